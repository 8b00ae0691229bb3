//! Rows of GGUF's block types as the kernels of GPUs take them (`kernels/include/gguf.cuh`): the same bits in another order.
//!
//! A row is cut into windows of 256 inputs, the last filled up with zeros: as many as a block of the k-quants has, and eight blocks of
//! the other types. A window is whole 16-byte pieces: the lower four bits of its codes (or all eight), then the bits above, then what
//! its groups share. Within, the bits that a lane of a warp multiplies lie together: of each 32 inputs, a *part*, a lane has eight.

use half::f16;
use serde::{Deserialize, Serialize};

use crate::dtype::WeightType;
use crate::format::Format;
use crate::pack::{Block, decode};

const WINDOW: usize = 256;
/// Inputs of which each of four lanes has eight.
const PART: usize = 32;
const PIECE: usize = 16;
/// Bytes of the lower four bits of a window's codes.
const NIBBLES: usize = WINDOW / 2;

/// A block type of GGUF that GPUs compute with as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "ggml's names, as GGUF files use them")]
#[allow(non_camel_case_types)]
pub enum GgufFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// What the groups of a window share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    /// Each of eight a scale in `f16`.
    Scale,
    /// Each of eight a scale and a minimum in `f16`.
    ScaleAndMin,
    /// All a scale and a minimum in `f16`, each of eight factors of them of six bits.
    SixBits,
    /// Each of sixteen a factor of eight bits. What it multiplies, a scale in `f16` for each window, lies behind the row's windows.
    EightBits,
}

impl GgufFormat {
    /// Inputs of a window.
    pub const WINDOW: usize = WINDOW;

    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// The format of a stored type; `None` for those that GPUs do not know.
    pub fn of(dtype: WeightType) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.dtype() == dtype)
    }

    /// As it is stored.
    pub fn dtype(self) -> WeightType {
        match self {
            Self::Q4_0 => WeightType::Q4_0,
            Self::Q4_1 => WeightType::Q4_1,
            Self::Q5_0 => WeightType::Q5_0,
            Self::Q5_1 => WeightType::Q5_1,
            Self::Q8_0 => WeightType::Q8_0,
            Self::Q4K => WeightType::Q4K,
            Self::Q5K => WeightType::Q5K,
            Self::Q6K => WeightType::Q6K,
        }
    }

    /// Bits of a code.
    const fn bits(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q4K => 4,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 5,
            Self::Q6K => 6,
            Self::Q8_0 => 8,
        }
    }

    const fn shared(self) -> Shared {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => Shared::Scale,
            Self::Q4_1 | Self::Q5_1 => Shared::ScaleAndMin,
            Self::Q4K | Self::Q5K => Shared::SixBits,
            Self::Q6K => Shared::EightBits,
        }
    }

    /// Bytes of a window's codes.
    const fn code_bytes(self) -> usize {
        WINDOW * self.bits() / 8
    }

    /// Pieces of 16 bytes of a window's codes.
    pub(crate) const fn code_pieces(self) -> usize {
        self.code_bytes() / PIECE
    }

    /// Pieces of 16 bytes of a window.
    pub const fn pieces(self) -> usize {
        let shared = match self.shared() {
            Shared::Scale | Shared::SixBits | Shared::EightBits => 1,
            Shared::ScaleAndMin => 2,
        };
        self.code_pieces() + shared
    }

    /// Bytes of the windows of a row of `inputs`.
    pub fn windows_bytes(self, inputs: usize) -> usize {
        inputs.div_ceil(WINDOW) * self.pieces() * PIECE
    }

    /// Bytes of a row of `inputs`.
    pub fn pitch(self, inputs: usize) -> usize {
        let behind = match self.shared() {
            Shared::EightBits => inputs.div_ceil(WINDOW) * size_of::<f16>(),
            _ => 0,
        };
        self.windows_bytes(inputs) + behind.next_multiple_of(PIECE)
    }

    /// Puts a stored row into the order of the kernels.
    ///
    /// # Panics
    /// If `out` has not the bytes of [`Self::pitch`], or the row is not whole blocks.
    pub fn pack_row(self, stored: &[u8], out: &mut [u8]) {
        let (dtype, spec) = (self.dtype(), Format::spec(self.packed()));
        let blocks = stored.chunks_exact(dtype.block_bytes());
        assert!(blocks.remainder().is_empty(), "a row of whole blocks");
        let inputs = blocks.len() * spec.block();
        assert_eq!(out.len(), self.pitch(inputs), "room for a row of {inputs}");
        out.fill(0);
        let (windows, scales) = out.split_at_mut(self.windows_bytes(inputs));
        let mut block = Block::new();
        for (index, stored) in blocks.enumerate() {
            decode(dtype, stored, &mut block);
            let first = index * spec.block();
            let window = &mut windows[first / WINDOW * self.pieces() * PIECE..][..self.pieces() * PIECE];
            for (input, &code) in block.codes[..spec.block()].iter().enumerate() {
                self.put_code(window, first % WINDOW + input, code);
            }
            let halves = [block.scale, block.min].map(|value| f16::from_f32(value).to_le_bytes());
            let shared = &mut window[self.code_bytes()..];
            let group = first % WINDOW / spec.group;
            match self.shared() {
                Shared::Scale => shared[2 * group..][..2].copy_from_slice(&halves[0]),
                Shared::ScaleAndMin => shared[4 * group..][..4].copy_from_slice(&halves.concat()),
                Shared::SixBits => {
                    shared[..4].copy_from_slice(&halves.concat());
                    put_six_bits(shared, &block);
                }
                Shared::EightBits => {
                    for (byte, scale) in shared.iter_mut().zip(block.scales) {
                        *byte = scale as u8 ^ 0x80;
                    }
                    scales[2 * index..][..2].copy_from_slice(&halves[0]);
                }
            }
        }
    }

    /// The elements of a row in the order of the kernels.
    ///
    /// # Panics
    /// If `packed` has not the bytes of [`Self::pitch`] for as many elements.
    pub fn unpack_row(self, packed: &[u8], out: &mut [f32]) {
        assert_eq!(packed.len(), self.pitch(out.len()), "a row of {}", out.len());
        let spec = Format::spec(self.packed());
        let (windows, scales) = packed.split_at(self.windows_bytes(out.len()));
        let half = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        let windows = windows.chunks_exact(self.pieces() * PIECE).enumerate();
        for ((index, window), out) in windows.zip(out.chunks_mut(WINDOW)) {
            let shared = &window[self.code_bytes()..];
            for (input, out) in out.iter_mut().enumerate() {
                let group = input / spec.group;
                let (scale, min) = match self.shared() {
                    Shared::Scale => (half(shared, 2 * group), 0.0),
                    Shared::ScaleAndMin => (half(shared, 4 * group), half(shared, 4 * group + 2)),
                    Shared::SixBits => {
                        let [scale, min] = six_bits(shared, group).map(f32::from);
                        (half(shared, 0) * scale, half(shared, 2) * min)
                    }
                    Shared::EightBits => {
                        let factor = f32::from((shared[group] ^ 0x80) as i8);
                        (half(scales, 2 * index) * factor, 0.0)
                    }
                };
                let level = i32::from(self.code(window, input)) - spec.offset;
                *out = scale * level as f32 + min;
            }
        }
    }

    /// The format of the same type on CPUs, which has its groups and offsets.
    fn packed(self) -> Format {
        Format::of(self.dtype()).expect("a block type")
    }

    /// What the groups of random codes share, and what lies behind the windows, for elements of about this deviation and of mean 0.
    pub fn made_up(self, deviation: f32) -> ([u8; 2 * PIECE], [u8; 2]) {
        let levels = (1_u32 << self.bits()) as f32;
        let scale = deviation / ((levels * levels - 1.0) / 12.0).sqrt();
        let middle = (levels - 1.0) / 2.0;
        // Of each group, where it has one.
        const FACTOR: f32 = 32.0;
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let mut shared = [0; 2 * PIECE];
        match self.shared() {
            Shared::Scale => shared.as_chunks_mut().0.fill(half(scale)),
            Shared::ScaleAndMin => {
                let [a, b] = half(scale);
                let [c, d] = half(-middle * scale);
                shared.as_chunks_mut().0.fill([a, b, c, d]);
            }
            Shared::SixBits => {
                shared[..2].copy_from_slice(&half(scale / FACTOR));
                shared[2..4].copy_from_slice(&half(-middle * scale / FACTOR));
                let mut block = Block::new();
                block.scales = [FACTOR as i8; _];
                block.mins = [FACTOR as i8; _];
                put_six_bits(&mut shared, &block);
            }
            Shared::EightBits => shared.fill(FACTOR as u8 ^ 0x80),
        }
        (shared, half(scale / FACTOR))
    }

    /// Where the code of an input of a window lies: words, shifts and widths of its parts, the lowest bits first.
    fn places(self, input: usize) -> [(usize, usize, u32); 2] {
        let (part, within) = (input / PART, input % PART);
        // A lane's place of an input: with groups of sixteen its first four are of the first.
        let (quad, place) = match self.shared() {
            Shared::EightBits => (within % 16 / 4, within / 16 * 4 + within % 4),
            _ => (within / 8, within % 8),
        };
        let (pair, odd) = (place / 2, place % 2);
        let none = (0, 0, 0);
        if self.bits() == 8 {
            let word = 16 * (part / 2) + 4 * quad + 2 * (part % 2) + pair / 2;
            return [(word, 8 * (2 * odd + pair % 2), 8), none];
        }
        let low = (16 * (part / 4) + 4 * quad + part % 4, 16 * odd + 4 * pair, 4);
        let above = NIBBLES / size_of::<u32>();
        let high = match self.bits() {
            5 => (above + 2 * quad + part / 4, 16 * odd + 4 * (part % 4) + pair, 1),
            6 => (
                above + 4 * quad + part / 2,
                16 * odd + 2 * (4 * (part % 2) + pair),
                2,
            ),
            _ => none,
        };
        [low, high]
    }

    fn put_code(self, window: &mut [u8], input: usize, code: u8) {
        // Those of eight bits are two's complements.
        let mut rest = if self.bits() == 8 { code ^ 0x80 } else { code };
        for (word, shift, bits) in self.places(input) {
            let bytes = &mut window[4 * word + shift / 8];
            let mask = ((1_u16 << bits) - 1) as u8;
            *bytes |= (rest & mask) << (shift % 8);
            rest = rest.checked_shr(bits).unwrap_or(0);
        }
    }

    fn code(self, window: &[u8], input: usize) -> u8 {
        let mut below = 0;
        let mut code = 0;
        for (word, shift, bits) in self.places(input) {
            let mask = ((1_u16 << bits) - 1) as u8;
            let part = window[4 * word + shift / 8] >> (shift % 8) & mask;
            code |= part.checked_shl(below).unwrap_or(0);
            below += bits;
        }
        if self.bits() == 8 { code ^ 0x80 } else { code }
    }
}

/// Puts eight pairs of twelve bits, a scale's and a minimum's factor, behind the first word: two in each of three words, and two in
/// the upper bytes of these.
fn put_six_bits(shared: &mut [u8], block: &Block) {
    let pair = |group: usize| u32::from(block.scales[group] as u8) | u32::from(block.mins[group] as u8) << 6;
    let last = pair(6) | pair(7) << 12;
    for word in 0..3 {
        let value = pair(2 * word) | pair(2 * word + 1) << 12 | (last >> (8 * word) & 255) << 24;
        shared[4 + 4 * word..][..4].copy_from_slice(&value.to_le_bytes());
    }
}

/// Factors of a group's scale and minimum.
fn six_bits(shared: &[u8], group: usize) -> [u8; 2] {
    let byte = |at: usize| u32::from(shared[4 + at]);
    let pairs = match group / 2 {
        3 => byte(3) | byte(7) << 8 | byte(11) << 16,
        word => byte(4 * word) | byte(4 * word + 1) << 8 | byte(4 * word + 2) << 16,
    };
    let pair = pairs >> (12 * (group % 2));
    [pair & 63, pair >> 6 & 63].map(|factor| factor as u8)
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;
    use crate::Matrix;
    use crate::testing::{assert_same_bits, rng};

    /// Random blocks whose floats are numbers.
    fn random_row(format: GgufFormat, inputs: usize, seed: u64) -> Vec<u8> {
        let mut rng = rng(seed);
        let dtype = format.dtype();
        let mut row: Vec<u8> = (0..dtype.row_bytes(inputs).unwrap())
            .map(|_| rng.random())
            .collect();
        let floats: &[usize] = match format {
            GgufFormat::Q4_0 | GgufFormat::Q5_0 | GgufFormat::Q8_0 => &[0],
            GgufFormat::Q6K => &[208],
            _ => &[0, 2],
        };
        for block in row.chunks_exact_mut(dtype.block_bytes()) {
            for &at in floats {
                // Any number, subnormal ones too.
                let bits = rng.random::<u16>() & 0xbbff;
                block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
        }
        row
    }

    #[test]
    fn packed_rows_hold_what_gguf_defines() {
        for format in GgufFormat::ALL {
            let dtype = format.dtype();
            for blocks in [1, 2, 3, 8, 9, 17] {
                let inputs = blocks * dtype.block_len();
                let stored = random_row(format, inputs, blocks as u64);
                let matrix = Matrix::new(dtype, 1, inputs, &stored).unwrap();
                let mut want = vec![0.0; inputs];
                matrix.widen_row(0, &mut want);
                let mut packed = vec![0xa5; format.pitch(inputs)];
                format.pack_row(&stored, &mut packed);
                let mut found = vec![f32::NAN; inputs];
                format.unpack_row(&packed, &mut found);
                assert_same_bits(&found, &want, &format!("{format:?}, {blocks} blocks"));
            }
        }
    }

    /// As many bits as the file has, but for what fills up the last window and the scales of Q6_K.
    #[test]
    fn packed_rows_are_as_long_as_stored_ones() {
        for format in GgufFormat::ALL {
            let stored = format.dtype().row_bytes(4096).unwrap();
            let packed = format.pitch(4096);
            assert!(packed >= stored && packed - stored < 2 * PIECE, "{format:?}");
            assert_eq!(format.pitch(4096) % PIECE, 0);
            assert_eq!(GgufFormat::of(format.dtype()), Some(format));
        }
        assert_eq!(GgufFormat::of(WeightType::Q2K), None);
        assert_eq!(GgufFormat::Q4_0.pitch(576), 3 * 144);
    }

    /// What fills up the last window is 0 whatever it is multiplied with.
    #[test]
    fn the_last_window_is_filled_up_with_zeros() {
        for format in GgufFormat::ALL
            .into_iter()
            .filter(|f| f.dtype().block_len() < WINDOW)
        {
            let mut packed = vec![0xa5; format.pitch(32)];
            format.pack_row(&random_row(format, 32, 5), &mut packed);
            let mut all = vec![f32::NAN; WINDOW];
            format.unpack_row(&packed, &mut all);
            assert!(all[32..].iter().all(|&value| value == 0.0), "{format:?}");
        }
    }

    /// Every bit of a window is of one code.
    #[test]
    fn codes_do_not_share_bits() {
        for format in GgufFormat::ALL {
            let mut taken = vec![0_u8; format.code_bytes()];
            for input in 0..WINDOW {
                for (word, shift, bits) in format.places(input) {
                    for bit in shift..shift + bits as usize {
                        let (byte, mask) = (4 * word + bit / 8, 1 << (bit % 8));
                        assert_eq!(taken[byte] & mask, 0, "{format:?}, input {input}");
                        taken[byte] |= mask;
                    }
                }
            }
            assert!(taken.iter().all(|&byte| byte == 255), "{format:?}");
        }
    }

    #[test]
    fn made_up_rows_have_the_deviation_asked_for() {
        const INPUTS: usize = 256 * 64;
        let mut rng = rng(9);
        for format in GgufFormat::ALL {
            let mut packed: Vec<u8> = (0..format.pitch(INPUTS)).map(|_| rng.random()).collect();
            let (shared, behind) = format.made_up(0.02);
            let (windows, scales) = packed.split_at_mut(format.windows_bytes(INPUTS));
            for window in windows.chunks_exact_mut(format.pieces() * PIECE) {
                let own = &mut window[format.code_bytes()..];
                own.copy_from_slice(&shared[..own.len()]);
            }
            scales.as_chunks_mut().0.fill(behind);
            let mut row = vec![0.0; INPUTS];
            format.unpack_row(&packed, &mut row);
            let mean = row.iter().sum::<f32>() / INPUTS as f32;
            let deviation = (row.iter().map(|x| x * x).sum::<f32>() / INPUTS as f32).sqrt();
            assert!(mean.abs() < 0.003, "{format:?}: mean {mean}");
            assert!(
                (deviation / 0.02 - 1.0).abs() < 0.03,
                "{format:?}: deviation {deviation}"
            );
        }
    }
}
