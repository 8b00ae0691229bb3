// Linear layers for a few rows, out[m, n] = x[m, k] . weight[n, k]^T (+ bias), at the speed of reading the weights.
//
// A warp multiplies 16 output features with all rows by mma.m16n8k16: the weights are the 16-row operand, the rows of x
// the columns of the other. The order of k within a product is free as long as both operands agree, so a lane takes 8
// consecutive inputs where the instruction's layout would have it take 4 pairs: every access is 16 bytes wide.
//
// Each warp has a ring of stages in shared memory for its weights, so warps never wait for each other but for the sums.
// All stages are requested before the wait for the kernel ahead: weights never change, and the memory stays busy between
// kernels. Two kernels must fit on a multiprocessor for that.
//
// The 8 warps of a block are `row_warps` groups of features times as many parts of k as that leaves. The blocks of a
// cluster are parts of k, too, so that each keeps its part of x in shared memory. Sums of parts meet in shared memory and
// are added in a fixed order, one block of features later: nobody waits for the slowest.
//
// Weights and x are both bf16, or both e4m3 with scales, by mma.m16n8k32: operands of the two instructions have the same bytes in
// the same registers. Sums of e4m3 products are kept by the tensor cores with few bits (arXiv:2412.19437, 3.3.2), so they are added
// up in f32 after each stage, which is where scales of blocks apply, too.
#include "activation.cuh"
#include "mma.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 16;            // output features of a warp
constexpr int kStages = 4;           // of a warp's ring
constexpr int kLanePieces = 4;       // 16-byte pieces of a stage that a lane copies
constexpr int kRowBytes = 128;       // of a row of weights in a stage: a chunk of its inputs
constexpr int kRowPieces = kRowBytes / 16;
constexpr int kRowsAtOnce = kWarp / kRowPieces;
constexpr int kStageBytes = kTile * kRowBytes;
constexpr int kRingBytes = kWarps * kStages * kStageBytes;
constexpr int kInputBytes = 32 << 10;
constexpr int kBuffers = 4;          // of x, where not all of it fits
constexpr int kPad = 4;              // of sums, in floats: no bank conflicts
constexpr int kMostParts = 8;
constexpr int kEnough = (kStages + kBuffers - 2) / (kBuffers - 1);  // stages a phase

enum Mode { kBf16 = 0, kF32 = 1, kGlu = 2 };

// Of x and of weights.
enum class Values {
    kBf16,
    kFp8,       // e4m3 with a factor for each row
    kFp8Blocks  // e4m3 with a factor for each 128 inputs of a row of x and each 128 x 128 weights
};

// Factors of e4m3 values.
struct Scales {
    const float* x;       // [m], or for blocks [k / 128, x_stride]
    const float* weight;  // [n], or for blocks [n / 128, weight_stride]
    int x_stride, weight_stride;
};

// The add and RMSNorm that x goes through first, for few rows; every block computes them for itself.
struct Norm {
    const bf16* delta;    // [m, k], added to x
    const float* weight;  // [k]; null for none of this
    bf16* sum;            // [m, k]: x + delta, rounded; another place than x, which blocks read at any time
    float eps;
};

struct Problem {
    const uint8_t* x;
    const uint8_t* weight;  // if gated [2 n, k]: gate, up
    const bf16* bias;       // null for none; never if gated
    void* out;
    int m, n;
    int row_bytes;          // of k inputs
    int row_warps;
    int mode;
    Norm norm;              // of bf16 only
    Scales scales;          // of e4m3

    __device__ __forceinline__ bool gated() const { return mode == kGlu; }
};

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
#else
    return 1;
#endif
}

// The two halves of a barrier among the threads of a cluster.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Two floats from the shared memory of a block of the cluster, at the address that `from` has in this one.
__device__ __forceinline__ float2 load_remote(const float* from, int rank) {
    float2 v;
#if __CUDA_ARCH__ >= 900
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(from)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
#else
    v = *reinterpret_cast<const float2*>(from);
#endif
    return v;
}

__device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Where a piece of a row of a chunk lies: the halves are swapped in odd rows against bank conflicts.
__device__ __forceinline__ int swizzled(int row, int piece) {
    return row * kRowBytes + (piece ^ ((row & 1) * (kRowPieces / 2))) * 16;
}

__device__ __forceinline__ void wait_all_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// How a problem is cut: the same in all threads of a cluster but for the warp's own coordinates.
struct Cut {
    int blocks;         // of output features
    int outputs;        // of a block
    int begin, end;     // chunks of k of this thread block
    int phase;          // chunks of x that are in shared memory at once
    int row_warp;
    int part, parts;    // of k, among this block's warps

    __device__ Cut(const Problem& p, int warp) {
        row_warp = warp & (p.row_warps - 1);
        part = warp / p.row_warps;
        parts = kWarps / p.row_warps;
        outputs = p.row_warps * kTile / (p.gated() ? 2 : 1);
        blocks = (p.n + outputs - 1) / outputs;
        const int chunks = p.row_bytes / kRowBytes, size = cluster_size(), rank = cluster_rank();
        begin = chunks * rank / size;
        end = chunks * (rank + 1) / size;
        // All of it, if that fits, or a ring of buffers.
        const int chunk_bytes = p.m * kRowBytes;
        const int largest = (chunks + size - 1) / size;
        phase = largest;
        if (largest * chunk_bytes > kInputBytes) {
            phase = max(kInputBytes / kBuffers / chunk_bytes / parts, 1) * parts;
            while (phase > parts && (end - begin) % phase != 0) phase -= parts;
        }
    }

    // What the products of a chunk of e4m3 values of this warp's tile, never gated, and of two rows of x are multiplied by before
    // they are added up. The tile lies in one row of blocks, as 16 divides 128.
    __device__ float2 stage_scale(const Problem& p, int block, int chunk, int row) const {
        const Scales& scales = p.scales;
        const int at = min(block * outputs + row_warp * kTile, p.n - 1) / 128;
        const float weight = scales.weight[at * scales.weight_stride + chunk];
        const float* x = scales.x + chunk * scales.x_stride;
        return make_float2(weight * x[min(row, p.m - 1)], weight * x[min(row + 1, p.m - 1)]);
    }

    // First weight of a row of this warp's tile; rows past the end repeat the last one and are not stored.
    __device__ const uint8_t* weights(const Problem& p, int block, int row) const {
        int at = block * outputs;
        if (p.gated()) {
            at = min(at + (row_warp >> 1) * kTile + row, p.n - 1) + (row_warp & 1) * p.n;
        } else {
            at = min(at + row_warp * kTile + row, p.n - 1);
        }
        return p.weight + size_t(at) * p.row_bytes;
    }
};

// Starts to copy a phase of x: [m][phase chunks], with the halves of a chunk swapped in odd rows against bank conflicts.
__device__ __forceinline__ void copy_inputs(uint8_t* to, const Problem& p, const Cut& cut, int first) {
    const int pieces = (min(first + cut.phase, cut.end) - first) * kRowPieces;
    for (int i = threadIdx.x; i < p.m * pieces; i += kThreads) {
        const int row = i / pieces, piece = i % pieces;
        const int swapped = piece ^ ((row & 1) * (kRowPieces / 2));
        copy_async(to + (row * cut.phase * kRowPieces + swapped) * 16,
                   p.x + size_t(row) * p.row_bytes + first * kRowBytes + piece * 16, true);
    }
}

// As copy_inputs for all of this block's x, normalised. `partial` is room for kWarps floats a row.
__device__ __forceinline__ void normalise_inputs(bf16* to, const Problem& p, const Cut& cut, float* partial) {
    const bf16* const inputs = reinterpret_cast<const bf16*>(p.x);
    const int k = p.row_bytes / int(sizeof(bf16));
    constexpr int kAtOnce = 2;  // loads before the first store, which might be to the same place for all the compiler knows
    const int pieces = k / 8, low = cut.begin * kRowPieces, high = cut.end * kRowPieces;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const auto place = [&](int row, int piece) {
        return to + (row * cut.phase * kRowPieces + ((piece - low) ^ ((row & 1) * (kRowPieces / 2)))) * 8;
    };
    for (int row = 0; row < p.m; ++row) {
        float squares = 0.0f;
        for (int first = threadIdx.x; first < pieces; first += kAtOnce * kThreads) {
            Bf16x8 x[kAtOnce], delta[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = first + i * kThreads;
                if (piece >= pieces) continue;
                x[i] = load8(inputs + size_t(row) * k + piece * 8);
                delta[i] = load8(p.norm.delta + size_t(row) * k + piece * 8);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = first + i * kThreads;
                if (piece >= pieces) continue;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 a = __bfloat1622float2(x[i].pair[j]), b = __bfloat1622float2(delta[i].pair[j]);
                    x[i].pair[j] = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
                    const float2 sum = __bfloat1622float2(x[i].pair[j]);
                    squares = fmaf(sum.x, sum.x, fmaf(sum.y, sum.y, squares));
                }
                if (blockIdx.x == 0) store8(p.norm.sum + size_t(row) * k + piece * 8, x[i]);
                if (piece >= low && piece < high) store8(place(row, piece), x[i]);
            }
        }
        squares = warp_sum(squares);
        if (lane == 0) partial[row * kWarps + warp] = squares;
    }
    __syncthreads();
    for (int row = 0; row < p.m; ++row) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) squares += partial[row * kWarps + i];
        const float scale = rsqrtf(squares / float(k) + p.norm.eps);
        // What this thread wrote itself.
        for (int piece = threadIdx.x; piece < high; piece += kThreads) {
            if (piece < low) continue;
            Bf16x8 x = load8(place(row, piece));
            const float2* weight = reinterpret_cast<const float2*>(p.norm.weight + piece * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 v = __bfloat1622float2(x.pair[j]), w = weight[j];
                x.pair[j] = __floats2bfloat162_rn(v.x * scale * w.x, v.y * scale * w.y);
            }
            store8(place(row, piece), x);
        }
    }
    __syncthreads();
}

// Adds the parts of a pair of outputs: `sums` is that pair in the first part of each block.
__device__ __forceinline__ float2 add_parts(const float* sums, int parts, int stride) {
    const int count = parts * cluster_size();
    float2 value[kMostParts];
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) {
        if (i < count) value[i] = load_remote(sums + (i & (parts - 1)) * stride, i / parts);
    }
    float2 sum = value[0];
#pragma unroll
    for (int i = 1; i < kMostParts; ++i) {
        if (i < count) sum.x += value[i].x, sum.y += value[i].y;
    }
    return sum;
}

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
    return x / (1.0f + __expf(-sigmoid_input(kActivation, x)));
}

// One or two neighbouring outputs of a row.
__device__ __forceinline__ void store(const Problem& p, int row, int column, float2 v) {
    if (p.bias != nullptr) {
        v.x += __bfloat162float(p.bias[column]);
        if (column + 1 < p.n) v.y += __bfloat162float(p.bias[column + 1]);
    }
    const size_t at = size_t(row) * p.n + column;
    const bool pair = (p.n & 1) == 0;
    if (p.mode == kF32) {
        float* out = static_cast<float*>(p.out) + at;
        if (pair) {
            *reinterpret_cast<float2*>(out) = v;
        } else {
            out[0] = v.x;
            if (column + 1 < p.n) out[1] = v.y;
        }
    } else {
        bf16* out = static_cast<bf16*>(p.out) + at;
        if (pair) {
            *reinterpret_cast<bf162*>(out) = __floats2bfloat162_rn(v.x, v.y);
        } else {
            out[0] = __float2bfloat16(v.x);
            if (column + 1 < p.n) out[1] = __float2bfloat16(v.y);
        }
    }
}

// Adds and stores the outputs of a block, each thread block of the cluster some of them.
template <int Tiles, Values kValues, Activation kActivation>
__device__ __forceinline__ void add_up(const Problem& p, const Cut& cut, const float* sums, int block, int rows) {
    const int pairs = cut.outputs / 2;
    for (int i = cluster_rank() * kThreads + threadIdx.x; i < p.m * pairs; i += cluster_size() * kThreads) {
        const int token = i / pairs, column = i % pairs * 2;
        if (block * cut.outputs + column >= p.n) continue;
        const float* from = sums + token * rows;
        float2 v;
        if (p.gated()) {
            from += column / kTile * 2 * kTile + column % kTile;
            const float2 gate = add_parts(from, cut.parts, Tiles * 8 * rows);
            v = add_parts(from + kTile, cut.parts, Tiles * 8 * rows);
            v.x *= activate<kActivation>(gate.x);
            v.y *= activate<kActivation>(gate.y);
        } else {
            v = add_parts(from + column, cut.parts, Tiles * 8 * rows);
        }
        if constexpr (kValues == Values::kFp8) {
            const int at = block * cut.outputs + column;
            const float scale = p.scales.x[token];
            v.x *= scale * p.scales.weight[at];
            v.y *= scale * p.scales.weight[min(at + 1, p.n - 1)];
        }
        store(p, token, block * cut.outputs + column, v);
    }
}

// Up to 8 * Tiles rows.
template <int Tiles, Values kValues, Activation kActivation>
__device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int group = lane / 4, quad = lane % 4;
    uint8_t* ring = shared + warp * kStages * kStageBytes;
    uint8_t* inputs = shared + kRingBytes;
    float* sums = reinterpret_cast<float*>(shared + kRingBytes + kInputBytes);

    pdl_launch();
    const Cut cut(p, warp);
    const int size = cluster_size();
    const int first_block = blockIdx.x / size, stride = gridDim.x / size;

    // What this lane requests next: a piece of every fourth row, so that 8 lanes read whole lines.
    int next_block = first_block, next_chunk = cut.begin + cut.part, next_stage = 0;
    const int fetch_row = lane / kRowPieces, fetch_piece = lane % kRowPieces;
    uint8_t* const fetch_to = ring + swizzled(fetch_row, fetch_piece);
    const uint8_t* rows_from[kLanePieces];
    auto enter_block = [&] {
#pragma unroll
        for (int i = 0; i < kLanePieces; ++i) {
            rows_from[i] = cut.weights(p, next_block, fetch_row + i * kRowsAtOnce) + fetch_piece * 16;
        }
    };
    auto request = [&] {
        if (next_block < cut.blocks && next_chunk >= cut.end) {
            next_block += stride;
            next_chunk = cut.begin + cut.part;
            if (next_block < cut.blocks) enter_block();
        }
        if (next_block < cut.blocks && next_chunk < cut.end) {
            uint8_t* to = fetch_to + next_stage * kStageBytes;
#pragma unroll
            for (int i = 0; i < kLanePieces; ++i) {
                copy_async(to + i * kRowsAtOnce * kRowBytes, rows_from[i] + next_chunk * kRowBytes, true);
            }
            next_chunk += cut.parts;
        }
        next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
        commit_async();
    };
    if (next_block < cut.blocks) enter_block();
#pragma unroll
    for (int i = 0; i < kStages; ++i) request();

    const bool normalise = Tiles == 1 && kValues == Values::kBf16 && p.norm.weight != nullptr;
    if (normalise && threadIdx.x * 64 < p.row_bytes) prefetch_line(p.norm.weight + threadIdx.x * 32);

    pdl_wait();
    // Phases of x: all in one, or a ring of buffers.
    const bool resident = cut.phase >= cut.end - cut.begin;
    const bool even = (cut.end - cut.begin) % cut.phase == 0;
    const int buffer = p.m * cut.phase * kRowBytes;
    int input_block = first_block, input_chunk = cut.begin, input_to = 0;
    auto request_inputs = [&] {
        if (input_block >= cut.blocks) return;
        copy_inputs(inputs + input_to * buffer, p, cut, input_chunk);
        input_to = (input_to + 1) % kBuffers;
        input_chunk += cut.phase;
        if (input_chunk >= cut.end) input_chunk = cut.begin, input_block += stride;
    };
    if (normalise) {
        normalise_inputs(reinterpret_cast<bf16*>(inputs), p, cut, sums);
    } else {
        request_inputs();
        if (!resident) {
            for (int i = 2; i < kBuffers; ++i) request_inputs();
        }
        wait_all_async();
        __syncthreads();
    }
    int odd = 0;
    bool fresh = true;

    const uint8_t* row[Tiles];
    int swap[Tiles];
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
        // Rows past the end repeat the last one: a column of a product reaches no other.
        const int token = min(j * 8 + group, p.m - 1);
        row[j] = inputs + token * cut.phase * kRowBytes + quad * 16;
        swap[j] = (token & 1) * (kRowBytes / 2);
    }

    const int rows = p.row_warps * kTile + kPad;
    const int buffer_floats = cut.parts * Tiles * 8 * rows;
    int turn = 0, last_block = first_block;
    int stage = 0;
    for (int block = first_block; block < cut.blocks; block += stride) {
        float acc[Tiles][4] = {};
        for (int first = cut.begin; first < cut.end; first += cut.phase) {
            if (!resident) {
                // It was requested kBuffers - 1 phases ago, before that phase's first stage.
                if (!fresh) {
                    if (!even) {
                        wait_all_async();
                    } else if (cut.phase >= kEnough * cut.parts) {
                        wait_async<kStages - 1>();
                    } else {
                        wait_async<kBuffers - 2>();
                    }
                    __syncthreads();
                    odd = odd + 1 == kBuffers ? 0 : odd + 1;
                }
                fresh = false;
                request_inputs();
            }
            const int last = min(first + cut.phase, cut.end);
            for (int chunk = first + cut.part; chunk < last; chunk += cut.parts) {
                float2 scale[kValues == Values::kFp8Blocks ? Tiles : 1];
                if constexpr (kValues == Values::kFp8Blocks) {
#pragma unroll
                    for (int j = 0; j < Tiles; ++j) scale[j] = cut.stage_scale(p, block, chunk, j * 8 + quad * 2);
                }
                wait_async<kStages - 1>();
                __syncwarp();
                const uint8_t* from = ring + stage * kStageBytes;
                uint4 w[kLanePieces];
#pragma unroll
                for (int i = 0; i < kLanePieces; ++i) {
                    w[i] = *reinterpret_cast<const uint4*>(from + swizzled(group, quad + i / 2 * 4) + i % 2 * 8 * kRowBytes);
                }
                __syncwarp();
                stage = stage + 1 == kStages ? 0 : stage + 1;
                request();
                const int at = odd * buffer + (chunk - first) * kRowBytes;
                // Of a half of the chunk, two operands of 16 rows.
                const auto operands = [&](int half, uint32_t (&even)[4], uint32_t (&second)[4]) {
                    const uint4 l = w[half * 2], h = w[half * 2 + 1];
                    even[0] = l.x, even[1] = h.x, even[2] = l.y, even[3] = h.y;
                    second[0] = l.z, second[1] = h.z, second[2] = l.w, second[3] = h.w;
                };
                const auto inputs_of = [&](int j, int half) {
                    return *reinterpret_cast<const uint4*>(row[j] + at + ((half * (kRowBytes / 2)) ^ swap[j]));
                };
                uint32_t even[4], second[4];
                if constexpr (kValues != Values::kBf16) {
#pragma unroll
                    for (int j = 0; j < Tiles; ++j) {
                        float part[4] = {};
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            operands(half, even, second);
                            const uint4 v = inputs_of(j, half);
                            mma_e4m3(part, even, v.x, v.y);
                            mma_e4m3(part, second, v.z, v.w);
                        }
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            if constexpr (kValues == Values::kFp8Blocks) {
                                acc[j][i] = fmaf(part[i], i % 2 == 0 ? scale[j].x : scale[j].y, acc[j][i]);
                            } else {
                                acc[j][i] += part[i];
                            }
                        }
                    }
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        operands(half, even, second);
#pragma unroll
                        for (int j = 0; j < Tiles; ++j) {
                            const uint4 v = inputs_of(j, half);
                            mma(acc[j], even, v.x, v.y);
                            mma(acc[j], second, v.z, v.w);
                        }
                    }
                }
            }
        }

        // The sums of the block before are added now, when the other blocks of the cluster have long written them.
        if (block != first_block) {
            cluster_wait();
            add_up<Tiles, kValues, kActivation>(p, cut, sums + (turn ^ 1) * buffer_floats, block - stride, rows);
        }
        float* mine = sums + turn * buffer_floats + cut.part * Tiles * 8 * rows + cut.row_warp * kTile + group;
#pragma unroll
        for (int j = 0; j < Tiles; ++j) {
            float* to = mine + (j * 8 + quad * 2) * rows;
            to[0] = acc[j][0];
            to[rows] = acc[j][1];
            to[8] = acc[j][2];
            to[rows + 8] = acc[j][3];
        }
        cluster_arrive();
        turn ^= 1;
        last_block = block;
    }
    if (first_block < cut.blocks) {
        cluster_wait();
        add_up<Tiles, kValues, kActivation>(p, cut, sums + (turn ^ 1) * buffer_floats, last_block, rows);
        // Other blocks may still read this one's.
        cluster_arrive();
        cluster_wait();
    }
}

#define LINEAR(NAME, TILES, ACTIVATION)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                           \
        NAME(const uint8_t* x, const uint8_t* weight, const bf16* bias, void* out, int m, int n, int row_bytes,         \
             int row_warps, int mode, const bf16* delta, const float* norm_weight, bf16* sum, float eps) {              \
        run<TILES, Values::kBf16, ACTIVATION>(                                                                                  \
            {x, weight, bias, out, m, n, row_bytes, row_warps, mode, {delta, norm_weight, sum, eps}, {}});              \
    }

LINEAR(linear_8, 1, Activation::kSilu)
LINEAR(linear_16, 2, Activation::kSilu)
LINEAR(linear_32, 4, Activation::kSilu)
LINEAR(linear_8_gelu_tanh, 1, Activation::kGeluTanh)
LINEAR(linear_16_gelu_tanh, 2, Activation::kGeluTanh)
LINEAR(linear_32_gelu_tanh, 4, Activation::kGeluTanh)

// Never gated: what follows e4m3 products is quantised, which takes a kernel that sees whole rows.
#define LINEAR_FP8(NAME, TILES, VALUES)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                           \
        NAME(const uint8_t* x, const uint8_t* weight, const bf16* bias, void* out, int m, int n, int row_bytes,         \
             int row_warps, int mode, const float* x_scales, const float* weight_scales, int x_stride,                  \
             int weight_stride) {                                                                                       \
        run<TILES, VALUES, Activation::kSilu>({x, weight, bias, out, m, n, row_bytes, row_warps, mode, {},              \
                                               {x_scales, weight_scales, x_stride, weight_stride}});                    \
    }

LINEAR_FP8(linear_fp8_8, 1, Values::kFp8)
LINEAR_FP8(linear_fp8_16, 2, Values::kFp8)
LINEAR_FP8(linear_fp8_32, 4, Values::kFp8)
LINEAR_FP8(linear_fp8_blocks_8, 1, Values::kFp8Blocks)
LINEAR_FP8(linear_fp8_blocks_16, 2, Values::kFp8Blocks)
LINEAR_FP8(linear_fp8_blocks_32, 4, Values::kFp8Blocks)

// Stands for the small kernels between linear layers when these are measured.
extern "C" __global__ void linear_pause() {
    pdl_launch();
    pdl_wait();
}
