// Philox4x32-10, the counter-based generator of Salmon et al. (https://doi.org/10.1145/2063384.2063405): four random words
// as a pure function of a key and a counter. The twin of crates/kernels/src/philox.rs.
#pragma once

#include <stdint.h>

__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
    constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(kMultiplier0, counter.x), low0 = kMultiplier0 * counter.x;
        const uint32_t high1 = __umulhi(kMultiplier1, counter.z), low1 = kMultiplier1 * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += kWeyl0;
        key.y += kWeyl1;
    }
    return counter;
}

__device__ __forceinline__ uint2 words(uint64_t value) {
    return make_uint2(static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32));
}

// The 53 bits of the draw of (seed, index), as an integer: the draw is this over 2^53.
__device__ __forceinline__ uint64_t uniform53(uint64_t seed, uint64_t index) {
    const uint2 counter = words(index);
    const uint4 block = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
    return (static_cast<uint64_t>(block.y) << 32 | block.x) >> 11;
}
