//! From what the probe measured to the size of the KV cache, and back: what a size would need.

use plimsoll_core::{Meters, StepLimits};
use serde::{Deserialize, Serialize};

use crate::{Bound, ProfileSpec};

/// What the stress of a state measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Highest `reserved`.
    pub peak_reserved: u64,
    /// Highest `used`.
    pub peak_used: u64,
    /// Bytes of the KV cache meanwhile.
    pub kv_bytes: u64,
    /// Tokens it held.
    pub kv_tokens: usize,
    /// Most bytes of the step arena in use at once.
    pub scratch_bytes: u64,
}

impl Measured {
    /// Bytes allocators held without using them, at the peak (C1).
    pub fn fragmentation(&self) -> u64 {
        self.peak_reserved.saturating_sub(self.peak_used)
    }
}

/// The sum that gives the KV cache its size (A7), in bytes where nothing else is said.
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
    /// Bytes of one block of KV, as measured.
    pub block_bytes: u64,
    /// Blocks that fit.
    pub fitting_blocks: usize,
    /// Blocks to build.
    pub blocks: usize,
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
        let block_bytes = measured_block_bytes(spec, measured);
        let fitting_blocks = blocks_in(room, spec.mem_fraction.get(), block_bytes);
        let useful = spec
            .useful_tokens
            .map(|tokens| spec.block_size.blocks_for(tokens));
        let useful = useful.filter(|&blocks| blocks < fitting_blocks);
        Self {
            total: meters.total,
            non_kv: non_kv.unwrap_or(0),
            peers: meters.peers(),
            canary: spec.margins.canary_bytes,
            fragmentation_buffer,
            room,
            mem_fraction: spec.mem_fraction.get(),
            block_bytes,
            fitting_blocks,
            blocks: useful.unwrap_or(fitting_blocks),
            bound: if useful.is_some() {
                Bound::Useful
            } else {
                Bound::Memory
            },
            clamped: non_kv.is_none(),
        }
    }

    /// Blocks for which `usable` bytes of ours suffice, margins included.
    pub(crate) fn blocks_within(&self, usable: u64) -> usize {
        let taken = self
            .non_kv
            .saturating_add(self.canary)
            .saturating_add(self.fragmentation_buffer);
        blocks_in(i128::from(usable.saturating_sub(taken)), 1.0, self.block_bytes)
    }

    /// Blocks that would fit if the whole room were KV.
    pub fn full_blocks(&self) -> usize {
        blocks_in(self.room, 1.0, self.block_bytes)
    }
}

/// What a device really took for a block; never less than the model says.
fn measured_block_bytes(spec: &ProfileSpec, measured: &Measured) -> u64 {
    let blocks = spec.block_size.blocks_for(measured.kv_tokens) as u64;
    measured.kv_bytes.div_ceil(blocks.max(1)).max(spec.block_bytes())
}

fn blocks_in(room: i128, fraction: f64, block_bytes: u64) -> usize {
    let budget = if fraction == 1.0 {
        room.max(0) as u64
    } else {
        (room.max(0) as f64 * fraction) as u64
    };
    usize::try_from(budget / block_bytes).unwrap_or(usize::MAX)
}

/// `blocks` after `retries` cuts of 5 % (A14), each at least one block.
pub(crate) fn shrunk(blocks: usize, retries: u32) -> usize {
    let exact = (blocks as f64 * SHRINK.powi(retries as i32)) as usize;
    exact.min(blocks.saturating_sub(retries as usize))
}

/// What is left of the target after an attempt that failed.
const SHRINK: f64 = 0.95;

/// Attempts at most: 100, 95, 90.25 and 85.74 % of the target.
pub(crate) const MAX_ATTEMPTS: u32 = 4;

/// Bytes of one more token or row: at least and at most. The prudent one of the two predicts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slope {
    pub(crate) low: u64,
    pub(crate) high: u64,
}

/// Predicts what limits would need, from what other limits were measured to need.
#[derive(Clone, Debug)]
pub(crate) struct Predictor {
    /// Limits that were measured.
    pub(crate) at: StepLimits,
    /// `non_kv` there.
    pub(crate) non_kv: u64,
    /// Step memory of one more token in a step; `None` if it could not be told apart.
    pub(crate) bytes_per_token: Option<Slope>,
    /// Step memory of one more row in a step, likewise.
    pub(crate) bytes_per_row: Option<Slope>,
    /// Margins and neighbours.
    pub(crate) set_aside: u64,
    pub(crate) block_bytes: u64,
}

impl Predictor {
    /// Device memory with which `spec` would pass both the probe and the strict check that one request fits.
    pub(crate) fn total_needed(&self, spec: &ProfileSpec) -> u64 {
        let kv = |blocks: usize| self.block_bytes as f64 * blocks as f64;
        let probe = kv(spec.block_size.blocks_for(spec.probe_tokens())) as u64;
        let request = (kv(spec.request_blocks()) / spec.mem_fraction.get()).ceil() as u64 + self.block_bytes;
        self.non_kv_of(&spec.limits)
            .saturating_add(self.set_aside)
            .saturating_add(probe.max(request))
    }

    fn non_kv_of(&self, limits: &StepLimits) -> u64 {
        let grow = |to: usize, from: usize, slope: Option<Slope>| {
            let slope = slope.map_or(0, |slope| if to > from { slope.high } else { slope.low });
            (to as i128 - from as i128) * i128::from(slope)
        };
        let tokens = grow(
            limits.max_num_batched_tokens,
            self.at.max_num_batched_tokens,
            self.bytes_per_token,
        );
        let rows = grow(limits.max_num_seqs, self.at.max_num_seqs, self.bytes_per_row);
        u64::try_from((i128::from(self.non_kv) + tokens + rows).max(0)).unwrap_or(u64::MAX)
    }

    /// The largest value below `now` with which the spec fits `total`, where `set` writes the value into a spec.
    pub(crate) fn largest(
        &self,
        spec: &ProfileSpec,
        total: u64,
        now: usize,
        set: impl Fn(&mut ProfileSpec, usize),
    ) -> Option<usize> {
        let fits = |value: usize| {
            let mut changed = spec.clone();
            set(&mut changed, value);
            self.total_needed(&changed) <= total
        };
        let (mut low, mut high) = (1, now);
        if now <= 1 || !fits(low) {
            return None;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        Some(low)
    }
}
