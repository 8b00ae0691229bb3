// The element-wise steps of a decoder layer, each in one pass over its rows, and random weights. All rows are a multiple of
// eight elements and 16-byte aligned, so every access is 16 bytes wide.
//
// Weights (tables, norms, frequencies) are read before `pdl_wait`: no kernel of a step writes them.
//
// What e4m3 products take is quantised where its rows are made: x = value * scale with scale = max |x| / 448 of the row or of each
// 128 of its elements, all of it from f32.

#include "activation.cuh"
#include "common.cuh"
#include "norm.cuh"
#include "philox.cuh"
#include "rows.cuh"

namespace {

// hidden = (hidden + delta) * factor, or + the norm of delta where it has a weight, of this block's row, by the way of f32. The
// factor is also the number at `scalar`, if there is one.
struct Sum {
    bf16* hidden;
    const bf16* delta;
    const float* delta_weight;
    const float* scalar;
    float factor;
    int n;
    float eps;
};

template <int kVecs>
__device__ __forceinline__ void add_row(const Sum& sum) {
    __shared__ float partial[kWarp];
    pdl_launch();
    const int vecs = sum.n / kVec;
    const auto at = [&](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x); };
    const float factor = sum.factor * (sum.scalar == nullptr ? 1.0f : *sum.scalar);
    pdl_wait();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * sum.n;
    Bf16x8 x[kVecs], delta[kVecs];
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= vecs) continue;
        x[v] = load8(sum.hidden + row + at(v) * kVec);
        delta[v] = load8(sum.delta + row + at(v) * kVec);
        squares += sum_of_squares(widen(delta[v]));
    }
    float scale = 1.0f;
    if (sum.delta_weight != nullptr) scale = rsqrtf(block_sum(squares, partial) / static_cast<float>(sum.n) + sum.eps);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= vecs) continue;
        Float8 to = widen(x[v]);
        const Float8 added = widen(delta[v]);
        Float8 weight = {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}};
        if (sum.delta_weight != nullptr) weight = load_floats(sum.delta_weight + at(v) * kVec);
#pragma unroll
        for (int i = 0; i < kVec; ++i) to.at[i] = (to.at[i] + added.at[i] * scale * weight.at[i]) * factor;
        store8(sum.hidden + row + at(v) * kVec, narrow(to));
    }
}

// x = the norm of x with one weight + the norm of y with another, of this block's row.
template <int kVecs>
__device__ __forceinline__ void sum_norms_row(bf16* x, const bf16* y, const float* x_weight, const float* y_weight, int n,
                                              float eps) {
    __shared__ float partial[2][kWarp];
    pdl_launch();
    const int vecs = n / kVec;
    const auto at = [&](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x); };
    pdl_wait();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * n;
    Bf16x8 a[kVecs], b[kVecs];
    float a_squares = 0.0f, b_squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= vecs) continue;
        a[v] = load8(x + row + at(v) * kVec);
        b[v] = load8(y + row + at(v) * kVec);
        a_squares += sum_of_squares(widen(a[v]));
        b_squares += sum_of_squares(widen(b[v]));
    }
    const float a_scale = rsqrtf(block_sum(a_squares, partial[0]) / static_cast<float>(n) + eps);
    const float b_scale = rsqrtf(block_sum(b_squares, partial[1]) / static_cast<float>(n) + eps);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= vecs) continue;
        const Float8 a_weight = load_floats(x_weight + at(v) * kVec), b_weight = load_floats(y_weight + at(v) * kVec);
        Float8 sum = widen(a[v]);
        const Float8 other = widen(b[v]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            sum.at[i] = sum.at[i] * a_scale * a_weight.at[i] + other.at[i] * b_scale * b_weight.at[i];
        }
        store8(x + row + at(v) * kVec, narrow(sum));
    }
}

// `activation(gate) * up` of a vector.
template <Activation kActivation>
__device__ __forceinline__ Float8 gated(const bf16* gate, const bf16* up) {
    Float8 g = widen(load8(gate));
    const Float8 u = widen(load8(up));
#pragma unroll
    for (int j = 0; j < kVec; ++j) g.at[j] = activated(kActivation, g.at[j], u.at[j]);
    return g;
}

template <Activation kActivation>
__device__ __forceinline__ void gate_row(const bf16* gate, const bf16* up, bf16* out, int inner, int gate_stride, int up_stride,
                                         int blocks_per_row) {
    pdl_launch();
    const int row = blockIdx.x / blocks_per_row;
    const int i = ((blockIdx.x - row * blocks_per_row) * blockDim.x + threadIdx.x) * kVec;
    pdl_wait();
    if (i >= inner) return;
    gate += static_cast<int64_t>(row) * gate_stride + i;
    up += static_cast<int64_t>(row) * up_stride + i;
    store8(out + static_cast<int64_t>(row) * inner + i, narrow(gated<kActivation>(gate, up)));
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
// may be `tokens`. Tokens outside the vocabulary (padding rows) are taken for the nearest in it. The table has `count` tokens from
// `first` on; rows of others are 0. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    embedding(const bf16* table, const int* tokens, const int* prev_sampled, int* resolved, bf16* out, float scale, int vocab,
              int first, int count, int n) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x;
    int token = tokens[row];
    if (token < 0) token = prev_sampled[-1 - token];
    token = min(max(token, 0), vocab - 1);
    const int at = token - first;
    const bool is_here = at >= 0 && at < count;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
        Float8 x = {};
        if (is_here) x = widen(load8(table + static_cast<int64_t>(at) * n + i));
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
                      const float* scalar, int n, float eps) {                                                          \
        norm_row<ROWS, VECS, false>({hidden, delta, delta_weight, weight, out, {}, scalar, n, eps});                    \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        NAME##_fp8_##VECS(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight,              \
                          uint8_t* values, float* scales, int stride, const float* scalar, int n, float eps) {          \
        norm_row<ROWS, VECS, true>(                                                                                     \
            {hidden, delta, delta_weight, weight, nullptr, {values, scales, stride}, scalar, n, eps});                  \
    }

#define NORM_KERNELS(NAME, ROWS) \
    NORM_KERNEL(NAME, ROWS, 1)   \
    NORM_KERNEL(NAME, ROWS, 2)

// out = x * rsqrt(mean(x^2) + eps) * weight, where x is hidden, or hidden + delta, or hidden + such a norm of delta with
// delta_weight, which may be multiplied by a number; the sum is rounded to bf16 and stored to hidden. The suffix is the vectors a thread keeps: blocks have
// n / 8 / suffix threads. Those of fp8 quantise.
NORM_KERNELS(rms_norm, Rows::kPlain)
NORM_KERNELS(add_rms_norm, Rows::kAdd)
NORM_KERNELS(sandwich_norm, Rows::kSandwich)

#define SUM_KERNELS(VECS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        add_normed_##VECS(bf16* hidden, const bf16* delta, const float* delta_weight, const float* scalar,              \
                          float factor, int n, float eps) {                                                             \
        add_row<VECS>({hidden, delta, delta_weight, scalar, factor, n, eps});                                           \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        sum_norms_##VECS(bf16* x, const bf16* y, const float* x_weight, const float* y_weight, int n, float eps) {      \
        sum_norms_row<VECS>(x, y, x_weight, y_weight, n, eps);                                                          \
    }

// Sums with norms where no norm follows, as above.
SUM_KERNELS(1)
SUM_KERNELS(2)

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
                           [&](int at) { return gated<Activation::kSilu>(row + at, row + n + at); });                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        gelu_tanh_mul_fp8_##VECS(const bf16* gate_up, uint8_t* values, float* scales, int stride, int n) {              \
        const bf16* row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * n;                                           \
        quantise_row<VECS>({values, scales, stride}, n,                                                            \
                           [&](int at) { return gated<Activation::kGeluTanh>(row + at, row + n + at); });                          \
    }

// Rows of x, or `activation(gate) * up` of rows of gate and up, quantised, one block a row.
QUANTISE_KERNELS(1)
QUANTISE_KERNELS(2)
QUANTISE_KERNELS(4)

#define GLU_KERNEL(NAME, ACTIVATION)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        NAME(const bf16* gate, const bf16* up, bf16* out, int inner, int gate_stride, int up_stride,                    \
             int blocks_per_row) {                                                                                      \
        gate_row<ACTIVATION>(gate, up, out, inner, gate_stride, up_stride, blocks_per_row);                             \
    }

// out[row][i] = activation(gate[row][i]) * up[row][i], of rows so many elements apart. Blocks of a row follow each other: gridDim.x is rows
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

// Words between the device and pinned memory of the host, past the caches: the host has just written them, or reads them next.
extern "C" __global__ void __launch_bounds__(256) copy_words(const uint32_t* from, uint32_t* to, int words) {
    constexpr int kWordsOfVec = 4;
    const int vecs = words / kWordsOfVec, stride = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = thread; i < vecs; i += stride) __stcs(reinterpret_cast<uint4*>(to) + i, __ldcv(reinterpret_cast<const uint4*>(from) + i));
    if (thread < words % kWordsOfVec) to[vecs * kWordsOfVec + thread] = __ldcv(from + vecs * kWordsOfVec + thread);
}

// out[i] = the first n elements of x[rows[i]], whose rows are `stride` elements apart. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    gather_rows(const bf16* x, const int* rows, bf16* out, int n, int stride) {
    pdl_launch();
    pdl_wait();
    const int64_t from = static_cast<int64_t>(rows[blockIdx.x]) * stride, to = static_cast<int64_t>(blockIdx.x) * n;
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
