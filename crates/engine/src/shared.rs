use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use plimsoll_core::{Event, KvConfig, Limits, Request, RequestId, StepError, StepPlan, TenantId};
use plimsoll_scheduler::{MAX_IN_FLIGHT, SchedulerStats};
use tokio::sync::{mpsc::UnboundedSender, oneshot, watch};

use crate::stall::{Activity, CurrentActivity, Stall, StepInFlight};
use crate::{EngineStats, Health, Histogram, OutOfMemory, Phase};

/// What the engine thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Request),
    Cancel(RequestId),
    /// Look at [`State::deadline`].
    Drain,
    /// Sleep once there is no work, unless the phase is another by then.
    Sleep(Sleeper),
    Wake(Waker),
}

/// Hears when the engine sleeps.
#[derive(Debug)]
pub(crate) struct Sleeper {
    /// Of [`State::fall_asleep`]: one that lost patience must not answer for the next.
    pub(crate) attempt: u64,
    pub(crate) asleep: oneshot::Sender<()>,
}

/// Hears whether the engine woke, or why it has not yet.
pub(crate) type Waker = oneshot::Sender<Result<(), String>>;

/// How handles and streams reach the thread, which ends when the last link is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: mpsc::Sender<Command>,
}

impl Link {
    /// A thread that is gone has failed all requests and needs no command.
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
    /// Tells whoever waits that the thread has ended.
    pub(crate) ended: watch::Sender<bool>,
}

/// Who waits for the events of a request.
#[derive(Debug)]
pub(crate) struct Client {
    /// Each with when it was sent: who reads it may be late.
    events: UnboundedSender<(Instant, Event)>,
    tenant: TenantId,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// What requests may ask for, with the KV cache in use.
    pub(crate) limits: Limits,
    pub(crate) kv: KvConfig,
    /// While there is no state for want of memory: why.
    pub(crate) outage: Option<String>,
    /// When it is tried again.
    pub(crate) retry_at: Option<Instant>,
    /// How often it was told to sleep.
    pub(crate) sleep_attempts: u64,
    /// While draining: when what is left is failed.
    pub(crate) deadline: Option<Instant>,
    /// As many as requests are in.
    pub(crate) clients: HashMap<RequestId, Client>,
    /// How many of them each tenant has, where tenants are told apart.
    tenants: HashMap<TenantId, usize>,
    pub(crate) stats: EngineStats,
    /// Requests that [`Self::fail_all`] ended.
    pub(crate) abandoned: usize,
    failures_in_a_row: u64,
    pub(crate) last_error: Option<String>,
    step_began: Option<Instant>,
    step_ended: Option<Instant>,
    /// Begun and not ended, oldest first.
    steps: VecDeque<StepInFlight>,
    busy_since: Option<Instant>,
    /// While a state is built again: when that last moved.
    pub(crate) built: Option<Instant>,
    /// When the latest requests of this busy time left, for the estimate of how fast the queue moves.
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
/// Departures that the estimate of throughput looks back on.
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

    /// A panic elsewhere leaves the state usable: every critical section is a few plain assignments.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out events that no step made.
    pub(crate) fn deliver(&self, scheduler: SchedulerStats, events: Vec<(RequestId, Event)>) {
        let mut state = self.lock();
        state.stats.scheduler = scheduler;
        state.deliver(events);
    }
}

impl State {
    /// Requests of `tenant`; 0 where nobody is told apart.
    pub(crate) fn held(&self, tenant: TenantId) -> usize {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Enters a request.
    pub(crate) fn enter(
        &mut self,
        id: RequestId,
        tenant: TenantId,
        events: UnboundedSender<(Instant, Event)>,
    ) {
        self.busy_since.get_or_insert_with(Instant::now);
        self.clients.insert(id, Client { events, tenant });
        if tenant != TenantId::default() {
            *self.tenants.entry(tenant).or_default() += 1;
        }
        self.stats.submitted += 1;
    }

    /// Sends each event to its client; the last one ends the request here too.
    pub(crate) fn deliver(&mut self, events: Vec<(RequestId, Event)>) {
        let now = Instant::now();
        for (id, event) in events {
            // A client that is gone has dropped its stream, which is no error.
            if is_last(&event) {
                if let Some(client) = self.leave(id) {
                    let _ = client.events.send((now, event));
                }
            } else if let Some(client) = self.clients.get(&id) {
                let _ = client.events.send((now, event));
            }
        }
    }

    /// Ends a request without an event.
    pub(crate) fn leave(&mut self, id: RequestId) -> Option<Client> {
        let client = self.clients.remove(&id)?;
        if let Entry::Occupied(mut held) = self.tenants.entry(client.tenant) {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
        self.departures.push_back(Instant::now());
        if self.departures.len() > DEPARTURES {
            self.departures.pop_front();
        }
        if self.clients.is_empty() {
            self.busy_since = None;
            // An idle time says nothing about the speed of the next busy one.
            self.departures.clear();
        }
        Some(client)
    }

    /// Ends every request with `error`.
    pub(crate) fn fail_all(&mut self, error: &StepError) {
        self.busy_since = None;
        self.abandoned += self.clients.len();
        self.tenants.clear();
        for (_, client) in self.clients.drain() {
            let _ = client.events.send((Instant::now(), Event::Failed(error.clone())));
        }
    }

    pub(crate) fn begin_step(&mut self, plan: &StepPlan) {
        self.step_began.get_or_insert_with(Instant::now);
        self.steps.push_back(plan.into());
    }

    /// Ends a step of `tokens` tokens; with `more` behind it, the next begins now.
    pub(crate) fn end_step(&mut self, step: u64, tokens: usize, more: bool, failure: Option<String>) {
        let now = Instant::now();
        self.steps.retain(|begun| begun.step != step);
        if let Some(began) = self.step_began.take() {
            self.stats.step_seconds.observe((now - began).as_secs_f64());
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
    }

    /// When the engine last moved; `None` where there is no work.
    fn progress(&self) -> Option<Instant> {
        let busy = self.busy_since?;
        Some(self.step_ended.map_or(busy, |step| step.max(busy)))
    }

    /// The same for one that may be building its state. Between two tries to build it nothing is to move.
    pub(crate) fn movement(&self) -> Option<Instant> {
        match self.phase {
            Phase::Rebuilding => self.built,
            Phase::Running | Phase::FallingAsleep | Phase::Draining => self.progress(),
            Phase::Asleep | Phase::Stopped | Phase::Dead => None,
        }
    }

    /// What there is to say about an engine that has not moved for so long.
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

    pub(crate) fn health(&self) -> Health {
        Health {
            phase: self.phase,
            last_step_age: self.step_ended.map(|at| at.elapsed()),
            step_in_progress: self.step_began.map(|at| at.elapsed()),
            stalled_for: self.movement().map(|at| at.elapsed()),
            failures_in_a_row: self.failures_in_a_row,
            last_error: self.last_error.clone(),
            outage: self.outage.clone(),
            retry_after: self.retry_in(),
        }
    }

    /// How long until a state is tried again, at least a second.
    pub(crate) fn retry_in(&self) -> Duration {
        let left = self
            .retry_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        left.unwrap_or_default().max(MIN_RETRY)
    }

    /// A step ran out of memory: there is no state until another is proved.
    pub(crate) fn lose_state(&mut self, outage: OutOfMemory) {
        if self.phase == Phase::Running {
            self.phase = Phase::Rebuilding;
        }
        // Until another is built, to free this one is what moves.
        self.built = Some(Instant::now());
        self.outage = Some(format!(
            "a step ran out of device memory: {} bytes for {} were not there",
            outage.requested, outage.component
        ));
        self.stats.last_oom = Some(Arc::new(outage));
    }

    /// Accepts nothing more, and returns which sleep it is that begins once nothing is left.
    pub(crate) fn fall_asleep(&mut self) -> u64 {
        self.phase = Phase::FallingAsleep;
        self.sleep_attempts += 1;
        self.sleep_attempts
    }

    /// Takes a sleep back that has not begun, where requests are in: how many.
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

    /// Nobody could have seen progress before now.
    pub(crate) fn restart_progress(&mut self) {
        self.busy_since = self.busy_since.map(|_| Instant::now());
    }

    /// When a client that finds `waiting` requests in the queue should come back: when, at the present rate of departures,
    /// these have been admitted.
    pub(crate) fn retry_after(&self, waiting: usize) -> Duration {
        // Early in a busy time it counts from its beginning, later from the oldest departure that is remembered.
        let (since, departures) = match self.departures.len() {
            DEPARTURES => (self.departures.front().copied(), DEPARTURES - 1),
            fewer => (self.busy_since, fewer),
        };
        let (Some(since), 1..) = (since, departures) else {
            return MIN_RETRY;
        };
        let per_departure = since.elapsed() / departures as u32;
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

/// What requests hear that a shutdown cuts off.
pub(crate) const SHUT_DOWN: &str = "the server shut down before the request was done";

const MIN_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use plimsoll_core::BlockSize;

    use super::*;

    #[test]
    fn retry_after_follows_the_rate_of_departures() {
        let limits = Limits {
            max_model_len: 1,
            kv_capacity_tokens: 16,
            vocab_size: 1,
        };
        let kv = KvConfig {
            block_size: BlockSize::default(),
            num_pages: 1,
            groups: plimsoll_core::CacheGroups::default(),
        };
        let shared = Shared::new(SchedulerStats::default(), limits, kv);
        let mut state = shared.lock();
        assert_eq!(state.retry_after(100), MIN_RETRY, "nothing is known");
        state.busy_since = Some(Instant::now() - Duration::from_secs(20));
        state.departures.extend([Instant::now(); 10]);
        // One leaves every 2 s.
        assert_eq!(state.retry_after(4).as_secs(), 8);
        assert_eq!(state.retry_after(100), MAX_RETRY);
        // With a full memory the beginning does not count.
        state.departures = vec![Instant::now() - Duration::from_secs(31); DEPARTURES].into();
        assert_eq!(state.retry_after(4).as_secs(), 4);
    }
}
