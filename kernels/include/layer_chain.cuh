// What layer_chain.cu computes, and how a block divides it with the other blocks.
#pragma once

#include "chain.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "tagged.cuh"

// With the warp that copies there are three for each scheduler.
constexpr int kConsumers = 11;  // warps
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kChainThreads = kConsumerThreads + kWarp;

// As crates/kernels/src/cuda/linear/layers.rs has them too.
constexpr int kMostLayers = 32;
constexpr int kLeastWidth = 512;  // of the residual stream: all blocks have some of it, and see `gated` in layer_chain.cu
constexpr int kMostWidth = 2048;  // of it, and of what is attended
constexpr int kMostProjected = 4096;
constexpr int kMostInner = 11520;
constexpr int kStep = 128;  // inputs that a warp multiplies with two rows at a time; those of a product are a multiple
constexpr int kMostOutputs = 24;  // of a block, that are added to the residual stream
constexpr int kMostBiases = 64;   // outputs of any product of a block that may have a bias
constexpr int kMostBlocks = 160;
constexpr int kMostDim = 128;  // of a head
constexpr int kStaticBytes = 32 << 10;

constexpr int kMostSplits = 9;           // of a context
constexpr int kChunk = 18 << 10;         // bytes of weights that are copied at a time, unless a row is longer
constexpr int kPairs = 4;                // of rows of gate and up in a chunk, at most: a warp has all of it
constexpr int kChunks = 24;              // in shared memory at once
constexpr int kMostInFlight = 64 << 10;  // bytes on their way at once, as crates/kernels/src/cuda/chain.rs has it
constexpr int kTile = 16;                // tokens that lie together in any cache

// One of the layers. Weights are bf16.
struct ChainLayer {
    const uint8_t *output, *gate_up, *down, *next;  // [width, attended], [2 inner, width], [width, inner], [projected, width] or null
    const bf16 *output_bias, *down_bias, *next_bias;  // null for none
    const float *norm, *next_norm;                    // [width]: of the MLP, and of `next`
    const float *q_norm, *k_norm;                     // [dim]: of heads; null for none
    bf16 *k, *v;
};

// What blocks give each other, in the workspace of the linear layers (crates/kernels/src/cuda/linear/layers.rs).
struct LayerExchange {
    unsigned arrived;   // blocks: 0 between launches
    uint32_t last_tag;  // tag of the last layer of the launch before
    __align__(128) uint32_t projected[kMostProjected];
    // Inputs of products, each at its `place_of`.
    uint32_t hidden[kMostWidth];  // the residual stream after the mixer's output
    uint32_t next_hidden[kMostWidth];  // and after the MLP
    uint32_t attended[kMostWidth];
    uint32_t activated[kMostInner];
    uint64_t parts[kMostBlocks][kMostDim];  // of what a head attends to in the splits behind the first
    uint64_t logs[kMostBlocks];             // log2 of the sums of their weights
};
static_assert(kLeastWidth >= kMostBlocks);
static_assert(sizeof(LayerExchange) <= 256 << 10, "LAYER_BYTES in crates/kernels/src/cuda/linear/layers.rs");

// As `Args` of crates/kernels/src/cuda/linear/layers.rs.
struct LayerChain {
    ChainLayer layers[kMostLayers];
    const bf16* projected;  // q, k and v of the first layer
    bf16* hidden;           // [width]
    bf16* out;              // what `next` of the last layer projects to
    LayerExchange* exchange;
    const Run* run;
    const int* blocks;
    const int* slot;
    const int* position;
    const float2* frequencies;  // [dim / 2]
    int count;                  // of layers
    int width, inner, projected_width, heads, kv_heads;
    int block_shift, block_stride;
    int ring_bytes, in_flight;
    float eps, head_eps, turn_factor, scale;
    int activation, padding;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a block attends to for one head: cached tokens begin..end, and if `split` is 0 the current one too. The first block of a head takes the
// first split and merges the others.
struct Unit {
    int head;  // -1 for none
    int kv_head;
    bool is_first;  // of the heads that have it
    int split, splits, begin, end;

    // `tokens` are cached; so many are copied at a time.
    __device__ __forceinline__ void set(int heads, int kv_heads, int tokens, int at_once) {
        const int of_head = min(int(gridDim.x) / heads, kMostSplits);
        splits = min(max((tokens + at_once - 1) / at_once, 1), of_head);
        split = int(blockIdx.x) % of_head;
        head = split < splits && int(blockIdx.x) / of_head < heads ? int(blockIdx.x) / of_head : -1;
        kv_head = head / (heads / kv_heads), is_first = head % (heads / kv_heads) == 0;
        const int share = ((tokens + splits - 1) / splits + kTile - 1) / kTile * kTile;
        begin = split * share;
        end = min(begin + share, tokens);
    }

    // Which of all splits behind the first ones that is `other` splits further.
    __device__ __forceinline__ int part(int other) const { return int(blockIdx.x) + other; }
};

// The outputs of a product that a block computes.
struct Share {
    int first, count;
    int row_bytes;  // of weights
    int at_once;    // outputs whose weights are copied at a time: of gate and up two rows each

    __device__ __forceinline__ void set(int n, int k, bool is_gated) {
        first = first_output(n, blockIdx.x);
        count = first_output(n, blockIdx.x + 1) - first;
        row_bytes = k * int(sizeof(bf16));
        const int pairs = max(kChunk / (2 * row_bytes), 1);  // a warp multiplies two rows at once
        at_once = is_gated ? min(pairs, kPairs) : 2 * pairs;
    }
};

// Where an input of a product lies in the exchange: lane `i` gets four words in a row, which are those of inputs 2i, 2i + 1, 64 + 2i and
// 65 + 2i of a step, as products need them (see `multiply`).
__device__ __forceinline__ int place_of(int input) {
    return (input & -kStep) | (input << 1 & 0x7c) | (input >> 5 & 2) | (input & 1);
}

enum Product { kOutput, kGated, kDown, kNext, kProducts };

template <int kDim, int kHeld>
struct Shared {
    uint64_t full[kChunks], empty[kChunks];
    int offset[kChunks];    // of chunks, in the ring
    unsigned end[kChunks];  // and in all that goes through it, modulo 2^32
    Share shares[kProducts];
    Unit unit;
    bool is_last;
    __align__(16) float2 turns[kDim / 2];
    __align__(16) uint2 inputs[2][kHeld * kVec * kWarp / 4];  // of a product, as lanes need them; those of `output` apart from those of the others
    float squares[2][kConsumers + 1];
    float biases[2][kMostBiases];
    float residual[kMostOutputs];
    float sums[kConsumers][kMostOutputs];
    __align__(16) float parts[kConsumers + kMostSplits - 1][kDim];
    float2 states[kConsumers + kMostSplits - 1];  // largest score and sum of weights
};
static_assert(sizeof(Shared<kMostDim, kMostWidth / (kVec * kWarp)>) <= kStaticBytes);

// The thread that copies, through a ring of chunks of any size.
template <int kDim, int kHeld>
struct Copier {
    const LayerChain& c;
    Shared<kDim, kHeld>& shared;
    uint8_t* memory;
    uint64_t policy = read_once_policy();
    int next = 0, oldest = 0, landed = 0;  // chunks
    unsigned head = 0, tail = 0;           // bytes that have gone in and out, with those left out before the ring's end, modulo 2^32
    int at = 0;                            // in the ring

    __device__ __forceinline__ Copier(const LayerChain& c, Shared<kDim, kHeld>& shared, uint8_t* memory) : c(c), shared(shared), memory(memory) {}

    // Waits for room, and until few enough bytes are on their way. Returns where so many are to go.
    __device__ __forceinline__ uint32_t begin(int bytes) {
        if (at + bytes > c.ring_bytes) head += c.ring_bytes - at, at = 0;
        while (head + bytes - tail > unsigned(c.ring_bytes) || next - oldest == kChunks) {
            barrier_wait(&shared.empty[oldest % kChunks], oldest / kChunks & 1);
            tail = shared.end[oldest++ % kChunks];
        }
        landed = max(landed, oldest);
        for (; landed < next && head - start_of(landed) + bytes > unsigned(c.in_flight); ++landed) {
            barrier_wait(&shared.full[landed % kChunks], landed / kChunks & 1);
        }
        head += bytes;
        const int to = at;
        at += bytes;
        shared.offset[next % kChunks] = to;
        shared.end[next % kChunks] = head;
        barrier_expect_bytes(&shared.full[next % kChunks], bytes);
        return shared_address(memory + to);
    }

    __device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes) {
        copy_bulk(to, from, bytes, &shared.full[next % kChunks], policy);
    }

    // A block's rows of a product, and the same of `more`, which comes with them.
    __device__ __forceinline__ void rows(const uint8_t* weights, const Share& share, const uint8_t* more = nullptr) {
        for (int i = 0; i < share.count; i += share.at_once) {
            const int bytes = min(share.at_once, share.count - i) * share.row_bytes;
            const size_t from = size_t(share.first + i) * share.row_bytes;
            const uint32_t to = begin(more != nullptr ? 2 * bytes : bytes);
            copy(to, weights + from, bytes);
            if (more != nullptr) copy(to + bytes, more + from, bytes);
            ++next;
        }
    }

    // Cached tokens first..end of a head.
    __device__ __forceinline__ void cached(const bf16* from, int kv_head, int first, int end) {
        constexpr int kBytes = kTile * kDim * int(sizeof(bf16));
        const int mask = (1 << c.block_shift) - 1;
        const int* const blocks = c.blocks + c.run->block_offset;
        uint32_t to = begin((end - first + kTile - 1) / kTile * kBytes);
        for (int token = first; token < end; token += kTile, to += kBytes) {
            const int block = blocks[token >> c.block_shift];
            const size_t row = (size_t(kv_head) << c.block_shift) + (token & mask);
            // Several heads read them, and with short contexts they stay in L2 until the next step.
            copy_bulk(to, from + size_t(block) * c.block_stride + row * kDim, kBytes, &shared.full[next % kChunks]);
        }
        ++next;
    }

private:
    // Where a chunk that has not been overwritten begins: behind the one before.
    __device__ __forceinline__ unsigned start_of(int chunk) const { return chunk == 0 ? 0 : shared.end[(chunk - 1) % kChunks]; }
};

#endif
