// Mixtures of experts: the products of tiles of up to 16 rows with weights of four bits, which should take as long as reading the weights
// of the experts that are hit. Beside reading, converting codes to bf16 takes the time, so all else takes as few instructions as possible:
// weights are stored in the order of the products' operands, and a warp has all of k, so that there are no partial sums to add.
//
// A block has two warps with 16 rows of weights each, of a gated product eight of the gate and the same eight of the up projection. They
// share a ring of stages in shared memory, each with a part of k of their rows and of the rows of x.
//
// Codes of int4 weights are multiplied without their scale, which multiplies the sums of each 32 inputs instead: nothing is rounded.
#include "experts_few.cuh"

namespace {

constexpr int kWarps = 2;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = 2 * kRowsTogether;  // of weights
// As `Format::few_features` and `few_ring` in crates/kernels/src/cuda/moe/products.rs have them too.
constexpr int kRows = kWarps * kWarpRows;
constexpr int kStages = 3;
constexpr int kStageBytes = kRows * 128 + 8 * (2 * 256 + 16);

// The part of k of a stage.
template <int kTokenTiles>
struct Stage {
    static constexpr int kTokens = 8 * kTokenTiles;
    static constexpr int kWindows = 4 / kTokenTiles;
    static constexpr int kInputs = kWindows * kExpertWindow;

    uint8_t codes[kWarps][2][kWindows * kWindowOfEight];
    // Rows are 16 bytes longer than their inputs, so that matrices of eight rows are in different banks.
    bf16 inputs[kTokens][kInputs + 8];
};
static_assert(sizeof(Stage<1>) == kStageBytes && sizeof(Stage<2>) <= kStageBytes);

// `kGroup` inputs of int4 weights have one scale.
template <Format kFormat, int kGroup = kExponentInputs>
struct Few {
    static constexpr bool kMxfp4 = kFormat == Format::kMxfp4;

    // The rows of weights of a warp: two groups of eight; where there is no second one, the first again.
    struct Eights {
        int first, second;
        bool exist;

        __device__ __forceinline__ Eights(const Problem& p, int warp) {
            const int eights = p.n / kRowsTogether, wanted = (blockIdx.x * kWarps + warp) * (p.kind != kPlain ? 1 : 2);
            exist = wanted < eights;
            first = min(wanted, eights - 1);
            second = p.kind != kPlain ? first + eights : min(first + 1, eights - 1);
        }
        __device__ __forceinline__ int row(int i) const { return (i < kRowsTogether ? first : second) * kRowsTogether + i % kRowsTogether; }
    };

    template <int kTokenTiles, bool kOneRow>
    __device__ __forceinline__ static void of_tile(const Problem& p, const Tile& tile, uint8_t* shared) {
        using S = Stage<kTokenTiles>;
        S* const ring = reinterpret_cast<S*>(shared);
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quad = lane % 4;
        const Eights eights(p, warp);
        const uint8_t* const weight = of_expert(p.weight, p.stride, tile.expert);
        const int windows = expert_windows(p.k), stages = (windows + S::kWindows - 1) / S::kWindows;

        // What this lane copies of weights: as many pieces of both eights.
        constexpr int kPieces = S::kWindows * kWindowOfEight / 16;  // of an eight, in a stage
        const size_t bytes_of_eight = size_t(kRowsTogether) * p.pitch;
        const uint8_t* first_from = weight + eights.first * bytes_of_eight + lane * 16;
        const uint8_t* second_from = weight + eights.second * bytes_of_eight + lane * 16;
        int pieces_left = windows * (kWindowOfEight / 16) - lane;
        // And of x: a piece of some rows.
        constexpr int kRowPieces = S::kInputs / 8, kRowsAtOnce = kThreads / kRowPieces, kCopies = kOneRow ? 1 : S::kTokens / kRowsAtOnce;
        const int row = threadIdx.x / kRowPieces, piece = threadIdx.x % kRowPieces;
        const bf16* inputs_from[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int token = row + i * kRowsAtOnce;
            inputs_from[i] = (kOneRow ? p.x : p.inputs(tile.first + min(token, tile.count - 1))) + piece * 8;
        }
        int inputs_left = p.k - piece * 8;
        int to = 0;
        const auto request = [&](int stage) {
            if (stage < stages) {
                S& at = ring[to];
#pragma unroll
                for (int i = 0; i < kPieces; i += kWarp) {
                    const bool wanted = i < pieces_left;
                    copy_async(at.codes[warp][0] + (i + lane) * 16, first_from + i * 16, wanted);
                    copy_async(at.codes[warp][1] + (i + lane) * 16, second_from + i * 16, wanted);
                }
                // Zeros past the end of k. Rows that are not there may hold anything: their sums are not stored.
#pragma unroll
                for (int i = 0; i < kCopies; ++i) {
                    const int token = row + i * kRowsAtOnce;
                    if (token < tile.count) copy_async(at.inputs[token] + piece * 8, inputs_from[i], inputs_left > 0);
                    inputs_from[i] += S::kInputs;
                }
            }
            commit_async();
            first_from += kPieces * 16, second_from += kPieces * 16;
            pieces_left -= kPieces, inputs_left -= S::kInputs;
            to = to + 1 == kStages ? 0 : to + 1;
        };

        // What rows have beside codes, for all inputs: exponents, or words of groups, an odd number for each row, so that rows are in
        // different banks. Exponents are few to read, and with more bytes for them there would be a block less on a multiprocessor.
        uint8_t* const beside = shared + kStages * kStageBytes;
        const int beside_pitch = kMxfp4 ? exponent_bytes(p.k) : (p.scale_stride | 1) * int(sizeof(uint32_t));
        {
            const int of_warp = lane / 2, at = (warp * kWarpRows + of_warp) * beside_pitch;
            if constexpr (kMxfp4) {
                const uint8_t* const from = exponents_of(p, weight, eights.row(of_warp));
                for (int i = lane % 2 * 16; i < beside_pitch; i += 32) copy_async(beside + at + i, from + i, true);
            } else {
                const uint32_t* const from = groups_of(p, tile.expert) + size_t(eights.row(of_warp)) * p.scale_stride;
                for (int i = lane % 2; i < p.scale_stride; i += 2) copy_async_of<4>(beside + at + i * 4, from + i);
            }
        }
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) request(i);
        // Blocks of the next kernel that start meanwhile delay no copy.
        if (!kOneRow) pdl_launch();

        // Where this lane reads.
        const uint8_t* const low_beside = beside + (warp * kWarpRows + group) * beside_pitch;
        const uint8_t* const high_beside = low_beside + kRowsTogether * beside_pitch;
        const uint32_t first_codes = shared_address(ring[0].codes[warp][0]) + lane * 8;
        const uint32_t first_inputs = shared_address(ring[0].inputs[lane % 8]) + lane / 8 * 16;
        float acc[kTokenTiles][4] = {};
        int slot = 0;
        for (int stage = 0; stage < stages; ++stage) {
            wait_async<kStages - 2>();
            __syncthreads();
            request(stage + kStages - 1);
            const uint32_t codes = first_codes + slot * uint32_t(sizeof(S)), inputs = first_inputs + slot * uint32_t(sizeof(S));
            slot = slot + 1 == kStages ? 0 : slot + 1;
            // One for each 32 inputs.
            uint2 low_exponents{}, high_exponents{};
            if constexpr (kMxfp4 && kTokenTiles == 1) {
                low_exponents = *reinterpret_cast<const uint2*>(low_beside + stage * 8);
                high_exponents = *reinterpret_cast<const uint2*>(high_beside + stage * 8);
            } else if constexpr (kMxfp4) {
                low_exponents.x = *reinterpret_cast<const uint32_t*>(low_beside + stage * 4);
                high_exponents.x = *reinterpret_cast<const uint32_t*>(high_beside + stage * 4);
            }
            const int left = windows - stage * S::kWindows;
#pragma unroll
            for (int window = 0; window < S::kWindows; ++window) {
                if (window >= left) break;
                const uint2 low = load_shared8(codes + window * kWindowOfEight);
                const uint2 high = load_shared8(codes + (S::kWindows + window) * kWindowOfEight);
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const int at = window * 2 + part;
                    uint32_t low_one, high_one;
                    if constexpr (kMxfp4) {
                        low_one = __byte_perm(at < 4 ? low_exponents.x : low_exponents.y, 0, 0x4440 + at % 4);
                        high_one = __byte_perm(at < 4 ? high_exponents.x : high_exponents.y, 0, 0x4440 + at % 4);
                    } else {
                        const int of_row = (stage * S::kWindows * kExpertWindow + at * 32) / kGroup;
                        low_one = reinterpret_cast<const uint32_t*>(low_beside)[of_row];
                        high_one = reinterpret_cast<const uint32_t*>(high_beside)[of_row];
                    }
                    const uint4 a = widen<kFormat>(part == 0 ? low.x : low.y, low_one);
                    const uint4 b = widen<kFormat>(part == 0 ? high.x : high.y, high_one);
                    uint4 x[kTokenTiles];
#pragma unroll
                    for (int j = 0; j < kTokenTiles; ++j) {
                        x[j] = load_matrices(inputs + j * uint32_t(8 * sizeof(S::inputs[0])) + at * 64);
                    }
                    if constexpr (kMxfp4) {
                        add_products(acc, a, b, x);
                    } else {
                        add_scaled_products(acc, a, b, x, group_scale(low_one), group_scale(high_one));
                    }
                }
            }
        }

        if (!eights.exist) return;
        const int low_row = eights.row(group), high_row = eights.row(kRowsTogether + group);
        const bf16* const bias = of_expert(p.bias, p.stride, tile.expert);
        const float low_bias = bias != nullptr ? __bfloat162float(bias[low_row]) : 0.0f;
        const float high_bias = bias != nullptr ? __bfloat162float(bias[high_row]) : 0.0f;
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = j * 8 + quad * 2 + i;
                if (token >= tile.count) continue;
                const float low = fmaf(acc[j][i], kSumScale<kFormat>, low_bias);
                const float high = fmaf(acc[j][i + 2], kSumScale<kFormat>, high_bias);
                bf16* const out = p.out + size_t(tile.first + token) * p.n;
                if (p.kind != kPlain) {
                    out[low_row] = __float2bfloat16(activate(p.kind, low, high));
                } else {
                    out[low_row] = __float2bfloat16(low);
                    out[high_row] = __float2bfloat16(high);
                }
            }
        }
    }
};

template <int kGroup>
using FewInt4 = Few<Format::kInt4, kGroup>;

}  // namespace

FEW_PRODUCTS(moe_few_mxfp4, kThreads, 8, Few<Format::kMxfp4>)
FEW_PRODUCTS(moe_few_int4_32, kThreads, 8, FewInt4<32>)
FEW_PRODUCTS(moe_few_int4_64, kThreads, 8, FewInt4<64>)
FEW_PRODUCTS(moe_few_int4_128, kThreads, 8, FewInt4<128>)
