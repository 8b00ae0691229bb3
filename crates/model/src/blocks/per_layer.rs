use super::{Matrix, Operations, Scope, Stack, Vector, Visitor, Widths};
use crate::DecoderSpec;
use crate::spec::{LayerSpec, NormSpec, PerLayerSpec};

/// What makes the inputs of all layers beside the residual stream: those of one row lie one after the other.
#[derive(Clone, Debug)]
pub(crate) struct PerLayer<E, L, V> {
    /// `[vocabulary, layers x width]`.
    pub(crate) table: E,
    /// From an embedding to the inputs of all layers.
    pub(crate) projection: L,
    /// Of what is projected, layer by layer: `[width]`.
    pub(crate) norm: V,
}

/// What a layer makes of its input and adds to the residual stream.
#[derive(Clone, Debug)]
pub(crate) struct LayerInput<L, V> {
    /// From the residual stream to a gate for each element of the input.
    pub(crate) gate: L,
    /// From the gated input to what is added.
    pub(crate) projection: L,
    /// Of what is added.
    norm: V,
}

impl<E, L, V> PerLayer<E, L, V> {
    pub(super) fn visit<T: Visitor<Embedding = E, Linear = L, Vector = V>>(
        decoder: &DecoderSpec,
        spec: &PerLayerSpec,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let own = scope.part("model");
        let all = decoder.layers.len() * spec.width;
        let matrix = |name, outputs, inputs| -> Matrix { own.matrix(name, outputs, inputs) };
        let norm = NormSpec {
            unit_offset: false,
            ..decoder.final_norm
        };
        let projection = matrix("per_layer_model_projection", all, decoder.hidden_size);
        Ok(Self {
            table: visitor.embedding(&matrix("embed_tokens_per_layer", spec.vocab_size, all))?,
            projection: visitor.linear(&Stack::new(vec![projection]))?,
            norm: visitor.vector(&Vector::norm(
                own.name("per_layer_projection_norm.weight"),
                spec.width,
                norm,
            ))?,
        })
    }
}

impl<L, V> LayerInput<L, V> {
    /// `scope` is the layer's.
    pub(super) fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        spec: &PerLayerSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let gate = scope.matrix("per_layer_input_gate", spec.width, hidden);
        let projection = scope.matrix("per_layer_projection", hidden, spec.width);
        Ok(Self {
            gate: visitor.linear(&Stack::new(vec![gate]))?,
            projection: visitor.linear(&Stack::new(vec![projection]))?,
            norm: visitor.vector(&Vector::norm(
                scope.name("post_per_layer_input_norm.weight"),
                hidden,
                layer.norm,
            ))?,
        })
    }

    /// The residual stream is complete before and after it.
    pub(super) fn forward<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        spec: &PerLayerSpec,
        step: &mut O,
    ) -> Result<(), O::Error> {
        step.gate_layer_input(spec, self)?;
        step.settle(Some(&self.norm), layer.norm.eps)
    }
}

pub(super) fn widen(spec: &PerLayerSpec, layers: usize, widths: &mut Widths) {
    let all = spec.width.saturating_mul(layers);
    widths.layer_inputs = all;
    // The projection of the embedding; a gate beside its input.
    widths.gate_up = widths.gate_up.max(all).max(2 * spec.width);
    widths.activated = widths.activated.max(spec.width);
}
