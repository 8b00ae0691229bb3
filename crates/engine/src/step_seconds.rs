//! How long steps took, beside how long they were expected to take.

use std::time::Duration;

use plimsoll_core::{StepCosts, StepPlan};

/// Seconds of steps in which requests generated: as measured, and as [`StepCosts`] expects them from a few steps that were
/// measured at start. The scheduler relies on the latter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSeconds {
    /// Wall-clock time.
    pub actual: f64,
    /// Expected time.
    pub expected: f64,
}

/// [`StepSeconds`] by kind of step. A step that encodes a part of an image counts in neither.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SecondsByKind {
    /// Steps of outputs alone.
    pub decode: StepSeconds,
    /// Steps with prompts beside the outputs.
    pub mixed: StepSeconds,
}

impl StepSeconds {
    /// Of the steps after `before` was taken.
    pub fn since(self, before: Self) -> Self {
        Self {
            actual: self.actual - before.actual,
            expected: self.expected - before.expected,
        }
    }
}

impl SecondsByKind {
    /// Counts a step that succeeded, if requests generated in it.
    pub(crate) fn count(&mut self, plan: &StepPlan, costs: &StepCosts, took: Duration) {
        let continued = plan.runs.iter().filter(|run| run.continues_output());
        let contexts = continued.map(|run| run.start);
        let (outputs, context) = contexts.fold((0, 0), |(outputs, sum), start| (outputs + 1, sum + start));
        if outputs == 0 || plan.encode.is_some() {
            return;
        }
        // An output that is computed again after a preemption has many rows.
        let prompts = plan.num_tokens() - outputs;
        let (times, seconds) = match prompts {
            0 => (&mut self.decode, costs.decode_seconds(outputs)),
            _ => (&mut self.mixed, costs.mixed_seconds(outputs, prompts)),
        };
        let (actual, expected) = (
            took.as_secs_f64(),
            seconds + costs.context_seconds() * context as f64,
        );
        tracing::trace!(outputs, prompts, context, actual, expected, "step");
        times.actual += actual;
        times.expected += expected;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use plimsoll_core::{RequestId, Run, RunInput, SampleSpec, SamplingParams, StepCost};

    use super::*;

    /// Computes `tokens` behind `start`; the output sampled behind them is the one with this index.
    fn run(start: usize, tokens: usize, index: Option<usize>) -> Run {
        Run {
            request: RequestId(0),
            start,
            input: RunInput::Known(vec![0; tokens]),
            images: None,
            tables: Vec::new(),
            state: None,
            sample: index.map(|index| SampleSpec {
                params: Arc::new(SamplingParams::greedy()),
                seed: 0,
                index,
                history: Vec::new(),
                prompt_len: 0,
                constrained: false,
            }),
            score: None,
            pool: None,
        }
    }

    #[test]
    fn steps_in_which_requests_generate_are_counted_by_kind() {
        let cost = |rows: usize, seconds: f64| StepCost { rows, seconds };
        let decode = vec![cost(1, 1.0), cost(3, 3.0)];
        let mixed = vec![cost(2, 10.0), cost(102, 110.0)];
        let costs = StepCosts::new(decode, mixed, 0.25).unwrap();
        let mut times = SecondsByKind::default();
        let mut step = |runs: Vec<Run>, took: u64| {
            let plan = StepPlan {
                step: 0,
                runs,
                encode: None,
            };
            times.count(&plan, &costs, Duration::from_secs(took));
            times
        };
        let none = SecondsByKind::default();
        assert_eq!(
            step(vec![run(0, 50, None), run(0, 7, Some(0))], 9),
            none,
            "prompts alone"
        );
        let decode = StepSeconds {
            actual: 4.0,
            expected: 2.0 + 0.25 * 30.0,
        };
        let outputs = || vec![run(10, 1, Some(1)), run(20, 1, Some(5))];
        assert_eq!(step(outputs(), 4), SecondsByKind { decode, ..none });
        // An answer of three tokens is computed again, one of a prompt's tokens too.
        let runs = [outputs(), vec![run(0, 3, Some(3)), run(0, 1, None)]].concat();
        let mixed = StepSeconds {
            actual: 40.0,
            expected: 14.0 + 0.25 * 30.0,
        };
        assert_eq!(step(runs, 40), SecondsByKind { decode, mixed });
    }
}
