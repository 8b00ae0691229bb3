//! Whom the scheduler admits: those for whom nobody is soon preempted.

mod common;

use std::ops::RangeInclusive;

use plimsoll_core::{RequestId, TokenId};
use plimsoll_scheduler::Scheduler;

use common::{request, scheduler, step};

/// What every request generates.
const TOKEN: TokenId = 3;

/// Requests with these ids.
fn submit(scheduler: &mut Scheduler, ids: RangeInclusive<u64>, prompt: usize, max_tokens: usize) {
    ids.for_each(|id| scheduler.submit(request(id, prompt, max_tokens)));
}

/// Steps until nothing is left.
fn run_all(scheduler: &mut Scheduler) {
    while !scheduler.is_idle() {
        step(scheduler, TOKEN);
    }
}

#[test]
fn a_burst_is_admitted_with_what_it_will_grow_by() {
    // Eight prompts and one block more for each fit at once, and six whole requests of three blocks.
    let mut scheduler = scheduler(1000, 8, 19);
    submit(&mut scheduler, 1..=8, 8, 17);
    run_all(&mut scheduler);
    let before = scheduler.stats().preemptions;
    assert!(before > 0, "nothing was known yet");
    submit(&mut scheduler, 11..=30, 8, 17);
    step(&mut scheduler, TOKEN);
    assert_eq!(scheduler.stats().running, 6);
    run_all(&mut scheduler);
    assert_eq!(scheduler.stats().preemptions, before);
    assert_eq!(scheduler.stats().finished_length, 28);
}

#[test]
fn outputs_that_clients_end_are_known_too() {
    let mut scheduler = scheduler(1000, 8, 40);
    scheduler.submit(request(1, 8, 100));
    run_all(&mut scheduler);
    for id in 2..=10 {
        scheduler.submit(request(id, 8, 100));
        (0..2).for_each(|_| drop(step(&mut scheduler, TOKEN)));
        assert!(scheduler.cancel(RequestId(id)));
    }
    submit(&mut scheduler, 11..=17, 8, 100);
    step(&mut scheduler, TOKEN);
    assert_eq!(scheduler.stats().running, 7, "most outputs end early");
}

#[test]
fn those_that_live_long_leave_the_rest_of_the_cache_to_short_ones() {
    let mut scheduler = scheduler(1000, 8, 18);
    submit(&mut scheduler, 1..=20, 4, 2);
    run_all(&mut scheduler);
    // In the end it will need the whole cache.
    scheduler.submit(request(21, 40, 100));
    (0..60).for_each(|_| drop(step(&mut scheduler, TOKEN)));
    scheduler.submit(request(22, 4, 2));
    step(&mut scheduler, TOKEN);
    assert_eq!(scheduler.stats().running, 2);
}
