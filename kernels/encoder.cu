// An encoder of images: attention in which the patches of a frame or of a window see each other, what its layers do element by element,
// and what takes its rows to the decoder. Rows are a multiple of eight elements and 16-byte aligned, but for those inside gated MLPs.
#include "activation.cuh"
#include "common.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace {

struct EncoderArgs {
    const bf16* q;
    const bf16* k;
    const bf16* v;
    bf16* out;
    // Where segments are of different lengths: their first rows, and where the last ends.
    const int* starts;
    int stride;   // elements between rows of q, of k and of v
    int dim;      // elements of a head, a multiple of eight, at most D
    int segment;  // rows that see each other, where all are of one length
    int begin;    // of each such segment, the rows whose attention is computed
    int end;
    float scale;  // times log2(e)

    __device__ __forceinline__ int64_t first() const {
        return starts == nullptr ? int64_t(blockIdx.z) * segment : int64_t(starts[blockIdx.z]);
    }

    __device__ __forceinline__ int rows() const {
        return starts == nullptr ? segment : starts[blockIdx.z + 1] - starts[blockIdx.z];
    }
};

// Flash attention of one head over contiguous rows: a block of threads has a tile of queries and streams tiles of keys and values
// of its segment through shared memory. Heads of fewer than D elements are padded with zeros there.
template <int D>
struct EncoderAttention {
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kM = D <= 80 ? 2 : 1;  // tiles of 16 rows of a warp
    static constexpr int kRows = kWarps * kM * 16;
    static constexpr int kKeys = 64;
    static constexpr int kN = kKeys / 8;
    static constexpr int kD = D / 8;
    // Padded so that the eight rows of an 8x8 matrix lie in different banks.
    static constexpr int kStride = D + 8;
    static constexpr int kTile = kKeys * kStride;

    const EncoderArgs& args;
    bf16* const q_tile;
    bf16* const k_tiles;  // two: one is loaded while the other is read
    bf16* const v_tiles;
    const int64_t first;  // row of the segment
    const int segment;    // rows of it
    const int end;        // of those whose attention is computed
    const int head_at;    // column of the head
    const int row;        // of the tile, in the segment

    __device__ __forceinline__ EncoderAttention(const EncoderArgs& args, char* shared)
        : args(args),
          q_tile(reinterpret_cast<bf16*>(shared)),
          k_tiles(q_tile + kRows * kStride),
          v_tiles(k_tiles + 2 * kTile),
          first(args.first()),
          segment(args.rows()),
          end(args.starts == nullptr ? args.end : segment),
          head_at(blockIdx.y * args.dim),
          row(args.begin + blockIdx.x * kRows) {}

    template <int Rows>
    __device__ __forceinline__ void load(const bf16* from, int begin, bf16* tile) const {
        constexpr int kChunks = D / 8;
        static_assert(Rows * kChunks % kThreads == 0);
#pragma unroll 4
        for (int i = 0; i < Rows * kChunks / kThreads; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            const int r = chunk / kChunks, column = chunk % kChunks * 8;
            const bool wanted = begin + r < segment && column < args.dim;
            const bf16* source = from + (wanted ? (first + begin + r) * args.stride + head_at + column : 0);
            copy_async(tile + r * kStride + column, source, wanted);
        }
    }

    __device__ __forceinline__ void operator()() const {
        // Other segments may have more tiles.
        if (row >= end) return;
        const int tiles = (segment + kKeys - 1) / kKeys;
        load<kRows>(args.q, row, q_tile);
        load<kKeys>(args.k, 0, k_tiles);
        commit_async();
        load<kKeys>(args.v, 0, v_tiles);
        commit_async();

        const int warp_row = threadIdx.x / kWarp * kM * 16;
        float sums[kM][kD][4] = {};
        float largest[kM][2], total[kM][2] = {};
#pragma unroll
        for (int m = 0; m < kM; ++m) largest[m][0] = largest[m][1] = -INFINITY;

        for (int tile = 0; tile < tiles; ++tile) {
            const int key = tile * kKeys, stage = tile & 1;
            float weights[kM][kN][4];
            // The keys have arrived, and everyone is done with those before the last and the values before.
            wait_async<1>();
            __syncthreads();
            if (tile + 1 < tiles) load<kKeys>(args.k, key + kKeys, k_tiles + (1 - stage) * kTile);
            commit_async();
            score(warp_row, k_tiles + stage * kTile, weights);
            if (key + kKeys > segment) mask(segment - key, weights);
            soften(weights, largest, total, sums);
            wait_async<1>();
            __syncthreads();
            if (tile + 1 < tiles) load<kKeys>(args.v, key + kKeys, v_tiles + (1 - stage) * kTile);
            commit_async();
            accumulate(weights, v_tiles + stage * kTile, sums);
        }
        write(warp_row, total, sums);
    }

    // weights = queries x keys
    __device__ __forceinline__ void score(int warp_row, const bf16* keys, float (&weights)[kM][kN][4]) const {
        const int lane = threadIdx.x % kWarp;
        const bf16* q = q_tile + (warp_row + lane % 16) * kStride + lane / 16 * 8;
        const bf16* k = keys + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int n = 0; n < kN; ++n) weights[m][n][0] = weights[m][n][1] = weights[m][n][2] = weights[m][n][3] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) load_matrices(a[m], q + m * 16 * kStride + d);
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                uint32_t b[4];
                load_matrices(b, k + n * 8 * kStride + d);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    mma(weights[m][n], a[m], b[0], b[1]);
                    mma(weights[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Nobody sees keys from `keys` on.
    __device__ __forceinline__ void mask(int keys, float (&weights)[kM][kN][4]) const {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (n * 8 + column + i % 2 < keys) continue;
#pragma unroll
                for (int m = 0; m < kM; ++m) weights[m][n][i] = -INFINITY;
            }
        }
    }

    // From scores to weights relative to the largest so far, to which what was summed is adjusted. Every tile has a key that is seen.
    __device__ __forceinline__ void soften(float (&weights)[kM][kN][4], float (&largest)[kM][2], float (&total)[kM][2],
                                           float (&sums)[kM][kD][4]) const {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = largest[m][half];
#pragma unroll
                for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(weights[m][n][2 * half], weights[m][n][2 * half + 1]));
                top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
                top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
                const float base = top * args.scale, factor = exp2_fast(largest[m][half] * args.scale - base);
                largest[m][half] = top;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kN; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& weight = weights[m][n][2 * half + i];
                        weight = exp2_fast(fmaf(weight, args.scale, -base));
                        sum += weight;
                    }
                }
                total[m][half] = fmaf(total[m][half], factor, sum);
#pragma unroll
                for (int d = 0; d < kD; ++d) {
                    sums[m][d][2 * half] *= factor;
                    sums[m][d][2 * half + 1] *= factor;
                }
            }
        }
    }

    // sums += weights x values
    __device__ __forceinline__ void accumulate(const float (&weights)[kM][kN][4], const bf16* values,
                                               float (&sums)[kM][kD][4]) const {
        const int lane = threadIdx.x % kWarp;
        const bf16* v = values + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                a[m][0] = pack(weights[m][n][0], weights[m][n][1]);
                a[m][1] = pack(weights[m][n][2], weights[m][n][3]);
                a[m][2] = pack(weights[m][n + 1][0], weights[m][n + 1][1]);
                a[m][3] = pack(weights[m][n + 1][2], weights[m][n + 1][3]);
            }
#pragma unroll
            for (int d = 0; d < kD; d += 2) {
                uint32_t b[4];
                load_matrices_transposed(b, v + n * 8 * kStride + d * 8);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    mma(sums[m][d], a[m], b[0], b[1]);
                    mma(sums[m][d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void write(int warp_row, const float (&total)[kM][2], const float (&sums)[kM][kD][4]) const {
        const int lane = threadIdx.x % kWarp, width = gridDim.y * args.dim;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float all = total[m][half];
                all += __shfl_xor_sync(kAllLanes, all, 1);
                all += __shfl_xor_sync(kAllLanes, all, 2);
                const int at = row + warp_row + m * 16 + half * 8 + lane / 4;
                if (at >= end) continue;
                const float inverse = 1.0f / all;
                bf16* const out = args.out + (first + at) * width + head_at + lane % 4 * 2;
#pragma unroll
                for (int d = 0; d < kD; ++d) {
                    if (d * 8 >= args.dim) continue;
                    *reinterpret_cast<uint32_t*>(out + d * 8) =
                        pack(sums[m][d][2 * half] * inverse, sums[m][d][2 * half + 1] * inverse);
                }
            }
        }
    }
};

// Row and column of patch `patch`: merged ones follow each other, squares of them line by line or as `order` says, if it is not null.
__device__ __forceinline__ int2 place_of(int patch, const int* order, int height, int width, int merge) {
    const int inside = patch % (merge * merge), square = patch / (merge * merge);
    const int merged = order == nullptr ? square : order[square];
    const int rows = height / merge, columns = width / merge;
    return make_int2(merged / columns % rows * merge + inside / merge, merged % columns * merge + inside % merge);
}

// Between which two places of a table of `side` place `at` of `len` falls where both have the same ends, and the second's weight.
struct Taps {
    int first;
    int second;
    float weight;
};

__device__ __forceinline__ Taps taps(int at, int len, int side) {
    const float place = static_cast<float>(at) * static_cast<float>(side - 1) / static_cast<float>(max(len - 1, 1));
    const int first = min(static_cast<int>(place), side - 1);
    return {first, min(first + 1, side - 1), place - static_cast<float>(first)};
}

// One block a row, `kVecs` vectors of it a thread.
template <int kVecs>
__device__ __forceinline__ void layer_norm_row(bf16* hidden, const bf16* delta, const float* weight, const float* bias, bf16* out,
                                               int n, float eps) {
    __shared__ float partial[2][kWarp];
    pdl_launch();
    pdl_wait();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * n;
    const auto at = [&](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x) * kVec; };
    Float8 x[kVecs];
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= n) continue;
        x[v] = widen(load8(hidden + row + at(v)));
        if (delta != nullptr) {
            const Float8 added = widen(load8(delta + row + at(v)));
#pragma unroll
            for (int i = 0; i < kVec; ++i) x[v].at[i] += added.at[i];
            const Bf16x8 rounded = narrow(x[v]);
            store8(hidden + row + at(v), rounded);
            x[v] = widen(rounded);
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += x[v].at[i];
    }
    const float mean = block_sum(sum, partial[0]) / static_cast<float>(n);
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= n) continue;
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[v].at[i] -= mean;
        squares += sum_of_squares(x[v]);
    }
    const float scale = rsqrtf(block_sum(squares, partial[1]) / static_cast<float>(n) + eps);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (at(v) >= n) continue;
        const Float8 w = load_floats(weight + at(v)), b = load_floats(bias + at(v));
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[v].at[i] = fmaf(x[v].at[i] * scale, w.at[i], b.at[i]);
        store8(out + row + at(v), narrow(x[v]));
    }
}

__device__ __forceinline__ float gelu_exact(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

// (1 + tanh(u)) / 2 is sigmoid(2u).
__device__ __forceinline__ float gelu_tanh(float x) {
    return __fdividef(x, 1.0f + __expf(-x * fmaf(0.07135482f, x * x, 1.5957691f)));
}

// Of `len` elements in place.
template <typename Activation>
__device__ __forceinline__ void activate(bf16* x, uint64_t len, Activation activation) {
    pdl_launch();
    pdl_wait();
    const uint64_t i = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
    if (i >= len) return;
    Float8 values = widen(load8(x + i));
#pragma unroll
    for (int j = 0; j < kVec; ++j) values.at[j] = activation(values.at[j]);
    store8(x + i, narrow(values));
}

// activation(gate) * up of rows of `inner` elements of each, gate first, to `len` elements of out, four a thread.
template <Activation kActivation>
__device__ __forceinline__ void gate_rows(const bf16* gate_up, bf16* out, int inner, uint64_t len) {
    pdl_launch();
    pdl_wait();
    const uint64_t i = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= len) return;
    const bf16* const gates = gate_up + i / inner * inner + i;
    uint2 gate = *reinterpret_cast<const uint2*>(gates);
    const uint2 up = *reinterpret_cast<const uint2*>(gates + inner);
    bf162* const pairs = reinterpret_cast<bf162*>(&gate);
    const bf162* const ups = reinterpret_cast<const bf162*>(&up);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float2 g = __bfloat1622float2(pairs[j]), u = __bfloat1622float2(ups[j]);
        pairs[j] = __floats2bfloat162_rn(activated(kActivation, g.x, u.x), activated(kActivation, g.y, u.y));
    }
    *reinterpret_cast<uint2*>(out + i) = gate;
}

}  // namespace

extern __shared__ __align__(16) char shared[];

// Grid: tiles of queries of a segment x heads x segments.
#define ENCODER_ATTENTION(D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(EncoderAttention<D>::kThreads, 2)                                      \
        encoder_attention_##D(const bf16* q, const bf16* k, const bf16* v, bf16* out, const int* starts, int stride,    \
                              int dim, int segment, int begin, int end, float scale) {                                  \
        pdl_wait();                                                                                                     \
        pdl_launch();                                                                                                   \
        const EncoderArgs args{q, k, v, out, starts, stride, dim, segment, begin, end, scale};                          \
        EncoderAttention<D>(args, shared)();                                                                            \
    }

ENCODER_ATTENTION(64)
ENCODER_ATTENTION(80)
ENCODER_ATTENTION(128)

// hidden += delta, unless that is null; out = (hidden - mean) / sqrt(variance + eps) * weight + bias. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    layer_norm_1(bf16* hidden, const bf16* delta, const float* weight, const float* bias, bf16* out, int n, float eps) {
    layer_norm_row<1>(hidden, delta, weight, bias, out, n, eps);
}
extern "C" __global__ void __launch_bounds__(1024)
    layer_norm_2(bf16* hidden, const bf16* delta, const float* weight, const float* bias, bf16* out, int n, float eps) {
    layer_norm_row<2>(hidden, delta, weight, bias, out, n, eps);
}

extern "C" __global__ void __launch_bounds__(256) gelu_exact_in_place(bf16* x, uint64_t len) {
    activate(x, len, [](float value) { return gelu_exact(value); });
}
extern "C" __global__ void __launch_bounds__(256) gelu_tanh_in_place(bf16* x, uint64_t len) {
    activate(x, len, [](float value) { return gelu_tanh(value); });
}

// Rows are a multiple of four elements: inside an MLP there may be no more.
extern "C" __global__ void __launch_bounds__(256) gate_silu(const bf16* gate_up, bf16* out, int inner, uint64_t len) {
    gate_rows<Activation::kSilu>(gate_up, out, inner, len);
}
extern "C" __global__ void __launch_bounds__(256) gate_gelu_tanh(const bf16* gate_up, bf16* out, int inner, uint64_t len) {
    gate_rows<Activation::kGeluTanh>(gate_up, out, inner, len);
}

// Turns the bytes of each patch, [3, pixels], into the values that the encoder reads, [3, frames, pixels] with equal frames, by the levels
// of their colour, [3, 256]; with an order, `merged` patches follow each other. One block a patch.
extern "C" __global__ void __launch_bounds__(256)
    read_patches(const uint8_t* bytes, const float* levels, const int* order, bf16* out, int pixels, int frames, int merged) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x, size = 3 * pixels;
    const int patch = order == nullptr ? row : order[row / merged] * merged + row % merged;
    const uint8_t* const from = bytes + static_cast<int64_t>(patch) * size;
    bf16* const to = out + static_cast<int64_t>(row) * size * frames;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const int colour = i / pixels, pixel = i - colour * pixels;
        const bf16 value = __float2bfloat16_rn(levels[colour * 256 + from[i]]);
        for (int frame = 0; frame < frames; ++frame) to[(colour * frames + frame) * pixels + pixel] = value;
    }
}

// hidden += what a table of side x side positions, [side * side, n], has at each patch's place, interpolated. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    add_positions(bf16* hidden, const float* table, const int* order, int n, int height, int width, int merge, int side) {
    pdl_launch();
    pdl_wait();
    const int2 place = place_of(blockIdx.x, order, height, width, merge);
    const Taps y = taps(place.x, height, side), x = taps(place.y, width, side);
    const auto at = [&](int row, int column) { return table + static_cast<int64_t>(row * side + column) * n; };
    const float* const corners[4] = {at(y.first, x.first), at(y.first, x.second), at(y.second, x.first),
                                     at(y.second, x.second)};
    const float weights[4] = {(1.0f - y.weight) * (1.0f - x.weight), (1.0f - y.weight) * x.weight,
                              y.weight * (1.0f - x.weight), y.weight * x.weight};
    bf16* const row = hidden + static_cast<int64_t>(blockIdx.x) * n;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
        Float8 sum = widen(load8(row + i));
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
            const Float8 position = load_floats(corners[corner] + i);
#pragma unroll
            for (int j = 0; j < kVec; ++j) sum.at[j] = fmaf(weights[corner], position.at[j], sum.at[j]);
        }
        store8(row + i, narrow(sum));
    }
}

// Cosine and sine of the angles of all patches, [patches, pairs]: the first half of the pairs turns with the row, the other with the
// column, pair i of `pairs / 2` by theta^(-i / (pairs / 2)), of columns with `column_shift` added to i; log2_theta is the logarithm of
// theta. One thread an angle.
extern "C" __global__ void __launch_bounds__(256)
    patch_angles(float2* angles, const int* order, int patches, int pairs, float log2_theta, float column_shift, int height,
                 int width, int merge) {
    pdl_launch();
    pdl_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= patches * pairs) return;
    const int patch = i / pairs, pair = i - patch * pairs, quarter = pairs / 2;
    const int2 place = place_of(patch, order, height, width, merge);
    const bool is_row = pair < quarter;
    const float step = is_row ? static_cast<float>(pair) : static_cast<float>(pair - quarter) + column_shift;
    const float exponent = step / static_cast<float>(quarter);
    const float angle = static_cast<float>(is_row ? place.x : place.y) * exp2f(-exponent * log2_theta);
    float2 turned;
    sincosf(angle, &turned.y, &turned.x);
    angles[i] = turned;
}

// Rotates the first `heads` heads of each row of x, element i with i + pairs, four pairs a thread. Heads have 2 * pairs elements.
extern "C" __global__ void __launch_bounds__(256)
    rotate_heads(bf16* x, const float2* angles, int rows, int stride, int heads, int pairs) {
    pdl_launch();
    pdl_wait();
    const int quads = pairs / 4, in_row = heads * quads;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(i / in_row), unit = static_cast<int>(i - static_cast<int64_t>(row) * in_row);
    if (row >= rows) return;
    const int head = unit / quads, pair = (unit - head * quads) * 4;
    bf162* const first = reinterpret_cast<bf162*>(x + static_cast<int64_t>(row) * stride + head * 2 * pairs + pair);
    bf162* const second = first + pairs / 2;
    const float2* const turned = angles + static_cast<int64_t>(row) * pairs + pair;
    uint2 a = *reinterpret_cast<const uint2*>(first), b = *reinterpret_cast<const uint2*>(second);
    bf162* const as = reinterpret_cast<bf162*>(&a);
    bf162* const bs = reinterpret_cast<bf162*>(&b);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float2 u = __bfloat1622float2(as[j]), w = __bfloat1622float2(bs[j]);
        const float2 s = turned[2 * j], t = turned[2 * j + 1];
        as[j] = __floats2bfloat162_rn(u.x * s.x - w.x * s.y, u.y * t.x - w.y * t.y);
        bs[j] = __floats2bfloat162_rn(w.x * s.x + u.x * s.y, w.y * t.x + u.y * t.y);
    }
    *reinterpret_cast<uint2*>(first) = a;
    *reinterpret_cast<uint2*>(second) = b;
}

// Row i of x, which is row r = order[i], or i where that is null, of an image, goes to row pages[r / page] * page + r % page of `kept`,
// whose rows are `stride` elements apart, from column `column` on. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    keep_rows(const bf16* x, const int* order, const int* pages, bf16* kept, int n, int stride, int column, int page) {
    pdl_launch();
    pdl_wait();
    const bf16* const from = x + static_cast<int64_t>(blockIdx.x) * n;
    const int row = order == nullptr ? static_cast<int>(blockIdx.x) : order[blockIdx.x];
    const int64_t to = static_cast<int64_t>(pages[row / page] * page + row % page) * stride + column;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) store8(kept + to + i, load8(from + i));
}

// Of patches that lie line by line, `width` in each: row i of out has of those in the i-th square of merge x merge all first elements,
// then all second ones, and so on. One block a row.
extern "C" __global__ void __launch_bounds__(1024) gather_squares(const bf16* x, bf16* out, int n, int width, int merge) {
    pdl_launch();
    pdl_wait();
    const int columns = width / merge, merged = merge * merge, row = blockIdx.x;
    const bf16* const corner = x + (static_cast<int64_t>(row / columns) * merge * width + row % columns * merge) * n;
    bf16* const to = out + static_cast<int64_t>(row) * merged * n;
    for (int i = threadIdx.x; i < merged * n; i += blockDim.x) {
        const int patch = i % merged;
        to[i] = corner[static_cast<int64_t>(patch / merge * width + patch % merge) * n + i / merged];
    }
}

// Of patches that lie line by line, `width` in each: row i of out is the mean of those in the i-th square of merge x merge. One block a
// row.
extern "C" __global__ void __launch_bounds__(1024) average_squares(const bf16* x, bf16* out, int n, int width, int merge) {
    pdl_launch();
    pdl_wait();
    const int columns = width / merge, merged = merge * merge, row = blockIdx.x;
    const bf16* const corner = x + (static_cast<int64_t>(row / columns) * merge * width + row % columns * merge) * n;
    const float share = 1.0f / static_cast<float>(merged);
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
        Float8 sum{};
        for (int patch = 0; patch < merged; ++patch) {
            const Float8 more = widen(load8(corner + static_cast<int64_t>(patch / merge * width + patch % merge) * n + i));
#pragma unroll
            for (int j = 0; j < kVec; ++j) sum.at[j] += more.at[j];
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] *= share;
        store8(out + static_cast<int64_t>(row) * n + i, narrow(sum));
    }
}

// For each pair of rows, that of `hidden`, [rows, n], becomes that of `kept`, from column `column` of its `stride`. One block a pair.
extern "C" __global__ void __launch_bounds__(1024)
    put_rows(const bf16* kept, const int2* pairs, bf16* hidden, int n, int stride, int column) {
    pdl_launch();
    pdl_wait();
    const int2 pair = pairs[blockIdx.x];
    const bf16* const from = kept + static_cast<int64_t>(pair.y) * stride + column;
    bf16* const to = hidden + static_cast<int64_t>(pair.x) * n;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) store8(to + i, load8(from + i));
}

// The same, added.
extern "C" __global__ void __launch_bounds__(1024)
    add_rows(const bf16* kept, const int2* pairs, bf16* hidden, int n, int stride, int column) {
    pdl_launch();
    pdl_wait();
    const int2 pair = pairs[blockIdx.x];
    const bf16* const from = kept + static_cast<int64_t>(pair.y) * stride + column;
    bf16* const to = hidden + static_cast<int64_t>(pair.x) * n;
    for (int i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
        Float8 sum = widen(load8(to + i));
        const Float8 more = widen(load8(from + i));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum.at[j] += more.at[j];
        store8(to + i, narrow(sum));
    }
}
