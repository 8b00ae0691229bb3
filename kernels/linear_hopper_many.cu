// Linear layers of up to 512 rows by the matrix instructions of warp groups (wgmma, sm_90a): out[m, n] = x[m, k] . weight[n, k]^T (+ bias), or
// activation(gate) * up of weights [2 n, k]. x and weights are bf16, or e4m3 with a factor for each row of either; sums of e4m3 have the bits
// that the tensor cores keep, as those of linear_hopper.cu.
//
// A tile is `kRows` rows of x times `kWeights` rows of weights, of a gated product half of them gates and half the same rows of the up
// projection. It is computed in stages of 128 bytes of each row: the copy engine (TMA) fills a ring of them, started by one thread, and each of
// the other warp groups multiplies 64 rows of x by all weights of the tile. Blocks are persistent: the next tile is copied while sums are stored.
//
// Clusters: with more than one tile of rows, two blocks have the same weights, each brings half of them for both, and its own rows of x.
// Where there are fewer tiles than multiprocessors, two blocks have a tile together, each half of its inputs: at the end each gets the sums of
// half of the warps from the other, in the memory of its ring.
#include "activation.cuh"
#include "cluster.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace {

struct Problem {
    const TensorMap* x;          // of [m, k]; a copy has `kRows` rows
    const TensorMap* weight;     // of [n, k], or if gated [2 n, k]: gate, up; a copy has half the rows of a tile
    const float* x_scales;       // [m], of e4m3 values
    const float* weight_scales;  // [n] or [2 n], of e4m3 values
    const bf16* bias;            // [n]; null for none, with outputs in f32, and if gated
    void* out;                   // [m] rows that begin `pitch` apart
    int m, n, k, pitch;          // n and pitch are multiples of 8, rows of x of 16 bytes
    int mode, activation;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kRowBytes = 128;          // of a stage
constexpr int kMostShared = 227 << 10;  // of a block
constexpr int kGroupWarps = kWarpGroup / kWarp;

// A stage of the ring, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// Stores four sums in a block of the cluster, and tells a barrier there.
__device__ __forceinline__ void store_async(uint32_t to, const float (&v)[4], uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
                 : "memory");
}

template <bool kFp8, int kRows, int kWeights, int kParts>
struct Linear {
    static constexpr int kConsumers = kRows / 64;  // warp groups that multiply, behind one that copies
    // Where sums are many: the threads that copy leave registers to the others.
    static constexpr bool kMovesRegisters = kConsumers > 1 && kWeights >= 192;
    // Instructions for all weights of a tile. With 512 threads the compiler plans 128 registers a thread; one instruction with 112 sums leaves
    // too few, so there are two.
    static constexpr int kInstructions = kConsumers > 2 && kWeights > 192 ? 2 : 1;
    static constexpr int kConsumerThreads = kConsumers * kWarpGroup;
    static constexpr int kHalf = kWeights / 2;  // rows of weights of a copy
    static constexpr int kEights = kHalf / 8;
    static constexpr int kStageBytes = (kRows + kWeights) * kRowBytes;
    // As many as fit, as `stages` in crates/kernels/src/cuda/linear/many.rs says too.
    static constexpr int kStages = (kMostShared - 6144) / kStageBytes;
    static constexpr int kOwnWarps = kGroupWarps / kParts;  // of a group, whose outputs a block stores
    static constexpr int kSumBytes = 2 * kEights * kWarp * sizeof(float4);  // of a warp

    struct __align__(1024) Shared {
        uint8_t inputs[kStages][kRows * kRowBytes];
        uint8_t weights[kStages][kWeights * kRowBytes];
        float scales[kFp8 ? kConsumers : 1][kWeights];  // of a tile's weights
        uint64_t full[kStages], empty[kStages];
        uint64_t sums[kConsumers][kOwnWarps];
    };
    static_assert(kHalf % 8 == 0, "copies begin at multiples of 1024 bytes");
    static_assert(kParts == 1 || kInstructions == 1, "sums of a single instruction are exchanged");
    static_assert(kParts == 1 || kParts == 2, "each block has sums of one other");
    static_assert((kParts - 1) * kConsumers * kOwnWarps * kSumBytes <= kStages * kStageBytes, "sums of the other fit in the ring");

    // The first row of x and the first output of a tile. Output i is row i of the weights, or of the gates.
    struct Tile {
        int row, column;
    };

    const Problem& p;
    Shared& shared;
    Group cluster;
    int sharers;  // blocks that have the same weights: 1 or 2
    int rank;     // part * sharers + row

    __device__ __forceinline__ bool is_gated() const { return p.mode == kGlu; }
    __device__ __forceinline__ int row_tiles() const { return (p.m + kRows - 1) / kRows; }
    __device__ __forceinline__ int outputs() const { return is_gated() ? kHalf : kWeights; }
    // This block among those that have the same weights, and its part of the inputs.
    __device__ __forceinline__ int row_rank() const { return rank & (sharers - 1); }
    __device__ __forceinline__ int part() const { return rank >> (sharers - 1); }
    // A work item is a tile for each sharer; those of neighbouring rows, which share weights, follow each other.
    __device__ __forceinline__ int row_groups() const { return (row_tiles() + sharers - 1) / sharers; }
    __device__ __forceinline__ int work_items() const { return (p.n + outputs() - 1) / outputs() * row_groups(); }
    __device__ __forceinline__ int first_work() const { return blockIdx.x / cluster.parts; }
    __device__ __forceinline__ int work_step() const { return gridDim.x / cluster.parts; }

    __device__ __forceinline__ Tile tile_at(int work) const {
        const int column = work / row_groups(), row = work % row_groups() * sharers + row_rank();
        return {row * kRows, column * outputs()};
    }

    // Of a tile, those that this block's part begins with and ends before.
    __device__ __forceinline__ int2 stages() const {
        constexpr int kStageInputs = kRowBytes / (kFp8 ? 1 : sizeof(bf16));
        const int all = (p.k + kStageInputs - 1) / kStageInputs;
        return make_int2(all * part() / kParts, all * (part() + 1) / kParts);
    }

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, 1);
                barrier_init(shared.empty + i, sharers * kConsumerThreads / kWarp);
            }
            for (int i = 0; i < kConsumers * kOwnWarps; ++i) barrier_init(&shared.sums[0][0] + i, 1);
            fence_barrier_init();
            // The copy engine sees them.
            fence_for_products();
        }
        cluster.sync();
        pdl_launch();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            if constexpr (kMovesRegisters) give_registers<kConsumers == 2 ? 40 : 32>();
            if (threadIdx.x == 0) produce();
            __syncwarp();
            if constexpr (kParts > 1) cluster.sync();
        } else {
            if constexpr (kMovesRegisters) take_registers<kConsumers == 2 ? 232 : 160>();
            consume(group - 1);
        }
        // No block ends while another one tells it that weights are used.
        cluster.arrive();
        cluster.wait();
    }

    // By one thread.
    __device__ __forceinline__ void produce() const {
        const int2 own = stages();
        const int count = own.y - own.x, ahead = min(count, kStages);
        // Weights never change, so as many as fit are on their way before the wait for the kernel ahead.
        const Tile first = tile_at(first_work());
        for (int i = 0; i < ahead; ++i) begin_stage(first, own.x + i, i);
        pdl_wait();
        Ring<kStages> ring;
        int step = 0;
        for (int work = first_work(); work < work_items(); work += work_step()) {
            const Tile tile = tile_at(work);
            for (int i = own.x; i < own.y; ++i, ++step, ring.advance()) {
                if (step >= ahead) {
                    barrier_wait(shared.empty + ring.stage, ring.phase ^ 1);
                    begin_stage(tile, i, ring.stage);
                }
                copy_tensor(shared.inputs[ring.stage], *p.x, make_int2(i * kRowBytes, tile.row), shared.full + ring.stage);
            }
        }
    }

    // Announces the bytes of a stage and begins to copy its weights. Rows past the last gate are the first ones of the up projection, and those past
    // the end zeros; their outputs are not stored.
    __device__ __forceinline__ void begin_stage(const Tile& tile, int stage_of_k, int stage) const {
        uint64_t* const full = shared.full + stage;
        barrier_expect_bytes(full, kStageBytes);
        const auto from = [&](int half) { return make_int2(stage_of_k * kRowBytes, tile.column + half * (is_gated() ? p.n : kHalf)); };
        if (sharers == 1) {
            copy_tensor(shared.weights[stage], *p.weight, from(0), full);
            copy_tensor(shared.weights[stage] + kHalf * kRowBytes, *p.weight, from(1), full);
        } else {
            const int half = row_rank();
            copy_tensor(shared.weights[stage] + half * kHalf * kRowBytes, *p.weight, from(half), full, uint16_t(3 << (rank - half)));
        }
    }

    __device__ __forceinline__ void consume(int group) const {
        const uint64_t inputs = rows_operand(shared_address(shared.inputs) + uint32_t(group * 64 * kRowBytes));
        const uint64_t weights = rows_operand(shared_address(shared.weights));
        const int lane = threadIdx.x % kWarp;
        const int2 own = stages();
        // The first lanes of a warp tell one sharer each that a stage is free; these are that block's barriers.
        const bool tells = lane < sharers;
        const uint32_t empty = cluster_address(shared_address(shared.empty), tells ? rank ^ lane : rank);
        const auto release = [&](int stage) {
            if (tells) barrier_arrive_at(empty + uint32_t(stage * sizeof(uint64_t)));
        };
        // Before the first write: the kernel ahead may read what is written.
        pdl_wait();
        Ring<kStages> ring;
        for (int work = first_work(); work < work_items(); work += work_step()) {
            const Tile tile = tile_at(work);
            const Scales scales(*this, tile, group);
            float acc[kInstructions][2 * kEights / kInstructions][4];
            int last = 0;
            for (int i = own.x; i < own.y; ++i) {
                barrier_wait(shared.full + ring.stage, ring.phase);
                const uint64_t a = inputs + uint32_t(ring.stage * (kRows * kRowBytes / 16));
                const uint64_t b = weights + uint32_t(ring.stage * (kWeights * kRowBytes / 16));
                wgmma_fence();
#pragma unroll
                for (int at = 0; at < kRowBytes; at += 32) {
#pragma unroll
                    for (int j = 0; j < kInstructions; ++j) {
                        const uint64_t own_weights = b + uint32_t((j * kHalf * kRowBytes + at) / 16);
                        if constexpr (kFp8) {
                            Wgmma<kWeights / kInstructions>::rows_fp8(acc[j], a + at / 16, own_weights, i > own.x || at > 0);
                        } else {
                            Wgmma<kWeights / kInstructions>::rows(acc[j], a + at / 16, own_weights, i > own.x || at > 0);
                        }
                    }
                }
                wgmma_commit();
                // The products of this stage run while those of the one before end.
                wgmma_wait<1>();
                if (i > own.x) release(last);
                last = ring.stage;
                ring.advance();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < kInstructions; ++j) touch(acc[j]);
            release(last);
            scales.publish(*this, group);
            if constexpr (kParts > 1) {
                if (!add_other_part(acc[0], group)) continue;
            }
            const auto sum = [&](int half, int i) {
                const float(&v)[4] = (&acc[0][0])[half * kEights + i];
                if constexpr (!kFp8) return make_float4(v[0], v[1], v[2], v[3]);
                const int at = half * kHalf + i * 8 + threadIdx.x % 4 * 2;
                const float2 factor = *reinterpret_cast<const float2*>(shared.scales[group] + at);
                return make_float4(v[0] * scales.low * factor.x, v[1] * scales.low * factor.y, v[2] * scales.high * factor.x,
                                   v[3] * scales.high * factor.y);
            };
            store(tile, group, sum);
        }
    }

    // Factors of a tile: of two rows of x, and of its weights, which threads of a group load early and share before they are used.
    struct Scales {
        static constexpr int kOwn = (kWeights + kWarpGroup - 1) / kWarpGroup;
        float low, high, weights[kOwn];

        __device__ __forceinline__ Scales(const Linear& linear, const Tile& tile, int group) {
            if constexpr (!kFp8) return;
            const Problem& p = linear.p;
            const int row = linear.first_row(tile, group);
            low = __ldcg(p.x_scales + min(row, p.m - 1));
            high = __ldcg(p.x_scales + min(row + 8, p.m - 1));
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int at = threadIdx.x % kWarpGroup + i * kWarpGroup, half = at / kHalf;
                const int output = tile.column + (linear.is_gated() ? at - half * kHalf : at);
                weights[i] = output < p.n && at < kWeights ? __ldg(p.weight_scales + (linear.is_gated() ? half * p.n : 0) + output) : 0.0f;
            }
        }

        __device__ __forceinline__ void publish(const Linear& linear, int group) const {
            if constexpr (!kFp8) return;
            // Those of the tile before are no longer read.
            group_sync(1 + group);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int at = threadIdx.x % kWarpGroup + i * kWarpGroup;
                if (at < kWeights) linear.shared.scales[group][at] = weights[i];
            }
            group_sync(1 + group);
        }
    };

    // Gives this warp's sums to the block of the tile that stores its outputs, or if that is this one adds those of the other.
    __device__ __forceinline__ bool add_other_part(float (&acc)[2 * kEights][4], int group) const {
        // No block uses its ring any more.
        cluster.sync();
        const int warp = threadIdx.x % kWarpGroup / kWarp, own_warp = warp % kOwnWarps;
        uint64_t* const barrier = &shared.sums[group][own_warp];
        const uint32_t offset = (group * kOwnWarps + own_warp) * kSumBytes + threadIdx.x % kWarp * sizeof(float4);
        const uint32_t place = shared_address(shared.inputs) + offset;
        if (warp / kOwnWarps != part()) {
            const int other = rank ^ sharers;
            const uint32_t to = cluster_address(place, other), told = cluster_address(shared_address(barrier), other);
#pragma unroll
            for (int i = 0; i < 2 * kEights; ++i) store_async(to + i * kWarp * sizeof(float4), acc[i], told);
            return false;
        }
        if (threadIdx.x % kWarp == 0) barrier_expect_bytes(barrier, kSumBytes);
        barrier_wait(barrier, 0);
        // The same bits whichever block adds: a sum of two does not depend on their order.
#pragma unroll
        for (int i = 0; i < 2 * kEights; ++i) {
            const uint4 v = load_shared16(place + i * kWarp * sizeof(float4));
            acc[i][0] += __uint_as_float(v.x), acc[i][1] += __uint_as_float(v.y);
            acc[i][2] += __uint_as_float(v.z), acc[i][3] += __uint_as_float(v.w);
        }
        return true;
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

template <bool kFp8, int kRows, int kWeights, int kParts>
__device__ __forceinline__ void run(const Problem& p) {
    using L = Linear<kFp8, kRows, kWeights, kParts>;
    static_assert(sizeof(typename L::Shared) + 1024 <= kMostShared, "a block's shared memory, and room to align it");
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename L::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    const int sharers = p.m > kRows ? 2 : 1;
    const Group cluster{sharers * kParts};
    L{p, shared, cluster, sharers, cluster.parts > 1 ? cluster.rank() : 0}();
}

#else

template <bool kFp8, int kRows, int kWeights, int kParts>
__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

// One block per multiprocessor, in clusters of those that have the same weights or tile. With two parts, as many clusters as there are tiles.
#define LINEAR_HOPPER_MANY(NAME, FP8, ROWS, WEIGHTS, PARTS)                                                                            \
    extern "C" __global__ void __launch_bounds__((1 + ROWS / 64) * 128, 1)                                                             \
        NAME##_##ROWS##x##WEIGHTS##_##PARTS(                                                                                           \
            const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const float* x_scales,                      \
            const float* weight_scales, const bf16* bias, void* out, int m, int n, int k, int pitch, int mode, int activation) {       \
        run<FP8, ROWS, WEIGHTS, PARTS>({&x, &weight, x_scales, weight_scales, bias, out, m, n, k, pitch, mode, activation});           \
    }

#define LINEAR_HOPPER_MANY_BF16(ROWS, WEIGHTS) LINEAR_HOPPER_MANY(linear_hopper_many, false, ROWS, WEIGHTS, 1)
LINEAR_HOPPER_MANY_BF16(128, 192)
LINEAR_HOPPER_MANY_BF16(128, 224)
LINEAR_HOPPER_MANY_BF16(128, 256)
LINEAR_HOPPER_MANY_BF16(192, 192)
LINEAR_HOPPER_MANY_BF16(192, 224)

#define LINEAR_HOPPER_MANY_FP8(ROWS, WEIGHTS, PARTS) LINEAR_HOPPER_MANY(linear_hopper_many_fp8, true, ROWS, WEIGHTS, PARTS)
LINEAR_HOPPER_MANY_FP8(64, 128, 2)
LINEAR_HOPPER_MANY_FP8(64, 224, 1)
LINEAR_HOPPER_MANY_FP8(128, 64, 1)
LINEAR_HOPPER_MANY_FP8(128, 64, 2)
LINEAR_HOPPER_MANY_FP8(128, 224, 1)
LINEAR_HOPPER_MANY_FP8(192, 64, 1)
LINEAR_HOPPER_MANY_FP8(192, 96, 1)
LINEAR_HOPPER_MANY_FP8(192, 224, 1)
