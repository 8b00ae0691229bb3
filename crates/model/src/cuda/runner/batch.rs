//! What becomes of the rows of a plan.

use plimsoll_core::{Pooling, RequestId, Run, ScoreSpec, StepPlan};

use crate::cuda::graphs::Graphs;
use crate::cuda::input::StepInput;
use crate::cuda::shape::BatchShape;
use crate::images;

/// A step that was launched.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) step: usize,
    pub(super) runs: Vec<LaunchedRun>,
}

/// A run of a step that was launched.
#[derive(Clone, Debug)]
pub(super) struct LaunchedRun {
    pub(super) request: RequestId,
    /// The row of its sample, and whether it wants log-probabilities.
    pub(super) sample: Option<(u32, bool)>,
    /// Which of the scored rows is its first, and what it wants of them.
    pub(super) score: Option<(usize, ScoreSpec)>,
    /// Which of the pooled vectors is its own.
    pub(super) vector: Option<usize>,
}

/// A step that waits for its masks.
#[derive(Debug)]
pub(super) struct Unsampled {
    pub(super) step: usize,
    pub(super) input: StepInput,
    /// Rows that are sampled from, padding left out.
    pub(super) samples: usize,
    pub(super) logprobs: bool,
}

/// How the rows of a step are laid out.
pub(super) struct Batch {
    pub(super) shape: BatchShape,
    /// Rows that are sampled from, padding left out.
    pub(super) samples: usize,
    pub(super) runs: Vec<LaunchedRun>,
}

impl Batch {
    /// A step of decoding requests takes a graph, if there is one. Prompts may be computed `in_chunks`.
    pub(super) fn new(plan: &StepPlan, graphs: &Graphs, in_chunks: bool) -> Self {
        let decodes = plan
            .runs
            .iter()
            .all(|run| run.input.len() == 1 && run.sample.is_some() && run.score.is_none())
            // Graphs know nothing of chunks of a recurrence: the last token of a prompt may be one.
            && !(in_chunks && plan.runs.iter().any(|run| run.state.is_some_and(|state| state.in_chunks)))
            // Graphs know nothing of images, whose last row may be that which is sampled from.
            && images::rows_of(plan).is_none();
        let is_long = is_long_row(&plan.runs, graphs.longest_whole);
        let step = graphs.step_for(plan.runs.len(), is_long).filter(|_| decodes);
        let (mut row, mut at, mut scored) = (0, Vec::new(), 0);
        let runs = plan.runs.iter().map(|run| {
            row += run.input.len();
            let sample = run.sample.as_ref().map(|spec| {
                at.push((row - 1) as i32);
                ((at.len() - 1) as u32, spec.params.logprobs().is_some())
            });
            let score = run.score.as_ref().map(|spec| {
                scored += spec.targets.len();
                (scored - spec.targets.len(), spec.clone())
            });
            LaunchedRun {
                request: run.request,
                sample,
                score,
                vector: None,
            }
        });
        let runs = runs.collect();
        Self {
            samples: at.len(),
            runs,
            shape: step.map_or(BatchShape::Exact(at), BatchShape::Decode),
        }
    }

    /// A step of a model for embeddings: last rows are picked, means are of all rows.
    pub(super) fn pooled(plan: &StepPlan) -> Self {
        let (mut row, mut at, mut spans) = (0, Vec::new(), Vec::new());
        let mut all = false;
        let runs = plan.runs.iter().map(|run| {
            let (first, len) = (row, run.input.len() as i32);
            row += len;
            let span = run.pool.map(|pooling| match pooling {
                Pooling::Last => {
                    at.push(row - 1);
                    [at.len() as i32 - 1, 1]
                }
                Pooling::Mean => {
                    all = true;
                    [first, len]
                }
            });
            let vector = span.map(|span| {
                spans.push(span);
                spans.len() - 1
            });
            LaunchedRun {
                request: run.request,
                sample: None,
                score: None,
                vector,
            }
        });
        let runs = runs.collect();
        Self {
            samples: 0,
            runs,
            shape: BatchShape::Pool((!all).then_some(at), spans),
        }
    }
}

/// Whether this is one row with more context than `longest` tokens, if there is such a bound.
fn is_long_row(runs: &[Run], longest: Option<usize>) -> bool {
    match (runs, longest) {
        ([run], Some(longest)) => run.end() > longest,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_core::RunInput;

    use super::*;

    #[test]
    fn one_row_alone_may_have_a_long_context() {
        let run = |context: usize| Run {
            request: RequestId(0),
            start: context - 1,
            input: RunInput::LastSampled,
            images: None,
            tables: Vec::new(),
            state: None,
            sample: None,
            score: None,
            pool: None,
        };
        for (contexts, longest, is_long) in [
            (&[8192][..], Some(8192), false),
            (&[8193], Some(8192), true),
            (&[8193], None, false),
            (&[8193, 1], Some(8192), false),
            (&[1, 9000, 20_000], Some(8192), false),
        ] {
            let runs: Vec<Run> = contexts.iter().map(|&context| run(context)).collect();
            assert_eq!(is_long_row(&runs, longest), is_long, "{contexts:?}, {longest:?}");
        }
    }
}
