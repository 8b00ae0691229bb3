// Gated DeltaNet: a short causal convolution, the delta rule token by token, and the gated norm of its output; and the gate of gated
// attention. Decode rows and prompts of any length run side by side and go through the same arithmetic in the same order, so results
// are the same to the bit however a run is cut.
//
// Three kernels. `delta_conv` writes what the rule takes: in bf16 q and k of unit length and v, and for each token its gates.
// `delta_rule` keeps the state of a slice of value columns in the registers of a block and writes the outputs over v; runs of
// prompts can go through `delta_chunks.cu` instead, and those of one token through `delta_step.cu`. `delta_norm` makes the outputs the rows of the next product.
//
// States are f32, indexed by slot, and found in one slot and left in the same or another. Work lists, weights and states are read
// before `pdl_wait`: no other kernel of a step writes them or the slots of these runs, and a copy separates steps.
//
// Head dimensions are multiples of 8, up to 256, so every access of four channels is aligned.

#include "delta_conv.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace {

constexpr int kRuleWarps = 4;
constexpr int kRuleThreads = kRuleWarps * kWarp;
constexpr int kPairs = 4;                               // neighbouring lanes, which share keys
constexpr int kKeyLanes = kWarp / kPairs;               // lanes that share columns
constexpr int kColumns = 2;                             // neighbouring value columns of a thread
constexpr int kSlice = kRuleWarps * kPairs * kColumns;  // value columns of a block
constexpr int kTokens = 16;                             // of a stage, an even number
constexpr int kStages = 2;

// Tokens in shared memory: q and k as long as kKey, zeros behind key_dim; the block's columns of v; gates. What is behind the last
// token is read and not used.
template <int kKey>
struct __align__(16) Stage {
    bf16 q[kTokens][kKey];
    bf16 k[kTokens][kKey];
    bf16 v[kTokens + 1][kSlice];
    float2 gates[kTokens + 2];
};

// Nothing unless `wanted`; zeros if there is nothing to copy. A branch around copies costs more than they do.
__device__ __forceinline__ void copy_async_if(bool wanted, void* to, const void* from, bool there) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;\n}" ::"r"(
            int(wanted)),
        "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
        : "memory");
}

__device__ __forceinline__ void copy_async_8_if(bool wanted, void* to, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p cp.async.ca.shared.global [%1], [%2], 8;\n}" ::"r"(int(wanted)),
                 "r"(shared_address(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ float other_lane(float x, int apart) { return __shfl_xor_sync(kAllLanes, x, apart); }

// The sums over the lanes that share columns, in all of them.
__device__ __forceinline__ float2 sum_keys(float2 x) {
#pragma unroll
    for (int apart = kPairs; apart < kWarp; apart *= 2) {
        const float2 other = make_float2(other_lane(x.x, apart), other_lane(x.y, apart));
        x = make_float2(__fadd_rn(x.x, other.x), __fadd_rn(x.y, other.y));
    }
    return x;
}

// The same sums in the same order, of two tokens at once: those of the second are in lanes with the bit kPairs, and those of second
// columns in lanes with the bit above.
__device__ __forceinline__ float sum_keys_of_two(float2 first, float2 second) {
    const bool of_second = threadIdx.x & kPairs, of_y = threadIdx.x & (2 * kPairs);
    const float2 mine = of_second ? second : first, theirs = of_second ? first : second;
    const float x = __fadd_rn(mine.x, other_lane(theirs.x, kPairs)), y = __fadd_rn(mine.y, other_lane(theirs.y, kPairs));
    float sum = __fadd_rn(of_y ? y : x, other_lane(of_y ? x : y, 2 * kPairs));
#pragma unroll
    for (int apart = 4 * kPairs; apart < kWarp; apart *= 2) sum = __fadd_rn(sum, other_lane(sum, apart));
    return sum;
}

__device__ __forceinline__ float element(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// kQuads times four keys of a token, those of this thread.
template <int kQuads>
struct Keys {
    float4 at[kQuads];

    __device__ __forceinline__ void load(const bf16* from) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
            const Four four = widen_four(reinterpret_cast<const uint2*>(from)[quad * kKeyLanes]);
            at[quad] = make_float4(four.at[0], four.at[1], four.at[2], four.at[3]);
        }
    }
};

// Two columns of the state, at the keys of this thread.
template <int kQuads>
struct Columns {
    float2 at[kQuads][4];

    // The part of this thread in the products with `keys`.
    __device__ __forceinline__ float2 read(const Keys<kQuads>& keys) const {
        float2 sums[2] = {};
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2& sum = sums[i % 2];
                sum.x = fmaf(at[quad][i].x, element(keys.at[quad], i), sum.x);
                sum.y = fmaf(at[quad][i].y, element(keys.at[quad], i), sum.y);
            }
        }
        return make_float2(__fadd_rn(sums[0].x, sums[1].x), __fadd_rn(sums[0].y, sums[1].y));
    }

    __device__ __forceinline__ void learn(const Keys<kQuads>& keys, float2 delta) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float key = element(keys.at[quad], i);
                at[quad][i] = make_float2(fmaf(key, delta.x, at[quad][i].x), fmaf(key, delta.y, at[quad][i].y));
            }
        }
    }

    __device__ __forceinline__ void forget(float decay) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at[quad][i] = make_float2(__fmul_rn(decay, at[quad][i].x), __fmul_rn(decay, at[quad][i].y));
            }
        }
    }
};

struct Rule {
    bf16* mixed;          // [rows][channels]: q, k, v; outputs take the place of v
    const float2* gates;  // [rows][value_heads]
    float* states;        // [slots][value_heads][key_dim][value_dim]
    Layout layout;
};

// Where a block's tokens come from. Each thread copies the same 16 bytes of every few rows of q and k, of one row of v, and perhaps
// gates. Elements behind a head's last become zeros.
template <int kKey>
struct Source {
    static constexpr int kChunks = kKey / kVec, kRows = kRuleThreads / kChunks;  // of q and of k
    static constexpr int kValueChunks = kSlice / kVec;
    static_assert(kTokens * kValueChunks <= kRuleThreads && kTokens % kRows == 0, "at most a copy of v for each thread");
    const bf16* q;  // of the next stage, as all that follow
    const bf16* v;
    const float2* gates;
    int keys;  // from q to k
    int channels;
    int value_heads;
    int left;  // rows
    bool has_keys;
    bool has_values;

    __device__ __forceinline__ Source(const Rule& rule, const StateRun& run, int head, int slice) {
        const Layout& layout = rule.layout;
        const int thread = threadIdx.x, chunk = thread % kChunks * kVec;
        const int column = slice * kSlice + thread % kValueChunks * kVec;
        const int64_t first = run.first_row;
        keys = layout.keys();
        channels = layout.channels();
        value_heads = layout.value_heads;
        left = run.len;
        has_keys = chunk < layout.key_dim;
        has_values = column < layout.value_dim;
        const int key_head = head / layout.adjacent % layout.key_heads;
        q = rule.mixed + (first + thread / kChunks) * channels + key_head * layout.key_dim + chunk;
        v = rule.mixed + (first + thread / kValueChunks) * channels + 2 * keys + head * layout.value_dim + column;
        gates = rule.gates + (first + thread) * value_heads + head;
    }

    // Begins to copy the next kTokens.
    __device__ __forceinline__ void fetch(Stage<kKey>& stage) {
        const int thread = threadIdx.x, chunk = thread % kChunks * kVec;
#pragma unroll
        for (int row = 0; row < kTokens; row += kRows) {
            const int token = row + thread / kChunks;
            copy_async_if(token < left, &stage.q[token][chunk], q, has_keys);
            copy_async_if(token < left, &stage.k[token][chunk], q + keys, has_keys);
            q += kRows * channels;
        }
        const int token = thread / kValueChunks;
        copy_async_if(token < min(kTokens, left), &stage.v[token][thread % kValueChunks * kVec], v, has_values);
        copy_async_8_if(thread < min(kTokens, left), &stage.gates[thread], gates);
        commit_async();
        v += kTokens * channels;
        gates += kTokens * value_heads;
        left -= kTokens;
    }
};

// A block has kSlice value columns of a head of a run, for all of its tokens. With decay g and S the state before,
//
//   d = beta v - beta g Sk,  S = g S + k d,  o = S q
//
// Each token waits for the one before: the state is read with k, lanes add up their sums in three shuffles, and d follows. What
// does not depend on d fills that time: the output of the token before, and gS. So the loop adds k d of a token when it takes in
// the next one. A thread has two columns of every eighth four keys: what is read from shared memory serves both, and neighbouring
// lanes read the same. Lanes add up the outputs of two tokens at once. Sums and products are spelled out, so that all copies of the
// loop round alike.
//
// What a token takes with 128 keys: 128 multiplications and additions in each thread, and 46 other instructions. A prompt of
// Qwen3.5-9B alone has one warp for each scheduler, so that is 174 cycles at least. The code for sm_90a has 207 by the stalls and
// latencies that it was scheduled for, 0.105 us at 1.98 GHz. The chunked form of `delta_chunks.cu` takes a fraction of that.
template <int kKey>
__device__ __forceinline__ void recur(const Rule& rule, const StateRun* runs) {
    constexpr int kQuads = kKey / (kLane * kKeyLanes);
    extern __shared__ __align__(16) unsigned char shared[];
    Stage<kKey>* const stages = reinterpret_cast<Stage<kKey>*>(shared);
    pdl_launch();
    const Layout& layout = rule.layout;
    const int slices = (layout.value_dim + kSlice - 1) / kSlice, parts = layout.value_heads * slices;
    const int at_run = blockIdx.x / parts, part = blockIdx.x - at_run * parts;
    const int head = part / slices, slice = part - head * slices;
    const StateRun run = runs[at_run];
    if (run.after < 0) {
        pdl_wait();
        return;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int key_lane = lane / kPairs;
    const int at_slice = (warp * kPairs + lane % kPairs) * kColumns, column = slice * kSlice + at_slice;
    const bool has_column = column < layout.value_dim;
    const auto state_at = [&](int slot) {
        return rule.states + (static_cast<int64_t>(slot) * layout.value_heads + head) * layout.key_dim * layout.value_dim + column;
    };
    const auto key_at = [&](int quad, int i) { return (quad * kKeyLanes + key_lane) * kLane + i; };

    Columns<kQuads> state;
    const float* const before = state_at(max(run.before, 0));
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            const int key = key_at(quad, i);
            const bool wanted = has_column && key < layout.key_dim && run.before >= 0;
            state.at[quad][i] =
                wanted ? *reinterpret_cast<const float2*>(before + key * layout.value_dim) : make_float2(0.0f, 0.0f);
        }
    }
    pdl_wait();

    // Where this lane puts its sum of the outputs of two tokens, of which there are none the first time.
    const int channels = layout.channels();
    const bool gives_second = lane & kPairs, gives = has_column && lane < 4 * kPairs;
    bf16* out = rule.mixed + static_cast<int64_t>(run.first_row + (gives_second ? 1 : 0) - 2) * channels + 2 * layout.keys() +
                head * layout.value_dim + column + (lane & (2 * kPairs) ? 1 : 0);
    int given = -2;
    const auto give = [&](float sum) {
        if (gives && given >= 0) *out = __float2bfloat16_rn(sum);
        out += 2 * channels;
        given += 2;
    };

    // Of the last token; the state is still to learn d. At first that leaves it as it is, also a zero below zero.
    Keys<kQuads> k{}, q{};
    float2 delta = make_float2(-0.0f, -0.0f);
    float2 earlier{};  // this thread's part of the output of the token before that
    float2 gates, v;   // of the next token
    const auto load_values = [&](const Stage<kKey>& stage, int token) {
        gates = stage.gates[token];
        v = __bfloat1622float2(*reinterpret_cast<const bf162*>(&stage.v[token][at_slice]));
    };
    // Takes in a token; the result is this thread's part of the output of the last one.
    const auto take = [&](const Stage<kKey>& stage, int token) {
        const float decay = gates.x, beta = gates.y, rate = __fmul_rn(-beta, decay);
        const float2 new_v = make_float2(__fmul_rn(beta, v.x), __fmul_rn(beta, v.y));
        Keys<kQuads> next;
        next.load(&stage.k[token][key_lane * kLane]);
        load_values(stage, token + 1);
        state.learn(k, delta);
        const float2 of_k = sum_keys(state.read(next));
        const float2 of_q = state.read(q);
        state.forget(decay);
        q.load(&stage.q[token][key_lane * kLane]);
        k = next;
        delta = make_float2(fmaf(rate, of_k.x, new_v.x), fmaf(rate, of_k.y, new_v.y));
        return of_q;
    };

    Source<kKey> source(rule, run, head, slice);
    source.fetch(stages[0]);
    for (int first = 0; first < run.len; first += kTokens) {
        wait_async<0>();
        // All copies have arrived, and all warps are done with the stage that is filled next.
        __syncthreads();
        source.fetch(stages[(first / kTokens + 1) % kStages]);
        const Stage<kKey>& stage = stages[first / kTokens % kStages];
        const int count = min(kTokens, run.len - first);
        load_values(stage, 0);
#pragma unroll 1
        for (int token = 0; token + 1 < count; token += 2) {
            give(sum_keys_of_two(earlier, take(stage, token)));
            earlier = take(stage, token + 1);
        }
    }
    // One output is left of an odd number of tokens, else two.
    const bool odd = run.len % 2 != 0;
    if (odd) {
        const int token = run.len - 1;
        give(sum_keys_of_two(earlier, take(stages[token / kTokens % kStages], token % kTokens)));
    }
    state.learn(k, delta);
    const float2 last = state.read(q);
    const float sum = sum_keys_of_two(odd ? last : earlier, last);
    if (!(odd && gives_second)) give(sum);
    if (!has_column) return;
    float* const after = state_at(run.after);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            const int key = key_at(quad, i);
            if (key < layout.key_dim) *reinterpret_cast<float2*>(after + key * layout.value_dim) = state.at[quad][i];
        }
    }
}

constexpr int kNormWarps = 8;

}  // namespace

#define CONV_KERNEL(DIM, PARTS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(kConvWarps* kWarp)                                                     \
        delta_conv_##DIM(const bf16* x, const float* weight, float* states, bf16* mixed, const float* a_log,            \
                         const float* dt_bias, float2* gates, const StateRun* runs, const StateTile* tiles,             \
                         int key_heads, int value_heads, int key_dim, int value_dim, int taps) {                        \
        mix<PARTS>({x, weight, states, mixed, {key_heads, value_heads, key_dim, value_dim, taps, 1}},                   \
                   {a_log, dt_bias, gates}, runs, tiles);                                                               \
    }

// For heads of up to so many elements. gridDim.x is tiles times ceil((2 key_heads + value_heads) / 4).
CONV_KERNEL(128, 1)
CONV_KERNEL(256, 2)

#define RULE_KERNEL(KEY, BLOCKS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(kRuleThreads, BLOCKS)                                                  \
        delta_rule_##KEY(bf16* mixed, const float2* gates, float* states, const StateRun* runs, int key_heads,          \
                         int value_heads, int key_dim, int value_dim, int adjacent) {                                   \
        recur<KEY>({mixed, gates, states, {key_heads, value_heads, key_dim, value_dim, 0, adjacent}}, runs);            \
    }

// For key heads of up to so many elements. gridDim.x is runs times value_heads times ceil(value_dim / 32); the longest runs come
// first. Dynamic shared memory: two `Stage`s.
RULE_KERNEL(64, 5)
RULE_KERNEL(128, 4)
RULE_KERNEL(256, 2)

// out = x / sqrt(mean(x^2) + eps) * weight * silu(gate), of heads of `dim` elements in rows that begin `x_stride` and `gate_stride`
// elements after each other. A warp has a head of a row; `heads` is how many heads all rows have.
extern "C" __global__ void __launch_bounds__(kNormWarps* kWarp)
    delta_norm(const bf16* x, int x_stride, const bf16* gate, int gate_stride, const float* weight, bf16* out, int heads,
               int heads_of_row, int dim, float eps) {
    constexpr int kParts = 2;
    pdl_launch();
    const int lane = threadIdx.x % kWarp, index = blockIdx.x * kNormWarps + threadIdx.x / kWarp;
    const auto at = [&](int part) { return lane * kLane + part * kSpan; };
    Four weights[kParts]{};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (at(part) < dim) weights[part] = load_four(weight + at(part));
    }
    pdl_wait();
    if (index >= heads) return;
    const int64_t row = index / heads_of_row;
    const int head = index - static_cast<int>(row) * heads_of_row;
    Four values[kParts]{}, gates[kParts]{};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (at(part) >= dim) continue;
        values[part] = widen_four(*reinterpret_cast<const uint2*>(x + row * x_stride + head * dim + at(part)));
        gates[part] = widen_four(*reinterpret_cast<const uint2*>(gate + row * gate_stride + head * dim + at(part)));
    }
    const float factor = rsqrtf(dot(values, values) / static_cast<float>(dim) + eps);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (at(part) >= dim) continue;
        Four result;
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            result.at[i] = values[part].at[i] * factor * weights[part].at[i] * silu(gates[part].at[i]);
        }
        store_narrow(out + static_cast<int64_t>(index) * dim + at(part), result);
    }
}

// out[row][i] *= sigmoid(gates[row][i]), of rows of `n`, a multiple of 8; rows of `gates` begin `stride` elements after each other.
// gridDim.x is rows times ceil(n / 8 / blockDim.x).
extern "C" __global__ void __launch_bounds__(256) sigmoid_gate(bf16* out, const bf16* gates, int n, int stride,
                                                               int blocks_per_row) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x / blocks_per_row;
    const int i = ((blockIdx.x - row * blocks_per_row) * blockDim.x + threadIdx.x) * kVec;
    if (i >= n) return;
    bf16* const to = out + static_cast<int64_t>(row) * n + i;
    Float8 x = widen(load8(to));
    const Float8 gate = widen(load8(gates + static_cast<int64_t>(row) * stride + i));
#pragma unroll
    for (int j = 0; j < kVec; ++j) x.at[j] = __fdividef(x.at[j], 1.0f + __expf(-gate.at[j]));
    store8(to, narrow(x));
}
