//! What this process holds on the GPU, from meters of its own: the account of what it allocated or mapped, the driver's
//! meters of the stream-ordered pool and of graphs, and a charge for what the driver takes without being asked (context,
//! modules, libraries). Other processes appear in one number alone, what is free, so one that starts, grows or ends
//! meanwhile changes nothing that is attributed to this one.

use cudarc::driver::sys;
use plimsoll_core::{Component, Meters, Oom, RefusedBy};

use super::{Gpu, GpuError, check};

/// What an allocator of the driver holds, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    used: u64,
    reserved: u64,
    used_high: u64,
    reserved_high: u64,
}

/// One look at the driver's meters.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// Free bytes.
    free: u64,
    pool: Held,
    graphs: Held,
}

impl Gpu {
    /// The typed error for a request that the driver refused.
    pub(super) fn oom(&self, component: Component, bytes: u64, error: &GpuError) -> Oom {
        if !error.is_out_of_memory() {
            tracing::error!(%error, %component, bytes, "device memory could not be allocated");
        }
        // The account covers this process only; the meters include other processes.
        Oom {
            requested: bytes,
            component,
            refused_by: RefusedBy::Device,
            meters: Box::new(self.meters()),
        }
    }

    /// Reads the meters. If the driver does not answer, returns this process's own account.
    pub fn meters(&self) -> Meters {
        let account = Meters {
            allocations: self.allocations(),
            ..self.budget().meters()
        };
        match self.readings() {
            Ok(readings) => combine(account, &readings),
            Err(error) => {
                tracing::error!(%error, "the GPU's meters cannot be read");
                account
            }
        }
    }

    /// Sets the high-water marks to what is in use now.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn reset_high_water(&self) -> Result<(), GpuError> {
        use sys::CUgraphMem_attribute as G;
        use sys::CUmemPool_attribute as P;
        self.budget().reset_high_water();
        self.bind()?;
        for mark in [
            P::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            P::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ] {
            let mut zero = 0_u64;
            // SAFETY: the pool is alive; these marks are 64-bit and may be set to 0 alone.
            check("cuMemPoolSetAttribute", unsafe {
                sys::cuMemPoolSetAttribute(self.pool(), mark, (&raw mut zero).cast())
            })?;
        }
        for mark in [
            G::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH,
            G::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH,
        ] {
            let mut zero = 0_u64;
            // SAFETY: as above.
            check("cuDeviceSetGraphMemAttribute", unsafe {
                sys::cuDeviceSetGraphMemAttribute(self.device(), mark, (&raw mut zero).cast())
            })?;
        }
        Ok(())
    }

    /// Waits for all work, and returns to the device what allocators hold without using it.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn trim(&self) -> Result<(), GpuError> {
        self.synchronize()?;
        // SAFETY: the pool is alive.
        unsafe {
            check("cuMemPoolTrimTo", sys::cuMemPoolTrimTo(self.pool(), 0))?;
            check("cuDeviceGraphMemTrim", sys::cuDeviceGraphMemTrim(self.device()))
        }
    }

    /// Charges the growth of the runtime since the last call: modules and libraries load when first used. Memory that is not
    /// charged counts as that of other processes, so it is not planned with in either case.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn settle_runtime(&self) -> Result<(), GpuError> {
        let info = self.memory_info()?;
        let account = self.budget().meters();
        let held = combine(account, &self.readings()?).reserved;
        let unclaimed = info.total.saturating_sub(info.free).saturating_sub(held);
        self.runtime().settle(
            self.budget(),
            unclaimed,
            account.by_component.get(Component::Runtime),
        );
        Ok(())
    }

    fn readings(&self) -> Result<Readings, GpuError> {
        use sys::CUgraphMem_attribute as G;
        use sys::CUmemPool_attribute as P;
        let free = self.memory_info()?.free;
        let pool = |attribute| {
            let mut value = 0_u64;
            // SAFETY: the pool is alive, and these attributes are 64-bit.
            check("cuMemPoolGetAttribute", unsafe {
                sys::cuMemPoolGetAttribute(self.pool(), attribute, (&raw mut value).cast())
            })
            .map(|()| value)
        };
        let graphs = |attribute| {
            let mut value = 0_u64;
            // SAFETY: these attributes are 64-bit.
            check("cuDeviceGetGraphMemAttribute", unsafe {
                sys::cuDeviceGetGraphMemAttribute(self.device(), attribute, (&raw mut value).cast())
            })
            .map(|()| value)
        };
        Ok(Readings {
            free,
            pool: Held {
                used: pool(P::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
                reserved: pool(P::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
                used_high: pool(P::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
                reserved_high: pool(P::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            },
            graphs: Held {
                used: graphs(G::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)?,
                reserved: graphs(G::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)?,
                used_high: graphs(G::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)?,
                reserved_high: graphs(G::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)?,
            },
        })
    }
}

/// Adds to the account what only the driver knows: what the pool holds without using it, and memory of graphs beyond what
/// was charged for them. The pool's allocations themselves are in the account.
///
/// The highest `reserved` is exact as long as the parts peak together, as they do where memory is taken while a state is
/// built and given back when it is dropped, with the marks reset in between.
fn combine(account: Meters, driver: &Readings) -> Meters {
    let Held {
        used,
        reserved,
        used_high,
        reserved_high,
    } = driver.pool;
    let slack = reserved.saturating_sub(used);
    let slack_high = reserved_high.saturating_sub(used_high).max(slack);
    let charged = account.by_component.get(Component::Graphs);
    let uncharged = |bytes: u64| bytes.saturating_sub(charged);
    let graphs = uncharged(driver.graphs.reserved);
    let graphs_high = uncharged(driver.graphs.reserved_high).max(graphs);
    let mut by_component = account.by_component;
    *by_component.get_mut(Component::Graphs) += graphs;
    let reserved = account.reserved + slack + graphs;
    Meters {
        // A limit below the device's capacity, or a driver that rounds, must not promise more than there is.
        free: driver.free.min(account.total.saturating_sub(reserved)),
        used: account.used + uncharged(driver.graphs.used),
        reserved,
        used_high: account.used_high + uncharged(driver.graphs.used_high).max(uncharged(driver.graphs.used)),
        reserved_high: account.reserved_high + slack_high + graphs_high,
        by_component,
        ..account
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    const NONE: Held = Held {
        used: 0,
        reserved: 0,
        used_high: 0,
        reserved_high: 0,
    };

    fn readings(free: u64, pool: Held) -> Readings {
        Readings {
            free,
            pool,
            graphs: NONE,
        }
    }

    #[test]
    fn what_is_neither_free_nor_ours_belongs_to_other_processes() {
        let budget = Budget::new(1000);
        let _runtime = budget.record(Component::Runtime, 50);
        let _weights = budget.charge(Component::Weights, 300).unwrap();
        let pool = Held {
            used: 300,
            reserved: 320,
            used_high: 310,
            reserved_high: 340,
        };
        let meters = combine(budget.meters(), &readings(500, pool));
        assert_eq!((meters.used, meters.reserved, meters.free), (350, 370, 500));
        assert_eq!(meters.peers(), 130);
        assert_eq!((meters.used_high, meters.reserved_high), (350, 380));
        // Other processes that grow or end do not change our own numbers.
        for free in [0, 400, 630] {
            let other = combine(budget.meters(), &readings(free, pool));
            assert_eq!((other.used, other.reserved), (meters.used, meters.reserved));
            assert_eq!(other.peers(), 630 - free);
        }
        // The parts sum to what is reserved, but for the pool's slack.
        assert_eq!(meters.reserved - meters.by_component.total(), 20);
    }

    #[test]
    fn memory_of_graphs_counts_once() {
        let budget = Budget::new(1000);
        let charged = budget.record(Component::Graphs, 30);
        let graphs = Held {
            used: 40,
            reserved: 50,
            used_high: 45,
            reserved_high: 60,
        };
        let driver = Readings {
            graphs,
            ..readings(900, NONE)
        };
        let meters = combine(budget.meters(), &driver);
        assert_eq!((meters.used, meters.reserved, meters.reserved_high), (40, 50, 60));
        assert_eq!(meters.by_component.get(Component::Graphs), 50);
        drop(charged);
        let meters = combine(budget.meters(), &driver);
        assert_eq!((meters.reserved, meters.by_component.total()), (50, 50));
    }

    #[test]
    fn a_limit_below_the_device_leaves_no_more_than_the_limit() {
        let budget = Budget::new(400);
        let _weights = budget.charge(Component::Weights, 300).unwrap();
        let meters = combine(budget.meters(), &readings(5000, NONE));
        assert_eq!((meters.total, meters.free, meters.peers()), (400, 100, 0));
        // Where the device cannot give what the limit allows, the rest is not ours to plan with.
        let meters = combine(budget.meters(), &readings(20, NONE));
        assert_eq!((meters.free, meters.peers()), (20, 80));
    }
}
