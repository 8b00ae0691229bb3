// What the ways to compute attention of many query rows share: the work list, and the softmax of a warp's tile of scores.
#pragma once

#include "common.cuh"
#include "mma.cuh"

// What a block of threads works on; see `PrefillItem` in crates/kernels/src/cuda/attention_prefill.rs.
struct __align__(16) Item {
    int run;
    int row;      // first row of the tile: token of the run * group + query head
    int begin;    // keys begin..end, or for a merge partial results begin..end
    int end;
    int partial;  // where the partial result goes, -1: it is the whole result
    int padding[3];
};

struct PrefillArgs {
    const bf16* q;
    const void* k;
    const void* v;
    const Run* runs;
    const int* blocks;
    const Item* items;
    bf16* out;
    float* scratch;
    int q_stride;  // elements from one token's queries to the next token's
    int kv_heads;
    int group;        // query heads of one KV head
    unsigned group_inverse;  // 2^32 / group, rounded up; 0 for a group of one
    int block_shift;  // log2 of the tokens of a block
    int block_rows;   // rows of the cache, in units of a head, from one block to the next
    int window;       // tokens seen, the current one included
    float scale;      // times log2(e): weights are powers of two
    float inner;      // of a soft cap: what products are multiplied by before `tanh_exp2`, whose results `scale` multiplies
    const float* sinks;  // a logit of each query head that has no value, or null
    const int* ends;     // of each row of the batch the key behind the last that it sees, ascending within a run; null: itself
    float out_scale;     // multiplies the result
    int work;         // items x KV heads

    // Token of a row; exact for rows below 2^32 / group.
    __device__ __forceinline__ int token(int row) const { return group_inverse == 0 ? row : __umulhi(row, group_inverse); }

    // What a sink adds to the weights of a run's row, relative to their maximum: to those of a whole result, once.
    __device__ __forceinline__ float sink(int kv_head, int row, float maximum) const {
        const int head = kv_head * group + row - token(row) * group;
        return exp2_fast(sinks[head] * kLog2E - maximum);
    }
};

// Floats of one partial result: the rows' sums, then maximum and sum of weights of each row.
constexpr __host__ __device__ int partial_floats(int rows, int head_dim) { return rows * (head_dim + 2); }

// A row's running maximum may be this much too small (log2) before the sums are scaled anew: scaling is rare, and nothing
// comes near to overflow.
constexpr float kSlack = 8.0f;

// The KV head of a block of threads that has one; read where it is used, for the large kernels have no register to keep it in.
struct HeadOfBlock {
    __device__ __forceinline__ operator int() const {
        int x;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
        return x;
    }
};

// A tile of query rows: `Rows` rows of `D` elements.
template <int D, int Rows, typename Head = HeadOfBlock>
struct QueryTile {
    static constexpr int kDim = D, kRows = Rows;

    const PrefillArgs args;
    const Item item;
    const Run run;
    const Head kv_head;
    const int origin;  // what its first row would be if the run began at position 0

    __device__ __forceinline__ QueryTile(const PrefillArgs& args, const Item& item, const Run& run, Head kv_head)
        : args(args),
          item(item),
          run(run),
          kv_head(kv_head),
          origin((run.context_end - run.len) * args.group + item.row) {}

    __device__ __forceinline__ QueryTile(const PrefillArgs& args, int index, Head kv_head)
        : QueryTile(args, args.items[index], args.runs[args.items[index].run], kv_head) {}

    // Rows that exist.
    __device__ __forceinline__ int rows() const { return min(Rows, run.len * args.group - item.row); }

    __device__ __forceinline__ int position(int row) const { return args.token(origin + row); }

    // The last key that a row sees. Rows that do not exist see as much as the run's last.
    __device__ __forceinline__ int last_seen(int row) const {
        if (args.ends == nullptr) return position(row);
        return args.ends[run.first_row + min(args.token(item.row + row), run.len - 1)] - 1;
    }

    // Offset of a row of the tile in a matrix of tokens.
    __device__ __forceinline__ size_t offset(int row, int stride) const {
        const int token = args.token(item.row + row), head = item.row + row - token * args.group;
        return size_t(run.first_row + token) * stride + (int(kv_head) * args.group + head) * D;
    }

    // Row of the cache, in units of a head, of the eight keys from `key` on; keys that nothing may read have none.
    __device__ __forceinline__ int cache_row(int key) const {
        if (key + 8 <= item.begin || key >= item.end) return 0;
        const int block = args.blocks[run.block_offset + (key >> args.block_shift)];
        return block * args.block_rows + (int(kv_head) << args.block_shift) + (key & ((1 << args.block_shift) - 1));
    }

    // Whether a key is the item's. Others become zero in shared memory: what a block's unused slots hold must not even be
    // multiplied by zero.
    __device__ __forceinline__ bool wanted(int key) const { return key >= item.begin && key < item.end; }

    __device__ __forceinline__ float* partial() const {
        return args.scratch + (size_t(item.partial) * args.kv_heads + int(kv_head)) * partial_floats(Rows, D);
    }
};

// A warp's share of a tile: `M` times 16 rows from `row` on, scores of `N` times 8 keys, as the matrix instructions lay
// them out: a lane holds columns `lane % 4 * 2` and the next of rows `lane / 4` and `lane / 4 + 8`. Its sums are those of `Columns`
// of the values' columns, from `first` on. Weights are powers of two of scores less `maximum`, which is `Below` less than that of the row.
template <typename Tile, int M, int N, int Columns = Tile::kDim, int Below = 0>
struct WarpRows {
    static constexpr int D = Tile::kDim, Rows = Tile::kRows;
    using Weights = float[M][N][4];
    using Sums = float[M][Columns / 8][4];

    const int row;
    const int first;
    float maximum[M][2];
    float total[M][2];

    __device__ __forceinline__ explicit WarpRows(int row, int first = 0) : row(row), first(first) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[m][h] = -INFINITY;
                total[m][h] = 0.0f;
            }
        }
    }

    // Products become capped scores, to be multiplied by the scale.
    __device__ __forceinline__ static void cap(float inner, Weights& weights) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) weights[m][n][i] = tanh_exp2(weights[m][n][i] * inner);
            }
        }
    }

    // Scores of keys that a row does not see become -inf.
    __device__ __forceinline__ void mask(const Tile& tile, int key, Weights& weights) const {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int own = row + m * 16 + h * 8 + lane / 4, position = tile.position(own);
                const int ahead = position - (key + lane % 4 * 2), least = position - tile.last_seen(own);
#pragma unroll
                for (int i = 0; i < N * 2; ++i) {
                    const int behind = ahead - (i / 2 * 8 + i % 2);
                    if (behind < least || behind >= tile.args.window) weights[m][i / 2][h * 2 + i % 2] = -INFINITY;
                }
            }
        }
    }

    // Scores become weights relative to the running maximum; `factor` is what the sums so far must be multiplied by.
    __device__ __forceinline__ void soften(float scale, Weights& weights, float (&factor)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float largest = -INFINITY;
#pragma unroll
                for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(weights[m][n][h * 2], weights[m][n][h * 2 + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2)) * scale;
                factor[m][h] = 1.0f;
                if (largest > maximum[m][h] + (kSlack + Below)) {
                    factor[m][h] = exp2_fast(maximum[m][h] - (largest - Below));
                    maximum[m][h] = largest - Below;
                }
                // A row that has seen nothing yet keeps weights of zero.
                const float base = maximum[m][h] == -INFINITY ? 0.0f : maximum[m][h];
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < N; ++n) {
#pragma unroll
                    for (int i = h * 2; i < h * 2 + 2; ++i) {
                        weights[m][n][i] = exp2_fast(fmaf(weights[m][n][i], scale, -base));
                        sum += weights[m][n][i];
                    }
                }
                total[m][h] = total[m][h] * factor[m][h] + sum;
            }
        }
    }

    __device__ __forceinline__ static void rescale(const float (&factor)[M][2], Sums& sums) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (!__any_sync(kAllLanes, factor[m][0] != 1.0f || factor[m][1] != 1.0f)) continue;
#pragma unroll
            for (int d = 0; d < Columns / 8; ++d) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][d][i] *= factor[m][i / 2];
            }
        }
    }

    // The four lanes of a row have summed different columns.
    __device__ __forceinline__ void finish_total() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                total[m][h] += __shfl_xor_sync(kAllLanes, total[m][h], 1);
                total[m][h] += __shfl_xor_sync(kAllLanes, total[m][h], 2);
            }
        }
    }

    // The sinks of a whole result.
    __device__ __forceinline__ void add_sinks(const Tile& tile) {
        if (tile.args.sinks == nullptr) return;
        const int own = tile.item.row + row + threadIdx.x % kWarp / 4;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) total[m][h] += tile.args.sink(tile.kv_head, own + m * 16 + h * 8, maximum[m][h]);
        }
    }

    // Normalises and stores, by way of `staging`, rows of `Stride` elements of which this warp's columns are its own, so that
    // stores are 16 bytes wide. Columns are XORed with `swap` of their row there, a multiple of 8 below 64.
    template <int Stride, typename Swap>
    __device__ __forceinline__ void write(const Tile& tile, const Sums& sums, bf16* staging, const Swap& swap) const {
        const int lane = threadIdx.x % kWarp;
        __syncwarp();
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float inverse = tile.args.out_scale / total[m][h];
                const int swapped = swap(m * 16 + h * 8 + lane / 4);
                bf16* to = staging + (m * 16 + h * 8 + lane / 4) * Stride + first + lane % 4 * 2;
#pragma unroll
                for (int d = 0; d < Columns / 8; ++d) {
                    *reinterpret_cast<uint32_t*>(to + (d * 8 ^ swapped)) =
                        pack(sums[m][d][h * 2] * inverse, sums[m][d][h * 2 + 1] * inverse);
                }
            }
        }
        __syncwarp();
        constexpr int kChunks = Columns / 8;
        const int count = min(M * 16, tile.rows() - row), stride = tile.args.kv_heads * tile.args.group * D;
        for (int chunk = lane; chunk < count * kChunks; chunk += kWarp) {
            const int at = chunk / kChunks, column = first + chunk % kChunks * 8;
            store8(tile.args.out + tile.offset(row + at, stride) + column, load8(staging + at * Stride + (column ^ swap(at))));
        }
    }

    // Stores what `attention_prefill_merge` needs.
    __device__ __forceinline__ void write_partial(const Tile& tile, const Sums& sums) const {
        const int lane = threadIdx.x % kWarp;
        float* to = tile.partial();
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = row + m * 16 + h * 8 + lane / 4;
                if (at >= tile.rows()) continue;
                float* columns = to + at * D + first + lane % 4 * 2;
#pragma unroll
                for (int d = 0; d < Columns / 8; ++d) {
                    *reinterpret_cast<float2*>(columns + d * 8) = make_float2(sums[m][d][h * 2], sums[m][d][h * 2 + 1]);
                }
                if (lane % 4 == 0 && first == 0) {
                    *reinterpret_cast<float2*>(to + Rows * D + at * 2) = make_float2(maximum[m][h], total[m][h]);
                }
            }
        }
    }
};
