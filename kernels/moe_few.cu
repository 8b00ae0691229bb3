// Mixtures of experts: the products of tiles of up to 16 rows, which take as long as reading the weights of the experts that are hit;
// moe_few_4bit.cu has those of weights of four bits.
//
// A block has 16 rows of weights, of a gated product eight rows of the gate and the same eight of the up projection, and each of its
// warps a part of k: one row of x is too little work for fewer warps. A warp has a ring of stages in shared memory, each with 128
// bytes of every row, whatever the format: shorter pieces cost as many accesses and move less. Rows of x are read
// into registers ahead, as they may come from L2. The sums of the parts meet in shared memory and are added in order. Of short rows of
// eight bits, in a plain product, each warp has all of k, and a block 32 rows of weights: nothing is added up then, and blocks are half as
// many.
//
// An expert that all rows go to has tiles of its own in the same launches.
//
// E4m3 weights with scales of blocks are multiplied without their scale, which multiplies the sums of each 128 inputs instead: nothing is
// rounded.
#include "experts_few.cuh"

namespace {

constexpr int kWarps = 2;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16;  // of weights, of a warp
constexpr int kFewRows = 16;  // of x, of a tile
constexpr int kRowBytes = 128;  // of a stage
constexpr int kRowPieces = kRowBytes / 16;
constexpr int kRowsAtOnce = kWarp / kRowPieces;
constexpr int kStageBytes = kRows * kRowBytes;
constexpr int kSums = kRows + 1;  // of a row of x: no bank conflicts

template <Format kFormat>
constexpr int kStageChunks = kRowBytes / kStoredBytes<kFormat>;

// As in `few_ring` of crates/kernels/src/cuda/moe/products.rs; what was measured is in tests/bench/h200/kernels.md.
template <Format kFormat>
constexpr int kStagesOf = kFormat == Format::kBf16 ? 4 : 3;

// Inputs between the two vectors of a chunk that a lane has.
template <Format kFormat>
constexpr int kNextVector = kFormat == Format::kBf16 ? 32 : 8;

// Where a 16-byte piece of a row lies in a stage: what is read at once, of two rows, is in different banks.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * kRowBytes + (piece ^ (row & 1) * 4) * 16; }

// A lane's vectors of a chunk of a row of weights.
struct Vectors {
    uint4 of[2];
};

template <Format kFormat>
__device__ __forceinline__ Vectors load_vectors(const uint8_t* stage, int row, int chunk, int quad) {
    if constexpr (kFormat == Format::kBf16) {
        return {*reinterpret_cast<const uint4*>(stage + swizzled(row, quad)), *reinterpret_cast<const uint4*>(stage + swizzled(row, quad + 4))};
    } else {
        const uint4 codes = *reinterpret_cast<const uint4*>(stage + swizzled(row, chunk * 4 + quad));
        return {widen_e4m3(make_uint2(codes.x, codes.y)), widen_e4m3(make_uint2(codes.z, codes.w))};
    }
}

// What a warp multiplies: eight rows of the expert's weights and eight more, of the other projection if gated. Where there are no more,
// eight are computed twice.
struct Rows {
    int first, second;
    bool gated;

    __device__ __forceinline__ int row(int i) const { return i < 8 ? first + i : second + i - 8; }
    // log2 of the outputs of a row of x.
    __device__ __forceinline__ int outputs_log2() const { return gated || first == second ? 3 : 4; }
};

// The rows of a warp, in a block whose warps divide k into `kParts`. With all of k in each warp, products are not gated.
template <int kParts>
__device__ __forceinline__ Rows rows_of_warp(const Problem& p) {
    const bool gated = kParts > 1 && p.kind != kPlain;
    const int unit = blockIdx.x * (kWarps / kParts) + threadIdx.x / kWarp / kParts;
    const int first = unit * (gated ? kRows / 2 : kRows);
    return {first, gated ? first + p.n : p.n - first > 8 ? first + 8 : first, gated};
}

// A warp's weights on their way: what a lane copies is a piece of every fourth row, in the stages of its warp.
template <Format kFormat, int kParts>
struct Copies {
    static constexpr int kStages = kStagesOf<kFormat>, kRingBytes = kStages * kStageBytes;

    const uint8_t* ring;
    const uint8_t *first_from, *second_from;
    uint32_t first_place, place;
    int begin, end, pieces, four_rows;

    __device__ __forceinline__ Copies(const Problem& p, int expert, const Rows& rows, uint8_t* shared)
        : pieces(row_pieces<kFormat>(p)), four_rows(kRowsAtOnce * p.pitch) {
        const int warp = threadIdx.x / kWarp, part = warp % kParts, stages = (pieces + kRowPieces - 1) / kRowPieces;
        begin = stages * part / kParts, end = stages * (part + 1) / kParts;
        static_assert(kRows == 4 * kRowsAtOnce);
        first_from = of_expert(p.weight, p.stride, expert) + size_t(rows.first + first_row()) * p.pitch + begin * kRowBytes + piece() * 16;
        second_from = first_from + size_t(rows.second - rows.first) * p.pitch;
        ring = shared + warp * kRingBytes;
        place = first_place = shared_address(ring + swizzled(first_row(), piece()));
    }

    __device__ __forceinline__ static int piece() { return threadIdx.x % kRowPieces; }
    __device__ __forceinline__ static int first_row() { return threadIdx.x % kWarp / kRowPieces; }

    __device__ __forceinline__ void request(int stage) {
        if (stage < end) {
            const bool wanted = stage * kRowPieces + piece() < pieces;
            constexpr int kFourRows = kRowsAtOnce * kRowBytes;
            // A copy that is not wanted reads nothing, wherever its source is. Where instructions are few beside bytes, copies are a
            // little faster if sources are computed anew.
            const size_t at = kFormat == Format::kBf16 ? size_t(stage - begin) * kRowBytes : 0;
            copy_async(place, first_from + at, wanted);
            copy_async(place + kFourRows, first_from + four_rows + at, wanted);
            copy_async(place + 2 * kFourRows, second_from + at, wanted);
            copy_async(place + 3 * kFourRows, second_from + four_rows + at, wanted);
        }
        commit_async();
        if (kFormat != Format::kBf16) first_from += kRowBytes, second_from += kRowBytes;
        place = place == first_place + (kStages - 1) * kStageBytes ? first_place : place + kStageBytes;
    }

    // Requests all but one of the stages that the ring holds: with all, rows of x come later, and products take longer.
    __device__ __forceinline__ void fill() {
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) request(begin + i);
    }
};

// The ring of `copies` has been requested.
template <int kTokenTiles, Format kFormat, int kParts, bool kOneRow>
__device__ __forceinline__ void multiply_tile(const Problem& p, const Tile& tile, const Rows& rows, Copies<kFormat, kParts>& copies,
                                              uint8_t* shared) {
    constexpr int kStages = kStagesOf<kFormat>, kRingBytes = kStages * kStageBytes;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4;
    const int begin = copies.begin, end = copies.end;
    const float* const scales = of_expert(p.scales, p.stride, tile.expert);

    // Columns of no row repeat the first one and are not stored. Past the end of k weights are zeros and x its last inputs.
    const int first_input = input_vector<kFormat>(quad, 0) * 8;
    const bf16* x[kTokenTiles];
    const int skipped = begin * kStageChunks<kFormat> * kChunk;
    // Vectors that are neighbours are both past the end, or neither.
    constexpr bool kNeighbours = kNextVector<kFormat> == 8;
    int last = p.k - first_input - (kNeighbours ? 16 : 8) - skipped;
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
        const int row = j * 8 + group;
        x[j] = (kOneRow ? p.x : p.inputs(tile.first + (row < tile.count ? row : 0))) + first_input + skipped;
    }
    // With up to 8 rows, x is read a stage ahead; with 16 there are registers for one chunk.
    constexpr int kAhead = kTokenTiles == 1 ? kStageChunks<kFormat> : 1;
    uint4 next[kAhead][2][kTokenTiles];
    const auto load_inputs = [&](int chunk, bool may_end) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = chunk * kChunk + (kNeighbours ? 0 : half * kNextVector<kFormat>);
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
                const bf16* const from = x[j] + (may_end ? min(at, last) : at) + (kNeighbours ? half * 8 : 0);
                next[chunk % kAhead][half][j] = *reinterpret_cast<const uint4*>(from);
            }
        }
    };
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) load_inputs(chunk, true);
    const int low_row = rows.row(group), high_row = rows.row(group + 8);
    // Of blocks, one for each stage.
    const float* const low_scales = scales + low_row / kFp8Block * p.scale_stride;
    const float* const high_scales = kParts == 1 ? low_scales : scales + high_row / kFp8Block * p.scale_stride;
    constexpr bool kBlocks = kFormat == Format::kFp8Blocks;
    static_assert(!kBlocks || kStageChunks<kFormat> * kChunk == kFp8Block);
    float low_next = kBlocks && begin < end ? low_scales[begin] : 1.0f, high_next = kBlocks && begin < end ? high_scales[begin] : 1.0f;

    float acc[kTokenTiles][4] = {};
    int slot = 0;
    const auto multiply_stage = [&](int stage, bool is_last) {
        wait_async<kStages - 2>();
        __syncwarp();
        copies.request(stage + kStages - 1);
        const uint8_t* const weights = copies.ring + slot * kStageBytes;
        slot = slot + 1 == kStages ? 0 : slot + 1;
        const float low_scale = low_next, high_scale = high_next;
        float of_block[kTokenTiles][4] = {};
        auto& sums = kBlocks ? of_block : acc;
        if (kBlocks && !is_last) low_next = low_scales[stage + 1], high_next = high_scales[stage + 1];
#pragma unroll
        for (int chunk = 0; chunk < kStageChunks<kFormat>; ++chunk) {
            // What is read one chunk ahead is requested before the products, what is read a stage ahead after them: that saves copies of
            // registers.
            uint4 v[2][kTokenTiles];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < kTokenTiles; ++j) v[half][j] = next[chunk % kAhead][half][j];
            }
            const bool ends = is_last || chunk + kAhead >= kStageChunks<kFormat>;
            if (kAhead == 1) load_inputs(chunk + kAhead, ends);
            const Vectors low = load_vectors<kFormat>(weights, group, chunk, quad);
            const Vectors high = load_vectors<kFormat>(weights, group + 8, chunk, quad);
#pragma unroll
            for (int half = 0; half < 2; ++half) add_products(sums, low.of[half], high.of[half], v[half]);
            if (kAhead > 1) load_inputs(chunk + kAhead, ends);
        }
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
            x[j] += kStageChunks<kFormat> * kChunk;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (kBlocks) acc[j][i] = fmaf(of_block[j][i], i < 2 ? low_scale : high_scale, acc[j][i]);
            }
        }
        last -= kStageChunks<kFormat> * kChunk;
    };
    for (int stage = begin; stage < end - 1; ++stage) multiply_stage(stage, false);
    if (begin < end) multiply_stage(end - 1, true);

    const bf16* const bias = of_expert(p.bias, p.stride, tile.expert);
    const auto finished = [&](float sum, int row) {
        const float scale = kFormat == Format::kFp8 ? scales[row] : 1.0f;
        return fmaf(sum, scale, bias != nullptr ? __bfloat162float(bias[row]) : 0.0f);
    };
    if constexpr (kParts == 1) {
        // The warp's sums are whole: a lane has two rows of weights for two rows of x.
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = j * 8 + quad * 2 + i;
                if (row >= tile.count) continue;
                bf16* const out = p.out + size_t(tile.first + row) * p.n;
                out[low_row] = __float2bfloat16(finished(acc[j][i], low_row));
                out[high_row] = __float2bfloat16(finished(acc[j][i + 2], high_row));
            }
        }
        return;
    }
    // Sums take the place of the rings: [part][row of x][row of weights].
    wait_async<0>();
    __syncthreads();
    constexpr int kPartSums = kTokenTiles * 8 * kSums;
    static_assert(kParts * kPartSums * int(sizeof(float)) <= kParts * kRingBytes);
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
        float* const at = sums + warp * kPartSums + (j * 8 + quad * 2) * kSums + group;
        at[0] = acc[j][0], at[kSums] = acc[j][1], at[8] = acc[j][2], at[kSums + 8] = acc[j][3];
    }
    __syncthreads();
    const auto added = [&](const float* at, int row) {
        float sum = at[0];
#pragma unroll
        for (int part = 1; part < kParts; ++part) sum += at[part * kPartSums];
        return finished(sum, row);
    };
    const int outputs_log2 = rows.outputs_log2(), column = threadIdx.x & (1 << outputs_log2) - 1, output = rows.row(column);
    for (int row = threadIdx.x >> outputs_log2; row < tile.count; row += kThreads >> outputs_log2) {
        const float* const at = sums + row * kSums + column;
        float value = added(at, output);
        if (rows.gated) value = activate(p.kind, value, added(at + 8, output + p.n));
        p.out[size_t(tile.first + row) * p.n + output] = __float2bfloat16(value);
    }
}

// An expert that all rows go to, as wide as the others; its places are behind all routes.
struct SharedExpert {
    const uint8_t* weight;
    const float* scales;
    int rows;  // 0 if there is none
    int first_place;

    __device__ __forceinline__ int tiles() const { return (rows + kFewRows - 1) / kFewRows; }
};

// The first blocks have the shared expert's tiles, the next ones those of the list. Where tiles are known before the kernel ahead has ended,
// `routed`, weights are asked for then.
template <Format kFormat, int kParts>
__device__ __forceinline__ void product(Problem p, const SharedExpert& of_all, bool routed) {
    extern __shared__ __align__(128) uint8_t shared[];
    const Rows rows = rows_of_warp<kParts>(p);
    // Only where no warps of a block meet later.
    if (kParts < kWarps && rows.first >= p.n) return;
    const int shared_tiles = of_all.tiles(), y = int(blockIdx.y) - shared_tiles;
    const bool is_shared = y < 0;
    Tile tile{};
    if (is_shared) {
        const int first = blockIdx.y * kFewRows;
        tile.first = of_all.first_place + first, tile.count = min(kFewRows, of_all.rows - first);
        p.weight = of_all.weight, p.scales = of_all.scales, p.bias = nullptr;
        if (p.top_k > 0) p.x -= size_t(of_all.first_place) * p.k, p.top_k = 0;
    } else {
        int count;
        if (routed) {
            // Not from L1, which may have kept what was there in a kernel before.
            count = __ldcg(&p.tiles[0].count);
            const int4 listed = __ldcg(reinterpret_cast<const int4*>(p.tiles + 1 + y));
            tile = {listed.x, listed.y, listed.z, 0};
        } else {
            pdl_wait();
            count = p.tiles[0].count;
            tile = p.tiles[1 + y];
        }
        if (y >= count) return;
    }
    Copies<kFormat, kParts> copies(p, tile.expert, rows, shared);
    copies.fill();
    // Its weights need no list of tiles, but its rows come from the kernel ahead.
    if (is_shared && !routed) pdl_wait();
    // Blocks of the next kernel that start meanwhile delay no copy, and know that tiles are there.
    pdl_launch();
    if (routed) pdl_wait();
    if (tile.count > 8) {
        multiply_tile<2, kFormat, kParts, false>(p, tile, rows, copies, shared);
    } else {
        multiply_tile<1, kFormat, kParts, false>(p, tile, rows, copies, shared);
    }
}

template <Format kFormat>
struct Few {
    template <int kTokenTiles, bool kOneRow>
    __device__ __forceinline__ static void of_tile(const Problem& p, const Tile& tile, uint8_t* shared) {
        const Rows rows = rows_of_warp<kWarps>(p);
        Copies<kFormat, kWarps> copies(p, tile.expert, rows, shared);
        copies.fill();
        multiply_tile<kTokenTiles, kFormat, kWarps, kOneRow>(p, tile, rows, copies, shared);
    }
};

}  // namespace

#define PRODUCT(NAME, BLOCKS, FORMAT, PARTS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)                                                                      \
        NAME(const bf16* x, const uint8_t* weight, const bf16* bias, const float* scales, bf16* out, const int* sources,                \
             const Tile* tiles, uint64_t stride, int n, int k, int pitch, int top_k, int kind, int scale_stride,                        \
             const uint8_t* shared_weight, const float* shared_scales, int shared_rows, int shared_place, int routed) {                 \
        product<FORMAT, PARTS>({x, weight, bias, scales, out, sources, tiles, stride, n, k, pitch, top_k, kind, scale_stride},          \
                               {shared_weight, shared_scales, shared_rows, shared_place}, routed != 0);                                 \
    }

// NAME and NAME_one.
#define PRODUCTS(NAME, BLOCKS, FORMAT)    \
    PRODUCT(NAME, BLOCKS, FORMAT, kWarps) \
    FEW_PRODUCT_OF_ONE(NAME, kThreads, BLOCKS, Few<FORMAT>)

// The same, and NAME_whole, whose warps have all of k each. Of bf16, whose copies take longer than all else, that was slower.
#define PRODUCTS_AND_WHOLE(NAME, BLOCKS, FORMAT) \
    PRODUCTS(NAME, BLOCKS, FORMAT)               \
    PRODUCT(NAME##_whole, BLOCKS, FORMAT, 1)

PRODUCTS(moe_few_bf16, 10, Format::kBf16)
PRODUCTS_AND_WHOLE(moe_few_fp8, 9, Format::kFp8)
PRODUCTS_AND_WHOLE(moe_few_fp8_blocks, 9, Format::kFp8Blocks)
