// What the products of experts with few rows, moe_few*.cu and moe_stream.cu, and with many, moe.cu and moe_hopper*.cu, share: tiles, how weights are stored
// and become bf16, and what becomes of sums. moe_route.cu says what routes, places and tiles are.
//
// All but moe_hopper.cu take weights as the left operand of a product and rows of x as the columns of the right one. The order of k
// within a product is free as long as both operands agree, so a lane takes consecutive inputs where weights have eight bits or more. Of 64
// inputs it has two vectors of eight: with bf16 weights 8 * quad and 32 + 8 * quad on, with e4m3 16 * quad and 16 * quad + 8 on, so that what it reads
// of a row of weights is 16 bytes or one piece.
//
// Weights of four bits are stored in the order in which products read them. Eight neighbouring rows lie together, and a row is cut into
// windows of 64 inputs, the last one padded with any codes, as x is 0 past the end of k: 32 bytes, eight words of eight codes. Window `w`
// of row `r` is at `(r / 8 * 8) * pitch + w * 256 + r % 8 * 32` of the matrix, and input `32 * part + 8 * pair + 2 * quad + odd` of a
// window in its word `2 * quad + part`: a word has the codes of 32 inputs that one lane multiplies. Behind the windows of eight rows of
// MXFP4 lie their exponents, a byte for each 32 inputs, each row padded with zeros to a multiple of 16 bytes. Words of groups of int4
// weights (int4.cuh) lie elsewhere, row after row.
#pragma once

#include "activation.cuh"
#include "fp8.cuh"
#include "int4.cuh"
#include "mma.cuh"
#include "route.cuh"
#include "rows.cuh"

// How experts' weights are stored.
enum class Format {
    kBf16,
    kFp8,        // e4m3, a scale for each output
    kFp8Blocks,  // e4m3, a scale for each 128 x 128
    kMxfp4,      // codes of four bits, and an exponent for each 32 inputs
    kInt4        // codes of four bits, and words with the scale and the zero of each group (int4.cuh)
};

// What becomes of sums.
enum Kind { kPlain = 0, kSilu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

// Of an expert's product. Everything of the next expert lies `stride` bytes further.
struct Problem {
    const bf16* x;          // [rows, k], or [places, k]
    const uint8_t* weight;  // [n, k], or gate and up, [2 n, k]; rows of `pitch` bytes
    const bf16* bias;       // [n] or [2 n]; null for none
    const float* scales;    // or words of groups
    bf16* out;              // [places, n]
    const int* sources;
    const Tile* tiles;
    size_t stride;
    int n, k, pitch;
    int top_k;              // 0 where x has a row for each place
    int kind;
    int scale_stride;       // of rows of blocks, or of groups

    // The row of x of a place.
    __device__ __forceinline__ int input_row(int place) const { return top_k > 0 ? sources[place] / top_k : place; }
    __device__ __forceinline__ const bf16* inputs(int place) const { return x + size_t(input_row(place)) * k; }
};

constexpr int kChunk = 64;  // inputs that a lane has two vectors of
constexpr int kExponentInputs = 32;
constexpr int kExpertWindow = 64;                                  // inputs, of weights of four bits
constexpr int kWindowOfEight = kRowsTogether * kExpertWindow / 2;  // bytes of a window of eight rows
static_assert(kExpertWindow == kChunk, "moe.cu and moe_hopper_4bit.cu go on by chunks");

// Windows of a row of weights of four bits.
__device__ __forceinline__ int expert_windows(int k) { return (k + kExpertWindow - 1) / kExpertWindow; }

// Bytes of the exponents of a row, with padding.
__device__ __forceinline__ int exponent_bytes(int k) { return (k / kExponentInputs + 15) / 16 * 16; }

template <Format kFormat>
constexpr bool kHasFourBits = kFormat == Format::kMxfp4 || kFormat == Format::kInt4;

// Of a chunk of a row of weights.
template <Format kFormat>
constexpr int kStoredBytes = kFormat == Format::kBf16 ? 128 : kHasFourBits<kFormat> ? 32 : 64;

// Pieces of 16 bytes with the codes of a row of weights.
template <Format kFormat>
__device__ __forceinline__ int row_pieces(const Problem& p) {
    return kHasFourBits<kFormat> ? expert_windows(p.k) * 2 : p.k * kStoredBytes<kFormat> / kChunk / 16;
}

// log2 of how many times 32 inputs a group has, from the words of a window of 128 inputs: 4, 2 or 1.
__device__ __forceinline__ int group_shift(const Problem& p) { return 2 - p.scale_stride / ((p.k + kWindow - 1) / kWindow) / 2; }

// Which of the eight vectors of a chunk of x goes with a lane's vector `half` of weights of eight bits or more.
template <Format kFormat>
__device__ __forceinline__ int input_vector(int quad, int half) {
    return kFormat == Format::kBf16 ? half * 4 + quad : quad * 2 + half;
}

template <typename T>
__device__ __forceinline__ T* of_expert(T* first, size_t stride, int expert) {
    if (first == nullptr) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + stride * expert);
}

// The exponents of a row of an expert's weights.
__device__ __forceinline__ const uint8_t* exponents_of(const Problem& p, const uint8_t* weight, int row) {
    const int eight = row / kRowsTogether;
    return weight + size_t(eight) * kRowsTogether * p.pitch + expert_windows(p.k) * kWindowOfEight + row % kRowsTogether * exponent_bytes(p.k);
}

// The words of the groups of an expert.
__device__ __forceinline__ const uint32_t* groups_of(const Problem& p, int expert) {
    return reinterpret_cast<const uint32_t*>(of_expert(p.scales, p.stride, expert));
}

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

// Eight e4m3 values times a scale.
__device__ __forceinline__ uint4 widen_e4m3(uint2 codes, float scale) {
    return make_uint4(widen_scaled(codes.x & 0xffff, scale), widen_scaled(codes.x >> 16, scale),
                      widen_scaled(codes.y & 0xffff, scale), widen_scaled(codes.y >> 16, scale));
}

// Eight e4m3 values, exactly.
__device__ __forceinline__ uint4 widen_e4m3(uint2 codes) { return widen_e4m3(codes, 1.0f); }

// How the eight e2m1 codes of a word become four pairs of bf16 (of a pair the even code is in the lower half). Sign and magnitude of a code
// belong in bits 15 and 8 to 6 of 16: those of the first pair are there, those of the next two after the word is rotated by 3 and 6, and
// those of the last pair, in bits 3, 1, 0 and 4, after a multiplication, in which no carry occurs.
constexpr uint32_t kE2m1Bits = 0x81c081c0, kLastPairBits = 0x001b001b, kLastPairFactor = 1 << 12 | 1 << 7 | 1 << 2;
constexpr int kPairRotation = 3;

// 2^(exponent - 127) times 2^126 / kSumScale. The exponents of the pairs lack 126; with all of it the power of two would be too large for
// bf16, so sums make up for a part. Exact for exponents of 65 to 192, weights of 2^-63 to 2^66: lower ones lose bits, higher ones are refused
// when a checkpoint is read.
__device__ __forceinline__ uint32_t e2m1_power(uint32_t exponent) { return exponent * 0x00800080u + 0x1f001f00u; }

// Eight e2m1 values in bf16, times 2^-126.
__device__ __forceinline__ uint4 place_e2m1(uint32_t codes) {
    const uint32_t second = __funnelshift_r(codes, codes, kPairRotation), third = __funnelshift_r(codes, codes, 2 * kPairRotation);
    const uint32_t last = (codes & kLastPairBits) * kLastPairFactor;
    return make_uint4(codes & kE2m1Bits, second & kE2m1Bits, third & kE2m1Bits, last & kE2m1Bits);
}

// Eight e2m1 values times 2^(exponent - 127) / kSumScale.
__device__ __forceinline__ uint4 widen_e2m1(uint32_t codes, uint32_t exponent) {
    const uint32_t power = e2m1_power(exponent);
    const uint4 placed = place_e2m1(codes);
    return make_uint4(multiply(placed.x, power), multiply(placed.y, power), multiply(placed.z, power), multiply(placed.w, power));
}

// All of a word's pairs. `beside` is the exponent of MXFP4, or the word of the group of int4, whose scale is left to sums.
template <Format kFormat>
__device__ __forceinline__ uint4 widen(uint32_t codes, uint32_t beside) {
    static_assert(kHasFourBits<kFormat>);
    if constexpr (kFormat == Format::kMxfp4) {
        return widen_e2m1(codes, beside);
    } else {
        return widen_int4(codes, group_zeros(beside));
    }
}

// Adds products of vectors of two rows of weights, eight apart, with those of eight rows of x each.
template <int kTokenTiles>
__device__ __forceinline__ void add_products(float (&acc)[kTokenTiles][4], const uint4& low, const uint4& high,
                                             const uint4 (&x)[kTokenTiles]) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) mma(acc[j], first, x[j].x, x[j].y);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) mma(acc[j], second, x[j].z, x[j].w);
}

// The same with codes, whose sums are multiplied by two scales.
template <int kTokenTiles>
__device__ __forceinline__ void add_scaled_products(float (&acc)[kTokenTiles][4], const uint4& low, const uint4& high,
                                                    const uint4 (&x)[kTokenTiles], float low_scale, float high_scale) {
    float of_codes[kTokenTiles][4] = {};
    add_products(of_codes, low, high, x);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[j][i] = fmaf(of_codes[j][i], i < 2 ? low_scale : high_scale, acc[j][i]);
    }
}

// All of a word's int4 pairs, of the group of a word: rounded once, but for 2^-17 of it.
__device__ __forceinline__ uint4 widen_int4_scaled(uint32_t codes, uint32_t group) {
    const uint4 wide = widen_int4(codes, group_zeros(group));
    const float whole = group_scale(group);
    const bf16 rounded = __float2bfloat16(whole);
    const bf162 scale(rounded, rounded), rest = __float2bfloat162_rn(whole - __bfloat162float(rounded));
    const auto scaled = [&](uint32_t pair) {
        const bf162 value = reinterpret_cast<const bf162&>(pair), product = __hfma2(value, scale, __hmul2(value, rest));
        return reinterpret_cast<const uint32_t&>(product);
    };
    return make_uint4(scaled(wide.x), scaled(wide.y), scaled(wide.z), scaled(wide.w));
}

// What sums of widened weights are multiplied by.
template <Format kFormat>
constexpr float kSumScale = kFormat == Format::kMxfp4 ? 0x1p64f : 1.0f;

// What a gate and its up projection become. Divisions are accurate to 2 ulp, and 0 for a denominator above 2^126, where the quotient is next to
// 0 anyway. With correctly rounded ones products of many rows took a quarter longer.
__device__ __forceinline__ float activate(int kind, float gate, float up) {
    if (kind == kClampedSwiglu) {
        // Comparisons that NaN passes unchanged.
        gate = gate > 7.0f ? 7.0f : gate;
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
    }
    return activated(kind == kGeluTanh ? Activation::kGeluTanh : Activation::kSilu, gate, up);
}

// Defines the kernels of a product, NAME and its format: RUN(Format) takes a Problem.
#define EXPERT_PRODUCT(NAME, THREADS, BLOCKS, RUN)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
        NAME(const bf16* x, const uint8_t* weight, const bf16* bias, const float* scales, bf16* out, const int* sources,   \
             const Tile* tiles, uint64_t stride, int n, int k, int pitch, int top_k, int kind, int scale_stride) {         \
        RUN({x, weight, bias, scales, out, sources, tiles, stride, n, k, pitch, top_k, kind, scale_stride});               \
    }
