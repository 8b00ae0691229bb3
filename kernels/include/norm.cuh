// Norms of rows, and of their sums with what is added to them: each row is one block's.
#pragma once

#include "rows.cuh"

// What the rows of a norm are.
enum class Rows {
    kPlain,    // hidden
    kAdd,      // hidden += delta, stored
    kSandwich  // hidden += the norm of delta, stored
};

struct Norm {
    bf16* hidden;
    const bf16* delta;
    const float* delta_weight;
    const float* weight;
    bf16* out;
    Fp8Rows quantised;  // in place of out
    const float* scalar;  // multiplies a sum with a norm, if there is one
    int n;
    float eps;
};

// One block a row, `kVecs` vectors of it a thread: one for few rows, where latency counts (the weights are then read ahead of
// the wait), two for long rows and for many, where it is bytes under way that count. `fetch_delta` gets `delta` (its vectors of
// norm.delta) and where the row's begin, after the wait.
template <Rows kRows, int kVecs, bool kFp8, typename FetchDelta>
__device__ __forceinline__ void norm_row(const Norm& norm, FetchDelta fetch_delta) {
    constexpr bool kReadAhead = kVecs == 1;
    __shared__ float partial[(kRows == Rows::kSandwich ? 2 : 1) + (kFp8 ? 1 : 0)][kWarp];
    pdl_launch();
    const int vecs = norm.n / kVec;
    const auto at = [&](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x); };
    Float8 weight{}, delta_weight{};
    if (kReadAhead && at(0) < vecs) {
        weight = load_floats(norm.weight + at(0) * kVec);
        if (kRows == Rows::kSandwich) delta_weight = load_floats(norm.delta_weight + at(0) * kVec);
    }
    float factor = 1.0f;
    if (kRows == Rows::kSandwich && norm.scalar != nullptr) factor = *norm.scalar;
    pdl_wait();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * norm.n;
    // All loads before the first store, which might be to the same place for all the compiler knows.
    Bf16x8 x[kVecs]{}, delta[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) < vecs) x[v] = load8(norm.hidden + row + at(v) * kVec);
    }
    if (kRows != Rows::kPlain) fetch_delta(delta, row);
    const auto scale_of = [&](float squares, float (&partial)[kWarp]) {
        return rsqrtf(block_sum(squares, partial) / static_cast<float>(norm.n) + norm.eps);
    };
    float delta_scale = 1.0f;
    if constexpr (kRows == Rows::kSandwich) {
        float squares = 0.0f;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            if (at(v) < vecs) squares += sum_of_squares(widen(delta[v]));
        }
        delta_scale = scale_of(squares, partial[1]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (kRows != Rows::kPlain && at(v) < vecs) {
            Float8 sum = widen(x[v]);
            const Float8 added = widen(delta[v]);
            if (kRows == Rows::kSandwich && !kReadAhead) delta_weight = load_floats(norm.delta_weight + at(v) * kVec);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                sum.at[i] += kRows == Rows::kSandwich ? added.at[i] * delta_scale * delta_weight.at[i] : added.at[i];
                if (kRows == Rows::kSandwich) sum.at[i] *= factor;
            }
            x[v] = narrow(sum);
            store8(norm.hidden + row + at(v) * kVec, x[v]);
        }
        squares += sum_of_squares(widen(x[v]));
    }
    const float scale = scale_of(squares, partial[0]);
    Float8 wide[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= vecs) continue;
        if (!kReadAhead) weight = load_floats(norm.weight + at(v) * kVec);
        wide[v] = widen(x[v]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) wide[v].at[i] *= scale * weight.at[i];
        if (!kFp8) store8(norm.out + row + at(v) * kVec, narrow(wide[v]));
    }
    if constexpr (kFp8) store_fp8(norm.quantised, norm.n, wide, partial[kRows == Rows::kSandwich ? 2 : 1]);
}

// What is added is there.
template <Rows kRows, int kVecs, bool kFp8>
__device__ __forceinline__ void norm_row(const Norm& norm) {
    norm_row<kRows, kVecs, kFp8>(norm, [&](Bf16x8(&delta)[kVecs], int64_t row) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            const int at = static_cast<int>(threadIdx.x + v * blockDim.x);
            if (at * kVec < norm.n) delta[v] = load8(norm.delta + row + at * kVec);
        }
    });
}
