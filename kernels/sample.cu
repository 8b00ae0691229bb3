// Chooses a token per row of logits: the twin of crates/kernels/src/sample.rs, in the same order and with the same meaning.
//
// A row belongs to a cluster of up to eight blocks (one before sm_90), each with a contiguous range of the vocabulary. All
// parameters are read from device memory, so one launch serves any mix of rows:
// - greedy rows read their logits once;
// - plain sampling reads them two times: the largest, then the sum of the weights; a warp walks to the drawn token;
// - truncated rows (top_k, top_p) find the histogram bucket that the cut lies in, and list the few tokens at or above it in
//   one block, which finishes alone; where too many are left, all blocks go on over the logits.
//
// Weights have the twin's bits; their sums are integers (63 bits for the whole row), exact in any order, where the twin's are
// `double`. So the choice differs only where a draw falls within 2^-40 or so of a boundary between two tokens.

#include "descent.cuh"
#include "philox.cuh"

namespace {

constexpr uint32_t kSkip = 1, kMasked = 2;
constexpr int kMaxLogprobs = 20;

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

struct Bias {
    int token;
    float bias;
};

// `RowLogprobs` of crates/kernels/src/cuda/sample.rs.
struct RowLogprobs {
    float sampled;
    uint32_t len;
    uint32_t tokens[kMaxLogprobs];
    float logprobs[kMaxLogprobs];
};

// This block's range of a row.
struct Slice {
    float* logits;
    int begin;
    int end;
};

// Bias and penalties, in place. Pairs of one token follow each other and are added in their order.
__device__ void adjust(SampleShared& shared, const Slice& slice, const SampleRow& row, const Bias* biases,
                       const int* history, const int* resolved, const uint32_t* mask) {
    if (row.flags & kMasked) {
        for (int i = slice.begin + threadIdx.x; i < slice.end; i += kSampleThreads) {
            if (!(mask[i / 32] >> (i % 32) & 1)) slice.logits[i] = -kInfinity;
        }
        __syncthreads();
    }
    const Bias* const pairs = biases + row.bias;
    for (int i = threadIdx.x; i < row.bias_len; i += kSampleThreads) {
        const int token = pairs[i].token;
        if (token < slice.begin || token >= slice.end || (i > 0 && pairs[i - 1].token == token)) continue;
        float logit = slice.logits[token];
        for (int j = i; j < row.bias_len && pairs[j].token == token; ++j) logit += pairs[j].bias;
        slice.logits[token] = logit;
    }
    if (row.history_len == 0) return;
    __syncthreads();

    constexpr uint32_t kInPrompt = 1u << 31;
    const int* const tokens = history + row.history;
    const auto token_at = [&](int i) { return tokens[i] >= 0 ? tokens[i] : resolved[-1 - tokens[i]]; };
    for (int base = slice.begin; base < slice.end; base += kMarks) {
        const int len = min(kMarks, slice.end - base);
        for (int i = threadIdx.x; i < len; i += kSampleThreads) shared.marks[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < row.history_len; i += kSampleThreads) {
            const int at = token_at(i) - base;
            if (at < 0 || at >= len) continue;
            if (i < row.prompt_len) {
                atomicOr(&shared.marks[at], kInPrompt);
            } else {
                atomicAdd(&shared.marks[at], 1u);
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < len; i += kSampleThreads) {
            const uint32_t mark = shared.marks[i];
            if (mark == 0) continue;
            float logit = slice.logits[base + i];
            logit = logit > 0.0f ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
            const uint32_t count = mark & ~kInPrompt;
            if (count > 0) {
                logit = __fadd_rn(
                    logit, -__fadd_rn(__fmul_rn(row.frequency, static_cast<float>(count)), row.presence));
            }
            slice.logits[base + i] = logit;
        }
        __syncthreads();
    }
}

// The largest logit and its lowest token, as one number that orders so. Turns NaN into -inf on the way.
__device__ __forceinline__ uint64_t best_token(SampleShared& shared, const Group& group, const Source& source,
                                               float* logits) {
    float max = -kInfinity;
    int token = source.begin;
    const auto see = [&](float logit, int i) {
        if (logit > max) {
            max = logit;
            token = i;
        }
        if (isnan(logit)) logits[i] = -kInfinity;
    };
    constexpr int kAtOnce = 4;
    int i = source.begin + (threadIdx.x % kWarp) * 4;
    for (; i + kWarp * 4 * (kAtOnce - 1) < source.end; i += kWarp * 4 * kAtOnce) {
        float4 x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) x[j] = source.load_logits(i + j * kWarp * 4);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int at = i + j * kWarp * 4;
            see(x[j].x, at);
            see(x[j].y, at + 1);
            see(x[j].z, at + 2);
            see(x[j].w, at + 3);
        }
    }
    for (; i < source.end; i += kWarp * 4) {
        const float4 x = source.load_logits(i);
        see(x.x, i);
        see(x.y, i + 1);
        see(x.z, i + 2);
        see(x.w, i + 3);
    }
    uint64_t best = static_cast<uint64_t>(ordered(max)) << 32 | ~static_cast<uint32_t>(token);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        best = max64(best, __shfl_xor_sync(kAllLanes, best, offset));
    }
    if (threadIdx.x % kWarp == 0) shared.warp_sum[threadIdx.x / kWarp] = best;
    __syncthreads();
    best = 0;
#pragma unroll
    for (int w = 0; w < kSampleWarps; ++w) best = max64(best, shared.warp_sum[w]);
    group.wait();
    if (threadIdx.x < group.parts) group.at(shared.best, threadIdx.x)[group.rank] = best;
    group.sync();
    best = 0;
    for (int part = 0; part < group.parts; ++part) best = max64(best, shared.best[part]);
    return best;
}

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

// The tokens that top_k leaves.
struct Kept {
    uint32_t key;
    // Of the tokens with just that key, those up to this one.
    uint32_t last_equal;
    uint64_t mass;
};

// Draws among the tokens of `source`, of which there are `all`, after top_k and top_p. `mass` is what top_p is a share of where top_k cuts
// nothing.
__device__ uint32_t draw_truncated(SampleShared& shared, const Group& group, const Source& source, const SampleRow& row,
                                   uint32_t all, uint64_t mass) {
    Kept kept{1, 0xffffffffu, mass};
    const bool nucleus = row.top_p < 1.0f;
    if (row.top_k < all) {
        const Cut cut = descend(shared, group, source, By::kCount, row.top_k - 1);
        const uint32_t equal = row.top_k - cut.before.count;
        kept.key = cut.key;
        kept.mass = cut.before.mass + equal * source.mass(cut.key);
        if (!nucleus && equal < cut.equal) kept.last_equal = nth_of_key(shared, group, source, cut.key, equal - 1);
    }
    if (!nucleus) {
        const auto value = [&](const Token& token) -> uint64_t {
            const bool in = token.key > kept.key || (token.key == kept.key && token.id <= kept.last_equal);
            return in && token.key != 0 ? source.mass(token.key) : 0;
        };
        const Sums sums = sum(shared, group, source, value);
        return find(shared, group, source, sums, draw(row, sums.total), value);
    }
    // The draw is among the tokens by rank, of which the nucleus is the first few: exactly those it takes to have enough.
    const uint64_t least = enough(row, kept.mass);
    const Cut last = descend(shared, group, source, By::kMass, least - 1);
    const uint64_t each = source.mass(last.key);
    const uint64_t equal = (least - last.before.mass + each - 1) / each;
    const uint64_t target = draw(row, last.before.mass + equal * each);
    const Cut drawn = target < last.before.mass ? descend(shared, group, source, By::kMass, target) : last;
    const uint32_t n = static_cast<uint32_t>((target - drawn.before.mass) / source.mass(drawn.key));
    return nth_of_key(shared, group, source, drawn.key, n);
}

// As above from the logits: lists the candidates in the first block if they fit there, which is then alone.
__device__ uint32_t draw_from_logits(SampleShared& shared, const Group& group, const Source& source,
                                     const SampleRow& row) {
    constexpr int kTopShift = 21;
    fill(shared, group, source, 0, kTopShift, 32 - kTopShift);
    const Merged merged = merge(shared, group);
    // Candidates: the buckets down to where top_k cuts, or else to where top_p does.
    uint32_t count = merged.total.count, last_bucket = 0;
    const bool cut_by_count = row.top_k < merged.total.count, cut_by_mass = !cut_by_count && row.top_p < 1.0f;
    if (cut_by_count || cut_by_mass) {
        const uint64_t target = cut_by_count ? row.top_k - 1 : enough(row, merged.total.mass) - 1;
        const Crossing crossing = cross(shared, group, merged, cut_by_count ? By::kCount : By::kMass, target);
        count = crossing.before.count + crossing.in.count;
        last_bucket = crossing.bucket;
    }
    if (count > kListed) return draw_truncated(shared, group, source, row, merged.total.count, merged.total.mass);
    const auto keep = [&](const Token& token) { return token.key != 0 && token.key >> kTopShift >= last_bucket; };
    const int len = list(shared, group, source, keep);
    if (group.rank == 0) {
        const Group alone{1, 0};
        Source listed = source;
        listed.keys = Keys::kListed;
        listed.listed = shared.listed;
        set_range(listed, alone, len);
        const uint32_t token = draw_truncated(shared, alone, listed, row, merged.total.count, merged.total.mass);
        if (static_cast<int>(threadIdx.x) < group.parts) *group.at(&shared.token, threadIdx.x) = token;
    }
    group.sync();
    return shared.token;
}

// Log-probabilities of the token and of the likeliest ones.
__device__ void logprobs(SampleShared& shared, const Group& group, Source source, const SampleRow& row, uint32_t token,
                         RowLogprobs* out) {
    source.keys = Keys::kWeights;
    source.temperature = 1.0f;
    source.min_p = 0.0f;
    const Sums sums = sum(shared, group, source, [&](const Token& t) { return source.mass(t.key); });
    const float log_sum = static_cast<float>(log(static_cast<double>(sums.total) / static_cast<double>(source.unit)));
    if (group.rank == 0 && threadIdx.x == 0) {
        // Past L1: another block may have changed it.
        out->sampled = __ldcg(source.logits + token) - source.max - log_sum;
        out->len = row.logprobs;
    }
    if (row.logprobs == 0) return;
    source.keys = Keys::kLogits;
    const Cut cut = descend(shared, group, source, By::kCount, row.logprobs - 1);
    const uint32_t equal = row.logprobs - cut.before.count;
    uint32_t last_equal = 0xffffffffu;
    if (equal < cut.equal) last_equal = nth_of_key(shared, group, source, cut.key, equal - 1);
    const int len = list(shared, group, source, [&](const Token& t) {
        return t.key > cut.key || (t.key == cut.key && t.id <= last_equal && t.key != 0);
    });
    if (group.rank == 0 && static_cast<int>(threadIdx.x) < len) {
        const Token mine = shared.listed[threadIdx.x];
        int rank = 0;
        for (int i = 0; i < len; ++i) {
            const Token other = shared.listed[i];
            rank += other.key > mine.key || (other.key == mine.key && other.id < mine.id);
        }
        out->tokens[rank] = mine.id;
        out->logprobs[rank] = __ldcg(source.logits + mine.id) - source.max - log_sum;
    }
}

}  // namespace

// gridDim.x is rows * parts, clusters of `parts` blocks. `unit` is the mass of weight 1, such that vocab * unit < 2^63.
// sampled[row]: the token, -1 where there is no finite logit or one is +inf, 0 for a row to be skipped.
extern "C" __global__ void __launch_bounds__(kSampleThreads, 2)
    sample(float* all_logits, int vocab, int parts, float unit, const SampleRow* rows, const int* history,
           const int* resolved, const Bias* biases, const uint32_t* masks, int* sampled, RowLogprobs* all_logprobs) {
    __shared__ SampleShared shared;
    pdl_launch();
    const int index = blockIdx.x / parts;
    const Group group{parts, static_cast<int>(blockIdx.x) - index * parts};
    pdl_wait();
    const SampleRow row = rows[index];
    if (row.flags & kSkip) {
        if (group.rank == 0 && threadIdx.x == 0) sampled[index] = 0;
        return;
    }
    group.arrive();
    float* const logits = all_logits + static_cast<int64_t>(index) * vocab;
    Source source{};
    source.keys = Keys::kWeights;
    source.logits = logits;
    source.aligned = vocab % 4 == 0;
    source.temperature = row.temperature;
    source.min_p = row.min_p;
    source.unit = unit;
    set_range(source, group, vocab);

    if (row.flags & kMasked || row.bias_len > 0 || row.history_len > 0) {
        const int step = per_warp(group, vocab) * kSampleWarps;
        const Slice slice{logits, min(group.rank * step, vocab), min((group.rank + 1) * step, vocab)};
        adjust(shared, slice, row, biases, history, resolved, masks + static_cast<int64_t>(index) * ((vocab + 31) / 32));
        __syncthreads();
    }
    const uint64_t best = best_token(shared, group, source, logits);
    uint32_t token = ~static_cast<uint32_t>(best);
    const uint32_t key = best >> 32;
    const bool finite = key > ordered(-kInfinity) && key < ordered(kInfinity);
    if (finite) {
        source.max = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
        if (row.temperature > 0.0f) {
            if (row.top_k < vocab || row.top_p < 1.0f) {
                token = draw_from_logits(shared, group, source, row);
            } else {
                const auto mass = [&](const Token& t) { return source.mass(t.key); };
                const Sums sums = sum(shared, group, source, mass);
                token = find(shared, group, source, sums, draw(row, sums.total), mass);
            }
        }
        if (row.logprobs >= 0) logprobs(shared, group, source, row, token, all_logprobs + index);
    }
    if (group.rank == 0 && threadIdx.x == 0) sampled[index] = finite ? static_cast<int>(token) : -1;
    // No block may end while another writes to its memory.
    group.sync();
}
