//! Words of codes in MXFP4, of which kernels make `bf16` with few instructions (`widen_e2m1` of `kernels/include/experts.cuh`).

/// For each byte with a pair of codes, the word that has this pair and zeros.
static FIRST_PAIR: [u32; 256] = words([15, 8, 7, 6]);
static LAST_PAIR: [u32; 256] = words([3, 1, 0, 4]);

/// The second and the third pair are rotated by so many bits more than the one before.
const ROTATION: u32 = 3;

/// Of bytes that have an even code in their low four bits and an odd one in the others. `bits` are the places of the sign, both bits of
/// the exponent and that of the mantissa of even codes; those of odd ones are 16 further.
const fn words(bits: [u32; 4]) -> [u32; 256] {
    let mut words = [0; 256];
    let mut byte = 0;
    while byte < words.len() {
        let mut bit = 0;
        while bit < 8 {
            let is_set = (byte >> bit & 1) as u32;
            words[byte] |= is_set << (bits[3 - bit % 4] + 16 * (bit / 4) as u32);
            bit += 1;
        }
        byte += 1;
    }
    words
}

/// The word of the eight e2m1 codes that a lane has of 32 inputs. Each byte of `pairs` is a pair: the even code in its low four bits, the
/// odd one in the others.
#[inline]
pub fn mxfp4_word(pairs: u32) -> u32 {
    let [first, second, third, last] = pairs.to_le_bytes().map(usize::from);
    FIRST_PAIR[first]
        | FIRST_PAIR[second].rotate_left(ROTATION)
        | FIRST_PAIR[third].rotate_left(2 * ROTATION)
        | LAST_PAIR[last]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bit_of_a_word_is_one_of_a_code() {
        let mut taken = 0;
        for bit in 0..32 {
            let word = mxfp4_word(1 << bit);
            assert!(word.is_power_of_two() && taken & word == 0, "{bit}: {word:x}");
            taken |= word;
        }
        assert_eq!(taken, u32::MAX);
    }

    /// As `widen_e2m1` takes it: sign and magnitude of both codes of a pair where `bf16` has them, which has 7 bits of mantissa.
    #[test]
    fn kernels_find_every_code() {
        for byte in 0..=255_u8 {
            let [even, odd] = [byte & 15, byte >> 4].map(|code| {
                let code = u32::from(code);
                (code & 8) << 12 | (code & 7) << 6
            });
            for pair in 0..4 {
                // The others must not show.
                let others = !(0xff << (8 * pair));
                for around in [0, others, 0x5a69_c3b4 & others] {
                    let word = mxfp4_word(u32::from(byte) << (8 * pair) | around);
                    let bits = match pair {
                        3 => (word & 0x001b_001b).wrapping_mul(1 << 12 | 1 << 7 | 1 << 2),
                        _ => word.rotate_right(3 * pair),
                    };
                    assert_eq!(bits & 0x81c0_81c0, odd << 16 | even, "{byte:x} as pair {pair}");
                }
            }
        }
    }
}
