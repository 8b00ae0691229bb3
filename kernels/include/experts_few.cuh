// What the products of tiles of up to 16 rows share: moe_few.cu, and moe_few_4bit.cu for weights of four bits.
#pragma once

#include "experts.cuh"

// Where one row goes.
struct Route {
    const float* logits;
    Router router;
    int experts;
    float* weights;
    int* places;
    int* sources;
    Tile* tiles;
    unsigned* loads;  // see Loads: one row is no padding
};

// Run::of_tile<kTokenTiles, kOneRow>(problem, tile, shared) multiplies up to 8 * kTokenTiles rows of x, which may be the only one.
template <typename Run>
__device__ __forceinline__ void few_product(const Problem& p) {
    extern __shared__ __align__(128) uint8_t shared[];
    pdl_wait();
    const int count = p.tiles[0].count;
    const Tile tile = p.tiles[1 + blockIdx.y];
    if (int(blockIdx.y) >= count) return;
    if (tile.count > 8) {
        Run::template of_tile<2, false>(p, tile, shared);
    } else {
        Run::template of_tile<1, false>(p, tile, shared);
    }
}

// A product of one row. Each block finds the row's experts itself, which takes less time than a kernel ahead. The first block writes what
// moe_route.cu would have, for the kernels that follow.
template <typename Run>
__device__ __forceinline__ void few_product_of_one(const Problem& p, const Route& route) {
    extern __shared__ __align__(128) uint8_t shared[];
    // Where the ring is later.
    float* const weights = reinterpret_cast<float*>(shared);
    uint16_t* const chosen = reinterpret_cast<uint16_t*>(weights + kWarp);
    pdl_launch();
    pdl_wait();
    const int i = threadIdx.x, at = blockIdx.y;
    if (i < kWarp) route_row(route.logits, route.router, route.experts, p.top_k, chosen, weights);
    __syncthreads();
    const int expert = chosen[at];
    if (blockIdx.x == 0 && at == 0 && i < p.top_k) {
        route.weights[i] = weights[i];
        route.places[i] = route.sources[i] = i;
        route.tiles[1 + i] = {chosen[i], i, 1, 0};
        if (route.loads != nullptr) atomicAdd(route.loads + chosen[i], 1u);
        if (i == 0) route.tiles[0] = {0, 0, p.top_k, 0};
    }
    __syncthreads();
    Run::template of_tile<1, true>(p, {expert, at, 1, 0}, shared);
}

// Defines the kernels of a format, NAME and NAME_one.
#define FEW_PRODUCTS(NAME, THREADS, BLOCKS, RUN)            \
    EXPERT_PRODUCT(NAME, THREADS, BLOCKS, few_product<RUN>) \
    FEW_PRODUCT_OF_ONE(NAME, THREADS, BLOCKS, RUN)

#define FEW_PRODUCT_OF_ONE(NAME, THREADS, BLOCKS, RUN)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                \
        NAME##_one(const float* logits, const bf16* router_bias, int of_all, float scale, const float* expert_scales,            \
                   int experts, float* weights, int* places, int* sources, Tile* tiles, unsigned* loads, const bf16* x,          \
                   const uint8_t* weight, const bf16* bias, const float* scales, bf16* out, uint64_t stride, int n, int k,       \
                   int pitch, int top_k, int kind, int scale_stride) {                                                           \
        few_product_of_one<RUN>(                                                                                                 \
            {x, weight, bias, scales, out, nullptr, nullptr, stride, n, k, pitch, top_k, kind, scale_stride},                    \
            {logits, {router_bias, of_all != 0, scale, expert_scales}, experts, weights, places, sources, tiles, loads});        \
    }
