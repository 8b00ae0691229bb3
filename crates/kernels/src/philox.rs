//! Philox4x32-10, the counter-based generator of Salmon et al.,
//! [Parallel random numbers: as easy as 1, 2, 3](https://doi.org/10.1145/2063384.2063405): a draw is a pure function of a
//! key and a counter, so it depends neither on the batch nor on what was drawn before.

/// The block of four words for `counter` under `key`.
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let product = |a: u32, b: u32| {
        let wide = u64::from(a) * u64::from(b);
        ((wide >> 32) as u32, wide as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = product(MULTIPLIERS[0], counter[0]);
        let (high1, low1) = product(MULTIPLIERS[1], counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The draw of `(seed, index)`, uniform in [0, 1) with 53 bits: key `seed`, counter `index`, low words first.
pub(crate) fn uniform(seed: u64, index: u64) -> f64 {
    let words = |v: u64| [v as u32, (v >> 32) as u32];
    let [low, high] = words(index);
    let [a, b, ..] = philox4x32_10([low, high, 0, 0], words(seed));
    let bits = (u64::from(b) << 32 | u64::from(a)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123 (`kat_vectors`).
    #[test]
    fn known_answers() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, block) in cases {
            assert_eq!(philox4x32_10(counter, key), block);
        }
    }

    #[test]
    fn draws_are_uniform_and_independent_of_order() {
        let n = 100_000;
        let mut buckets = [0u32; 100];
        for index in 0..n {
            buckets[(uniform(7, index) * 100.0) as usize] += 1;
        }
        let expected = n as f64 / 100.0;
        let chi2: f64 = buckets
            .iter()
            .map(|&b| (f64::from(b) - expected).powi(2) / expected)
            .sum();
        // 99 degrees of freedom: beyond 160 with probability 1e-4.
        assert!(chi2 < 160.0, "chi² {chi2}");
        assert_eq!(uniform(7, 3).to_bits(), uniform(7, 3).to_bits());
        assert_ne!(uniform(7, 3), uniform(8, 3));
    }
}
