//! The devices, as the auto-profile sees them.

mod footprint;
mod gpu;
mod model;
mod sim;

pub(crate) use footprint::{CpuPlan, GpuPlan, SimPlan, holding};
pub(crate) use gpu::GpuTarget;
pub(crate) use model::ModelTarget;
pub(crate) use sim::{KV_BYTES_PER_TOKEN as SIM_KV_BYTES_PER_TOKEN, STEP_TIME as SIM_STEP_TIME, SimTarget};
