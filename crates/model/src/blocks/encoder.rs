use std::ops::Range;

use super::{Scope, Stack, Vector, Visitor};
use crate::EncoderSpec;
use crate::encoder_spec::{MergerNames, families};
use crate::shard::Shard;
use crate::spec::NormSpec;

/// An encoder of images, with `L` for each linear layer and `V` for each vector.
#[derive(Clone, Debug)]
pub(crate) struct Encoder<L, V> {
    /// The projection of patches.
    patches: L,
    /// The table of positions, row by row.
    positions: Option<V>,
    /// Before the first layer.
    first_norm: Option<EncoderNorm<V>>,
    layers: Vec<EncoderLayer<L, V>>,
    merger: Merger<L, V>,
    /// Of the layers whose output becomes rows too.
    features: Vec<Merger<L, V>>,
}

/// Attention and an MLP, each of a norm.
#[derive(Clone, Debug)]
pub(crate) struct EncoderLayer<L, V> {
    /// Patches see those of their window alone.
    pub(crate) is_windowed: bool,
    pub(crate) attention_norm: EncoderNorm<V>,
    /// q, k and v, one after the other.
    pub(crate) qkv: L,
    pub(crate) output: L,
    pub(crate) mlp_norm: EncoderNorm<V>,
    /// Gate and up, where the MLP is gated.
    pub(crate) up: L,
    pub(crate) down: L,
}

/// A norm's weight, and its bias where it is one around the mean.
#[derive(Clone, Debug)]
pub(crate) struct EncoderNorm<V> {
    pub(crate) weight: V,
    pub(crate) bias: Option<V>,
}

/// From patches that lie together to one row.
#[derive(Clone, Debug)]
pub(crate) enum Merger<L, V> {
    /// As [`MergerNames::Mlp`].
    Mlp {
        /// Of each patch, or as wide as what is merged.
        norm: EncoderNorm<V>,
        up: L,
        down: L,
    },
    /// As [`MergerNames::Mean`].
    Mean {
        last_norm: EncoderNorm<V>,
        norm: V,
        projection: L,
    },
    /// As [`MergerNames::Projected`].
    Projected { norm: V, merge: L, up: L, down: L },
}

/// The operations of an encoder's blocks on the activations of one image, which the implementation holds.
pub(crate) trait EncoderOperations<L, V> {
    type Error;

    /// From patches and their positions to the residual stream.
    fn embed(&mut self, patches: &L, positions: Option<&V>) -> Result<(), Self::Error>;

    /// Puts the norm of the residual stream in its place.
    fn normalise(&mut self, norm: &EncoderNorm<V>) -> Result<(), Self::Error>;

    /// In how many parts a layer's patches are taken from [`Self::attend`] on.
    fn parts(&self) -> usize;

    /// Queries, keys and values of all patches, from the norm of the residual stream.
    fn project(&mut self, layer: &EncoderLayer<L, V>) -> Result<(), Self::Error>;

    /// Adds their attention to the residual stream of one part of the patches.
    fn attend(&mut self, layer: &EncoderLayer<L, V>, part: usize) -> Result<(), Self::Error>;

    /// Adds the MLP of the norm of the residual stream to it, of one part of the patches.
    fn mlp(&mut self, layer: &EncoderLayer<L, V>, part: usize) -> Result<(), Self::Error>;

    /// From the residual stream to rows: embeddings (column 0), or what the decoder's layer `column - 1` adds to its output.
    fn merge(&mut self, merger: &Merger<L, V>, column: usize) -> Result<(), Self::Error>;
}

impl<L, V> Encoder<L, V> {
    /// Visits all tensors, in one order.
    pub(crate) fn visit<T: Visitor<Linear = L, Vector = V>>(
        spec: &EncoderSpec,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        // Towers are stored in floats, whatever the decoder is stored in.
        let floats = crate::Quantization::default();
        let (family, hidden) = (spec.family, spec.hidden_size);
        let scope = Scope::new(family.scope, &floats, Shard::WHOLE);
        let behind = Scope::new(families::BEHIND, &floats, Shard::WHOLE);
        let (patches, patch_bias) = family.patches;
        let patches = Stack {
            bias: patch_bias,
            ..Stack::new(vec![scope.kernel(patches, hidden, spec.patch_shape.clone())])
        };
        Ok(Self {
            patches: visitor.linear(&patches)?,
            positions: (family.positions.zip(spec.positions_per_side))
                .map(|(name, side)| Vector::table(scope.name(name), [side.pow(2), hidden]))
                .map(|table| visitor.vector(&table))
                .transpose()?,
            first_norm: (family.first_norm)
                .map(|name| EncoderNorm::visit(spec, hidden, &scope.part(name), visitor))
                .transpose()?,
            layers: (0..spec.layers)
                .map(|index| {
                    let scope = scope.part(&format!("{}.{index}", family.layers));
                    EncoderLayer::visit(spec, index, &scope, visitor)
                })
                .collect::<Result<_, _>>()?,
            merger: Merger::visit(spec, None, &scope, &behind, visitor)?,
            features: (0..spec.features.len())
                .map(|index| Merger::visit(spec, Some(index), &scope, &behind, visitor))
                .collect::<Result<_, _>>()?,
        })
    }

    /// The same with something else for each linear layer, and nothing for vectors.
    pub(crate) fn map_linear<M>(&self, of: &impl Fn(&L) -> M) -> Encoder<M, ()> {
        Encoder {
            patches: of(&self.patches),
            positions: self.positions.as_ref().map(|_| ()),
            first_norm: self.first_norm.as_ref().map(EncoderNorm::without_vectors),
            layers: (self.layers.iter())
                .map(|layer| EncoderLayer {
                    is_windowed: layer.is_windowed,
                    attention_norm: layer.attention_norm.without_vectors(),
                    qkv: of(&layer.qkv),
                    output: of(&layer.output),
                    mlp_norm: layer.mlp_norm.without_vectors(),
                    up: of(&layer.up),
                    down: of(&layer.down),
                })
                .collect(),
            merger: self.merger.map_linear(of),
            features: (self.features.iter())
                .map(|merger| merger.map_linear(of))
                .collect(),
        }
    }

    /// Some of the parts of it, in order: each is a part of a layer's patches, and there are as many as layers times [`EncoderOperations::parts`].
    pub(crate) fn forward<O: EncoderOperations<L, V>>(
        &self,
        spec: &EncoderSpec,
        parts: Range<usize>,
        step: &mut O,
    ) -> Result<(), O::Error> {
        let of_layer = step.parts();
        for at in parts {
            let (index, part) = (at / of_layer, at % of_layer);
            let layer = &self.layers[index];
            if at == 0 {
                step.embed(&self.patches, self.positions.as_ref())?;
                if let Some(norm) = &self.first_norm {
                    step.normalise(norm)?;
                }
            }
            if part == 0 {
                step.project(layer)?;
            }
            step.attend(layer, part)?;
            step.mlp(layer, part)?;
            if part + 1 < of_layer {
                continue;
            }
            if let Some(feature) = spec.features.iter().position(|&feature| feature == index) {
                step.merge(&self.features[feature], 1 + feature)?;
            }
            if index + 1 == self.layers.len() {
                step.merge(&self.merger, 0)?;
            }
        }
        Ok(())
    }
}

impl<L, V> EncoderLayer<L, V> {
    fn visit<T: Visitor<Linear = L, Vector = V>>(
        spec: &EncoderSpec,
        index: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let (family, hidden, inner) = (spec.family, spec.hidden_size, spec.intermediate_size);
        let [attention_norm, mlp_norm] = family.norms;
        // Of all outputs together, divided among as many tensors as there are names.
        let mut linear = |names: &[&str], outputs: usize, inputs| {
            let part = |name: &&str| scope.matrix(name, outputs / names.len(), inputs);
            visitor.linear(&Stack {
                bias: family.has_biases,
                ..Stack::new(names.iter().map(part).collect())
            })
        };
        let (qkv, output) = (
            linear(family.qkv, 3 * hidden, hidden)?,
            linear(&[family.output], hidden, hidden)?,
        );
        let (up, down) = (
            linear(family.up, family.up.len() * inner, hidden)?,
            linear(&[family.down], hidden, inner)?,
        );
        Ok(Self {
            is_windowed: spec.is_windowed(index),
            attention_norm: EncoderNorm::visit(spec, hidden, &scope.part(attention_norm), visitor)?,
            qkv,
            output,
            mlp_norm: EncoderNorm::visit(spec, hidden, &scope.part(mlp_norm), visitor)?,
            up,
            down,
        })
    }
}

impl<V> EncoderNorm<V> {
    fn visit<T: Visitor<Vector = V>>(
        spec: &EncoderSpec,
        len: usize,
        scope: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        Ok(Self {
            weight: visitor.vector(&Vector::norm(scope.name("weight"), len, spec.norm()))?,
            bias: (spec.family.norms_are_centred)
                .then(|| visitor.vector(&Vector::plain(scope.name("bias"), len)))
                .transpose()?,
        })
    }

    fn without_vectors(&self) -> EncoderNorm<()> {
        EncoderNorm {
            weight: (),
            bias: self.bias.as_ref().map(|_| ()),
        }
    }
}

impl<L, V> Merger<L, V> {
    /// Of the last layer, or of one whose output becomes rows too.
    fn visit<T: Visitor<Linear = L, Vector = V>>(
        spec: &EncoderSpec,
        feature: Option<usize>,
        scope: &Scope<'_>,
        behind: &Scope<'_>,
        visitor: &mut T,
    ) -> Result<Self, T::Error> {
        let (hidden, out) = (spec.hidden_size, spec.out_size);
        let merged = hidden * spec.merged();
        let plain = NormSpec {
            eps: spec.merger_eps,
            unit_offset: false,
        };
        Ok(match &spec.family.merger {
            MergerNames::Mlp {
                scope: last,
                norm,
                up,
                down,
                features,
            } => {
                let scope = match feature {
                    None => scope.part(last),
                    Some(index) => scope.part(&format!("{}.{index}", features.unwrap_or(last))),
                };
                // Of features the norm is of what is merged.
                let normed = if feature.is_some() { merged } else { hidden };
                let biased = |matrix| Stack {
                    bias: true,
                    ..Stack::new(vec![matrix])
                };
                Self::Mlp {
                    norm: EncoderNorm::visit(spec, normed, &scope.part(norm), visitor)?,
                    up: visitor.linear(&biased(scope.matrix(up, merged, merged)))?,
                    down: visitor.linear(&biased(scope.matrix(down, out, merged)))?,
                }
            }
            MergerNames::Mean {
                last_norm,
                norm,
                projection,
            } => {
                // Stored less 1, as all norms of the decoder are.
                let offset = NormSpec {
                    unit_offset: true,
                    ..plain
                };
                Self::Mean {
                    last_norm: EncoderNorm::visit(spec, hidden, &scope.part(last_norm), visitor)?,
                    norm: visitor.vector(&Vector::norm(behind.name(norm), hidden, offset))?,
                    projection: visitor
                        .linear(&Stack::new(vec![behind.parameter(projection, out, hidden)]))?,
                }
            }
            MergerNames::Projected {
                norm,
                merge,
                up,
                down,
            } => {
                let matrix = |name, outputs, inputs| Stack::new(vec![behind.matrix(name, outputs, inputs)]);
                Self::Projected {
                    norm: visitor.vector(&Vector::norm(behind.name(norm), hidden, plain))?,
                    merge: visitor.linear(&matrix(merge, hidden, merged))?,
                    up: visitor.linear(&matrix(up, out, hidden))?,
                    down: visitor.linear(&matrix(down, out, out))?,
                }
            }
        })
    }

    fn map_linear<M>(&self, of: &impl Fn(&L) -> M) -> Merger<M, ()> {
        match self {
            Self::Mlp { norm, up, down } => Merger::Mlp {
                norm: norm.without_vectors(),
                up: of(up),
                down: of(down),
            },
            Self::Mean {
                last_norm,
                norm: _,
                projection,
            } => Merger::Mean {
                last_norm: last_norm.without_vectors(),
                norm: (),
                projection: of(projection),
            },
            Self::Projected {
                norm: _,
                merge,
                up,
                down,
            } => Merger::Projected {
                norm: (),
                merge: of(merge),
                up: of(up),
                down: of(down),
            },
        }
    }
}
