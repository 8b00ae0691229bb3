use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use plimsoll_core::{
    CacheListener, DeviceTime, Event, Executor, KvConfig, RefusedBy, Request, RequestId, Run, StepCosts,
    StepError, StepLimits, StepOutput, StepPlan,
};
use plimsoll_profiler::ProfileError;
use plimsoll_scheduler::{PromptBudget, Scheduler};

use crate::masks::MaskPool;
use crate::shared::{Command, Shared, Sleeper};
use crate::stall::Activity;
use crate::{OutOfMemory, Phase, StateSource, StepShape};

/// State of the engine thread besides the executor. It alone uses the scheduler.
pub(crate) struct EngineThread<E> {
    pub(crate) scheduler: Scheduler,
    pub(crate) source: Box<dyn StateSource<E>>,
    pub(crate) kv: KvConfig,
    pub(crate) commands: Receiver<Command>,
    pub(crate) shared: Arc<Shared>,
    /// Plans in flight, oldest first.
    pub(crate) in_flight: VecDeque<StepPlan>,
    /// Maximum number of steps in flight, at least 1.
    pub(crate) depth: usize,
    /// How long requests wait for a new state.
    pub(crate) outage_patience: Duration,
    /// Longest step in which requests generate.
    pub(crate) target_itl: Option<Duration>,
    pub(crate) clock: Clock,
    /// Highest device bytes held so far, at least the proved peak.
    pub(crate) highest: u64,
    pub(crate) peers_at_ready: u64,
    /// The last launched step waits for its masks.
    pub(crate) unsampled: bool,
    pub(crate) masks: MaskPool,
    /// A step ran out of device memory: the executor must be replaced.
    pub(crate) lost: bool,
    /// A rank of the executor is gone: nothing can replace that.
    pub(crate) rank_lost: Option<String>,
    /// The caller that waits for the engine to sleep.
    pub(crate) sleeper: Option<Sleeper>,
    pub(crate) cache_listener: Option<Arc<dyn CacheListener>>,
}

/// What ends the engine.
#[derive(Debug, thiserror::Error)]
enum Defect {
    #[error("the engine state could not be rebuilt: {0}")]
    Rebuild(ProfileError),
    #[error("the ranks of the server lost each other: {0}")]
    RankLost(String),
}

/// Why the engine stopped taking steps.
pub(crate) enum Pause {
    /// The engine is to end.
    Stop,
    /// The state is lost.
    Lost,
    /// A rank of the executor is gone.
    RankLost(String),
    /// The engine is to sleep.
    Sleep(Sleeper),
}

impl<E: Executor> EngineThread<E> {
    /// Limits prompts and encodes in steps of `executor` that take the time of `costs`; without them prompts fill each step.
    pub(crate) fn limit_prompts(&mut self, costs: Option<StepCosts>, limits: StepLimits, executor: &E) {
        let (most, target) = (limits.max_num_batched_tokens, self.target_itl);
        let costs = costs.map(|costs| costs.with_encode(executor.encode_cost()));
        let budget = costs.map(|costs| PromptBudget::new(costs, most, target));
        self.scheduler.limit_prompts(budget);
    }

    /// Serves until it is told to end, all handles are dropped, or a defect ends it. In every case each request gets its last
    /// event, and [`Shared::ended`] is set.
    pub(crate) fn run(self, executor: E) {
        // Dropped last, after the executor's memory is freed, even if its destructor panics.
        let _announce = Announce(Arc::clone(&self.shared));
        self.live_and_settle(executor);
    }

    fn live_and_settle(mut self, executor: E) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.live(executor)));
        let mut state = self.shared.lock();
        let error = match outcome {
            Ok(Ok(())) => {
                state.phase = Phase::Stopped;
                StepError::ShutDown
            }
            Ok(Err(defect)) => {
                let message = defect.to_string();
                tracing::error!(%message, "the engine has ended");
                state.phase = Phase::Dead;
                state.last_error = Some(message.clone());
                StepError::Failed(message)
            }
            Err(panic) => {
                let message = message(panic.as_ref());
                tracing::error!(%message, "the engine thread panicked outside a step; the engine has ended");
                state.phase = Phase::Dead;
                state.last_error = Some(message.clone());
                StepError::Panicked(message)
            }
        };
        state.fail_all(&error, Instant::now());
    }

    /// Serves with one executor after the other. An error is a defect that needs a new process.
    fn live(&mut self, mut executor: E) -> Result<(), Defect> {
        loop {
            let pause = self.serve(&mut executor);
            self.clock.stop(executor.device_time());
            // The next one needs its memory.
            drop(executor);
            let next = match pause {
                Pause::Stop => None,
                Pause::Lost => self.recover().map_err(Defect::Rebuild)?,
                Pause::RankLost(why) => return Err(Defect::RankLost(why)),
                Pause::Sleep(sleeper) => self.sleep(sleeper).map_err(Defect::Rebuild)?,
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
                // Work without a plan would hang silently.
                None => assert!(
                    launched > 0,
                    "there is work and no plan: {:?}",
                    self.scheduler.stats()
                ),
            }
            if let Some(why) = self.rank_lost.take() {
                return Pause::RankLost(why);
            }
            if self.lost {
                // The other step in flight may still succeed.
                while let Some(plan) = self.in_flight.pop_front() {
                    self.finish(executor, &plan);
                }
                self.lost = false;
                return Pause::Lost;
            }
        }
    }

    /// Handles all commands; blocks while there is no work.
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

    /// True if it drains, and no request is left or the deadline has passed.
    pub(crate) fn is_over(&self) -> bool {
        let deadline = self.shared.lock().deadline;
        deadline.is_some_and(|deadline| self.scheduler.is_idle() || Instant::now() >= deadline)
    }

    pub(crate) fn obey(&mut self, command: Command) {
        let mut cancelled = None;
        match command {
            Command::Submit(request) => self.submit(*request),
            Command::Cancel(id) => {
                self.scheduler.cancel(id);
                cancelled = Some(id);
            }
            Command::Drain => {}
            Command::Sleep(sleeper) => self.sleeper = Some(sleeper),
            // The caller sees from the phase that it is awake.
            Command::Wake(_) => {}
            Command::ForgetCached(done) => {
                self.scheduler.forget_cached();
                self.tell_cache();
                // The caller may be gone.
                let _ = done.send(());
            }
        }
        let mut state = self.shared.lock();
        state.stats.scheduler = self.scheduler.stats();
        // Under the same lock, so that counters match what clients see.
        if let Some(id) = cancelled {
            state.leave(id, Instant::now());
        }
    }

    fn submit(&mut self, request: Request) {
        if self.scheduler.fits(&request) {
            return self.scheduler.submit(request);
        }
        // The request was validated before the KV cache became smaller.
        let error = StepError::KvTooSmall {
            needed: request.longest(),
            capacity: self.scheduler.longest_request(),
        };
        let event = (request.id(), Event::Failed(error));
        self.shared.lock().deliver(vec![event], Instant::now());
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

    /// Records the step that begins, and sends `Admitted` to the requests that it admits.
    fn begin(&mut self, plan: &StepPlan) {
        let admitted = self.scheduler.admitted(plan);
        if !admitted.is_empty() {
            self.shared.deliver(self.scheduler.stats(), admitted);
        }
        self.shared.lock().begin_step(plan, Instant::now());
    }

    /// Computes the masks of the last launched step once all steps before it are applied, as masks depend on their tokens. The
    /// device computes the rest of the step in the meantime.
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
        let sampled = guard(|| executor.sample(&mut |masks| pool.fill(scheduler.constraints(&plan), masks)));
        self.shared.activity.set(Activity::BetweenSteps);
        match sampled {
            Ok(()) => self.in_flight.push_front(plan),
            Err(error) => self.settle(executor, &plan, Err(error)),
        }
    }

    /// Runs `work` of the executor; a panic becomes the error of its step. Records `activity`, in case the work never ends.
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

    /// Waits for the oldest step in flight, delivers its events, and samples the next step if it waits for masks.
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
            // The scheduler fails a step whose output does not match its plan. Other errors are those of single requests.
            failure = events.iter().find_map(|(_, event)| match event {
                Event::Failed(StepError::Constraint(_)) => None,
                Event::Failed(error @ StepError::NotFinite(_)) => {
                    tracing::error!(step = plan.step, %error, "a request failed");
                    None
                }
                Event::Failed(error) => Some(error.clone()),
                _ => None,
            });
        }
        if let Some(error) = &failure {
            self.report(plan, error);
        }
        self.tell_cache();
        let above_proof = self.rises_above_proof(plan) || failure.as_ref().is_some_and(needs_more_scratch);
        // Reads the device, which may hang: not under the lock that the stall detection needs.
        let device_time = self.clock.read(executor.device_time());
        let mut state = self.shared.lock();
        let now = Instant::now();
        state.stats.high_water_above_proof += u64::from(above_proof);
        state.stats.step_requests.observe(plan.runs.len() as f64);
        let generated = events
            .iter()
            .filter(|(_, event)| matches!(event, Event::Token(_)));
        let prompts = plan.prompt_tokens();
        let tokens = prompts + generated.count();
        state.stats.iteration_tokens.observe(tokens as f64);
        let failed = failure.is_some();
        let took = state.end_step(
            plan.step,
            plan.num_tokens(),
            !self.in_flight.is_empty(),
            failure.map(|error| error.to_string()),
            now,
        );
        if let (Some(took), Some(costs), false) = (took, self.scheduler.step_costs(), failed) {
            state.stats.seconds_by_kind.count(plan, costs, took);
        }
        if plan.runs.iter().any(Run::continues_output) {
            let is_late = took
                .zip(self.target_itl)
                .is_some_and(|(took, target)| took > target);
            state.stats.steps_above_target_itl += u64::from(is_late);
            if prompts > 0 {
                state.stats.step_prompt_tokens.observe(prompts as f64);
            }
        }
        state.stats.scheduler = self.scheduler.stats();
        state.stats.device_time = device_time;
        state.deliver(events, now);
    }

    /// Sends changes of the prefix cache to the listener.
    fn tell_cache(&mut self) {
        let Some(listener) = &self.cache_listener else {
            return;
        };
        let changes = self.scheduler.take_cache_events();
        if !changes.is_empty() {
            listener.changed(changes, &|| self.scheduler.cached());
        }
    }

    /// Logs the failed step. After an out of memory, also records who holds the memory and that the state is lost.
    fn report(&mut self, plan: &StepPlan, error: &StepError) {
        let shape = StepShape::from(plan);
        let oom = match error {
            StepError::Oom(oom) if !needs_more_scratch(error) => oom,
            StepError::Oom(oom) => {
                // A new state would have no more scratch, and this one serves all other steps.
                let requested = oom.requested;
                tracing::error!(step = plan.step, %shape, requested, "a step needs more arena memory than was proved");
                return;
            }
            _ => {
                tracing::error!(step = plan.step, %shape, %error, "step failed");
                if let StepError::RankLost(why) = error {
                    self.rank_lost = Some(why.clone());
                }
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
        // Before clients get the error: the server is already unready then.
        self.shared.lock().lose_state(outage, Instant::now());
    }

    /// True if `plan` raised the memory held above the highest so far.
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

    /// Delivers events outside a step.
    pub(crate) fn deliver(&mut self, events: Vec<(RequestId, Event)>) {
        self.tell_cache();
        self.shared.deliver(self.scheduler.stats(), events);
    }
}

/// Adds up the device time of successive executors, each from when it begins to serve.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    /// Time of former executors.
    past: DeviceTime,
    /// Time of the current one before it began to serve: the profile's steps.
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

/// True if a step needed more scratch than its arena has, while the device still had memory.
fn needs_more_scratch(error: &StepError) -> bool {
    matches!(error, StepError::Oom(oom) if oom.refused_by == RefusedBy::FixedScratch)
}

/// Turns a panic of the executor into the error of its step.
pub(crate) fn guard<T>(work: impl FnOnce() -> Result<T, StepError>) -> Result<T, StepError> {
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
