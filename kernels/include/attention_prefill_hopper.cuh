// Attention of many query rows by products of warp groups (sm_90a). A block of threads stays and takes one piece of work after
// the other. One warp group copies, ahead of the two that work on 64 rows each: while one of these takes exponentials the tensor
// cores run the products of the other, for they issue products in turns (FlashAttention-3, https://arxiv.org/abs/2407.08608), and
// within each the scores of the next keys are computed beside the sums of these.
#pragma once

#include "attention_prefill.cuh"
#include "wgmma.cuh"

constexpr int kHopperThreads = 3 * 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scores have a soft cap if `Capped`.
template <int D, bool Capped>
struct HopperPrefill {
    using Tile = QueryTile<D, 128, int>;
    static constexpr int kKeys = D <= 128 ? 128 : 64;
    // Tiles of keys, and of values. The copy of keys does not wait until values are free, which are needed for longer.
    static constexpr int kKeyTiles = D <= 64 ? 4 : D <= 96 ? 3 : 2;
    static constexpr int kValueTiles = D <= 64 ? 4 : 3;
    using Panel = SwizzledPanel<D % 64 == 0 ? 64 : 32>;
    static constexpr int kPanel = kKeys * Panel::kColumns;
    static constexpr int kTile = kKeys * D;
    static constexpr int kConsumers = 2;
    static constexpr int kGroupRows = 64;
    static constexpr int kStride = D % 64 == 0 ? D : D + 8;  // of results on their way out, which take the place of the queries
    static constexpr int kQueries = kGroupRows * kStride;    // of a consumer
    static constexpr int kChunks = D / 8;                    // of 16 bytes, of a row
    // Rows that the copying group copies at once, a chunk each thread.
    static constexpr int kRowsAtOnce = D <= 64 ? 16 : D <= 128 ? 8 : 4;
    static constexpr int kCopying = kRowsAtOnce * kChunks;
    static_assert(kCopying <= kWarpGroup && kCopying % kWarp == 0, "whole warps that copy");
    static constexpr int kBuffers = D <= 128 ? 2 : 1;  // of queries
    // Together what a launch of 384 threads with 168 registers each has.
    static constexpr int kProducerRegisters = D <= 96 ? 88 : 56;
    static constexpr int kConsumerRegisters = D <= 96 ? 208 : 224;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == 3 * 168, "registers of the warp groups");
    using Warp = WarpRows<Tile, 1, kKeys / 8>;
    using Weights = float[1][kKeys / 8][4];
    using Packed = uint32_t[kKeys / 16][4];

    // Named barriers: of each consumer alone, and of each for its turn.
    static constexpr int kGroupBarrier = 1;
    static constexpr int kTurnBarrier = kGroupBarrier + kConsumers;

    // What the copying group tells the others of a piece of work.
    struct Work {
        Item item;
        Run run;
        int kv_head;
    };

    // Barriers of `N` places in shared memory that are filled and emptied in turns.
    template <int N>
    struct Places {
        uint64_t full[N];
        uint64_t empty[N];

        __device__ __forceinline__ void init(int producers) {
            for (int i = 0; i < N; ++i) {
                barrier_init(full + i, producers);
                barrier_init(empty + i, kConsumers * kWarpGroup / kWarp);
            }
        }
        // For the `n`th time any place is used.
        __device__ __forceinline__ void wait_empty(int n) {
            if (n >= N) barrier_wait(empty + n % N, (n / N - 1) & 1);
            __syncwarp();
        }
        __device__ __forceinline__ void arrive(int n) { barrier_arrive_after_copies(full + n % N); }
        __device__ __forceinline__ void wait_full(int n) {
            barrier_wait(full + n % N, n / N & 1);
            fence_for_products();
        }
        __device__ __forceinline__ void release(int n) {
            if (threadIdx.x % kWarp == 0) barrier_arrive(empty + n % N);
        }
    };

    struct __align__(1024) Shared {
        bf16 keys[kKeyTiles][kTile];
        bf16 values[kValueTiles][kTile];
        bf16 queries[kBuffers][kConsumers][kQueries];  // in panels of 64 rows
        Work work[kBuffers];
        Places<kKeyTiles> key_places;
        Places<kValueTiles> value_places;
        Places<kBuffers> buffers;
    };

    const PrefillArgs args;
    Shared& shared;

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            shared.key_places.init(kWarpGroup);
            shared.value_places.init(kWarpGroup);
            shared.buffers.init(kWarpGroup + 1);  // One more for what is not copied.
        }
        __syncthreads();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            give_registers<kProducerRegisters>();
            produce();
        } else {
            take_registers<kConsumerRegisters>();
            consume(group - 1);
        }
    }

    // This block's work, forth and back through the list, which is sorted by length.
    __device__ __forceinline__ int index(int round) const {
        return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }

    // Copies queries, and tiles of keys and of values, in the order in which they are needed: keys before the values of the tile before.
    // Tiles of all pieces of work are counted together.
    __device__ __forceinline__ void produce() const {
        Work work = fetch(0);
        int keys = 0, values = 0, rows = lookup(work, first_tile(work));
        for (int round = 0; index(round) < args.work; ++round) {
            // Reading what the next piece of work is, and where the tile after the next lies, takes as long as copying a tile: it is asked
            // for as much ahead.
            const Work after = fetch(round + 1);
            const Tile tile(args, work.item, work.run, work.kv_head);
            shared.buffers.wait_empty(round);
            if (threadIdx.x == 0) {
                shared.work[round % kBuffers] = work;
                barrier_arrive(shared.buffers.full + round % kBuffers);
            }
            load_queries(tile, shared.queries[round % kBuffers][0]);
            shared.buffers.arrive(round);
            const int first = first_tile(work), last = (tile.item.end + kKeys - 1) / kKeys;
            int next = first + 1 < last ? lookup(work, first + 1) : lookup(after, first_tile(after));
            load_keys(tile, first, rows, keys++);
            for (int at = first; at < last; ++at) {
                int later = 0;
                if (at + 2 < last) {
                    later = lookup(work, at + 2);
                } else if (at + 2 == last) {
                    later = lookup(after, first_tile(after));
                }
                if (at + 1 < last) load_keys(tile, at + 1, next, keys++);
                load_values(tile, at, rows, values++);
                rows = next;
                next = later;
            }
            work = after;
        }
    }

    __device__ __forceinline__ static int first_tile(const Work& work) { return work.item.begin / kKeys; }

    __device__ __forceinline__ void load_keys(const Tile& tile, int at, int rows, int n) const {
        shared.key_places.wait_empty(n);
        load(tile, static_cast<const bf16*>(args.k), at, rows, shared.keys[n % kKeyTiles]);
        shared.key_places.arrive(n);
    }

    __device__ __forceinline__ void load_values(const Tile& tile, int at, int rows, int n) const {
        shared.value_places.wait_empty(n);
        load(tile, static_cast<const bf16*>(args.v), at, rows, shared.values[n % kValueTiles]);
        shared.value_places.arrive(n);
    }

    // A piece of work, or the last one if there is none.
    __device__ __forceinline__ Work fetch(int round) const {
        const int at = min(index(round), args.work - 1);
        const Item item = args.items[at / args.kv_heads];
        return {item, args.runs[item.run], at % args.kv_heads};
    }

    // The cache row of eight keys of a tile for every lane.
    __device__ __forceinline__ int lookup(const Work& work, int at) const {
        return Tile(args, work.item, work.run, work.kv_head).cache_row(at * kKeys + threadIdx.x % (kKeys / 8) * 8);
    }

    // Begins to copy a tile: a thread copies the same chunk of every `kRowsAtOnce`th row.
    __device__ __forceinline__ static void load(const Tile& tile, const bf16* cache, int at, int rows, bf16* to) {
        if (tile.item.begin <= at * kKeys && at * kKeys + kKeys <= tile.item.end) {
            load<true>(tile, cache, at, rows, to);
        } else {
            load<false>(tile, cache, at, rows, to);
        }
    }

    template <bool Inner>
    __device__ __forceinline__ static void load(const Tile& tile, const bf16* cache, int at, int rows, bf16* to) {
        if (kCopying < kWarpGroup && threadIdx.x >= kCopying) return;
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        cache += row % 8 * D + chunk * 8;
        to += chunk / Panel::kChunks * kPanel;
#pragma unroll(Inner ? 8 : 2)
        for (int i = 0; i < kKeys; i += kRowsAtOnce) {
            const int more = i % 8;  // 0 unless fewer than eight rows are copied at once
            const bf16* from = cache + size_t(__shfl_sync(kAllLanes, rows, (row + i) / 8) + more) * D;
            copy_async(Panel::at(to + (i - more) * Panel::kColumns, row + more, chunk % Panel::kChunks), from,
                       Inner || tile.wanted(at * kKeys + row + i));
        }
    }

    __device__ __forceinline__ void load_queries(const Tile& tile, bf16* to) const {
        if (kCopying < kWarpGroup && threadIdx.x >= kCopying) return;
        const int chunk = threadIdx.x % kChunks, count = tile.rows();
#pragma unroll 4
        for (int row = threadIdx.x / kChunks; row < kConsumers * kGroupRows; row += kRowsAtOnce) {
            const bf16* from = args.q + (row < count ? tile.offset(row, args.q_stride) + chunk * 8 : 0);
            bf16* panel = to + row / kGroupRows * kQueries + chunk / Panel::kChunks * kGroupRows * Panel::kColumns;
            copy_async(Panel::at(panel, row % kGroupRows, chunk % Panel::kChunks), from, row < count);
        }
    }

    // The consumers issue products in turns, one for every tile of every piece of work, seen or not: so neither has one more than the
    // other.
    __device__ __forceinline__ static void begin_turn(int group) {
        named_sync<kConsumers * kWarpGroup>(kTurnBarrier + group);
    }

    __device__ __forceinline__ static void end_turn(int group) {
        named_arrive<kConsumers * kWarpGroup>(kTurnBarrier + 1 - group);
    }

    // Rows `64 * group` on of every piece of work.
    __device__ __forceinline__ void consume(int group) const {
        if (group == 1) end_turn(group);  // The first turn is the other's.
        int tiles = 0;
        for (int round = 0; index(round) < args.work; ++round) {
            shared.buffers.wait_full(round);
            const Work& work = shared.work[round % kBuffers];
            const Tile tile(args, work.item, work.run, work.kv_head);
            bf16* const q = shared.queries[round % kBuffers][group];
            tiles = consume(tile, group, q, tiles);
            __syncwarp();
            shared.buffers.release(round);
        }
        if (group == 0) begin_turn(group);  // Nobody comes to a barrier that nobody waits at.
    }

    // `n` tiles have been before; returns how many have with these.
    __device__ __forceinline__ int consume(const Tile& tile, int group, bf16* q, int n) const {
        const int group_row = group * kGroupRows, count = tile.rows();
        const int first = tile.item.begin / kKeys, last = (tile.item.end + kKeys - 1) / kKeys;
        // The tiles that any row of the group sees; the others are for the other group.
        int begin = last, end = last;
        if (group_row < count) {
            begin = min(max(tile.position(group_row) - (args.window - 1), first * kKeys) / kKeys, last);
            end = max(min(tile.last_seen(min(group_row + kGroupRows, count) - 1) / kKeys + 1, last), begin);
        }
        n = skip(group, n, begin - first);
        Warp warp(group_row + threadIdx.x % kWarpGroup / kWarp * 16);
        float sums[1][D / 8][4] = {};
        if (begin < end) n = attend(tile, warp, group, q, begin, end, n, sums);
        n = skip(group, n, last - end);
        if (group_row >= count) return n;
        warp.finish_total();
        if (tile.item.partial < 0) {
            warp.add_sinks(tile);
            group_sync(kGroupBarrier + group);
            // Rows without padding are permuted within 128 bytes, so that the same columns of eight rows lie in different banks.
            static_assert(kStride != D || D % 64 == 0, "whole 128 bytes");
            const auto swap = [](int row) { return kStride == D ? row % 8 * 8 : 0; };
            warp.template write<kStride>(tile, sums, q + (warp.row - group_row) * kStride, swap);
        } else {
            warp.write_partial(tile, sums);
        }
        return n;
    }

    __device__ __forceinline__ int attend(const Tile& tile, Warp& warp, int group, const bf16* q, int begin, int end,
                                          int n, float (&sums)[1][D / 8][4]) const {
        Weights weights;
        Packed packed;
        float factor[1][2];
        shared.key_places.wait_full(n);
        begin_turn(group);
        wgmma_fence();
        score(q, shared.keys[n % kKeyTiles], weights[0]);
        wgmma_commit();
        end_turn(group);
        wgmma_wait<0>();
        touch(weights[0]);
        shared.key_places.release(n);
        soften(tile, warp, begin, weights, factor);
        pack_all(weights, packed);
        for (int at = begin + 1; at < end; ++at) {
            // The scores of this tile and the sums of the one before run on the tensor cores; the softmax of this tile waits
            // for the former alone.
            shared.key_places.wait_full(n + 1);
            begin_turn(group);
            wgmma_fence();
            touch(weights[0]);
            score(q, shared.keys[(n + 1) % kKeyTiles], weights[0]);
            wgmma_commit();
            shared.value_places.wait_full(n);
            wgmma_fence();
            accumulate(packed, shared.values[n % kValueTiles], sums[0]);
            wgmma_commit();
            end_turn(group);
            wgmma_wait<1>();
            touch(weights[0]);
            shared.key_places.release(n + 1);
            soften(tile, warp, at, weights, factor);
            // The wait stands in branches of a condition that all weights enter, or the compiler would move the softmax behind
            // it; sums of weights are never negative.
            const float(&total)[2] = warp.total[0];
            if (__any_sync(kAllLanes, factor[0][0] != 1.0f || factor[0][1] != 1.0f || total[0] < 0.0f || total[1] < 0.0f)) {
                wgmma_wait<0>();
                touch(sums[0]);
                warp.rescale(factor, sums);
            } else {
                asm volatile("wgmma.wait_group.sync.aligned 0;  // not merged with the other" ::: "memory");
                touch(sums[0]);
            }
            shared.value_places.release(n);
            pack_all(weights, packed);
            ++n;
        }
        shared.value_places.wait_full(n);
        wgmma_fence();
        touch(sums[0]);
        accumulate(packed, shared.values[n % kValueTiles], sums[0]);
        wgmma_commit();
        wgmma_wait<0>();
        touch(sums[0]);
        shared.value_places.release(n);
        return n + 1;
    }

    __device__ __forceinline__ void soften(const Tile& tile, Warp& warp, int at, Weights& weights,
                                           float (&factor)[1][2]) const {
        const int key = at * kKeys;
        if constexpr (Capped) warp.cap(args.inner, weights);
        if (key + kKeys - 1 > tile.position(warp.row) || key <= tile.position(warp.row + 15) - args.window) {
            warp.mask(tile, key, weights);
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
        for (int d = 0; d < D; d += 16) {
            const int panel = d / Panel::kColumns, column = d % Panel::kColumns;
            Wgmma<kKeys>::rows(weights, Panel::rows_operand(q + panel * kGroupRows * Panel::kColumns + column),
                               Panel::rows_operand(keys + panel * kPanel + column), d > 0);
        }
    }

    // sums += weights x values
    __device__ __forceinline__ static void accumulate(const Packed& packed, const bf16* values, float (&sums)[D / 8][4]) {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            Wgmma<D>::columns(sums, packed[k],
                              Panel::columns_operand(values + k * 16 * Panel::kColumns, kPanel * int(sizeof(bf16))));
        }
    }

    __device__ __forceinline__ int skip(int group, int n, int count) const {
        for (const int end = n + count; n < end; ++n) {
            begin_turn(group);
            end_turn(group);
            shared.key_places.wait_full(n);
            __syncwarp();
            shared.key_places.release(n);
            shared.value_places.wait_full(n);
            __syncwarp();
            shared.value_places.release(n);
        }
        return n;
    }
};

#endif
