// A layer of one row with experts, from its mixer's output projection to the projections that the next mixer begins with, in one launch
// (sm_90a): that product, the router's, the experts' two with their sum, and the next one or two, with residual sums and norms between them.
// chain.cuh says how. An expert that every row goes to is one more, which the sigmoid of its gate multiplies.
//
// Each block has its share of the outputs of each product, of all chosen experts as if they were one. Weights are bf16, or e4m3 with scales;
// those of experts may also be MXFP4 (moe_chain_mxfp4.cuh); inputs are not quantised (pieces.cuh). A warp multiplies whole rows of weights, its
// lanes 16 bytes each in turn, with inputs in shared memory. Of the experts' second projections a block computes the same outputs for all experts
// and adds them in the order of the experts' logits. Every block chooses the row's experts, from the same logits; only then can its copying thread
// go on to their weights. What blocks need of each other they exchange as tagged words (tagged.cuh).
#include "moe_chain_copies.cuh"
#include "moe_chain_mxfp4.cuh"
#include "moe_chain_rows.cuh"

namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kGate = 2;  // among links, of the expert that every row goes to

// Copies the weights of all products, by one thread.
template <typename Experts>
__device__ __forceinline__ void produce(const MoeChain& c, Shared& shared, uint8_t* memory) {
    WeightCopies<Experts> copies(c, shared, memory);
#pragma unroll 1
    for (int i = 0; i < kLinks; ++i) {
        // The experts' products come before what follows the layer.
        if (i == kNext) {
            copies.gated(GatedParts(shared, c.inner));
            copies.down();
        }
        copies.rows(shared.links[i].matrix, shared.shares[i]);
    }
}

// What the warps that multiply do.
template <typename Experts>
__device__ __forceinline__ void consume(Experts warps) {
    const MoeChain& c = warps.c;
    Shared& shared = warps.shared;
    pdl_wait();
    const Share& own = shared.shares[0];
    if (int(threadIdx.x) < own.count) warps.residual = c.hidden[own.first + threadIdx.x];
    // In L1 already, a product's first scales delay it less. Those of what follows might not stay there so long.
    if (warps.warp == 0) touch_scales(c.output, own.first, own.count);
    const int phases = kLast + c.has_next();
#pragma unroll 1
    for (int phase = kOutput; phase < phases; ++phase) {
        const Source source = shared.sources[phase];
        float4 norm[kTaken] = {};
        warps.load_norm(norm, source);
        if (phase > kOutput) {
            warps.tell_others();
            if (phase == kLast && warps.warp >= kConsumers - kProjections) {
                const int next = kNext + warps.warp - (kConsumers - kProjections);
                touch_scales(shared.links[next].matrix, shared.shares[next].first, shared.shares[next].count);
            }
            if (phase == kDown) warps.put_ahead();
            warps.wait_for_others();
        }
        if (phase == kGated) {
            warps.route();
            warps.read_ahead();
            warps.gated();
            continue;
        }
        warps.take(source, norm);
        if (phase == phases - 1 && warps.warp == kLeastBusy) warps.leave();
        if (phase == kDown) {
            warps.down();
            continue;
        }
        const int first = phase == kOutput ? 0 : phase == kRouter ? 1 : kNext, end = phase == kOutput ? 1 : phase == kRouter ? kNext : kLinks;
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            if (shared.links[i].matrix.is_fp8()) {
                warps.template plain<true>(shared.links[i], shared.shares[i]);
            } else {
                warps.template plain<false>(shared.links[i], shared.shares[i]);
            }
        }
    }
}

template <typename Experts>
__device__ __forceinline__ void run(const MoeChain& c) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared shared;
    pdl_launch();
    if (threadIdx.x == 0) {
        begin(c, shared);
        shared.links[kGate] = {bf16_rows(c.shared_gate), nullptr, c.has_shared(), c.width, Take::kLogits, c.shared_logit, c.experts};
        if (c.has_shared()) shared.slots[c.top_k] = {c.dense_gate_up, c.dense_down, c.dense_activated, 0.0f, 0};
    }
    if (threadIdx.x == kWarp) {
        const auto source = [](const uint32_t* words, int count, const RowNorm& norm, const Matrix& matrix) {
            return Source{words, norm, count, !matrix.is_fp8(), matrix.is_fp8()};
        };
        shared.sources[kOutput] = source(nullptr, c.attended, {}, c.output);
        shared.sources[kRouter] = source(c.exchange->hidden, c.width, c.norm, c.gate_up.first);
        shared.sources[kRouter].plain = true;
        shared.sources[kGated] = {};
        shared.sources[kDown] = source(c.exchange->activated, c.slots() * c.inner, {}, c.down.first);
        Source& last = shared.sources[kLast];
        last = {c.exchange->next_hidden, c.next_norm, c.width, false, false};
#pragma unroll
        for (const Projection& next : c.next) {
            if (next.outputs > 0) (next.matrix.is_fp8() ? last.halves : last.plain) = true;
        }
    }
    if (threadIdx.x < kWarp) {
        __syncwarp();
        divide<Experts>(c, shared);
    }
    __syncthreads();
    if (threadIdx.x < kConsumerThreads) {
        consume(Experts(c, shared, memory));
        return;
    }
    // Scales, biases, and weights of norms, wait in L2 for when they are needed.
    prefetch_around(c, shared);
    if (blockIdx.x == 0) {
        prefetch_biases(c.router.bias, 0, c.experts);
        prefetch_norm(c.norm.weight, c.width);
        if (c.has_next()) prefetch_norm(c.next_norm.weight, c.width);
    }
    if (threadIdx.x % kWarp == 0) produce<Experts>(c, shared, memory);
}

// Of a copy the compiler makes less code than of the parameter itself.
#define RUN(EXPERTS, C) run<EXPERTS>(MoeChain(C));

#else

#define RUN(EXPERTS, C)

#endif

}  // namespace

#define MOE_CHAIN(NAME, EXPERTS) \
    extern "C" __global__ void __launch_bounds__(kChainThreads, 1) NAME(const __grid_constant__ MoeChain c) { RUN(EXPERTS, c) }

MOE_CHAIN(moe_chain, RowExperts)
MOE_CHAIN(moe_chain_mxfp4, Mxfp4Experts)
