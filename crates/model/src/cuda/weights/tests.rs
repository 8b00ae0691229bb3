//! What becomes of stored experts, without a GPU.

use std::path::Path;

use half::bf16;
use plimsoll_device::cast_slice_mut;

use super::convert::{Job, widen_mxfp4};
use super::layout::{Element, Layout, Part, Stored};
use crate::model::Description;
use crate::quantization::Fp8Scales;
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
