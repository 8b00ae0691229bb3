// Chooses a token per row of logits: the twin of crates/kernels/src/sample.rs, in the same order and with the same meaning.
//
// A row belongs to a cluster of up to eight blocks (one before sm_90), each with a contiguous range of the vocabulary, which it
// reads once, into shared memory if there is room. All parameters are read from device memory, so one launch serves any mix
// of rows:
// - greedy rows need the largest logit alone;
// - plain sampling sums the weights, and a warp walks to the drawn token;
// - truncated rows (top_k, top_p) leave out tokens that are certainly cut, until the rest fits a list in one block, which
//   finishes alone; where too many are left, all blocks go on together.
//
// Weights have the twin's bits; their sums are integers (63 bits for the whole row), exact in any order, where the twin's are
// `double`. So the choice differs only where a draw falls within 2^-40 or so of a boundary between two tokens.

#include "draw.cuh"

namespace {

constexpr uint32_t kSkip = 1, kMasked = 2;
constexpr int kMaxLogprobs = 20;

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
__device__ __forceinline__ void adjust(SampleShared& shared, const Slice& slice, const SampleRow& row, const Bias* biases,
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

// The largest logit and its lowest token, as one number that orders so. Turns NaN
// into -inf on the way, and copies the logits to `cache`, unless that is null.
__device__ __forceinline__ uint64_t best_token(SampleShared& shared, const Group& group, const Source& source,
                                               float* logits, bool aligned, float* cache) {
    float max = -kInfinity;
    int token = source.begin;
    const auto see = [&](float& logit, int i) {
        if (isnan(logit)) {
            logit = -kInfinity;
            logits[i] = logit;
        }
        if (logit > max) {
            max = logit;
            token = i;
        }
    };
    const auto see4 = [&](float4 x, int i) {
        see(x.x, i);
        see(x.y, i + 1);
        see(x.z, i + 2);
        see(x.w, i + 3);
        if (cache != nullptr) *reinterpret_cast<float4*>(cache + i) = x;
    };
    constexpr int kAtOnce = 8, kStride = kWarp * 4;
    int i = source.begin + (threadIdx.x % kWarp) * 4;
    for (; aligned && i + kStride * (kAtOnce - 1) + 4 <= source.end; i += kStride * kAtOnce) {
        float4 x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) x[j] = *reinterpret_cast<const float4*>(logits + i + j * kStride);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) see4(x[j], i + j * kStride);
    }
    for (; i < source.end; i += kStride) see4(load_logits(logits, aligned, i, source.end), i);
    shared.own_best[threadIdx.x] = max;
    uint64_t best = static_cast<uint64_t>(ordered(max)) << 32 | ~static_cast<uint32_t>(token);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        best = max64(best, __shfl_xor_sync(kAllLanes, best, offset));
    }
    if (threadIdx.x % kWarp == 0) shared.warp_sum[threadIdx.x / kWarp] = best;
    __syncthreads();
    best = 0;
#pragma unroll 4
    for (int w = 0; w < kSampleWarps; ++w) best = max64(best, shared.warp_sum[w]);
    group.wait();
    if (threadIdx.x < group.parts) group.at(shared.best, threadIdx.x)[group.rank()] = best;
    group.sync();
    best = 0;
#pragma unroll 2
    for (int part = 0; part < group.parts; ++part) best = max64(best, shared.best[part]);
    return best;
}

// The `n` likeliest tokens, best first.
__device__ __forceinline__ void likeliest(SampleShared& shared, const Group& group, const Source& source, int n,
                                          float log_sum, RowLogprobs* out) {
    bound(shared, group, source, n);
    Sums counts = sum(shared, group, source, [](const Token& t) -> uint64_t { return t.key != 0; });
    uint32_t key = 1, last_equal = 0xffffffffu;
    const auto keep = [&](const Token& t) -> uint64_t { return t.key > key || (t.key == key && t.id <= last_equal); };
    if (counts.total > kSampleThreads) {
        const Cut cut = descend(shared, group, source, By::kCount, n - 1);
        const uint32_t equal = n - cut.before.count;
        if (equal < cut.equal) last_equal = nth_of_key(shared, group, source, cut.key, equal - 1);
        key = cut.key;
        counts = sum(shared, group, source, keep);
    }
    list(shared, group, source, counts, keep);
    const int len = static_cast<int>(counts.total);
    if (group.rank() != 0 || static_cast<int>(threadIdx.x) >= len) return;
    const Token token = shared.listed[threadIdx.x];
    const int rank = rank_among(shared, len, token);
    if (rank < n) {
        out->tokens[rank] = token.id;
        out->logprobs[rank] = from_ordered(token.key) - shared.row.max - log_sum;
    }
}

// Log-probabilities of the token, whose logit is given, and of the likeliest ones.
__device__ __forceinline__ void logprobs(SampleShared& shared, const Group& group, Source& source, const SampleRow& row,
                                         const float* logit, RowLogprobs* out) {
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.row.temperature = shared.row.inverse = 1.0f;
        shared.row.least_key = 1;
    }
    __syncthreads();
    const Sums sums = sum(shared, group, source, [&](const Token& t) { return source.mass(t.key); });
    const float log_sum = logf(__ull2float_rn(sums.total) / shared.row.unit);
    if (group.rank() == 0 && threadIdx.x == 0) {
        // Past L1: another block may have changed it.
        out->sampled = __ldcg(logit) - shared.row.max - log_sum;
        out->len = row.logprobs;
    }
    if (row.logprobs == 0) return;
    source.keys = Keys::kLogits;
    likeliest(shared, group, source, row.logprobs, log_sum, out);
}

}  // namespace

// gridDim.x is rows * parts, clusters of `parts` blocks. `cached`: dynamic shared memory holds the logits of a block's range,
// rounded up to 32 for each warp. `unit` is the mass of weight 1, such that vocab * unit < 2^63.
// sampled[row]: the token, -1 where there is no finite logit or one is +inf, 0 for a row to be skipped.
extern "C" __global__ void __launch_bounds__(kSampleThreads, 2)
    sample(float* all_logits, int vocab, int parts, float unit, int cached, const SampleRow* rows, const int* history,
           const int* resolved, const Bias* biases, const uint32_t* masks, int* sampled, RowLogprobs* all_logprobs) {
    __shared__ SampleShared shared;
    pdl_launch();
    const int index = blockIdx.x / parts;
    const Group group{parts};
    pdl_wait();
    // In shared memory: registers are few.
    __shared__ SampleRow row;
    constexpr int kWords = sizeof(SampleRow) / sizeof(uint32_t);
    if (threadIdx.x < kWords) {
        reinterpret_cast<uint32_t*>(&row)[threadIdx.x] = reinterpret_cast<const uint32_t*>(rows + index)[threadIdx.x];
    }
    __syncthreads();
    if (row.flags & kSkip) {
        if (group.rank() == 0 && threadIdx.x == 0) sampled[index] = 0;
        return;
    }
    group.arrive();
    float* const logits = all_logits + static_cast<int64_t>(index) * vocab;
    const bool aligned = vocab % 4 == 0;
    const int step = per_warp(group, vocab) * kSampleWarps;
    // Where the logits are read again and again, from shared memory.
    extern __shared__ float4 cache_memory[];
    const bool again = cached && (row.temperature > 0.0f || row.logprobs >= 0);
    float* const cache = again ? reinterpret_cast<float*>(cache_memory) - group.rank() * step : nullptr;
    if (threadIdx.x == 0) {
        shared.row = {again ? cache : logits, again || aligned, 0.0f, row.temperature, 1.0f / row.temperature, unit,
                      __float_as_uint(row.min_p) << 2};
        shared.row_index = index;
    }
    Source source{shared, Keys::kWeights, 0, 0};
    set_range(source, group, vocab);

    if (row.flags & kMasked || row.bias_len > 0 || row.history_len > 0) {
        const Slice slice{logits, min(group.rank() * step, vocab), min((group.rank() + 1) * step, vocab)};
        adjust(shared, slice, row, biases, history, resolved, masks + static_cast<int64_t>(index) * ((vocab + 31) / 32));
        __syncthreads();
    }
    const uint64_t best = best_token(shared, group, source, logits, aligned, cache);
    uint32_t token = ~static_cast<uint32_t>(best);
    const uint32_t key = best >> 32;
    const bool finite = key > ordered(-kInfinity) && key < ordered(kInfinity);
    if (finite) {
        if (threadIdx.x == 0) shared.row.max = from_ordered(key);
        __syncthreads();
        if (row.temperature > 0.0f) {
            if (row.top_k < vocab || row.top_p < 1.0f) {
                token = draw_truncated(shared, group, source, row, vocab);
            } else {
                const auto mass = [&](const Token& t) { return source.mass(t.key); };
                const Sums sums = sum(shared, group, source, mass);
                token = find(shared, group, source, sums, draw(row, sums.total), mass);
            }
        }
        if (row.logprobs >= 0) {
            const float* logit = all_logits + static_cast<int64_t>(shared.row_index) * vocab + token;
            logprobs(shared, group, source, row, logit, all_logprobs + shared.row_index);
        }
    }
    if (group.rank() == 0 && threadIdx.x == 0) sampled[shared.row_index] = finite ? static_cast<int>(token) : -1;
    // No block may end while another writes to its memory.
    group.sync();
}

// `TokenRank` of crates/kernels/src/cuda/sample.rs.
struct TokenRank {
    float logprob;
    uint32_t rank;
};

// Where `targets[row]` stands among the logits of its row, a block per row: behind what is likelier, and behind what is as
// likely and has a lower id. `best` and `likeliest` are what `sample` found in the same logits: the log-probability has the
// bits that it gives the same token.
extern "C" __global__ void __launch_bounds__(kSampleThreads)
    rank_targets(const float* all_logits, int vocab, const int* targets, const int* best, const RowLogprobs* likeliest,
         TokenRank* ranks) {
    __shared__ uint32_t warp_before[kSampleWarps];
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x;
    const float* const logits = all_logits + static_cast<int64_t>(row) * vocab;
    const int target = targets[row];
    const float logit = logits[target];
    uint32_t before = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        const float other = logits[i];
        before += other > logit || (other == logit && i < target);
    }
    before = __reduce_add_sync(kAllLanes, before);
    if (threadIdx.x % kWarp == 0) warp_before[threadIdx.x / kWarp] = before;
    __syncthreads();
    if (threadIdx.x != 0 || best[row] < 0) return;
    before = 0;
    for (int w = 0; w < kSampleWarps; ++w) before += warp_before[w];
    // The likeliest token's log-probability is minus the logarithm of the sum.
    ranks[row] = {logit - logits[best[row]] + likeliest[row].sampled, before + 1};
}
