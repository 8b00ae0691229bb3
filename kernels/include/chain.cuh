// Layers of one row that follow each other in one launch (sm_90a): what linear_chain.cu, moe_chain.cu and moe_chain_sandwich.cu share.
// layer_chain.cu works so too, but with a ring of its own, whose chunks are of any size.
//
// One block runs on each multiprocessor. One thread of it copies the block's shares of the weights to a ring of stages by the copy engine, one
// layer after the other; bulk copies of 16 KiB and more read at 4.6 TB/s on an H200, copies of 16 bytes a lane at 4.3. The ring is deep, but
// few copies are under way at once: what blocks read of each other would queue behind them. All other warps multiply, and wait for what the other
// blocks give them between layers.
#pragma once

#include "rows.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As crates/kernels/src/cuda/chain.rs has it too.
constexpr int kMostStages = 8;
// Where a thread is on its way around the stages.
struct Ring {
    int stages, place = 0, phase = 0;

    __device__ __forceinline__ void next() {
        if (++place == stages) place = 0, phase ^= 1;
    }
};

// Of the stages: that copies have landed, and that all consumers have read them.
struct StageBarriers {
    uint64_t full[kMostStages], empty[kMostStages];

    // By one thread, before all others use them. So many warps multiply.
    __device__ __forceinline__ void init(int stages, int consumers) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], consumers);
        }
        fence_for_products();
    }
};

// The thread that copies.
struct Producer {
    StageBarriers& barriers;
    Ring ring, landed;
    int under_way = 0;
    uint64_t policy = read_once_policy();

    __device__ __forceinline__ Producer(StageBarriers& barriers, int stages) : barriers(barriers), ring{stages}, landed{stages} {}

    // Waits for the next stage, and until fewer than `most` stages are on their way; so many bytes are to come. Returns which stage it is.
    __device__ __forceinline__ int begin(int bytes, int most) {
        barrier_wait(&barriers.empty[ring.place], ring.phase ^ 1);
        for (; under_way >= most; --under_way) {
            barrier_wait(&barriers.full[landed.place], landed.phase);
            landed.next();
        }
        ++under_way;
        barrier_expect_bytes(&barriers.full[ring.place], bytes);
        return ring.place;
    }

    // A part of the bytes of the stage that was begun last.
    __device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes) {
        copy_bulk(to, from, bytes, &barriers.full[ring.place], policy);
    }
};

// The sums over a warp of one, two, four or eight values; a lane gets that of value `lane * kValues / kWarp`.
template <int kValues>
__device__ __forceinline__ float sum_values(float (&x)[kValues]) {
    int offset = kWarp / 2;
#pragma unroll
    for (int half = kValues / 2; half > 0; half /= 2, offset /= 2) {
        const bool upper = threadIdx.x & offset;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + half], offset);
        }
    }
#pragma unroll
    for (; offset > 0; offset /= 2) x[0] += __shfl_xor_sync(kAllLanes, x[0], offset);
    return x[0];
}

// The first of n outputs that a block computes.
__device__ __forceinline__ int first_output(int n, unsigned block) { return unsigned(n) * block / gridDim.x; }

// Brings the weights of a norm into L2, by a warp.
__device__ __forceinline__ void prefetch_norm(const float* weight, int k) {
    for (int i = threadIdx.x % kWarp * kWarp; i < k; i += kWarp * kWarp) asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + i));
}

#endif
