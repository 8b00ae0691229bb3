//! The engine over an executor that can be told to be slow, to fail, to panic or to lie.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt};
use plimsoll_core::{
    BlockSize, CacheGroups, Event, Executor, FinishReason, KvConfig, Request, RequestOptions, StepError,
    StepLimits,
};
use plimsoll_scheduler::SchedulerConfig;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

mod fake;
mod fan_out;
mod masks;
mod overlap;
mod recovery;
mod stall;

use fake::{FINITE, Fake, Script, Unmetered, token};

use crate::{Drained, EngineConfig, EngineHandle, Phase, RequestStream, SubmitError};

/// Longer than anything here takes on a busy machine; a test that waits this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

struct Rig {
    engine: EngineHandle,
    script: Arc<Script>,
}

struct Shape {
    max_num_seqs: usize,
    max_queue: usize,
    num_blocks: usize,
    steps_in_flight: usize,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            max_num_seqs: 8,
            max_queue: 2000,
            num_blocks: 256,
            steps_in_flight: 1,
        }
    }
}

fn config(max_queue: usize, steps_in_flight: usize) -> EngineConfig {
    EngineConfig {
        max_queue,
        vocab_size: 100,
        images: None,
        enable_prefix_caching: true,
        steps_in_flight,
        outage_patience: PATIENCE,
        target_itl: None,
        cache_listener: None,
    }
}

/// An engine over an executor with `num_pages` pages of KV.
fn start(
    executor: impl Executor + 'static,
    limits: StepLimits,
    block_size: BlockSize,
    num_pages: usize,
    config: &EngineConfig,
) -> EngineHandle {
    let groups = CacheGroups::default();
    let scheduler = SchedulerConfig {
        limits,
        kv: KvConfig {
            block_size,
            num_pages,
            groups,
            state_slots: 0,
        },
        state_chunk: 1,
        enable_prefix_caching: true,
        patience: 1000,
    };
    EngineHandle::start(executor, Box::new(Unmetered), scheduler, config).unwrap()
}

/// A request of `len` output tokens; its seed is its prompt.
fn options(seed: u64, len: usize) -> RequestOptions {
    RequestOptions {
        prompt: (0..5).map(|i| token(seed, i + 1000)).collect(),
        max_tokens: Some(len),
        seed,
        ..Default::default()
    }
}

fn submit(engine: &EngineHandle, options: RequestOptions) -> Result<RequestStream, SubmitError> {
    engine.submit(Request::new(engine.next_id(), options, &engine.limits()).unwrap())
}

impl Rig {
    fn new(shape: Shape) -> Self {
        Self::with(shape, |_| {})
    }

    fn with(shape: Shape, configure: impl FnOnce(&mut EngineConfig)) -> Self {
        let script = Arc::new(Script::default());
        let executor = Fake {
            script: Arc::clone(&script),
            launched: VecDeque::new(),
        };
        let limits = StepLimits {
            max_num_batched_tokens: 64,
            max_num_seqs: shape.max_num_seqs,
            max_model_len: 256,
        };
        let mut config = config(shape.max_queue, shape.steps_in_flight);
        configure(&mut config);
        let engine = start(executor, limits, BlockSize::default(), shape.num_blocks, &config);
        Self { engine, script }
    }

    fn submit(&self, seed: u64, len: usize) -> Result<RequestStream, SubmitError> {
        submit(&self.engine, options(seed, len))
    }

    fn set(&self, flag: impl Fn(&Script) -> &AtomicBool) {
        flag(&self.script).store(true, Ordering::SeqCst);
    }

    fn set_step(&self, duration: Duration) {
        self.script
            .step_micros
            .store(duration.as_micros() as u64, Ordering::SeqCst);
    }

    /// Waits until `condition` holds.
    async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !condition(self) {
            assert!(
                began.elapsed() < PATIENCE,
                "{what} did not happen: {:?}",
                self.engine.stats()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Nothing is in, waits, runs or holds a block.
    async fn until_empty(&self) {
        self.until("emptiness", |rig| {
            let stats = rig.engine.stats();
            stats.in_flight + stats.scheduler.running + stats.scheduler.waiting + stats.scheduler.pages_used
                == 0
        })
        .await;
    }
}

/// Reads a stream to its end: its tokens, and how it ended.
async fn read(mut stream: RequestStream) -> (Vec<u32>, Result<FinishReason, StepError>) {
    let mut tokens = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, stream.next())
            .await
            .expect("the stream hangs");
        match event.expect("a stream ends with an event that says so") {
            Event::Admitted { .. } | Event::Prompt(_) => {}
            Event::Token(event) => {
                tokens.push(event.token);
                if let Some(reason) = event.finish {
                    assert!(stream.next().await.is_none());
                    return (tokens, Ok(reason));
                }
            }
            Event::Pooled(_) => panic!("a vector for a text"),
            Event::Failed(error) => {
                assert!(stream.next().await.is_none());
                return (tokens, Err(error));
            }
        }
    }
}

fn expected(seed: u64, len: usize) -> Vec<u32> {
    (0..len).map(|index| token(seed, index)).collect()
}

/// What is read of a request that got all its tokens.
fn whole(seed: u64, len: usize) -> (Vec<u32>, Result<FinishReason, StepError>) {
    (expected(seed, len), Ok(FinishReason::Length))
}

#[tokio::test]
async fn steps_that_readers_wait_for_longer_than_the_target_are_counted() {
    for (target, late) in [
        (Some(Duration::from_millis(1)), 4),
        (Some(PATIENCE), 0),
        (None, 0),
    ] {
        let rig = Rig::with(Shape::default(), |config| config.target_itl = target);
        rig.set_step(Duration::from_millis(5));
        // The first step computes its prompt, which nobody waits for yet.
        assert_eq!(read(rig.submit(1, 5).unwrap()).await, whole(1, 5));
        assert_eq!(rig.engine.stats().steps_above_target_itl, late);
        assert_eq!(rig.engine.stats().step_prompt_tokens.count(), 0);
        let mut reader = rig.submit(2, 50).unwrap();
        while !matches!(reader.next().await, Some(Event::Token(_))) {}
        assert_eq!(read(rig.submit(3, 5).unwrap()).await, whole(3, 5));
        let beside = rig.engine.stats().step_prompt_tokens;
        assert_eq!((beside.count(), beside.sum()), (1, 5.0));
    }
}

#[tokio::test]
async fn a_thousand_streams_get_their_own_tokens_with_little_kv() {
    for steps_in_flight in [1, 2] {
        let shape = Shape {
            num_blocks: 12,
            max_num_seqs: 16,
            steps_in_flight,
            ..Default::default()
        };
        let rig = Rig::new(shape);
        // All the others come while the first is held in its step, so that the plans are the same in every run: an engine
        // that ends requests as fast as they come never has many at once.
        rig.set(|s| &s.hold);
        let first = (0, rig.submit(0, 1).unwrap());
        rig.until("a step", |rig| rig.engine.health().step_in_progress.is_some())
            .await;
        let others = (1..1000).map(|i| (i, rig.submit(i, 1 + i as usize % 40).unwrap()));
        let streams: Vec<_> = std::iter::once(first).chain(others).collect();
        rig.script.hold.store(false, Ordering::SeqCst);
        let reads = streams
            .into_iter()
            .map(|(i, stream)| async move { (i, read(stream).await) });
        for (i, found) in futures::future::join_all(reads).await {
            assert_eq!(found, whole(i, 1 + i as usize % 40), "request {i}");
        }
        rig.until_empty().await;
        let stats = rig.engine.stats();
        assert!(
            stats.scheduler.preemptions > 0,
            "KV was meant to be scarce: {stats:?}"
        );
        assert_eq!(stats.submitted, 1000);
        assert_eq!(stats.step_seconds.count(), stats.steps);
        assert_eq!(rig.script.most_in_flight.load(Ordering::SeqCst), steps_in_flight);
        assert!(
            rig.engine.health().is_moving(Duration::ZERO),
            "there is no work to stall"
        );
    }
}

#[tokio::test]
async fn a_step_that_fails_takes_its_own_requests_along_and_no_others() {
    type Flag = fn(&Script) -> &AtomicBool;
    let flags: [(Flag, &str); 4] = [
        (|s| &s.fail, "told to fail"),
        (|s| &s.panic_in_launch, "told to panic in launch"),
        (|s| &s.panic_in_finish, "told to panic in finish"),
        (|s| &s.lie, "results for"),
    ];
    for (flag, message) in flags {
        let rig = Rig::new(Shape {
            max_num_seqs: 2,
            ..Default::default()
        });
        rig.set_step(Duration::from_millis(20));
        rig.set(flag);
        // Two run, one waits: only the two are in the step that fails.
        let [a, b, c] = [1, 2, 3].map(|seed| rig.submit(seed, 3).unwrap());
        let (a, b, c) = tokio::join!(read(a), read(b), read(c));
        let failed = [&a, &b, &c].into_iter().filter(|(_, end)| end.is_err()).count();
        assert!((1..=2).contains(&failed), "{failed} failed");
        assert!(a.1.unwrap_err().to_string().contains(message), "{message}");
        assert_eq!(c, whole(3, 3));
        rig.until_empty().await;
        let health = rig.engine.health();
        assert_eq!((health.phase, health.failures_in_a_row), (Phase::Running, 0));
        assert!(health.last_error.unwrap().contains(message));
        assert_eq!(rig.engine.stats().failed_steps, 1);
        assert_eq!(read(rig.submit(4, 5).unwrap()).await, whole(4, 5));
    }
}

/// The step behind was launched with what it sampled last, whatever that is.
#[tokio::test]
async fn what_is_not_finite_ends_its_own_request_alone() {
    for steps_in_flight in [1, 2] {
        let rig = Rig::new(Shape {
            steps_in_flight,
            ..Default::default()
        });
        rig.script.not_finite.store(2, Ordering::SeqCst);
        let [a, b, c] = [1, 2, 3].map(|seed| rig.submit(seed, 30).unwrap());
        let (a, b, c) = tokio::join!(read(a), read(b), read(c));
        assert_eq!((a, c), (whole(1, 30), whole(3, 30)));
        assert_eq!(b.0, expected(2, FINITE));
        let error = b.1.unwrap_err();
        assert!(matches!(error, StepError::NotFinite(_)), "{error}");
        assert!(error.to_string().contains("NaN or infinite"), "{error}");
        let (stats, health) = (rig.engine.stats(), rig.engine.health());
        assert_eq!((stats.failed_steps, stats.scheduler.failed), (0, 1));
        assert_eq!((health.phase, health.last_error), (Phase::Running, None));
    }
}

#[tokio::test]
async fn failures_in_a_row_are_counted() {
    let rig = Rig::new(Shape::default());
    for n in 1..=3 {
        rig.set(|s| &s.fail);
        assert!(read(rig.submit(n, 3).unwrap()).await.1.is_err());
        assert_eq!(rig.engine.health().failures_in_a_row, n);
    }
    assert!(read(rig.submit(9, 1).unwrap()).await.1.is_ok());
    assert_eq!(rig.engine.health().failures_in_a_row, 0);
}

#[tokio::test]
async fn a_storm_of_cancellations_disturbs_nobody() {
    let seed = rand::random::<u64>();
    let mut random = StdRng::seed_from_u64(seed);
    for steps_in_flight in [1, 2] {
        let rig = Rig::new(Shape {
            num_blocks: 32,
            steps_in_flight,
            ..Default::default()
        });
        let mut readers = Vec::new();
        for i in 0..400 {
            let mut stream = rig.submit(i, 30).unwrap();
            // One in four stays; the others leave at once, after some events, or after some turns of the runtime.
            match random.random_range(0..4) {
                0 => readers.push((i, tokio::spawn(read(stream)))),
                1 => drop(stream),
                2 => {
                    let events = random.random_range(0..20);
                    tokio::spawn(async move {
                        for _ in 0..events {
                            stream.next().await;
                        }
                    });
                }
                _ => {
                    let turns = random.random_range(0..500);
                    tokio::spawn(async move {
                        for _ in 0..turns {
                            tokio::task::yield_now().await;
                        }
                        drop(stream);
                    });
                }
            }
            tokio::task::yield_now().await;
        }
        for (i, reader) in readers {
            assert_eq!(reader.await.unwrap(), whole(i, 30), "request {i}, seed {seed}");
        }
        rig.until_empty().await;
        assert!(rig.engine.stats().scheduler.cancelled > 0, "seed {seed}");
    }
}

#[tokio::test]
async fn admission_is_bounded_and_says_when_to_come_back() {
    let rig = Rig::new(Shape {
        max_num_seqs: 2,
        max_queue: 3,
        ..Default::default()
    });
    // Nobody is done before the last is refused.
    rig.set_step(Duration::from_millis(50));
    let mut streams: Vec<_> = (0..5).map(|i| rig.submit(i, 200).unwrap()).collect();
    let refused = rig.submit(5, 200).unwrap_err();
    let SubmitError::QueueFull {
        limit: 5,
        retry_after,
    } = refused
    else {
        panic!("{refused:?}")
    };
    assert!((1..=60).contains(&retry_after.as_secs()), "{retry_after:?}");
    assert_eq!(rig.engine.stats().refused, 1);
    // One that leaves makes room for one.
    drop(streams.remove(3));
    rig.until("a free place", |rig| rig.engine.stats().in_flight == 4)
        .await;
    streams.push(rig.submit(6, 200).unwrap());
    assert!(matches!(rig.submit(7, 200), Err(SubmitError::QueueFull { .. })));
    rig.set_step(Duration::ZERO);
    for stream in streams {
        assert!(read(stream).await.1.is_ok());
    }
}

#[tokio::test]
async fn a_queue_may_be_of_any_length() {
    let rig = Rig::new(Shape {
        max_queue: usize::MAX,
        ..Default::default()
    });
    assert_eq!(rig.engine.capacity(), usize::MAX);
    assert_eq!(read(rig.submit(1, 3).unwrap()).await, whole(1, 3));
}

#[tokio::test]
async fn an_id_that_is_in_is_refused() {
    let rig = Rig::new(Shape::default());
    rig.set_step(Duration::from_millis(5));
    let request = Request::new(rig.engine.next_id(), options(1, 20), &rig.engine.limits()).unwrap();
    let stream = rig.engine.submit(request.clone()).unwrap();
    let id = request.id();
    assert_eq!(
        rig.engine.submit(request).unwrap_err(),
        SubmitError::DuplicateId(id)
    );
    assert!(read(stream).await.1.is_ok());
}

#[tokio::test]
async fn a_drain_finishes_what_is_in_and_refuses_the_rest() {
    let rig = Rig::new(Shape::default());
    rig.set_step(Duration::from_millis(2));
    let reader = tokio::spawn(read(rig.submit(1, 50).unwrap()));
    let draining = tokio::spawn({
        let engine = rig.engine.clone();
        async move { engine.drain(PATIENCE).await }
    });
    rig.until("the drain", |rig| rig.engine.health().phase != Phase::Running)
        .await;
    assert_eq!(rig.submit(2, 1).unwrap_err(), SubmitError::ShuttingDown);
    assert!(!rig.engine.health().is_moving(PATIENCE));
    assert_eq!(reader.await.unwrap(), whole(1, 50));
    assert_eq!(draining.await.unwrap(), Drained::Complete);
    assert!(
        rig.script.dropped.load(Ordering::SeqCst),
        "the executor's memory is free"
    );
    assert_eq!(rig.engine.health().phase, Phase::Stopped);
    assert_eq!(rig.submit(3, 1).unwrap_err(), SubmitError::ShuttingDown);
    assert_eq!(rig.engine.drain(PATIENCE).await, Drained::Complete);
}

#[tokio::test]
async fn a_drain_fails_what_is_left_when_time_is_up() {
    let rig = Rig::new(Shape {
        max_num_seqs: 1,
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(10));
    let readers: Vec<_> = (0..3)
        .map(|i| tokio::spawn(read(rig.submit(i, 200).unwrap())))
        .collect();
    assert_eq!(
        rig.engine.drain(Duration::from_millis(50)).await,
        Drained::Failed(3)
    );
    for reader in readers {
        let (_, end) = reader.await.unwrap();
        assert!(end.unwrap_err().to_string().contains("shut down"));
    }
    assert!(rig.script.dropped.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_drain_returns_though_a_step_hangs() {
    let rig = Rig::new(Shape::default());
    rig.set(|script| &script.hold);
    let reader = tokio::spawn(read(rig.submit(1, 5).unwrap()));
    rig.until("a step", |rig| rig.engine.health().step_in_progress.is_some())
        .await;
    let drained = tokio::time::timeout(PATIENCE, rig.engine.drain(Duration::from_millis(20))).await;
    assert_eq!(drained, Ok(Drained::Failed(1)));
    assert!(reader.await.unwrap().1.is_err());
    rig.script.hold.store(false, Ordering::SeqCst);
}

#[tokio::test]
async fn a_stall_is_seen() {
    let rig = Rig::new(Shape::default());
    assert!(rig.engine.health().stalled_for.is_none());
    rig.set(|s| &s.hold);
    let stream = rig.submit(1, 1).unwrap();
    rig.until("a stall", |rig| {
        let health = rig.engine.health();
        let in_progress = health.step_in_progress.unwrap_or_default();
        !health.is_moving(Duration::from_millis(100)) && in_progress >= Duration::from_millis(50)
    })
    .await;
    assert_eq!(rig.engine.health().phase, Phase::Running);
    rig.script.hold.store(false, Ordering::SeqCst);
    assert!(read(stream).await.1.is_ok());
    rig.until("movement", |rig| {
        rig.engine.health().is_moving(Duration::from_millis(100))
    })
    .await;
}

#[tokio::test]
async fn a_dead_engine_is_no_silent_hang() {
    let rig = Rig::new(Shape {
        num_blocks: 4,
        ..Default::default()
    });
    // No step ends before the panic.
    rig.set(|s| &s.hold);
    let others = [rig.submit(1, 50).unwrap(), rig.submit(2, 5).unwrap()];
    rig.set(|s| &s.panic_between);
    rig.script.hold.store(false, Ordering::SeqCst);
    tokio::time::timeout(PATIENCE, rig.engine.ended())
        .await
        .expect("the end is announced");
    for stream in others {
        assert!(matches!(read(stream).await.1, Err(StepError::Panicked(m)) if m.contains("between steps")));
    }
    assert_eq!(rig.engine.health().phase, Phase::Dead);
    assert!(matches!(rig.submit(2, 1), Err(SubmitError::Dead(m)) if m.contains("between steps")));
    rig.engine
        .drain(PATIENCE)
        .now_or_never()
        .expect("a dead engine needs no drain");
}

/// The KV cache may become smaller between the check of a request and its admission.
#[tokio::test]
async fn a_request_made_with_larger_limits_fails_alone() {
    let rig = Rig::new(Shape {
        num_blocks: 4,
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(5));
    let innocent = rig.submit(1, 50).unwrap();
    let limits = plimsoll_core::Limits {
        kv_capacity_tokens: 10_000,
        ..rig.engine.limits()
    };
    let options = RequestOptions {
        prompt: vec![1; 100],
        max_tokens: Some(100),
        ..Default::default()
    };
    let guilty = rig
        .engine
        .submit(Request::new(rig.engine.next_id(), options, &limits).unwrap())
        .unwrap();
    let too_small = StepError::KvTooSmall {
        needed: 200,
        capacity: 64,
    };
    assert_eq!(read(guilty).await, (vec![], Err(too_small)));
    assert_eq!(read(innocent).await.0, expected(1, 50));
}

#[tokio::test]
async fn an_idle_engine_takes_no_steps_and_ends_with_its_last_handle() {
    let Rig { engine, script } = Rig::new(Shape::default());
    let rig = Rig {
        engine,
        script: Arc::clone(&script),
    };
    assert!(read(rig.submit(1, 3).unwrap()).await.1.is_ok());
    rig.until_empty().await;
    let steps = script.steps.load(Ordering::SeqCst);
    // Each command is a pass of the engine's loop.
    for _ in 0..10 {
        assert!(rig.engine.forget_cached().await);
    }
    assert_eq!(script.steps.load(Ordering::SeqCst), steps);
    let stream = rig.submit(2, 100).unwrap();
    drop(rig);
    // The stream alone keeps the engine alive.
    assert_eq!(read(stream).await.0, expected(2, 100));
    assert_eq!(script.steps.load(Ordering::SeqCst), steps + 100);
    let began = Instant::now();
    while !script.dropped.load(Ordering::SeqCst) {
        assert!(began.elapsed() < PATIENCE, "the thread outlives its handles");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
