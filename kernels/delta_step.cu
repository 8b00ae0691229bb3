// The delta rule for runs of one token, as in decode steps, with heads of 128 keys and 128 values: in place of `delta_rule.cu`, whose
// results are the same to the bit. There a block has a slice of a state, of which a warp reads 32 bytes of eight keys at once; with
// hundreds of requests that is a fifth slower than memory allows.
//
// Here a block has a whole state. Its keys are cut into fours, of which each warp takes every eighth, and a lane has four value columns, so
// that a warp reads and writes 512 bytes in a row. What lanes add up in `delta_rule.cu`, warps add up here, in the same order.
//
// Work lists and states are read before `pdl_wait`, as there.

#include "delta_conv.cuh"
#include "rows.cuh"

namespace {

constexpr int kDim = 128;                              // keys of a head, and values
constexpr int kStepWarps = 8;                          // which share columns
constexpr int kQuads = kDim / (kLane * kStepWarps);    // four keys each, of a warp
constexpr int kStepBlocks = 2;                         // of a multiprocessor
static_assert(kDim == kSpan, "a lane has four columns");

// The sum of each warp for each lane's columns.
using Parts = Four[kStepWarps][kWarp];

// Keys of a warp, in its order.
struct WarpKeys {
    Four quads[kQuads];

    __device__ __forceinline__ void load(const bf16* from) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
            quads[quad] = widen_four(*reinterpret_cast<const uint2*>(from + quad * kStepWarps * kLane));
        }
    }
};

// The keys of a warp at the columns of a lane.
struct Columns {
    Four at[kQuads][kLane];

    // What this warp has of the product with `keys`.
    __device__ __forceinline__ Four read(const WarpKeys& keys) const {
        Four sums[2] = {};
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < kLane; ++i) {
                Four& sum = sums[i % 2];
#pragma unroll
                for (int column = 0; column < kLane; ++column) {
                    sum.at[column] = fmaf(at[quad][i].at[column], keys.quads[quad].at[i], sum.at[column]);
                }
            }
        }
        Four both;
#pragma unroll
        for (int column = 0; column < kLane; ++column) both.at[column] = __fadd_rn(sums[0].at[column], sums[1].at[column]);
        return both;
    }

    // Forgets, and then learns.
    __device__ __forceinline__ void update(float decay, const WarpKeys& keys, const Four& delta) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < kLane; ++i) {
#pragma unroll
                for (int column = 0; column < kLane; ++column) {
                    float& value = at[quad][i].at[column];
                    value = fmaf(keys.quads[quad].at[i], delta.at[column], __fmul_rn(decay, value));
                }
            }
        }
    }
};

// The sums of all warps, at the columns of this lane.
__device__ __forceinline__ Four sum_warps(const Parts& parts) {
    const int lane = threadIdx.x % kWarp;
    Four sums[kStepWarps];
#pragma unroll
    for (int warp = 0; warp < kStepWarps; ++warp) sums[warp] = load_four(parts[warp][lane].at);
#pragma unroll
    for (int apart = 1; apart < kStepWarps; apart *= 2) {
#pragma unroll
        for (int warp = 0; warp < kStepWarps; warp += 2 * apart) {
#pragma unroll
            for (int column = 0; column < kLane; ++column) {
                sums[warp].at[column] = __fadd_rn(sums[warp].at[column], sums[warp + apart].at[column]);
            }
        }
    }
    return sums[0];
}

}  // namespace

// mixed: [rows][channels], q, k, v, of which outputs take the place of v. gates: [rows][value_heads]. states: [slots][value_heads][128][128].
// `runs` have one token, whatever their `len`, or are padding. gridDim.x is runs times value_heads.
extern "C" __global__ void __launch_bounds__(kStepWarps* kWarp, kStepBlocks)
    delta_step_128(bf16* mixed, const float2* gates, float* states, const StateRun* runs, int key_heads, int value_heads, int adjacent) {
    __shared__ __align__(16) Parts of_k, of_q;
    pdl_launch();
    const Layout layout{key_heads, value_heads, kDim, kDim, 0, adjacent};
    const int at_run = blockIdx.x / value_heads, head = blockIdx.x - at_run * value_heads;
    const StateRun run = runs[at_run];
    if (run.after < 0) {
        pdl_wait();
        return;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const auto row_at = [&](int slot, int quad, int i) {
        const int64_t first = (static_cast<int64_t>(slot) * value_heads + head) * kDim;
        return states + (first + (quad * kStepWarps + warp) * kLane + i) * kDim + lane * kLane;
    };

    Columns state{};
    if (run.before >= 0) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
            for (int i = 0; i < kLane; ++i) state.at[quad][i] = load_four(row_at(run.before, quad, i));
        }
    }
    pdl_wait();

    bf16* const row = mixed + static_cast<int64_t>(run.first_row) * layout.channels();
    const bf16* const keys_of_q = row + head / adjacent % key_heads * kDim + warp * kLane;
    bf16* const values = row + 2 * layout.keys() + head * kDim + lane * kLane;
    WarpKeys k, q;
    k.load(keys_of_q + layout.keys());
    q.load(keys_of_q);
    const Four v = widen_four(*reinterpret_cast<const uint2*>(values));
    const float2 gate = gates[static_cast<int64_t>(run.first_row) * value_heads + head];
    const float decay = gate.x, beta = gate.y, rate = __fmul_rn(-beta, decay);

    store_four(of_k[warp][lane].at, state.read(k));
    __syncthreads();
    const Four known = sum_warps(of_k);
    Four delta;
#pragma unroll
    for (int column = 0; column < kLane; ++column) {
        delta.at[column] = fmaf(rate, known.at[column], __fmul_rn(beta, v.at[column]));
    }
    state.update(decay, k, delta);
    store_four(of_q[warp][lane].at, state.read(q));
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) store_four(row_at(run.after, quad, i), state.at[quad][i]);
    }
    __syncthreads();
    if (warp == 0) store_narrow(values, sum_warps(of_q));
}
