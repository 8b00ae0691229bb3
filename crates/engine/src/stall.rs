//! Detects steps that never end, and describes them.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use plimsoll_core::{Run, StepPlan};
use strum::{EnumIter, FromRepr, IntoStaticStr};

use crate::Phase;
use crate::shape::image_patches;

/// A step that was launched, or is being launched, and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepInFlight {
    /// Its number.
    pub step: u64,
    /// Requests in it.
    pub rows: usize,
    /// Tokens of prompts that it computes.
    pub prefill_tokens: usize,
    /// Generated tokens that it computes.
    pub decode_tokens: usize,
    /// Longest context: tokens of one request, those before the step included.
    pub longest_context: usize,
    /// Patches of the image that it encodes a part of, or of which it has rows; 0 without one.
    pub image_patches: usize,
}

impl From<&StepPlan> for StepInFlight {
    fn from(plan: &StepPlan) -> Self {
        let prefill_tokens = plan.prompt_tokens();
        Self {
            step: plan.step,
            rows: plan.runs.len(),
            prefill_tokens,
            decode_tokens: plan.num_tokens() - prefill_tokens,
            longest_context: plan.runs.iter().map(Run::end).max().unwrap_or(0),
            image_patches: image_patches(plan),
        }
    }
}

/// Keys and values for the log.
impl fmt::Display for StepInFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step={} rows={} prefill_tokens={} decode_tokens={} longest_context={} image_patches={}",
            self.step,
            self.rows,
            self.prefill_tokens,
            self.decode_tokens,
            self.longest_context,
            self.image_patches
        )
    }
}

/// What the engine thread is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumIter, FromRepr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum Activity {
    /// Commands, plans, events.
    #[default]
    BetweenSteps,
    /// It hands a step to the executor.
    Launch,
    /// It computes the masks of a step's constrained requests.
    Masks,
    /// It waits for the end of a step.
    Finish,
    /// It builds and proves another state.
    Build,
}

impl Activity {
    /// Name in logs.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What the engine thread is doing, as it last recorded: written a few times per step, read when a step hangs.
#[derive(Debug, Default)]
pub(crate) struct CurrentActivity(AtomicU8);

impl CurrentActivity {
    pub(crate) fn set(&self, activity: Activity) {
        self.0.store(activity as u8, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Activity {
        Activity::from_repr(self.0.load(Ordering::Relaxed)).unwrap_or_default()
    }
}

/// An engine that has work and makes no progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Phase of the engine's life.
    pub phase: Phase,
    /// What its thread is doing.
    pub activity: Activity,
    /// How long there has been no progress.
    pub waited: Duration,
    /// The oldest step that has not ended.
    pub step: Option<StepInFlight>,
    /// Requests that have KV and run.
    pub running: usize,
    /// Requests that wait to run.
    pub waiting: usize,
}

/// Keys and values for the log.
impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (phase, activity, seconds) = (self.phase, self.activity.name(), self.waited.as_secs_f64());
        write!(f, "phase=\"{phase}\" activity={activity} seconds={seconds:.1} ")?;
        match &self.step {
            Some(step) => write!(f, "{step}")?,
            None => f.write_str("step=none")?,
        }
        write!(f, " running={} waiting={}", self.running, self.waiting)
    }
}

/// How often to check for progress.
pub(crate) fn look_every(timeout: Duration) -> Duration {
    (timeout / 20).clamp(Duration::from_millis(5), Duration::from_secs(1))
}

/// Measures the time without progress. If the whole process or its machine was suspended between two checks, that time
/// counts as one interval: the engine could not make progress either.
#[derive(Debug)]
pub(crate) struct Patience {
    every: Duration,
    looked: Instant,
    progress: Option<Instant>,
    waited: Duration,
}

impl Patience {
    pub(crate) fn new(every: Duration, now: Instant) -> Self {
        Self {
            every,
            looked: now,
            progress: None,
            waited: Duration::ZERO,
        }
    }

    /// How long `progress`, the time of the last progress, has not changed. `None`: there is no work.
    pub(crate) fn look(&mut self, progress: Option<Instant>, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.looked).min(2 * self.every);
        self.waited = match progress {
            Some(_) if progress == self.progress => self.waited + passed,
            // Progress within this interval.
            Some(at) => now.saturating_duration_since(at).min(passed),
            None => Duration::ZERO,
        };
        self.looked = now;
        self.progress = progress;
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn patience_ends_where_nothing_moves_and_only_there() {
        let start = Instant::now();
        let mut patience = Patience::new(SECOND, start);
        let mut at = |seconds: u32, progress: Option<u32>| {
            let progress = progress.map(|seconds| start + SECOND * seconds);
            patience.look(progress, start + SECOND * seconds).as_secs()
        };
        // Idle, then work at 2 that makes no progress.
        assert_eq!((at(1, None), at(2, None)), (0, 0));
        assert_eq!((at(3, Some(2)), at(4, Some(2)), at(5, Some(2))), (1, 2, 3));
        // A step ended.
        assert_eq!((at(6, Some(6)), at(7, Some(6))), (0, 1));
        // Slow, but with progress.
        for second in 8..20 {
            assert!(at(second, Some(second - second % 2)) <= 1);
        }
        assert_eq!(at(20, None), 0);
    }

    #[test]
    fn time_in_which_the_process_stood_still_does_not_count() {
        let start = Instant::now();
        let mut patience = Patience::new(SECOND, start);
        assert_eq!(patience.look(Some(start), start + SECOND), SECOND);
        let waited = patience.look(Some(start), start + 1000 * SECOND);
        assert_eq!(waited, 3 * SECOND, "one long interval");
        assert_eq!(patience.look(Some(start), start + 1001 * SECOND), 4 * SECOND);
    }

    #[test]
    fn activities_are_told_apart() {
        let current = CurrentActivity::default();
        assert_eq!(current.get(), Activity::BetweenSteps);
        for activity in Activity::iter() {
            current.set(activity);
            assert_eq!(current.get(), activity);
        }
    }
}
