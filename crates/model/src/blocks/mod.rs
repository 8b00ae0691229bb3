//! What a decoder consists of, written down once: each block's tensors, activations and operations. Devices implement the
//! operations ([`Operations`]); loading, layouts and sums of memory visit the tensors ([`Visitor`]).

mod attention;
mod count;
mod delta_net;
mod dense_mlp;
mod encoder;
mod formats;
mod mlp;
mod moe;
mod per_layer;
mod row_order;
mod tensors;

use std::sync::Arc;

pub(crate) use attention::Attention;
pub(crate) use delta_net::{DeltaNet, DeltaRule};
pub(crate) use dense_mlp::DenseMlp;
pub(crate) use encoder::{Encoder, EncoderLayer, EncoderNorm, EncoderOperations, Merger};
pub(crate) use formats::check_formats;
pub(crate) use mlp::{Mlp, MlpKind};
pub(crate) use moe::{Beside, Moe};
pub(crate) use per_layer::{LayerInput, PerLayer};
pub(crate) use row_order::{Among, RowOrder};
pub(crate) use tensors::{InExperts, Matrix, Scope, Stack, StoredAs, Vector};

use crate::quantization::{EMBEDDING, FP8_BLOCK, Fp8Scales};
use crate::rope::{RopeScaling, RopeSpec};
use crate::spec::{self, AttentionSpec, DeltaNetSpec, DenseMlpSpec, LayerSpec, MoeSpec, PerLayerSpec};
use crate::{DecoderSpec, OutputHead};

/// Makes something of each tensor of a decoder: weights, sizes, places.
pub(crate) trait Visitor {
    /// Of a vector.
    type Vector;
    /// Of stacked matrices and their biases.
    type Linear;
    /// Of the table of tokens.
    type Embedding;
    type Error;

    fn vector(&mut self, vector: &Vector) -> Result<Self::Vector, Self::Error>;

    /// A vector that a model may do without.
    fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Self::Vector>, Self::Error>;

    fn linear(&mut self, stack: &Stack) -> Result<Self::Linear, Self::Error>;

    fn embedding(&mut self, table: &Matrix) -> Result<Self::Embedding, Self::Error>;

    /// A tensor that checkpoints may have, and that nothing reads.
    fn idle(&mut self, _: String) {}

    /// The embedding as a projection to logits.
    fn tied(&mut self, embedding: &Self::Embedding) -> Self::Linear;
}

/// A [`Visitor`] that looks at the tensors every checkpoint has, and makes nothing of them.
pub(crate) trait Inspector {
    type Error;

    fn vector(&mut self, _: &Vector) -> Result<(), Self::Error> {
        Ok(())
    }

    fn linear(&mut self, stack: &Stack) -> Result<(), Self::Error>;

    fn embedding(&mut self, _: &Matrix) -> Result<(), Self::Error> {
        Ok(())
    }
}

impl<T: Inspector> Visitor for T {
    type Vector = ();
    type Linear = ();
    type Embedding = ();
    type Error = T::Error;

    fn vector(&mut self, vector: &Vector) -> Result<(), T::Error> {
        Inspector::vector(self, vector)
    }

    fn optional_vector(&mut self, _: &Vector) -> Result<Option<()>, T::Error> {
        Ok(None)
    }

    fn linear(&mut self, stack: &Stack) -> Result<(), T::Error> {
        Inspector::linear(self, stack)
    }

    fn embedding(&mut self, table: &Matrix) -> Result<(), T::Error> {
        Inspector::embedding(self, table)
    }

    fn tied(&mut self, (): &()) {}
}

/// A decoder, with `E` for its embedding, `L` for each linear layer and `V` for each vector.
#[derive(Clone, Debug)]
pub(crate) struct Decoder<E, L, V> {
    /// One divisor per frequency, by which GGUF files of Llama 3 spell out the scaling; others have none.
    pub(crate) rope_factors: Option<V>,
    pub(crate) embedding: E,
    /// A model for embeddings has none.
    pub(crate) head: Option<L>,
    pub(crate) final_norm: V,
    /// Where layers have inputs beside the residual stream.
    pub(crate) per_layer: Option<PerLayer<E, L, V>>,
    pub(crate) layers: Vec<Layer<L, V>>,
}

/// One layer of a [`Decoder`].
#[derive(Clone, Debug)]
pub(crate) struct Layer<L, V> {
    pub(crate) spec: Arc<LayerSpec>,
    pub(crate) mixer: Mixer<L, V>,
    pub(crate) mlp: Mlp<L, V>,
    pub(crate) input: Option<LayerInput<L, V>>,
    /// What the residual stream behind it is multiplied by, one number.
    pub(crate) scalar: Option<V>,
}

/// What lets tokens see each other, and the norms around it.
#[derive(Clone, Debug)]
pub(crate) enum Mixer<L, V> {
    Attention(Attention<L, V>),
    DeltaNet(DeltaNet<L, V>),
}

impl<E, L, V> Decoder<E, L, V> {
    /// Visits all tensors, in one order.
    pub(crate) fn visit<T: Visitor<Embedding = E, Linear = L, Vector = V>>(
        spec: &DecoderSpec,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let (vocab, hidden) = (spec.vocab_rows(), spec.hidden_size);
        let ropes = spec.ropes();
        // Which pairs turn is a part of the configuration.
        let is_proportional = |rope: &&RopeSpec| matches!(rope.scaling, RopeScaling::Proportional { .. });
        let rope_factors = match ropes.first().filter(|_| !ropes.iter().any(is_proportional)) {
            Some(rope) => {
                visitor.optional_vector(&Vector::plain("rope_freqs.weight", rope.rotary_dim / 2))?
            }
            None => None,
        };
        let scope = Scope::new("", &spec.quantization, spec.shard);
        let table = scope
            .matrix(EMBEDDING, vocab, hidden)
            .outputs_of(spec.vocab_shard);
        let embedding = visitor.embedding(&table)?;
        Ok(Self {
            rope_factors,
            head: match spec.head {
                OutputHead::None => None,
                OutputHead::Own => {
                    let head = scope
                        .matrix("lm_head", vocab, hidden)
                        .outputs_of(spec.vocab_shard);
                    Some(visitor.linear(&Stack::new(vec![head]))?)
                }
                OutputHead::Tied => Some(visitor.tied(&embedding)),
            },
            embedding,
            final_norm: visitor.vector(&Vector::norm("model.norm.weight", hidden, spec.final_norm))?,
            per_layer: (spec.per_layer.as_ref())
                .map(|own| PerLayer::visit(spec, own, &scope, visitor))
                .transpose()?,
            layers: (spec.layers.iter().enumerate())
                .map(|(index, layer)| {
                    let scope = scope.part(&format!("model.layers.{index}"));
                    Layer::visit(layer, spec, &scope, visitor)
                })
                .collect::<Result<_, _>>()?,
        })
    }

    /// All layers and the last norm, of a step whose embeddings are there. After the last keys and values are written, only the rows
    /// that are given out matter; nothing more is done if there are none.
    pub(crate) fn forward<O: Operations<L, V>>(
        &self,
        spec: &DecoderSpec,
        step: &mut O,
    ) -> Result<(), O::Error> {
        self.forward_through(0..self.layers.len(), spec, step)
    }

    /// The same through some of the layers alone, in order: a step that is to load what these need, and computes nothing of use.
    pub(crate) fn forward_through<O: Operations<L, V>>(
        &self,
        layers: impl IntoIterator<Item = usize>,
        spec: &DecoderSpec,
        step: &mut O,
    ) -> Result<(), O::Error> {
        if let Some(per_layer) = &self.per_layer {
            step.make_layer_inputs(&per_layer.projection, &per_layer.norm, spec.final_norm.eps)?;
        }
        let keeps = |layer: &Layer<L, V>| {
            let attention = layer.spec.attention();
            attention.is_none_or(|attention| attention.shares_kv.is_none())
        };
        let last_kept = self.layers.iter().rposition(keeps);
        let mut added = None;
        for index in layers {
            let layer = &self.layers[index];
            let is_last = index + 1 == self.layers.len();
            step.begin_layer(index);
            layer.mixer.write(&layer.spec, added, step)?;
            if last_kept == Some(index) && step.rows_given() == 0 {
                return Ok(());
            }
            layer.mixer.finish(&layer.spec, is_last, step)?;
            layer.mlp.forward(&layer.spec, layer.mixer.post_norm(), step)?;
            added = layer.mlp.post_norm.as_ref();
            if layer.input.is_some() || layer.scalar.is_some() {
                step.settle(added.take(), layer.spec.norm.eps)?;
            }
            if let (Some(input), Some(spec)) = (&layer.input, &spec.per_layer) {
                input.forward(&layer.spec, spec, step)?;
            }
            if let Some(scalar) = &layer.scalar {
                step.scale(scalar)?;
            }
            step.add_features(index)?;
        }
        step.finish(&Norms {
            added,
            weight: &self.final_norm,
            eps: spec.final_norm.eps,
        })
    }
}

impl<L, V> Layer<L, V> {
    fn visit<T: Visitor<Linear = L, Vector = V>>(
        spec: &Arc<LayerSpec>,
        decoder: &DecoderSpec,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let hidden = decoder.hidden_size;
        Ok(Self {
            mixer: Mixer::visit(spec, hidden, scope, visitor)?,
            mlp: Mlp::visit(spec, hidden, scope, visitor)?,
            input: (decoder.per_layer.as_ref())
                .map(|own| LayerInput::visit(spec, own, hidden, scope, visitor))
                .transpose()?,
            scalar: (spec.scalar)
                .then(|| visitor.vector(&Vector::plain(scope.name("layer_scalar"), 1)))
                .transpose()?,
            spec: Arc::clone(spec),
        })
    }
}

impl<L, V> Mixer<L, V> {
    fn visit<T: Visitor<Linear = L, Vector = V>>(
        layer: &LayerSpec,
        hidden: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        Ok(match &layer.mixer {
            spec::Mixer::Attention(spec) => {
                Self::Attention(Attention::visit(layer, spec, hidden, scope, visitor)?)
            }
            spec::Mixer::DeltaNet(spec) => {
                Self::DeltaNet(DeltaNet::visit(layer, spec, hidden, scope, visitor)?)
            }
        })
    }

    /// Up to the point from which rows that are not given out no longer matter.
    fn write<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        added: Option<&V>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        match (self, &layer.mixer) {
            (Self::Attention(block), spec::Mixer::Attention(spec)) => block.write(layer, spec, added, step),
            (Self::DeltaNet(block), spec::Mixer::DeltaNet(spec)) => block.write(layer, spec, added, step),
            _ => unreachable!("blocks are made from their layers"),
        }
    }

    fn finish<O: Operations<L, V>>(
        &self,
        layer: &LayerSpec,
        is_last: bool,
        step: &mut O,
    ) -> Result<(), O::Error> {
        match (self, &layer.mixer) {
            (Self::Attention(block), spec::Mixer::Attention(spec)) => block.finish(spec, is_last, step),
            (Self::DeltaNet(block), spec::Mixer::DeltaNet(spec)) => block.finish(spec, is_last, step),
            _ => unreachable!("blocks are made from their layers"),
        }
    }

    pub(crate) fn post_norm(&self) -> Option<&V> {
        match self {
            Self::Attention(block) => block.post_norm.as_ref(),
            Self::DeltaNet(block) => block.post_norm.as_ref(),
        }
    }

    /// If it is attention.
    pub(crate) fn attention(&self) -> Option<&Attention<L, V>> {
        match self {
            Self::Attention(block) => Some(block),
            Self::DeltaNet(_) => None,
        }
    }

    /// Its last projection.
    pub(crate) fn output(&self) -> &L {
        match self {
            Self::Attention(block) => &block.output,
            Self::DeltaNet(block) => &block.output,
        }
    }

    /// What it begins with.
    pub(crate) fn projections(&self) -> &L {
        match self {
            Self::Attention(block) => &block.qkv,
            Self::DeltaNet(block) => &block.projections,
        }
    }
}

/// What is done to the residual stream before a block: what the block before gave is normalised, if its layer says so, and
/// added, and the sum is normalised.
#[derive(Debug)]
pub(crate) struct Norms<'a, V> {
    /// Of what is added.
    pub(crate) added: Option<&'a V>,
    /// Of the sum.
    pub(crate) weight: &'a V,
    /// Of both.
    pub(crate) eps: f32,
}

/// The operations of a decoder's blocks on the activations of one step, which the implementation holds. Before the first
/// block there is nothing to be added to the residual stream.
pub(crate) trait Operations<L, V> {
    type Error;

    /// From the embeddings of the residual stream and the rows of the second table to the inputs of all layers.
    fn make_layer_inputs(&mut self, projection: &L, norm: &V, eps: f32) -> Result<(), Self::Error>;

    /// What follows is that layer's.
    fn begin_layer(&mut self, index: usize);

    /// The projections of the norm of the residual stream that a mixer begins with, in rows of `width` elements, at least as many as
    /// `linear` has outputs: q, its gates if there are any, k and v; or q, k, v, the output's gate, and what makes the gates of the state.
    fn project(&mut self, norms: &Norms<'_, V>, linear: &L, width: usize) -> Result<(), Self::Error>;

    /// Norms of the heads of q and k, rotation, and k and v to the layer's cache.
    fn write_kv(
        &mut self,
        layer: &LayerSpec,
        attention: &AttentionSpec,
        qk_norm: Option<&[V; 2]>,
    ) -> Result<(), Self::Error>;

    /// Norms of the heads of q and rotation, where the cache has the keys and values of another layer.
    fn rotate_queries(
        &mut self,
        layer: &LayerSpec,
        attention: &AttentionSpec,
        q_norm: Option<&V>,
    ) -> Result<(), Self::Error>;

    /// From q and the layer's cache to what is attended, times the sigmoids of the gates if there are any.
    fn attend(&mut self, attention: &AttentionSpec, sinks: Option<&V>) -> Result<(), Self::Error>;

    /// From these and the layer's states to the states behind the step, and to the normalised and gated output, which takes
    /// the place of what is attended.
    fn apply_delta_rule(
        &mut self,
        layer: &LayerSpec,
        delta_net: &DeltaNetSpec,
        rule: &DeltaRule<V>,
    ) -> Result<(), Self::Error>;

    /// Rows of the step that are given out.
    fn rows_given(&self) -> usize;

    /// From here on, only these rows of the residual stream and of what is attended matter; the latter are of that width.
    fn keep_given(&mut self, attended: usize) -> Result<(), Self::Error>;

    /// From what is attended to what is added to the residual stream.
    fn project_output(&mut self, output: &L) -> Result<(), Self::Error>;

    /// The gated projections of the norm of the residual stream.
    fn project_gated(
        &mut self,
        mlp: &DenseMlpSpec,
        norms: &Norms<'_, V>,
        gate_up: &L,
    ) -> Result<(), Self::Error>;

    /// From these to what is added to the residual stream.
    fn project_down(&mut self, mlp: &DenseMlpSpec, down: &L) -> Result<(), Self::Error>;

    /// What is added to the residual stream is the sum of what all ranks computed. One rank alone has all of it.
    fn sum_ranks(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// From the norm of the residual stream through each row's experts to what is added to it.
    fn experts(&mut self, spec: &MoeSpec, norms: &Norms<'_, V>, moe: &Moe<L>) -> Result<(), Self::Error>;

    /// The same of experts beside an MLP, whose output is there: their sum takes its place. The residual stream has been normalised,
    /// and so is complete.
    fn experts_beside(&mut self, spec: &MoeSpec, eps: f32, beside: &Beside<L, V>) -> Result<(), Self::Error>;

    /// Adds what the block before gave to the residual stream, normalised where it has a norm: nothing is to be added then.
    fn settle(&mut self, added: Option<&V>, eps: f32) -> Result<(), Self::Error>;

    /// From the residual stream, which is complete, and the layer's input to what is added to the stream.
    fn gate_layer_input(&mut self, spec: &PerLayerSpec, input: &LayerInput<L, V>) -> Result<(), Self::Error>;

    /// Multiplies the residual stream, which is complete, by a number.
    fn scale(&mut self, scalar: &V) -> Result<(), Self::Error>;

    /// What an image's rows have for the output of that layer is added to the residual stream.
    fn add_features(&mut self, layer: usize) -> Result<(), Self::Error>;

    /// The last norm.
    fn finish(&mut self, norms: &Norms<'_, V>) -> Result<(), Self::Error>;
}

/// Elements of a row of each activation: as many as the widest layer needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Widths {
    /// The residual stream, its norm, and what is added to it.
    pub(crate) hidden: usize,
    /// What a mixer projects to first: q, k, v, gates of what is attended and of states.
    pub(crate) qkv: usize,
    /// What is attended; rotated queries, where they have a place of their own.
    pub(crate) attended: usize,
    /// Gate and up.
    pub(crate) gate_up: usize,
    /// Their product.
    pub(crate) activated: usize,
    /// Logits of the router: experts of the layer with the most; 0 without any.
    pub(crate) experts: usize,
    /// Experts that a row goes to.
    pub(crate) routes: usize,
    /// Inside an expert.
    pub(crate) expert_inner: usize,
    /// Inputs of all layers beside the residual stream.
    pub(crate) layer_inputs: usize,
    /// The widest inputs, where a device quantises them for products in eight bits.
    pub(crate) quantised: usize,
    /// Their scales.
    pub(crate) scales: usize,
    /// The widest inputs, where a matrix of four bits has them in another order.
    pub(crate) ordered: usize,
    /// A device that keeps the bits of matrices may want some in floats for a product.
    pub(crate) has_codes: bool,
}

impl Widths {
    pub(crate) fn of(spec: &DecoderSpec) -> Self {
        let mut widths = Self {
            hidden: spec.hidden_size,
            ..Self::default()
        };
        for layer in &spec.layers {
            match &layer.mixer {
                spec::Mixer::Attention(spec) => attention::widen(spec, &mut widths),
                spec::Mixer::DeltaNet(spec) => delta_net::widen(spec, &mut widths),
            }
            match &layer.mlp {
                spec::Mlp::Dense(mlp) => dense_mlp::widen(mlp, &mut widths),
                spec::Mlp::Moe(moe) => moe::widen(moe, &mut widths),
                spec::Mlp::Both(mlp, moe) => {
                    dense_mlp::widen(mlp, &mut widths);
                    moe::widen(moe, &mut widths);
                    // What the experts give, beside what the MLP gave.
                    widths.qkv = widths.qkv.max(spec.hidden_size);
                }
            }
        }
        if let Some(per_layer) = &spec.per_layer {
            per_layer::widen(per_layer, spec.layers.len(), &mut widths);
        }
        let widest = widths.hidden.max(widths.attended).max(widths.activated);
        for scales in spec.quantization.kept_scales() {
            widths.quantised = widest;
            widths.scales = widths.scales.max(match scales {
                Fp8Scales::Tensor | Fp8Scales::Channel => 1,
                Fp8Scales::Block => widest.div_ceil(FP8_BLOCK),
            });
        }
        widths.has_codes = spec.quantization.gguf.are_kept_in_layers();
        for format in spec.quantization.int4() {
            widths.has_codes = true;
            if format.ordered {
                widths.ordered = widest;
            }
        }
        widths
    }

    /// Elements of the largest matrix that a device may want in floats for a product, as large as that of any layer may be; 0 where there
    /// are none.
    pub(crate) fn largest_of_codes(&self) -> Option<usize> {
        let other = self.qkv.max(self.attended).max(self.gate_up).max(self.activated);
        if self.has_codes {
            self.hidden.checked_mul(other)
        } else {
            Some(0)
        }
    }

    /// Where all experts are computed at once, in room of their own: gate and up are those of what every token goes through.
    pub(crate) fn beside_experts(spec: &DecoderSpec) -> Self {
        let mut own = Self::default();
        for mlp in spec.layers.iter().filter_map(|layer| layer.mlp_of_all()) {
            dense_mlp::widen(mlp, &mut own);
        }
        if let Some(per_layer) = &spec.per_layer {
            per_layer::widen(per_layer, spec.layers.len(), &mut own);
        }
        Self {
            gate_up: own.gate_up,
            activated: own.activated,
            ..Self::of(spec)
        }
    }
}
