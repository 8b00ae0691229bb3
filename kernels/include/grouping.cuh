// Routes grouped by expert, and the tiles of each: what moe_route.cu and moe_route_hopper.cu share.
#pragma once

#include "route.cuh"

// What a step's routes are kept in.
struct Routes {
    uint16_t* chosen;  // [rows, top_k]: experts
    float* weights;    // [rows, top_k]
    int* places;       // [rows, top_k]
    int* sources;      // [rows * top_k]: the route at each place
    Tile* tiles;
    Loads loads;
    int rows, experts, top_k, tile;
};

// The places of an expert, and the first of its tiles.
struct Span {
    int first, count, tile;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The sum of a value of the lanes up to this one.
__device__ __forceinline__ int sum_of_lanes(int x) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kAllLanes, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// The sum of a value of the threads before this one; `total` is that of all threads. `partial` is used once.
__device__ __forceinline__ int sum_before(int x, int (&partial)[kWarp], int& total) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, sum = sum_of_lanes(x);
    if (lane == kWarp - 1) partial[warp] = sum;
    __syncthreads();
    const int of_warp = lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : 0;
    total = __reduce_add_sync(kAllLanes, of_warp);
    return sum - x + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
}

// The tiles of an expert, by a warp.
__device__ __forceinline__ void write_tiles(const Routes& r, int expert, const Span& span) {
    for (int i = threadIdx.x % kWarp; i * r.tile < span.count; i += kWarp) {
        r.tiles[1 + span.tile + i] = {expert, span.first + i * r.tile, min(r.tile, span.count - i * r.tile), 0};
    }
}

// Up to `kThreads` routes to as many experts at most, in shared memory.
template <typename Expert, int kThreads>
struct FewRoutes {
    Expert chosen[kThreads];
    int counts[kThreads];  // of experts
    int before[kThreads];  // routes and tiles before each expert's, in the halves of a word
    int partial[kWarp];
    int loaded;  // routes that are counted among loads

    // By one thread, before the others of the block begin to group.
    __device__ __forceinline__ void set_loaded(const Routes& r) { loaded = r.loads.counts == nullptr ? 0 : *r.loads.rows * r.top_k; }

    // By all threads of a block, who know what was chosen, and that counts are 0. Of several blocks, each writes what belongs to experts
    // `part`, `part + parts`, ...; the first also adds to the loads.
    __device__ __forceinline__ void group(const Routes& r, int part, int parts) {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, routes = r.rows * r.top_k;
        if (int(threadIdx.x) < routes) {
            atomicAdd(&counts[chosen[threadIdx.x]], 1);
            if (part == 0 && int(threadIdx.x) < loaded) atomicAdd(r.loads.counts + chosen[threadIdx.x], 1u);
        }
        __syncthreads();
        const int own = counts[threadIdx.x];
        int all = 0;
        before[threadIdx.x] = sum_before(own | ceil_div(own, r.tile) << 16, partial, all);
        if (part == 0 && threadIdx.x == 0) r.tiles[0] = {0, 0, all >> 16, 0};
        __syncthreads();
        for (int expert = part + parts * warp; expert < r.experts; expert += parts * (kThreads / kWarp)) {
            const Span span{before[expert] & 0xffff, counts[expert], before[expert] >> 16};
            if (span.count == 0) continue;
            int place = span.first;
            for (int i = lane; i - lane < routes; i += kWarp) {
                const bool is_own = i < routes && chosen[i] == expert;
                const unsigned found = __ballot_sync(kAllLanes, is_own);
                if (is_own) {
                    const int at = place + __popc(found & ((1u << lane) - 1));
                    r.sources[at] = i;
                    r.places[i] = at;
                }
                place += __popc(found);
            }
            write_tiles(r, expert, span);
        }
    }
};
