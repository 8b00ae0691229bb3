//! The activations of a step: one allocation of the arena, and its parts.

use plimsoll_core::Oom;
use plimsoll_device::{Arena, cast_slice_mut};
use plimsoll_kernels::Route;

use crate::DecoderSpec;
use crate::blocks::Widths;

/// Elements of a cache line: each part begins at one, as the arena's own allocations do.
const ALIGN: usize = 64 / size_of::<f32>();

const PARTS: usize = 14;

/// What a step computes of all of its rows, `[rows, n]` each, for the widest layer.
pub(super) struct Activations<'a> {
    /// The residual stream.
    pub(super) hidden: &'a mut [f32],
    /// What is to be added to it.
    pub(super) delta: &'a mut [f32],
    pub(super) normed: &'a mut [f32],
    /// Of each kind of rotary embedding.
    pub(super) angles: &'a mut [f32],
    pub(super) qkv: &'a mut [f32],
    /// Queries after their rotation.
    pub(super) q: &'a mut [f32],
    /// The mixer's output.
    pub(super) attended: &'a mut [f32],
    pub(super) gate_up: &'a mut [f32],
    pub(super) activated: &'a mut [f32],
    /// Inputs of an expert.
    pub(super) gathered: &'a mut [f32],
    /// Outputs of an expert.
    pub(super) projected: &'a mut [f32],
    pub(super) router_logits: &'a mut [f32],
    /// Inputs of layers beside the residual stream.
    pub(super) layer_inputs: &'a mut [f32],
    pub(super) routes: &'a mut [Route],
}

impl<'a> Activations<'a> {
    pub(super) fn new(spec: &DecoderSpec, rows: usize, arena: &'a Arena) -> Result<Self, Oom> {
        // What no memory could hold, the arena refuses.
        let all = activation_elements(spec, rows).unwrap_or(usize::MAX);
        let mut rest = arena.alloc::<f32>(all)?;
        let mut sizes = parts(spec, rows)
            .unwrap_or_default()
            .into_iter()
            .zip(widths(spec));
        // In the order of the fields.
        let mut next = || {
            let (part, width) = sizes.next().expect("a size for each field");
            let part = rest.split_off_mut(..part).expect("all is their sum");
            &mut part[..rows * width]
        };
        Ok(Self {
            hidden: next(),
            delta: next(),
            normed: next(),
            angles: next(),
            qkv: next(),
            q: next(),
            attended: next(),
            gate_up: next(),
            activated: next(),
            gathered: next(),
            projected: next(),
            router_logits: next(),
            layer_inputs: next(),
            routes: cast_slice_mut(next()),
        })
    }
}

/// Elements that the activations of so many rows take from the arena; `None` if no memory could hold them.
pub(crate) fn activation_elements(spec: &DecoderSpec, rows: usize) -> Option<usize> {
    let parts = parts(spec, rows)?;
    parts.into_iter().try_fold(0, usize::checked_add)
}

/// Elements of each of the [`Activations`], with what is between it and the next.
fn parts(spec: &DecoderSpec, rows: usize) -> Option<[usize; PARTS]> {
    let mut parts = widths(spec);
    for part in &mut parts {
        *part = part.checked_mul(rows)?.checked_next_multiple_of(ALIGN)?;
    }
    Some(parts)
}

/// Elements of a row of each of the [`Activations`].
fn widths(spec: &DecoderSpec) -> [usize; PARTS] {
    let Widths {
        hidden,
        qkv,
        attended,
        gate_up,
        activated,
        experts,
        routes,
        // Experts are computed one after the other on a CPU.
        expert_inner: _,
        layer_inputs,
        // Inputs are not quantised on a CPU.
        quantised: _,
        scales: _,
        ordered: _,
        has_codes: _,
    } = Widths::of(spec);
    let angles = spec.ropes().iter().map(|rope| rope.rotary_dim).sum();
    let expert = if experts > 0 { hidden } else { 0 };
    [
        hidden,
        hidden,
        hidden,
        angles,
        qkv,
        attended,
        attended,
        gate_up,
        activated,
        expert,
        expert,
        experts,
        layer_inputs,
        routes * size_of::<Route>() / size_of::<f32>(),
    ]
}
