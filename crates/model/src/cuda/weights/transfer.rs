//! Stored tensors to device memory, at the speed of storage: threads that read, convert and copy at the same time.

use std::num::NonZero;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use plimsoll_device::cast_slice_mut;
use plimsoll_device::cuda::{Gpu, GpuSlab, Uploader};

use super::convert::Job;
use super::layout::Part;
use crate::{Cancel, ModelError};

/// Bytes of device memory that are filled at once: enough that a copy's start does not matter, and little to pin, which
/// takes a millisecond per megabyte.
const PIECE_BYTES: usize = 2 << 20;

/// Most threads: more do not read faster, and each has pinned memory of its own.
const MOST_THREADS: usize = 16;

/// Rows of one job that are copied at once.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    job: usize,
    rows: Range<usize>,
}

/// Fills and copies all jobs; `advance` hears of stored bytes that are dealt with.
pub(super) fn transfer(
    gpu: &Gpu,
    slab: &GpuSlab,
    jobs: &[Job<'_>],
    cancel: &Cancel,
    mut advance: impl FnMut(usize),
) -> Result<(), ModelError> {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    // Files are read from front to back.
    order.sort_by_key(|&job| jobs[job].address());
    let pieces: Vec<Piece> = order
        .into_iter()
        .flat_map(|job| pieces(jobs[job].part()).map(move |rows| Piece { job, rows }))
        .collect();
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(MOST_THREADS)
        .min(pieces.len());
    let (sender, advanced) = mpsc::channel();
    let next = AtomicUsize::new(0);
    let work = Work {
        gpu,
        slab,
        jobs,
        pieces: &pieces,
        next: &next,
        cancel,
    };
    thread::scope(|scope| {
        let work = &work;
        let start = |_| {
            let sender = sender.clone();
            scope.spawn(move || work.run(&sender))
        };
        let workers: Vec<_> = (0..threads).map(start).collect();
        drop(sender);
        advanced.into_iter().for_each(&mut advance);
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// What the threads share.
struct Work<'a> {
    gpu: &'a Gpu,
    slab: &'a GpuSlab,
    jobs: &'a [Job<'a>],
    pieces: &'a [Piece],
    /// The first piece that nobody has taken.
    next: &'a AtomicUsize,
    cancel: &'a Cancel,
}

impl Work<'_> {
    /// Takes pieces until there are none.
    fn run(&self, advanced: &Sender<usize>) -> Result<(), ModelError> {
        self.upload(advanced).inspect_err(|_| {
            // The others need not go on.
            self.next.store(self.pieces.len(), Ordering::Relaxed);
        })
    }

    fn upload(&self, advanced: &Sender<usize>) -> Result<(), ModelError> {
        let spans = |piece: &Piece| self.jobs[piece.job].part().spans(piece.rows.clone());
        let bytes = |piece: &Piece| {
            let (elements, scales) = spans(piece);
            elements.len.max(scales.map_or(0, |scales| scales.len))
        };
        let most = self.pieces.iter().map(bytes).max().unwrap_or(0);
        let mut uploader = Uploader::new(self.gpu, most)?;
        let memory = self.slab.slice::<u8>();
        let mut scales = Vec::new();
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            self.cancel.check()?;
            let job = &self.jobs[piece.job];
            let (elements, scales_at) = spans(piece);
            scales.clear();
            let to = memory.range(elements.range());
            uploader.upload(to, |out| job.write_rows(piece.rows.clone(), out, &mut scales))?;
            if let Some(span) = scales_at.filter(|span| span.len > 0) {
                uploader.upload(memory.range(span.range()), |out| {
                    cast_slice_mut(out).copy_from_slice(&scales);
                    Ok::<_, ModelError>(())
                })?;
            }
            // Nobody listens any more only if the caller panics.
            let _ = advanced.send(job.stored_bytes(piece.rows.len()));
        }
        Ok(uploader.finish()?)
    }
}

/// Ranges of rows of up to [`PIECE_BYTES`] each, at least as many rows as are interleaved.
fn pieces(part: &Part) -> impl Iterator<Item = Range<usize>> + use<> {
    let together = part.element.rows_together();
    let (rows, step) = (
        part.rows(),
        (PIECE_BYTES / part.row_bytes() / together).max(1) * together,
    );
    (0..rows)
        .step_by(step)
        .map(move |first| first..rows.min(first + step))
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use plimsoll_kernels::WeightType;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::super::layout::tests::random_spec;
    use super::super::layout::{Element, Layout, Stored};
    use super::*;
    use crate::Shape;
    use crate::blocks::{Matrix, RowOrder, StoredAs, Vector};
    use crate::quantization::{MatrixFormat, Quantization};
    use crate::weights::{Beside, Checked, DummyWeights, Scales, Source, Tensor};

    #[test]
    fn pieces_are_all_rows_in_order() {
        for (rows, cols) in [
            (1, Some(1)),
            (7, Some(64 << 20)),
            (5000, Some(4096)),
            (1024, Some(4096)),
            (9 << 20, None),
        ] {
            let stored = match cols {
                None => Stored::Vector(Vector::plain("", rows)),
                Some(inputs) => Stored::Matrix(Matrix {
                    module: String::new(),
                    outputs: rows,
                    inputs,
                    format: MatrixFormat::Plain,
                    order: RowOrder::Plain,
                    expert: None,
                    stored_as: StoredAs::Weight,
                    share: None,
                }),
            };
            for element in [Element::Bf16, Element::Int4, Element::ExpertInt4, Element::Mxfp4] {
                let part = Part {
                    stored: stored.clone(),
                    element,
                    start: 0,
                    scales: None,
                    order: None,
                };
                let together = element.rows_together();
                let mut next = 0;
                for piece in pieces(&part) {
                    assert!(piece.start == next && !piece.is_empty());
                    assert!(piece.start.is_multiple_of(together));
                    assert!(piece.len() <= together || piece.len() * part.row_bytes() <= PIECE_BYTES);
                    next = piece.end;
                }
                assert_eq!(next, rows);
            }
        }
    }

    /// Tensors of mixed types, in mixed orders of rows.
    struct Mixed([DummyWeights; 3]);

    impl Mixed {
        fn new(quantization: &Quantization) -> Self {
            let types = [WeightType::F32, WeightType::F16, WeightType::Bf16];
            Self(types.map(|dtype| DummyWeights {
                seed: 1,
                dtype,
                quantization: quantization.clone(),
            }))
        }
    }

    impl Source for Mixed {
        fn has(&self, _: &str) -> bool {
            true
        }

        fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
            let dummy = &self.0[name.len() % self.0.len()];
            let mut tensor = dummy.tensor(name, expected)?.expect("one is made up");
            if name.ends_with("_scale") {
                let scales = (0..tensor.data.len()).map(|i| 0.01 + (i * 7 % 61) as f32 / 61.0);
                let scales: Vec<f32> = scales.take(expected.iter().product()).collect();
                tensor.dtype = WeightType::F32;
                tensor.data = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            } else if let ([rows, cols], true) = (expected, tensor.dtype != WeightType::F8E4M3) {
                if rows % 4 == 0 {
                    tensor.order = RowOrder::Interleaved { head_dim: rows / 2 };
                }
                if cols % 32 == 0 {
                    let bytes = (0..rows * cols / 32 * 34).map(|i| (i * 7 % 61) as u8);
                    (tensor.dtype, tensor.data) = (WeightType::Q8_0, bytes.collect());
                }
            }
            tensor.shape = Shape(expected.to_vec());
            Ok(Some(tensor))
        }

        fn names(&self) -> Vec<String> {
            Vec::new()
        }

        fn total_bytes(&self) -> u64 {
            0
        }
    }

    /// Into host memory, piece by piece, as the threads do it.
    #[test]
    fn every_row_is_rounded_into_its_place() {
        for seed in 0..40 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut spec = random_spec(&mut rng);
            spec.hidden_size = 32 * rng.random_range(1..10);
            if spec.quantization.int4().next().is_some() {
                // Inputs are any number here, and whole words there: `weights/tests.rs` has them.
                continue;
            }
            let layout = Layout::new(&spec, None).unwrap();
            let mixed = Mixed::new(&spec.quantization);
            let mut checked = Checked::new(&mixed);
            let mut aligned = vec![u64::MAX; layout.bytes / 8];
            let memory: &mut [u8] = cast_slice_mut(&mut aligned);
            let mut scales = Vec::new();
            for part in &layout.parts {
                let job = Job::new(&mut checked, part).unwrap();
                // Pieces that begin and end within blocks too.
                let step = rng.random_range(1..200);
                for first in (0..part.rows()).step_by(step) {
                    let rows = first..part.rows().min(first + step);
                    let (elements, places) = part.spans(rows.clone());
                    scales.clear();
                    job.write_rows(rows, &mut memory[elements.range()], &mut scales)
                        .unwrap();
                    match places {
                        None => assert!(scales.is_empty()),
                        Some(places) => cast_slice_mut(&mut memory[places.range()]).copy_from_slice(&scales),
                    }
                }
            }
            for part in &layout.parts {
                check_part(part, &mixed, memory, &format!("seed {seed}: {}", part.name()));
            }
        }
    }

    fn check_part(part: &Part, mixed: &Mixed, memory: &mut [u8], context: &str) {
        let matrix = match &part.stored {
            Stored::Matrix(matrix) => matrix,
            Stored::Vector(vector) => {
                let mut tensor = mixed.tensor(&vector.name, &[vector.len]).unwrap().unwrap();
                tensor.unit_offset = vector.unit_offset;
                let (want, found) = (tensor.widen().unwrap(), &mut memory[part.span().range()]);
                match part.element {
                    Element::F32 => assert_eq!(cast_slice_mut::<_, f32>(found), want, "{context}"),
                    _ => assert_eq!(cast_slice_mut::<_, bf16>(found), rounded(&want), "{context}"),
                }
                return;
            }
        };
        let stored = Checked::new(mixed).matrix(matrix).unwrap();
        let kept = part.scales.map(|place| {
            let span = place.span(0..part.rows());
            let scales = place.without_padding(cast_slice_mut(&mut memory[span.range()]));
            Scales::new(scales, matrix.format.kept_scales().unwrap(), matrix)
        });
        let found = &mut memory[part.span().range()];
        let Some(kept) = kept else {
            let want = wide_rows(&stored.tensor.in_order(), matrix).concat();
            assert_eq!(cast_slice_mut::<_, bf16>(found), rounded(&want), "{context}");
            return;
        };
        let found = found.chunks_exact(matrix.inputs).enumerate();
        let found = found.map(|(row, codes)| kept.widen(row, codes).collect::<Vec<f32>>());
        match stored.beside {
            // To the bit, also where one scale became many.
            Beside::Scales(scales) => {
                let codes = stored.tensor.data.chunks_exact(matrix.inputs).enumerate();
                for (found, (row, codes)) in found.zip(codes) {
                    assert!(scales.widen(row, codes).eq(found), "{context}, row {row}");
                }
            }
            _ => {
                for (found, want) in found.zip(wide_rows(&stored.tensor.in_order(), matrix)) {
                    let largest = want.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
                    let near = |(found, want): (&f32, &f32)| {
                        (found - want).abs() <= (want.abs() / 15.0).max(largest / (448.0 * 1000.0))
                    };
                    assert!(found.iter().zip(&want).all(near), "{context}");
                }
            }
        }
    }

    fn wide_rows(tensor: &Tensor<'_>, matrix: &Matrix) -> Vec<Vec<f32>> {
        let row = |row| {
            let mut out = vec![f32::NAN; matrix.inputs];
            tensor.matrix().unwrap().widen_row(row, &mut out);
            out
        };
        (0..matrix.outputs).map(row).collect()
    }

    fn rounded(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&value| bf16::from_f32(value)).collect()
    }
}
