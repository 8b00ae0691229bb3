// Mixtures of experts: the products of few rows with MXFP4 weights by persistent blocks (sm_90a), in place of those of moe_few_4bit.cu, where
// each tile of weights reads its rows of x again, which takes as much as a third of the time. For int4 weights, whose groups a second copy
// would have to bring, these were slower.
//
// One block runs on each multiprocessor and has an equal share of the tiles of all experts that are hit, one tile after the other, so
// that it needs the rows of x of few experts, which it keeps in shared memory. A tile is 16 rows of weights with all of k, of a gated product
// eight of the gate and the same eight of the up projection. One thread copies tiles ahead to a ring of stages, by the copy engine. Four
// teams of four warps take turns at tiles: each warp multiplies every fourth pair of windows of k, and the sums of these parts are added in
// their order. Two teams of eight warps were slower, because of what is done once for each tile.
//
// Rows of x are taken eight at a time: an expert with more of them is read again for the next eight.
#include "experts.cuh"
#include "grouping.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace {

// As crates/kernels/src/cuda/moe/stream.rs has them too.
constexpr int kTeams = 4, kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarp, kConsumerThreads = kTeams * kTeamThreads, kThreads = kConsumerThreads + kWarp;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTokens = 8;
constexpr int kMostPasses = 512;
constexpr int kMostStages = 16;
constexpr int kStageAlign = 128;
constexpr int kStaticBytes = 49 << 9;

constexpr int kInFlightBytes = 96 << 10;      // of copies
constexpr int kTileRows = 2 * kRowsTogether;  // of weights
constexpr int kSumPitch = kTileRows + 4;      // of a token, so that lanes write to different banks

// Up to eight rows of x of an expert, from a place on.
struct Pass {
    int first;
    uint16_t expert, count;
};

struct Shared {
    float sums[kTeams][2][kTeamWarps][kTokens * kSumPitch];
    Pass passes[kMostPasses];
    uint64_t full[kMostStages], empty[kMostStages];
    int partial[kWarp];
};
static_assert(sizeof(Shared) <= kStaticBytes && sizeof(Shared) % kStageAlign == 0, "stages lie behind it");

__device__ __forceinline__ int dynamic_shared_bytes() {
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return int(bytes);
}

template <int kValue>
struct Count {
    static constexpr int value = kValue;
};

struct Stream {
    const Problem& p;
    Shared& shared;
    // Of weights: eights of rows, and tiles.
    int eights, tiles;
    int windows, eight_bytes, stage_bytes;
    int input_pitch;  // bytes of a row of x, an odd number of pieces, so that matrices of eight rows are in different banks
    uint32_t inputs, ring;
    int stages;
    // 2^23, in a way that hides its value from the compiler, which would turn products by it into shifts. Shifts run on the integer unit, the
    // busiest here; products do not.
    uint32_t first_exponent_bit;
    // This block's tiles, of those of all passes.
    int first, last;

    __device__ __forceinline__ Stream(const Problem& p, Shared& shared, uint8_t* memory) : p(p), shared(shared) {
        eights = p.n / kRowsTogether;
        tiles = gated() ? eights : (eights + 1) / 2;
        windows = expert_windows(p.k);
        // Exponents lie behind the codes of the eight rows.
        eight_bytes = kRowsTogether * p.pitch;
        stage_bytes = (2 * eight_bytes + kStageAlign - 1) / kStageAlign * kStageAlign;
        input_pitch = (windows * (kExpertWindow / 8) + 1) * 16;
        ring = shared_address(memory);
        stages = min((dynamic_shared_bytes() - kTokens * input_pitch) / stage_bytes, kMostStages);
        inputs = ring + stages * stage_bytes;
        first_exponent_bit = (1u << 23) + (p.n >> 31);
    }

    __device__ __forceinline__ bool gated() const { return p.kind != kPlain; }

    // All threads: lists the passes, and takes this block's share of their tiles.
    __device__ __forceinline__ void divide() {
        // From L2, where they are even if this kernel has not waited for the one ahead.
        const auto* const listed = reinterpret_cast<const int4*>(p.tiles);
        const int count = __ldcg(listed).z, at = threadIdx.x;
        const int4 of_thread = at < count ? __ldcg(listed + 1 + at) : make_int4(0, 0, 0, 0);
        const Tile tile{of_thread.x, of_thread.y, of_thread.z, 0};
        const int parts = ceil_div(tile.count, kTokens);
        int all = 0;
        const int before = sum_before(parts, shared.partial, all);
        for (int i = 0; i < parts; ++i) {
            shared.passes[before + i] = {tile.first + i * kTokens, uint16_t(tile.expert), uint16_t(min(tile.count - i * kTokens, kTokens))};
        }
        const unsigned total = all * tiles;
        first = total * blockIdx.x / gridDim.x;
        last = total * (blockIdx.x + 1) / gridDim.x;
        __syncthreads();
    }

    // Of the two eights of a tile of an expert. Where there is no second one, anything is multiplied, and its sums are not stored.
    __device__ __forceinline__ int first_eight(int tile) const { return gated() ? tile : 2 * tile; }
    __device__ __forceinline__ bool has_second(int tile) const { return gated() || 2 * tile + 1 < eights; }

    // The two eights of a tile of a gated product, or those of another one that exist, which are neighbours.
    __device__ __forceinline__ void copy_tile(uint32_t to, const uint8_t* matrix, int tile, uint64_t* full, uint64_t policy) const {
        const uint8_t* const low = matrix + size_t(first_eight(tile)) * eight_bytes;
        const int bytes = has_second(tile) ? 2 * eight_bytes : eight_bytes;
        barrier_expect_bytes(full, bytes);
        if (gated()) {
            copy_bulk(to, low, eight_bytes, full, policy);
            copy_bulk(to + eight_bytes, low + size_t(eights) * eight_bytes, eight_bytes, full, policy);
        } else {
            copy_bulk(to, low, bytes, full, policy);
        }
    }

    // Copies the tiles, by one thread, which has as little time for each as copying it takes.
    __device__ __forceinline__ void produce() const {
        const uint64_t policy = read_once_policy();
        // A team waits for a tile when it is done with the one `kTeams` before. With at most so many copies under way, the tile that was in the
        // same stage before has landed by then. Otherwise the team could take that tile's phase for its own: barriers tell only odd from even.
        const int most = min(max(kInFlightBytes / stage_bytes, 1), stages - kTeams);
        int at = first, place = 0, phase = 0, landed = 0, landed_phase = 0;
        for (int i = first / tiles; i * tiles < last; ++i) {
            const int expert = shared.passes[i].expert;
            const uint8_t* const weight = of_expert(p.weight, p.stride, expert);
            for (const int end = min((i + 1) * tiles, last); at < end; ++at) {
                barrier_wait(&shared.empty[place], phase ^ 1);
                if (at - first >= most) {
                    barrier_wait(&shared.full[landed], landed_phase);
                    if (++landed == stages) landed = 0, landed_phase ^= 1;
                }
                copy_tile(ring + place * stage_bytes, weight, at - i * tiles, &shared.full[place], policy);
                if (++place == stages) place = 0, phase ^= 1;
            }
        }
    }

    // The rows of x of a pass, by all that multiply, two warps for each row: zeros past the end of k. Rows that are not there may hold
    // anything: their sums are not stored.
    __device__ __forceinline__ void load_inputs(const Pass& pass) const {
        const int warp = threadIdx.x / kWarp, row = warp % kTokens;
        if (row >= pass.count) return;
        const bf16* const from = p.inputs(pass.first + row);
        const uint32_t to = inputs + row * input_pitch;
        const int pieces = windows * (kExpertWindow / 8);
        constexpr int kStep = kConsumerThreads / kTokens, kAtOnce = 4;
#pragma unroll 1
        for (int first = warp / kTokens * kWarp + threadIdx.x % kWarp; first < pieces; first += kAtOnce * kStep) {
            uint4 x[kAtOnce]{};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = first + i * kStep;
                if (piece * 8 < p.k) x[i] = *reinterpret_cast<const uint4*>(from + piece * 8);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = first + i * kStep;
                if (piece < pieces) store_shared16(to + piece * 16, scaled(x[i]));
            }
        }
    }

    // Eight inputs, below 2^64, times 2^64: an e2m1 code becomes bf16 without 126 of its exponent, and its products must not be too small for
    // f32.
    __device__ __forceinline__ static uint4 scaled(const uint4& x) {
        constexpr uint32_t kPower = 0x5f805f80;
        return make_uint4(::multiply(x.x, kPower), ::multiply(x.y, kPower), ::multiply(x.z, kPower), ::multiply(x.w, kPower));
    }

    // Which part of k this warp multiplies. Where only some have one, neighbouring teams use different schedulers.
    __device__ __forceinline__ static int part_of_k() {
        const int warp = threadIdx.x / kWarp;
        return (warp ^ warp / kTeamWarps * 2) % kTeamWarps;
    }

    // What products with the codes of each 32 inputs of one or two windows are multiplied by, from the address of their exponents on.
    template <int kWindows>
    __device__ __forceinline__ void load_scales(uint32_t from, float (&scales)[kWindows * 2]) const {
        const uint32_t exponents = kWindows == 2 ? load_shared4(from) : load_shared2(from);
#pragma unroll
        for (int i = 0; i < kWindows * 2; ++i) {
            // 2^(exponent - 127) times 2^(126 - 64). Exponents above 192 are refused when a checkpoint is read.
            scales[i] = __uint_as_float(__byte_perm(exponents, 0, 0x4440 + i) * first_exponent_bit + (uint32_t(126 - 64) << 23));
        }
    }

    // Adds a tile's products of one or two windows, from an even one on, to sums of each half of windows, so that products wait less for
    // one another.
    template <int kWindows>
    __device__ __forceinline__ void add_windows(float (&acc)[2][1][4], uint32_t codes, uint32_t exponents, uint32_t x) const {
        uint2 low[kWindows], high[kWindows];
        float low_scales[kWindows * 2], high_scales[kWindows * 2];
        uint4 inputs[kWindows * 2][1];
        load_scales<kWindows>(exponents, low_scales);
        load_scales<kWindows>(exponents + eight_bytes, high_scales);
#pragma unroll
        for (int i = 0; i < kWindows; ++i) {
            low[i] = load_shared8(codes + i * kWindowOfEight);
            high[i] = load_shared8(codes + eight_bytes + i * kWindowOfEight);
        }
#pragma unroll
        for (int i = 0; i < kWindows * 2; ++i) inputs[i][0] = load_matrices(x + i * 64);
#pragma unroll
        for (int i = 0; i < kWindows * 2; ++i) {
            const uint4 a = place_e2m1(i % 2 == 0 ? low[i / 2].x : low[i / 2].y);
            const uint4 b = place_e2m1(i % 2 == 0 ? high[i / 2].x : high[i / 2].y);
            add_scaled_products(acc[i % 2], a, b, inputs[i], low_scales[i], high_scales[i]);
        }
    }

    // The sums of this warp's windows of the tile in a stage. It takes neighbours, whose exponents are one load: all rows' may be in the same
    // banks.
    __device__ __forceinline__ void multiply(uint32_t stage, float (&acc)[2][1][4]) const {
        constexpr int kPairExponents = 2 * kExpertWindow / kExponentInputs;
        const int part = part_of_k(), lane = threadIdx.x % kWarp, row = lane / 4, pairs = windows / 2;
        const uint32_t codes = stage + lane * 8, x = inputs + lane % 8 * input_pitch + lane / 8 * 16;
        const uint32_t exponents = stage + windows * kWindowOfEight + row * exponent_bytes(p.k);
        const auto add = [&](auto count, int pair) {
            add_windows<decltype(count)::value>(acc, codes + pair * 2 * kWindowOfEight, exponents + pair * kPairExponents,
                                                x + pair * 2 * (kExpertWindow * 2));
        };
#pragma unroll 1
        for (int pair = part; pair < pairs; pair += kTeamWarps) add(Count<2>{}, pair);
        if (windows % 2 != 0 && pairs % kTeamWarps == part) add(Count<1>{}, pairs);
    }

    // A tile, by a team.
    __device__ __forceinline__ void compute(const Pass& pass, int tile, int place, int phase, int buffer) const {
        const int team = threadIdx.x / kTeamThreads, at = threadIdx.x % kTeamThreads, lane = at % kWarp;
        // What this thread stores, if anything: of a gated product the sums of both rows of an output, otherwise that of one.
        const int outputs = gated() ? kRowsTogether : kTileRows, token = at / outputs, row = at % outputs;
        const int eight = row < kRowsTogether ? first_eight(tile) : 2 * tile + 1, output = eight * kRowsTogether + row % kRowsTogether;
        const bool stores = token < pass.count && eight < eights;
        // Still on the way while this tile is multiplied.
        uint16_t low_bias = 0, high_bias = 0;
        if (stores && p.bias != nullptr) {
            const auto* const bias = reinterpret_cast<const uint16_t*>(of_expert(p.bias, p.stride, pass.expert)) + output;
            low_bias = __ldg(bias);
            if (gated()) high_bias = __ldg(bias + p.n);
        }
        barrier_wait(&shared.full[place], phase);
        float acc[2][1][4] = {};
        multiply(ring + place * stage_bytes, acc);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[place]);

        float* const own = shared.sums[team][buffer][part_of_k()];
#pragma unroll
        for (int i = 0; i < 4; ++i) own[(lane % 4 * 2 + i % 2) * kSumPitch + lane / 4 + i / 2 * kRowsTogether] = acc[0][0][i] + acc[1][0][i];
        named_sync<kTeamThreads>(2 + team);
        if (!stores) return;
        const auto wide = [](uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); };
        const auto sum = [&](int of_row) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kTeamWarps; ++i) sum += shared.sums[team][buffer][i][token * kSumPitch + of_row];
            return sum;
        };
        float value = sum(row) + wide(low_bias);
        if (gated()) value = activate(p.kind, value, sum(kRowsTogether + row) + wide(high_bias));
        p.out[size_t(pass.first + token) * p.n + output] = __float2bfloat16(value);
    }

    __device__ __forceinline__ void consume() const {
        pdl_wait();
        int at = first + int(threadIdx.x) / kTeamThreads, place = threadIdx.x / kTeamThreads, phase = 0, buffer = 0;
        for (int i = first / tiles; i * tiles < last; ++i) {
            const Pass pass = shared.passes[i];
            // Nobody multiplies by the rows of the pass before.
            named_sync<kConsumerThreads>(1);
            load_inputs(pass);
            named_sync<kConsumerThreads>(1);
            for (const int end = min((i + 1) * tiles, last); at < end; at += kTeams) {
                compute(pass, at - i * tiles, place, phase, buffer);
                place += kTeams, buffer ^= 1;
                if (place >= stages) place -= stages, phase ^= 1;
            }
        }
    }
};

__device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(kStageAlign) uint8_t memory[];
    __shared__ Shared shared;
    if (threadIdx.x < kMostStages) {
        barrier_init(&shared.full[threadIdx.x], 1);
        barrier_init(&shared.empty[threadIdx.x], kTeamWarps);
        fence_for_products();
    }
    Stream stream(p, shared, memory);
    // Where x has a row for each place, the first projection came before. It waited for the tiles before it let kernels behind it start, and
    // this one can copy weights until it has ended.
    if (p.top_k > 0) pdl_wait();
    pdl_launch();
    stream.divide();
    if (threadIdx.x < kConsumerThreads) {
        stream.consume();
    } else if (threadIdx.x == kConsumerThreads) {
        stream.produce();
    }
}

#else

__device__ __forceinline__ void run(const Problem&) {}

#endif

}  // namespace

EXPERT_PRODUCT(moe_stream_mxfp4, kThreads, 1, run)
