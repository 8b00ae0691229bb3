// Sums over the GPUs of one process, in place, and what is done with them. All ranks launch the same kernels with the same sizes in
// the same order. Sums are f32 in the order of ranks and rounded once, so that all ranks have the same bits, whichever kernel
// computes them.

#include "norm.cuh"
#include "peers.cuh"

namespace {

// Everyone sends everything to everyone: one way across the link.
template <int N, int kVecs>
__device__ __forceinline__ void sum_few(bf16* x, int vecs, const Peers<N>& peers) {
    pdl_launch();
    pdl_wait();
    const auto at = [&](int v) {
        const int vec = static_cast<int>((blockIdx.x * kVecs + v) * blockDim.x + threadIdx.x);
        return vec < vecs ? int64_t{vec} : -1;
    };
    uint4 own[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= 0) own[v] = as_words(load8(x + at(v) * kVec));
    }
    FewCall<N> call(peers);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= 0) call.send(at(v), own[v]);
    }
    call.count();
    Bf16x8 sums[kVecs];
    call.receive(own, sums, at);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= 0) store8(x + at(v) * kVec, sums[v]);
    }
    call.end();
}

// The same, where the sum is added to the residual stream and normalised.
template <Rows kRows, int kVecs, bool kFp8, int N>
__device__ __forceinline__ void sum_norm_row(const Norm& norm, const Peers<N>& peers) {
    norm_row<kRows, kVecs, kFp8>(norm, [&](Bf16x8(&delta)[kVecs], int64_t row) {
        const auto at = [&](int v) {
            const int vec = static_cast<int>(threadIdx.x + v * blockDim.x);
            return vec * kVec < norm.n ? row / kVec + vec : int64_t{-1};
        };
        uint4 own[kVecs];
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            if (at(v) >= 0) own[v] = as_words(load8(norm.delta + at(v) * kVec));
        }
        FewCall<N> call(peers);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            if (at(v) >= 0) call.send(at(v), own[v]);
        }
        call.count();
        call.receive(own, delta, at);
        call.end();
    });
}

// The same, where a copy engine has brought the other rank's rows.
template <Rows kRows, int kVecs, bool kFp8>
__device__ __forceinline__ void arrived_norm_row(const Norm& norm, const SentRows& sent, const Peers<2>& peers) {
    norm_row<kRows, kVecs, kFp8>(norm, [&](Bf16x8(&delta)[kVecs], int64_t row) {
        await_rows(peers, sent);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            const int at = static_cast<int>(threadIdx.x + v * blockDim.x) * kVec;
            if (at < norm.n) delta[v] = sum_of_two(peers, norm.delta + row + at, sent.rows + row + at);
        }
    });
}

// And where nothing else is done with the sum.
__device__ __forceinline__ void sum_arrived(bf16* x, int64_t vecs, const SentRows& sent, const Peers<2>& peers) {
    pdl_wait();
    await_rows(peers, sent);
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t vec = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; vec < vecs; vec += stride) {
        store8(x + vec * kVec, sum_of_two(peers, x + vec * kVec, sent.rows + vec * kVec));
    }
}

constexpr RankFlags kScatteredFlags = &RingFlags::scattered, kGatheredFlags = &RingFlags::gathered;

// Each rank sums its share of every tile and sends the sums to the others. While they are under way, the next tile's parts are.
template <int N>
__device__ __forceinline__ void sum_many(bf16* x, int64_t vecs, const Peers<N>& peers) {
    pdl_wait();
    const Ring<N> ring(peers);
    constexpr int kTile = Ring<N>::kTile, kShare = Ring<N>::kShare;
    const int tiles = static_cast<int>((vecs + kTile - 1) / kTile);
    const int turns = static_cast<int>(blockIdx.x) < tiles ? (tiles - 1 - static_cast<int>(blockIdx.x)) / gridDim.x + 1 : 0;
    char* const mine = peers.mine;
    const auto first_vec = [&](int turn, int share) {
        return (blockIdx.x + int64_t{turn} * gridDim.x) * kTile + share * kShare;
    };
    const auto scatter = [&](int turn) {
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p == peers.rank) continue;
            char* const to = ring.place(peers.base[p], kScattered, ring.first + turn, peers.rank);
            const int64_t from = first_vec(turn, p);
            for (int i = threadIdx.x; i < kShare && from + i < vecs; i += blockDim.x) {
                *reinterpret_cast<Bf16x8*>(to + i * 16) = load8(x + (from + i) * kVec);
            }
        }
        ring.raise<kScatteredFlags>(ring.first + turn);
    };
    const auto collect = [&](int turn) {
        ring.await<kGatheredFlags>(ring.first + turn);
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p == peers.rank) continue;
            const char* const from = ring.place(mine, kGathered, ring.first + turn, p);
            const int64_t to = first_vec(turn, p);
            for (int i = threadIdx.x; i < kShare && to + i < vecs; i += blockDim.x) {
                store8(x + (to + i) * kVec, as_bf16(__ldcg(reinterpret_cast<const uint4*>(from) + i)));
            }
        }
    };
    if (turns > 0) scatter(0);
    for (int turn = 0; turn < turns; ++turn) {
        if (turn > 0) {
            scatter(turn);
            collect(turn - 1);
        }
        ring.await<kScatteredFlags>(ring.first + turn);
        const int64_t share = first_vec(turn, peers.rank);
        for (int i = threadIdx.x; i < kShare && share + i < vecs; i += blockDim.x) {
            uint4 words[N];
#pragma unroll
            for (int p = 0; p < N; ++p) {
                words[p] = p == peers.rank
                               ? as_words(load8(x + (share + i) * kVec))
                               : __ldcg(reinterpret_cast<const uint4*>(ring.place(mine, kScattered, ring.first + turn, p)) + i);
            }
            RankSum<N> sum;
#pragma unroll
            for (int p = 0; p < N; ++p) sum.add(p, words[p]);
            const Bf16x8 rounded = sum.rounded();
            store8(x + (share + i) * kVec, rounded);
#pragma unroll
            for (int p = 0; p < N; ++p) {
                if (p == peers.rank) continue;
                char* const to = ring.place(peers.base[p], kGathered, ring.first + turn, peers.rank);
                *reinterpret_cast<Bf16x8*>(to + i * 16) = rounded;
            }
        }
        ring.raise<kGatheredFlags>(ring.first + turn);
    }
    if (turns > 0) collect(turns - 1);
    ring.end(turns);
}

// Columns of all ranks side by side: x is [rows, 4 * width], out [rows, N * 4 * width].
template <int N>
__device__ __forceinline__ void gather_columns(const float4* x, float4* out, int64_t vecs, int width, const Peers<N>& peers) {
    pdl_wait();
    const Ring<N> ring(peers);
    constexpr int kShare = Ring<N>::kShare;
    const int tiles = static_cast<int>((vecs + kShare - 1) / kShare);
    const int turns = static_cast<int>(blockIdx.x) < tiles ? (tiles - 1 - static_cast<int>(blockIdx.x)) / gridDim.x + 1 : 0;
    for (int turn = 0; turn < turns; ++turn) {
        const int64_t first = (blockIdx.x + int64_t{turn} * gridDim.x) * kShare;
        const auto place = [&](int64_t vec, int rank) { return (vec / width * N + rank) * width + vec % width; };
        for (int i = threadIdx.x; i < kShare && first + i < vecs; i += blockDim.x) {
            const float4 value = x[first + i];
            out[place(first + i, peers.rank)] = value;
#pragma unroll
            for (int p = 0; p < N; ++p) {
                if (p == peers.rank) continue;
                char* const to = ring.place(peers.base[p], kGathered, ring.first + turn, peers.rank);
                reinterpret_cast<float4*>(to)[i] = value;
            }
        }
        ring.raise<kGatheredFlags>(ring.first + turn);
        ring.await<kGatheredFlags>(ring.first + turn);
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p == peers.rank) continue;
            const char* const from = ring.place(peers.mine, kGathered, ring.first + turn, p);
            for (int i = threadIdx.x; i < kShare && first + i < vecs; i += blockDim.x) {
                out[place(first + i, p)] = __ldcg(reinterpret_cast<const float4*>(from) + i);
            }
        }
    }
    ring.end(turns);
}

}  // namespace

// Of every kernel: the buffers of the ranks, of which the first N are there; this rank's and its number; and where it says which rank did not come.
#define PEER_PARAMS \
    char *peer0, char *peer1, char *peer2, char *peer3, char *peer4, char *peer5, char *peer6, char *peer7, char *mine, int rank, \
        uint32_t *fault

template <int N>
__device__ __forceinline__ Peers<N> peers_of(PEER_PARAMS) {
    char* const all[kMaxRanks] = {peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7};
    Peers<N> peers;
#pragma unroll
    for (int p = 0; p < N; ++p) peers.base[p] = all[p];
    peers.mine = mine;
    peers.rank = rank;
    peers.fault = fault;
    return peers;
}

#define PEERS(N) peers_of<N>(peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, mine, rank, fault)

#define NORM_KERNEL(NAME, ROWS, VECS, N)                                                                                      \
    extern "C" __global__ void __launch_bounds__(1024)                                                                        \
        NAME##_##VECS##_ranks_##N(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight, bf16* out, \
                                  const float* scalar, int n, float eps, PEER_PARAMS) {                                       \
        sum_norm_row<ROWS, VECS, false, N>({hidden, delta, delta_weight, weight, out, {}, scalar, n, eps}, PEERS(N));         \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024)                                                                        \
        NAME##_fp8_##VECS##_ranks_##N(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight,        \
                                      uint8_t* values, float* scales, int stride, const float* scalar, int n, float eps,      \
                                      PEER_PARAMS) {                                                                          \
        sum_norm_row<ROWS, VECS, true, N>(                                                                                    \
            {hidden, delta, delta_weight, weight, nullptr, {values, scales, stride}, scalar, n, eps}, PEERS(N));              \
    }

#define SUM_FEW(VECS, N)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512, 1) sum_few_##VECS##_ranks_##N(bf16* x, int vecs, PEER_PARAMS) { \
        sum_few<N, VECS>(x, vecs, PEERS(N));                                                                        \
    }

// For N ranks. Norms are those of fused.cu, of the sum of `delta` over the ranks.
#define KERNELS(N)                                                                                                            \
    SUM_FEW(1, N)                                                                                                             \
    SUM_FEW(4, N)                                                                                                             \
    NORM_KERNEL(add_rms_norm, Rows::kAdd, 1, N)                                                                               \
    NORM_KERNEL(add_rms_norm, Rows::kAdd, 2, N)                                                                               \
    NORM_KERNEL(sandwich_norm, Rows::kSandwich, 1, N)                                                                         \
    NORM_KERNEL(sandwich_norm, Rows::kSandwich, 2, N)                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1) sum_many_ranks_##N(bf16* x, int64_t vecs, PEER_PARAMS) {               \
        sum_many(x, vecs, PEERS(N));                                                                                          \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                                         \
        gather_columns_ranks_##N(const float4* x, float4* out, int64_t vecs, int width, PEER_PARAMS) {                       \
        gather_columns<N>(x, out, vecs, width, PEERS(N));                                                                  \
    }

KERNELS(2)
KERNELS(4)
KERNELS(8)

// Halves have so many rows that a thread keeps two vectors of each.
#define ARRIVED_NORM(NAME, ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                        \
        NAME##_arrived(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight, bf16* out,            \
                       const float* scalar, int n, float eps, const bf16* sent, uint32_t number, PEER_PARAMS) {               \
        arrived_norm_row<ROWS, 2, false>({hidden, delta, delta_weight, weight, out, {}, scalar, n, eps}, {sent, number},      \
                                         PEERS(2));                                                                           \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024)                                                                        \
        NAME##_arrived_fp8(bf16* hidden, const bf16* delta, const float* delta_weight, const float* weight, uint8_t* values,  \
                           float* scales, int stride, const float* scalar, int n, float eps, const bf16* sent,                \
                           uint32_t number, PEER_PARAMS) {                                                                    \
        arrived_norm_row<ROWS, 2, true>({hidden, delta, delta_weight, weight, nullptr, {values, scales, stride}, scalar, n,   \
                                         eps},                                                                                \
                                        {sent, number}, PEERS(2));                                                            \
    }

ARRIVED_NORM(add_rms_norm, Rows::kAdd)
ARRIVED_NORM(sandwich_norm, Rows::kSandwich)

extern "C" __global__ void __launch_bounds__(512, 2)
    sum_arrived(bf16* x, int64_t vecs, const bf16* sent, uint32_t number, PEER_PARAMS) {
    sum_arrived(x, vecs, {sent, number}, PEERS(2));
}
