// Weights of four bits for products that take bf16, and what products of them need besides. int4.cuh says how they lie.
#include "int4.cuh"
#include "mma.cuh"
#include "philox.cuh"

namespace {

constexpr int kThreads = 256;

}  // namespace

// `weight` `[n, k]` of groups of `group` inputs, whose rows of words begin `stride` apart, to `out` `[n, k]`, rounded once. A thread has
// a word: of each 16 threads, one after the other reads it where it lies, and writes eight inputs somewhere in the window.
extern "C" __global__ void __launch_bounds__(kThreads) int4_dequantise(const uint32_t* weight, const uint32_t* groups, bf16* out,
                                                                       int n, int k, int group, int stride) {
    pdl_launch();
    const int row_words = (k + kWindow - 1) / kWindow * kWindowWords;
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const int row = int(at / row_words), word = int(at % row_words);
    const int window = word / kWindowWords, quad = word % kWindowWords / kWindowParts, part = word % kWindowParts;
    const int input = window * kWindow + part * 32 + quad * 8;
    const bool is_input = row < n && input < k;
    uint32_t codes = 0, shared = 0;
    if (is_input) {
        codes = __ldg(weight + at);
        shared = __ldg(groups + size_t(row) * stride + input / group);
    }
    pdl_wait();
    if (!is_input) return;
    const float scale = group_scale(shared), zero = float(shared & kZeroMask);
    const auto element = [&](int i) {
        const uint32_t code = codes >> (i % 2 * 16 + i / 2 * 4) & 15;
        return (float(code) - zero) * scale;
    };
    uint4 wide;
    wide.x = pack(element(0), element(1)), wide.y = pack(element(2), element(3));
    wide.z = pack(element(4), element(5)), wide.w = pack(element(6), element(7));
    *reinterpret_cast<uint4*>(out + size_t(row) * k + input) = wide;
}

// Inputs `[m, k]` in another order: of each row of `out`, input `i` is input `order[i]` of `x`. A thread has eight; `k` is a multiple of
// that.
extern "C" __global__ void __launch_bounds__(kThreads) int4_reorder(const bf16* x, const uint32_t* order, bf16* out, int m, int k) {
    pdl_launch();
    const int pieces = k / 8;
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const int row = int(at / pieces), piece = int(at % pieces);
    if (row >= m) {
        pdl_wait();
        return;
    }
    const uint4* const from = reinterpret_cast<const uint4*>(order) + piece * 2;
    const uint4 a = __ldg(from), b = __ldg(from + 1);
    pdl_wait();
    const bf16* const row_of_x = x + size_t(row) * k;
    const auto pair = [&](uint32_t low, uint32_t high) {
        return uint32_t(__bfloat16_as_ushort(row_of_x[low])) | uint32_t(__bfloat16_as_ushort(row_of_x[high])) << 16;
    };
    reinterpret_cast<uint4*>(out)[at] = make_uint4(pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w));
}

// Random codes, `len` times four words.
extern "C" __global__ void __launch_bounds__(kThreads) int4_fill(uint4* out, uint64_t len, uint64_t seed) {
    pdl_launch();
    pdl_wait();
    const uint64_t step = uint64_t(gridDim.x) * kThreads;
    for (uint64_t at = uint64_t(blockIdx.x) * kThreads + threadIdx.x; at < len; at += step) {
        const uint2 counter = words(at);
        out[at] = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
    }
}
