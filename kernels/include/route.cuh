// From a row's logits to its experts, and the tiles that their products take.
#pragma once

#include "common.cuh"

constexpr int kMostExperts = 1024;

// Places `first` on, so many, of one expert. In front of the tiles is one whose `count` is the number of tiles.
struct __align__(16) Tile {
    int expert, first, count, unused;
};

// Where it is counted how many rows go to each expert.
struct Loads {
    unsigned* counts;  // [experts], or null
    const int* rows;   // how many rows count: those behind them are padding
};

// From logits to weights.
struct Router {
    const bf16* bias;     // added to logits, or null
    bool of_all;          // weights of all experts sum to 1, not those of the chosen alone
    float scale;          // of logits
    const float* scales;  // of weights, [experts], or null
};

// Unsigned numbers in the order of logits, none of them 0. What is no number is the largest, and there is one zero.
__device__ __forceinline__ uint32_t to_key(float logit) {
    const uint32_t bits = isnan(logit) ? 0x7f800000u : __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The experts of a row, by a warp whose lanes hold `kLogits` logits each.
template <int kLogits>
__device__ __forceinline__ void route_row(const float* logits, const Router& router, int experts, int top_k, uint16_t* chosen,
                                          float* weights) {
    static_assert(kLogits <= 32, "a bit for each");
    const int lane = threadIdx.x % kWarp;
    uint32_t keys[kLogits];
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        const int at = lane + i * kWarp;
        keys[i] = 0;
        if (at >= experts) continue;
        const float bias = router.bias == nullptr ? 0.0f : __bfloat162float(router.bias[at]);
        keys[i] = to_key(logits[at] * router.scale + bias);
    }
    // The largest logit that is left; of equal ones the first expert.
    uint32_t taken = 0, top = 0, mine = 0;
    int expert = 0;
#pragma unroll 1
    for (int found = 0; found < top_k; ++found) {
        uint32_t best = 0;
        int best_at = 0;
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            if (keys[i] > best && !(taken >> i & 1)) best = keys[i], best_at = i;
        }
        const uint32_t largest = __reduce_max_sync(kAllLanes, best);
        const int of_lane = best == largest ? lane + best_at * kWarp : kMostExperts;
        const int next = __reduce_min_sync(kAllLanes, of_lane);
        if (next == of_lane) taken |= 1u << best_at;
        if (found == 0) top = largest;
        if (found == lane) mine = largest, expert = next;
    }
    const bool is_mine = lane < top_k;
    const float max = from_key(top);
    float weight = is_mine ? expf(from_key(mine) - max) : 0.0f, sum = weight;
    if (router.of_all) {
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            if (lane + i * kWarp < experts) sum += expf(from_key(keys[i]) - max);
        }
    }
    weight = isfinite(max) ? weight / warp_sum(sum) : __int_as_float(0x7fffffff);
    int rank = 0;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        const unsigned chosen_here = __ballot_sync(kAllLanes, taken >> i & 1), before = (1u << expert % kWarp) - 1;
        if (i <= expert / kWarp) rank += __popc(i < expert / kWarp ? chosen_here : chosen_here & before);
    }
    if (is_mine) {
        if (router.scales != nullptr) weight *= router.scales[expert];
        chosen[rank] = static_cast<uint16_t>(expert);
        weights[rank] = weight;
    }
}

// The experts of a row, by a warp.
__device__ __forceinline__ void route_row(const float* logits, const Router& router, int experts, int top_k, uint16_t* chosen,
                                          float* weights) {
    if (experts <= 4 * kWarp) {
        route_row<4>(logits, router, experts, top_k, chosen, weights);
    } else if (experts <= 8 * kWarp) {
        route_row<8>(logits, router, experts, top_k, chosen, weights);
    } else {
        route_row<kMostExperts / kWarp>(logits, router, experts, top_k, chosen, weights);
    }
}
