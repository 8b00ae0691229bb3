use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use plimsoll_core::{
    CacheListener, DeviceTime, Executor, ImageInput, KvConfig, Limits, Request, RequestId, StepError,
};
use plimsoll_profiler::Proved;
use plimsoll_scheduler::{MAX_IN_FLIGHT, Scheduler, SchedulerConfig};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot;

use crate::masks::MaskPool;
use crate::shared::{Command, Link, Shared, Sleeper};
use crate::stall::{Patience, look_every};
use crate::thread::{Clock, EngineThread};
use crate::{EngineStats, Health, Phase, RequestStream, Stall, StateSource};

/// Configuration of the engine beyond what the profile proved.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Requests that may wait, in addition to those that run (`--max-num-seqs`); more are refused.
    pub max_queue: usize,
    /// Size of the model's vocabulary.
    pub vocab_size: usize,
    /// Which images prompts may have; `None` for text alone.
    pub images: Option<ImageInput>,
    /// Keep KV of finished requests for later ones with the same beginning.
    pub enable_prefix_caching: bool,
    /// Maximum number of steps in flight, 1 or 2. With 2, scheduling overlaps with an executor that works asynchronously; with
    /// one that computes inside `launch` it would only delay tokens by a step.
    pub steps_in_flight: usize,
    /// How long requests wait for a new state after an out of memory.
    pub outage_patience: Duration,
    /// Longest step in which requests generate (`--target-itl`), as far as prompts can be computed in smaller pieces.
    pub target_itl: Option<Duration>,
    /// Receives the events of the prefix cache.
    pub cache_listener: Option<Arc<dyn CacheListener>>,
}

/// Why a request was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("the server is at its limit of {limit} requests; try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// Requests that may be in at once, running and waiting.
        limit: usize,
        /// Estimated time until there is room, from the current throughput.
        retry_after: Duration,
    },
    /// The tenant has its share of the queue.
    #[error("this API key has {held} of the server's {limit} requests, and the rest is reserved for other keys; try again in {} s", retry_after.as_secs())]
    ShareFull {
        /// Requests of the tenant, running and waiting.
        held: usize,
        /// Requests that may be in at once, of all tenants.
        limit: usize,
        /// Estimated time until there is room, from the current throughput.
        retry_after: Duration,
    },
    /// There is too little memory for a KV cache now.
    #[error("the server is rebuilding its KV cache after device memory ran out; try again in {} s", retry_after.as_secs())]
    Rebuilding {
        /// When the next try is made.
        retry_after: Duration,
    },
    /// The engine sleeps, or is about to.
    #[error("the server is asleep until POST /wake_up")]
    Asleep,
    /// The engine drains.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine thread has ended by a defect.
    #[error("the engine is dead: {0}; restart the server")]
    Dead(String),
    /// The id belongs to another admitted request; use [`EngineHandle::next_id`].
    #[error("{0} is in use")]
    DuplicateId(RequestId),
}

/// Why the engine did not fall asleep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// Requests were still running after the timeout.
    #[error("{requests} requests are still in progress; the server stays awake")]
    Busy {
        /// Requests that still run or wait.
        requests: usize,
    },
    /// It rebuilds its state, already falls asleep, or ends.
    #[error("the server cannot be put to sleep while it is {0}")]
    NotNow(Phase),
}

/// Why the engine did not wake up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WakeError {
    /// The state does not fit now, or another process holds the device's lock; the engine keeps retrying.
    #[error("the server cannot wake up yet and keeps trying: {why}")]
    NoMemory {
        /// Why it could not be built.
        why: String,
        /// When the next try is made.
        retry_after: Duration,
    },
    /// It builds its state already, falls asleep, or ends.
    #[error("the server cannot be woken while it is {0}")]
    NotNow(Phase),
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request finished.
    Complete,
    /// The timeout passed: this many requests were failed.
    Failed(usize),
}

/// A handle to the engine; clones share it. The thread ends when the last handle and the last stream are dropped.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    link: Link,
    capacity: usize,
    next_id: Arc<AtomicU64>,
    cache_listener: Option<Arc<dyn CacheListener>>,
}

impl EngineHandle {
    /// Starts the thread with a state that the auto-profile proved; `source` built it and builds later ones.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn spawn<S: Executor + 'static>(
        proved: Proved<S>,
        source: impl StateSource<S> + 'static,
        config: &EngineConfig,
    ) -> std::io::Result<Self> {
        let parts = proved.into_parts();
        let scheduler = SchedulerConfig {
            limits: parts.limits,
            kv: parts.config.kv,
            state_chunk: parts.state.state_chunk(),
            enable_prefix_caching: config.enable_prefix_caching,
            patience: PATIENCE,
        };
        let (handle, mut thread) =
            Self::prepare(parts.state.device_time(), Box::new(source), scheduler, config);
        thread.limit_prompts(parts.costs, parts.limits, &parts.state);
        Self::run(thread, parts.state)?;
        Ok(handle)
    }

    #[cfg(test)]
    pub(crate) fn start<S: Executor + 'static>(
        executor: S,
        source: Box<dyn StateSource<S>>,
        scheduler: SchedulerConfig,
        config: &EngineConfig,
    ) -> std::io::Result<Self> {
        let (handle, thread) = Self::prepare(executor.device_time(), source, scheduler, config);
        Self::run(thread, executor)?;
        Ok(handle)
    }

    fn run<S: Executor + 'static>(thread: EngineThread<S>, executor: S) -> std::io::Result<()> {
        let builder = std::thread::Builder::new().name("plimsoll-engine".into());
        builder.spawn(move || thread.run(executor)).map(drop)
    }

    /// A handle, and what its thread is going to run.
    pub(crate) fn prepare<S: Executor>(
        device_time: Option<DeviceTime>,
        source: Box<dyn StateSource<S>>,
        scheduler: SchedulerConfig,
        config: &EngineConfig,
    ) -> (Self, EngineThread<S>) {
        let limits = Limits {
            max_model_len: scheduler.limits.max_model_len,
            kv_capacity_tokens: scheduler
                .kv
                .longest_request(scheduler.limits.max_num_batched_tokens),
            vocab_size: config.vocab_size,
            images: config.images,
        };
        let capacity = scheduler.limits.max_num_seqs.saturating_add(config.max_queue);
        let kv = scheduler.kv;
        let mut scheduler = Scheduler::new(scheduler);
        if config.cache_listener.is_some() {
            scheduler.record_cache_events();
        }
        let (sender, commands) = mpsc::channel();
        let shared = Arc::new(Shared::new(scheduler.stats(), limits, kv));
        let mut clock = Clock::default();
        clock.start(device_time);
        // Present from the first reading on, if it is measured at all.
        shared.lock().stats.device_time = clock.read(device_time);
        let link = Link {
            shared: Arc::clone(&shared),
            commands: sender,
        };
        let depth = config.steps_in_flight.clamp(1, MAX_IN_FLIGHT);
        let in_flight = VecDeque::with_capacity(depth);
        let thread = EngineThread {
            scheduler,
            highest: source.proved_peak(),
            peers_at_ready: source.meters().peers(),
            source,
            kv,
            commands,
            shared,
            in_flight,
            depth,
            outage_patience: config.outage_patience,
            target_itl: config.target_itl,
            clock,
            unsampled: false,
            masks: MaskPool::default(),
            lost: false,
            rank_lost: None,
            sleeper: None,
            cache_listener: config.cache_listener.clone(),
        };
        let handle = Self {
            link,
            capacity,
            next_id: Arc::default(),
            cache_listener: config.cache_listener.clone(),
        };
        (handle, thread)
    }

    /// Limits of requests with the current KV cache.
    pub fn limits(&self) -> Limits {
        self.link.shared.lock().limits
    }

    /// Size of the current KV cache.
    pub fn kv(&self) -> KvConfig {
        self.link.shared.lock().kv
    }

    /// Requests that may be in at once, running and waiting.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// A new request id.
    pub fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Admits `request` or refuses it at once. A refusal is counted: the caller passes it on to a client.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.offer(request).inspect_err(|error| self.turned_away(error))
    }

    /// Counts a rejected request.
    pub fn turned_away(&self, error: &SubmitError) {
        if let SubmitError::QueueFull { .. } | SubmitError::ShareFull { .. } = error {
            self.link.shared.lock().stats.refused += 1;
        }
    }

    /// As [`Self::submit`], for callers that retry when there is no room: refusals are not counted.
    pub fn offer(&self, request: Request) -> Result<RequestStream, SubmitError> {
        let id = request.id();
        let (sender, receiver) = unbounded_channel();
        {
            let mut state = self.link.shared.lock();
            match state.phase {
                Phase::Running => {}
                Phase::Rebuilding => {
                    let retry_after = state.retry_in(Instant::now());
                    return Err(SubmitError::Rebuilding { retry_after });
                }
                Phase::FallingAsleep | Phase::Asleep => return Err(SubmitError::Asleep),
                Phase::Draining | Phase::Stopped => return Err(SubmitError::ShuttingDown),
                Phase::Dead => return Err(SubmitError::Dead(state.last_error.clone().unwrap_or_default())),
            }
            if state.clients.contains_key(&id) {
                return Err(SubmitError::DuplicateId(id));
            }
            let (limit, held) = (self.capacity, state.held(request.tenant()));
            let left = limit.saturating_sub(state.clients.len());
            if left == 0 || held >= left.saturating_mul(SHARE) {
                let retry_after = state.retry_after(state.stats.scheduler.waiting.max(1), Instant::now());
                return Err(match left {
                    0 => SubmitError::QueueFull { limit, retry_after },
                    _ => SubmitError::ShareFull {
                        held,
                        limit,
                        retry_after,
                    },
                });
            }
            state.enter(id, request.tenant(), sender, Instant::now());
            // Under the lock, so that requests reach the scheduler in the order in which they were admitted. If the thread
            // dies meanwhile, it fails every entered request.
            self.link.send(Command::Submit(Box::new(request)));
        }
        Ok(RequestStream::new(id, receiver, self.link.clone()))
    }

    /// Counters of the engine.
    pub fn stats(&self) -> EngineStats {
        let state = self.link.shared.lock();
        EngineStats {
            in_flight: state.clients.len(),
            cache_events: self.cache_listener.as_ref().map(|listener| listener.counts()),
            ..state.stats.clone()
        }
    }

    /// Whether the engine is alive and makes progress.
    pub fn health(&self) -> Health {
        self.link.shared.lock().health(Instant::now())
    }

    /// Returns when the engine thread has ended, for whatever reason; see [`Self::health`].
    pub async fn ended(&self) {
        // The sender lives in `shared`, so waiting cannot fail.
        let _ = self.link.shared.ended.subscribe().wait_for(|&ended| ended).await;
    }

    /// Returns when there has been work and no step has ended for `timeout`, or a rebuild has made no progress for as long. It
    /// checks several times within `timeout`; time in which the whole process was suspended does not count.
    pub async fn stalled(&self, timeout: Duration) -> Stall {
        let every = look_every(timeout);
        let mut patience = Patience::new(every, Instant::now());
        loop {
            tokio::time::sleep(every).await;
            if let Some(stall) = self.look(&mut patience, timeout, Instant::now()) {
                return stall;
            }
        }
    }

    /// One check at `now`.
    pub(crate) fn look(&self, patience: &mut Patience, timeout: Duration, now: Instant) -> Option<Stall> {
        let state = self.link.shared.lock();
        let waited = patience.look(state.movement(), now);
        (waited >= timeout).then(|| state.stall(waited, self.link.shared.activity.get()))
    }

    /// Fails every request and accepts no more, without waiting for the thread, which may hang for ever.
    pub fn give_up(&self, why: &str) {
        let mut state = self.link.shared.lock();
        state.phase = Phase::Dead;
        state.last_error = Some(why.to_owned());
        state.fail_all(&StepError::Failed(why.to_owned()), Instant::now());
    }

    /// Accepts no more requests, waits up to `timeout` for admitted ones, and frees the state; weights stay. If requests still
    /// run after `timeout`, the engine stays awake and none is cut off. Does nothing if it sleeps already.
    ///
    /// # Errors
    /// [`SleepError`] if it does not sleep then.
    pub async fn sleep(&self, timeout: Duration) -> Result<(), SleepError> {
        let (sender, mut asleep) = oneshot::channel();
        {
            let mut state = self.link.shared.lock();
            match state.phase {
                Phase::Running => {
                    let attempt = state.fall_asleep();
                    self.link.send(Command::Sleep(Sleeper {
                        attempt,
                        asleep: sender,
                    }));
                }
                Phase::Asleep => return Ok(()),
                other => return Err(SleepError::NotNow(other)),
            }
        }
        let slept = match tokio::time::timeout(timeout, &mut asleep).await {
            Ok(slept) => slept,
            Err(_) => {
                if let Some(requests) = self.link.shared.lock().stay_awake() {
                    return Err(SleepError::Busy { requests });
                }
                // No request is left: it sleeps as soon as its memory is free, or it ends.
                asleep.await
            }
        };
        slept.map_err(|_| SleepError::NotNow(self.health().phase))
    }

    /// Builds and proves a state after a sleep, and accepts requests again. Does nothing if it is awake.
    ///
    /// # Errors
    /// [`WakeError::NoMemory`] if there is too little memory now; the engine keeps retrying.
    pub async fn wake(&self) -> Result<(), WakeError> {
        let (waker, awake) = oneshot::channel();
        {
            let mut state = self.link.shared.lock();
            match state.phase {
                Phase::Asleep => state.phase = Phase::Rebuilding,
                Phase::Running => return Ok(()),
                other => return Err(WakeError::NotNow(other)),
            }
            self.link.send(Command::Wake(waker));
        }
        match awake.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(WakeError::NoMemory {
                why,
                retry_after: self.health().retry_after,
            }),
            Err(_) => Err(WakeError::NotNow(self.health().phase)),
        }
    }

    /// Empties the prefix cache: no later request shares what was computed so far. False if the engine has ended.
    pub async fn forget_cached(&self) -> bool {
        let (done, forgotten) = oneshot::channel();
        self.link.send(Command::ForgetCached(done));
        forgotten.await.is_ok()
    }

    /// Accepts no more requests, and ends the thread once admitted ones are done, or after `timeout`. [`Self::drain`] also waits
    /// for that.
    pub fn begin_drain(&self, timeout: Duration) {
        let mut state = self.link.shared.lock();
        if !matches!(state.phase, Phase::Stopped | Phase::Dead) {
            state.phase = Phase::Draining;
        }
        state.deadline = Some(Instant::now() + timeout);
        self.link.send(Command::Drain);
    }

    /// Accepts no more requests, waits up to `timeout` for admitted ones, fails the rest and ends the thread. Returns soon after
    /// `timeout` even if a step hangs.
    pub async fn drain(&self, timeout: Duration) -> Drained {
        self.begin_drain(timeout);
        if tokio::time::timeout(timeout, self.ended()).await.is_err() {
            self.link
                .shared
                .lock()
                .fail_all(&StepError::ShutDown, Instant::now());
            // The thread ends now unless a step hangs.
            let _ = tokio::time::timeout(GRACE, self.ended()).await;
        }
        match self.link.shared.lock().abandoned {
            0 => Drained::Complete,
            left => Drained::Failed(left),
        }
    }
}

/// Later requests that may be admitted before a waiting one. More than a queue is long, so that priorities matter; few enough
/// that they pass within minutes.
const PATIENCE: u64 = 1024;

/// A tenant may hold up to this many times the free places of the queue: one alone takes 8/9 of it, two take 8/17 each, and
/// another one still finds a place (dynamic thresholds: Choudhury and Hahne 1998).
const SHARE: usize = 8;

/// How long a drain waits for the thread after its timeout.
const GRACE: Duration = Duration::from_secs(1);
