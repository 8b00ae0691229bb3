use super::{Scope, Stack, Vector, Visitor};
use crate::EncoderSpec;
use crate::shard::Shard;

/// An encoder of images, with `L` for each linear layer and `V` for each vector.
#[derive(Clone, Debug)]
pub(crate) struct Encoder<L, V> {
    /// The projection of patches.
    patches: L,
    /// The table of positions, row by row.
    positions: V,
    layers: Vec<EncoderLayer<L, V>>,
    merger: Merger<L, V>,
    /// Of the layers whose output becomes rows too.
    features: Vec<Merger<L, V>>,
}

/// Attention and an MLP, each of a norm.
#[derive(Clone, Debug)]
pub(crate) struct EncoderLayer<L, V> {
    pub(crate) attention_norm: LayerNorm<V>,
    /// q, k and v, stored as one.
    pub(crate) qkv: L,
    pub(crate) output: L,
    pub(crate) mlp_norm: LayerNorm<V>,
    pub(crate) up: L,
    pub(crate) down: L,
}

/// A norm's weight and bias.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm<V> {
    pub(crate) weight: V,
    pub(crate) bias: V,
}

/// From patches that lie together to one row.
#[derive(Clone, Debug)]
pub(crate) struct Merger<L, V> {
    /// Of each patch, or as wide as what is merged.
    pub(crate) norm: LayerNorm<V>,
    pub(crate) up: L,
    pub(crate) down: L,
}

/// The operations of an encoder's blocks on the activations of one image, which the implementation holds.
pub(crate) trait EncoderOperations<L, V> {
    type Error;

    /// From patches and their positions to the residual stream.
    fn embed(&mut self, patches: &L, positions: &V) -> Result<(), Self::Error>;

    /// Adds the attention of the norm of the residual stream to it.
    fn attend(&mut self, layer: &EncoderLayer<L, V>) -> Result<(), Self::Error>;

    /// Adds the MLP of the norm of the residual stream to it.
    fn mlp(&mut self, layer: &EncoderLayer<L, V>) -> Result<(), Self::Error>;

    /// From the residual stream to rows: embeddings (part 0), or what the decoder's layer `part - 1` adds to its output.
    fn merge(&mut self, merger: &Merger<L, V>, part: usize) -> Result<(), Self::Error>;
}

impl<L, V> Encoder<L, V> {
    /// Visits all tensors, in one order.
    pub(crate) fn visit<T>(spec: &EncoderSpec, visitor: &mut T) -> Result<Self, T::Error>
    where
        T: Visitor<Linear = L, Vector = V>,
    {
        // Towers are stored in floats, whatever the decoder is stored in.
        let floats = crate::Quantization::default();
        let scope = Scope::new("visual.", &floats, Shard::WHOLE);
        let hidden = spec.hidden_size;
        let embed = scope.part("patch_embed");
        let positions = [spec.positions_per_side.pow(2), hidden];
        Ok(Self {
            patches: visitor.linear(&biased(embed.kernel("proj", hidden, spec.patch_shape)))?,
            positions: visitor.vector(&Vector::table(scope.name("pos_embed.weight"), positions))?,
            layers: (0..spec.layers)
                .map(|index| EncoderLayer::visit(spec, &scope.part(&format!("blocks.{index}")), visitor))
                .collect::<Result<_, _>>()?,
            merger: Merger::visit(spec, false, &scope.part("merger"), visitor)?,
            features: (0..spec.features.len())
                .map(|index| {
                    let scope = scope.part(&format!("deepstack_merger_list.{index}"));
                    Merger::visit(spec, true, &scope, visitor)
                })
                .collect::<Result<_, _>>()?,
        })
    }

    /// The same with something else for each linear layer, and nothing for vectors.
    pub(crate) fn map_linear<M>(&self, of: &impl Fn(&L) -> M) -> Encoder<M, ()> {
        let norm = |_: &LayerNorm<V>| LayerNorm { weight: (), bias: () };
        let merger = |merger: &Merger<L, V>| Merger {
            norm: norm(&merger.norm),
            up: of(&merger.up),
            down: of(&merger.down),
        };
        Encoder {
            patches: of(&self.patches),
            positions: (),
            layers: (self.layers.iter())
                .map(|layer| EncoderLayer {
                    attention_norm: norm(&layer.attention_norm),
                    qkv: of(&layer.qkv),
                    output: of(&layer.output),
                    mlp_norm: norm(&layer.mlp_norm),
                    up: of(&layer.up),
                    down: of(&layer.down),
                })
                .collect(),
            merger: merger(&self.merger),
            features: self.features.iter().map(merger).collect(),
        }
    }

    /// All of it.
    pub(crate) fn forward<O: EncoderOperations<L, V>>(
        &self,
        spec: &EncoderSpec,
        step: &mut O,
    ) -> Result<(), O::Error> {
        step.embed(&self.patches, &self.positions)?;
        for (index, layer) in self.layers.iter().enumerate() {
            step.attend(layer)?;
            step.mlp(layer)?;
            if let Some(feature) = spec.features.iter().position(|&feature| feature == index) {
                step.merge(&self.features[feature], 1 + feature)?;
            }
        }
        step.merge(&self.merger, 0)
    }
}

impl<L, V> EncoderLayer<L, V> {
    fn visit<T>(spec: &EncoderSpec, scope: &Scope<'_>, visitor: &mut T) -> Result<Self, T::Error>
    where
        T: Visitor<Linear = L, Vector = V>,
    {
        let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
        let mut linear =
            |name: &str, outputs, inputs| visitor.linear(&biased(scope.matrix(name, outputs, inputs)));
        let (qkv, output) = (
            linear("attn.qkv", 3 * hidden, hidden)?,
            linear("attn.proj", hidden, hidden)?,
        );
        let (up, down) = (
            linear("mlp.linear_fc1", inner, hidden)?,
            linear("mlp.linear_fc2", hidden, inner)?,
        );
        Ok(Self {
            attention_norm: LayerNorm::visit(spec, hidden, &scope.part("norm1"), visitor)?,
            qkv,
            output,
            mlp_norm: LayerNorm::visit(spec, hidden, &scope.part("norm2"), visitor)?,
            up,
            down,
        })
    }
}

impl<V> LayerNorm<V> {
    fn visit<T>(spec: &EncoderSpec, len: usize, scope: &Scope<'_>, visitor: &mut T) -> Result<Self, T::Error>
    where
        T: Visitor<Vector = V>,
    {
        Ok(Self {
            weight: visitor.vector(&Vector::norm(scope.name("weight"), len, spec.norm()))?,
            bias: visitor.vector(&Vector::plain(scope.name("bias"), len))?,
        })
    }
}

impl<L, V> Merger<L, V> {
    fn visit<T>(
        spec: &EncoderSpec,
        norm_is_of_merged: bool,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error>
    where
        T: Visitor<Linear = L, Vector = V>,
    {
        let merged = spec.hidden_size * spec.merged();
        let normed = if norm_is_of_merged {
            merged
        } else {
            spec.hidden_size
        };
        Ok(Self {
            norm: LayerNorm::visit(spec, normed, &scope.part("norm"), visitor)?,
            up: visitor.linear(&biased(scope.matrix("linear_fc1", merged, merged)))?,
            down: visitor.linear(&biased(scope.matrix("linear_fc2", spec.out_size, merged)))?,
        })
    }
}

/// One matrix and its bias.
fn biased(matrix: super::Matrix) -> Stack {
    Stack {
        bias: true,
        ..Stack::new(vec![matrix])
    }
}
