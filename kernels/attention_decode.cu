// Attention of one query row per request over the paged cache: decode.
//
// Flash decoding: a context is cut into splits, so that few long contexts fill the GPU as well as many short ones. A unit of
// work is a split for one KV head; its query heads are the rows of a tensor-core tile, so keys and values are read once.
// Each warp (of large heads each team of two) streams its own tiles of 16 keys through its own ring in shared memory and shares
// nothing with the others until the split is done. Who finishes the last of up to `kFanIn` neighbouring splits merges them in order, and who finishes the
// last of several such merges merges those.
//
// The grid is fixed: blocks walk over the units that the work list in device memory names, so one captured graph serves all
// contexts.
#include "attention_decode.cuh"

namespace {

// See `DecodeHeader` and `DecodeItem` in crates/kernels/src/cuda/attention_decode.rs.
struct __align__(16) Header {
    int items;
    int chunk;
    int runs;
    int padding;
};

struct __align__(8) Item {
    int run;
    int split;
};

struct Args {
    const bf16* q;
    const void* k;
    const void* v;
    const Run* runs;
    const int* blocks;
    const Header* header;
    const Item* items;
    bf16* out;
    float* scratch;
    unsigned* counters;
    int q_stride;  // elements from one request's queries to the next one's
    int kv_heads;
    int group;        // query heads of one KV head
    int block_shift;  // log2 of the tokens of a block
    int block_rows;   // rows of the cache, in units of a head, from one block to the next
    int window;       // tokens seen, the current one included
    float scale;      // times log2(e): weights are powers of two
    float inner;      // of a soft cap: what products are multiplied by before `tanh_exp2`, whose results `scale` multiplies
    const float* sinks;  // a logit of each query head that has no value, or null
    float out_scale;     // multiplies the result
};

constexpr int kFanIn = 16;  // partial results that are merged at once

// Floats of a row of a partial result: the sums, then maximum and sum of weights of a split, then those of several merged.
__host__ __device__ constexpr int partial_floats(int head_dim) { return head_dim + 4; }

// What other multiprocessors have just written.
__device__ __forceinline__ float4 load_fresh4(const float* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_fresh2(const float* from) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
    return v;
}

// One split of one run for one tile of heads.
struct Unit {
    int item;
    int tile;
    int split;
    int splits;
    int first_row;
    int block_offset;
    int begin;  // keys begin..end, begin rounded down to a tile
    int end;
    int seen;  // first key that is seen
    int context_end;
    int kv_head;
    int head;  // first query head
    int rows;  // query heads
};

// Scores have a soft cap if `Capped`, and keys and values 8 bits if `Fp8`.
template <int D, bool Capped, bool Fp8>
struct Decode {
    using S = Shape<D, Fp8>;
    using Element = typename S::Element;
    using Products = TileProducts<D, Fp8>;
    static constexpr int kHeld = Products::kHeld;
    static constexpr int kSums = Products::kSums;
    // Quads of columns of a unit's results that a thread combines at once. Of large heads a block has few threads for many of them, which would
    // wait for memory in turn.
    static constexpr int kAtOnce = D > 128 ? 4 : 1;

    const Args args;
    char* const rings;
    Element* const ring;  // this team's
    const int team;
    const int part;  // of the columns, which the team shares
    const int lane;
    const int passes;  // tiles of query heads for one KV head
    const int tiles;

    __device__ __forceinline__ Decode(const Args& args, char* shared)
        : args(args),
          rings(shared),
          ring(reinterpret_cast<Element*>(shared + threadIdx.x / kWarp / S::kParts * S::kRingBytes)),
          team(threadIdx.x / kWarp / S::kParts),
          part(threadIdx.x / kWarp % S::kParts),
          lane(threadIdx.x % kWarp),
          passes((args.group + kRows - 1) / kRows),
          tiles(args.kv_heads * passes) {}

    // Unit `index` of the work list; one without keys if there is none.
    __device__ __forceinline__ Unit fetch(const Header& header, int index) const {
        Unit unit = {};
        unit.item = index / tiles;
        unit.tile = index % tiles;
        if (unit.item >= header.items) return unit;
        const Item item = args.items[unit.item];
        const Run run = args.runs[item.run];
        unit.split = item.split;
        unit.first_row = run.first_row;
        unit.block_offset = run.block_offset;
        unit.context_end = run.context_end;
        unit.kv_head = unit.tile / passes;
        const int head = unit.tile % passes * kRows;
        unit.head = unit.kv_head * args.group + head;
        unit.rows = min(kRows, args.group - head);

        unit.seen = max(run.context_end - args.window, 0);
        const int start = unit.seen / kKeys * kKeys;
        const int keys = run.context_end - start;
        unit.splits = (keys + header.chunk - 1) / header.chunk;
        // A list made for a longer window has splits that nobody needs.
        if (unit.split >= unit.splits) return unit;
        const int share = (keys + unit.splits - 1) / unit.splits;
        const int size = (share + kKeys - 1) / kKeys * kKeys;
        unit.begin = start + unit.split * size;
        unit.end = min(unit.begin + size, run.context_end);
        return unit;
    }

    // How many of the unit's first tiles are this team's: each `kTeams`th.
    __device__ __forceinline__ int share(int tiles) const { return max(tiles - team + S::kTeams - 1, 0) / S::kTeams; }

    // Until all of the team are here.
    __device__ __forceinline__ static void wait_for_team() {
        if constexpr (S::kParts == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }

    __device__ __forceinline__ int count(const Unit& unit) const {
        return share((unit.end - unit.begin + kKeys - 1) / kKeys);
    }

    __device__ __forceinline__ int first_key(const Unit& unit, int tile) const {
        return unit.begin + (tile * S::kTeams + team) * kKeys;
    }

    // For this lane's eight keys of the lot that starts with `tile`: their row of the cache, in units of a head.
    __device__ __forceinline__ int cache_row(const Unit& unit, int tile) const {
        const int key = first_key(unit, tile + lane / 2) + lane % 2 * 8;
        if (key + 8 <= unit.seen || key >= unit.end) return 0;
        const int block = args.blocks[unit.block_offset + (key >> args.block_shift)];
        return block * args.block_rows + (unit.kv_head << args.block_shift) + (key & ((1 << args.block_shift) - 1));
    }

    // Begins to copy keys and values of a tile, or this warp's share of its rows. Those that are not seen become zero: what a
    // block's unused slots hold must not even be multiplied by zero.
    __device__ __forceinline__ void load(const Unit& unit, int tile, int& rows) const {
        if (tile % S::kLot == 0 && tile > 0) rows = cache_row(unit, tile);
        const int key = first_key(unit, tile);
        const Element* const k = static_cast<const Element*>(args.k);
        const Element* const v = static_cast<const Element*>(args.v);
        Element* const to = ring + tile % S::kStages * S::kStage;
        if constexpr (Fp8) {
            constexpr int kChunks = D / 16;
#pragma unroll
            for (int i = 0; i < kKeys * kChunks / kWarp / S::kParts; ++i) {
                const int at_lane = i * kWarp + lane;
                const int row = part * (kKeys / S::kParts) + at_lane / kChunks, chunk = at_lane % kChunks;
                const int head = __shfl_sync(kAllLanes, rows, tile % S::kLot * 2 + row / 8) + row % 8;
                const size_t from = size_t(head) * D + chunk * 16;
                const bool wanted = key + row >= unit.seen && key + row < unit.end;
                const int at = swizzled_fp8<D>(row, chunk);
                copy_async(to + at, k + from, wanted);
                copy_async(to + S::kTile + at, v + from, wanted);
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (S::kParts > 1 && half != part) continue;
                const size_t from = size_t(__shfl_sync(kAllLanes, rows, tile % S::kLot * 2 + half)) * D;
#pragma unroll
                for (int i = 0; i < D / kWarp; ++i) {
                    const int chunk = i * kWarp + lane;
                    const int row = half * 8 + chunk / S::kChunks;
                    const bool wanted = key + row >= unit.seen && key + row < unit.end;
                    const int at = swizzled<D>(row, chunk % S::kChunks);
                    copy_async(to + at, k + from + chunk * 8, wanted);
                    copy_async(to + S::kTile + at, v + from + chunk * 8, wanted);
                }
            }
        }
    }

    // Begins the copies of the first tiles, from the `from`th up to the `to`th; the last stage stays free.
    __device__ __forceinline__ void start(const Unit& unit, int& rows, int from, int to) const {
        const int tiles = count(unit);
#pragma unroll
        for (int i = 0; i < S::kStages - 1; ++i) {
            if (i < from || i >= to) continue;
            if (i < tiles) load(unit, i, rows);
            commit_async();
        }
    }

    __device__ __forceinline__ void operator()(float2 (*states)[kRows], unsigned& arrived) const {
        // The work list, runs and block tables come from the host, and all keys and values but the newest from earlier steps:
        // no kernel that may still run writes them.
        const Header header = *args.header;
        const int units = header.items * tiles;
        // Who has no work makes room for the next kernel, but for one: this one must not end before the one ahead of it.
        if (blockIdx.x > 0 && int(blockIdx.x) >= units) return;
        Unit unit = fetch(header, blockIdx.x);
        int rows = cache_row(unit, 0);
        const int old = share((min(unit.end, unit.context_end - 1) - unit.begin) / kKeys);
        start(unit, rows, 0, old);
        pdl_launch();
        pdl_wait();
        start(unit, rows, old, S::kStages);
        for (int index = blockIdx.x; index < units;) {
            uint32_t queries[kHeld][4];
            if constexpr (S::kSharedQueries) {
                share_queries(unit);
            } else {
                const bf16* const from = args.q + size_t(unit.first_row) * args.q_stride + unit.head * D;
                if constexpr (Fp8) {
                    Products::load_wide_queries(from, unit.rows, queries);
                } else {
                    Products::load_queries(from, unit.rows, queries);
                }
            }
            index += gridDim.x;
            const Unit next = fetch(header, index);
            const int next_rows = cache_row(next, 0);

            float sums[kSums][4] = {};
            float maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
            const int tiles = count(unit);
            for (int tile = 0; tile < tiles; ++tile) {
                wait_async<S::kStages - 2>();
                wait_for_team();
                if (tile + S::kStages - 1 < tiles) load(unit, tile + S::kStages - 1, rows);
                commit_async();
                attend(unit, tile, queries, sums, maximum, total);
            }
            wait_for_team();

            rows = next_rows;
            start(next, rows, 0, S::kStages);
            if (unit.end > 0) finish(unit, sums, maximum, total, states, arrived);
            unit = next;
        }
    }

    // The rows of the unit in shared memory; those beyond are zero.
    __device__ __forceinline__ void share_queries(const Unit& unit) const {
        const bf16* from = args.q + size_t(unit.first_row) * args.q_stride + unit.head * D;
        bf16* const to = shared_queries();
#pragma unroll
        for (int i = 0; i < kRows * S::kChunks / S::kThreads; ++i) {
            const int at = i * S::kThreads + threadIdx.x;
            const Bf16x8 zero = {};
            const int place = Fp8 ? swizzled_queries<D>(at / S::kChunks, at % S::kChunks) : swizzled<D>(at / S::kChunks, at % S::kChunks);
            store8(to + place, at / S::kChunks < unit.rows ? load8(from + at * 8) : zero);
        }
        __syncthreads();
    }

    __device__ __forceinline__ bf16* shared_queries() const {
        return reinterpret_cast<bf16*>(rings + S::kTeams * S::kRingBytes);
    }

    __device__ __forceinline__ void attend(const Unit& unit, int tile, const uint32_t (&queries)[kHeld][4],
                                           float (&sums)[kSums][4], float (&maximum)[2], float (&total)[2]) const {
        const Element* keys = ring + tile % S::kStages * S::kStage;
        // Four chains of products instead of two: the tensor cores' latency is what a short context waits for.
        float chains[2][2][4] = {};
        if constexpr (Fp8) {
            Products::score_fp8(keys, shared_queries(), queries, chains);
        } else {
            Products::score(keys, shared_queries(), queries, chains);
        }
        float weights[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float product = chains[0][n][i] + chains[1][n][i];
                weights[n][i] = (Capped ? tanh_exp2(product * args.inner) : product) * args.scale;
            }
        }
        const int key = first_key(unit, tile);
        if (key < unit.seen || key + kKeys > unit.end) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = key + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (at < unit.seen || at >= unit.end) weights[i / 4][i % 4] = -INFINITY;
            }
        }
        soften(weights, sums, maximum, total);

        const uint32_t a[4] = {pack(weights[0][0], weights[0][1]), pack(weights[0][2], weights[0][3]),
                               pack(weights[1][0], weights[1][1]), pack(weights[1][2], weights[1][3])};
        const Element* values = keys + S::kTile;
        if constexpr (Fp8) {
            Products::accumulate_fp8(a, values, part, sums);
        } else {
            Products::accumulate(a, values, part, sums);
        }
    }

    // Scores become weights relative to the running maximum, and what came before is scaled to it. Each tile has a key that
    // is seen, so the maximum is finite.
    __device__ __forceinline__ static void soften(float (&weights)[2][4], float (&sums)[kSums][4], float (&maximum)[2],
                                                  float (&total)[2]) {
        float factor[2];
        bool grown = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = h * 2;
            float largest = fmaxf(fmaxf(weights[0][i], weights[0][i + 1]), fmaxf(weights[1][i], weights[1][i + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
            largest = fmaxf(largest, maximum[h]);
            grown |= largest > maximum[h];
            factor[h] = exp2_fast(maximum[h] - largest);
            maximum[h] = largest;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                weights[n][i] = exp2_fast(weights[n][i] - largest);
                weights[n][i + 1] = exp2_fast(weights[n][i + 1] - largest);
            }
            total[h] = total[h] * factor[h] + (weights[0][i] + weights[0][i + 1]) + (weights[1][i] + weights[1][i + 1]);
        }
        if (__any_sync(kAllLanes, grown)) {
#pragma unroll
            for (int d = 0; d < kSums; ++d) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[d][i] *= factor[i / 2];
            }
        }
    }

    // Combines the teams' results and stores the unit's: the output if there is only one split, else a partial result.
    __device__ __forceinline__ void finish(const Unit& unit, const float (&sums)[kSums][4], const float (&maximum)[2],
                                           float (&total)[2], float2 (*states)[kRows], unsigned& arrived) const {
        // Columns are permuted so that the lanes' stores go to different banks.
        constexpr int kExchange = S::kRingBytes - S::kExchangeBytes;
        float* mine = reinterpret_cast<float*>(rings + team * S::kRingBytes + kExchange) + part * S::kColumns;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            total[h] += __shfl_xor_sync(kAllLanes, total[h], 1);
            total[h] += __shfl_xor_sync(kAllLanes, total[h], 2);
            const int row = h * 8 + lane / 4;
            if (row < unit.rows) {
                if (lane % 4 == 0 && part == 0) states[team][row] = make_float2(maximum[h], total[h]);
                if constexpr (Fp8) {
                    // Even and odd columns of 16; see `TileProducts::accumulate_fp8`.
#pragma unroll
                    for (int d = 0; d < kSums; d += 2) {
                        *reinterpret_cast<float4*>(mine + row * D + (d * 8 + lane % 4 * 4 ^ (row & 3) * 8)) = make_float4(
                            sums[d][h * 2], sums[d + 1][h * 2], sums[d][h * 2 + 1], sums[d + 1][h * 2 + 1]);
                    }
                } else {
#pragma unroll
                    for (int d = 0; d < kSums; ++d) {
                        *reinterpret_cast<float2*>(mine + row * D + (d * 8 + lane % 4 * 2 ^ (row & 3) * 8)) =
                            make_float2(sums[d][h * 2], sums[d][h * 2 + 1]);
                    }
                }
            }
        }
        __syncthreads();
        const float* teams = reinterpret_cast<const float*>(rings + kExchange);
        for (int first = threadIdx.x; first < unit.rows * (D / 4); first += kAtOnce * S::kThreads) {
            float largest[kAtOnce], weight[kAtOnce] = {};
            float4 sum[kAtOnce] = {};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const auto [row, column] = quad(unit, first, i);
                largest[i] = states[0][row].x;
#pragma unroll
                for (int t = 1; t < S::kTeams; ++t) largest[i] = fmaxf(largest[i], states[t][row].x);
#pragma unroll
                for (int t = 0; t < S::kTeams; ++t) {
                    const float factor = exp2_fast(states[t][row].x - largest[i]);
                    const float* sums_of = teams + t * (S::kRingBytes / int(sizeof(float))) + row * D;
                    const float4 of_team = *reinterpret_cast<const float4*>(sums_of + (column ^ (row & 3) * 8));
                    add(sum[i], weight[i], factor, of_team, states[t][row].y);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i * S::kThreads >= unit.rows * (D / 4)) break;
                const auto [row, column] = quad(unit, first, i);
                if (unit.splits == 1) {
                    store(unit, row, column, sum[i], largest[i], weight[i]);
                } else {
                    store_partial(unit, unit.split, 0, row, column, sum[i], make_float2(largest[i], weight[i]));
                }
            }
        }
        if (unit.splits > 1) {
            merge(unit, arrived);
        } else {
            __syncthreads();
        }
    }

    // Four columns of a row of a unit.
    struct Quad {
        int row, column;
    };

    // The `i`th that a thread combines together with number `first` of all. Behind the last it is that again.
    __device__ __forceinline__ static Quad quad(const Unit& unit, int first, int i) {
        const int at = min(first + i * S::kThreads, unit.rows * (D / 4) - 1);
        return {at / (D / 4), at % (D / 4) * 4};
    }

    // Merges what is complete with this unit.
    __device__ __forceinline__ void merge(const Unit& unit, unsigned& arrived) const {
        const int first = unit.split / kFanIn * kFanIn;
        const int merges = (unit.splits + kFanIn - 1) / kFanIn;
        if (!last(unit, first, 0, min(kFanIn, unit.splits - first), arrived)) return;
        merge(unit, first, 1, min(kFanIn, unit.splits - first), 0, merges > 1);
        if (merges > 1 && last(unit, 0, 1, merges, arrived)) merge(unit, 0, kFanIn, merges, 1, false);
    }

    // Counts one of `count` results as written; whether it was the last. Counters wrap to zero with the last one: ready for
    // the next launch.
    __device__ __forceinline__ bool last(const Unit& unit, int split, int level, int count, unsigned& arrived) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            arrived = atomicInc(args.counters + partial(unit, split) * 2 + level, count - 1);
            __threadfence();
        }
        __syncthreads();
        return arrived == count - 1;
    }

    // Merges `count` results of a level, `step` splits apart, into the output, or into the first one's place.
    __device__ __forceinline__ void merge(const Unit& unit, int first, int step, int count, int level, bool again) const {
        if constexpr (kAtOnce > 1) {
            if (count <= 4) return merge<4, kAtOnce>(unit, first, step, count, level, again);
        }
        merge<8, (kAtOnce + 1) / 2>(unit, first, step, count, level, again);
    }

    // The same, where a thread loads `kBatch` results of `kQuads` quads at once.
    template <int kBatch, int kQuads>
    __device__ __forceinline__ void merge(const Unit& unit, int first, int step, int count, int level, bool again) const {
        for (int at = threadIdx.x; at < unit.rows * (D / 4); at += kQuads * S::kThreads) {
            float largest[kQuads], weight[kQuads] = {};
            float4 sum[kQuads] = {};
#pragma unroll
            for (float& x : largest) x = -INFINITY;
            for (int i = 0; i < count; i += kBatch) {
                float4 parts[kQuads][kBatch];
                float2 states[kQuads][kBatch];
#pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    const auto [row, column] = quad(unit, at, q);
#pragma unroll
                    for (int j = 0; j < kBatch; ++j) {
                        // Repeating the last one changes no maximum.
                        const float* from = partial_row(unit, first + min(i + j, count - 1) * step, row);
                        parts[q][j] = load_fresh4(from + column);
                        states[q][j] = load_fresh2(from + D + level * 2);
                    }
                }
#pragma unroll
                for (int q = 0; q < kQuads; ++q) {
                    float grown = largest[q];
#pragma unroll
                    for (int j = 0; j < kBatch; ++j) grown = fmaxf(grown, states[q][j].x);
                    const float factor = exp2_fast(largest[q] - grown);
                    sum[q].x *= factor, sum[q].y *= factor, sum[q].z *= factor, sum[q].w *= factor;
                    weight[q] *= factor;
                    largest[q] = grown;
#pragma unroll
                    for (int j = 0; j < kBatch; ++j) {
                        if (i + j < count) add(sum[q], weight[q], exp2_fast(states[q][j].x - grown), parts[q][j], states[q][j].y);
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                // What lies behind the last quad is another thread's, which may have written the first split's place already.
                if (at + q * S::kThreads >= unit.rows * (D / 4)) break;
                const auto [row, column] = quad(unit, at, q);
                if (again) {
                    store_partial(unit, first, 1, row, column, sum[q], make_float2(largest[q], weight[q]));
                } else {
                    store(unit, row, column, sum[q], largest[q], weight[q]);
                }
            }
        }
    }

    __device__ __forceinline__ static void add(float4& sum, float& weight, float factor, const float4& part, float total) {
        sum.x += factor * part.x;
        sum.y += factor * part.y;
        sum.z += factor * part.z;
        sum.w += factor * part.w;
        weight += factor * total;
    }

    // The result of a whole context: here the sink counts, once.
    __device__ __forceinline__ void store(const Unit& unit, int row, int column, const float4& sum, float largest,
                                          float weight) const {
        if (args.sinks != nullptr) weight += exp2_fast(args.sinks[unit.head + row] * kLog2E - largest);
        const float inverse = args.out_scale / weight;
        bf16* to = args.out + (size_t(unit.first_row) * args.kv_heads * args.group + unit.head + row) * D + column;
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack(sum.x * inverse, sum.y * inverse), pack(sum.z * inverse, sum.w * inverse));
    }

    __device__ __forceinline__ void store_partial(const Unit& unit, int split, int level, int row, int column,
                                                  const float4& sum, float2 state) const {
        float* to = partial_row(unit, split, row);
        *reinterpret_cast<float4*>(to + column) = sum;
        if (column == 0) *reinterpret_cast<float2*>(to + D + level * 2) = state;
    }

    // Which partial result a split of the unit's run has; its splits are neighbours in the work list.
    __device__ __forceinline__ size_t partial(const Unit& unit, int split) const {
        return size_t(unit.item - unit.split + split) * tiles + unit.tile;
    }

    __device__ __forceinline__ float* partial_row(const Unit& unit, int split, int row) const {
        return args.scratch + (partial(unit, split) * min(kRows, args.group) + row) * partial_floats(D);
    }
};

}  // namespace

extern __shared__ __align__(128) char shared[];

// Grid: any number of blocks.
#define DECODE_KERNEL(NAME, D, CAPPED, FP8)                                                                              \
    extern "C" __global__ void __launch_bounds__(Shape<D, FP8>::kThreads, 2) NAME(                                       \
        const bf16* q, const void* k, const void* v, const Run* runs, const int* blocks, const Header* header,           \
        const Item* items, bf16* out, float* scratch, unsigned* counters, int q_stride, int kv_heads, int group,         \
        int block_shift, int block_rows, int window, float scale, float inner, const float* sinks, float out_scale) {    \
        __shared__ float2 states[Shape<D, FP8>::kTeams][kRows];                                                          \
        __shared__ unsigned arrived;                                                                                     \
        const Args args = {q,        k,        v,     runs,        blocks,     header, items, out,   scratch, counters,  \
                           q_stride, kv_heads, group, block_shift, block_rows, window, scale, inner, sinks,   out_scale}; \
        Decode<D, CAPPED, FP8>(args, shared)(states, arrived);                                                           \
    }
#define DECODE(D)                                                    \
    DECODE_KERNEL(attention_decode_##D, D, false, false)             \
    DECODE_KERNEL(attention_decode_capped_##D, D, true, false)       \
    DECODE_KERNEL(attention_decode_fp8_##D, D, false, true)          \
    DECODE_KERNEL(attention_decode_capped_fp8_##D, D, true, true)

DECODE(64)
DECODE(96)
DECODE(128)
DECODE(256)
DECODE(512)
