use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use plimsoll_core::{CacheListener, Executor, KvConfig, Limits, Request, RequestId, StepError};
use plimsoll_profiler::{Proved, ProvedParts};
use plimsoll_scheduler::{MAX_IN_FLIGHT, Scheduler, SchedulerConfig};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot;

use crate::masks::MaskPool;
use crate::shared::{Command, Link, SHUT_DOWN, Shared, Sleeper};
use crate::stall::{Patience, look_every};
use crate::thread::{Clock, EngineThread};
use crate::{EngineStats, Health, Phase, RequestStream, Stall, StateSource};

/// What the engine is told besides what the profile proved.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Requests that may wait beyond those that can run (`--max-num-seqs`); one more is refused.
    pub max_queue: usize,
    /// Size of the model's vocabulary.
    pub vocab_size: usize,
    /// Keep KV of finished requests for later ones with the same beginning.
    pub enable_prefix_caching: bool,
    /// Steps launched and not finished, 1 or 2. 2 hides the scheduler behind an executor that works on its own; with one
    /// that computes inside `launch` it only delays tokens by a step.
    pub steps_in_flight: usize,
    /// How long requests wait where the state is lost and memory for a new one is missing.
    pub outage_patience: Duration,
    /// Who hears what the prefix cache holds.
    pub cache_listener: Option<Arc<dyn CacheListener>>,
}

/// Why a request was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests are in as may be.
    #[error("the server is at its limit of {limit} requests; try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// Requests that may be in at once, running and waiting.
        limit: usize,
        /// When the queue will have moved, from the present throughput.
        retry_after: Duration,
    },
    /// Its tenant has as many requests in as may be, and the rest is for others.
    #[error("this API key has {held} of the server's {limit} requests, and the rest is for others; try again in {} s", retry_after.as_secs())]
    ShareFull {
        /// Requests of the tenant, running and waiting.
        held: usize,
        /// Requests that may be in at once, of all tenants.
        limit: usize,
        /// When the queue will have moved, from the present throughput.
        retry_after: Duration,
    },
    /// There is too little memory for a KV cache at the moment.
    #[error("the server builds its KV cache again: device memory ran out; try again in {} s", retry_after.as_secs())]
    Rebuilding {
        /// When memory is looked for again.
        retry_after: Duration,
    },
    /// The engine sleeps, or is about to.
    #[error("the server sleeps: its KV cache is given back until POST /wake_up")]
    Asleep,
    /// The engine finishes its last requests.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine thread has ended by a defect.
    #[error("the engine is dead: {0}; restart the server")]
    Dead(String),
    /// The id belongs to a request that is in; use [`EngineHandle::next_id`].
    #[error("{0} is already in")]
    DuplicateId(RequestId),
}

/// Why the engine does not sleep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// Requests took longer than was waited for them.
    #[error("{requests} requests still run; the server stays awake")]
    Busy {
        /// Requests that are in.
        requests: usize,
    },
    /// It builds its state, already falls asleep, or ends.
    #[error("the server cannot be put to sleep while it is {0}")]
    NotNow(Phase),
}

/// Why the engine is not awake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WakeError {
    /// The state does not fit at the moment, or another process measures the device; it is tried again until it does.
    #[error("the server cannot wake yet, and tries again: {why}")]
    NoMemory {
        /// What kept it from being built.
        why: String,
        /// When it is tried again.
        retry_after: Duration,
    },
    /// It builds its state already, falls asleep, or ends.
    #[error("the server cannot be woken while it is {0}")]
    NotNow(Phase),
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request ran to its end.
    Complete,
    /// Time was up: this many requests were failed.
    Failed(usize),
}

/// The engine as seen by everybody else; clones share it. When the last handle and the last stream are dropped, the thread
/// ends.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    link: Link,
    capacity: usize,
    next_id: Arc<AtomicU64>,
    cache_listener: Option<Arc<dyn CacheListener>>,
}

impl EngineHandle {
    /// Starts the thread over a state that the auto-profile proved, which came from `source`; there is no other way in.
    ///
    /// # Errors
    /// Where the operating system gives no thread.
    pub fn spawn<S: Executor + 'static>(
        proved: Proved<S>,
        source: impl StateSource<S> + 'static,
        config: &EngineConfig,
    ) -> std::io::Result<Self> {
        let ProvedParts {
            state,
            config: built,
            limits,
            report: _,
        } = proved.into_parts();
        let enable_prefix_caching = config.enable_prefix_caching;
        Self::start(
            state,
            Box::new(source),
            SchedulerConfig {
                limits,
                kv: built.kv,
                enable_prefix_caching,
                patience: PATIENCE,
            },
            config,
        )
    }

    pub(crate) fn start<S: Executor + 'static>(
        executor: S,
        source: Box<dyn StateSource<S>>,
        scheduler: SchedulerConfig,
        config: &EngineConfig,
    ) -> std::io::Result<Self> {
        let limits = Limits {
            max_model_len: scheduler.limits.max_model_len,
            kv_capacity_tokens: scheduler
                .kv
                .longest_request(scheduler.limits.max_num_batched_tokens),
            vocab_size: config.vocab_size,
        };
        let capacity = scheduler.limits.max_num_seqs + config.max_queue;
        let kv = scheduler.kv;
        let mut scheduler = Scheduler::new(scheduler);
        if config.cache_listener.is_some() {
            scheduler.record_cache_events();
        }
        let (sender, commands) = mpsc::channel();
        let device_time = executor.device_time();
        let shared = Arc::new(Shared::new(scheduler.stats(), limits, kv));
        let mut clock = Clock::default();
        clock.start(device_time);
        // There from the first look on, where it is measured at all.
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
            clock,
            unsampled: false,
            masks: MaskPool::default(),
            lost: false,
            sleeper: None,
            cache_listener: config.cache_listener.clone(),
        };
        std::thread::Builder::new()
            .name("plimsoll-engine".into())
            .spawn(move || thread.run(executor))?;
        Ok(Self {
            link,
            capacity,
            next_id: Arc::default(),
            cache_listener: config.cache_listener.clone(),
        })
    }

    /// What a request may ask for, with the KV cache in use.
    pub fn limits(&self) -> Limits {
        self.link.shared.lock().limits
    }

    /// The KV cache in use.
    pub fn kv(&self) -> KvConfig {
        self.link.shared.lock().kv
    }

    /// Requests that may be in at once, running and waiting.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// An id that no other request has.
    pub fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Admits `request` or refuses it; never waits. Whoever asks tells a client of the refusal, which is counted.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.offer(request).inspect_err(|error| self.turned_away(error))
    }

    /// Somebody was told that his request is refused.
    pub fn turned_away(&self, error: &SubmitError) {
        if let SubmitError::QueueFull { .. } | SubmitError::ShareFull { .. } = error {
            self.link.shared.lock().stats.refused += 1;
        }
    }

    /// As [`Self::submit`], for whoever tries again by himself where there is no room.
    pub fn offer(&self, request: Request) -> Result<RequestStream, SubmitError> {
        let id = request.id();
        let (sender, receiver) = unbounded_channel();
        {
            let mut state = self.link.shared.lock();
            match state.phase {
                Phase::Running => {}
                Phase::Rebuilding => {
                    let retry_after = state.retry_in();
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
                let retry_after = state.retry_after(state.stats.scheduler.waiting.max(1));
                return Err(match left {
                    0 => SubmitError::QueueFull { limit, retry_after },
                    _ => SubmitError::ShareFull {
                        held,
                        limit,
                        retry_after,
                    },
                });
            }
            state.enter(id, request.tenant(), sender);
            // Under the lock, so that requests reach the scheduler in the order in which they were admitted. If the thread
            // dies meanwhile, it fails every entered request.
            self.link.send(Command::Submit(request));
        }
        Ok(RequestStream::new(id, receiver, self.link.clone()))
    }

    /// What the engine did so far.
    pub fn stats(&self) -> EngineStats {
        let state = self.link.shared.lock();
        EngineStats {
            in_flight: state.clients.len(),
            cache_events: self.cache_listener.as_ref().map(|listener| listener.counts()),
            ..state.stats.clone()
        }
    }

    /// Whether the engine lives and moves.
    pub fn health(&self) -> Health {
        self.link.shared.lock().health()
    }

    /// Ends when the engine thread has ended, for whatever reason; [`Self::health`] then says why.
    pub async fn ended(&self) {
        // The sender lives in `shared`, so waiting cannot fail.
        let _ = self.link.shared.ended.subscribe().wait_for(|&ended| ended).await;
    }

    /// Ends when there has been work and no step has ended for `timeout`, or when a state that is built again has not come
    /// further for as long. It looks several times within `timeout`; time in which nothing could move, because the whole
    /// process was stopped, does not count.
    pub async fn stalled(&self, timeout: Duration) -> Stall {
        let every = look_every(timeout);
        let mut patience = Patience::new(every, Instant::now());
        loop {
            tokio::time::sleep(every).await;
            let state = self.link.shared.lock();
            let waited = patience.look(state.movement(), Instant::now());
            if waited >= timeout {
                return state.stall(waited, self.link.shared.activity.get());
            }
        }
    }

    /// Fails every request and accepts no more, whatever the thread does: it may hang for ever, and is not waited for.
    pub fn give_up(&self, why: &str) {
        let mut state = self.link.shared.lock();
        state.phase = Phase::Dead;
        state.last_error = Some(why.to_owned());
        state.fail_all(&StepError::Failed(why.to_owned()));
    }

    /// Accepts nothing more, lets what is in finish for at most `timeout`, and gives the memory of the state back; weights
    /// stay. Whoever is not asleep by then stays awake, and no request is cut off. Nothing happens to one that sleeps.
    ///
    /// # Errors
    /// [`SleepError`] where it does not sleep.
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
                // It sleeps as soon as its memory is free, or it ends.
                asleep.await
            }
        };
        slept.map_err(|_| SleepError::NotNow(self.health().phase))
    }

    /// Builds and proves a state again after a sleep, and accepts requests. Nothing happens to one that is awake.
    ///
    /// # Errors
    /// [`WakeError::NoMemory`] if there is no room at the moment; the engine wakes by itself when there is.
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

    /// Accepts nothing more and ends the thread once all that is in is done, or after `timeout`; whoever wants to know how
    /// that went calls [`Self::drain`].
    pub fn begin_drain(&self, timeout: Duration) {
        let mut state = self.link.shared.lock();
        if !matches!(state.phase, Phase::Stopped | Phase::Dead) {
            state.phase = Phase::Draining;
        }
        state.deadline = Some(Instant::now() + timeout);
        self.link.send(Command::Drain);
    }

    /// Accepts nothing more, lets what is in finish for at most `timeout`, fails the rest and ends the thread. Returns soon
    /// after `timeout` even if a step hangs.
    pub async fn drain(&self, timeout: Duration) -> Drained {
        self.begin_drain(timeout);
        if tokio::time::timeout(timeout, self.ended()).await.is_err() {
            self.link
                .shared
                .lock()
                .fail_all(&StepError::Failed(SHUT_DOWN.into()));
            // A thread that is not stuck in a step ends now.
            let _ = tokio::time::timeout(GRACE, self.ended()).await;
        }
        match self.link.shared.lock().abandoned {
            0 => Drained::Complete,
            left => Drained::Failed(left),
        }
    }
}

/// Turns that others may have before a request that waits. More than a queue is long, so that priority counts for
/// something; so few that they pass within minutes.
const PATIENCE: u64 = 1024;

/// A tenant may have so many times as many requests in as there are places left: one alone takes all but a ninth, two
/// take 8/17 each, and whoever comes finds a place (dynamic thresholds: Choudhury and Hahne 1998).
const SHARE: usize = 8;

/// How long a drain waits for the thread after its time was up.
const GRACE: Duration = Duration::from_secs(1);
