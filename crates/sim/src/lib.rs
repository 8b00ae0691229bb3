//! An engine without a device, and the oracles that check the real one.

mod checks;
mod client;
mod constraint;
mod cost;
mod device;
mod executor;
mod harness;
mod images;
mod model;
mod quote;
mod ranks;
mod router;
mod turns;
mod workload;

pub use constraint::SimConstraint;
pub use cost::{StepModel, StepSize};
pub use device::{DeviceModel, StepMemory, VirtualDevice, VirtualState};
pub use executor::{Fault, SimConfig, SimExecutor, StepTime};
pub use harness::{Report, simulate};
pub use model::{Context, SimModel, oracle, pooled_oracle, score_oracle};
pub use ranks::{Member, World};
pub use workload::{Cancel, Workload, random_groups};
