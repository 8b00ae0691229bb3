// The thread that copies weights in moe_chain.cu and moe_chain_sandwich.cu.
#pragma once

#include "moe_chain.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename Experts>
struct WeightCopies {
    const MoeChain& c;
    Shared& shared;
    uint8_t* memory;
    Producer producer;

    __device__ __forceinline__ WeightCopies(const MoeChain& c, Shared& shared, uint8_t* memory)
        : c(c), shared(shared), memory(memory), producer(shared.barriers, c.stages) {}

    // Of a product, this block's rows.
    __device__ __forceinline__ void rows(const Matrix& matrix, const Share share) {
        const int most = most_of(share.at_once * share.row_bytes);
        for (int first = 0; first < share.count; first += share.at_once) {
            const int bytes = min(share.at_once, share.count - first) * share.row_bytes;
            const uint8_t* const from = matrix.weight + size_t(share.first + first) * share.row_bytes;
            producer.copy(place(producer.begin(bytes, most)), from, bytes);
            producer.ring.next();
        }
    }

    // Of the first projections of experts, each once it is known whether the row goes to it.
    __device__ __forceinline__ void gated(GatedParts parts) {
        const int row_bytes = shared.shares[kGatedShare].row_bytes, at_once = shared.shares[kGatedShare].at_once;
        const int most = most_of(2 * at_once * row_bytes);
        while (parts.next(at_once)) {
            const int bytes = parts.count * row_bytes;
            const uint32_t to = place(producer.begin(2 * bytes, most));
            if (parts.slot < c.top_k) barrier_wait(&shared.routed, 0);
            const uint8_t* const from = shared.slots[parts.slot].gate_up.weight + size_t(parts.first) * row_bytes;
            producer.copy(to, from, bytes);
            producer.copy(to + bytes, from + size_t(parts.inner) * row_bytes, bytes);
            producer.ring.next();
        }
    }

    // Of the second projections of the row's experts.
    __device__ __forceinline__ void down() {
        for (DownParts<Experts::kDownRows> parts(shared, c.slots()); parts.next();) {
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

private:
    // How many stages of so many bytes may be on their way.
    __device__ __forceinline__ int most_of(int bytes) const { return min(max((c.in_flight + bytes - 1) / bytes, 2), c.stages); }

    __device__ __forceinline__ uint32_t place(int stage) const { return shared_address(memory + stage * c.stage_bytes); }
};

#endif
