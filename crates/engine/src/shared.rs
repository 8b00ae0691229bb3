use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use plimsoll_core::{Event, KvConfig, Limits, Request, RequestId, StepError, StepPlan, TenantId};
use plimsoll_scheduler::{MAX_IN_FLIGHT, SchedulerStats};
use tokio::sync::{mpsc::UnboundedSender, oneshot, watch};

use crate::stall::{Activity, CurrentActivity, Stall, StepInFlight};
use crate::{EngineStats, Health, Histogram, OutOfMemory, Phase, SecondsByKind};

/// Commands to the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Request>),
    Cancel(RequestId),
    /// Look at [`State::deadline`].
    Drain,
    /// Sleep once there is no work, unless the phase is another by then.
    Sleep(Sleeper),
    Wake(Waker),
    /// Empty the prefix cache, then tell the caller.
    ForgetCached(oneshot::Sender<()>),
}

/// A caller that waits for the engine to sleep.
#[derive(Debug)]
pub(crate) struct Sleeper {
    /// From [`State::fall_asleep`]: tells an attempt that timed out from the next one.
    pub(crate) attempt: u64,
    pub(crate) asleep: oneshot::Sender<()>,
}

/// Reports whether the engine woke, or why it could not yet.
pub(crate) type Waker = oneshot::Sender<Result<(), String>>;

/// Connects handles and streams with the thread, which ends when the last link is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: mpsc::Sender<Command>,
}

impl Link {
    /// Ignores a thread that has ended: it has failed all requests.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}

/// What handles, streams and the engine thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// What the thread works on.
    pub(crate) activity: CurrentActivity,
    /// Becomes true when the thread has ended.
    pub(crate) ended: watch::Sender<bool>,
}

/// Receiver of the events of one request.
#[derive(Debug)]
pub(crate) struct Client {
    /// Events with the time they were sent: they may be read later.
    events: UnboundedSender<(Instant, Event)>,
    tenant: TenantId,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// Limits of requests with the current KV cache.
    pub(crate) limits: Limits,
    pub(crate) kv: KvConfig,
    /// Why there is no state, while memory is missing.
    pub(crate) outage: Option<String>,
    /// When it is tried again.
    pub(crate) retry_at: Option<Instant>,
    /// Number of sleep attempts.
    pub(crate) sleep_attempts: u64,
    /// While draining: when the remaining requests are failed.
    pub(crate) deadline: Option<Instant>,
    /// One for each admitted request.
    pub(crate) clients: HashMap<RequestId, Client>,
    /// Requests of each tenant, if tenants are distinguished.
    tenants: HashMap<TenantId, usize>,
    pub(crate) stats: EngineStats,
    /// Requests that [`Self::fail_all`] ended.
    pub(crate) abandoned: usize,
    failures_in_a_row: u64,
    pub(crate) last_error: Option<String>,
    step_began: Option<Instant>,
    step_ended: Option<Instant>,
    /// Steps in flight, oldest first.
    steps: VecDeque<StepInFlight>,
    busy_since: Option<Instant>,
    /// While a state is rebuilt: time of the last progress.
    pub(crate) built: Option<Instant>,
    /// When the latest requests of this busy period ended, to estimate how fast the queue moves.
    departures: VecDeque<Instant>,
}

/// From a decode step of a tiny model to a full prefill on a slow machine.
const STEP_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];
/// vLLM's buckets of `iteration_tokens_total`.
const STEP_TOKENS: &[f64] = &[
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
];
/// Batch sizes: powers of two, as the graphs of decode steps have them.
const STEP_REQUESTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
/// Departures that the estimate of throughput uses.
const DEPARTURES: usize = 32;

impl Shared {
    pub(crate) fn new(scheduler: SchedulerStats, limits: Limits, kv: KvConfig) -> Self {
        let stats = EngineStats {
            scheduler,
            in_flight: 0,
            steps: 0,
            failed_steps: 0,
            submitted: 0,
            refused: 0,
            step_seconds: Histogram::new(STEP_SECONDS),
            step_tokens: Histogram::new(STEP_TOKENS),
            iteration_tokens: Histogram::new(STEP_TOKENS),
            step_prompt_tokens: Histogram::new(STEP_TOKENS),
            steps_above_target_itl: 0,
            seconds_by_kind: SecondsByKind::default(),
            step_requests: Histogram::new(STEP_REQUESTS),
            high_water_above_proof: 0,
            rebuilds_oom: 0,
            rebuilds_wake: 0,
            last_oom: None,
            device_time: None,
            cache_events: None,
        };
        let state = State {
            phase: Phase::Running,
            limits,
            kv,
            outage: None,
            retry_at: None,
            sleep_attempts: 0,
            deadline: None,
            clients: HashMap::new(),
            tenants: HashMap::new(),
            stats,
            abandoned: 0,
            failures_in_a_row: 0,
            last_error: None,
            step_began: None,
            step_ended: None,
            steps: VecDeque::with_capacity(MAX_IN_FLIGHT + 1),
            busy_since: None,
            built: None,
            departures: VecDeque::new(),
        };
        Self {
            state: Mutex::new(state),
            activity: CurrentActivity::default(),
            ended: watch::Sender::new(false),
        }
    }

    /// The state stays valid if another thread panics: every critical section is a few plain assignments.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Delivers events outside a step.
    pub(crate) fn deliver(&self, scheduler: SchedulerStats, events: Vec<(RequestId, Event)>) {
        let mut state = self.lock();
        state.stats.scheduler = scheduler;
        state.deliver(events, Instant::now());
    }
}

impl State {
    /// Requests of `tenant`; 0 if tenants are not distinguished.
    pub(crate) fn held(&self, tenant: TenantId) -> usize {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Adds a request.
    pub(crate) fn enter(
        &mut self,
        id: RequestId,
        tenant: TenantId,
        events: UnboundedSender<(Instant, Event)>,
        now: Instant,
    ) {
        self.busy_since.get_or_insert(now);
        self.clients.insert(id, Client { events, tenant });
        if tenant != TenantId::default() {
            *self.tenants.entry(tenant).or_default() += 1;
        }
        self.stats.submitted += 1;
    }

    /// Sends each event to its client; the last one also removes the request.
    pub(crate) fn deliver(&mut self, events: Vec<(RequestId, Event)>, now: Instant) {
        for (id, event) in events {
            // Sending fails if the client dropped its stream, which is no error.
            if is_last(&event) {
                if let Some(client) = self.leave(id, now) {
                    let _ = client.events.send((now, event));
                }
            } else if let Some(client) = self.clients.get(&id) {
                let _ = client.events.send((now, event));
            }
        }
    }

    /// Ends a request without an event.
    pub(crate) fn leave(&mut self, id: RequestId, now: Instant) -> Option<Client> {
        let client = self.clients.remove(&id)?;
        if let Entry::Occupied(mut held) = self.tenants.entry(client.tenant) {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
        self.departures.push_back(now);
        if self.departures.len() > DEPARTURES {
            self.departures.pop_front();
        }
        if self.clients.is_empty() {
            self.busy_since = None;
            // An idle period says nothing about the speed of the next busy one.
            self.departures.clear();
        }
        Some(client)
    }

    /// Ends every request with `error`.
    pub(crate) fn fail_all(&mut self, error: &StepError, now: Instant) {
        self.busy_since = None;
        self.abandoned += self.clients.len();
        self.tenants.clear();
        for (_, client) in self.clients.drain() {
            let _ = client.events.send((now, Event::Failed(error.clone())));
        }
    }

    pub(crate) fn begin_step(&mut self, plan: &StepPlan, now: Instant) {
        self.step_began.get_or_insert(now);
        self.steps.push_back(plan.into());
    }

    /// Ends a step of `tokens` tokens; with `more` behind it, the next begins now. Returns how long it took.
    pub(crate) fn end_step(
        &mut self,
        step: u64,
        tokens: usize,
        more: bool,
        failure: Option<String>,
        now: Instant,
    ) -> Option<Duration> {
        self.steps.retain(|begun| begun.step != step);
        let took = self.step_began.take().map(|began| now - began);
        if let Some(took) = took {
            self.stats.step_seconds.observe(took.as_secs_f64());
            self.stats.step_tokens.observe(tokens as f64);
        }
        self.step_ended = Some(now);
        self.step_began = more.then_some(now);
        if failure.is_some() {
            self.stats.failed_steps += 1;
            self.failures_in_a_row += 1;
            self.last_error = failure;
        } else {
            self.stats.steps += 1;
            self.failures_in_a_row = 0;
        }
        took
    }

    /// Time of the last progress; `None` if there is no work.
    fn progress(&self) -> Option<Instant> {
        let busy = self.busy_since?;
        Some(self.step_ended.map_or(busy, |step| step.max(busy)))
    }

    /// The same, also while a state is built. `None` between two tries to build it.
    pub(crate) fn movement(&self) -> Option<Instant> {
        match self.phase {
            Phase::Asleep | Phase::Stopped | Phase::Dead => None,
            // A state may be lost while the engine drains, or is about to sleep, too.
            phase if phase == Phase::Rebuilding || self.outage.is_some() => self.built,
            _ => self.progress(),
        }
    }

    /// Describes an engine that has made no progress for `waited`.
    pub(crate) fn stall(&self, waited: Duration, activity: Activity) -> Stall {
        Stall {
            phase: self.phase,
            activity,
            waited,
            step: self.steps.front().cloned(),
            running: self.stats.scheduler.running,
            waiting: self.stats.scheduler.waiting,
        }
    }

    pub(crate) fn health(&self, now: Instant) -> Health {
        let since = |at: Instant| now.saturating_duration_since(at);
        Health {
            phase: self.phase,
            last_step_age: self.step_ended.map(since),
            step_in_progress: self.step_began.map(since),
            stalled_for: self.movement().map(since),
            failures_in_a_row: self.failures_in_a_row,
            last_error: self.last_error.clone(),
            outage: self.outage.clone(),
            retry_after: self.retry_in(now),
        }
    }

    /// Time until a state is tried again, at least a second.
    pub(crate) fn retry_in(&self, now: Instant) -> Duration {
        let left = self.retry_at.map(|at| at.saturating_duration_since(now));
        left.unwrap_or_default().max(MIN_RETRY)
    }

    /// A step ran out of memory: there is no state until another is proved.
    pub(crate) fn lose_state(&mut self, outage: OutOfMemory, now: Instant) {
        if self.phase == Phase::Running {
            self.phase = Phase::Rebuilding;
        }
        // Freeing the lost state counts as progress of the rebuild.
        self.built = Some(now);
        self.outage = Some(format!(
            "a step ran out of device memory: an allocation of {} bytes for {} failed",
            outage.requested, outage.component
        ));
        self.stats.last_oom = Some(Arc::new(outage));
    }

    /// Accepts no more requests; returns the number of this sleep attempt.
    pub(crate) fn fall_asleep(&mut self) -> u64 {
        self.phase = Phase::FallingAsleep;
        self.sleep_attempts += 1;
        self.sleep_attempts
    }

    /// Cancels a sleep that has not begun; returns how many requests are still in.
    pub(crate) fn stay_awake(&mut self) -> Option<usize> {
        if self.phase != Phase::FallingAsleep {
            return None;
        }
        self.phase = match self.outage {
            Some(_) => Phase::Rebuilding,
            None => Phase::Running,
        };
        Some(self.clients.len())
    }

    /// Progress counts from now on.
    pub(crate) fn restart_progress(&mut self, now: Instant) {
        self.busy_since = self.busy_since.map(|_| now);
    }

    /// When a client that finds `waiting` requests in the queue should retry: when these will have been admitted, at the current
    /// rate of departures.
    pub(crate) fn retry_after(&self, waiting: usize, now: Instant) -> Duration {
        // Counts from the beginning of the busy period, or from the oldest departure recorded.
        let (since, departures) = match self.departures.len() {
            DEPARTURES => (self.departures.front().copied(), DEPARTURES - 1),
            fewer => (self.busy_since, fewer),
        };
        let (Some(since), 1..) = (since, departures) else {
            return MIN_RETRY;
        };
        let per_departure = now.saturating_duration_since(since) / departures as u32;
        per_departure
            .saturating_mul(waiting as u32)
            .clamp(MIN_RETRY, MAX_RETRY)
    }
}

pub(crate) fn is_last(event: &Event) -> bool {
    match event {
        Event::Admitted { .. } => false,
        Event::Prompt(prompt) => prompt.finish.is_some(),
        Event::Token(token) => token.finish.is_some(),
        Event::Pooled(_) | Event::Failed(_) => true,
    }
}

const MIN_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use plimsoll_core::{BlockSize, CacheGroups};
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::stall::Patience;

    const SECOND: Duration = Duration::from_secs(1);

    fn shared() -> Shared {
        let limits = Limits {
            max_model_len: 1,
            kv_capacity_tokens: 16,
            vocab_size: 1,
            images: None,
        };
        let kv = KvConfig {
            block_size: BlockSize::default(),
            num_pages: 1,
            groups: CacheGroups::default(),
            state_slots: 0,
        };
        Shared::new(SchedulerStats::default(), limits, kv)
    }

    #[test]
    fn retry_after_follows_the_rate_of_departures() {
        let shared = shared();
        let mut state = shared.lock();
        let start = Instant::now();
        let now = start + 31 * SECOND;
        assert_eq!(state.retry_after(100, now), MIN_RETRY, "nothing is known");
        state.busy_since = Some(now - 20 * SECOND);
        state.departures.extend([now; 10]);
        // One request leaves every 2 s.
        assert_eq!(state.retry_after(4, now).as_secs(), 8);
        assert_eq!(state.retry_after(100, now), MAX_RETRY);
        // Once all departures are recorded, the beginning does not count.
        state.departures = vec![start; DEPARTURES].into();
        assert_eq!(state.retry_after(4, now).as_secs(), 4);
    }

    #[test]
    fn building_a_state_is_movement_in_every_phase() {
        let shared = shared();
        let mut state = shared.lock();
        let start = Instant::now();
        let (sender, _events) = unbounded_channel();
        state.enter(RequestId(0), TenantId::default(), sender, start);
        for phase in [Phase::Rebuilding, Phase::FallingAsleep, Phase::Draining] {
            state.phase = phase;
            state.outage = Some("a step ran out of memory".to_owned());
            state.built = Some(start + SECOND);
            assert_eq!(state.movement(), state.built, "{phase}");
            state.built = None;
            assert_eq!(state.movement(), None, "{phase}, between two tries");
            state.outage = None;
        }
        assert_eq!(state.movement(), Some(start), "it drains, and has a state");
    }

    #[test]
    fn slow_steps_and_idle_periods_are_no_stall() {
        let shared = shared();
        let mut state = shared.lock();
        let start = Instant::now();
        let mut patience = Patience::new(SECOND, start);
        let (sender, _events) = unbounded_channel();
        state.enter(RequestId(0), TenantId::default(), sender, start);
        let mut now = start;
        let mut check = |state: &mut State, passed: u32, longest: u32| {
            for _ in 0..passed {
                now += SECOND;
                assert!(patience.look(state.movement(), now) <= longest * SECOND);
            }
            now
        };
        // Steps of 3 s, for ten times as long as a single one may take.
        for step in 0..10 {
            let plan = StepPlan {
                step,
                ..StepPlan::default()
            };
            let began = check(&mut state, 0, 0);
            state.begin_step(&plan, began);
            let ended = check(&mut state, 3, 3);
            state.end_step(step, 1, false, None, ended);
        }
        let now = check(&mut state, 1, 1);
        state.leave(RequestId(0), now);
        // Idle.
        check(&mut state, 100, 0);
    }
}
