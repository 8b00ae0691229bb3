// Gated DeltaNet: a short causal convolution, the delta rule token by token, and the gated norm of its output; and the gate of gated
// attention. Decode rows and prompts of any length run side by side and go through the same arithmetic in the same order, so results
// are the same to the bit however a prompt is cut into steps.
//
// Three kernels. `delta_conv` writes what the rule takes, in f32: q and k of unit length, v, and for each token its gates and k . q.
// `delta_rule` keeps the state of a slice of value columns in the registers of a block and writes the outputs over v. `delta_norm`
// makes them the rows of the next product.
//
// States are f32, indexed by slot, and found in one slot and left in the same or another. Work lists, weights, and states of the rule are read before `pdl_wait`: no
// other kernel of a step writes them, and a copy separates steps.
//
// Head dimensions are multiples of 8, up to 256, so every access of four channels is aligned.

#include "common.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace {

// Rows of one request. `after` below 0 is padding: nothing is read or written for it. `GpuStateRun` of crates/kernels/src/cuda/delta_rule.rs.
struct __align__(16) StateRun {
    int first_row;
    int len;
    int before;  // slot of the state before the first row; below 0 that is zero
    int after;   // slot of the state after the last one
};

// Up to kTileRows rows of a run, from its row `first` on.
struct __align__(8) StateTile {
    int run;
    int first;
};

struct Layout {
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
    int taps;

    __device__ __forceinline__ int keys() const { return key_heads * key_dim; }
    __device__ __forceinline__ int values() const { return value_heads * value_dim; }
    __device__ __forceinline__ int channels() const { return 2 * keys() + values(); }
    __device__ __forceinline__ int width() const { return channels() + values(); }
};

constexpr int kTileRows = 32;  // at least as many as taps; one for each lane
constexpr int kTaps = 4;       // the most
constexpr int kLane = 4;       // neighbouring channels of a lane
constexpr int kSpan = kWarp * kLane;
constexpr int kAhead = 4;      // rows that are loaded together
constexpr int kConvWarps = 4;

struct Four {
    float at[kLane];
};

__device__ __forceinline__ Four load_four(const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void store_four(float* to, const Four& v) {
    *reinterpret_cast<float4*>(to) = make_float4(v.at[0], v.at[1], v.at[2], v.at[3]);
}

__device__ __forceinline__ Four widen_four(uint2 packed) {
    const float2 low = __bfloat1622float2(*reinterpret_cast<const bf162*>(&packed.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const bf162*>(&packed.y));
    return {{low.x, low.y, high.x, high.y}};
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

struct Conv {
    const bf16* x;        // [rows][width]: q, k, v, z
    const float* weight;  // [channels][taps]
    float* states;        // [slots][taps - 1][channels]
    float* mixed;         // [rows][channels]
    Layout layout;
};

// The channels of one head, kParts times four to a lane.
template <int kParts>
struct ConvHead {
    int channel;  // this lane's first
    int dim;
    float weight[kParts][kLane][kTaps];  // the last is that of the token itself; zeros before the first
    Four seen[kParts][kTaps - 1];        // inputs of the tokens before

    __device__ __forceinline__ bool has(int part) const {
        return static_cast<int>(threadIdx.x % kWarp) * kLane + part * kSpan < dim;
    }

    __device__ __forceinline__ int at(int part) const { return channel + part * kSpan; }

    __device__ __forceinline__ void begin(const Conv& conv, int head_channel, int head_dim) {
        channel = head_channel + static_cast<int>(threadIdx.x % kWarp) * kLane;
        dim = head_dim;
        const int missing = kTaps - conv.layout.taps;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kLane; ++i) {
#pragma unroll
                for (int tap = 0; tap < kTaps; ++tap) {
                    const bool wanted = has(part) && tap >= missing;
                    weight[part][i][tap] =
                        wanted ? conv.weight[static_cast<int64_t>(at(part) + i) * conv.layout.taps + tap - missing] : 0.0f;
                }
            }
        }
    }

    // The input of a token of the run, counted from its first; those before are in the state.
    __device__ __forceinline__ Four input(const Conv& conv, const StateRun& run, int token, int part) const {
        if (!has(part)) return {};
        if (token >= 0) return widen_four(*raw(conv, run, token, part));
        if (run.before < 0) return {};
        const int past = conv.layout.taps - 1;
        return load_four(state(conv, run.before, past + token, part));
    }

    __device__ __forceinline__ const uint2* raw(const Conv& conv, const StateRun& run, int token, int part) const {
        const int64_t row = run.first_row + token;
        return reinterpret_cast<const uint2*>(conv.x + row * conv.layout.width() + at(part));
    }

    __device__ __forceinline__ float* state(const Conv& conv, int slot, int tap, int part) const {
        const int64_t row = static_cast<int64_t>(slot) * (conv.layout.taps - 1) + tap;
        return conv.states + row * conv.layout.channels() + at(part);
    }

    // What a tile that begins at `first` sees of the tokens before. The run's first tile also writes the state behind the run: it is
    // the only one that reads the state before.
    __device__ __forceinline__ void look_back(const Conv& conv, const StateRun& run, int first) {
        const int past = conv.layout.taps - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int tap = 0; tap < kTaps - 1; ++tap) {
                const int back = kTaps - 1 - tap;
                seen[part][tap] = back <= past ? input(conv, run, first - back, part) : Four{};
            }
            if (first > 0 || !has(part)) continue;
            // What is overwritten was read for a smaller index, or is in `seen`.
            for (int tap = 0; tap < past; ++tap) {
                store_four(state(conv, run.after, tap, part), input(conv, run, run.len - past + tap, part));
            }
        }
    }

    // The next token's output.
    __device__ __forceinline__ void step(const uint2 (&raw)[kParts], Four (&out)[kParts]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const Four now = widen_four(raw[part]);
#pragma unroll
            for (int i = 0; i < kLane; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < kTaps - 1; ++tap) sum = fmaf(seen[part][tap].at[i], weight[part][i][tap], sum);
                sum = fmaf(now.at[i], weight[part][i][kTaps - 1], sum);
                out[part].at[i] = silu(sum);
            }
#pragma unroll
            for (int tap = 0; tap + 1 < kTaps - 1; ++tap) seen[part][tap] = seen[part][tap + 1];
            seen[part][kTaps - 2] = now;
        }
    }

    __device__ __forceinline__ void store(const Conv& conv, int64_t row, const Four (&out)[kParts]) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (has(part)) store_four(conv.mixed + row * conv.layout.channels() + at(part), out[part]);
        }
    }
};

template <int kParts>
__device__ __forceinline__ float dot(const Four (&a)[kParts], const Four (&b)[kParts]) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) sum = fmaf(a[part].at[i], b[part].at[i], sum);
    }
    return warp_sum(sum);
}

// Scales to this length.
template <int kParts>
__device__ __forceinline__ void normalise(Four (&x)[kParts], float length) {
    const float factor = rsqrtf(dot(x, x) + 1e-6f) * length;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) x[part].at[i] *= factor;
    }
}

// Goes through the rows of a tile: `each` gets the row and the heads' outputs.
template <int kHeads, int kParts, typename Each>
__device__ __forceinline__ void walk(const Conv& conv, const StateRun& run, int first, int count,
                                     ConvHead<kParts> (&heads)[kHeads], const Each& each) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) heads[head].look_back(conv, run, first);
    for (int row = 0; row < count; row += kAhead) {
        uint2 raw[kAhead][kHeads][kParts];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int head = 0; head < kHeads; ++head) {
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const bool wanted = row + i < count && heads[head].has(part);
                    raw[i][head][part] = wanted ? *heads[head].raw(conv, run, first + row + i, part) : make_uint2(0, 0);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (row + i >= count) break;
            Four out[kHeads][kParts];
#pragma unroll
            for (int head = 0; head < kHeads; ++head) heads[head].step(raw[i][head], out[head]);
            each(static_cast<int64_t>(run.first_row + first + row + i), out);
        }
    }
}

struct GateInputs {
    const bf16* ba;        // [rows][2][value_heads]: b, then a
    const float* a_log;    // [value_heads]
    const float* dt_bias;  // [value_heads]
    float2* gates;         // [rows][value_heads]: what is left of the state, how much is learnt
    float* products;       // [rows][key_heads]: k . q
};

// ln(1 + e^x), which is x where that is all that f32 can tell.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// A warp has a tile of a head of q and of k, or of a head of v.
template <int kParts>
__device__ __forceinline__ void mix(const Conv& conv, const GateInputs& in, const StateRun* runs, const StateTile* tiles) {
    pdl_launch();
    const Layout& layout = conv.layout;
    const int tasks = layout.key_heads + layout.value_heads;
    const int blocks = (tasks + kConvWarps - 1) / kConvWarps;
    const int index = blockIdx.x / blocks, lane = threadIdx.x % kWarp;
    const int task = (blockIdx.x - index * blocks) * kConvWarps + threadIdx.x / kWarp;
    const StateTile tile = tiles[index];
    const StateRun run = runs[tile.run];
    const int count = min(kTileRows, run.len - tile.first);
    if (task >= tasks || run.after < 0) {
        pdl_wait();
        return;
    }
    if (task < layout.key_heads) {
        ConvHead<kParts> heads[2];
        heads[0].begin(conv, task * layout.key_dim, layout.key_dim);
        heads[1].begin(conv, layout.keys() + task * layout.key_dim, layout.key_dim);
        const float length = rsqrtf(static_cast<float>(layout.key_dim));
        pdl_wait();
        walk(conv, run, tile.first, count, heads, [&](int64_t row, Four (&out)[2][kParts]) {
            normalise(out[0], length);
            normalise(out[1], 1.0f);
            heads[0].store(conv, row, out[0]);
            heads[1].store(conv, row, out[1]);
            const float product = dot(out[0], out[1]);
            if (lane == 0) in.products[row * layout.key_heads + task] = product;
        });
        return;
    }
    const int head = task - layout.key_heads;
    ConvHead<kParts> heads[1];
    heads[0].begin(conv, 2 * layout.keys() + head * layout.value_dim, layout.value_dim);
    const float rate = -expf(in.a_log[head]), bias = in.dt_bias[head];
    pdl_wait();
    if (lane < count) {
        const int64_t row = run.first_row + tile.first + lane;
        const bf16* const ba = in.ba + row * 2 * layout.value_heads + head;
        const float b = __bfloat162float(ba[0]), a = __bfloat162float(ba[layout.value_heads]) + bias;
        in.gates[row * layout.value_heads + head] = make_float2(expf(rate * softplus(a)), 1.0f / (1.0f + expf(-b)));
    }
    walk(conv, run, tile.first, count, heads,
         [&](int64_t row, Four (&out)[1][kParts]) { heads[0].store(conv, row, out[0]); });
}

constexpr int kRuleWarps = 4;
constexpr int kRuleThreads = kRuleWarps * kWarp;
constexpr int kKeyLanes = 8;                                          // lanes that share the keys of a column
constexpr int kColumns = 2;                                           // neighbouring value columns of a thread
constexpr int kSlice = kRuleWarps * (kWarp / kKeyLanes) * kColumns;   // value columns of a block
constexpr int kTokens = 8;                                            // of a stage
constexpr int kStages = 3;

// Tokens in shared memory: q and k as long as kKey, zeros behind key_dim; the block's columns of v; gates, k . q and a gap.
template <int kKey>
struct Stage {
    float q[kTokens][kKey];
    float k[kTokens][kKey];
    float v[kTokens][kSlice];
    float4 scalars[kTokens];
};

__device__ __forceinline__ void copy_async_8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The sum over the lanes that share a column, in all of them.
__device__ __forceinline__ float sum_keys(float x) {
#pragma unroll
    for (int offset = 1; offset < kKeyLanes; offset *= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
}

// kQuads times four keys of a token, those of this thread.
template <int kQuads>
__device__ __forceinline__ void load_keys(float4 (&to)[kQuads], const float* from) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
        to[quad] = reinterpret_cast<const float4*>(from)[quad * kKeyLanes];
    }
}

__device__ __forceinline__ float element(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

struct Rule {
    float* mixed;           // [rows][channels]; outputs take the place of v
    const float2* gates;    // [rows][value_heads]
    const float* products;  // [rows][key_heads]
    float* states;          // [slots][value_heads][key_dim][value_dim]
    Layout layout;
};

// A block has kSlice value columns of a head of a run, for all of its tokens. With decay g and S the state before,
//
//   d = beta (v - g Sk),  o = g Sq + (k . q) d,  S = g S + k d
//
// where both products with S are summed at once. A thread has two columns of every eighth four keys: sums take three shuffles, and
// what is read from shared memory serves two columns. Sums and products are spelled out, so that all copies of the loop round alike.
template <int kKey>
__device__ __forceinline__ void recur(const Rule& rule, const StateRun* runs) {
    constexpr int kQuads = kKey / (4 * kKeyLanes);
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
    const int key_lane = lane % kKeyLanes;
    const int column = slice * kSlice + (warp * (kWarp / kKeyLanes) + lane / kKeyLanes) * kColumns;
    const bool has_column = column < layout.value_dim;
    const auto state_at = [&](int slot) {
        return rule.states + (static_cast<int64_t>(slot) * layout.value_heads + head) * layout.key_dim * layout.value_dim + column;
    };
    const auto key_at = [&](int quad, int i) { return (quad * kKeyLanes + key_lane) * 4 + i; };

    float2 state[kQuads][4];
    const float* const before = state_at(max(run.before, 0));
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = key_at(quad, i);
            const bool wanted = has_column && key < layout.key_dim && run.before >= 0;
            state[quad][i] =
                wanted ? *reinterpret_cast<const float2*>(before + key * layout.value_dim) : make_float2(0.0f, 0.0f);
        }
    }
    if (layout.key_dim < kKey || layout.value_dim % kSlice != 0) {
        float4* const all = reinterpret_cast<float4*>(shared);
        constexpr int kAll = kStages * static_cast<int>(sizeof(Stage<kKey>) / sizeof(float4));
        for (int i = threadIdx.x; i < kAll; i += kRuleThreads) all[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        __syncthreads();
    }
    pdl_wait();

    const int keys = layout.keys(), channels = layout.channels();
    const int key_head = head / (layout.value_heads / layout.key_heads);
    const int columns = min(kSlice, layout.value_dim - slice * kSlice);
    const int first_value = 2 * keys + head * layout.value_dim;
    const auto fetch = [&](int step) {
        Stage<kKey>& stage = stages[step % kStages];
        const int count = min(kTokens, run.len - step * kTokens);
        for (int token = warp; token < count; token += kRuleWarps) {
            const int64_t row = run.first_row + step * kTokens + token;
            const float* const from = rule.mixed + row * channels;
            for (int i = lane * 4; i < layout.key_dim; i += kWarp * 4) {
                copy_async(&stage.q[token][i], from + key_head * layout.key_dim + i, true);
                copy_async(&stage.k[token][i], from + keys + key_head * layout.key_dim + i, true);
            }
            if (lane * 4 < columns) {
                copy_async(&stage.v[token][lane * 4], from + first_value + slice * kSlice + lane * 4, true);
            }
            if (lane == kWarp - 2) copy_async_8(&stage.scalars[token], rule.gates + row * layout.value_heads + head);
            if (lane == kWarp - 1) copy_async_4(&stage.scalars[token].z, rule.products + row * layout.key_heads + key_head);
        }
        commit_async();
    };
    const int steps = (run.len + kTokens - 1) / kTokens;
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        wait_async<kStages - 2>();
        // All copies have arrived, and all warps are done with the stage that is filled next.
        __syncthreads();
        fetch(step + kStages - 1);
        const Stage<kKey>& stage = stages[step % kStages];
        const int count = min(kTokens, run.len - step * kTokens);
        float* out = rule.mixed + static_cast<int64_t>(run.first_row + step * kTokens) * channels + first_value + column;
        float4 q[kQuads], k[kQuads];
        load_keys(q, &stage.q[0][key_lane * 4]);
        load_keys(k, &stage.k[0][key_lane * 4]);
        for (int token = 0; token < count; ++token, out += channels) {
            float2 of_k = make_float2(0.0f, 0.0f), of_q = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    of_k.x = fmaf(state[quad][i].x, element(k[quad], i), of_k.x);
                    of_k.y = fmaf(state[quad][i].y, element(k[quad], i), of_k.y);
                    of_q.x = fmaf(state[quad][i].x, element(q[quad], i), of_q.x);
                    of_q.y = fmaf(state[quad][i].y, element(q[quad], i), of_q.y);
                }
            }
            const float4 scalars = stage.scalars[token];
            const float2 v = *reinterpret_cast<const float2*>(&stage.v[token][column - slice * kSlice]);
            // The next token's, while sums travel.
            const int next = min(token + 1, count - 1);
            float4 next_k[kQuads];
            load_keys(next_k, &stage.k[next][key_lane * 4]);
            load_keys(q, &stage.q[next][key_lane * 4]);
            const float decay = scalars.x, beta = scalars.y, product = scalars.z;
            of_k.x = sum_keys(of_k.x);
            of_k.y = sum_keys(of_k.y);
            of_q.x = sum_keys(of_q.x);
            of_q.y = sum_keys(of_q.y);
            const float2 delta = make_float2(__fmul_rn(fmaf(-decay, of_k.x, v.x), beta), __fmul_rn(fmaf(-decay, of_k.y, v.y), beta));
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float key = element(k[quad], i);
                    state[quad][i].x = fmaf(key, delta.x, __fmul_rn(decay, state[quad][i].x));
                    state[quad][i].y = fmaf(key, delta.y, __fmul_rn(decay, state[quad][i].y));
                }
                k[quad] = next_k[quad];
            }
            if (key_lane == 0 && has_column) {
                *reinterpret_cast<float2*>(out) = make_float2(fmaf(product, delta.x, __fmul_rn(decay, of_q.x)),
                                                              fmaf(product, delta.y, __fmul_rn(decay, of_q.y)));
            }
        }
    }
    if (!has_column) return;
    float* const after = state_at(run.after);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = key_at(quad, i);
            if (key < layout.key_dim) *reinterpret_cast<float2*>(after + key * layout.value_dim) = state[quad][i];
        }
    }
}

constexpr int kNormWarps = 8;

}  // namespace

#define CONV_KERNEL(DIM, PARTS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(kConvWarps* kWarp)                                                     \
        delta_conv_##DIM(const bf16* x, const float* weight, float* states, float* mixed, const bf16* ba,               \
                         const float* a_log, const float* dt_bias, float2* gates, float* products,                      \
                         const StateRun* runs, const StateTile* tiles, int key_heads, int value_heads, int key_dim,     \
                         int value_dim, int taps) {                                                                     \
        mix<PARTS>({x, weight, states, mixed, {key_heads, value_heads, key_dim, value_dim, taps}},                      \
                   {ba, a_log, dt_bias, gates, products}, runs, tiles);                                                 \
    }

// For heads of up to so many elements. gridDim.x is tiles times ceil((key_heads + value_heads) / 4).
CONV_KERNEL(128, 1)
CONV_KERNEL(256, 2)

#define RULE_KERNEL(KEY, BLOCKS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(kRuleThreads, BLOCKS)                                                  \
        delta_rule_##KEY(float* mixed, const float2* gates, const float* products, float* states,                       \
                         const StateRun* runs, int key_heads, int value_heads, int key_dim, int value_dim) {            \
        recur<KEY>({mixed, gates, products, states, {key_heads, value_heads, key_dim, value_dim, 0}}, runs);            \
    }

// For key heads of up to so many elements. gridDim.x is runs times value_heads times ceil(value_dim / 32); the longest runs come
// first. Dynamic shared memory: three times 8 (2 KEY + 36) floats.
RULE_KERNEL(64, 5)
RULE_KERNEL(128, 4)
RULE_KERNEL(256, 2)

// out = x / sqrt(mean(x^2) + eps) * weight * silu(gate), of heads of `dim` elements in rows that begin `x_stride` and `gate_stride`
// elements after each other. A warp has a head of a row; `heads` is how many heads all rows have.
extern "C" __global__ void __launch_bounds__(kNormWarps* kWarp)
    delta_norm(const float* x, int x_stride, const bf16* gate, int gate_stride, const float* weight, bf16* out, int heads,
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
        values[part] = load_four(x + row * x_stride + head * dim + at(part));
        gates[part] = widen_four(*reinterpret_cast<const uint2*>(gate + row * gate_stride + head * dim + at(part)));
    }
    const float factor = rsqrtf(dot(values, values) / static_cast<float>(dim) + eps);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (at(part) >= dim) continue;
        float result[kLane];
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            result[i] = values[part].at[i] * factor * weights[part].at[i] * silu(gates[part].at[i]);
        }
        bf162 packed[2] = {__floats2bfloat162_rn(result[0], result[1]), __floats2bfloat162_rn(result[2], result[3])};
        *reinterpret_cast<uint2*>(out + static_cast<int64_t>(index) * dim + at(part)) = *reinterpret_cast<uint2*>(packed);
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
