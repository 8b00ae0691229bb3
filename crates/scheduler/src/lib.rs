//! Continuous batching: what runs in the next step. Pure: no device, no threads, no clock.
//!
//! Every step is a list of runs, each some consecutive tokens of one request; a prompt, a chunk of one and a single new
//! token are the same thing. A request gets its turn by its priority; within one priority tenants take turns, and each
//! tenant's requests come in the order of their arrival. With one tenant and one priority that is the order of arrival.
//!
//! Those that had their turn are ranked by priority and turn: the lowest rank is planned first, and where blocks run out the
//! highest is preempted. It gives up its blocks and waits, first of its priority, to be computed again from what the
//! prefix cache kept.
//!
//! Why this cannot thrash: a preemption happens with no block available, and admission needs all blocks of the request
//! plus one for each that runs, or what all of them are likely to grow by, if that is more. So a preempted request does not return on the blocks it gave up, only after others ended
//! (or when it can share blocks that it held alone). And it cannot starve: once others have had
//! [`SchedulerConfig::patience`] turns since it came, it is next as soon as it is the oldest that waits, and then has the
//! lowest rank of all that come after it; the lowest rank is never preempted, and [`plimsoll_core::Request::new`] only
//! makes requests that fit the cache alone.
//!
//! A step can be planned while the one before is in flight: its runs continue tokens whose value is not known yet
//! ([`plimsoll_core::RunInput::LastSampled`]). If such a token turns out to end its request, the run behind it was in
//! vain: its token is discarded, and the blocks go back when no step in flight uses them any more.
//!
//! How many tokens of prompts a step computes beside requests that generate is what [`PromptBudget`] says, from measured times
//! of steps; without them, as many as fit.
//!
//! The tokens of a constrained request ([`plimsoll_core::Constraints`]) are chosen under masks that follow its output. It runs ahead
//! like any other: only the sampling of the step planned meanwhile waits until its mask is known.

mod budget;
mod defect;
mod growth;
mod population;
mod queue;
mod scheduler;
mod sequence;
mod stats;

pub use budget::{EncodeTime, Load, PromptBudget};
pub use population::{Ended, Population};
pub use scheduler::{Follow, MAX_IN_FLIGHT, Scheduler, SchedulerConfig};
pub use stats::SchedulerStats;
