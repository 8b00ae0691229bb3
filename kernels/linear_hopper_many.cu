// Linear layers of 65 to 512 rows by the matrix instructions of warp groups (wgmma, sm_90a), in bf16: out[m, n] = x[m, k] . weight[n, k]^T
// (+ bias), or activation(gate) * up of weights [2 n, k].
//
// A tile is `kRows` rows of x times `kWeights` rows of weights, of a gated product half of them gates and half the same rows of the up
// projection. It is computed in stages of 64 inputs: the copy engine (TMA) fills a ring of them, started by one thread, and each of the
// other warp groups multiplies 64 rows of x by all weights of the tile. Blocks are persistent: the next tile is copied while sums are stored.
//
// Clusters: with more than one tile of rows, two blocks have the same weights, each brings half of them for both, and its own rows of x.
#include "activation.cuh"
#include "cluster.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace {

struct Problem {
    const TensorMap* x;       // of [m, k]; a copy has `kRows` rows
    const TensorMap* weight;  // of [n, k], or if gated [2 n, k]: gate, up; a copy has half the rows of a tile
    const bf16* bias;         // [n]; null for none, with outputs in f32, and if gated
    void* out;                // [m] rows that begin `pitch` apart
    int m, n, k, pitch;       // n and pitch are multiples of 8
    int mode, activation;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kRowBytes = 128;  // of a stage
constexpr int kStageInputs = kRowBytes / 2;
constexpr int kMostShared = 227 << 10;  // of a block

// A stage of the ring, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

template <int kRows, int kWeights>
struct Linear {
    static constexpr int kConsumers = kRows / 64;  // warp groups that multiply, behind one that copies
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    // Instructions for all weights of a tile. With 512 threads the compiler plans 128 registers a thread; one instruction with 112 sums leaves
    // too few, so there are two.
    static constexpr int kInstructions = kConsumers > 2 && kWeights > 192 ? 2 : 1;
    static constexpr int kConsumerThreads = kConsumers * kWarpGroup;
    static constexpr int kHalf = kWeights / 2;  // rows of weights of a copy
    static constexpr int kEights = kHalf / 8;
    static constexpr int kStageBytes = (kRows + kWeights) * kRowBytes;
    // As many as fit, as `stages` in crates/kernels/src/cuda/linear/many.rs says too.
    static constexpr int kStages = (kMostShared - 2048) / kStageBytes;

    struct __align__(1024) Shared {
        uint8_t inputs[kStages][kRows * kRowBytes];
        uint8_t weights[kStages][kWeights * kRowBytes];
        uint64_t full[kStages], empty[kStages];
    };
    static_assert(kHalf % 8 == 0, "copies begin at multiples of 1024 bytes");

    // The first row of x and the first output of a tile. Output i is row i of the weights, or of the gates.
    struct Tile {
        int row, column;
    };

    const Problem& p;
    Shared& shared;
    Group cluster;  // blocks that have the same weights: 1 or 2
    int rank;

    __device__ __forceinline__ bool is_gated() const { return p.mode == kGlu; }
    __device__ __forceinline__ int row_tiles() const { return (p.m + kRows - 1) / kRows; }
    __device__ __forceinline__ int outputs() const { return is_gated() ? kHalf : kWeights; }
    // A work item is a tile for each block of a cluster; those of neighbouring rows, which share weights, follow each other.
    __device__ __forceinline__ int row_groups() const { return (row_tiles() + cluster.parts - 1) / cluster.parts; }
    __device__ __forceinline__ int work_items() const { return (p.n + outputs() - 1) / outputs() * row_groups(); }
    __device__ __forceinline__ int first_work() const { return blockIdx.x / cluster.parts; }
    __device__ __forceinline__ int work_step() const { return gridDim.x / cluster.parts; }

    __device__ __forceinline__ Tile tile_at(int work) const {
        const int column = work / row_groups(), row = work % row_groups() * cluster.parts + rank;
        return {row * kRows, column * outputs()};
    }

    // Stages of a tile.
    __device__ __forceinline__ int stages() const { return (p.k + kStageInputs - 1) / kStageInputs; }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, 1);
                barrier_init(shared.empty + i, cluster.parts * kConsumerThreads / kWarp);
            }
            fence_barrier_init();
            // The copy engine sees them.
            fence_for_products();
        }
        cluster.sync();
        pdl_launch();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            give_registers<kProducerRegisters>();
            if (threadIdx.x == 0) produce();
            __syncwarp();
        } else {
            take_registers<kConsumerRegisters>();
            consume(group - 1);
        }
        // No block ends while another one tells it that weights are used.
        cluster.arrive();
        cluster.wait();
    }

    // By one thread.
    __device__ __forceinline__ void produce() const {
        const int count = stages(), ahead = min(count, kStages);
        // Weights never change, so as many as fit are on their way before the wait for the kernel ahead.
        const Tile first = tile_at(first_work());
        for (int i = 0; i < ahead; ++i) begin_stage(first, i, i);
        pdl_wait();
        Ring<kStages> ring;
        int step = 0;
        for (int work = first_work(); work < work_items(); work += work_step()) {
            const Tile tile = tile_at(work);
            for (int i = 0; i < count; ++i, ++step, ring.advance()) {
                if (step >= ahead) {
                    barrier_wait(shared.empty + ring.stage, ring.phase ^ 1);
                    begin_stage(tile, i, ring.stage);
                }
                copy_tensor(shared.inputs[ring.stage], *p.x, make_int2(i * kRowBytes, tile.row), shared.full + ring.stage);
            }
        }
    }

    // Announces the bytes of a stage and begins to copy its weights. Rows past the last gate are the first ones of the up projection, and those past the end
    // zeros; their outputs are not stored.
    __device__ __forceinline__ void begin_stage(const Tile& tile, int stage_of_k, int stage) const {
        uint64_t* const full = shared.full + stage;
        barrier_expect_bytes(full, kStageBytes);
        const auto from = [&](int half) { return make_int2(stage_of_k * kRowBytes, tile.column + half * (is_gated() ? p.n : kHalf)); };
        if (cluster.parts == 1) {
            copy_tensor(shared.weights[stage], *p.weight, from(0), full);
            copy_tensor(shared.weights[stage] + kHalf * kRowBytes, *p.weight, from(1), full);
        } else {
            copy_tensor(shared.weights[stage] + rank * kHalf * kRowBytes, *p.weight, from(rank), full, uint16_t(3));
        }
    }

    __device__ __forceinline__ void consume(int group) const {
        const uint64_t inputs = rows_operand(shared_address(shared.inputs) + uint32_t(group * 64 * kRowBytes));
        const uint64_t weights = rows_operand(shared_address(shared.weights));
        const int lane = threadIdx.x % kWarp, count = stages();
        // The first lanes of a warp tell one block each that a stage is free; these are that block's barriers.
        const bool tells = lane < cluster.parts;
        const uint32_t empty = cluster_address(shared_address(shared.empty), tells ? lane : 0);
        const auto release = [&](int stage) {
            if (tells) barrier_arrive_at(empty + uint32_t(stage * sizeof(uint64_t)));
        };
        // Before the first write: the kernel ahead may read what is written.
        pdl_wait();
        Ring<kStages> ring;
        for (int work = first_work(); work < work_items(); work += work_step()) {
            float acc[kInstructions][2 * kEights / kInstructions][4];
            int last = 0;
            for (int i = 0; i < count; ++i) {
                barrier_wait(shared.full + ring.stage, ring.phase);
                const uint64_t a = inputs + uint32_t(ring.stage * (kRows * kRowBytes / 16));
                const uint64_t b = weights + uint32_t(ring.stage * (kWeights * kRowBytes / 16));
                wgmma_fence();
#pragma unroll
                for (int at = 0; at < kRowBytes; at += 32) {
#pragma unroll
                    for (int j = 0; j < kInstructions; ++j) {
                        const uint64_t own = b + uint32_t((j * kHalf * kRowBytes + at) / 16);
                        Wgmma<kWeights / kInstructions>::rows(acc[j], a + at / 16, own, i > 0 || at > 0);
                    }
                }
                wgmma_commit();
                // The products of this stage run while those of the one before end.
                wgmma_wait<1>();
                if (i > 0) release(last);
                last = ring.stage;
                ring.advance();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < kInstructions; ++j) touch(acc[j]);
            release(last);
            const Tile tile = tile_at(work);
            const auto sum = [&](int half, int i) {
                const float(&v)[4] = (&acc[0][0])[half * kEights + i];
                return make_float4(v[0], v[1], v[2], v[3]);
            };
            store(tile, group, sum);
        }
    }

    // Stores outputs of both halves of a tile, whose sums are `sum(half, i)`: this thread has two of each eight, of two rows of x.
    template <typename Sum>
    __device__ __forceinline__ void store(const Tile& tile, int group, const Sum& sum) const {
        if (p.mode == kGlu) {
            const auto activate = [&](float gate, float up) { return activated(Activation(p.activation), gate, up); };
            store_bf16(tile, group, 0, [&](int i, int) {
                const float4 v = sum(0, i), up = sum(1, i);
                return make_float4(activate(v.x, up.x), activate(v.y, up.y), activate(v.z, up.z), activate(v.w, up.w));
            });
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (p.mode == kF32) {
                store_f32(tile, group, half, [&](int i) { return sum(half, i); });
                continue;
            }
            store_bf16(tile, group, half, [&](int i, int column) {
                float4 v = sum(half, i);
                if (p.bias != nullptr && column < p.n) {
                    const float2 more = __bfloat1622float2(*reinterpret_cast<const bf162*>(p.bias + column));
                    v.x += more.x, v.y += more.y, v.z += more.x, v.w += more.y;
                }
                return v;
            });
        }
    }

    // This thread's first row of x.
    __device__ __forceinline__ int first_row(const Tile& tile, int group) const {
        return tile.row + group * 64 + threadIdx.x % kWarpGroup / kWarp * 16 + threadIdx.x % kWarp / 4;
    }

    // Four lanes have a row's outputs in twos, `finished(i, column)`; each stores eight of them.
    template <typename Finished>
    __device__ __forceinline__ void store_bf16(const Tile& tile, int group, int half, const Finished& finished) const {
        const int quad = threadIdx.x % 4, row = first_row(tile, group), column = tile.column + half * kHalf;
#pragma unroll
        for (int j = 0; j < kEights; j += 4) {
            if (column + j * 8 >= p.n) break;
            uint32_t pairs[2][4];
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const int i = j + at < kEights ? j + at : kEights - 1;
                const float4 v = finished(i, column + i * 8 + quad * 2);
                pairs[0][at] = pack(v.x, v.y), pairs[1][at] = pack(v.z, v.w);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 outputs = transpose_quads(pairs[i]);
                const int own_row = row + i * 8, own = column + (j + quad) * 8;
                if (j + quad >= kEights || own >= p.n || own_row >= p.m) continue;
                *reinterpret_cast<uint4*>(static_cast<bf16*>(p.out) + size_t(own_row) * p.pitch + own) = outputs;
            }
        }
    }

    template <typename Finished>
    __device__ __forceinline__ void store_f32(const Tile& tile, int group, int half, const Finished& finished) const {
        const int row = first_row(tile, group), column = tile.column + half * kHalf + threadIdx.x % 4 * 2;
        float* const to = static_cast<float*>(p.out) + size_t(row) * p.pitch + column;
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            if (column + j * 8 >= p.n) break;
            const float4 v = finished(j);
            if (row < p.m) *reinterpret_cast<float2*>(to + j * 8) = make_float2(v.x, v.y);
            if (row + 8 < p.m) *reinterpret_cast<float2*>(to + size_t(8) * p.pitch + j * 8) = make_float2(v.z, v.w);
        }
    }
};

template <int kRows, int kWeights>
__device__ __forceinline__ void run(const Problem& p) {
    using L = Linear<kRows, kWeights>;
    static_assert(sizeof(typename L::Shared) + 1024 <= kMostShared, "a block's shared memory, and room to align it");
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename L::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    const Group cluster{p.m > kRows ? 2 : 1};
    L{p, shared, cluster, cluster.parts > 1 ? cluster.rank() : 0}();
}

#else

template <int kRows, int kWeights>
__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

// One block per multiprocessor, with more than one tile of rows in clusters of two.
#define LINEAR_HOPPER_MANY(ROWS, WEIGHTS)                                                                                              \
    extern "C" __global__ void __launch_bounds__((1 + ROWS / 64) * 128, 1)                                                             \
        linear_hopper_many_##ROWS##x##WEIGHTS(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,           \
                                              const bf16* bias, void* out, int m, int n, int k, int pitch, int mode, int activation) { \
        run<ROWS, WEIGHTS>({&x, &weight, bias, out, m, n, k, pitch, mode, activation});                                                \
    }

LINEAR_HOPPER_MANY(128, 192)
LINEAR_HOPPER_MANY(128, 224)
LINEAR_HOPPER_MANY(128, 256)
LINEAR_HOPPER_MANY(192, 192)
LINEAR_HOPPER_MANY(192, 224)
