// Rows of weights in bf16 or e4m3 that a warp multiplies by one row of inputs: a lane takes pieces of 16 bytes.
#pragma once

#include <cuda_fp16.h>

#include "rows.cuh"

// `[n, k]`.
struct Matrix {
    const uint8_t* weight;
    const float* scales;  // of e4m3 weights; null for bf16
    int scale_stride;     // from one row of blocks of 128 x 128 to the next; 0 for a scale for each output
    int padding;          // copies are of whole words

    __device__ __forceinline__ bool is_fp8() const { return scales != nullptr; }
    // Of the row of scales that a row of weights has, the first.
    __device__ __forceinline__ const float* scales_of(int row) const {
        return scales + (scale_stride > 0 ? row / kFp8Block * scale_stride : row);
    }
    __device__ __forceinline__ int row_bytes(int k) const { return is_fp8() ? k : k * int(sizeof(bf16)); }
};

// Brings the scales of the first and the last of so many rows of weights into L2, by a warp; of blocks there is one for each 128 inputs.
__device__ __forceinline__ void prefetch_scales(const Matrix& matrix, int first, int count) {
    constexpr int kLine = 128 / sizeof(float);
    const int lane = threadIdx.x % kWarp, at = lane / 2 * kLine;
    if (!matrix.is_fp8() || count == 0 || at >= max(matrix.scale_stride, 1)) return;
    const float* const from = matrix.scales_of(first + lane % 2 * (count - 1)) + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The same into this multiprocessor's L1, by loads that nobody waits for.
__device__ __forceinline__ void touch_scales(const Matrix& matrix, int first, int count) {
    constexpr int kLine = 128 / sizeof(float);
    const int lane = threadIdx.x % kWarp, at = lane / 2 * kLine;
    if (!matrix.is_fp8() || count == 0 || at >= max(matrix.scale_stride, 1)) return;
    [[maybe_unused]] float unused;
    asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(unused) : "l"(matrix.scales_of(first + lane % 2 * (count - 1)) + at));
}

constexpr int kPieceBytes = 16;
constexpr int kFp8Piece = 16;  // inputs of a piece of e4m3 weights
template <bool kFp8>
constexpr int kPieceInputs = kFp8 ? kFp8Piece : kVec;

// A pair of bf16, the lower one first.
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Inputs of a piece of bf16 weights.
struct PieceInputs {
    float2 of[kVec / 2];

    __device__ __forceinline__ explicit PieceInputs(const uint4& v) : of{widen_pair(v.x), widen_pair(v.y), widen_pair(v.z), widen_pair(v.w)} {}
};

// Adds the products of a piece of bf16 weights.
__device__ __forceinline__ void add_piece(float (&sums)[4], const uint4& piece, const PieceInputs& x) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
        const float2 wide = widen_pair(words[i]);
        float &even = sums[i % 2 * 2], &odd = sums[i % 2 * 2 + 1];
        even = fmaf(wide.x, x.of[i].x, even);
        odd = fmaf(wide.y, x.of[i].y, odd);
    }
}

__device__ __forceinline__ float sum_of(const float (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// Products with e4m3 weights are computed in f16, two at a time. Inputs are first multiplied by a power of two that brings the largest to 8 to 16
// (tiny inputs to less). Then sums of eight products, each below 448 * 16, do not overflow, and inputs of at least 2^-17 of the largest are exact.
// For normally distributed weights and inputs the relative error of a sum is 4e-4; rounding it to bf16 makes 1.1e-3.
struct HalfFactor {
    float of_inputs, of_sum;
};

// For inputs of which the largest magnitude is `most`, as the bits of a bf16.
__device__ __forceinline__ HalfFactor half_factor(uint32_t most) {
    constexpr uint32_t kLeastExponent = 4;
    // 2^(exponent - 127) is the largest without its mantissa, and 2^(130 - exponent) its factor.
    const uint32_t exponent = max(most >> 7, kLeastExponent);
    return {__uint_as_float((257 - exponent) << 23), __uint_as_float((exponent - 3) << 23)};
}

// Of the piece whose inputs four neighbouring lanes hold, four each. All lanes of a warp must call it.
__device__ __forceinline__ HalfFactor piece_factor(uint2 inputs) {
    constexpr uint32_t kMagnitudes = 0x7fff7fff;
    uint32_t most = __vmaxu2(inputs.x & kMagnitudes, inputs.y & kMagnitudes);
    most = max(most >> 16, most & 0xffff);
    most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
    return half_factor(most);
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// The sum of the products of a piece of e4m3 weights and its 16 inputs in f16: two sums of eight in f16, added in f32.
__device__ __forceinline__ float sum_of_piece(const uint4& piece, const uint4& low, const uint4& high) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w}, x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    __half2 sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t first, second;
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
            : "=r"(first), "=r"(second)
            : "r"(words[i]));
        const auto half2 = [](const uint32_t& pair) { return reinterpret_cast<const __half2&>(pair); };
        sum = i == 0 ? __hmul2(half2(first), half2(x[0])) : __hfma2(half2(first), half2(x[2 * i]), sum);
        sum = __hfma2(half2(second), half2(x[2 * i + 1]), sum);
    }
    return __low2float(sum) + __high2float(sum);
}
