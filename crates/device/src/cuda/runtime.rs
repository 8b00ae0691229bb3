//! Memory that the driver takes implicitly, as charges: the runtime (context, modules, libraries), and graphs.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use plimsoll_core::{Component, Oom};

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

/// Most bytes that are ever taken for graphs.
const MAX_GRAPHS: u64 = 1 << 30;

/// Memory that the driver takes implicitly, as charges.
#[derive(Debug)]
pub(super) struct Runtime(Mutex<Settled>);

#[derive(Debug)]
struct Settled {
    runtime: Vec<Charge>,
    /// Of graphs that are there, or of which the driver has kept the memory.
    graphs: Option<Charge>,
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
            runtime: vec![budget.record(Component::Runtime, context)],
            graphs: None,
            unclaimed: taken - context,
        })))
    }

    /// Charges the growth of `unclaimed`, the bytes of the device that this process does not account for, since the last
    /// look.
    pub(super) fn settle(&self, budget: &Budget, unclaimed: u64) {
        let mut settled = self.lock();
        let charged = settled.runtime.iter().map(Charge::bytes).sum();
        let grown = settled.claim(unclaimed, charged, MAX_RUNTIME);
        if grown > 0 {
            settled.runtime.push(budget.record(Component::Runtime, grown));
        }
    }

    /// The same, where graphs were captured since.
    ///
    /// # Errors
    /// [`Oom`] if the account has no room for what they took.
    pub(super) fn settle_graphs(&self, budget: &Budget, unclaimed: u64) -> Result<(), Oom> {
        let mut settled = self.lock();
        let held = settled.graph_bytes();
        let grown = settled.claim(unclaimed, held, MAX_GRAPHS);
        settled.set_graphs(budget, held + grown);
        let meters = budget.meters();
        match meters.reserved > meters.total {
            true => Err(budget.oom(Component::Graphs, grown)),
            false => Ok(()),
        }
    }

    /// Graphs were destroyed, and the driver gave `bytes` of their memory back.
    pub(super) fn graphs_returned(&self, budget: &Budget, bytes: u64) {
        let mut settled = self.lock();
        let held = settled.graph_bytes();
        settled.set_graphs(budget, held.saturating_sub(bytes));
    }

    fn lock(&self) -> MutexGuard<'_, Settled> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Settled {
    /// By how much `unclaimed` has grown since the last look, as far as somebody who holds `held` bytes may hold `most`.
    fn claim(&mut self, unclaimed: u64, held: u64, most: u64) -> u64 {
        let grown = unclaimed.saturating_sub(self.unclaimed);
        let grown = grown.min(most.saturating_sub(held));
        self.unclaimed = unclaimed - grown;
        grown
    }

    fn graph_bytes(&self) -> u64 {
        self.graphs.as_ref().map_or(0, Charge::bytes)
    }

    /// Graphs hold `bytes` from here on.
    fn set_graphs(&mut self, budget: &Budget, bytes: u64) {
        // The old charge goes first, so that the high-water mark shows neither twice.
        self.graphs = None;
        self.graphs = (bytes > 0).then(|| budget.record(Component::Graphs, bytes));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_graphs_take_is_theirs_also_where_the_driver_keeps_it() {
        let budget = Budget::new(1000);
        let runtime = Runtime(Mutex::new(Settled {
            runtime: Vec::new(),
            graphs: None,
            unclaimed: 100,
        }));
        let held =
            || [Component::Runtime, Component::Graphs].map(|part| budget.meters().by_component.get(part));
        // Beside another process of 100 bytes, the runtime loads 50, and graphs take 46.
        runtime.settle(&budget, 150);
        runtime.settle_graphs(&budget, 146).unwrap();
        assert_eq!(held(), [50, 46]);
        // The driver keeps all of it; so the next ones take nothing, and nothing is the other process's.
        runtime.graphs_returned(&budget, 0);
        runtime.settle(&budget, 100);
        runtime.settle_graphs(&budget, 100).unwrap();
        assert_eq!(held(), [50, 46]);
        runtime.graphs_returned(&budget, 40);
        assert_eq!((held(), budget.meters().reserved_high), ([50, 6], 96));
        // More than there is room for.
        runtime.settle_graphs(&budget, 1100).unwrap_err();
    }
}
