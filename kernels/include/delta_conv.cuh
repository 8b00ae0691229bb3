// Gated DeltaNet's rows and layout, and its short causal convolution, from which the rule takes q, k, v and its gates.
#pragma once

#include "common.cuh"
#include "rows.cuh"

// Rows of one request. `after` below 0 is padding: nothing is read or written for it. `GpuStateRun` of crates/kernels/src/cuda/state_runs.rs.
struct __align__(16) StateRun {
    int first_row;
    int len;
    int before;  // slot of the state before the first row; below 0 that is zero
    int after;   // slot of the state after the last one
    int start;   // tokens of the request before the first row
    int in_chunks;  // for the host, which sorts by it
    int unused[2];
};

// Rows of a run from its row `first` on: up to kTileRows, or a chunk.
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
    int adjacent;  // value heads in a row that share a key head

    __device__ __forceinline__ int keys() const { return key_heads * key_dim; }
    __device__ __forceinline__ int values() const { return value_heads * value_dim; }
    __device__ __forceinline__ int channels() const { return 2 * keys() + values(); }
    __device__ __forceinline__ int width() const { return (channels() + values() + 2 * value_heads + kVec - 1) / kVec * kVec; }
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

__device__ __forceinline__ void store_narrow(bf16* to, const Four& v) {
    bf162 packed[2] = {__floats2bfloat162_rn(v.at[0], v.at[1]), __floats2bfloat162_rn(v.at[2], v.at[3])};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(packed);
}

__device__ __forceinline__ Four widen_four(uint2 packed) {
    const float2 low = __bfloat1622float2(*reinterpret_cast<const bf162*>(&packed.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const bf162*>(&packed.y));
    return {{low.x, low.y, high.x, high.y}};
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

struct Conv {
    const bf16* x;        // [rows][width]: q, k, v, z, b, a, padding
    const float* weight;  // [channels][taps]
    float* states;        // [slots][taps - 1][channels]
    bf16* mixed;          // [rows][channels]: q, k, v
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
                const float* const from = conv.weight + static_cast<int64_t>(at(part) + i) * conv.layout.taps;
                Four taps{};
                if (has(part) && missing == 0) {
                    taps = load_four(from);
                } else if (has(part)) {
#pragma unroll
                    for (int tap = 1; tap < kTaps; ++tap) taps.at[tap] = tap >= missing ? from[tap - missing] : 0.0f;
                }
#pragma unroll
                for (int tap = 0; tap < kTaps; ++tap) weight[part][i][tap] = taps.at[tap];
            }
        }
    }

    __device__ __forceinline__ const uint2* raw(const Conv& conv, const StateRun& run, int token, int part) const {
        const int64_t row = run.first_row + token;
        return reinterpret_cast<const uint2*>(conv.x + row * conv.layout.width() + at(part));
    }

    __device__ __forceinline__ float* state(const Conv& conv, int slot, int tap, int part) const {
        const int64_t row = static_cast<int64_t>(slot) * (conv.layout.taps - 1) + tap;
        return conv.states + row * conv.layout.channels() + at(part);
    }

    // What a run's first tile sees of the tokens before: the state, which that tile alone reads and writes.
    __device__ __forceinline__ void recall(const Conv& conv, const StateRun& run) {
        const int past = conv.layout.taps - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int tap = 0; tap < kTaps - 1; ++tap) {
                const int back = kTaps - 1 - tap;
                const bool is_kept = run.before >= 0 && back <= past && has(part);
                seen[part][tap] = is_kept ? load_four(state(conv, run.before, past - back, part)) : Four{};
            }
        }
    }

    // Leaves the state behind the run: its last inputs, and what was seen before if it is short.
    __device__ __forceinline__ void remember(const Conv& conv, const StateRun& run) const {
        const int past = conv.layout.taps - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (!has(part)) continue;
            Four kept[kTaps - 1];
#pragma unroll
            for (int tap = 0; tap < kTaps - 1; ++tap) {
                // Tokens are counted from the first of the run.
                const int token = run.len - (kTaps - 1 - tap);
                if (token >= 0) kept[tap] = widen_four(*raw(conv, run, token, part));
#pragma unroll
                for (int before = tap; before < kTaps - 1; ++before) {
                    if (token == before - (kTaps - 1)) kept[tap] = seen[part][before];
                }
            }
#pragma unroll
            for (int tap = 0; tap < kTaps - 1; ++tap) {
                const int at = tap - (kTaps - 1 - past);
                if (at >= 0) store_four(state(conv, run.after, at, part), kept[tap]);
            }
        }
    }

    // What a tile that begins at `first` of the run sees of the tokens before, where that is not the run's first.
    __device__ __forceinline__ void look_back(const Conv& conv, const StateRun& run, int first) {
        const int past = conv.layout.taps - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int tap = 0; tap < kTaps - 1; ++tap) {
                const int back = kTaps - 1 - tap;
                const bool is_seen = back <= past && has(part);
                seen[part][tap] = is_seen ? widen_four(*raw(conv, run, first - back, part)) : Four{};
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
            if (has(part)) store_narrow(conv.mixed + row * conv.layout.channels() + at(part), out[part]);
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

// Goes through the rows of a tile: `each` gets the row and the head's output. For a run's first tile the caller has called `recall`.
template <int kParts, typename Each>
__device__ __forceinline__ void walk(const Conv& conv, const StateRun& run, int first, int count, ConvHead<kParts>& head,
                                     const Each& each) {
    if (first > 0) {
        head.look_back(conv, run, first);
    } else {
        head.remember(conv, run);
    }
    for (int row = 0; row < count; row += kAhead) {
        uint2 raw[kAhead][kParts];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const bool wanted = row + i < count && head.has(part);
                raw[i][part] = wanted ? *head.raw(conv, run, first + row + i, part) : make_uint2(0, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (row + i >= count) break;
            Four out[kParts];
            head.step(raw[i], out);
            each(static_cast<int64_t>(run.first_row + first + row + i), out);
        }
    }
}

struct GateInputs {
    const float* a_log;    // [value_heads]
    const float* dt_bias;  // [value_heads]
    float2* gates;         // [rows][value_heads]: what is left of the state, how much is learnt
};

// ln(1 + e^x), which is x where that is all that f32 can tell.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// A warp has a tile of a head of q, of k or of v.
//
// Prompts do not let the next kernel start early: where that is the rule token by token, its few blocks would go to the multiprocessors
// that are done first, as many as fit into each, and stay there for the whole prompt while others have none.
template <int kParts>
__device__ __forceinline__ void mix(const Conv& conv, const GateInputs& in, const StateRun* runs, const StateTile* tiles) {
    const Layout& layout = conv.layout;
    const int key_tasks = 2 * layout.key_heads, tasks = key_tasks + layout.value_heads;
    const int blocks = (tasks + kConvWarps - 1) / kConvWarps;
    const int index = blockIdx.x / blocks, lane = threadIdx.x % kWarp;
    const int task = (blockIdx.x - index * blocks) * kConvWarps + threadIdx.x / kWarp;
    const StateTile tile = tiles[index];
    const StateRun run = runs[tile.run];
    if (run.len <= kTileRows) pdl_launch();
    const int count = min(kTileRows, run.len - tile.first);
    if (task >= tasks || run.after < 0) {
        pdl_wait();
        return;
    }
    const bool of_keys = task < key_tasks;
    const int value_head = task - key_tasks;
    ConvHead<kParts> head;
    if (of_keys) {
        head.begin(conv, task * layout.key_dim, layout.key_dim);
    } else {
        head.begin(conv, 2 * layout.keys() + value_head * layout.value_dim, layout.value_dim);
    }
    if (tile.first == 0) head.recall(conv, run);
    if (of_keys) {
        // Both get unit length; q also gets the scale of its products with k.
        const float length = task < layout.key_heads ? rsqrtf(static_cast<float>(layout.key_dim)) : 1.0f;
        pdl_wait();
        walk(conv, run, tile.first, count, head, [&](int64_t row, Four (&out)[kParts]) {
            normalise(out, length);
            head.store(conv, row, out);
        });
        return;
    }
    const float rate = -expf(in.a_log[value_head]), bias = in.dt_bias[value_head];
    pdl_wait();
    if (lane < count) {
        const int64_t row = run.first_row + tile.first + lane;
        const bf16* const ba = conv.x + row * layout.width() + layout.channels() + layout.values() + value_head;
        const float b = __bfloat162float(ba[0]), a = __bfloat162float(ba[layout.value_heads]) + bias;
        in.gates[row * layout.value_heads + value_head] = make_float2(expf(rate * softplus(a)), 1.0f / (1.0f + expf(-b)));
    }
    walk(conv, run, tile.first, count, head, [&](int64_t row, Four (&out)[kParts]) { head.store(conv, row, out); });
}
