// Products of weights of four bits by warp groups (sm_90a): from some rows on, where that is measured to be faster than linear.cu.
//
// A block has 128 rows of weights, a tile of rows of x, and a part of k. One warp group copies, ahead of the two that multiply 64 rows of
// weights each: codes become bf16 in registers, the left operand, while the products before are under way. Their scales are applied to
// sums or to weights.
//
// The blocks of a cluster share k. Sums of their parts meet in shared memory and are added in a fixed order.
#include "cluster.cuh"
#include "int4.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kThreads = 3 * 128;
// Blocks on a multiprocessor, by rows of x in a tile.
template <int kTokens>
constexpr int kBlocksOf = kTokens == 128 ? 1 : 2;

struct Problem {
    const bf16* x;           // [m, k]
    const uint8_t* weight;   // [n] rows of windows
    const uint32_t* groups;  // [n, stride]
    const bf16* bias;        // [n]; null for none
    bf16* out;               // [m] rows that begin `pitch` apart
    int m, n, k, stride, pitch;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFeatures = 128;    // rows of weights of a block
constexpr int kRowBytes = kWindow / 2;
constexpr int kPanel = 64;        // inputs of a panel of x
constexpr int kSumsPitch = kFeatures + 4;

// Stages, as `TILES` in crates/kernels/src/cuda/linear/int4_products.rs has them too.
template <int kTokens>
constexpr int kStagesOf = kTokens == 16 ? 7 : kTokens == 32 ? 6 : kTokens == 64 ? 4 : 5;
// Registers of the warp groups: of the one that copies, and of those that multiply.
template <int kTokens>
constexpr int kProducerRegisters = kBlocksOf<kTokens> == 1 ? 56 : 40;
template <int kTokens>
constexpr int kConsumerRegisters = kBlocksOf<kTokens> == 1 ? 224 : 96;

template <int kTokens, int kGroup>
struct Products {
    static constexpr int kStages = kStagesOf<kTokens>;
    static constexpr int kWords = kWindow / kGroup;  // of groups, of a row of a stage

    struct __align__(1024) Shared {
        bf16 inputs[kStages][2][kTokens * kPanel];
        uint8_t codes[kStages][kFeatures * kRowBytes];
        uint32_t groups[kStages][kFeatures * kWords];
        uint64_t full[kStages], empty[kStages];
    };
    static_assert(sizeof(float) * kTokens * kSumsPitch <= offsetof(Shared, groups), "sums take the place of stages");
    // Of 228 KiB of a multiprocessor, a block takes 1 KiB itself and up to 2 to align.
    static_assert(kBlocksOf<kTokens> * (sizeof(Shared) + (3 << 10)) <= 228 << 10);

    const Problem& p;
    Shared& shared;
    Group cluster;

    __device__ __forceinline__ int first_token() const { return blockIdx.y * kTokens; }
    __device__ __forceinline__ int first_feature() const { return blockIdx.z * kFeatures; }
    // The windows of this block.
    __device__ __forceinline__ int window(int rank) const { return (p.k + kWindow - 1) / kWindow * rank / cluster.parts; }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, kWarpGroup);
                barrier_init(shared.empty + i, 2 * kWarpGroup / kWarp);
            }
        }
        __syncthreads();
        pdl_launch();
        const int begin = window(cluster.rank()), count = window(cluster.rank() + 1) - begin;
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        float* const sums = reinterpret_cast<float*>(&shared);
        if (group == 0) {
            give_registers<kProducerRegisters<kTokens>>();
            produce(begin, count);
        } else {
            take_registers<kConsumerRegisters<kTokens>>();
            float acc[kTokens / 8][4];
            multiply(acc, begin, count, group - 1);
            // All copies have arrived, and both groups have read them.
            asm volatile("bar.sync 1, %0;" ::"n"(2 * kWarpGroup) : "memory");
            leave(sums, acc, group - 1);
        }
        cluster.sync();
        add_up(sums);
        // Others may still read this block's.
        if (cluster.parts > 1) cluster.sync();
    }

    // Where a piece of 16 bytes of a row of codes lies in a stage: permuted, so that rows that are read together are in different banks.
    __device__ __forceinline__ static int code_place(int row, int piece) { return row * kRowBytes + (piece ^ row / 2 % 4) * 16; }

    __device__ __forceinline__ void produce(int begin, int count) const {
        constexpr int kPieces = kRowBytes / 16, kRows = kWarpGroup / kPieces;
        constexpr int kInputPieces = kWindow / 8, kInputRows = kWarpGroup / kInputPieces;
        const int thread = threadIdx.x, piece = thread % kPieces, row = thread / kPieces;
        const int input_piece = thread % kInputPieces, input_row = thread / kInputPieces;
        const int last = p.n - 1, row_bytes = p.stride / kWords * kRowBytes;
        const auto copy_weights = [&](int s) {
            const int stage = s % kStages;
#pragma unroll
            for (int i = 0; i < kFeatures / kRows; ++i) {
                const size_t from = size_t(min(first_feature() + row + i * kRows, last)) * row_bytes;
                copy_async(shared.codes[stage] + code_place(row + i * kRows, piece),
                           p.weight + from + size_t(begin + s) * kRowBytes + piece * 16, true);
            }
            const size_t words = size_t(min(first_feature() + thread, last)) * p.stride + (begin + s) * kWords;
            copy_async_of<4 * kWords>(shared.groups[stage] + thread * kWords, p.groups + words);
        };
        const auto copy_inputs = [&](int s) {
            const int stage = s % kStages, input = (begin + s) * kWindow + input_piece * 8;
#pragma unroll
            for (int i = 0; i < kTokens / kInputRows; ++i) {
                const int token = input_row + i * kInputRows;
                // Zeros behind the last row, and behind the last input.
                const bool wanted = first_token() + token < p.m && input < p.k;
                const bf16* const from = p.x + (wanted ? size_t(first_token() + token) * p.k + input : 0);
                copy_async(swizzled(shared.inputs[stage][input_piece / 8], token, input_piece % 8), from, wanted);
            }
            barrier_arrive_after_copies(shared.full + stage);
        };
        // Weights never change, inputs are those of the kernel ahead; the groups that multiply write nothing before they have them.
        for (int s = 0; s < min(kStages, count); ++s) copy_weights(s);
        pdl_wait();
        for (int s = 0; s < min(kStages, count); ++s) copy_inputs(s);
        for (int s = kStages; s < count; ++s) {
            barrier_wait(shared.empty + s % kStages, (s / kStages - 1) & 1);
            __syncwarp();
            copy_weights(s);
            copy_inputs(s);
        }
    }

    // What a thread that multiplies keeps in registers; without the `asm` the compiler would compute it again in the loop.
    struct Lane {
        uint32_t stages;                               // the address of `Shared`
        int row;                                       // the first of its rows of weights
        int shift;
        uint32_t mask = 0x000f000f, bias = 0x43004300;  // see int4.cuh

        __device__ __forceinline__ Lane(const Shared& shared, int group) : stages(shared_address(&shared)) {
            row = group * 64 + threadIdx.x % kWarpGroup / kWarp * 16 + threadIdx.x % kWarp / 4;
            shift = threadIdx.x % 4 * 4;
            asm volatile("" : "+r"(stages), "+r"(row), "+r"(shift), "+r"(mask), "+r"(bias));
        }

        __device__ __forceinline__ uint32_t inputs(int stage, int half) const {
            return stages + (stage * 2 + half) * uint32_t(kTokens * kPanel * sizeof(bf16));
        }
        __device__ __forceinline__ uint32_t codes(int stage, int piece) const {
            return stages + uint32_t(offsetof(Shared, codes)) + stage * uint32_t(kFeatures * kRowBytes) + code_place(row, piece);
        }
        __device__ __forceinline__ uint32_t word(int stage, int second, int at) const {
            return stages + uint32_t(offsetof(Shared, groups)) + ((stage * kFeatures + row + second * 8) * kWords + at) * 4;
        }
    };

    // With few rows of x, the sums of `kInputs` inputs are multiplied by the scale of their group; with more it is cheaper to multiply the
    // weights.
    static constexpr bool kScaleSums = kTokens <= 32;

    // Widens the codes of a group: subtracts its zero, which is exact, and multiplies by its scale unless sums are scaled. The scale is
    // held as two bf16, so that a weight is rounded once.
    struct Scale {
        uint32_t zeros;
        float factor;
        bf162 high, low;

        __device__ __forceinline__ explicit Scale(uint32_t word) : zeros(group_zeros(word)), factor(group_scale(word)) {
            const bf16 rounded = __float2bfloat16_rn(factor);
            high = __bfloat162bfloat162(rounded);
            low = __bfloat162bfloat162(__float2bfloat16_rn(factor - __bfloat162float(rounded)));
        }

        // Pair `shift / 4` of a word.
        __device__ __forceinline__ uint32_t widen(uint32_t word, const Lane& lane) const {
            uint32_t bits;
            // (word & mask) | bias
            asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word >> lane.shift), "r"(lane.mask), "r"(lane.bias));
            bf162 wide = __hsub2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(zeros));
            if constexpr (!kScaleSums) wide = __hfma2(wide, high, __hmul2(wide, low));
            return reinterpret_cast<const uint32_t&>(wide);
        }
    };

    // Inputs of a unit: its weights are widened while the products of the unit before run.
    static constexpr int kInputs = kGroup < kPanel ? kGroup : kPanel;
    static constexpr int kUnits = kWindow / kInputs;
    static_assert(kUnits % 2 == 0);

    // A unit of this thread's two rows of weights, and their scales.
    struct Weights {
        uint32_t wide[kInputs / 16][4];
        float factors[2];
    };

    // Sums over this block's windows, of 64 rows of weights from row 64 * group on.
    __device__ __forceinline__ void multiply(float (&acc)[kTokens / 8][4], int begin, int count, int group) const {
        const Lane lane(shared, group);
        if constexpr (kScaleSums) {
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
        }
        Weights weights[2];
        // The host divides k among no more blocks than there are windows.
        load_weights(weights[0], lane, begin, 0, 0);
        for (int s = 0; s < count; ++s) {
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                const bool is_last = unit == kUnits - 1;
                const Weights& now = weights[unit % 2];
                const auto load_next = [&] {
                    if (!is_last || s + 1 < count) {
                        load_weights(weights[(unit + 1) % 2], lane, begin, is_last ? s + 1 : s, is_last ? 0 : unit + 1);
                    }
                };
                if constexpr (kScaleSums) {
                    float part[kTokens / 8][4];
                    start(part, now, lane, s, unit, false);
                    load_next();
                    wgmma_wait<0>();
                    touch(part);
                    if (is_last) release(s);
#pragma unroll
                    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc[j][i] = fmaf(part[j][i], now.factors[i / 2], acc[j][i]);
                    }
                } else {
                    start(acc, now, lane, s, unit, s > 0 || unit > 0);
                    // The products before have ended: the registers of their weights are free.
                    wgmma_wait<1>();
                    if (unit == 0 && s > 0) release(s - 1);
                    load_next();
                }
            }
        }
        if constexpr (!kScaleSums) {
            wgmma_wait<0>();
            touch(acc);
        }
    }

    // Starts the products of a unit of window `s`: they are added to `sums`, or replace them.
    __device__ __forceinline__ void start(float (&sums)[kTokens / 8][4], const Weights& weights, const Lane& lane, int s, int unit,
                                          bool add) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kInputs / 16; ++k) {
            const int input = unit * kInputs + k * 16;
            const uint32_t from = lane.inputs(s % kStages, input / kPanel) + input % kPanel * uint32_t(sizeof(bf16));
            Wgmma<kTokens>::rows(sums, weights.wide[k], rows_operand(from), add || k > 0);
        }
        wgmma_commit();
    }

    // Loads and widens a unit; for the first one of a window, waits until the window has arrived.
    __device__ __forceinline__ void load_weights(Weights& to, const Lane& lane, int begin, int s, int unit) const {
        const int stage = s % kStages;
        if (unit == 0) {
            barrier_wait(shared.full + stage, s / kStages & 1);
            fence_for_products();
        }
        const int first = unit * kInputs, left = p.k - (begin + s) * kWindow;  // inputs from this window on
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            // What is behind the last input may be anything.
            const Scale scale(first < left ? load_shared4(lane.word(stage, second, first / kGroup)) : 0);
            to.factors[second] = scale.factor;
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                // A piece has one word for each 32 inputs, and the same place in rows that are eight apart.
                const uint32_t from = lane.codes(stage, piece) + second * 8 * kRowBytes + first / 32 * 4;
                uint32_t words[kInputs / 32];
                if constexpr (kInputs == 64) {
                    const uint2 both = load_shared8(from);
                    words[0] = both.x, words[1] = both.y;
                } else {
                    words[0] = load_shared4(from);
                }
#pragma unroll
                for (int i = 0; i < kInputs / 32; ++i) to.wide[i * 2 + piece / 2][second + piece % 2 * 2] = scale.widen(words[i], lane);
            }
        }
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
        const bool pairs = ((p.n | p.pitch) & 1) == 0;
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
                if (feature + 1 < p.n) sum.y += __bfloat162float(p.bias[feature + 1]);
            }
            bf16* const out = p.out + size_t(first_token() + token) * p.pitch + feature;
            if (pairs) {
                *reinterpret_cast<bf162*>(out) = __floats2bfloat162_rn(sum.x, sum.y);
            } else {
                out[0] = __float2bfloat16(sum.x);
                if (feature + 1 < p.n) out[1] = __float2bfloat16(sum.y);
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
                                        bf16* out, int m, int n, int k, int stride, int pitch) {                              \
        product<TOKENS, GROUP>({x, weight, groups, bias, out, m, n, k, stride, pitch});                                       \
    }

#define INT4_PRODUCTS(GROUP) \
    INT4_PRODUCT(GROUP, 16)  \
    INT4_PRODUCT(GROUP, 32)  \
    INT4_PRODUCT(GROUP, 64)  \
    INT4_PRODUCT(GROUP, 128)

INT4_PRODUCTS(32)
INT4_PRODUCTS(64)
INT4_PRODUCTS(128)
