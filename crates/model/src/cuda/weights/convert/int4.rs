//! Integers of four bits, as the kernels take them (`kernels/include/int4.cuh`, `kernels/include/experts.cuh`).

use std::ops::Range;

use plimsoll_kernels::cuda::{INT4_WINDOW, Int4Group};

use super::super::layout::{Element, KeptScales, Part, Stored};
use super::Job;
use super::windows::Windows;
use crate::ModelError;
use crate::blocks::Matrix;
use crate::quantization::INT4_WORD;
use crate::weights::{Int4, int4_code};

/// Where the words of groups lie among those of all rows.
#[derive(Clone, Copy)]
struct GroupWords {
    /// Rows that lie together.
    together: usize,
    /// Windows of [`INT4_WINDOW`] inputs of a row.
    windows: usize,
    /// Of a window.
    count: usize,
}

impl GroupWords {
    fn new(element: Element, group: Int4Group, inputs: usize) -> Self {
        Self {
            together: match element {
                // Only their codes lie together.
                Element::ExpertInt4 => 1,
                _ => element.rows_together(),
            },
            windows: inputs.div_ceil(INT4_WINDOW),
            count: INT4_WINDOW / group.inputs(),
        }
    }

    /// Where those of a window of a row lie.
    fn of_window(self, row: usize, window: usize) -> Range<usize> {
        let among = (row / self.together * self.windows + window) * self.together + row % self.together;
        among * self.count..(among + 1) * self.count
    }
}

/// A word of the codes of four pairs, each of which is a byte: the even ones in the lower half, the odd ones in the upper.
fn int4_word(pairs: u32) -> u32 {
    let together = |codes: u32| {
        let pairs = (codes | codes >> 4) & 0x00ff_00ff;
        (pairs | pairs >> 8) & 0xffff
    };
    together(pairs & 0x0f0f_0f0f) | together(pairs >> 4 & 0x0f0f_0f0f) << 16
}

/// Which input of a matrix in four bits each is on the device: groups one after the other.
pub(super) fn input_order(int4: &Int4<'_>, part: &Part, name: &str) -> Result<Option<Vec<u32>>, ModelError> {
    let Stored::Matrix(Matrix {
        inputs, ref expert, ..
    }) = part.stored
    else {
        unreachable!("vectors have no groups")
    };
    let refuse = |message: &str| {
        Err(ModelError::Weights {
            name: name.to_owned(),
            message: format!("{message}; --device cpu takes it"),
        })
    };
    let mut order: Vec<u32> = (0..inputs as u32).collect();
    match (int4.order(), part.order) {
        (Some(_), None) if expert.is_some() => {
            return refuse("its inputs are in another order, which experts cannot have on a GPU");
        }
        (Some(_), None) => {
            return refuse("its inputs are in another order, of which the configuration says nothing");
        }
        (None, None) => return Ok(None),
        (None, Some(_)) => {}
        (Some(groups), Some(_)) => {
            order.sort_by_key(|&input| groups[input as usize]);
            let size = int4.group_inputs();
            let mut placed = order.iter().enumerate();
            if placed.any(|(place, &input)| groups[input as usize] != place / size) {
                return refuse("its groups are not all of one size, as they are on a GPU");
            }
        }
    }
    Ok(Some(order))
}

impl Job<'_> {
    /// Rows, of which whole [`Element::rows_together`] are written at once: words of codes, and a word for each group.
    pub(super) fn write_int4(
        &self,
        int4: &Int4<'_>,
        rows: Range<usize>,
        out: &mut [u8],
        words: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let (Stored::Matrix(Matrix { inputs, .. }), Some(KeptScales::Int4(group))) =
            (&self.part.stored, self.part.kept())
        else {
            unreachable!("what has codes of four bits has groups")
        };
        let inputs = *inputs;
        let windows = Windows::new(self.part.element, inputs);
        let group_words = GroupWords::new(self.part.element, group, inputs);
        let mut unpacked = Vec::new();
        int4.unpack(&self.tensor, rows.clone(), &mut unpacked);
        let mut ordered = vec![0; inputs / INT4_WORD];
        let first_word = words.len();
        words.resize(first_word + rows.len() * group.stride(inputs), 0.0);
        let words = &mut words[first_word..];
        for (at, (row, codes)) in rows.zip(unpacked.chunks_exact(inputs / INT4_WORD)).enumerate() {
            let mut codes = codes;
            if let Some(order) = &self.order {
                for (word, inputs) in ordered.iter_mut().zip(order.as_chunks::<INT4_WORD>().0) {
                    let code =
                        |place: usize| u32::from(int4_code(codes, inputs[place] as usize)) << (4 * place);
                    *word = (0..INT4_WORD).fold(0, |word, place| word | code(place));
                }
                codes = &ordered;
            }
            let groups = int4.groups(self.tensor.order, row)?;
            // Padding of the last window may be anything.
            let octet = |at: usize| codes.get(at).copied().unwrap_or(0);
            windows.write(at, octet, int4_word, out);
            let size = int4.group_inputs();
            for window in 0..group_words.windows {
                let words = &mut words[group_words.of_window(at, window)];
                for (of_window, word) in words.iter_mut().enumerate() {
                    // Groups past the last input repeat the last one.
                    let first = window * INT4_WINDOW + of_window * group.inputs();
                    let of = groups[(first / size).min(groups.len() - 1)];
                    *word = f32::from_bits(Int4Group::word(of.scale, of.zero));
                }
            }
        }
        Ok(())
    }
}

/// `inputs` elements of each row of [`Element::Int4`] or [`Element::ExpertInt4`] as the kernels take it, for oracles, from all codes and
/// words of groups.
pub(in super::super) fn widen_int4(
    element: Element,
    codes: &[u8],
    words: &[u32],
    group: Int4Group,
    inputs: usize,
) -> Vec<Vec<f32>> {
    let windows = Windows::new(element, inputs);
    let group_words = GroupWords::new(element, group, inputs);
    let element = |row: usize, input: usize| {
        let (word, pair, odd) = windows.find(codes, row, input);
        let code = word >> (16 * odd + 4 * pair) & 15;
        let groups = group_words.of_window(row, input / INT4_WINDOW);
        let shared = words[groups.start + input % INT4_WINDOW / group.inputs()];
        (code as f32 - (shared & 15) as f32) * f32::from_bits(shared & !15)
    };
    let row = |row: usize| (0..inputs).map(|input| element(row, input)).collect();
    (0..windows.rows(codes.len())).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_four_bits_are_told_apart() {
        let bytes = [0x10, 0x32, 0x54, 0x76];
        assert_eq!(int4_word(u32::from_le_bytes(bytes)), 0x7531_6420);
    }

    /// Row 9 of 16, the second of the second eight.
    #[test]
    fn codes_have_these_places() {
        for (element, inputs, row_bytes, places) in [
            // A window of 128 inputs and a part of another.
            (
                Element::Int4,
                136,
                128,
                &[
                    (0, 0, 0),
                    (11, 4 * 4, 20),
                    (96, 3 * 4, 0),
                    (127, 15 * 4, 28),
                    (130, 512 + 4 * 4, 0),
                ][..],
            ),
            // Two of 64 inputs and a part of another.
            (
                Element::ExpertInt4,
                136,
                96,
                &[
                    (0, 0, 0),
                    (11, 2 * 4, 20),
                    (63, 7 * 4, 28),
                    (96, 256 + 4, 0),
                    (130, 512 + 2 * 4, 0),
                ][..],
            ),
        ] {
            let windows = Windows::new(element, inputs);
            let window_bytes = if element == Element::Int4 { 64 } else { 32 };
            for &(input, byte, bit) in places {
                let mut out = vec![0; 16 * row_bytes];
                let octet = |at: usize| if at == input / 8 { 1 << (input % 8 * 4) } else { 0 };
                windows.write(9, octet, int4_word, &mut out);
                let mut want = vec![0; 16 * row_bytes];
                let first = 8 * row_bytes + window_bytes + byte;
                want[first..first + 4].copy_from_slice(&(1_u32 << bit).to_le_bytes());
                assert_eq!(out, want, "{element:?}, input {input}");
            }
            assert!(windows.behind(9).is_empty());
        }
    }
}
