//! From ggml's blocks to panels and back.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{Matrix, WeightType};
use crate::e4m3::e4m3_to_f32;
use crate::format::{Codes, Format, Spec};
use crate::panel::PANEL;

/// Most inputs in a block.
const MAX_BLOCK: usize = 256;
/// Most groups in a block.
const MAX_GROUPS: usize = 16;

/// One block of one row: `w = scale × scales[g] × (code - offset) + min × mins[g]`, or with f16 `scale` and `min` alone
/// where a block is one group.
pub(crate) struct Block {
    pub(crate) scale: f32,
    pub(crate) min: f32,
    pub(crate) scales: [i8; MAX_GROUPS],
    pub(crate) mins: [i8; MAX_GROUPS],
    pub(crate) codes: [u8; MAX_BLOCK],
}

impl Block {
    pub(crate) fn new() -> Self {
        Self {
            scale: 0.0,
            min: 0.0,
            scales: [1; MAX_GROUPS],
            mins: [1; MAX_GROUPS],
            codes: [0; MAX_BLOCK],
        }
    }
}

/// Writes one row of ggml blocks into lane `lane` of a panel.
pub(crate) fn pack_row(dtype: WeightType, spec: &Spec, row: &[u8], lane: usize, panel: &mut [u8]) {
    let mut block = Block::new();
    let packed = panel.chunks_exact_mut(spec.block_bytes());
    // A block of ours is a block of ggml's for every type.
    for (source, packed) in row.chunks_exact(dtype.block_bytes()).zip(packed) {
        decode(dtype, source, &mut block);
        let (header, groups) = packed.split_at_mut(spec.header_bytes());
        let (scales, mins) = (spec.scale_bytes() / PANEL, spec.scale_bytes());
        if !header.is_empty() {
            put(header, lane, &block.scale.to_ne_bytes());
            if spec.min {
                put(&mut header[4 * PANEL..], lane, &block.min.to_ne_bytes());
            }
        }
        for (g, group) in groups.chunks_exact_mut(spec.group_bytes()).enumerate() {
            if scales == 1 {
                put(group, lane, &block.scales[g].to_ne_bytes());
                if spec.min {
                    put(&mut group[mins..], lane, &block.mins[g].to_ne_bytes());
                }
            } else {
                put(group, lane, &f16::from_f32(block.scale).to_ne_bytes());
                if spec.min {
                    put(&mut group[mins..], lane, &f16::from_f32(block.min).to_ne_bytes());
                }
            }
            let codes = &mut group[spec.group_header_bytes()..];
            for (k, &code) in block.codes[g * spec.group..(g + 1) * spec.group]
                .iter()
                .enumerate()
            {
                for (byte, shift, bits) in places(spec.codes, k, lane) {
                    let part = match bits {
                        2 => code >> 4,
                        4 => code & 15,
                        _ => code,
                    };
                    codes[byte] |= part << shift;
                }
            }
        }
    }
}

/// Dequantises lane `lane` of a panel.
pub(crate) fn unpack_row(spec: &Spec, panel: &[u8], lane: usize, out: &mut [f32]) {
    let blocks = panel.chunks_exact(spec.block_bytes());
    for (packed, out) in blocks.zip(out.chunks_exact_mut(spec.block())) {
        let (header, groups) = packed.split_at(spec.header_bytes());
        for (group, out) in groups
            .chunks_exact(spec.group_bytes())
            .zip(out.chunks_exact_mut(spec.group))
        {
            let mins = &group[spec.scale_bytes()..];
            let (scale, min) = if header.is_empty() {
                let half = |from: &[u8]| f16::from_ne_bytes(get(from, lane)).to_f32();
                (half(group), if spec.min { half(mins) } else { 0.0 })
            } else {
                let float = |from: &[u8]| f32::from_ne_bytes(get(from, lane));
                let byte = |from: &[u8]| f32::from(i8::from_ne_bytes(get(from, lane)));
                let min = if spec.min {
                    float(&header[4 * PANEL..]) * byte(mins)
                } else {
                    0.0
                };
                (float(header) * byte(group), min)
            };
            let codes = &group[spec.group_header_bytes()..];
            for (k, y) in out.iter_mut().enumerate() {
                let mut code = 0;
                for (byte, shift, bits) in places(spec.codes, k, lane) {
                    let part = i32::from(codes[byte] >> shift) & ((1 << bits) - 1);
                    code |= if bits == 2 { part << 4 } else { part };
                }
                *y = scale * (code - spec.offset) as f32 + min;
            }
        }
    }
}

impl Matrix<'_> {
    /// Writes the elements of one row.
    ///
    /// # Panics
    /// If `out` has not as many elements as a row.
    pub fn widen_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols(), "out is not a row");
        let data = self.row(row);
        match self.dtype() {
            WeightType::F32 => {
                for (out, &bytes) in out.iter_mut().zip(data.as_chunks().0) {
                    *out = f32::from_le_bytes(bytes);
                }
            }
            WeightType::F16 => {
                // In pieces, as one at a time asks for the CPU's features each time.
                let mut piece = [f16::ZERO; 64];
                for (out, data) in out.chunks_mut(piece.len()).zip(data.chunks(2 * piece.len())) {
                    let piece = &mut piece[..out.len()];
                    for (half, &bytes) in piece.iter_mut().zip(data.as_chunks().0) {
                        *half = f16::from_le_bytes(bytes);
                    }
                    piece.convert_to_f32_slice(out);
                }
            }
            WeightType::Bf16 => {
                for (out, &bytes) in out.iter_mut().zip(data.as_chunks().0) {
                    *out = bf16::from_le_bytes(bytes).to_f32();
                }
            }
            WeightType::U8 => {
                out.iter_mut()
                    .zip(data)
                    .for_each(|(out, &byte)| *out = f32::from(byte));
            }
            WeightType::F8E4M3 => {
                for (out, &code) in out.iter_mut().zip(data) {
                    *out = e4m3_to_f32(code);
                }
            }
            quantised => dequantize_row(quantised, data, out),
        }
    }
}

/// Elements of one row of ggml blocks.
fn dequantize_row(dtype: WeightType, row: &[u8], out: &mut [f32]) {
    let spec = Format::of(dtype).expect("floats are not packed in blocks").spec();
    let mut block = Block::new();
    let sources = row.chunks_exact(dtype.block_bytes());
    for (source, out) in sources.zip(out.chunks_exact_mut(spec.block())) {
        decode(dtype, source, &mut block);
        let groups = out
            .chunks_exact_mut(spec.group)
            .zip(block.codes.chunks_exact(spec.group));
        for (g, (out, codes)) in groups.enumerate() {
            let scale = block.scale * f32::from(block.scales[g]);
            let min = block.min * f32::from(block.mins[g]);
            for (y, &code) in out.iter_mut().zip(codes) {
                *y = scale * (i32::from(code) - spec.offset) as f32 + min;
            }
        }
    }
}

/// Where input `k` of a group lies for output `lane`: bytes, shifts and widths of the code's parts.
fn places(codes: Codes, k: usize, lane: usize) -> impl Iterator<Item = (usize, usize, u32)> {
    let cell = lane * 4 + k % 4;
    let nibble = 4 * (k / 4 % 2);
    let (first, second) = match codes {
        Codes::U4 => ((k / 8 * 64 + cell, nibble, 4), None),
        Codes::U6 => {
            let hex = k / 16 * 192;
            let upper = (hex + 128 + cell, 2 * (k / 4 % 4), 2);
            ((hex + k / 8 % 2 * 64 + cell, nibble, 4), Some(upper))
        }
        Codes::I8 => ((k / 4 * 64 + cell, 0, 8), None),
    };
    std::iter::once(first).chain(second)
}

fn put<const N: usize>(to: &mut [u8], lane: usize, value: &[u8; N]) {
    to[lane * N..(lane + 1) * N].copy_from_slice(value);
}

fn get<const N: usize>(from: &[u8], lane: usize) -> [u8; N] {
    from[lane * N..(lane + 1) * N].try_into().expect("N bytes")
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Splits the nibbles of `qs` as ggml orders them: all low ones, then all high ones.
fn nibbles(qs: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(qs.len());
    for (i, &q) in qs.iter().enumerate() {
        (low[i], high[i]) = (q & 15, q >> 4);
    }
}

/// Reads one of ggml's blocks (ggml-common.h and the `dequantize_row_*` functions of ggml-quants.c).
pub(crate) fn decode(dtype: WeightType, block: &[u8], out: &mut Block) {
    let codes = &mut out.codes;
    match dtype {
        WeightType::Q4_0 => {
            out.scale = half_at(block, 0);
            nibbles(&block[2..], &mut codes[..32]);
        }
        WeightType::Q4_1 => {
            (out.scale, out.min) = (half_at(block, 0), half_at(block, 2));
            nibbles(&block[4..], &mut codes[..32]);
        }
        WeightType::Q5_0 => {
            out.scale = half_at(block, 0);
            fifth_bits(&block[2..6], &block[6..], codes);
        }
        WeightType::Q5_1 => {
            (out.scale, out.min) = (half_at(block, 0), half_at(block, 2));
            fifth_bits(&block[4..8], &block[8..], codes);
        }
        WeightType::Q8_0 => {
            out.scale = half_at(block, 0);
            biased(&block[2..], codes);
        }
        WeightType::Q8_1 => {
            out.scale = half_at(block, 0);
            biased(&block[4..], codes);
        }
        WeightType::Q2K => decode_q2k(block, out),
        WeightType::Q3K => decode_q3k(block, out),
        WeightType::Q4K => {
            six_bit_scales(block, out);
            for j in 0..4 {
                nibbles(&block[16 + 32 * j..][..32], &mut out.codes[64 * j..][..64]);
            }
        }
        WeightType::Q5K => {
            six_bit_scales(block, out);
            let (qh, qs) = block[16..].split_at(32);
            for j in 0..4 {
                nibbles(&qs[32 * j..][..32], &mut out.codes[64 * j..][..64]);
            }
            for (k, code) in out.codes.iter_mut().enumerate() {
                *code |= (qh[k % 32] >> (k / 32) & 1) << 4;
            }
        }
        WeightType::Q6K => decode_q6k(block, out),
        WeightType::Q8K => {
            out.scale = f32::from_le_bytes(block[..4].try_into().expect("four bytes"));
            biased(&block[4..260], codes);
        }
        WeightType::Mxfp4 => {
            out.scale = half_power(block[0]);
            nibbles(&block[1..], &mut codes[..32]);
            codes[..32]
                .iter_mut()
                .for_each(|code| *code = TWICE_E2M1[usize::from(*code)]);
        }
        WeightType::F32
        | WeightType::F16
        | WeightType::Bf16
        | WeightType::F8E4M3
        | WeightType::U8
        | WeightType::I32
        | WeightType::I64 => unreachable!("floats and integers are not packed in blocks"),
    }
}

/// Twice each element of MXFP4, plus the offset of 16 that its packed format has.
const TWICE_E2M1: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// Half of the power of two that a scale of MXFP4 stands for: 2^(code - 128), but for 255, which is no number.
fn half_power(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code - 1) << 23),
    }
}

fn fifth_bits(qh: &[u8], qs: &[u8], codes: &mut [u8]) {
    nibbles(qs, &mut codes[..32]);
    for (k, code) in codes[..32].iter_mut().enumerate() {
        *code |= (qh[k / 8] >> (k % 8) & 1) << 4;
    }
}

fn biased(qs: &[u8], codes: &mut [u8]) {
    for (code, &q) in codes.iter_mut().zip(qs) {
        *code = q ^ 0x80;
    }
}

fn decode_q2k(block: &[u8], out: &mut Block) {
    let (scales, rest) = block.split_at(16);
    (out.scale, out.min) = (half_at(rest, 64), -half_at(rest, 66));
    for (g, &s) in scales.iter().enumerate() {
        (out.scales[g], out.mins[g]) = ((s & 15) as i8, (s >> 4) as i8);
    }
    for (k, code) in out.codes.iter_mut().enumerate() {
        *code = rest[k / 128 * 32 + k % 32] >> (2 * (k / 32 % 4)) & 3;
    }
}

fn decode_q3k(block: &[u8], out: &mut Block) {
    let (hmask, rest) = block.split_at(32);
    let (qs, packed) = rest.split_at(64);
    out.scale = half_at(packed, 12);
    for g in 0..16 {
        let low = packed[g % 8] >> (4 * (g / 8)) & 15;
        let high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
        out.scales[g] = (low | high << 4) as i8 - 32;
    }
    for (k, code) in out.codes.iter_mut().enumerate() {
        let low = qs[k / 128 * 32 + k % 32] >> (2 * (k / 32 % 4)) & 3;
        let high = hmask[k % 32] >> (k / 32) & 1;
        // The value is low + 4 high - 4.
        *code = low | high << 2;
    }
}

/// The scales and minima of Q4_K and Q5_K: 6 bits each, in 12 bytes.
fn six_bit_scales(block: &[u8], out: &mut Block) {
    (out.scale, out.min) = (half_at(block, 0), -half_at(block, 2));
    let packed = &block[4..16];
    for g in 0..8 {
        let (scale, min) = if g < 4 {
            (packed[g] & 63, packed[g + 4] & 63)
        } else {
            let scale = packed[g + 4] & 15 | (packed[g - 4] >> 6) << 4;
            (scale, packed[g + 4] >> 4 | (packed[g] >> 6) << 4)
        };
        (out.scales[g], out.mins[g]) = (scale as i8, min as i8);
    }
}

fn decode_q6k(block: &[u8], out: &mut Block) {
    let (ql, rest) = block.split_at(128);
    let (qh, rest) = rest.split_at(64);
    out.scale = half_at(rest, 16);
    for g in 0..16 {
        out.scales[g] = rest[g] as i8;
    }
    for (k, code) in out.codes.iter_mut().enumerate() {
        let (half, quarter, l) = (k / 128, k / 32 % 4, k % 32);
        let low = ql[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
        let high = qh[32 * half + l] >> (2 * quarter) & 3;
        *code = low | high << 4;
    }
}
