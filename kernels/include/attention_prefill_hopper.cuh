// Attention of many query rows by products of warp groups (sm_90a). One warp group copies keys and values, two
// work on 64 rows each: while one takes exponentials the tensor cores run the products of the other, and within each the
// scores of the next keys are computed beside the sums of these.
#pragma once

#include "attention_prefill.cuh"
#include "wgmma.cuh"

constexpr int kHopperThreads = 3 * 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
struct HopperPrefill : QueryTile<D, 128> {
    using Base = QueryTile<D, 128>;
    using Base::args, Base::item;
    static constexpr int kKeys = D <= 128 ? 128 : 64;
    static constexpr int kStages = 4;  // keys, values, the next keys, the next values
    static constexpr int kPanel = kKeys * 64;
    static constexpr int kTile = kKeys * D;
    static constexpr int kGroupRows = 64;
    static constexpr int kStride = D + 8;  // of results on their way out, which take the place of the queries
    static constexpr int kQueries = kGroupRows * kStride;
    static constexpr int kConsumers = 2;
    using Warp = WarpRows<D, 128, 1, kKeys / 8>;
    using Weights = float[1][kKeys / 8][4];
    using Packed = uint32_t[kKeys / 16][4];

    bf16* const queries;  // for each consumer two panels
    bf16* const ring;
    uint64_t* const full;
    uint64_t* const empty;
    const int first, last;  // tiles of keys

    __device__ __forceinline__ HopperPrefill(const PrefillArgs& args, char* shared)
        : Base(args),
          queries(reinterpret_cast<bf16*>(shared)),
          ring(queries + kConsumers * kQueries),
          full(reinterpret_cast<uint64_t*>(ring + kStages * kTile)),
          empty(full + kStages),
          first(item.begin / kKeys),
          last((item.end + kKeys - 1) / kKeys) {}

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(full + i, kWarpGroup);
                barrier_init(empty + i, kConsumers * kWarpGroup / kWarp);
            }
        }
        __syncthreads();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            give_registers<40>();
            produce();
        } else {
            take_registers<232>();
            consume(group - 1);
        }
    }

    // Copies keys and values in turns into the ring.
    __device__ __forceinline__ void produce() const {
        const int steps = 2 * (last - first);
        int arrived = 0;
        int rows = lookup(first);
        for (int step = 0; step < steps; ++step) {
            const int stage = step % kStages, tile = first + step / 2;
            if (step >= kStages) {
                const int parity = (step / kStages - 1) & 1;
                if (!barrier_done(empty + stage, parity)) {
                    // Nothing to copy for a while: hand over what is under way as soon as it is there.
                    hand_over<0>(arrived, step);
                    barrier_wait(empty + stage, parity);
                }
                __syncwarp();
            }
            load(step % 2 == 0 ? args.k : args.v, tile, rows, ring + stage * kTile);
            commit_async();
            hand_over<1>(arrived, step);
            if (step % 2 == 1 && tile + 1 < last) rows = lookup(tile + 1);
        }
        hand_over<0>(arrived, steps);
    }

    // The cache row of eight keys of a tile for every lane.
    __device__ __forceinline__ int lookup(int tile) const {
        return this->cache_row(tile * kKeys + threadIdx.x % (kKeys / 8) * 8);
    }

    // Begins to copy a tile: a thread copies the same chunk of every `kRowsAtOnce`th row.
    __device__ __forceinline__ void load(const bf16* cache, int tile, int rows, bf16* to) const {
        constexpr int kChunks = D / 8, kRowsAtOnce = kWarpGroup / kChunks;
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll 2
        for (int i = row; i < kKeys; i += kRowsAtOnce) {
            const bf16* from = cache + size_t(__shfl_sync(kAllLanes, rows, i / 8) + i % 8) * D + chunk * 8;
            copy_async(swizzled(to + chunk / 8 * kPanel, i, chunk % 8), from, this->wanted(tile * kKeys + i));
        }
    }

    // Tells the consumers of all tiles before `end` but the last `Pending`, which may still be under way.
    template <int Pending>
    __device__ __forceinline__ void hand_over(int& arrived, int end) const {
        wait_async<Pending>();
        fence_for_products();
        for (; arrived < end; ++arrived) barrier_arrive(full + arrived % kStages);
    }

    // Rows `64 * group` on.
    __device__ __forceinline__ void consume(int group) const {
        const int group_row = group * kGroupRows, count = this->rows();
        Warp warp(group_row + threadIdx.x % kWarpGroup / kWarp * 16);
        bf16* const q = queries + group * kQueries;
        load_queries(q, group_row);

        // The tiles that any row of the group sees; the others are for the other group.
        int begin = last, end = last;
        if (group_row < count) {
            begin = min(max(this->position(group_row) - (args.window - 1), first * kKeys) / kKeys, last);
            end = max(min(this->position(min(group_row + kGroupRows, count) - 1) / kKeys + 1, last), begin);
        }
        for (int tile = first; tile < begin; ++tile) skip(tile);
        float sums[1][D / 8][4] = {};
        if (begin < end) attend(warp, q, begin, end, sums);
        for (int tile = end; tile < last; ++tile) skip(tile);
        if (group_row >= count) return;
        warp.finish_total();
        if (item.partial < 0) {
            group_sync(1 + group);
            warp.template write<kStride>(*this, sums, q + (warp.row - group_row) * kStride);
        } else {
            warp.write_partial(*this, sums);
        }
    }

    __device__ __forceinline__ void load_queries(bf16* to, int group_row) const {
        constexpr int kChunks = D / 8;
        const int chunk = threadIdx.x % kChunks, count = this->rows();
#pragma unroll 4
        for (int row = threadIdx.x % kWarpGroup / kChunks; row < kGroupRows; row += kWarpGroup / kChunks) {
            const bool exists = group_row + row < count;
            const bf16* from = args.q + (exists ? this->offset(group_row + row, args.q_stride) + chunk * 8 : 0);
            copy_async(swizzled(to + chunk / 8 * kGroupRows * 64, row, chunk % 8), from, exists);
        }
        commit_async();
        wait_async<0>();
        fence_for_products();
        group_sync(1 + group_row / kGroupRows);
    }

    __device__ __forceinline__ void attend(Warp& warp, const bf16* q, int begin, int end, float (&sums)[1][D / 8][4]) const {
        Weights weights;
        Packed packed;
        float factor[1][2];
        wait_for(begin, 0);
        wgmma_fence();
        score(q, stage(begin, 0), weights[0]);
        wgmma_commit();
        wgmma_wait<0>();
        touch(weights[0]);
        release(begin, 0);
        soften(warp, begin, weights, factor);
        pack_all(weights, packed);
        for (int tile = begin + 1; tile < end; ++tile) {
            // The scores of this tile and the sums of the one before run on the tensor cores; the softmax of this tile waits
            // for the former alone.
            wait_for(tile, 0);
            wgmma_fence();
            touch(weights[0]);
            score(q, stage(tile, 0), weights[0]);
            wgmma_commit();
            wait_for(tile - 1, 1);
            wgmma_fence();
            accumulate(packed, stage(tile - 1, 1), sums[0]);
            wgmma_commit();
            wgmma_wait<1>();
            touch(weights[0]);
            release(tile, 0);
            soften(warp, tile, weights, factor);
            wgmma_wait<0>();
            touch(sums[0]);
            release(tile - 1, 1);
            warp.rescale(factor, sums);
            pack_all(weights, packed);
        }
        wait_for(end - 1, 1);
        wgmma_fence();
        touch(sums[0]);
        accumulate(packed, stage(end - 1, 1), sums[0]);
        wgmma_commit();
        wgmma_wait<0>();
        touch(sums[0]);
        release(end - 1, 1);
    }

    __device__ __forceinline__ void soften(Warp& warp, int tile, Weights& weights, float (&factor)[1][2]) const {
        const int key = tile * kKeys;
        if (key + kKeys - 1 > this->position(warp.row) || key <= this->position(warp.row + 15) - args.window) {
            warp.mask(*this, key, weights);
        }
        warp.soften(args.scale, weights, factor);
    }

    // Weights as the left operand of products.
    __device__ __forceinline__ static void pack_all(const Weights& weights, Packed& packed) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            packed[n / 2][n % 2 * 2] = pack(weights[0][n][0], weights[0][n][1]);
            packed[n / 2][n % 2 * 2 + 1] = pack(weights[0][n][2], weights[0][n][3]);
        }
    }

    // weights = queries x keys
    __device__ __forceinline__ static void score(const bf16* q, const bf16* keys, float (&weights)[kKeys / 8][4]) {
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            Wgmma<kKeys>::rows(weights, rows_operand(q + d / 4 * kGroupRows * 64 + d % 4 * 16),
                       rows_operand(keys + d / 4 * kPanel + d % 4 * 16), d > 0);
        }
    }

    // sums += weights x values
    __device__ __forceinline__ static void accumulate(const Packed& packed, const bf16* values, float (&sums)[D / 8][4]) {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            Wgmma<D>::columns(sums, packed[k], columns_operand(values + k * 16 * 64, kPanel * int(sizeof(bf16))));
        }
    }

    // Keys (0) or values (1) of a tile in the ring.
    __device__ __forceinline__ int step(int tile, int kind) const { return (tile - first) * 2 + kind; }

    __device__ __forceinline__ const bf16* stage(int tile, int kind) const { return ring + step(tile, kind) % kStages * kTile; }

    __device__ __forceinline__ void wait_for(int tile, int kind) const {
        barrier_wait(full + step(tile, kind) % kStages, step(tile, kind) / kStages & 1);
    }

    __device__ __forceinline__ void release(int tile, int kind) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(empty + step(tile, kind) % kStages);
    }

    __device__ __forceinline__ void skip(int tile) const {
        for (int kind = 0; kind < 2; ++kind) {
            wait_for(tile, kind);
            __syncwarp();
            release(tile, kind);
        }
    }
};

#endif
