// Mixtures of experts, last part: the weighted sums of each row's experts, alone or with the norm that takes them up. And random weights
// in MXFP4.
#include "experts.cuh"
#include "norm.cuh"
#include "philox.cuh"

// Random codes and exponents (experts.cuh says how they lie), for weights of this standard deviation: codes of all values have one of 2.926.
extern "C" __global__ void __launch_bounds__(256)
    moe_fill_mxfp4(uint8_t* out, uint64_t bytes, int k, int pitch, uint64_t seed, float deviation) {
    pdl_launch();
    pdl_wait();
    const int exponent = min(max(127 + int(roundf(log2f(deviation / 2.926f))), 0), 254);
    const uint32_t both = exponent * 0x01010101u;
    const uint64_t count = bytes / 16, step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const int at = int(i * 16 % (kRowsTogether * pitch)) - expert_windows(k) * kWindowOfEight;
        uint4 v;
        if (at < 0) {
            const uint2 counter = words(i);
            v = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
        } else {
            // Behind the last exponent there are zeros.
            uint32_t word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int left = k / kExponentInputs - at % exponent_bytes(k) - 4 * j;
                word[j] = left >= 4 ? both : left <= 0 ? 0 : both >> (8 * (4 - left));
            }
            v = make_uint4(word[0], word[1], word[2], word[3]);
        }
        reinterpret_cast<uint4*>(out)[i] = v;
    }
}

namespace {

// The sums of rows' experts: sum over the row's routes of weight * x[place], in order. With `gates`, [rows], plus
// sigmoid(gate) * shared[row].
struct Sums {
    const bf16* x;  // [places, n]
    const int* places;
    const float* weights;
    const float* gates;
    const bf16* shared;
    int n, top_k;

    // Eight elements of a row, of so many experts at once.
    template <int kAtOnce>
    __device__ __forceinline__ Bf16x8 of(int row, int at) const {
        const size_t first = size_t(row) * top_k;
        Float8 sum{};
        for (int begin = 0; begin < top_k; begin += kAtOnce) {
            Bf16x8 one[kAtOnce];
            float weight[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (begin + i >= top_k) break;
                weight[i] = weights[first + begin + i];
                one[i] = load8(x + size_t(places[first + begin + i]) * n + at);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (begin + i >= top_k) break;
                const Float8 wide = widen(one[i]);
#pragma unroll
                for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(weight[i], wide.at[j], sum.at[j]);
            }
        }
        if (gates != nullptr) {
            const float gate = 1.0f / (1.0f + expf(-gates[row]));
            const Float8 other = widen(load8(shared + size_t(row) * n + at));
#pragma unroll
            for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(gate, other.at[j], sum.at[j]);
        }
        return narrow(sum);
    }
};

template <int kVecs, bool kFp8>
__device__ __forceinline__ void add_and_norm(const Norm& norm, const Sums& sums) {
    norm_row<Rows::kAdd, kVecs, kFp8>(norm, [&](Bf16x8(&delta)[kVecs], int64_t) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            const int at = static_cast<int>(threadIdx.x + v * blockDim.x) * kVec;
            if (at < norm.n) delta[v] = sums.of<kVecs == 1 ? 4 : 2>(blockIdx.x, at);
        }
    });
}

}  // namespace

// out = the sums. `shared` may be `out`.
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const bf16* x, const int* places, const float* weights, const float* gates, const bf16* shared, bf16* out, int n, int top_k) {
    pdl_launch();
    pdl_wait();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
    if (at >= n) return;
    const Sums sums{x, places, weights, gates, shared, n, top_k};
    store8(out + size_t(blockIdx.x) * n + at, sums.of<8>(blockIdx.x, at));
}

#define SUM_PARAMS const bf16 *x, const int *places, const float *weights, const float *gates, const bf16 *shared, int top_k

// hidden += the sums, rounded to bf16 first; then the norm of that, as `add_rms_norm` in fused.cu.
#define NORM_KERNELS(VECS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        moe_add_rms_norm_##VECS(SUM_PARAMS, bf16* hidden, const float* weight, bf16* out, int n, float eps) {           \
        add_and_norm<VECS, false>({hidden, nullptr, nullptr, weight, out, {}, nullptr, n, eps},                         \
                                  {x, places, weights, gates, shared, n, top_k});                                       \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        moe_add_rms_norm_fp8_##VECS(SUM_PARAMS, bf16* hidden, const float* weight, uint8_t* values, float* scales,      \
                                    int stride, int n, float eps) {                                                     \
        add_and_norm<VECS, true>({hidden, nullptr, nullptr, weight, nullptr, {values, scales, stride}, nullptr, n, eps}, \
                                 {x, places, weights, gates, shared, n, top_k});                                        \
    }

NORM_KERNELS(1)
NORM_KERNELS(2)
