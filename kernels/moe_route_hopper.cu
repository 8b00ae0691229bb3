// Mixtures of experts: where 2 to 32 rows go, from the router's product on (sm_90a), in place of that product and what moe_route.cu does.
//
// Eight blocks, a cluster, divide the inputs of the product. Each multiplies all rows by all experts' weights, which it has read before
// the kernel ahead has ended, and sends its sums of a row to the block that chooses the row's experts; rows go around the blocks. That
// one tells all blocks which experts it has chosen, and each groups the routes of some experts. What is sent arrives at a barrier of
// the block it is for: once all blocks run, they wait for nothing else, and nothing is sent to one that has ended.
//
// A warp has 32 experts, as two tiles of 16, and every so many units of 32 inputs. In what order inputs are multiplied does not matter as
// long as it is the same for weights and rows: so each lane takes eight in a row, and a unit is two products of 16.
#include "cluster.cuh"
#include "grouping.cuh"
#include "rows.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kThreads = 512;

// The gate of the expert that all rows go to: its product with each row.
struct SharedGate {
    const bf16* weight;  // [k], or null
    float* gates;        // [rows]
};

// The router's product: x is [rows, k], weight [experts, k].
struct Product {
    const bf16* x;
    const bf16* weight;
    int k;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As `Cut` in crates/kernels/src/cuda/moe/fused_router.rs has them too.
constexpr int kBlocks = 8;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostRows = 32;
constexpr int kExpertsOfWarp = 32;
constexpr int kUnit = 32;  // inputs
constexpr int kRoutedExperts = 256;

constexpr int kRowTiles = kMostRows / 8;
constexpr int kChunk = 8;  // inputs that a lane takes at once

struct Shared {
    // Of this block's rows: the blocks' parts of logits, of which the first becomes the logits.
    __align__(16) float logits[kBlocks][kMostRows / kBlocks][kRoutedExperts];
    uint16_t chosen[kMostRows / kBlocks][kWarp];
    FewRoutes<int, kThreads> routes;
    uint64_t have_logits, have_routes;
};

// The address of a shared variable in a block of the cluster.
__device__ __forceinline__ uint32_t address_in(int block, const void* mine) {
    uint32_t theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(block));
    return theirs;
}

// Begins to write to shared memory of a block of the cluster; the barrier there counts the bytes.
__device__ __forceinline__ void send(int block, const float* to, const float4& value, const uint64_t* barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address_in(block, to)),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(address_in(block, barrier))
                 : "memory");
}

__device__ __forceinline__ void send(int block, const int* to, int value, const uint64_t* barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(address_in(block, to)), "r"(value),
                 "r"(address_in(block, barrier))
                 : "memory");
}

// Waits for the first phase, and sees what other blocks wrote.
__device__ __forceinline__ void wait_for_blocks(uint64_t* barrier) {
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier))
            : "memory");
    }
}

// The product of a row and the shared expert's gate, by a warp.
__device__ __forceinline__ void write_gate(const Product& p, const SharedGate& gate, int row) {
    const bf16* const x = p.x + size_t(row) * p.k;
    const int lane = threadIdx.x % kWarp;
    float sum = 0.0f;
#pragma unroll 4
    for (int at = lane * kChunk; at < p.k; at += kWarp * kChunk) {
        const Float8 inputs = widen(load8(x + at)), weights = widen(load8(gate.weight + at));
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum = fmaf(inputs.at[i], weights.at[i], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) gate.gates[row] = sum;
}

// A warp has up to `kUnits` units of inputs.
template <int kUnits>
__device__ __forceinline__ void route(const Product& p, const Router& router, const Routes& r, const SharedGate& gate) {
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ Shared shared;
    const Group cluster{kBlocks};
    const int rank = cluster.rank(), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int own_rows = (r.rows - rank + kBlocks - 1) / kBlocks, quads = ceil_div(r.experts, 4);
    pdl_launch();
    shared.routes.counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        barrier_init(&shared.have_logits, 1);
        barrier_init(&shared.have_routes, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect_bytes(&shared.have_logits, kBlocks * own_rows * quads * int(sizeof(float4)));
        barrier_expect_bytes(&shared.have_routes, r.rows * r.top_k * int(sizeof(int)));
    }
    cluster.arrive();

    // The block's units of inputs, every `parts` of which from `first` on are the warp's.
    const int units = p.k / kUnit, begin = units * rank / kBlocks, end = units * (rank + 1) / kBlocks;
    const int warps = ceil_div(r.experts, kExpertsOfWarp), shift = kWarp - __clz(warps - 1);
    const int parts = kWarps >> shift, part = warp >> shift, first = begin + part;
    const int experts_from = (warp - (part << shift)) * kExpertsOfWarp;
    const int group = lane / 4, input = lane % 4 * kChunk;
    uint4 weights[kUnits][4];  // of experts `group`, `group + 8`, ...
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            const int expert = experts_from + eight * 8 + group, unit = first + i * parts;
            weights[i][eight] = make_uint4(0, 0, 0, 0);
            if (expert >= r.experts || unit >= end) continue;
            weights[i][eight] = load_streaming(p.weight + size_t(expert) * p.k + unit * kUnit + input);
        }
    }
    pdl_wait();

    // The block's inputs of all rows. With an odd number of units in a row eight lanes read all banks.
    const int row_bytes = (ceil_div(units, kBlocks) | 1) * kUnit * int(sizeof(bf16)), chunks = (end - begin) * (kUnit / kChunk);
    for (int row = warp; row < r.rows; row += kWarps) {
        for (int i = lane; i < chunks; i += kWarp) {
            copy_async(memory + row * row_bytes + i * 16, p.x + size_t(row) * p.k + begin * kUnit + i * kChunk, true);
        }
    }
    commit_async();
    if (threadIdx.x == kThreads - 1) shared.routes.set_loaded(r);
    wait_async<0>();
    __syncthreads();

    float* const sums = reinterpret_cast<float*>(memory + r.rows * row_bytes);  // [parts, rows, pitch]
    const int pitch = warps * kExpertsOfWarp + 4;
    if (experts_from < r.experts) {
        float c[2][kRowTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = first + i * parts;
            if (unit >= end) continue;
#pragma unroll
            for (int n = 0; n < kRowTiles; ++n) {
                if (n * 8 >= r.rows) continue;
                // Rows past the last one are any numbers, which stay among themselves.
                const int row = min(n * 8 + group, r.rows - 1);
                const uint4 x = *reinterpret_cast<const uint4*>(memory + row * row_bytes + ((unit - begin) * kUnit + input) * sizeof(bf16));
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const uint4 &low = weights[i][2 * tile], &high = weights[i][2 * tile + 1];
                    mma(c[tile][n], {low.x, high.x, low.y, high.y}, x.x, x.y);
                    mma(c[tile][n], {low.z, high.z, low.w, high.w}, x.z, x.w);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = n * 8 + lane % 4 * 2 + i % 2, expert = experts_from + i / 2 * 8 + group;
                if (row < r.rows) sums[(part * r.rows + row) * pitch + expert] = c[i / 4][n][i % 4];
            }
        }
    }
    __syncthreads();

    cluster.wait();
    for (int i = threadIdx.x; i < r.rows * quads; i += kThreads) {
        const int row = i / quads, expert = i % quads * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int from = 0; from < parts; ++from) {
            const float4 next = *reinterpret_cast<const float4*>(sums + (from * r.rows + row) * pitch + expert);
            sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
        }
        send(row % kBlocks, &shared.logits[rank][row / kBlocks][expert], sum, &shared.have_logits);
    }

    if (warp < own_rows) {
        wait_for_blocks(&shared.have_logits);
        const int row = rank + warp * kBlocks;
        float* const logits = shared.logits[0][warp];
        for (int expert = lane; expert < r.experts; expert += kWarp) {
            float sum = logits[expert];
#pragma unroll
            for (int from = 1; from < kBlocks; ++from) sum += shared.logits[from][warp][expert];
            logits[expert] = sum;
        }
        __syncwarp();
        uint16_t* const chosen = shared.chosen[warp];
        route_row<kRoutedExperts / kWarp>(logits, router, r.experts, r.top_k, chosen, r.weights + row * r.top_k);
        __syncwarp();
        for (int i = lane; i < r.top_k * kBlocks; i += kWarp) {
            const int of_row = i / kBlocks;
            send(i % kBlocks, &shared.routes.chosen[row * r.top_k + of_row], int(chosen[of_row]), &shared.have_routes);
        }
    } else if (gate.weight != nullptr && warp >= kWarps - own_rows) {
        // While others wait for logits.
        write_gate(p, gate, rank + (kWarps - 1 - warp) * kBlocks);
    }
    wait_for_blocks(&shared.have_routes);
    shared.routes.group(r, rank, kBlocks);
}

#else

template <int kUnits>
__device__ __forceinline__ void route(const Product&, const Router&, const Routes&, const SharedGate&) {}

#endif

}  // namespace

// One cluster.
#define MOE_ROUTE_HOPPER(UNITS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                                       \
        moe_route_hopper_##UNITS(const bf16* x, const bf16* weight, const bf16* bias, float* weights, int* places, int* sources,    \
                                 Tile* tiles, unsigned* loads, const int* loaded_rows, int rows, int experts, int top_k, int tile,  \
                                 int k, int of_all, float scale, const float* scales, const bf16* gate, float* gates) {             \
        route<UNITS>({x, weight, k}, {bias, of_all != 0, scale, scales},                                                            \
                     {nullptr, weights, places, sources, tiles, {loads, loaded_rows}, rows, experts, top_k, tile}, {gate, gates});  \
    }

MOE_ROUTE_HOPPER(1)
MOE_ROUTE_HOPPER(2)
MOE_ROUTE_HOPPER(4)
