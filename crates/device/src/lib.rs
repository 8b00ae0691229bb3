//! Memory of a device: budget, meters, slabs, the step arena.
//!
//! On a CPU the "device" is a [`Budget`] of bytes that every large allocation is charged to before it is made, so that
//! running out is a typed [`Oom`](plimsoll_core::Oom) at the place that asked, and the profiler's meters are exact.
//!
//! - [`Budget`], [`Charge`]: the account and one entry in it. Clones of a budget share the account.
//! - [`Slab`]: charged, zeroed memory whose pages really exist.
//! - [`Arena`], [`Frame`]: the memory of one step, handed out by bumping an offset; [`DryArena`] only counts it.
//! - [`cuda`]: an NVIDIA GPU with the same account, and its own slabs and arena.
//! - [`Machine`], [`Supply`]: what the machine around us can still give, so that other processes are seen.
//! - [`capacity`]: how much memory a server may sensibly take by default.

mod arena;
mod budget;
pub mod capacity;
pub mod cuda;
mod machine;
mod placement;
mod slab;

pub use arena::{Arena, Frame};
pub use budget::{Budget, Charge};
pub use bytemuck::{Pod, cast_slice_mut};
pub use machine::{CapacityError, Machine, Room, Supply};
pub use placement::DryArena;
pub use slab::Slab;
