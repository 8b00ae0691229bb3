// Weights in GGUF's block types: (code - zero) * scale + min.
//
// A row is cut into windows of 256 inputs, the last filled up with zeros: 16-byte pieces of the lower four bits of its codes, or all eight,
// then of the bits above, then of what its groups share. A part of 32 inputs is four lanes', eight of each: of consecutive inputs, or
// where groups have 16, four of each group, as a product sums over 16 inputs at once. `crates/kernels/src/gguf.rs` writes such rows, and
// says where each bit lies.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

enum class Gguf { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4K, kQ5K, kQ6K };

constexpr int kGgufWindow = 256;
constexpr int kGgufParts = kGgufWindow / 32;

// Bits of a code.
template <Gguf kType>
constexpr bool kHasFiveBits = kType == Gguf::kQ5_0 || kType == Gguf::kQ5_1 || kType == Gguf::kQ5K;
template <Gguf kType>
constexpr int kCodeBits = kType == Gguf::kQ8_0 ? 8 : kType == Gguf::kQ6K ? 6 : kHasFiveBits<kType> ? 5 : 4;
// Codes are less by this; those of eight bits have a sign.
template <Gguf kType>
constexpr uint32_t kCodeZero = kType == Gguf::kQ4_0 ? 8 : kType == Gguf::kQ5_0 ? 16 : kType == Gguf::kQ6K ? 32 : 0;
// Groups share a scale, or a scale and a minimum, or factors of those of a window, of six bits or of eight.
template <Gguf kType>
constexpr bool kHasSixBits = kType == Gguf::kQ4K || kType == Gguf::kQ5K;
template <Gguf kType>
constexpr bool kHasHalves = kType == Gguf::kQ4_1 || kType == Gguf::kQ5_1;
template <Gguf kType>
constexpr bool kHasMin = kHasSixBits<kType> || kHasHalves<kType>;
// What the factors of eight bits multiply lies behind a row's windows.
template <Gguf kType>
constexpr bool kHasScalesBehind = kType == Gguf::kQ6K;
// Parts of a window that are multiplied one step after another: those of whole pieces.
template <Gguf kType>
constexpr int kStepParts = kCodeBits<kType> == 8 ? 2 : 4;
template <Gguf kType>
constexpr int kSteps = kGgufParts / kStepParts<kType>;
template <Gguf kType>
constexpr int kGroupInputs = kType == Gguf::kQ6K ? 16 : 32;
template <Gguf kType>
constexpr int kSharedAt = kGgufWindow / 8 * kCodeBits<kType>;  // in bytes
template <Gguf kType>
constexpr int kWindowPieces = kSharedAt<kType> / 16 + (kHasHalves<kType> ? 2 : 1);

__device__ __forceinline__ float half_of(uint32_t word, bool upper) {
    return __half2float(__ushort_as_half(uint16_t(upper ? word >> 16 : word)));
}

// The scale of a window of a row, where it lies behind the windows.
template <Gguf kType>
__device__ __forceinline__ float window_scale(const uint8_t* row, int windows, int window) {
    if constexpr (!kHasScalesBehind<kType>) return 1.0f;
    const auto* const scales = reinterpret_cast<const uint16_t*>(row + size_t(windows) * kWindowPieces<kType> * 16);
    return half_of(__ldg(scales + window), false);
}

// A lane's codes of a step.
template <Gguf kType>
struct GgufCodes {
    uint32_t low[4], high[2];

    __device__ __forceinline__ void load(const uint8_t* window, int quad, int step) {
        const uint4 piece = reinterpret_cast<const uint4*>(window)[step * 4 + quad];
        low[0] = piece.x, low[1] = piece.y, low[2] = piece.z, low[3] = piece.w;
        const auto* const above = reinterpret_cast<const uint32_t*>(window + kGgufWindow / 2);
        if constexpr (kCodeBits<kType> == 5) high[0] = above[quad * 2 + step];
        if constexpr (kCodeBits<kType> == 6) high[0] = above[quad * 4 + step * 2], high[1] = above[quad * 4 + step * 2 + 1];
    }

    // Pairs of a part's eight codes, less their zero: bf16, exactly. 128 more than a code below 128 is a bf16 whose last bits are the
    // code.
    __device__ __forceinline__ void widen(int part, uint32_t (&pairs)[4]) const {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            uint32_t bits, zeros = kCodeZero<kType> * 0x00010001u | 0x43004300u;
            if constexpr (kCodeBits<kType> == 8) {
                const uint32_t word = low[part * 2 + pair / 2] >> (pair % 2 * 8);
                bits = replace_bits<0x007f007f, 0x43004300>(word);
                // A code with a sign is its last seven bits less 128: from there the next bf16 with such bits is 256.
                zeros = replace_bits<0x00800080, 0x43004300>(word);
            } else {
                bits = replace_bits<0x000f000f, 0x43004300>(low[part] >> (pair * 4));
            }
            if constexpr (kCodeBits<kType> == 5) bits |= shifted(high[0], part * 4 + pair) & 0x00100010u;
            if constexpr (kCodeBits<kType> == 6) bits |= shifted(high[part / 2], (part % 2 * 4 + pair) * 2) & 0x00300030u;
            const bf162 wide = __hsub2(reinterpret_cast<const bf162&>(bits), reinterpret_cast<const bf162&>(zeros));
            pairs[pair] = reinterpret_cast<const uint32_t&>(wide);
        }
    }

    // Bit `at` of each half of a word to bit 4.
    __device__ __forceinline__ static uint32_t shifted(uint32_t word, int at) { return at < 4 ? word << (4 - at) : word >> (at - 4); }
};

// What the groups of a step share.
template <Gguf kType>
struct GgufGroups {
    const uint32_t* each;  // those that have a word each
    uint32_t words[2];
    uint32_t of_all;     // a scale and a minimum of the window, two halves
    float scale_of_all;  // of the window

    // `behind` is the window's scale, if that does not lie in it.
    __device__ __forceinline__ void load(const uint8_t* window, int step, float behind) {
        const uint8_t* const shared = window + kSharedAt<kType>;
        if constexpr (kHasSixBits<kType>) {
            const uint4 piece = *reinterpret_cast<const uint4*>(shared);
            of_all = piece.x;
            // Factors of two groups each in the lower bits of the other words, those of the last two in the upper bytes of these.
            const uint32_t last = __byte_perm(__byte_perm(piece.y, piece.z, 0x0073), piece.w, 0x4710);
            words[0] = step == 0 ? piece.y : piece.w;
            words[1] = step == 0 ? piece.z : last;
        } else if constexpr (kHasHalves<kType>) {
            each = reinterpret_cast<const uint32_t*>(shared) + step * kStepParts<kType>;
        } else if constexpr (kStepParts<kType> == 4) {
            const uint2 piece = reinterpret_cast<const uint2*>(shared)[step];
            words[0] = piece.x, words[1] = piece.y, scale_of_all = behind;
        } else {
            words[0] = reinterpret_cast<const uint32_t*>(shared)[step];
        }
    }

    // Of one of the groups, exactly.
    __device__ __forceinline__ float scale(int group) const {
        if constexpr (kHasSixBits<kType>) return times(words[group / 2] >> (group % 2 * 12) & 63, half_of(of_all, false));
        if constexpr (kHasHalves<kType>) return half_of(each[group], false);
        if constexpr (kHasScalesBehind<kType>) {
            // Stored as 128 more.
            const uint32_t factor = words[group / 4] >> (group % 4 * 8) & 255;
            return (__uint_as_float(factor | 0x4b000000u) - 8388736.0f) * scale_of_all;
        }
        return half_of(words[group / 2], group % 2 == 1);
    }

    __device__ __forceinline__ float min(int group) const {
        if constexpr (kHasSixBits<kType>) return times(words[group / 2] >> (group % 2 * 12 + 6) & 63, half_of(of_all, true));
        if constexpr (kHasHalves<kType>) return half_of(each[group], true);
        return 0.0f;
    }

    // 2^23 more than a small integer is a float whose last bits are the integer. The product less that of 2^23 is rounded once, and has
    // few enough bits not to be.
    __device__ __forceinline__ static float times(uint32_t integer, float factor) {
        return fmaf(__uint_as_float(integer | 0x4b000000u), factor, -8388608.0f * factor);
    }
};
