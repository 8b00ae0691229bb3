// Linear layers of one row that follow each other, in one launch (sm_90a): a mixer's output projection, the two of an MLP, and the
// projections that the next mixer begins with, with the residual sums and the norms between them. chain.cuh says how.
//
// Each block has its share of the outputs of each layer, whose weights are one range of memory (if gated, two). The thread that copies them
// waits for no inputs, so the memory stays busy while the blocks wait for each other. All warps multiply each row of weights, a thread always
// by the same inputs, which it keeps in registers. Sums of the warps are added in a fixed order.
#include "activation.cuh"
#include "chain.cuh"

namespace {

constexpr int kConsumers = 8;  // warps
constexpr int kChainThreads = (kConsumers + 1) * kWarp;

// What becomes of sums.
enum class Take { kAdd, kGlu, kStore };

// `out[n] = x[k] . weight[n, k]^T (+ bias)`, of the norm of x if there is one.
struct Link {
    const bf16* x;
    const float* norm;  // [k]; null for none
    float eps;
    const bf16* weight;
    const bf16* bias;  // null for none
    int n, k;          // if gated n outputs of 2 n rows: gate, up
    Take take;
    bf16* out;  // [n], to which outputs are added, or which takes them
};

constexpr int kMostLinks = 4;

struct Chain {
    Link links[kMostLinks];
    int count;
    unsigned* arrived;
    Activation activation;
    int stage_bytes, stages, in_flight;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As crates/kernels/src/cuda/linear/chain.rs has them too.
constexpr int kMostVecs = 14;     // of inputs of a thread
constexpr int kMostNormVecs = 4;  // of those that are normalised
constexpr int kStageRows = 16;
constexpr int kSumRows = 128;
constexpr int kStaticBytes = 5 << 10;

__device__ __forceinline__ bool is_gated(const Link& l) { return l.take == Take::kGlu; }

// The outputs of a layer that a block computes, and how its stages have them.
struct Share {
    int first, count;
    int row_bytes;
    int at_once;  // outputs of a stage
    int batch;    // outputs whose sums are added at a time: those of whole stages, so at least kSumRows - kStageRows rows

    __device__ __forceinline__ void set(const Link& l, int stage_bytes) {
        const int gated = is_gated(l);
        first = unsigned(l.n) * blockIdx.x / gridDim.x;
        count = unsigned(l.n) * (blockIdx.x + 1) / gridDim.x - first;
        row_bytes = l.k * int(sizeof(bf16));
        at_once = min(stage_bytes / row_bytes, kStageRows) >> gated;
        batch = (kSumRows >> gated) / at_once * at_once;
    }
};

struct Shared {
    Chain chain;
    Share shares[kMostLinks];
    StageBarriers barriers;
    float sums[kConsumers][kSumRows];  // if gated, first those of the gates, then of up
    float squares[kConsumers];
};
static_assert(sizeof(Shared) <= kStaticBytes);

// Copies the weights of all layers, by one thread.
__device__ __forceinline__ void produce(Shared& shared, uint8_t* memory) {
    const Chain& c = shared.chain;
    Producer producer(shared.barriers, c.stages);
    for (int link = 0; link < c.count; ++link) {
        const Link& l = c.links[link];
        const Share share = shared.shares[link];
        for (int i = 0; i < share.count; i += share.at_once) {
            const int bytes = min(share.at_once, share.count - i) * share.row_bytes;
            const int stage = producer.begin(is_gated(l) ? 2 * bytes : bytes, c.in_flight);
            const uint32_t to = shared_address(memory + stage * c.stage_bytes);
            const bf16* const from = l.weight + size_t(share.first + i) * l.k;
            producer.copy(to, from, bytes);
            if (is_gated(l)) producer.copy(to + bytes, from + size_t(l.n) * l.k, bytes);
            producer.ring.next();
        }
    }
}

// Keeps the compiler from widening many of these ahead of a loop: it has no registers for that.
__device__ __forceinline__ void keep_narrow(Bf16x8& x) {
    uint4& words = reinterpret_cast<uint4&>(x);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

struct Consumer : Consumers<kConsumers> {
    const Chain& c;
    Shared& shared;
    uint32_t memory;
    Ring ring;
    Bf16x8 x[kMostVecs];  // vectors `thread`, `thread + threads`, ... of the inputs
    Float8 norm[kMostNormVecs];
    bf16 residual;  // of the output that this thread adds to: the host sees to it that a block has one batch of those

    __device__ __forceinline__ Consumer(Shared& shared, uint8_t* memory)
        : Consumers<kConsumers>{shared.chain.arrived}, c(shared.chain), shared(shared), memory(shared_address(memory)), ring{shared.chain.stages} {}

    // The sums of each warp of so many outputs, `kRows` rows of weights at a time.
    template <int kVecs, int kRows>
    __device__ __forceinline__ void multiply(const Share& share, bool gated, int outputs) {
        constexpr int kVecBytes = kVec * sizeof(bf16);
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, vecs = share.row_bytes / kVecBytes;
#pragma unroll 1
        for (int first = 0; first < outputs; first += share.at_once) {
            const int given = min(share.at_once, outputs - first), rows = given << int(gated);
            barrier_wait(&shared.barriers.full[ring.place], ring.phase);
            const uint32_t from = memory + ring.place * c.stage_bytes + threadIdx.x * kVecBytes;
#pragma unroll 1
            for (int low = 0; low < rows; low += kRows) {
                float even[kRows] = {}, odd[kRows] = {};
#pragma unroll
                for (int i = 0; i < kVecs; ++i) {
                    if (int(threadIdx.x) + i * kConsumerThreads >= vecs) continue;
                    if constexpr (kVecs > 4) keep_narrow(x[i]);
                    const Float8 inputs = widen(x[i]);
#pragma unroll
                    for (int j = 0; j < kRows; ++j) {
                        // Past the last row it is multiplied again, and left.
                        const int row = min(low + j, rows - 1);
                        const uint4 v = load_shared16(from + row * share.row_bytes + i * kConsumerThreads * kVecBytes);
                        const Float8 weights = widen(reinterpret_cast<const Bf16x8&>(v));
#pragma unroll
                        for (int e = 0; e < kVec; e += 2) {
                            even[j] = fmaf(weights.at[e], inputs.at[e], even[j]);
                            odd[j] = fmaf(weights.at[e + 1], inputs.at[e + 1], odd[j]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < kRows; ++j) even[j] += odd[j];
                const float sum = sum_values(even);
                const int row = low + lane * kRows / kWarp;
                if (lane % (kWarp / kRows) == 0 && row < rows) {
                    shared.sums[warp][first + (row < given ? row : kSumRows / 2 + row - given)] = sum;
                }
            }
            if (lane == 0) barrier_arrive(&shared.barriers.empty[ring.place]);
            ring.next();
        }
    }

    __device__ __forceinline__ void multiply(const Share& share, const Link& l, int outputs) {
        // As many rows at a time as a stage has of the longest such rows.
        const int vecs = (l.k + kVec * kConsumerThreads - 1) / (kVec * kConsumerThreads);
        if (vecs <= 1) return multiply<1, 4>(share, is_gated(l), outputs);
        if (vecs <= 2) return multiply<2, 4>(share, is_gated(l), outputs);
        if (vecs <= 4) return multiply<4, 2>(share, is_gated(l), outputs);
        if (vecs <= 7) return multiply<7, 1>(share, is_gated(l), outputs);
        multiply<kMostVecs, 1>(share, is_gated(l), outputs);
    }

    __device__ __forceinline__ float sum(int at) const {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kConsumers; ++warp) sum += shared.sums[warp][at];
        return sum;
    }

    // An output, and if gated its value of up.
    __device__ __forceinline__ void take(const Link& l, int row, float value, float up) {
        if (l.bias != nullptr) value += __bfloat162float(l.bias[row]);
        if (l.take == Take::kGlu) value = value / (1.0f + __expf(-sigmoid_input(c.activation, value))) * up;
        bf16 out = __float2bfloat16(value);
        if (l.take == Take::kAdd) {
            residual = __float2bfloat16(__bfloat162float(residual) + __bfloat162float(out));
            out = residual;
        }
        l.out[row] = out;
    }

    // A layer's products with x.
    __device__ __forceinline__ void compute(const Link& l, const Share& share) {
        const int at = threadIdx.x;
#pragma unroll 1
        for (int first = 0; first < share.count; first += share.batch) {
            const int outputs = min(share.batch, share.count - first);
            if (first > 0) sync();
            multiply(share, l, outputs);
            sync();
            if (at < outputs) take(l, share.first + first + at, sum(at), is_gated(l) ? sum(kSumRows / 2 + at) : 0.0f);
        }
    }

    __device__ __forceinline__ void run() {
        pdl_wait();
        const Share& own = shared.shares[0];
        if (int(threadIdx.x) < own.count) residual = c.links[0].out[own.first + threadIdx.x];
#pragma unroll 1
        for (int link = 0; link < c.count; ++link) {
            const Link& l = c.links[link];
            if (l.norm != nullptr) load_norm(norm, l.norm, l.k);
            if (link > 0) meet();
            load(x, l.x, l.k);
            if (l.norm != nullptr) normalise(x, norm, shared.squares, l.k, l.eps);
            compute(l, shared.shares[link]);
        }
        leave();
    }
};

__device__ __forceinline__ void run(const Chain& chain) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared shared;
    pdl_launch();
    if (threadIdx.x == 0) {
        shared.chain = chain;
        for (int i = 0; i < chain.count; ++i) shared.shares[i].set(shared.chain.links[i], chain.stage_bytes);
        shared.barriers.init(chain.stages, kConsumers);
    }
    __syncthreads();
    if (threadIdx.x < kConsumers * kWarp) {
        Consumer(shared, memory).run();
        return;
    }
    for (int link = 0; link < chain.count && blockIdx.x == 0; ++link) {
        const Link& l = shared.chain.links[link];
        if (l.norm != nullptr) prefetch_norm(l.norm, l.k);
    }
    if (threadIdx.x % kWarp == 0) produce(shared, memory);
}

#else

__device__ __forceinline__ void run(const Chain&) {}

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kChainThreads, 1)
    linear_chain(const bf16* x, const bf16* output, const bf16* output_bias, const bf16* gate_up, const bf16* down, const bf16* down_bias,
                 const bf16* next, const bf16* next_bias, bf16* hidden, const float* norm, const float* next_norm, bf16* activated,
                 bf16* out, unsigned* arrived, int attended, int width, int inner, int next_outputs, float eps, float next_eps,
                 int activation, int stage_bytes, int stages, int in_flight) {
    const Link links[kMostLinks] = {
        {x, nullptr, 0.0f, output, output_bias, width, attended, Take::kAdd, hidden},
        {hidden, norm, eps, gate_up, nullptr, inner, width, Take::kGlu, activated},
        {activated, nullptr, 0.0f, down, down_bias, width, inner, Take::kAdd, hidden},
        {hidden, next_norm, next_eps, next, next_bias, next_outputs, width, Take::kStore, out},
    };
    run({{links[0], links[1], links[2], links[3]},
         next == nullptr ? 3 : 4,
         arrived,
         Activation(activation),
         stage_bytes,
         stages,
         in_flight});
}
