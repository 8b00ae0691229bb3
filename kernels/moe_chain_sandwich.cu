// A layer of one row with experts beside an MLP and norms around both (Gemma 4), from its mixer's output projection to the projections that the next
// mixer begins with, in one launch (sm_90a), as moe_chain.cu. Weights are bf16.
//
// What the mixer adds to the residual stream is normalised first. Of the sum there are three norms: the router's, the MLP's and the experts'. What
// these two add is normalised each, then their sum; the stream, with that, is multiplied by a scalar. Every block computes all norms of whole rows,
// from what blocks give each other: the outputs of the mixer, the MLP and the experts. The MLP's first projection is computed once the row's experts
// are known, as its weights come to shared memory while blocks wait for the router's logits.
#include "moe_chain_copies.cuh"
#include "moe_chain_rows.cuh"

namespace {

// As `SandwichArgs` of crates/kernels/src/cuda/moe/chain.rs. `moe.norm` is that of the MLP's input, `moe.kind` is the MLP's activation too.
struct SandwichChain {
    MoeChain moe;
    const float* mixer_norm;       // of what the mixer adds; all norms have the eps of `moe.norm` but `moe.next_norm`
    const float* router_norm;      // of the router's input
    const float* expert_norm;      // of the experts' input
    const float* mlp_sum_norm;     // of what the MLP gives
    const float* expert_sum_norm;  // of what the experts give
    const float* sum_norm;         // of both together
    const float* scalar;
    int inner;  // of the MLP
    int padding;
};
static_assert(sizeof(SandwichChain) == sizeof(MoeChain) + 64, "SandwichArgs of crates/kernels/src/cuda/moe/chain.rs");

// With what the compiler may know of all such layers: it leaves out the code for others.
__device__ __forceinline__ SandwichChain of_bf16(SandwichChain of) {
    MoeChain& c = of.moe;
    c.output = bf16_rows(c.output.weight);
    c.gate_up.first = bf16_rows(c.gate_up.first.weight);
    c.down.first = bf16_rows(c.down.first.weight);
    c.dense_gate_up = bf16_rows(c.dense_gate_up.weight);
    c.dense_down = bf16_rows(c.dense_down.weight);
#pragma unroll
    for (Projection& next : c.next) next.matrix = bf16_rows(next.matrix.weight);
    c.shared_gate = nullptr;
    return of;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kMlpDown = 2;   // among links, where moe_chain.cu has the gate of the expert that every row goes to
constexpr int kRowQuads = 2;  // quads of a row that a thread has
static_assert(kRowQuads * kQuad * kConsumerThreads >= kMostWidth);
constexpr int kNormSums = 4;  // norms between two waits of blocks

struct SandwichShared {
    Shared shared;
    Share gated;  // of the MLP
    __align__(16) float sums[kNormSums][kConsumers];

    // The block's outputs of the first projections of the MLP, whose slot is behind those of the row's experts, or of these.
    __device__ __forceinline__ GatedParts parts(const SandwichChain& of, bool of_mlp) const {
        return of_mlp ? GatedParts(of.inner, of.moe.top_k, gated.first, gated.count) : GatedParts(shared, of.moe.inner);
    }
};
static_assert(sizeof(SandwichShared) <= kStaticBytes);

// What the warps that multiply do.
struct Consumers : RowExperts {
    using Row = uint2[kRowQuads];
    using Weights = float4[kRowQuads];

    const SandwichChain& of;
    SandwichShared& own;
    uint2* const first_inputs = inputs;
    const int quads = c.width / kQuad;
    Row stream{};  // this thread's part of the residual stream

    __device__ __forceinline__ Consumers(const SandwichChain& of, SandwichShared& own, uint8_t* memory)
        : RowExperts(of.moe, own.shared, memory), of(of), own(own) {}

    __device__ __forceinline__ static int quad_of(int i) { return threadIdx.x + i * kConsumerThreads; }

    __device__ __forceinline__ void load(Weights& weights, const float* from) const {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            weights[i] = quad_of(i) < quads ? reinterpret_cast<const float4*>(from)[quad_of(i)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    // A row that the blocks give each other.
    __device__ __forceinline__ void take_row(Row& row, const uint32_t* words) const {
        wait_quads(row, words, threadIdx.x, kConsumerThreads, quads, tag);
    }

    __device__ __forceinline__ static float squares(const Row& row) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            const float2 low = widen_pair(row[i].x), high = widen_pair(row[i].y);
            sum += fmaf(low.x, low.x, low.y * low.y) + fmaf(high.x, high.x, high.y * high.y);
        }
        return sum;
    }

    // What the values of rows are multiplied by in their norms, from this thread's part of their squares. Norms between two waits of blocks have
    // different sums, from `at` on.
    template <int kRows>
    __device__ __forceinline__ void scales(float (&of_rows)[kRows], int at, float eps) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float sum = warp_sum(of_rows[i]);
            if (lane == 0) own.sums[at + i][warp] = sum;
        }
        sync();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kConsumers; ++j) sum += own.sums[at + i][j];
            of_rows[i] = rsqrtf(__fdividef(sum, float(c.width)) + eps);
        }
    }

    __device__ __forceinline__ float scale(const Row& row, int at, float eps) const {
        float of_row[1] = {squares(row)};
        scales(of_row, at, eps);
        return of_row[0];
    }

    __device__ __forceinline__ static float4 normed(uint2 values, float scale, const float4& weight) {
        const float2 low = widen_pair(values.x), high = widen_pair(values.y);
        return make_float4(low.x * scale * weight.x, low.y * scale * weight.y, high.x * scale * weight.z, high.y * scale * weight.w);
    }

    __device__ __forceinline__ static uint2 narrow_quad(const float4& v) { return make_uint2(pack(v.x, v.y), pack(v.z, v.w)); }

    // Adds the norm of a row to the residual stream, which is then multiplied by `factor`.
    __device__ __forceinline__ void add_normed(const Row& row, float scale, const Weights& weights, float factor) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            const float4 added = normed(row[i], scale, weights[i]);
            const float2 low = widen_pair(stream[i].x), high = widen_pair(stream[i].y);
            stream[i] = narrow_quad(make_float4((low.x + added.x) * factor, (low.y + added.y) * factor, (high.x + added.z) * factor,
                                                (high.y + added.w) * factor));
        }
    }

    // Stores the norm of the residual stream as inputs.
    __device__ __forceinline__ void put(uint2* to, float scale, const Weights& weights) const {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            if (quad_of(i) < quads) to[quad_of(i)] = narrow_quad(normed(stream[i], scale, weights[i]));
        }
    }

    __device__ __forceinline__ void give(uint32_t* words, int row, float value) const { publish(words + row, __float2bfloat16(value), tag); }

    // From what the mixer added to the inputs of the router, the MLP and the experts, one behind the other.
    __device__ __forceinline__ void take_output() {
        const float eps = c.norm.eps;
        Weights mixer, router, mlp, experts;
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            if (quad_of(i) < quads) stream[i] = __ldcg(reinterpret_cast<const uint2*>(c.hidden) + quad_of(i));
        }
        load(mixer, of.mixer_norm);
        load(router, of.router_norm);
        load(mlp, c.norm.weight);
        load(experts, of.expert_norm);
        tell_others();
        wait_for_others();
        Row row;
        take_row(row, c.exchange->hidden);
        add_normed(row, scale(row, 0, eps), mixer, 1.0f);
        const float of_stream = scale(stream, 1, eps);
        put(first_inputs, of_stream, router);
        put(first_inputs + quads, of_stream, mlp);
        put(first_inputs + 2 * quads, of_stream, experts);
        sync();
    }

    // From what the MLP and the experts give to the residual stream, and the inputs of what follows.
    __device__ __forceinline__ void take_sums() {
        const float eps = c.norm.eps, factor = *of.scalar;
        Weights of_mlp, of_experts, of_both, next;
        load(of_mlp, of.mlp_sum_norm);
        load(of_experts, of.expert_sum_norm);
        load(of_both, of.sum_norm);
        if (c.has_next()) load(next, c.next_norm.weight);
        tell_others();
        wait_for_others();
        Row mlp, experts, both;
        take_row(mlp, c.exchange->mlp);
        take_row(experts, c.exchange->next_hidden);
        float of_rows[2] = {squares(mlp), squares(experts)};
        scales(of_rows, 0, eps);
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            const float4 a = normed(mlp[i], of_rows[0], of_mlp[i]), b = normed(experts[i], of_rows[1], of_experts[i]);
            both[i] = narrow_quad(make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
        }
        add_normed(both, scale(both, 2, eps), of_both, factor);
        if (c.has_next()) put(first_inputs, scale(stream, 3, c.next_norm.eps), next);
        sync();
        // Each block stores a part of it. All have read what it was, as they have given what they made of it.
        const int begin = first_output(quads, blockIdx.x), end = first_output(quads, blockIdx.x + 1);
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            if (quad_of(i) >= begin && quad_of(i) < end) reinterpret_cast<uint2*>(c.hidden)[quad_of(i)] = stream[i];
        }
    }

    // The first projections of the MLP and of the row's experts.
    __device__ __forceinline__ void gate() {
        tell_others();
        wait_for_others();
        route();
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            inputs += quads;
            gated<false>(own.parts(of, i == 0));
        }
        inputs = first_inputs;
        tell_others();
        wait_for_others();
    }

    __device__ __forceinline__ void run() {
        pdl_wait();
#pragma unroll 1
        for (int i = 0; i < kLinks; ++i) {
            if (i == kRouter) take_output();
            if (i == kMlpDown) gate();
            if (i == kOutput || i == kMlpDown) {
                const float4 no_norm[kTaken] = {};
                take(shared.sources[i == kOutput ? kOutput : kDown], no_norm);
            }
            if (i == kNext) {
                inputs = first_inputs;
                down<false>([&](int, int row, float sum) { give(c.exchange->next_hidden, row, sum); });
                take_sums();
                if (warp == kLeastBusy) leave();
                if (!c.has_next()) return;
            }
            // The MLP's inputs lie behind those of the experts.
            if (i == kMlpDown) inputs += c.top_k * c.inner / kQuad;
            const Link& link = shared.links[i];
            plain<false>(link, shared.shares[i], [&](int, int row, float value) { give(static_cast<uint32_t*>(link.out), row, value); });
        }
    }
};

// Copies the weights of all products, by one thread, in the order in which they are multiplied.
__device__ __forceinline__ void produce(const SandwichChain& of, SandwichShared& own, uint8_t* memory) {
    const MoeChain& c = of.moe;
    Shared& shared = own.shared;
    WeightCopies<RowExperts> copies(c, shared, memory);
#pragma unroll 1
    for (int i = 0; i < kLinks; ++i) {
        if (i == kMlpDown) {
#pragma unroll 1
            for (int j = 0; j < 2; ++j) copies.gated(own.parts(of, j == 0));
        }
        if (i == kNext) copies.down();
        copies.rows(shared.links[i].matrix, shared.shares[i]);
    }
}

__device__ __forceinline__ void run(const SandwichChain& of) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ SandwichShared own;
    Shared& shared = own.shared;
    const MoeChain& c = of.moe;
    pdl_launch();
    if (threadIdx.x == 0) {
        begin(c, shared);
        shared.links[kMlpDown] = {c.dense_down, nullptr, c.width, of.inner, Take::kAdd, c.exchange->mlp, 0};
        shared.slots[c.top_k] = {c.dense_gate_up, c.dense_down, c.dense_activated, 0.0f, 0};
    }
    if (threadIdx.x == kWarp) {
        shared.sources[kOutput] = {nullptr, {}, c.attended, true, false};
        shared.sources[kDown] = {c.exchange->activated, {}, c.top_k * c.inner + of.inner, true, false};
    }
    if (threadIdx.x < kWarp) {
        __syncwarp();
        divide<RowExperts>(c, shared);
        if (threadIdx.x == kShares) own.gated.set(of.inner, c.dense_gate_up.row_bytes(c.width), 2, 1, c.stage_bytes);
    }
    __syncthreads();
    if (threadIdx.x < kConsumerThreads) {
        Consumers(of, own, memory).run();
        return;
    }
    // Biases, and weights of norms, wait in L2 for when they are needed.
    prefetch_around(c, shared);
    // One norm a block.
    const float* const norms[] = {of.mixer_norm, of.router_norm, c.norm.weight, of.expert_norm, of.mlp_sum_norm, of.expert_sum_norm, of.sum_norm,
                                  c.next_norm.weight};
#pragma unroll
    for (int i = 0; i < int(sizeof(norms) / sizeof(norms[0])); ++i) {
        if (blockIdx.x == i % gridDim.x && norms[i] != nullptr) prefetch_norm(norms[i], c.width);
    }
    if (threadIdx.x % kWarp == 0) produce(of, own, memory);
}

#else

__device__ __forceinline__ void run(const SandwichChain&) {}

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kChainThreads, 1) moe_chain_sandwich(const __grid_constant__ SandwichChain of) { run(of_bf16(of)); }
