// Whole layers of one row, of a model whose layers are so small that waits count more than bytes, in one launch (sm_90a): norms of heads,
// rotation, keys and values to the cache, attention, the mixer's output projection, those of the MLP, and the projections of the next layer.
// chain.cuh says how.
//
// Each block has its share of the outputs of each product; a warp multiplies two whole rows of weights with inputs in its registers, but of
// `down`, where each warp has its part of the inputs of all rows. Rows are so short that instructions, not bytes, would take the time: tensor
// cores multiply, though only an eighth of their products is needed. The shares of a layer are so small that shared memory holds almost all of
// them: the copying thread is about a layer ahead. A head's attention is a block's, or with longer contexts several blocks', whose cached tokens
// come through the same ring; the current token's key and value are rotated where they are needed. Blocks exchange tagged words (tagged.cuh)
// that each thread waits for itself; every layer has its own tag. Every layer writes the same words, each only after all blocks have read what
// the layer before wrote there: each block has outputs of the products that are added and of the projections, so it is waited for in between.
#include "activation.cuh"
#include "layer_chain_attention.cuh"

namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What the warps that multiply do.
template <int kDim, int kHeld>
struct Consumer : AttentionConsumer<kDim, kHeld> {
    static constexpr int kTaken = (kHeld * kWarp * 2 + kConsumerThreads - 1) / kConsumerThreads;  // quads of inputs of a thread
    static constexpr int kSteps = kHeld * kVec * kWarp / kStep, kStepBytes = kStep * int(sizeof(bf16));
    static constexpr int kOwnSteps = (kMostInner / kStep + kConsumers - 1) / kConsumers;  // of `down`, of a warp

    using Base = AttentionConsumer<kDim, kHeld>;
    using Base::c, Base::shared, Base::warp, Base::lane, Base::last_tag;
    using Base::Base, Base::sync, Base::tag_of, Base::wait_words, Base::wait_chunk, Base::release_chunk, Base::attend;
    using Base::wait_chunk_behind, Base::release_chunk_behind, Base::pass_chunks;

    // Waits for the k inputs of a product, times the norm's weights if there are any, of which this lane gets its own of each step. Returns what
    // the product is to be multiplied by. `place`: see `Shared::inputs`.
    __device__ __forceinline__ float take(uint2 (&x)[kSteps], const uint32_t* words, uint32_t tag, int k, const float* norm, int place) {
        const int quads = k / kQuad;
        float2 low[kTaken], high[kTaken];  // weights
        const uint32_t* from[kTaken];
#pragma unroll
        for (int i = 0; i < kTaken; ++i) {
            const int quad = threadIdx.x + i * kConsumerThreads, known = quad < quads ? quad : 0;
            from[i] = words + kQuad * known;
            if (norm == nullptr) continue;
            const float2* const weights = reinterpret_cast<const float2*>(norm) + known / kWarp * (kStep / 2) + known % kWarp;
            low[i] = __ldg(weights), high[i] = __ldg(weights + kWarp);
        }
        float squares = 0.0f;
        if (warp * kWarp < quads) {
            uint4 values[kTaken];
            wait_words(values, from, tag);
#pragma unroll
            for (int i = 0; i < kTaken; ++i) {
                const int quad = threadIdx.x + i * kConsumerThreads;
                if (quad >= quads) continue;
                uint2 input = pairs_of(values[i]);
                if (norm != nullptr) {
                    const float4 h = make_float4(low_value(values[i].x), low_value(values[i].y), low_value(values[i].z), low_value(values[i].w));
                    squares = fmaf(h.x, h.x, fmaf(h.y, h.y, fmaf(h.z, h.z, fmaf(h.w, h.w, squares))));
                    input = make_uint2(pack(h.x * low[i].x, h.y * low[i].y), pack(h.z * high[i].x, h.w * high[i].y));
                }
                shared.inputs[place][quad] = input;
            }
            if (norm != nullptr) squares = warp_sum(squares);
        }
        if (norm != nullptr && lane == 0) shared.squares[place][warp] = squares;
        sync();
        float scale = 1.0f;
        if (norm != nullptr) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) sum += shared.squares[place][i];
            scale = rsqrtf(sum / static_cast<float>(k) + c.eps);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            x[i] = make_uint2(0, 0);
            if (i < k / kStep) x[i] = shared.inputs[place][i * kWarp + lane];
        }
        return scale;
    }

    // Four tagged words to two pairs of values.
    __device__ __forceinline__ static uint2 pairs_of(const uint4& words) {
        return make_uint2(__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410));
    }

    // This lane's part of the products of two rows of weights, of which a warp takes `steps` steps, `stride` bytes from each other, and inputs.
    //
    // An 8x8 matrix of the tensor cores is 64 weights in a row, eight to each of its rows, so that nothing has to lie apart in shared memory; the
    // columns of the other operand are the inputs that go with those eights. So what counts is the diagonals of the sums, for the first row of
    // weights of their upper half and for the other of the lower one. That is an eighth of what is computed, but one instruction each for
    // loads and products of 256 weights.
    template <int kMost>
    __device__ __forceinline__ float2 multiply(const uint8_t* row, const uint8_t* other, const uint2 (&x)[kMost], int steps, int stride) const {
        uint32_t from = shared_address(lane & 8 ? other : row) + (lane & 16) * 8 + lane % 8 * 16;
        constexpr int kLoads = 4;  // at a time
        float sums[2][4] = {};
#pragma unroll
        for (int first = 0; first < kMost; first += kLoads) {
            if (first >= steps) continue;
            uint32_t weights[kLoads][4];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (first + i < steps) load_matrices(weights[i], from + (first + i) * stride);
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (first + i < kMost && first + i < steps) mma(sums[i % 2], weights[i], x[first + i].x, x[first + i].y);
            }
        }
        const int column = lane / 4 - lane % 4 * 2;  // of this lane's two that is on the diagonal, if any
        const auto diagonal = [&](int i) {
            const float even = sums[0][i] + sums[1][i], odd = sums[0][i + 1] + sums[1][i + 1];
            return column == 0 ? even : column == 1 ? odd : 0.0f;
        };
        return make_float2(diagonal(0), diagonal(2));
    }

    // A block's outputs of a product without a gate: `done(output, sum)` by a lane for each.
    template <typename Done>
    __device__ __forceinline__ void plain(const Share& share, const uint2 (&x)[kSteps], Done done) {
        const int count = share.count, at_once = share.at_once, row_bytes = share.row_bytes, steps = row_bytes / kStepBytes;
        int turn = 2 * warp;
#pragma unroll 1
        for (int first = 0; first < count; first += at_once) {
            const int given = min(at_once, count - first);
            const uint8_t* const weights = wait_chunk();
#pragma unroll 1
            for (; turn < given; turn += 2 * kConsumers) {
                const uint8_t* const row = weights + turn * row_bytes;
                const float2 both = multiply(row, turn + 1 < given ? row + row_bytes : row, x, steps, kStepBytes);
                float sums[2] = {both.x, both.y};
                const float sum = sum_values(sums);
                const int output = turn + lane / (kWarp / 2);
                if (lane % (kWarp / 2) == 0 && output < given) done(first + output, sum);
            }
            turn -= given + given % 2;
            release_chunk();
        }
    }

    // Brings the biases of a block's outputs to shared memory; they are there for all after the next wait of all.
    __device__ __forceinline__ void put_biases(const bf16* biases, const Share& share, int place) const {
        const int at = threadIdx.x;
        if (at < share.count) shared.biases[place][at] = biases == nullptr ? 0.0f : __bfloat162float(biases[share.first + at]);
    }

    // Adds to the residual stream.
    __device__ __forceinline__ bf16 add(int output, float value) const {
        const bf16 sum = __float2bfloat16(shared.residual[output] + rounded(value));
        shared.residual[output] = __bfloat162float(sum);
        return sum;
    }

    __device__ __forceinline__ void output(int index) {
        const Share& share = shared.shares[kOutput];
        put_biases(c.layers[index].output_bias, share, 1);
        uint2 x[kSteps];
        take(x, c.exchange->attended, tag_of(index), c.heads * kDim, nullptr, 1);
        plain(share, x, [&](int output, float sum) {
            publish(c.exchange->hidden + place_of(share.first + output), add(output, sum + shared.biases[1][output]), tag_of(index));
        });
    }

    __device__ __forceinline__ void gated(int index) {
        const Share& share = shared.shares[kGated];
        uint2 x[kSteps];
        const float scale = take(x, c.exchange->hidden, tag_of(index), c.width, c.layers[index].norm, 0);
        const int count = share.count, at_once = share.at_once, row_bytes = share.row_bytes, steps = row_bytes / kStepBytes;
        const int chunks = (count + at_once - 1) / at_once;
        // Only one warp waits for a chunk. It may be a turn of the ring ahead of another's, which must have landed by then, as the parity of a
        // barrier tells one phase from the next alone: more bytes lie between the two than are on their way at once.
        static_assert((kChunks - kConsumers - 1) * kPairs * 2 * kLeastWidth * int(sizeof(bf16)) >= kMostInFlight);
#pragma unroll 1
        for (int own = warp; own < chunks; own += kConsumers) {
            const int first = own * at_once, given = min(at_once, count - first);
            const uint8_t* gate = wait_chunk_behind(own);
            float sums[2 * kPairs] = {};
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (i >= given) continue;
                const float2 both = multiply(gate, gate + given * row_bytes, x, steps, kStepBytes);
                sums[i] = both.x, sums[kPairs + i] = both.y;
                gate += row_bytes;
            }
            release_chunk_behind(own);
            const float sum = sum_values(sums) * scale, up = __shfl_xor_sync(kAllLanes, sum, kWarp / 2);
            constexpr int kLanes = kWarp / 2 / kPairs;  // that have the same sum
            const int output = lane / kLanes;
            if (lane % kLanes == 0 && output < given) {
                const bf16 value = __float2bfloat16(activated(Activation(c.activation), sum, up));
                publish(c.exchange->activated + place_of(share.first + first + output), value, tag_of(index));
            }
        }
        pass_chunks(chunks);
    }

    __device__ __forceinline__ void down(int index) {
        const Share& share = shared.shares[kDown];
        const int at = threadIdx.x;
        float bias = 0.0f;
        if (at < share.count && c.layers[index].down_bias != nullptr) bias = __bfloat162float(c.layers[index].down_bias[share.first + at]);
        // Each warp has steps of all rows, so that it waits for its inputs alone.
        const int own = (c.inner / kStep - warp + kConsumers - 1) / kConsumers;
        uint2 x[kOwnSteps];
        constexpr int kAtOnce = 4;
#pragma unroll
        for (int first = 0; first < kOwnSteps; first += kAtOnce) {
            if (first < own) wait_steps<kAtOnce>(x, first, own, tag_of(index));
        }
        __syncwarp();
        constexpr int kRows = 8;  // whose sums are added at once
        const int count = share.count, at_once = share.at_once, row_bytes = share.row_bytes;
        const uint8_t* weights = nullptr;
        int left = 0;  // rows of the chunk
#pragma unroll 1
        for (int first = 0; first < count; first += kRows) {
            float sums[kRows] = {};
#pragma unroll
            for (int row = 0; row < kRows; row += 2) {
                if (first + row >= count) continue;
                if (left == 0) weights = wait_chunk() + warp * kStepBytes, left = min(at_once, count - first - row);
                const float2 both = multiply(weights, left > 1 ? weights + row_bytes : weights, x, own, kConsumers * kStepBytes);
                sums[row] = both.x, sums[row + 1] = both.y;
                weights += 2 * row_bytes;
                left = max(left - 2, 0);
                if (left == 0) release_chunk();
            }
            const float sum = sum_values(sums);
            const int row = first + lane * kRows / kWarp;
            if (lane % (kWarp / kRows) == 0 && row < count) shared.sums[warp][row] = sum;
        }
        sync();
        if (at >= share.count) return;
        float sum = bias;
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) sum += shared.sums[i][at];
        const bf16 value = add(at, sum);
        if (c.layers[index].next != nullptr) publish(c.exchange->next_hidden + place_of(share.first + at), value, tag_of(index));
        if (index + 1 == c.count) c.hidden[share.first + at] = value;
    }

    // Waits for the inputs of steps first..first + kAtOnce of this warp's of `down`, if it has them.
    template <int kAtOnce>
    __device__ __forceinline__ void wait_steps(uint2 (&x)[kOwnSteps], int first, int own, uint32_t tag) const {
        const uint32_t* const from = c.exchange->activated + (warp + first * kConsumers) * kStep + lane * kQuad;
        uint4 words[kAtOnce];
        bool are_here[kAtOnce], all = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) are_here[i] = first + i >= own, words[i] = make_uint4(0, 0, 0, 0);
        for (int looks = 0; !all; ++looks) {
            if (looks == kMostLooks) __trap();
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (!are_here[i]) words[i] = look_at_words(from + i * kConsumers * kStep);
            }
            all = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                are_here[i] = are_here[i] || have_tag(words[i], tag);
                all = all && are_here[i];
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i < kOwnSteps) x[first + i] = pairs_of(words[i]);
        }
    }

    // The projections of the layer behind this one.
    __device__ __forceinline__ void project(int index) {
        const Share& share = shared.shares[kNext];
        const bool is_last = index + 1 == c.count;
        put_biases(c.layers[index].next_bias, share, 0);
        uint2 x[kSteps];
        const float scale = take(x, c.exchange->next_hidden, tag_of(index), c.width, c.layers[index].next_norm, 0);
        plain(share, x, [&](int output, float sum) {
            const bf16 value = __float2bfloat16(fmaf(sum, scale, shared.biases[0][output]));
            if (is_last) {
                c.out[share.first + output] = value;
            } else {
                publish(c.exchange->projected + share.first + output, value, tag_of(index + 1));
            }
        });
    }

    // The last block to end leaves the exchange as the next launch needs it. Words are cleared before tags begin again.
    __device__ __forceinline__ void leave() {
        LayerExchange& exchange = *c.exchange;
        const uint32_t tag = tag_of(c.count - 1);
        const bool clears = tag + kMostLayers > kLastTag;
        if (threadIdx.x == 0) {
            __threadfence();
            const bool is_last = atomicAdd(&exchange.arrived, 1) + 1 == gridDim.x;
            if (clears) __threadfence();
            if (is_last) exchange.arrived = 0, exchange.last_tag = clears ? 0 : tag;
            shared.is_last = is_last;
        }
        if (!clears) return;
        sync();
        if (!shared.is_last) return;
        constexpr int kFirst = offsetof(LayerExchange, projected) / sizeof(uint4), kEnd = sizeof(LayerExchange) / sizeof(uint4);
        for (int i = kFirst + threadIdx.x; i < kEnd; i += kConsumerThreads) reinterpret_cast<uint4*>(&exchange)[i] = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void run() {
        pdl_wait();
        last_tag = __ldcg(&c.exchange->last_tag);
        const int at = threadIdx.x;
        const Share& own = shared.shares[kOutput];
        if (at < own.count) shared.residual[at] = __bfloat162float(c.hidden[own.first + at]);
        if (at < kDim / 2) shared.turns[at] = turn_of(*c.position, c.frequencies[at], c.turn_factor);
        sync();
#pragma unroll 1
        for (int index = 0; index < c.count; ++index) {
            if (shared.unit.head >= 0) attend(index);
            output(index);
            gated(index);
            down(index);
            if (c.layers[index].next != nullptr) project(index);
        }
        leave();
    }
};

// Copies a block's weights and cached tokens of all layers, by one thread.
template <int kDim, int kHeld>
__device__ __forceinline__ void copy(const LayerChain& c, Shared<kDim, kHeld>& shared, uint8_t* memory) {
    constexpr int kAtOnce = Consumer<kDim, kHeld>::kAtOnce;
    Copier<kDim, kHeld> copier(c, shared, memory);
    const Unit unit = shared.unit;
#pragma unroll 1
    for (int i = 0; i < c.count; ++i) {
        const ChainLayer& layer = c.layers[i];
        if (unit.head >= 0) {
#pragma unroll 1
            for (int first = unit.begin; first < unit.end; first += kAtOnce) {
                const int end = min(first + kAtOnce, unit.end);
                copier.cached(layer.k, unit.kv_head, first, end);
                copier.cached(layer.v, unit.kv_head, first, end);
            }
        }
        copier.rows(layer.output, shared.shares[kOutput]);
        copier.rows(layer.gate_up, shared.shares[kGated], layer.gate_up + size_t(c.inner) * shared.shares[kGated].row_bytes);
        copier.rows(layer.down, shared.shares[kDown]);
        if (layer.next != nullptr) copier.rows(layer.next, shared.shares[kNext]);
    }
}

// Brings what is not copied into L2, by the lanes beside that thread.
__device__ __forceinline__ void prefetch_vectors(const LayerChain& c) {
    const int lane = threadIdx.x % kWarp - 1, dim = c.projected_width / (c.heads + 2 * c.kv_heads);
    const auto prefetch = [&](const void* from, int bytes) {
        if (from == nullptr) return;
        for (int i = lane * 128; i < bytes; i += (kWarp - 1) * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i));
    };
    for (int i = blockIdx.x; i < c.count; i += gridDim.x) {
        const ChainLayer& layer = c.layers[i];
        prefetch(layer.norm, c.width * int(sizeof(float)));
        prefetch(layer.output_bias, c.width * int(sizeof(bf16)));
        prefetch(layer.down_bias, c.width * int(sizeof(bf16)));
        prefetch(layer.q_norm, dim * int(sizeof(float)));
        prefetch(layer.k_norm, dim * int(sizeof(float)));
        if (layer.next == nullptr) continue;
        prefetch(layer.next_norm, c.width * int(sizeof(float)));
        prefetch(layer.next_bias, c.projected_width * int(sizeof(bf16)));
    }
}

template <int kDim, int kHeld>
__device__ __forceinline__ void run(const LayerChain& c) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared<kDim, kHeld> shared;
    pdl_launch();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kChunks; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], kConsumers);
        }
        fence_for_products();
        shared.shares[kOutput].set(c.width, c.heads * kDim, false);
        shared.shares[kGated].set(c.inner, c.width, true);
        shared.shares[kDown].set(c.width, c.inner, false);
        shared.shares[kNext].set(c.projected_width, c.width, false);
        shared.unit.set(c.heads, c.kv_heads, max(c.run->context_end - 1, 0), Consumer<kDim, kHeld>::kAtOnce);
    }
    __syncthreads();
    if (threadIdx.x < kConsumerThreads) {
        Consumer<kDim, kHeld>(c, shared, memory).run();
    } else if (threadIdx.x == kConsumerThreads) {
        copy<kDim, kHeld>(c, shared, memory);
    } else {
        prefetch_vectors(c);
    }
}

#else

template <int, int>
__device__ __forceinline__ void run(const LayerChain&) {}

#endif

}  // namespace

#define LAYER_CHAIN(DIM, HELD)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kChainThreads, 1) layer_chain_##DIM##_##HELD(const __grid_constant__ LayerChain c) { \
        run<DIM, HELD>(c);                                                                                                         \
    }

// By the size of a head, and eights of inputs that a lane has, of products but `down`.
LAYER_CHAIN(64, 4)
LAYER_CHAIN(64, 8)
LAYER_CHAIN(128, 4)
LAYER_CHAIN(128, 8)
