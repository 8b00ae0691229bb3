// What moe_chain.cu computes, and how a block divides it among its threads and with the other blocks; moe_chain_sandwich.cu adds to it.
#pragma once

#include <stddef.h>

#include "chain.cuh"
#include "experts.cuh"
#include "pieces.cuh"
#include "tagged.cuh"

constexpr int kConsumers = 16;  // warps
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kLeastBusy = kConsumers - 1;  // as warps take outputs in turn
constexpr int kChainThreads = kConsumerThreads + kWarp;

// As crates/kernels/src/cuda/moe.rs (MOST_ROUTES, and the expert for all rows) and moe/chain/plan.rs have them too.
constexpr int kMostSlots = 33;  // experts of a row
constexpr int kMostWidth = kConsumerThreads * kVec;
constexpr int kMostActivated = kMostSlots * 2048;
constexpr int kRoutedExperts = kConsumerThreads;

// What blocks give each other, in the workspace of the linear layers (crates/kernels/src/cuda/linear/chain.rs).
struct Exchange {
    unsigned arrived;                              // blocks: 0 between launches, as linear_chain.cu counts them too
    uint32_t last_tag;                             // tag of the launch before
    __align__(128) unsigned written;               // blocks that have written, summed over all waits: 0 between launches
    __align__(128) uint32_t hidden[kMostWidth];    // the residual stream after the mixer's output
    uint32_t next_hidden[kMostWidth];              // and after the experts; in moe_chain_sandwich.cu, what both add to it
    uint32_t mlp[kMostWidth];                      // there, what the MLP beside the experts gives
    uint32_t activated[kMostActivated];            // [slots, inner], as the experts' products order them; behind them that of the MLP
    uint64_t logits[kRoutedExperts + 1];           // of the experts; behind them that of the gate of the expert for all rows
};
static_assert(sizeof(Exchange) <= 320 << 10, "CHAIN_BYTES in crates/kernels/src/cuda/linear/chain.rs");

// Matrices of all experts, anything of the next one `stride` bytes further.
struct Matrices {
    Matrix first;
    const bf16* bias;  // of MXFP4 weights; null for none
    size_t stride;

    __device__ __forceinline__ Matrix of(int expert) const {
        return {of_expert(first.weight, stride, expert), of_expert(first.scales, stride, expert), first.scale_stride};
    }
};

struct RowNorm {
    const float* weight;
    float eps;
};

// A product of the row that the next mixer begins with.
struct Projection {
    Matrix matrix;  // [outputs, width]; null for none
    const bf16* bias;
    bf16* out;
    int outputs;
};

// As crates/kernels/src/cuda/chain.rs has it too: projections with weights of several types are as many products.
constexpr int kProjections = 2;

// As `Args` of crates/kernels/src/cuda/moe/chain.rs.
struct MoeChain {
    const bf16* x;  // [attended]
    Matrix output;  // [width, attended]
    const bf16* output_bias;
    bf16* hidden;  // [width]
    RowNorm norm;
    const bf16* router_weight;  // [experts, width]
    Router router;
    float* logits;                     // [experts]
    unsigned* loads;                   // [experts]: see Loads; or null
    Matrices gate_up, down;            // [2 inner, width], [width, inner]
    Matrix dense_gate_up, dense_down;  // of the expert that every row goes to, or of the MLP of moe_chain_sandwich.cu; null for none
    const bf16* shared_gate;           // of that expert, [width]; null for none
    float* shared_logit;
    bf16* activated;        // [top_k, inner]
    bf16* dense_activated;  // of what every row goes to
    RowNorm next_norm;
    Projection next[kProjections];
    Exchange* exchange;
    int attended, width, experts, top_k, inner, kind;
    int stage_bytes, stages, in_flight;  // bytes of a stage, how many there are, and bytes that may be on their way
    int plain_bytes;                     // of inputs of products with bf16 weights, behind the stages

    __device__ __forceinline__ bool has_shared() const { return shared_gate != nullptr; }
    __device__ __forceinline__ int slots() const { return top_k + has_shared(); }
    __device__ __forceinline__ bool has_next() const { return next[0].outputs > 0; }
};
static_assert(sizeof(MoeChain) == 432, "Args of crates/kernels/src/cuda/moe/chain.rs");

__device__ __forceinline__ Matrix bf16_rows(const void* rows) { return {static_cast<const uint8_t*>(rows), nullptr, 0}; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As crates/kernels/src/cuda/moe/chain/plan.rs has them too.
constexpr int kMostResiduals = 32;  // outputs of a block that are added to the residual stream
constexpr int kMostGroups = 2 * kConsumers;  // of eight gated outputs of a block, of MXFP4 weights
constexpr int kStaticBytes = 10 << 10;

constexpr int kQuad = 4;
constexpr int kTaken = 3;  // quads of inputs that a thread takes at a time
static_assert(kTaken * kQuad * kConsumerThreads >= kMostWidth, "a norm is one turn");
constexpr int kSlotsOfWarp = (kMostSlots + kConsumers - 1) / kConsumers;

// What becomes of a product's sums.
enum class Take { kAdd, kLogits, kStore };

// A product with rows of weights that are the same for all tokens.
struct Link {
    Matrix matrix;
    const bf16* bias;
    int n, k;
    Take take;
    void* out;        // words of Exchange if take is kAdd
    int first_logit;  // where its logits begin in Exchange::logits
};

// The mixer's output, the router, the gate of the expert for all rows, and from kNext on what follows.
constexpr int kNext = 3;
constexpr int kLinks = kNext + kProjections;

// The outputs of a product that a block computes.
struct Share {
    int first, count;
    int row_bytes;  // of weights
    int at_once;    // outputs whose weights a stage has room for: of gate and up two rows each

    // Of each output so many rows; all weights of so many outputs lie together.
    __device__ __forceinline__ void set(int n, int bytes, int rows, int together, int stage_bytes) {
        first = first_output(n / together, blockIdx.x) * together;
        count = first_output(n / together, blockIdx.x + 1) * together - first;
        row_bytes = bytes;
        at_once = stage_bytes / (rows * together * bytes) * together;
    }
};

// Shares of links, and of the experts' products.
constexpr int kGatedShare = kLinks, kDownShare = kLinks + 1, kShares = kLinks + 2;

// Blocks wait for each other between phases. Every phase but kGated takes new inputs.
enum Phase { kOutput, kRouter, kGated, kDown, kLast, kPhases };

// Where the inputs of a phase are.
struct Source {
    const uint32_t* words;  // null for those of the first phase
    RowNorm norm;           // its weights null for none
    int count;
    bool plain, halves;  // for products with weights in bf16, and in e4m3
};

// An expert of the row.
struct Slot {
    Matrix gate_up, down;
    bf16* activated;
    float weight;  // its logit at first
    int expert;    // whose scale the router has
};

// Of the outputs that a block computes.
struct ExpertBiases {
    __align__(16) bf16 gated[kMostGroups][2 * kRowsTogether];  // gates, then up projections
    bf16 down[kMostSlots][kMostResiduals];
};

struct Shared {
    StageBarriers barriers;
    uint64_t routed;
    Link links[kLinks];
    Share shares[kShares];
    Source sources[kPhases];
    int first_slot;  // of the gated share
    Slot slots[kMostSlots];
    uint4 zeros;
    __align__(16) float sums[kConsumers];
    __align__(8) bf16 residual[kMostResiduals];
    __align__(16) uint32_t keys[kRoutedExperts];  // logits, as to_key makes them
    // What comes with the experts' weights, by how these are stored.
    union {
        float down_scales[kMostSlots][kWarp];  // of the blocks that this block's rows lie in, or of its rows, times the expert's weight
        ExpertBiases biases;
    };
};
static_assert(sizeof(Shared) <= kStaticBytes);

// Computes this block's share of each product, one lane for each: divisions are slow, so they are done side by side.
template <typename Experts>
__device__ __forceinline__ void divide(const MoeChain& c, Shared& shared) {
    const int at = threadIdx.x % kWarp;
    if (at >= kShares) return;
    int n = c.width, row_bytes = Experts::row_bytes(c.down.first, c.inner);
    if (at < kLinks) n = shared.links[at].n, row_bytes = shared.links[at].matrix.row_bytes(shared.links[at].k);
    if (at == kGatedShare) n = c.slots() * c.inner, row_bytes = Experts::row_bytes(c.gate_up.first, c.width);
    Share& share = shared.shares[at];
    share.set(n, row_bytes, at == kGatedShare ? 2 : 1, at < kLinks ? 1 : Experts::kTogether, c.stage_bytes);
    if (at == kGatedShare) shared.first_slot = share.first / c.inner;
}

// By one thread, before all others use them; the link ahead of kNext, and the slot of what every row goes to, are up to the kernel.
__device__ __forceinline__ void begin(const MoeChain& c, Shared& shared) {
    shared.links[kOutput] = {c.output, c.output_bias, c.width, c.attended, Take::kAdd, c.exchange->hidden, 0};
    shared.links[kRouter] = {bf16_rows(c.router_weight), nullptr, c.experts, c.width, Take::kLogits, c.logits, 0};
#pragma unroll
    for (int i = 0; i < kProjections; ++i) {
        const Projection& next = c.next[i];
        shared.links[kNext + i] = {next.matrix, next.bias, next.outputs, c.width, Take::kStore, next.out, 0};
    }
    shared.zeros = {};
    barrier_init(&shared.routed, c.top_k);
    shared.barriers.init(c.stages, kConsumers);
}

// The gated outputs of a block, in parts that go through a stage: of one expert each.
struct GatedParts {
    int inner, slot, first, count = 0, left;

    __device__ __forceinline__ GatedParts(int inner, int slot, int first, int left) : inner(inner), slot(slot), first(first), left(left) {}

    __device__ __forceinline__ GatedParts(const Shared& shared, int inner)
        : GatedParts(inner, shared.first_slot, shared.shares[kGatedShare].first - shared.first_slot * inner, shared.shares[kGatedShare].count) {}

    // Goes on to the next part, if there is one, of at most so many outputs.
    __device__ __forceinline__ bool next(int at_once) {
        first += count;
        left -= count;
        if (first == inner) first = 0, ++slot;
        count = min(min(at_once, left), inner - first);
        return count > 0;
    }
};

// A block's rows of the second projections, in parts that go through a stage: of the same rows of some experts, and of all experts before the
// next rows; of no more rows than `kRows`.
template <int kRows>
struct DownParts {
    const Share& share;
    int all_slots, row = 0, rows = 0, slot = 0, slots = 0;

    __device__ __forceinline__ DownParts(const Shared& shared, int all_slots) : share(shared.shares[kDownShare]), all_slots(all_slots) {}

    __device__ __forceinline__ bool has_all() const { return slot + slots == all_slots; }

    // Goes on to the next part, if there is one.
    __device__ __forceinline__ bool next() {
        slot += slots;
        if (slot == all_slots || rows == 0) {
            slot = 0;
            row += rows;
            rows = min(min(share.at_once, kRows), share.count - row);
        }
        if (rows > 0) slots = min(share.at_once / rows, all_slots - slot);
        return rows > 0;
    }
};

// Brings biases into L2, by a warp.
__device__ __forceinline__ void prefetch_biases(const bf16* biases, int first, int count) {
    constexpr int kLine = 128 / sizeof(bf16);
    if (biases == nullptr || count == 0) return;
    for (int i = threadIdx.x % kWarp * kLine; i < count + kLine - 1; i += kWarp * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(biases + first + min(i, count - 1)));
    }
}

// Brings the scales and biases of the products around the experts into L2, by a warp.
__device__ __forceinline__ void prefetch_around(const MoeChain& c, const Shared& shared) {
    const Share& outputs = shared.shares[kOutput];
    prefetch_scales(c.output, outputs.first, outputs.count);
    prefetch_biases(c.output_bias, outputs.first, outputs.count);
#pragma unroll
    for (int i = 0; i < kProjections; ++i) {
        const Share& share = shared.shares[kNext + i];
        prefetch_scales(c.next[i].matrix, share.first, share.count);
        prefetch_biases(c.next[i].bias, share.first, share.count);
    }
}

// Adds 1 if the sum of two words does not fit in one.
__device__ __forceinline__ void count_carry(uint32_t& count, uint32_t a, uint32_t b) {
    asm("{\n.reg .u32 sum;\nadd.cc.u32 sum, %1, %2;\naddc.u32 %0, %0, 0;\n}" : "+r"(count) : "r"(a), "r"(b));
}

#endif
