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
// `delta_triangles` (`make_triangles` below) computes T and the lower triangle of Q K' of all chunks in parallel; `delta_chunks` goes
// through the chunks of a run with the state in registers. K, Q and V are bf16. Other operands are f32, each split into two bf16
// parts whose sum has 16 bits of mantissa; sums are f32.
#pragma once

#include "delta_conv.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kChunk = 64;                   // tokens
constexpr int kChunkTiles = kChunk / 16;     // of 16 tokens
constexpr int kTriangle = 2 * kChunk;        // elements of a row of a triangle: high parts, then low parts
constexpr int kTriangles = 2 * kTriangle;    // of a token and head: T, then the triangle of Q K'
constexpr float kLeastLog = -24.0f;          // the least logarithm of a decay: what it leaves is less than f32 rounds away

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

// The 16-byte piece `piece` of a row of kPieces pieces, swizzled so that a column of eight pieces has no bank conflicts.
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

// Two floats, each split into two bf16 parts whose sum is the float but for its last bits.
struct Parts {
    uint32_t high;
    uint32_t low;
};

__device__ __forceinline__ Parts in_parts(float x, float y) {
    const uint32_t high = pack(x, y);
    const float2 rounded = __bfloat1622float2(*reinterpret_cast<const bf162*>(&high));
    return {high, pack(x - rounded.x, y - rounded.y)};
}

// A left operand in two parts.
struct LeftParts {
    uint32_t high[4];
    uint32_t low[4];

    // From two neighbouring results.
    __device__ __forceinline__ void take(const float (&left)[4], const float (&right)[4]) {
        const float* const from[4] = {&left[0], &left[2], &right[0], &right[2]};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Parts parts = in_parts(from[i][0], from[i][1]);
            high[i] = parts.high;
            low[i] = parts.low;
        }
    }

    // Those of one lane; `at` is of a warp.
    __device__ __forceinline__ void store(uint4 (&at)[2][kWarp]) const {
        const int lane = threadIdx.x % kWarp;
        at[0][lane] = make_uint4(high[0], high[1], high[2], high[3]);
        at[1][lane] = make_uint4(low[0], low[1], low[2], low[3]);
    }

    __device__ __forceinline__ void load(const uint4 (&at)[2][kWarp]) {
        const int lane = threadIdx.x % kWarp;
        const uint4 h = at[0][lane], l = at[1][lane];
        high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
        low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
    }
};

// Four 8x8 matrices, as `load_matrices_transposed` loads them.
__device__ __forceinline__ void store_matrices_transposed(bf16* to, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
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

// A right operand of two products in two parts: their columns are 16 rows of A or of an inverse, 16 columns of which are summed.
struct RightParts {
    uint32_t high[4];
    uint32_t low[4];

    __device__ __forceinline__ RightParts(const float (&a)[kChunk][kRowOfA], int row, int column) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const from = &a[row + i / 2 * 8 + lane / 4][column + i % 2 * 8 + lane % 4 * 2];
            const float2 two = *reinterpret_cast<const float2*>(from);
            const Parts parts = in_parts(two.x, two.y);
            high[i] = parts.high;
            low[i] = parts.low;
        }
    }
};

// c += a b, but for the product of the low parts.
__device__ __forceinline__ void add_product(float (&c)[2][4], const LeftParts& a, const RightParts& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        mma(c[half], a.high, b.high[2 * half], b.high[2 * half + 1]);
        mma(c[half], a.low, b.high[2 * half], b.high[2 * half + 1]);
        mma(c[half], a.high, b.low[2 * half], b.low[2 * half + 1]);
    }
}

// The inverse of 1 + A of 16 tokens takes the place of A, by one warp: a lane has a column, in which each row follows from those before.
__device__ __forceinline__ void invert_tile(float (&a)[kChunk][kRowOfA], int first) {
    const int lane = threadIdx.x % kWarp, column = lane % 16;
    float t[16];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
        float sums[2] = {};
#pragma unroll
        for (int from = 0; from < row; ++from) sums[from % 2] = fmaf(a[first + row][first + from], t[from], sums[from % 2]);
        t[row] = (row == column ? 1.0f : 0.0f) - (sums[0] + sums[1]);
    }
    __syncwarp();
    if (lane >= 16) return;
#pragma unroll
    for (int row = 0; row < 16; ++row) a[first + row][first + column] = t[row];
}

// 16 columns of T, from the inverses of all tiles on the diagonal and A below them, by one warp: with tiles of 16 x 16,
// T_ij = -T_ii (A_ij T_jj + .. + A_i,i-1 T_i-1,j). Everything is transposed, so that results are left operands.
template <typename Room>
__device__ __forceinline__ void make_columns(Room& room, int column) {
    const int lane = threadIdx.x % kWarp, tile = column / 16;
    const auto store = [&](int row, const LeftParts& x) {
        const int at = row + lane % 8 + lane / 16 * 8, piece = column + lane / 8 % 2 * 8;
        store_matrices_transposed(&room.out[0][0][at][piece], {x.high[0], x.high[1], x.high[2], x.high[3]});
        store_matrices_transposed(&room.out[0][1][at][piece], {x.low[0], x.low[1], x.low[2], x.low[3]});
    };
    LeftParts columns[kChunkTiles];
#pragma unroll
    for (int row = 0; row < kChunkTiles; ++row) {
        if (row < tile) continue;
        float t[2][4]{};
        if (row == tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int of_column = column + lane / 4 + i % 4 / 2 * 8, of_row = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
                t[i / 4][i % 4] = room.a[of_row][of_column] * room.rate[of_column];
            }
        } else {
            float sum[2][4]{};
#pragma unroll
            for (int from = 0; from < row; ++from) {
                if (from >= tile) add_product(sum, columns[from], RightParts(room.a, row * 16, from * 16));
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = -sum[i / 4][i % 4];
            LeftParts left;
            left.take(sum[0], sum[1]);
            add_product(t, left, RightParts(room.a, row * 16, row * 16));
        }
        columns[row].take(t[0], t[1]);
        store(row * 16, columns[row]);
    }
}

// A block has a chunk, for one head of v.
template <int kKey>
__device__ __forceinline__ void make_triangles(const Chunked& of, const StateRun* runs, const StateTile* chunks) {
    constexpr int kPieces = kKey / kVec;
    extern __shared__ __align__(128) unsigned char shared[];
    TriangleRoom<kKey>& room = *reinterpret_cast<TriangleRoom<kKey>*>(shared);
    const Layout& layout = of.layout;
    const int index = blockIdx.x / layout.value_heads, head = blockIdx.x - index * layout.value_heads;
    const StateTile chunk = chunks[index];
    const StateRun run = runs[chunk.run];
    pdl_wait();
    const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
    const int len = chunk_len(run, chunk.first), first = run.first_row + chunk.first;

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
            log_g = logf(gate.x);
            if (log_g < kLeastLog) log_g = kLeastLog;  // not fmaxf, which loses a NaN
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
                    const float decay = earlier <= row ? __expf(room.log_g[row] - room.log_g[earlier]) : 0.0f;
                    a[i] = earlier < row ? kk[tokens][half][below * 2 + i] * decay * room.rate[row] : 0.0f;
                    p[i] = qk[tokens][half][below * 2 + i] * decay;
                }
                *reinterpret_cast<float2*>(&room.a[row][column]) = make_float2(a[0], a[1]);
                const Parts parts = in_parts(p[0], p[1]);
                *reinterpret_cast<uint32_t*>(&room.out[1][0][row][column]) = parts.high;
                *reinterpret_cast<uint32_t*>(&room.out[1][1][row][column]) = parts.low;
            }
        }
    }
    __syncthreads();
    invert_tile(room.a, warp * 16);
    __syncthreads();
    make_columns(room, warp * 16);
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
