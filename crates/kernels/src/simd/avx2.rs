use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, Simd};

/// AVX2 with FMA and F16C; a vector is two registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// # Safety
/// The CPU has the features named here.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx2>() }
}

/// The same for both registers. Not closures: those would not be compiled with the features of the kernel.
macro_rules! both {
    ($($v:ident),+ => $value:expr) => {
        [{ $(let $v = $v[0];)+ $value }, { $(let $v = $v[1];)+ $value }]
    };
}

type F = [__m256; 2];
type I = [__m256i; 2];

impl Simd for Avx2 {
    type F = F;
    type I = I;
    const ACCUMULATORS: usize = 4;
    const DOT_IS_BIASED: bool = false;

    op!(prefetch(from: *const u8) { _mm_prefetch::<_MM_HINT_T0>(from.cast()) });
    op!(splat(value: f32) -> F { [_mm256_set1_ps(value); 2] });
    op!(load(from: *const f32) -> F { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] });
    op!(load_f16(from: *const f16) -> F {
        let from: *const __m128i = from.cast();
        [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))]
    });
    op!(load_bf16(from: *const bf16) -> F {
        let from: *const __m128i = from.cast();
        let v = [_mm_loadu_si128(from), _mm_loadu_si128(from.add(1))];
        both!(v => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v))))
    });
    op!(load_i8(from: *const i8) -> F {
        let v = [_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast())];
        both!(v => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)))
    });
    op!(store(to: *mut f32, value: F) {
        _mm256_storeu_ps(to, value[0]);
        _mm256_storeu_ps(to.add(8), value[1])
    });
    op!(store_i8(to: *mut i8, value: F) {
        let v = both!(value => {
            let v = _mm256_cvtps_epi32(value);
            _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v))
        });
        _mm_storeu_si128(to.cast(), _mm_packs_epi16(v[0], v[1]))
    });
    op!(store_i16(to: *mut i16, value: F) {
        let v = both!(value => {
            let v = _mm256_shuffle_epi32::<0b11_01_10_00>(_mm256_cvtps_epi32(value));
            _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v))
        });
        _mm_storeu_si128(to.cast(), v[0]);
        _mm_storeu_si128(to.add(8).cast(), v[1])
    });
    op!(add(a: F, b: F) -> F { both!(a, b => _mm256_add_ps(a, b)) });
    op!(sub(a: F, b: F) -> F { both!(a, b => _mm256_sub_ps(a, b)) });
    op!(mul(a: F, b: F) -> F { both!(a, b => _mm256_mul_ps(a, b)) });
    op!(div(a: F, b: F) -> F { both!(a, b => _mm256_div_ps(a, b)) });
    op!(fma(a: F, b: F, c: F) -> F { both!(a, b, c => _mm256_fmadd_ps(a, b, c)) });
    op!(max(a: F, b: F) -> F { both!(a, b => _mm256_max_ps(a, b)) });
    op!(min(a: F, b: F) -> F { both!(a, b => _mm256_min_ps(a, b)) });
    op!(zero_below(a: F, b: F, value: F) -> F {
        both!(a, b, value => _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b), value))
    });
    op!(pow2(n: F) -> F {
        both!(n => {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    });
    op!(round(a: F) -> F {
        both!(a => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    });
    op!(keep_below(a: F, n: usize, fill: F) -> F {
        let n = n.min(16) as i32;
        let lane = [_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)];
        both!(a, fill, lane => {
            let keep = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
            _mm256_blendv_ps(fill, a, keep)
        })
    });
    op!(splat_i(value: i32) -> I { [_mm256_set1_epi32(value); 2] });
    op!(load_bytes(from: *const u8) -> I {
        let from: *const __m256i = from.cast();
        [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))]
    });
    op!(low_nibbles(v: I) -> I { both!(v => _mm256_and_si256(v, _mm256_set1_epi8(15))) });
    op!(high_nibbles(v: I) -> I {
        both!(v => _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)))
    });
    op!(bit_pair_to_4<const PAIR: usize>(v: I) -> I {
        both!(v => {
            let moved = match PAIR {
                0 => _mm256_slli_epi16::<4>(v),
                1 => _mm256_slli_epi16::<2>(v),
                2 => v,
                _ => _mm256_srli_epi16::<2>(v),
            };
            _mm256_and_si256(moved, _mm256_set1_epi8(0x30))
        })
    });
    op!(load_i8_i(from: *const i8) -> I {
        let v = [_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast())];
        both!(v => _mm256_cvtepi8_epi32(v))
    });
    op!(store_bytes(to: *mut u8, bytes: I) {
        _mm256_storeu_si256(to.cast(), bytes[0]);
        _mm256_storeu_si256(to.add(32).cast(), bytes[1])
    });
    op!(scaled_words(bytes: I, offset: i16, scale: I) -> [I; 2] {
        let scale = both!(scale => _mm256_blend_epi16::<0b1010_1010>(scale, _mm256_slli_epi32::<16>(scale)));
        let offset = _mm256_set1_epi16(offset);
        [
            both!(bytes, scale => {
                let even = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
                _mm256_mullo_epi16(_mm256_sub_epi16(even, offset), scale)
            }),
            both!(bytes, scale => {
                let odd = _mm256_srli_epi16::<8>(bytes);
                _mm256_mullo_epi16(_mm256_sub_epi16(odd, offset), scale)
            }),
        ]
    });
    op!(add_i(a: I, b: I) -> I { both!(a, b => _mm256_add_epi32(a, b)) });
    op!(mul_i(a: I, b: I) -> I { both!(a, b => _mm256_mullo_epi32(a, b)) });
    op!(times_128(a: I) -> I { both!(a => _mm256_slli_epi32::<7>(a)) });
    op!(or(a: I, b: I) -> I { both!(a, b => _mm256_or_si256(a, b)) });
    // `maddubs` adds pairs in 16 bits: 2 × 127 × 127 fits.
    op!(dot4(acc: I, w: I, x: i32) -> I {
        let x = _mm256_set1_epi32(x);
        both!(acc, w => {
            let pairs = _mm256_maddubs_epi16(w, x);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    });
    // |w| × (x with the sign of w): 2 × 128 × 127 still fits.
    op!(dot4_biased(acc: I, w: I, x: i32) -> I {
        let x = _mm256_set1_epi32(x);
        both!(acc, w => {
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    });
    op!(dot2(acc: I, w: I, x: i32) -> I {
        let x = _mm256_set1_epi32(x);
        both!(acc, w => _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)))
    });
    op!(to_f32(a: I) -> F { both!(a => _mm256_cvtepi32_ps(a)) });
}
