// Mixtures of experts, first part: which experts each row goes to.
//
// A route is one row's way to one expert; route `row * top_k + i` leads to the row's i-th expert, in ascending order. Routes are
// grouped by expert, those of one expert in the order of their rows: the place of a route is its index in that order. The places
// of an expert are cut into tiles, which moe_few*.cu, moe_hopper*.cu and moe.cu multiply, and which are listed in device memory: what the
// host launches does not depend on where rows go. A step of one row needs none of this: moe_few*.cu route it themselves.
#include "route.cuh"

namespace {

// What a step's routes are kept in.
struct Routes {
    uint16_t* chosen;  // [rows, top_k]: experts
    float* weights;    // [rows, top_k]
    int* places;       // [rows, top_k]
    int* sources;      // [rows * top_k]: the route at each place
    Tile* tiles;
    int rows, experts, top_k, tile;
};

__device__ __forceinline__ void route_row(const float* logits, const Router& router, const Routes& r, int row,
                                          uint16_t* chosen) {
    ::route_row(logits + size_t(row) * r.experts, router, r.experts, r.top_k, chosen, r.weights + size_t(row) * r.top_k);
}

// The sum of a value of the threads before this one; `total` is that of all threads. `partial` is used once.
__device__ __forceinline__ int sum_before(int x, int (&partial)[kWarp], int& total) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    int sum = x;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == kWarp - 1) partial[warp] = sum;
    __syncthreads();
    const int of_warp = lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : 0;
    total = __reduce_add_sync(kAllLanes, of_warp);
    return sum - x + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
}

__device__ __forceinline__ int tiles_of(int count, int tile) { return (count + tile - 1) / tile; }

// The tiles of an expert, by threads `thread`, `thread + threads`, ...
__device__ __forceinline__ void write_tiles(const Routes& r, int expert, int first, int count, int tile, int thread, int threads) {
    for (int i = thread; i * r.tile < count; i += threads) {
        r.tiles[1 + tile + i] = {expert, first + i * r.tile, min(r.tile, count - i * r.tile), 0};
    }
}

constexpr int kRouteWarps = 8;
constexpr int kGroupThreads = 512;
constexpr int kFewThreads = 1024;
constexpr int kFewRoutes = 1024;

}  // namespace

// The experts of many rows: a warp a row.
extern "C" __global__ void __launch_bounds__(kRouteWarps* kWarp)
    moe_route(const float* logits, const bf16* bias, uint16_t* chosen, float* weights, int* places, int* sources, Tile* tiles,
              int rows, int experts, int top_k, int tile, int of_all, float scale, const float* scales) {
    const Routes r{chosen, weights, places, sources, tiles, rows, experts, top_k, tile};
    const Router router{bias, of_all != 0, scale, scales};
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x * kRouteWarps + threadIdx.x / kWarp;
    if (row < rows) route_row(logits, router, r, row, chosen + size_t(row) * top_k);
}

// Groups the routes of many rows: a block an expert, each of which counts all routes.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    moe_group(uint16_t* chosen, int* places, int* sources, Tile* tiles, int rows, int experts, int top_k, int tile) {
    const Routes r{chosen, nullptr, places, sources, tiles, rows, experts, top_k, tile};
    __shared__ int counts[kMostExperts];
    __shared__ int partial[4][kWarp];
    const int expert = blockIdx.x, routes = rows * top_k;
    for (int i = threadIdx.x; i < experts; i += kGroupThreads) counts[i] = 0;
    pdl_launch();
    pdl_wait();
    __syncthreads();
    // Each thread has consecutive routes, read eight at a time.
    const int each = tiles_of(tiles_of(routes, kGroupThreads), 8) * 8;
    const int begin = min(int(threadIdx.x) * each, routes), end = min(begin + each, routes);
    const auto visit = [&](auto&& of) {
        int i = begin;
        for (; i + 8 <= end; i += 8) {
            const uint4 eight = *reinterpret_cast<const uint4*>(chosen + i);
            const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) of(i + j, int(words[j / 2] >> (j % 2 * 16) & 0xffff));
        }
        for (; i < end; ++i) of(i, int(chosen[i]));
    };
    int own = 0;
    visit([&](int, int at) {
        atomicAdd(&counts[at], 1);
        own += at == expert;
    });
    __syncthreads();
    int before = 0, tiles_before = 0, all_tiles = 0;
    for (int i = threadIdx.x; i < experts; i += kGroupThreads) {
        const int count = counts[i], of_expert = tiles_of(count, tile);
        before += i < expert ? count : 0;
        tiles_before += i < expert ? of_expert : 0;
        all_tiles += of_expert;
    }
    int total = 0, first = 0, first_tile = 0;
    sum_before(before, partial[0], first);
    sum_before(tiles_before, partial[1], first_tile);
    sum_before(all_tiles, partial[2], all_tiles);
    int place = first + sum_before(own, partial[3], total);
    visit([&](int route, int at) {
        if (at != expert) return;
        sources[place] = route;
        places[route] = place;
        ++place;
    });
    write_tiles(r, expert, first, total, first_tile, threadIdx.x, kGroupThreads);
    if (expert == 0 && threadIdx.x == 0) tiles[0] = {0, 0, all_tiles, 0};
}

// Both for few rows, by one block.
extern "C" __global__ void __launch_bounds__(kFewThreads)
    moe_route_few(const float* logits, const bf16* bias, uint16_t* chosen, float* weights, int* places, int* sources, Tile* tiles,
                  int rows, int experts, int top_k, int tile, int of_all, float scale, const float* scales) {
    const Routes r{chosen, weights, places, sources, tiles, rows, experts, top_k, tile};
    const Router router{bias, of_all != 0, scale, scales};
    __shared__ uint16_t few[kFewRoutes];
    __shared__ int counts[kMostExperts], firsts[kMostExperts];
    __shared__ int partial[kWarp];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, routes = rows * top_k;
    counts[threadIdx.x] = 0;
    pdl_launch();
    pdl_wait();
    for (int row = warp; row < rows; row += kFewThreads / kWarp) route_row(logits, router, r, row, few + row * top_k);
    __syncthreads();
    if (threadIdx.x < routes) atomicAdd(&counts[few[threadIdx.x]], 1);
    __syncthreads();
    // Routes and tiles before each expert's, in the halves of a word.
    const int own = counts[threadIdx.x];
    int all = 0;
    firsts[threadIdx.x] = sum_before(own | tiles_of(own, tile) << 16, partial, all);
    if (threadIdx.x == 0) tiles[0] = {0, 0, all >> 16, 0};
    __syncthreads();
    for (int expert = warp; expert < experts; expert += kFewThreads / kWarp) {
        const int count = counts[expert];
        if (count == 0) continue;
        const int first = firsts[expert] & 0xffff;
        int place = first;
        for (int i = lane; i - lane < routes; i += kWarp) {
            const bool is_own = i < routes && few[i] == expert;
            const unsigned found = __ballot_sync(kAllLanes, is_own);
            if (is_own) {
                const int at = place + __popc(found & ((1u << lane) - 1));
                sources[at] = i;
                places[i] = at;
            }
            place += __popc(found);
        }
        write_tiles(r, expert, first, count, firsts[expert] >> 16, lane, kWarp);
    }
}
