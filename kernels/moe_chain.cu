// A layer of one row with experts, from its mixer's output projection to the projections that the next mixer begins with, in one launch
// (sm_90a): that product, the router's, the experts' two with their sum, and the next, with residual sums and norms between them. chain.cuh
// says how. An expert that every row goes to is one more, which the sigmoid of its gate multiplies.
//
// Each block has its share of the outputs of each product, of all chosen experts as if they were one. Weights are bf16, or e4m3 with scales;
// inputs are not quantised. A warp multiplies whole rows of weights, its lanes 16 bytes each in turn, with inputs in shared memory. Of the experts'
// second projections a warp has the same outputs for all experts, and adds their sums in the order of their logits. All blocks choose the row's
// experts by the same logits; only then does the thread that copies go on to their weights.
#include "chain.cuh"
#include "experts.cuh"
#include "pieces.cuh"

namespace {

constexpr int kConsumers = 16;  // warps
constexpr int kChainThreads = (kConsumers + 1) * kWarp;

// Matrices of all experts, anything of the next one `stride` bytes further.
struct Matrices {
    Matrix first;
    size_t stride;

    __device__ __forceinline__ Matrix of(int expert) const {
        return {of_expert(first.weight, stride, expert), of_expert(first.scales, stride, expert), first.scale_stride};
    }
};

struct RowNorm {
    const float* weight;
    float eps;
};

struct MoeChain {
    const bf16* x;  // [attended]
    Matrix output;  // [width, attended]
    const bf16* output_bias;
    bf16* hidden;  // [width]
    RowNorm norm;
    const bf16* router_weight;  // [experts, width]
    Router router;
    float* logits;                 // [experts]
    Matrices gate_up, down;        // [2 inner, width], [width, inner]
    Matrix shared_gate_up, shared_down;  // of the expert that every row goes to; null for none
    const bf16* shared_gate;       // [width]
    float* shared_logit;
    bf16* activated;         // [top_k, inner]
    bf16* shared_activated;  // [inner]
    RowNorm next_norm;
    Matrix next;  // [next_outputs, width]; null for none
    const bf16* next_bias;
    bf16* out;
    unsigned* arrived;
    int attended, width, experts, top_k, inner, next_outputs, kind;
    int stage_bytes, stages, in_flight;  // bytes of a stage, how many there are, and bytes that may be on their way

    __device__ __forceinline__ bool has_shared() const { return shared_gate != nullptr; }
    __device__ __forceinline__ int slots() const { return top_k + has_shared(); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As crates/kernels/src/cuda/moe.rs (MOST_ROUTES, and the expert for all rows) and moe/chain.rs have them too.
constexpr int kMostSlots = 33;      // experts of a row
constexpr int kMostResiduals = 32;  // outputs of a block that are added to the residual stream
constexpr int kStaticBytes = 9 << 10;

constexpr int kRoutedExperts = kConsumers * kWarp;
constexpr int kSlotsOfWarp = (kMostSlots + kConsumers - 1) / kConsumers;

// What becomes of a product's sums.
enum class Take { kAdd, kLogits, kStore };

// A product with rows of weights that are the same for all tokens.
struct Link {
    Matrix matrix;
    const bf16* bias;
    int n, k;
    Take take;
    void* out;
};

constexpr int kLinks = 4;  // the mixer's output, the router, the gate of the expert for all rows, and what follows
constexpr int kNext = 3;

// An expert of the row.
struct Slot {
    Matrix gate_up, down;
    bf16* activated;
    float weight;
};

struct Shared {
    StageBarriers barriers;
    uint64_t routed;
    Link links[kLinks];
    Slot slots[kMostSlots];
    float sums[kConsumers];
    bf16 residual[kMostResiduals];
    __align__(16) uint32_t keys[kRoutedExperts];  // logits, as to_key makes them
    uint32_t top_key;
    float down_scales[kMostSlots][kWarp];  // of this block's rows, or of their blocks: of two rows of blocks, of up to 2,048 inputs
};
static_assert(sizeof(Shared) <= kStaticBytes);

// The outputs of a product that a block computes.
struct Share {
    int first, count;

    __device__ __forceinline__ explicit Share(int n)
        : first(unsigned(n) * blockIdx.x / gridDim.x), count(int(unsigned(n) * (blockIdx.x + 1) / gridDim.x) - first) {}
};

// The gated outputs of a block, in parts that go through a stage: of one expert each.
struct GatedParts {
    int slot, first, count = 0, left;

    __device__ __forceinline__ GatedParts(const Share& share, int inner) : slot(share.first / inner), first(share.first - slot * inner), left(share.count) {}

    // Goes on to the next part, if there is one.
    __device__ __forceinline__ bool next(int inner, int at_once) {
        first += count;
        left -= count;
        if (first == inner) first = 0, ++slot;
        count = min(min(at_once, left), inner - first);
        return count > 0;
    }
};

// Copies the weights of all products, by one thread.
__device__ __forceinline__ void produce(const MoeChain& c, Shared& shared, uint8_t* memory) {
    Producer producer(shared.barriers, c.stages);
    const auto most_of = [&](int bytes) { return min(max((c.in_flight + bytes - 1) / bytes, 2), c.stages); };
    const auto place = [&](int stage) { return shared_address(memory + stage * c.stage_bytes); };
#pragma unroll 1
    for (int i = 0; i < kLinks; ++i) {
        const Link& link = shared.links[i];
        if (i == kNext) {
            barrier_wait(&shared.routed, 0);
            {
                const int row_bytes = c.gate_up.first.row_bytes(c.width), at_once = c.stage_bytes / (2 * row_bytes);
                const int most = most_of(2 * at_once * row_bytes);
                for (GatedParts parts(Share(c.slots() * c.inner), c.inner); parts.next(c.inner, at_once);) {
                    const int bytes = parts.count * row_bytes;
                    const uint32_t to = place(producer.begin(2 * bytes, most));
                    const uint8_t* const from = shared.slots[parts.slot].gate_up.weight + size_t(parts.first) * row_bytes;
                    producer.copy(to, from, bytes);
                    producer.copy(to + bytes, from + size_t(c.inner) * row_bytes, bytes);
                    producer.ring.next();
                }
            }
            const Share share(c.width);
            const int row_bytes = c.down.first.row_bytes(c.inner), at_once = min(c.stage_bytes / row_bytes, kConsumers);
            const int most = most_of(at_once * row_bytes);
            for (int first = 0; first < share.count; first += at_once) {
                const int bytes = min(at_once, share.count - first) * row_bytes;
                for (int slot = 0; slot < c.slots(); ++slot) {
                    const uint8_t* const from = shared.slots[slot].down.weight + size_t(share.first + first) * row_bytes;
                    producer.copy(place(producer.begin(bytes, most)), from, bytes);
                    producer.ring.next();
                }
            }
        }
        if (link.n == 0) continue;
        const Share share(link.n);
        const int row_bytes = link.matrix.row_bytes(link.k), at_once = c.stage_bytes / row_bytes, most = most_of(at_once * row_bytes);
        for (int first = 0; first < share.count; first += at_once) {
            const int bytes = min(at_once, share.count - first) * row_bytes;
            producer.copy(place(producer.begin(bytes, most)), link.matrix.weight + size_t(share.first + first) * row_bytes, bytes);
            producer.ring.next();
        }
    }
}

// Instruction caches are cold at each launch and each new product, so the code is kept small and loops are not unrolled.
struct Consumer : Consumers<kConsumers> {
    const MoeChain& c;
    Shared& shared;
    const uint8_t* stages;
    uint4* inputs;  // of a product, in shared memory
    Ring ring;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    __device__ __forceinline__ Consumer(const MoeChain& c, Shared& shared, uint8_t* memory)
        : Consumers<kConsumers>{c.arrived},
          c(c),
          shared(shared),
          stages(memory),
          inputs(reinterpret_cast<uint4*>(memory + c.stages * c.stage_bytes)),
          ring{c.stages} {}

    // Waits for the next stage.
    __device__ __forceinline__ const uint8_t* wait_stage() {
        barrier_wait(&shared.barriers.full[ring.place], ring.phase);
        return stages + ring.place * c.stage_bytes;
    }

    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.barriers.empty[ring.place]);
        ring.next();
    }

    // A row of inputs from memory.
    __device__ __forceinline__ void take_inputs(const bf16* from, int count, uint4* to) const {
#pragma unroll 4
        for (int vec = threadIdx.x; vec * kVec < count; vec += kConsumerThreads) to[vec] = __ldcg(reinterpret_cast<const uint4*>(from) + vec);
    }

    // The norm of the residual stream, which all blocks have written. It has no more than a vector for each thread.
    __device__ __forceinline__ void take_norm(const Float8 (&norm)[1], float eps) {
        Bf16x8 x[1];
        load(x, c.hidden, c.width);
        normalise(x, norm, shared.sums, c.width, eps);
        if (int(threadIdx.x) * kVec < c.width) inputs[threadIdx.x] = reinterpret_cast<const uint4&>(x[0]);
        sync();
    }

    // What this lane has of the products of rows of weights and inputs. `scales` are of each row's first block, and of blocks there is one each
    // 128 inputs.
    template <bool kFp8, int kRows>
    __device__ __forceinline__ void multiply(float (&sums)[kRows], const uint4* const (&rows)[kRows], const float* const (&scales)[kRows],
                                             bool blocks, const uint4* x, int pieces) const {
        float parts[kRows][4] = {};
#pragma unroll 1
        for (int piece = lane; piece < pieces; piece += kWarp) {
            const PieceInputs<kFp8> of_piece(x + piece * (kPieceInputs<kFp8> / kVec));
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                if constexpr (kFp8) {
                    float products[4] = {};
                    add_piece(products, rows[row][piece], of_piece);
                    const float scale = scales[row][blocks ? piece * kPieceInputs<kFp8> / kFp8Block : 0];
                    parts[row][0] = fmaf(sum_of(products), scale, parts[row][0]);
                } else {
                    add_piece(parts[row], rows[row][piece], of_piece);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) sums[row] = kFp8 ? parts[row][0] : sum_of(parts[row]);
        __syncwarp();
    }

    __device__ __forceinline__ bf16 add(int residual, float value) {
        bf16& sum = shared.residual[residual];
        return sum = __float2bfloat16(__bfloat162float(sum) + __bfloat162float(__float2bfloat16(value)));
    }

    // Warps take rows in turn, from stage to stage.
    template <bool kFp8>
    __device__ __forceinline__ void plain(const Link& link) {
        const Matrix matrix = link.matrix;
        const int row_bytes = matrix.row_bytes(link.k), pieces = row_bytes / kPieceBytes, at_once = c.stage_bytes / row_bytes;
        const Share share(link.n);
#pragma unroll 1
        for (int first = 0; first < share.count; first += at_once) {
            const int end = min(at_once, share.count - first);
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (int at = unsigned(warp - first) % kConsumers; at < end; at += kConsumers) {
                const int row = share.first + first + at;
                float sums[1];
                multiply<kFp8, 1>(sums, {reinterpret_cast<const uint4*>(stage + at * row_bytes)}, {kFp8 ? matrix.scales_of(row) : nullptr},
                                  matrix.scale_stride > 0, inputs, pieces);
                float value = warp_sum(sums[0]);
                if (lane == 0) {
                    if (link.bias != nullptr) value += __bfloat162float(link.bias[row]);
                    if (link.take == Take::kLogits) {
                        static_cast<float*>(link.out)[row] = value;
                    } else {
                        static_cast<bf16*>(link.out)[row] = link.take == Take::kAdd ? add(first + at, value) : __float2bfloat16(value);
                    }
                }
            }
            release_stage();
        }
    }

    // The first projections of the row's experts.
    template <bool kFp8>
    __device__ __forceinline__ void gated() {
        const int row_bytes = c.gate_up.first.row_bytes(c.width), pieces = row_bytes / kPieceBytes, at_once = c.stage_bytes / (2 * row_bytes);
        const bool blocks = c.gate_up.first.scale_stride > 0;
        int turn = warp;
        for (GatedParts parts(Share(c.slots() * c.inner), c.inner); parts.next(c.inner, at_once);) {
            const Slot& slot = shared.slots[parts.slot];
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (; turn < parts.count; turn += kConsumers) {
                const int gate = parts.first + turn, up = c.inner + gate;
                const float *gate_scales = nullptr, *up_scales = nullptr;
                if (kFp8) gate_scales = slot.gate_up.scales_of(gate), up_scales = slot.gate_up.scales_of(up);
                const auto row = [&](int at) { return reinterpret_cast<const uint4*>(stage + at * row_bytes); };
                float sums[2];
                multiply<kFp8, 2>(sums, {row(turn), row(parts.count + turn)}, {gate_scales, up_scales}, blocks, inputs, pieces);
                const float sum = sum_values(sums), of_up = __shfl_sync(kAllLanes, sum, kWarp / 2);
                if (lane == 0) slot.activated[gate] = __float2bfloat16(activate(c.kind, sum, of_up));
            }
            turn -= parts.count;
            release_stage();
        }
    }

    __device__ __forceinline__ void prefetch_gated_scales() const {
        for (GatedParts parts(Share(c.slots() * c.inner), c.inner); parts.next(c.inner, c.inner);) {
            const Matrix& matrix = shared.slots[parts.slot].gate_up;
            prefetch_scales(matrix, parts.first, parts.count);
            prefetch_scales(matrix, c.inner + parts.first, parts.count);
        }
    }

    // Which of a slot's scales in shared memory is the first of one of this block's rows of the second projections.
    __device__ __forceinline__ int down_scale(const Share& share, int row) const {
        if (c.down.first.scale_stride == 0) return row;
        return ((share.first + row) / kFp8Block - share.first / kFp8Block) * (c.inner / kFp8Block);
    }

    // The scales of the second projections of the experts that this warp has to read, a lane of each.
    __device__ __forceinline__ void load_down_scales(float (&scales)[kSlotsOfWarp]) const {
        const Share share(c.width);
        const int of_row = c.inner / kFp8Block, stride = c.down.first.scale_stride;
        const int row = stride == 0 ? lane : lane / of_row, block = stride == 0 ? 0 : lane % of_row;
        const int rows = stride == 0 ? share.count : (share.first + share.count - 1) / kFp8Block - share.first / kFp8Block + 1;
        const int at = stride == 0 ? share.first + row : (share.first / kFp8Block + row) * stride + block;
#pragma unroll
        for (int i = 0; i < kSlotsOfWarp; ++i) {
            const int slot = warp + i * kConsumers;
            if (slot < c.slots() && row < rows) scales[i] = shared.slots[slot].down.scales[at];
        }
    }

    // The second projections, and their sum, which is added to the residual stream.
    template <bool kFp8>
    __device__ __forceinline__ void down() {
        const int row_bytes = c.down.first.row_bytes(c.inner), pieces = row_bytes / kPieceBytes, at_once = min(c.stage_bytes / row_bytes, kConsumers);
        const bool blocks = c.down.first.scale_stride > 0;
        const Share share(c.width);
#pragma unroll 1
        for (int first = 0; first < share.count; first += at_once) {
            const int row = first + warp;
            const bool has_row = warp < min(at_once, share.count - first);
            float sum = 0.0f;
#pragma unroll 1
            for (int slot = 0; slot < c.slots(); ++slot) {
                const uint8_t* const stage = wait_stage();
                if (has_row) {
                    float of_slot[1];
                    multiply<kFp8, 1>(of_slot, {reinterpret_cast<const uint4*>(stage + warp * row_bytes)},
                                      {kFp8 ? shared.down_scales[slot] + down_scale(share, row) : nullptr}, blocks,
                                      inputs + slot * (c.inner / kVec), pieces);
                    sum = fmaf(shared.slots[slot].weight, of_slot[0], sum);
                }
                release_stage();
            }
            sum = warp_sum(sum);
            if (lane == 0 && has_row) c.hidden[share.first + row] = add(row, sum);
        }
    }

    // Chooses the row's experts by the logits that all blocks have computed, as route_row does, and says so to the thread that copies. Slots
    // are in the order of logits, the largest first, and of equal ones that of the first expert. An expert has as many threads as can be.
    __device__ __forceinline__ void route() {
        const Router& router = c.router;
        const int log2 = 31 - __clz(kRoutedExperts / c.experts), threads = 1 << min(log2, 5);
        const int expert = threadIdx.x >> min(log2, 5), part = threadIdx.x & (threads - 1);
        uint32_t key = 0;
        if (expert < c.experts) {
            const float bias = router.bias == nullptr ? 0.0f : __bfloat162float(router.bias[expert]);
            key = to_key(__ldcg(c.logits + expert) * router.scale + bias);
        }
        if (part == 0) shared.keys[expert] = key;
        sync();
        // How many are before it.
        int rank = 0;
#pragma unroll 2
        for (int at = part * 4; at < c.experts; at += threads * 4) {
            const uint4 other = *reinterpret_cast<const uint4*>(shared.keys + at);
            const uint32_t others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) rank += others[i] >= key + (at + i >= expert);
        }
#pragma unroll 1
        for (int offset = threads / 2; offset > 0; offset /= 2) rank += __shfl_xor_sync(kAllLanes, rank, offset);
        const bool is_first = part == 0 && key > 0, is_chosen = is_first && rank < c.top_k;
        if (is_first && rank == 0) shared.top_key = key;
        sync();
        const float top = from_key(shared.top_key);
        const float weight = is_chosen || (is_first && router.of_all) ? expf(from_key(key) - top) : 0.0f;
        float sum = warp_sum(weight);
        if (lane == 0) shared.sums[warp] = sum;
        sync();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) sum += shared.sums[i];
        if (is_chosen) {
            const float scale = router.scales == nullptr ? 1.0f : router.scales[expert];
            const float part_of_all = isfinite(top) ? __fdividef(weight, sum) : __int_as_float(0x7fffffff);
            shared.slots[rank] = {c.gate_up.of(expert), c.down.of(expert), c.activated + rank * c.inner, part_of_all * scale};
        }
        if (threadIdx.x == 0 && c.has_shared()) {
            shared.slots[c.top_k] = {c.shared_gate_up, c.shared_down, c.shared_activated, 1.0f / (1.0f + expf(-__ldcg(c.shared_logit)))};
        }
        sync();
        if (threadIdx.x == 0) barrier_arrive(&shared.routed);
    }

    __device__ __forceinline__ void run() {
        enum Phase { kOutput, kRouter, kGated, kDown, kLast };
        pdl_wait();
        const Share own(c.width);
        bf16 residual;
        if (int(threadIdx.x) < own.count) residual = c.hidden[own.first + threadIdx.x];
        take_inputs(c.x, c.attended, inputs);
        if (int(threadIdx.x) < own.count) shared.residual[threadIdx.x] = residual;
        sync();
        const int phases = shared.links[kNext].n == 0 ? kLast : kLast + 1;
        float scales[kSlotsOfWarp] = {};  // of second projections
#pragma unroll 1
        for (int phase = kOutput; phase < phases; ++phase) {
            const bool norms = phase == kRouter || phase == kLast;
            const RowNorm row_norm{phase == kRouter ? c.norm.weight : c.next_norm.weight, phase == kRouter ? c.norm.eps : c.next_norm.eps};
            Float8 norm[1];
            if (norms) load_norm(norm, row_norm.weight, c.width);
            if (phase > kOutput) meet();
            if (norms) take_norm(norm, row_norm.eps);
            if (phase == kGated) {
                route();
                // Read ahead, as they come from memory.
                if (c.down.first.is_fp8()) load_down_scales(scales);
                if (warp == 1) prefetch_gated_scales();
                if (c.gate_up.first.is_fp8()) {
                    gated<true>();
                } else {
                    gated<false>();
                }
            } else if (phase == kDown) {
#pragma unroll
                for (int i = 0; i < kSlotsOfWarp; ++i) {
                    if (warp + i * kConsumers < c.slots()) shared.down_scales[warp + i * kConsumers][lane] = scales[i];
                }
                take_inputs(c.activated, c.top_k * c.inner, inputs);
                if (c.has_shared()) take_inputs(c.shared_activated, c.inner, inputs + c.top_k * (c.inner / kVec));
                sync();
                if (c.down.first.is_fp8()) {
                    down<true>();
                } else {
                    down<false>();
                }
            } else {
                const int first = phase == kOutput ? 0 : phase == kRouter ? 1 : kNext, end = phase == kRouter ? kNext : first + 1;
#pragma unroll 1
                for (int i = first; i < end; ++i) {
                    if (shared.links[i].matrix.is_fp8()) {
                        plain<true>(shared.links[i]);
                    } else {
                        plain<false>(shared.links[i]);
                    }
                }
            }
        }
        leave();
    }
};

__device__ __forceinline__ void run(const MoeChain& c) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared shared;
    pdl_launch();
    if (threadIdx.x == 0) {
        const auto bf16_rows = [](const bf16* rows) { return Matrix{reinterpret_cast<const uint8_t*>(rows), nullptr, 0}; };
        shared.links[0] = {c.output, c.output_bias, c.width, c.attended, Take::kAdd, c.hidden};
        shared.links[1] = {bf16_rows(c.router_weight), nullptr, c.experts, c.width, Take::kLogits, c.logits};
        shared.links[2] = {bf16_rows(c.shared_gate), nullptr, c.has_shared(), c.width, Take::kLogits, c.shared_logit};
        shared.links[kNext] = {c.next, c.next_bias, c.next_outputs, c.width, Take::kStore, c.out};
        barrier_init(&shared.routed, 1);
        shared.barriers.init(c.stages, kConsumers);
    }
    __syncthreads();
    if (threadIdx.x < kConsumers * kWarp) {
        Consumer(c, shared, memory).run();
        return;
    }
    // Scales, and weights of norms, wait in L2 for when they are needed.
    const Share outputs(c.width), next_outputs(c.next_outputs);
    prefetch_scales(c.output, outputs.first, outputs.count);
    prefetch_scales(c.next, next_outputs.first, next_outputs.count);
    if (blockIdx.x == 0) {
        prefetch_norm(c.norm.weight, c.width);
        if (c.next_outputs > 0) prefetch_norm(c.next_norm.weight, c.width);
    }
    if (threadIdx.x % kWarp == 0) produce(c, shared, memory);
}

#else

__device__ __forceinline__ void run(const MoeChain&) {}

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kChainThreads, 1)
    moe_chain(const bf16* x, const uint8_t* output, const float* output_scales, int output_stride, const bf16* output_bias, bf16* hidden,
              const float* norm, float eps, const bf16* router_weight, const bf16* router_bias, int of_all, float scale,
              const float* expert_scales, float* logits, const uint8_t* gate_up, const float* gate_up_scales, int gate_up_stride,
              uint64_t next_gate_up, const uint8_t* down, const float* down_scales, int down_stride, uint64_t next_down,
              const uint8_t* shared_gate_up, const float* shared_gate_up_scales, const uint8_t* shared_down, const float* shared_down_scales,
              const bf16* shared_gate, float* shared_logit, bf16* activated, bf16* shared_activated, const float* next_norm, float next_eps,
              const uint8_t* next, const float* next_scales, int next_stride, const bf16* next_bias, bf16* out, unsigned* arrived,
              int attended, int width, int experts, int top_k, int inner, int next_outputs, int kind, int stage_bytes, int stages,
              int in_flight) {
    run({x,
         {output, output_scales, output_stride},
         output_bias,
         hidden,
         {norm, eps},
         router_weight,
         {router_bias, of_all != 0, scale, expert_scales},
         logits,
         {{gate_up, gate_up_scales, gate_up_stride}, next_gate_up},
         {{down, down_scales, down_stride}, next_down},
         {shared_gate_up, shared_gate_up_scales, gate_up_stride},
         {shared_down, shared_down_scales, down_stride},
         shared_gate,
         shared_logit,
         activated,
         shared_activated,
         {next_norm, next_eps},
         {next, next_scales, next_stride},
         next_bias,
         out,
         arrived,
         attended,
         width,
         experts,
         top_k,
         inner,
         next_outputs,
         kind,
         stage_bytes,
         stages,
         in_flight});
}
