// Attention of one row as a part of layer_chain.cu, and what its warps have in common with products.
#pragma once

#include "layer_chain.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kQuad = 4;

__device__ __forceinline__ float low_value(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_value(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

// Adds the products of eight weights and inputs.
__device__ __forceinline__ void add_products(float& even, float& odd, const uint4& weights, const float* x) {
    const uint32_t words[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        even = fmaf(low_value(words[i]), x[2 * i], even);
        odd = fmaf(high_value(words[i]), x[2 * i + 1], odd);
    }
}

__device__ __forceinline__ uint4 load_shared(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }

// Cosine and sine of `position` times a frequency in turns, as rope.cu makes them.
__device__ __forceinline__ float2 turn_of(int position, float2 frequency, float factor) {
    const float p = static_cast<float>(position);
    const float turns = __fmul_rn(p, frequency.x);
    const float rest = fmaf(p, frequency.x, -turns) + p * frequency.y;
    float2 result;
    sincospif(2.0f * (turns - rintf(turns) + rest), &result.y, &result.x);
    return make_float2(result.x * factor, result.y * factor);
}

// A row that other blocks write, or that was there before the launch.
struct Source {
    const uint32_t* words;
    const bf16* plain;  // null for words

    __device__ __forceinline__ Source from(int at) const { return {words + at, plain == nullptr ? nullptr : plain + at}; }
};

// What the warps that multiply do with attention, and what they do it and products with.
template <int kDim, int kHeld>
struct AttentionConsumer {
    // Lanes that have a head between them, and tokens that a warp has at once.
    static constexpr int kLanes = kDim / kVec, kTokens = kWarp / kLanes;
    static constexpr int kAtOnce = (16 << 10) / kDim;  // tokens
    static constexpr int kMergers = kDim / kWarp;      // warps that have an element for each thread in the end
    static constexpr int kTurns = (kAtOnce + kTokens * kConsumers - 1) / (kTokens * kConsumers);

    const LayerChain& c;
    Shared<kDim, kHeld>& shared;
    const uint8_t* memory;
    int chunk = 0, phase = 0;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    uint32_t last_tag = 0;

    __device__ __forceinline__ AttentionConsumer(const LayerChain& c, Shared<kDim, kHeld>& shared, uint8_t* memory)
        : c(c), shared(shared), memory(memory) {}

    __device__ __forceinline__ static void sync() { named_sync<kConsumerThreads>(1); }

    __device__ __forceinline__ uint32_t tag_of(int layer) const { return last_tag + 1 + layer; }

    // The next chunk, once it is there.
    __device__ __forceinline__ const uint8_t* wait_chunk() const {
        barrier_wait(&shared.full[chunk], phase);
        return memory + shared.offset[chunk];
    }

    // By all lanes, which have read it.
    __device__ __forceinline__ void release_chunk() {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[chunk]);
        if (++chunk == kChunks) chunk = 0, phase ^= 1;
    }

    // The chunk so many behind the next one, once it is there.
    __device__ __forceinline__ const uint8_t* wait_chunk_behind(int others) const {
        const int place = (chunk + others) % kChunks;
        barrier_wait(&shared.full[place], phase ^ ((chunk + others) / kChunks & 1));
        return memory + shared.offset[place];
    }

    // By all lanes of the only warp that reads it.
    __device__ __forceinline__ void release_chunk_behind(int others) const {
        __syncwarp();
        if (lane < kConsumers) barrier_arrive(&shared.empty[(chunk + others) % kChunks]);
    }

    // Goes on behind so many chunks.
    __device__ __forceinline__ void pass_chunks(int count) {
        phase ^= (chunk + count) / kChunks & 1;
        chunk = (chunk + count) % kChunks;
    }

    // Waits for the words at these places.
    template <int N>
    __device__ __forceinline__ static void wait_words(uint4 (&words)[N], const uint32_t* const (&from)[N], uint32_t tag) {
        bool are_here[N] = {}, all = false;
        for (int looks = 0; !all; ++looks) {
            if (looks == kMostLooks) __trap();
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (!are_here[i]) words[i] = look_at_words(from[i]);
            }
            all = true;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                are_here[i] = are_here[i] || have_tag(words[i], tag);
                all = all && are_here[i];
            }
        }
    }

    // Eight neighbouring values of each of these.
    template <int N>
    __device__ __forceinline__ static void take_eights(float (&x)[N][kVec], const Source (&from)[N], uint32_t tag) {
        if (from[0].plain != nullptr) {
            uint4 eights[N];
#pragma unroll
            for (int i = 0; i < N; ++i) eights[i] = __ldcg(reinterpret_cast<const uint4*>(from[i].plain));
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const uint32_t pairs[4] = {eights[i].x, eights[i].y, eights[i].z, eights[i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][2 * j] = low_value(pairs[j]), x[i][2 * j + 1] = high_value(pairs[j]);
            }
            return;
        }
        // All at once, as each wait takes a way to L2 and back.
        uint4 words[2 * N];
        const uint32_t* places[2 * N];
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) places[i] = from[i / 2].words + i % 2 * kQuad;
        wait_words(words, places, tag);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint4 &low = words[2 * i], &high = words[2 * i + 1];
            const uint32_t all[kVec] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < kVec; ++j) x[i][j] = low_value(all[j]);
        }
    }

    // Normalises, if there are weights, and rotates a head, of which this lane has eight values, as `kLanes` lanes have all.
    __device__ __forceinline__ void turn_head(float (&x)[kVec], const float* norm) const {
        const int first = lane % kLanes * kVec;
        if (norm != nullptr) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < kVec; ++i) squares = fmaf(x[i], x[i], squares);
            const float scale = rsqrtf(sum_of_head(squares) / static_cast<float>(kDim) + c.head_eps);
#pragma unroll
            for (int i = 0; i < kVec; ++i) x[i] *= scale * __ldg(norm + first + i);
        }
        const float sign = lane & kLanes / 2 ? 1.0f : -1.0f;
        const float4* const turns = reinterpret_cast<const float4*>(&shared.turns[first % (kDim / 2)]);
#pragma unroll
        for (int i = 0; i < kVec; i += 2) {
            const float4 turn = turns[i / 2];
            const float even = __shfl_xor_sync(kAllLanes, x[i], kLanes / 2) * sign, odd = __shfl_xor_sync(kAllLanes, x[i + 1], kLanes / 2) * sign;
            x[i] = rounded(fmaf(even, turn.y, x[i] * turn.x));
            x[i + 1] = rounded(fmaf(odd, turn.w, x[i + 1] * turn.z));
        }
    }

    // By selections, so that values stay in registers.
    __device__ __forceinline__ static float one_of(const float (&x)[kVec], int at) {
        float some[kVec / 2];
#pragma unroll
        for (int i = 0; i < kVec / 2; ++i) some[i] = at & 4 ? x[i + 4] : x[i];
        const float even = at & 2 ? some[2] : some[0], odd = at & 2 ? some[3] : some[1];
        return at & 1 ? odd : even;
    }

    __device__ __forceinline__ static float sum_of_head(float x) {
#pragma unroll
        for (int offset = 1; offset < kLanes; offset *= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
        return x;
    }

    __device__ __forceinline__ static void store_eight(bf16* to, const float (&x)[kVec]) {
        Float8 wide;
#pragma unroll
        for (int i = 0; i < kVec; ++i) wide.at[i] = x[i];
        store8(to, narrow(wide));
    }

    // This block's part of the attention of a layer.
    __device__ __forceinline__ void attend(int index) {
        const ChainLayer& layer = c.layers[index];
        const Unit& unit = shared.unit;
        const uint32_t tag = tag_of(index);
        const int kv_head = unit.kv_head;
        const Source projected = {c.exchange->projected, index == 0 ? c.projected : nullptr};
        const Source key = projected.from((c.heads + kv_head) * kDim), value = key.from(c.kv_heads * kDim);
        const float factor = c.scale * 1.44269504f;
        const int first = lane % kLanes * kVec, at = threadIdx.x;
        const bool merges = unit.split == 0 && warp < kMergers;
        const bool stores = unit.split == 0 && warp == kMergers && unit.is_first;
        const Source query = projected.from(unit.head * kDim + first);
        float q[kVec], new_score = -INFINITY, new_value = 0.0f;
        if (merges || stores) {
            float x[3][kVec];
            take_eights(x, {query, key.from(first), value.from(merges ? at / kVec * kVec : first)}, tag);
            __syncwarp();
            turn_head(x[0], layer.q_norm);
            turn_head(x[1], layer.k_norm);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kVec; ++i) q[i] = x[0][i], sum = fmaf(q[i], x[1][i], sum);
            if (merges) {
                new_score = sum_of_head(sum) * factor;
                new_value = one_of(x[2], at % kVec);
            } else {
                store_current(layer, x[1], x[2], kv_head);
            }
        } else {
            float x[1][kVec];
            take_eights(x, {query}, tag);
            __syncwarp();
            turn_head(x[0], layer.q_norm);
#pragma unroll
            for (int i = 0; i < kVec; ++i) q[i] = x[0][i];
        }
        float sums[kVec] = {}, most = -INFINITY, total = 0.0f;
#pragma unroll 1
        for (int begin = unit.begin; begin < unit.end; begin += kAtOnce) {
            const int tokens = min(kAtOnce, unit.end - begin);
            attend_to(tokens, q, factor, sums, most, total);
        }
        merge(unit, tag, new_score, new_value, sums, most, total);
    }

    // The current token's key and value go to the cache, if they have a place there; by a warp.
    __device__ __forceinline__ void store_current(const ChainLayer& layer, const float (&k)[kVec], const float (&v)[kVec], int kv_head) const {
        const int slot = *c.slot, mask = (1 << c.block_shift) - 1;
        if (slot < 0 || lane >= kLanes) return;
        const size_t row = (size_t(kv_head) << c.block_shift) + (slot & mask);
        const size_t at = size_t(slot >> c.block_shift) * c.block_stride + row * kDim + lane * kVec;
        store_eight(layer.k + at, k);
        store_eight(layer.v + at, v);
    }

    // Adds so many tokens, whose keys and values are the next two chunks.
    __device__ __forceinline__ void attend_to(int tokens, const float (&q)[kVec], float factor, float (&sums)[kVec], float& most, float& total) {
        const int own = warp * kTokens + lane / kLanes, offset = lane % kLanes * 16;
        const uint8_t* const keys = wait_chunk() + offset;
        float scores[kTurns], largest = most;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
            const int token = own + i * kTokens * kConsumers;
            float even = 0.0f, odd = 0.0f;
            if (token < tokens) add_products(even, odd, load_shared(keys + token * kDim * int(sizeof(bf16))), q);
            const float score = sum_of_head(even + odd) * factor;
            scores[i] = token < tokens ? score : -INFINITY;
            largest = fmaxf(largest, scores[i]);
        }
        release_chunk();
        // Finite, so that no difference is of two infinities.
        largest = fmaxf(largest, -1e30f);
        const float shrunk = exp2f(most - largest);
        most = largest;
        total *= shrunk;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] *= shrunk;
        const uint8_t* const values = wait_chunk() + offset;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
            const int token = own + i * kTokens * kConsumers;
            if (token >= tokens) continue;
            const float weight = exp2f(scores[i] - largest);
            total += weight;
            const uint4 v = load_shared(values + token * kDim * int(sizeof(bf16)));
            const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[2 * j] = fmaf(weight, low_value(pairs[j]), sums[2 * j]);
                sums[2 * j + 1] = fmaf(weight, high_value(pairs[j]), sums[2 * j + 1]);
            }
        }
        release_chunk();
    }

    // Merges what the warps have of a split, and the block of the first split those of the others, with the current token.
    __device__ __forceinline__ void merge(const Unit& unit, uint32_t tag, float new_score, float new_value, float (&sums)[kVec], float most,
                                          float total) {
        // Each group of lanes has other tokens, and its own maximum.
        const float largest = fmaxf(warp_max(most), -1e30f), factor = exp2f(most - largest);
        total *= factor;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] *= factor;
#pragma unroll
        for (int offset = kLanes; offset < kWarp; offset *= 2) {
            total += __shfl_xor_sync(kAllLanes, total, offset);
#pragma unroll
            for (int i = 0; i < kVec; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], offset);
        }
        if (lane < kLanes) {
            float4* const to = reinterpret_cast<float4*>(shared.parts[warp] + lane * kVec);
            to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
        }
        if (lane == 0) shared.states[warp] = make_float2(largest, total);
        // What other splits give is as if it were of more warps.
        const int others = unit.split == 0 ? unit.splits - 1 : 0;
#pragma unroll 1
        for (int i = warp; i < others; i += kConsumers) {
            const int part = unit.part(i + 1);
            const uint64_t* from[kMergers + 1] = {};
#pragma unroll
            for (int j = 0; j < kMergers; ++j) from[j] = &c.exchange->parts[part][lane + j * kWarp];
            from[kMergers] = &c.exchange->logs[part];
            float values[kMergers + 1];
            wait_values(values, from, tag);
#pragma unroll
            for (int j = 0; j < kMergers; ++j) shared.parts[kConsumers + i][lane + j * kWarp] = values[j];
            if (lane == 0) shared.states[kConsumers + i] = make_float2(values[kMergers], 1.0f);
        }
        sync();
        const int at = threadIdx.x;
        if (at >= kDim) return;
        float all = new_score;
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) all = fmaxf(all, shared.states[i].x);
#pragma unroll 1
        for (int i = kConsumers; i < kConsumers + others; ++i) all = fmaxf(all, shared.states[i].x);
        float weight = exp2f(new_score - all), sum = weight * new_value;
        const auto add_part = [&](int i) {
            const float2 state = shared.states[i];
            const float share = exp2f(state.x - all);
            weight = fmaf(share, state.y, weight);
            sum = fmaf(share, shared.parts[i][at], sum);
        };
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) add_part(i);
#pragma unroll 1
        for (int i = kConsumers; i < kConsumers + others; ++i) add_part(i);
        if (unit.split == 0) {
            publish(c.exchange->attended + place_of(unit.head * kDim + at), __float2bfloat16(sum / weight), tag);
        } else {
            publish(&c.exchange->parts[blockIdx.x][at], sum / weight, tag);
            if (at == 0) publish(&c.exchange->logs[blockIdx.x], all + __log2f(weight), tag);
        }
    }
};

#endif
