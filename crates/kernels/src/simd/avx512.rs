use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, Simd};

/// AVX-512 with VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// # Safety
/// The CPU has the features named here.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx512>() }
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const ACCUMULATORS: usize = 16;
    const DOT_IS_BIASED: bool = true;

    op!(prefetch(from: *const u8) { _mm_prefetch::<_MM_HINT_T0>(from.cast()) });
    op!(splat(value: f32) -> __m512 { _mm512_set1_ps(value) });
    op!(load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) });
    op!(load_f16(from: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) });
    op!(load_bf16(from: *const bf16) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
    });
    op!(load_i8(from: *const i8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    });
    op!(store(to: *mut f32, value: __m512) { _mm512_storeu_ps(to, value) });
    op!(store_i8(to: *mut i8, value: __m512) {
        _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)))
    });
    op!(store_i16(to: *mut i16, value: __m512) {
        let quads = _mm512_shuffle_epi32::<0b11_01_10_00>(_mm512_cvtps_epi32(value));
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(quads))
    });
    op!(add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) });
    op!(sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) });
    op!(mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) });
    op!(div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) });
    op!(fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) });
    op!(max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) });
    op!(min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) });
    op!(zero_below(a: __m512, b: __m512, value: __m512) -> __m512 {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), value)
    });
    op!(pow2(n: __m512) -> __m512 {
        let n = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
    });
    op!(round(a: __m512) -> __m512 { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a) });
    op!(keep_below(a: __m512, n: usize, fill: __m512) -> __m512 {
        _mm512_mask_blend_ps(((1u32 << n.min(16)) - 1) as __mmask16, fill, a)
    });
    op!(splat_i(value: i32) -> __m512i { _mm512_set1_epi32(value) });
    op!(load_bytes(from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) });
    op!(low_nibbles(v: __m512i) -> __m512i { _mm512_and_si512(v, _mm512_set1_epi8(15)) });
    op!(high_nibbles(v: __m512i) -> __m512i {
        _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15))
    });
    op!(bit_pair_to_4<const PAIR: usize>(v: __m512i) -> __m512i {
        let moved = match PAIR {
            0 => _mm512_slli_epi16::<4>(v),
            1 => _mm512_slli_epi16::<2>(v),
            2 => v,
            _ => _mm512_srli_epi16::<2>(v),
        };
        _mm512_and_si512(moved, _mm512_set1_epi8(0x30))
    });
    op!(load_i8_i(from: *const i8) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())) });
    op!(store_bytes(to: *mut u8, bytes: __m512i) { _mm512_storeu_si512(to.cast(), bytes) });
    op!(scaled_words(bytes: __m512i, offset: i16, scale: __m512i) -> [__m512i; 2] {
        let scale = _mm512_mask_blend_epi16(0xaaaa_aaaa, scale, _mm512_slli_epi32::<16>(scale));
        let offset = _mm512_set1_epi16(offset);
        let even = _mm512_and_si512(bytes, _mm512_set1_epi16(255));
        let odd = _mm512_srli_epi16::<8>(bytes);
        [
            _mm512_mullo_epi16(_mm512_sub_epi16(even, offset), scale),
            _mm512_mullo_epi16(_mm512_sub_epi16(odd, offset), scale),
        ]
    });
    op!(add_i(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) });
    op!(mul_i(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) });
    op!(times_128(a: __m512i) -> __m512i { _mm512_slli_epi32::<7>(a) });
    op!(or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) });
    op!(dot4(acc: __m512i, w: __m512i, x: i32) -> __m512i { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)) });
    op!(dot4_biased(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x))
    });
    op!(dot2(acc: __m512i, w: __m512i, x: i32) -> __m512i { _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x)) });
    op!(to_f32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) });
    op!(sum(a: __m512) -> f32 {
        let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    });
    op!(largest(a: __m512) -> f32 {
        // The maximum is its second operand where either is NaN.
        let a = _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(a, a), _mm512_set1_ps(f32::NEG_INFINITY), a);
        let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
        let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
    });
}
