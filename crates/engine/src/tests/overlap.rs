//! The engine over a device that works on its own, as a GPU does.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use plimsoll_core::{
    BlockSize, DeviceTime, Executor, FillMasks, FinishReason, KvConfig, Request, RequestOptions, Run,
    Sampled, StepError, StepLimits, StepOutput, StepPlan,
};
use plimsoll_scheduler::SchedulerConfig;

use super::{Unmetered, expected, read, token};
use crate::{EngineConfig, EngineHandle, EngineStats};

const STEP: Duration = Duration::from_millis(10);

/// It needs [`STEP`] for whatever it is given, one after the other.
struct Device {
    launched: VecDeque<(StepPlan, Instant)>,
    /// When everything launched so far is done.
    done: Instant,
    resting: bool,
    time: DeviceTime,
}

impl Executor for Device {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        let now = Instant::now();
        if !std::mem::take(&mut self.resting) {
            self.time.idle_seconds += now.saturating_duration_since(self.done).as_secs_f64();
        }
        self.done = now.max(self.done) + STEP;
        self.time.busy_seconds += STEP.as_secs_f64();
        self.launched.push_back((plan.clone(), self.done));
        Ok(())
    }

    fn sample(&mut self, _: &mut FillMasks<'_>) -> Result<(), StepError> {
        unreachable!("nobody is constrained")
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let (plan, done) = self.launched.pop_front().expect("a step was launched");
        std::thread::sleep(done.saturating_duration_since(Instant::now()));
        let sampled = |run: &Run| {
            run.sample.as_ref().map(|spec| Sampled {
                token: token(spec.seed, spec.index),
                logprobs: None,
            })
        };
        Ok(StepOutput {
            samples: plan.runs.iter().map(sampled).collect(),
            ..Default::default()
        })
    }

    fn rest(&mut self) {
        self.resting = true;
    }

    fn device_time(&self) -> Option<DeviceTime> {
        Some(self.time)
    }
}

/// 256 requests at once, twice, with a pause between them.
async fn serve(steps_in_flight: usize) -> EngineStats {
    let device = Device {
        launched: VecDeque::new(),
        done: Instant::now(),
        resting: true,
        time: DeviceTime::default(),
    };
    let scheduler = SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            max_model_len: 1024,
        },
        kv: KvConfig {
            block_size: BlockSize::default(),
            num_blocks: 256 * 16,
        },
        enable_prefix_caching: true,
        patience: 1000,
    };
    let config = EngineConfig {
        max_queue: 256,
        vocab_size: 100,
        enable_prefix_caching: true,
        steps_in_flight,
        outage_patience: super::PATIENCE,
        cache_listener: None,
    };
    let engine = EngineHandle::start(device, Box::new(Unmetered), scheduler, &config).unwrap();
    for round in 0..2 {
        let submit = |seed: u64| {
            let options = RequestOptions {
                prompt: (0..128).map(|i| token(seed + 1000 * round, i)).collect(),
                max_tokens: Some(40),
                seed,
                ..Default::default()
            };
            let request = Request::new(engine.next_id(), options, &engine.limits()).unwrap();
            (seed, tokio::spawn(read(engine.submit(request).unwrap())))
        };
        for (seed, client) in (0..256).map(submit).collect::<Vec<_>>() {
            assert_eq!(
                client.await.unwrap(),
                (expected(seed, 40), Ok(FinishReason::Length))
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    engine.stats()
}

/// What the host does takes well under a millisecond a step, so this holds on a busy machine too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_does_not_wait_for_the_host() {
    let two = serve(2).await.device_time.expect("the device measures");
    assert!(two.busy_seconds > 0.8, "{two:?}");
    assert!(two.idle_seconds < 0.03 * two.busy_seconds, "{two:?}");
    // With one step at a time it waits after each.
    let one = serve(1).await.device_time.expect("the device measures");
    assert!(
        one.idle_seconds > 0.0 && one.idle_seconds > two.idle_seconds,
        "{one:?}"
    );
}
