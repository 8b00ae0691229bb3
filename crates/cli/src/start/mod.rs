//! From files to an engine that is proved, in three steps: [`Loaded::new`], [`Loaded::prove`], [`Loaded::spawn`]. Nothing is
//! served yet.

mod disabled;
mod load;
mod memory;
mod plans;
mod predict;
mod progress;
mod prove;
mod rebuild;
mod spawn;
mod spec;
mod text;
mod times;

pub(crate) use disabled::TEXT_GENERATION;
pub use load::Loaded;
pub use memory::StateMemory;
pub use predict::predict;
pub(crate) use predict::with_enough_memory;
pub(crate) use progress::PhaseSeconds;
pub use progress::StartProgress;
pub use prove::Proof;
pub use spawn::{Serving, Started};
pub use text::Text;
pub use times::StartTimes;
pub(crate) use times::report_json;
