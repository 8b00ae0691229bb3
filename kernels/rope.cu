// Between the projection to q, k and v and attention: norms of heads, rotation, and keys and values to the cache. All rows are a
// multiple of eight elements and 16-byte aligned, so every access is 16 bytes wide.
//
// Norms and frequencies are read before `pdl_wait`: no kernel of a step writes them.

#include "common.cuh"
#include "fp8.cuh"
#include "rows.cuh"

namespace {

// Cosine and sine of `position` times a frequency given in turns per position as a sum of two floats. The product is exact
// up to about 2^-48 of itself, so the fraction of a turn is as good at position 10^6 as at 1, where the product in radians
// as one float would be off by 0.06.
__device__ __forceinline__ float2 cos_sin(int position, float2 frequency) {
    const float p = static_cast<float>(position);
    const float turns = __fmul_rn(p, frequency.x);
    const float rest = fmaf(p, frequency.x, -turns) + p * frequency.y;
    float2 result;
    sincospif(2.0f * (turns - rintf(turns) + rest), &result.y, &result.x);
    return result;
}

struct Rotation {
    // Of the head's vector `first` with vector `second`; a head's vectors beyond the rotated ones go in pairs too.
    int first;
    int second;
    bool rotated;
};

// The `unit`-th pair of vectors of a head of which elements below `2 * pairs` are rotated.
__device__ __forceinline__ Rotation rotation(int unit, int pairs) {
    const int half = pairs / kVec;
    if (unit < half) return {unit, unit + half, true};
    return {2 * unit, 2 * unit + 1, false};
}

struct Projection {
    bf16* qkv;
    int heads;
    int gate_heads;  // between q and k, left alone
    int value_heads;  // behind k; where there are none, values are the keys as they are projected
    int lanes_log2;
    int pairs;
};

// Which pairs turn with the second and third number of a position, a bit each, of the first 64 pairs and of the others; the rest
// turns with the first. `width` numbers are a position.
struct Axes {
    uint64_t second_low;
    uint64_t second_high;
    uint64_t third_low;
    uint64_t third_high;
    int width;

    __device__ __forceinline__ int of(int pair) const {
        const int bit = pair % 64;
        const uint64_t second = pair < 64 ? second_low : second_high, third = pair < 64 ? third_low : third_high;
        return static_cast<int>(second >> bit & 1) + 2 * static_cast<int>(third >> bit & 1);
    }
};

struct RowPlace {
    const int* positions;
    Axes axes;
    const int* slots;
    const float2* frequencies;
    float factor;  // of cosines and sines
};

// Of q, at a position: 1 + beta * ln(1 + floor(position / original)).
struct QueryScale {
    float beta;
    int original;
};

// What heads are normalised.
enum class Heads {
    kNone,
    kQk,  // of q and k, before the rotation
    kAll  // those of v too, without a weight
};

struct HeadNorm {
    const float* q_weight;
    const float* k_weight;
    float eps;
};

struct KvCache {
    void* k;
    void* v;
    float k_inverse;  // what elements of 8 bits are multiplied by before they are rounded
    float v_inverse;
    int kv_heads;
    int block_size;
    int dim;
    int block_stride;  // elements from one block to the next
};

__device__ __forceinline__ int64_t cache_offset(const KvCache& cache, int slot, int kv_head) {
    const int block = slot / cache.block_size, token = slot % cache.block_size;
    return static_cast<int64_t>(block) * cache.block_stride + (kv_head * cache.block_size + token) * cache.dim;
}

__device__ __forceinline__ void store8_fp8(uint8_t* to, const Bf16x8& value, float factor) {
    const Float8 x = widen(value);
    const auto four = [&](int i) {
        return narrow_fp8(x.at[i] * factor, x.at[i + 1] * factor) | narrow_fp8(x.at[i + 2] * factor, x.at[i + 3] * factor) << 16;
    };
    *reinterpret_cast<uint2*>(to) = make_uint2(four(0), four(4));
}

// Normalises two vectors of a head whose others are in the `lanes` neighbouring lanes: with a weight, without, or not at all.
enum class HeadScale { kNone, kPlain, kWeighted };

__device__ __forceinline__ void norm_head(Float8& a, Float8& b, HeadScale kind, const float* weight, const Rotation& at, int lanes,
                                          int dim, float eps) {
    float squares = sum_of_squares(a) + sum_of_squares(b);
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(kAllLanes, squares, offset);
    if (kind == HeadScale::kNone) return;
    const float scale = rsqrtf(squares / static_cast<float>(dim) + eps);
    if (kind == HeadScale::kPlain) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            a.at[i] *= scale;
            b.at[i] *= scale;
        }
        return;
    }
    const Float8 wa = load_floats(weight + at.first * kVec), wb = load_floats(weight + at.second * kVec);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
        a.at[i] *= scale * wa.at[i];
        b.at[i] *= scale * wb.at[i];
    }
}

template <Heads kNorm, bool kScale, bool kFp8>
__device__ __forceinline__ void rotate_row(const Projection& in, const RowPlace& place, const HeadNorm& norm,
                                           const KvCache& cache, const QueryScale& query) {
    extern __shared__ float2 angles[];
    pdl_launch();
    const int lanes = 1 << in.lanes_log2;
    const int group = threadIdx.x >> in.lanes_log2, groups = blockDim.x >> in.lanes_log2;
    const int unit = threadIdx.x & (lanes - 1);
    const bool in_head = unit < cache.dim / (2 * kVec);
    const Rotation at = rotation(unit, in.pairs);
    const int rotated_heads = in.heads + cache.kv_heads, all_heads = rotated_heads + cache.kv_heads;
    float2 frequency = make_float2(0.0f, 0.0f);
    if (threadIdx.x < in.pairs) frequency = place.frequencies[threadIdx.x];
    pdl_wait();

    const int row = blockIdx.x;
    const int width = rotated_heads + in.value_heads + in.gate_heads;
    bf16* const heads_of_row = in.qkv + static_cast<int64_t>(row) * width * cache.dim;
    const int slot = place.slots[row];
    const int* const positions = place.positions + row * place.axes.width;
    const auto angle_of = [&](int pair, float2 frequency) {
        const float2 angle = cos_sin(positions[place.axes.of(pair)], frequency);
        return make_float2(angle.x * place.factor, angle.y * place.factor);
    };
    if (threadIdx.x < in.pairs) angles[threadIdx.x] = angle_of(threadIdx.x, frequency);
    for (int pair = threadIdx.x + blockDim.x; pair < in.pairs; pair += blockDim.x) {
        angles[pair] = angle_of(pair, place.frequencies[pair]);
    }
    // Beside the angles: it would take a register all the time.
    if (kScale && threadIdx.x == 0) {
        angles[in.pairs].x = 1.0f + query.beta * __logf(static_cast<float>(1 + positions[0] / query.original));
    }

    // All lanes of a warp make the same number of turns, for the shuffles.
    for (int base = 0; base < all_heads; base += groups) {
        const int head = base + group;
        const bool mine = in_head && head < all_heads;
        int stored = head < in.heads ? head : head + in.gate_heads;
        if (kNorm == Heads::kAll && in.value_heads == 0 && head >= rotated_heads) stored -= cache.kv_heads;
        bf16* const from = heads_of_row + stored * cache.dim;
        Bf16x8 first{}, second{};
        if (mine) {
            first = load8(from + at.first * kVec);
            second = load8(from + at.second * kVec);
        }
        // The first head's loads are under way while the angles are made.
        if (base == 0) __syncthreads();
        if (kNorm != Heads::kNone || head < rotated_heads) {
            Float8 a = widen(first), b = widen(second);
            if (kNorm != Heads::kNone) {
                const float* weight = head < in.heads ? norm.q_weight : norm.k_weight;
                const HeadScale of_values = kNorm == Heads::kAll ? HeadScale::kPlain : HeadScale::kNone;
                const HeadScale kind = !mine ? HeadScale::kNone : head < rotated_heads ? HeadScale::kWeighted : of_values;
                norm_head(a, b, kind, weight, at, lanes, cache.dim, norm.eps);
            }
            if (mine && at.rotated && head < rotated_heads) {
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    const float2 angle = angles[at.first * kVec + i];
                    const float x = a.at[i], y = b.at[i];
                    a.at[i] = x * angle.x - y * angle.y;
                    b.at[i] = y * angle.x + x * angle.y;
                }
            }
            if (kScale && head < in.heads) {
                const float scale = angles[in.pairs].x;
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a.at[i] *= scale;
                    b.at[i] *= scale;
                }
            }
            first = narrow(a);
            second = narrow(b);
        }
        bf16* to = from;
        if (head >= in.heads) {
            if (slot < 0) continue;
            const bool is_v = head >= rotated_heads;
            void* const elements = is_v ? cache.v : cache.k;
            const int64_t offset = cache_offset(cache, slot, head - (is_v ? rotated_heads : in.heads));
            if constexpr (kFp8) {
                if (!mine) continue;
                uint8_t* const bytes = static_cast<uint8_t*>(elements) + offset;
                const float factor = is_v ? cache.v_inverse : cache.k_inverse;
                store8_fp8(bytes + at.first * kVec, first, factor);
                store8_fp8(bytes + at.second * kVec, second, factor);
                continue;
            }
            to = static_cast<bf16*>(elements) + offset;
        }
        if (!mine) continue;
        store8(to + at.first * kVec, first);
        store8(to + at.second * kVec, second);
    }
}

}  // namespace

#define ROPE_KERNEL(NAME, NORM, SCALE, FP8, REGISTERS)                                                                  \
    extern "C" __global__ void __maxnreg__(REGISTERS)                                                                   \
        NAME(bf16* qkv, const int* positions, const int* slots, const float2* frequencies, float factor,                \
             const float* q_weight, const float* k_weight, float eps, void* k_cache, void* v_cache, int heads,          \
             int gate_heads, int kv_heads, int value_heads, int dim, int pairs, int block_size, int block_stride,       \
             int lanes_log2, float beta, int original, float k_inverse, float v_inverse, int width,                     \
             uint64_t second_low, uint64_t second_high, uint64_t third_low, uint64_t third_high) {                      \
        rotate_row<Heads::NORM, SCALE, FP8>(                                                                            \
            {qkv, heads, gate_heads, value_heads, lanes_log2, pairs},                                                   \
            {positions, {second_low, second_high, third_low, third_high, width}, slots, frequencies, factor},           \
            {q_weight, k_weight, eps},                                                                                  \
            {k_cache, v_cache, k_inverse, v_inverse, kv_heads, block_size, dim, block_stride}, {beta, original});       \
    }

// From a row of the fused projection, [heads + gate_heads + kv_heads + value_heads][dim] (q, gates, k, v): q and k rotated, element
// i with i + pairs, or normalised per head and then rotated, v normalised too if `qkv_norm`, and q scaled by its position; q back
// into its place, k and v into the cache at the row's slot, if there are any. One block a row; `1 << lanes_log2` lanes share a head, each with two vectors of it. Dynamic shared memory: pairs + 1 float2. The
// registers are capped for more rows at once.
ROPE_KERNEL(rope_kv_write, kNone, false, false, 40)
ROPE_KERNEL(qk_norm_rope_kv_write, kQk, false, false, 40)
ROPE_KERNEL(qkv_norm_rope_kv_write, kAll, false, false, 48)
ROPE_KERNEL(rope_scale_kv_write, kNone, true, false, 48)
ROPE_KERNEL(qk_norm_rope_scale_kv_write, kQk, true, false, 48)
ROPE_KERNEL(qkv_norm_rope_scale_kv_write, kAll, true, false, 48)
ROPE_KERNEL(rope_kv_write_fp8, kNone, false, true, 56)
ROPE_KERNEL(qk_norm_rope_kv_write_fp8, kQk, false, true, 56)
ROPE_KERNEL(qkv_norm_rope_kv_write_fp8, kAll, false, true, 56)
ROPE_KERNEL(rope_scale_kv_write_fp8, kNone, true, true, 56)
ROPE_KERNEL(qk_norm_rope_scale_kv_write_fp8, kQk, true, true, 56)
ROPE_KERNEL(qkv_norm_rope_scale_kv_write_fp8, kAll, true, true, 56)
