// Linear layers for a few rows, out[m, n] = x[m, k] . weight[n, k]^T (+ bias), at the speed of reading the weights.
//
// A warp multiplies 16 output features with all rows by mma.m16n8k16: the weights are the 16-row operand, the rows of x
// the columns of the other. The order of k within a product is free as long as both operands agree, so a lane takes 8
// consecutive inputs where the instruction's layout would have it take 4 pairs: every access is 16 bytes wide.
//
// Each warp has a ring of stages in shared memory for its weights, so warps never wait for each other but for the sums.
// All stages are requested before the wait for the kernel ahead: weights never change, and the memory stays busy between
// kernels.
//
// The 8 warps of a block are `row_warps` groups of features times as many parts of k as that leaves. The blocks of a
// cluster are parts of k, too, so that each keeps its part of x in shared memory. Sums of parts meet in shared memory and
// are added in a fixed order, one block of features later: nobody waits for the slowest.
//
// x is bf16. Weights are bf16, or e4m3, four bits or GGUF's types with scales, which become bf16 in registers: few rows need no products
// of e4m3 values to be as fast as their weights are read, and x keeps its bits.
#include "linear.cuh"

// Sums of two neighbouring rows of weights, times the rows' factors if each has its own.
template <Values kValues>
__device__ __forceinline__ float2 scaled(const Problem& p, int row, float2 sums) {
    if constexpr (kValues == Values::kFp8) {
        const int last = p.gated() ? 2 * p.n - 1 : p.n - 1;
        sums.x *= p.scales.floats()[row];
        sums.y *= p.scales.floats()[min(row + 1, last)];
    }
    return sums;
}

// The words of a window's groups, of two rows of a stage.
template <Values kValues>
struct Groups {
    static constexpr int kWords = kWindow / kGroup<kValues>;
    uint32_t of[2][kWords];

    // Of rows `row` and `row + 8`.
    __device__ __forceinline__ Groups(const uint8_t* stage, int row, int window) {
        const auto* const words = reinterpret_cast<const uint32_t*>(stage + kTile * kRowBytes);
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            const uint32_t* const from = words + (row + second * 8) * (2 * kWords) + window * kWords;
            if constexpr (kWords == 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(from);
                of[second][0] = four.x, of[second][1] = four.y, of[second][2] = four.z, of[second][3] = four.w;
            } else if constexpr (kWords == 2) {
                const uint2 two = *reinterpret_cast<const uint2*>(from);
                of[second][0] = two.x, of[second][1] = two.y;
            } else {
                of[second][0] = *from;
            }
        }
    }
};

// A chunk of weights in four bits: codes less their zeros are exact, so that sums of a group are multiplied by its scale.
template <int Tiles, Values kValues, typename Piece, typename Leave, typename Inputs>
__device__ __forceinline__ void multiply_int4(float (&acc)[Tiles][4], const uint8_t* stage, int group, const Piece& piece,
                                              const Leave& leave_stage, const Inputs& inputs_at) {
    constexpr int kParts = kGroup<kValues> / 32;  // of a group
#pragma unroll
    for (int window = 0; window < 2; ++window) {
        const uint4 l = piece(window, 0), h = piece(window, 1);
        const Groups<kValues> groups(stage, group, window);
        if (window == 1) leave_stage();
        const uint32_t low[4] = {l.x, l.y, l.z, l.w}, high[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
        for (int first = 0; first < kWindowParts; first += kParts) {
            const uint32_t low_group = groups.of[0][first / kParts], high_group = groups.of[1][first / kParts];
            const uint32_t low_zeros = group_zeros(low_group), high_zeros = group_zeros(high_group);
            // Two sums, so that half as many products wait for each other.
            float sums[Tiles][4] = {}, others[Tiles][4] = {};
#pragma unroll
            for (int part = first; part < first + kParts; ++part) {
                const uint32_t even[4] = {widen_int4<0>(low[part], low_zeros), widen_int4<0>(high[part], high_zeros),
                                          widen_int4<1>(low[part], low_zeros), widen_int4<1>(high[part], high_zeros)};
                const uint32_t second[4] = {widen_int4<2>(low[part], low_zeros), widen_int4<2>(high[part], high_zeros),
                                            widen_int4<3>(low[part], low_zeros), widen_int4<3>(high[part], high_zeros)};
#pragma unroll
                for (int j = 0; j < Tiles; ++j) {
                    const uint4 v = inputs_at(j, window * 2 * kRowBytes + part / 2 * kRowBytes, part % 2 * (kRowBytes / 2));
                    mma(sums[j], even, v.x, v.y);
                    mma(Tiles == 1 ? others[j] : sums[j], second, v.z, v.w);
                }
            }
            const float low_scale = group_scale(low_group), high_scale = group_scale(high_group);
#pragma unroll
            for (int j = 0; j < Tiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float sum = Tiles == 1 ? sums[j][i] + others[j][i] : sums[j][i];
                    acc[j][i] = fmaf(sum, i < 2 ? low_scale : high_scale, acc[j][i]);
                }
            }
        }
    }
}

// A window of weights of a type of GGUF: of rows `group` and `group + 8` where it lies in shared memory, and its scales if these lie
// elsewhere. `place` is that of inputs. Levels are exact, so that sums of a group are multiplied by its scale; minima are by the sums of
// its inputs, which are products with ones.
template <int Tiles, Gguf kType, typename Leave, typename Place>
__device__ __forceinline__ void multiply_gguf(float (&acc)[Tiles][4], const uint8_t* const (&windows)[2], const float (&behind)[2],
                                              int quad, const Leave& leave_stage, const Place& place) {
    constexpr uint32_t kOnes[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll 1
    for (int step = 0; step < kSteps<kType>; ++step) {
        GgufGroups<kType> groups[2];
        GgufCodes<kType> codes[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) groups[row].load(windows[row], step, behind[row]);
#pragma unroll
        for (int row = 0; row < 2; ++row) codes[row].load(windows[row], quad, step);
        // Halves are read where they are needed, as registers are few.
        if (step + 1 == kSteps<kType> && !kHasHalves<kType>) leave_stage();
#pragma unroll
        for (int part = 0; part < kStepParts<kType>; ++part) {
            uint32_t low[4], high[4];
            codes[0].widen(part, low), codes[1].widen(part, high);
            const uint32_t even[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
            const int at = (step * kStepParts<kType> + part) / 2 * kRowBytes, swapped = part % 2 * (kRowBytes / 2);
            constexpr bool kTwoGroups = kGroupInputs<kType> == 16;
            const int group = kTwoGroups ? part * 2 : part;
#pragma unroll
            for (int j = 0; j < Tiles; ++j) {
                uint4 v;
                if constexpr (kTwoGroups) {
                    const uint2 a = *reinterpret_cast<const uint2*>(place(j, at, swapped));
                    const uint2 b = *reinterpret_cast<const uint2*>(place(j, at + 32, swapped));
                    v = make_uint4(a.x, a.y, b.x, b.y);
                } else {
                    v = *reinterpret_cast<const uint4*>(place(j, at, swapped));
                }
                if constexpr (kHasMin<kType>) {
                    float inputs[4] = {};
                    mma(inputs, kOnes, v.x, v.y);
                    mma(inputs, kOnes, v.z, v.w);
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[j][i] = fmaf(inputs[i], groups[i / 2].min(group), acc[j][i]);
                }
                // Two sums, so that half as many products wait for each other; with minima there are two anyway, and few registers.
                float sums[4] = {}, others[4] = {};
                mma(sums, even, v.x, v.y);
                mma(kHasMin<kType> ? sums : others, second, v.z, v.w);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float scale = groups[i / 2].scale(group);
                    if constexpr (kTwoGroups) {
                        acc[j][i] = fmaf(sums[i], scale, acc[j][i]);
                        acc[j][i] = fmaf(others[i], groups[i / 2].scale(group + 1), acc[j][i]);
                    } else {
                        acc[j][i] = fmaf(sums[i] + others[i], scale, acc[j][i]);
                    }
                }
            }
        }
    }
    if (kHasHalves<kType>) leave_stage();
}

// Bytes of shared memory for x, as `Cuts::input_bytes` in crates/kernels/src/cuda/linear/cuts.rs says. On Hopper there is always room for the
// most, which is then a constant of the kernels.
__device__ __forceinline__ int input_bytes(int launched) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return kInputBytes;
#else
    return launched;
#endif
}

// Up to 8 * Tiles rows, with `room` bytes of shared memory for them.
template <int Tiles, Values kValues, Activation kActivation>
__device__ __forceinline__ void run(const Problem& p, int room) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int group = lane / 4, quad = lane % 4;
    constexpr int kPieces = kStagePieces<kValues>, kDepth = kStages<kValues>, kBytes = kStageBytes<kValues>;
    constexpr int kChunk = kChunkBytes<kValues>;
    uint8_t* ring = shared + warp * kDepth * kBytes;
    uint8_t* inputs = shared + kRingBytes<kValues>;
    float* sums = reinterpret_cast<float*>(shared + kRingBytes<kValues> + room);

    pdl_launch();
    const int row_bytes = kIsGguf<kValues> ? p.scales.stride : p.k * int(sizeof(bf16)) / kWidening<kValues>;
    const int chunks = kIsGguf<kValues> ? (p.k + kGgufWindow - 1) / kGgufWindow : row_bytes / kRowBytes;
    const Cut cut(p, warp, row_bytes, chunks, kChunk, room);
    const int size = cluster_size();
    const int first_block = blockIdx.x / size, stride = gridDim.x / size;

    // What this lane requests next: a piece of every fourth row, so that 8 lanes read whole lines; of GGUF's windows, of every eighth, and
    // then those four on.
    int next_block = first_block, next_chunk = cut.begin + cut.part, next_stage = 0;
    constexpr int kAtOnce = kPiecesAtOnce<kValues>, kLane = kLaneRows<kValues>;
    const int fetch_row = lane / kAtOnce, fetch_piece = lane % kAtOnce;
    uint8_t* const fetch_to = ring + (kIsGguf<kValues> ? (fetch_row * kPieces + fetch_piece) * 16 : swizzled(fetch_row, fetch_piece));
    uint32_t pieces_from[kLane];  // 16 bytes each: half the registers of addresses
    // Weights in four bits: rows lie together in windows, of which a chunk has two. Of the words of groups, a lane copies the `kWords` of
    // one window of a row.
    constexpr int kWindowRows = 2 * kRowsTogether, kWords = kGroupBytes<kValues> / 8;
    static_assert(!kIsInt4<kValues> || kWarp == 2 * kTile);
    uint32_t words_from = 0;
    auto enter_block = [&] {
        if constexpr (kIsInt4<kValues>) {
            words_from = (cut.int4_row(p, next_block, lane / 2) + lane % 2 * kRowsTogether) * kWords;
        }
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
            const int row = fetch_row + i * kRowsAtOnce<kValues>;
            if constexpr (kIsInt4<kValues>) {
                constexpr int kOfWindow = kWindowBytes / 16;
                const uint32_t of_window = cut.int4_row(p, next_block, row) + fetch_piece / kOfWindow * kRowsTogether;
                pieces_from[i] = of_window * kOfWindow + fetch_piece % kOfWindow;
            } else {
                pieces_from[i] = cut.first_piece(p, next_block, row) + fetch_piece;
            }
        }
    };
    auto request = [&] {
        if (next_block < cut.blocks && next_chunk >= cut.end) {
            next_block += stride;
            next_chunk = cut.begin + cut.part;
            if (next_block < cut.blocks) enter_block();
        }
        if (next_block < cut.blocks && next_chunk < cut.end) {
            uint8_t* to = fetch_to + next_stage * kBytes;
#pragma unroll
            for (int i = 0; i < kLane; ++i) {
                constexpr int kChunkPieces = kIsInt4<kValues> ? kWindowRows * kWindowBytes / 16 : kPieces;
                const size_t piece = pieces_from[i] + next_chunk * kChunkPieces;
#pragma unroll
                for (int first = 0; first < kPieces; first += kAtOnce) {
                    if (first + kAtOnce > kPieces && first + fetch_piece >= kPieces) continue;
                    copy_async(to + (i * kRowsAtOnce<kValues> * kPieces + first) * 16, p.weight + (piece + first) * 16, true);
                }
            }
            if constexpr (kIsInt4<kValues>) {
                uint8_t* const words_to = ring + next_stage * kBytes + kTile * kRowBytes + lane * kWords * 4;
                const auto* const words = static_cast<const uint32_t*>(p.scales.of) + words_from + next_chunk * (kWindowRows * kWords);
                copy_async_of<kWords * 4>(words_to, words);
            }
            next_chunk += cut.parts;
        }
        next_stage = next_stage + 1 == kDepth ? 0 : next_stage + 1;
        commit_async();
    };
    if (next_block < cut.blocks) enter_block();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) request();

    const bool normalise = Tiles == 1 && p.norm.weight != nullptr;
    if (normalise && threadIdx.x * 32 < p.k) prefetch_line(p.norm.weight + threadIdx.x * 32);

    pdl_wait();
    // Phases of x: all in one, or a ring of buffers.
    const bool resident = cut.phase >= cut.end - cut.begin;
    const bool even = (cut.end - cut.begin) % cut.phase == 0;
    const int buffer = p.m * cut.phase * kChunk;
    int input_block = first_block, input_chunk = cut.begin, input_to = 0;
    auto request_inputs = [&] {
        if (input_block >= cut.blocks) return;
        copy_inputs<kValues>(inputs + input_to * buffer, p, cut, input_chunk);
        input_to = (input_to + 1) % kBuffers;
        input_chunk += cut.phase;
        if (input_chunk >= cut.end) input_chunk = cut.begin, input_block += stride;
    };
    const int rows = p.row_warps * kTile + kPad;
    const int buffer_floats = cut.parts * Tiles * 8 * rows;
    if (normalise) {
        const int low = cut.begin * kPiecesOfChunk<kValues>, high = cut.end * kPiecesOfChunk<kValues>;
        normalise_inputs(p, low, high, sums, [&](int row, int piece) {
            const int swapped = (piece - low) ^ input_swap<kValues>(row);
            return reinterpret_cast<bf16*>(inputs) + (row * cut.phase * kPiecesOfChunk<kValues> + swapped) * 8;
        });
    } else {
        request_inputs();
        if (!resident) {
            for (int i = 2; i < kBuffers; ++i) request_inputs();
        }
        wait_all_async();
        __syncthreads();
    }
    int odd = 0;
    bool fresh = true;

    // Where this lane's pieces of x begin; those of the other half of what is swapped have one other bit.
    int row[Tiles];
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
        // Rows past the end repeat the last one: a column of a product reaches no other. With weights in four bits, it is the address of a
        // row of one of four matrices.
        const int token = min(j * 8 + (kIsInt4<kValues> ? lane % 8 : group), p.m - 1);
        const int swapped = kIsInt4<kValues> ? (lane / 8 ^ input_swap<kValues>(token)) * 16
                                             : quad * kLaneInputs<kValues> + input_swap<kValues>(token) * 16;
        row[j] = token * cut.phase * kChunk + swapped;
    }

    int turn = 0, last_block = first_block;
    const auto add_sums = [&](int block) {
        add_up<Tiles * 8, kActivation, kTile>(p, cut.outputs, cut.parts, sums + (turn ^ 1) * buffer_floats, block, rows, threadIdx.x,
                                              kThreads, [&](int row, float2 sums) { return scaled<kValues>(p, row, sums); });
    };
    int stage = 0;
    for (int block = first_block; block < cut.blocks; block += stride) {
        float acc[Tiles][4] = {};
        for (int first = cut.begin; first < cut.end; first += cut.phase) {
            if (!resident) {
                // It was requested kBuffers - 1 phases ago, before that phase's first stage.
                if (!fresh) {
                    if (!even) {
                        wait_all_async();
                    } else if (cut.phase >= kEnough<kValues> * cut.parts) {
                        wait_async<kDepth - 1>();
                    } else {
                        wait_async<kBuffers - 2>();
                    }
                    __syncthreads();
                    odd = odd + 1 == kBuffers ? 0 : odd + 1;
                }
                fresh = false;
                request_inputs();
            }
            const int last = min(first + cut.phase, cut.end);
            for (int chunk = first + cut.part; chunk < last; chunk += cut.parts) {
                float scale = 1.0f;
                if constexpr (kValues == Values::kFp8Blocks) scale = cut.stage_scale(p, block, chunk);
                float behind[2];
                if constexpr (kIsGguf<kValues>) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint8_t* const of = p.weight + size_t(cut.row_at(p, block, group + i * 8)) * cut.row_bytes;
                        behind[i] = window_scale<kGguf<kValues>>(of, cut.chunks, chunk);
                    }
                }
                wait_async<kDepth - 1>();
                __syncwarp();
                const uint8_t* from = ring + stage * kBytes;
                // Of rows `group` and `group + 8` of the tile, a piece in each half of the chunk.
                const auto piece = [&](int half, int second) {
                    return *reinterpret_cast<const uint4*>(from + swizzled(group, quad + half * 4) + second * 8 * kRowBytes);
                };
                const auto leave_stage = [&] {
                    __syncwarp();
                    stage = stage + 1 == kDepth ? 0 : stage + 1;
                    request();
                };
                const int at = odd * buffer + (chunk - first) * kChunk;
                const auto place = [&](int j, int added, int swapped) { return inputs + ((row[j] + at + added) ^ swapped); };
                const auto inputs_at = [&](int j, int added, int swapped) {
                    if constexpr (kIsInt4<kValues>) {
                        uint32_t pairs[4];
                        load_matrices(pairs, reinterpret_cast<const bf16*>(place(j, added, swapped)));
                        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                    } else {
                        return *reinterpret_cast<const uint4*>(place(j, added, swapped));
                    }
                };
                if constexpr (kValues == Values::kBf16) {
                    const uint4 w[2][2] = {{piece(0, 0), piece(0, 1)}, {piece(1, 0), piece(1, 1)}};
                    leave_stage();
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 l = w[half][0], h = w[half][1];
                        const uint32_t even[4] = {l.x, h.x, l.y, h.y}, second[4] = {l.z, h.z, l.w, h.w};
#pragma unroll
                        for (int j = 0; j < Tiles; ++j) {
                            const uint4 v = inputs_at(j, 0, half * (kRowBytes / 2));
                            mma(acc[j], even, v.x, v.y);
                            mma(acc[j], second, v.z, v.w);
                        }
                    }
                } else if constexpr (kIsInt4<kValues>) {
                    multiply_int4<Tiles, kValues>(acc, from, group, piece, leave_stage, inputs_at);
                } else if constexpr (kIsGguf<kValues>) {
                    const uint8_t* const windows[2] = {from + group * kPieces * 16, from + (group + 8) * kPieces * 16};
                    multiply_gguf<Tiles, kGguf<kValues>>(acc, windows, behind, quad, leave_stage, place);
                } else {
                    float part[kValues == Values::kFp8Blocks ? Tiles : 1][4] = {};
                    // One tile's products in two sums, so that half as many wait for each other.
                    constexpr bool kTwoSums = Tiles == 1;
                    float second[4] = {};
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 l = piece(half, 0), h = piece(half, 1);
                        if (half == 1) leave_stage();
                        const uint32_t low[4] = {l.x, l.y, l.z, l.w}, high[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
                        for (int eight = 0; eight < 2; ++eight) {
                            uint32_t operand[2][4];
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                operand[i][0] = widen_e4m3<false>(low[eight * 2 + i]);
                                operand[i][1] = widen_e4m3<false>(high[eight * 2 + i]);
                                operand[i][2] = widen_e4m3<true>(low[eight * 2 + i]);
                                operand[i][3] = widen_e4m3<true>(high[eight * 2 + i]);
                            }
#pragma unroll
                            for (int j = 0; j < Tiles; ++j) {
                                const uint4 v = inputs_at(j, half * kRowBytes, eight * 16);
                                float(&to)[4] = kValues == Values::kFp8Blocks ? part[j] : acc[j];
                                mma(to, operand[0], v.x, v.y);
                                mma(kTwoSums ? second : to, operand[1], v.z, v.w);
                            }
                        }
                    }
                    if constexpr (kTwoSums) {
                        float(&to)[4] = kValues == Values::kFp8Blocks ? part[0] : acc[0];
#pragma unroll
                        for (int i = 0; i < 4; ++i) to[i] += second[i];
                    }
                    if constexpr (kValues == Values::kFp8Blocks) {
#pragma unroll
                        for (int j = 0; j < Tiles; ++j) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) acc[j][i] = fmaf(part[j][i], scale, acc[j][i]);
                        }
                    }
                }
            }
        }

        // The sums of the block before are added now, when the other blocks of the cluster have long written them.
        if (block != first_block) {
            cluster_wait();
            add_sums(block - stride);
        }
        float* mine = sums + turn * buffer_floats + cut.part * Tiles * 8 * rows + cut.row_warp * kTile + group;
#pragma unroll
        for (int j = 0; j < Tiles; ++j) {
            float* to = mine + (j * 8 + quad * 2) * rows;
            to[0] = acc[j][0];
            to[rows] = acc[j][1];
            to[8] = acc[j][2];
            to[rows + 8] = acc[j][3];
        }
        cluster_arrive();
        turn ^= 1;
        last_block = block;
    }
    if (first_block < cut.blocks) {
        cluster_wait();
        add_sums(last_block);
        // Other blocks may still read this one's.
        cluster_arrive();
        cluster_wait();
    }
}

// Blocks that fit on a multiprocessor. One with 100 KiB of shared memory has room for a single block, which may then have all registers.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif

#define LINEAR(NAME, TILES, VALUES, ACTIVATION)                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                                                     \
        NAME(const bf16* x, const uint8_t* weight, const bf16* bias, void* out, int m, int n, int k, int row_warps,     \
             int mode, const bf16* delta, const float* norm_weight, bf16* sum, float eps, const void* scales,           \
             int stride, int pitch, int inputs) {                                                                       \
        run<TILES, VALUES, ACTIVATION>(                                                                                 \
            {x, weight, bias, out, m, n, k, row_warps, mode, {delta, norm_weight, sum, eps}, {scales, stride}, pitch},  \
            input_bytes(inputs));                                                                                       \
    }
#define LINEARS(NAME, VALUES)                                     \
    LINEAR(NAME##_silu_8, 1, VALUES, Activation::kSilu)           \
    LINEAR(NAME##_silu_16, 2, VALUES, Activation::kSilu)          \
    LINEAR(NAME##_gelu_tanh_8, 1, VALUES, Activation::kGeluTanh)  \
    LINEAR(NAME##_gelu_tanh_16, 2, VALUES, Activation::kGeluTanh)

LINEARS(linear, Values::kBf16)
LINEAR(linear_silu_32, 4, Values::kBf16, Activation::kSilu)
LINEAR(linear_gelu_tanh_32, 4, Values::kBf16, Activation::kGeluTanh)
// None for 32 rows: on an H200 it took as long as two launches for 16.
LINEARS(linear_fp8, Values::kFp8)
LINEARS(linear_fp8_blocks, Values::kFp8Blocks)
// None for 16 rows of groups of 32: it would have to spill registers.
LINEAR(linear_int4_32_silu_8, 1, Values::kInt4Of32, Activation::kSilu)
LINEAR(linear_int4_32_gelu_tanh_8, 1, Values::kInt4Of32, Activation::kGeluTanh)
LINEARS(linear_int4_64, Values::kInt4Of64)
LINEARS(linear_int4_128, Values::kInt4Of128)

#define LINEAR_GGUF(NAME, VALUES)                             \
    LINEAR(NAME##_silu_8, 1, VALUES, Activation::kSilu)       \
    LINEAR(NAME##_gelu_tanh_8, 1, VALUES, Activation::kGeluTanh)

LINEAR_GGUF(linear_q4_0, Values::kQ4_0)
LINEAR_GGUF(linear_q4_1, Values::kQ4_1)
LINEAR_GGUF(linear_q5_0, Values::kQ5_0)
LINEAR_GGUF(linear_q5_1, Values::kQ5_1)
LINEAR_GGUF(linear_q8_0, Values::kQ8_0)
LINEAR_GGUF(linear_q4_k, Values::kQ4K)
LINEAR_GGUF(linear_q5_k, Values::kQ5K)
LINEAR_GGUF(linear_q6_k, Values::kQ6K)

// 2 us at the clocks of an H100 or H200 (1.7 to 2 GHz), as long as an RMSNorm of few rows takes between products.
constexpr long long kPauseCycles = 3400;

// Stands for the small kernels between linear layers when these are measured.
extern "C" __global__ void linear_pause() {
    pdl_launch();
    pdl_wait();
    const long long start = clock64();
    while (clock64() - start < kPauseCycles) {
    }
}
