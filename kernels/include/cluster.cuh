// Blocks that work on one thing together: a cluster whose blocks reach each other's shared memory (sm_90 and newer), or a
// single block.
#pragma once

#include "common.cuh"

// The address, in block `rank` of the cluster, of the shared variable that has address `mine` (of `shared_address`) here.
__device__ __forceinline__ uint32_t cluster_address(uint32_t mine, int rank) {
    uint32_t theirs = mine;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
#endif
    return theirs;
}

struct Group {
    // Blocks; 1 is a block alone, be it the first of a cluster.
    int parts;

    // This block among them.
    __device__ __forceinline__ int rank() const {
        int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        // Volatile, so that it is read again rather than kept: registers are few.
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
        return rank;
    }

    // All threads of all blocks; writes before it, to shared and global memory, are seen after it.
    __device__ __forceinline__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (parts > 1) {
            arrive();
            wait();
            return;
        }
#endif
        __syncthreads();
    }

    // The halves of `sync` for a cluster. The first time, it says that a block runs, so that its memory may be touched.
    __device__ __forceinline__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (parts > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
    }

    __device__ __forceinline__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (parts > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
    }

    // The same shared variable in block `other`.
    template <typename T>
    __device__ __forceinline__ T* at(T* mine, int other) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (parts > 1) {
            uint64_t theirs;
            asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(other));
            return reinterpret_cast<T*>(theirs);
        }
#endif
        return mine;
    }

    // One thread writes a shared variable of all blocks.
    template <typename T>
    __device__ __forceinline__ void tell(T* mine, const T& value) const {
#pragma unroll 1
        for (int part = 0; part < parts; ++part) *at(mine, part) = value;
    }
};
