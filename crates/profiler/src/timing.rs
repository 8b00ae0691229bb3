//! How long steps of different sizes take: from this the scheduler knows what a token of a prompt costs beside those that
//! generate.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::time::{Duration, Instant};

use plimsoll_core::{
    Executor, KvConfig, MEASURED_DECODE_ROWS, MEASURED_MIXED_ROWS, OUTPUTS_BESIDE_PROMPTS, StepCost,
    StepPlan, larger_rows,
};

use crate::profiler::Profiler;
use crate::scenario::{ScenarioKind, timed_step};
use crate::stress::{Stop, check_finite};
use crate::timed_shape::TimedShape;
use crate::{Phase, StepTimes, Target, TimedStep};

/// The second round times steps of up to so many rows twice, as they vary more. Larger ones may be timed in it alone.
const REPEATED_ROWS: usize = 256;

/// Tokens before those that are generated: reading them takes no time.
const SHORT_CONTEXT: usize = 1;
/// What a token of context costs is the difference to these, in steps of so many rows.
const LONG_CONTEXT: usize = 2048;
const LONG_CONTEXT_ROWS: usize = 64;
/// A smaller difference says nothing.
const LEAST_LONG_CONTEXT: usize = 256;

/// For all steps together, or this part of the time of the proof if that is longer.
const LIMIT: Duration = Duration::from_millis(500);
const LIMIT_OF_PROOF: f64 = 0.1;
/// With the steps of [`larger_rows`], so many times that limit.
const LIMIT_OF_LARGER: f64 = 2.0;

impl<T: Target> Profiler<'_, T> {
    /// Times steps of a state that took `proof` to prove, smaller than those of the proof. `None` where nothing is ever computed
    /// beside what generates, or the device is so slow that there is no time for enough of them.
    pub(crate) fn time_steps(
        &mut self,
        state: &mut T::State,
        kv: KvConfig,
        proof: Duration,
    ) -> Result<Option<StepTimes>, Stop> {
        let depth = self.spec.timed_in_flight;
        if depth == 0 || self.spec.pooling.is_some() {
            return Ok(None);
        }
        let known = self.spec.plan.as_ref().and_then(|plan| plan.step_times.clone());
        // The ranks run the same steps, or none.
        if self.ranks.min(usize::from(known.is_some()))? == 1 {
            return Ok(known);
        }
        self.observer.ended(Phase::Validate);
        let started = Instant::now();
        let limit = LIMIT.max(proof.mul_f64(LIMIT_OF_PROOF));
        let mut stopwatch = Stopwatch::new(started, limit, depth);
        let shapes = self.timed_shapes(kv);
        let (small, large) = shapes.split_at(shapes.partition_point(|shape| shape.rows <= REPEATED_ROWS));
        let small_again: Vec<_> = small.iter().rev().flat_map(|shape| [shape; 2]).collect();
        let again: Vec<_> = large.iter().rev().chain(small_again.iter().copied()).collect();
        // The smallest first, until there is no more time on a slow device. The first step of a size can take longer than all that follow.
        self.time(state, kv, &mut stopwatch, small)?;
        // Behind another step that does not show: what is longer is launching it. So where there is time for all in any case, large steps are
        // timed in the second round alone.
        let is_once = depth > 1 && stopwatch.is_time_for_all(&again);
        let is_once = self.ranks.min(usize::from(is_once))? == 1;
        if !is_once {
            self.time(state, kv, &mut stopwatch, large)?;
        }
        // Launched ahead of larger steps: the time of the first of a row of steps has that of its launch in it.
        let ahead = small.last().filter(|_| depth > 1);
        // The largest first: under load a GPU's power limit lowers its clock, and small steps then take as long as in a busy server. On an
        // H200 256 rows of an 8B model take 6.7 ms after a pause, and 7.7 under load.
        stopwatch.begin_round();
        self.time(
            state,
            kv,
            &mut stopwatch,
            ahead.into_iter().chain(large.iter().rev()),
        )?;
        if is_once {
            // More load, where the first round was none.
            self.time_larger(state, kv, &mut stopwatch, ahead)?;
        }
        // It was timed before there was load.
        if let Some(shape) = ahead {
            stopwatch.shortest.remove(shape);
        }
        self.time(state, kv, &mut stopwatch, small_again)?;
        stopwatch.end_round();
        if !is_once {
            self.time_larger(state, kv, &mut stopwatch, ahead)?;
        }
        let times = stopwatch.times();
        // A slow device has no time for all of them.
        let kinds = [("decode", &times.decode), ("mixed", &times.mixed)];
        let kinds = kinds.into_iter().filter(|(_, steps)| !steps.is_empty());
        let mut fields: Vec<_> = kinds.map(|(kind, steps)| (kind, listed(steps))).collect();
        fields.extend([
            ("context_ns", format!("{:.1}", times.context_seconds * 1e9)),
            ("seconds", crate::profiler::seconds(started)),
        ]);
        self.log(Phase::Timing, fields);
        Ok(times.costs().is_some().then_some(times))
    }

    /// Times steps of [`larger_rows`], for which there is time of their own.
    fn time_larger(
        &mut self,
        state: &mut T::State,
        kv: KvConfig,
        stopwatch: &mut Stopwatch,
        ahead: Option<&TimedShape>,
    ) -> Result<(), Stop> {
        stopwatch.limit = stopwatch.limit.mul_f64(LIMIT_OF_LARGER);
        stopwatch.latest = stopwatch.of_largest();
        while let Some(larger) = self.larger(stopwatch, kv)? {
            // The small one takes less time than a second larger one.
            self.time(state, kv, stopwatch, [ahead.unwrap_or(&larger), &larger])?;
            if !stopwatch.shortest.contains_key(&larger) {
                break;
            }
        }
        Ok(())
    }

    /// Times steps one after the other, and skips each that would not end in time: a smaller one that follows may.
    fn time<'a>(
        &mut self,
        state: &mut T::State,
        kv: KvConfig,
        stopwatch: &mut Stopwatch,
        shapes: impl IntoIterator<Item = &'a TimedShape>,
    ) -> Result<(), Stop> {
        stopwatch.last = Instant::now();
        for &shape in shapes {
            let is_time = stopwatch.is_time_for(shape);
            if self.ranks.min(usize::from(is_time))? == 0 {
                continue;
            }
            let plan = timed_step(&self.spec.limits, self.spec.vocab_size, kv, shape);
            self.launch(state, &plan)?;
            stopwatch.running.push_back(shape);
            // As the engine does it: where the device works by itself, the next step is launched while one runs.
            if stopwatch.running.len() == self.spec.timed_in_flight {
                self.finish(state)?;
                stopwatch.finished();
            }
        }
        while !stopwatch.running.is_empty() {
            self.finish(state)?;
            stopwatch.finished();
        }
        Ok(())
    }

    /// The next larger step with prompts to time, if all ranks would time it.
    fn larger(&mut self, stopwatch: &Stopwatch, kv: KvConfig) -> Result<Option<TimedShape>, Stop> {
        let limits = &self.spec.limits;
        let larger = stopwatch.larger(limits.max_num_batched_tokens);
        let larger = larger.filter(|shape| shape.fits(limits, kv));
        let rows = self.ranks.min(larger.map_or(0, |shape| shape.rows))?;
        Ok(larger.filter(|shape| shape.rows == rows))
    }

    /// All that the limits and the cache have room for, the smallest first.
    fn timed_shapes(&self, kv: KvConfig) -> Vec<TimedShape> {
        let limits = &self.spec.limits;
        let upto = |sizes: &[usize], most: usize| {
            let last = sizes.last().copied().filter(|&last| last < most);
            let smaller = sizes.iter().copied().filter(|&rows| rows < most);
            smaller.chain([last.unwrap_or(most)]).collect::<Vec<_>>()
        };
        let longest = limits.max_model_len - 1;
        let context = longest.min(SHORT_CONTEXT);
        let decode = upto(
            &MEASURED_DECODE_ROWS,
            limits.max_num_seqs.min(limits.max_num_batched_tokens),
        );
        let decode = decode.into_iter().map(|rows| TimedShape::decode(rows, context));
        let beside = OUTPUTS_BESIDE_PROMPTS.min(limits.max_num_seqs / 2);
        let mixed = upto(&MEASURED_MIXED_ROWS, limits.max_num_batched_tokens);
        let mixed = mixed.into_iter().map(|rows| TimedShape {
            rows,
            decoding: beside.min(rows / 2),
            context,
        });
        let rows = limits
            .max_num_seqs
            .min(limits.max_num_batched_tokens)
            .min(LONG_CONTEXT_ROWS);
        let long = (kv.capacity_tokens() / rows).saturating_sub(2 * kv.block_size.tokens());
        let long = long.min(longest).min(LONG_CONTEXT);
        let compared = [context, long].map(|context| TimedShape::decode(rows, context));
        let compared = compared.into_iter().filter(|_| long >= LEAST_LONG_CONTEXT);
        let shapes = decode.chain(mixed).chain(compared);
        let mut shapes: Vec<_> = shapes.filter(|shape| shape.fits(limits, kv)).collect();
        shapes.sort_unstable();
        shapes.dedup();
        shapes
    }

    fn launch(&mut self, state: &mut T::State, plan: &StepPlan) -> Result<(), Stop> {
        let launched = state.launch(plan).map_err(stop);
        self.agree(Phase::Timing, None, launched)
    }

    fn finish(&mut self, state: &mut T::State) -> Result<(), Stop> {
        let finished = state.finish().map_err(stop);
        let finished = finished.and_then(|output| check_finite(Phase::Timing, TIMED_AS, &output));
        self.agree(Phase::Timing, None, finished)
    }
}

/// These steps are like the worst mixed one, only smaller.
const TIMED_AS: ScenarioKind = ScenarioKind::Mixed;

fn stop(error: plimsoll_core::StepError) -> Stop {
    Stop::of_step(Phase::Timing, TIMED_AS, error)
}

fn listed(steps: &[TimedStep]) -> String {
    let steps = steps.iter();
    let steps = steps.map(|step| format!("{}:{:.2}ms", step.rows, step.seconds * 1e3));
    steps.collect::<Vec<_>>().join(",")
}

/// Takes the time from the end of one step to the end of the next.
struct Stopwatch {
    started: Instant,
    limit: Duration,
    /// When the last step ended.
    last: Instant,
    /// Steps in flight, the oldest first.
    running: VecDeque<TimedShape>,
    /// Seconds of the shortest step of each shape in this round.
    shortest: BTreeMap<TimedShape, f64>,
    /// The same of the round before.
    before: BTreeMap<TimedShape, f64>,
    /// Rows and seconds of the last two steps that were timed, the latter last.
    latest: [Option<(usize, f64)>; 2],
}

impl Stopwatch {
    fn new(started: Instant, limit: Duration, depth: usize) -> Self {
        Self {
            started,
            limit,
            last: started,
            running: VecDeque::with_capacity(depth),
            shortest: BTreeMap::new(),
            before: BTreeMap::new(),
            latest: [None; 2],
        }
    }

    fn begin_round(&mut self) {
        self.before = mem::take(&mut self.shortest);
    }

    /// Keeps the time of the round before for each shape that this one had no time for.
    fn end_round(&mut self) {
        let mut all = mem::take(&mut self.before);
        all.append(&mut self.shortest);
        self.shortest = all;
    }

    /// Whether another step is likely to end in time.
    fn is_time_for(&self, shape: TimedShape) -> bool {
        let known = self
            .shortest
            .get(&shape)
            .or_else(|| self.before.get(&shape))
            .copied();
        let seconds = known.unwrap_or_else(|| self.predicted(shape.rows));
        self.started.elapsed().as_secs_f64() + seconds < self.limit.as_secs_f64()
    }

    /// Whether all of these will end in time if a row of a larger step costs no more than one of the step that was timed last. Should it cost
    /// more, those that come last are left out.
    fn is_time_for_all(&self, shapes: &[&TimedShape]) -> bool {
        let Some((timed, seconds)) = self.latest[1] else {
            return false;
        };
        let most = |shape: &&TimedShape| match self.shortest.get(*shape) {
            Some(known) => *known,
            None => seconds * (shape.rows as f64 / timed as f64).max(1.0),
        };
        let all: f64 = shapes.iter().map(most).sum();
        self.started.elapsed().as_secs_f64() + all < self.limit.as_secs_f64()
    }

    /// Seconds of a step of so many rows, by the last two that were timed. One alone tells nothing: on a GPU 64 rows take hardly
    /// longer than one, on a CPU 64 times as long.
    fn predicted(&self, rows: usize) -> f64 {
        let [before, last] = self.latest;
        let Some((timed, seconds)) = last else { return 0.0 };
        let slope = match before {
            Some((fewer, less)) if fewer < timed => (seconds - less) / (timed - fewer) as f64,
            _ => 0.0,
        };
        seconds + slope.max(0.0) * rows.saturating_sub(timed) as f64
    }

    /// What makes [`Self::predicted`] proportional to the largest step with prompts so far.
    fn of_largest(&self) -> [Option<(usize, f64)>; 2] {
        let mixed = self.shortest.iter().filter(|(shape, _)| shape.is_mixed());
        let largest = mixed.map(|(shape, &seconds)| (shape.rows, seconds)).next_back();
        [largest.map(|_| (0, 0.0)), largest]
    }

    /// The next larger step with prompts to time.
    fn larger(&self, most: usize) -> Option<TimedShape> {
        let mixed = || self.shortest.iter().filter(|(shape, _)| shape.is_mixed());
        let costs = mixed().map(|(shape, &seconds)| StepCost {
            rows: shape.rows,
            seconds,
        });
        let rows = larger_rows(&costs.collect::<Vec<_>>(), most)?;
        let (largest, _) = mixed().next_back()?;
        Some(TimedShape { rows, ..*largest })
    }

    fn finished(&mut self) {
        let now = Instant::now();
        let seconds = (now - self.last).as_secs_f64();
        self.last = now;
        if let Some(shape) = self.running.pop_front() {
            let shortest = self.shortest.entry(shape).or_insert(seconds);
            *shortest = shortest.min(seconds);
            self.latest = [self.latest[1], Some((shape.rows, seconds))];
        }
    }

    fn times(&self) -> StepTimes {
        let short = self.shortest.keys().map(|shape| shape.context).min().unwrap_or(0);
        let of = |mixed: bool| {
            let steps = self.shortest.iter();
            let steps = steps.filter(move |(shape, _)| shape.is_mixed() == mixed && shape.context == short);
            steps
                .map(|(shape, &seconds)| TimedStep {
                    rows: shape.rows,
                    seconds,
                })
                .collect()
        };
        let long = self.shortest.iter().find(|(shape, _)| shape.context > short);
        let context_seconds = long.and_then(|(shape, seconds)| {
            let same = self.shortest.get(&TimedShape {
                context: short,
                ..*shape
            })?;
            let tokens = shape.rows * (shape.context - short);
            Some((seconds - same).max(0.0) / tokens as f64)
        });
        StepTimes {
            decode: of(false),
            mixed: of(true),
            context_seconds: context_seconds.unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_larger_step_takes_as_long_for_each_row() {
        let mut stopwatch = Stopwatch::new(Instant::now(), Duration::from_secs(60), 1);
        let mixed = |rows| TimedShape {
            rows,
            decoding: 16,
            context: 1,
        };
        let times = [
            (TimedShape::decode(1024, 1), 20e-3),
            (mixed(1024), 24e-3),
            (mixed(2048), 28e-3),
            (TimedShape::decode(4096, 1), 30e-3),
        ];
        stopwatch.shortest = times.into();
        stopwatch.latest = stopwatch.of_largest();
        assert_eq!(stopwatch.larger(6000), Some(mixed(4096)));
        let predicted = stopwatch.predicted(4096);
        assert!((predicted - 56e-3).abs() < 1e-9, "{predicted}");
    }

    #[test]
    fn there_is_time_for_all_where_larger_steps_cost_no_more_by_the_row() {
        let mut stopwatch = Stopwatch::new(Instant::now(), Duration::from_secs(60), 2);
        let [small, last, large] = [1, 256, 1024].map(|rows| TimedShape::decode(rows, 1));
        assert!(!stopwatch.is_time_for_all(&[&small]));
        stopwatch.shortest = [(small, 1.0), (last, 8.0)].into();
        stopwatch.latest = [Some((1, 1.0)), Some((256, 8.0))];
        // Four times eight seconds.
        assert!(stopwatch.is_time_for_all(&[&large, &last, &last, &small]));
        assert!(!stopwatch.is_time_for_all(&[&large, &large]));
        // What is smaller and was not timed may take as long.
        let between = TimedShape::decode(2, 1);
        assert!(stopwatch.is_time_for_all(&[&between; 7]));
        assert!(!stopwatch.is_time_for_all(&[&between; 8]));
    }

    #[test]
    fn a_round_replaces_the_times_of_the_one_before() {
        let mut stopwatch = Stopwatch::new(Instant::now(), Duration::from_secs(60), 1);
        let [small, large] = [1, 64].map(|rows| TimedShape::decode(rows, 1));
        stopwatch.shortest = [(small, 1.0), (large, 2.0)].into();
        stopwatch.begin_round();
        stopwatch.shortest = [(large, 3.0)].into();
        stopwatch.end_round();
        assert_eq!(stopwatch.shortest, [(small, 1.0), (large, 3.0)].into());
    }

    #[test]
    fn the_last_two_steps_predict_the_next() {
        let mut stopwatch = Stopwatch::new(Instant::now(), Duration::from_secs(60), 1);
        assert_eq!(stopwatch.predicted(1), 0.0);
        // As measured on an H200, where proportion to rows predicted 292 ms for 64.
        stopwatch.latest = [None, Some((1, 4.56e-3))];
        assert_eq!(stopwatch.predicted(64), 4.56e-3);
        stopwatch.latest = [Some((1, 4.56e-3)), Some((32, 5.18e-3))];
        let predicted = stopwatch.predicted(64);
        assert!((5.8e-3..5.9e-3).contains(&predicted), "{predicted}");
        // As on a CPU.
        stopwatch.latest = [Some((1, 5e-3)), Some((32, 160e-3))];
        let predicted = stopwatch.predicted(64);
        assert!((0.31..0.33).contains(&predicted), "{predicted}");
    }
}
