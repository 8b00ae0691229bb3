// Weights in GGUF's block types for products that take bf16, rows of tables of them, and made-up ones. gguf.cuh says how they lie.
#include "gguf.cuh"
#include "mma.cuh"
#include "philox.cuh"

namespace {

constexpr int kThreads = 256;

template <Gguf kType>
constexpr int kWindowThreads = kSteps<kType> * 4;  // each has a lane's inputs of a step

// What thread `at` has of a row: `emit` gets the first of four neighbouring inputs, and their elements.
template <Gguf kType, typename Emit>
__device__ __forceinline__ void widen_some(const uint8_t* row, int k, int at, const Emit& emit) {
    const int window = at / kWindowThreads<kType>, step = at % kWindowThreads<kType> / 4, quad = at % 4;
    const int windows = (k + kGgufWindow - 1) / kGgufWindow;
    const uint8_t* const from = row + size_t(window) * kWindowPieces<kType> * 16;
    GgufCodes<kType> codes;
    GgufGroups<kType> groups;
    codes.load(from, quad, step);
    groups.load(from, step, window_scale<kType>(row, windows, window));
#pragma unroll
    for (int part = 0; part < kStepParts<kType>; ++part) {
        const int input = window * kGgufWindow + (step * kStepParts<kType> + part) * 32;
        if (input >= k) return;
        uint32_t pairs[4];
        codes.widen(part, pairs);
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            constexpr bool kInGroups = kGroupInputs<kType> == 16;
            const int group = kInGroups ? part * 2 + four : part;
            const float scale = groups.scale(group), min = groups.min(group);
            const float2 low = __bfloat1622float2(reinterpret_cast<const bf162&>(pairs[four * 2]));
            const float2 high = __bfloat1622float2(reinterpret_cast<const bf162&>(pairs[four * 2 + 1]));
            // Levels times scales are exact, so that sums are rounded once.
            const float4 elements = make_float4(fmaf(low.x, scale, min), fmaf(low.y, scale, min), fmaf(high.x, scale, min),
                                                fmaf(high.y, scale, min));
            emit(input + (kInGroups ? four * 16 + quad * 4 : quad * 8 + four * 4), elements);
        }
    }
}

__device__ __forceinline__ void store4(bf16* to, float4 elements) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(elements.x, elements.y), pack(elements.z, elements.w));
}

// Rows [n, k] that begin `pitch` bytes apart to `out` [n, k], rounded once.
template <Gguf kType>
__device__ __forceinline__ void dequantise(const uint8_t* weight, bf16* out, int n, int k, int pitch) {
    pdl_launch();
    const unsigned of_row = (k + kGgufWindow - 1) / kGgufWindow * kWindowThreads<kType>;
    const unsigned at = blockIdx.x * kThreads + threadIdx.x;
    const size_t row = at / of_row;
    pdl_wait();
    if (row >= n) return;
    bf16* const to = out + row * k;
    widen_some<kType>(weight + row * pitch, k, int(at % of_row), [&](int input, float4 elements) { store4(to + input, elements); });
}

// As `embedding` of fused.cu, whose table is bf16: here rows are dequantised, scaled, and rounded once. One block a row.
template <Gguf kType>
__device__ __forceinline__ void embed(const uint8_t* table, const int* tokens, const int* prev_sampled, int* resolved, bf16* out,
                                      float scale, int vocab, int first, int count, int k, int pitch) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x;
    int token = tokens[row];
    if (token < 0) token = prev_sampled[-1 - token];
    token = min(max(token, 0), vocab - 1);
    const bool is_here = token >= first && token - first < count;
    const uint8_t* const from = table + size_t(is_here ? token - first : 0) * pitch;
    const float by = is_here ? scale : 0.0f;
    bf16* const to = out + size_t(row) * k;
    const int of_row = (k + kGgufWindow - 1) / kGgufWindow * kWindowThreads<kType>;
    for (int at = threadIdx.x; at < of_row; at += kThreads) {
        widen_some<kType>(from, k, at, [&](int input, float4 x) {
            store4(to + input, make_float4(x.x * by, x.y * by, x.z * by, x.w * by));
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) resolved[row] = token;
}

}  // namespace

#define GGUF(NAME, TYPE)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                                         \
        gguf_dequantise_##NAME(const uint8_t* weight, bf16* out, int n, int k, int pitch) {                                        \
        dequantise<TYPE>(weight, out, n, k, pitch);                                                                                \
    }                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                                         \
        gguf_embedding_##NAME(const uint8_t* table, const int* tokens, const int* prev_sampled, int* resolved, bf16* out,          \
                              float scale, int vocab, int first, int count, int k, int pitch) {                                    \
        embed<TYPE>(table, tokens, prev_sampled, resolved, out, scale, vocab, first, count, k, pitch);                             \
    }

GGUF(q4_0, Gguf::kQ4_0)
GGUF(q4_1, Gguf::kQ4_1)
GGUF(q5_0, Gguf::kQ5_0)
GGUF(q5_1, Gguf::kQ5_1)
GGUF(q8_0, Gguf::kQ8_0)
GGUF(q4_k, Gguf::kQ4K)
GGUF(q5_k, Gguf::kQ5K)
GGUF(q6_k, Gguf::kQ6K)

// Random codes, `len` pieces of rows of `pitch` pieces: windows of `window` pieces, the last of which, from `codes` on, are `shared0` and
// `shared1`; from `windows` pieces on `behind`, twice a word.
extern "C" __global__ void __launch_bounds__(kThreads)
    gguf_fill(uint4* out, uint64_t len, uint64_t seed, uint64_t shared0, uint64_t shared1, uint64_t shared2, uint64_t shared3, int pitch,
              int windows, int window, int codes, int behind) {
    pdl_launch();
    pdl_wait();
    const auto whole = [](uint64_t low, uint64_t high) {
        const uint2 a = words(low), b = words(high);
        return make_uint4(a.x, a.y, b.x, b.y);
    };
    const uint64_t step = uint64_t(gridDim.x) * kThreads;
    for (uint64_t at = uint64_t(blockIdx.x) * kThreads + threadIdx.x; at < len; at += step) {
        const int piece = int(at % uint64_t(pitch));
        if (piece >= windows) {
            out[at] = make_uint4(behind, behind, behind, behind);
        } else if (piece % window >= codes) {
            out[at] = piece % window == codes ? whole(shared0, shared1) : whole(shared2, shared3);
        } else {
            const uint2 counter = words(at);
            out[at] = philox4x32_10(make_uint4(counter.x, counter.y, 0, 0), words(seed));
        }
    }
}
