// Mixtures of experts: the products of tiles of many rows, on GPUs for which there is nothing better (moe_hopper*.cu); moe_few*.cu are
// for few rows. The grid has as many blocks as there can be tiles; those beyond the last one end at once. Weights that are not bf16
// become it on their way from shared memory to the registers, exactly or rounded once; scales of int4 weights multiply sums.
#include "experts.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kInputBytes = 128;  // of a row of x in a stage
constexpr int kInputPieces = kInputBytes / 16;
constexpr int kPad = 4;           // of sums, in floats: no bank conflicts

// How a tile is cut: `kTokens` rows by `kFeatures` rows of weights, among four warps.
template <int kTokens, Format kFormat>
struct Shape {
    static constexpr int kFeatures = 128;
    static constexpr int kTokenWarps = 2;
    static constexpr int kFeatureWarps = kThreads / kWarp / kTokenWarps;
    static constexpr int kFeatureTiles = kFeatures / kFeatureWarps / 16;  // of a warp
    static constexpr int kTokenTiles = kTokens / kTokenWarps / 8;
    static constexpr int kStages = kTokens == 64 ? 4 : 3;
    static constexpr int kRowBytes = kStoredBytes<kFormat>;
    static constexpr int kPieces = kRowBytes / 16;
    static constexpr int kRowsAtOnce = kThreads / kPieces;
    static constexpr int kCopies = kFeatures / kRowsAtOnce;
    static constexpr int kInputCopies = kTokens * kInputPieces / kThreads;
    static constexpr int kWeightBytes = kFeatures * kRowBytes;
    static constexpr int kStageBytes = kWeightBytes + kTokens * kInputBytes;
};

// Where a 16-byte piece of a row of 128 bytes lies: what eight lanes read at once is in different banks.
template <Format kFormat>
__device__ __forceinline__ int swizzled(int row, int piece) {
    return row * kInputBytes + (piece ^ (kFormat == Format::kBf16 ? (row & 1) * 4 : row & 7)) * 16;
}

// Vector `half` of a lane's of a row of weights in a stage. `scale` is that of blocks, `beside` an exponent or the word of a group.
template <Format kFormat>
__device__ __forceinline__ uint4 load_weights(const uint8_t* stage, int row, int quad, int half, float scale, uint32_t beside) {
    if constexpr (kFormat == Format::kBf16) {
        return *reinterpret_cast<const uint4*>(stage + swizzled<kFormat>(row, input_vector<kFormat>(quad, half)));
    } else if constexpr (kHasFourBits<kFormat>) {
        return widen<kFormat>(*reinterpret_cast<const uint32_t*>(stage + row * kStoredBytes<kFormat> + quad * 8 + half * 4), beside);
    } else {
        return widen_e4m3(*reinterpret_cast<const uint2*>(stage + row * kStoredBytes<kFormat> + quad * 16 + half * 8), scale);
    }
}

// Eight neighbouring sums of a row of a tile, with what belongs to their rows of weights.
template <Format kFormat>
__device__ __forceinline__ Float8 finished(const float* sums, const bf16* bias, const float* scales, int row) {
    Float8 v = load_floats(sums), more{};
    if (bias != nullptr) more = widen(load8(bias + row));
#pragma unroll
    for (int i = 0; i < kVec; ++i) v.at[i] = fmaf(v.at[i], kFormat == Format::kFp8 ? scales[row + i] : kSumScale<kFormat>, more.at[i]);
    return v;
}

template <int kTokens, Format kFormat>
__device__ __forceinline__ void product(const Problem& p) {
    using S = Shape<kTokens, kFormat>;
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int group = lane / 4, quad = lane % 4;
    const int feature_warp = warp % S::kFeatureWarps, token_warp = warp / S::kFeatureWarps;

    pdl_launch();
    pdl_wait();
    if (int(blockIdx.y) >= p.tiles[0].count) return;
    const Tile tile = p.tiles[1 + blockIdx.y];
    const uint8_t* const weight = of_expert(p.weight, p.stride, tile.expert);
    const bool gated = p.kind != kPlain;
    const int outputs = gated ? S::kFeatures / 2 : S::kFeatures;
    const int first_output = blockIdx.x * outputs;
    // The row of weights of a row of the tile. Those past the end repeat the last one and are not stored.
    const auto weight_row = [&](int row) {
        const bool is_up = row >= outputs;
        return min(first_output + row - (is_up ? outputs : 0), p.n - 1) + (is_up ? p.n : 0);
    };

    // What this thread copies: a piece of some rows of weights, and of some rows of x.
    const int piece = threadIdx.x % S::kPieces, first_row = threadIdx.x / S::kPieces;
    const int pieces = row_pieces<kFormat>(p);
    const uint8_t* from[S::kCopies];
#pragma unroll
    for (int i = 0; i < S::kCopies; ++i) {
        const int row = weight_row(first_row + i * S::kRowsAtOnce), within = kHasFourBits<kFormat> ? row % kRowsTogether : 0;
        from[i] = weight + size_t(row - within) * p.pitch + within * S::kRowBytes + piece * 16;
    }
    constexpr int kChunkBytes = kHasFourBits<kFormat> ? kWindowOfEight : S::kRowBytes;  // from a row's chunk to its next
    const int to = kFormat == Format::kBf16 ? swizzled<kFormat>(first_row, piece) : first_row * S::kRowBytes + piece * 16;
    constexpr int kInputRows = kThreads / kInputPieces;
    const int input_piece = threadIdx.x % kInputPieces, input_row = threadIdx.x / kInputPieces;
    const int input_pieces = p.k / 8;
    const bf16* inputs_from[S::kInputCopies];
#pragma unroll
    for (int i = 0; i < S::kInputCopies; ++i) {
        const int row = input_row + i * kInputRows;
        inputs_from[i] = p.inputs(tile.first + min(row, tile.count - 1)) + input_piece * 8;
    }
    const int inputs_to = S::kWeightBytes + swizzled<kFormat>(input_row, input_piece);
    const int chunks = (p.k + kChunk - 1) / kChunk;
    const auto request = [&](int chunk, int stage) {
        if (chunk < chunks) {
            uint8_t* const base = shared + stage * S::kStageBytes;
            const bool is_weight = chunk * S::kPieces + piece < pieces;
#pragma unroll
            for (int i = 0; i < S::kCopies; ++i) {
                copy_async(base + to + i * S::kRowsAtOnce * S::kRowBytes, is_weight ? from[i] + chunk * kChunkBytes : from[i],
                           is_weight);
            }
            const bool is_input = chunk * kInputPieces + input_piece < input_pieces;
#pragma unroll
            for (int i = 0; i < S::kInputCopies; ++i) {
                const bool wanted = is_input && input_row + i * kInputRows < tile.count;
                copy_async(base + inputs_to + i * kInputRows * kInputBytes, wanted ? inputs_from[i] + chunk * kChunk : p.x, wanted);
            }
        }
        commit_async();
    };
    // Exponents of all inputs stay.
    uint8_t* const exponents = shared + S::kStages * S::kStageBytes;
    const int exponent_pieces = kFormat == Format::kMxfp4 ? exponent_bytes(p.k) / 16 : 0;
    if constexpr (kFormat == Format::kMxfp4) {
        for (int i = threadIdx.x; i < S::kFeatures * exponent_pieces; i += kThreads) {
            const int row = i / exponent_pieces, at = i % exponent_pieces * 16;
            copy_async(exponents + i * 16, exponents_of(p, weight, weight_row(row)) + at, true);
        }
    }
#pragma unroll
    for (int i = 0; i < S::kStages - 1; ++i) request(i, i);

    const float* const scales = of_expert(p.scales, p.stride, tile.expert);
    const uint32_t* const groups = groups_of(p, tile.expert);
    const int shift = kFormat == Format::kInt4 ? group_shift(p) : 0;
    const int warp_row = feature_warp * S::kFeatureTiles * 16;
    // A warp whose rows of x are all beyond the tile's only copies.
    const bool idle = token_warp * S::kTokenTiles * 8 >= tile.count;
    float acc[S::kFeatureTiles][S::kTokenTiles][4] = {};
    int stage = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        wait_async<S::kStages - 2>();
        __syncthreads();
        request(chunk + S::kStages - 1, stage == 0 ? S::kStages - 1 : stage - 1);
        const uint8_t* const weights = shared + stage * S::kStageBytes;
        const uint8_t* const inputs = weights + S::kWeightBytes + token_warp * S::kTokenTiles * 8 * kInputBytes;
        stage = stage + 1 == S::kStages ? 0 : stage + 1;
        if (idle) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 v[S::kTokenTiles];
#pragma unroll
            for (int j = 0; j < S::kTokenTiles; ++j) {
                if constexpr (kHasFourBits<kFormat>) {
                    v[j] = load_matrices(shared_address(inputs + swizzled<kFormat>(j * 8 + lane % 8, half * 4 + lane / 8)));
                } else {
                    v[j] = *reinterpret_cast<const uint4*>(inputs + swizzled<kFormat>(j * 8 + group, input_vector<kFormat>(quad, half)));
                }
            }
#pragma unroll
            for (int i = 0; i < S::kFeatureTiles; ++i) {
                const int row = warp_row + i * 16 + group;
                float scale = 1.0f;
                uint32_t beside[2] = {};
                if constexpr (kFormat == Format::kFp8Blocks) {
                    // A tile of 16 rows lies in one row of blocks, whether of gate or up.
                    scale = scales[weight_row(warp_row + i * 16) / 128 * p.scale_stride + chunk * kChunk / 128];
                } else if constexpr (kFormat == Format::kMxfp4) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        beside[j] = exponents[(row + j * 8) * exponent_pieces * 16 + chunk * 2 + half];
                    }
                } else if constexpr (kFormat == Format::kInt4) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        beside[j] = __ldg(groups + size_t(weight_row(row + j * 8)) * p.scale_stride + (chunk * 2 + half >> shift));
                    }
                }
                const uint4 low = load_weights<kFormat>(weights, row, quad, half, scale, beside[0]);
                const uint4 high = load_weights<kFormat>(weights, row + 8, quad, half, scale, beside[1]);
                if constexpr (kFormat == Format::kInt4) {
                    add_scaled_products(acc[i], low, high, v, group_scale(beside[0]), group_scale(beside[1]));
                } else {
                    add_products(acc[i], low, high, v);
                }
            }
        }
    }

    // Sums to shared memory, [rows of x][rows of weights], from where whole vectors are stored.
    wait_async<0>();
    __syncthreads();
    constexpr int kSums = S::kFeatures + kPad;
    static_assert(kTokens * kSums * int(sizeof(float)) <= 72 << 10, "`launch_of` in crates/kernels/src/cuda/moe/products.rs");
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < S::kFeatureTiles; ++i) {
#pragma unroll
        for (int j = 0; j < S::kTokenTiles; ++j) {
            float* at = sums + ((token_warp * S::kTokenTiles + j) * 8 + quad * 2) * kSums + warp_row + i * 16 + group;
            at[0] = acc[i][j][0];
            at[kSums] = acc[i][j][1];
            at[8] = acc[i][j][2];
            at[kSums + 8] = acc[i][j][3];
        }
    }
    __syncthreads();
    const bf16* const bias = of_expert(p.bias, p.stride, tile.expert);
    const int vectors = outputs / kVec;
    for (int i = threadIdx.x; i < tile.count * vectors; i += kThreads) {
        const int row = i / vectors, column = i % vectors * kVec, output = first_output + column;
        if (output >= p.n) continue;
        Float8 v = finished<kFormat>(sums + row * kSums + column, bias, scales, output);
        if (gated) {
            const Float8 up = finished<kFormat>(sums + row * kSums + outputs + column, bias, scales, p.n + output);
#pragma unroll
            for (int j = 0; j < kVec; ++j) v.at[j] = activate(p.kind, v.at[j], up.at[j]);
        }
        store8(p.out + size_t(tile.first + row) * p.n + output, narrow(v));
    }
}

}  // namespace

#define PRODUCTS(NAME, FORMAT)                                            \
    EXPERT_PRODUCT(NAME##_64, kThreads, 2, (product<64, FORMAT>))          \
    EXPERT_PRODUCT(NAME##_128, kThreads, 2, (product<128, FORMAT>))

PRODUCTS(moe_bf16, Format::kBf16)
PRODUCTS(moe_fp8, Format::kFp8)
PRODUCTS(moe_fp8_blocks, Format::kFp8Blocks)
PRODUCTS(moe_mxfp4, Format::kMxfp4)
PRODUCTS(moe_int4, Format::kInt4)
