//! The engine: one thread that owns the scheduler and the executor. Requests enter and events leave by channels.
//!
//! - [`EngineHandle::submit`] admits a request or refuses it at once ([`SubmitError`]); nothing waits unbounded.
//! - The [`RequestStream`] it returns yields [`plimsoll_core::Event`]s and always ends: with a finished token or with
//!   `Failed`, whatever happens to the engine. Dropping it cancels the request, at any moment.
//! - A step that runs out of device memory costs its own requests and the state: a new one is proved, at the same size or
//!   what fits by then, and the other requests go on ([`StateSource`]). Sleep gives the state back and wakes the same way.
//! - An error or a panic of the executor fails the requests of that step alone; [`EngineHandle::health`] shows it.
//! - The tokens of constrained requests are chosen under masks, which are computed while the device computes the step that they
//!   are for; other steps do not wait for them.
//! - A step that never ends is seen ([`EngineHandle::stalled`]); nobody can make it end, but everybody can be told
//!   ([`EngineHandle::give_up`]).
//! - The thread sleeps while there is nothing to do. Text is none of its business: it deals in tokens.

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
mod stream;
mod thread;

#[cfg(test)]
mod tests;

pub use handle::{Drained, EngineConfig, EngineHandle, SleepError, SubmitError, WakeError};
pub use histogram::Histogram;
pub use outage::OutOfMemory;
pub use shape::StepShape;
pub use source::{RebuildError, StateSource};
pub use stall::{Activity, Stall, StepInFlight};
pub use stats::{EngineStats, Health, Phase};
pub use stream::RequestStream;
