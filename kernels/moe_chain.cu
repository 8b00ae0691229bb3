// A layer of one row with experts, from its mixer's output projection to the projections that the next mixer begins with, in one launch
// (sm_90a): that product, the router's, the experts' two with their sum, and the next, with residual sums and norms between them. chain.cuh
// says how. An expert that every row goes to is one more, which the sigmoid of its gate multiplies.
//
// Each block has its share of the outputs of each product, of all chosen experts as if they were one. Weights are bf16, or e4m3 with scales;
// inputs are not quantised (pieces.cuh). A warp multiplies whole rows of weights, its lanes 16 bytes each in turn, with inputs in shared memory.
// Of the experts' second projections a warp computes the same outputs for all experts and adds them in the order of the experts' logits. Every
// block chooses the row's experts, from the same logits; only then can its copying thread go on to their weights. What blocks need of each other
// they exchange as tagged words (tagged.cuh).
#include "moe_chain.cuh"

namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies the weights of all products, by one thread.
__device__ __forceinline__ void produce(const MoeChain& c, Shared& shared, uint8_t* memory) {
    Producer producer(shared.barriers, c.stages);
    const auto most_of = [&](int bytes) { return min(max((c.in_flight + bytes - 1) / bytes, 2), c.stages); };
    const auto place = [&](int stage) { return shared_address(memory + stage * c.stage_bytes); };
#pragma unroll 1
    for (int i = 0; i < kLinks; ++i) {
        const Link& link = shared.links[i];
        // The experts' products come before what follows the layer.
        if (i == kNext) {
            const int row_bytes = shared.shares[kGatedShare].row_bytes, at_once = shared.shares[kGatedShare].at_once;
            const int most = most_of(2 * at_once * row_bytes);
            for (GatedParts parts(shared, c.inner); parts.next(at_once);) {
                const int bytes = parts.count * row_bytes;
                const uint32_t to = place(producer.begin(2 * bytes, most));
                barrier_wait(&shared.routed, 0);
                const uint8_t* const from = shared.slots[parts.slot].gate_up.weight + size_t(parts.first) * row_bytes;
                producer.copy(to, from, bytes);
                producer.copy(to + bytes, from + size_t(c.inner) * row_bytes, bytes);
                producer.ring.next();
            }
            for (DownParts parts(shared, c.slots()); parts.next();) {
                const int row_bytes = parts.share.row_bytes, bytes = parts.rows * row_bytes;
                const uint32_t to = place(producer.begin(parts.slots * bytes, most_of(parts.slots * bytes)));
                barrier_wait(&shared.routed, 0);
#pragma unroll 1
                for (int of = 0; of < parts.slots; ++of) {
                    const uint8_t* const from = shared.slots[parts.slot + of].down.weight;
                    producer.copy(to + of * bytes, from + size_t(parts.share.first + parts.row) * row_bytes, bytes);
                }
                producer.ring.next();
            }
        }
        const Share share = shared.shares[i];
        const int most = most_of(share.at_once * share.row_bytes);
        for (int first = 0; first < share.count; first += share.at_once) {
            const int bytes = min(share.at_once, share.count - first) * share.row_bytes;
            const uint8_t* const from = link.matrix.weight + size_t(share.first + first) * share.row_bytes;
            producer.copy(place(producer.begin(bytes, most)), from, bytes);
            producer.ring.next();
        }
    }
}

// What the warps that multiply do. Instruction caches are cold at each launch and each new product, so the code is small and loops are not unrolled.
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
    bf16 residual{};       // the residual stream at this thread's output of the block
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

    // Warps take rows in turn, from stage to stage.
    template <bool kFp8>
    __device__ __forceinline__ void plain(const Link& link, const Share& share) {
        const Matrix matrix = link.matrix;
        const int row_bytes = share.row_bytes, of_row = row_bytes / kPieceBytes, at_once = share.at_once;
#pragma unroll 1
        for (int first = 0; first < share.count; first += at_once) {
            const int end = min(at_once, share.count - first);
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (int at = unsigned(warp - first) % kConsumers; at < end; at += kConsumers) {
                const int row = share.first + first + at;
                float sums[1];
                multiply<kFp8, 1>(sums, {reinterpret_cast<const uint4*>(stage + at * row_bytes)}, {kFp8 ? matrix.scales_of(row) : nullptr},
                                  block_shift(matrix), 0, of_row);
                float value = warp_sum(sums[0]);
                if (lane == 0) {
                    if (link.bias != nullptr) value += __bfloat162float(link.bias[row]);
                    if (link.take == Take::kAdd) {
                        publish(c.exchange->hidden + row, add(first + at, value), tag);
                    } else if (link.take == Take::kLogits) {
                        publish(c.exchange->logits + link.first_logit + row, value, tag);
                        static_cast<float*>(link.out)[row] = value;
                    } else {
                        static_cast<bf16*>(link.out)[row] = __float2bfloat16(value);
                    }
                }
            }
            release_stage();
        }
    }

    // The first projections of the row's experts.
    template <bool kFp8>
    __device__ __forceinline__ void gated() {
        const int row_bytes = shared.shares[kGatedShare].row_bytes, of_row = row_bytes / kPieceBytes, at_once = shared.shares[kGatedShare].at_once;
        const int shift = block_shift(c.gate_up.first);
        int turn = warp;
        for (GatedParts parts(shared, c.inner); parts.next(at_once);) {
            const Slot& slot = shared.slots[parts.slot];
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (; turn < parts.count; turn += kConsumers) {
                const int gate = parts.first + turn, up = c.inner + gate;
                const float *gate_scales = nullptr, *up_scales = nullptr;
                if (kFp8) gate_scales = slot.gate_up.scales_of(gate), up_scales = slot.gate_up.scales_of(up);
                const auto row = [&](int at) { return reinterpret_cast<const uint4*>(stage + at * row_bytes); };
                float sums[2];
                multiply<kFp8, 2>(sums, {row(turn), row(parts.count + turn)}, {gate_scales, up_scales}, shift, 0, of_row);
                const float sum = sum_values(sums), of_up = __shfl_sync(kAllLanes, sum, kWarp / 2);
                if (lane == 0) {
                    const bf16 value = __float2bfloat16(activate(c.kind, sum, of_up));
                    publish(c.exchange->activated + parts.slot * c.inner + gate, value, tag);
                    slot.activated[gate] = value;
                }
            }
            turn -= parts.count;
            release_stage();
        }
    }

    __device__ __forceinline__ void prefetch_gated_scales() const {
        for (GatedParts parts(shared, c.inner); parts.next(c.inner);) {
            const Matrix& matrix = shared.slots[parts.slot].gate_up;
            prefetch_scales(matrix, parts.first, parts.count);
            prefetch_scales(matrix, c.inner + parts.first, parts.count);
        }
    }

    // Where in `down_scales` of a slot the first scale of one of this block's rows is.
    __device__ __forceinline__ int down_scale(int row) const {
        if (c.down.first.scale_stride == 0) return row;
        const Share& share = shared.shares[kDownShare];
        return ((share.first + row) / kFp8Block - share.first / kFp8Block) * (c.inner / kFp8Block);
    }

    // Loads the scales of the second projections of this warp's share of the experts, one for each lane.
    __device__ __forceinline__ void load_down_scales(float (&scales)[kSlotsOfWarp]) const {
        const Share& share = shared.shares[kDownShare];
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

    // Stores them, times the experts' weights, for all warps.
    __device__ __forceinline__ void put_down_scales(const float (&scales)[kSlotsOfWarp]) const {
#pragma unroll
        for (int i = 0; i < kSlotsOfWarp; ++i) {
            const int slot = warp + i * kConsumers;
            if (slot < c.slots()) shared.down_scales[slot][lane] = scales[i] * shared.slots[slot].weight;
        }
    }

    // The second projections, and their sum, which is added to the residual stream. A warp has one row of each expert's weights at a time. Those
    // of e4m3 that are in a stage it multiplies as if they were one row.
    template <bool kFp8>
    __device__ __forceinline__ void down() {
        const Share& share = shared.shares[kDownShare];
        const int row_bytes = share.row_bytes, of_row = row_bytes / kPieceBytes, shift = block_shift(c.down.first);
        float sum = 0.0f;
        for (DownParts parts(shared, c.slots()); parts.next();) {
            const uint8_t* const stage = wait_stage();
            const int row = parts.row + warp, expert_bytes = parts.rows * row_bytes;
            const bool has_row = warp < parts.rows;
            if (has_row) {
                const uint8_t* weights = stage + warp * row_bytes;
                if constexpr (kFp8) {
                    const float* scales = shared.down_scales[parts.slot] + down_scale(row);
                    const uint4* const x = halves + parts.slot * of_row;
                    const float* const factors = reinterpret_cast<const float*>(halves + 2 * pieces) + parts.slot * of_row;
                    int piece = lane;  // of an expert's row
#pragma unroll 1
                    for (int i = lane; i < parts.slots * of_row; i += kWarp, piece += kWarp) {
                        for (; piece >= of_row; piece -= of_row) weights += expert_bytes, scales += kWarp;
                        const float scale = scales[piece >> shift] * factors[i];
                        sum = fmaf(sum_of_piece(reinterpret_cast<const uint4*>(weights)[piece], x[i], x[i + pieces]), scale, sum);
                    }
                } else {
#pragma unroll 1
                    for (int i = 0; i < parts.slots; ++i, weights += expert_bytes) {
                        float of_expert[1];
                        multiply<false, 1>(of_expert, {reinterpret_cast<const uint4*>(weights)}, {nullptr}, 0, (parts.slot + i) * of_row, of_row);
                        sum = fmaf(shared.slots[parts.slot + i].weight, of_expert[0], sum);
                    }
                }
            }
            release_stage();
            if (!parts.has_all()) continue;
            sum = warp_sum(sum);
            if (lane == 0 && has_row) {
                const bf16 value = add(row, sum);
                // Without a reader, a store might arrive after the last block has left.
                if (c.next_outputs > 0) publish(c.exchange->next_hidden + share.first + row, value, tag);
                c.hidden[share.first + row] = value;
            }
            sum = 0.0f;
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
            const float bias = router.bias == nullptr ? 0.0f : __bfloat162float(router.bias[expert]);
            key = to_key(wait_value(c.exchange->logits + expert, tag) * router.scale + bias);
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

    __device__ __forceinline__ void run() {
        pdl_wait();
        const Share& own = shared.shares[kDownShare];
        if (int(threadIdx.x) < own.count) residual = c.hidden[own.first + threadIdx.x];
        const int phases = shared.links[kNext].n == 0 ? kLast : kLast + 1;
        float scales[kSlotsOfWarp] = {};  // of second projections
#pragma unroll 1
        for (int phase = kOutput; phase < phases; ++phase) {
            const Source source = shared.sources[phase];
            float4 norm[kTaken] = {};
            load_norm(norm, source);
            if (phase > kOutput) {
                tell_others();
                if (phase == kDown && c.down.first.is_fp8()) put_down_scales(scales);
                wait_for_others();
            }
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
                continue;
            }
            take(source, norm);
            if (phase == phases - 1 && warp == kLeastBusy) leave();
            if (phase == kDown) {
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
                        plain<true>(shared.links[i], shared.shares[i]);
                    } else {
                        plain<false>(shared.links[i], shared.shares[i]);
                    }
                }
            }
        }
    }
};

__device__ __forceinline__ void run(const MoeChain& c) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared shared;
    pdl_launch();
    if (threadIdx.x == 0) {
        const auto bf16_rows = [](const bf16* rows) { return Matrix{reinterpret_cast<const uint8_t*>(rows), nullptr, 0}; };
        shared.links[0] = {c.output, c.output_bias, c.width, c.attended, Take::kAdd, nullptr, 0};
        shared.links[1] = {bf16_rows(c.router_weight), nullptr, c.experts, c.width, Take::kLogits, c.logits, 0};
        shared.links[2] = {bf16_rows(c.shared_gate), nullptr, c.has_shared(), c.width, Take::kLogits, c.shared_logit, c.experts};
        shared.links[kNext] = {c.next, c.next_bias, c.next_outputs, c.width, Take::kStore, c.out, 0};
        if (c.has_shared()) shared.slots[c.top_k] = {c.shared_gate_up, c.shared_down, c.shared_activated, 0.0f, 0};
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
        shared.sources[kLast] = source(c.exchange->next_hidden, c.width, c.next_norm, c.next);
    }
    if (threadIdx.x < kWarp) {
        __syncwarp();
        divide(c, shared);
    }
    __syncthreads();
    if (threadIdx.x < kConsumerThreads) {
        Consumer(c, shared, memory).run();
        return;
    }
    // Scales, and weights of norms, wait in L2 for when they are needed.
    const Share &outputs = shared.shares[0], &next_outputs = shared.shares[kNext];
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
              const float* expert_scales, float* logits, unsigned* loads, const uint8_t* gate_up, const float* gate_up_scales,
              int gate_up_stride, uint64_t next_gate_up, const uint8_t* down, const float* down_scales, int down_stride, uint64_t next_down,
              const uint8_t* shared_gate_up, const float* shared_gate_up_scales, const uint8_t* shared_down, const float* shared_down_scales,
              const bf16* shared_gate, float* shared_logit, bf16* activated, bf16* shared_activated, const float* next_norm, float next_eps,
              const uint8_t* next, const float* next_scales, int next_stride, const bf16* next_bias, bf16* out, Exchange* exchange,
              int attended, int width, int experts, int top_k, int inner, int next_outputs, int kind, int stage_bytes, int stages,
              int in_flight, int plain_bytes) {
    run({x,
         {output, output_scales, output_stride},
         output_bias,
         hidden,
         {norm, eps},
         router_weight,
         {router_bias, of_all != 0, scale, expert_scales},
         logits,
         loads,
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
         exchange,
         attended,
         width,
         experts,
         top_k,
         inner,
         next_outputs,
         kind,
         stage_bytes,
         stages,
         in_flight,
         plain_bytes});
}
