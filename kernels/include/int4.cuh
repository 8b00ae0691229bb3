// Weights of four bits: (code - zero) * scale.
//
// A row is cut into windows of 128 inputs, the last filled up with any codes: 64 bytes, 16 words of eight codes. Eight neighbouring rows
// lie together, window by window, so that a part of k of a tile of rows is in few pieces: window `w` of row `r` is the
// `((r / 8 * windows + w) * 8 + r % 8)`th, and in the same order lie the words of groups.
//
// Input `32 * part + 8 * pair + 2 * quad + odd` of a window is in its word `4 * quad + part`, in the four bits from `16 * odd + 4 * pair` on: the
// words of a `quad` have what one lane of a product multiplies, mma.m16n8k16 after mma.m16n8k16.
//
// Codes of experts have smaller windows (experts.cuh), and the words of their groups lie row after row.
//
// Each 32, 64 or 128 inputs of a row are a group. They share a word: the scale as f32, whose last four bits are the zero instead.
// Scales of 16 bits lose nothing by that. The word of the last group stands for groups past the end too.
#pragma once

#include "common.cuh"

constexpr int kWindow = 128;
constexpr int kWindowParts = 4;  // of 32 inputs
constexpr int kRowsTogether = 8;
constexpr int kWindowBytes = kWindow / 2;  // of a row
constexpr uint32_t kZeroMask = 15;

__device__ __forceinline__ float group_scale(uint32_t group) { return __uint_as_float(group & ~kZeroMask); }

// 128 more than a code is a bf16 whose last bits are the code: what is taken from such pairs to leave codes less their zero, exactly.
__device__ __forceinline__ uint32_t group_zeros(uint32_t group) { return (group & kZeroMask) * 0x00010001u | 0x43004300u; }

// Pair `kPair` of a word, less its zero.
template <int kPair>
__device__ __forceinline__ uint32_t widen_int4(uint32_t word, uint32_t zeros) {
    const uint32_t bits = replace_bits<0x000f000f, 0x43004300>(word >> (4 * kPair));
    const bf162 wide = __hsub2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(zeros));
    return reinterpret_cast<const uint32_t&>(wide);
}

// All four pairs of a word, less their zero.
__device__ __forceinline__ uint4 widen_int4(uint32_t word, uint32_t zeros) {
    return make_uint4(widen_int4<0>(word, zeros), widen_int4<1>(word, zeros), widen_int4<2>(word, zeros), widen_int4<3>(word, zeros));
}
