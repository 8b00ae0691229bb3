//! Sixteen-lane vectors, written once per instruction set; the operations are generic over [`Simd`] and [`dispatch`]
//! picks the instruction set at run time.
//!
//! Every implementation rounds alike: multiplications and additions are IEEE, `fma` is fused everywhere and reductions
//! add in one fixed tree. So an operation gives the same bits on AVX-512, AVX2 and plain scalar code.

/// Bodies of intrinsics: every function of the trait is unsafe for the same two reasons.
#[cfg(target_arch = "x86_64")]
macro_rules! op {
    ($name:ident$(<const $c:ident: usize>)?($($arg:ident: $ty:ty),*) $(-> $out:ty)? $body:block) => {
        #[inline(always)]
        unsafe fn $name$(<const $c: usize>)?($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the caller promised the CPU features and valid pointers.
            unsafe { $body }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod in_place;
mod math;
mod scalar;

use std::sync::OnceLock;

use half::{bf16, f16};

pub(crate) use in_place::{InPlace, Lanes};
pub(crate) use math::{exp, times_sigmoid};
pub(crate) use scalar::Scalar;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen lanes of `f32` ([`Simd::F`]) or of `i32` / 64 bytes ([`Simd::I`]).
///
/// # Safety
/// All functions need the CPU features of the implementing type, which [`dispatch`] has checked; pointers must be valid
/// for sixteen elements (64 bytes for `load_bytes`), at any alignment.
pub(crate) trait Simd: Copy {
    type F: Copy;
    type I: Copy;
    /// Vectors of accumulators that fit the registers beside eight vectors of operands.
    const ACCUMULATORS: usize;
    /// [`Simd::dot4_biased`] takes bytes as unsigned and leaves `128 × Σx` to subtract.
    const DOT_IS_BIASED: bool;

    /// Asks for the cache line of `from`, which need not be valid.
    unsafe fn prefetch(from: *const u8);
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn load_f16(from: *const f16) -> Self::F;
    unsafe fn load_bf16(from: *const bf16) -> Self::F;
    /// Sixteen `i8`.
    unsafe fn load_i8(from: *const i8) -> Self::F;
    unsafe fn store(to: *mut f32, value: Self::F);
    /// Whole numbers in -127..=127.
    unsafe fn store_i8(to: *mut i8, value: Self::F);
    /// Whole numbers in -32768..=32767, each four in the order 0, 2, 1, 3, as [`Simd::dot2`] takes them.
    unsafe fn store_i16(to: *mut i16, value: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a × b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger, or `b` where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller, or `b` where either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// `value` where `a >= b`, else 0.
    unsafe fn zero_below(a: Self::F, b: Self::F, value: Self::F) -> Self::F;
    /// `2^n` for whole `n` in -126..=127.
    unsafe fn pow2(n: Self::F) -> Self::F;
    /// To the nearest whole number, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `a` in lanes below `n`, `fill` in the others.
    unsafe fn keep_below(a: Self::F, n: usize, fill: Self::F) -> Self::F;

    unsafe fn splat_i(value: i32) -> Self::I;
    unsafe fn load_bytes(from: *const u8) -> Self::I;
    /// The lower four bits of each byte.
    unsafe fn low_nibbles(bytes: Self::I) -> Self::I;
    /// The upper four bits of each byte.
    unsafe fn high_nibbles(bytes: Self::I) -> Self::I;
    /// Bits `2i` and `2i + 1` of each byte, moved to bits 4 and 5.
    unsafe fn bit_pair_to_4<const PAIR: usize>(bytes: Self::I) -> Self::I;
    /// Sixteen `i8`, widened to lanes.
    unsafe fn load_i8_i(from: *const i8) -> Self::I;
    /// All 64 bytes.
    unsafe fn store_bytes(to: *mut u8, bytes: Self::I);
    /// Per lane, the four `(byte - offset) × scale` in 16 bits, where they must fit: those of bytes 0 and 2, and of 1 and 3.
    unsafe fn scaled_words(bytes: Self::I, offset: i16, scale: Self::I) -> [Self::I; 2];
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// The lower 32 bits of each product.
    unsafe fn mul_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn times_128(a: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Per lane, `acc + Σ w × x` over the four bytes `w` (0..=127) of the lane and the four `i8` of `x`.
    unsafe fn dot4(acc: Self::I, w: Self::I, x: i32) -> Self::I;
    /// As `dot4` with `w - 128` for `w` in 0..=255; see [`Simd::DOT_IS_BIASED`]. No `x` is -128.
    unsafe fn dot4_biased(acc: Self::I, w: Self::I, x: i32) -> Self::I;
    /// Per lane, `acc + Σ w × x` over the two `i16` of `w` and of `x`, of which no `x` is -32768.
    unsafe fn dot2(acc: Self::I, w: Self::I, x: i32) -> Self::I;
    unsafe fn to_f32(a: Self::I) -> Self::F;

    /// Sum of the lanes, halves first: lanes `i` and `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: as the caller promised; `lanes` has sixteen elements.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The largest lane that is a number, by halves: a chain of sixteen maxima would take longer than an exponential.
    #[inline(always)]
    unsafe fn largest(a: Self::F) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: as the caller promised; `lanes` has sixteen elements.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = lanes[i].max(lanes[i + half]);
            }
            half /= 2;
        }
        lanes[0].max(f32::NEG_INFINITY)
    }
}

/// An operation on vectors.
pub(crate) trait Kernel {
    /// What it returns.
    type Out;
    /// Runs it. Implementations are `#[inline(always)]`, so that they are compiled with the features of `S`.
    ///
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn run<S: Simd>(self) -> Self::Out;
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Any CPU.
    Scalar,
    /// AVX2, FMA and F16C: Haswell (2013), Zen 1.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI: Ice Lake (2019), Zen 4.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best this CPU has. The features are asked for one by one: virtual machines exist whose CPU model and
    /// feature bits disagree.
    pub(crate) fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| Self::available().pop().expect("scalar always is"))
    }

    /// What this CPU has, best last.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut levels = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 {
                levels.push(Self::Avx2);
                if avx512 {
                    levels.push(Self::Avx512);
                }
            }
        }
        levels
    }
}

/// Name of the instruction set in use, for logs and benchmark results.
pub fn instruction_set() -> &'static str {
    match Level::detect() {
        Level::Scalar => "scalar",
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => "avx2",
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => "avx512-vnni",
    }
}

/// Runs `kernel` compiled for `level`, which must come from [`Level::detect`] or [`Level::available`].
#[inline]
pub(crate) fn dispatch<K: Kernel>(level: Level, kernel: K) -> K::Out {
    match level {
        // SAFETY: needs nothing.
        Level::Scalar => unsafe { kernel.run::<Scalar>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was detected.
        Level::Avx2 => unsafe { avx2::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was detected.
        Level::Avx512 => unsafe { avx512::run(kernel) },
    }
}
