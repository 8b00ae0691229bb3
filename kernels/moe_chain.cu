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
        const auto bf16_rows = [](const bf16* rows) { return Matrix{reinterpret_cast<const uint8_t*>(rows), nullptr, 0}; };
        shared.links[0] = {c.output, c.output_bias, c.width, c.attended, Take::kAdd, nullptr, 0};
        shared.links[1] = {bf16_rows(c.router_weight), nullptr, c.experts, c.width, Take::kLogits, c.logits, 0};
        shared.links[2] = {bf16_rows(c.shared_gate), nullptr, c.has_shared(), c.width, Take::kLogits, c.shared_logit, c.experts};
#pragma unroll
        for (int i = 0; i < kProjections; ++i) {
            const Projection& next = c.next[i];
            shared.links[kNext + i] = {next.matrix, next.bias, next.outputs, c.width, Take::kStore, next.out, 0};
        }
        if (c.has_shared()) shared.slots[c.top_k] = {c.shared_gate_up, c.shared_down, c.shared_activated, 0.0f, 0};
        shared.zeros = {};
        barrier_init(&shared.routed, c.top_k);
        shared.barriers.init(c.stages, kConsumers);
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
    const Share& outputs = shared.shares[0];
    prefetch_scales(c.output, outputs.first, outputs.count);
    prefetch_biases(c.output_bias, outputs.first, outputs.count);
#pragma unroll
    for (int i = 0; i < kProjections; ++i) {
        const Share& share = shared.shares[kNext + i];
        prefetch_scales(c.next[i].matrix, share.first, share.count);
        prefetch_biases(c.next[i].bias, share.first, share.count);
    }
    if (blockIdx.x == 0) {
        prefetch_biases(c.router.bias, 0, c.experts);
        prefetch_norm(c.norm.weight, c.width);
        if (c.has_next()) prefetch_norm(c.next_norm.weight, c.width);
    }
    if (threadIdx.x % kWarp == 0) produce<Experts>(c, shared, memory);
}

#endif

}  // namespace

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define RUN(EXPERTS, ...) run<EXPERTS>(__VA_ARGS__)
#else
#define RUN(EXPERTS, ...)
#endif

#define MOE_CHAIN(NAME, EXPERTS)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(kChainThreads, 1)                                                                          \
        NAME(const bf16* x, const uint8_t* output, const float* output_scales, int output_stride, const bf16* output_bias, bf16* hidden,    \
             const float* norm, float eps, const bf16* router_weight, const bf16* router_bias, int of_all, float scale,                     \
             const float* expert_scales, float* logits, unsigned* loads, const uint8_t* gate_up, const float* gate_up_scales,               \
             int gate_up_stride, const bf16* gate_up_bias, uint64_t next_gate_up, const uint8_t* down, const float* down_scales,            \
             int down_stride, const bf16* down_bias, uint64_t next_down, const uint8_t* shared_gate_up,                                     \
             const float* shared_gate_up_scales, const uint8_t* shared_down, const float* shared_down_scales, const bf16* shared_gate,      \
             float* shared_logit, bf16* activated, bf16* shared_activated, const float* next_norm, float next_eps, const uint8_t* next,     \
             const float* next_scales, int next_stride, const bf16* next_bias, bf16* next_out, int next_outputs, const uint8_t* other,      \
             const float* other_scales, int other_stride, const bf16* other_bias, bf16* other_out, int other_outputs, Exchange* exchange,   \
             int attended, int width, int experts, int top_k, int inner, int kind, int stage_bytes, int stages, int in_flight,              \
             int plain_bytes) {                                                                                                             \
        RUN(EXPERTS, MoeChain{x,                                                                                                            \
                              {output, output_scales, output_stride},                                                                       \
                              output_bias,                                                                                                  \
                              hidden,                                                                                                       \
                              {norm, eps},                                                                                                  \
                              router_weight,                                                                                                \
                              {router_bias, of_all != 0, scale, expert_scales},                                                             \
                              logits,                                                                                                       \
                              loads,                                                                                                        \
                              {{gate_up, gate_up_scales, gate_up_stride}, gate_up_bias, next_gate_up},                                      \
                              {{down, down_scales, down_stride}, down_bias, next_down},                                                     \
                              {shared_gate_up, shared_gate_up_scales, gate_up_stride},                                                      \
                              {shared_down, shared_down_scales, down_stride},                                                               \
                              shared_gate,                                                                                                  \
                              shared_logit,                                                                                                 \
                              activated,                                                                                                    \
                              shared_activated,                                                                                             \
                              {next_norm, next_eps},                                                                                        \
                              {{{next, next_scales, next_stride}, next_bias, next_out, next_outputs},                                       \
                               {{other, other_scales, other_stride}, other_bias, other_out, other_outputs}},                                \
                              exchange,                                                                                                     \
                              attended,                                                                                                     \
                              width,                                                                                                        \
                              experts,                                                                                                      \
                              top_k,                                                                                                        \
                              inner,                                                                                                        \
                              kind,                                                                                                         \
                              stage_bytes,                                                                                                  \
                              stages,                                                                                                       \
                              in_flight,                                                                                                    \
                              plain_bytes});                                                                                                \
    }

MOE_CHAIN(moe_chain, RowExperts)
MOE_CHAIN(moe_chain_mxfp4, Mxfp4Experts)
