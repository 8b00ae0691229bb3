// What the kernels of experts of many rows on sm_90a share (moe_hopper.cu, moe_hopper_4bit.cu): pieces of work, and who does what in a block.
#pragma once

#include "experts.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kConsumers = 2;  // warp groups that multiply, behind one that copies

// A piece of work: a tile of rows of x, and outputs from `first` on.
struct Work {
    Tile tile;
    int first;
};

// Piece of work `index`, each of `columns` columns of `outputs` outputs of a tile before those of the next tile.
__device__ __forceinline__ Work work_at(const Problem& p, int index, int columns, int outputs) {
    return {p.tiles[1 + index / columns], index % columns * outputs};
}

// Runs a block: the first warp group fills stages, by `produce`, and the others multiply, by `consume`. All threads of the first arrive at a
// stage's full barrier, and one of them once more for the copy engine, where that fills stages too.
template <int kProducerRegisters, int kConsumerRegisters, typename Experts>
__device__ __forceinline__ void run_warp_groups(const Experts& experts) {
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == (1 + kConsumers) * 168, "registers of the warp groups");
    if (threadIdx.x == 0) {
        for (int i = 0; i < Experts::kStages; ++i) {
            barrier_init(experts.shared.full + i, kWarpGroup + Experts::kHasCopyEngine);
            barrier_init(experts.shared.empty + i, kConsumers * kWarpGroup / kWarp);
        }
        // The copy engine sees them.
        if constexpr (Experts::kHasCopyEngine) fence_for_products();
    }
    __syncthreads();
    pdl_launch();
    pdl_wait();
    const int count = experts.p.tiles[0].count * experts.columns();
    // The compiler must see that it is the same for all lanes.
    const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
    if (group == 0) {
        give_registers<kProducerRegisters>();
        experts.produce(count);
    } else {
        take_registers<kConsumerRegisters>();
        experts.consume(count, group - 1);
    }
}

#endif
