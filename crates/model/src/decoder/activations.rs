//! The activations of a step: one allocation of the arena, and its parts.

use plimsoll_core::Oom;
use plimsoll_device::{Arena, cast_slice_mut};
use plimsoll_kernels::Route;

use crate::DecoderSpec;
use crate::blocks::Widths;

/// A cache line, so that parts begin where vectors may.
const ALIGN: usize = 64 / size_of::<f32>();

/// What a step computes of all of its rows, `[rows, n]` each, for the widest layer.
pub(super) struct Activations<'a> {
    /// The residual stream.
    pub(super) hidden: &'a mut [f32],
    /// What is to be added to it.
    pub(super) delta: &'a mut [f32],
    pub(super) normed: &'a mut [f32],
    /// Of every kind of rotary positions.
    pub(super) angles: &'a mut [f32],
    pub(super) qkv: &'a mut [f32],
    /// Rotated.
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
        let widths = widths(spec);
        let most = activation_elements(spec, rows).unwrap_or(usize::MAX);
        let mut rest = arena.alloc::<f32>(most)?;
        let [
            hidden,
            delta,
            normed,
            angles,
            qkv,
            q,
            attended,
            gate_up,
            activated,
            gathered,
            projected,
            router_logits,
            layer_inputs,
            routes,
        ] = widths.map(|width| {
            let (part, behind) =
                std::mem::take(&mut rest).split_at_mut((rows * width).next_multiple_of(ALIGN));
            rest = behind;
            &mut part[..rows * width]
        });
        Ok(Self {
            hidden,
            delta,
            normed,
            angles,
            qkv,
            q,
            attended,
            gate_up,
            activated,
            gathered,
            projected,
            router_logits,
            layer_inputs,
            routes: cast_slice_mut(routes),
        })
    }
}

/// Elements that the activations of so many rows take from the arena; `None` if no memory could hold them.
pub(crate) fn activation_elements(spec: &DecoderSpec, rows: usize) -> Option<usize> {
    let part = |width: usize| rows.checked_mul(width)?.checked_next_multiple_of(ALIGN);
    widths(spec)
        .into_iter()
        .try_fold(0_usize, |sum, width| sum.checked_add(part(width)?))
}

/// Elements of a row of each of the [`Activations`].
fn widths(spec: &DecoderSpec) -> [usize; 14] {
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
