// The gated delta rule of prompts in chunks of 64 tokens, as products of matrices on tensor cores: section 3.3 of
// https://arxiv.org/abs/2412.06464. Chunks begin at multiples of 64 tokens of the request, not of the run, so that they are the same
// however a prompt is cut at such multiples.
//
// With the decays of a chunk's tokens multiplied up to g, rates b, and S the state before it (keys by value columns),
//
//   A = tril(diag(b) (K K' * g_i / g_j), -1),  T = (1 + A)^-1 diag(b)
//   U = T (V - diag(g) K S)
//   O = diag(g) Q S + tril(Q K' * g_i / g_j) U
//   S = g_last S + K' diag(g_last / g) U
//
// `delta_triangles`, here, computes T and the triangle of Q K' of all chunks side by side; `delta_chunks` goes through the chunks of a
// run with the state in registers. K, Q and V are bf16; whatever else is multiplied is f32, in two parts of bf16 each: products are as
// exact as 16 bits of mantissa allow, and sums are f32.
#pragma once

#include "delta_conv.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kChunk = 64;                   // tokens
constexpr int kChunkTiles = kChunk / 16;     // of 16 tokens
constexpr int kTriangle = 2 * kChunk;        // elements of a row of a triangle: high parts, then low parts
constexpr int kTriangles = 2 * kTriangle;    // of a token and head: T, then the triangle of Q K'
constexpr float kLeastLog = -24.0f;          // of a decay: what is left then is less than f32 rounds away

// What both kernels work on. Rows of `triangles` are written for the tokens of chunks, up to the last column of their tile.
struct Chunked {
    bf16* mixed;       // [rows][channels]: q, k, v; outputs take the place of v
    float2* gates;     // [rows][value_heads]: decay and rate; those of chunks become g and g_last / g
    bf16* triangles;   // [rows][value_heads][2][kTriangle]
    float* states;     // [slots][value_heads][key_dim][value_dim]
    Layout layout;

    __device__ __forceinline__ const bf16* keys(int row, int head) const {
        const int key_head = head / layout.adjacent % layout.key_heads;
        return mixed + static_cast<int64_t>(row) * layout.channels() + key_head * layout.key_dim;
    }

    __device__ __forceinline__ bf16* values(int row, int head) const {
        return mixed + static_cast<int64_t>(row) * layout.channels() + 2 * layout.keys() + head * layout.value_dim;
    }

    __device__ __forceinline__ int64_t at(int row, int head) const {
        return static_cast<int64_t>(row) * layout.value_heads + head;
    }
};

// Tokens of the chunk that begins with token `first` of a run.
__device__ __forceinline__ int chunk_len(const StateRun& run, int first) {
    return min(kChunk - (run.start + first) % kChunk, run.len - first);
}

// The 16-byte piece `piece` of a row of kPieces pieces: permuted within each eight rows, so that eight pieces below each other are in
// all banks.
template <int kPieces>
__device__ __forceinline__ bf16* piece_of(bf16* tile, int row, int piece) {
    return tile + (row * kPieces + (piece ^ (row & 7))) * kVec;
}

// Left operand: 16 rows from `row` on, 16 columns from piece `piece` on.
template <int kPieces>
__device__ __forceinline__ void load_left(uint32_t (&a)[4], bf16* tile, int row, int piece) {
    const int lane = threadIdx.x % kWarp;
    load_matrices(a, piece_of<kPieces>(tile, row + lane % 16, piece + lane / 16));
}

// Right operands of two products, whose columns are rows of the tile: 16 of them, and 16 elements of the sum.
template <int kPieces>
__device__ __forceinline__ void load_right(uint32_t (&b)[4], bf16* tile, int row, int piece) {
    const int lane = threadIdx.x % kWarp;
    load_matrices(b, piece_of<kPieces>(tile, row + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2));
}

// Two parts of bf16 whose sum is x but for its last bits.
struct Parts {
    uint32_t high;
    uint32_t low;
};

__device__ __forceinline__ Parts in_parts(float x, float y) {
    const uint32_t high = pack(x, y);
    const float2 rounded = __bfloat1622float2(*reinterpret_cast<const bf162*>(&high));
    return {high, pack(x - rounded.x, y - rounded.y)};
}

constexpr int kTriangleThreads = 2 * kChunk;
constexpr int kRowOfA = kChunk + 4;  // elements

template <int kKey>
struct __align__(128) TriangleRoom {
    union {
        struct {
            bf16 q[kChunk * kKey];
            bf16 k[kChunk * kKey];
        };
        bf16 out[2][2][kChunk][kChunk + 8];  // T and the triangle of Q K', each in high and low parts
    };
    float a[kChunk][kRowOfA];
    float log_g[kChunk];
    float rate[kChunk];
    float sum_of_first;  // half of the logarithms
};

// Column `column` of (1 + A)^-1 from row kFirst on, above which it is zero: each row follows from those before.
template <int kFirst>
__device__ __forceinline__ void invert_column(const float (&a)[kChunk][kRowOfA], int column, float rate,
                                              bf16 (&high)[kChunk][kChunk + 8], bf16 (&low)[kChunk][kChunk + 8]) {
    float t[kChunk];
#pragma unroll
    for (int row = kFirst; row < kChunk; ++row) {
        float sums[4] = {};
#pragma unroll
        for (int from = kFirst; from < row; from += 4) {
            const float4 of_row = *reinterpret_cast<const float4*>(&a[row][from]);
            sums[0] = fmaf(of_row.x, t[from], sums[0]);
            if (from + 1 < row) sums[1] = fmaf(of_row.y, t[from + 1], sums[1]);
            if (from + 2 < row) sums[2] = fmaf(of_row.z, t[from + 2], sums[2]);
            if (from + 3 < row) sums[3] = fmaf(of_row.w, t[from + 3], sums[3]);
        }
        t[row] = (row == column ? 1.0f : 0.0f) - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        const float scaled = t[row] * rate;
        high[row][column] = __float2bfloat16_rn(scaled);
        low[row][column] = __float2bfloat16_rn(scaled - __bfloat162float(high[row][column]));
    }
}

// A block has the chunk that begins with a tile, for one head of v; nothing where none begins.
template <int kKey>
__device__ __forceinline__ void make_triangles(const Chunked& of, const StateRun* runs, const StateTile* tiles) {
    constexpr int kPieces = kKey / kVec;
    extern __shared__ __align__(128) unsigned char shared[];
    TriangleRoom<kKey>& room = *reinterpret_cast<TriangleRoom<kKey>*>(shared);
    const Layout& layout = of.layout;
    const int index = blockIdx.x / layout.value_heads, head = blockIdx.x - index * layout.value_heads;
    const StateTile tile = tiles[index];
    const StateRun run = runs[tile.run];
    const bool begins = tile.first == 0 || (run.start + tile.first) % kChunk == 0;
    pdl_wait();
    if (run.after < 0 || !begins) return;
    const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
    const int len = chunk_len(run, tile.first), first = run.first_row + tile.first;

    const bf16* const keys = of.keys(first, head);
    const int64_t stride = layout.channels();
    for (int i = thread; i < kChunk * kPieces; i += kTriangleThreads) {
        const int row = i / kPieces, piece = i % kPieces;
        const bool there = row < len && piece * kVec < layout.key_dim;
        const bf16* const from = there ? keys + row * stride + piece * kVec : keys;
        copy_async(piece_of<kPieces>(room.q, row, piece), from, there);
        copy_async(piece_of<kPieces>(room.k, row, piece), there ? from + layout.keys() : from, there);
    }
    commit_async();

    // Sums of the logarithms of decays, by two warps with half of the tokens each.
    float log_g = 0.0f, rate = 0.0f;
    float2* const gates = of.gates + of.at(first + thread, head);
    if (thread < kChunk) {
        if (thread < len) {
            const float2 gate = *gates;
            log_g = fmaxf(logf(gate.x), kLeastLog);
            rate = gate.y;
        }
#pragma unroll
        for (int back = 1; back < kWarp; back *= 2) {
            const float before = __shfl_up_sync(kAllLanes, log_g, back);
            if (lane >= back) log_g += before;
        }
        if (thread == kWarp - 1) room.sum_of_first = log_g;
    }
    __syncthreads();
    if (thread < kChunk) {
        if (warp > 0) log_g += room.sum_of_first;
        room.log_g[thread] = log_g;
        room.rate[thread] = rate;
    }
    wait_async<0>();
    __syncthreads();
    if (thread < len) *gates = make_float2(__expf(log_g), __expf(room.log_g[len - 1] - log_g));

    // 16 rows of K K' and of Q K', up to the diagonal.
    float kk[kChunkTiles][2][4]{}, qk[kChunkTiles][2][4]{};
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {
        uint32_t k[4], q[4];
        load_left<kPieces>(k, room.k, warp * 16, piece);
        load_left<kPieces>(q, room.q, warp * 16, piece);
#pragma unroll
        for (int tokens = 0; tokens < kChunkTiles; ++tokens) {
            if (tokens > warp) continue;
            uint32_t b[4];
            load_right<kPieces>(b, room.k, tokens * 16, piece);
            mma(kk[tokens][0], k, b[0], b[1]);
            mma(kk[tokens][1], k, b[2], b[3]);
            mma(qk[tokens][0], q, b[0], b[1]);
            mma(qk[tokens][1], q, b[2], b[3]);
        }
    }
    // The outputs take the place of q and k.
    __syncthreads();
#pragma unroll
    for (int tokens = 0; tokens < kChunkTiles; ++tokens) {
        if (tokens > warp) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const int row = warp * 16 + lane / 4 + below * 8, column = tokens * 16 + half * 8 + lane % 4 * 2;
                float a[2], p[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int earlier = column + i;
                    const float left = earlier <= row ? __expf(room.log_g[row] - room.log_g[earlier]) : 0.0f;
                    a[i] = earlier < row ? kk[tokens][half][below * 2 + i] * left * room.rate[row] : 0.0f;
                    p[i] = qk[tokens][half][below * 2 + i] * left;
                }
                *reinterpret_cast<float2*>(&room.a[row][column]) = make_float2(a[0], a[1]);
                const Parts parts = in_parts(p[0], p[1]);
                *reinterpret_cast<uint32_t*>(&room.out[1][0][row][column]) = parts.high;
                *reinterpret_cast<uint32_t*>(&room.out[1][1][row][column]) = parts.low;
            }
        }
    }
    __syncthreads();
    // What is above in later columns is not read.
    if (warp == 0) invert_column<0>(room.a, thread, rate, room.out[0][0], room.out[0][1]);
    if (warp == 1) invert_column<kWarp>(room.a, thread, rate, room.out[0][0], room.out[0][1]);
    __syncthreads();
    constexpr int kRowPieces = kTriangles / kVec;
    for (int i = thread; i < len * kRowPieces; i += kTriangleThreads) {
        const int row = i / kRowPieces, part = i % kRowPieces / (kChunk / kVec), piece = i % (kChunk / kVec);
        if (piece / 2 > row / 16) continue;
        store8(of.triangles + of.at(first + row, head) * kTriangles + part * kChunk + piece * kVec,
               load8(&room.out[part / 2][part % 2][row][piece * kVec]));
    }
}

#endif
