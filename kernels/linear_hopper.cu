// Linear layers for up to 32 rows with the matrix instructions of warp groups (wgmma, sm_90a): out[m, n] = x[m, k] . weight[n, k]^T
// (+ bias), at the speed of reading the weights. Weights and inputs are bf16, or e4m3 with factors: one for each row of either, or one
// for each 128 x 128 weights and each 128 inputs of a row.
//
// The weights are the left operand. A tile is 64 rows of weights times all rows of x; it is computed in stages of 256 bytes of k, and
// each of two warp groups multiplies half of a stage. The stages of all tiles form one sequence, which is divided equally among the
// blocks (stream-K, Osama et al. 2023, arXiv:2301.03598), so that all multiprocessors finish together. Where several blocks share a
// tile, the one with its first stage adds the partial sums of the others to its own, in a fixed order.
//
// Partial sums need no flags or fences, as in NCCL's LL protocol: the exchange buffer holds a NaN that no sum can be; a reader waits
// until it is replaced, and then restores it for the next launch.
//
// Five warps copy, ahead of the two warp groups that multiply. A block takes nearly all shared memory of a multiprocessor and fills it
// with weights before it waits for the kernel ahead. So memory stays busy during the small kernels in between, whose blocks still find
// threads and registers.
#include "activation.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kConsumerThreads = 2 * 128;
constexpr int kWeightThreads = 128;
constexpr int kThreads = kConsumerThreads + kWeightThreads + kWarp;

enum Mode { kBf16 = 0, kF32 = 1, kGlu = 2 };

// The type of weights and inputs.
enum class Values {
    kBf16,
    kFp8,       // e4m3 with a factor for each row
    kFp8Blocks  // e4m3 with a factor for each 128 x 128 weights, and for each 128 inputs of a row
};

struct Problem {
    const void* x;               // [m, k]
    const void* weight;          // [n, k], or if gated [2 n, k]: gate, up
    const float* x_scales;       // [m], of e4m3 values, or of blocks [k / 128, x_stride]
    const float* weight_scales;  // [n] or [2 n], or of blocks [n / 128, stride]
    const bf16* bias;            // [n]; null for none
    void* out;                   // [m] rows that begin `pitch` apart
    float4* sums;                // partial sums that blocks leave for others; all `kNone` between launches
    int m, n, k, pitch;
    int mode, activation;
    int x_stride, stride;

    __device__ __forceinline__ bool gated() const { return mode == kGlu; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFeatures = 64;  // rows of weights of a tile
constexpr int kPanel = 128;    // bytes of a row of a panel; a stage has one panel for each warp group
constexpr int kPanels = 2;
constexpr int kPieces = kPanel / 16;
constexpr int kInFlight = 4;   // stages of weights in flight at once; more would only delay each other and the exchange of sums

// Stages, as `STAGES` in crates/kernels/src/cuda/linear/hopper.rs has them too.
template <int kTokens>
constexpr int kStagesOf = kTokens == 32 ? 8 : kTokens == 16 ? 10 : 11;

// Marks a sum that has not arrived: the bits of a NaN. `leave` replaces computed values that have the same bits.
constexpr uint32_t kNone = 0xffffffff;

// Accesses to memory that blocks exchange. Each of the four floats is atomic on its own.
__device__ __forceinline__ void store_relaxed(float4* to, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_relaxed(const float4* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ bool is_none(float x) { return __float_as_uint(x) == kNone; }

__device__ __forceinline__ bool is_whole(float4 v) { return !(is_none(v.x) || is_none(v.y) || is_none(v.z) || is_none(v.w)); }

template <int kTokens, Values kValues>
struct Linear {
    static constexpr bool kFp8 = kValues != Values::kBf16;
    static constexpr int kStages = kStagesOf<kTokens>;
    static constexpr int kEights = kTokens / 8;

    struct __align__(1024) Shared {
        uint8_t weights[kStages][kPanels][kFeatures * kPanel];
        uint8_t inputs[kStages][kPanels][kTokens * kPanel];
        float4 second[kEights][kWarpGroup];  // sums of the second warp group
        uint64_t full[kStages], empty[kStages];
    };

    const Problem& p;
    Shared& shared;

    __device__ __forceinline__ int outputs() const { return p.gated() ? kFeatures / 2 : kFeatures; }
    __device__ __forceinline__ int tiles() const { return (p.n + outputs() - 1) / outputs(); }
    // 16-byte pieces of a row of weights or inputs.
    __device__ __forceinline__ int pieces() const { return p.k / (kFp8 ? 16 : 8); }
    // Stages of a tile.
    __device__ __forceinline__ int stages() const { return (pieces() + kPanels * kPieces - 1) / (kPanels * kPieces); }
    // Ranks run against block indices: a block waits only for higher ranks, which have smaller indices and so have started already, even
    // where not all blocks fit at once.
    __device__ __forceinline__ int rank() const { return gridDim.x - 1 - blockIdx.x; }
    // The first stage of a rank's share, in the sequence of the stages of all tiles.
    __device__ __forceinline__ int begin(int rank) const { return int(int64_t(tiles()) * stages() * rank / gridDim.x); }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, kWeightThreads + kWarp);
                barrier_init(shared.empty + i, kConsumerThreads / kWarp);
            }
        }
        __syncthreads();
        pdl_launch();
        const int first = begin(rank()), end = begin(rank() + 1);
        if (threadIdx.x < kConsumerThreads) {
            consume(first, end);
        } else if (threadIdx.x < kConsumerThreads + kWeightThreads) {
            produce_weights(first, end, threadIdx.x - kConsumerThreads);
        } else {
            produce_inputs(first, end, threadIdx.x % kWarp);
        }
    }

    // Where a piece of a row of a panel lies, as products expect it.
    __device__ __forceinline__ static int place(int row, int piece) { return row * kPanel + (piece ^ (row & 7)) * 16; }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= kStages) barrier_wait(shared.empty + step % kStages, (step / kStages - 1) & 1);
        __syncwarp();
    }

    // A thread copies a piece of 16 bytes of every 16th row. Weights never change, so none waits for the kernel ahead.
    __device__ __forceinline__ void produce_weights(int first, int end, int thread) const {
        constexpr int kRows = kWeightThreads / kPieces, kOfThread = kFeatures / kRows;
        static_assert(kRows == 16, "rows of a gated tile alternate in eights");
        const int piece = thread % kPieces, row = thread / kPieces, pieces = this->pieces(), stages = this->stages();
        const uint4* const weight = static_cast<const uint4*>(p.weight);
        uint32_t from[kOfThread];
        int tile = -1;
        for (int at = first, step = 0; at < end; ++at, ++step) {
            if (at / stages != tile) {
                tile = at / stages;
#pragma unroll
                for (int i = 0; i < kOfThread; ++i) from[i] = weight_row(tile, row + i * kRows) * uint32_t(pieces) + piece;
            }
            wait_empty(step);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int before = (at % stages * kPanels + panel) * kPieces;
                const bool wanted = before + piece < pieces;
                uint8_t* const to = shared.weights[step % kStages][panel] + place(row, piece);
#pragma unroll
                for (int i = 0; i < kOfThread; ++i) {
                    copy_async_256(to + i * kRows * kPanel, weight + (wanted ? from[i] + before : 0), wanted);
                }
            }
            barrier_arrive_after_copies(shared.full + step % kStages);
            commit_async();
            wait_async<kInFlight - 1>();
        }
    }

    // Which row of the weight matrix is row `row` of a tile; rows past the end repeat the last one. Gated tiles alternate eight rows of
    // gate and the same eight of up, so that one thread has both sums of an output.
    __device__ __forceinline__ int weight_row(int tile, int row) const {
        const int at = tile * outputs();
        if (!p.gated()) return min(at + row, p.n - 1);
        return min(at + row / 16 * 8 + row % 8, p.n - 1) + (row % 16 < 8 ? 0 : p.n);
    }

    __device__ __forceinline__ void produce_inputs(int first, int end, int lane) const {
        constexpr int kRows = kWarp / kPieces;
        const int piece = lane % kPieces, row = lane / kPieces, pieces = this->pieces(), stages = this->stages();
        const uint4* const x = static_cast<const uint4*>(p.x);
        pdl_wait();
        for (int at = first, step = 0; at < end; ++at, ++step) {
            wait_empty(step);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int wanted_piece = (at % stages * kPanels + panel) * kPieces + piece;
#pragma unroll
                for (int i = 0; i < kTokens / kRows; ++i) {
                    const int token = row + i * kRows;
                    // Zeros past the last row and past the last input.
                    const bool wanted = token < p.m && wanted_piece < pieces;
                    uint8_t* const to = shared.inputs[step % kStages][panel] + place(token, piece);
                    copy_async(to, x + (wanted ? token * pieces + wanted_piece : 0), wanted);
                }
            }
            barrier_arrive_after_copies(shared.full + step % kStages);
        }
    }

    __device__ __forceinline__ void consume(int first, int end) const {
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0), stages = this->stages();
        const uint32_t weights = shared_address(shared.weights[0][group]), inputs = shared_address(shared.inputs[0][group]);
        // Before the first write: the kernel ahead may read what is written.
        pdl_wait();
        for (int at = first, step = 0; at < end;) {
            const int tile = at / stages, from = at % stages, to = min(stages, from + end - at);
            float acc[kEights][4];
            if constexpr (kValues == Values::kFp8Blocks) {
#pragma unroll
                for (int j = 0; j < kEights; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
                for (int i = from; i < to; ++i, ++step) {
                    const Factors factors(*this, tile, i * kPanels + group);
                    float part[kEights][4];
                    multiply(part, weights, inputs, step, false);
                    wgmma_wait<0>();
                    touch(part);
                    release(step);
                    factors.add(acc, part);
                }
            } else {
                for (int i = from; i < to; ++i, ++step) {
                    multiply(acc, weights, inputs, step, i > from);
                    // The products of this stage run while those of the one before finish.
                    wgmma_wait<1>();
                    if (i > from) release(step - 1);
                }
                wgmma_wait<0>();
                touch(acc);
                release(step - 1);
            }
            at += to - from;
            add_second(acc, group);
            if (group > 0) continue;
            if (from > 0) {
                leave(acc);
            } else {
                if (to < stages) add_others(acc, (tile + 1) * stages);
                store(tile, acc);
            }
        }
    }

    // Starts the products of a stage: they are added to `acc`, or replace it.
    __device__ __forceinline__ void multiply(float (&acc)[kEights][4], uint32_t weights, uint32_t inputs, int step, bool add) const {
        const int stage = step % kStages;
        barrier_wait(shared.full + stage, step / kStages & 1);
        fence_for_products();
        wgmma_fence();
#pragma unroll
        for (int at = 0; at < kPanel; at += 32) {
            const uint64_t a = rows_operand(weights + uint32_t(stage * kPanels * kFeatures * kPanel + at));
            const uint64_t b = rows_operand(inputs + uint32_t(stage * kPanels * kTokens * kPanel + at));
            if constexpr (kFp8) {
                Wgmma<kTokens>::rows_fp8(acc, a, b, add || at > 0);
            } else {
                Wgmma<kTokens>::rows(acc, a, b, add || at > 0);
            }
        }
        wgmma_commit();
    }

    // The factors of 128 inputs of a tile. A tile lies within one row of blocks of weights; if gated, gate and up each lie within one.
    struct Factors {
        float low, high;  // of this thread's rows of weights
        float2 tokens[kEights];

        __device__ __forceinline__ Factors(const Linear& linear, int tile, int block) {
            const Problem& p = linear.p;
            const int first = tile * linear.outputs(), quad = threadIdx.x % 4;
            // The last stage always has two panels; one past the end is all zeros, and any factor will do for it.
            block = min(block, (p.k - 1) / 128);
            low = p.weight_scales[first / 128 * p.stride + block];
            high = p.gated() ? p.weight_scales[(p.n + first) / 128 * p.stride + block] : low;
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
                const int token = j * 8 + quad * 2;
                const auto* const from = reinterpret_cast<const float2*>(p.x_scales + block * p.x_stride + token);
                tokens[j] = token < p.m ? __ldcg(from) : make_float2(0.0f, 0.0f);
            }
        }

        __device__ __forceinline__ void add(float (&acc)[kEights][4], const float (&part)[kEights][4]) const {
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float token = i % 2 == 0 ? tokens[j].x : tokens[j].y;
                    acc[j][i] = fmaf(part[j][i], (i < 2 ? low : high) * token, acc[j][i]);
                }
            }
        }
    };

    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + step % kStages);
    }

    // Adds the sums of the second warp group to those of the first one.
    __device__ __forceinline__ void add_second(float (&acc)[kEights][4], int group) const {
        const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); };
        float4* const second = &shared.second[0][threadIdx.x % kWarpGroup];
        if (group == 1) {
#pragma unroll
            for (int j = 0; j < kEights; ++j) second[j * kWarpGroup] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
        }
        sync();
        if (group == 0) {
#pragma unroll
            for (int j = 0; j < kEights; ++j) add(acc[j], second[j * kWarpGroup]);
        }
        sync();
    }

    __device__ __forceinline__ static void add(float (&acc)[4], float4 v) {
        acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
    }

    // Where this thread's partial sums lie that the block of a rank leaves; its float4s are `kWarpGroup` apart.
    __device__ __forceinline__ float4* left_by(int rank) const {
        return p.sums + size_t(rank) * (kEights * kWarpGroup) + threadIdx.x;
    }

    // Leaves partial sums to the block that has the first stage of the tile. This happens at most once per block: only its first tile can
    // begin in another block.
    __device__ __forceinline__ void leave(const float (&acc)[kEights][4]) const {
        const auto computed = [](float x) { return is_none(x) ? __uint_as_float(0x7fffffff) : x; };
        float4* const to = left_by(rank());
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            const float (&c)[4] = acc[j];
            store_relaxed(to + j * kWarpGroup, make_float4(computed(c[0]), computed(c[1]), computed(c[2]), computed(c[3])));
        }
    }

    // Adds the partial sums that later ranks have left for this block's last tile, which ends before stage `end`.
    __device__ __forceinline__ void add_others(float (&acc)[kEights][4], int end) const {
        int last = rank() + 1;
        while (last + 1 < gridDim.x && begin(last + 1) < end) ++last;
        // Loads from several blocks at once, to hide latency.
        constexpr int kAtOnce = kTokens == 32 ? 2 : 4;
        for (int other = rank() + 1; other <= last; other += kAtOnce) {
            float4 v[kAtOnce][kEights];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int j = 0; j < kEights; ++j) v[i][j] = load_relaxed(left_by(min(other + i, last)) + j * kWarpGroup);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (other + i > last) break;
                float4* const from = left_by(other + i);
#pragma unroll
                for (int j = 0; j < kEights; ++j) {
                    while (!is_whole(v[i][j])) v[i][j] = load_relaxed(from + j * kWarpGroup);
                    add(acc[j], v[i][j]);
                    const float none = __uint_as_float(kNone);
                    store_relaxed(from + j * kWarpGroup, make_float4(none, none, none, none));
                }
            }
        }
    }

    __device__ __forceinline__ float activate(float gate, float up) const {
        return gate / (1.0f + __expf(-sigmoid_input(Activation(p.activation), gate))) * up;
    }

    // Sums of a tile: of rows `lane / 4` and eight further of a warp's 16 rows of weights, times two neighbouring rows of x.
    __device__ __forceinline__ void store(int tile, const float (&acc)[kEights][4]) const {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = lane / 4, quad = lane % 4;
        // The warp's first output.
        const int first = tile * outputs() + warp * (p.gated() ? 8 : 16);
        const auto bias = [&](int output) {
            return p.bias != nullptr && output < p.n ? __bfloat162float(p.bias[output]) : 0.0f;
        };
        const float low_bias = bias(first + row), high_bias = p.gated() ? 0.0f : bias(first + row + 8);
        constexpr bool kScaled = kValues == Values::kFp8;
        const auto factor = [&](int of) { return kScaled ? p.weight_scales[of] : 1.0f; };
        const float low_factor = factor(min(first + row, p.n - 1));
        const float high_factor = factor(p.gated() ? min(first + row, p.n - 1) + p.n : min(first + row + 8, p.n - 1));
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            if (j * 8 >= p.m) break;
            float low[2], high[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float of_token = kScaled ? p.x_scales[min(j * 8 + quad * 2 + i, p.m - 1)] : 1.0f;
                low[i] = fmaf(acc[j][i], low_factor * of_token, low_bias);
                high[i] = fmaf(acc[j][i + 2], high_factor * of_token, high_bias);
            }
            if (p.mode == kF32) {
                float* const out = static_cast<float*>(p.out) + first + row;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = j * 8 + quad * 2 + i;
                    if (token >= p.m) continue;
                    if (first + row < p.n) out[size_t(token) * p.pitch] = low[i];
                    if (first + row + 8 < p.n) out[size_t(token) * p.pitch + 8] = high[i];
                }
                continue;
            }
            // After the transposition a lane has two neighbouring outputs of a row of x.
            const int token = j * 8 + row, output = first + quad * 2;
            bf16* const out = static_cast<bf16*>(p.out) + size_t(token) * p.pitch + output;
            const bool gated = p.gated();
            const uint32_t values = transpose(gated ? pack(activate(low[0], high[0]), activate(low[1], high[1])) : pack(low[0], low[1]));
            if (token < p.m && output < p.n) *reinterpret_cast<uint32_t*>(out) = values;
            if (!gated) {
                const uint32_t others = transpose(pack(high[0], high[1]));
                if (token < p.m && output + 8 < p.n) *reinterpret_cast<uint32_t*>(out + 8) = others;
            }
        }
    }
};

template <int kTokens, Values kValues>
__device__ __forceinline__ void run(const Problem& p) {
    using L = Linear<kTokens, kValues>;
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename L::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    L{p, shared}();
}

#else

template <int kTokens, Values kValues>
__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

// One block per multiprocessor, or per stage if there are fewer stages. The bound of two blocks keeps registers at 72 a thread, so that
// blocks of other kernels fit beside it.
#define LINEAR_HOPPER(NAME, TOKENS, VALUES)                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                                       \
        NAME##_##TOKENS(const void* x, const void* weight, const float* x_scales, const float* weight_scales, const bf16* bias,     \
                        void* out, float4* sums, int m, int n, int k, int pitch, int mode, int activation, int x_stride,            \
                        int stride) {                                                                                               \
        run<TOKENS, VALUES>(                                                                                                        \
            {x, weight, x_scales, weight_scales, bias, out, sums, m, n, k, pitch, mode, activation, x_stride, stride});             \
    }
#define LINEARS_HOPPER(NAME, VALUES)  \
    LINEAR_HOPPER(NAME, 8, VALUES)    \
    LINEAR_HOPPER(NAME, 16, VALUES)   \
    LINEAR_HOPPER(NAME, 32, VALUES)

LINEARS_HOPPER(linear_hopper, Values::kBf16)
LINEARS_HOPPER(linear_hopper_fp8, Values::kFp8)
LINEARS_HOPPER(linear_hopper_fp8_blocks, Values::kFp8Blocks)
