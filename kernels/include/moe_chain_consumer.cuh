// What the warps that multiply do in moe_chain.cu and moe_chain_sandwich.cu, however experts' weights are stored.
#pragma once

#include "moe_chain.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Instruction caches are cold at each launch and each new product, so the code is small and loops are not unrolled. `kTogether` rows of the
// experts' weights lie together.
template <int kTogether>
struct Consumer {
    const MoeChain& c;
    Shared& shared;
    const uint8_t* stages;
    uint2* inputs;   // in shared memory, as bf16, for products with bf16 weights
    uint4* halves;   // as f16, for e4m3 weights: the first eight inputs of every piece, the last eight of every piece, then a factor for each piece
    int pieces = 0;  // in halves
    Ring ring;
    uint32_t tag = 0;      // this launch's
    unsigned counted = 0;  // what `written` was awaited to reach so far
    bf16 residual{};       // the residual stream at this thread's output of the first product
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    __device__ __forceinline__ Consumer(const MoeChain& c, Shared& shared, uint8_t* memory)
        : c(c),
          shared(shared),
          stages(memory),
          inputs(reinterpret_cast<uint2*>(memory + c.stages * c.stage_bytes)),
          halves(reinterpret_cast<uint4*>(memory + c.stages * c.stage_bytes + c.plain_bytes)),
          ring{c.stages} {}

    __device__ __forceinline__ static void sync() { named_sync<kConsumerThreads>(1); }

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

    // Stores four inputs as f16 at `to`, and their piece's factor at `factor_to`. All lanes of a warp must call it.
    __device__ __forceinline__ static void put_halves(uint2* to, float* factor_to, uint2 values, bool is_input) {
        const HalfFactor factor = piece_factor(values);
        if (!is_input) return;
        const float2 low = widen_pair(values.x), high = widen_pair(values.y);
        *to = make_uint2(pack_halves(low.x * factor.of_inputs, low.y * factor.of_inputs),
                         pack_halves(high.x * factor.of_inputs, high.y * factor.of_inputs));
        *factor_to = factor.of_sum;
    }

    // Tells the other blocks that all threads of this one have published the outputs of the phase before.
    __device__ __forceinline__ void tell_others() {
        sync();
        if (threadIdx.x == 0) count_written(&c.exchange->written);
    }

    // Waits until all blocks have said so. Some of their words may still arrive later.
    __device__ __forceinline__ void wait_for_others() {
        counted += gridDim.x;
        if (threadIdx.x == 0) wait_count(&c.exchange->written, counted);
        sync();
    }

    // Loads the weights of a phase's norm ahead of `take`.
    __device__ __forceinline__ void load_norm(float4 (&norm)[kTaken], const Source& from) const {
        const int quads = from.count / kQuad;
#pragma unroll
        for (int i = 0; i < kTaken; ++i) {
            const int quad = threadIdx.x + i * kConsumerThreads;
            if (from.norm.weight != nullptr && quad < quads) norm[i] = reinterpret_cast<const float4*>(from.norm.weight)[quad];
        }
    }

    // Keeps what of the residual stream the block's outputs of the second projections are added to, where these are not those of the first product.
    __device__ __forceinline__ void keep_residual(const uint2 (&values)[kTaken], int first) {
        const Share& share = shared.shares[kDownShare];
#pragma unroll
        for (int i = 0; i < kTaken; ++i) {
            const int at = (first + i * kConsumerThreads) * kQuad - share.first;
            if (at >= 0 && at < share.count) *reinterpret_cast<uint2*>(shared.residual + at) = values[i];
        }
    }

    // Brings the inputs of a phase to shared memory, normalised if it has a norm.
    __device__ __forceinline__ void take(const Source& from, const float4 (&norm)[kTaken]) {
        constexpr unsigned kQuads = kFp8Piece / kQuad;  // of a piece, in neighbouring lanes
        const int quads = from.count / kQuad, part = threadIdx.x % kQuads;
        if (from.halves) pieces = from.count / kFp8Piece;
#pragma unroll 1
        for (int base = 0; base < quads; base += kTaken * kConsumerThreads) {
            const int first = base + threadIdx.x;
            uint4* const piece = halves + unsigned(first) / kQuads;
            float* const factor = reinterpret_cast<float*>(halves + 2 * pieces) + unsigned(first) / kQuads;
            const auto is_left = [&](int i) { return base + i * kConsumerThreads < quads; };  // the same for all threads
            uint2 values[kTaken];
            if (from.words == nullptr) {
#pragma unroll
                for (int i = 0; i < kTaken; ++i) {
                    const int quad = first + i * kConsumerThreads;
                    values[i] = quad < quads ? __ldcg(reinterpret_cast<const uint2*>(c.x) + quad) : make_uint2(0, 0);
                }
                // After the loads above were issued: reading the tag waits for memory too.
                if (base == 0) {
                    tag = __ldcg(&c.exchange->last_tag) + 1;
                    if (threadIdx.x < kMostResiduals) shared.residual[threadIdx.x] = residual;
                }
            } else {
                wait_quads(values, from.words, first, kConsumerThreads, quads, tag);
                if (kTogether > 1 && from.words == c.exchange->hidden) keep_residual(values, first);
            }
            float scale = 0.0f;
            if (from.norm.weight != nullptr) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kTaken; ++i) {
                    if (!is_left(i)) break;
                    const float2 low = widen_pair(values[i].x), high = widen_pair(values[i].y);
                    sum += fmaf(low.x, low.x, low.y * low.y) + fmaf(high.x, high.x, high.y * high.y);
                }
                sum = warp_sum(sum);
                if (lane == 0) shared.sums[warp] = sum;
                sync();
                sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kConsumers; ++i) sum += shared.sums[i];
                scale = rsqrtf(__fdividef(sum, float(from.count)) + from.norm.eps);
            }
#pragma unroll
            for (int i = 0; i < kTaken; ++i) {
                if (!is_left(i)) break;
                if (from.norm.weight != nullptr) {
                    const float2 low = widen_pair(values[i].x), high = widen_pair(values[i].y);
                    values[i] = make_uint2(pack(low.x * scale * norm[i].x, low.y * scale * norm[i].y),
                                           pack(high.x * scale * norm[i].z, high.y * scale * norm[i].w));
                }
                const int step = i * kConsumerThreads;
                const bool is_input = first + step < quads;
                if (from.plain && is_input) inputs[first + step] = values[i];
                if (from.halves) {
                    uint2* const to = reinterpret_cast<uint2*>(piece + part / 2 * pieces + step / kQuads) + part % 2;
                    put_halves(to, factor + step / kQuads, values[i], is_input);
                }
            }
        }
        sync();
    }

    // By how many bits a piece's index is shifted to get its block's; with one scale for each output, all get block 0.
    __device__ __forceinline__ static int block_shift(const Matrix& matrix) {
        static_assert(kFp8Block == kFp8Piece << 3);
        return matrix.scale_stride > 0 ? 3 : 31;
    }

    // This lane's part of the products of rows of weights with the inputs from piece `first` on; `scales` are those of each row's first block.
    template <bool kFp8, int kRows>
    __device__ __forceinline__ void multiply(float (&sums)[kRows], const uint4* const (&rows)[kRows], const float* const (&scales)[kRows],
                                             int shift, int first, int of_row) const {
        float parts[kRows][4] = {};
        const uint4* const x = (kFp8 ? halves : reinterpret_cast<const uint4*>(inputs)) + first;
        const float* const factors = reinterpret_cast<const float*>(halves + 2 * pieces) + first;
#pragma unroll 1
        for (int piece = lane; piece < of_row; piece += kWarp) {
            if constexpr (kFp8) {
                const uint4 low = x[piece], high = x[piece + pieces];
                const float factor = factors[piece];
#pragma unroll
                for (int row = 0; row < kRows; ++row) {
                    const float scale = scales[row][piece >> shift] * factor;
                    parts[row][0] = fmaf(sum_of_piece(rows[row][piece], low, high), scale, parts[row][0]);
                }
            } else {
                const PieceInputs of_piece(x[piece]);
#pragma unroll
                for (int row = 0; row < kRows; ++row) add_piece(parts[row], rows[row][piece], of_piece);
            }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) sums[row] = kFp8 ? parts[row][0] : sum_of(parts[row]);
        __syncwarp();
    }

    // Adds to one of this block's outputs of the residual stream, and returns the sum.
    __device__ __forceinline__ bf16 add(int at, float value) {
        bf16& sum = shared.residual[at];
        return sum = __float2bfloat16(__bfloat162float(sum) + __bfloat162float(__float2bfloat16(value)));
    }

    template <bool kFp8>
    __device__ __forceinline__ void plain(const Link& link, const Share& share) {
        plain<kFp8>(link, share, [&](int at, int row, float value) { publish(c.exchange->hidden + row, add(at, value), tag); });
    }

    // Warps take rows in turn, from stage to stage; of e4m3 two at a time, whose inputs are loaded once, if there are many. `take_sum` gets
    // which of the block's outputs it is, its row, and its value if the link's take is kAdd.
    template <bool kFp8, typename TakeSum>
    __device__ __forceinline__ void plain(const Link& link, const Share& share, TakeSum take_sum) {
        if constexpr (kFp8) {
            if (share.count >= 4 * kConsumers) return plain_rows<kFp8, 2>(link, share, take_sum);
        }
        plain_rows<kFp8, 1>(link, share, take_sum);
    }

    template <bool kFp8, int kRows, typename TakeSum>
    __device__ __forceinline__ void plain_rows(const Link& link, const Share& share, TakeSum take_sum) {
        const Matrix matrix = link.matrix;
        const int row_bytes = share.row_bytes, of_row = row_bytes / kPieceBytes, at_once = share.at_once;
        int turn = warp;
#pragma unroll 1
        for (int first = 0; first < share.count; first += at_once) {
            const int end = min(at_once, share.count - first), turns = (end + kRows - 1) / kRows;
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (; turn < turns; turn += kConsumers) {
                const uint4* rows[kRows];
                const float* scales[kRows];
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const int at = min(turn * kRows + i, end - 1);
                    rows[i] = reinterpret_cast<const uint4*>(stage + at * row_bytes);
                    scales[i] = kFp8 ? matrix.scales_of(share.first + first + at) : nullptr;
                }
                // Of the row whose sum this lane gets.
                const int at = turn * kRows + lane * kRows / kWarp, row = share.first + first + min(at, end - 1);
                const bf16 bias = link.bias == nullptr ? bf16{} : link.bias[row];
                float sums[kRows];
                multiply<kFp8, kRows>(sums, rows, scales, block_shift(matrix), 0, of_row);
                const float value = sum_values(sums) + __bfloat162float(bias);
                if (lane % (kWarp / kRows) == 0 && at < end) {
                    if (link.take == Take::kAdd) {
                        take_sum(first + at, row, value);
                    } else if (link.take == Take::kLogits) {
                        publish(c.exchange->logits + link.first_logit + row, value, tag);
                        static_cast<float*>(link.out)[row] = value;
                    } else {
                        static_cast<bf16*>(link.out)[row] = __float2bfloat16(value);
                    }
                }
            }
            turn -= turns;
            release_stage();
        }
    }

    // Chooses the row's experts from the logits that all blocks have computed, as route_row does, and tells the copying thread. Slots are in
    // descending order of logits; of equal logits the lower expert is first. 1 to 32 threads work on each expert.
    __device__ __forceinline__ void route() {
        const Router& router = c.router;
        const int log2 = min(31 - __clz(kRoutedExperts / c.experts), 5), threads = 1 << log2;
        const int expert = threadIdx.x >> log2, part = threadIdx.x & (threads - 1), own = expert / kQuad * kQuad;
        uint32_t key = 0;
        if (expert < c.experts) {
            const bf16 bias = router.bias == nullptr ? bf16{} : router.bias[expert];
            key = to_key(wait_value(c.exchange->logits + expert, tag) * router.scale + __bfloat162float(bias));
        }
        if (part == 0) shared.keys[expert] = key;
        sync();
        // The rank of an expert: how many have a larger logit, or an equal one and a lower index (here those in quads before its own).
        uint32_t rank = 0;
#pragma unroll 2
        for (int at = part * kQuad; at < c.experts; at += threads * kQuad) {
            const uint4 others = *reinterpret_cast<const uint4*>(shared.keys + at);
            const uint32_t bound = ~key + (at < own);
            count_carry(rank, others.x, bound);
            count_carry(rank, others.y, bound);
            count_carry(rank, others.z, bound);
            count_carry(rank, others.w, bound);
        }
#pragma unroll 1
        for (int offset = threads / 2; offset > 0; offset /= 2) rank += __shfl_xor_sync(kAllLanes, rank, offset);
        if (part == 0 && key > 0) {
#pragma unroll 1
            for (int at = own; at < expert; ++at) rank += shared.keys[at] == key;
            if (rank < c.top_k) {
                shared.slots[rank] = {c.gate_up.of(expert), c.down.of(expert), c.activated + rank * c.inner, from_key(key), expert};
                barrier_arrive(&shared.routed);
                if (blockIdx.x == 0 && c.loads != nullptr) atomicAdd(c.loads + expert, 1u);
            }
        }
        sync();
        if (warp == kLeastBusy) weigh();
    }

    // Turns the logits in slots into weights of the experts, by one warp. The next phase needs them.
    __device__ __forceinline__ void weigh() {
        const Router& router = c.router;
        Slot& slot = shared.slots[min(lane, c.top_k - 1)];
        const float top = shared.slots[0].weight;
        float weight = lane < c.top_k ? expf(slot.weight - top) : 0.0f, sum = weight;
        if (router.of_all) {
            sum = 0.0f;
#pragma unroll 1
            for (int at = lane; at < c.experts; at += kWarp) sum += expf(from_key(shared.keys[at]) - top);
        }
        weight = isfinite(top) ? __fdividef(weight, warp_sum(sum)) : __int_as_float(0x7fffffff);
        __syncwarp();
        if (lane < c.top_k) slot.weight = router.scales == nullptr ? weight : weight * router.scales[slot.expert];
        if (lane == 0 && c.has_shared()) {
            shared.slots[c.top_k].weight = 1.0f / (1.0f + expf(-wait_value(c.exchange->logits + c.experts, tag)));
        }
    }

    // By one warp of each block, once the block has read everything that others gave it. The last block resets the counters and stores the tag;
    // after the last tag it also clears all words.
    __device__ __forceinline__ void leave() const {
        Exchange& exchange = *c.exchange;
        if (tag == kLastTag) __threadfence();
        unsigned before = 0;
        if (lane == 0) before = atomicInc(&exchange.arrived, gridDim.x - 1);
        if (__shfl_sync(kAllLanes, before, 0) != gridDim.x - 1) return;
        if (tag == kLastTag) {
            __threadfence();
            uint4* const words = reinterpret_cast<uint4*>(exchange.hidden);
            const int vecs = (sizeof(Exchange) - offsetof(Exchange, hidden)) / sizeof(uint4);
            for (int i = lane; i < vecs; i += kWarp) words[i] = make_uint4(0, 0, 0, 0);
        }
        if (lane == 0) exchange.written = 0, exchange.last_tag = tag == kLastTag ? 0 : tag;
    }
};

#endif
