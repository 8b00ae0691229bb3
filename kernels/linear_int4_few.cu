// Linear layers for a few rows with weights of four bits: out[m, n] = x[m, k] . weight[n, k]^T (+ bias), at the speed of reading the weights.
// All of x lies in shared memory. linear.cu computes the others: more rows, k divided among the blocks of a cluster, or no room for x.
//
// A warp multiplies 16 rows of weights with all rows of x by mma.m16n8k16, window by window (int4.cuh). A lane copies to shared memory what
// it multiplies itself, so warps wait for nobody. The first windows are requested before the wait for the kernel ahead, as weights never
// change, the others after x, which would queue behind them.
//
// The warps of a block are `row_warps` tiles of 16 rows times as many parts of k as that leaves. Their sums meet in shared memory, where a
// warp that does nothing else adds them in a fixed order.
#include "int4.cuh"
#include "linear.cuh"

namespace {

constexpr int kAllThreads = kThreads + kWarp;
constexpr int kMostRows = 8;
// Bytes between rows of x are this many more than a multiple of 128: no bank conflicts.
constexpr int kInputPad = 16;
// Windows that a warp requests before x.
constexpr int kFirst = 3;

// Barriers of a block, each for tiles in turns: the sums of a tile are there, and they have been added up. The fence of `barrier.cluster`
// would wait for all loads under way.
constexpr int kFull = 2, kEmpty = 4;

template <int kGroup, Activation kActivation>
struct Linear {
    static constexpr int kGroups = kWindow / kGroup;  // of a window
    // A window of two eights of rows: codes, and for each lane the words of two rows.
    static constexpr int kEightBytes = kRowsTogether * kWindowBytes, kWordBytes = kGroups * sizeof(uint32_t);
    static constexpr int kOfStage = 2 * (kEightBytes + kWarp * kWordBytes);
    // As `FEW_RING_BYTES` in crates/kernels/src/cuda/linear/stream.rs.
    static constexpr int kAhead = 8192 / kOfStage;
    static constexpr int kRing = kWarps * kAhead * kOfStage;
    static_assert(kAhead > kFirst);

    const Problem& p;
    int windows;  // of a row
    int outputs;  // of a block of tiles
    int blocks;   // of tiles
    int parts;    // of k, among this block's warps

    __device__ __forceinline__ explicit Linear(const Problem& p) : p(p) {
        windows = (p.k + kWindow - 1) / kWindow;
        outputs = p.row_warps * (p.gated() ? kTile / 2 : kTile);
        blocks = (p.n + outputs - 1) / outputs;
        parts = kWarps / p.row_warps;
    }

    __device__ __forceinline__ int input_pitch() const { return windows * (kWindow * 2) + kInputPad; }
    // Floats between rows of x in sums, and of the sums of a tile.
    __device__ __forceinline__ int sum_pitch() const { return p.row_warps * kTile + kPad; }
    __device__ __forceinline__ int sum_floats() const { return parts * kMostRows * sum_pitch(); }

    __device__ __forceinline__ void operator()() const {
        extern __shared__ __align__(128) uint8_t shared[];
        uint8_t* const inputs = shared + kRing;
        float* const sums = reinterpret_cast<float*>(inputs + p.m * input_pitch());
        pdl_launch();
        if (threadIdx.x < kThreads) {
            multiply(shared_address(shared), inputs, sums);
        } else {
            add(sums);
        }
    }

    // Adds and stores the sums of tiles, as they come.
    __device__ __forceinline__ void add(const float* sums) const {
        pdl_wait();
        int index = 0;
        for (int block = blockIdx.x; block < blocks; block += gridDim.x, ++index) {
            named_sync<kAllThreads>(kFull + index % 2);
            add_up<kMostRows, kActivation, kTile / 2>(p, outputs, parts, sums + index % 2 * sum_floats(), block, sum_pitch(),
                                                      threadIdx.x % kWarp, kWarp, [](int, float2 sums) { return sums; });
            if (block + 2 * gridDim.x < blocks) named_arrive<kAllThreads>(kEmpty + index % 2);
        }
    }

    __device__ __forceinline__ void multiply(uint32_t ring, uint8_t* inputs, float* sums) const {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
        const int row_warp = warp & (p.row_warps - 1), part = warp / p.row_warps;
        ring += warp * (kAhead * kOfStage);
        const uint32_t codes_at = ring + lane * 16, words_at = ring + 2 * kEightBytes + lane * kWordBytes;

        const uint8_t* codes = p.weight + lane * 16;
        const uint8_t* words = static_cast<const uint8_t*>(p.scales.of) + lane / 4 * kWordBytes;
        // Keeps the sums of base and offset in registers; the compiler would add them at each request.
        asm volatile("" : "+l"(codes), "+l"(words));
        // What is requested next, and where the windows of the tile's eights begin: the second are of the up projection if gated. Eights past
        // the end repeat the last one and are not stored.
        int next_block = blockIdx.x, next = part;
        uint32_t eights[2];
        const auto enter = [&] {
            const int all = p.n / kRowsTogether, first = (next_block * outputs + row_warp * (outputs / p.row_warps)) / kRowsTogether;
            eights[0] = min(first, all - 1) * windows;
            eights[1] = (p.gated() ? min(first, all - 1) + all : min(first + 1, all - 1)) * windows;
        };
        const auto request = [&](int stage) {
            if (next_block < blocks && next < windows) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint64_t at = eights[i] + next;
                    copy_async_256(codes_at + stage * kOfStage + i * kEightBytes, codes + at * kEightBytes, true);
                    copy_async_of<kWordBytes>(words_at + stage * kOfStage + i * (kWarp * kWordBytes), words + at * (kRowsTogether * kWordBytes));
                }
                next += parts;
                if (next >= windows) {
                    next = part;
                    next_block += gridDim.x;
                    enter();
                }
            }
            commit_async();
        };
        enter();
#pragma unroll
        for (int i = 0; i < kFirst; ++i) request(i);
        if (p.norm.weight != nullptr && threadIdx.x * 32 < p.k) prefetch_line(p.norm.weight + threadIdx.x * 32);
        pdl_wait();
        const auto request_others = [&] {
#pragma unroll
            for (int i = kFirst; i < kAhead; ++i) request(i);
        };
        const int pitch = input_pitch();
        if (p.norm.weight != nullptr) {
            // A row is whole windows here: `can_norm` in stream.rs.
            normalise_inputs(p, 0, p.k / 8, sums, [&](int row, int piece) { return reinterpret_cast<bf16*>(inputs + row * pitch) + piece * 8; });
            request_others();
        } else {
            copy_inputs(inputs);
            commit_async();
            request_others();
            wait_async<kAhead - kFirst>();
            sync_threads();
        }

        // Of one of four matrices of eight rows of x and eight inputs, a row. Rows past the end repeat the last one: a column of a product
        // reaches no other.
        const uint32_t x_at = shared_address(inputs) + min(lane % 8, p.m - 1) * pitch + lane / 8 * 16;
        int index = 0, stage = 0;
        for (int block = blockIdx.x; block < blocks; block += gridDim.x, ++index) {
            float acc[4] = {};
            for (int window = part; window < windows; window += parts) {
                wait_async<kAhead - 1>();
                products(acc, codes_at + stage * kOfStage, words_at + stage * kOfStage, x_at + window * (kWindow * 2));
                request(stage);
                stage = stage + 1 == kAhead ? 0 : stage + 1;
            }
            if (index >= 2) named_sync<kAllThreads>(kEmpty + index % 2);
            float* const to = sums + index % 2 * sum_floats() + (part * kMostRows + lane % 4 * 2) * sum_pitch() + row_warp * kTile + lane / 4;
            to[0] = acc[0], to[sum_pitch()] = acc[1], to[8] = acc[2], to[sum_pitch() + 8] = acc[3];
            named_arrive<kAllThreads>(kFull + index % 2);
        }
    }

    // Starts to copy x. What fills up the last window becomes zeros.
    __device__ __forceinline__ void copy_inputs(uint8_t* to) const {
        const int pieces = windows * (kWindow / 8);
        for (int row = 0; row < p.m; ++row) {
            for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
                const bool is_there = piece * 8 < p.k;
                copy_async(to + row * input_pitch() + piece * 16, p.x + size_t(row) * p.k + (is_there ? piece * 8 : 0), is_there);
            }
        }
    }

    // Adds the products of a window. Codes less their zeros are exact, so that sums of a group are multiplied by its scale.
    __device__ __forceinline__ static void products(float (&acc)[4], uint32_t codes_at, uint32_t words_at, uint32_t x_at) {
        uint32_t codes[2][kWindowParts], words[2][kGroups];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_shared_words(codes[i], codes_at + i * kEightBytes);
            load_shared_words(words[i], words_at + i * (kWarp * kWordBytes));
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const uint32_t low_zeros = group_zeros(words[0][group]), high_zeros = group_zeros(words[1][group]);
            // Two sums, so that half as many products wait for each other.
            float sums[2][4] = {};
#pragma unroll
            for (int i = 0; i < kGroup / 32; ++i) {
                const int part = group * (kGroup / 32) + i;
                const uint4 low = widen_int4(codes[0][part], low_zeros), high = widen_int4(codes[1][part], high_zeros);
                const uint32_t even[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
                uint32_t x[4];
                load_matrices(x, x_at + part * 64);
                mma(sums[0], even, x[0], x[1]);
                mma(sums[1], second, x[2], x[3]);
            }
            const float low_scale = group_scale(words[0][group]), high_scale = group_scale(words[1][group]);
#pragma unroll
            for (int v = 0; v < 4; ++v) acc[v] = fmaf(sums[0][v] + sums[1][v], v < 2 ? low_scale : high_scale, acc[v]);
        }
    }
};

}  // namespace

#define LINEAR_INT4_FEW(GROUP, SUFFIX, ACTIVATION)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kAllThreads, 2)                                                                       \
        linear_int4_few_##GROUP##_##SUFFIX(const bf16* x, const uint8_t* weight, const bf16* bias, void* out, int m, int n, int k,     \
                                           int row_warps, int mode, const bf16* delta, const float* norm_weight, bf16* sum, float eps, \
                                           const void* scales, int stride, int pitch) {                                                \
        const Problem p{x, weight, bias, out, m, n, k, row_warps, mode, {delta, norm_weight, sum, eps}, {scales, stride}, pitch};      \
        Linear<GROUP, ACTIVATION>{p}();                                                                                                \
    }
#define LINEARS_INT4_FEW(GROUP)                     \
    LINEAR_INT4_FEW(GROUP, silu, Activation::kSilu) \
    LINEAR_INT4_FEW(GROUP, gelu_tanh, Activation::kGeluTanh)

LINEARS_INT4_FEW(32)
LINEARS_INT4_FEW(64)
LINEARS_INT4_FEW(128)
