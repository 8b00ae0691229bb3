use crate::DecoderSpec;
use crate::blocks::Widths;

/// Elements of a row of each activation that a step takes from the arena for all of its rows: the residual stream, what is
/// to be added to it, its norm; angles; q, k and v, rotated q, the mixer's output; gate and up, their product;
/// inputs and outputs of an expert, the router's logits; inputs of layers beside the residual stream. [`Widths::routes`] come after
/// them.
pub(crate) fn activation_widths(spec: &DecoderSpec) -> [usize; 13] {
    let Widths {
        hidden,
        qkv,
        attended,
        gate_up,
        activated,
        experts,
        routes: _,
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
    ]
}
