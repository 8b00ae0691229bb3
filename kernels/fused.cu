// The element-wise steps of a decoder layer, each in one pass over its rows, and random weights. All rows are a multiple of
// eight elements and 16-byte aligned, so every access is 16 bytes wide.
//
// Weights (tables, norms, frequencies) are read before `pdl_wait`: no kernel of a step writes them.
//
// What e4m3 products take is quantised where its rows are made: x = value * scale with scale = max |x| / 448 of the row or of each
// 128 of its elements, all of it from f32.

#include "activation.cuh"
#include "common.cuh"
#include "fp8.cuh"
#include "norm.cuh"
#include "philox.cuh"
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
    int lanes_log2;
    int pairs;
};

struct RowPlace {
    const int* positions;
    const int* slots;
    const float2* frequencies;
    float factor;  // of cosines and sines
};

// Of q, at a position: 1 + beta * ln(1 + floor(position / original)).
struct QueryScale {
    float beta;
    int original;
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
};

__device__ __forceinline__ int64_t cache_offset(const KvCache& cache, int slot, int kv_head) {
    const int block = slot / cache.block_size, token = slot % cache.block_size;
    return ((static_cast<int64_t>(block) * cache.kv_heads + kv_head) * cache.block_size + token) * cache.dim;
}

__device__ __forceinline__ void store8_fp8(uint8_t* to, const Bf16x8& value, float factor) {
    const Float8 x = widen(value);
    const auto four = [&](int i) {
        return narrow_fp8(x.at[i] * factor, x.at[i + 1] * factor) | narrow_fp8(x.at[i + 2] * factor, x.at[i + 3] * factor) << 16;
    };
    *reinterpret_cast<uint2*>(to) = make_uint2(four(0), four(4));
}

// Normalises two vectors of a head whose others are in the `lanes` neighbouring lanes.
__device__ __forceinline__ void norm_head(Float8& a, Float8& b, const float* weight, const Rotation& at, int lanes, int dim,
                                          float eps) {
    float squares = sum_of_squares(a) + sum_of_squares(b);
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(kAllLanes, squares, offset);
    if (weight == nullptr) return;
    const float scale = rsqrtf(squares / static_cast<float>(dim) + eps);
    const Float8 wa = load_floats(weight + at.first * kVec), wb = load_floats(weight + at.second * kVec);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
        a.at[i] *= scale * wa.at[i];
        b.at[i] *= scale * wb.at[i];
    }
}

template <bool kNorm, bool kScale, bool kFp8>
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
    bf16* const heads_of_row = in.qkv + static_cast<int64_t>(row) * (all_heads + in.gate_heads) * cache.dim;
    const int slot = place.slots[row], position = place.positions[row];
    const auto angle_of = [&](float2 frequency) {
        const float2 angle = cos_sin(position, frequency);
        return make_float2(angle.x * place.factor, angle.y * place.factor);
    };
    if (threadIdx.x < in.pairs) angles[threadIdx.x] = angle_of(frequency);
    for (int pair = threadIdx.x + blockDim.x; pair < in.pairs; pair += blockDim.x) {
        angles[pair] = angle_of(place.frequencies[pair]);
    }
    // Beside the angles: it would take a register all the time.
    if (kScale && threadIdx.x == 0) {
        angles[in.pairs].x = 1.0f + query.beta * __logf(static_cast<float>(1 + position / query.original));
    }

    // All lanes of a warp make the same number of turns, for the shuffles.
    for (int base = 0; base < all_heads; base += groups) {
        const int head = base + group;
        const bool mine = in_head && head < all_heads;
        bf16* const from = heads_of_row + (head < in.heads ? head : head + in.gate_heads) * cache.dim;
        Bf16x8 first{}, second{};
        if (mine) {
            first = load8(from + at.first * kVec);
            second = load8(from + at.second * kVec);
        }
        // The first head's loads are under way while the angles are made.
        if (base == 0) __syncthreads();
        if (kNorm || head < rotated_heads) {
            Float8 a = widen(first), b = widen(second);
            if (kNorm) {
                const float* weight = head < in.heads ? norm.q_weight : norm.k_weight;
                norm_head(a, b, mine && head < rotated_heads ? weight : nullptr, at, lanes, cache.dim, norm.eps);
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

// `activation(gate) * up` of a vector, `inner` elements apart.
template <Activation kActivation>
__device__ __forceinline__ Float8 gated(const bf16* gate, int inner) {
    Float8 g = widen(load8(gate));
    const Float8 u = widen(load8(gate + inner));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
        g.at[j] = __fdividef(g.at[j], 1.0f + __expf(-sigmoid_input(kActivation, g.at[j]))) * u.at[j];
    }
    return g;
}

template <Activation kActivation>
__device__ __forceinline__ void gate_row(const bf16* gate_up, bf16* out, int inner, int blocks_per_row) {
    pdl_launch();
    const int row = blockIdx.x / blocks_per_row;
    const int i = ((blockIdx.x - row * blocks_per_row) * blockDim.x + threadIdx.x) * kVec;
    pdl_wait();
    if (i >= inner) return;
    const bf16* gate = gate_up + static_cast<int64_t>(row) * 2 * inner + i;
    store8(out + static_cast<int64_t>(row) * inner + i, narrow(gated<kActivation>(gate, inner)));
}

// Quantises what `load` makes of each vector of this block's row.
template <int kVecs, typename Load>
__device__ __forceinline__ void quantise_row(const Fp8Rows& out, int n, const Load& load) {
    __shared__ float partial[kWarp];
    pdl_launch();
    pdl_wait();
    Float8 x[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        const int at = static_cast<int>(threadIdx.x + v * blockDim.x) * kVec;
        if (at < n) x[v] = load(at);
    }
    store_fp8(out, n, x, partial);
}

}  // namespace

// out[row] = table[token] * scale, where a negative token -1 - i stands for prev_sampled[i]; resolved[row] = token. `resolved`
// may be `tokens`. Tokens outside the vocabulary (padding rows) are taken for the nearest in it. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    embedding(const bf16* table, const int* tokens, const int* prev_sampled, int* resolved, bf16* out, float scale, int vocab,
              int n) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x;
    int token = tokens[row];
    if (token < 0) token = prev_sampled[-1 - token];
    token = min(max(token, 0), vocab - 1);
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
        Float8 x = widen(load8(table + static_cast<int64_t>(token) * n + i));
#pragma unroll
        for (int j = 0; j < kVec; ++j) x.at[j] *= scale;
        store8(out + static_cast<int64_t>(row) * n + i, narrow(x));
    }
    __syncthreads();
    if (threadIdx.x == 0) resolved[row] = token;
}

#define NORM_KERNEL(NAME, ROWS, VECS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        NAME##_##VECS(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight, bf16* out,       \
                      int n, float eps) {                                                                               \
        norm_row<ROWS, VECS, false>({hidden, delta, delta_weight, weight, out, {}, n, eps});                            \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        NAME##_fp8_##VECS(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight,              \
                          uint8_t* values, float* scales, int stride, int n, float eps) {                               \
        norm_row<ROWS, VECS, true>(                                                                                     \
            {hidden, delta, delta_weight, weight, nullptr, {values, scales, stride}, n, eps});                     \
    }

#define NORM_KERNELS(NAME, ROWS) \
    NORM_KERNEL(NAME, ROWS, 1)   \
    NORM_KERNEL(NAME, ROWS, 2)

// out = x * rsqrt(mean(x^2) + eps) * weight, where x is hidden, or hidden + delta, or hidden + such a norm of delta with
// delta_weight; the sum is rounded to bf16 and stored to hidden. The suffix is the vectors a thread keeps: blocks have
// n / 8 / suffix threads. Those of fp8 quantise.
NORM_KERNELS(rms_norm, Rows::kPlain)
NORM_KERNELS(add_rms_norm, Rows::kAdd)
NORM_KERNELS(sandwich_norm, Rows::kSandwich)

#define QUANTISE_KERNELS(VECS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        quantise_fp8_##VECS(const bf16* x, uint8_t* values, float* scales, int stride, int n) {                         \
        const bf16* row = x + static_cast<int64_t>(blockIdx.x) * n;                                                     \
        quantise_row<VECS>({values, scales, stride}, n, [&](int at) { return widen(load8(row + at)); });           \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        silu_mul_fp8_##VECS(const bf16* gate_up, uint8_t* values, float* scales, int stride, int n) {                   \
        const bf16* row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * n;                                           \
        quantise_row<VECS>({values, scales, stride}, n,                                                            \
                           [&](int at) { return gated<Activation::kSilu>(row + at, n); });                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        gelu_tanh_mul_fp8_##VECS(const bf16* gate_up, uint8_t* values, float* scales, int stride, int n) {              \
        const bf16* row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * n;                                           \
        quantise_row<VECS>({values, scales, stride}, n,                                                            \
                           [&](int at) { return gated<Activation::kGeluTanh>(row + at, n); });                          \
    }

// Rows of x, or `activation(gate) * up` of rows of gate and up, quantised, one block a row.
QUANTISE_KERNELS(1)
QUANTISE_KERNELS(2)
QUANTISE_KERNELS(4)

#define ROPE_KERNEL(NAME, NORM, SCALE, FP8, REGISTERS)                                                                  \
    extern "C" __global__ void __maxnreg__(REGISTERS)                                                                   \
        NAME(bf16* qkv, const int* positions, const int* slots, const float2* frequencies, float factor,                \
             const float* q_weight, const float* k_weight, float eps, void* k_cache, void* v_cache, int heads,          \
             int gate_heads, int kv_heads, int dim, int pairs, int block_size, int lanes_log2, float beta, int original,                \
             float k_inverse, float v_inverse) {                                                                        \
        rotate_row<NORM, SCALE, FP8>({qkv, heads, gate_heads, lanes_log2, pairs}, {positions, slots, frequencies, factor},          \
                                     {q_weight, k_weight, eps},                                                         \
                                     {k_cache, v_cache, k_inverse, v_inverse, kv_heads, block_size, dim},               \
                                     {beta, original});                                                                 \
    }

// From a row of the fused projection, [heads + gate_heads + 2 kv_heads][dim] (q, gates, k, v): q and k rotated, element i with i + pairs, or normalised per
// head and then rotated, and q scaled by its position; q back into its place, k and v into the cache at the row's slot. One
// block a row; `1 << lanes_log2` lanes share a head, each with two vectors of it. Dynamic shared memory: pairs + 1 float2. The
// registers are capped for more rows at once.
ROPE_KERNEL(rope_kv_write, false, false, false, 40)
ROPE_KERNEL(qk_norm_rope_kv_write, true, false, false, 40)
ROPE_KERNEL(rope_scale_kv_write, false, true, false, 48)
ROPE_KERNEL(qk_norm_rope_scale_kv_write, true, true, false, 48)
ROPE_KERNEL(rope_kv_write_fp8, false, false, true, 56)
ROPE_KERNEL(qk_norm_rope_kv_write_fp8, true, false, true, 56)
ROPE_KERNEL(rope_scale_kv_write_fp8, false, true, true, 56)
ROPE_KERNEL(qk_norm_rope_scale_kv_write_fp8, true, true, true, 56)

#define GLU_KERNEL(NAME, ACTIVATION)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        NAME(const bf16* gate_up, bf16* out, int inner, int blocks_per_row) {                                           \
        gate_row<ACTIVATION>(gate_up, out, inner, blocks_per_row);                                                      \
    }

// out[row][i] = activation(gate_up[row][i]) * gate_up[row][inner + i]. Blocks of a row follow each other: gridDim.x is rows
// times ceil(inner / 8 / blockDim.x).
GLU_KERNEL(silu_mul, Activation::kSilu)
GLU_KERNEL(gelu_tanh_mul, Activation::kGeluTanh)

// x = cap * tanh(x / cap), of `len` values in place; x is 16-byte aligned. Its threads stride over the values.
extern "C" __global__ void __launch_bounds__(256) soft_cap(float* x, uint64_t len, float cap) {
    pdl_launch();
    pdl_wait();
    const float inverse = 1.0f / cap;
    const auto capped = [&](float value) { return cap * tanhf(value * inverse); };
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    float4* const quads = reinterpret_cast<float4*>(x);
    for (uint64_t i = thread; i < len / 4; i += stride) {
        const float4 v = quads[i];
        quads[i] = make_float4(capped(v.x), capped(v.y), capped(v.z), capped(v.w));
    }
    if (thread < len % 4) x[len / 4 * 4 + thread] = capped(x[len / 4 * 4 + thread]);
}

// out[i] = x[rows[i]]. One block a row.
extern "C" __global__ void __launch_bounds__(1024) gather_rows(const bf16* x, const int* rows, bf16* out, int n) {
    pdl_launch();
    pdl_wait();
    const int64_t from = static_cast<int64_t>(rows[blockIdx.x]) * n, to = static_cast<int64_t>(blockIdx.x) * n;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) store8(out + to + i, load8(x + from + i));
}

// out[i] = the sum of rows spans[i].x to spans[i].x + spans[i].y of x. A block has 32 vectors of a sum, its warps share the
// rows: which warp has which depends on the span alone.
extern "C" __global__ void __launch_bounds__(512) sum_rows(const bf16* x, const int2* spans, float* out, int n) {
    constexpr int kWarps = 16;
    __shared__ Float8 partial[kWarps][kWarp];
    pdl_launch();
    pdl_wait();
    const int2 span = spans[blockIdx.x];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int i = (blockIdx.y * kWarp + lane) * kVec;
    const bool mine = i < n;
    Float8 sum{};
    const auto add = [&](const Float8& more) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] += more.at[j];
    };
    for (int row = warp; mine && row < span.y; row += kWarps) {
        add(widen(load8(x + static_cast<int64_t>(span.x + row) * n + i)));
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || !mine) return;
    for (int other = 1; other < kWarps; ++other) add(partial[other][lane]);
    float4* const to = reinterpret_cast<float4*>(out + static_cast<int64_t>(blockIdx.x) * n + i);
    to[0] = make_float4(sum.at[0], sum.at[1], sum.at[2], sum.at[3]);
    to[1] = make_float4(sum.at[4], sum.at[5], sum.at[6], sum.at[7]);
}

namespace {

// Roughly normal values of standard deviation `scale`, sums of four random bytes, a function of seed and place alone, eight at
// a time: `store` gets where, the values, and how many of them there are.
template <typename Store>
__device__ __forceinline__ void fill(uint64_t len, uint64_t seed, float scale, Store store) {
    pdl_wait();
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    // Mean and standard deviation of the sum of four uniform bytes.
    constexpr float kMean = 510.0f, kDeviation = 147.80054f;
    const float factor = scale / kDeviation;
    const auto value = [&](uint32_t word) {
        return (static_cast<float>(__dp4a(word, 0x01010101u, 0u)) - kMean) * factor;
    };
    for (uint64_t vec = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; vec * kVec < len; vec += stride) {
        const uint2 counter = words(vec);
        const uint4 a = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
        const uint4 b = philox4x32_10(make_uint4(counter.x, counter.y, 1, 0), words(seed));
        const Float8 values = {
            {value(a.x), value(a.y), value(a.z), value(a.w), value(b.x), value(b.y), value(b.z), value(b.w)}};
        const uint64_t left = len - vec * kVec;
        store(vec * kVec, values, left < kVec ? static_cast<int>(left) : kVec);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) fill_random(bf16* out, uint64_t len, uint64_t seed, float scale) {
    fill(len, seed, scale, [&](uint64_t at, const Float8& values, int count) {
        if (count == kVec) return store8(out + at, narrow(values));
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if (i < count) out[at + i] = __float2bfloat16_rn(values.at[i]);
        }
    });
}

extern "C" __global__ void __launch_bounds__(256)
    fill_random_e4m3(uint8_t* out, uint64_t len, uint64_t seed, float scale) {
    fill(len, seed, scale, [&](uint64_t at, const Float8& values, int count) {
        const auto code = [&](int i) -> uint32_t {
            return __nv_cvt_float_to_fp8(values.at[i], __NV_SATFINITE, __NV_E4M3);
        };
        const auto four = [&](int i) { return code(i) | code(i + 1) << 8 | code(i + 2) << 16 | code(i + 3) << 24; };
        if (count == kVec) {
            *reinterpret_cast<uint2*>(out + at) = make_uint2(four(0), four(4));
            return;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if (i < count) out[at + i] = static_cast<uint8_t>(code(i));
        }
    });
}
