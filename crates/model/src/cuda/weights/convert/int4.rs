//! Weights of four bits, as the kernels take them (`kernels/include/int4.cuh`).

use std::ops::Range;

use plimsoll_device::cast_slice_mut;
use plimsoll_kernels::cuda::{INT4_WINDOW, Int4Group};

use super::super::layout::{Element, KeptScales, Part, Stored};
use super::{Job, apart};
use crate::ModelError;
use crate::blocks::Matrix;
use crate::quantization::INT4_WORD;
use crate::weights::{Int4, int4_code};

/// A word whose eight codes are 1.
const EACH_CODE: u32 = 0x1111_1111;
/// Lanes of a product that share a row of weights; so many words have 32 neighbouring inputs.
const LANES: usize = 4;

/// Where codes and words of groups lie among those of all rows.
#[derive(Clone, Copy)]
struct Int4Places {
    element: Element,
    /// Groups in [`INT4_WINDOW`] inputs.
    groups: usize,
    inputs: usize,
}

impl Int4Places {
    fn new(element: Element, group: Int4Group, inputs: usize) -> Self {
        Self {
            element,
            groups: INT4_WINDOW / group.inputs(),
            inputs,
        }
    }

    /// Words of codes of a window of a row.
    fn window_words(self) -> usize {
        match self.element {
            Element::ExpertInt4 => 2 * LANES,
            _ => INT4_WINDOW / INT4_WORD,
        }
    }

    /// Windows of a row.
    fn windows(self) -> usize {
        self.inputs.div_ceil(self.window_words() * INT4_WORD)
    }

    /// Where the words of a window of a row lie.
    fn codes(self, row: usize, window: usize) -> Range<usize> {
        let words = self.window_words();
        let first = self.among(row, window, self.windows()) * words;
        first..first + words
    }

    /// Where the words of the groups of [`INT4_WINDOW`] inputs of a row lie.
    fn groups(self, row: usize, window: usize) -> Range<usize> {
        let first = self.among(row, window, self.inputs.div_ceil(INT4_WINDOW)) * self.groups;
        first..first + self.groups
    }

    /// The index of a window of a row among those of all rows.
    fn among(self, row: usize, window: usize, windows: usize) -> usize {
        let together = self.element.rows_together();
        (row / together * windows + window) * together + row % together
    }

    /// Writes a window, given its words of eight neighbouring inputs.
    fn write_window(self, word: impl Fn(usize) -> u32, out: &mut [u32]) {
        let parts = out.len() / LANES;
        for part in 0..parts {
            let words: [u32; LANES] = std::array::from_fn(|at| word(part * LANES + at));
            for lane in 0..LANES {
                out[lane * parts + part] = apart(match self.element {
                    Element::ExpertInt4 => words[lane],
                    _ => u32::from_le_bytes(words.map(|word| word.to_le_bytes()[lane])),
                });
            }
        }
    }

    /// The code of an input of a window.
    fn code(self, window: &[u32], input: usize) -> u32 {
        let parts = window.len() / LANES;
        let (part, eight, place) = (input / 32, input % 32 / 8, input % 8);
        let (lane, pair) = match self.element {
            Element::ExpertInt4 => (eight, place / 2),
            _ => (place / 2, eight),
        };
        window[lane * parts + part] >> (place % 2 * 16 + pair * 4) & 15
    }
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
        let places = Int4Places::new(self.part.element, group, inputs);
        let mut unpacked = Vec::new();
        int4.unpack(&self.tensor, rows.clone(), &mut unpacked);
        let mut ordered = vec![0; inputs / INT4_WORD];
        let out: &mut [u32] = cast_slice_mut(out);
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
            // Padding has the zero of the last group as its codes, which stand for 0: `moe_few.cu` multiplies them.
            let filling = groups.last().map_or(0, |group| u32::from(group.zero) * EACH_CODE);
            for window in 0..places.windows() {
                let first = window * places.window_words();
                let word = |at: usize| codes.get(first + at).copied().unwrap_or(filling);
                places.write_window(word, &mut out[places.codes(at, window)]);
            }
            let size = int4.group_inputs();
            for window in 0..inputs.div_ceil(INT4_WINDOW) {
                for (of_window, word) in words[places.groups(at, window)].iter_mut().enumerate() {
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
    let places = Int4Places::new(element, group, inputs);
    let codes: Vec<u32> = codes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u32::from_le_bytes(word))
        .collect();
    let rows = codes.len() / (places.windows() * places.window_words());
    let window_inputs = places.window_words() * INT4_WORD;
    let element = |row: usize, input: usize| {
        let window = &codes[places.codes(row, input / window_inputs)];
        let code = places.code(window, input % window_inputs);
        let groups = places.groups(row, input / INT4_WINDOW);
        let shared = words[groups.start + input % INT4_WINDOW / group.inputs()];
        (code as f32 - (shared & 15) as f32) * f32::from_bits(shared & !15)
    };
    let row = |row: usize| (0..inputs).map(|input| element(row, input)).collect();
    (0..rows).map(row).collect()
}
