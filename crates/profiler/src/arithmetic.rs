//! From what the probe measured to the size of the KV cache, and back: what a size would need.

use plimsoll_core::{Meters, StepLimits};
use serde::Serialize;

use crate::{Bound, Margins, Measured, ProfileSpec, ScenarioKind, ScenarioResult};

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
    pub block_bytes: u64,
    /// Pages that fit.
    pub fitting_blocks: usize,
    /// Pages to build.
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
            .map(|tokens| spec.kv_of_tokens(tokens).num_pages.max(spec.request_blocks()));
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

    /// Blocks that would fit if that part of the room were KV.
    pub(crate) fn blocks_of(&self, fraction: f64) -> usize {
        blocks_in(self.room, fraction, self.block_bytes)
    }

    /// Blocks that would fit if the whole room were KV.
    pub fn full_blocks(&self) -> usize {
        self.blocks_of(1.0)
    }
}

/// What a device really took for a page; never less than the model says.
fn measured_block_bytes(spec: &ProfileSpec, measured: &Measured) -> u64 {
    let blocks = spec.kv_of_tokens(measured.kv_tokens).num_pages as u64;
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

/// `blocks` after `retries` cuts of 5 %, each at least one block.
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
    at: StepLimits,
    /// Before any state was built.
    before: u64,
    /// `non_kv` there.
    non_kv: u64,
    /// Step memory of one more token in a step; `None` if it could not be told apart.
    bytes_per_token: Option<Slope>,
    /// Step memory of one more row in a step, likewise.
    bytes_per_row: Option<Slope>,
    fragmentation: u64,
    /// Most bytes of the step arena.
    scratch: u64,
    /// What a larger device might have kept: an arena that grows leaves its former sizes behind, and an allocator gives them
    /// back where it must.
    given_back: u64,
    peers: u64,
    block_bytes: u64,
}

impl Predictor {
    /// From a probe of `spec`; `meters` are those after it was dropped.
    pub(crate) fn new(
        spec: &ProfileSpec,
        measured: &Measured,
        scenarios: &[ScenarioResult],
        meters: &Meters,
    ) -> Self {
        let spare = meters
            .total
            .saturating_sub(meters.peers())
            .saturating_sub(measured.peak_reserved);
        let left_behind = left_behind(scenarios);
        Self {
            at: spec.limits,
            given_back: if spare < left_behind { left_behind } else { 0 },
            before: meters.reserved,
            non_kv: measured.peak_reserved.saturating_sub(measured.kv_bytes),
            bytes_per_token: slope_per_token(scenarios),
            bytes_per_row: slope_per_row(scenarios),
            fragmentation: measured.fragmentation(),
            scratch: measured.scratch_bytes,
            peers: meters.peers(),
            block_bytes: measured_block_bytes(spec, measured),
        }
    }

    /// Bytes that a start with `spec` needs, without margins and neighbours: for the probe, and for what must fit after it.
    fn needed(&self, spec: &ProfileSpec, non_kv: u64) -> u64 {
        let kv = |blocks: usize| self.block_bytes.saturating_mul(blocks as u64);
        let request = kv(spec.request_blocks());
        let kv = match spec.pinned_blocks() {
            // No probe.
            Some(blocks) => kv(blocks).max(request),
            None => {
                let probe = kv(spec.probe_kv().num_pages);
                let part = (request as f64 / spec.mem_fraction.get()).ceil() as u64;
                probe.max(part.saturating_add(self.block_bytes))
            }
        };
        non_kv.saturating_add(kv)
    }

    fn set_aside(&self, margins: &Margins, fragmentation: u64) -> u64 {
        margins.canary_bytes + margins.fragmentation_buffer(fragmentation) + self.peers
    }

    /// Whether `spec` is predicted to start on a device of `total` bytes.
    pub(crate) fn fits(&self, spec: &ProfileSpec, total: u64) -> bool {
        self.needed(spec, self.non_kv_of(&spec.limits))
            .saturating_add(self.set_aside(&spec.margins, self.fragmentation))
            <= total
    }

    /// Device memory that is enough for `spec`.
    pub(crate) fn device_for(&self, spec: &ProfileSpec) -> u64 {
        let non_kv = self.most_non_kv_of(&spec.limits);
        let needed = self.needed(spec, non_kv);
        let with = |margins: &Margins| {
            needed.saturating_add(self.set_aside(margins, self.fragmentation + self.given_back))
        };
        // A larger device may have larger margins, which need a larger device.
        let mut total = with(&spec.margins);
        loop {
            let scaled = Margins::scaled_to(total);
            let margins = Margins {
                canary_bytes: scaled.canary_bytes.max(spec.margins.canary_bytes),
                min_fragmentation_bytes: scaled
                    .min_fragmentation_bytes
                    .max(spec.margins.min_fragmentation_bytes),
            };
            let more = with(&margins);
            if more <= total {
                return total;
            }
            total = more;
        }
    }

    /// Blocks that are predicted to fit beside the steps of `spec` if we may have `usable` bytes.
    pub(crate) fn blocks(&self, spec: &ProfileSpec, usable: u64) -> usize {
        let taken = self
            .non_kv_of(&spec.limits)
            .saturating_add(self.set_aside(&spec.margins, self.fragmentation) - self.peers);
        blocks_in(i128::from(usable) - i128::from(taken), 1.0, self.block_bytes)
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
        let sum = i128::from(self.non_kv) + tokens + rows;
        u64::try_from(sum.max(i128::from(self.before))).unwrap_or(u64::MAX)
    }

    /// The same, and enough: whatever a state took grows with the limits at most in proportion.
    fn most_non_kv_of(&self, limits: &StepLimits) -> u64 {
        let mut grown = u128::from(self.non_kv.saturating_sub(self.before) + self.given_back);
        if *limits != self.at {
            // Steps of another size may leave an arena behind where these did not.
            grown += u128::from(self.scratch);
        }
        let in_proportion = |to: usize, from: usize| (grown * to as u128).div_ceil(from as u128);
        let most = in_proportion(limits.max_num_batched_tokens, self.at.max_num_batched_tokens)
            .max(in_proportion(limits.max_num_seqs, self.at.max_num_seqs))
            .max(grown);
        let most = u64::try_from(most).unwrap_or(u64::MAX);
        self.before.saturating_add(most).max(self.non_kv_of(limits))
    }

    /// The largest value of `least..now` with which the spec is predicted to fit `total`, where `set` writes the value into a
    /// spec.
    pub(crate) fn largest(
        &self,
        spec: &ProfileSpec,
        total: u64,
        values: std::ops::Range<usize>,
        set: &impl Fn(&mut ProfileSpec, usize),
    ) -> Option<usize> {
        let fits = |value: usize| {
            let mut changed = spec.clone();
            set(&mut changed, value);
            self.fits(&changed, total)
        };
        let (mut low, mut high) = (values.start, values.end);
        if low >= high || !fits(low) {
            return None;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        Some(low)
    }
}

/// Sizes that an arena grew out of, in the order in which the steps ran.
fn left_behind(scenarios: &[ScenarioResult]) -> u64 {
    let (mut largest, mut records) = (0, 0);
    for result in scenarios {
        if result.scratch_bytes > largest {
            largest = result.scratch_bytes;
            records += largest;
        }
    }
    records - largest
}

fn result(scenarios: &[ScenarioResult], kind: ScenarioKind) -> Option<&ScenarioResult> {
    scenarios.iter().find(|result| result.kind == kind)
}

/// Two steps with the same rows and the same sampling that differ in tokens only: many rows, or one. The steeper of the two.
fn slope_per_token(scenarios: &[ScenarioResult]) -> Option<Slope> {
    let of = |more: ScenarioKind, less: ScenarioKind| {
        let (more, less) = (result(scenarios, more)?, result(scenarios, less)?);
        let tokens = more
            .tokens
            .checked_sub(less.tokens)
            .filter(|&tokens| tokens > 0)? as u64;
        let bytes = more.scratch_bytes.saturating_sub(less.scratch_bytes);
        Some(Slope {
            low: bytes / tokens,
            high: bytes.div_ceil(tokens),
        })
    };
    let many = of(ScenarioKind::Mixed, ScenarioKind::SampleSort);
    let one = of(ScenarioKind::Prefill, ScenarioKind::Decode);
    many.into_iter().chain(one).max_by_key(|slope| slope.high)
}

/// Two steps with about the same tokens: one plain row, and many rows that sample with everything.
fn slope_per_row(scenarios: &[ScenarioResult]) -> Option<Slope> {
    let mixed = result(scenarios, ScenarioKind::Mixed)?;
    let one = result(scenarios, ScenarioKind::Prefill)?;
    let more = mixed.rows.checked_sub(one.rows)? as u64;
    let bytes = mixed.scratch_bytes.saturating_sub(one.scratch_bytes);
    // The plain row samples greedily, so `bytes` holds between `more` and `more + 1` rows of full sampling.
    (more > 0).then(|| Slope {
        low: bytes / (more + 1),
        high: bytes.div_ceil(more),
    })
}
