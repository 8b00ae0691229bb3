// Elements of 8 bits in the KV cache: e4m3, four bits of exponent and three of mantissa, up to 448, without infinities. Before
// sm_89 the conversions are computed by instructions for integers.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"
#include "mma.cuh"

// What an element of the KV cache is.
template <bool Fp8>
struct KvElement {
    using Type = bf16;
};
template <>
struct KvElement<true> {
    using Type = uint8_t;
};

// The two elements in the lower half of a word as bf16: exact, and NaN stays.
__device__ __forceinline__ uint32_t widen_fp8(uint32_t pair) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    const float2 wide = __half22float2(__half2(half));
    return pack(wide.x, wide.y);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The four elements of a word as bf16 or, if `Half`, as f16, two in a word each: exact, and NaN stays.
template <bool Half>
__device__ __forceinline__ uint2 widen_fp8x4(uint32_t four) {
    uint2 half;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(half.x), "=r"(half.y)
        : "r"(four));
    if (Half) return half;
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(half.x)), high = __half22float2(reinterpret_cast<const __half2&>(half.y));
    return make_uint2(pack(low.x, low.y), pack(high.x, high.y));
}
#endif

// Two values rounded to nearest in the lower half of a word; beyond 448 they are 448.
__device__ __forceinline__ uint32_t narrow_fp8(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
