// Linear layers of one row that follow each other, in one launch (sm_90a): a mixer's output projection, the two of an MLP, and the
// projections that the next mixer begins with, with the residual sums and the norms between them. chain.cuh says how.
//
// Each block has its share of the outputs of each layer, whose weights are one range of memory (if gated, two). The thread that copies them
// waits for no inputs, so the memory stays busy while the blocks wait for each other. All warps multiply each row of weights, a thread always
// by the same inputs, which it keeps in registers. Sums of the warps are added in a fixed order.
//
// Weights are bf16, or e4m3 with scales. Inputs are not quantised: for e4m3 weights a thread has its inputs as halves, times a power of two that
// keeps sums of eight products in the range of halves; the two such sums of a piece of 16 weights are added in f32. Projections that follow may
// be two layers of the same inputs, and have bf16 weights beside e4m3: these are multiplied by the halves, in f32.
//
// What the mixer and the MLP add may be normalised first: then blocks give each other that, and each adds the norm of the whole row to the residual
// stream.
#include "activation.cuh"
#include "chain.cuh"
#include "pieces.cuh"

namespace {

constexpr int kConsumers = 8;  // warps
constexpr int kChainThreads = (kConsumers + 1) * kWarp;

// What becomes of sums.
enum class Take { kAdd, kGlu, kStore };

// The format of weights: e4m3 has a scale for each row, or one for each 128 x 128 weights.
enum class Weights { kBf16, kFp8Rows, kFp8Blocks };

// `out[n] = x[k] . weight[n, k]^T (+ bias)`, of the norm of x if there is one.
struct Link {
    const bf16* x;      // null for the inputs of the link before, as it has them
    const float* norm;  // [k]; null for none
    float eps;
    Matrix matrix;
    const bf16* bias;  // null for none
    int n, k;          // if gated n outputs of 2 n rows: gate, up
    Take take;
    bf16* out;  // [n], to which outputs are added, or which takes them
};

constexpr int kMostLinks = 5, kMlpLinks = 3;  // the latter up to the end of the MLP

// Of a layer whose mixer and MLP have norms of what they add.
struct Sandwich {
    bf16* hidden;               // the residual stream
    const bf16* delta;          // what is added to it
    const float *mixer, *mlp;   // weights of these norms
    const float* scalar;        // multiplies the residual stream at the end; null for none
    float eps;
};

struct Chain {
    Link links[kMostLinks];
    int count;
    unsigned* arrived;
    Activation activation;
    int stage_bytes, stages, in_flight;
    Sandwich sandwich;
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
        first = first_output(l.n, blockIdx.x);
        count = first_output(l.n, blockIdx.x + 1) - first;
        row_bytes = l.matrix.row_bytes(l.k);
        at_once = min(stage_bytes / row_bytes, kStageRows) >> gated;
        batch = (kSumRows >> gated) / at_once * at_once;
    }
};

struct Shared {
    Chain chain;
    Share shares[kMostLinks];
    StageBarriers barriers;
    float sums[kConsumers][kSumRows];  // if gated, first those of the gates, then of up
    float squares[2][kConsumers];
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
            const uint8_t* const from = l.matrix.weight + size_t(share.first + i) * share.row_bytes;
            producer.copy(to, from, bytes);
            if (is_gated(l)) producer.copy(to + bytes, from + size_t(l.n) * share.row_bytes, bytes);
            producer.ring.next();
        }
    }
}

// Keeps the compiler from widening many of these ahead of a loop: it has no registers for that.
__device__ __forceinline__ void keep_narrow(Bf16x8& x) {
    uint4& words = reinterpret_cast<uint4&>(x);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

constexpr uint64_t kLongestWait = 10'000'000'000;  // nanoseconds

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What the `kConsumers` warps that multiply do together. A thread has `kAdjacent` neighbouring vectors of a row, then as many again
// `kConsumerThreads * kAdjacent` vectors further on.
template <int kAdjacent>
struct Consumers {
    static constexpr int kConsumerThreads = kConsumers * kWarp;

    unsigned* arrived;  // blocks; zero between launches
    int waits = 0;

    __device__ __forceinline__ static void sync() { named_sync<kConsumerThreads>(1); }

    // Which vector of a row this thread's `i`th is.
    __device__ __forceinline__ static int vec_of(int i) {
        return (int(threadIdx.x) + i / kAdjacent * kConsumerThreads) * kAdjacent + i % kAdjacent;
    }

    // What this block has written is there for all; waits until so is what the others have.
    __device__ __forceinline__ void meet() {
        sync();
        ++waits;
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
            const uint64_t begin = nanoseconds();
            while (true) {
                unsigned now;
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
                if (now >= waits * gridDim.x) break;
                // Another kernel of this kind would have to have the other multiprocessors.
                if (nanoseconds() - begin > kLongestWait) __trap();
                __nanosleep(20);
            }
        }
        sync();
    }

    // The last block to end leaves the counter at zero.
    __device__ __forceinline__ void leave() const {
        if (threadIdx.x == 0 && atomicAdd(arrived, 1) + 1 == (waits + 1) * gridDim.x) atomicExch(arrived, 0);
    }

    // This thread's vectors of a row of k elements, past the cache of the multiprocessor, as other blocks have just written them.
    template <int kVecs, int kAll>
    __device__ __forceinline__ static void load(Bf16x8 (&x)[kAll], const bf16* from, int k) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec = vec_of(i);
            if (vec * kVec >= k) continue;
            const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from) + vec);
            x[i] = reinterpret_cast<const Bf16x8&>(v);
        }
    }

    // The same of the weights of a norm.
    template <int kVecs>
    __device__ __forceinline__ static void load_norm(Float8 (&norm)[kVecs], const float* from, int k) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec = vec_of(i);
            if (vec * kVec < k) norm[i] = load_floats(from + vec * kVec);
        }
    }

    // The same into registers that need not keep what they have.
    template <int kVecs>
    __device__ __forceinline__ static void load_new_norm(Float8 (&norm)[kVecs], const float* from, int k) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const int vec = vec_of(i);
            norm[i] = vec * kVec < k ? load_floats(from + vec * kVec) : Float8{};
        }
    }

    // What a row that was loaded so is multiplied by in its norm; `squares` is used once between two waits of all threads.
    template <int kVecs, int kAll>
    __device__ __forceinline__ static float norm_scale(const Bf16x8 (&x)[kAll], float (&squares)[kConsumers], int k, float eps) {
        static_assert(kVecs <= kAll);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            if (vec_of(i) * kVec < k) sum += sum_of_squares(widen(x[i]));
        }
        sum = warp_sum(sum);
        if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = sum;
        sync();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) sum += squares[i];
        return rsqrtf(sum / float(k) + eps);
    }

    // The norm of a row.
    template <int kVecs, int kAll>
    __device__ __forceinline__ static void normalise(Bf16x8 (&x)[kAll], const Float8 (&norm)[kVecs], float (&squares)[kConsumers], int k,
                                                     float eps) {
        const float scale = norm_scale<kVecs>(x, squares, k, eps);
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            Float8 wide = widen(x[i]);
#pragma unroll
            for (int j = 0; j < kVec; ++j) wide.at[j] = wide.at[j] * scale * norm[i].at[j];
            x[i] = narrow(wide);
        }
    }

    // Adds the norm of a row to another, which is then multiplied by `factor`.
    template <int kVecs, int kAll>
    __device__ __forceinline__ static void add_normed(Bf16x8 (&to)[kVecs], Bf16x8 (&x)[kAll], const Float8 (&norm)[kVecs],
                                                      float (&squares)[kConsumers], int k, float eps, float factor) {
        const float scale = norm_scale<kVecs>(x, squares, k, eps);
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            keep_narrow(x[i]);
            keep_narrow(to[i]);
            Float8 sum = widen(to[i]);
            const Float8 added = widen(x[i]);
#pragma unroll
            for (int j = 0; j < kVec; ++j) sum.at[j] = (sum.at[j] + added.at[j] * scale * norm[i].at[j]) * factor;
            to[i] = narrow(sum);
        }
    }
};

template <Weights kWeights, bool kSandwich>
struct Consumer : Consumers<kPieceInputs<kWeights != Weights::kBf16> / kVec> {
    static constexpr bool kFp8 = kWeights != Weights::kBf16, kBlocks = kWeights == Weights::kFp8Blocks;
    using Base = Consumers<kPieceInputs<kFp8> / kVec>;
    static constexpr int kThreads = Base::kConsumerThreads;

    const Chain& c;
    Shared& shared;
    uint32_t memory;
    Ring ring;
    Bf16x8 x[kMostVecs];  // the inputs of pieces `thread`, `thread + threads`, ... of a row; for e4m3 weights as halves
    float unit = 1.0f;    // what 1 in these halves stands for
    Float8 norm[kMostNormVecs];
    bf16 residual;  // of the output that this thread adds to: the host sees to it that a block has one batch of those

    __device__ __forceinline__ Consumer(Shared& shared, uint8_t* memory)
        : Base{shared.chain.arrived}, c(shared.chain), shared(shared), memory(shared_address(memory)), ring{shared.chain.stages} {}

    // Makes this thread's inputs halves, scaled as pieces.cuh says. Rounding changes one by at most 2^-28 of the largest.
    __device__ __forceinline__ void narrow_to_halves(int k) {
        __nv_bfloat162 most = __floats2bfloat162_rn(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kMostVecs; ++i) {
            if (Base::vec_of(i) * kVec >= k) continue;
#pragma unroll
            for (int j = 0; j < kVec / 2; ++j) most = __hmax2(most, __habs2(x[i].pair[j]));
        }
        const HalfFactor factor = half_factor(__bfloat16_as_ushort(__hmax(most.x, most.y)));
        unit = factor.of_sum;
#pragma unroll
        for (int i = 0; i < kMostVecs; ++i) {
            if (Base::vec_of(i) * kVec >= k) continue;
            const Float8 wide = widen(x[i]);
            __half2* const halves = reinterpret_cast<__half2*>(x[i].pair);
#pragma unroll
            for (int j = 0; j < kVec / 2; ++j) halves[j] = __floats2half2_rn(wide.at[2 * j] * factor.of_inputs, wide.at[2 * j + 1] * factor.of_inputs);
        }
    }

    // Adds the products of a piece of weights and this thread's `i`th piece of inputs.
    __device__ __forceinline__ void add_products(float& even, float& odd, const uint4& weights, int i, float scale) const {
        if constexpr (kFp8) {
            const auto inputs = [&](int j) { return reinterpret_cast<const uint4&>(x[2 * i + j]); };
            even = fmaf(sum_of_piece(weights, inputs(0), inputs(1)), scale, even);
        } else {
            const Float8 wide = widen(reinterpret_cast<const Bf16x8&>(weights)), inputs = widen(x[i]);
#pragma unroll
            for (int e = 0; e < kVec; e += 2) {
                even = fmaf(wide.at[e], inputs.at[e], even);
                odd = fmaf(wide.at[e + 1], inputs.at[e + 1], odd);
            }
        }
    }

    // Adds the products of eight bf16 weights and this thread's `i`th vector of inputs, which are halves.
    __device__ __forceinline__ void add_wide_products(float& even, float& odd, const uint4& weights, int i) const {
        const Float8 wide = widen(reinterpret_cast<const Bf16x8&>(weights));
        const __half2* const halves = reinterpret_cast<const __half2*>(x[i].pair);
#pragma unroll
        for (int j = 0; j < kVec / 2; ++j) {
            const float2 inputs = __half22float2(halves[j]);
            even = fmaf(wide.at[2 * j], inputs.x, even);
            odd = fmaf(wide.at[2 * j + 1], inputs.y, odd);
        }
    }

    // The sums of each warp of so many outputs from `begin` on, `kRows` rows of weights at a time; `kWide` for bf16 weights where inputs are halves.
    template <int kPieces, int kRows, bool kWide = false>
    __device__ __forceinline__ void multiply(const Share& share, const Link& l, int begin, int outputs) {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
        constexpr int kBytes = kWide ? 2 * kPieceBytes : kPieceBytes;  // of weights for a piece of inputs
        const int row_bytes = share.row_bytes, pieces = row_bytes / kBytes, gated = is_gated(l);
#pragma unroll 1
        for (int first = 0; first < outputs; first += share.at_once) {
            const int given = min(share.at_once, outputs - first), rows = given << gated;
            barrier_wait(&shared.barriers.full[ring.place], ring.phase);
            const uint32_t from = memory + ring.place * c.stage_bytes + threadIdx.x * kBytes;
#pragma unroll 1
            for (int low = 0; low < rows; low += kRows) {
                float even[kRows] = {}, odd[kRows] = {};
                const float* scales[kRows];
                if constexpr (kBlocks && !kWide) {
#pragma unroll
                    for (int j = 0; j < kRows; ++j) {
                        // Rows of up lie behind those of the gates.
                        const int row = min(low + j, rows - 1), output = begin + first + (row < given ? row : l.n + row - given);
                        scales[j] = l.matrix.scales_of(output) + threadIdx.x * kPieceInputs<kFp8> / kFp8Block;
                    }
                }
#pragma unroll
                for (int i = 0; i < kPieces; ++i) {
                    const int piece = threadIdx.x + i * kThreads;
                    if (piece >= pieces) continue;
                    if constexpr (!kFp8 && kPieces > 4) keep_narrow(x[i]);
                    if constexpr (kWide) {
                        static_assert(kRows == 1);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const uint32_t at = from + low * row_bytes + i * kThreads * kBytes + half * kPieceBytes;
                            add_wide_products(even[0], odd[0], load_shared16(at), 2 * i + half);
                        }
                    } else {
                        uint4 weights[kRows];
                        float scale[kRows];
#pragma unroll
                        for (int j = 0; j < kRows; ++j) {
                            // Past the last row it is multiplied again, and left.
                            weights[j] = load_shared16(from + min(low + j, rows - 1) * row_bytes + i * kThreads * kPieceBytes);
                            scale[j] = kBlocks ? __ldg(scales[j] + i * (kThreads * kPieceInputs<kFp8> / kFp8Block)) : 1.0f;
                        }
#pragma unroll
                        for (int j = 0; j < kRows; ++j) add_products(even[j], odd[j], weights[j], i, scale[j]);
                    }
                }
#pragma unroll
                for (int j = 0; j < kRows; ++j) even[j] = (even[j] + odd[j]) * unit;
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

    __device__ __forceinline__ void multiply(const Share& share, const Link& l, int begin, int outputs) {
        // Only the projections at the end have other weights. Their inputs are a row that was normalised, so there are at most these pieces.
        if constexpr (kFp8) {
            if (!l.matrix.is_fp8()) return multiply<kMostNormVecs / 2, 1, true>(share, l, begin, outputs);
        }
        // As many rows at a time as a stage has of the longest such rows.
        const int pieces = (share.row_bytes + kPieceBytes * kThreads - 1) / (kPieceBytes * kThreads);
        if (pieces <= 1) return multiply<1, 4>(share, l, begin, outputs);
        if (pieces <= 2) return multiply<2, 4>(share, l, begin, outputs);
        if (pieces <= 4) return multiply<4, 2>(share, l, begin, outputs);
        if (pieces <= 7) return multiply<7, 1>(share, l, begin, outputs);
        if constexpr (!kFp8) multiply<kMostVecs, 1>(share, l, begin, outputs);
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
            float scale = 1.0f, up_scale = 1.0f;
            if (kWeights == Weights::kFp8Rows && l.matrix.is_fp8() && at < outputs) {
                const float* const scales = l.matrix.scales + share.first + first + at;
                scale = scales[0];
                if (is_gated(l)) up_scale = scales[l.n];
            }
            if (first > 0) Base::sync();
            multiply(share, l, share.first + first, outputs);
            Base::sync();
            if (at < outputs) {
                take(l, share.first + first + at, sum(at) * scale, is_gated(l) ? sum(kSumRows / 2 + at) * up_scale : 0.0f);
            }
        }
    }

    // Waits for what the mixer or the MLP adds, and takes the residual stream with that as inputs. Each block stores a part of it: all have read what
    // it was before they met.
    __device__ __forceinline__ void meet_and_add(int k, bool of_mlp) {
        const Sandwich& own = c.sandwich;
        const float factor = of_mlp && own.scalar != nullptr ? *own.scalar : 1.0f;
        Float8 sum_norm[kMostNormVecs];
        Bf16x8 stream[kMostNormVecs];
        // So that no inputs of the link before are kept in registers until they are replaced.
#pragma unroll
        for (int i = 0; i < kMostNormVecs; ++i) x[i] = {};
        Base::load_new_norm(sum_norm, of_mlp ? own.mlp : own.mixer, k);
#pragma unroll
        for (Bf16x8& of_stream : stream) of_stream = {};
        Base::template load<kMostNormVecs>(stream, own.hidden, k);
        Base::meet();
        Base::template load<kMostNormVecs>(x, own.delta, k);
        Base::add_normed(stream, x, sum_norm, shared.squares[1], k, own.eps, factor);
        const int begin = first_output(k / kVec, blockIdx.x), end = first_output(k / kVec, blockIdx.x + 1);
#pragma unroll
        for (int i = 0; i < kMostNormVecs; ++i) {
            x[i] = stream[i];
            const int vec = Base::vec_of(i);
            if (vec >= begin && vec < end) store8(own.hidden + vec * kVec, stream[i]);
        }
#pragma unroll
        for (int i = kMostNormVecs; i < kMostVecs; ++i) x[i] = {};
    }

    __device__ __forceinline__ void run() {
        pdl_wait();
        const Share& own = shared.shares[0];
        if (!kSandwich && int(threadIdx.x) < own.count) residual = c.links[0].out[own.first + threadIdx.x];
        // A sum that is normalised is made ahead of what follows, if anything does.
        const int count = kSandwich ? max(c.count, kMlpLinks + 1) : c.count;
#pragma unroll 1
        for (int link = 0; link < count; ++link) {
            const Link& l = c.links[link];
            if (l.x == nullptr) {
                // Sums of the link before have been read.
                Base::sync();
            } else {
                if (!kSandwich && l.norm != nullptr) Base::load_norm(norm, l.norm, l.k);
                if (kSandwich && (link == 1 || link == kMlpLinks)) {
                    meet_and_add(l.k, link > 1);
                    if (link == c.count) break;
                    // Not ahead of the wait, where there are no registers for them.
                    Float8 norm[kMostNormVecs];
                    Base::load_new_norm(norm, l.norm, l.k);
                    Base::normalise(x, norm, shared.squares[0], l.k, l.eps);
                } else {
                    if (link > 0) Base::meet();
                    Base::template load<kMostVecs>(x, l.x, l.k);
                }
                if (!kSandwich && l.norm != nullptr) Base::normalise(x, norm, shared.squares[0], l.k, l.eps);
                if constexpr (kFp8) narrow_to_halves(l.k);
            }
            compute(l, shared.shares[link]);
        }
        Base::leave();
    }
};

template <Weights kWeights, bool kSandwich>
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
        Consumer<kWeights, kSandwich>(shared, memory).run();
        return;
    }
    for (int link = 0; link < chain.count; ++link) {
        const Link& l = shared.chain.links[link];
        const Share& share = shared.shares[link];
        if (blockIdx.x == 0 && l.norm != nullptr) prefetch_norm(l.norm, l.k);
        if (kSandwich && blockIdx.x == 1 && link == 0) {
            prefetch_norm(shared.chain.sandwich.mixer, l.n);
            prefetch_norm(shared.chain.sandwich.mlp, l.n);
        }
        prefetch_scales(l.matrix, share.first, share.count);
        if (is_gated(l)) prefetch_scales(l.matrix, l.n + share.first, share.count);
    }
    if (threadIdx.x % kWarp == 0) produce(shared, memory);
}

#else

template <Weights, bool>
__device__ __forceinline__ void run(const Chain&) {}

#endif

}  // namespace

#define LINEAR_CHAIN(name, weights, has_sums_normed)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kChainThreads, 1)                                                                    \
    name(const bf16* x, const uint8_t* output, const float* output_scales, int output_stride, const bf16* output_bias,                \
                 const uint8_t* gate_up, const float* gate_up_scales, int gate_up_stride, const uint8_t* down, const float* down_scales,\
                 int down_stride, const bf16* down_bias, const uint8_t* next, const float* next_scales, int next_stride,              \
                 const bf16* next_bias, bf16* next_out, int next_outputs, const uint8_t* other, const float* other_scales,            \
                 int other_stride, const bf16* other_bias, bf16* other_out, int other_outputs, bf16* hidden, const float* norm,       \
                 const float* next_norm, bf16* activated, unsigned* arrived, int attended, int width, int inner, float eps,           \
                 float next_eps, int activation, int stage_bytes, int stages, int in_flight, bf16* delta, const float* mixer_norm,    \
                 const float* mlp_norm, const float* scalar) {                                                                        \
    const Take take = has_sums_normed ? Take::kStore : Take::kAdd;                                                                    \
    bf16* const sum = has_sums_normed ? delta : hidden;                                                                               \
    const Link links[kMostLinks] = {                                                                                                  \
        {x, nullptr, 0.0f, {output, output_scales, output_stride}, output_bias, width, attended, take, sum},                          \
        {sum, norm, eps, {gate_up, gate_up_scales, gate_up_stride}, nullptr, inner, width, Take::kGlu, activated},                    \
        {activated, nullptr, 0.0f, {down, down_scales, down_stride}, down_bias, width, inner, take, sum},                             \
        {sum, next_norm, next_eps, {next, next_scales, next_stride}, next_bias, next_outputs, width, Take::kStore, next_out},         \
        {nullptr, nullptr, 0.0f, {other, other_scales, other_stride}, other_bias, other_outputs, width, Take::kStore, other_out},     \
    };                                                                                                                                \
    run<weights, has_sums_normed>({{links[0], links[1], links[2], links[3], links[4]},                                                \
         next == nullptr ? kMlpLinks : other == nullptr ? 4 : 5,                                                                      \
         arrived,                                                                                                                     \
         Activation(activation),                                                                                                      \
         stage_bytes,                                                                                                                 \
         stages,                                                                                                                      \
         in_flight,                                                                                                                   \
         {hidden, delta, mixer_norm, mlp_norm, scalar, eps}});                                                                        \
}

LINEAR_CHAIN(linear_chain_bf16, Weights::kBf16, false)
LINEAR_CHAIN(linear_chain_fp8_rows, Weights::kFp8Rows, false)
LINEAR_CHAIN(linear_chain_fp8_blocks, Weights::kFp8Blocks, false)
LINEAR_CHAIN(linear_chain_sandwich_bf16, Weights::kBf16, true)
LINEAR_CHAIN(linear_chain_sandwich_fp8_rows, Weights::kFp8Rows, true)
LINEAR_CHAIN(linear_chain_sandwich_fp8_blocks, Weights::kFp8Blocks, true)
