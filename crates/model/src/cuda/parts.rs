//! Rows that are sampled together, as there is room for a bounded number of tokens that they refer to.

use std::ops::Range;

use plimsoll_core::{SampleSpec, StepLimits, StepPlan};
use plimsoll_kernels::cuda::{SampleLists, SampleRow};

use super::shape::{BatchShape, Sampling};

/// Elements of the lists that rows to sample refer to: room for any one row. Steps of more are sampled in parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListRoom {
    pub(super) history: usize,
    pub(super) biases: usize,
}

/// Rows of a step that are sampled together.
#[derive(Clone, Debug)]
pub(super) struct SamplePart {
    pub(super) rows: Range<usize>,
    /// What they refer to. Only that of the first part is there at first.
    lists: Option<SampleLists>,
}

/// What the plan says about the rows to sample from.
fn specs(plan: &StepPlan) -> impl Iterator<Item = &SampleSpec> {
    plan.runs.iter().filter_map(|run| run.sample.as_ref())
}

impl SamplePart {
    /// Takes what its rows refer to from the step's plan, if it is not there yet.
    pub(super) fn add_lists(&mut self, plan: &StepPlan) {
        if self.lists.is_none() {
            self.lists = Some(self.lists_of(plan));
        }
    }

    /// What its rows refer to.
    ///
    /// # Panics
    /// If it is not there yet.
    pub(super) fn lists(&self) -> &SampleLists {
        self.lists.as_ref().expect("what rows of a part refer to")
    }

    fn lists_of(&self, plan: &StepPlan) -> SampleLists {
        let mut lists = SampleLists::default();
        // Behind the last one is padding.
        for spec in specs(plan).skip(self.rows.start).take(self.rows.len()) {
            lists.add(spec, None);
        }
        lists
    }
}

impl ListRoom {
    pub(super) fn new(limits: &StepLimits, sampling: Sampling) -> Self {
        match sampling {
            Sampling::From { vocab_size } => Self {
                history: (256 << 10).max(limits.max_model_len),
                biases: (64 << 10).max(vocab_size),
            },
            Sampling::Pooled(_) => Self {
                history: 0,
                biases: 0,
            },
        }
    }

    /// One entry per row to sample from, padded as `shape` wants, and which of them are sampled together: the first part has its lists.
    pub(super) fn sample_rows(
        &self,
        plan: &StepPlan,
        shape: &BatchShape,
    ) -> (Vec<SampleRow>, Vec<SamplePart>) {
        let (mut rows, mut parts) = (Vec::new(), Vec::new());
        let (mut first, mut behind) = (0, [0; 2]);
        let part = |rows| SamplePart { rows, lists: None };
        for spec in specs(plan) {
            let more = [spec.history.len(), spec.params.logit_bias().len()];
            if behind[0] + more[0] > self.history || behind[1] + more[1] > self.biases {
                parts.push(part(first..rows.len()));
                (first, behind) = (rows.len(), [0; 2]);
            }
            let row = SampleRow::behind(spec, None, behind);
            rows.push(if spec.constrained { row.masked() } else { row });
            if spec.params.needs_history() {
                behind[0] += more[0];
            }
            behind[1] += more[1];
        }
        let len = match shape {
            BatchShape::Decode(step) => step.rows,
            // Fewer specs than rows where logits are asked for, and nothing is sampled.
            BatchShape::Exact(at) => at.len(),
            BatchShape::Pool(..) => 0,
        };
        rows.resize(len, SampleRow::padding());
        parts.push(part(first..rows.len()));
        parts[0].add_lists(plan);
        (rows, parts)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use plimsoll_core::{GroupTable, RequestId, Run, RunInput, SamplingOptions, SamplingParams};

    use super::*;
    use crate::cuda::shape::DecodeStep;

    /// A run of one token with this history, which counts if there is a penalty, and so many biases.
    fn run(request: u64, history: usize, is_penal: bool, biases: usize) -> Run {
        let options = SamplingOptions {
            repetition_penalty: is_penal.then_some(1.5),
            logit_bias: (0..biases as u32).map(|token| (token, 0.5)).collect(),
            ..Default::default()
        };
        let first = request as u32 * 100;
        Run {
            request: RequestId(request),
            start: 0,
            input: RunInput::Known(vec![1]),
            images: None,
            tables: vec![GroupTable::default()],
            state: None,
            sample: Some(SampleSpec {
                params: Arc::new(SamplingParams::new(&options, 1000).unwrap()),
                seed: request,
                index: 0,
                prompt_len: history,
                history: match is_penal {
                    true => (first..first + history as u32).collect(),
                    false => Vec::new(),
                },
                constrained: request.is_multiple_of(2),
            }),
            score: None,
            pool: None,
        }
    }

    /// Each part is what it would be as a step of its own, whenever its lists are taken from the plan.
    #[test]
    fn parts_are_like_steps_of_their_own() {
        let room = ListRoom {
            history: 50,
            biases: 6,
        };
        let plan = StepPlan {
            step: 0,
            runs: vec![
                run(1, 30, true, 2),
                run(2, 40, false, 1),
                run(3, 20, true, 3),
                run(4, 1, true, 1),
                run(5, 0, false, 6),
                run(6, 50, true, 1),
            ],
            encode: None,
        };
        let shape = BatchShape::Decode(DecodeStep {
            rows: 8,
            is_long: false,
        });
        let (rows, mut parts) = room.sample_rows(&plan, &shape);
        let ranges: Vec<_> = parts.iter().map(|part| part.rows.clone()).collect();
        assert_eq!(ranges, [0..3, 3..4, 4..5, 5..8]);
        assert!(parts[1..].iter().all(|part| part.lists.is_none()));
        for part in &mut parts {
            part.add_lists(&plan);
            let mut lists = SampleLists::default();
            for (row, run) in rows[part.rows.clone()].iter().zip(&plan.runs[part.rows.start..]) {
                let spec = run.sample.as_ref().unwrap();
                let alone = SampleRow::new(spec, None, &mut lists);
                assert_eq!(*row, if spec.constrained { alone.masked() } else { alone });
            }
            let found = part.lists();
            assert_eq!((&found.history, &found.biases), (&lists.history, &lists.biases));
        }
        assert_eq!(rows[6..], [SampleRow::padding(); 2]);
    }
}
