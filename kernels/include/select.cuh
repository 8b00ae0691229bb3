// Exact selection among the tokens of a row without sorting them: sums and ranks over keys, by histograms of the keys' bits.
//
// A token has a 32-bit key; larger is better, equal keys rank by lower id, key 0 is no candidate. Its mass is an integer, so
// sums are exact and do not depend on the order they are made in. `Group` blocks share a row; each warp has a contiguous
// range of ids, in the order of blocks and warps.
#pragma once

#include "cluster.cuh"

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / kWarp;
// Blocks that share a row, at most.
constexpr int kMaxParts = 8;
// Levels of a descent: 11, 11 and 10 bits of the key.
constexpr int kBuckets = 2048;
// Tokens a block lists to select among them alone.
constexpr int kListed = 2048;
// Vocabulary whose marks fit where the histogram is.
constexpr int kMarks = 3 * kBuckets;
constexpr float kInfinity = __builtin_huge_valf();

struct Token {
    uint32_t key;
    uint32_t id;
};

// Number and mass of tokens.
struct Weight {
    uint32_t count;
    uint64_t mass;
};

// The bucket at which a running sum from the best token down passes a target.
struct Crossing {
    Weight before;
    Weight in;
    uint32_t bucket;
};

struct Histogram {
    uint32_t count[kBuckets];
    // Mass in two words: 32-bit atomics are native.
    uint32_t low[kBuckets];
    uint32_t high[kBuckets];
};

// Orders as floats do, -0 and 0 alike; never 0.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The number that `ordered` was made from.
__device__ __forceinline__ float from_ordered(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// `e^x` for x <= 0 with the same operations as the twin in crates/kernels/src/simd/math.rs, so the same bits.
__device__ __forceinline__ float exp_twin(float x) {
    constexpr float kLowest = -87.3f;
    // Adding this rounds to an integer, which is then the low bits of the sum: conversions are slow.
    constexpr float kRound = 12582912.0f;
    const float clamped = fmaxf(x, kLowest);
    const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), kRound);
    const float n = __fadd_rn(shifted, -kRound);
    float r = fmaf(n, -0.6933594f, clamped);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(__fmul_rn(r, r), p, __fadd_rn(r, 1.0f));
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    return x < kLowest ? 0.0f : __fmul_rn(p, power);
}

// Where keys come from.
enum class Keys {
    kLogits,   // the logits, in order
    kWeights,  // e^((logit - max) / temperature), a number in 0..1, its bits times 4
    kListed    // SampleShared::listed
};

// Tokens by rank.
struct Ranked {
    uint64_t mass[kSampleThreads];
    uint32_t id[kSampleThreads];
};

// What keys are made from, the same for all threads.
struct RowLogits {
    // In shared memory where there is room, else the logits themselves.
    const float* logits;
    // Those may be read four at a time.
    bool aligned;
    float max;
    float temperature;
    // 1 / temperature.
    float inverse;
    // Mass of weight 1: a power of two.
    float unit;
    // Tokens of lower keys are no candidates.
    uint32_t least_key;
};

// All of it in shared memory: registers are few.
struct SampleShared {
    RowLogits row;
    int row_index;
    union alignas(16) {
        Histogram histogram;
        uint32_t marks[kMarks];
        Ranked ranked;
    };
    Token listed[kListed];
    // The largest logit that each thread saw.
    float own_best[kSampleThreads];
    uint64_t warp_sum[kSampleWarps];
    Weight warp_weight[kSampleWarps];
    // One per block of the group.
    uint64_t best[kMaxParts];
    uint64_t part_sum[kMaxParts];
    Weight part_weight[kMaxParts];
    Crossing crossing;
    uint32_t picked;
    uint32_t token;
    uint64_t passed;
};

// Logits i to i + 3 of those before `end`, -inf beyond.
__device__ __forceinline__ float4 load_logits(const float* logits, bool aligned, int i, int end) {
    if (aligned && i + 4 <= end) return *reinterpret_cast<const float4*>(logits + i);
    float4 x;
    x.x = i < end ? logits[i] : -kInfinity;
    x.y = i + 1 < end ? logits[i + 1] : -kInfinity;
    x.z = i + 2 < end ? logits[i + 2] : -kInfinity;
    x.w = i + 3 < end ? logits[i + 3] : -kInfinity;
    return x;
}

// This warp's tokens of a row, or of the list.
struct Source {
    const SampleShared& shared;
    Keys keys;
    int begin;
    int end;

    __device__ __forceinline__ uint32_t key(float logit) const {
        uint32_t key;
        if (keys == Keys::kLogits) {
            key = ordered(logit);
        } else {
            // The twin's quotient: one step of Newton's from the product with the inverse rounds as the division does.
            const float below = __fadd_rn(logit, -shared.row.max);
            const float near = __fmul_rn(below, shared.row.inverse);
            const float rest = fmaf(-near, shared.row.temperature, below);
            const float weight = exp_twin(fmaf(rest, shared.row.inverse, near));
            key = near < -88.0f ? 0 : __float_as_uint(weight) << 2;
        }
        return key >= shared.row.least_key ? key : 0;
    }

    // Tokens i to i + 3 of this warp's range; beyond its end there are no candidates.
    __device__ __forceinline__ void load(int i, Token (&tokens)[4]) const {
        if (keys == Keys::kListed) {
#pragma unroll
            for (int j = 0; j < 4; ++j) tokens[j] = i + j < end ? shared.listed[i + j] : Token{0, 0};
            return;
        }
        const float4 x = load_logits(shared.row.logits, shared.row.aligned, i, end);
        const float logit[] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) tokens[j] = {i + j < end ? key(logit[j]) : 0, static_cast<uint32_t>(i + j)};
    }

    __device__ __forceinline__ uint64_t mass(uint32_t key) const {
        return __float2ull_rz(__uint_as_float(key >> 2) * shared.row.unit);
    }

    // `use(token)` for each of this warp's tokens, four in a row per lane.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const {
        for (int i = begin + (threadIdx.x % kWarp) * 4; i < end; i += kWarp * 4) {
            Token tokens[4];
            load(i, tokens);
#pragma unroll
            for (int j = 0; j < 4; ++j) use(tokens[j]);
        }
    }
};

__device__ __forceinline__ uint64_t max64(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_sum64(uint64_t x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
}

__device__ __forceinline__ uint64_t warp_scan64(uint64_t x) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t y = __shfl_up_sync(kAllLanes, x, offset);
        if (static_cast<int>(threadIdx.x % kWarp) >= offset) x += y;
    }
    return x;
}

// Elements per warp of the group, of `len`.
__device__ __forceinline__ int per_warp(const Group& group, int len) {
    const int warps = group.parts * kSampleWarps;
    return ((len + warps - 1) / warps + kWarp - 1) / kWarp * kWarp;
}

// The contiguous range of `len` elements that belongs to this warp of the group.
__device__ __forceinline__ void set_range(Source& source, const Group& group, int len) {
    const int step = per_warp(group, len);
    source.begin = min((group.rank() * kSampleWarps + static_cast<int>(threadIdx.x) / kWarp) * step, len);
    source.end = min(source.begin + step, len);
}

// Running sums of `value(token)` over all tokens in order of id.
struct Sums {
    uint64_t total;
    // Before this warp's range.
    uint64_t before;
    uint64_t own;
};

template <typename Value>
__device__ __forceinline__ Sums sum(SampleShared& shared, const Group& group, const Source& source, Value value) {
    const int warp = threadIdx.x / kWarp;
    uint64_t own = 0;
    source.each([&](const Token& token) { own += value(token); });
    own = warp_sum64(own);
    if (threadIdx.x % kWarp == 0) shared.warp_sum[warp] = own;
    __syncthreads();
    uint64_t before = 0, block = 0;
#pragma unroll 4
    for (int w = 0; w < kSampleWarps; ++w) {
        if (w < warp) before += shared.warp_sum[w];
        block += shared.warp_sum[w];
    }
    const int rank = group.rank();
    if (threadIdx.x < group.parts) group.at(shared.part_sum, threadIdx.x)[rank] = block;
    group.sync();
    uint64_t total = 0;
#pragma unroll 2
    for (int part = 0; part < group.parts; ++part) {
        if (part < rank) before += shared.part_sum[part];
        total += shared.part_sum[part];
    }
    return {total, before, own};
}

// The token, in order of id, at which the running sum of `value` passes `target`, which is below the total.
template <typename Value>
__device__ __forceinline__ uint32_t find(SampleShared& shared, const Group& group, const Source& source, const Sums& sums,
                                         uint64_t target, Value value) {
    if (sums.before <= target && target - sums.before < sums.own) {
        uint64_t before = sums.before;
        const int lane = threadIdx.x % kWarp;
        for (int i = source.begin; i < source.end; i += kWarp * 4) {
            Token tokens[4];
            source.load(i + lane * 4, tokens);
            uint64_t lane_sum = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) lane_sum += value(tokens[j]);
            const uint64_t through = before + warp_scan64(lane_sum);
            const unsigned passed = __ballot_sync(kAllLanes, through > target);
            before = __shfl_sync(kAllLanes, through, kWarp - 1);
            if (passed == 0) continue;
            if (lane == __ffs(passed) - 1) {
                uint64_t running = through - lane_sum;
                uint32_t id = 0;
                bool done = false;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    running += value(tokens[j]);
                    if (!done && running > target) {
                        id = tokens[j].id;
                        done = true;
                    }
                }
                group.tell(&shared.picked, id);
            }
            break;
        }
    }
    group.sync();
    return shared.picked;
}

// The `n`-th token (from 0) in order of id that has this key.
__device__ __forceinline__ uint32_t nth_of_key(SampleShared& shared, const Group& group, const Source& source, uint32_t key,
                                               uint32_t n) {
    const auto equal = [&](const Token& token) -> uint64_t { return token.key == key; };
    return find(shared, group, source, sum(shared, group, source, equal), n, equal);
}

// Lists the tokens that satisfy `keep` in order of id in the first block's `listed`. `sums` counts them; they must fit.
template <typename Keep>
__device__ __forceinline__ void list(SampleShared& shared, const Group& group, const Source& source, const Sums& sums,
                                     Keep keep) {
    const int lane = threadIdx.x % kWarp;
    Token* const to = group.at(shared.listed, 0);
    uint64_t before = sums.before;
    for (int i = source.begin; i < source.end && sums.own > 0; i += kWarp * 4) {
        Token tokens[4];
        source.load(i + lane * 4, tokens);
        uint64_t lane_sum = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) lane_sum += keep(tokens[j]);
        const uint64_t through = before + warp_scan64(lane_sum);
        uint64_t at = through - lane_sum;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (keep(tokens[j])) to[at++] = tokens[j];
        }
        before = __shfl_sync(kAllLanes, through, kWarp - 1);
    }
    group.sync();
}
