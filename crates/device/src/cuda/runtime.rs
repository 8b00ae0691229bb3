//! Memory that the driver takes implicitly: context, modules, libraries.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use plimsoll_core::Component;

use super::{GpuError, check};
use crate::{Budget, Charge};

/// What the driver says about the device's memory, whoever uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free bytes.
    pub free: u64,
    /// Bytes of the device.
    pub total: u64,
}

/// Most bytes that are taken for our own context. A GPU with more in use before anything was allocated has other processes.
const MAX_CONTEXT: u64 = 1 << 30;

/// Most bytes that are ever taken for the runtime; more belongs to other processes.
const MAX_RUNTIME: u64 = 3 << 29;

/// Memory that the driver takes implicitly, as charges.
#[derive(Debug)]
pub(super) struct Runtime(Mutex<Settled>);

#[derive(Debug)]
struct Settled {
    charges: Vec<Charge>,
    /// Bytes of the device that this process does not account for, at the last look.
    unclaimed: u64,
}

impl Runtime {
    /// Charges the context, which must be the current one of this thread, and without allocations so far.
    pub(super) fn of_context(budget: &Budget, device: sys::CUdevice) -> Result<Self, GpuError> {
        let info = memory_info()?;
        let taken = info.total.saturating_sub(info.free);
        let context = if taken <= MAX_CONTEXT {
            taken
        } else {
            second_context(device)?.min(MAX_CONTEXT)
        };
        Ok(Self(Mutex::new(Settled {
            charges: vec![budget.record(Component::Runtime, context)],
            unclaimed: taken - context,
        })))
    }

    /// Charges the growth of `unclaimed`, the bytes of the device that this process does not account for, since the last
    /// look; `charged` bytes have been charged so far.
    pub(super) fn settle(&self, budget: &Budget, unclaimed: u64, charged: u64) {
        let mut settled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let most = MAX_RUNTIME.saturating_sub(charged);
        let grown = unclaimed.saturating_sub(settled.unclaimed).min(most);
        if grown > 0 {
            settled.charges.push(budget.record(Component::Runtime, grown));
        }
        settled.unclaimed = unclaimed - grown;
    }
}

/// Bytes that one more context takes; includes changes of other processes in the meantime.
fn second_context(device: sys::CUdevice) -> Result<u64, GpuError> {
    let before = memory_info()?.free;
    let mut context = std::ptr::null_mut();
    // SAFETY: a place to write to, and no parameters: a plain context. It is the current one until it is destroyed, then
    // the former is again.
    unsafe {
        let created = sys::cuCtxCreate_v4(&mut context, std::ptr::null_mut(), 0, device);
        check("cuCtxCreate", created)?;
        let after = memory_info();
        check("cuCtxDestroy", sys::cuCtxDestroy_v2(context))?;
        Ok(before.saturating_sub(after?.free))
    }
}

/// As the driver sees it, in the thread's current context.
pub(super) fn memory_info() -> Result<MemoryInfo, GpuError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: places to write to.
    check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&mut free, &mut total)
    })?;
    Ok(MemoryInfo {
        free: free as u64,
        total: total as u64,
    })
}
