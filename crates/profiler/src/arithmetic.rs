//! From what the probe measured to the size of the KV cache.

use plimsoll_core::Meters;
use serde::Serialize;

use crate::{Bound, Measured, ProfileSpec};

/// The sum that gives the KV cache its size, in bytes where nothing else is said.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arithmetic {
    /// Capacity of the device.
    pub total: u64,
    /// Everything of ours but KV, at the peak of the probe.
    pub non_kv: u64,
    /// Other processes.
    pub peers: u64,
    /// Held while a size is proved.
    pub canary: u64,
    /// For what allocators hold without using it.
    pub fragmentation_buffer: u64,
    /// What is left for KV: may be below 0.
    pub room: i128,
    /// The part of `room` that KV gets: `--mem-fraction`.
    pub mem_fraction: f64,
    /// Bytes of one page of KV, as measured: with one group of layers, a block.
    pub page_bytes: u64,
    /// Pages that fit.
    pub fitting_pages: usize,
    /// Pages to build.
    pub pages: usize,
    /// What decided that number.
    pub bound: Bound,
    /// The probe's peak was below its KV cache, which no sound meter says; `non_kv` was taken as 0.
    pub clamped: bool,
}

impl Arithmetic {
    pub(crate) fn new(spec: &ProfileSpec, measured: &Measured, meters: &Meters) -> Self {
        let non_kv = measured.peak_reserved.checked_sub(measured.kv_bytes);
        let fragmentation_buffer = spec.margins.fragmentation_buffer(measured.fragmentation());
        let taken = [
            non_kv.unwrap_or(0),
            spec.margins.canary_bytes,
            fragmentation_buffer,
            meters.peers(),
        ];
        let room = i128::from(meters.total) - taken.iter().map(|&bytes| i128::from(bytes)).sum::<i128>();
        let page_bytes = measured_page_bytes(spec, measured);
        let fitting_pages = pages_in(room, spec.mem_fraction.get(), page_bytes);
        let useful = spec
            .useful_tokens
            .map(|tokens| spec.kv_of_tokens(tokens).num_pages.max(spec.request_pages()));
        let useful = useful.filter(|&pages| pages < fitting_pages);
        Self {
            total: meters.total,
            non_kv: non_kv.unwrap_or(0),
            peers: meters.peers(),
            canary: spec.margins.canary_bytes,
            fragmentation_buffer,
            room,
            mem_fraction: spec.mem_fraction.get(),
            page_bytes,
            fitting_pages,
            pages: useful.unwrap_or(fitting_pages),
            bound: if useful.is_some() {
                Bound::Useful
            } else {
                Bound::Memory
            },
            clamped: non_kv.is_none(),
        }
    }

    /// Pages that would fit if that part of the room were KV.
    pub(crate) fn pages_of(&self, fraction: f64) -> usize {
        pages_in(self.room, fraction, self.page_bytes)
    }

    /// Pages that would fit if the whole room were KV.
    pub fn full_pages(&self) -> usize {
        self.pages_of(1.0)
    }
}

/// What a device really took for a page; never less than the model says.
fn measured_page_bytes(spec: &ProfileSpec, measured: &Measured) -> u64 {
    let pages = spec.kv_of_tokens(measured.kv_tokens).num_pages as u64;
    measured.kv_bytes.div_ceil(pages.max(1)).max(spec.page_bytes())
}

fn pages_in(room: i128, fraction: f64, page_bytes: u64) -> usize {
    let budget = if fraction == 1.0 {
        room.max(0) as u64
    } else {
        (room.max(0) as f64 * fraction) as u64
    };
    usize::try_from(budget / page_bytes).unwrap_or(usize::MAX)
}

/// `pages` after `retries` cuts of 5 %, each at least one page.
pub(crate) fn shrunk(pages: usize, retries: u32) -> usize {
    let exact = (pages as f64 * SHRINK.powi(retries as i32)) as usize;
    exact.min(pages.saturating_sub(retries as usize))
}

/// What is left of the target after an attempt that failed.
const SHRINK: f64 = 0.95;

/// Attempts at most: 100, 95, 90.25 and 85.74 % of the target.
pub(crate) const MAX_ATTEMPTS: u32 = 4;
