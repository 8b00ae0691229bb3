//! The engine over a device that works on its own, as a GPU does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_core::{
    BlockSize, DeviceTime, Executor, FillMasks, RequestOptions, StepError, StepLimits, StepOutput, StepPlan,
};

use super::fake::answer;
use super::{PATIENCE, config, options, read, start, submit, token, whole};
use crate::EngineStats;

/// Milliseconds that the device needs for whatever it is given.
const STEP: u64 = 10;

/// Milliseconds that the host needs for what a step produced.
const HOST: u64 = 1;

/// What the test sees of the device. Its time is its own, so that nothing depends on how busy the machine is.
#[derive(Default)]
struct World {
    /// The host's time in milliseconds.
    now: AtomicU64,
    /// The device takes no steps yet.
    held: AtomicBool,
    resting: AtomicBool,
}

/// It computes one step after the other.
struct Device {
    world: Arc<World>,
    /// Each with when it is done.
    launched: VecDeque<(StepPlan, u64)>,
    /// When everything launched so far is done.
    done: u64,
    busy: u64,
    idle: u64,
}

impl Executor for Device {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        while self.world.held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(100));
        }
        let now = self.world.now.load(Ordering::SeqCst);
        if !self.world.resting.swap(false, Ordering::SeqCst) {
            self.idle += now.saturating_sub(self.done);
        }
        self.done = now.max(self.done) + STEP;
        self.busy += STEP;
        self.launched.push_back((plan.clone(), self.done));
        Ok(())
    }

    fn sample(&mut self, _: &mut FillMasks<'_>) -> Result<(), StepError> {
        unreachable!("nobody is constrained")
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let (plan, done) = self.launched.pop_front().expect("a step was launched");
        self.world.now.fetch_max(done, Ordering::SeqCst);
        self.world.now.fetch_add(HOST, Ordering::SeqCst);
        Ok(answer(&plan))
    }

    fn rest(&mut self) {
        self.world.resting.store(true, Ordering::SeqCst);
    }

    fn device_time(&self) -> Option<DeviceTime> {
        Some(DeviceTime {
            busy_seconds: self.busy as f64 / 1e3,
            idle_seconds: self.idle as f64 / 1e3,
        })
    }
}

/// 256 requests at once, twice, with a pause between them.
async fn serve(steps_in_flight: usize) -> EngineStats {
    let world = Arc::<World>::default();
    let device = Device {
        world: Arc::clone(&world),
        launched: VecDeque::new(),
        done: 0,
        busy: 0,
        idle: 0,
    };
    let limits = StepLimits {
        max_num_batched_tokens: 8192,
        max_num_seqs: 256,
        max_model_len: 1024,
    };
    let config = config(256, steps_in_flight);
    let engine = start(device, limits, BlockSize::default(), 256 * 16, &config);
    for round in 0..2 {
        until_rest(&world).await;
        // With a pause before, in which the device waits for nobody.
        world.now.fetch_add(100, Ordering::SeqCst);
        world.held.store(true, Ordering::SeqCst);
        let send = |seed: u64| {
            let prompt = (0..128).map(|i| token(seed + 1000 * round, i)).collect();
            let options = RequestOptions {
                prompt,
                ..options(seed, 40)
            };
            (seed, tokio::spawn(read(submit(&engine, options).unwrap())))
        };
        let clients: Vec<_> = (0..256).map(send).collect();
        world.held.store(false, Ordering::SeqCst);
        for (seed, client) in clients {
            assert_eq!(client.await.unwrap(), whole(seed, 40));
        }
    }
    engine.stats()
}

/// The engine has nothing to do, and says so.
async fn until_rest(world: &World) {
    let rest = async {
        while !world.resting.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, rest)
        .await
        .expect("the engine rests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_does_not_wait_for_the_host() {
    let two = serve(2).await.device_time.expect("the device measures");
    assert!(two.busy_seconds > 0.8, "{two:?}");
    assert_eq!(two.idle_seconds, 0.0, "{two:?}");
    // With one step at a time it waits after each.
    let one = serve(1).await.device_time.expect("the device measures");
    assert!(
        one.idle_seconds > 0.0 && one.idle_seconds > two.idle_seconds,
        "{one:?}"
    );
}
