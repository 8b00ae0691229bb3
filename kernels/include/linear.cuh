// A linear layer for a few rows: what is multiplied, how it is cut, how x comes into shared memory, and how sums
// are added up. See linear.cu and linear_int4_few.cu.
#pragma once

#include "activation.cuh"
#include "gguf.cuh"
#include "int4.cuh"
#include "mma.cuh"
#include "rows.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 16;            // output features of a warp
constexpr int kRowBytes = 128;       // of a row of weights in a stage, a chunk of its inputs, but for GGUF's windows
constexpr int kRowPieces = kRowBytes / 16;
constexpr int kInputBytes = 32 << 10;  // of x in shared memory, at most
constexpr int kBuffers = 4;          // of x, where not all of it fits
constexpr int kPad = 4;              // of sums, in floats: no bank conflicts
constexpr int kMostParts = 8;
constexpr int kRingPieces = 34;      // 16 bytes each, of a row in all stages, at most: two blocks fit on a multiprocessor

// Of weights.
enum class Values {
    kBf16,
    kFp8,        // e4m3 with a factor for each row
    kFp8Blocks,  // e4m3 with a factor for each 128 x 128 weights
    kInt4Of32,   // four bits with a factor and a zero for so many inputs of a row; see int4.cuh
    kInt4Of64,
    kInt4Of128,
    kQ4_0,       // GGUF's; see gguf.cuh
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kQ4K,
    kQ5K,
    kQ6K
};

template <Values kValues>
constexpr bool kIsInt4 = kValues == Values::kInt4Of32 || kValues == Values::kInt4Of64 || kValues == Values::kInt4Of128;

template <Values kValues>
constexpr bool kIsGguf = kValues >= Values::kQ4_0;

// The type of GGUF's values.
template <Values kValues>
constexpr Gguf kGguf = Gguf(kIsGguf<kValues> ? int(kValues) - int(Values::kQ4_0) : 0);

// Inputs of a group.
template <Values kValues>
constexpr int kGroup = kValues == Values::kInt4Of32 ? 32 : kValues == Values::kInt4Of64 ? 64 : 128;

// Bytes of x in a chunk for each byte of a row of a stage, or if of four bits for each two.
template <Values kValues>
constexpr int kWidening = kValues == Values::kBf16 ? 1 : kIsInt4<kValues> || kIsGguf<kValues> ? 4 : 2;

// A row of weights in a stage: 16-byte pieces, and the bytes of its inputs.
template <Values kValues>
constexpr int kStagePieces = kIsGguf<kValues> ? kWindowPieces<kGguf<kValues>> : kRowPieces;
template <Values kValues>
constexpr int kChunkBytes = kRowBytes * kWidening<kValues>;

// Behind the codes of its 16 rows a stage of four bits has their groups' words: so many bytes a row.
template <Values kValues>
constexpr int kGroupBytes = kIsInt4<kValues> ? 2 * kWindow / kGroup<kValues> * 4 : 0;

template <Values kValues>
constexpr int kStageBytes = kTile * (kStagePieces<kValues> * 16 + kGroupBytes<kValues>);
// Of a warp's ring.
template <Values kValues>
constexpr int kStages = kTile * kRingPieces * 16 / kStageBytes<kValues>;
template <Values kValues>
constexpr int kRingBytes = kWarps * kStages<kValues> * kStageBytes<kValues>;
// Neighbouring pieces of a row that as many lanes copy at once, rows from one of a lane's to the next, and how many it has.
template <Values kValues>
constexpr int kPiecesAtOnce = kIsGguf<kValues> ? 4 : kRowPieces;
template <Values kValues>
constexpr int kRowsAtOnce = kWarp / kPiecesAtOnce<kValues>;
template <Values kValues>
constexpr int kLaneRows = kTile / kRowsAtOnce<kValues>;
// Stages a phase.
template <Values kValues>
constexpr int kEnough = (kStages<kValues> + kBuffers - 2) / (kBuffers - 1);

// Factors of weights.
struct Scales {
    const void* of;  // floats [n], for blocks [n / 128, stride], or words of groups; if gated of 2 n rows
    int stride;      // of GGUF's types, which have theirs among them, bytes of a row of weights

    __device__ __forceinline__ const float* floats() const { return static_cast<const float*>(of); }
};

// The add and RMSNorm that x goes through first, for few rows; every block computes them for itself.
struct Norm {
    const bf16* delta;    // [m, k], added to x
    const float* weight;  // [k]; null for none of this
    bf16* sum;            // [m, k]: x + delta, rounded; another place than x, which blocks read at any time
    float eps;
};

struct Problem {
    const bf16* x;
    const uint8_t* weight;  // if gated [2 n, k]: gate, up
    const bf16* bias;       // null for none; never if gated
    void* out;
    int m, n;
    int k;
    int row_warps;
    int mode;
    Norm norm;
    Scales scales;          // of weights of fewer than 16 bits
    int pitch;              // outputs between two rows of `out`, at least n

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

// Where a piece of a row of weights lies in a stage: the halves are swapped in odd rows against bank conflicts.
__device__ __forceinline__ int swizzled(int row, int piece) {
    return row * kRowBytes + (piece ^ ((row & 1) * (kRowPieces / 2))) * 16;
}

// In odd rows of x the index of a piece is XORed with this, against bank conflicts too: lanes read neighbouring pieces, or every second
// one where a weight is an e4m3 value. With weights of four bits, lanes read the same piece of
// eight rows, and the index is XORed with the last three bits of the row.
template <Values kValues>
constexpr int kInputSwap = kIsInt4<kValues> || kWidening<kValues> == 2 ? 1 : kRowPieces / 2;

template <Values kValues>
__device__ __forceinline__ int input_swap(int row) {
    return (row & (kIsInt4<kValues> ? 7 : 1)) * kInputSwap<kValues>;
}

// Neighbouring bytes of x that a lane reads, but for weights of four bits.
template <Values kValues>
constexpr int kLaneInputs = kWidening<kValues> == 2                                       ? 32
                            : kIsGguf<kValues> && kGroupInputs<kGguf<kValues>> == 16 ? 8
                                                                                          : 16;

// Two e4m3 weights, bytes 0 and 1 or 2 and 3 of a word, as bf16, exactly: exponent and mantissa go where bf16 has them, and a factor
// makes up for the other bias. NaN, which makes no sense as a weight, becomes 480.
template <bool kHigh>
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t word) {
    const uint32_t pair = __byte_perm(word, 0, kHigh ? 0x4342 : 0x4140);
    // All but the sign is where it belongs after a shift by 4, the sign, bit 7, goes on to bit 15: multiplications, as other units than
    // those of shifts and logic compute them.
    const uint32_t bits = pair * 16 + (pair & 0x00800080) * 240;
    const uint32_t factor = 0x7b807b80;  // 2^120
    const bf162 wide = __hmul2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(factor));
    return reinterpret_cast<const uint32_t&>(wide);
}

__device__ __forceinline__ void wait_all_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// How a problem is cut: the same in all threads of a cluster but for the warp's own coordinates.
struct Cut {
    int blocks;         // of output features
    int outputs;        // of a block
    int chunks;         // of k
    int begin, end;     // chunks of k of this thread block
    int phase;          // chunks of x that are in shared memory at once
    int row_warp;
    int part, parts;    // of k, among this block's warps
    int row_bytes;      // of weights

    // Bytes of a row of weights, its chunks, bytes of x in one, and room for so many in shared memory.
    __device__ Cut(const Problem& p, int warp, int row_bytes, int chunks, int inputs, int room) : chunks(chunks), row_bytes(row_bytes) {
        row_warp = warp & (p.row_warps - 1);
        part = warp / p.row_warps;
        parts = kWarps / p.row_warps;
        outputs = p.row_warps * kTile / (p.gated() ? 2 : 1);
        blocks = (p.n + outputs - 1) / outputs;
        const int size = cluster_size(), rank = cluster_rank();
        begin = chunks * rank / size;
        end = chunks * (rank + 1) / size;
        // All of it, if that fits, or a ring of buffers.
        const int chunk_bytes = p.m * inputs;
        const int largest = (chunks + size - 1) / size;
        phase = largest;
        if (largest * chunk_bytes > room) {
            phase = max(room / kBuffers / chunk_bytes / parts, 1) * parts;
            while (phase > parts && (end - begin) % phase != 0) phase -= parts;
        }
    }

    // First row of weights of this warp's tile.
    __device__ int first_row(const Problem& p, int block) const {
        if (!p.gated()) return block * outputs + row_warp * kTile;
        return block * outputs + (row_warp >> 1) * kTile + (row_warp & 1) * p.n;
    }

    // The factor of a chunk of e4m3 weights of this warp's tile, which lies in one row of blocks, as 16 divides 128.
    __device__ float stage_scale(const Problem& p, int block, int chunk) const {
        const int last = p.gated() ? 2 * p.n - 1 : p.n - 1;
        return p.scales.floats()[min(first_row(p, block), last) / kFp8Block * p.scales.stride + chunk];
    }

    // Where a row of this warp's tile of weights in four bits lies in its first window: an index among the rows of all windows.
    __device__ uint32_t int4_row(const Problem& p, int block, int row) const {
        const uint32_t at = row_at(p, block, row), windows = row_bytes / kWindowBytes;
        return at / kRowsTogether * windows * kRowsTogether + at % kRowsTogether;
    }

    // A row of this warp's tile among those of the weights; rows past the end repeat the last one and are not stored.
    __device__ int row_at(const Problem& p, int block, int row) const {
        const int at = block * outputs;
        if (!p.gated()) return min(at + row_warp * kTile + row, p.n - 1);
        return min(at + (row_warp >> 1) * kTile + row, p.n - 1) + (row_warp & 1) * p.n;
    }

    // First piece of a row of this warp's tile.
    __device__ uint32_t first_piece(const Problem& p, int block, int row) const {
        return uint32_t(row_at(p, block, row)) * uint32_t(row_bytes / 16);
    }
};

// Among the first `kThreads` threads of a block, which may have more.
__device__ __forceinline__ void sync_threads() { named_sync<kThreads>(1); }

// Pieces of x, eight inputs each, in a chunk.
template <Values kValues>
constexpr int kPiecesOfChunk = kRowPieces * kWidening<kValues>;

// Starts to copy a phase of x: [m][phase chunks], pieces swapped in odd rows.
template <Values kValues>
__device__ __forceinline__ void copy_inputs(uint8_t* to, const Problem& p, const Cut& cut, int first) {
    constexpr int kChunkPieces = kPiecesOfChunk<kValues>;
    const int pieces = (min(first + cut.phase, cut.end) - first) * kChunkPieces;
    for (int i = threadIdx.x; i < p.m * pieces; i += kThreads) {
        const int row = i / pieces, piece = i % pieces;
        const int swapped = piece ^ input_swap<kValues>(row);
        const int input = (first * kChunkPieces + piece) * kVec;
        // What fills up GGUF's last window is taken for 0 here too.
        const bool is_there = !kIsGguf<kValues> || input < p.k;
        copy_async(to + (row * cut.phase * kChunkPieces + swapped) * 16, p.x + size_t(row) * p.k + (is_there ? input : 0), is_there);
    }
}

// Writes pieces `low` to `high` of the normalised x, eight inputs each, to where `place` says for a row and a piece. `partial` is room for
// `kWarps` floats a row. For the first `kThreads` threads of a block.
template <typename Place>
__device__ __forceinline__ void normalise_inputs(const Problem& p, int low, int high, float* partial, const Place& place) {
    constexpr int kAtOnce = 2;  // loads before the first store, which might be to the same place for all the compiler knows
    const int k = p.k, pieces = k / 8;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int row = 0; row < p.m; ++row) {
        float squares = 0.0f;
        for (int first = threadIdx.x; first < pieces; first += kAtOnce * kThreads) {
            Bf16x8 x[kAtOnce], delta[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = first + i * kThreads;
                if (piece >= pieces) continue;
                x[i] = load8(p.x + size_t(row) * k + piece * 8);
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
    sync_threads();
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
    sync_threads();
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
    const size_t at = size_t(row) * p.pitch + column;
    const bool pair = ((p.n | p.pitch) & 1) == 0;
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

// `threads` threads add and store the outputs of a block, each thread block of the cluster some of them. A part has the sums of `kRows` rows
// of x, `pitch` floats apart; if gated, in turns of `kTurn` rows of weights of the gate and of the up projection. `factored` is called with a
// row of weights and the sums of it and of the next.
template <int kRows, Activation kActivation, int kTurn, typename Factored>
__device__ __forceinline__ void add_up(const Problem& p, int outputs, int parts, const float* sums, int block, int pitch, int thread,
                                       int threads, const Factored& factored) {
    const int pairs = outputs / 2;
    for (int i = cluster_rank() * threads + thread; i < p.m * pairs; i += cluster_size() * threads) {
        const int token = i / pairs, column = i % pairs * 2;
        const int at = block * outputs + column;
        if (at >= p.n) continue;
        const float* from = sums + token * pitch;
        float2 v;
        if (p.gated()) {
            from += column / kTurn * 2 * kTurn + column % kTurn;
            const float2 gate = factored(at, add_parts(from, parts, kRows * pitch));
            v = factored(p.n + at, add_parts(from + kTurn, parts, kRows * pitch));
            v.x *= activate<kActivation>(gate.x);
            v.y *= activate<kActivation>(gate.y);
        } else {
            v = factored(at, add_parts(from + column, parts, kRows * pitch));
        }
        store(p, token, at, v);
    }
}
