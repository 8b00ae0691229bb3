// Drawing a token by its weight, after top_k and top_p.
#pragma once

#include "descent.cuh"
#include "philox.cuh"

// `SampleRow` of crates/kernels/src/cuda/sample.rs.
struct SampleRow {
    uint64_t seed;
    uint64_t index;
    float temperature;
    float top_p;
    float min_p;
    float repetition;
    float frequency;
    float presence;
    uint32_t top_k;
    int logprobs;
    int history;
    int history_len;
    int prompt_len;
    int bias;
    int bias_len;
    uint32_t flags;
};

// floor(u * total), where u is the 53-bit draw of the row: sums of integers pass u * total where they pass this.
__device__ __forceinline__ uint64_t draw(const SampleRow& row, uint64_t total) {
    return __umul64hi(uniform53(row.seed, row.index) << 11, total);
}

// The mass that top_p keeps at least, of `mass`.
__device__ __forceinline__ uint64_t enough(const SampleRow& row, uint64_t mass) {
    const double exact = ceil(static_cast<double>(row.top_p) * static_cast<double>(mass));
    const uint64_t rounded = static_cast<uint64_t>(exact);
    return rounded < 1 ? 1 : rounded > mass ? mass : rounded;
}

// Inclusive running sums over the threads of the block.
__device__ __forceinline__ uint64_t block_scan64(SampleShared& shared, uint64_t x) {
    const int warp = threadIdx.x / kWarp;
    uint64_t through = warp_scan64(x);
    __syncthreads();
    if (threadIdx.x % kWarp == kWarp - 1) shared.warp_sum[warp] = through;
    __syncthreads();
#pragma unroll 4
    for (int w = 0; w < kSampleWarps; ++w) {
        if (w < warp) through += shared.warp_sum[w];
    }
    return through;
}

// How many of the listed tokens, of which there are `len`, rank before this one.
__device__ __forceinline__ int rank_among(const SampleShared& shared, int len, const Token& token) {
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < len; ++i) {
        const Token other = shared.listed[i];
        rank += other.key > token.key || (other.key == token.key && other.id < token.id);
    }
    return rank;
}

// Draws from the block's list of at most `kSampleThreads` tokens, one per thread. `mass` as below.
__device__ __forceinline__ uint32_t draw_listed(SampleShared& shared, const Source& source, const SampleRow& row, int len,
                                                uint64_t mass) {
    const int thread = threadIdx.x;
    const Token token = thread < len ? shared.listed[thread] : Token{0, 0};
    const uint64_t own = token.key != 0 ? source.mass(token.key) : 0;
    const int rank = rank_among(shared, len, token);
    Ranked& ranked = shared.ranked;
    if (thread < len) {
        ranked.mass[rank] = own;
        ranked.id[rank] = token.id;
    }
    __syncthreads();
    const uint64_t by_rank = thread < min(static_cast<uint32_t>(len), row.top_k) ? ranked.mass[thread] : 0;
    uint64_t through = block_scan64(shared, by_rank);
    if (thread == kSampleThreads - 1) shared.passed = through;
    __syncthreads();
    const uint64_t kept = static_cast<uint32_t>(len) > row.top_k || mass == 0 ? shared.passed : mass;
    // What passes a target that is below the total, in one thread only.
    const auto passes = [&](uint64_t target, uint64_t x) { return through > target && through - x <= target; };
    if (row.top_p < 1.0f) {
        const uint64_t least = enough(row, kept);
        __syncthreads();
        if (passes(least - 1, by_rank)) shared.passed = through;
        __syncthreads();
        if (passes(draw(row, shared.passed), by_rank)) shared.picked = ranked.id[thread];
    } else {
        const uint64_t in_order = static_cast<uint32_t>(rank) < row.top_k ? own : 0;
        through = block_scan64(shared, in_order);
        if (passes(draw(row, shared.passed), in_order)) shared.picked = token.id;
    }
    __syncthreads();
    return shared.picked;
}

// Draws among the candidates of `source`, of which there are `count`. `mass` is what top_p keeps a share of if top_k cuts
// nothing, or 0 if that is the mass of the candidates.
__device__ __forceinline__ uint32_t draw_by_descent(SampleShared& shared, const Group& group, const Source& source,
                                                    const SampleRow& row, uint32_t count, uint64_t mass) {
    // Of the tokens with just this key, those up to `last_equal` are kept, and all better ones.
    uint32_t key = 1, last_equal = 0xffffffffu;
    const bool nucleus = row.top_p < 1.0f;
    if (row.top_k < count) {
        const Cut cut = descend(shared, group, source, By::kCount, row.top_k - 1);
        const uint32_t equal = row.top_k - cut.before.count;
        key = cut.key;
        mass = cut.before.mass + equal * source.mass(cut.key);
        if (!nucleus && equal < cut.equal) last_equal = nth_of_key(shared, group, source, cut.key, equal - 1);
    }
    if (!nucleus || mass == 0) {
        const auto value = [&](const Token& token) -> uint64_t {
            const bool in = token.key > key || (token.key == key && token.id <= last_equal);
            return in && token.key != 0 ? source.mass(token.key) : 0;
        };
        const Sums sums = sum(shared, group, source, value);
        if (!nucleus) return find(shared, group, source, sums, draw(row, sums.total), value);
        mass = sums.total;
        group.sync();
    }
    // The draw is among the tokens by rank, of which the nucleus is the first few: exactly those it takes to have enough.
    const uint64_t least = enough(row, mass);
    uint64_t target = least - 1;
    Cut cut;
#pragma unroll 1
    for (bool drawn = false;; drawn = true) {
        cut = descend(shared, group, source, By::kMass, target);
        if (drawn) break;
        const uint64_t each = source.mass(cut.key);
        const uint64_t equal = (least - cut.before.mass + each - 1) / each;
        target = draw(row, cut.before.mass + equal * each);
        if (target >= cut.before.mass) break;
    }
    const uint32_t n = static_cast<uint32_t>((target - cut.before.mass) / source.mass(cut.key));
    return nth_of_key(shared, group, source, cut.key, n);
}

// Draws from the row's logits where top_k or top_p cut. Tokens that are certainly cut are left out step by step until the
// others fit a list in the first block, which then goes on alone; if they never do, all blocks draw from the logits.
__device__ __forceinline__ uint32_t draw_truncated(SampleShared& shared, const Group& group, const Source& source,
                                                   const SampleRow& row, uint32_t vocab) {
    const auto one = [](const Token& token) -> uint64_t { return token.key != 0; };
    uint64_t mass = 0;
    if (!(row.top_k < vocab && bound(shared, group, source, row.top_k))) {
        mass = sum(shared, group, source, [&](const Token& token) { return source.mass(token.key); }).total;
        // Tokens of no more than this mass have, together, no more than what top_p leaves out.
        const uint64_t least = row.top_k < vocab ? 0 : (mass - enough(row, mass)) / vocab;
        raise_least(shared, __float_as_uint(__ull2float_rd(least) / shared.row.unit) << 2);
        group.sync();
    }
    Sums counts = sum(shared, group, source, one);
    if (counts.total > kListed) {
        fill(shared, group, source, 0, kTopShift, 32 - kTopShift);
        const Merged merged = merge(shared, group);
        const bool by_count = row.top_k < counts.total;
        if (!by_count && mass == 0) mass = merged.total.mass;
        if (by_count || row.top_p < 1.0f) {
            const By by = by_count ? By::kCount : By::kMass;
            const Crossing crossing =
                cross(shared, group, merged, by, by_count ? row.top_k - 1 : enough(row, mass) - 1);
            raise_least(shared, crossing.bucket << kTopShift);
        }
        counts = sum(shared, group, source, one);
    }
    const uint32_t count = static_cast<uint32_t>(counts.total);
    const bool listed = count <= kListed;
    if (listed) list(shared, group, source, counts, [](const Token& token) { return token.key != 0; });
    if (!listed || group.rank() == 0) {
        uint32_t token;
        if (count <= kSampleThreads) {
            token = draw_listed(shared, source, row, count, mass);
        } else {
            const Group drawers{listed ? 1 : group.parts};
            Source candidates{shared, listed ? Keys::kListed : source.keys, 0, 0};
            set_range(candidates, drawers, listed ? count : vocab);
            token = draw_by_descent(shared, drawers, candidates, row, count, mass);
        }
        if (group.rank() == 0 && static_cast<int>(threadIdx.x) < group.parts) *group.at(&shared.token, threadIdx.x) = token;
    }
    group.sync();
    return shared.token;
}
