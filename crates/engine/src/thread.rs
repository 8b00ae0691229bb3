use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use plimsoll_core::{
    CacheListener, DeviceTime, Event, Executor, KvConfig, RefusedBy, Request, RequestId, StepError,
    StepOutput, StepPlan,
};
use plimsoll_profiler::ProfileError;
use plimsoll_scheduler::Scheduler;

use crate::masks::MaskPool;
use crate::shared::{Command, SHUT_DOWN, Shared, Sleeper};
use crate::stall::Activity;
use crate::{OutOfMemory, Phase, StateSource, StepShape};

/// What the engine thread owns besides the executor: nobody else touches the scheduler.
pub(crate) struct EngineThread<E> {
    pub(crate) scheduler: Scheduler,
    pub(crate) source: Box<dyn StateSource<E>>,
    pub(crate) kv: KvConfig,
    pub(crate) commands: Receiver<Command>,
    pub(crate) shared: Arc<Shared>,
    /// Launched and not finished, oldest first.
    pub(crate) in_flight: VecDeque<StepPlan>,
    /// Most steps in flight, at least 1.
    pub(crate) depth: usize,
    /// How long requests wait for a state.
    pub(crate) outage_patience: Duration,
    pub(crate) clock: Clock,
    /// Most bytes of the device held so far, at least what was proved.
    pub(crate) highest: u64,
    pub(crate) peers_at_ready: u64,
    /// The step launched last awaits its masks.
    pub(crate) unsampled: bool,
    pub(crate) masks: MaskPool,
    /// A step found no memory: its executor is to be replaced.
    pub(crate) lost: bool,
    /// Who waits until the engine sleeps.
    pub(crate) sleeper: Option<Sleeper>,
    pub(crate) cache_listener: Option<Arc<dyn CacheListener>>,
}

/// Why the engine takes no steps.
pub(crate) enum Pause {
    /// It is time to end.
    Stop,
    /// The state is lost.
    Lost,
    /// The state shall be given back.
    Sleep(Sleeper),
}

impl<E: Executor> EngineThread<E> {
    /// Serves until told to end, until nobody can talk to it any more, or until a defect of the scheduler ends it. However
    /// it ends, every request gets its last event and [`Shared::ended`] is announced.
    pub(crate) fn run(self, executor: E) {
        // Dropped last: whoever waits for the end finds the executor's memory freed, even if its destructor panics.
        let _announce = Announce(Arc::clone(&self.shared));
        self.live_and_settle(executor);
    }

    fn live_and_settle(mut self, executor: E) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.live(executor)));
        let mut state = self.shared.lock();
        let error = match outcome {
            Ok(Ok(())) => {
                state.phase = Phase::Stopped;
                StepError::Failed(SHUT_DOWN.into())
            }
            Ok(Err(defect)) => {
                let message = format!("the state could not be built again: {defect}");
                tracing::error!(%message, "nothing is served any more");
                state.phase = Phase::Dead;
                state.last_error = Some(message.clone());
                StepError::Failed(message)
            }
            Err(panic) => {
                let message = message(panic.as_ref());
                tracing::error!(%message, "the engine thread panicked outside a step; nothing is served any more");
                state.phase = Phase::Dead;
                state.last_error = Some(message.clone());
                StepError::Panicked(message)
            }
        };
        state.fail_all(&error);
    }

    /// From one executor to the next. An error is a defect that only a new process can be rid of.
    fn live(&mut self, mut executor: E) -> Result<(), ProfileError> {
        loop {
            let pause = self.serve(&mut executor);
            self.clock.stop(executor.device_time());
            // Its memory is what the next one is made of.
            drop(executor);
            let next = match pause {
                Pause::Stop => None,
                Pause::Lost => self.recover()?,
                Pause::Sleep(sleeper) => self.sleep(sleeper)?,
            };
            match next {
                Some(next) => executor = next,
                None => return Ok(()),
            }
        }
    }

    fn serve(&mut self, executor: &mut E) -> Pause {
        loop {
            if let Some(pause) = self.take_commands(executor) {
                return pause;
            }
            let mut launched = 0;
            while !self.lost && self.in_flight.len() < self.depth {
                let plan = self.scheduler.plan();
                if plan.is_empty() {
                    break;
                }
                launched += 1;
                self.launch(executor, plan);
                self.sample(executor);
            }
            match self.in_flight.pop_front() {
                Some(plan) => self.finish(executor, &plan),
                // Work without a plan would be a silent hang.
                None => assert!(
                    launched > 0,
                    "there is work and no plan: {:?}",
                    self.scheduler.stats()
                ),
            }
            if self.lost {
                // What was launched beside the step that failed may still end well.
                while let Some(plan) = self.in_flight.pop_front() {
                    self.finish(executor, &plan);
                }
                self.lost = false;
                return Pause::Lost;
            }
        }
    }

    /// Obeys all commands; sleeps while there is nothing to do.
    fn take_commands(&mut self, executor: &mut E) -> Option<Pause> {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                // Every stream holds a sender, so there are no clients left.
                Err(TryRecvError::Disconnected) => return Some(Pause::Stop),
                Err(TryRecvError::Empty) => {
                    if self.is_over() {
                        return Some(Pause::Stop);
                    }
                    if !self.scheduler.is_idle() {
                        return None;
                    }
                    if let Some(sleeper) = self.take_sleeper() {
                        return Some(Pause::Sleep(sleeper));
                    }
                    executor.rest();
                    match self.commands.recv() {
                        Ok(command) => self.obey(command),
                        Err(_) => return Some(Pause::Stop),
                    }
                }
            }
        }
    }

    /// Whether it drains, and either nothing is left or the time for it is over.
    pub(crate) fn is_over(&self) -> bool {
        let deadline = self.shared.lock().deadline;
        deadline.is_some_and(|deadline| self.scheduler.is_idle() || Instant::now() >= deadline)
    }

    pub(crate) fn obey(&mut self, command: Command) {
        let mut cancelled = None;
        match command {
            Command::Submit(request) => self.submit(request),
            Command::Cancel(id) => {
                self.scheduler.cancel(id);
                cancelled = Some(id);
            }
            Command::Drain => {}
            Command::Sleep(sleeper) => self.sleeper = Some(sleeper),
            // Whoever asks learns from the phase that it is awake.
            Command::Wake(_) => {}
        }
        let mut state = self.shared.lock();
        state.stats.scheduler = self.scheduler.stats();
        // In the same moment: whoever finds it gone finds it counted.
        if let Some(id) = cancelled {
            state.leave(id);
        }
    }

    fn submit(&mut self, request: Request) {
        if self.scheduler.fits(&request) {
            return self.scheduler.submit(request);
        }
        // It was made before the KV cache became smaller.
        let error = StepError::KvTooSmall {
            needed: request.longest(),
            capacity: self.scheduler.longest_request(),
        };
        let event = (request.id(), Event::Failed(error));
        self.shared.lock().deliver(vec![event]);
    }

    fn launch(&mut self, executor: &mut E, plan: StepPlan) {
        self.begin(&plan);
        let launched = self.doing(Activity::Launch, || executor.launch(&plan));
        match launched {
            Ok(()) => {
                self.unsampled = plan.awaits_masks();
                self.in_flight.push_back(plan);
            }
            Err(error) => self.settle(executor, &plan, Err(error)),
        }
    }

    /// Says what is about to be computed, and to those that it admits that they wait no more.
    fn begin(&mut self, plan: &StepPlan) {
        let admitted = self.scheduler.admitted(plan);
        if !admitted.is_empty() {
            self.shared.deliver(self.scheduler.stats(), admitted);
        }
        self.shared.lock().begin_step(plan);
    }

    /// Brings the step launched last its masks, once all before it are applied, whose tokens they depend on. The device is
    /// busy with the rest of the step meanwhile.
    fn sample(&mut self, executor: &mut E) {
        if !self.unsampled || self.in_flight.len() > 1 {
            return;
        }
        let Some(plan) = self.in_flight.pop_front() else {
            return;
        };
        self.unsampled = false;
        let (pool, scheduler) = (&self.masks, &mut self.scheduler);
        self.shared.activity.set(Activity::Masks);
        let sampled = guard(|| executor.sample(&mut |masks| pool.fill(scheduler.guides(&plan), masks)));
        self.shared.activity.set(Activity::BetweenSteps);
        match sampled {
            Ok(()) => self.in_flight.push_front(plan),
            Err(error) => self.settle(executor, &plan, Err(error)),
        }
    }

    /// `work` of the executor, whose panic becomes the error of its step. If it never ends, it is known what it was.
    fn doing<T>(
        &self,
        activity: Activity,
        work: impl FnOnce() -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        self.shared.activity.set(activity);
        let done = guard(work);
        self.shared.activity.set(Activity::BetweenSteps);
        done
    }

    /// Waits for the oldest step in flight, hands out what it produced, and samples the step behind it if that waits.
    fn finish(&mut self, executor: &mut E, plan: &StepPlan) {
        let output = self.doing(Activity::Finish, || executor.finish());
        self.settle(executor, plan, output);
        self.sample(executor);
    }

    fn settle(&mut self, executor: &E, plan: &StepPlan, output: Result<StepOutput, StepError>) {
        let mut failure = output.as_ref().err().cloned();
        let events = match output {
            Ok(output) => {
                self.masks.follow(self.scheduler.followers(plan, &output));
                self.scheduler.apply(plan, output)
            }
            Err(error) => self.scheduler.fail(plan, &error),
        };
        if failure.is_none() {
            // The scheduler fails a step whose output does not answer its plan. A constraint fails its own request, in a good step.
            failure = events.iter().find_map(|(_, event)| match event {
                Event::Failed(StepError::Constraint(_)) => None,
                Event::Failed(error) => Some(error.clone()),
                _ => None,
            });
        }
        if let Some(error) = &failure {
            self.report(plan, error);
        }
        self.tell_cache();
        let above_proof = self.rises_above_proof(plan) || failure.as_ref().is_some_and(needs_more_scratch);
        // Asks the device, which may hang: not under the lock that whoever looks for that needs.
        let device_time = self.clock.read(executor.device_time());
        let mut state = self.shared.lock();
        state.stats.high_water_above_proof += u64::from(above_proof);
        state.stats.step_requests.observe(plan.runs.len() as f64);
        state.end_step(
            plan.step,
            plan.num_tokens(),
            !self.in_flight.is_empty(),
            failure.map(|error| error.to_string()),
        );
        state.stats.scheduler = self.scheduler.stats();
        state.stats.device_time = device_time;
        state.deliver(events);
    }

    /// Tells who listens what changed in the prefix cache.
    fn tell_cache(&mut self) {
        let Some(listener) = &self.cache_listener else {
            return;
        };
        let changes = self.scheduler.take_cache_events();
        if !changes.is_empty() {
            listener.changed(changes, &|| self.scheduler.cached());
        }
    }

    /// Says which step failed; for want of memory, also who has it, and that the state is lost.
    fn report(&mut self, plan: &StepPlan, error: &StepError) {
        let shape = StepShape::from(plan);
        let oom = match error {
            StepError::Oom(oom) if !needs_more_scratch(error) => oom,
            StepError::Oom(oom) => {
                // The next state would have no more of it, and this one serves all other steps.
                let requested = oom.requested;
                tracing::error!(step = plan.step, %shape, requested, "a step needs more scratch than was proved");
                return;
            }
            _ => {
                tracing::error!(step = plan.step, %shape, %error, "step failed");
                return;
            }
        };
        let outage = OutOfMemory {
            shape,
            requested: oom.requested,
            component: oom.component,
            meters: self.source.meters(),
            peers_at_ready: self.peers_at_ready,
        };
        tracing::error!(step = plan.step, "device memory ran out in a step: {outage}");
        self.lost = true;
        // Whoever hears that the step failed finds the server unready.
        self.shared.lock().lose_state(outage);
    }

    /// Whether the memory held rose above all that was proved or seen before while `plan` ran.
    fn rises_above_proof(&mut self, plan: &StepPlan) -> bool {
        let high_water = self.source.high_water();
        let above = high_water > self.highest;
        if above {
            tracing::warn!(
                step = plan.step,
                shape = %StepShape::from(plan),
                high_water,
                proved = self.source.proved_peak(),
                "a step held more memory than was proved"
            );
            self.highest = high_water;
        }
        above
    }

    /// Hands out events that no step made.
    pub(crate) fn deliver(&mut self, events: Vec<(RequestId, Event)>) {
        self.tell_cache();
        self.shared.deliver(self.scheduler.stats(), events);
    }
}

/// Adds up the time of one executor after the other, from when each begins to serve.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    /// Of executors that are gone.
    past: DeviceTime,
    /// What the profile's steps took of the present one's.
    before: DeviceTime,
}

impl Clock {
    /// A new executor takes over.
    pub(crate) fn start(&mut self, now: Option<DeviceTime>) {
        self.before = now.unwrap_or_default();
    }

    pub(crate) fn read(&self, now: Option<DeviceTime>) -> Option<DeviceTime> {
        now.map(|now| self.past.plus(now.since(self.before)))
    }

    fn stop(&mut self, now: Option<DeviceTime>) {
        self.past = self.read(now).unwrap_or(self.past);
    }
}

/// Whether a step failed for what it takes itself, and not for want of the device's memory.
fn needs_more_scratch(error: &StepError) -> bool {
    matches!(error, StepError::Oom(oom) if oom.refused_by == RefusedBy::FixedScratch)
}

/// A panic of the executor becomes the error of its step.
fn guard<T>(work: impl FnOnce() -> Result<T, StepError>) -> Result<T, StepError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(StepError::Panicked(message(panic.as_ref()))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

struct Announce(Arc<Shared>);

impl Drop for Announce {
    fn drop(&mut self) {
        self.0.ended.send_replace(true);
    }
}
