// What every kernel shares: types, vector access, warp and block reductions, programmatic dependent launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;
using bf162 = __nv_bfloat162;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Where the rows of one request lie in a step; see `RunMeta` in crates/kernels/src/cuda/meta.rs.
struct __align__(16) Run {
    int first_row;
    int len;
    int context_end;
    int block_offset;
};

// Waits until the kernel before this one in the stream has finished and its writes are visible. Every kernel calls this
// before it reads what another kernel wrote and before its first write, or the order of a whole chain is lost.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream start its prologue.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Named barriers of a block, 1 to 15: done when `kThreads` threads, whole warps, have come. Those that arrive do not wait.
template <int kThreads>
__device__ __forceinline__ void named_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void named_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
}

// (x & kMask) | kBits in one instruction: of two constants the compiler would make two.
template <uint32_t kMask, uint32_t kBits>
__device__ __forceinline__ uint32_t replace_bits(uint32_t x) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(kMask), "r"(kBits));
    return out;
}

// Eight bf16 in one 16-byte access.
struct __align__(16) Bf16x8 {
    bf162 pair[4];
};

__device__ __forceinline__ Bf16x8 load8(const bf16* from) { return *reinterpret_cast<const Bf16x8*>(from); }

__device__ __forceinline__ void store8(bf16* to, const Bf16x8& value) { *reinterpret_cast<Bf16x8*>(to) = value; }

// Reads once and keeps it out of L1: weights, KV.
__device__ __forceinline__ uint4 load_streaming(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
