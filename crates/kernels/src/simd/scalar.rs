use half::{bf16, f16};

use super::{LANES, Simd};

/// Plain code; also the definition of what the other implementations do.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

macro_rules! lanes {
    ($i:ident => $value:expr) => {
        std::array::from_fn(|$i| $value)
    };
}

/// The byte `b` of lane `i`.
fn byte(v: &[i32; LANES], i: usize, b: usize) -> i32 {
    (v[i] >> (8 * b)) & 0xff
}

/// The two `i16` of a lane.
fn words(v: i32) -> [i32; 2] {
    [i32::from(v as i16), v >> 16]
}

fn bytes(v: [i32; LANES], f: impl Fn(u8) -> u8) -> [i32; LANES] {
    lanes!(i => i32::from_le_bytes(v[i].to_le_bytes().map(&f)))
}

// SAFETY (all blocks): the caller promised sixteen valid elements.
impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    const ACCUMULATORS: usize = 4;
    const DOT_IS_BIASED: bool = false;

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::F {
        // SAFETY: see above.
        let from = unsafe { from.cast::<[f16; LANES]>().read_unaligned() };
        lanes!(i => from[i].to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        let from = unsafe { from.cast::<[bf16; LANES]>().read_unaligned() };
        lanes!(i => from[i].to_f32())
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: see above.
        let from = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        lanes!(i => f32::from(from[i]))
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: see above.
        unsafe { to.cast::<Self::F>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, value: Self::F) {
        // SAFETY: see above.
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(value.map(|v| v as i8)) }
    }

    #[inline(always)]
    unsafe fn store_i16(to: *mut i16, value: Self::F) {
        let ordered: [i16; LANES] = lanes!(i => value[i & !3 | [0, 2, 1, 3][i % 4]] as i16);
        // SAFETY: see above.
        unsafe { to.cast::<[i16; LANES]>().write_unaligned(ordered) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn zero_below(a: Self::F, b: Self::F, value: Self::F) -> Self::F {
        lanes!(i => if a[i] >= b[i] { value[i] } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn pow2(n: Self::F) -> Self::F {
        lanes!(i => f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        lanes!(i => a[i].round_ties_even())
    }

    #[inline(always)]
    unsafe fn keep_below(a: Self::F, n: usize, fill: Self::F) -> Self::F {
        lanes!(i => if i < n { a[i] } else { fill[i] })
    }

    #[inline(always)]
    unsafe fn splat_i(value: i32) -> Self::I {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::I {
        // SAFETY: see above.
        let from = unsafe { from.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        lanes!(i => i32::from_le_bytes(from[i]))
    }

    #[inline(always)]
    unsafe fn low_nibbles(v: Self::I) -> Self::I {
        bytes(v, |b| b & 15)
    }

    #[inline(always)]
    unsafe fn high_nibbles(v: Self::I) -> Self::I {
        bytes(v, |b| b >> 4)
    }

    #[inline(always)]
    unsafe fn bit_pair_to_4<const PAIR: usize>(v: Self::I) -> Self::I {
        bytes(v, |b| (b >> (2 * PAIR) & 3) << 4)
    }

    #[inline(always)]
    unsafe fn load_i8_i(from: *const i8) -> Self::I {
        // SAFETY: see above.
        let from = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        lanes!(i => i32::from(from[i]))
    }

    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, bytes: Self::I) {
        // SAFETY: see above.
        unsafe {
            to.cast::<[[u8; 4]; LANES]>()
                .write_unaligned(bytes.map(i32::to_le_bytes))
        }
    }

    #[inline(always)]
    unsafe fn scaled_words(bytes: Self::I, offset: i16, scale: Self::I) -> [Self::I; 2] {
        [0, 1].map(|first| {
            lanes!(i => {
                let word = |b: usize| (byte(&bytes, i, b) - i32::from(offset)) * scale[i];
                word(first) & 0xffff | word(first + 2) << 16
            })
        })
    }

    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn mul_i(a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i].wrapping_mul(b[i]))
    }

    #[inline(always)]
    unsafe fn times_128(a: Self::I) -> Self::I {
        lanes!(i => a[i] * 128)
    }

    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn dot4(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| i32::from(b as i8));
        lanes!(i => acc[i] + (0..4).map(|b| byte(&w, i, b) * x[b]).sum::<i32>())
    }

    #[inline(always)]
    unsafe fn dot4_biased(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| i32::from(b as i8));
        lanes!(i => acc[i] + (0..4).map(|b| (byte(&w, i, b) - 128) * x[b]).sum::<i32>())
    }

    #[inline(always)]
    unsafe fn dot2(acc: Self::I, w: Self::I, x: i32) -> Self::I {
        let x = words(x);
        lanes!(i => {
            let w = words(w[i]);
            acc[i] + w[0] * x[0] + w[1] * x[1]
        })
    }

    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        lanes!(i => a[i] as f32)
    }
}
