// Attention of many query rows by products of warp groups (sm_90a). A block of threads stays and takes one piece of work after
// the other. One warp group copies, ahead of the two that work on 64 rows each. While one of these takes exponentials, the tensor
// cores run the products of the other, for they issue products in turns (FlashAttention-3, https://arxiv.org/abs/2407.08608), and
// within each the scores of the next keys are computed beside the sums of these. Keys and values of 8 bits are copied as they are, and a fourth
// warp group puts what they stand for where products read it.
#pragma once

#include <type_traits>

#include "attention_prefill.cuh"
#include "fp8.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr __host__ __device__ int hopper_threads(bool fp8) { return (fp8 ? 4 : 3) * 128; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scores have a soft cap if `Capped`, and keys and values 8 bits if `Fp8`.
template <int D, bool Capped, bool Fp8>
struct HopperPrefill {
    using Element = typename KvElement<Fp8>::Type;
    using Tile = QueryTile<D, 128, int>;
    static constexpr int kKeys = D <= 128 ? 128 : 64;
    // Tiles of keys, and of values, which are needed for longer.
    static constexpr int kKeyTiles = D <= 64 ? 4 : D <= 96 ? 3 : 2;
    static constexpr int kValueTiles = D <= 64 ? 4 : Fp8 ? 2 : 3;
    // Keys and values that are copied at once: of 8 bits a part of a tile, so that the next one is on its way while it is widened.
    static constexpr int kParts = !Fp8 ? 1 : D <= 128 ? 2 : 4;
    static constexpr int kCopied = kKeys / kParts;
    static constexpr int kNarrowParts = D == 128 ? 2 : 4;
    using Panel = SwizzledPanel<D % 64 == 0 ? 64 : 32>;
    // Tiles of keys and values are copied eight rows at once, and so laid out: panels of eight rows, then those of the next eight.
    static constexpr int kEight = 8 * D;
    static constexpr int kPanel = 8 * Panel::kColumns;
    static constexpr int kTile = kKeys * D;
    static constexpr int kPart = kCopied * D;
    static constexpr int kConsumers = 2;
    static constexpr int kGroupRows = 64;
    static constexpr int kStride = D % 64 == 0 ? D : D + 8;  // of results on their way out, which take the place of the queries
    static constexpr int kQueries = kGroupRows * kStride;    // of a consumer
    static constexpr int kChunks = D / 8;                    // of 16 bytes, of a row
    // Of the copying group, a warp copies keys, another one values and the others queries.
    static constexpr int kQueryThreads = kWarpGroup - 2 * kWarp;
    static constexpr int kNowhere = 0x7fffff00;  // a row behind any cache, in place of which the copy engine writes zeros
    static constexpr int kBuffers = D <= 128 ? 2 : 1;  // of queries
    static constexpr int kWideningWarps = kWarpGroup / kWarp;
    // Together what a launch of 384 threads with 168 registers each has, or of 512 with 128.
    static constexpr int kProducerRegisters = Fp8 && D > 128 ? 32 : 40;
    static constexpr int kWidenerRegisters = !Fp8 ? 0 : D > 128 ? 32 : 56;
    static constexpr int kConsumerRegisters = !Fp8 ? 232 : D > 128 ? 224 : 208;
    static_assert(kProducerRegisters + kWidenerRegisters + kConsumers * kConsumerRegisters == (Fp8 ? 4 * 128 : 3 * 168),
                  "registers of the warp groups");
    // Columns of a product: an instruction has no more registers than a thread has at launch.
    static constexpr int kWidest = Fp8 && D > 128 ? 128 : D;
    // Values of 8 bits become f16, which takes an instruction where bf16 takes four, and so do their weights. f16 ends at 2^-24: they are made large.
    using Warp = WarpRows<Tile, 1, kKeys / 8, D, Fp8 ? 7 : 0>;
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

        __device__ __forceinline__ void init(int producers, int consuming_warps = kConsumers * kWarpGroup / kWarp) {
            for (int i = 0; i < N; ++i) {
                barrier_init(full + i, producers);
                barrier_init(empty + i, consuming_warps);
            }
        }
        // For the `n`th time any place is used.
        __device__ __forceinline__ void wait_empty(int n) {
            if (n >= N) barrier_wait(empty + n % N, (n / N - 1) & 1);
            __syncwarp();
        }
        __device__ __forceinline__ void arrive(int n) { barrier_arrive_after_copies(full + n % N); }
        // Once for the whole warp, with what its lanes have written.
        __device__ __forceinline__ void publish(int n) {
            fence_for_products();
            __syncwarp();
            if (threadIdx.x % kWarp == 0) barrier_arrive(full + n % N);
        }
        __device__ __forceinline__ void wait_full(int n) { barrier_wait(full + n % N, n / N & 1); }
        __device__ __forceinline__ void release(int n) {
            if (threadIdx.x % kWarp == 0) barrier_arrive(empty + n % N);
        }
    };

    // Keys and values of 8 bits, rows right after each other.
    struct Narrow {
        uint8_t keys[kNarrowParts][kPart];
        uint8_t values[kNarrowParts][kPart];
        Places<kNarrowParts> key_places;
        Places<kNarrowParts> value_places;
    };
    struct Nothing {};

    struct __align__(1024) Shared {
        bf16 keys[kKeyTiles][kTile];
        bf16 values[kValueTiles][kTile];
        bf16 queries[kBuffers][kConsumers][kQueries];  // in panels of 64 rows
        __align__(128) std::conditional_t<Fp8, Narrow, Nothing> narrow;
        Work work[kBuffers];
        Places<kKeyTiles> key_places;
        Places<kValueTiles> value_places;
        Places<kBuffers> buffers;
    };

    const PrefillArgs args;
    // Of 16 bits.
    const TensorMap* const key_map;
    const TensorMap* const value_map;
    Shared& shared;

    __device__ __forceinline__ void operator()() const {
        if (threadIdx.x == 0) {
            // Every thread that copies arrives when its copies are done, and one of them once more: with the bytes that the copy engine copies, or
            // when it has written `work`.
            if constexpr (Fp8) {
                shared.narrow.key_places.init(kWarp + 1, kWideningWarps);
                shared.narrow.value_places.init(kWarp + 1, kWideningWarps);
            }
            shared.key_places.init(Fp8 ? kWideningWarps : kWarp + 1);
            shared.value_places.init(Fp8 ? kWideningWarps : kWarp + 1);
            shared.buffers.init(kQueryThreads + 1);
            fence_barrier_init();
        }
        __syncthreads();
        // The compiler must see that it is the same for all lanes.
        const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
        if (group == 0) {
            give_registers<kProducerRegisters>();
            const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
            if (warp >= 2) {
                copy_queries(threadIdx.x - 2 * kWarp);
            } else if constexpr (Fp8) {
                if (warp == 0) copy_tiles(nullptr, args.k, shared.narrow.keys, shared.narrow.key_places);
                if (warp == 1) copy_tiles(nullptr, args.v, shared.narrow.values, shared.narrow.value_places);
            } else {
                if (warp == 0) copy_tiles(key_map, args.k, shared.keys, shared.key_places);
                if (warp == 1) copy_tiles(value_map, args.v, shared.values, shared.value_places);
            }
        } else if (group <= kConsumers) {
            take_registers<kConsumerRegisters>();
            consume(group - 1);
        } else if constexpr (Fp8) {
            give_registers<kWidenerRegisters>();
            widen_tiles();
        }
    }

    // This block's work, forth and back through the list, which is sorted by length.
    __device__ __forceinline__ int index(int round) const {
        return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }

    __device__ __forceinline__ void copy_queries(int thread) const {
        for (int round = 0; index(round) < args.work; ++round) {
            const Work work = fetch(round);
            const Tile tile(args, work.item, work.run, work.kv_head);
            const int count = tile.rows();
            shared.buffers.wait_empty(round);
            if (thread == 0) {
                shared.work[round % kBuffers] = work;
                barrier_arrive(shared.buffers.full + round % kBuffers);
            }
            bf16* const to = shared.queries[round % kBuffers][0];
#pragma unroll (Fp8 && D > 128 ? 2 : 4)
            for (int i = thread; i < kConsumers * kGroupRows * kChunks; i += kQueryThreads) {
                const int row = i / kChunks, chunk = i % kChunks;
                const bf16* from = args.q + (row < count ? tile.offset(row, args.q_stride) + chunk * 8 : 0);
                bf16* panel = to + row / kGroupRows * kQueries + chunk / Panel::kChunks * kGroupRows * Panel::kColumns;
                copy_async(Panel::at(panel, row % kGroupRows, chunk % Panel::kChunks), from, row < count);
            }
            shared.buffers.arrive(round);
        }
    }

    // Keys or values, `kCopied` at once; those of all pieces of work are counted together.
    template <int N>
    __device__ __forceinline__ void copy_tiles(const TensorMap* map, const void* cache, Element (&tiles)[N][kPart], Places<N>& places) const {
        Work work = fetch(0);
        int n = 0, rows = lookup(work, tiles_of(work.item).x * kParts);
        for (int round = 0; index(round) < args.work; ++round) {
            // Reading what the next piece of work is, and where the next tile lies, takes as long as copying a tile: it is asked for ahead.
            const Work after = fetch(round + 1);
            const Tile tile(args, work.item, work.run, work.kv_head);
            const int first = tiles_of(work.item).x * kParts, last = tiles_of(work.item).y * kParts;
            for (int at = first; at < last; ++at, ++n) {
                const int next = at + 1 < last ? lookup(work, at + 1) : lookup(after, tiles_of(after.item).x * kParts);
                places.wait_empty(n);
                copy(tile, map, static_cast<const Element*>(cache), at, rows, tiles[n % N], places.full + n % N);
                places.arrive(n);
                rows = next;
            }
            work = after;
        }
    }

    // The tiles that an item's keys lie in, up to the second.
    __device__ __forceinline__ static int2 tiles_of(const Item& item) { return make_int2(item.begin / kKeys, (item.end + kKeys - 1) / kKeys); }

    // Which of the keys that are copied at once are the item's.
    __device__ __forceinline__ static int2 wanted(const Tile& tile, int at) {
        const int key = at * kCopied;
        return make_int2(min(max(tile.item.begin - key, 0), kCopied), max(min(tile.item.end - key, kCopied), 0));
    }

    // Begins to copy `kCopied` keys or values. The copy engine takes each eight rows that are all wanted, and of 16 bits writes zeros in place
    // of those of which none is; threads copy the other eights.
    __device__ __forceinline__ static void copy(const Tile& tile, const TensorMap* map, const Element* cache, int at, int rows, Element* to,
                                                uint64_t* full) {
        constexpr int kBytes = kEight * int(sizeof(Element));
        constexpr unsigned kEights = kCopied / 8;
        const int lane = threadIdx.x % kWarp, key = lane * 8;
        const int2 keys = wanted(tile, at);
        const bool all = keys.x <= key && key + 8 <= keys.y, none = key + 8 <= keys.x || key >= keys.y;
        const bool whole = lane < int(kEights) && (all || (none && !Fp8));
        const unsigned wholes = __ballot_sync(kAllLanes, whole);
        if (lane == 0) barrier_expect_bytes(full, __popc(wholes) * kBytes);
        __syncwarp();
        if (whole) {
            if constexpr (Fp8) {
                copy_bulk(shared_address(to + lane * kEight), cache + size_t(rows) * D, kBytes, full);
            } else {
                copy_tensor(to + lane * kEight, *map, make_int3(0, all ? rows : kNowhere, 0), full);
            }
        }
#pragma unroll 1
        for (unsigned rest = ~wholes & ((1u << kEights) - 1); rest != 0; rest &= rest - 1) {
            copy_eight(tile, cache, at, rows, __ffs(rest) - 1, to);
        }
    }

    __device__ __forceinline__ static void copy_eight(const Tile& tile, const Element* cache, int at, int rows, int eight, Element* to) {
        constexpr int kVec = 16 / int(sizeof(Element)), kVecs = D / kVec;
        cache += size_t(__shfl_sync(kAllLanes, rows, eight)) * D;
        to += eight * kEight;
#pragma unroll 1
        for (int i = threadIdx.x % kWarp; i < 8 * kVecs; i += kWarp) {
            const int row = i / kVecs, chunk = i % kVecs;
            Element* place = to + i * kVec;
            if constexpr (!Fp8) place = Panel::at(to + chunk / Panel::kChunks * kPanel, row, chunk % Panel::kChunks);
            copy_async(place, cache + i * kVec, tile.wanted(at * kCopied + eight * 8 + row));
        }
    }

    // Puts what copied elements of 8 bits stand for into tiles: in the order in which places become empty, keys a tile ahead of values.
    __device__ __forceinline__ void widen_tiles() const {
        auto& narrow = shared.narrow;
        Item item = fetch(0).item;
        int n = 0;
        for (int round = 0; index(round) < args.work; ++round) {
            const Item after = fetch(round + 1).item;
            for (const int end = n + tiles_of(item).y - tiles_of(item).x; n < end; ++n) {
                widen_tile<false>(n, narrow.keys, narrow.key_places, shared.keys, shared.key_places);
                if (n > 0) widen_tile<true>(n - 1, narrow.values, narrow.value_places, shared.values, shared.value_places);
            }
            item = after;
        }
        widen_tile<true>(n - 1, narrow.values, narrow.value_places, shared.values, shared.value_places);
    }

    // To f16 if `Half`.
    template <bool Half, int M, int N>
    __device__ __forceinline__ static void widen_tile(int n, const uint8_t (&parts)[M][kPart], Places<M>& copied, bf16 (&tiles)[N][kTile],
                                                      Places<N>& places) {
        // Eight elements of a thread at once: so both what a warp reads and what it writes touches all banks.
        constexpr int kSteps = kPart / 8 / kWarpGroup;
        const int thread = threadIdx.x % kWarpGroup;
        places.wait_empty(n);
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
            const int m = n * kParts + part;
            copied.wait_full(m);
            uint2 x[kSteps];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) x[i] = *reinterpret_cast<const uint2*>(parts[m % M] + (i * kWarpGroup + thread) * 8);
            bf16* const to = tiles[n % N] + part * kPart;
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const int row = (i * kWarpGroup + thread) / kChunks, chunk = (i * kWarpGroup + thread) % kChunks;
                bf16* const panel = to + row / 8 * kEight + chunk / Panel::kChunks * kPanel;
                const uint2 low = widen_fp8x4<Half>(x[i].x), high = widen_fp8x4<Half>(x[i].y);
                // The compiler would split a plain store into four, whose words share banks.
                store_shared16(shared_address(Panel::at(panel, row % 8, chunk % Panel::kChunks)), make_uint4(low.x, low.y, high.x, high.y));
            }
            // Only after the stores: a load may still be under way when later instructions are issued, and the copy engine would overwrite what it reads.
            __syncwarp();
            copied.release(m);
        }
        places.publish(n);
    }

    // A piece of work, or the last one if there is none.
    __device__ __forceinline__ Work fetch(int round) const {
        const int at = min(index(round), args.work - 1);
        const Item item = args.items[at / args.kv_heads];
        return {item, args.runs[item.run], at % args.kv_heads};
    }

    // The cache row of eight of the keys that are copied at once for every lane.
    __device__ __forceinline__ int lookup(const Work& work, int at) const {
        return Tile(args, work.item, work.run, work.kv_head).cache_row(at * kCopied + threadIdx.x % (kCopied / 8) * 8);
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
            fence_for_products();
            tiles = consume(shared.work[round % kBuffers], group, shared.queries[round % kBuffers][group], tiles);
            __syncwarp();
            shared.buffers.release(round);
        }
        if (group == 0) begin_turn(group);  // Nobody comes to a barrier that nobody waits at.
    }

    // `n` tiles have been before; returns how many have with these.
    __device__ __forceinline__ int consume(const Work& work, int group, bf16* q, int n) const {
        const Tile tile(args, work.item, work.run, work.kv_head);
        const int group_row = group * kGroupRows, count = tile.rows();
        const int first = tiles_of(tile.item).x, last = tiles_of(tile.item).y;
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
        // Read anew rather than kept in registers all the time.
        const Tile result(args, work.item, work.run, work.kv_head);
        if (result.item.partial < 0) {
            warp.add_sinks(result);
            group_sync(kGroupBarrier + group);
            // Rows without padding are permuted within 128 bytes, so that the same columns of eight rows lie in different banks.
            static_assert(kStride != D || D % 64 == 0, "whole 128 bytes");
            const auto swap = [](int row) { return kStride == D ? row % 8 * 8 : 0; };
            warp.template write<kStride>(result, sums, q + (warp.row - group_row) * kStride, swap);
        } else {
            warp.write_partial(result, sums);
        }
        return n;
    }

    __device__ __forceinline__ int attend(const Tile& tile, Warp& warp, int group, const bf16* q, int begin, int end,
                                          int n, float (&sums)[1][D / 8][4]) const {
        Weights weights;
        Packed packed;
        float factor[1][2];
        shared.key_places.wait_full(n);
        fence_copies(tile, begin);
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
            fence_copies(tile, at);
            begin_turn(group);
            wgmma_fence();
            touch(weights[0]);
            score(q, shared.keys[(n + 1) % kKeyTiles], weights[0]);
            wgmma_commit();
            shared.value_places.wait_full(n);
            fence_copies(tile, at - 1);
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
        fence_copies(tile, end - 1);
        wgmma_fence();
        touch(sums[0]);
        accumulate(packed, shared.values[n % kValueTiles], sums[0]);
        wgmma_commit();
        wgmma_wait<0>();
        touch(sums[0]);
        shared.value_places.release(n);
        return n + 1;
    }

    // What threads have copied of a tile becomes visible to products; who widens has seen to that.
    __device__ __forceinline__ static void fence_copies(const Tile& tile, int at) {
        const int2 keys = wanted(tile, at);
        if (!Fp8 && (keys.x | keys.y) % 8 != 0) fence_for_products();
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
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float low = weights[0][n][h * 2], high = weights[0][n][h * 2 + 1];
                packed[n / 2][n % 2 * 2 + h] = Fp8 ? pack_half(low, high) : pack(low, high);
            }
        }
    }

    // weights = queries x keys
    __device__ __forceinline__ static void score(const bf16* q, const bf16* keys, float (&weights)[kKeys / 8][4]) {
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            const int panel = d / Panel::kColumns, column = d % Panel::kColumns;
            const uint64_t left = Panel::rows_operand(shared_address(q + panel * kGroupRows * Panel::kColumns + column));
            const uint64_t right = Panel::rows_operand(shared_address(keys + panel * kPanel + column), kEight);
            Wgmma<kKeys>::rows(weights, left, right, d > 0);
        }
    }

    // sums += weights x values
    __device__ __forceinline__ static void accumulate(const Packed& packed, const bf16* values, float (&sums)[D / 8][4]) {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
            for (int d = 0; d < D; d += kWidest) {
                const bf16* const right = values + k * 2 * kEight + d / Panel::kColumns * kPanel;
                Wgmma<kWidest>::template columns<Fp8>(reinterpret_cast<float(&)[kWidest / 8][4]>(sums[d / 8]), packed[k],
                                        Panel::columns_operand(shared_address(right), kPanel, kEight));
            }
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
