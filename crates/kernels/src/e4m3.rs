//! Eight-bit floats of one sign, four exponent and three fraction bits, without infinities: E4M3 of
//! [FP8 formats for deep learning](https://arxiv.org/abs/2209.05433), safetensors' `F8_E4M3`.

/// The largest finite value.
pub const E4M3_MAX: f32 = 448.0;

/// Values of all codes.
static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = decode(code as u32);
        code += 1;
    }
    values
}

const fn decode(code: u32) -> f32 {
    let (exponent, fraction) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        // Subnormal: multiples of 2^-9.
        (0, _) => fraction as f32 / 512.0,
        // The exponents' biases are 7 and 127.
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    match code >> 7 {
        0 => magnitude,
        _ => -magnitude,
    }
}

/// The value of a code. Exact.
pub fn e4m3_to_f32(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The nearest code, ties to even; magnitudes above [`E4M3_MAX`] become that. Without a branch, so that loops over it use
/// vectors.
pub fn e4m3_from_f32(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    // Not `min`, which loses a NaN.
    let magnitude = value.abs();
    let bounded = if magnitude > E4M3_MAX { E4M3_MAX } else { magnitude };
    // A unit in the last place of 2^14 is 2^-9, the smallest subnormal: the addition rounds to multiples of it.
    const ROUND: f32 = 16384.0;
    let subnormal = (bounded + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
    let bits = bounded.to_bits();
    let tie = bits >> 20 & 1;
    let normal = (bits.wrapping_add(0x7_ffff + tie) >> 20).wrapping_sub(120 << 3);
    const LEAST_NORMAL: f32 = 1.0 / 64.0;
    let code = if bounded < LEAST_NORMAL { subnormal } else { normal };
    let code = if value.is_nan() { 0x7f } else { code as u8 };
    sign | code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition, in `f64`.
    fn nearest(value: f32) -> u8 {
        let magnitude = f64::from(value.abs()).min(448.0);
        let distance = |code: u8| (f64::from(e4m3_to_f32(code)) - magnitude).abs();
        // Of two at the same distance, the even code.
        let code = (0..0x7f).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
        code.unwrap() | if value.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn codes_have_the_values_of_the_paper() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0xb8, -1.0),
        ] {
            assert_eq!(e4m3_to_f32(code), value, "{code:#x}");
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_to_even() {
        let codes = (0..=255).filter(|code| code & 0x7f != 0x7f);
        for code in codes.clone() {
            assert_eq!(e4m3_from_f32(e4m3_to_f32(code)), code, "{code:#x}");
        }
        let values = codes.flat_map(|code| {
            let (value, next) = (e4m3_to_f32(code), e4m3_to_f32(code.saturating_add(1)));
            let middle = if next.is_nan() {
                value
            } else {
                (value + next) / 2.0
            };
            [value, middle]
        });
        let neighbours = values.flat_map(|value| {
            let bits = value.to_bits();
            [bits.saturating_sub(1), bits, bits + 1].map(f32::from_bits)
        });
        let mut bits = 1_u32;
        let random = std::iter::repeat_with(|| {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(bits)
        });
        let random = random.filter(|value| value.is_finite()).take(20_000);
        let uniform = (0..40_000).map(|i| (i as f32 - 20_000.0) / 40.0);
        for value in neighbours
            .filter(|value| !value.is_nan())
            .chain(random)
            .chain(uniform)
        {
            assert_eq!(e4m3_from_f32(value), nearest(value), "{value:e}");
        }
        for (value, code) in [(f32::INFINITY, 0x7e), (f32::NEG_INFINITY, 0xfe), (1e9, 0x7e)] {
            assert_eq!(e4m3_from_f32(value), code);
        }
        assert_eq!(e4m3_from_f32(f32::NAN) & 0x7f, 0x7f);
    }
}
