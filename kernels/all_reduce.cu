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

// Each rank sums a share of the vectors, of which the others send it theirs, and sends the sums to the others: two ways across the link,
// and of each rank only twice its part in all. A thread has the same place of all shares.
template <int N>
__device__ __forceinline__ void sum_many(bf16* x, int vecs, const Peers<N>& peers) {
    pdl_launch();
    pdl_wait();
    const int share = (vecs + N - 1) / N;
    const int place = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const auto has = [&](int p) { return place < share && p * share + place < vecs; };
    const auto vec = [&](int p) { return x + int64_t{p * share + place} * kVec; };
    FewCall<N> call(peers);
#pragma unroll
    for (int i = 1; i < N; ++i) {
        const int p = peers.behind(i);
        if (has(p)) call.send_to(p, place, as_words(load8(vec(p))));
    }
    uint4 own[1];
    if (has(peers.rank)) own[0] = as_words(load8(vec(peers.rank)));
    call.count();
    Bf16x8 sums[1];
    call.receive(own, sums, [&](int) { return has(peers.rank) ? int64_t{place} : -1; });
    const int64_t summed = int64_t{share} + place;  // sums arrive behind the parts
    if (has(peers.rank)) {
        const uint4 sum = sendable(as_words(sums[0]));
        store8(vec(peers.rank), as_bf16(sum));
        call.send(summed, sum);
    }
#pragma unroll
    for (int i = 1; i < N; ++i) {
        const int p = peers.behind(i);
        if (has(p)) store8(vec(p), as_bf16(call.take(p, summed)));
    }
    call.end();
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
                char* const to = ring.place(peers.base[p], ring.first + turn, peers.rank);
                reinterpret_cast<float4*>(to)[i] = value;
            }
        }
        ring.raise(ring.first + turn);
        ring.await(ring.first + turn);
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p == peers.rank) continue;
            const char* const from = ring.place(peers.mine, ring.first + turn, p);
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
    extern "C" __global__ void __launch_bounds__(256) sum_many_ranks_##N(bf16* x, int vecs, PEER_PARAMS) {                    \
        sum_many<N>(x, vecs, PEERS(N));                                                                                       \
    }                                                                                                                         \
    NORM_KERNEL(add_rms_norm, Rows::kAdd, 1, N)                                                                               \
    NORM_KERNEL(add_rms_norm, Rows::kAdd, 2, N)                                                                               \
    NORM_KERNEL(sandwich_norm, Rows::kSandwich, 1, N)                                                                         \
    NORM_KERNEL(sandwich_norm, Rows::kSandwich, 2, N)                                                                         \
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
