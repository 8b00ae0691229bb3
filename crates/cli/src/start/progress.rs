//! How far a start is: what `/ready` says until there is an engine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use plimsoll_server::{Start, StartPhase, StartStatus};

use crate::bytes::Bytes;

/// Seconds that phases of a start took, by their names.
pub(crate) type PhaseSeconds = BTreeMap<String, f64>;

/// The progress of one start. Clones share it.
#[derive(Clone, Debug)]
pub struct StartProgress(Arc<Mutex<Course>>);

const PHASES: usize = StartPhase::ALL.len();

/// What part of a start each phase is, where no earlier start tells. A download is none until there is one.
const SHARES: [f64; PHASES] = [1.0, 0.0, 1.0, 40.0, 28.0, 1.0, 3.0, 24.0, 2.0];

/// The part of a download.
const DOWNLOAD_SHARE: f64 = 100.0;

/// No phase is over before it is over, however long it took last time.
const ALMOST: f64 = 0.95;

/// Longest phase that is believed, in seconds.
const MOST: f64 = 7.0 * 24.0 * 3600.0;

#[derive(Debug)]
struct Course {
    begin: Instant,
    phase: StartPhase,
    /// When the phase began.
    since: Instant,
    /// What part of the phase is done, where that is counted.
    part: Option<f64>,
    detail: Option<String>,
    /// Sizes that were tried so far.
    attempts: usize,
    shares: [f64; PHASES],
    /// What each phase is expected to take, or took.
    seconds: [Option<f64>; PHASES],
    /// What each phase took in this start.
    taken: [f64; PHASES],
    /// The most that was ever shown as done.
    shown: f64,
}

impl Default for StartProgress {
    fn default() -> Self {
        Self::at(Instant::now())
    }
}

impl StartProgress {
    fn at(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(Course {
            begin: now,
            phase: StartPhase::Resolve,
            since: now,
            part: None,
            detail: None,
            attempts: 0,
            shares: SHARES,
            seconds: [None; PHASES],
            taken: [0.0; PHASES],
            shown: 0.0,
        })))
    }

    /// A phase begins, unless it is the present one.
    pub(crate) fn enter(&self, phase: StartPhase) {
        self.0.lock().enter(phase, Instant::now());
    }

    /// There is something to download.
    pub(crate) fn downloads(&self) {
        let mut course = self.0.lock();
        course.shares[StartPhase::Download as usize] = DOWNLOAD_SHARE;
        course.enter(StartPhase::Download, Instant::now());
    }

    /// Bytes of the phase that are done.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        let detail = format!("{} of {}", Bytes(done), Bytes(total));
        self.0.lock().count(done as f64, total as f64, detail);
    }

    /// Worst steps of the phase that are done, and which is next.
    pub(crate) fn steps(&self, done: usize, of: usize, next: &str) {
        let mut course = self.0.lock();
        let mut detail = format!("worst step {} of {of}: {next}", done + 1);
        if course.phase == StartPhase::Validate {
            detail = format!("size {}, {detail}", course.attempts);
        }
        course.count(done as f64, of as f64, detail);
    }

    /// CUDA graphs that are captured; those of the state that is probed are part of the probe.
    pub(crate) fn graphs(&self, done: usize, of: usize) {
        let mut course = self.0.lock();
        let detail = format!("CUDA graph {} of {of}", (done + 1).min(of));
        match course.phase {
            StartPhase::Rebuild | StartPhase::Capture => {
                course.enter(StartPhase::Capture, Instant::now());
                course.count(done as f64, of as f64, detail);
            }
            _ => course.detail = Some(detail),
        }
    }

    /// What an earlier start of the same model took, whose probe this one will not need.
    pub(crate) fn expect(&self, earlier: &PhaseSeconds) {
        let mut course = self.0.lock();
        for &phase in StartPhase::ALL {
            let took = earlier.get(phase.name()).copied();
            course.seconds[phase as usize] = took.filter(|seconds| (0.0..MOST).contains(seconds));
        }
        course.seconds[StartPhase::Probe as usize] = Some(0.0);
        // A download, if there is one, was none of that start's.
        let known = course.seconds;
        if known[StartPhase::Weights as usize].is_some() && known[StartPhase::Validate as usize].is_some() {
            for phase in &StartPhase::ALL[StartPhase::Device as usize..] {
                course.shares[*phase as usize] = known[*phase as usize].unwrap_or(0.0);
            }
        }
    }

    /// What the validation is expected to take at least: the steps of a probe, as they were measured.
    pub(crate) fn expect_validation(&self, seconds: f64) {
        let expected = &mut self.0.lock().seconds[StartPhase::Validate as usize];
        *expected = Some(expected.map_or(seconds, |earlier| earlier.max(seconds)));
    }

    /// What phases took, for the next start of the same model.
    pub(crate) fn taken(&self) -> PhaseSeconds {
        let course = self.0.lock();
        let now = course.since.elapsed().as_secs_f64();
        let took = |phase: StartPhase| match phase == course.phase {
            true => course.taken[phase as usize] + now,
            false => course.taken[phase as usize],
        };
        let kept = StartPhase::ALL
            .iter()
            .filter(|phase| **phase != StartPhase::Download);
        kept.map(|&phase| (phase.name().to_owned(), took(phase)))
            .collect()
    }
}

impl Course {
    fn enter(&mut self, phase: StartPhase, now: Instant) {
        if phase == self.phase {
            return;
        }
        let left = self.phase as usize;
        let took = (now - self.since).as_secs_f64();
        self.taken[left] += took;
        // The same steps again.
        if self.phase == StartPhase::Probe {
            self.seconds[StartPhase::Validate as usize].get_or_insert(took);
        }
        if phase == StartPhase::Rebuild {
            self.attempts += 1;
        }
        self.phase = phase;
        self.since = now;
        self.part = None;
        self.detail = None;
    }

    fn count(&mut self, done: f64, total: f64, detail: String) {
        self.part = (total > 0.0).then(|| (done / total).clamp(0.0, 1.0));
        self.detail = Some(detail);
    }

    fn status(&mut self, now: Instant) -> StartStatus {
        let here = self.phase as usize;
        let spent = (now - self.since).as_secs_f64();
        let by_clock = self.seconds[here]
            .filter(|&seconds| seconds > 0.0)
            .map(|seconds| spent / seconds);
        let part = self.part.or(by_clock).unwrap_or(0.0).min(ALMOST);
        let before: f64 = self.shares[..here].iter().sum();
        let done = (before + self.shares[here] * part) / self.shares.iter().sum::<f64>();
        self.shown = self.shown.max(done.min(ALMOST));
        StartStatus {
            phase: self.phase,
            detail: self.detail.clone(),
            done: self.shown,
            elapsed: now - self.begin,
            remaining: self
                .remaining(spent)
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        }
    }

    /// By the pace of the present phase, and what those behind it are known to take.
    fn remaining(&self, spent: f64) -> Option<f64> {
        let here = match (self.part, self.seconds[self.phase as usize]) {
            (Some(part), _) if part > 0.0 => spent * (1.0 - part) / part,
            (_, Some(expected)) => (expected - spent).max(0.0),
            (_, None) => short(self.phase)?,
        };
        let behind = &StartPhase::ALL[self.phase as usize + 1..];
        behind.iter().try_fold(here, |sum, &phase| {
            let takes = match (self.seconds[phase as usize], phase) {
                (Some(seconds), _) => seconds,
                // The steps that are probed now.
                (None, StartPhase::Validate) if self.phase == StartPhase::Probe => {
                    spent / self.part.filter(|&part| part > 0.0)?
                }
                (None, StartPhase::Download) => 0.0,
                (None, phase) => short(phase)?,
            };
            Some(sum + takes)
        })
    }
}

/// Phases that take next to nothing.
fn short(phase: StartPhase) -> Option<f64> {
    use StartPhase::{Capture, Device, Engine, Rebuild, Resolve};
    matches!(phase, Resolve | Device | Rebuild | Capture | Engine).then_some(0.0)
}

impl Start for StartProgress {
    fn status(&self) -> StartStatus {
        self.0.lock().status(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Clock(Instant, StartProgress);

    impl Clock {
        fn new() -> Self {
            let now = Instant::now();
            Self(now, StartProgress::at(now))
        }

        fn at(&self, seconds: f64) -> Instant {
            self.0 + Duration::from_secs_f64(seconds)
        }

        fn enter(&self, seconds: f64, phase: StartPhase) {
            self.1.0.lock().enter(phase, self.at(seconds));
        }

        /// Percent, and the seconds that are left.
        fn look(&self, seconds: f64) -> (u32, Option<u64>) {
            let status = self.1.0.lock().status(self.at(seconds));
            assert_eq!(status.elapsed.as_secs_f64().round(), seconds.round());
            let left = status.remaining.map(|left| left.as_secs_f64().round() as u64);
            ((status.done * 100.0) as u32, left)
        }
    }

    #[test]
    fn a_first_start_estimates_once_the_worst_steps_run() {
        let clock = Clock::new();
        assert_eq!(clock.look(0.0), (0, None));
        clock.1.0.lock().shares[StartPhase::Download as usize] = DOWNLOAD_SHARE;
        clock.enter(1.0, StartPhase::Download);
        clock.1.bytes(30 << 20, 40 << 20);
        assert_eq!(clock.1.status().detail.as_deref(), Some("30.0 MiB of 40.0 MiB"));
        let (downloading, unknown) = clock.look(10.0);
        assert!(
            (35..40).contains(&downloading) && unknown.is_none(),
            "{downloading}"
        );
        clock.enter(14.0, StartPhase::Device);
        clock.enter(15.0, StartPhase::Weights);
        clock.1.bytes(1, 2);
        assert_eq!(
            clock.look(20.0).1,
            None,
            "nobody knows how long the worst steps take"
        );
        clock.enter(25.0, StartPhase::Probe);
        clock.1.steps(0, 10, "prefill");
        assert_eq!(clock.look(25.0).1, None);
        clock.1.steps(5, 10, "decode");
        // Five seconds for half of them, and all of them once more.
        assert_eq!(clock.look(30.0).1, Some(15));
        clock.enter(35.0, StartPhase::Rebuild);
        assert_eq!(clock.look(36.0).1, Some(10));
        clock.enter(36.0, StartPhase::Validate);
        clock.1.steps(9, 10, "decode");
        let last = clock.look(45.0);
        assert_eq!(last.1, Some(1));
        assert_eq!(
            clock.1.status().detail.as_deref(),
            Some("size 1, worst step 10 of 10: decode")
        );
        // A second size is no step back.
        clock.enter(46.0, StartPhase::Rebuild);
        assert_eq!(clock.look(46.0).0, last.0);
        clock.enter(47.0, StartPhase::Validate);
        clock.1.steps(1, 10, "prefill");
        assert!(clock.1.status().detail.unwrap().starts_with("size 2"));
        clock.enter(57.0, StartPhase::Engine);
        let end = clock.look(57.0);
        assert!((90..100).contains(&end.0) && end.1 == Some(0), "{end:?}");
    }

    #[test]
    fn a_later_start_goes_by_the_times_of_an_earlier_one() {
        let first = Clock::new();
        first.enter(1.0, StartPhase::Device);
        first.enter(2.0, StartPhase::Weights);
        first.enter(42.0, StartPhase::Probe);
        first.enter(72.0, StartPhase::Rebuild);
        first.enter(73.0, StartPhase::Validate);
        let mut taken = first.1.taken();
        taken.insert("validate".to_owned(), 19.0);
        assert_eq!((taken["weights"], taken["probe"]), (40.0, 30.0));
        assert!(!taken.contains_key("download"));

        let clock = Clock::new();
        clock.1.expect(&taken);
        assert_eq!(clock.look(0.0), (0, Some(62)));
        clock.enter(1.0, StartPhase::Device);
        clock.enter(2.0, StartPhase::Weights);
        // Nothing is counted yet: the clock tells.
        let (percent, left) = clock.look(22.0);
        assert!(
            (30..40).contains(&percent) && left == Some(40),
            "{percent} {left:?}"
        );
        // It is counted, and faster than then.
        clock.1.bytes(9, 10);
        assert_eq!(clock.look(20.0).1, Some(22));
        clock.enter(22.0, StartPhase::Rebuild);
        clock.enter(23.0, StartPhase::Validate);
        let late = clock.look(100.0);
        assert!(late.0 < 100 && late.1 == Some(0), "{late:?}");
    }

    #[test]
    fn graphs_are_a_phase_behind_each_rebuild_and_part_of_the_probe() {
        let clock = Clock::new();
        let now = || {
            let StartStatus { phase, detail, .. } = clock.1.status();
            (phase, detail.unwrap_or_default())
        };
        clock.enter(0.0, StartPhase::Probe);
        clock.1.graphs(0, 3);
        assert_eq!(now(), (StartPhase::Probe, "CUDA graph 1 of 3".into()));
        clock.enter(2.0, StartPhase::Rebuild);
        for _ in 0..2 {
            clock.1.graphs(0, 3);
            assert_eq!(now(), (StartPhase::Capture, "CUDA graph 1 of 3".into()));
            clock.1.graphs(3, 3);
            assert_eq!(now(), (StartPhase::Capture, "CUDA graph 3 of 3".into()));
            // Too large: the next is built.
            clock.1.enter(StartPhase::Rebuild);
        }
        clock.1.graphs(2, 3);
        clock.1.enter(StartPhase::Validate);
        clock.1.steps(0, 2, "decode");
        assert_eq!(now().1, "size 3, worst step 1 of 2: decode");
    }

    #[test]
    fn nonsense_of_earlier_starts_is_not_believed() {
        let clock = Clock::new();
        let odd = [
            ("weights", f64::NAN),
            ("validate", -1.0),
            ("rebuild", 1e300),
            ("lunch", 1.0),
        ];
        clock
            .1
            .expect(&odd.map(|(name, seconds)| (name.to_owned(), seconds)).into());
        assert_eq!(clock.look(1.0).1, None);
    }

    #[test]
    fn what_is_done_never_falls() {
        use rand::rngs::StdRng;
        use rand::{Rng, SeedableRng};
        for seed in 0..200 {
            let mut random = StdRng::seed_from_u64(seed);
            let clock = Clock::new();
            let (mut now, mut last) = (0.0, 0.0);
            for _ in 0..60 {
                now += random.random_range(0.0..3.0);
                match random.random_range(0..7) {
                    0 => clock.enter(now, StartPhase::ALL[random.random_range(0..PHASES)]),
                    1 => clock.1.bytes(random.random_range(0..10), 8),
                    2 => clock
                        .1
                        .steps(random.random_range(0..10), random.random_range(0..10), "x"),
                    6 => clock
                        .1
                        .graphs(random.random_range(0..4), random.random_range(0..4)),
                    3 => clock.1.expect_validation(random.random_range(0.0..9.0)),
                    4 => clock.1.expect(&clock.1.taken()),
                    _ => {}
                }
                let status = clock.1.0.lock().status(clock.at(now));
                assert!(
                    (last..1.0).contains(&status.done),
                    "seed {seed}: {last} then {status:?}"
                );
                last = status.done;
            }
        }
    }
}
