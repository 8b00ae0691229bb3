// The products of experts with MXFP4 weights, for moe_chain.cu.
//
// Weights are stored in the order of products' operands, eight rows together (experts.cuh), so products are those of tensor cores, of two groups
// of eight rows at once: gate and up of the same outputs, or the same rows of two experts, whose inputs are two columns. All warps multiply each
// group, every 16th window of its inputs a warp, and their sums meet in shared memory at the end of a phase.
#pragma once

#include "mma.cuh"
#include "moe_chain_consumer.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Mxfp4Experts : Consumer<kRowsTogether> {
    static constexpr int kTogether = kRowsTogether, kDownRows = kRowsTogether;
    static constexpr int kGatedSums = 2 * kRowsTogether;  // gates, then up projections
    static constexpr int kWindowBytes = kExpertWindow * sizeof(bf16), kPartBytes = kWindowBytes / 2;  // of inputs

    using Consumer::Consumer;

    // On average: exponents lie behind the codes of eight rows.
    __device__ __forceinline__ static int row_bytes(const Matrix&, int k) { return expert_windows(k) * (kExpertWindow / 2) + exponent_bytes(k); }

    // Eight gated outputs of a block: of which expert, and which.
    struct Group {
        int slot, first;
    };

    __device__ __forceinline__ int groups() const { return shared.shares[kGatedShare].count / kRowsTogether; }

    __device__ __forceinline__ Group group(int at) const {
        Group group{shared.first_slot, shared.shares[kGatedShare].first - shared.first_slot * c.inner + at * kRowsTogether};
        for (; group.first >= c.inner; group.first -= c.inner) ++group.slot;
        return group;
    }

    // Begins to copy the experts' biases to shared memory, as soon as these are known. Loads to registers would be waited for.
    __device__ __forceinline__ void read_ahead() const {
        const int at = threadIdx.x;
        if (at < 2 * kMostGroups) {
            if (c.gate_up.bias == nullptr || at / 2 >= groups()) return;
            const Group own = group(at / 2);
            copy_bias(shared.biases.gated[at / 2] + at % 2 * kRowsTogether, c.gate_up, own.slot, own.first + at % 2 * c.inner);
        } else {
            constexpr int kMostEights = kMostResiduals / kRowsTogether;
            const Share& share = shared.shares[kDownShare];
            const int slot = (at - 2 * kMostGroups) / kMostEights, row = at % kMostEights * kRowsTogether;
            if (c.down.bias == nullptr || slot >= c.slots() || row >= share.count) return;
            copy_bias(shared.biases.down[slot] + row, c.down, slot, share.first + row);
        }
    }

    // Biases need nothing done to them.
    __device__ __forceinline__ void put_ahead() const {}

    __device__ __forceinline__ void gated() {
        switch (rounds(c.width)) {
            case 1: return gated<1>();
            case 2: return gated<2>();
            case 3: return gated<3>();
            default: return gated<4>();
        }
    }

    __device__ __forceinline__ void down() {
        switch (rounds(c.inner)) {
            case 1: return down<1>();
            case 2: return down<2>();
            case 3: return down<3>();
            default: return down<4>();
        }
    }

private:
    // Begins to copy the biases of eight rows.
    __device__ __forceinline__ void copy_bias(bf16* to, const Matrices& matrices, int slot, int row) const {
        static_assert(kRowsTogether * sizeof(bf16) == kPieceBytes);
        copy_async(to, of_expert(matrices.bias, matrices.stride, shared.slots[slot].expert) + row, true);
    }

    // Windows of a warp, of which the last may be none. There are at most four.
    static_assert(kMostWidth <= 4 * kConsumers * kExpertWindow);
    __device__ __forceinline__ static int rounds(int k) { return (k / kExpertWindow + kConsumers - 1) / kConsumers; }

    // The sums of all warps, behind so many inputs.
    __device__ __forceinline__ float* sums_behind(int count) const { return reinterpret_cast<float*>(inputs + count / kQuad); }

    // Inputs below 2^64, times 2^64: an e2m1 code becomes bf16 without 126 of its exponent, and its products must not be too small for f32.
    static constexpr uint32_t kInputPower = 0x5f805f80;
    __device__ __forceinline__ static uint4 times_power(const uint4& x) {
        return make_uint4(::multiply(x.x, kInputPower), ::multiply(x.y, kInputPower), ::multiply(x.z, kInputPower), ::multiply(x.w, kInputPower));
    }

    // What products with the codes of 32 inputs are multiplied by: 2^(exponent - 127) times 2^(126 - 64). Exponents above 192 are refused when a
    // checkpoint is read.
    __device__ __forceinline__ static float scale(uint32_t exponents, int part) {
        return __uint_as_float((__byte_perm(exponents, 0, 0x4440 + part) + 126 - 64) << 23);
    }

    // Adds the products of this warp's windows of two groups of eight rows, at these addresses, to the sums of each group's row `lane / 4`, in the
    // first of each four lanes. Columns 0 and 1 of the inputs are those of the first and the second group.
    template <int kRounds, typename Inputs>
    __device__ __forceinline__ void multiply(float (&sums)[2], uint32_t low, uint32_t high, int windows, const Inputs& inputs_of) const {
        const uint32_t exponents = windows * kWindowOfEight + lane / 4 * exponent_bytes(windows * kExpertWindow);
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int window = min(warp + round * kConsumers, windows - 1);
            const uint2 a = load_shared8(low + window * kWindowOfEight + lane * 8), b = load_shared8(high + window * kWindowOfEight + lane * 8);
            const uint32_t of_a = load_shared2(low + exponents + window * 2), of_b = load_shared2(high + exponents + window * 2);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 x[1] = {inputs_of(round, part)};
                float products[1][4] = {};
                add_products(products, place_e2m1(part == 0 ? a.x : a.y), place_e2m1(part == 0 ? b.x : b.y), x);
                sums[0] = fmaf(products[0][0], scale(of_a, part), sums[0]);
                sums[1] = fmaf(products[0][3], scale(of_b, part), sums[1]);
            }
        }
    }

    // The first projections of the row's experts.
    template <int kRounds>
    __device__ __forceinline__ void gated() {
        const Share& share = shared.shares[kGatedShare];
        const int windows = c.width / kExpertWindow, eight_bytes = kRowsTogether * share.row_bytes;
        uint4 x[kRounds][2];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int window = warp + round * kConsumers;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                x[round][part] = make_uint4(0, 0, 0, 0);
                const uint32_t from = shared_address(inputs) + window * kWindowBytes + part * kPartBytes + lane / 8 * kPieceBytes;
                if (window < windows) x[round][part] = times_power(load_matrices(from));
            }
        }
        float* const sums = sums_behind(c.width);
        int at = 0;
        for (GatedParts parts(shared, c.inner); parts.next(share.at_once);) {
            uint32_t gate = shared_address(wait_stage());
#pragma unroll 1
            for (int first = 0; first < parts.count; first += kRowsTogether, gate += eight_bytes, ++at) {
                float own[2] = {};
                multiply<kRounds>(own, gate, gate + parts.count * share.row_bytes, windows, [&](int round, int part) { return x[round][part]; });
                if (lane % 4 == 0) {
                    float* const to = sums + (at * kConsumers + warp) * kGatedSums + lane / 4;
                    to[0] = own[0], to[kRowsTogether] = own[1];
                }
            }
            release_stage();
        }
        commit_async();
        wait_async<0>();
        sync();
#pragma unroll
        for (int i = 0; i < kMostGroups / kConsumers; ++i) {
            const int of = warp + i * kConsumers;
            if (of >= at) break;
            float sum = sum_of_warps<kGatedSums>(sums + of * (kConsumers * kGatedSums));
            if (c.gate_up.bias != nullptr) sum += __bfloat162float(shared.biases.gated[of][lane % kGatedSums]);
            const float up = __shfl_down_sync(kAllLanes, sum, kRowsTogether);
            if (lane < kRowsTogether) {
                const Group own = group(of);
                const bf16 value = __float2bfloat16(activate(c.kind, sum, up));
                const int output = own.first + lane;
                const float larger = __bfloat162float(value) * 0x1p64f;
                publish(c.exchange->activated + own.slot * c.inner + place(own.slot, output), __float2bfloat16(larger), tag);
                shared.slots[own.slot].activated[output] = value;
            }
        }
    }

    // Where an input of the second projections is among those of its expert: pieces of 16 bytes of every other expert change places, so that
    // those of two experts that are multiplied together are in different banks.
    __device__ __forceinline__ static int place(int slot, int input) { return input ^ slot % 2 * kVec; }

    // The sum over all warps of sums of so many rows: those of a row in lanes that are as many apart.
    template <int kRows>
    __device__ __forceinline__ float sum_of_warps(const float* from) const {
        constexpr int kAtOnce = kWarp / kRows;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kConsumers / kAtOnce; ++i) sum += from[i * kWarp + lane];
#pragma unroll
        for (int offset = kRows; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
        return sum;
    }

    // The second projections, and their sum, which is added to the residual stream.
    template <int kRounds>
    __device__ __forceinline__ void down() {
        const Share& share = shared.shares[kDownShare];
        const int windows = c.inner / kExpertWindow, eight_bytes = kRowsTogether * share.row_bytes;
        float* const sums = sums_behind(c.slots() * c.inner);
        float sum = 0.0f;
        int at = 0;
        for (DownParts<kDownRows> parts(shared, c.slots()); parts.next();) {
            uint32_t low = shared_address(wait_stage());
#pragma unroll 1
            for (int i = 0; i < parts.slots; i += 2, low += 2 * eight_bytes) {
                // Without a second one, the first again.
                const int first = parts.slot + i, other = i + 1 < parts.slots, column = first + lane % 2 * other;
                const uint32_t x = shared_address(inputs) + column * c.inner * int(sizeof(bf16)) + (lane / 8 ^ column % 2) * kPieceBytes;
                float own[2] = {};
                multiply<kRounds>(own, low, low + other * eight_bytes, windows, [&](int round, int part) {
                    const int window = warp + round * kConsumers;
                    const uint32_t from = window < windows ? x + window * kWindowBytes + part * kPartBytes : shared_address(&shared.zeros);
                    return load_matrices(from);
                });
                sum = fmaf(shared.slots[first].weight, own[0], sum);
                if (other > 0) sum = fmaf(shared.slots[first + 1].weight, own[1], sum);
            }
            release_stage();
            if (!parts.has_all()) continue;
            if (lane % 4 == 0) sums[(at * kConsumers + warp) * kRowsTogether + lane / 4] = sum;
            sum = 0.0f;
            ++at;
        }
        sync();
        if (warp >= at) return;
        const int row = warp * kRowsTogether + lane % kRowsTogether;
        sum = sum_of_warps<kRowsTogether>(sums + warp * (kConsumers * kRowsTogether));
        if (c.down.bias != nullptr) {
#pragma unroll 1
            for (int slot = 0; slot < c.slots(); ++slot) {
                sum = fmaf(shared.slots[slot].weight, __bfloat162float(shared.biases.down[slot][row]), sum);
            }
        }
        if (lane < kRowsTogether) {
            const bf16 value = add(row, sum);
            if (c.has_next()) publish(c.exchange->next_hidden + share.first + row, value, tag);
            c.hidden[share.first + row] = value;
        }
    }
};

#endif
