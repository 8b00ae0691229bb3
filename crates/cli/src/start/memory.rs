//! Memory of the engine's state: what was proved at the start, and the device's meters since.

use std::sync::Arc;

use parking_lot::Mutex;
use plimsoll_core::Meters;
use plimsoll_profiler::Report;
use plimsoll_server::{Memory, StartNumbers};

use super::times::{StartTimes, report_json};
use crate::backend::Backend;

/// The proof of the state in use, on its device. Shared by the engine, which has it replaced, and the API, which shows it.
#[derive(Debug)]
pub struct StateMemory {
    device: Arc<dyn Backend>,
    times: StartTimes,
    proof: Mutex<Proof>,
}

#[derive(Debug)]
struct Proof {
    report: Report,
    /// By the process's own account, of each rank.
    peaks: Vec<u64>,
    /// Allocations before the server was ready, or for states built later.
    allocations: u64,
    /// While a state is built: allocations when that began.
    rebuilding_since: Option<u64>,
}

impl StateMemory {
    /// Taken at ready: the device's marks still show the proof, and start anew here.
    pub(crate) fn new(device: Arc<dyn Backend>, report: Report, times: StartTimes) -> Self {
        let proof = Proof {
            peaks: proved_peaks(&*device, &report),
            allocations: device.allocations(),
            rebuilding_since: None,
            report,
        };
        device.reset_high_water();
        Self {
            device,
            times,
            proof: Mutex::new(proof),
        }
    }

    /// What is allocated from here on is for another state.
    pub(crate) fn rebuild_begins(&self) {
        let now = self.device.allocations();
        self.proof.lock().rebuilding_since.get_or_insert(now);
    }

    /// There is a state with that report in place of the former, or there is none.
    pub(crate) fn rebuild_ends(&self, report: Option<&Report>) {
        let now = self.device.allocations();
        let mut proof = self.proof.lock();
        let since = proof.rebuilding_since.take().unwrap_or(now);
        proof.allocations += now - since;
        if let Some(report) = report {
            proof.peaks = proved_peaks(&*self.device, report);
            proof.report = report.clone();
            self.device.reset_high_water();
        }
    }

    /// The device's meters, of the first rank where there are several.
    pub(crate) fn first_rank(&self) -> Meters {
        self.device.meters()
    }

    /// Highest bytes that all ranks held since the server is ready, by the process's own account.
    pub(crate) fn high_water(&self) -> u64 {
        let accounts = self.device.accounts().into_iter();
        accounts.map(|account| account.meters().reserved_high).sum()
    }

    /// The same during the proof, without the canary.
    pub(crate) fn proved_by_all(&self) -> u64 {
        self.proof.lock().peaks.iter().sum()
    }
}

/// What the accounts of all ranks show of the attempt that passed, in which the canary was held from the first byte to the last.
fn proved_peaks(device: &dyn Backend, report: &Report) -> Vec<u64> {
    let peak = |meters: Meters| {
        let without_canary = meters
            .reserved_high
            .saturating_sub(report.sizing.margins.canary_bytes);
        without_canary.max(meters.reserved)
    };
    let accounts = device.accounts().into_iter();
    accounts.map(|account| peak(account.meters())).collect()
}

impl Memory for StateMemory {
    fn report(&self) -> serde_json::Value {
        report_json(&self.proof.lock().report, &self.times)
    }

    fn meters(&self) -> Vec<Meters> {
        match self.device.parts() {
            [] => vec![self.device.meters()],
            ranks => ranks.iter().map(|(backend, _)| backend.meters()).collect(),
        }
    }

    fn allocations_after_ready(&self) -> u64 {
        let proof = self.proof.lock();
        let now = proof
            .rebuilding_since
            .unwrap_or_else(|| self.device.allocations());
        now.saturating_sub(proof.allocations)
    }

    fn proved_peaks(&self) -> Vec<u64> {
        self.proof.lock().peaks.clone()
    }

    fn start(&self) -> StartNumbers {
        StartNumbers {
            stages: self.times.stages(),
            tried: self.proof.lock().report.attempts.len(),
        }
    }
}
