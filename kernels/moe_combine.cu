// Mixtures of experts, last part: the weighted sums of each row's experts. And random weights in MXFP4.
#include "philox.cuh"
#include "rows.cuh"

constexpr int kExponentInputs = 32;

// Random rows of codes and exponents, for weights of this standard deviation: codes of all values have one of 2.926.
extern "C" __global__ void __launch_bounds__(256)
    moe_fill_mxfp4(uint8_t* out, uint64_t bytes, int k, int pitch, uint64_t seed, float deviation) {
    pdl_launch();
    pdl_wait();
    const int exponent = min(max(127 + int(roundf(log2f(deviation / 2.926f))), 0), 254);
    const uint32_t both = exponent * 0x01010101u;
    const uint64_t count = bytes / 16, step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const int at = int(i * 16 % pitch);
        uint4 v;
        if (at < k / 2) {
            const uint2 counter = words(i);
            v = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
        } else {
            // Behind the last exponent there are zeros.
            uint32_t word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int left = k / 2 + k / kExponentInputs - at - 4 * j;
                word[j] = left >= 4 ? both : left <= 0 ? 0 : both >> (8 * (4 - left));
            }
            v = make_uint4(word[0], word[1], word[2], word[3]);
        }
        reinterpret_cast<uint4*>(out)[i] = v;
    }
}

// out[row] = sum over the row's routes of weight * x[place], in order. With `gates`, [rows], plus sigmoid(gate) * out[row].
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const bf16* x, const int* places, const float* weights, const float* gates, bf16* out, int n, int top_k) {
    pdl_launch();
    pdl_wait();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
    if (at >= n) return;
    const size_t first = size_t(blockIdx.x) * top_k;
    Float8 sum{};
#pragma unroll 4
    for (int i = 0; i < top_k; ++i) {
        const float weight = weights[first + i];
        const Float8 one = widen(load8(x + size_t(places[first + i]) * n + at));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(weight, one.at[j], sum.at[j]);
    }
    bf16* to = out + size_t(blockIdx.x) * n + at;
    if (gates != nullptr) {
        const float gate = 1.0f / (1.0f + expf(-gates[blockIdx.x]));
        const Float8 shared = widen(load8(to));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(gate, shared.at[j], sum.at[j]);
    }
    store8(to, narrow(sum));
}
