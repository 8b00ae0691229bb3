//! Weights in MXFP4, as the kernels take them (`kernels/include/experts.cuh`).

use std::ops::Range;

use plimsoll_kernels::cuda::mxfp4_word;

use super::super::layout::Element;
use super::Job;
use super::windows::Windows;
use crate::ModelError;
use crate::quantization::MXFP4_BLOCK;
use crate::weights::Tensor;

/// The largest exponent that the kernels of experts widen exactly; see `widen_e2m1` of `kernels/include/experts.cuh`.
const MOST_EXPONENT: u8 = 192;

impl Job<'_> {
    /// Rows, of which whole [`Element::rows_together`] are written at once: windows of codes, and then exponents.
    pub(super) fn write_mxfp4(
        &self,
        exponents: &Tensor<'_>,
        inputs: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        let [code_bytes, exponent_bytes] = [inputs / 2, inputs / MXFP4_BLOCK];
        let windows = Windows::new(self.part.element, inputs);
        for (at, row) in rows.enumerate() {
            let stored = &self.tensor.data[self.tensor.order.stored(row) * code_bytes..][..code_bytes];
            let octets = stored.as_chunks().0;
            let octet = |at: usize| octets.get(at).map_or(0, |octet| u32::from_le_bytes(*octet));
            windows.write(at, octet, mxfp4_word, out);
            let stored = exponents.order.stored(row) * exponent_bytes;
            let (own, padding) = out[windows.behind(at)].split_at_mut(exponent_bytes);
            own.copy_from_slice(&exponents.data[stored..][..exponent_bytes]);
            padding.fill(0);
            if let Some(exponent) = own.iter().find(|exponent| **exponent > MOST_EXPONENT) {
                return Err(ModelError::Weights {
                    name: exponents.name.clone(),
                    message: format!(
                        "row {row} has an exponent of {exponent}; up to {MOST_EXPONENT}, weights of 2^66, are supported on GPUs"
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The e2m1 code of a pair of a word.
fn code(word: u32, pair: usize, odd: usize) -> u32 {
    /// Of the code that is even, from the sign down. Those of the other are half a word away.
    const BITS: [[u32; 4]; 4] = [[15, 8, 7, 6], [18, 11, 10, 9], [21, 14, 13, 12], [3, 1, 0, 4]];
    let own = word.rotate_right(16 * odd as u32);
    BITS[pair].iter().fold(0, |code, bit| code << 1 | own >> bit & 1)
}

/// `inputs` elements of each row of [`Element::Mxfp4`] as the kernels take it, for oracles.
pub(in super::super) fn widen_mxfp4(rows: &[u8], inputs: usize) -> Vec<Vec<f32>> {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let windows = Windows::new(Element::Mxfp4, inputs);
    let element = |row: usize, input: usize| {
        let (word, pair, odd) = windows.find(rows, row, input);
        let code = code(word, pair, odd);
        let value = VALUES[(code & 7) as usize] * if code & 8 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(rows[windows.behind(row)][input / MXFP4_BLOCK]) - 127;
        value * f64::from(exponent).exp2() as f32
    };
    let row = |row: usize| (0..inputs).map(|input| element(row, input)).collect();
    (0..windows.rows(rows.len())).map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use plimsoll_kernels::WeightType;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::super::super::layout::{Part, Stored};
    use super::*;
    use crate::blocks::{Among, InExperts, Matrix, RowOrder, StoredAs};
    use crate::quantization::MatrixFormat;
    use crate::weights::Checked;
    use crate::weights::int4_tests::Tensors;

    /// Row 9 of 16 of 96 inputs: the second of the second eight, in two windows.
    #[test]
    fn codes_and_exponents_have_these_places() {
        let windows = Windows::new(Element::Mxfp4, 96);
        let row_bytes = 2 * 32 + 16;
        for (input, byte_of_word, bit) in [
            // The lowest bits of codes, which are those of mantissas.
            (0, 0, 6),
            (1, 0, 6 + 16),
            (8, 0, 9),
            (17, 0, 12 + 16),
            (24, 0, 4),
            (2, 2 * 4, 6),
            (31, 6 * 4, 4 + 16),
            (32, 4, 6),
            (63, 7 * 4, 4 + 16),
            (64, 256, 6),
            (95, 256 + 6 * 4, 4 + 16),
        ] {
            let mut out = vec![0; 16 * row_bytes];
            let octet = |at: usize| if at == input / 8 { 1 << (input % 8 * 4) } else { 0 };
            windows.write(9, octet, mxfp4_word, &mut out);
            let mut want = vec![0; 16 * row_bytes];
            let first = 8 * row_bytes + 32 + byte_of_word;
            want[first..first + 4].copy_from_slice(&(1_u32 << bit).to_le_bytes());
            assert_eq!(out, want, "input {input}");
        }
        let exponents = 8 * row_bytes + 2 * 256;
        assert_eq!(windows.behind(9), exponents + 16..exponents + 32);
        assert_eq!(windows.behind(15).end, 16 * row_bytes);
    }

    #[test]
    fn words_have_the_codes_they_are_made_of() {
        for codes in [0x7654_3210, 0xfedc_ba98, 0x0f1e_2d3c, 1, 1 << 31] {
            let word = mxfp4_word(codes);
            let found = (0..8).fold(0, |found, at| found | code(word, at / 2, at % 2) << (4 * at));
            assert_eq!(found, codes, "{codes:x}");
        }
    }

    /// Codes and exponents of experts that have two matrices each, whose rows take turns.
    fn tensors(shape: [usize; 3], codes: &[u8], exponents: &[u8]) -> Tensors {
        let [experts, all, inputs] = shape;
        let shape = vec![experts, all, inputs / MXFP4_BLOCK];
        let blocks = [&shape[..], &[MXFP4_BLOCK / 2]].concat();
        Tensors(BTreeMap::from([
            (
                "experts_blocks".to_owned(),
                (WeightType::U8, blocks, codes.to_vec()),
            ),
            (
                "experts_scales".to_owned(),
                (WeightType::U8, shape, exponents.to_vec()),
            ),
        ]))
    }

    /// One of those matrices.
    fn part([count, all, inputs]: [usize; 3], index: usize, first: usize) -> Part {
        let rows = Among { first, step: 2, all };
        Part {
            stored: Stored::Matrix(Matrix {
                module: format!("experts.{index}.up_proj"),
                outputs: all / 2,
                inputs,
                format: MatrixFormat::Mxfp4,
                order: RowOrder::Plain,
                expert: Some(InExperts {
                    stacked: "experts".to_owned(),
                    index,
                    count,
                    rows,
                    transposed: false,
                }),
                stored_as: StoredAs::Weight,
                share: None,
            }),
            element: Element::Mxfp4,
            start: 0,
            scales: None,
            order: None,
        }
    }

    /// To the bit, in pieces of any eights of rows. What fills up windows and exponents is 0.
    #[test]
    fn rows_keep_their_values() {
        const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (outputs, inputs) = (8 * rng.random_range(1..20), 32 * rng.random_range(1..40));
            let shape @ [count, all, _] = [3, 2 * outputs, inputs];
            let rows = count * all;
            let codes: Vec<u8> = (0..rows * inputs / 2).map(|_| rng.random()).collect();
            let exponents = (0..rows * inputs / 32).map(|_| rng.random_range(0..=MOST_EXPONENT));
            let exponents: Vec<u8> = exponents.collect();
            let tensors = tensors(shape, &codes, &exponents);
            let (index, first) = (rng.random_range(0..count), rng.random_range(0..2));
            let part = part(shape, index, first);
            let job = Job::new(&mut Checked::new(&tensors), &part).unwrap();
            let step = 8 * rng.random_range(1..=outputs / 8);
            for start in (0..outputs).step_by(step) {
                let rows = start..outputs.min(start + step);
                let mut out = vec![0xff; rows.len() * part.row_bytes()];
                job.write_rows(rows.clone(), &mut out, &mut Vec::new()).unwrap();
                let found = widen_mxfp4(&out, inputs);
                assert_eq!(found.len(), rows.len());
                for (row, found) in rows.zip(found) {
                    let row = index * all + first + 2 * row;
                    let element = |input: usize| {
                        let byte = codes[row * inputs / 2 + input / 2];
                        let code = usize::from(byte >> (4 * (input % 2)) & 15);
                        let exponent = f64::from(exponents[row * inputs / 32 + input / 32]) - 127.0;
                        let sign = if code < 8 { 1.0 } else { -1.0 };
                        (sign * VALUES[code % 8] * exponent.exp2()) as f32
                    };
                    let want: Vec<f32> = (0..inputs).map(element).collect();
                    assert_eq!(found, want, "seed {seed}, row {row}");
                }
                check_filling(&out, inputs);
            }
        }
    }

    fn check_filling(out: &[u8], inputs: usize) {
        let [windows, exponents] = [inputs.div_ceil(64) * 256, (inputs / 32).next_multiple_of(16)];
        for eight in out.chunks_exact(windows + 8 * exponents) {
            let (codes, beside) = eight.split_at(windows);
            let mut past = beside.chunks_exact(exponents).flat_map(|own| &own[inputs / 32..]);
            assert!(past.all(|&byte| byte == 0), "{inputs} inputs");
            if !inputs.is_multiple_of(64) {
                // Of each two words the second one.
                let mut past = codes[windows - 256..]
                    .chunks_exact(8)
                    .flat_map(|words| &words[4..]);
                assert!(past.all(|&byte| byte == 0), "{inputs} inputs");
            }
        }
    }

    #[test]
    fn exponents_that_kernels_do_not_take_are_named() {
        let shape = [1, 32, 32];
        let exponents = [[192; 22].as_slice(), &[193; 10]].concat();
        let tensors = tensors(shape, &[0; 32 * 16], &exponents);
        let job = Job::new(&mut Checked::new(&tensors), &part(shape, 0, 0)).unwrap();
        let write = |rows: Range<usize>| {
            let mut out = vec![0; rows.len() * job.part.row_bytes()];
            job.write_rows(rows, &mut out, &mut Vec::new())
        };
        write(0..8).unwrap();
        let error = write(8..16).unwrap_err().to_string();
        for said in ["experts_scales", "row 11", "193"] {
            assert!(error.contains(said), "{error}");
        }
    }
}
