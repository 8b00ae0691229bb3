//! What becomes of stored experts, and of integers of four bits, without a GPU.

use std::path::Path;

use half::bf16;
use plimsoll_device::cast_slice_mut;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::convert::{Job, widen_int4, widen_mxfp4};
use super::layout::{Element, KeptScales, Layout, Part, Span, Stored};
use crate::blocks::RowOrder;
use crate::model::Description;
use crate::quantization::Fp8Scales;
use crate::weights::int4_tests::{self, Plain};
use crate::weights::{Checked, Scales};
use crate::{LoadFormat, ServeAs};

/// Into host memory, some rows at a time.
fn fill(part: &Part, tensors: &mut Checked<'_>, memory: &mut [u8]) {
    let job = Job::new(tensors, part).unwrap();
    let mut scales = Vec::new();
    for first in (0..part.rows()).step_by(7) {
        let rows = first..part.rows().min(first + 7);
        let (elements, places) = part.spans(rows.clone());
        scales.clear();
        job.write_rows(rows, &mut memory[elements.range()], &mut scales)
            .unwrap();
        if let Some(places) = places {
            cast_slice_mut(&mut memory[places.range()]).copy_from_slice(&scales);
        }
    }
}

/// One by one, stacked, transposed, by turns, in 16, 8 and 4 bits: as the CPU reads them.
#[test]
fn experts_arrive_as_a_cpu_reads_them() {
    for name in [
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "qwen3-moe-fp8-block",
        "gpt-oss",
        "gpt-oss-mxfp4",
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden")
            .join(name);
        let description = Description::read(&path, &ServeAs::default()).unwrap();
        let source = description.source(LoadFormat::Auto).unwrap();
        let layout = Layout::new(description.about.spec()).unwrap();
        let mut tensors = Checked::new(&*source);
        let mut aligned = vec![u64::MAX; layout.bytes / 8];
        let memory: &mut [u8] = cast_slice_mut(&mut aligned);
        for part in &layout.parts {
            fill(part, &mut tensors, memory);
        }
        let mut experts = 0;
        for part in &layout.parts {
            let Stored::Matrix(matrix) = &part.stored else {
                continue;
            };
            let place = part.scales;
            let kept: Option<Vec<f32>> = place.map(|place| {
                let span = place.span(0..part.rows());
                place.without_padding(cast_slice_mut(&mut memory[span.range()]))
            });
            let scales = kept.map(|kept| Scales::new(kept, Fp8Scales::Block, matrix));
            let found = &mut memory[part.span().range()];
            let cpu = Checked::new(&*source)
                .matrix(matrix)
                .unwrap()
                .dequantised()
                .unwrap();
            let cpu = cpu.matrix().unwrap();
            let mut wide = vec![0.0; matrix.inputs];
            for (row, bytes) in found.chunks_exact_mut(part.row_bytes()).enumerate() {
                cpu.widen_row(row, &mut wide);
                let found: Vec<f32> = match (part.element, &scales) {
                    (Element::Mxfp4, _) => widen_mxfp4(bytes, matrix.inputs),
                    (Element::Fp8, Some(scales)) => scales
                        .widen(row, bytes)
                        .map(|x| bf16::from_f32(x).to_f32())
                        .collect(),
                    _ => cast_slice_mut::<_, bf16>(bytes)
                        .iter()
                        .map(|x| x.to_f32())
                        .collect(),
                };
                assert_eq!(found, wide, "{name}: {} row {row}", part.name());
            }
            experts += usize::from(matrix.expert.is_some());
        }
        assert!(experts >= 18, "{name}: {experts} matrices of experts");
    }
}

/// Every layout becomes the kernels' own, to the bit, in pieces of any rows, and in the order of groups.
#[test]
fn integers_of_four_bits_keep_their_values() {
    for (seed, format) in (0..).zip(int4_tests::formats()) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (outputs, inputs) = (8 * rng.random_range(1..20), 8 * rng.random_range(1..50));
        let plain = Plain::random(format, outputs, inputs, &mut rng);
        let tensors = plain.tensors();
        let parts = [1, 3, 0, 4].map(|part| part * outputs / 8);
        for order in [RowOrder::Plain, RowOrder::Grouped { groups: 1, parts }] {
            let place = Span {
                start: 0,
                len: inputs * size_of::<u32>(),
            };
            let part = Part {
                stored: Stored::Matrix(plain.matrix(order)),
                element: Element::Int4,
                start: 0,
                scales: None,
                order: format.ordered.then_some(place),
            };
            let Some(KeptScales::Int4(group)) = part.kept() else {
                panic!("{format:?} has no groups")
            };
            let job = Job::new(&mut Checked::new(&tensors), &part).unwrap();
            let same: Vec<u32> = (0..inputs as u32).collect();
            let input_of = job.order().unwrap_or(&same);
            let step = rng.random_range(1..=outputs);
            for first in (0..outputs).step_by(step) {
                let rows = first..outputs.min(first + step);
                let mut codes = vec![0xff; rows.len() * part.row_bytes()];
                let mut words = Vec::new();
                job.write_rows(rows.clone(), &mut codes, &mut words).unwrap();
                let words: Vec<u32> = words.into_iter().map(f32::to_bits).collect();
                assert_eq!(words.len(), rows.len() * group.stride(inputs));
                let codes = codes.chunks_exact(part.row_bytes());
                for (row, (codes, words)) in rows.zip(codes.zip(words.chunks_exact(group.stride(inputs)))) {
                    let found = widen_int4(codes, words, group, inputs);
                    let of = |&input: &u32| plain.element(order.stored(row), input as usize);
                    let want: Vec<f32> = input_of.iter().map(of).collect();
                    assert_eq!(found, want, "{format:?}, {order:?}, row {row}");
                }
            }
        }
    }
}
