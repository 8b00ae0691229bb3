//! NVIDIA GPUs, each by itself: context, memory, launches, graphs, through the driver library, which is opened when the first GPU is.
//! Nothing is linked, so the same binary runs on machines without a driver.
//!
//! Work goes to one stream and runs in the order it was launched in; copies may go to a [`SideStream`]. [`GpuSlice`] is a plain view of device memory: copies
//! of it may be read and written by kernels in that order, so nothing here prevents two views of the same bytes.

mod arena;
mod copy;
mod error;
mod event;
mod gpu;
mod graph;
mod holders;
mod identity;
mod launch;
mod mapping;
mod meters;
mod nccl;
mod pinned;
mod runtime;
mod side;
mod slab;
mod tensor_map;
mod upload;

pub use arena::{DryGpuArena, GpuArena};
pub(crate) use error::check;
pub use error::{DeviceError, GpuError};
pub use event::Event;
pub use gpu::{Gpu, GpuInfo, GpuLimit, GpuOptions};
pub use graph::Graph;
pub use holders::{Holder, holders};
pub use identity::uuid;
pub use launch::{Arg, Function, Launch, Module};
pub use nccl::Nccl;
pub use pinned::PinnedSlab;
pub use runtime::MemoryInfo;
pub use side::SideStream;
pub use slab::{GpuSlab, GpuSlice, POOL_CHUNK, POOL_UNIT};
pub use tensor_map::{Matrices, MatrixEights, MatrixRows, MatrixTiles, TensorMap};
pub use upload::Uploader;
