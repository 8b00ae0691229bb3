// Rows of weights in bf16 or e4m3 that a warp multiplies by one row of inputs: a lane takes pieces of 16 bytes.
#pragma once

#include "rows.cuh"

// `[n, k]`.
struct Matrix {
    const uint8_t* weight;
    const float* scales;  // of e4m3 weights; null for bf16
    int scale_stride;     // from one row of blocks of 128 x 128 to the next; 0 for a scale for each output

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

constexpr int kPieceBytes = 16;

template <bool kFp8>
constexpr int kPieceInputs = kFp8 ? 16 : 8;

// A pair of bf16, the lower one first.
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Inputs of a piece of 16 bytes of weights.
template <bool kFp8>
struct PieceInputs {
    float2 of[kPieceInputs<kFp8> / 2];

    __device__ __forceinline__ explicit PieceInputs(const uint4* from) {
#pragma unroll
        for (int i = 0; i < kPieceInputs<kFp8> / kVec; ++i) {
            const uint4 v = from[i];
            of[4 * i] = widen_pair(v.x), of[4 * i + 1] = widen_pair(v.y), of[4 * i + 2] = widen_pair(v.z), of[4 * i + 3] = widen_pair(v.w);
        }
    }
};

// Adds the products of a piece of weights.
template <bool kFp8>
__device__ __forceinline__ void add_piece(float (&sums)[4], const uint4& piece, const PieceInputs<kFp8>& x) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < kPieceInputs<kFp8> / 2; ++i) {
        float2 wide;
        if constexpr (kFp8) {
            const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> i % 2 * 16 & 0xffff);
            wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
        } else {
            wide = widen_pair(words[i]);
        }
        float &even = sums[i % 2 * 2], &odd = sums[i % 2 * 2 + 1];
        even = fmaf(wide.x, x.of[i].x, even);
        odd = fmaf(wide.y, x.of[i].y, odd);
    }
}

__device__ __forceinline__ float sum_of(const float (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }
