// Products whose work is divided equally among the blocks (stream-K, Osama et al. 2023, arXiv:2301.03598), so that all multiprocessors
// finish together (sm_90a): the stages of all tiles form one sequence. Where several blocks share a tile, the one with its first stage
// adds the partial sums of the others to its own, in a fixed order.
//
// Partial sums need no flags or fences, as in NCCL's LL protocol: the exchange buffer holds a NaN that no sum can be; a reader waits
// until it is replaced, and then restores it for the next launch.
#pragma once

#include "activation.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTileRows = 64;  // of weights, of which a warp group has the sums

// Marks a sum that has not arrived: the bits of a NaN. `leave` replaces computed values that have the same bits.
constexpr uint32_t kNone = 0xffffffff;

// Accesses to memory that blocks exchange. Each of the four floats is atomic on its own.
__device__ __forceinline__ void store_relaxed(float4* to, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_relaxed(const float4* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ bool is_none(float x) { return __float_as_uint(x) == kNone; }

__device__ __forceinline__ bool is_whole(float4 v) { return !(is_none(v.x) || is_none(v.y) || is_none(v.z) || is_none(v.w)); }

__device__ __forceinline__ void add(float (&acc)[4], float4 v) { acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w; }

// Leaves sums to others, from `to` on, `kStep` apart.
template <int kStep, int kEights>
__device__ __forceinline__ void leave_sums(float4* to, const float (&acc)[kEights][4]) {
    const auto computed = [](float x) { return is_none(x) ? __uint_as_float(0x7fffffff) : x; };
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
        const float (&c)[4] = acc[j];
        store_relaxed(to + j * kStep, make_float4(computed(c[0]), computed(c[1]), computed(c[2]), computed(c[3])));
    }
}

// Adds sums that others leave, once they are there, in their order: `left(i)` points to those of the `i`th of `count`, which are one to
// `kAtOnce`. All are loaded at once, to hide latency. `kNone` takes their place.
template <int kStep, int kAtOnce, int kEights, typename Left>
__device__ __forceinline__ void add_sums(float (&acc)[kEights][4], int count, const Left& left) {
    float4 v[kAtOnce][kEights];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) v[i][j] = load_relaxed(left(min(i, count - 1)) + j * kStep);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
        float4* const from = left(i);
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            while (!is_whole(v[i][j])) v[i][j] = load_relaxed(from + j * kStep);
            add(acc[j], v[i][j]);
            const float none = __uint_as_float(kNone);
            store_relaxed(from + j * kStep, make_float4(none, none, none, none));
        }
    }
}

// Two groups of `kThreads` threads have sums of the same outputs: those of group 1 are added to those of group 0. `second` points to this
// thread's first float4 in shared memory, the others follow `kThreads` apart.
template <int kThreads, int kEights>
__device__ __forceinline__ void add_second(float (&acc)[kEights][4], float4* second, int group) {
    const auto sync = [] { named_sync<2 * kThreads>(1); };
    if (group == 1) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) second[j * kThreads] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
    }
    sync();
    if (group == 0) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) add(acc[j], second[j * kThreads]);
    }
    sync();
}

// The stages of this block and of others.
struct Shares {
    int all, stages;  // stages of all tiles, and of one

    // Ranks run against block indices: a block waits only for higher ranks, which have smaller indices and so have started already, even
    // where not all blocks fit at once.
    __device__ __forceinline__ static int rank() { return gridDim.x - 1 - blockIdx.x; }
    // The first stage of a rank's share.
    __device__ __forceinline__ int begin(int rank) const { return int(int64_t(all) * rank / gridDim.x); }
};

// Partial sums that blocks leave for others; all `kNone` between launches. Each of `kThreads` threads has `4 * kEights` sums. Those of `kAtOnce`
// blocks are loaded at once, to hide latency.
template <int kEights, int kThreads, int kAtOnce>
struct Exchange {
    float4* sums;
    Shares shares;

    // This thread's sums from the block of a rank, `kThreads` apart.
    __device__ __forceinline__ float4* left_by(int rank) const { return sums + size_t(rank) * (kEights * kThreads) + threadIdx.x; }

    // Leaves sums to the block that has the first stage of the tile. This happens at most once per block: only its first tile can begin
    // in another block.
    __device__ __forceinline__ void leave(const float (&acc)[kEights][4]) const { leave_sums<kThreads>(left_by(Shares::rank()), acc); }

    // Adds what later ranks have left of this block's last tile, which ends before stage `end`.
    __device__ __forceinline__ void add_others(float (&acc)[kEights][4], int end) const {
        const int rank = Shares::rank();
        int last = rank + 1;
        while (last + 1 < gridDim.x && shares.begin(last + 1) < end) ++last;
        for (int other = rank + 1; other <= last; other += kAtOnce) {
            add_sums<kThreads, kAtOnce>(acc, min(last + 1 - other, kAtOnce), [&](int i) { return left_by(other + i); });
        }
        __syncwarp();
    }
};

// Where sums go. A gated tile has eight rows of the gate, then the same eight of the up projection, and so on: one thread has both sums
// of an output.
struct Outputs {
    const bf16* bias;  // [n]; null for none
    void* out;         // [m] rows that begin `pitch` apart
    int m, n, pitch;
    int mode, activation;

    __device__ __forceinline__ bool gated() const { return mode == kGlu; }
    // Of a tile.
    __device__ __forceinline__ int of_tile() const { return gated() ? kTileRows / 2 : kTileRows; }

    __device__ __forceinline__ float activate(float gate, float up) const {
        return gate / (1.0f + __expf(-sigmoid_input(Activation(activation), gate))) * up;
    }

    // Stores the sums of a tile of `kTileRows`: a thread has those of rows `lane / 4` and eight further of its warp's 16 rows of weights, times
    // two neighbouring rows of x. `weight_factor` is that of a row of weights.
    template <int kEights, typename WeightFactor>
    __device__ __forceinline__ void store(int tile, const float (&acc)[kEights][4], const WeightFactor& weight_factor) const {
        const int warp = threadIdx.x % kWarpGroup / kWarp;
        store_from(tile * of_tile() + warp * (gated() ? 8 : 16), acc, weight_factor);
    }

    // The same for the warp's 16 rows of weights alone, whose first output is `first`, and for rows of x from `8 * first_eight` on.
    template <int kEights, typename WeightFactor>
    __device__ __forceinline__ void store_from(int first, const float (&acc)[kEights][4], const WeightFactor& weight_factor,
                                               int first_eight = 0) const {
        const int lane = threadIdx.x % kWarp, row = lane / 4, quad = lane % 4;
        const auto bias_of = [&](int output) { return bias != nullptr && output < n ? __bfloat162float(bias[output]) : 0.0f; };
        const float low_bias = bias_of(first + row), high_bias = gated() ? 0.0f : bias_of(first + row + 8);
        const float low_factor = weight_factor(min(first + row, n - 1));
        const float high_factor = weight_factor(gated() ? min(first + row, n - 1) + n : min(first + row + 8, n - 1));
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            const int first_token = (first_eight + j) * 8;
            if (first_token >= m) break;
            float low[2], high[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                low[i] = fmaf(acc[j][i], low_factor, low_bias);
                high[i] = fmaf(acc[j][i + 2], high_factor, high_bias);
            }
            if (mode == kF32) {
                float* const to = static_cast<float*>(out) + first + row;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = first_token + quad * 2 + i;
                    if (token >= m) continue;
                    if (first + row < n) to[size_t(token) * pitch] = low[i];
                    if (first + row + 8 < n) to[size_t(token) * pitch + 8] = high[i];
                }
                continue;
            }
            // After the transposition a lane has two neighbouring outputs of a row of x.
            const int token = first_token + row, output = first + quad * 2;
            bf16* const to = static_cast<bf16*>(out) + size_t(token) * pitch + output;
            const uint32_t values = transpose(gated() ? pack(activate(low[0], high[0]), activate(low[1], high[1])) : pack(low[0], low[1]));
            if (token < m && output < n) *reinterpret_cast<uint32_t*>(to) = values;
            if (!gated()) {
                const uint32_t others = transpose(pack(high[0], high[1]));
                if (token < m && output + 8 < n) *reinterpret_cast<uint32_t*>(to + 8) = others;
            }
        }
    }
};

#endif
