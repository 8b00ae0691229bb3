// Warp-wide matrix products of bf16 with f32 sums, and the copies that feed them (compute capability 8.0 on).
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Begins to copy 16 bytes to shared memory, or zeroes them.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_async(void* to, const void* from, bool wanted) { copy_async(shared_address(to), from, wanted); }

// The same, with a hint to bring the surrounding 256 bytes into L2, for rows whose next 128 bytes are needed soon. A head of 128256 x 4096
// took 4 % less time with it (H100).
__device__ __forceinline__ void copy_async_256(uint32_t to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// Begins to copy 4, 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void copy_async_of(uint32_t to, const void* from) {
    if constexpr (kBytes == 16) {
        copy_async(to, from, true);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
    }
}

template <int kBytes>
__device__ __forceinline__ void copy_async_of(void* to, const void* from) {
    copy_async_of<kBytes>(shared_address(to), from);
}

// To and from addresses in shared memory, where the compiler could not tell that a pointer leads there.
__device__ __forceinline__ void store_shared16(uint32_t to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

__device__ __forceinline__ uint2 load_shared8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
    return v;
}

__device__ __forceinline__ uint32_t load_shared2(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
    return v;
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
}

// One, two or four words.
template <int kWords>
__device__ __forceinline__ void load_shared_words(uint32_t (&to)[kWords], uint32_t from) {
    static_assert(kWords == 1 || kWords == 2 || kWords == 4);
    if constexpr (kWords == 4) {
        const uint4 v = load_shared16(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (kWords == 2) {
        const uint2 v = load_shared8(from);
        to[0] = v.x, to[1] = v.y;
    } else {
        to[0] = load_shared4(from);
    }
}

// Closes a group of copies.
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups are still under way.
template <int Pending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices; lane `i` gives the address of row `i % 8` of matrix `i / 8`.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const bf16* from) { load_matrices(r, shared_address(from)); }

__device__ __forceinline__ uint4 load_matrices(uint32_t from) {
    uint32_t r[4];
    load_matrices(r, from);
    return make_uint4(r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const bf16* from) {
    load_matrices_transposed(r, shared_address(from));
}

// Eight rows of eight bf16, a row in four lanes, to rows that were columns (sm_75 on).
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Transposes words among each four neighbouring lanes: lane i gets word i of each of them.
__device__ __forceinline__ uint4 transpose_quads(uint32_t (&words)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool high = threadIdx.x & step;
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            if (at & step) continue;
            // The pair of lanes exchanges what each has of the other.
            const uint32_t given = high ? words[at] : words[at + step];
            const uint32_t got = __shfl_xor_sync(kAllLanes, given, step);
            (high ? words[at] : words[at + step]) = got;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// c += a x b: a is 16x16 by rows, b 16x8 by columns.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    const bf162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// The same as f16.
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float kLog2E = 1.4426950408889634f;

// tanh(t), given 2 log2(e) t, to a few units of 2^-24: the instruction for it has eleven bits, which a soft cap of 50 would
// turn into 2 % of a weight.
__device__ __forceinline__ float tanh_exp2(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_fast(x)));
    return fmaf(-2.0f, y, 1.0f);
}
