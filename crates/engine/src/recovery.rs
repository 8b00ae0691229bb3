//! Replaces the engine state after it was lost (out of memory) or freed (sleep).

use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use plimsoll_core::{Executor, StepError};
use plimsoll_profiler::{ProfileError, Proved};
use plimsoll_scheduler::Scheduler;

use crate::shared::{Command, Shared, Sleeper, Waker};
use crate::stall::Activity;
use crate::thread::EngineThread;
use crate::{Phase, RebuildError};

/// Delay before a state that did not fit is tried again; doubles up to [`LAST_RETRY`].
pub(crate) const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// What ended a wait for commands.
enum Waited {
    Elapsed,
    Woken(Waker),
    Stop,
}

impl<E: Executor> EngineThread<E> {
    /// Replaces a state that ran out of memory; requests that were not in the failed step wait. `None` if the engine is to end.
    pub(crate) fn recover(&mut self) -> Result<Option<E>, ProfileError> {
        self.forget_kv();
        let executor = self.renew(None)?;
        self.shared.lock().stats.rebuilds_oom += u64::from(executor.is_some());
        Ok(executor)
    }

    /// Sleeps without a state until woken. `None` if the engine is to end.
    pub(crate) fn sleep(&mut self, sleeper: Sleeper) -> Result<Option<E>, ProfileError> {
        self.forget_kv();
        self.source.trim();
        tracing::info!("asleep: KV cache and arena are freed, the weights stay");
        // The caller may have disconnected.
        let _ = sleeper.asleep.send(());
        let Waited::Woken(waker) = self.wait(None) else {
            return Ok(None);
        };
        let executor = self.renew(Some(waker))?;
        self.shared.lock().stats.rebuilds_wake += u64::from(executor.is_some());
        Ok(executor)
    }

    /// Begins to sleep if that is still wanted, and returns who waits for it.
    pub(crate) fn take_sleeper(&mut self) -> Option<Sleeper> {
        let sleeper = self.sleeper.take()?;
        let mut state = self.shared.lock();
        // The caller may have given up and another one may have asked: wait for that one's command, requests may come before it.
        let asked = state.phase == Phase::FallingAsleep && state.sleep_attempts == sleeper.attempt;
        asked.then(|| {
            state.phase = Phase::Asleep;
            sleeper
        })
    }

    /// Retries until a state is proved. `None` if the engine is to end; an error if a retry would not help.
    fn renew(&mut self, mut waker: Option<Waker>) -> Result<Option<E>, ProfileError> {
        let began = Instant::now();
        let mut pause = FIRST_RETRY;
        loop {
            // Handles commands that arrived in the meantime.
            if let Waited::Stop = self.wait(Some(Instant::now())) {
                return Ok(None);
            }
            let why = match self.rebuild(began) {
                Ok(proved) => {
                    let executor = self.take_over(proved);
                    tracing::info!(
                        tokens = self.kv.capacity_tokens(),
                        seconds = began.elapsed().as_secs_f64(),
                        "the engine state was rebuilt and proved"
                    );
                    if let Some(waker) = waker {
                        let _ = waker.send(Ok(()));
                    }
                    return Ok(Some(executor));
                }
                Err(RebuildError::NotNow(why)) => why,
                Err(RebuildError::Defect(defect)) => return Err(defect),
            };
            tracing::warn!(
                retry_seconds = pause.as_secs_f64(),
                "the engine state cannot be rebuilt: {why}"
            );
            if let Some(waker) = waker.take() {
                let _ = waker.send(Err(why.clone()));
            }
            {
                let mut state = self.shared.lock();
                state.outage = Some(why);
                state.retry_at = Some(Instant::now() + pause);
            }
            if began.elapsed() + pause > self.outage_patience {
                turn_away(&mut self.scheduler, &self.shared, self.outage_patience);
            }
            if let Waited::Stop = self.wait(Some(Instant::now() + pause)) {
                return Ok(None);
            }
            pause = (2 * pause).min(LAST_RETRY);
        }
    }

    /// One try. Requests that have waited since `began` are failed in time even if it takes long.
    fn rebuild(&mut self, began: Instant) -> Result<Proved<E>, RebuildError> {
        let Self {
            source,
            scheduler,
            shared,
            outage_patience,
            ..
        } = self;
        shared.activity.set(Activity::Build);
        shared.lock().built = Some(Instant::now());
        let built = source.rebuild(&mut || {
            shared.lock().built = Some(Instant::now());
            if began.elapsed() > *outage_patience {
                turn_away(scheduler, shared, *outage_patience);
            }
        });
        shared.lock().built = None;
        shared.activity.set(Activity::BetweenSteps);
        built
    }

    /// Drops all KV; requests wait to be computed again.
    fn forget_kv(&mut self) {
        let events = self.scheduler.reset(self.kv);
        self.deliver(events);
    }

    /// Switches to a new state.
    fn take_over(&mut self, proved: Proved<E>) -> E {
        let parts = proved.into_parts();
        self.limit_prompts(parts.costs, parts.limits, &parts.state);
        let (executor, kv) = (parts.state, parts.config.kv);
        self.kv = kv;
        self.highest = self.source.proved_peak();
        self.peers_at_ready = self.source.meters().peers();
        self.clock.start(executor.device_time());
        {
            let mut state = self.shared.lock();
            state.kv = kv;
            state.limits.kv_capacity_tokens = kv.longest_request(parts.limits.max_num_batched_tokens);
            state.outage = None;
            state.retry_at = None;
            state.restart_progress(Instant::now());
            if state.phase == Phase::Rebuilding {
                state.phase = Phase::Running;
            }
        }
        let events = self.scheduler.reset(kv);
        self.deliver(events);
        executor
    }

    /// Handles commands until `until` (`None`: for ever), or until the engine is to end.
    fn wait(&mut self, until: Option<Instant>) -> Waited {
        loop {
            let received = match self.commands.try_recv() {
                Err(TryRecvError::Empty) if self.is_over() => return Waited::Stop,
                Err(TryRecvError::Empty) => self.receive(until),
                received => received.map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Ok(Command::Wake(waker)) if until.is_none() => return Waited::Woken(waker),
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) => {
                    if until.is_some_and(|until| Instant::now() >= until) {
                        return Waited::Elapsed;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Waited::Stop,
            }
        }
    }

    /// The next command, if it comes before `until` and before the engine's end.
    fn receive(&self, until: Option<Instant>) -> Result<Command, RecvTimeoutError> {
        let deadline = self.shared.lock().deadline;
        match until.into_iter().chain(deadline).min() {
            Some(end) => self
                .commands
                .recv_timeout(end.saturating_duration_since(Instant::now())),
            None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }
}

/// Fails all waiting requests.
fn turn_away(scheduler: &mut Scheduler, shared: &Shared, patience: Duration) {
    let error = StepError::NoState { patience };
    let events = scheduler.fail_all(&error);
    if events.is_empty() {
        return;
    }
    tracing::error!(requests = events.len(), %error, "requests that waited for memory failed");
    shared.deliver(scheduler.stats(), events);
}
