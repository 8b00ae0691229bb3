// Mixtures of experts, second part: the products of each expert with its rows, and their weighted sums. moe_route.cu says what
// routes, places and tiles are. The grid has as many blocks as there can be tiles; those beyond the last one end at once.
//
// A product takes weights as the 16-row operand of mma.m16n8k16 and rows as the columns of the other, in any tile in the same
// order: what a row gets depends on nothing but the row. As in linear.cu a lane takes consecutive inputs, so all accesses are
// wide. Weights that are not bf16 become it on their way from shared memory to the registers, exactly or rounded once.
#include "activation.cuh"
#include "fp8.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "rows.cuh"

namespace {

// As moe_route.cu writes it: places `first` on, so many, of one expert. In front of the tiles is one whose `count` is the number of tiles.
struct __align__(16) Tile {
    int expert, first, count, unused;
};

// How experts' weights are stored.
enum class Format {
    kBf16,
    kFp8,        // e4m3, a scale for each output
    kFp8Blocks,  // e4m3, a scale for each 128 x 128
    kMxfp4       // rows of codes of four bits, then an exponent for each 32 inputs
};

// What becomes of sums.
enum Kind { kPlain = 0, kSilu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

// Of an expert's product. Everything of the next expert lies `stride` bytes further.
struct Problem {
    const bf16* x;          // [rows, k], or [places, k]
    const uint8_t* weight;  // [n, k], or gate and up, [2 n, k]; rows begin `pitch` bytes apart
    const bf16* bias;       // [n] or [2 n]; null for none
    const float* scales;
    bf16* out;              // [places, n]
    const int* sources;
    const Tile* tiles;
    size_t stride;
    int n, k, pitch;
    int top_k;              // 0 where x has a row for each place
    int kind;
    int scale_stride;       // of rows of blocks
};

constexpr int kThreads = 128;
constexpr int kChunk = 64;        // inputs of a stage
constexpr int kInputBytes = 128;  // of a row of x in a stage
constexpr int kInputPieces = kInputBytes / 16;
constexpr int kPad = 4;           // of sums, in floats: no bank conflicts
constexpr int kExponentInputs = 32;

// Of a row of weights in a stage.
template <Format kFormat>
constexpr int kStoredBytes = kFormat == Format::kBf16 ? 128 : kFormat == Format::kMxfp4 ? 32 : 64;

// How a tile is cut: `kTokens` rows by `kFeatures` rows of weights, among four warps.
template <int kTokens, Format kFormat>
struct Shape {
    static constexpr int kFeatures = kTokens == 16 ? 64 : 128;
    static constexpr int kTokenWarps = kTokens == 16 ? 1 : 2;
    static constexpr int kFeatureWarps = kThreads / kWarp / kTokenWarps;
    static constexpr int kFeatureTiles = kFeatures / kFeatureWarps / 16;  // of a warp
    static constexpr int kTokenTiles = kTokens / kTokenWarps / 8;
    static constexpr int kStages = kTokens == 16 ? 6 : kTokens == 64 ? 4 : 3;
    static constexpr int kRowBytes = kStoredBytes<kFormat>;
    static constexpr int kPieces = kRowBytes / 16;
    static constexpr int kRowsAtOnce = kThreads / kPieces;
    static constexpr int kCopies = kFeatures / kRowsAtOnce;
    static constexpr int kInputCopies = kTokens * kInputPieces / kThreads;
    static constexpr int kWeightBytes = kFeatures * kRowBytes;
    static constexpr int kStageBytes = kWeightBytes + kTokens * kInputBytes;
};

// Where a 16-byte piece of a row of 128 bytes lies: eight rows of a column are in different banks.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * kInputBytes + (piece ^ (row & 7)) * 16; }

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    const bf162 product = __hmul2(*reinterpret_cast<const bf162*>(&a), *reinterpret_cast<const bf162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
}

// Two e4m3 values times a scale, rounded once; without a scale exact.
__device__ __forceinline__ uint32_t widen_scaled(uint32_t pair, float scale) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    const float2 wide = __half22float2(__half2(half));
    return pack(wide.x * scale, wide.y * scale);
}

// Codes `2 * i` and `2 * i + 1` of eight, of which a word has the even ones in its lower half: e2m1 as bf16 whose exponent lacks
// 126, times two powers of two that one bf16 could not hold.
__device__ __forceinline__ uint32_t widen_e2m1(uint32_t codes, int i, uint32_t power) {
    const uint32_t pair = codes >> (4 * i);
    return multiply(multiply((pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12, 0x7e807e80u), power);
}

// Of a row of weights in a stage, inputs 16 * quad + 8 * half on, eight of them. `scale` is that of blocks.
template <Format kFormat>
__device__ __forceinline__ uint4 load_weights(const uint8_t* stage, int row, int quad, int half, float scale, uint32_t power) {
    if constexpr (kFormat == Format::kBf16) {
        return *reinterpret_cast<const uint4*>(stage + swizzled(row, quad * 2 + half));
    } else if constexpr (kFormat == Format::kMxfp4) {
        const uint32_t codes = *reinterpret_cast<const uint32_t*>(stage + row * kStoredBytes<kFormat> + quad * 8 + half * 4);
        return make_uint4(widen_e2m1(codes, 0, power), widen_e2m1(codes, 1, power), widen_e2m1(codes, 2, power),
                          widen_e2m1(codes, 3, power));
    } else {
        const uint2 codes = *reinterpret_cast<const uint2*>(stage + row * kStoredBytes<kFormat> + quad * 16 + half * 8);
        return make_uint4(widen_scaled(codes.x & 0xffff, scale), widen_scaled(codes.x >> 16, scale),
                          widen_scaled(codes.y & 0xffff, scale), widen_scaled(codes.y >> 16, scale));
    }
}

template <typename T>
__device__ __forceinline__ T* of_expert(T* first, size_t stride, int expert) {
    if (first == nullptr) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + stride * expert);
}

// What a gate and its up projection become.
__device__ __forceinline__ float activate(int kind, float gate, float up) {
    if (kind == kClampedSwiglu) {
        // Comparisons that NaN passes unchanged.
        gate = gate > 7.0f ? 7.0f : gate;
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
    }
    const float inner = sigmoid_input(kind == kGeluTanh ? Activation::kGeluTanh : Activation::kSilu, gate);
    return gate / (1.0f + __expf(-inner)) * up;
}

// Eight neighbouring sums of a row of a tile, with what belongs to their rows of weights.
template <Format kFormat>
__device__ __forceinline__ Float8 finished(const float* sums, const bf16* bias, const float* scales, int row) {
    Float8 v = load_floats(sums);
    if constexpr (kFormat == Format::kFp8) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) v.at[i] *= scales[row + i];
    }
    if (bias != nullptr) {
        const Float8 more = widen(load8(bias + row));
#pragma unroll
        for (int i = 0; i < kVec; ++i) v.at[i] += more.at[i];
    }
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
    const int pieces = p.k * S::kRowBytes / kChunk / 16;
    const uint8_t* from[S::kCopies];
#pragma unroll
    for (int i = 0; i < S::kCopies; ++i) {
        from[i] = weight + size_t(weight_row(first_row + i * S::kRowsAtOnce)) * p.pitch + piece * 16;
    }
    const int to = kFormat == Format::kBf16 ? swizzled(first_row, piece) : first_row * S::kRowBytes + piece * 16;
    constexpr int kInputRows = kThreads / kInputPieces;
    const int input_piece = threadIdx.x % kInputPieces, input_row = threadIdx.x / kInputPieces;
    const int input_pieces = p.k / 8;
    const bf16* inputs_from[S::kInputCopies];
#pragma unroll
    for (int i = 0; i < S::kInputCopies; ++i) {
        const int row = input_row + i * kInputRows;
        int source = tile.first + min(row, tile.count - 1);
        if (p.top_k > 0) source = p.sources[source] / p.top_k;
        inputs_from[i] = p.x + size_t(source) * p.k + input_piece * 8;
    }
    const int inputs_to = S::kWeightBytes + swizzled(input_row, input_piece);
    const int chunks = (p.k + kChunk - 1) / kChunk;
    const auto request = [&](int chunk, int stage) {
        if (chunk < chunks) {
            uint8_t* const base = shared + stage * S::kStageBytes;
            const bool is_weight = chunk * S::kPieces + piece < pieces;
#pragma unroll
            for (int i = 0; i < S::kCopies; ++i) {
                copy_async(base + to + i * S::kRowsAtOnce * S::kRowBytes, is_weight ? from[i] + chunk * S::kRowBytes : from[i],
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
    const int exponent_pieces = kFormat == Format::kMxfp4 ? (p.k / kExponentInputs + 15) / 16 : 0;
    if constexpr (kFormat == Format::kMxfp4) {
        for (int i = threadIdx.x; i < S::kFeatures * exponent_pieces; i += kThreads) {
            const int row = i / exponent_pieces, at = i % exponent_pieces * 16;
            copy_async(exponents + i * 16, weight + size_t(weight_row(row)) * p.pitch + p.k / 2 + at, true);
        }
    }
#pragma unroll
    for (int i = 0; i < S::kStages - 1; ++i) request(i, i);

    const float* const scales = of_expert(p.scales, p.stride, tile.expert);
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
                v[j] = *reinterpret_cast<const uint4*>(inputs + swizzled(j * 8 + group, quad * 2 + half));
            }
#pragma unroll
            for (int i = 0; i < S::kFeatureTiles; ++i) {
                const int row = warp_row + i * 16 + group;
                float scale = 1.0f;
                uint32_t power[2] = {};
                if constexpr (kFormat == Format::kFp8Blocks) {
                    // A tile of 16 rows lies in one row of blocks, whether of gate or up.
                    scale = scales[weight_row(warp_row + i * 16) / 128 * p.scale_stride + chunk * kChunk / 128];
                } else if constexpr (kFormat == Format::kMxfp4) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const uint32_t e = exponents[(row + j * 8) * exponent_pieces * 16 + chunk * 2 + quad / 2];
                        power[j] = (e == 255 ? 0x7fffu : max(e << 7, 0x40u)) * 0x10001u;
                    }
                }
                const uint4 low = load_weights<kFormat>(weights, row, quad, half, scale, power[0]);
                const uint4 high = load_weights<kFormat>(weights, row + 8, quad, half, scale, power[1]);
                const uint32_t even[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int j = 0; j < S::kTokenTiles; ++j) mma(acc[i][j], even, v[j].x, v[j].y);
#pragma unroll
                for (int j = 0; j < S::kTokenTiles; ++j) mma(acc[i][j], second, v[j].z, v[j].w);
            }
        }
    }

    // Sums to shared memory, [rows of x][rows of weights], from where whole vectors are stored.
    wait_async<0>();
    __syncthreads();
    constexpr int kSums = S::kFeatures + kPad;
    static_assert(kTokens * kSums * int(sizeof(float)) <= 72 << 10, "`sums_bytes` in crates/kernels/src/cuda/moe.rs");
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

#define PRODUCT(NAME, TOKENS, FORMAT, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)                                                         \
        NAME(const bf16* x, const uint8_t* weight, const bf16* bias, const float* scales, bf16* out, const int* sources,   \
             const Tile* tiles, uint64_t stride, int n, int k, int pitch, int top_k, int kind, int scale_stride) {         \
        product<TOKENS, FORMAT>(                                                                                           \
            {x, weight, bias, scales, out, sources, tiles, stride, n, k, pitch, top_k, kind, scale_stride});               \
    }
#define PRODUCTS(NAME, FORMAT)          \
    PRODUCT(NAME##_16, 16, FORMAT, 3)   \
    PRODUCT(NAME##_64, 64, FORMAT, 2)   \
    PRODUCT(NAME##_128, 128, FORMAT, 2)

PRODUCTS(moe_bf16, Format::kBf16)
PRODUCTS(moe_fp8, Format::kFp8)
PRODUCTS(moe_fp8_blocks, Format::kFp8Blocks)
PRODUCTS(moe_mxfp4, Format::kMxfp4)

// Random rows of codes and exponents, for weights of this standard deviation: codes of all values have one of 2.926.
extern "C" __global__ void __launch_bounds__(256)
    moe_fill_mxfp4(uint8_t* out, uint64_t bytes, int k, int pitch, uint64_t seed, float deviation) {
    pdl_launch();
    pdl_wait();
    const int exponent = min(max(127 + int(roundf(log2f(deviation / 2.926f))), 0), 254);
    const uint32_t both = exponent * 0x01010101u;
    const uint64_t count = bytes / 16, step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const int at = int(i * 16 % pitch);
        uint4 v;
        if (at < k / 2) {
            const uint2 counter = words(i);
            v = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
        } else {
            // Behind the last exponent there are zeros.
            uint32_t word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int left = k / 2 + k / kExponentInputs - at - 4 * j;
                word[j] = left >= 4 ? both : left <= 0 ? 0 : both >> (8 * (4 - left));
            }
            v = make_uint4(word[0], word[1], word[2], word[3]);
        }
        reinterpret_cast<uint4*>(out)[i] = v;
    }
}

// out[row] = sum over the row's routes of weight * x[place], in order. With `gates`, [rows], plus sigmoid(gate) * out[row].
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const bf16* x, const int* places, const float* weights, const float* gates, bf16* out, int n, int top_k) {
    pdl_launch();
    pdl_wait();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
    if (at >= n) return;
    const size_t first = size_t(blockIdx.x) * top_k;
    Float8 sum{};
#pragma unroll 4
    for (int i = 0; i < top_k; ++i) {
        const float weight = weights[first + i];
        const Float8 one = widen(load8(x + size_t(places[first + i]) * n + at));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(weight, one.at[j], sum.at[j]);
    }
    bf16* to = out + size_t(blockIdx.x) * n + at;
    if (gates != nullptr) {
        const float gate = 1.0f / (1.0f + expf(-gates[blockIdx.x]));
        const Float8 shared = widen(load8(to));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(gate, shared.at[j], sum.at[j]);
    }
    store8(to, narrow(sum));
}
