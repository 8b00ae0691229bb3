// Values that the blocks of a launch exchange, each in one word together with the launch's tag. A reader repeats a load until the word has the
// tag. No fence is needed, as value and tag are stored and loaded at once, past the L1 caches. If all threads polled for long, they would slow
// the loads of weights. So blocks also count those that have written, and one thread of each block polls the count first. The count is only a
// hint, without order: words may arrive after it.
//
// Launches use the tags 1 to kLastTag in turn; those of layer_chain.cu one for each layer. Words are 0 at first, and the launch behind which no
// tags, or too few, are left clears all of them at its end. So a word with a launch's or layer's tag was written by it, whatever ran in between.
#pragma once

#include "common.cuh"

constexpr uint32_t kLastTag = 0xffff;
// A wait ends with an error after so many looks, which take some ten seconds.
constexpr int kMostLooks = 1 << 25;
constexpr int kLookPause = 20;  // nanoseconds between looks at a word

// Counts a block, by one thread, once all its threads have written.
__device__ __forceinline__ void count_written(unsigned* count) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

// Waits until so many have been counted, by one thread, without a pause between loads.
__device__ __forceinline__ void wait_count(const unsigned* count, unsigned least) {
#pragma unroll 1
    for (int looks = 0; looks < kMostLooks; ++looks) {
        unsigned now;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
        if (now >= least) return;
    }
    __trap();
}

// A value in the lower half of a word, the tag in the upper one.
__device__ __forceinline__ void publish(uint32_t* to, bf16 value, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(tag << 16 | __bfloat16_as_ushort(value)) : "memory");
}

__device__ __forceinline__ void publish(uint64_t* to, float value, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(tag) << 32 | __float_as_uint(value)) : "memory");
}

__device__ __forceinline__ float wait_value(const uint64_t* from, uint32_t tag) {
    uint64_t word;
    int looks = 0;
    while (true) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
        if (uint32_t(word >> 32) == tag) return __uint_as_float(uint32_t(word));
        if (++looks == kMostLooks) __trap();
        __nanosleep(kLookPause);
    }
}

// Values that are waited for at once.
template <int N>
__device__ __forceinline__ void wait_values(float (&values)[N], const uint64_t* const (&from)[N], uint32_t tag) {
    uint64_t words[N];
    bool are_here[N] = {}, all = false;
    for (int looks = 0; !all; ++looks) {
        if (looks == kMostLooks) __trap();
        if (looks > 0) __nanosleep(kLookPause);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (!are_here[i]) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(from[i]) : "memory");
        }
        all = true;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            are_here[i] = are_here[i] || uint32_t(words[i] >> 32) == tag;
            all = all && are_here[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = __uint_as_float(uint32_t(words[i]));
}

// Four words, each loaded atomically but not together.
__device__ __forceinline__ uint4 look_at_words(const uint32_t* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ bool have_tag(const uint4& words, uint32_t tag) {
    const uint32_t t = tag << 16;
    return ((words.x ^ t) | (words.y ^ t) | (words.z ^ t) | (words.w ^ t)) <= 0xffff;
}

// Waits for the values of the quads `first`, `first + step`, ... of a row of `quads`; those past its end become 0.
template <int kQuads>
__device__ __forceinline__ void wait_quads(uint2 (&values)[kQuads], const uint32_t* from, int first, int step, int quads, uint32_t tag) {
    uint4 words[kQuads];
    bool are_here[kQuads], all = true;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        words[i] = make_uint4(0, 0, 0, 0);
        are_here[i] = first + i * step >= quads;
        all = all && are_here[i];
    }
    for (int looks = 0; !all; ++looks) {
        if (looks == kMostLooks) __trap();
        if (looks > 0) __nanosleep(kLookPause);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            if (!are_here[i]) words[i] = look_at_words(from + 4 * (first + i * step));
        }
        all = true;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            are_here[i] = are_here[i] || have_tag(words[i], tag);
            all = all && are_here[i];
        }
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        values[i] = make_uint2(__byte_perm(words[i].x, words[i].y, 0x5410), __byte_perm(words[i].z, words[i].w, 0x5410));
    }
}
