// What a warp of `attention_decode.cu` does with a tile of keys and values: where it lies in shared memory, and its products with
// queries and weights.
#pragma once

#include "common.cuh"
#include "fp8.cuh"
#include "mma.cuh"

constexpr int kRows = 16;  // query heads of a unit
constexpr int kKeys = 16;  // keys of a tile

template <int D, bool Fp8>
struct Shape {
    using Element = typename KvElement<Fp8>::Type;
    static constexpr int kWarps = D <= 128 ? 4 : 2;
    // A team of warps shares a ring, and each of them sums a part of the values' columns: all do not fit its registers. The scores
    // are computed by each.
    static constexpr int kParts = D <= 256 ? 1 : 2;
    static constexpr int kTeams = kWarps / kParts;
    static_assert(kParts == 1 || kTeams == 1, "a team waits for its warps as a block does");
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kWideStages = D < 128 ? 4 : D == 128 ? 3 : 2;
    static constexpr int kStages = !Fp8 ? kWideStages : D < 128 ? 6 : D == 128 ? 4 : 2;
    static constexpr int kChunks = D / 8;
    static constexpr int kTile = kKeys * D;  // of keys or of values
    static constexpr int kStage = 2 * kTile;
    // A team's ring, and at its end a float for each row and column, where teams exchange results: in bf16 that is the last
    // stage, which is not being loaded then; behind the stages of 8 bits there is room for it.
    static constexpr int kExchangeBytes = kRows * D * int(sizeof(float));
    static constexpr int kRingBytes = kWideStages * kStage * int(sizeof(bf16));
    static_assert(kStages * kStage * int(sizeof(Element)) + (Fp8 ? kExchangeBytes : 0) <= kRingBytes, "a team's ring");
    static_assert(kStage * int(sizeof(bf16)) == kExchangeBytes, "a stage of bf16 holds the sums of a team");
    // Large queries stay in shared memory: registers hold the sums.
    static constexpr bool kSharedQueries = D > 128;
    // Elements of the values' rows that a warp sums.
    static constexpr int kColumns = D / kParts;
    // Tiles whose cache rows the lanes of a warp hold, one lane for each eight keys.
    static constexpr int kLot = kWarp * 8 / kKeys;
};

// Where 8 elements of a row lie in a tile, such that eight rows of a column lie in different banks.
template <int D>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    const int key = D % 64 == 0 ? row & 7 : row >> 1 & 3;
    return row * D + (chunk ^ key) * 8;
}

// The same of tiles of 8 bits, in chunks of 16 elements. Eight rows of a column lie in different banks, and so do 32 elements
// of each of four rows.
template <int D>
__device__ __forceinline__ int swizzled_fp8(int row, int chunk) {
    const int high = row >> 2 & 1;
    const int key = D % 128 == 0 ? (row & 3) * 2 + high : D == 64 ? (row & 2) + high : high;
    return row * D + (chunk ^ key) * 16;
}

// The same of queries of which four lanes take 32 elements of a row.
template <int D>
__device__ __forceinline__ int swizzled_queries(int row, int chunk) {
    return row * D + (chunk ^ ((row & 1) * 4 + (row >> 1 & 3))) * 8;
}

// Products of a warp.
template <int D, bool Fp8>
struct TileProducts {
    using S = Shape<D, Fp8>;
    static constexpr int kSteps = D / 16;
    static constexpr int kHeld = S::kSharedQueries ? 1 : kSteps;  // of the queries' operands in registers
    static constexpr int kSums = S::kColumns / 8;

    // The rows of a unit as the left operand; those beyond are zero.
    __device__ __forceinline__ static void load_queries(const bf16* unit, int rows, uint32_t (&queries)[kHeld][4]) {
        const int lane = threadIdx.x % kWarp;
        const bf16* from = unit + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i % 2 * 8 + lane / 4;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const bf16* at = from + row * D + step * 16 + i / 2 * 8;
                queries[step][i] = row < rows ? *reinterpret_cast<const uint32_t*>(at) : 0;
            }
        }
    }

    // The same for keys of 8 bits, of which a lane takes eight neighbours for two products: the sum over a head is the same in
    // any order, as long as queries and keys have the same one.
    __device__ __forceinline__ static void load_wide_queries(const bf16* unit, int rows, uint32_t (&queries)[kHeld][4]) {
        const int lane = threadIdx.x % kWarp;
        const bf16* from = unit + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = half * 8 + lane / 4;
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                const uint4 x = row < rows ? *reinterpret_cast<const uint4*>(from + row * D + step * 16) : uint4{};
                queries[step][half] = x.x;
                queries[step][half + 2] = x.y;
                queries[step + 1][half] = x.z;
                queries[step + 1][half + 2] = x.w;
            }
        }
    }

    // Products of the queries and a tile of keys.
    __device__ __forceinline__ static void score(const bf16* keys, const bf16* shared_queries,
                                                 const uint32_t (&queries)[kHeld][4], float (&chains)[2][2][4]) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll(S::kSharedQueries ? 4 : kSteps)
        for (int step = 0; step < kSteps; ++step) {
            uint32_t b[4];
            load_matrices(b, keys + swizzled<D>(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
            if constexpr (S::kSharedQueries) {
                uint32_t a[4];
                load_matrices(a, shared_queries + swizzled<D>(lane % 16, step * 2 + lane / 16));
                mma(chains[step % 2][0], a, b[0], b[1]);
                mma(chains[step % 2][1], a, b[2], b[3]);
            } else {
                mma(chains[step % 2][0], queries[step], b[0], b[1]);
                mma(chains[step % 2][1], queries[step], b[2], b[3]);
            }
        }
    }

    // Products of the queries and a tile of keys of 8 bits.
    __device__ __forceinline__ static void score_fp8(const uint8_t* keys, const bf16* shared_queries,
                                                     const uint32_t (&queries)[kHeld][4], float (&chains)[2][2][4]) {
        const int lane = threadIdx.x % kWarp;
        const auto eight = [&](int row, int step) {
            return *reinterpret_cast<const uint2*>(keys + swizzled_fp8<D>(row, step + lane % 4 / 2) + lane % 2 * 8);
        };
#pragma unroll(S::kSharedQueries ? 4 : kSteps)
        for (int step = 0; step < kSteps; step += 2) {
            uint32_t a[2][4];
            if constexpr (S::kSharedQueries) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 x = *reinterpret_cast<const uint4*>(
                        shared_queries + swizzled_queries<D>(half * 8 + lane / 4, step * 2 + lane % 4));
                    a[0][half] = x.x, a[0][half + 2] = x.y, a[1][half] = x.z, a[1][half + 2] = x.w;
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[0][i] = queries[step][i], a[1][i] = queries[step + 1][i];
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint2 b = eight(n * 8 + lane / 4, step);
                mma(chains[0][n], a[0], widen_fp8(b.x & 0xffff), widen_fp8(b.x >> 16));
                mma(chains[1][n], a[1], widen_fp8(b.y & 0xffff), widen_fp8(b.y >> 16));
            }
        }
    }

    // sums += weights x values, of the columns of a part of the team
    __device__ __forceinline__ static void accumulate(const uint32_t (&weights)[4], const bf16* values, int part,
                                                      float (&sums)[kSums][4]) {
        const int lane = threadIdx.x % kWarp, first = part * kSums + lane / 16;
#pragma unroll
        for (int d = 0; d < kSums; d += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, values + swizzled<D>(lane % 16, first + d));
            mma(sums[d], weights, b[0], b[1]);
            mma(sums[d + 1], weights, b[2], b[3]);
        }
    }

    // sums += weights x values of 8 bits. Transposed pairs of bytes are two neighbouring columns of a row: those with even
    // numbers go to one product, those with odd ones to the next.
    __device__ __forceinline__ static void accumulate_fp8(const uint32_t (&weights)[4], const uint8_t* values, int part,
                                                          float (&sums)[kSums][4]) {
        const int lane = threadIdx.x % kWarp, first = part * (kSums / 2) + lane / 16;
#pragma unroll
        for (int chunk = 0; chunk < kSums / 2; chunk += 2) {
            uint32_t b[4];
            load_matrices_transposed(
                b, reinterpret_cast<const bf16*>(values + swizzled_fp8<D>(lane % 16, first + chunk)));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint32_t low = __byte_perm(b[n * 2], 0, 0x3120), high = __byte_perm(b[n * 2 + 1], 0, 0x3120);
                float(&even)[4] = sums[(chunk + n) * 2];
                float(&odd)[4] = sums[(chunk + n) * 2 + 1];
                mma(even, weights, widen_fp8(low & 0xffff), widen_fp8(high & 0xffff));
                mma(odd, weights, widen_fp8(low >> 16), widen_fp8(high >> 16));
            }
        }
    }
};
