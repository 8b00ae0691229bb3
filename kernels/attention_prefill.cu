// Causal attention of many query rows over the paged cache: prompts, and chunks of prompts over what is cached already. Rows may see
// what follows them in their run too, as far as a list says.
//
// Flash attention: a block of threads holds a tile of query rows, streams tiles of keys and values through shared memory and
// keeps a running maximum and sum for each row. A run's rows are its tokens times the query heads of one KV head, token by
// token, so one read of the keys serves all those heads and short runs still fill a tile. An item may cover only a part of
// the context; then its unnormalised result goes to scratch, and `attention_prefill_merge` combines the parts.
#include "attention_prefill.cuh"
#include "attention_prefill_hopper.cuh"
#include "fp8.cuh"

namespace {

template <int D, bool Fp8>
struct Shape {
    using Element = typename KvElement<Fp8>::Type;
    // Less than 99 KiB of shared memory, which every GPU has.
    static constexpr int kRows = D <= 128 ? 128 : D <= 256 ? 64 : 32;
    static constexpr int kKeys = D <= 128 ? 64 : D <= 256 ? 32 : 16;
    static constexpr int kWarps = 4;
    // Warps that have the same rows, and of which each sums a part of the values' columns: all do not fit its registers. The
    // scores are computed by each.
    static constexpr int kParts = D <= 256 ? 1 : 2;
    static constexpr int kThreads = kWarps * kWarp;
    // Keys and values of 8 bits have one tile each, and one each as they are in the cache, from which it is filled.
    static constexpr int kStages = Fp8 ? 2 : 3;
    static constexpr int kTile = kKeys * D;
    static constexpr int kRaw = Fp8 ? kKeys * D : 0;
    static constexpr int kVec = 16 / int(sizeof(Element));
    static constexpr int kGroups = kKeys / 8;

    // Tiles are swizzled: the column of an element is XORed with this, so that the eight rows of an 8x8 matrix lie in different banks. Padded rows
    // would leave no room for a second block on GPUs with 164 KiB of shared memory.
    __device__ __forceinline__ static int swap(int row) {
        // Every second row of 192 bytes begins in the other half of the banks.
        return kSwapBytes == 128 ? row % 8 * 8 : row / 2 % 4 * 8;
    }
    // Elements of a row stay within aligned spans of so many bytes.
    static constexpr int kSwapBytes = D % 64 == 0 ? 128 : 64;

    // Index of an element in a tile.
    __device__ __forceinline__ static int place(int row, int column) { return row * D + (column ^ swap(row)); }
};

// By the matrix instructions of a warp, from compute capability 8.0 on. Keys and values take turns in a ring of tiles.
// Scores have a soft cap if `Capped`, and keys and values 8 bits if `Fp8`.
template <int D, bool Capped, bool Fp8>
struct PortablePrefill : QueryTile<D, Shape<D, Fp8>::kRows> {
    using S = Shape<D, Fp8>;
    using Element = typename S::Element;
    using Base = QueryTile<D, S::kRows>;
    static constexpr int kM = S::kRows * S::kParts / S::kWarps / 16;  // tiles of 16 rows of a warp
    static constexpr int kN = S::kKeys / 8;
    static constexpr int kColumns = D / S::kParts;
    static constexpr int kD = kColumns / 8;
    static constexpr int kRowBytes = D * int(sizeof(bf16));
    using Warp = WarpRows<Base, kM, kN, kColumns>;
    using Base::args, Base::item;

    bf16* const q_tile;
    bf16* const ring;
    uint8_t* const raw;  // of 8 bits: keys, then values
    int* const groups;  // for the tile being loaded and the next: cache row of each eight keys

    __device__ __forceinline__ PortablePrefill(const PrefillArgs& args, char* shared)
        : Base(args, blockIdx.y, HeadOfBlock()),
          q_tile(reinterpret_cast<bf16*>(shared)),
          ring(q_tile + S::kRows * D),
          raw(reinterpret_cast<uint8_t*>(ring + S::kStages * S::kTile)),
          groups(reinterpret_cast<int*>(raw + 2 * S::kRaw)) {}

    // Begins to copy a tile of keys or values.
    __device__ __forceinline__ void load(const void* cache, int tile, int stage) const {
        constexpr int kChunks = D / S::kVec;
        const int* from = groups + (tile & 1) * S::kGroups;
        // Not all at once: their addresses would take the registers of the sums.
#pragma unroll 2
        for (int i = 0; i < S::kKeys * kChunks / S::kThreads; ++i) {
            const int chunk = threadIdx.x + i * S::kThreads;
            const int row = chunk / kChunks, column = chunk % kChunks * S::kVec;
            void* to = ring + stage * S::kTile + S::place(row, column);
            if constexpr (Fp8) to = raw + stage * S::kRaw + chunk * S::kVec;
            copy_async(to, static_cast<const Element*>(cache) + size_t(from[row / 8] + row % 8) * D + column,
                       this->wanted(tile * S::kKeys + row));
        }
    }

    // Fills a tile with what this thread itself has copied of it.
    __device__ __forceinline__ void widen(int stage) const {
        constexpr int kChunks = D / S::kVec;
#pragma unroll 1
        for (int i = 0; i < S::kKeys * kChunks / S::kThreads; ++i) {
            const int chunk = threadIdx.x + i * S::kThreads;
            const int row = chunk / kChunks, column = chunk % kChunks * S::kVec;
            const uint4 x = *reinterpret_cast<const uint4*>(raw + stage * S::kRaw + chunk * S::kVec);
            const auto to = [&](int half) {
                return reinterpret_cast<uint4*>(ring + stage * S::kTile + S::place(row, column + half * 8));
            };
            *to(0) = make_uint4(widen_fp8(x.x & 0xffff), widen_fp8(x.x >> 16), widen_fp8(x.y & 0xffff), widen_fp8(x.y >> 16));
            *to(1) = make_uint4(widen_fp8(x.z & 0xffff), widen_fp8(x.z >> 16), widen_fp8(x.w & 0xffff), widen_fp8(x.w >> 16));
        }
    }

    // The stage of the values beside these keys, or of the next keys beside these values; of 8 bits, each has its own.
    __device__ __forceinline__ static int after(int stage) { return Fp8 ? 1 - stage : stage == 2 ? 0 : stage + 1; }

    // The one to load into meanwhile.
    __device__ __forceinline__ static int free(int stage) { return Fp8 ? stage : stage == 0 ? 2 : stage - 1; }

    __device__ __forceinline__ void load_queries() const {
        constexpr int kChunks = D / 8;
        const int count = this->rows();
#pragma unroll 4
        for (int i = 0; i < S::kRows * kChunks / S::kThreads; ++i) {
            const int chunk = threadIdx.x + i * S::kThreads;
            const int row = chunk / kChunks, column = chunk % kChunks * 8;
            const bf16* from = args.q + (row < count ? this->offset(row, args.q_stride) + column : 0);
            copy_async(q_tile + S::place(row, column), from, row < count);
        }
    }

    __device__ __forceinline__ void operator()() const {
        const int first = item.begin / S::kKeys, last = (item.end + S::kKeys - 1) / S::kKeys;

        if (threadIdx.x < 2 * S::kGroups) {
            const int tile = first + threadIdx.x / S::kGroups;
            groups[(tile & 1) * S::kGroups + threadIdx.x % S::kGroups] =
                this->cache_row(tile * S::kKeys + threadIdx.x % S::kGroups * 8);
        }
        __syncthreads();
        load_queries();
        load(args.k, first, 0);
        commit_async();
        load(args.v, first, 1);
        commit_async();

        Warp warp(threadIdx.x / kWarp / S::kParts * kM * 16, threadIdx.x / kWarp % S::kParts * kColumns);
        const bool idle = warp.row >= this->rows();
        const int lowest = this->position(warp.row);
        const int highest = this->last_seen(min(warp.row + kM * 16, this->rows()) - 1);
        float sums[kM][kD][4] = {};
        float weights[kM][kN][4];

        int stage = 0;
        for (int tile = first; tile < last; ++tile) {
            const int key = tile * S::kKeys;
            const bool skip = idle || key > highest || key + S::kKeys <= lowest - (args.window - 1);

            // The keys have arrived, and everyone is done with the stage that is loaded next, or was filled here: since the
            // barrier before, nobody reads it.
            wait_async<1>();
            if constexpr (Fp8) widen(stage);
            __syncthreads();
            if (tile + 1 < last) load(args.k, tile + 1, free(stage));
            commit_async();
            const int g = threadIdx.x;
            const int ahead = g < S::kGroups ? this->cache_row(key + 2 * S::kKeys + g * 8) : 0;
            if (!skip) {
                score(warp.row, stage, weights);
                if constexpr (Capped) warp.cap(args.inner, weights);
                if (key + S::kKeys - 1 > lowest || key <= highest - args.window) warp.mask(*this, key, weights);
                float factor[kM][2];
                warp.soften(args.scale, weights, factor);
                warp.rescale(factor, sums);
            }
            if (g < S::kGroups) groups[(tile & 1) * S::kGroups + g] = ahead;
            stage = after(stage);

            wait_async<1>();
            if constexpr (Fp8) widen(stage);
            __syncthreads();
            if (tile + 1 < last) load(args.v, tile + 1, free(stage));
            commit_async();
            if (!skip) accumulate(warp.first, weights, stage, sums);
            stage = after(stage);
        }
        // Others may still read the queries, in whose place the results are.
        if constexpr (S::kParts > 1) __syncthreads();
        if (idle) return;
        warp.finish_total();
        // Read anew rather than kept in registers all the time.
        const Base tile(args, blockIdx.y, HeadOfBlock());
        if (tile.item.partial < 0) {
            warp.add_sinks(tile);
            warp.template write<D>(tile, sums, q_tile + warp.row * D, S::swap);
        } else {
            warp.write_partial(tile, sums);
        }
    }

    // What a lane passes to `load_matrices`: the address of its row of a matrix, which begins at `row` and `column` of the tile. `matrix_at` turns
    // it into that of the matrix `columns` further on, a multiple of 16.
    __device__ __forceinline__ static uint32_t first_matrix(const bf16* tile, int row, int column) {
        return shared_address(tile + S::place(row, column));
    }
    __device__ __forceinline__ static uint32_t matrix_at(uint32_t first, int columns) {
        const uint32_t bytes = columns * sizeof(bf16);
        return (first ^ bytes % S::kSwapBytes) + bytes / S::kSwapBytes * S::kSwapBytes;
    }

    // weights = queries x keys
    __device__ __forceinline__ void score(int warp_row, int stage, float (&weights)[kM][kN][4]) const {
        const int lane = threadIdx.x % kWarp;
        const uint32_t q = first_matrix(q_tile, warp_row + lane % 16, lane / 16 * 8);
        const uint32_t k = first_matrix(ring + stage * S::kTile, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int n = 0; n < kN; ++n) weights[m][n][0] = weights[m][n][1] = weights[m][n][2] = weights[m][n][3] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) load_matrices(a[m], matrix_at(q, d) + m * 16 * kRowBytes);
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                uint32_t b[4];
                load_matrices(b, matrix_at(k, d) + n * 8 * kRowBytes);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    mma(weights[m][n], a[m], b[0], b[1]);
                    mma(weights[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // sums += weights x values, of the columns from `first` on
    __device__ __forceinline__ void accumulate(int first, const float (&weights)[kM][kN][4], int stage,
                                               float (&sums)[kM][kD][4]) const {
        const int lane = threadIdx.x % kWarp;
        const uint32_t v = first_matrix(ring + stage * S::kTile, lane % 16, first + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                a[m][0] = pack(weights[m][n][0], weights[m][n][1]);
                a[m][1] = pack(weights[m][n][2], weights[m][n][3]);
                a[m][2] = pack(weights[m][n + 1][0], weights[m][n + 1][1]);
                a[m][3] = pack(weights[m][n + 1][2], weights[m][n + 1][3]);
            }
#pragma unroll
            for (int d = 0; d < kD; d += 2) {
                uint32_t b[4];
                load_matrices_transposed(b, matrix_at(v, d * 8) + n * 8 * kRowBytes);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    mma(sums[m][d], a[m], b[0], b[1]);
                    mma(sums[m][d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

// Combines the partial results of a tile: a warp for each row.
__device__ __forceinline__ void merge(const PrefillArgs& args, int head_dim, int tile_rows) {
    const int kv_head = blockIdx.x;
    const Item item = args.items[blockIdx.y];
    const Run run = args.runs[item.run];
    const int row = blockIdx.z * (blockDim.x / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (row >= min(tile_rows, run.len * args.group - item.row)) return;

    const size_t step = size_t(args.kv_heads) * partial_floats(tile_rows, head_dim);
    const float* part = args.scratch + item.begin * step + size_t(kv_head) * partial_floats(tile_rows, head_dim);
    const float* states = part + tile_rows * head_dim + row * 2;
    const int count = item.end - item.begin;
    float largest = -INFINITY;
    for (int i = lane; i < count; i += kWarp) largest = fmaxf(largest, states[i * step]);
    largest = warp_max(largest);
    float total = 0.0f;
    for (int i = lane; i < count; i += kWarp) total += states[i * step + 1] * exp2_fast(states[i * step] - largest);
    total = warp_sum(total);
    if (args.sinks != nullptr) total += args.sink(kv_head, item.row + row, largest);
    const float inverse = args.out_scale / total;

    const int token = args.token(item.row + row), head = item.row + row - token * args.group;
    bf16* out =
        args.out + ((size_t(run.first_row + token) * args.kv_heads + kv_head) * args.group + head) * head_dim;
    for (int column = lane * 4; column < head_dim; column += kWarp * 4) {
        float4 sum = {};
        for (int i = 0; i < count; ++i) {
            const float weight = exp2_fast(states[i * step] - largest);
            const float4 x = *reinterpret_cast<const float4*>(part + i * step + row * head_dim + column);
            sum.x += weight * x.x;
            sum.y += weight * x.y;
            sum.z += weight * x.z;
            sum.w += weight * x.w;
        }
        *reinterpret_cast<uint2*>(out + column) =
            make_uint2(pack(sum.x * inverse, sum.y * inverse), pack(sum.z * inverse, sum.w * inverse));
    }
}

}  // namespace

extern __shared__ __align__(16) char shared[];
// The same memory, aligned for `matrix_at`, which XORs low bits of addresses.
extern __shared__ __align__(128) char portable_shared[];

#define ARGS                                                                                                           \
    const bf16 *q, const void *k, const void *v, const Run *runs, const int *blocks, const Item *items, bf16 *out,      \
        float *scratch, int q_stride, int kv_heads, int group, unsigned group_inverse, int block_shift, int block_rows, \
        int window, float scale, float inner, const float *sinks, const int *ends, float out_scale, int work
#define PACKED_ARGS                                                                                                    \
    PrefillArgs {                                                                                                      \
        q, k, v, runs, blocks, items, out, scratch, q_stride, kv_heads, group, group_inverse, block_shift, block_rows, \
            window, scale, inner, sinks, ends, out_scale, work                                                               \
    }

// Grid: KV heads x items.
#define PREFILL_KERNEL(NAME, D, CAPPED, FP8)                                              \
    extern "C" __global__ void __launch_bounds__(Shape<D, FP8>::kThreads, 2) NAME(ARGS) { \
        pdl_wait();                                                                       \
        pdl_launch();                                                                     \
        PortablePrefill<D, CAPPED, FP8>(PACKED_ARGS, portable_shared)();                  \
    }
#define PREFILL(D)                                                  \
    PREFILL_KERNEL(attention_prefill_##D, D, false, false)          \
    PREFILL_KERNEL(attention_prefill_capped_##D, D, true, false)    \
    PREFILL_KERNEL(attention_prefill_fp8_##D, D, false, true)       \
    PREFILL_KERNEL(attention_prefill_capped_fp8_##D, D, true, true)

PREFILL(64)
PREFILL(96)
PREFILL(128)
PREFILL(256)
PREFILL(512)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int D, bool Capped, bool Fp8>
__device__ __forceinline__ void hopper_prefill(const PrefillArgs& args, const TensorMap* key_map, const TensorMap* value_map) {
    using Prefill = HopperPrefill<D, Capped, Fp8>;
    pdl_wait();
    pdl_launch();
    using Shared = typename Prefill::Shared;
    Prefill{args, key_map, value_map, *reinterpret_cast<Shared*>(shared + (-shared_address(shared) & 1023))}();
}
#define HOPPER_BODY(D, CAPPED, FP8, KEY_MAP, VALUE_MAP) hopper_prefill<D, CAPPED, FP8>(PACKED_ARGS, KEY_MAP, VALUE_MAP);
#else
#define HOPPER_BODY(D, CAPPED, FP8, KEY_MAP, VALUE_MAP)
#endif

// Grid: as many blocks as run at once; on compute capability 9.0 alone.
#define HOPPER_PREFILL(NAME, D, CAPPED)                                                                                      \
    extern "C" __global__ void __launch_bounds__(hopper_threads(false), 1)                                                   \
        NAME(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map, ARGS) {                 \
        HOPPER_BODY(D, CAPPED, false, &key_map, &value_map)                                                                  \
    }
#define HOPPER_PREFILL_FP8(NAME, D, CAPPED)                                            \
    extern "C" __global__ void __launch_bounds__(hopper_threads(true), 1) NAME(ARGS) { \
        HOPPER_BODY(D, CAPPED, true, nullptr, nullptr)                                 \
    }
#define HOPPER_PREFILLS(D)                                 \
    HOPPER_PREFILL(attention_prefill_hopper_##D, D, false) \
    HOPPER_PREFILL(attention_prefill_hopper_capped_##D, D, true)
#define HOPPER_PREFILLS_FP8(D)                                     \
    HOPPER_PREFILL_FP8(attention_prefill_hopper_fp8_##D, D, false) \
    HOPPER_PREFILL_FP8(attention_prefill_hopper_capped_fp8_##D, D, true)

// As `hopper_head_dims` says.
HOPPER_PREFILLS(64)
HOPPER_PREFILLS(96)
HOPPER_PREFILLS(128)
HOPPER_PREFILLS(256)
HOPPER_PREFILLS_FP8(64)
HOPPER_PREFILLS_FP8(128)
HOPPER_PREFILLS_FP8(256)

// Grid: KV heads x merges x (rows of a tile / warps of a block).
extern "C" __global__ void __launch_bounds__(256) attention_prefill_merge(ARGS, int head_dim, int tile_rows) {
    pdl_wait();
    pdl_launch();
    merge(PACKED_ARGS, head_dim, tile_rows);
}
