// Weights of four bits: (code - zero) * scale.
//
// A row is cut into windows of 128 inputs, the last filled up with whatever: 64 bytes, 16 words of eight codes. Word `4 * quad + part`
// has inputs `32 * part + 8 * quad` on of its window, so that the 16 bytes that a lane of a product reads have eight inputs of each
// 32, and the four lanes of a row all 32. A word has its four even inputs in the lower half, the odd ones in the upper.
//
// Experts' windows have 64 inputs, and word `2 * quad + part` inputs `32 * part + 8 * quad` on; codes that fill up the last window are
// the zero of the last group, whose word stands for groups past the end too.
//
// Each 32, 64 or 128 inputs of a row are a group. They share a word: the scale as f32, whose last four bits are the zero instead.
// Scales of 16 bits lose nothing by that.
#pragma once

#include "common.cuh"

constexpr int kWindow = 128;
constexpr int kWindowWords = kWindow / 8;
constexpr int kWindowParts = 4;  // of 32 inputs
constexpr uint32_t kZeroMask = 15;

__device__ __forceinline__ float group_scale(uint32_t group) { return __uint_as_float(group & ~kZeroMask); }

// 128 more than a code is a bf16 whose last bits are the code: what is taken from such pairs to leave codes less their zero, exactly.
__device__ __forceinline__ uint32_t group_zeros(uint32_t group) { return (group & kZeroMask) * 0x00010001u | 0x43004300u; }

// Inputs 2 * kPair and 2 * kPair + 1 of a word, less their zero.
template <int kPair>
__device__ __forceinline__ uint32_t widen_int4(uint32_t word, uint32_t zeros) {
    const uint32_t bits = (word >> (4 * kPair) & 0x000f000fu) | 0x43004300u;
    const bf162 wide = __hsub2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(zeros));
    return reinterpret_cast<const uint32_t&>(wide);
}

// All eight inputs of a word, less their zero.
__device__ __forceinline__ uint4 widen_int4(uint32_t word, uint32_t zeros) {
    return make_uint4(widen_int4<0>(word, zeros), widen_int4<1>(word, zeros), widen_int4<2>(word, zeros), widen_int4<3>(word, zeros));
}
