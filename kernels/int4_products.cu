// Products of weights of four bits by warp groups (sm_90a): of more rows than linear_hopper_int4.cu has, where that is measured to be
// faster than linear.cu.
//
// A block has 128 rows of weights, a tile of rows of x, and a part of k. One warp group copies weights and one copies x, ahead of the two
// that multiply 64 rows of weights each: codes become bf16 in registers, the left operand, while the products before are under way. With
// this many rows of x, scaling weights is cheaper than scaling sums.
//
// The blocks of a cluster share k. Sums of their parts meet in shared memory and are added in a fixed order.
#include "cluster.cuh"
#include "int4_tile.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kThreads = 4 * 128;
// Blocks on a multiprocessor, by rows of x in a tile.
template <int kTokens>
constexpr int kBlocksOf = kTokens == 128 ? 1 : 2;

struct Problem {
    const bf16* x;           // [m, k]
    const uint8_t* weight;   // of [n, k]; n is a multiple of 8
    const uint32_t* groups;
    const bf16* bias;        // [n]; null for none
    bf16* out;               // [m] rows that begin `pitch` apart
    int m, n, k, pitch;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kPanel = 64;        // inputs of a panel of x
constexpr int kSumsPitch = kFeatures + 4;

// Stages, as `TILES` in crates/kernels/src/cuda/linear/int4_products.rs has them too.
template <int kTokens>
constexpr int kStagesOf = kTokens == 64 ? 4 : 5;
// Registers of the warp groups: of those that copy, and of those that multiply.
template <int kTokens>
constexpr int kProducerRegisters = kBlocksOf<kTokens> == 1 ? 56 : 32;
template <int kTokens>
constexpr int kConsumerRegisters = kBlocksOf<kTokens> == 1 ? 200 : 96;

// Reads the rows of a warp group unit by unit: a unit is the inputs that are widened at once. Codes less their zeros are exact, and scales
// are held as two bf16, so that a weight is rounded once.
template <int kGroup>
struct Int4Reader {
    using Stage = Int4Stage<kGroup, 1>;
    static constexpr int kInputs = kGroup < 64 ? kGroup : 64;
    static constexpr int kUnits = kWindow / kInputs;
    static_assert(kUnits % 2 == 0, "the registers of two units take turns");

    // A unit of this thread's two rows: operands of 16 inputs each.
    struct Unit {
        uint32_t wide[kInputs / 16][4];
    };

    uint32_t codes, words;  // where this thread's begin in a stage
    uint4 window[2];        // its codes of a window

    __device__ __forceinline__ explicit Int4Reader(int group) {
        const int lane = threadIdx.x % kWarp, eight = group * (kEightsOfTile / 2) + threadIdx.x % kWarpGroup / kWarp * 2;
        codes = offsetof(Stage, codes) + eight * uint32_t(sizeof(Stage::codes[0])) + lane * 16;
        words = offsetof(Stage, words) + eight * uint32_t(sizeof(Stage::words[0])) + lane / 4 * (Stage::kWords * 4);
        // They stay in registers; the compiler would compute them again in each loop.
        asm volatile("" : "+r"(codes), "+r"(words));
    }

    // Unit `unit` of a stage at an address of shared memory, units in order.
    __device__ __forceinline__ void load(Unit& to, uint32_t stage, int unit) {
        constexpr int kParts = kInputs / 32;
        const int first = unit * kInputs;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            if (first == 0) window[second] = load_shared16(stage + codes + second * uint32_t(sizeof(Stage::codes[0])));
            const uint32_t group = load_shared4(stage + words + second * uint32_t(sizeof(Stage::words[0])) + first / kGroup * 4);
            const uint32_t zeros = group_zeros(group);
            const float scale = group_scale(group);
            const bf16 rounded = __float2bfloat16_rn(scale);
            const bf162 high = __bfloat162bfloat162(rounded);
            const bf162 low = __bfloat162bfloat162(__float2bfloat16_rn(scale - __bfloat162float(rounded)));
            const auto scaled = [&](uint32_t wide) {
                const bf162 pair = reinterpret_cast<const bf162&>(wide), product = __hfma2(pair, high, __hmul2(pair, low));
                return reinterpret_cast<const uint32_t&>(product);
            };
            const uint32_t of[4] = {window[second].x, window[second].y, window[second].z, window[second].w};
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint32_t word = of[first / 32 + part];
                to.wide[part * 2][second] = scaled(widen_int4<0>(word, zeros));
                to.wide[part * 2][second + 2] = scaled(widen_int4<1>(word, zeros));
                to.wide[part * 2 + 1][second] = scaled(widen_int4<2>(word, zeros));
                to.wide[part * 2 + 1][second + 2] = scaled(widen_int4<3>(word, zeros));
            }
        }
    }
};

template <int kTokens, int kGroup>
struct Products {
    static constexpr int kStages = kStagesOf<kTokens>;
    using Reader = Int4Reader<kGroup>;

    struct __align__(1024) Shared {
        bf16 inputs[kStages][kWindow / kPanel][kTokens * kPanel];
        Int4Stage<kGroup, 1> weights[kStages];
        uint64_t full[kStages], empty[kStages];
    };
    static_assert(sizeof(float) * kTokens * kSumsPitch <= offsetof(Shared, full), "sums take the place of stages");
    // Of 228 KiB of a multiprocessor, a block takes 1 KiB itself and up to 2 to align.
    static_assert(kBlocksOf<kTokens> * (sizeof(Shared) + (3 << 10)) <= 228 << 10);

    const Problem& p;
    Shared& shared;
    Group cluster;

    __device__ __forceinline__ int first_token() const { return blockIdx.y * kTokens; }
    __device__ __forceinline__ int first_feature() const { return blockIdx.z * kFeatures; }
    // The windows of this block.
    __device__ __forceinline__ int window(int rank) const { return windows() * rank / cluster.parts; }
    __device__ __forceinline__ int windows() const { return (p.k + kWindow - 1) / kWindow; }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, 2 * kWarpGroup);
                barrier_init(shared.empty + i, 2 * kWarpGroup / kWarp);
            }
        }
        __syncthreads();
        pdl_launch();
        const int begin = window(cluster.rank()), count = window(cluster.rank() + 1) - begin;
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        float* const sums = reinterpret_cast<float*>(&shared);
        if (group < 2) {
            take_registers<kConsumerRegisters<kTokens>>();
            float acc[kTokens / 8][4];
            multiply(acc, count, group);
            // All copies have arrived, and both groups have read them.
            named_sync<2 * kWarpGroup>(1);
            leave(sums, acc, group);
        } else {
            give_registers<kProducerRegisters<kTokens>>();
            if (group == 2) {
                produce_weights(begin, count);
            } else {
                produce_inputs(begin, count);
            }
        }
        cluster.sync();
        add_up(sums);
        // Others may still read this block's.
        if (cluster.parts > 1) cluster.sync();
    }

    __device__ __forceinline__ void wait_empty(int s) const {
        if (s >= kStages) barrier_wait(shared.empty + s % kStages, (s / kStages - 1) & 1);
        __syncwarp();
    }

    // Weights never change, so their copies do not wait for the kernel ahead.
    __device__ __forceinline__ void produce_weights(int begin, int count) const {
        const Int4Weights weights{p.weight, p.groups, windows()};
        const Int4Rows rows{first_feature(), p.n, false};
        for (int s = 0; s < count; ++s) {
            wait_empty(s);
            weights.copy<kWarpGroup>(shared.weights[s % kStages], rows, begin + s, threadIdx.x % kWarpGroup);
            barrier_arrive_after_copies(shared.full + s % kStages);
        }
    }

    __device__ __forceinline__ void produce_inputs(int begin, int count) const {
        constexpr int kPieces = kWindow / 8, kRows = kWarpGroup / kPieces;
        const int thread = threadIdx.x % kWarpGroup, piece = thread % kPieces, row = thread / kPieces;
        // The groups that multiply write nothing before they have inputs.
        pdl_wait();
        for (int s = 0; s < count; ++s) {
            wait_empty(s);
            const int input = (begin + s) * kWindow + piece * 8;
            bf16* const panel = shared.inputs[s % kStages][piece / 8];
#pragma unroll
            for (int i = 0; i < kTokens / kRows; ++i) {
                const int token = row + i * kRows;
                // Zeros behind the last row, and behind the last input.
                const bool wanted = first_token() + token < p.m && input < p.k;
                const bf16* const from = p.x + (wanted ? size_t(first_token() + token) * p.k + input : 0);
                copy_async(swizzled(panel, token, piece % 8), from, wanted);
            }
            barrier_arrive_after_copies(shared.full + s % kStages);
        }
    }

    // Sums over this block's windows, of 64 rows of weights from row 64 * group on.
    __device__ __forceinline__ void multiply(float (&acc)[kTokens / 8][4], int count, int group) const {
        Reader reader(group);
        typename Reader::Unit units[2];
        // The host divides k among no more blocks than there are windows.
        load(units[0], reader, 0, 0);
        for (int s = 0; s < count; ++s) {
#pragma unroll
            for (int unit = 0; unit < Reader::kUnits; ++unit) {
                const bool is_last = unit == Reader::kUnits - 1;
                start(acc, units[unit % 2], s, unit, s > 0 || unit > 0);
                // The products before have ended: the registers of their weights are free.
                wgmma_wait<1>();
                if (unit == 0 && s > 0) release(s - 1);
                if (!is_last || s + 1 < count) load(units[(unit + 1) % 2], reader, is_last ? s + 1 : s, is_last ? 0 : unit + 1);
            }
        }
        wgmma_wait<0>();
        touch(acc);
    }

    // Starts the products of a unit of window `s`: they are added to `sums`, or replace them.
    __device__ __forceinline__ void start(float (&sums)[kTokens / 8][4], const typename Reader::Unit& weights, int s, int unit,
                                          bool add) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Reader::kInputs / 16; ++k) {
            const int input = unit * Reader::kInputs + k * 16;
            const bf16* const from = shared.inputs[s % kStages][input / kPanel] + input % kPanel;
            Wgmma<kTokens>::rows(sums, weights.wide[k], rows_operand(from), add || k > 0);
        }
        wgmma_commit();
    }

    // Loads a unit; for the first one of a window, waits until the window has arrived.
    __device__ __forceinline__ void load(typename Reader::Unit& to, Reader& reader, int s, int unit) const {
        const int stage = s % kStages;
        if (unit == 0) {
            barrier_wait(shared.full + stage, s / kStages & 1);
            fence_for_products();
        }
        reader.load(to, shared_address(shared.weights + stage), unit);
    }

    __device__ __forceinline__ void release(int s) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + s % kStages);
    }

    // Sums of 64 rows of weights to [tokens][features].
    __device__ __forceinline__ void leave(float* sums, const float (&acc)[kTokens / 8][4], int group) const {
        const int lane = threadIdx.x % kWarp, feature = group * 64 + threadIdx.x % kWarpGroup / kWarp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[(j * 8 + lane % 4 * 2 + i % 2) * kSumsPitch + feature + i / 2 * 8] = acc[j][i];
        }
    }

    // Adds the parts of the cluster, each block those of some outputs, two neighbours at once.
    __device__ __forceinline__ void add_up(float* sums) const {
        const int tokens = min(kTokens, p.m - first_token());
        const bool pairs = p.pitch % 2 == 0;
        for (int i = cluster.rank() * kThreads + threadIdx.x; i < tokens * (kFeatures / 2); i += cluster.parts * kThreads) {
            const int token = i / (kFeatures / 2), at = i % (kFeatures / 2) * 2, feature = first_feature() + at;
            if (feature >= p.n) continue;
            float2 sum = make_float2(0.0f, 0.0f);
            for (int part = 0; part < cluster.parts; ++part) {
                const float2 of = *reinterpret_cast<const float2*>(cluster.at(sums + token * kSumsPitch + at, part));
                sum.x += of.x, sum.y += of.y;
            }
            if (p.bias != nullptr) {
                sum.x += __bfloat162float(p.bias[feature]);
                sum.y += __bfloat162float(p.bias[feature + 1]);
            }
            bf16* const out = p.out + size_t(first_token() + token) * p.pitch + feature;
            if (pairs) {
                *reinterpret_cast<bf162*>(out) = __floats2bfloat162_rn(sum.x, sum.y);
            } else {
                out[0] = __float2bfloat16(sum.x);
                out[1] = __float2bfloat16(sum.y);
            }
        }
    }
};

template <int kTokens, int kGroup>
__device__ __forceinline__ void product(const Problem& p) {
    using P = Products<kTokens, kGroup>;
    extern __shared__ uint8_t memory[];
    // In the same place in all blocks of a cluster, which have as much shared memory.
    auto& shared = *reinterpret_cast<typename P::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    P{p, shared, {int(gridDim.x)}}();
}

#else

template <int kTokens, int kGroup>
__device__ __forceinline__ void product(const Problem&) {}

#endif

}  // namespace

// gridDim is parts of k, which are a cluster, tiles of rows of x, and tiles of 128 rows of weights.
#define INT4_PRODUCT(GROUP, TOKENS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocksOf<TOKENS>)                                                 \
        int4_product_##GROUP##_##TOKENS(const bf16* x, const uint8_t* weight, const uint32_t* groups, const bf16* bias,       \
                                        bf16* out, int m, int n, int k, int pitch) {                                          \
        product<TOKENS, GROUP>({x, weight, groups, bias, out, m, n, k, pitch});                                               \
    }

#define INT4_PRODUCTS(GROUP) \
    INT4_PRODUCT(GROUP, 64)  \
    INT4_PRODUCT(GROUP, 128)

INT4_PRODUCTS(32)
INT4_PRODUCTS(64)
INT4_PRODUCTS(128)
