// How a tile of 128 rows of weights of four bits comes into shared memory (sm_90a). int4.cuh says how weights lie.
#pragma once

#include "int4.cuh"
#include "wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFeatures = 128;                       // rows of weights of a tile
constexpr int kEightsOfTile = kFeatures / kRowsTogether;

// A part of k of a tile.
template <int kGroup, int kWindows>
struct Int4Stage {
    static constexpr int kWords = kWindow / kGroup;  // of groups, of a window of a row

    uint8_t codes[kEightsOfTile][kWindows][kRowsTogether * kWindowBytes];
    uint32_t words[kEightsOfTile][kWindows][kRowsTogether * kWords];
};

// The rows of weights of a tile: they come in eights, of a gated tile in turns from the gate and from the up projection.
struct Int4Rows {
    int first;  // output
    int n;      // outputs, a multiple of 8
    bool gated;

    // Past the last output there are no rows.
    __device__ __forceinline__ bool exists(int eight) const { return first + (gated ? eight / 2 : eight) * kRowsTogether < n; }
    // Its index among the eights of the matrix.
    __device__ __forceinline__ int of_matrix(int eight) const {
        const int step = gated ? 1 : 2, second = gated ? n / kRowsTogether : 1;
        return first / kRowsTogether + eight / 2 * step + eight % 2 * second;
    }
};

// A matrix in device memory.
struct Int4Weights {
    const uint8_t* codes;
    const uint32_t* groups;
    int windows;  // of a row

    // As many threads start to copy windows from `window` on. What is past the end of rows or of outputs becomes zeros.
    template <int kThreads, int kGroup, int kWindows>
    __device__ __forceinline__ void copy(Int4Stage<kGroup, kWindows>& to, const Int4Rows& rows, int window, int thread) const {
        const int count = min(kWindows, windows - window);
        if (count == kWindows && rows.exists(kEightsOfTile - 1)) {
            copy_some<kThreads, true>(to, rows, window, thread, count);
        } else {
            copy_some<kThreads, false>(to, rows, window, thread, count);
        }
    }

    // Copies everything, or only `count` windows of the rows that exist; the rest becomes zeros.
    template <int kThreads, bool kAreAll, int kGroup, int kWindows>
    __device__ __forceinline__ void copy_some(Int4Stage<kGroup, kWindows>& to, const Int4Rows& rows, int window, int thread,
                                              int count) const {
        constexpr int kCodePieces = sizeof(to.codes[0][0]) / 16, kWordPieces = sizeof(to.words[0][0]) / 16;
        copy_pieces<kThreads, kAreAll, kWindows, kCodePieces>(to.codes, codes, rows, window, thread, count);
        copy_pieces<kThreads, kAreAll, kWindows, kWordPieces>(to.words, groups, rows, window, thread, count);
    }

    // `kPieces` of 16 bytes of each window of each eight.
    template <int kThreads, bool kAreAll, int kWindows, int kPieces>
    __device__ __forceinline__ void copy_pieces(void* to, const void* from, const Int4Rows& rows, int window, int thread,
                                                int count) const {
        constexpr int kOfEight = kWindows * kPieces, kAll = kEightsOfTile * kOfEight;
        static_assert(kThreads % kOfEight == 0 || kOfEight % kThreads == 0);
        uint4* const first_to = static_cast<uint4*>(to) + thread;
        const uint4* const first_from = static_cast<const uint4*>(from) + window * kPieces;
        // The partial copy is rare: it is not unrolled, to save registers.
#pragma unroll(kAreAll ? (kAll + kThreads - 1) / kThreads : 1)
        for (int first = 0; first < kAll; first += kThreads) {
            if (kAll % kThreads != 0 && first + thread >= kAll) break;
            // Once unrolled, the terms with `first` are constants.
            const int eight = first / kOfEight + (kThreads > kOfEight ? thread / kOfEight : 0);
            const int piece = first % kOfEight + (kThreads > kOfEight ? thread % kOfEight : thread);
            const bool is_wanted = kAreAll || (rows.exists(eight) && piece < count * kPieces);
            const size_t at = size_t(rows.of_matrix(eight)) * (windows * kPieces) + piece;
            copy_async(first_to + first, first_from + (is_wanted ? at : 0), is_wanted);
        }
    }
};

#endif
