//! A device whose memory goes away, in a step or by request, and may come back.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use plimsoll_core::{
    BlockSize, BuildError, Component, Meters, Oom, RefusedBy, StateConfig, StepError, StepLimits,
};
use plimsoll_profiler::{BuildProgress, KvSize, Margins, ProfileError, ProfileSpec, Proved, Target, profile};
use plimsoll_scheduler::SchedulerConfig;
use tokio::sync::oneshot;

use super::{Fake, PATIENCE, Rig, Script, config, options, read, submit, whole};
use crate::recovery::FIRST_RETRY;
use crate::shared::{Command, Sleeper};
use crate::stall::Patience;
use crate::thread::EngineThread;
use crate::{
    Activity, Drained, EngineConfig, EngineHandle, Phase, RebuildError, RequestStream, SleepError,
    StateSource, SubmitError, WakeError,
};

const LIMITS: StepLimits = StepLimits {
    max_num_batched_tokens: 64,
    max_num_seqs: 4,
    max_model_len: 256,
};

/// Tokens of KV at the start.
const TOKENS: usize = 512;

/// A device with room for so many tokens of KV.
#[derive(Clone)]
struct Device {
    script: Arc<Script>,
    room: Arc<AtomicUsize>,
}

impl Default for Device {
    fn default() -> Self {
        Self {
            script: Arc::default(),
            room: Arc::new(AtomicUsize::new(TOKENS)),
        }
    }
}

impl Device {
    fn meters_now(&self) -> Meters {
        let total = 2 * TOKENS as u64;
        Meters {
            total,
            free: self.room.load(Ordering::SeqCst) as u64,
            ..Default::default()
        }
    }

    fn prove(&self) -> Result<Proved<Fake>, ProfileError> {
        let mut spec = ProfileSpec::new(LIMITS, 100, BlockSize::default(), 1);
        spec.size = KvSize::Tokens(self.room.load(Ordering::SeqCst).min(TOKENS));
        spec.margins = Margins {
            canary_bytes: 0,
            min_fragmentation_bytes: 0,
        };
        profile(&mut self.clone(), &spec, &mut ())
    }
}

impl Target for Device {
    type State = Fake;

    fn build(&mut self, config: &StateConfig, _: &mut dyn FnMut(BuildProgress)) -> Result<Fake, BuildError> {
        if config.kv.capacity_tokens() > self.room.load(Ordering::SeqCst) {
            return Err(oom().into());
        }
        self.script.dropped.store(false, Ordering::SeqCst);
        Ok(Fake {
            script: Arc::clone(&self.script),
            launched: VecDeque::new(),
        })
    }

    fn meters(&self) -> Meters {
        self.meters_now()
    }

    fn reset_high_water(&mut self) {}

    fn trim(&mut self) {}

    fn take_scratch_high_water(&mut self, _: &mut Fake) -> u64 {
        0
    }

    fn release_canary(&mut self, _: &mut Fake) {}
}

impl StateSource<Fake> for Device {
    fn high_water(&self) -> u64 {
        0
    }

    fn proved_peak(&self) -> u64 {
        0
    }

    fn meters(&self) -> Meters {
        self.meters_now()
    }

    fn trim(&mut self) {}

    fn rebuild(&mut self, meanwhile: &mut dyn FnMut()) -> Result<Proved<Fake>, RebuildError> {
        assert!(
            self.script.dropped.load(Ordering::SeqCst),
            "the old state makes room first"
        );
        if self.script.defect.load(Ordering::SeqCst) {
            return Err(ProfileError::InvalidSpec("told to be defective").into());
        }
        while self.script.hold_rebuild.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(100));
            meanwhile();
            self.script.progress.fetch_add(1, Ordering::SeqCst);
        }
        while self.script.hang_rebuild.load(Ordering::SeqCst) {
            self.script.hanging.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(self.prove()?)
    }
}

fn oom() -> Oom {
    Oom {
        requested: 77,
        component: Component::Arena,
        refused_by: RefusedBy::Device,
        meters: Box::default(),
    }
}

/// The steps that shall find no memory say so.
pub(super) fn told_oom() -> StepError {
    StepError::Oom(oom())
}

/// So does the step that shall be too large.
pub(super) fn told_overflow() -> StepError {
    StepError::Oom(Oom {
        refused_by: RefusedBy::FixedScratch,
        ..oom()
    })
}

fn start(steps_in_flight: usize, outage_patience: Duration) -> (Rig, Device) {
    let device = Device::default();
    let config = EngineConfig {
        outage_patience,
        ..config(100, steps_in_flight)
    };
    let engine = EngineHandle::spawn(device.prove().unwrap(), device.clone(), &config).unwrap();
    let script = Arc::clone(&device.script);
    script.steps.store(0, Ordering::SeqCst);
    (Rig { engine, script }, device)
}

/// A request that takes part in every second step alone, as its sampling needs to know the last token.
fn submit_slow(rig: &Rig, seed: u64, len: usize) -> RequestStream {
    let mut options = options(seed, len);
    options.sampling.presence_penalty = Some(1.0);
    submit(&rig.engine, options).unwrap()
}

async fn until_steps(rig: &Rig, steps: usize) {
    let more = rig.script.steps.load(Ordering::SeqCst) + steps;
    rig.until("steps", |rig| rig.script.steps.load(Ordering::SeqCst) >= more)
        .await;
}

/// A request whose first step waits; whoever comes now is not in it.
async fn submit_held(rig: &Rig, seed: u64, len: usize) -> RequestStream {
    rig.script.holding.store(false, Ordering::SeqCst);
    rig.set(|s| &s.hold);
    let stream = rig.submit(seed, len).unwrap();
    rig.until("a held step", |rig| rig.script.holding.load(Ordering::SeqCst))
        .await;
    stream
}

/// The held step of `guilty` finds no memory.
async fn lose_memory(rig: &Rig, guilty: RequestStream) {
    rig.set(|s| &s.oom_in_launch);
    rig.script.hold.store(false, Ordering::SeqCst);
    assert_eq!(read(guilty).await.1, Err(told_oom()));
}

#[tokio::test]
async fn a_step_without_memory_costs_its_own_requests_and_the_state_is_built_again() {
    for (steps_in_flight, in_launch) in [(1, false), (1, true), (2, false), (2, true)] {
        let (rig, _device) = start(steps_in_flight, PATIENCE);
        rig.set_step(Duration::from_millis(5));
        // Two steps in flight hold one each, if the second comes between two steps of the first.
        let first = submit_slow(&rig, 1, 60);
        until_steps(&rig, 2).await;
        let second = submit_slow(&rig, 2, 60);
        until_steps(&rig, 6).await;
        rig.set(|s| if in_launch { &s.oom_in_launch } else { &s.oom });
        let waiting: Vec<_> = (3..9).map(|seed| rig.submit(seed, 20).unwrap()).collect();
        let ends = [(1, read(first).await), (2, read(second).await)];
        let lost = ends.iter().filter(|(_, (_, end))| end.is_err()).count();
        assert!(lost > 0, "{ends:?}");
        for (seed, found) in ends {
            match found {
                (_, Err(error)) => assert_eq!(error, told_oom()),
                found => assert_eq!(found, whole(seed, 60)),
            }
        }
        for (seed, stream) in (3..).zip(waiting) {
            match read(stream).await {
                (_, Err(error)) => assert_eq!(error, told_oom()),
                found => assert_eq!(found, whole(seed, 20)),
            }
        }
        rig.until_empty().await;
        let stats = rig.engine.stats();
        assert_eq!((stats.rebuilds_oom, stats.failed_steps), (1, 1), "{stats:?}");
        let outage = stats.last_oom.unwrap();
        assert_eq!((outage.requested, outage.component), (77, Component::Arena));
        assert!(outage.shape.rows > 0 && outage.shape.longest_context > 5);
        let again = read(rig.submit(9, 30).unwrap()).await;
        assert_eq!(again, whole(9, 30));
        assert!(rig.engine.health().is_moving(PATIENCE));
    }
}

/// Another state would have as little scratch: a request that comes again and again must not take the server down each time.
#[tokio::test]
async fn a_step_that_needs_more_scratch_than_was_proved_costs_itself_alone() {
    let (rig, _device) = start(1, PATIENCE);
    let before = rig.engine.kv();
    for again in 1..=3 {
        let guilty = submit_held(&rig, 1, 100).await;
        let waiting = rig.submit(2, 10).unwrap();
        rig.set(|s| &s.overflow);
        rig.script.hold.store(false, Ordering::SeqCst);
        assert_eq!(read(guilty).await.1, Err(told_overflow()));
        let health = rig.engine.health();
        assert_eq!((health.phase, health.outage), (Phase::Running, None));
        assert_eq!(read(waiting).await, whole(2, 10));
        rig.until_empty().await;
        let stats = rig.engine.stats();
        assert_eq!((stats.rebuilds_oom, stats.failed_steps), (0, again), "{stats:?}");
        assert_eq!(stats.high_water_above_proof, again);
        assert!(stats.last_oom.is_none() && !rig.script.dropped.load(Ordering::SeqCst));
    }
    assert_eq!(rig.engine.kv(), before);
}

/// With two steps in flight, only one of them fails: whoever was in the other alone goes on where it was.
#[tokio::test]
async fn the_step_beside_the_failed_one_ends_well() {
    let (rig, _device) = start(2, PATIENCE);
    rig.set_step(Duration::from_millis(5));
    // One is in every step, the other in every second.
    let in_all = rig.submit(1, 100).unwrap();
    let in_some = submit_slow(&rig, 2, 40);
    until_steps(&rig, 6).await;
    rig.set(|s| &s.oom_of_one);
    assert_eq!(read(in_all).await.1, Err(told_oom()));
    assert_eq!(read(in_some).await, whole(2, 40));
    rig.until_empty().await;
    let stats = rig.engine.stats();
    assert_eq!(
        (stats.failed_steps, stats.scheduler.restarts),
        (1, 1),
        "{stats:?}"
    );
    assert_eq!(stats.last_oom.unwrap().shape.rows, 1);
}

#[tokio::test]
async fn a_smaller_state_serves_what_fits_it() {
    let (rig, device) = start(1, PATIENCE);
    let guilty = submit_held(&rig, 1, 100).await;
    let long = rig.submit(2, 251).unwrap();
    let short = rig.submit(3, 30).unwrap();
    device.room.store(256 - 16, Ordering::SeqCst);
    lose_memory(&rig, guilty).await;
    // One full request does not fit, so there is no state, until there is room for one.
    rig.until("the outage", |rig| rig.engine.health().outage.is_some())
        .await;
    let refused = rig.submit(4, 1).unwrap_err();
    assert!(
        matches!(refused, SubmitError::Rebuilding { retry_after } if retry_after >= Duration::from_secs(1))
    );
    assert_eq!(rig.engine.health().phase, Phase::Rebuilding);
    assert!(!rig.engine.health().is_moving(PATIENCE));
    device.room.store(256, Ordering::SeqCst);
    assert_eq!(read(short).await, whole(3, 30));
    assert_eq!(read(long).await, whole(2, 251));
    assert_eq!(rig.engine.limits().kv_capacity_tokens, 256);
    assert_eq!(rig.engine.kv().num_pages, 16);
    let health = rig.engine.health();
    assert_eq!((health.phase, health.outage), (Phase::Running, None));
}

#[tokio::test]
async fn nobody_waits_for_memory_for_ever_and_a_shutdown_waits_for_none() {
    let (rig, device) = start(1, Duration::ZERO);
    let guilty = submit_held(&rig, 1, 100).await;
    let waiting = rig.submit(2, 10).unwrap();
    device.room.store(0, Ordering::SeqCst);
    lose_memory(&rig, guilty).await;
    let patience = Duration::ZERO;
    assert_eq!(read(waiting).await.1, Err(StepError::NoState { patience }));
    rig.until_empty().await;
    // It would take a second to look again, and a minute to give up.
    ends_at_once(&rig).await;
    assert_eq!(rig.engine.health().phase, Phase::Stopped);
}

/// An attempt may take longer than requests wait.
#[tokio::test]
async fn requests_are_turned_away_while_a_state_is_built() {
    let (rig, _device) = start(1, Duration::from_millis(1));
    let guilty = submit_held(&rig, 1, 100).await;
    let waiting = rig.submit(2, 10).unwrap();
    rig.set(|s| &s.hold_rebuild);
    lose_memory(&rig, guilty).await;
    let patience = Duration::from_millis(1);
    assert_eq!(read(waiting).await.1, Err(StepError::NoState { patience }));
    assert_eq!(rig.engine.health().phase, Phase::Rebuilding);
    rig.script.hold_rebuild.store(false, Ordering::SeqCst);
    rig.until("readiness", |rig| rig.engine.health().phase == Phase::Running)
        .await;
    let again = read(rig.submit(3, 10).unwrap()).await;
    assert_eq!(again, whole(3, 10));
}

/// A build that hangs is seen as a step is, and one that goes on is no hang.
#[tokio::test]
async fn a_build_that_hangs_is_seen() {
    let (rig, _device) = start(1, PATIENCE);
    let guilty = submit_held(&rig, 1, 100).await;
    rig.set(|s| &s.hold_rebuild);
    rig.set(|s| &s.hang_rebuild);
    lose_memory(&rig, guilty).await;
    let (timeout, every) = (Duration::from_secs(3), Duration::from_secs(1));
    let mut now = Instant::now();
    let mut patience = Patience::new(every, now);
    let mut look = || {
        now += every;
        rig.engine.look(&mut patience, timeout, now)
    };
    for _ in 0..10 {
        let before = rig.script.progress.load(Ordering::SeqCst);
        rig.until("progress", |rig| {
            rig.script.progress.load(Ordering::SeqCst) > before
        })
        .await;
        assert_eq!(look(), None);
    }
    rig.script.hold_rebuild.store(false, Ordering::SeqCst);
    rig.until("a build that hangs", |rig| {
        rig.script.hanging.load(Ordering::SeqCst)
    })
    .await;
    let mut looks = 0;
    let stall = loop {
        looks += 1;
        assert!(looks < 5, "a build that hangs is not seen");
        if let Some(stall) = look() {
            break stall;
        }
    };
    // The first look may see the last progress.
    assert!(looks > 2, "{looks} looks");
    assert_eq!(
        (stall.phase, stall.activity, stall.step),
        (Phase::Rebuilding, Activity::Build, None)
    );
    rig.script.hang_rebuild.store(false, Ordering::SeqCst);
    rig.until("readiness", |rig| rig.engine.health().phase == Phase::Running)
        .await;
}

/// Each try is a build of its own: how long there has been no state does not count.
#[tokio::test]
async fn a_second_try_begins_anew() {
    let (rig, device) = start(1, PATIENCE);
    let guilty = submit_held(&rig, 1, 100).await;
    device.room.store(0, Ordering::SeqCst);
    let began = Instant::now();
    lose_memory(&rig, guilty).await;
    until_refused(&rig).await;
    rig.set(|s| &s.hang_rebuild);
    let stalled = Cell::new(None);
    rig.until("another try", |rig| {
        stalled.set(rig.engine.health().stalled_for);
        stalled.get().is_some()
    })
    .await;
    let (stalled, outage) = (stalled.into_inner().unwrap(), began.elapsed());
    assert!(stalled + FIRST_RETRY <= outage, "{stalled:?} of {outage:?}");
    rig.script.hang_rebuild.store(false, Ordering::SeqCst);
}

/// Drains with nothing in; far from its timeout, on however busy a machine.
async fn ends_at_once(rig: &Rig) {
    let began = Instant::now();
    assert_eq!(rig.engine.drain(10 * PATIENCE).await, Drained::Complete);
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

/// Requests that wait for memory get the time of the drain too.
#[tokio::test]
async fn a_drain_lets_requests_wait_for_memory_until_its_time_is_over() {
    for comes_back in [true, false] {
        let (rig, device) = start(1, PATIENCE);
        let guilty = submit_held(&rig, 1, 100).await;
        let waiting = rig.submit(2, 10).unwrap();
        device.room.store(0, Ordering::SeqCst);
        lose_memory(&rig, guilty).await;
        until_refused(&rig).await;
        let draining = tokio::spawn({
            let engine = rig.engine.clone();
            // Whoever waits in vain need not wait long.
            let time = if comes_back {
                PATIENCE
            } else {
                Duration::from_millis(1)
            };
            async move { engine.drain(time).await }
        });
        rig.until("draining", |rig| rig.engine.health().phase != Phase::Rebuilding)
            .await;
        if comes_back {
            device.room.store(TOKENS, Ordering::SeqCst);
            assert_eq!(read(waiting).await, whole(2, 10));
            assert_eq!(draining.await.unwrap(), Drained::Complete);
        } else {
            assert_eq!(read(waiting).await.1, Err(StepError::ShutDown));
            assert_eq!(draining.await.unwrap(), Drained::Failed(1));
        }
        assert_eq!(rig.engine.health().phase, Phase::Stopped);
    }
}

/// An attempt has failed.
async fn until_refused(rig: &Rig) {
    let refused = |why: String| !why.contains("a step ran out");
    rig.until("a failed attempt", |rig| {
        rig.engine.health().outage.is_some_and(refused)
    })
    .await;
}

/// What more memory would not mend ends the engine, so that a supervisor starts another.
#[tokio::test]
async fn a_state_that_cannot_be_built_for_a_defect_ends_the_engine() {
    let (rig, _device) = start(1, PATIENCE);
    let guilty = submit_held(&rig, 1, 100).await;
    let waiting = rig.submit(2, 10).unwrap();
    rig.set(|s| &s.defect);
    rig.set(|s| &s.oom_in_launch);
    rig.script.hold.store(false, Ordering::SeqCst);
    rig.engine.ended().await;
    assert_eq!(read(guilty).await.1, Err(told_oom()));
    let error = read(waiting).await.1.unwrap_err();
    assert!(error.to_string().contains("told to be defective"), "{error}");
    let health = rig.engine.health();
    assert_eq!(health.phase, Phase::Dead);
    assert!(health.last_error.unwrap().contains("could not be rebuilt"));
}

#[tokio::test]
async fn sleep_gives_the_state_back_and_waking_proves_it_again() {
    let (rig, device) = start(1, PATIENCE);
    let before = read(rig.submit(1, 20).unwrap()).await;
    // Whoever asks too early is told, and nothing has happened.
    let running = submit_held(&rig, 2, 60).await;
    assert_eq!(
        rig.engine.sleep(Duration::from_millis(1)).await,
        Err(SleepError::Busy { requests: 1 })
    );
    assert_eq!(rig.engine.health().phase, Phase::Running);
    let sleeping = tokio::spawn({
        let engine = rig.engine.clone();
        async move { engine.sleep(PATIENCE).await }
    });
    rig.until("falling asleep", |rig| {
        rig.engine.health().phase == Phase::FallingAsleep
    })
    .await;
    assert_eq!(rig.submit(3, 1).unwrap_err(), SubmitError::Asleep);
    assert_eq!(
        rig.engine.wake().await,
        Err(WakeError::NotNow(Phase::FallingAsleep))
    );
    rig.script.hold.store(false, Ordering::SeqCst);
    assert_eq!(read(running).await, whole(2, 60));
    assert_eq!(sleeping.await.unwrap(), Ok(()));
    assert!(rig.script.dropped.load(Ordering::SeqCst), "the memory is free");
    assert_eq!(rig.engine.health().phase, Phase::Asleep);
    assert_eq!(rig.submit(3, 1).unwrap_err(), SubmitError::Asleep);
    assert_eq!(rig.engine.sleep(PATIENCE).await, Ok(()), "it sleeps already");

    device.room.store(0, Ordering::SeqCst);
    let error = rig.engine.wake().await.unwrap_err();
    assert!(matches!(&error, WakeError::NoMemory { .. }), "{error}");
    assert_eq!(rig.engine.health().phase, Phase::Rebuilding);
    device.room.store(TOKENS, Ordering::SeqCst);
    rig.until("waking", |rig| rig.engine.health().phase == Phase::Running)
        .await;
    assert_eq!(rig.engine.wake().await, Ok(()), "it is awake already");
    assert_eq!(read(rig.submit(1, 20).unwrap()).await, before);
    let stats = rig.engine.stats();
    assert_eq!((stats.rebuilds_wake, stats.rebuilds_oom), (1, 0));
    assert_eq!(stats.scheduler.pages_total, TOKENS / 16);

    // A shutdown finds a sleeper asleep.
    assert_eq!(rig.engine.sleep(PATIENCE).await, Ok(()));
    ends_at_once(&rig).await;
}

/// A second sleep that is asked for while the engine is about to sleep for the first, which lost patience: what was submitted
/// in between is in its queue, and is not slept over.
#[test]
fn a_sleep_that_was_given_up_does_not_answer_for_the_next() {
    let device = Device::default();
    let scheduler = SchedulerConfig {
        limits: LIMITS,
        kv: device.prove().unwrap().into_parts().config.kv,
        state_chunk: 1,
        enable_prefix_caching: false,
        patience: 1000,
    };
    let (_handle, mut thread) = EngineHandle::prepare(None, Box::new(device), scheduler, &config(100, 1));
    let ask = |thread: &EngineThread<Fake>| {
        let (asleep, told) = oneshot::channel();
        let attempt = thread.shared.lock().fall_asleep();
        (Command::Sleep(Sleeper { attempt, asleep }), told)
    };
    let (first, _gone) = ask(&thread);
    thread.obey(first);
    assert_eq!(thread.shared.lock().stay_awake(), Some(0));
    let (second, mut told) = ask(&thread);
    assert!(thread.take_sleeper().is_none());
    assert_eq!(thread.shared.lock().phase, Phase::FallingAsleep);
    thread.obey(second);
    let sleeper = thread.take_sleeper().unwrap();
    assert_eq!(thread.shared.lock().phase, Phase::Asleep);
    sleeper.asleep.send(()).unwrap();
    assert_eq!(told.try_recv(), Ok(()));
}
