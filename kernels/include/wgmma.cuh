// Matrix products of a warp group (sm_90a): operands in shared memory in rows of 128 bytes, swizzled; and its barriers.
#pragma once

#include "mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarpGroup = 128;

// A panel of `Columns` bf16 of many rows, whose 16-byte chunks are permuted within each eight rows, so that both a row and a column of chunks
// touch all banks. Rows are 128 bytes, or 64 where the width of a matrix is no multiple of that; then two of them have the same permutation.
// Panels start at multiples of eight rows: of 1024 or 512 bytes.
template <int Columns>
struct SwizzledPanel {
    static_assert(Columns == 64 || Columns == 32, "a permutation of the hardware");
    static constexpr int kColumns = Columns;
    static constexpr int kChunks = Columns / 8;

    // Element (row, 8 x chunk).
    __device__ __forceinline__ static bf16* at(bf16* panel, int row, int chunk) {
        return panel + row * Columns + ((chunk ^ (row >> (Columns == 64 ? 0 : 1) & (kChunks - 1))) << 3);
    }

    // An operand whose rows run along the summed dimension: 32 bytes (16 bf16 or 32 e4m3 values) of each, from an address in shared memory on.
    // `eight`: elements from eight rows to the next eight.
    __device__ __forceinline__ static uint64_t rows_operand(uint32_t at, int eight = 8 * Columns) { return operand(at, 8, eight); }

    // An operand whose rows are steps of the summed dimension: 16 rows from an address on, of as many panels as the product is wide. `panel`:
    // elements from one panel to the next.
    __device__ __forceinline__ static uint64_t columns_operand(uint32_t at, int panel, int eight = 8 * Columns) {
        return operand(at, panel, eight);
    }

private:
    __device__ __forceinline__ static uint64_t operand(uint32_t at, int leading, int stride) {
        constexpr uint64_t kPermutation = uint64_t(Columns == 64 ? 1 : 2) << 62;
        return uint64_t((at & 0x3ffff) >> 4) | uint64_t(leading / 8) << 16 | uint64_t(stride / 8) << 32 | kPermutation;
    }
};

// The same of panels of 64 columns, eight rows right after the other.
__device__ __forceinline__ bf16* swizzled(bf16* panel, int row, int chunk) { return SwizzledPanel<64>::at(panel, row, chunk); }

__device__ __forceinline__ uint64_t rows_operand(uint32_t at) { return SwizzledPanel<64>::rows_operand(at); }

__device__ __forceinline__ uint64_t rows_operand(const bf16* at) { return rows_operand(shared_address(at)); }

// Before the first product of a sequence, and after registers of one were touched.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Tells the compiler that registers change where it cannot see it: products are asynchronous.
template <int N>
__device__ __forceinline__ void touch(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
    }
}

// The registers of a result of 4 to 128 elements for each thread, as operands and by name.
#define WGMMA_4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WGMMA_8(n) WGMMA_4(n), WGMMA_4(n + 1)
#define WGMMA_16(n) WGMMA_4(n), WGMMA_4(n + 1), WGMMA_4(n + 2), WGMMA_4(n + 3)
#define WGMMA_32(n) WGMMA_16(n), WGMMA_16(n + 4)
#define WGMMA_48(n) WGMMA_32(n), WGMMA_16(n + 8)
#define WGMMA_56(n) WGMMA_32(n), WGMMA_16(n + 8), WGMMA_8(n + 12)
#define WGMMA_64(n) WGMMA_32(n), WGMMA_32(n + 8)
#define WGMMA_96(n) WGMMA_64(n), WGMMA_32(n + 16)
#define WGMMA_112(n) WGMMA_96(n), WGMMA_16(n + 24)
#define WGMMA_128(n) WGMMA_64(n), WGMMA_64(n + 16)
#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 \
    WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_MORE_48 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_MORE_56 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_MORE_64 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", " WGMMA_NAMES_MORE_48
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", " WGMMA_NAMES_MORE_56
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", " WGMMA_NAMES_MORE_64
#define WGMMA_NAMES_MORE_96 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_MORE_112 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_MORE_128 \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_NAMES_96 WGMMA_NAMES_64 ", " WGMMA_NAMES_MORE_96
#define WGMMA_NAMES_112 WGMMA_NAMES_96 ", " WGMMA_NAMES_MORE_112
#define WGMMA_NAMES_128 WGMMA_NAMES_112 ", " WGMMA_NAMES_MORE_128

// Products with a right operand of `N` columns. Results are laid out as those of `mma`, eight columns after eight, warp `i` of
// the group having rows 16 x i on.
template <int N>
struct Wgmma;

#define WGMMA(N, C, NAMES, P0, P1, P2, P3, P4, P5)                                                                       \
    template <>                                                                                                         \
    struct Wgmma<N> {                                                                                                   \
        /* c (+)= a x b: a is 64x16 by rows, b 16xN with rows along the sum. */                                         \
        __device__ __forceinline__ static void rows(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {            \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, " P0 ", " P1            \
                         ", add, 1, 1, 0, 0;\n}"                                                                        \
                         : C                                                                                            \
                         : "l"(a), "l"(b), "r"(add));                                                                   \
        }                                                                                                               \
        /* The same for e4m3 values: a is 64x32, b is 32xN. Sums have fewer bits than f32. */                            \
        __device__ __forceinline__ static void rows_fp8(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {        \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, " P0 ", " P1            \
                         ", add, 1, 1;\n}"                                                                              \
                         : C                                                                                            \
                         : "l"(a), "l"(b), "r"(add));                                                                   \
        }                                                                                                               \
        /* The same with a in registers. */                                                                             \
        __device__ __forceinline__ static void rows(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int add) { \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P5 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {" P0 ", " P1 ", " P2   \
                         ", " P3 "}, " P4 ", add, 1, 1, 0;\n}"                                                          \
                         : C                                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                               \
        }                                                                                                               \
        /* c += a x b: a in registers, b 16xN with rows of columns; of bf16 or, if `Half`, of f16. */                   \
        template <bool Half = false>                                                                                    \
        __device__ __forceinline__ static void columns(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {      \
            if constexpr (Half) {                                                                                       \
                asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P5 ", 0;\n"                                       \
                             "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, {" P0 ", " P1 ", " P2 \
                             ", " P3 "}, " P4 ", add, 1, 1, 1;\n}"                                                      \
                             : C                                                                                        \
                             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                             \
                return;                                                                                                 \
            }                                                                                                           \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P5 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {" P0 ", " P1 ", " P2   \
                         ", " P3 "}, " P4 ", add, 1, 1, 1;\n}"                                                          \
                         : C                                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                 \
        }                                                                                                               \
    }

WGMMA(8, WGMMA_4(0), WGMMA_NAMES_4, "%4", "%5", "%6", "%7", "%8", "%9");
WGMMA(16, WGMMA_8(0), WGMMA_NAMES_8, "%8", "%9", "%10", "%11", "%12", "%13");
WGMMA(32, WGMMA_16(0), WGMMA_NAMES_16, "%16", "%17", "%18", "%19", "%20", "%21");
WGMMA(64, WGMMA_32(0), WGMMA_NAMES_32, "%32", "%33", "%34", "%35", "%36", "%37");
WGMMA(96, WGMMA_48(0), WGMMA_NAMES_48, "%48", "%49", "%50", "%51", "%52", "%53");
WGMMA(112, WGMMA_56(0), WGMMA_NAMES_56, "%56", "%57", "%58", "%59", "%60", "%61");
WGMMA(128, WGMMA_64(0), WGMMA_NAMES_64, "%64", "%65", "%66", "%67", "%68", "%69");
WGMMA(192, WGMMA_96(0), WGMMA_NAMES_96, "%96", "%97", "%98", "%99", "%100", "%101");
WGMMA(224, WGMMA_112(0), WGMMA_NAMES_112, "%112", "%113", "%114", "%115", "%116", "%117");
WGMMA(256, WGMMA_128(0), WGMMA_NAMES_128, "%128", "%129", "%130", "%131", "%132", "%133");

// What this thread has written to shared memory becomes visible to products, once a barrier has told others.
__device__ __forceinline__ void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// What this thread has initialised, other blocks of the cluster may use after the next barrier of the cluster.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives at a barrier in any block of the cluster; `barrier` is an address of `cluster_address`. It does not publish what this thread wrote to
// memory of other blocks.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once this thread's copies so far are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase of that parity has completed.
__device__ __forceinline__ bool barrier_done(uint64_t* barrier, int parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
    while (!barrier_done(barrier, parity)) {
    }
}

// A barrier of one warp group.
__device__ __forceinline__ void group_sync(int id) { named_sync<kWarpGroup>(id); }

template <int Registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

#endif
