//! Ten thousand random servers. Whatever happens, all ranks end with a proof at the same size, or all with a typed error; and
//! what was taken comes back.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::cases::Case;
use crate::check::{End, Reduction, check, judge};

const SEEDS: u64 = 10_000;

#[derive(Debug, Default)]
struct Tally {
    proved: usize,
    shrunk: usize,
    refused: usize,
    leaks: usize,
    broken: usize,
    cached: usize,
    discarded: usize,
    ranks_proved: usize,
    other_rank: usize,
}

impl Tally {
    fn add(&mut self, case: &Case, end: &End) {
        let count = |tally: &mut usize, which: bool| *tally += usize::from(which);
        count(&mut self.proved, end.proved);
        count(&mut self.shrunk, end.proved && end.attempts > 1);
        count(&mut self.refused, !end.proved && !end.leak && !end.broken);
        count(&mut self.leaks, end.leak);
        count(&mut self.broken, end.broken);
        count(&mut self.cached, end.cached);
        count(&mut self.discarded, end.discarded);
        count(&mut self.ranks_proved, end.proved && case.ranks.len() > 1);
        count(&mut self.other_rank, end.other_rank);
    }

    fn counts(&self) -> [usize; 9] {
        [
            self.proved,
            self.shrunk,
            self.refused,
            self.leaks,
            self.broken,
            self.cached,
            self.discarded,
            self.ranks_proved,
            self.other_rank,
        ]
    }
}

#[test]
fn any_server_ends_in_a_proof_or_a_typed_error() {
    let (next, tally, failures) = (
        AtomicU64::new(0),
        Mutex::new(Tally::default()),
        Mutex::new(Vec::new()),
    );
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SEEDS {
                break;
            }
            let result = catch_unwind(|| judge(seed));
            match result.unwrap_or_else(|_| Err("panicked".into())) {
                Ok((case, end)) => tally.lock().unwrap().add(&case, &end),
                Err(what) => failures.lock().unwrap().push((seed, what)),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    let (tally, mut failures) = (tally.into_inner().unwrap(), failures.into_inner().unwrap());
    failures.sort();
    assert!(
        failures.is_empty(),
        "{} seeds failed, the first are {:#?}",
        failures.len(),
        &failures[..failures.len().min(5)]
    );
    // The servers are only worth something if every end is reached often.
    assert!(tally.counts().iter().all(|&count| count > 100), "{tally:?}");
}

/// The simulation is worth something: whatever is left out of the agreements, it notices.
#[test]
fn a_missing_reduction_is_noticed() {
    for reduction in [
        Reduction::OwnSize,
        Reduction::OwnOutcome,
        Reduction::NoMeeting,
        Reduction::DeafToShortage,
        Reduction::DeafToFailure,
    ] {
        let noticed = (0..200).find_map(|seed| check(&Case::random(seed, true), reduction).err());
        assert!(noticed.is_some(), "{reduction:?} is never noticed");
    }
}
