// Weights of four bits for products that take bf16, and what products of them need besides. int4.cuh says how they lie.
#include "int4.cuh"
#include "mma.cuh"
#include "philox.cuh"

namespace {

constexpr int kThreads = 256;

}  // namespace

// `weight` `[n, k]` of groups of `group` inputs to `out` `[n, k]`, rounded once. The four lanes of a row read a window; then each has eight
// neighbouring inputs of each part.
extern "C" __global__ void __launch_bounds__(kThreads) int4_dequantise(const uint4* weight, const uint32_t* groups, bf16* out, int n,
                                                                       int k, int group) {
    pdl_launch();
    const int windows = (k + kWindow - 1) / kWindow, of_window = kWindow / group;
    const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
    const int quad = at % 4, row = int(at / 4 / windows), window = int(at / 4 % windows);
    const bool is_row = row < n;
    // Where this row lies in this window: an index among the rows of all windows.
    const size_t of_windows = size_t(row / kRowsTogether * windows + window) * kRowsTogether + row % kRowsTogether;
    const uint4 codes = is_row ? __ldg(weight + of_windows * 4 + quad) : uint4{};
    // Lane `to` gets pair `to` of the words of all four lanes, those of the four parts in one word.
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int shift = (quad ^ i) * 4;
        const auto pair = [&](uint32_t word) { return word >> shift & 0x000f000fu; };
        const uint32_t all = pair(codes.x) | pair(codes.y) << 4 | pair(codes.z) << 8 | pair(codes.w) << 12;
        pairs[i] = __shfl_xor_sync(kAllLanes, all, i);
    }
    // In the order of the lanes that they are from.
    const auto swap = [](bool wanted, uint32_t& a, uint32_t& b) {
        const uint32_t first = wanted ? b : a;
        b = wanted ? a : b, a = first;
    };
    swap(quad & 1, pairs[0], pairs[1]), swap(quad & 1, pairs[2], pairs[3]);
    swap(quad & 2, pairs[0], pairs[2]), swap(quad & 2, pairs[1], pairs[3]);
    pdl_wait();
#pragma unroll
    for (int part = 0; part < kWindowParts; ++part) {
        const int input = window * kWindow + part * 32 + quad * 8;
        if (!is_row || input >= k) continue;
        const uint32_t shared = __ldg(groups + of_windows * of_window + input % kWindow / group);
        const uint32_t zeros = group_zeros(shared);
        const float scale = group_scale(shared);
        const auto scaled = [&](uint32_t word) {
            const uint32_t wide = widen_int4<0>(word >> (part * 4), zeros);
            return pack(__uint_as_float(wide << 16) * scale, __uint_as_float(wide & 0xffff0000u) * scale);
        };
        const uint4 wide = make_uint4(scaled(pairs[0]), scaled(pairs[1]), scaled(pairs[2]), scaled(pairs[3]));
        *reinterpret_cast<uint4*>(out + size_t(row) * k + input) = wide;
    }
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
