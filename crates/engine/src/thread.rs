use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use plimsoll_core::{DeviceTime, Event, Executor, StepError, StepOutput, StepPlan};
use plimsoll_scheduler::Scheduler;

use crate::handle::SHUT_DOWN;
use crate::shared::{Command, Shared};
use crate::{Phase, StateSource, StepShape};

/// What the engine thread owns: nobody else touches the scheduler or the executor.
pub(crate) struct EngineThread<E> {
    pub(crate) scheduler: Scheduler,
    pub(crate) executor: E,
    pub(crate) source: Box<dyn StateSource<E>>,
    /// Most bytes of the device held so far, at least what was proved.
    pub(crate) highest: u64,
    pub(crate) commands: Receiver<Command>,
    pub(crate) shared: Arc<Shared>,
    /// Launched and not finished, oldest first.
    pub(crate) in_flight: VecDeque<StepPlan>,
    /// Most steps in flight, at least 1.
    pub(crate) depth: usize,
    /// What the profile's steps took.
    pub(crate) device_time_before: DeviceTime,
}

impl<E: Executor> EngineThread<E> {
    /// Serves until told to end, until nobody can talk to it any more, or until a defect of the scheduler ends it. However
    /// it ends, every request gets its last event and [`Shared::ended`] is announced.
    pub(crate) fn run(self) {
        // Dropped last: whoever waits for the end finds the executor's memory freed, even if its destructor panics.
        let _announce = Announce(Arc::clone(&self.shared));
        self.serve_and_settle();
    }

    fn serve_and_settle(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let mut state = self.shared.lock();
        let error = match outcome {
            Ok(()) => {
                state.phase = Phase::Stopped;
                StepError::Failed(SHUT_DOWN.into())
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

    fn serve(&mut self) {
        while self.take_commands() {
            let mut launched = 0;
            while self.in_flight.len() < self.depth {
                let plan = self.scheduler.plan();
                if plan.is_empty() {
                    break;
                }
                launched += 1;
                self.launch(plan);
            }
            match self.in_flight.pop_front() {
                Some(plan) => self.finish(&plan),
                // Work without a plan would be a silent hang.
                None => assert!(
                    launched > 0,
                    "there is work and no plan: {:?}",
                    self.scheduler.stats()
                ),
            }
        }
    }

    /// Obeys all commands; sleeps while there is nothing to do. False where it is time to end.
    fn take_commands(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                // Every stream holds a sender, so there are no clients left.
                Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => {
                    let deadline = self.shared.lock().deadline;
                    let has_work = !self.scheduler.is_idle();
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline || !has_work) {
                        return false;
                    }
                    if has_work {
                        return true;
                    }
                    self.executor.rest();
                    match self.commands.recv() {
                        Ok(command) => self.obey(command),
                        Err(_) => return false,
                    }
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(request) => self.scheduler.submit(request),
            Command::Cancel(id) => {
                self.scheduler.cancel(id);
                self.shared.lock().leave(id);
            }
            Command::Drain => {}
        }
        self.shared.lock().stats.scheduler = self.scheduler.stats();
    }

    fn launch(&mut self, plan: StepPlan) {
        self.shared.lock().begin_step();
        match guard(|| self.executor.launch(&plan)) {
            Ok(()) => self.in_flight.push_back(plan),
            Err(error) => self.settle(&plan, Err(error)),
        }
    }

    /// Waits for the oldest step in flight and hands out what it produced.
    fn finish(&mut self, plan: &StepPlan) {
        let output = guard(|| self.executor.finish());
        self.settle(plan, output);
    }

    fn settle(&mut self, plan: &StepPlan, output: Result<StepOutput, StepError>) {
        let mut failure = output.as_ref().err().cloned();
        let events = match output {
            Ok(output) => self.scheduler.apply(plan, output),
            Err(error) => self.scheduler.fail(plan, &error),
        };
        if failure.is_none() {
            // The scheduler fails a step whose output does not answer its plan.
            failure = events.iter().find_map(|(_, event)| match event {
                Event::Failed(error) => Some(error.clone()),
                _ => None,
            });
        }
        if let Some(error) = &failure {
            tracing::error!(step = plan.step, runs = plan.runs.len(), tokens = plan.num_tokens(), %error, "step failed");
        }
        let above_proof = self.rises_above_proof(plan);
        let mut state = self.shared.lock();
        state.stats.high_water_above_proof += u64::from(above_proof);
        state.end_step(
            plan.num_tokens(),
            !self.in_flight.is_empty(),
            failure.map(|error| error.to_string()),
        );
        state.stats.scheduler = self.scheduler.stats();
        let device_time = self.executor.device_time();
        state.stats.device_time = device_time.map(|time| time.since(self.device_time_before));
        for (id, event) in events {
            state.deliver(id, event);
        }
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
