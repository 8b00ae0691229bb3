// Linear layers for up to 32 rows with the matrix instructions of warp groups (wgmma, sm_90a): out[m, n] = x[m, k] . weight[n, k]^T
// (+ bias), at the speed of reading the weights. Weights and inputs are bf16, or e4m3 with factors: one for each row of either, or one
// for each 128 x 128 weights and each 128 inputs of a row.
//
// The weights are the left operand. A tile is 64 rows of weights times all rows of x; it is computed in stages of 256 bytes of k, and
// each of two warp groups multiplies half of a stage. The stages of all tiles are divided equally among the blocks (stream_k.cuh).
//
// Two warps have the copy engine bring weights and inputs, 128 bytes of all rows of a tile at a time, ahead of the two warp groups that
// multiply. (With inputs copied by the lanes of one warp, products of 32 rows took 1 to 2 us more.) A block takes nearly all shared memory of a
// multiprocessor and fills it with weights before it waits for the kernel ahead. So memory stays busy during the small kernels in between,
// whose blocks still find threads and registers.
#include "stream_k.cuh"
#include "tensor_map.cuh"

namespace {

constexpr int kConsumerThreads = 2 * 128;
constexpr int kThreads = kConsumerThreads + 2 * kWarp;

// The type of weights and inputs.
enum class Values {
    kBf16,
    kFp8,       // e4m3 with a factor for each row
    kFp8Blocks  // e4m3 with a factor for each 128 x 128 weights, and for each 128 inputs of a row
};

struct Problem {
    const TensorMap* x;          // of [m, k]; a copy has as many rows as the kernel
    const TensorMap* weight;     // of [n, k], or if gated of [2 n, k]: gate, up, of which a copy has eight rows in turn
    const float* x_scales;       // [m], of e4m3 values, or of blocks [k / 128, x_stride]
    const float* weight_scales;  // [n] or [2 n], or of blocks [n / 128, stride]
    const bf16* bias;            // [n]; null for none
    void* out;                   // [m] rows that begin `pitch` apart
    float4* sums;                // partial sums that blocks leave for others; all `kNone` between launches
    int m, n, k, pitch;
    int mode, activation;
    int x_stride, stride;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kPanel = 128;    // bytes of a row of a panel; a stage has one panel for each warp group
constexpr int kPanels = 2;
constexpr int kPieces = kPanel / 16;
constexpr int kInFlight = 4;   // stages of weights in flight at once; more would only delay each other and the exchange of sums

// Stages, as `STAGES` in crates/kernels/src/cuda/linear/hopper.rs has them too.
template <int kTokens>
constexpr int kStagesOf = kTokens == 32 ? 8 : kTokens == 16 ? 10 : 11;

template <int kTokens, Values kValues>
struct Linear {
    static constexpr bool kFp8 = kValues != Values::kBf16;
    static constexpr int kStages = kStagesOf<kTokens>;
    static constexpr int kEights = kTokens / 8;

    struct __align__(1024) Shared {
        uint8_t weights[kStages][kPanels][kTileRows * kPanel];
        uint8_t inputs[kStages][kPanels][kTokens * kPanel];
        float4 second[kEights][kWarpGroup];  // sums of the second warp group
        uint64_t full_weights[kStages], full_inputs[kStages], empty[kStages];
    };

    const Problem& p;
    Shared& shared;

    __device__ __forceinline__ Outputs outputs() const { return {p.bias, p.out, p.m, p.n, p.pitch, p.mode, p.activation}; }
    // 16-byte pieces of a row of weights or inputs.
    __device__ __forceinline__ int pieces() const { return p.k / (kFp8 ? 16 : 8); }
    __device__ __forceinline__ Shares shares() const {
        const int tiles = (p.n + outputs().of_tile() - 1) / outputs().of_tile();
        const int stages = (pieces() + kPanels * kPieces - 1) / (kPanels * kPieces);
        return {tiles * stages, stages};
    }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full_weights + i, 1);
                barrier_init(shared.full_inputs + i, 1);
                barrier_init(shared.empty + i, kConsumerThreads / kWarp);
            }
            fence_for_products();
        }
        __syncthreads();
        pdl_launch();
        const int first = shares().begin(Shares::rank()), end = shares().begin(Shares::rank() + 1);
        if (threadIdx.x < kConsumerThreads) {
            consume(first, end);
        } else if (threadIdx.x == kConsumerThreads + kWarp) {
            produce_inputs(first, end);
        } else if (threadIdx.x == kConsumerThreads) {
            produce_weights(first, end);
        }
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= kStages) barrier_wait(shared.empty + step % kStages, (step / kStages - 1) & 1);
    }

    // By one thread. Weights never change, so it does not wait for the kernel ahead.
    __device__ __forceinline__ void produce_weights(int first, int end) const {
        static_assert(kTileRows == 64, "a copy has 64 rows, or of gate and up 32 each");
        const int stages = shares().stages;
        const bool gated = outputs().gated();
        for (int at = first, step = 0; at < end; ++at, ++step) {
            const int row = at / stages * outputs().of_tile(), byte = at % stages * kPanels * kPanel;
            wait_empty(step);
            if (step >= kInFlight) barrier_wait(shared.full_weights + (step - kInFlight) % kStages, (step - kInFlight) / kStages & 1);
            uint64_t* const full = shared.full_weights + step % kStages;
            barrier_expect_bytes(full, kPanels * kTileRows * kPanel);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                // Zeros past the last row and past the last input.
                const int4 from = make_int4(byte + panel * kPanel, gated ? 0 : row, 0, gated ? row / 8 : 0);
                copy_tensor(shared.weights[step % kStages][panel], *p.weight, from, full);
            }
        }
    }

    // By one thread.
    __device__ __forceinline__ void produce_inputs(int first, int end) const {
        const int stages = shares().stages;
        pdl_wait();
        for (int at = first, step = 0; at < end; ++at, ++step) {
            const int byte = at % stages * kPanels * kPanel;
            wait_empty(step);
            uint64_t* const full = shared.full_inputs + step % kStages;
            barrier_expect_bytes(full, kPanels * kTokens * kPanel);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                // Zeros past the last row and past the last input.
                copy_tensor(shared.inputs[step % kStages][panel], *p.x, make_int2(byte + panel * kPanel, 0), full);
            }
        }
    }

    __device__ __forceinline__ void consume(int first, int end) const {
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0), stages = shares().stages;
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
            add_second<kWarpGroup>(acc, &shared.second[0][threadIdx.x % kWarpGroup], group);
            if (group > 0) continue;
            const Exchange<kEights, kWarpGroup, kTokens == 32 ? 2 : 4> exchange{p.sums, shares()};
            if (from > 0) {
                exchange.leave(acc);
            } else {
                if (to < stages) exchange.add_others(acc, (tile + 1) * stages);
                store(tile, acc);
            }
        }
    }

    // Starts the products of a stage: they are added to `acc`, or replace it.
    __device__ __forceinline__ void multiply(float (&acc)[kEights][4], uint32_t weights, uint32_t inputs, int step, bool add) const {
        const int stage = step % kStages;
        barrier_wait(shared.full_weights + stage, step / kStages & 1);
        barrier_wait(shared.full_inputs + stage, step / kStages & 1);
        wgmma_fence();
#pragma unroll
        for (int at = 0; at < kPanel; at += 32) {
            const uint64_t a = rows_operand(weights + uint32_t(stage * kPanels * kTileRows * kPanel + at));
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
            const int first = tile * linear.outputs().of_tile(), quad = threadIdx.x % 4;
            // The last stage always has two panels; one past the end is all zeros, and any factor will do for it.
            block = min(block, (p.k - 1) / 128);
            low = p.weight_scales[first / 128 * p.stride + block];
            high = linear.outputs().gated() ? p.weight_scales[(p.n + first) / 128 * p.stride + block] : low;
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

    __device__ __forceinline__ void store(int tile, float (&acc)[kEights][4]) const {
        constexpr bool kScaled = kValues == Values::kFp8;
        if constexpr (kScaled) {
            // All loads before their use.
            float factors[kEights][2];
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) factors[j][i] = __ldcg(p.x_scales + min(j * 8 + threadIdx.x % 4 * 2 + i, p.m - 1));
            }
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[j][i] *= factors[j][i % 2];
            }
        }
        outputs().store(tile, acc, [&](int row) { return kScaled ? p.weight_scales[row] : 1.0f; });
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

// One block per multiprocessor, or per stage if there are fewer stages. The bound, of more threads than there are, keeps registers at 72 a
// thread, so that blocks of other kernels fit beside it.
#define LINEAR_HOPPER(NAME, TOKENS, VALUES)                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads + 3 * kWarp, 2)                                                           \
        NAME##_##TOKENS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* x_scales,       \
                        const float* weight_scales, const bf16* bias, void* out, float4* sums, int m, int n, int k, int pitch,      \
                        int mode, int activation, int x_stride, int stride) {                                                       \
        run<TOKENS, VALUES>(                                                                                                        \
            {&x, &weight, x_scales, weight_scales, bias, out, sums, m, n, k, pitch, mode, activation, x_stride, stride});             \
    }
#define LINEARS_HOPPER(NAME, VALUES)  \
    LINEAR_HOPPER(NAME, 8, VALUES)    \
    LINEAR_HOPPER(NAME, 16, VALUES)   \
    LINEAR_HOPPER(NAME, 32, VALUES)

LINEARS_HOPPER(linear_hopper, Values::kBf16)
LINEARS_HOPPER(linear_hopper_fp8, Values::kFp8)
LINEARS_HOPPER(linear_hopper_fp8_blocks, Values::kFp8Blocks)
