// The token of a given rank, or at a given running mass, by three histograms of ever lower bits of the keys.
#pragma once

#include "select.cuh"

__device__ __forceinline__ Weight operator+(const Weight& a, const Weight& b) {
    return {a.count + b.count, a.mass + b.mass};
}

__device__ __forceinline__ void add64(uint32_t* low, uint32_t* high, uint64_t x) {
    const uint32_t part = static_cast<uint32_t>(x);
    const uint32_t old = atomicAdd(low, part);
    const uint32_t carry = static_cast<uint32_t>(x >> 32) + (old + part < old);
    if (carry != 0) atomicAdd(high, carry);
}

__device__ __forceinline__ void clear(SampleShared& shared) {
    uint4* const words = reinterpret_cast<uint4*>(shared.marks);
    for (int i = threadIdx.x; i < kMarks / 4; i += kSampleThreads) words[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

// Counts and weighs the candidates with `key >> (shift + bits) == prefix` by their next `bits` bits, for the whole group.
__device__ __forceinline__ void fill(SampleShared& shared, const Group& group, const Source& source, uint64_t prefix,
                                     int shift, int bits) {
    clear(shared);
    const uint32_t mask = (1u << bits) - 1;
    source.each([&](const Token& token) {
        if (token.key == 0 || static_cast<uint64_t>(token.key) >> (shift + bits) != prefix) return;
        const uint32_t bucket = (token.key >> shift) & mask;
        atomicAdd(&shared.histogram.count[bucket], 1u);
        if (source.keys == Keys::kLogits) return;
        add64(&shared.histogram.low[bucket], &shared.histogram.high[bucket], source.mass(token.key));
    });
    group.sync();
}

// Buckets per thread and 16-byte access.
constexpr int kOwn = 4;

// The group's histogram: each block has a range of buckets, each thread four of them, from the best down.
struct Merged {
    Weight own[kOwn];
    // In better buckets, and in all.
    Weight before;
    Weight total;
    uint32_t first_bucket;
};

__device__ __forceinline__ Merged merge(SampleShared& shared, const Group& group) {
    Merged merged{};
    const int per_part = kBuckets / group.parts, rank = group.rank();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    merged.first_bucket = kBuckets - 1 - rank * per_part - threadIdx.x * kOwn;
    Weight sum{0, 0};
    if (static_cast<int>(threadIdx.x) * kOwn < per_part) {
        const int base = merged.first_bucket - (kOwn - 1);
#pragma unroll 1
        for (int part = 0; part < group.parts; ++part) {
            const Histogram* theirs = group.at(&shared.histogram, part);
            const uint4 count = *reinterpret_cast<const uint4*>(theirs->count + base);
            const uint4 low = *reinterpret_cast<const uint4*>(theirs->low + base);
            const uint4 high = *reinterpret_cast<const uint4*>(theirs->high + base);
            const auto join = [](uint32_t h, uint32_t l) { return static_cast<uint64_t>(h) << 32 | l; };
            merged.own[0] = merged.own[0] + Weight{count.w, join(high.w, low.w)};
            merged.own[1] = merged.own[1] + Weight{count.z, join(high.z, low.z)};
            merged.own[2] = merged.own[2] + Weight{count.y, join(high.y, low.y)};
            merged.own[3] = merged.own[3] + Weight{count.x, join(high.x, low.x)};
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sum = sum + merged.own[i];
    }
    Weight through = sum;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const Weight other{__shfl_up_sync(kAllLanes, through.count, offset),
                           __shfl_up_sync(kAllLanes, through.mass, offset)};
        if (lane >= offset) through = through + other;
    }
    if (lane == kWarp - 1) shared.warp_weight[warp] = through;
    __syncthreads();
    Weight block{0, 0};
    merged.before = {through.count - sum.count, through.mass - sum.mass};
#pragma unroll 4
    for (int w = 0; w < kSampleWarps; ++w) {
        if (w < warp) merged.before = merged.before + shared.warp_weight[w];
        block = block + shared.warp_weight[w];
    }
    if (threadIdx.x < group.parts) group.at(shared.part_weight, threadIdx.x)[rank] = block;
    group.sync();
#pragma unroll 2
    for (int part = 0; part < group.parts; ++part) {
        if (part < rank) merged.before = merged.before + shared.part_weight[part];
        merged.total = merged.total + shared.part_weight[part];
    }
    return merged;
}

// What a running sum counts.
enum class By { kCount, kMass };

// The bucket at which the running sum passes `target`, which is below the total.
__device__ __forceinline__ Crossing cross(SampleShared& shared, const Group& group, const Merged& merged, By by,
                                          uint64_t target) {
    const auto amount = [&](const Weight& weight) { return by == By::kCount ? weight.count : weight.mass; };
    Weight before = merged.before;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if (amount(before) <= target && target - amount(before) < amount(merged.own[i])) {
            group.tell(&shared.crossing, Crossing{before, merged.own[i], merged.first_bucket - i});
        }
        before = before + merged.own[i];
    }
    group.sync();
    return shared.crossing;
}

// A key, what ranks before all tokens that have it, and how many have it.
struct Cut {
    uint32_t key;
    Weight before;
    uint32_t equal;
};

// The key of the token at which the running sum over tokens by rank passes `target`, which is below the total.
__device__ __forceinline__ Cut descend(SampleShared& shared, const Group& group, const Source& source, By by,
                                    uint64_t target) {
    uint32_t key = 0;
    Weight before{0, 0};
    uint32_t equal = 0;
#pragma unroll 1
    for (int level = 0; level < 3; ++level) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, bits = level == 2 ? 10 : 11;
        fill(shared, group, source, static_cast<uint64_t>(key) >> (shift + bits), shift, bits);
        const Merged merged = merge(shared, group);
        const Crossing crossing =
            cross(shared, group, merged, by, target - (by == By::kCount ? before.count : before.mass));
        key |= crossing.bucket << shift;
        before = before + crossing.before;
        equal = crossing.in.count;
    }
    return {key, before, equal};
}

// Bits below those of the first level.
constexpr int kTopShift = 21;

// From now on only keys from `least` on are candidates.
__device__ __forceinline__ void raise_least(SampleShared& shared, uint32_t least) {
    least = max(least, shared.row.least_key);
    __syncthreads();
    if (threadIdx.x == 0) shared.row.least_key = least;
    __syncthreads();
}

// Leaves out tokens that are certainly not among the best `n`: those that rank below the n-th best of the threads' own best,
// given by their logits. Returns whether there are as many threads, and so at least `n` candidates left.
__device__ __forceinline__ bool bound(SampleShared& shared, const Group& group, const Source& source, uint32_t n) {
    clear(shared);
    const bool has_any = source.begin + static_cast<int>(threadIdx.x % kWarp) * 4 < source.end;
    const uint32_t key = has_any ? source.key(shared.own_best[threadIdx.x]) : 0;
    if (key != 0) atomicAdd(&shared.histogram.count[key >> kTopShift], 1u);
    group.sync();
    const Merged merged = merge(shared, group);
    if (merged.total.count < n) return false;
    const Crossing crossing = cross(shared, group, merged, By::kCount, n - 1);
    raise_least(shared, crossing.bucket << kTopShift);
    return true;
}
