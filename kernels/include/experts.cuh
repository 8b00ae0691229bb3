// What the products of experts with few rows, moe_few.cu, and with many, moe.cu, share: tiles, how weights are stored and become
// bf16, and what becomes of sums. moe_route.cu says what routes, places and tiles are.
//
// Both take weights as the 16-row operand of mma.m16n8k16 and rows of x as the columns of the other. The order of k within a product
// is free as long as both operands agree, so a lane takes consecutive inputs. Of 64 inputs it has two vectors of eight: with bf16
// weights 8 * quad and 32 + 8 * quad on, with those of fewer bits 16 * quad and 16 * quad + 8 on, so that what it reads of a row of
// weights is 16 bytes or one piece. Int4 weights are stored so that it has the inputs that it has of bf16 ones: the products of a vector
// are those of 32 neighbouring inputs, which have one scale.
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
    kMxfp4,      // rows of codes of four bits, then an exponent for each 32 inputs
    kInt4        // codes of four bits, and words with the scale and the zero of each group (int4.cuh)
};

// What becomes of sums.
enum Kind { kPlain = 0, kSilu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

// Of an expert's product. Everything of the next expert lies `stride` bytes further.
struct Problem {
    const bf16* x;          // [rows, k], or [places, k]
    const uint8_t* weight;  // [n, k], or gate and up, [2 n, k]; rows begin `pitch` bytes apart
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

// Of a chunk of a row of weights.
template <Format kFormat>
constexpr int kStoredBytes = kFormat == Format::kBf16 ? 128 : kFormat == Format::kMxfp4 || kFormat == Format::kInt4 ? 32 : 64;

// Pieces of 16 bytes with the codes of a row of weights.
template <Format kFormat>
__device__ __forceinline__ int row_pieces(const Problem& p) {
    return kFormat == Format::kInt4 ? p.pitch / 16 : p.k * kStoredBytes<kFormat> / kChunk / 16;
}

// log2 of how many times 32 inputs a group has, from the words of a window of 128 inputs: 4, 2 or 1.
__device__ __forceinline__ int group_shift(const Problem& p) { return 2 - p.scale_stride / ((p.k + kWindow - 1) / kWindow) / 2; }

// Which of the eight vectors of a chunk of x goes with a lane's vector `half` of weights.
template <Format kFormat>
__device__ __forceinline__ int input_vector(int quad, int half) {
    return kFormat == Format::kBf16 || kFormat == Format::kInt4 ? half * 4 + quad : quad * 2 + half;
}

template <typename T>
__device__ __forceinline__ T* of_expert(T* first, size_t stride, int expert) {
    if (first == nullptr) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + stride * expert);
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

// Eight e2m1 values, of which a word has the even ones in its lower half, times 2^(exponent - 127) / kSumScale.
//
// Sign and magnitude of a code go where bf16 has them by one multiplication, as there are more units for those than for shifts. The
// exponent of that bf16 lacks 126; with it the power of two would be too large for bf16, so sums make up for a part of it. Exact for
// exponents of 65 to 192, weights of 2^-63 to 2^66: lower ones lose bits, higher ones are refused when a checkpoint is read.
__device__ __forceinline__ uint4 widen_e2m1(uint32_t codes, uint32_t exponent) {
    const uint32_t power = exponent * 0x00800080u + 0x1f001f00u;
    uint32_t wide[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t half = i < 2 ? codes : codes >> 8;
        const uint32_t bits = i % 2 == 0 ? (half & 0x000f000fu) * 0x1040u : (half & 0x00f000f0u) * 0x0104u;
        wide[i] = multiply(bits & 0x81c081c0u, power);
    }
    return make_uint4(wide[0], wide[1], wide[2], wide[3]);
}

// Pair `quad` of the eight e2m1 values of a word, as `widen_e2m1` has it.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t codes, uint32_t exponent, int quad) {
    const uint32_t bits = (codes >> 4 * quad & 0x000f000fu) * 0x1040u;
    return multiply(bits & 0x81c081c0u, exponent * 0x00800080u + 0x1f001f00u);
}

// Pair `quad` of the eight e4m3 values of two words, exactly. NaN, which makes no sense as a weight, becomes 480.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t low, uint32_t high, int quad) {
    // In the upper halves of 16 bits: the sign is where bf16 has it, and the rest 4 bits above.
    const uint32_t codes = __byte_perm(low, high, quad * 0x2020 + 0x1000);
    return multiply((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u), 0x7b807b80u);  // 2^120
}

// Adds products of vectors of two rows of weights, eight apart, with those of eight rows of x each. `scales` are those of int4 weights.
template <Format kFormat, int kTokenTiles>
__device__ __forceinline__ void add_products(float (&acc)[kTokenTiles][4], const uint4& low, const uint4& high,
                                             const uint4 (&x)[kTokenTiles], const float (&scales)[2]) {
    const uint32_t even[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    if constexpr (kFormat == Format::kInt4) {
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
            float of_codes[4] = {};
            mma(of_codes, even, x[j].x, x[j].y);
            mma(of_codes, second, x[j].z, x[j].w);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[j][i] = fmaf(of_codes[i], scales[i / 2], acc[j][i]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) mma(acc[j], even, x[j].x, x[j].y);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) mma(acc[j], second, x[j].z, x[j].w);
    }
}

// Pair `quad` of the eight int4 values of a word times `scale + rest`, which are two bf16 each: rounded once, but for 2^-17 of it.
__device__ __forceinline__ uint32_t int4_pair(uint32_t codes, uint32_t zeros, bf162 scale, bf162 rest, int quad) {
    const uint32_t bits = replace_bits<0x000f000f, 0x43004300>(codes >> 4 * quad);
    const bf162 wide = __hsub2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(zeros));
    const bf162 product = __hfma2(wide, scale, __hmul2(wide, rest));
    return reinterpret_cast<const uint32_t&>(product);
}

// What sums of widened weights are multiplied by.
template <Format kFormat>
constexpr float kSumScale = kFormat == Format::kMxfp4 ? 0x1p64f : 1.0f;

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

// Defines the kernels of a product, NAME and its format: RUN(Format) takes a Problem.
#define EXPERT_PRODUCT(NAME, THREADS, BLOCKS, RUN)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
        NAME(const bf16* x, const uint8_t* weight, const bf16* bias, const float* scales, bf16* out, const int* sources,   \
             const Tile* tiles, uint64_t stride, int n, int k, int pitch, int top_k, int kind, int scale_stride) {         \
        RUN({x, weight, bias, scales, out, sources, tiles, stride, n, k, pitch, top_k, kind, scale_stride});               \
    }
