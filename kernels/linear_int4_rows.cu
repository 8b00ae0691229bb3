// Linear layers for up to 24 rows with weights of four bits (sm_90a): out[m, n] = x[m, k] . weight[n, k]^T (+ bias), with x in registers.
//
// k is cut into slabs of at most 32 windows (int4.cuh; 16 windows with more than 16 rows of x). A tile is 16 rows of weights (eight of the gate and
// the same eight of the up projection, if gated) with one slab; tiles lie slab after slab and are divided equally among the blocks. Sixteen
// warps multiply: each has up to two windows of the slab, holds their inputs in registers as right operands of mma.m16n8k16, and takes its
// part of one tile after the other. Further warps add up what the sixteen have, in the order of windows, and store it. One thread copies the
// tiles, four bulk copies each: it needs no kernel ahead, so the ring is full when x comes.
//
// Kernels for up to eight rows can make the norm of their inputs: they multiply x + delta by the norm's weight as they load it, and the sums of
// products by 1 / rms, of which each warp has the squares of its inputs.
//
// Where there are several slabs, their sums are exchanged through device memory (stream_k.cuh): the blocks with a tile of the last slab add
// them up, slab after slab, once they have multiplied all their tiles. They wait only for blocks with smaller indices.
//
// Codes are not widened. The bits of a code, in the low or the high half of a byte, are as bf16 the code times 2^-133 or 2^-129: bf16 has no
// gap between its subnormal numbers and the next 128. Inputs are multiplied by 2^64 or 2^60 accordingly, and all sums by 2^69 at the end;
// that is exact for sums of 2^-57 and more and inputs below 2^63. Of the sum of a group, its zero times the sum of its inputs is subtracted.
#include "int4.cuh"
#include "stream_k.cuh"
#include "tensor_map.cuh"

namespace {

// Registers of a thread: x takes 16 of them for each window and eight rows.
template <int kTokens, int kGroup>
constexpr int kRegistersOf = kTokens > 8 ? 96 : kGroup < 128 ? 88 : 80;

// The add and RMSNorm that x goes through first, in kernels made for it. k is whole windows then, in one slab, and there are as many blocks as
// windows or more.
struct Norm {
    const bf16* delta;    // [m, k], added to x
    const float* weight;  // [k]
    bf16* sum;            // [m, k]: x + delta, rounded; another place than x, which blocks read at any time
    float eps;
};

struct Problem {
    const bf16* x;           // [m, k]
    const uint8_t* weight;   // of [n, k], or if gated [2 n, k]: gate, up
    const uint32_t* groups;
    const bf16* bias;        // [n]; null for none
    void* out;               // [m] rows that begin `pitch` apart
    float4* sums;            // of tiles, if there are several slabs; all `kNone` between launches
    int m, n, k, pitch;      // n is a multiple of 8
    int mode, activation;
    int slabs;               // no more than blocks
    Norm norm;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Warps that multiply, and all threads with those of four more warps, as crates/kernels/src/cuda/linear/int4_rows.rs has them too: two add up
// sums, and a thread of the third one copies weights.
constexpr int kMultipliers = 16, kAddingWarps = 2;
constexpr int kMultiplierThreads = kMultipliers * kWarp, kThreads = kMultiplierThreads + 4 * kWarp;

// Two buffers for the sums of tiles, used in turn. A named barrier for each says that its sums are there.
constexpr int kPlaces = 2, kFull = 1;
constexpr int kPart = 32;           // inputs of a part of a window: two products
constexpr int kHalf = kWindow / 2;  // inputs that a warp prepares at once
// Of inputs that meet codes in the low half of a byte, and of the others.
constexpr float kLowFactor = 0x1p64f, kHighFactor = 0x1p60f;

// As in crates/kernels/src/cuda/linear/int4_rows.rs: what a block takes of a multiprocessor's shared memory leaves room for a small kernel's block.
constexpr int kMostSharedBytes = 224 << 10;
// Tiles on their way at once. Reads of x, though in L2, would queue behind more.
constexpr int kInFlight = 2;

template <int kTokens, int kGroup, bool kNorm>
struct Linear {
    static constexpr int kWindows = kTokens > 16 ? 1 : 2;  // that a warp has at most
    static constexpr int kEights = kTokens / 8, kGroups = kWindow / kGroup, kParts = kWindow / kPart;
    static_assert(!kNorm || kEights == 1 && kWindows <= kPlaces);
    // A stage has the windows of the slab of two eights of rows: their codes, then the words of their groups.
    static constexpr int kMostWindows = kMultipliers * kWindows;
    static constexpr int kEightBytes = kRowsTogether * kWindowBytes, kEightWords = kRowsTogether * kGroups * int(sizeof(uint32_t));
    static constexpr int kWordsAt = 2 * kMostWindows * kEightBytes, kStageBytes = kWordsAt + 2 * kMostWindows * kEightWords;
    // Warps that add up a tile, each for some groups of eight rows of x: both, or each for every other tile.
    static constexpr int kAdders = kEights % 2 == 0 ? kAddingWarps : 1, kAdderEights = kEights / kAdders;
    static constexpr int kSumThreads = kMultiplierThreads + kAdders * kWarp;

    static constexpr int kRegisters = kRegistersOf<kTokens, kGroup>;
    static constexpr int kAdderRegisters = kRegisters < 96 ? kRegisters - 32 : kEights == 3 ? 64 : 32;
    static constexpr int kMultiplierRegisters = kRegisters < 96 || kEights == 3 ? kRegisters + 8 : 112;
    static_assert(kMultiplierThreads * kMultiplierRegisters + 4 * kWarp * kAdderRegisters <= kThreads * kRegisters);

    // What a warp has beside the ring: sums, inputs and totals.
    static constexpr int kWarpBytes = kPlaces * kEights * kWarp * int(sizeof(float4)) + 8 * kHalf * int(sizeof(bf16)) +
                                      kWindows * kGroups * kEights * 4 * int(sizeof(float2));
    static constexpr int kStages = (kMostSharedBytes - kMultipliers * kWarpBytes - 128) / (kStageBytes + 2 * int(sizeof(uint64_t)));
    static_assert(kStages > kInFlight);

    // As `shared_bytes` in crates/kernels/src/cuda/linear/int4_rows.rs counts it too. One block runs on a multiprocessor.
    struct __align__(128) Shared {
        uint8_t ring[kStages][kStageBytes];
        float4 sums[kPlaces][kMultipliers][kEights * kWarp];        // as products leave them
        bf16 inputs[kMultipliers][8 * kHalf];                       // on their way to registers
        float2 totals[kMultipliers][kWindows][kGroups][kEights][4];  // of groups of inputs, of two neighbouring rows of x
        uint64_t added[kPlaces];                                    // sums have been added up
        uint64_t full[kStages], empty[kStages];
    };
    static_assert(sizeof(Shared) > 114 << 10 && sizeof(Shared) <= kMostSharedBytes);
    using Inputs = uint32_t[kWindows][kParts][kEights][4];

    const Problem& p;
    Shared& shared;
    Outputs outputs;
    int eights;       // of rows of weights, or if gated of rows of the gate
    int tiles;        // of a slab
    int slab;         // of this block
    int first, last;  // tiles of this block

    __device__ __forceinline__ Linear(const Problem& p, Shared& shared)
        : p(p), shared(shared), outputs{p.bias, p.out, p.m, p.n, p.pitch, p.mode, p.activation} {
        eights = p.n / kRowsTogether;
        tiles = outputs.gated() ? eights : (eights + 1) / 2;
        // Read anew, as registers do not suffice to keep what follows from it.
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        const int blocks = gridDim.x;
        slab = block * p.slabs / blocks;
        const auto first_block = [&](int slab) { return (slab * blocks + p.slabs - 1) / p.slabs; };
        const int of_slab = first_block(slab + 1) - first_block(slab), at = block - first_block(slab);
        first = tiles * at / of_slab, last = tiles * (at + 1) / of_slab;
    }

    // Where a warp keeps the norm's weights of a window until it has its inputs: pairs of them, times the factors of inputs, rounded, and what
    // rounding took away. No sums are there yet.
    __device__ __forceinline__ uint2* norm_weights(int window) const {
        return reinterpret_cast<uint2*>(shared.sums[window][threadIdx.x / kWarp]);
    }
    // Where a warp leaves the squares of its inputs, added up for each row, once inputs no longer pass through.
    __device__ __forceinline__ float* squares_of(int warp) const { return reinterpret_cast<float*>(shared.inputs[warp]); }

    __device__ __forceinline__ int windows() const { return (p.k + kWindow - 1) / kWindow; }  // of a row
    // The first window of a slab.
    __device__ __forceinline__ int begin(int slab) const { return windows() * slab / p.slabs; }
    __device__ __forceinline__ int first_output(int tile) const { return tile * (outputs.gated() ? 8 : 16); }
    // This lane's sums of a tile of a slab, in the exchange; those of further rows of x follow `kWarp` apart.
    __device__ __forceinline__ float4* exchanged(int slab, int tile) const {
        return p.sums + size_t(slab * tiles + tile) * (kEights * kWarp) + threadIdx.x % kWarp;
    }
    // Stores the sums of `kCount` groups of eight rows of x, from `first_eight` on.
    template <int kCount>
    __device__ __forceinline__ void store(int tile, const float (&acc)[kCount][4], int first_eight) const {
        outputs.store_from(first_output(tile), acc, [](int) { return 0x1p69f; }, first_eight);
    }

    __device__ __forceinline__ static void run(const Problem& p, Shared& shared) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kPlaces; ++i) barrier_init(shared.added + i, kAdders);
            for (int i = 0; i < kStages; ++i) {
                barrier_init(shared.full + i, 1);
                barrier_init(shared.empty + i, kMultipliers);
            }
            fence_for_products();
        }
        __syncthreads();
        pdl_launch();
        // The compiler must see that it is the same for all lanes.
        const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
        if (warp < kMultipliers) {
            take_registers<kMultiplierRegisters>();
            Linear(p, shared).multiply();
            if (!kNorm && p.slabs > 1) Linear(p, shared).add_slabs();
        } else {
            give_registers<kAdderRegisters>();
            if (warp < kMultipliers + kAddingWarps) {
                pdl_wait();
                Linear(p, shared).add_parts(warp - kMultipliers);
            } else if (threadIdx.x == (kMultipliers + kAddingWarps) * kWarp) {
                Linear(p, shared).copy_tiles();
            }
        }
    }

    // Copies this block's tiles, by one thread.
    __device__ __forceinline__ void copy_tiles() const {
        const uint64_t policy = read_once_policy();
        const int from = begin(slab), count = begin(slab + 1) - from;
        const int code_bytes = count * kEightBytes, word_bytes = count * kEightWords;
        const auto* const words = reinterpret_cast<const uint8_t*>(p.groups);
        int place = 0, phase = 0, landed = 0, landed_phase = 0;
        for (int tile = first; tile < last; ++tile) {
            barrier_wait(shared.empty + place, phase ^ 1);
            if (tile - first >= kInFlight) {
                barrier_wait(shared.full + landed, landed_phase);
                if (++landed == kStages) landed = 0, landed_phase ^= 1;
            }
            const int low = outputs.gated() ? tile : 2 * tile;
            // Where there is no second eight, the first one stands for it, and is not stored.
            const int high = outputs.gated() ? low + eights : min(low + 1, eights - 1);
            const size_t at[2] = {size_t(low) * windows() + from, size_t(high) * windows() + from};
            uint64_t* const full = shared.full + place;
            const uint32_t to = shared_address(shared.ring[place]);
            barrier_expect_bytes(full, 2 * (code_bytes + word_bytes));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                copy_bulk(to + i * (kMostWindows * kEightBytes), p.weight + at[i] * kEightBytes, code_bytes, full, policy);
                copy_bulk(to + kWordsAt + i * (kMostWindows * kEightWords), words + at[i] * kEightWords, word_bytes, full, policy);
            }
            if (++place == kStages) place = 0, phase ^= 1;
        }
    }

    // Adds up the warps' sums of tiles: of all, or of those that use this warp's buffer.
    __device__ __forceinline__ void add_parts(int adder) const {
        constexpr int kStep = kPlaces / kAdders;
        const int parts = min(begin(slab + 1) - begin(slab), kMultipliers), first_eight = kAdders == 1 ? 0 : adder * kAdderEights;
        float scales[2] = {};
        for (int i = kAdders == 1 ? adder : 0; first + i < last; i += kStep) {
            const int place = i % kPlaces, tile = first + i;
            const float4* const from = &shared.sums[place][0][first_eight * kWarp + threadIdx.x % kWarp];
            float acc[kAdderEights][4] = {};
            named_sync<kSumThreads>(kFull + place);
            if constexpr (kNorm) {
                if (i == adder) load_scales(scales, parts);
            }
#pragma unroll 2
            for (int part = 0; part < parts; ++part) {
#pragma unroll
                for (int j = 0; j < kAdderEights; ++j) add(acc[j], from[part * (kEights * kWarp) + j * kWarp]);
            }
            __syncwarp();
            if (threadIdx.x % kWarp == 0) barrier_arrive(shared.added + place);
            if constexpr (kNorm) {
#pragma unroll
                for (int v = 0; v < 4; ++v) acc[0][v] *= scales[v % 2];
            }
            if (kNorm || p.slabs == 1) {
                store(tile, acc, first_eight);
            } else {
                leave_sums<kWarp>(exchanged(slab, tile) + first_eight * kWarp, acc);
            }
        }
    }

    // 1 / rms of this lane's two rows of x, once all warps have left their squares.
    __device__ __forceinline__ void load_scales(float (&scales)[2], int parts) const {
        float2 sums = {};
        for (int part = 0; part < parts; ++part) {
            const float2 of_part = reinterpret_cast<const float2*>(squares_of(part))[threadIdx.x % 4];
            sums.x += of_part.x, sums.y += of_part.y;
        }
        scales[0] = rsqrtf(sums.x / float(p.k) + p.norm.eps), scales[1] = rsqrtf(sums.y / float(p.k) + p.norm.eps);
    }

    // Adds up the slabs' sums of this block's tiles, if they are of the last slab.
    __device__ __forceinline__ void add_slabs() const {
        if (slab != p.slabs - 1) return;
        constexpr int kAtOnce = 8 / kEights;  // slabs
        for (int tile = first + int(threadIdx.x) / kWarp; tile < last; tile += kMultipliers) {
            float acc[kEights][4] = {};
            for (int from = 0; from < p.slabs; from += kAtOnce) {
                add_sums<kWarp, kAtOnce>(acc, min(p.slabs - from, kAtOnce), [&](int i) { return exchanged(from + i, tile); });
            }
            store(tile, acc, 0);
        }
    }

    __device__ __forceinline__ void multiply() const {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
        // This warp's windows are `own` and so many, `kMultipliers` apart.
        const int own = begin(slab) + warp, count = (begin(slab + 1) - own + kMultipliers - 1) / kMultipliers;
        if constexpr (kNorm) load_norm_weights(own, count);
        pdl_wait();
        Inputs x;
        load_inputs(x, own, count);
        const uint32_t codes_at = shared_address(shared.ring) + warp * kEightBytes + lane * 16;
        const uint32_t words_at = shared_address(shared.ring) + kWordsAt + warp * kEightWords + lane / 4 * (kGroups * 4);
        const uint32_t totals_at = shared_address(&shared.totals[warp][0][0][0][lane % 4]);
        int stage = 0, phase = 0, place = 0, parity = 1;
        for (int tile = first; tile < last; ++tile) {
            barrier_wait(shared.full + stage, phase);
            __syncwarp();
            float acc[kEights][4] = {};
#pragma unroll
            for (int i = 0; i < kWindows; ++i) {
                if (i >= count) continue;
                const uint32_t from = stage * kStageBytes;
                add_window(acc, x[i], codes_at + from + i * (kMultipliers * kEightBytes), words_at + from + i * (kMultipliers * kEightWords),
                           totals_at + i * uint32_t(sizeof(shared.totals[0][0])));
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.empty + stage);
            if (++stage == kStages) stage = 0, phase ^= 1;
            barrier_wait(shared.added + place, parity);
            __syncwarp();
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
                shared.sums[place][warp][j * kWarp + lane] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
            }
            named_arrive<kSumThreads>(kFull + place);
            parity ^= place, place ^= 1;
        }
    }

    // Before the wait for the kernel ahead, as these never change.
    __device__ __forceinline__ void load_norm_weights(int own, int count) const {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < kWindows; ++i) {
            if (i >= count) continue;
            const auto* const from = reinterpret_cast<const float2*>(p.norm.weight + (own + i * kMultipliers) * kWindow);
#pragma unroll
            for (int pair = lane; pair < kWindow / 2; pair += kWarp) {
                const float2 weight = from[pair];
                const float factor = pair / 4 % 2 == 0 ? kLowFactor : kHighFactor, low = weight.x * factor, high = weight.y * factor;
                const bf162 rounded = __floats2bfloat162_rn(low, high);
                const float2 wide = __bfloat1622float2(rounded);
                norm_weights(i)[pair] = make_uint2(reinterpret_cast<const uint32_t&>(rounded), pack(low - wide.x, high - wide.y));
            }
        }
    }

    // Loads this warp's windows of x as operands, and adds up their groups. What is past the last row, input or window becomes zeros.
    __device__ __forceinline__ void load_inputs(Inputs& x, int own, int count) const {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = lane / 8, piece = lane % 8;
        const uint32_t to = shared_address(shared.inputs[warp]);
        constexpr int kUnits = kWindows * 2;
        // All loads are in flight at once.
        uint4 raw[kUnits][kEights][2], delta[kUnits][kEights][2];
        float totals[kEights][4], squares[4] = {};
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int input = (own + unit / 2 * kMultipliers) * kWindow + unit % 2 * kHalf + piece * 8;
            const bool is_there = unit / 2 < count && input < p.k;
#pragma unroll
            for (int j = 0; j < kEights * 2; ++j) {
                const int token = j * 4 + row, at = is_there ? token * p.k + input : 0;
                raw[unit][j / 2][j % 2] = load16_or_zeros(p.x + at, is_there && token < p.m);
                if constexpr (kNorm) delta[unit][j / 2][j % 2] = load16_or_zeros(p.norm.delta + at, is_there && token < p.m);
            }
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int window = unit / 2, part = unit % 2 * 2;
            if constexpr (kNorm) {
                add_delta(raw[unit][0], delta[unit][0], own + window * kMultipliers, window < count, unit % 2 * kHalf + piece * 8);
            }
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
                uint32_t (&low)[4] = x[window][part][j], (&high)[4] = x[window][part + 1][j];
                transpose_inputs(low, high, raw[unit][j], to);
                if constexpr (kNorm) {
                    add_squares(squares, low), add_squares(squares, high);
                    const uint2* const weights = norm_weights(window) + part * (kPart / 2);
                    weigh(low, weights), weigh(high, weights + kPart / 2);
                } else {
                    scale(low, high);
                }
            }
            add_totals(totals, x[window], part, window);
            add_totals(totals, x[window], part + 1, window);
            // Also keeps the compiler from going ahead, for which registers do not suffice.
            __syncwarp();
        }
        // A lane has the products of the row `lane / 4` with two rows, of which one may be the same.
        if (kNorm && lane / 8 == lane % 4) squares_of(warp)[lane / 4] = lane / 4 % 2 == 0 ? squares[0] : squares[1];
    }

    // Adds what is to be added to half a window of x. One block stores the sums.
    __device__ __forceinline__ void add_delta(uint4 (&raw)[2], const uint4 (&delta)[2], int window, bool is_there, int from) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint4& v = raw[i];
            const uint4& d = delta[i];
            v = make_uint4(sum_of(v.x, d.x), sum_of(v.y, d.y), sum_of(v.z, d.z), sum_of(v.w, d.w));
            const int token = i * 4 + threadIdx.x % kWarp / 8;
            if (int(blockIdx.x) != window || !is_there || token >= p.m) continue;
            *reinterpret_cast<uint4*>(p.norm.sum + token * p.k + window * kWindow + from) = v;
        }
    }

    // Adds the products of eight rows of inputs with each other.
    __device__ __forceinline__ static void add_squares(float (&sums)[4], const uint32_t (&x)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t rows[4] = {x[2 * half], 0, x[2 * half + 1], 0};
            mma(sums, rows, x[2 * half], x[2 * half + 1]);
        }
    }

    // Multiplies inputs of a part by their weights, with one rounding, and by their factors.
    __device__ __forceinline__ static void weigh(uint32_t (&x)[4], const uint2* weights) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const uint2 weight = weights[pair * 4 + threadIdx.x % 4];
            const uint32_t rest = scaled(x[pair], weight.y);
            const bf162 product = __hfma2(reinterpret_cast<const bf162&>(x[pair]), reinterpret_cast<const bf162&>(weight.x),
                                          reinterpret_cast<const bf162&>(rest));
            x[pair] = reinterpret_cast<const uint32_t&>(product);
        }
    }

    __device__ __forceinline__ static void scale(uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const uint32_t factors = pair % 2 == 0 ? 0x5f805f80 : 0x5d805d80;
            low[pair] = scaled(low[pair], factors), high[pair] = scaled(high[pair], factors);
        }
    }

    // Adds the inputs of a part of a window to totals of its group, which it stores behind the last part. They are products with codes of one.
    __device__ __forceinline__ void add_totals(float (&totals)[kEights][4], const uint32_t (&x)[kParts][kEights][4], int part, int window) const {
        constexpr uint32_t kOnes[4] = {0x00010001, 0x00010001, 0x00100010, 0x00100010};
        constexpr int kOfGroup = kGroup / kPart;
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
            if (part % kOfGroup == 0) totals[j][0] = totals[j][1] = totals[j][2] = totals[j][3] = 0.0f;
            mma(totals[j], kOnes, x[part][j][0], x[part][j][1]);
            mma(totals[j], kOnes, x[part][j][2], x[part][j][3]);
            if (part % kOfGroup != kOfGroup - 1 || lane >= 4) continue;
            shared.totals[threadIdx.x / kWarp][window][part / kOfGroup][j][lane] = make_float2(totals[j][0], totals[j][1]);
        }
    }

    // Turns half a window of eight rows of x into operands of two parts, through shared memory.
    __device__ __forceinline__ static void transpose_inputs(uint32_t (&low)[4], uint32_t (&high)[4], const uint4 (&raw)[2], uint32_t memory) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            const int row = four * 4 + lane / 8;
            store_shared16(memory + row * (kHalf * 2) + (lane % 8 ^ row) * 16, raw[four]);
        }
        __syncwarp();
        load_matrices(low, memory + lane % 8 * (kHalf * 2) + (lane / 8 ^ lane % 8) * 16);
        load_matrices(high, memory + lane % 8 * (kHalf * 2) + ((4 + lane / 8) ^ lane % 8) * 16);
        __syncwarp();
    }

    // Eight inputs, once the kernel ahead has written them. The load stays ahead of copies that follow.
    __device__ __forceinline__ static uint4 load16_or_zeros(const bf16* from, bool wanted) {
        uint4 v;
        asm volatile(
            "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
            "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
            : "l"(from), "r"(int(wanted))
            : "memory");
        return v;
    }

    // Sums of two pairs of bf16.
    __device__ __forceinline__ static uint32_t sum_of(uint32_t a, uint32_t b) {
        const bf162 sum = __hadd2(reinterpret_cast<const bf162&>(a), reinterpret_cast<const bf162&>(b));
        return reinterpret_cast<const uint32_t&>(sum);
    }

    // Products of two pairs of bf16.
    __device__ __forceinline__ static uint32_t scaled(uint32_t pair, uint32_t factors) {
        const bf162 product = __hmul2(reinterpret_cast<const bf162&>(pair), reinterpret_cast<const bf162&>(factors));
        return reinterpret_cast<const uint32_t&>(product);
    }

    // The operand of the low or high codes of the bytes 0 and 2 of words of two rows.
    __device__ __forceinline__ static void multiply_codes(float (&sums)[kEights][4], uint32_t low, uint32_t high,
                                                          const uint32_t (&x)[kEights][4], int first) {
        const uint32_t codes[4] = {low & 0x000f000f, high & 0x000f000f, low & 0x00f000f0, high & 0x00f000f0};
#pragma unroll
        for (int j = 0; j < kEights; ++j) mma(sums[j], codes, x[j][first], x[j][first + 1]);
    }

    // Adds the products of a window.
    __device__ __forceinline__ static void add_window(float (&acc)[kEights][4], const uint32_t (&x)[kParts][kEights][4], uint32_t codes_at,
                                                      uint32_t words_at, uint32_t totals_at) {
        uint32_t codes[2][kParts];
        load_shared_words(codes[0], codes_at);
        load_shared_words(codes[1], codes_at + kMostWindows * kEightBytes);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const uint32_t word = words_at + group * 4, words[2] = {load_shared4(word), load_shared4(word + kMostWindows * kEightWords)};
            // With few products two accumulators each, which halves the chain of products that wait for each other.
            constexpr int kSums = kEights == 1 ? 2 : 1;
            float sums[kSums][kEights][4] = {};
#pragma unroll
            for (int i = 0; i < kGroup / kPart; ++i) {
                const int part = group * (kGroup / kPart) + i;
                multiply_codes(sums[0], codes[0][part], codes[1][part], x[part], 0);
                multiply_codes(sums[kSums - 1], codes[0][part] >> 8, codes[1][part] >> 8, x[part], 2);
            }
            const float scales[2] = {group_scale(words[0]), group_scale(words[1])};
            const float zeros[2] = {negative_zero(words[0]), negative_zero(words[1])};
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
                const uint2 pair = load_shared8(totals_at + (group * kEights + j) * uint32_t(4 * sizeof(float2)));
                const float totals[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const float sum = kSums == 1 ? sums[0][j][v] : sums[0][j][v] + sums[kSums - 1][j][v];
                    acc[j][v] = fmaf(fmaf(zeros[v / 2], totals[v % 2], sum), scales[v / 2], acc[j][v]);
                }
            }
            // Keeps the compiler from computing all groups at once, for which registers do not suffice.
            if constexpr (kGroups > 1) __syncwarp();
        }
    }

    // What a group subtracts from its codes, times -1.
    __device__ __forceinline__ static float negative_zero(uint32_t group) {
        constexpr float kTwoTo23 = 8388608.0f;  // the last bits of floats from it on are whole numbers
        return kTwoTo23 - __uint_as_float(replace_bits<kZeroMask, 0x4b000000>(group));
    }
};

template <int kTokens, int kGroup, bool kNorm>
__device__ __forceinline__ void run(const Problem& p) {
    using L = Linear<kTokens, kGroup, kNorm>;
    extern __shared__ __align__(128) uint8_t memory[];
    L::run(p, *reinterpret_cast<typename L::Shared*>(memory));
}

#else

template <int kTokens, int kGroup, bool kNorm>
__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

// One block per multiprocessor, or per tile of a slab if there are fewer.
#define LINEAR_INT4_ROWS(GROUP, TOKENS)                                                                                              \
    extern "C" __global__ void __maxnreg__((kRegistersOf<TOKENS, GROUP>))                                                            \
        linear_int4_rows_##GROUP##_##TOKENS(const bf16* x, const uint8_t* weight, const uint32_t* groups, const bf16* bias,          \
                                            void* out, float4* sums, int m, int n, int k, int pitch, int mode, int activation,       \
                                            int slabs) {                                                                             \
        run<TOKENS, GROUP, false>({x, weight, groups, bias, out, sums, m, n, k, pitch, mode, activation, slabs, {}});                \
    }

LINEAR_INT4_ROWS(32, 8)
LINEAR_INT4_ROWS(64, 8)
LINEAR_INT4_ROWS(128, 8)
LINEAR_INT4_ROWS(32, 16)
LINEAR_INT4_ROWS(64, 16)
LINEAR_INT4_ROWS(128, 16)
// With groups of 32, registers do not suffice for more rows.
LINEAR_INT4_ROWS(64, 24)
LINEAR_INT4_ROWS(128, 24)

// With the norm; one slab.
#define LINEAR_INT4_ROWS_NORM(GROUP)                                                                                                 \
    extern "C" __global__ void __maxnreg__((kRegistersOf<8, GROUP>))                                                                 \
        linear_int4_rows_norm_##GROUP(const bf16* x, const uint8_t* weight, const uint32_t* groups, const bf16* bias, void* out,     \
                                      float4* sums, int m, int n, int k, int pitch, int mode, int activation, int slabs,             \
                                      const bf16* delta, const float* norm_weight, bf16* sum, float eps) {                           \
        run<8, GROUP, true>(                                                                                                         \
            {x, weight, groups, bias, out, sums, m, n, k, pitch, mode, activation, slabs, {delta, norm_weight, sum, eps}});          \
    }

LINEAR_INT4_ROWS_NORM(32)
LINEAR_INT4_ROWS_NORM(64)
LINEAR_INT4_ROWS_NORM(128)
