// Mixtures of experts: the products of tiles of many rows by products of warp groups (sm_90a), in place of those of moe.cu.
//
// A block of threads stays and takes one piece of work after the other: a tile of 64 or 128 rows of x times 256 rows of weights, of a
// gated product 128 of the gate and the same of the up projection, in groups of eight, so that both sums of an output are in one
// thread. One warp group copies, ahead of the two that multiply 128 rows of weights each. Weights are bf16: for those in eight or four bits,
// widened by the warp group that copies, moe.cu was faster (323 TFLOP/s of MXFP4 against 297 on an H200).
#include "experts.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kThreads = 3 * 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFeatures = 256;  // rows of weights of a piece of work
constexpr int kConsumers = 2;
constexpr int kGroupFeatures = kFeatures / kConsumers;
constexpr int kProducts = kGroupFeatures / 64;  // side by side, of a warp group
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == 3 * 168, "registers of the warp groups");

template <int kTokens>
struct Experts {
    static constexpr int kStages = kTokens == 128 ? 4 : 5;

    struct __align__(1024) Shared {
        bf16 weights[kStages][kFeatures * kChunk];
        bf16 inputs[kStages][kTokens * kChunk];
        uint64_t full[kStages], empty[kStages];
    };

    // A piece of work.
    struct Work {
        Tile tile;
        int first;  // output
    };

    const Problem& p;
    Shared& shared;

    __device__ __forceinline__ bool gated() const { return p.kind != kPlain; }
    __device__ __forceinline__ int outputs() const { return gated() ? kFeatures / 2 : kFeatures; }
    __device__ __forceinline__ int columns() const { return (p.n + outputs() - 1) / outputs(); }
    __device__ __forceinline__ int chunks() const { return (p.k + kChunk - 1) / kChunk; }

    __device__ __forceinline__ Work work(int index) const {
        const int columns = this->columns();
        return {p.tiles[1 + index / columns], index % columns * outputs()};
    }

    // The row of the expert's weights that is row `row` of a piece of work. Those past the end repeat the last one.
    __device__ __forceinline__ int weight_row(const Work& w, int row) const {
        if (!gated()) return min(w.first + row, p.n - 1);
        return min(w.first + row / 16 * 8 + row % 8, p.n - 1) + (row % 16 < 8 ? 0 : p.n);
    }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, kWarpGroup);
                barrier_init(shared.empty + i, kConsumers * kWarpGroup / kWarp);
            }
        }
        __syncthreads();
        pdl_launch();
        pdl_wait();
        const int count = p.tiles[0].count * columns();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            give_registers<kProducerRegisters>();
            produce(count);
        } else {
            take_registers<kConsumerRegisters>();
            consume(count, group - 1);
        }
    }

    // Copies all chunks of all work.
    __device__ __forceinline__ void produce(int count) const {
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work(index);
            // This thread copies the same piece of some rows: where they begin, in pieces of 16 bytes. A row is the same in each eight.
            constexpr int kPieces = kChunk / 8, kRows = kWarpGroup / kPieces;
            const int piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces, row_pieces = p.k / 8;
            uint32_t inputs[kTokens / kRows], weights[kFeatures / kRows];
#pragma unroll
            for (int i = 0; i < kTokens / kRows; ++i) {
                inputs[i] = p.input_row(w.tile.first + min(first_row + i * kRows, w.tile.count - 1)) * row_pieces + piece;
            }
#pragma unroll
            for (int i = 0; i < kFeatures / kRows; ++i) weights[i] = weight_row(w, first_row + i * kRows) * row_pieces + piece;
            const uint4* from_weights = reinterpret_cast<const uint4*>(of_expert(p.weight, p.stride, w.tile.expert));
            const uint4* from_inputs = reinterpret_cast<const uint4*>(p.x);
            for (int left = row_pieces - piece; left > -piece; left -= kPieces, ++step) {
                const int stage = step % kStages;
                wait_empty(step);
                bf16* const to_weights = swizzled(shared.weights[stage], first_row, piece);
                bf16* const to_inputs = swizzled(shared.inputs[stage], first_row, piece);
                if (left > 0) {
#pragma unroll
                    for (int i = 0; i < kFeatures / kRows; ++i) copy_async(to_weights + i * kRows * kChunk, from_weights + weights[i], true);
#pragma unroll
                    for (int i = 0; i < kTokens / kRows; ++i) copy_async(to_inputs + i * kRows * kChunk, from_inputs + inputs[i], true);
                } else {
                    // Zeros past the end of k.
#pragma unroll
                    for (int i = 0; i < kFeatures / kRows; ++i) copy_async(to_weights + i * kRows * kChunk, p.x, false);
#pragma unroll
                    for (int i = 0; i < kTokens / kRows; ++i) copy_async(to_inputs + i * kRows * kChunk, p.x, false);
                }
                barrier_arrive_after_copies(shared.full + stage);
                from_weights += kPieces, from_inputs += kPieces;
            }
        }
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= kStages) barrier_wait(shared.empty + step % kStages, (step / kStages - 1) & 1);
        __syncwarp();
    }

    // Multiplies rows `kGroupFeatures * group` on of all work.
    __device__ __forceinline__ void consume(int count, int group) const {
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work(index);
            float acc[kProducts][kTokens / 8][4];
            for (int chunk = 0, chunks = this->chunks(); chunk < chunks; ++chunk, ++step) {
                const int stage = step % kStages;
                barrier_wait(shared.full + stage, step / kStages & 1);
                fence_for_products();
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kChunk; k += 16) {
                    const uint64_t b = rows_operand(shared.inputs[stage] + k);
#pragma unroll
                    for (int i = 0; i < kProducts; ++i) {
                        const uint64_t a = rows_operand(shared.weights[stage] + (group * kGroupFeatures + i * 64) * kChunk + k);
                        Wgmma<kTokens>::rows(acc[i], a, b, chunk > 0 || k > 0);
                    }
                }
                wgmma_commit();
                // While the products of this chunk begin those of the one before end.
                wgmma_wait<1>();
                if (chunk > 0) release(step - 1);
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kProducts; ++i) touch(acc[i]);
            release(step - 1);
#pragma unroll
            for (int i = 0; i < kProducts; ++i) store(w, group * kGroupFeatures + i * 64, acc[i]);
        }
    }

    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + step % kStages);
    }

    // Eight rows of eight bf16, a row in four lanes, to rows that were columns.
    __device__ __forceinline__ static uint32_t transpose(uint32_t pair) {
        uint32_t out;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
        return out;
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
                a[i] = acc[j][i] + low_bias, b[i] = acc[j][i + 2] + high_bias;
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

template <int kTokens>
__device__ __forceinline__ void product(const Problem& p) {
    using E = Experts<kTokens>;
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename E::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    E{p, shared}();
}

#else

template <int kTokens>
__device__ __forceinline__ void product(const Problem&) {}

#endif

}  // namespace

EXPERT_PRODUCT(moe_hopper_bf16_64, kThreads, 1, product<64>)
EXPERT_PRODUCT(moe_hopper_bf16_128, kThreads, 1, product<128>)
