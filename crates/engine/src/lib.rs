//! The engine: one thread that owns the scheduler and the executor. Requests enter and events leave by channels.
//!
//! - [`EngineHandle::submit`] admits a request or refuses it at once ([`SubmitError`]); nothing waits unbounded.
//! - The [`RequestStream`] it returns yields [`plimsoll_core::Event`]s and always ends: with a finished token or with
//!   `Failed`, whatever happens to the engine. Dropping it cancels the request, at any moment.
//! - A step that runs out of device memory costs its own requests and the state: a new one is proved, at the same size or
//!   what fits by then, and the other requests go on ([`StateSource`]). Sleep gives the state back and wakes the same way.
//! - An error or a panic of the executor fails the requests of that step alone; [`EngineHandle::health`] shows it.
//! - Token masks of constrained requests are computed while the device computes the step that they are for; other steps do
//!   not wait for them.
//! - A step that never ends is detected ([`EngineHandle::stalled`]). It cannot be interrupted, but all requests can be failed
//!   ([`EngineHandle::give_up`]).
//! - Several ranks, each with a part of the model, are one executor ([`FanOut`]); one that is lost ends the engine.
//! - The thread sleeps while there is no work. It handles tokens only, never text.

mod fan_out;
mod handle;
mod histogram;
mod masks;
mod outage;
mod recovery;
mod shape;
mod shared;
mod source;
mod stall;
mod stats;
mod step_seconds;
mod stream;
mod thread;

#[cfg(test)]
mod tests;

pub use fan_out::FanOut;
pub use handle::{Drained, EngineConfig, EngineHandle, SleepError, SubmitError, WakeError};
pub use histogram::Histogram;
pub use outage::OutOfMemory;
pub use plimsoll_scheduler::SchedulerStats;
pub use shape::StepShape;
pub use source::{RebuildError, StateSource};
pub use stall::{Activity, Stall, StepInFlight};
pub use stats::{EngineStats, Health, Phase};
pub use step_seconds::{SecondsByKind, StepSeconds};
pub use stream::RequestStream;
