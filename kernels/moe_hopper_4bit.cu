// Mixtures of experts: the products of tiles of many rows by products of warp groups (sm_90a), in place of those of moe.cu, of weights of
// four bits.
//
// A block of threads stays and takes one piece of work after the other: a tile of 64 or 128 rows of x times 256 rows of weights, of a
// gated product 128 of the gate and the same of the up projection, in groups of eight, so that both sums of an output are in one
// thread. One warp group copies, ahead of the two that multiply 128 rows of weights each.
//
// Weights become bf16 in registers, which are then the left operand: while the products of 64 rows of weights run, those of the other 64 are
// widened.
#include "experts_hopper.cuh"

namespace {

constexpr int kThreads = 3 * 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFeatures = 256;  // rows of weights of a piece of work
constexpr int kGroupFeatures = kFeatures / kConsumers;
constexpr int kProducts = kGroupFeatures / 64;  // side by side, of a warp group
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// Stages that fit, as `launch_of` in crates/kernels/src/cuda/moe/products.rs has them too.
template <int kTokens, Format kFormat>
struct Experts {
    static constexpr bool kHasCopyEngine = false;
    static constexpr int kStages = kTokens == 128 ? 4 : 6;
    // Of a stage: chunks, and bytes of a row of weights.
    static constexpr int kStageChunks = 2;
    static constexpr int kRowBytes = kStageChunks * kStoredBytes<kFormat>;
    static constexpr int kRowPieces = kRowBytes / 16;
    // Words that a row of a stage has beside codes: one of four exponents, or up to four of groups.
    static constexpr int kBeside = kFormat == Format::kMxfp4 ? 1 : kWindow / 32;

    struct __align__(1024) Shared {
        uint8_t weights[kStages][kFeatures * kRowBytes];
        bf16 inputs[kStages][kStageChunks][kTokens * kChunk];
        uint64_t full[kStages], empty[kStages];
        uint32_t beside[kStages][kFeatures * kBeside + 1];
    };

    const Problem& p;
    Shared& shared;

    __device__ __forceinline__ bool gated() const { return p.kind != kPlain; }
    __device__ __forceinline__ int outputs() const { return gated() ? kFeatures / 2 : kFeatures; }
    __device__ __forceinline__ int columns() const { return (p.n + outputs() - 1) / outputs(); }
    __device__ __forceinline__ int chunks() const { return (p.k + kChunk - 1) / kChunk; }
    __device__ __forceinline__ int stages() const { return (chunks() + kStageChunks - 1) / kStageChunks; }

    // The row of the expert's weights that is row `row` of a piece of work. Those past the end repeat the last one.
    __device__ __forceinline__ int weight_row(const Work& w, int row) const {
        if (!gated()) return min(w.first + row, p.n - 1);
        return min(w.first + row / 16 * 8 + row % 8, p.n - 1) + (row % 16 < 8 ? 0 : p.n);
    }

    // Copies all chunks of all work.
    __device__ __forceinline__ void produce(int count) const {
        // This thread copies the same piece of some rows of x, and of some eights of rows of weights, which lie in a stage as in the matrix. A
        // row is the same in each eight.
        constexpr int kPieces = kChunk / 8, kRows = kWarpGroup / kPieces;
        const int piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces, pieces = p.k / 8;
        constexpr int kPiecesTogether = kRowsTogether * kRowPieces, kWeightRows = kWarpGroup / kPiecesTogether * kRowsTogether;
        const int weight_piece = threadIdx.x % kPiecesTogether, first_weight = threadIdx.x / kPiecesTogether * kRowsTogether;
        const int weight_pieces = kRowsTogether * row_pieces<kFormat>(p), stage_groups = kFormat == Format::kInt4 ? kBeside >> group_shift(p) : 0;
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work_at(p, index, columns(), outputs());
            // Where they begin, in pieces of 16 bytes.
            uint32_t inputs[kTokens / kRows], weights[kFeatures / kWeightRows];
#pragma unroll
            for (int i = 0; i < kTokens / kRows; ++i) {
                inputs[i] = p.input_row(w.tile.first + min(first_row + i * kRows, w.tile.count - 1)) * pieces + piece;
            }
#pragma unroll
            for (int i = 0; i < kFeatures / kWeightRows; ++i) {
                const int together = weight_row(w, first_weight + i * kWeightRows) / kRowsTogether;
                weights[i] = together * uint32_t(kRowsTogether * p.pitch / 16) + weight_piece;
            }
            const uint8_t* const weight = of_expert(p.weight, p.stride, w.tile.expert);
            const uint4* from_weights = reinterpret_cast<const uint4*>(weight);
            const uint4* from_inputs = reinterpret_cast<const uint4*>(p.x);
            for (int s = 0, all = stages(); s < all; ++s, ++step) {
                const int stage = step % kStages;
                wait_empty(step);
                // Zeros past the end of k.
                uint8_t* const to_weights = shared.weights[stage] + first_weight * kRowBytes + weight_piece * 16;
                if (s * kPiecesTogether + weight_piece < weight_pieces) {
#pragma unroll
                    for (int i = 0; i < kFeatures / kWeightRows; ++i) {
                        copy_async(to_weights + i * kWeightRows * kRowBytes, from_weights + weights[i], true);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < kFeatures / kWeightRows; ++i) copy_async(to_weights + i * kWeightRows * kRowBytes, p.x, false);
                }
                from_weights += kPiecesTogether;
#pragma unroll
                for (int chunk = 0; chunk < kStageChunks; ++chunk) {
                    bf16* const to_inputs = swizzled(shared.inputs[stage][chunk], first_row, piece);
                    if ((s * kStageChunks + chunk) * kPieces + piece < pieces) {
#pragma unroll
                        for (int i = 0; i < kTokens / kRows; ++i) copy_async(to_inputs + i * kRows * kChunk, from_inputs + inputs[i], true);
                    } else {
#pragma unroll
                        for (int i = 0; i < kTokens / kRows; ++i) copy_async(to_inputs + i * kRows * kChunk, p.x, false);
                    }
                    from_inputs += kPieces;
                }
                if constexpr (kFormat == Format::kMxfp4) {
#pragma unroll
                    for (int row = threadIdx.x; row < kFeatures; row += kWarpGroup) {
                        copy_async_of<4>(shared.beside[stage] + row, exponents_of(p, weight, weight_row(w, row)) + s * 4);
                    }
                } else if constexpr (kFormat == Format::kInt4) {
                    const uint32_t* const groups = groups_of(p, w.tile.expert) + s * stage_groups;
#pragma unroll
                    for (int row = threadIdx.x; row < kFeatures; row += kWarpGroup) {
                        const uint32_t* const from = groups + size_t(weight_row(w, row)) * p.scale_stride;
                        for (int i = 0; i < stage_groups; ++i) copy_async_of<4>(shared.beside[stage] + row * kBeside + i, from + i);
                    }
                }
                barrier_arrive_after_copies(shared.full + stage);
            }
        }
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= kStages) barrier_wait(shared.empty + step % kStages, (step / kStages - 1) & 1);
        __syncwarp();
    }

    // What a thread that multiplies looks up once.
    struct Lane {
        uint32_t shared;  // the address of all stages
        int group;
        int row;          // the first of its rows of weights
        int quad;
        int shift;        // of int4 weights: see `group_shift`

        __device__ __forceinline__ Lane(const Shared& all, int group, int shift)
            : shared(shared_address(&all)), group(group), shift(shift) {
            row = group * kGroupFeatures + threadIdx.x % kWarpGroup / kWarp * 16 + threadIdx.x % kWarp / 4;
            quad = threadIdx.x % 4;
            // The compiler would look them up in the loop.
            asm volatile("" : "+r"(shared), "+r"(row), "+r"(quad));
        }

        __device__ __forceinline__ uint32_t weights(int stage) const { return shared + stage * uint32_t(kFeatures * kRowBytes); }
        // Of four bits: eight `eight` of the warp's rows, the lane's words of a chunk.
        __device__ __forceinline__ uint32_t codes(int stage, int eight, int chunk) const {
            const uint32_t first = row / kRowsTogether * (kStageChunks * kWindowOfEight) + threadIdx.x % kWarp * 8;
            return weights(stage) + first + eight * (kStageChunks * kWindowOfEight) + chunk * kWindowOfEight;
        }
        __device__ __forceinline__ uint32_t inputs(int stage, int chunk) const {
            constexpr uint32_t kPanel = kTokens * kChunk * sizeof(bf16);
            return shared + uint32_t(offsetof(Shared, inputs)) + (stage * kStageChunks + chunk) * kPanel;
        }
        __device__ __forceinline__ uint32_t beside(int stage, int row, int word) const {
            return shared + uint32_t(offsetof(Shared, beside)) + (stage * (kFeatures * kBeside + 1) + row * kBeside + word) * 4;
        }
    };

    // Multiplies rows `kGroupFeatures * group` on of all work.
    __device__ __forceinline__ void consume(int count, int group) const {
        const Lane lane(shared, group, kFormat == Format::kInt4 ? group_shift(p) : 0);
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work_at(p, index, columns(), outputs());
            float acc[kProducts][kTokens / 8][4];
            for (int s = 0, all = stages(); s < all; ++s, ++step) {
                const int stage = step % kStages;
                barrier_wait(shared.full + stage, step / kStages & 1);
                fence_for_products();
                multiply(acc, s, step, lane);
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kProducts; ++i) touch(acc[i]);
            release(step - 1);
#pragma unroll
            for (int i = 0; i < kProducts; ++i) store(w, group * kGroupFeatures + i * 64, acc[i]);
        }
    }

    // Products of a stage.
    __device__ __forceinline__ void multiply(float (&acc)[kProducts][kTokens / 8][4], int s, int step, const Lane& lane) const {
        const int stage = step % kStages;
        const int chunks = min(this->chunks() - s * kStageChunks, kStageChunks);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                // Those of these rows with the chunk before have ended, and the registers of their weights are free.
                wgmma_wait<1>();
                if (chunk == 0 && i == 1 && s > 0) release(step - 1);
                uint32_t a[kChunk / 16][4];
                widen(a, lane, stage, i, chunk);
                wgmma_fence();
                const uint32_t inputs = lane.inputs(stage, chunk);
#pragma unroll
                for (int k = 0; k < kChunk / 16; ++k) {
                    const uint64_t b = rows_operand(inputs + k * uint32_t(16 * sizeof(bf16)));
                    Wgmma<kTokens>::rows(acc[i], a[k], b, s > 0 || chunk > 0 || k > 0);
                }
                wgmma_commit();
            }
        }
    }

    // A chunk of two rows of a stage, of half `i`, as left operands: of a product's 16 inputs a lane has 2 x quad and 8 + 2 x quad on.
    __device__ __forceinline__ void widen(uint32_t (&a)[kChunk / 16][4], const Lane& lane, int stage, int i, int chunk) const {
        const int row = lane.row + i * 64;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            // All inputs of each half of the chunk that this lane has.
            const uint2 codes = load_shared8(lane.codes(stage, i * (64 / kRowsTogether) + second, chunk));
            uint32_t exponents = 0;
            if constexpr (kFormat == Format::kMxfp4) exponents = load_shared4(lane.beside(stage, row + second * kRowsTogether, 0));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 wide;
                if constexpr (kFormat == Format::kMxfp4) {
                    wide = widen_e2m1(half ? codes.y : codes.x, __byte_perm(exponents, 0, 0x4440 + chunk * 2 + half));
                } else {
                    const int word = chunk * 2 + half >> lane.shift;
                    wide = widen_int4_scaled(half ? codes.y : codes.x, load_shared4(lane.beside(stage, row + second * kRowsTogether, word)));
                }
                a[half * 2][second] = wide.x, a[half * 2][second + 2] = wide.y;
                a[half * 2 + 1][second] = wide.z, a[half * 2 + 1][second + 2] = wide.w;
            }
        }
    }

    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + step % kStages);
    }

    // Sums of rows `row` on of a piece of work, 64 of them.
    __device__ __forceinline__ void store(const Work& w, int row, const float (&acc)[kTokens / 8][4]) const {
        const int warp = threadIdx.x % kWarpGroup / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4;
        row += warp * 16;
        const int low = weight_row(w, row + group), high = weight_row(w, row + group + 8);
        const bf16* const bias = of_expert(p.bias, p.stride, w.tile.expert);
        const auto more = [&](int at) { return bias != nullptr ? __bfloat162float(bias[at]) : 0.0f; };
        const float low_bias = more(low), high_bias = more(high);
        // After the transposition a lane has two neighbouring outputs of a row of x.
        const int output = w.first + (gated() ? row / 2 : row) + quad * 2;
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
            const int token = j * 8 + group;
            if (j * 8 >= w.tile.count) break;
            float a[2], b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                a[i] = fmaf(acc[j][i], kSumScale<kFormat>, low_bias), b[i] = fmaf(acc[j][i + 2], kSumScale<kFormat>, high_bias);
                if (gated()) a[i] = activate(p.kind, a[i], b[i]);
            }
            const uint32_t first = transpose(pack(a[0], a[1]));
            bf16* const out = p.out + size_t(w.tile.first + token) * p.n + output;
            const bool wanted = token < w.tile.count;
            if (wanted && output < p.n) *reinterpret_cast<uint32_t*>(out) = first;
            if (!gated()) {
                const uint32_t second = transpose(pack(b[0], b[1]));
                if (wanted && output + 8 < p.n) *reinterpret_cast<uint32_t*>(out + 8) = second;
            }
        }
    }
};

template <int kTokens, Format kFormat>
__device__ __forceinline__ void product(const Problem& p) {
    using E = Experts<kTokens, kFormat>;
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename E::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    run_warp_groups<kProducerRegisters, kConsumerRegisters>(E{p, shared});
}

#else

template <int kTokens, Format kFormat>
__device__ __forceinline__ void product(const Problem&) {}

#endif

}  // namespace

#define PRODUCTS(NAME, FORMAT)                                       \
    EXPERT_PRODUCT(NAME##_64, kThreads, 1, (product<64, FORMAT>))    \
    EXPERT_PRODUCT(NAME##_128, kThreads, 1, (product<128, FORMAT>))

PRODUCTS(moe_hopper_mxfp4, Format::kMxfp4)
PRODUCTS(moe_hopper_int4, Format::kInt4)
