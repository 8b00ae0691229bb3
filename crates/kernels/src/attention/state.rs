use super::Job;
use crate::kv::KvElement;
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, exp};

/// Softmax in progress: for each row the maximum of the scores so far, the sum of their exponentials and the weighted sum of
/// values, both relative to the maximum.
pub(super) struct State<'a> {
    pub(super) acc: &'a mut [f32],
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Floats of a state, whole vectors.
    pub(super) fn len(rows: usize, width: usize) -> usize {
        (rows * (width + 2)).next_multiple_of(LANES)
    }

    pub(super) fn new<E: KvElement>(job: &Job<'_, E>, memory: &'a mut [f32]) -> Self {
        let rows = job.rows();
        let (acc, rest) = memory.split_at_mut(rows * job.width);
        let (max, sum) = rest.split_at_mut(rows);
        Self {
            acc,
            max,
            sum: &mut sum[..rows],
        }
    }

    pub(super) fn reset(&mut self) {
        self.acc.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    pub(super) fn merge(&mut self, part: &State<'_>, level: Level) {
        let width = self.acc.len() / self.max.len();
        for row in 0..self.max.len() {
            let at = row * width..(row + 1) * width;
            if self.max[row] == f32::NEG_INFINITY {
                // The first part, taken over as it is.
                self.acc[at.clone()].copy_from_slice(&part.acc[at]);
                (self.max[row], self.sum[row]) = (part.max[row], part.sum[row]);
            } else if part.max[row] != f32::NEG_INFINITY {
                let max = self.max[row].max(part.max[row]);
                let ours = dispatch(level, Exp(self.max[row] - max));
                let theirs = dispatch(level, Exp(part.max[row] - max));
                for (a, b) in self.acc[at.clone()].iter_mut().zip(&part.acc[at]) {
                    *a = *a * ours + b * theirs;
                }
                self.sum[row] = self.sum[row] * ours + part.sum[row] * theirs;
                self.max[row] = max;
            }
        }
    }

    /// Sum of the weights of a row, that of its sink included, which counts once: here, not in parts.
    pub(super) fn total(&self, row: usize, sink: Option<f32>, level: Level) -> f32 {
        let (max, sum) = (self.max[row], self.sum[row]);
        match sink {
            // Without a weight there was no score that is a number.
            Some(sink) if sum > 0.0 => sum + dispatch(level, Exp(sink - max)),
            _ => sum,
        }
    }
}

struct Exp(f32);

impl Kernel for Exp {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: the features are there by the caller's promise.
        unsafe { exp_one::<S>(self.0) }
    }
}

/// `e^x` as the vectors compute it.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(super) unsafe fn exp_one<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    // SAFETY: the caller has the features of `S`; the array has sixteen elements.
    unsafe { S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(x))) };
    lanes[0]
}
