// A row in the registers of a block: vectors of eight floats, sums and maxima over the block, and rows of e4m3 values.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

constexpr int kVec = 8;

struct Float8 {
    float at[kVec];
};

__device__ __forceinline__ Float8 widen(const Bf16x8& packed) {
    Float8 wide;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
        const float2 pair = __bfloat1622float2(packed.pair[i]);
        wide.at[2 * i] = pair.x;
        wide.at[2 * i + 1] = pair.y;
    }
    return wide;
}

__device__ __forceinline__ Bf16x8 narrow(const Float8& wide) {
    Bf16x8 packed;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) packed.pair[i] = __floats2bfloat162_rn(wide.at[2 * i], wide.at[2 * i + 1]);
    return packed;
}

__device__ __forceinline__ Float8 load_floats(const float* from) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ float sum_of_squares(const Float8& x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum = fmaf(x.at[i], x.at[i], sum);
    return sum;
}

// The sum of a value of every thread of the block, in all of them. `partial` is used once.
__device__ __forceinline__ float block_sum(float x, float (&partial)[kWarp]) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    x = warp_sum(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : 0.0f);
}

// As block_sum, the largest.
__device__ __forceinline__ float block_max(float x, float (&partial)[kWarp]) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    x = warp_max(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : 0.0f);
}

// Rows of e4m3 values. `scales` is [rows], or [n / 128, stride] for one for each 128 elements; the stride of the former is 0.
struct Fp8Rows {
    uint8_t* values;
    float* scales;
    int stride;

    __device__ __forceinline__ bool blocks() const { return stride != 0; }
};

constexpr float kFp8Max = 448.0f;
constexpr int kFp8Block = 128;

// Quantises the row of this block, of which this thread has the vectors `threadIdx.x + v * blockDim.x`. `partial` is used once.
template <int kVecs>
__device__ __forceinline__ void store_fp8(const Fp8Rows& out, int n, const Float8 (&x)[kVecs], float (&partial)[kWarp]) {
    const int row = blockIdx.x;
    float largest[kVecs], of_thread = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        largest[v] = 0.0f;
        if (static_cast<int>(threadIdx.x + v * blockDim.x) * kVec < n) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) largest[v] = fmaxf(largest[v], fabsf(x[v].at[i]));
        }
        of_thread = fmaxf(of_thread, largest[v]);
    }
    if (!out.blocks()) of_thread = block_max(of_thread, partial);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        const int at = static_cast<int>(threadIdx.x + v * blockDim.x) * kVec;
        float most = of_thread;
        if (out.blocks()) {
            // The lanes that have a block's vectors are neighbours in one warp, all of whose lanes are here.
            most = largest[v];
#pragma unroll
            for (int lane = kFp8Block / kVec / 2; lane > 0; lane /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, lane));
        }
        if (at >= n) continue;
        const float factor = most > 0.0f ? kFp8Max / most : 0.0f;
        uint2 packed;
        uint16_t* pairs = reinterpret_cast<uint16_t*>(&packed);
#pragma unroll
        for (int i = 0; i < kVec / 2; ++i) {
            const float2 pair = make_float2(x[v].at[2 * i] * factor, x[v].at[2 * i + 1] * factor);
            pairs[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
        }
        *reinterpret_cast<uint2*>(out.values + static_cast<int64_t>(row) * n + at) = packed;
        if (out.blocks() ? at % kFp8Block == 0 : at == 0) {
            out.scales[static_cast<int64_t>(at / kFp8Block) * out.stride + row] = most / kFp8Max;
        }
    }
}
