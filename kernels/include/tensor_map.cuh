// Copies of parts of matrices by the copy engine (TMA, sm_90 and later), as a tensor map says that the host has encoded
// (crates/device/src/cuda/tensor_map.rs).
#pragma once

#include "mma.cuh"

// Matrices of bytes, one behind the other or two in turn. A copy takes `kMapRows` rows of 128 bytes each, or with a map of one matrix as many
// as its maker said, or with a map of eights (`MatrixEights`) eight whole rows; swizzled as products of warp groups want them.
struct __align__(64) TensorMap {
    uint8_t bytes[128];
};

constexpr int kMapRows = 64;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Arrives, and makes the phase wait for so many bytes of copies too.
__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Begins to copy from (byte, row, matrix) on, or with a map of eights from (0, row, 0) on, with zeros past the end. `to` is a multiple of 1024
// bytes, or of 512 where a map's rows are 64 bytes wide.
__device__ __forceinline__ void copy_tensor(void* to, const TensorMap& map, int3 from, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(from.x), "r"(from.y), "r"(from.z), "r"(shared_address(barrier))
        : "memory");
}

// The same with a map of a single matrix, from (byte, row, 0, 0) on, or of the eights of two matrices in turn, from (byte, 0, 0, eight) on.
__device__ __forceinline__ void copy_tensor(void* to, const TensorMap& map, int4 from, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w), "r"(shared_address(barrier))
        : "memory");
}

// The same with a map of one matrix, from (byte, row) on.
__device__ __forceinline__ void copy_tensor(void* to, const TensorMap& map, int2 from, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(from.x), "r"(from.y), "r"(shared_address(barrier))
                 : "memory");
}

// The same to each block of the cluster whose bit is set in `blocks`, at the same offset in its shared memory; the barrier at that offset there
// is told.
__device__ __forceinline__ void copy_tensor(void* to, const TensorMap& map, int2 from, uint64_t* barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(from.x), "r"(from.y), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}

// That what is read is not read again: it makes room in L2 first.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Begins to copy so many bytes, a multiple of 16 as both addresses are.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

// The same of what is read again.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(shared_address(barrier))
                 : "memory");
}

#endif
