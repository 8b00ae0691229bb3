// Gated DeltaNet's rule for runs of prompts, in chunks on tensor cores (sm_90a): see `delta_chunk.cuh`.
//
// A block goes through all chunks of a run, for 64 value columns of a head, with three warp groups. The first copies chunks ahead. The
// second keeps the state in registers, transposed (columns by keys), as are its other operands (columns by tokens): so the results of
// one product are the left operand of the next without leaving registers. The third computes the outputs from the state
// and U, which the second hands over in shared memory.

#include "delta_chunk.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace {

constexpr int kColumns = 64;                 // of v, a panel
constexpr int kGroupWarps = kWarpGroup / kWarp;
constexpr int kPanel = kChunk * 64;          // elements: 64 of each token
constexpr int kRowPieces = 64 / kVec;        // of a row of a panel
constexpr int kStages = 2;
constexpr int kThreads = 3 * kWarpGroup;
// Registers for each thread of a group where an equal share of a multiprocessor's 65536 is too few: set by `setmaxnreg`.
constexpr int kCopyRegisters = 56, kStateRegisters = 232, kOutputRegisters = 216;

// Tokens in shared memory, with the block's columns of v. Panels are swizzled.
template <int kKey>
struct __align__(1024) Stage {
    bf16 q[kKey / 64 * kPanel];
    bf16 k[kKey / 64 * kPanel];
    bf16 triangles[4][kPanel];  // T and the triangle of Q K', each in high and low parts; zeros above the diagonal
    bf16 v[kPanel];             // outputs take its place
    float2 gates[kChunk];
};

// What a warp of the second group hands to the one with the same 16 columns of the third.
template <int kKey>
struct Handover {
    uint4 state[kKey / 16][2][kWarp];
    uint4 u[kChunkTiles][2][kWarp];
};

template <int kKey>
struct Room {
    Stage<kKey> stages[kStages];
    Handover<kKey> handover[kGroupWarps];
    uint64_t full[kStages];
    uint64_t empty[kStages];

    // Before any other access, by the whole block.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(full + i, kWarpGroup);
                barrier_init(empty + i, 2 * kGroupWarps);
            }
        }
        for (int i = threadIdx.x; i < kStages * 4 * kChunk * kRowPieces; i += kThreads) {
            const int row = i / kRowPieces % kChunk, piece = i % kRowPieces;
            if (piece / 2 <= row / 16) continue;
            bf16* const panel = stages[i / (4 * kChunk * kRowPieces)].triangles[i / (kChunk * kRowPieces) % 4];
            *reinterpret_cast<uint4*>(swizzled(panel, row, piece)) = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }

    // The stage of the `n`th chunk, once it is there.
    __device__ __forceinline__ Stage<kKey>& arrived(int n) {
        barrier_wait(full + n % kStages, n / kStages & 1);
        fence_for_products();
        return stages[n % kStages];
    }

    // This warp is done with it.
    __device__ __forceinline__ void release(int n) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) barrier_arrive(empty + n % kStages);
    }
};

// Accumulators of 64 tokens by 16 columns in a warp: a thread has two tokens of each eight, in two columns.
using OfTokens = float[kChunk / 8][4];

// The token of a result, and which of the two columns.
__device__ __forceinline__ int token_of(int tile, int i) { return tile * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2; }

// Where this lane's row of four matrices begins: 16 tokens from tile `tile` on, of the 16 columns of this warp.
__device__ __forceinline__ bf16* corner(bf16* panel, int tile) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpGroup / kWarp;
    return swizzled(panel, tile * 8 + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2);
}

// sums (+)= a k', where k are 16 elements of keys of a panel.
__device__ __forceinline__ void add_keys(OfTokens& sums, const LeftParts& a, const bf16* k, int add) {
    Wgmma<kChunk>::rows(sums, a.high, rows_operand(k), add);
    Wgmma<kChunk>::rows(sums, a.low, rows_operand(k), 1);
}

// sums (+)= a t', where t are 16 columns of a triangle, but for the product of the low parts.
__device__ __forceinline__ void add_triangle(OfTokens& sums, const LeftParts& a, const bf16* high, const bf16* low, int add) {
    Wgmma<kChunk>::rows(sums, a.high, rows_operand(high), add);
    Wgmma<kChunk>::rows(sums, a.low, rows_operand(high), 1);
    Wgmma<kChunk>::rows(sums, a.high, rows_operand(low), 1);
}

// Begins to copy 8 bytes to shared memory, or zeroes them.
__device__ __forceinline__ void copy_async_8(void* to, const void* from, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(wanted ? 8 : 0) : "memory");
}

__device__ __forceinline__ void wait_all_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copies of the first group.
template <int kKey>
struct Copies {
    static constexpr int kKeyPieces = kKey / kVec, kKeyRows = kWarpGroup / kKeyPieces;  // of a row, and rows at a time
    static constexpr int kPanelRows = kWarpGroup / kRowPieces;
    static_assert(kPanelRows == 16, "a tile at a time");

    const Chunked& of;
    const StateRun& run;
    int head;
    int first_column;

    // Begins to copy the chunk that begins with a token.
    __device__ __forceinline__ void begin(Stage<kKey>& stage, int token) const {
        const Layout& layout = of.layout;
        const int thread = threadIdx.x;
        const int len = chunk_len(run, token), first = run.first_row + token;
        {
            const int piece = thread % kKeyPieces, row = thread / kKeyPieces;
            const bool there = piece * kVec < layout.key_dim;
            const int64_t stride = layout.channels();
            const bf16* from = of.keys(first + min(row, len - 1), head) + (there ? piece * kVec : 0);
            const int panel = piece / kRowPieces * kPanel;
#pragma unroll
            for (int next = 0; next < kChunk; next += kKeyRows) {
                const bool wanted = there && next + row < len;
                bf16* const to = swizzled(stage.q + panel, next + row, piece % kRowPieces);
                copy_async(to, from, wanted);
                copy_async(to + (stage.k - stage.q), from + layout.keys(), wanted);
                if (next + kKeyRows + row < len) from += kKeyRows * stride;
            }
        }
        {
            const int piece = thread % kRowPieces, row = thread / kRowPieces;
            const int64_t stride = static_cast<int64_t>(layout.value_heads) * kTriangles;
            const bf16* from = of.triangles + of.at(first + min(row, len - 1), head) * kTriangles + piece * kVec;
#pragma unroll
            for (int tile = 0; tile < kChunkTiles; ++tile) {
                const bool wanted = tile * 16 + row < len;
                if (piece / 2 <= tile) {
                    bf16* const to = swizzled(stage.triangles[0], tile * 16 + row, piece);
#pragma unroll
                    for (int part = 0; part < 4; ++part) copy_async(to + part * kPanel, from + part * kChunk, wanted);
                }
                if (tile * 16 + 16 + row < len) from += 16 * stride;
            }
        }
        {
            const int piece = thread % kRowPieces, row = thread / kRowPieces;
            const bool there = first_column + piece * kVec < layout.value_dim;
            const bf16* from = of.values(first + min(row, len - 1), head) + (there ? first_column + piece * kVec : 0);
#pragma unroll
            for (int next = 0; next < kChunk; next += kPanelRows) {
                copy_async(swizzled(stage.v, next + row, piece), from, there && next + row < len);
                if (next + kPanelRows + row < len) from += kPanelRows * static_cast<int64_t>(layout.channels());
            }
        }
        if (thread < kChunk) {
            const bool there = thread < len;
            copy_async_8(&stage.gates[thread], of.gates + of.at(first + (there ? thread : 0), head), there);
        }
    }

    __device__ __forceinline__ void all(Room<kKey>& room) const {
        for (int token = 0, n = 0; token < run.len; token += chunk_len(run, token), ++n) {
            const int at = n % kStages;
            if (n >= kStages) barrier_wait(room.empty + at, (n / kStages - 1) & 1);
            __syncwarp();
            begin(room.stages[at], token);
            barrier_arrive_after_copies(room.full + at);
        }
        wait_all_async();
    }
};

__device__ __forceinline__ void arrive(int id) {
    __threadfence_block();
    named_arrive<64>(id);
}

__device__ __forceinline__ void wait_for(int id) { named_sync<64>(id); }

// One lane's part in the work of the second and of the third group.
template <int kKey>
struct Columns {
    static constexpr int kKeyTiles = kKey / 16;

    const Chunked& of;
    const StateRun& run;
    Room<kKey>& room;
    int head;
    int first_column;
    int warp;
    int lane;

    // Of this lane's two columns, whether there is one.
    __device__ __forceinline__ bool has(int below) const { return first_column + column(below) < of.layout.value_dim; }

    __device__ __forceinline__ int column(int below) const { return warp * 16 + lane / 4 + below * 8; }

    __device__ __forceinline__ float* state_at(int slot, int key, int below) const {
        const int64_t row = (static_cast<int64_t>(slot) * of.layout.value_heads + head) * of.layout.key_dim + key;
        return of.states + row * of.layout.value_dim + first_column + column(below);
    }

    // Barriers of a warp of the second group and its counterpart of the third.
    __device__ __forceinline__ int state_known() const { return 1 + warp; }
    __device__ __forceinline__ int u_known() const { return 1 + kGroupWarps + warp; }
    __device__ __forceinline__ int handed_over() const { return 1 + 2 * kGroupWarps + warp; }

    __device__ __forceinline__ void update_state() const {
        float state[2 * kKeyTiles][4];
#pragma unroll
        for (int tile = 0; tile < 2 * kKeyTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = token_of(tile, i);
                const bool wanted = run.before >= 0 && key < of.layout.key_dim && has(i / 2);
                state[tile][i] = wanted ? *state_at(run.before, key, i / 2) : 0.0f;
            }
        }
        Handover<kKey>& handover = room.handover[warp];
        for (int token = 0, n = 0; token < run.len; ++n) {
            const int len = chunk_len(run, token);
            Stage<kKey>& stage = room.arrived(n);
            if (n > 0) wait_for(handed_over());
            // What is new of v: first S'K'.
            OfTokens sums;
            {
                LeftParts left[kKeyTiles];
#pragma unroll
                for (int tile = 0; tile < kKeyTiles; ++tile) {
                    left[tile].take(state[2 * tile], state[2 * tile + 1]);
                    left[tile].store(handover.state[tile]);
                    wgmma_fence();
                    add_keys(sums, left[tile], stage.k + tile / 4 * kPanel + tile % 4 * 16, tile > 0);
                    wgmma_commit();
                }
                arrive(state_known());
                wgmma_wait<0>();
                touch(sums);
            }
            OfTokens u;
            {
                LeftParts left[kChunkTiles];
#pragma unroll
                for (int tile = 0; tile < kChunkTiles; ++tile) {
                    uint32_t v[4];
                    load_matrices_transposed(v, corner(stage.v, 2 * tile));
#pragma unroll
                    for (int pair = 0; pair < 4; ++pair) {
                        const float2 two = __bfloat1622float2(*reinterpret_cast<const bf162*>(&v[pair]));
                        float* const sum = &sums[2 * tile + pair / 2][pair % 2 * 2];
                        sum[0] = fmaf(-stage.gates[token_of(2 * tile + pair / 2, 0)].x, sum[0], two.x);
                        sum[1] = fmaf(-stage.gates[token_of(2 * tile + pair / 2, 1)].x, sum[1], two.y);
                    }
                    left[tile].take(sums[2 * tile], sums[2 * tile + 1]);
                    wgmma_fence();
                    add_triangle(u, left[tile], stage.triangles[0] + tile * 16, stage.triangles[1] + tile * 16, tile > 0);
                    wgmma_commit();
                }
                const float kept = stage.gates[len - 1].x;
#pragma unroll
                for (int tile = 0; tile < 2 * kKeyTiles; ++tile) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) state[tile][i] *= kept;
                }
                wgmma_wait<0>();
                touch(u);
            }
#pragma unroll
            for (int tile = 0; tile < kChunkTiles; ++tile) {
                LeftParts left;
                left.take(u[2 * tile], u[2 * tile + 1]);
                left.store(handover.u[tile]);
            }
            arrive(u_known());
            LeftParts left[kChunkTiles];
            touch(state);
#pragma unroll
            for (int tile = 0; tile < kChunk / 8; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) u[tile][i] *= stage.gates[token_of(tile, i)].y;
                if (tile % 2 == 0) continue;
                left[tile / 2].take(u[tile - 1], u[tile]);
                wgmma_fence();
                const uint64_t k = SwizzledPanel<64>::columns_operand(shared_address(stage.k + tile / 2 * 16 * 64), kPanel);
                Wgmma<kKey>::columns(state, left[tile / 2].high, k);
                Wgmma<kKey>::columns(state, left[tile / 2].low, k);
                wgmma_commit();
            }
            wgmma_wait<0>();
            touch(state);
            room.release(n);
            token += len;
        }
#pragma unroll
        for (int tile = 0; tile < 2 * kKeyTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = token_of(tile, i);
                if (key < of.layout.key_dim && has(i / 2)) *state_at(run.after, key, i / 2) = state[tile][i];
            }
        }
    }

    __device__ __forceinline__ void write_outputs() const {
        const Handover<kKey>& handover = room.handover[warp];
        const int piece = warp * 2 + lane % 2;  // of a row, in global memory
        const bool has_piece = first_column + piece * kVec < of.layout.value_dim;
        for (int token = 0, n = 0; token < run.len; ++n) {
            const int len = chunk_len(run, token);
            Stage<kKey>& stage = room.arrived(n);
            OfTokens sums;
            LeftParts left[kKeyTiles];
            wait_for(state_known());
#pragma unroll
            for (int tile = 0; tile < kKeyTiles; ++tile) left[tile].load(handover.state[tile]);
            wgmma_fence();
#pragma unroll
            for (int tile = 0; tile < kKeyTiles; ++tile) {
                add_keys(sums, left[tile], stage.q + tile / 4 * kPanel + tile % 4 * 16, tile > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            touch(sums);
#pragma unroll
            for (int tile = 0; tile < kChunk / 8; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][i] *= stage.gates[token_of(tile, i)].x;
            }
            wait_for(u_known());
#pragma unroll
            for (int tile = 0; tile < kChunkTiles; ++tile) left[tile].load(handover.u[tile]);
            if (token + len < run.len) arrive(handed_over());
            touch(sums);
            wgmma_fence();
#pragma unroll
            for (int tile = 0; tile < kChunkTiles; ++tile) {
                add_triangle(sums, left[tile], stage.triangles[2] + tile * 16, stage.triangles[3] + tile * 16, 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            touch(sums);
            // Through shared memory, into whole rows of 16 columns. Those of v were read before u was known.
#pragma unroll
            for (int tile = 0; tile < kChunk / 8; tile += 2) {
                const uint32_t packed[4] = {pack(sums[tile][0], sums[tile][1]), pack(sums[tile][2], sums[tile][3]),
                                            pack(sums[tile + 1][0], sums[tile + 1][1]), pack(sums[tile + 1][2], sums[tile + 1][3])};
                store_matrices_transposed(corner(stage.v, tile), packed);
            }
            __syncwarp();
            if (has_piece) {
                const int64_t stride = of.layout.channels();
                bf16* const out = of.values(run.first_row + token, head) + first_column + piece * kVec;
#pragma unroll
                for (int row = lane / 2; row < kChunk; row += kWarp / 2) {
                    if (row < len) store8(out + row * stride, load8(swizzled(stage.v, row, piece)));
                }
            }
            room.release(n);
            token += len;
        }
    }
};

template <int kKey>
__device__ __forceinline__ void go_through_chunks(const Chunked& of, const StateRun* runs) {
    constexpr bool kUnequal = kKey > 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& room = *reinterpret_cast<Room<kKey>*>(shared);
    const Layout& layout = of.layout;
    const int slices = (layout.value_dim + kColumns - 1) / kColumns, parts = layout.value_heads * slices;
    const int at_run = blockIdx.x / parts, part = blockIdx.x - at_run * parts;
    const int head = part / slices, first_column = (part - head * slices) * kColumns;
    const StateRun run = runs[at_run];
    room.init();
    const int warp = threadIdx.x % kWarpGroup / kWarp, lane = threadIdx.x % kWarp;
    const Columns<kKey> columns{of, run, room, head, first_column, warp, lane};
    // The compiler must see that it is the same for all lanes.
    const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpGroup, 0);
    pdl_wait();
    if (group == 0) {
        if constexpr (kUnequal) give_registers<kCopyRegisters>();
        Copies<kKey>{of, run, head, first_column}.all(room);
    } else if (group == 1) {
        if constexpr (kUnequal) take_registers<kStateRegisters>();
        columns.update_state();
    } else {
        if constexpr (kUnequal) take_registers<kOutputRegisters>();
        columns.write_outputs();
    }
}

}  // namespace

static_assert(sizeof(StateRun) == 32, "as in state_runs.rs");
static_assert(sizeof(TriangleRoom<64>) == 54912 && sizeof(TriangleRoom<128>) == 54912, "as in delta_chunks.rs");
static_assert(sizeof(Room<64>) == 150528 && sizeof(Room<128>) == 199680, "as in delta_chunks.rs");

// For key heads of up to so many elements. Runs are those in chunks.
//
// `delta_triangles`: gridDim.x is chunks times value_heads, blockDim.x 128; dynamic shared memory: a `TriangleRoom`.
// `delta_chunks`: gridDim.x is runs times value_heads times ceil(value_dim / 64), blockDim.x 384; dynamic shared memory: a `Room`.
#define CHUNK_KERNELS(KEY)                                                                                              \
    extern "C" __global__ void __launch_bounds__(kTriangleThreads)                                                      \
        delta_triangles_##KEY(bf16* mixed, float2* gates, bf16* triangles, const StateRun* runs,                        \
                              const StateTile* chunks, int key_heads, int value_heads, int key_dim, int value_dim,      \
                              int adjacent) {                                                                           \
        const Layout layout{key_heads, value_heads, key_dim, value_dim, 0, adjacent};                                   \
        make_triangles<KEY>({mixed, gates, triangles, nullptr, layout}, runs, chunks);                                  \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                              \
        delta_chunks_##KEY(bf16* mixed, float2* gates, bf16* triangles, float* states, const StateRun* runs,            \
                           int key_heads, int value_heads, int key_dim, int value_dim, int adjacent) {                  \
        const Layout layout{key_heads, value_heads, key_dim, value_dim, 0, adjacent};                                   \
        go_through_chunks<KEY>({mixed, gates, triangles, states, layout}, runs);                                        \
    }

CHUNK_KERNELS(64)
CHUNK_KERNELS(128)

#endif
