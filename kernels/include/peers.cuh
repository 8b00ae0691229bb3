// Memory that the GPUs of one process share: each rank has a buffer that all of them read and write at the same addresses.
#pragma once

#include "rows.cuh"

// Places in a rank's buffer; see crates/kernels/src/cuda/all_reduce/layout.rs.
constexpr int kMaxRanks = 8;
constexpr int kTileBytes = 32 << 10;  // of all ranks' parts together, for each block and turn
constexpr int64_t kFewBytes = 32 << 20;
constexpr int64_t kFewState = 0;  // FewState
constexpr int64_t kTurns = 4 << 10;
constexpr int64_t kFlags = 8 << 10;
constexpr int64_t kSentParts = 32 << 10;  // a word: up to which part the other rank has sent
constexpr int64_t kGivenUp = 36 << 10;    // a word: 1 once a wait of this rank has ended for a fault
constexpr int64_t kFew = 64 << 10;        // [2][ranks][kFewBytes / ranks]
constexpr int64_t kGathered = kFew + 2 * kFewBytes;

// A word that nobody has written yet. As two bf16 and as a float it is a NaN, and other NaNs are sent in its place.
constexpr uint32_t kNotArrived = 0xffffffffu;
constexpr uint32_t kSentNan = 0x7fff7fffu;

// Nanoseconds that a rank waits for another.
constexpr uint64_t kPatience = 20'000'000'000;

struct FewState {
    uint32_t parity;   // of the half that the next call uses
    uint32_t arrived;  // blocks that have read it
};

// Written by the peers, for each block of a ring: up to which turn they have sent.
struct __align__(64) RingFlags {
    uint32_t sent[kMaxRanks];
};

template <int N>
struct Peers {
    char* base[N];
    char* mine;
    int rank;
    // In host memory: 0, or one more than the rank that did not come; what the host writes makes all waits end too.
    uint32_t* fault;

    // Of a rank that is not known at compile time: from registers.
    __device__ __forceinline__ char* base_of(int p) const {
        char* found = base[0];
#pragma unroll
        for (int i = 1; i < N; ++i) found = i == p ? base[i] : found;
        return found;
    }

    // The rank that is `i` behind this one.
    __device__ __forceinline__ int behind(int i) const { return (rank + i) % N; }
};

__device__ __forceinline__ uint4 load_shared_words(const void* from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_words(void* to, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_word(uint32_t* to, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

// Looks with `look` until it says that nobody is missing (below 0), or until the rank that it names has taken too long. Once one wait of
// a rank has ended so, no other lasts.
template <int N, typename Look>
__device__ __forceinline__ void wait_for_peers(const Peers<N>& peers, Look look) {
    // All threads look at the host, over PCI Express, which takes milliseconds: ranks that are out of step by less do not.
    constexpr int kLooks = 1024, kRounds = 64;
    auto* const given_up = reinterpret_cast<uint32_t*>(peers.mine + kGivenUp);
    uint64_t since = 0;
    for (int round = 1;; ++round) {
        int missing = 0;
#pragma unroll 1
        for (int i = 0; i < kLooks; ++i) {
            missing = look();
            if (missing < 0) return;
        }
        if (load_shared_word(given_up) != 0) return;
        if (round % kRounds != 0) continue;
        bool is_over = load_shared_word(peers.fault) != 0;
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (since == 0) since = now;
        if (!is_over && now - since >= kPatience) {
            store_shared_word(peers.fault, 1 + missing);
            is_over = true;
        }
        if (!is_over) continue;
        store_shared_word(given_up, 1);
        return;
    }
}

__device__ __forceinline__ bool has_arrived(uint4 v) {
    return v.x != kNotArrived && v.y != kNotArrived && v.z != kNotArrived && v.w != kNotArrived;
}

__device__ __forceinline__ uint4 sendable(uint4 v) {
    const auto word = [](uint32_t w) { return w == kNotArrived ? kSentNan : w; };
    return make_uint4(word(v.x), word(v.y), word(v.z), word(v.w));
}

__device__ __forceinline__ uint4 as_words(const Bf16x8& v) { return *reinterpret_cast<const uint4*>(&v); }

__device__ __forceinline__ Bf16x8 as_bf16(const uint4& v) { return *reinterpret_cast<const Bf16x8*>(&v); }

// The sum of a vector of all ranks, in their order.
template <int N>
struct RankSum {
    Float8 sum;

    __device__ __forceinline__ void add(int from, const uint4& words) {
        const Float8 wide = widen(as_bf16(words));
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum.at[i] = from == 0 ? wide.at[i] : sum.at[i] + wide.at[i];
    }

    __device__ __forceinline__ Bf16x8 rounded() const { return narrow(sum); }
};

// One call that sends up to kFewBytes / N to each rank: the data says itself that it has arrived. Each rank's buffer has
// two halves, used in turn. A half is used again two calls later: by then every rank has seen the others' data of the call between,
// which they sent when they were done with this half.
template <int N>
struct FewCall {
    const Peers<N>& peers;
    FewState* state;
    int64_t half;
    uint32_t parity;
    uint32_t order;

    // After `pdl_wait`. All threads of all blocks make one.
    __device__ __forceinline__ explicit FewCall(const Peers<N>& peers)
        : peers(peers), state(reinterpret_cast<FewState*>(peers.mine + kFewState)) {
        parity = __ldcg(&state->parity);
        half = kFew + parity * kFewBytes;
        order = 0;
    }

    __device__ __forceinline__ char* place(char* base, int from, int64_t vec) const {
        return base + half + from * (kFewBytes / N) + vec * 16;
    }

    // To all others, in such an order that no rank is sent to by all at the same time.
    __device__ __forceinline__ void send(int64_t vec, const uint4& words) const {
#pragma unroll
        for (int i = 1; i < N; ++i) send_to(peers.behind(i), vec, words);
    }

    __device__ __forceinline__ void send_to(int to, int64_t vec, const uint4& words) const {
        store_shared_words(place(peers.base_of(to), peers.rank, vec), sendable(words));
    }

    // A vector that rank `from` has sent.
    __device__ __forceinline__ uint4 take(int from, int64_t vec) const {
        char* const at = place(peers.mine, from, vec);
        uint4 words;
        wait_for_peers(peers, [&] {
            words = load_shared_words(at);
            return has_arrived(words) ? -1 : from;
        });
        store_shared_words(at, make_uint4(kNotArrived, kNotArrived, kNotArrived, kNotArrived));
        return words;
    }

    // The next call uses the other half once all blocks have come here. Between sending and receiving, and `end` last.
    __device__ __forceinline__ void count() {
        __syncthreads();
        if (threadIdx.x == 0) order = atomicInc(&state->arrived, gridDim.x - 1);
    }

    __device__ __forceinline__ void end() const {
        if (threadIdx.x == 0 && order == gridDim.x - 1) __stcg(&state->parity, parity ^ 1);
    }

    // The sums of `kVecs` vectors, of which this rank has `own`; `at` gives their places, below 0 for none.
    template <int kVecs, typename At>
    __device__ __forceinline__ void receive(const uint4 (&own)[kVecs], Bf16x8 (&sums)[kVecs], At at) const {
        char* const base = peers.mine;
        const uint4 nobody = make_uint4(kNotArrived, kNotArrived, kNotArrived, kNotArrived);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            const int64_t vec = at(v);
            if (vec < 0) continue;
            RankSum<N> sum;
            // Not more at once than registers hold.
            constexpr int kAtOnce = N < 4 ? N : 4;
#pragma unroll
            for (int first = 0; first < N; first += kAtOnce) {
                uint4 words[kAtOnce];
                wait_for_peers(peers, [&] {
                    int missing = -1;
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int p = first + i;
                        words[i] = p == peers.rank ? sendable(own[v]) : load_shared_words(place(base, p, vec));
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        if (!has_arrived(words[i])) missing = first + i;
                    }
                    return missing;
                });
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    sum.add(first + i, words[i]);
                    if (first + i != peers.rank) store_shared_words(place(base, first + i, vec), nobody);
                }
            }
            sums[v] = sum.rounded();
        }
    }
};

// Turns of one block through its ring, for what is large. In each turn, everyone has room for one tile from the others twice,
// used in turn, and flags say which turn has been sent. A block takes its turns in order, in one kernel after the other.
template <int N>
struct Ring {
    static constexpr int kShare = kTileBytes / 16 / N;  // vectors

    const Peers<N>& peers;
    uint32_t first;  // turns before this kernel

    // After `pdl_wait`.
    __device__ __forceinline__ explicit Ring(const Peers<N>& peers) : peers(peers) { first = __ldcg(turns()) + 1; }

    __device__ __forceinline__ uint32_t* turns() const {
        return reinterpret_cast<uint32_t*>(peers.mine + kTurns) + blockIdx.x;
    }

    __device__ __forceinline__ RingFlags* flags(char* base) const {
        return reinterpret_cast<RingFlags*>(base + kFlags) + blockIdx.x;
    }

    // Where rank `from` leaves its vectors of `turn`.
    __device__ __forceinline__ char* place(char* base, uint32_t turn, int from) const {
        return base + kGathered + ((int64_t{blockIdx.x} * 2 + (turn & 1)) * N + from) * (kShare * 16);
    }

    // What all threads of the block have written for the peers is there.
    __device__ __forceinline__ void raise(uint32_t turn) const {
        __syncthreads();
        if (threadIdx.x > 0) return;
        __threadfence_system();
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p != peers.rank) store_shared_word(&flags(peers.base[p])->sent[peers.rank], turn);
        }
    }

    // What all peers have sent in `turn` may be read by all threads of the block.
    __device__ __forceinline__ void await(uint32_t turn) const {
        const int p = threadIdx.x;
        if (p < N && p != peers.rank) {
            const uint32_t* const from = &flags(peers.mine)->sent[p];
            wait_for_peers(peers, [&] { return static_cast<int>(load_shared_word(from) - turn) >= 0 ? -1 : p; });
            __threadfence_system();
        }
        __syncthreads();
    }

    __device__ __forceinline__ void end(uint32_t turns_taken) const {
        if (threadIdx.x == 0) __stcg(turns(), first - 1 + turns_taken);
    }
};

// Rows of one sum that the other of two ranks has sent beside its kernels: where they are here, and their number. Each rank sends its
// parts in order.
struct SentRows {
    const bf16* rows;
    uint32_t number;
};

// Waits until they have arrived; for all threads of a block, after `pdl_wait`.
__device__ __forceinline__ void await_rows(const Peers<2>& peers, const SentRows& sent) {
    if (threadIdx.x == 0) {
        const auto* const arrived = reinterpret_cast<const uint32_t*>(peers.mine + kSentParts);
        wait_for_peers(peers,
                       [&] { return static_cast<int>(load_shared_word(arrived) - sent.number) >= 0 ? -1 : 1 - peers.rank; });
        __threadfence_system();
    }
    __syncthreads();
}

// The sum of one's own vector and the other rank's, in the order of ranks.
__device__ __forceinline__ Bf16x8 sum_of_two(const Peers<2>& peers, const bf16* own, const bf16* sent) {
    const uint4 mine = as_words(load8(own)), theirs = __ldcg(reinterpret_cast<const uint4*>(sent));
    RankSum<2> sum;
    sum.add(0, peers.rank == 0 ? mine : theirs);
    sum.add(1, peers.rank == 0 ? theirs : mine);
    return sum.rounded();
}
