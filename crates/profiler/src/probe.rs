//! The measurement: baseline, the worst steps with a small KV cache, and the size they lead to.

use std::time::Instant;

use plimsoll_core::{Component, KvConfig, Meters, Oom, Scratch, StateConfig};

use crate::advice::PARTS;
use crate::arithmetic::shrunk;
use crate::profiler::{Profiler, seconds};
use crate::refusal::Evidence;
use crate::stress::{Exhausted, Stop, or_exhausted};
use crate::{Arithmetic, Bound, Cause, Measured, Phase, Probed, ProfileError, ProfileSpec, Target};

/// The meters before any state is built.
pub(crate) struct Baseline(pub(crate) Meters);

/// The size that a probe leads to, the same on every rank.
pub(crate) struct Sized {
    /// This rank's sum.
    pub(crate) arithmetic: Arithmetic,
    /// The least that any rank can hold.
    pub(crate) pages: usize,
    /// What decided it.
    pub(crate) bound: Bound,
}

impl<T: Target> Profiler<'_, T> {
    pub(crate) fn baseline(&mut self) -> Baseline {
        self.target.trim();
        self.target.reset_high_water();
        let meters = self.target.meters();
        let fields = vec![
            ("total", meters.total.to_string()),
            ("free", meters.free.to_string()),
            ("weights", meters.by_component.get(Component::Weights).to_string()),
            ("runtime", meters.by_component.get(Component::Runtime).to_string()),
            ("ours", meters.reserved.to_string()),
            ("peers", meters.peers().to_string()),
        ];
        self.log(Phase::Baseline, fields);
        Baseline(meters)
    }

    /// The whole probe and what it leads to, or why it does not fit.
    pub(crate) fn measure(&mut self) -> Result<(Probed, Sized), ProfileError> {
        // A pinned size needs no more KV than a step writes: it is smaller than a probe's on small devices.
        let kv = self.spec.measured_kv();
        let probed = match or_exhausted(self.probe(Phase::Probe, self.spec, kv))? {
            Ok(probed) => probed,
            Err(exhausted) => return Err(self.probe_failed(&exhausted)),
        };
        let meters = self.target.meters();
        let sized = self.size(&probed.measured, &meters, 0)?;
        self.log_size(&sized);
        Ok((probed, sized))
    }

    /// What `measured` leaves for KV on today's `meters`, after `cuts` cuts of 5 %; then the least of all ranks.
    pub(crate) fn size(
        &mut self,
        measured: &Measured,
        meters: &Meters,
        cuts: u32,
    ) -> Result<Sized, ProfileError> {
        let arithmetic = Arithmetic::new(self.spec, measured, meters);
        let own = shrunk(arithmetic.pages, cuts);
        let pages = self.ranks.min(own)?;
        let bound = match pages < own {
            true => Bound::OtherRank,
            false => arithmetic.bound,
        };
        Ok(Sized {
            arithmetic,
            pages,
            bound,
        })
    }

    /// The size once an attempt failed: less than before where other processes have grown meanwhile. Those that
    /// gave back what they held when memory ran out may take it again.
    pub(crate) fn size_again(
        &mut self,
        measured: &Measured,
        oom: Option<&Oom>,
    ) -> Result<Sized, ProfileError> {
        let now = self.target.meters();
        let then = oom.map(|oom| *oom.meters);
        let meters = then.filter(|then| then.peers() > now.peers()).unwrap_or(now);
        self.size(measured, &meters, 0)
    }

    pub(crate) fn log_size(&mut self, sized: &Sized) {
        let Sized {
            arithmetic,
            pages,
            bound,
        } = sized;
        let fields = vec![
            ("total", arithmetic.total.to_string()),
            ("non_kv", arithmetic.non_kv.to_string()),
            ("peers", arithmetic.peers.to_string()),
            ("canary", arithmetic.canary.to_string()),
            (
                "fragmentation_buffer",
                arithmetic.fragmentation_buffer.to_string(),
            ),
            ("room", arithmetic.room.to_string()),
            ("mem_fraction", arithmetic.mem_fraction.to_string()),
            ("bytes_per_page", arithmetic.page_bytes.to_string()),
            ("tokens", self.spec.kv(*pages).capacity_tokens().to_string()),
            ("bound", bound.name().to_owned()),
            ("clamped", arithmetic.clamped.to_string()),
        ];
        self.log(Phase::Compute, fields);
    }

    /// The worst steps of `spec` with a KV cache of `kv` and an arena that grows.
    pub(crate) fn probe(&mut self, phase: Phase, spec: &ProfileSpec, kv: KvConfig) -> Result<Probed, Stop> {
        let started = Instant::now();
        let config = StateConfig {
            kv,
            scratch: Scratch::Growable,
            canary_bytes: 0,
        };
        let (mut state, steps) = self.build_with_steps(phase, spec, &config)?;
        let mut scenarios = Vec::new();
        let scratch_bytes = match self.stress(phase, &steps, &mut state, &mut scenarios) {
            Ok(bytes) => bytes,
            Err(stop) => return Err(self.give_up(phase, Some(state), stop)),
        };
        let meters = self.target.meters();
        let torn = self.tear_down(phase, state).map_err(Stop::Failed);
        self.agree(phase, None, torn)?;
        let measured = Measured {
            peak_reserved: meters.reserved_high,
            peak_used: meters.used_high,
            kv_bytes: meters.by_component.get(Component::Kv),
            kv_tokens: kv.capacity_tokens(),
            scratch_bytes,
        };
        let mut fields = vec![
            ("kv_tokens", measured.kv_tokens.to_string()),
            ("kv_bytes", measured.kv_bytes.to_string()),
            ("peak_reserved", measured.peak_reserved.to_string()),
            ("peak_used", measured.peak_used.to_string()),
            ("scratch", measured.scratch_bytes.to_string()),
            ("scenarios", scenarios.len().to_string()),
            ("left_out", steps.left_out.len().to_string()),
            ("seconds", seconds(started)),
        ];
        if phase == Phase::Advise {
            let limits = spec.limits;
            fields.push((
                "max_num_batched_tokens",
                limits.max_num_batched_tokens.to_string(),
            ));
            fields.push(("max_num_seqs", limits.max_num_seqs.to_string()));
            fields.push(("max_model_len", limits.max_model_len.to_string()));
        }
        self.log(phase, fields);
        Ok(Probed {
            measured,
            scenarios,
            weights: meters.by_component.get(Component::Weights),
            runtime: meters.by_component.get(Component::Runtime),
        })
    }

    /// The probe did not fit: measures the step with less KV, or a part of it, from which the diagnostic computes. Every
    /// rank takes part: the steps are everyone's.
    fn probe_failed(&mut self, exhausted: &Exhausted) -> ProfileError {
        let mut part = None;
        let parts: &[usize] = if self.spec.gives_advice { &PARTS } else { &[] };
        for &divisor in parts {
            let spec = self.spec.part(divisor);
            let kv = spec.kv_of_tokens(spec.written_tokens());
            if divisor == 1 && kv == self.spec.measured_kv() {
                continue;
            }
            match or_exhausted(self.probe(Phase::Probe, &spec, kv)) {
                Ok(Ok(probed)) => {
                    part = Some((probed, spec));
                    break;
                }
                Ok(Err(_)) => {}
                Err(error) => return error,
            }
        }
        let oom = match exhausted.oom() {
            Ok(oom) => oom,
            Err(error) => return error,
        };
        let evidence = Evidence {
            probe: part.as_ref().map(|(probed, spec)| (probed, spec.limits)),
            arithmetic: None,
            oom: Some(oom),
            last_tokens: None,
        };
        self.refuse(Cause::ProbeDoesNotFit, &evidence)
    }
}
