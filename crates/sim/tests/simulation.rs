//! Thousands of random workloads through the real scheduler and KV manager.

use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use plimsoll_scheduler::SchedulerStats;
use plimsoll_sim::{Workload, simulate};

const WORKLOADS: u64 = 8_000;
const THREADS: u64 = 4;

/// Simulates fresh workloads at `depth` and adds up what happened.
fn simulate_all(depth: usize) -> SchedulerStats {
    let base = RandomState::new().hash_one(depth);
    let snapshot_hits = AtomicU64::new(0);
    let snapshot_hits = &snapshot_hits;
    let worker = |first: u64| {
        let mut total = SchedulerStats::default();
        for i in (first..WORKLOADS).step_by(THREADS as usize) {
            let seed = base.wrapping_add(i);
            let audit = i % 16 < THREADS;
            let workload = Workload::random(seed);
            match simulate(&workload, depth, audit) {
                Ok(report) => {
                    add(&mut total, &report.stats);
                    if workload.scheduler.kv.groups.state_layers() > 0 {
                        snapshot_hits.fetch_add(report.stats.prefix_hit_tokens, Ordering::Relaxed);
                    }
                }
                Err(broken) => panic!("workload {seed} at depth {depth}: {broken}"),
            }
        }
        total
    };
    let mut total = SchedulerStats::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|first| scope.spawn(move || worker(first)))
            .collect();
        for worker in workers {
            add(
                &mut total,
                &worker.join().expect("every workload keeps the promises"),
            );
        }
    });
    let hits = snapshot_hits.load(Ordering::Relaxed);
    assert!(hits > 500, "{hits} tokens were found in models with states");
    total
}

fn add(total: &mut SchedulerStats, stats: &SchedulerStats) {
    total.steps += stats.steps;
    total.preemptions += stats.preemptions;
    total.restarts += stats.restarts;
    total.evictions += stats.evictions;
    total.slots.given_up += stats.slots.given_up;
    total.prefix_hit_tokens += stats.prefix_hit_tokens;
    total.finished_stop += stats.finished_stop;
    total.finished_length += stats.finished_length;
    total.finished_pooled += stats.finished_pooled;
    total.cancelled += stats.cancelled;
    total.failed += stats.failed;
    total.discarded_tokens += stats.discarded_tokens;
}

/// A proof by simulation is worth what it visits.
fn assert_everything_happened(total: &SchedulerStats) {
    let counts = [
        total.preemptions,
        total.restarts,
        total.evictions,
        total.slots.given_up,
        total.prefix_hit_tokens,
        total.finished_stop,
        total.finished_length,
        total.finished_pooled,
        total.cancelled,
        total.failed,
        total.discarded_tokens,
    ];
    assert!(
        counts.iter().all(|&count| count > 500),
        "too little happened: {total:?}"
    );
}

#[test]
fn every_promise_is_kept_step_by_step() {
    assert_everything_happened(&simulate_all(1));
}

#[test]
fn every_promise_is_kept_with_a_step_in_flight() {
    assert_everything_happened(&simulate_all(2));
}
