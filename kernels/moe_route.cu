// Mixtures of experts, first part: which experts each row goes to.
//
// A route is one row's way to one expert; route `row * top_k + i` leads to the row's i-th expert, in ascending order. Routes are
// grouped by expert, those of one expert in the order of their rows: the place of a route is its index in that order. The places
// of an expert are cut into tiles, which moe_few*.cu, moe_hopper*.cu and moe.cu multiply, and which are listed in device memory: what the
// host launches does not depend on where rows go. A step of one row needs none of this, as moe_few*.cu route it themselves, and a step of
// 2 to 32 rows on Hopper hardly ever: there moe_route_hopper.cu does it in one kernel with the router's product.
#include "grouping.cuh"

namespace {

__device__ __forceinline__ void route_row(const float* logits, const Router& router, const Routes& r, int row,
                                          uint16_t* chosen) {
    ::route_row(logits + size_t(row) * r.experts, router, r.experts, r.top_k, chosen, r.weights + size_t(row) * r.top_k);
}

// Eight routes, two in a word; if fewer are left, the rest are to no expert.
struct Eight {
    uint32_t words[4];

    __device__ __forceinline__ explicit Eight(const uint16_t* from, int left = 8) : words{~0u, ~0u, ~0u, ~0u} {
        if (left >= 8) {
            const uint4 all = *reinterpret_cast<const uint4*>(from);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < left) words[i / 2] ^= (from[i] ^ 0xffffu) << i % 2 * 16;
        }
    }

    __device__ __forceinline__ int operator[](int i) const { return words[i / 2] >> i % 2 * 16 & 0xffff; }
};

constexpr int kRouteWarps = 8;
constexpr int kGroupThreads = 1024;  // at least as many as experts
constexpr int kFewThreads = 1024;

}  // namespace

// The experts of many rows: a warp a row. `finished` becomes 0. As moe_group adds all rows to the loads, those of padding are taken away.
extern "C" __global__ void __launch_bounds__(kRouteWarps* kWarp)
    moe_route(const float* logits, const bf16* bias, uint16_t* chosen, float* weights, int* places, int* sources, Tile* tiles,
              unsigned* loads, const int* loaded_rows, int rows, int experts, int top_k, int tile, int of_all, float scale,
              const float* scales, int* finished) {
    const Routes r{chosen, weights, places, sources, tiles, {loads, loaded_rows}, rows, experts, top_k, tile};
    const Router router{bias, of_all != 0, scale, scales};
    pdl_launch();
    pdl_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) *finished = 0;
    const int row = blockIdx.x * kRouteWarps + threadIdx.x / kWarp;
    if (row >= rows) return;
    const bool is_padding = loads != nullptr && row >= *loaded_rows;
    uint16_t* const own = chosen + size_t(row) * top_k;
    route_row(logits, router, r, row, own);
    if (!is_padding) return;
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
    if (lane < top_k) atomicSub(loads + own[lane], 1u);
}

// Groups the routes of many rows: a block an expert. Each reads all routes, and the last to have counted its own lists all tiles.
// `counts` are those of experts, and `finished` is how many are known.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    moe_group(uint16_t* chosen, int* places, int* sources, Tile* tiles, unsigned* loads, int* counts, int* finished, int rows,
              int experts, int top_k, int tile) {
    const Routes r{chosen, nullptr, places, sources, tiles, {}, rows, experts, top_k, tile};
    constexpr int kWarps = kGroupThreads / kWarp, kStep = 8 * kWarp;
    __shared__ int partial[4][kWarp];
    __shared__ bool is_last;
    __shared__ Span spans[kGroupThreads];
    const int expert = blockIdx.x, routes = rows * top_k, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    pdl_launch();
    pdl_wait();
    // Each warp has consecutive routes, of which each lane reads eight at a time.
    const int each = ceil_div(ceil_div(routes, kWarps), kStep) * kStep;
    const int begin = min(warp * each, routes), end = min(begin + each, routes);
    int own = 0, before = 0;
    const auto count = [&](const Eight& eight) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            own += eight[j] == expert;
            before += eight[j] < expert;
        }
    };
    int at = begin;
#pragma unroll 4
    for (; at + kStep <= end; at += kStep) count(Eight(chosen + at + lane * 8));
    if (at < end) count(Eight(chosen + at + lane * 8, end - at - lane * 8));
    int first = 0, total = 0;
    sum_before(before, partial[0], first);
    // Where the warp's first route goes.
    int next = first + __shfl_sync(kAllLanes, sum_before(own, partial[1], total), 0);
    int others = 0;
    if (threadIdx.x == 0) {
        counts[expert] = total;
        __threadfence();
        others = atomicAdd(finished, 1);
        if (loads != nullptr) atomicAdd(loads + expert, unsigned(total));
    }
    for (int i = begin; i < end; i += kStep) {
        const Eight eight(chosen + i + lane * 8, end - i - lane * 8);
        uint32_t is_own = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) is_own |= uint32_t(eight[j] == expert) << j;
        const int found = __popc(is_own), sum = sum_of_lanes(found);
        for (int place = next + sum - found; is_own != 0; is_own &= is_own - 1, ++place) {
            const int route = i + lane * 8 + __ffs(is_own) - 1;
            sources[place] = route;
            places[route] = place;
        }
        next += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (threadIdx.x == 0) is_last = others == experts - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int mine = int(threadIdx.x) < experts ? __ldcg(counts + threadIdx.x) : 0;
    int all_tiles = 0;
    first = sum_before(mine, partial[2], total);
    spans[threadIdx.x] = {first, mine, sum_before(ceil_div(mine, tile), partial[3], all_tiles)};
    if (threadIdx.x == 0) tiles[0] = {0, 0, all_tiles, 0};
    __syncthreads();
    for (int i = warp; i < experts; i += kWarps) write_tiles(r, i, spans[i]);
}

// Both for few rows, by one block.
extern "C" __global__ void __launch_bounds__(kFewThreads)
    moe_route_few(const float* logits, const bf16* bias, uint16_t* chosen, float* weights, int* places, int* sources, Tile* tiles,
                  unsigned* loads, const int* loaded_rows, int rows, int experts, int top_k, int tile, int of_all, float scale,
                  const float* scales) {
    const Routes r{chosen, weights, places, sources, tiles, {loads, loaded_rows}, rows, experts, top_k, tile};
    const Router router{bias, of_all != 0, scale, scales};
    __shared__ FewRoutes<uint16_t, kFewThreads> few;
    few.counts[threadIdx.x] = 0;
    pdl_launch();
    pdl_wait();
    // By a warp that has few rows, if any.
    if (threadIdx.x == kFewThreads - 1) few.set_loaded(r);
    for (int row = threadIdx.x / kWarp; row < rows; row += kFewThreads / kWarp) route_row(logits, router, r, row, few.chosen + row * top_k);
    __syncthreads();
    few.group(r, 0, 1);
}
