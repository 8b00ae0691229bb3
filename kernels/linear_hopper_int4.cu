// Linear layers for up to 32 rows with weights of four bits (sm_90a): out[m, n] = x[m, k] . weight[n, k]^T (+ bias).
//
// A tile is 128 rows of weights times all rows of x, computed in stages of two windows of 128 inputs. Eight warps multiply each window, 16
// rows of weights each, by mma.m16n8k16: the matrix instructions of warp groups (wgmma), with the left operand in registers, take 28 cycles
// however few rows of x there are. Codes less their zeros are exact, and the sums of a group are multiplied by its scale. The stages of all tiles are divided
// equally among the blocks (stream_k.cuh).
//
// Four warps copy weights, which they request before the wait for the kernel ahead, and four copy x. A block takes nearly all shared memory
// of a multiprocessor; blocks of the small kernels in between still find threads and registers.
#include "int4_tile.cuh"
#include "stream_k.cuh"

namespace {

// Of a thread, so that blocks of other kernels fit beside one.
template <int kTokens>
constexpr int kRegistersOf = kTokens == 32 ? 72 : 64;

struct Problem {
    const bf16* x;           // [m, k]
    const uint8_t* weight;   // of [n, k], or if gated [2 n, k]: gate, up
    const uint32_t* groups;
    const bf16* bias;        // [n]; null for none
    void* out;               // [m] rows that begin `pitch` apart
    float4* sums;            // partial sums that blocks leave for others; all `kNone` between launches
    int m, n, k, pitch;      // n is a multiple of 8
    int mode, activation;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kSumThreads = 2 * kWarpGroup;  // that multiply one window of a stage
constexpr int kProducers = kWarpGroup;       // threads that copy weights; as many copy x
constexpr int kStageWindows = 2;
constexpr int kConsumerThreads = kStageWindows * kSumThreads;
constexpr int kThreads = kConsumerThreads + 2 * kProducers;
constexpr int kStageInputs = kStageWindows * kWindow;
constexpr int kPanel = 64;  // inputs of a panel of x
static_assert(kFeatures == 2 * kTileRows);

// As `INT4_SHARED_BYTES` in crates/kernels/src/cuda/linear/hopper.rs has it too, with what aligns it.
constexpr int kSharedBytes = 226 << 10;

template <int kTokens, int kGroup>
struct Linear {
    static constexpr int kEights = kTokens / 8;
    static constexpr int kGroups = kWindow / kGroup;  // of a window

    static constexpr int kProducerRegisters = kTokens == 32 ? 40 : 32, kConsumerRegisters = kTokens == 32 ? 88 : 80;
    static_assert(kConsumerThreads * kConsumerRegisters + 2 * kProducers * kProducerRegisters <= kThreads * kRegistersOf<kTokens>);

    using Panel = bf16[kTokens * kPanel];
    using Weights = Int4Stage<kGroup, kStageWindows>;
    using Sums = float4[kSumThreads];
    // As many stages as fit.
    static constexpr int kStages = (kSharedBytes - kEights * int(sizeof(Sums))) /
                                   int(sizeof(Panel) * (kStageInputs / kPanel) + sizeof(Weights) + 2 * sizeof(uint64_t));

    struct __align__(1024) Shared {
        Panel inputs[kStages][kStageInputs / kPanel];
        Weights weights[kStages];
        Sums second[kEights];  // of the second windows
        uint64_t full[kStages], empty[kStages];
    };
    static_assert(sizeof(Shared) <= kSharedBytes);

    const Problem& p;
    Shared& shared;

    __device__ __forceinline__ Outputs outputs() const { return {p.bias, p.out, p.m, p.n, p.pitch, p.mode, p.activation}; }
    __device__ __forceinline__ int windows() const { return (p.k + kWindow - 1) / kWindow; }
    __device__ __forceinline__ Shares shares() const {
        const int of_tile = 2 * outputs().of_tile(), stages = (windows() + kStageWindows - 1) / kStageWindows;
        return {(p.n + of_tile - 1) / of_tile * stages, stages};
    }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, 2 * kProducers);
                barrier_init(shared.empty + i, kConsumerThreads / kWarp);
            }
        }
        __syncthreads();
        pdl_launch();
        const int first = shares().begin(Shares::rank()), end = shares().begin(Shares::rank() + 1);
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group < kConsumerThreads / kWarpGroup) {
            take_registers<kConsumerRegisters>();
            consume(first, end);
        } else {
            give_registers<kProducerRegisters>();
            const int thread = threadIdx.x % kProducers;
            if (group == kConsumerThreads / kWarpGroup) {
                produce_weights(first, end, thread);
            } else {
                produce_inputs(first, end, thread);
            }
        }
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= kStages) barrier_wait(shared.empty + step % kStages, (step / kStages - 1) & 1);
        __syncwarp();
    }

    // Weights never change, so their copies do not wait for the kernel ahead.
    __device__ __forceinline__ void produce_weights(int first, int end, int thread) const {
        const Int4Weights weights{p.weight, p.groups, windows()};
        const int stages = shares().stages;
        for (int at = first, step = 0; at < end; ++at, ++step) {
            const Int4Rows rows{at / stages * 2 * outputs().of_tile(), p.n, outputs().gated()};
            wait_empty(step);
            weights.copy<kProducers>(shared.weights[step % kStages], rows, at % stages * kStageWindows, thread);
            barrier_arrive_after_copies(shared.full + step % kStages);
        }
    }

    __device__ __forceinline__ void produce_inputs(int first, int end, int thread) const {
        static_assert(kStageInputs == 8 * kWarp, "a lane has eight inputs of a row");
        constexpr int kRows = kProducers / kWarp;
        const int piece = thread % kWarp, stages = shares().stages;
        pdl_wait();
        for (int at = first, step = 0; at < end; ++at, ++step) {
            wait_empty(step);
            const int input = at % stages * kStageInputs + piece * 8;
            bf16* const panel = shared.inputs[step % kStages][piece / 8];
#pragma unroll
            for (int i = 0; i < kTokens / kRows; ++i) {
                const int token = thread / kWarp + i * kRows;
                // Zeros past the last row and past the last input.
                const bool wanted = token < p.m && input < p.k;
                copy_async(swizzled(panel, token, piece % 8), p.x + (wanted ? token * p.k + input : 0), wanted);
            }
            barrier_arrive_after_copies(shared.full + step % kStages);
        }
    }

    __device__ __forceinline__ void consume(int first, int end) const {
        const int window = __shfl_sync(kAllLanes, threadIdx.x / kSumThreads, 0), group = threadIdx.x / kWarpGroup;
        const Shares shares = this->shares();
        const Exchange<kEights, kSumThreads, kTokens == 32 ? 1 : 4> exchange{p.sums, shares};
        // Before the first write: the kernel ahead may read what is written.
        pdl_wait();
        const Lane lane(shared, window);
        int stage = 0, parity = 0;
        for (int at = first; at < end;) {
            const int tile = at / shares.stages, from = at % shares.stages, to = min(shares.stages, from + end - at);
            float acc[kEights][4] = {};
            for (int i = from; i < to; ++i) {
                barrier_wait(shared.full + stage, parity);
                __syncwarp();
                multiply(acc, lane, stage);
                __syncwarp();
                if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + stage);
                if (++stage == kStages) stage = 0, parity ^= 1;
            }
            at += to - from;
            add_second<kSumThreads>(acc, &shared.second[0][threadIdx.x % kSumThreads], window);
            if (window > 0) continue;
            if (from > 0) {
                exchange.leave(acc);
            } else {
                if (to < shares.stages) exchange.add_others(acc, (tile + 1) * shares.stages);
                const auto no_factor = [](int) { return 1.0f; };
                outputs().store(tile * 2 + group, acc, no_factor);
            }
        }
    }

    // Where a lane reads in the first stage: addresses in shared memory.
    struct Lane {
        uint32_t codes, words;  // of row `lane / 4` of the warp's first eight
        uint32_t inputs;        // of a row of one of four matrices of eight rows of x and eight inputs

        __device__ __forceinline__ Lane(const Shared& shared, int window) {
            const int eight = threadIdx.x % kSumThreads / kWarp * 2, lane = threadIdx.x % kWarp, row = lane % 8;
            codes = shared_address(shared.weights[0].codes[eight][window] + lane * 16);
            words = shared_address(shared.weights[0].words[eight][window] + lane / 4 * kGroups);
            inputs = shared_address(shared.inputs[0][window * (kWindow / kPanel)]) + row * (kPanel * 2) + (lane / 8 ^ row) * 16;
        }
    };

    // Adds the products of a window. What is past the last input is zeros.
    __device__ __forceinline__ void multiply(float (&acc)[kEights][4], const Lane& lane, int stage) const {
        uint32_t codes[2][kWindowParts], words[2][kGroups];
        const uint32_t codes_from = lane.codes + stage * uint32_t(sizeof(Weights)), words_from = lane.words + stage * uint32_t(sizeof(Weights));
        const uint32_t inputs = lane.inputs + stage * uint32_t(sizeof(shared.inputs[0]));
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            const uint4 four = load_shared16(codes_from + second * uint32_t(sizeof(Weights::codes[0])));
            codes[second][0] = four.x, codes[second][1] = four.y, codes[second][2] = four.z, codes[second][3] = four.w;
#pragma unroll
            for (int i = 0; i < kGroups; ++i) words[second][i] = load_shared4(words_from + second * uint32_t(sizeof(Weights::words[0])) + i * 4);
        }
#pragma unroll
        for (int of_window = 0; of_window < kGroups; ++of_window) {
            const uint32_t low_zeros = group_zeros(words[0][of_window]), high_zeros = group_zeros(words[1][of_window]);
            // With few products two sums each, so that half as many wait for each other.
            constexpr int kSums = kEights == 1 ? 2 : 1;
            float sums[kSums][kEights][4] = {};
#pragma unroll
            for (int i = 0; i < kGroup / 32; ++i) {
                const int part = of_window * (kGroup / 32) + i;
                const uint4 low = widen_int4(codes[0][part], low_zeros), high = widen_int4(codes[1][part], high_zeros);
                const uint32_t even[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int j = 0; j < kEights; ++j) {
                    uint32_t x[4];
                    load_matrices(x, (inputs + part / 2 * (kTokens * kPanel * 2) + j * (8 * kPanel * 2)) ^ part % 2 * 64);
                    mma(sums[0][j], even, x[0], x[1]);
                    mma(sums[kSums - 1][j], second, x[2], x[3]);
                }
            }
            const float low_scale = group_scale(words[0][of_window]), high_scale = group_scale(words[1][of_window]);
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const float sum = kSums == 1 ? sums[0][j][v] : sums[0][j][v] + sums[kSums - 1][j][v];
                    acc[j][v] = fmaf(sum, v < 2 ? low_scale : high_scale, acc[j][v]);
                }
            }
        }
    }
};

template <int kTokens, int kGroup>
__device__ __forceinline__ void run(const Problem& p) {
    using L = Linear<kTokens, kGroup>;
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename L::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    L{p, shared}();
}

#else

template <int kTokens, int kGroup>
__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

// One block per multiprocessor, or per stage if there are fewer stages.
#define LINEAR_HOPPER_INT4(GROUP, TOKENS)                                                                                            \
    extern "C" __global__ void __maxnreg__(kRegistersOf<TOKENS>)                                                                     \
        linear_hopper_int4_##GROUP##_##TOKENS(const bf16* x, const uint8_t* weight, const uint32_t* groups, const bf16* bias,        \
                                              void* out, float4* sums, int m, int n, int k, int pitch, int mode, int activation) {   \
        run<TOKENS, GROUP>({x, weight, groups, bias, out, sums, m, n, k, pitch, mode, activation});                                  \
    }
#define LINEARS_HOPPER_INT4(GROUP) \
    LINEAR_HOPPER_INT4(GROUP, 8)   \
    LINEAR_HOPPER_INT4(GROUP, 16)  \
    LINEAR_HOPPER_INT4(GROUP, 32)

LINEARS_HOPPER_INT4(32)
LINEARS_HOPPER_INT4(64)
LINEARS_HOPPER_INT4(128)
