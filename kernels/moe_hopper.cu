// Mixtures of experts: the products of tiles of many rows by products of warp groups (sm_90a), in place of those of moe.cu. Weights in
// bf16, or in e4m3 with rows of x in e4m3 too; those of four bits are moe_hopper_4bit.cu's.
//
// Blocks are persistent and take one piece of work after the other: a tile of 64 or 128 rows of x times some rows of weights, of a
// gated product half of them gates and half the same rows of the up projection. Of two warp groups that multiply each takes 64 rows of x
// and up to 256 rows of weights: half of the rows of x, or half of the weights. A third one fills the stages: the copy engine (TMA) brings
// weights, as a tensor map describes them, its threads gather the rows of x, 16 bytes at a time.
//
// Sums of products of e4m3 have fewer bits than f32, so those of each 128 inputs are added to others in f32, multiplied by the scales of
// blocks if there are such.
#include "experts_hopper.cuh"
#include "tensor_map.cuh"

namespace {

constexpr int kThreads = 3 * 128;

// Rows of x in eight bits: `scales` is [rows], or [k / 128, stride] for blocks of 128.
struct InputScales {
    const float* scales;
    int stride;
};

// Where gated outputs go that become the next product's x in eight bits: `scales` is [n / 128, stride].
struct QuantisedOutputs {
    uint8_t* values;
    float* scales;
    int stride;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kRowBytes = 128;  // of a stage
constexpr int kPiece = 16;      // bytes that a thread copies at once
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <int kTokens, Format kFormat>
struct Experts {
    static constexpr bool kFp8 = kFormat != Format::kBf16, kBlocks = kFormat == Format::kFp8Blocks;
    static constexpr bool kHasCopyEngine = true;
    // Of a warp group: rows of weights, and whether the other one has other rows of x or other rows of weights.
    static constexpr bool kSplitsTokens = kTokens == 128;
    static constexpr int kWidth = !kFp8 && kSplitsTokens ? 256 : 128;
    static constexpr int kFeatures = kSplitsTokens ? kWidth : kConsumers * kWidth;
    // A piece of work has the outputs that share a scale.
    static constexpr bool kQuantises = kBlocks && kFeatures / 2 == kFp8Block;
    static constexpr int kStageInputs = kFp8 ? kRowBytes : kRowBytes / 2;
    // As `launch_of` in crates/kernels/src/cuda/moe/products.rs has them too.
    static constexpr int kStages = kFp8 && kSplitsTokens ? 6 : kSplitsTokens ? 4 : 5;

    struct __align__(1024) Shared {
        uint8_t weights[kStages][kFeatures * kRowBytes];
        uint8_t inputs[kStages][kTokens * kRowBytes];
        float scales[kStages][kBlocks ? kTokens : 1];
        // Of two pieces of work, one behind the other: of each warp group's outputs of a row.
        float largest[2][kConsumers][kQuantises ? kTokens : 1];
        uint64_t full[kStages], empty[kStages];
    };

    const Problem& p;
    const TensorMap& map;
    const InputScales& x;
    const QuantisedOutputs& quantised;
    Shared& shared;

    __device__ __forceinline__ bool gated() const { return p.kind != kPlain; }
    // Of a piece of work, and of a warp group.
    __device__ __forceinline__ int outputs() const { return gated() ? kFeatures / 2 : kFeatures; }
    __device__ __forceinline__ int group_outputs() const { return gated() ? kWidth / 2 : kWidth; }
    // In a stage.
    __device__ __forceinline__ static int first_token(int group) { return kSplitsTokens ? group * 64 : 0; }
    __device__ __forceinline__ static int first_feature(int group) { return kSplitsTokens ? 0 : group * kWidth; }
    __device__ __forceinline__ int columns() const { return (p.n + outputs() - 1) / outputs(); }
    __device__ __forceinline__ int stages() const { return (p.k + kStageInputs - 1) / kStageInputs; }
    // Of a row of x.
    __device__ __forceinline__ int pieces() const { return p.k * kRowBytes / kStageInputs / kPiece; }

    // Copies all stages of all work.
    __device__ __forceinline__ void produce(int count) const {
        // This thread copies the same piece of some rows.
        constexpr int kPieces = kRowBytes / kPiece, kRows = kWarpGroup / kPieces;
        static_assert(kRows % 8 == 0, "a row is the same in each eight");
        const int piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces, pieces = this->pieces();
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work_at(p, index, columns(), outputs());
            // Where they begin, in pieces. Rows past the end of the tile repeat its last one.
            uint32_t inputs[kTokens / kRows];
#pragma unroll
            for (int i = 0; i < kTokens / kRows; ++i) inputs[i] = input_row(w, first_row + i * kRows) * uint32_t(pieces) + piece;
            const uint4* from = reinterpret_cast<const uint4*>(p.x);
            const float* scale = kBlocks ? x.scales + input_row(w, threadIdx.x) : nullptr;
            for (int s = 0, all = stages(); s < all; ++s, ++step) {
                const int stage = step % kStages;
                if (step >= kStages) barrier_wait(shared.empty + stage, (step / kStages - 1) & 1);
                __syncwarp();
                if (threadIdx.x == 0) copy_weights(w, s, stage);
                uint8_t* const to = shared.inputs[stage] + first_row * kRowBytes + (piece ^ first_row % 8) * kPiece;
                // Zeros past the end of k.
                if (s * kPieces + piece < pieces) {
#pragma unroll
                    for (int i = 0; i < kTokens / kRows; ++i) copy_async(to + i * kRows * kRowBytes, from + inputs[i], true);
                } else {
#pragma unroll
                    for (int i = 0; i < kTokens / kRows; ++i) copy_async(to + i * kRows * kRowBytes, p.x, false);
                }
                from += kPieces;
                if constexpr (kBlocks) {
                    if (threadIdx.x < kTokens) copy_async_of<4>(shared.scales[stage] + threadIdx.x, scale);
                    scale += x.stride;
                }
                barrier_arrive_after_copies(shared.full + stage);
            }
        }
    }

    // The row of x that is row `row` of a tile.
    __device__ __forceinline__ int input_row(const Work& w, int row) const {
        return p.input_row(w.tile.first + min(row, w.tile.count - 1));
    }

    // The rows of weights of a piece of work, by the copy engine: for each warp group gates, then the same rows of the up projection. Rows past
    // the last gate are the first ones of the up projection, and those past the end zeros; their outputs are not stored.
    __device__ __forceinline__ void copy_weights(const Work& w, int s, int stage) const {
        barrier_expect_bytes(shared.full + stage, kFeatures * kRowBytes);
#pragma unroll
        for (int row = 0; row < kFeatures; row += kMapRows) {
            const int group = row / kWidth, of_group = row % kWidth;
            const bool up = gated() && of_group >= kWidth / 2;
            const int output = group * group_outputs() + of_group - (up ? kWidth / 2 : 0);
            const int3 from = make_int3(s * kRowBytes, w.first + output + (up ? p.n : 0), w.tile.expert);
            copy_tensor(shared.weights[stage] + row * kRowBytes, map, from, shared.full + stage);
        }
    }

    // Multiplies a warp group's part of all work.
    __device__ __forceinline__ void consume(int count, int group) const {
        const int row = first_token(group) + threadIdx.x % kWarpGroup / kWarp * 16 + threadIdx.x % kWarp / 4;
        int step = 0;
        for (int index = blockIdx.x; index < count; index += gridDim.x) {
            const Work w = work_at(p, index, columns(), outputs());
            const int first = w.first + (kSplitsTokens ? 0 : group * group_outputs());
            float acc[kWidth / 8][4];
            const int all = stages();
            if constexpr (kFp8) {
#pragma unroll
                for (int j = 0; j < kWidth / 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
                // While sums of one stage are added, products of the next are under way.
                float parts[2][kWidth / 8][4];
                int s = 0;
                const auto add = [&](float (&part)[kWidth / 8][4]) {
                    touch(part);
                    const Factors factors(*this, w.tile.expert, first, s, step % kStages, row);
                    // All lanes have read scales.
                    __syncwarp();
                    release(step);
                    factors.add(acc, part);
                    ++s, ++step;
                };
                multiply(parts[0], group, step, false);
                while (s + 2 < all) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        multiply(parts[1 - i], group, step + 1, false);
                        wgmma_wait<1>();
                        add(parts[i]);
                    }
                }
                if (s + 1 < all) {
                    multiply(parts[1], group, step + 1, false);
                    wgmma_wait<1>();
                    add(parts[0]);
                    wgmma_wait<0>();
                    add(parts[1]);
                } else {
                    wgmma_wait<0>();
                    add(parts[0]);
                }
            } else {
                for (int s = 0; s < all; ++s, ++step) {
                    multiply(acc, group, step, s > 0);
                    // While the products of this stage begin those of the one before end.
                    wgmma_wait<1>();
                    if (s > 0) release(step - 1);
                }
                wgmma_wait<0>();
                touch(acc);
                release(step - 1);
            }
            if constexpr (kQuantises) {
                if (quantised.values != nullptr) {
                    store_quantised(w, group, row, index / gridDim.x % 2, acc);
                    continue;
                }
            }
            store(w, first, row, acc);
        }
    }

    // Begins this warp group's products of a stage, once it is there.
    __device__ __forceinline__ void multiply(float (&acc)[kWidth / 8][4], int group, int step, bool add) const {
        const int stage = step % kStages;
        barrier_wait(shared.full + stage, step / kStages & 1);
        fence_for_products();
        const uint32_t inputs = shared_address(shared.inputs[stage]) + first_token(group) * kRowBytes;
        const uint32_t weights = shared_address(shared.weights[stage]) + first_feature(group) * kRowBytes;
        wgmma_fence();
#pragma unroll
        for (int at = 0; at < kRowBytes; at += 32) {
            const uint64_t a = rows_operand(inputs + at), b = rows_operand(weights + at);
            if constexpr (kFp8) {
                Wgmma<kWidth>::rows_fp8(acc, a, b, add || at > 0);
            } else {
                Wgmma<kWidth>::rows(acc, a, b, add || at > 0);
            }
        }
        wgmma_commit();
    }

    // What the sums of a stage in eight bits are multiplied by, for this thread's two rows of x.
    struct Factors {
        float gate[2], up[2];

        __device__ __forceinline__ Factors(const Experts& experts, int expert, int first, int s, int stage, int row) {
            if constexpr (kBlocks) {
                const Problem& p = experts.p;
                const float* const scales = of_expert(p.scales, p.stride, expert) + s;
                // A second warp group may have no outputs.
                const auto of_block = [&](int feature) { return __ldg(scales + feature / kFp8Block * p.scale_stride); };
                const float of_gate = of_block(min(first, p.n - 1)), of_up = experts.gated() ? of_block(min(first, p.n - 1) + p.n) : of_gate;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float of_row = experts.shared.scales[stage][row + i * 8];
                    gate[i] = of_row * of_gate, up[i] = of_row * of_up;
                }
            }
        }

        __device__ __forceinline__ void add(float (&acc)[kWidth / 8][4], const float (&part)[kWidth / 8][4]) const {
#pragma unroll
            for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (kBlocks) {
                        acc[j][i] = fmaf(part[j][i], j < kWidth / 16 ? gate[i / 2] : up[i / 2], acc[j][i]);
                    } else {
                        acc[j][i] += part[j][i];
                    }
                }
            }
        }
    };

    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty + step % kStages);
    }

    __device__ __forceinline__ static float2 wide(uint32_t pair) { return __bfloat1622float2(reinterpret_cast<const bf162&>(pair)); }

    // Gated outputs in eight bits, 128 of a row with one scale, as `quantise_fp8` (fused.cu) makes of them in bf16.
    __device__ __forceinline__ void store_quantised(const Work& w, int group, int row, int buffer, const float (&acc)[kWidth / 8][4]) const {
        constexpr int kOutputs = kWidth / 2;
        const int quad = threadIdx.x % 4, first = w.first + group * kOutputs;
        const bf16* const bias = of_expert(p.bias, p.stride, w.tile.expert);
        uint32_t pairs[2][kOutputs / 8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < kOutputs / 8; ++j) {
                float2 gate = make_float2(acc[j][i * 2], acc[j][i * 2 + 1]);
                float2 up = make_float2(acc[j + kOutputs / 8][i * 2], acc[j + kOutputs / 8][i * 2 + 1]);
                if (bias != nullptr) {
                    const bf16* const own = bias + first + j * 8 + quad * 2;
                    const float2 of_gate = __bfloat1622float2(*reinterpret_cast<const bf162*>(own));
                    const float2 of_up = __bfloat1622float2(*reinterpret_cast<const bf162*>(own + p.n));
                    gate.x += of_gate.x, gate.y += of_gate.y, up.x += of_up.x, up.y += of_up.y;
                }
                pairs[i][j] = pack(activate(p.kind, gate.x, up.x), activate(p.kind, gate.y, up.y));
                const float2 rounded = wide(pairs[i][j]);
                most = fmaxf(most, fmaxf(fabsf(rounded.x), fabsf(rounded.y)));
            }
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
            if (quad == 0) shared.largest[buffer][group][row + i * 8] = most;
        }
        named_sync<kConsumers * kWarpGroup>(1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = row + i * 8, place = w.tile.first + token;
            const float most = fmaxf(shared.largest[buffer][0][token], shared.largest[buffer][1][token]);
            const float factor = most > 0.0f ? kFp8Max / most : 0.0f;
            // Two of eight outputs each, of two neighbouring eights.
            uint32_t words[4];
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const auto narrow = [&](uint32_t pair) {
                    const float2 values = wide(pair);
                    return uint32_t(__nv_cvt_float2_to_fp8x2(make_float2(values.x * factor, values.y * factor), __NV_SATFINITE, __NV_E4M3));
                };
                words[at] = narrow(pairs[i][at * 2]) | narrow(pairs[i][at * 2 + 1]) << 16;
            }
            const uint4 of_lanes = transpose_quads(words);
            if (token >= w.tile.count) continue;
            *reinterpret_cast<uint4*>(quantised.values + size_t(place) * p.n + first + quad * 16) =
                make_uint4(__byte_perm(of_lanes.x, of_lanes.y, 0x5410), __byte_perm(of_lanes.z, of_lanes.w, 0x5410),
                           __byte_perm(of_lanes.x, of_lanes.y, 0x7632), __byte_perm(of_lanes.z, of_lanes.w, 0x7632));
            if (group == 0 && quad == 0) quantised.scales[size_t(w.first / kFp8Block) * quantised.stride + place] = most / kFp8Max;
        }
    }

    // A warp group's sums, of outputs `first` on; this thread has rows `row` and `row + 8` of the tile.
    __device__ __forceinline__ void store(const Work& w, int first, int row, const float (&acc)[kWidth / 8][4]) const {
        const int quad = threadIdx.x % 4;
        const bf16* const bias = of_expert(p.bias, p.stride, w.tile.expert);
        const float* const scales = kFp8 && !kBlocks ? of_expert(p.scales, p.stride, w.tile.expert) : nullptr;
        float of_row[2] = {1.0f, 1.0f};
        if constexpr (kFp8 && !kBlocks) {
#pragma unroll
            for (int i = 0; i < 2; ++i) of_row[i] = x.scales[input_row(w, row + i * 8)];
        }
        // Two neighbouring outputs' sums, in their scale and with their bias.
        const auto complete = [&](const float* sums, int feature, int i) {
            float2 pair = make_float2(sums[i * 2], sums[i * 2 + 1]);
            if constexpr (kFp8 && !kBlocks) {
                const float2 scale = *reinterpret_cast<const float2*>(scales + feature);
                pair.x *= scale.x * of_row[i], pair.y *= scale.y * of_row[i];
            }
            if (bias != nullptr) {
                const float2 more = __bfloat1622float2(*reinterpret_cast<const bf162*>(bias + feature));
                pair.x += more.x, pair.y += more.y;
            }
            return pair;
        };
        // Four lanes have a row's outputs in twos; each stores eight of them.
#pragma unroll
        for (int j = 0; j < kWidth / 8; j += 4) {
            if (j * 8 >= group_outputs() || first + j * 8 >= p.n) break;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t pairs[4];
#pragma unroll
                for (int at = 0; at < 4; ++at) {
                    const int output = min(first + (j + at) * 8, p.n - 8) + quad * 2;
                    float2 pair = complete(acc[j + at], output, i);
                    if (gated()) {
                        const float2 up = complete(acc[(j + at + kWidth / 16) % (kWidth / 8)], p.n + output, i);
                        pair.x = activate(p.kind, pair.x, up.x), pair.y = activate(p.kind, pair.y, up.y);
                    }
                    pairs[at] = pack(pair.x, pair.y);
                }
                const uint4 outputs = transpose_quads(pairs);
                const int token = row + i * 8, output = first + (j + quad) * 8;
                if (token < w.tile.count && output < p.n) {
                    *reinterpret_cast<uint4*>(p.out + size_t(w.tile.first + token) * p.n + output) = outputs;
                }
            }
        }
    }
};

template <int kTokens, Format kFormat>
__device__ __forceinline__ void product(const Problem& p, const TensorMap& map, const InputScales& x, const QuantisedOutputs& quantised) {
    using E = Experts<kTokens, kFormat>;
    constexpr int kRows = kTokens + E::kFeatures, kScales = E::kFp8 ? kTokens * int(sizeof(float)) : 0;
    static_assert(sizeof(typename E::Shared) <= E::kStages * (kRows * kRowBytes + kScales) + 2048, "2 KiB beside stages, 1 KiB for alignment");
    extern __shared__ uint8_t memory[];
    auto& shared = *reinterpret_cast<typename E::Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    run_warp_groups<kProducerRegisters, kConsumerRegisters>(E{p, map, x, quantised, shared});
}

#else

template <int kTokens, Format kFormat>
__device__ __forceinline__ void product(const Problem&, const TensorMap&, const InputScales&, const QuantisedOutputs&) {}

#endif

}  // namespace

#define PRODUCT(NAME, TOKENS, FORMAT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                                          \
        NAME(const __grid_constant__ TensorMap map, const bf16* x, const uint8_t* weight, const bf16* bias, const float* scales,       \
             bf16* out, const int* sources, const Tile* tiles, uint64_t stride, int n, int k, int pitch, int top_k, int kind,          \
             int scale_stride, const float* x_scales, int x_stride, uint8_t* quantised, float* quantised_scales,                       \
             int quantised_stride) {                                                                                                   \
        const Problem p{x, weight, bias, scales, out, sources, tiles, stride, n, k, pitch, top_k, kind, scale_stride};                 \
        product<TOKENS, FORMAT>(p, map, {x_scales, x_stride}, {quantised, quantised_scales, quantised_stride});                        \
    }
#define PRODUCTS(NAME, FORMAT)     \
    PRODUCT(NAME##_64, 64, FORMAT) \
    PRODUCT(NAME##_128, 128, FORMAT)

PRODUCTS(moe_hopper_bf16, Format::kBf16)
PRODUCTS(moe_hopper_fp8, Format::kFp8)
PRODUCTS(moe_hopper_fp8_blocks, Format::kFp8Blocks)
