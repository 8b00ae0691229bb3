//! Stored tensors to device memory, at the speed of storage: threads that read, convert and copy at the same time.

use std::num::NonZero;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

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
        let bytes = |piece: &Piece| piece.rows.len() * row_bytes(self.jobs[piece.job].part());
        let most = self.pieces.iter().map(bytes).max().unwrap_or(0);
        let mut uploader = Uploader::new(self.gpu, most)?;
        let memory = self.slab.slice::<u8>();
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            self.cancel.check()?;
            let job = &self.jobs[piece.job];
            let start = job.part().start + piece.rows.start * row_bytes(job.part());
            let to = memory.range(start..start + bytes(piece));
            uploader.upload(to, |out| job.write_rows(piece.rows.clone(), out))?;
            // Nobody listens any more only if the caller panics.
            let _ = advanced.send(job.stored_bytes(piece.rows.len()));
        }
        Ok(uploader.finish()?)
    }
}

fn row_bytes(part: &Part) -> usize {
    part.bytes() / part.rows()
}

/// Ranges of rows of up to [`PIECE_BYTES`] each, at least one row.
fn pieces(part: &Part) -> impl Iterator<Item = Range<usize>> + use<> {
    let (rows, step) = (part.rows(), (PIECE_BYTES / row_bytes(part)).max(1));
    (0..rows)
        .step_by(step)
        .map(move |first| first..rows.min(first + step))
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use plimsoll_device::cast_slice_mut;
    use plimsoll_kernels::WeightType;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::super::jobs;
    use super::super::layout::tests::random_spec;
    use super::super::layout::{Element, Layout};
    use super::*;
    use crate::Shape;
    use crate::blocks::Vector;
    use crate::weights::{Checked, DummyWeights, RowOrder, Source, Tensor};

    #[test]
    fn pieces_are_all_rows_in_order() {
        for (rows, cols) in [
            (1, Some(1)),
            (7, Some(64 << 20)),
            (5000, Some(4096)),
            (1024, Some(4096)),
            (9 << 20, None),
        ] {
            let part = Part {
                vector: Vector::plain("", rows),
                cols,
                element: Element::Bf16,
                start: 0,
            };
            let mut next = 0;
            for piece in pieces(&part) {
                assert!(piece.start == next && !piece.is_empty());
                assert!(piece.len() == 1 || piece.len() * row_bytes(&part) <= PIECE_BYTES);
                next = piece.end;
            }
            assert_eq!(next, rows);
        }
    }

    /// Tensors of mixed types, in mixed orders of rows.
    struct Mixed([DummyWeights; 3]);

    impl Mixed {
        fn new() -> Self {
            let types = [WeightType::F32, WeightType::F16, WeightType::Bf16];
            Self(types.map(|dtype| DummyWeights { seed: 1, dtype }))
        }
    }

    impl Source for Mixed {
        fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
            let dummy = &self.0[name.len() % self.0.len()];
            let mut tensor = dummy.tensor(name, expected)?.expect("one is made up");
            if let [rows, cols] = *expected {
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
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut spec = random_spec(&mut rng);
            spec.hidden_size = 32 * rng.random_range(1..3);
            let layout = Layout::new(&spec).unwrap();
            let mixed = Mixed::new();
            let jobs = jobs(&mut Checked::new(&mixed), layout.parts.iter()).unwrap();
            let mut aligned = vec![u64::MAX; layout.bytes / 8];
            let memory: &mut [u8] = cast_slice_mut(&mut aligned);
            for job in &jobs {
                for rows in pieces(job.part()) {
                    let row_bytes = row_bytes(job.part());
                    let start = job.part().start + rows.start * row_bytes;
                    let out = &mut memory[start..start + rows.len() * row_bytes];
                    job.write_rows(rows, out).unwrap();
                }
            }
            for part in &layout.parts {
                let shape: Vec<usize> = std::iter::once(part.rows()).chain(part.cols).collect();
                let mut tensor = mixed.tensor(&part.vector.name, &shape).unwrap().unwrap();
                tensor.unit_offset = part.vector.unit_offset;
                let found = &mut memory[part.start..part.start + part.bytes()];
                let context = format!("seed {seed}: {} as {:?}", part.vector.name, tensor.dtype);
                let Some(cols) = part.cols else {
                    let want = tensor.widen().unwrap();
                    match part.element {
                        Element::F32 => assert_eq!(cast_slice_mut::<_, f32>(found), want, "{context}"),
                        Element::Bf16 => {
                            assert_eq!(cast_slice_mut::<_, bf16>(found), rounded(&want), "{context}")
                        }
                    }
                    continue;
                };
                let tensor = tensor.in_order();
                let mut want = vec![f32::NAN; part.rows() * cols];
                for (row, out) in want.chunks_exact_mut(cols).enumerate() {
                    tensor.matrix().unwrap().widen_row(row, out);
                }
                assert_eq!(cast_slice_mut::<_, bf16>(found), rounded(&want), "{context}");
            }
        }
    }

    fn rounded(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&value| bf16::from_f32(value)).collect()
    }
}
