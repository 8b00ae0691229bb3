// The products of experts whose weights are whole rows of bf16 or e4m3, for moe_chain.cu and, with bf16, moe_chain_sandwich.cu.
#pragma once

#include "moe_chain_consumer.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp has one row of weights at a time, of gate and up one each.
struct RowExperts : Consumer<1> {
    static constexpr int kTogether = 1, kDownRows = kConsumers;  // of a part of the second projections, a warp each

    float scales[kSlotsOfWarp] = {};  // of second projections

    using Consumer::Consumer;

    __device__ __forceinline__ static int row_bytes(const Matrix& matrix, int k) { return matrix.row_bytes(k); }

    // Reads ahead what comes from memory, as soon as the row's experts are known.
    __device__ __forceinline__ void read_ahead() {
        if (c.down.first.is_fp8()) load_down_scales();
        if (warp == 1) touch_gated_scales();
    }

    // Stores what was read, before the second projections need it.
    __device__ __forceinline__ void put_ahead() const {
        if (c.down.first.is_fp8()) put_down_scales();
    }

    __device__ __forceinline__ void gated() {
        if (c.gate_up.first.is_fp8()) {
            gated<true>(GatedParts(shared, c.inner));
        } else {
            gated<false>(GatedParts(shared, c.inner));
        }
    }

    __device__ __forceinline__ void down() {
        if (c.down.first.is_fp8()) {
            down<true>();
        } else {
            down<false>();
        }
    }

protected:
    // The first projections of these experts.
    template <bool kFp8>
    __device__ __forceinline__ void gated(GatedParts parts) {
        const int row_bytes = shared.shares[kGatedShare].row_bytes, of_row = row_bytes / kPieceBytes, at_once = shared.shares[kGatedShare].at_once;
        const int shift = block_shift(c.gate_up.first);
        int turn = warp;
        while (parts.next(at_once)) {
            const Slot& slot = shared.slots[parts.slot];
            const uint8_t* const stage = wait_stage();
#pragma unroll 1
            for (; turn < parts.count; turn += kConsumers) {
                const int gate = parts.first + turn, up = parts.inner + gate;
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

    __device__ __forceinline__ void touch_gated_scales() const {
        for (GatedParts parts(shared, c.inner); parts.next(c.inner);) {
            const Matrix& matrix = shared.slots[parts.slot].gate_up;
            touch_scales(matrix, parts.first, parts.count);
            touch_scales(matrix, c.inner + parts.first, parts.count);
        }
    }

    // Where in `down_scales` of a slot the first scale of one of this block's rows is.
    __device__ __forceinline__ int down_scale(int row) const {
        if (c.down.first.scale_stride == 0) return row;
        const Share& share = shared.shares[kDownShare];
        return ((share.first + row) / kFp8Block - share.first / kFp8Block) * (c.inner / kFp8Block);
    }

    // Loads the scales of the second projections of this warp's share of the experts, one for each lane.
    __device__ __forceinline__ void load_down_scales() {
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
    __device__ __forceinline__ void put_down_scales() const {
#pragma unroll
        for (int i = 0; i < kSlotsOfWarp; ++i) {
            const int slot = warp + i * kConsumers;
            if (slot < c.slots()) shared.down_scales[slot][lane] = scales[i] * shared.slots[slot].weight;
        }
    }

    // The second projections, and their sum, which is added to the residual stream.
    template <bool kFp8>
    __device__ __forceinline__ void down() {
        down<kFp8>([&](int at, int row, float sum) {
            const bf16 value = add(at, sum);
            // Without a reader, a store might arrive after the last block has left.
            if (c.has_next()) publish(c.exchange->next_hidden + row, value, tag);
            c.hidden[row] = value;
        });
    }

    // The second projections: `take_sum` gets which of the block's outputs it is, its row, and the sum over the experts. A warp has one row of each
    // expert's weights at a time. Those of e4m3 that are in a stage it multiplies as if they were one row.
    template <bool kFp8, typename TakeSum>
    __device__ __forceinline__ void down(TakeSum take_sum) {
        const Share& share = shared.shares[kDownShare];
        const int row_bytes = share.row_bytes, of_row = row_bytes / kPieceBytes, shift = block_shift(c.down.first);
        float sum = 0.0f;
        for (DownParts<kDownRows> parts(shared, c.slots()); parts.next();) {
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
            if (lane == 0 && has_row) take_sum(row, share.first + row, sum);
            sum = 0.0f;
        }
    }
};

#endif
