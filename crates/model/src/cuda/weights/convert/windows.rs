//! Codes of four bits, as the kernels take them (`kernels/include/int4.cuh`, `kernels/include/experts.cuh`).

use std::ops::Range;

use plimsoll_kernels::cuda::{EXPERT_WINDOW, INT4_ROWS, INT4_WINDOW};

use super::super::layout::Element;
use crate::quantization::INT4_WORD;

/// Lanes of a product that share a row of weights.
const LANES: usize = 4;
/// Inputs of which each lane has a word: as many words, of eight neighbouring inputs each, are stored.
const PART: usize = LANES * INT4_WORD;
const WORD_BYTES: usize = size_of::<u32>();

/// Where the codes of rows lie, of which [`INT4_ROWS`] lie together: window by window, and behind these what else rows have.
#[derive(Clone, Copy)]
pub(super) struct Windows {
    /// Of a row.
    count: usize,
    /// Of a window.
    parts: usize,
    row_bytes: usize,
}

impl Windows {
    /// Of rows of so many inputs.
    pub(super) fn new(element: Element, inputs: usize) -> Self {
        let parts = match element {
            Element::Int4 => INT4_WINDOW / PART,
            _ => EXPERT_WINDOW / PART,
        };
        let row_bytes = element.row_bytes(inputs);
        Self {
            count: inputs.div_ceil(parts * PART),
            parts,
            row_bytes: row_bytes.expect("places are handed out where there is memory"),
        }
    }

    /// How many rows have so many bytes.
    pub(super) fn rows(self, bytes: usize) -> usize {
        bytes / self.row_bytes
    }

    /// Bytes of a window of a row.
    fn bytes(self) -> usize {
        self.parts * LANES * WORD_BYTES
    }

    /// Where the eight rows begin that this one belongs to.
    fn first(self, row: usize) -> usize {
        row / INT4_ROWS * INT4_ROWS * self.row_bytes
    }

    /// Where a window of a row lies.
    fn window(self, row: usize, window: usize) -> Range<usize> {
        let start = self.first(row) + (window * INT4_ROWS + row % INT4_ROWS) * self.bytes();
        start..start + self.bytes()
    }

    /// Where the exponents of a row lie, behind the codes of its eight rows; empty for int4.
    pub(super) fn behind(self, row: usize) -> Range<usize> {
        let codes = self.count * self.bytes();
        let len = self.row_bytes - codes;
        let start = self.first(row) + INT4_ROWS * codes + row % INT4_ROWS * len;
        start..start + len
    }

    /// Writes all codes of a row. `octet` returns those of eight neighbouring inputs, the first in the lowest bits; `word` arranges the
    /// eight codes of 32 inputs that one lane multiplies, four bytes with a pair each, within a word.
    pub(super) fn write(
        self,
        row: usize,
        octet: impl Fn(usize) -> u32,
        word: impl Fn(u32) -> u32,
        out: &mut [u8],
    ) {
        for window in 0..self.count {
            let out = out[self.window(row, window)].as_chunks_mut().0;
            for part in 0..self.parts {
                let first = (window * self.parts + part) * LANES;
                let octets: [_; LANES] = std::array::from_fn(|at| octet(first + at).to_le_bytes());
                for lane in 0..LANES {
                    let pairs = u32::from_le_bytes(octets.map(|octet| octet[lane]));
                    out[lane * self.parts + part] = word(pairs).to_le_bytes();
                }
            }
        }
    }

    /// The word with the code of an input of a row, the index of its pair in the word, and its index in the pair.
    pub(super) fn find(self, codes: &[u8], row: usize, input: usize) -> (u32, usize, usize) {
        let window = &codes[self.window(row, input / (self.parts * PART))];
        let (part, pair) = (input / PART % self.parts, input % PART / INT4_WORD);
        let lane = input % INT4_WORD / 2;
        let word = window.as_chunks().0[lane * self.parts + part];
        (u32::from_le_bytes(word), pair, input % 2)
    }
}
