//! Where each weight lies in the one piece of memory, and which stored tensors go there.

use std::ops::Range;

use half::bf16;

use crate::DecoderSpec;
use crate::blocks::{Decoder, Stack, Vector, Visitor};
use crate::rope::RopeTable;

/// Alignment of every weight, in bytes: that of a line of L2, and what bulk copies and tensor maps ask for.
const ALIGN: usize = 256;

/// Types of elements in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    F32,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 => size_of::<bf16>(),
            Self::F32 => size_of::<f32>(),
        }
    }
}

/// A place in device memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span {
    pub(super) fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Where a linear layer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinearSpan {
    pub(super) weight: Span,
    pub(super) bias: Option<Span>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// A stored tensor and its place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    /// As it is stored: its name, and for a vector its elements.
    pub(super) vector: Vector,
    /// Elements of a row of a matrix of as many rows; `None` for a vector.
    pub(super) cols: Option<usize>,
    /// What its elements become.
    pub(super) element: Element,
    /// Where the first goes, in bytes.
    pub(super) start: usize,
}

impl Part {
    pub(super) fn rows(&self) -> usize {
        self.vector.len
    }

    pub(super) fn span(&self) -> Span {
        Span {
            start: self.start,
            len: self.bytes(),
        }
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.rows() * self.cols.unwrap_or(1) * self.element.bytes()
    }
}

/// Places of all weights.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Of each kind of rotary positions, and each of its tables.
    pub(super) turns: Vec<Vec<Span>>,
    /// All stored tensors that every source has.
    pub(super) parts: Vec<Part>,
    /// Vectors that a source may have, which are not stored on the device.
    pub(super) optional: Vec<Vector>,
    /// Bytes of everything.
    pub(super) bytes: usize,
}

impl Layout {
    /// `None` if the weights would not fit into any memory.
    pub(super) fn new(spec: &DecoderSpec) -> Option<Self> {
        let mut places = Places::default();
        Decoder::visit(spec, &mut places).ok()?;
        let mut turns = Vec::new();
        for rope in spec.ropes() {
            let tables = rope.tables();
            let table = |table: &RopeTable| places.take(&[table.frequencies.len(), 2], Element::F32).ok();
            turns.push(tables.iter().map(table).collect::<Option<_>>()?);
        }
        Some(Self {
            turns,
            parts: places.parts,
            optional: places.optional,
            bytes: places.end,
        })
    }
}

/// Hands out places one after another.
#[derive(Debug, Default)]
pub(super) struct Places {
    parts: Vec<Part>,
    optional: Vec<Vector>,
    /// A multiple of [`ALIGN`].
    end: usize,
}

/// No memory could hold it.
#[derive(Debug)]
pub(super) struct Boundless;

impl Places {
    fn take(&mut self, shape: &[usize], element: Element) -> Result<Span, Boundless> {
        let start = self.end;
        let bytes = |shape: &[usize]| {
            let mut sizes = shape.iter();
            let len = sizes.try_fold(element.bytes(), |bytes, &n| bytes.checked_mul(n))?;
            Some((len, start.checked_add(len)?.checked_next_multiple_of(ALIGN)?))
        };
        let (len, end) = bytes(shape).ok_or(Boundless)?;
        self.end = end;
        Ok(Span { start, len })
    }

    /// Tensors one after another in a place.
    fn put(
        &mut self,
        tensors: impl IntoIterator<Item = (Vector, Option<usize>)>,
        span: Span,
        element: Element,
    ) {
        let mut start = span.start;
        for (vector, cols) in tensors {
            let part = Part {
                vector,
                cols,
                element,
                start,
            };
            start += part.bytes();
            self.parts.push(part);
        }
    }
}

impl Visitor for Places {
    type Vector = Span;
    type Linear = LinearSpan;
    type Embedding = LinearSpan;
    type Error = Boundless;

    fn vector(&mut self, vector: &Vector) -> Result<Span, Boundless> {
        let span = self.take(&[vector.len], Element::F32)?;
        self.put([(vector.clone(), None)], span, Element::F32);
        Ok(span)
    }

    fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Span>, Boundless> {
        self.optional.push(vector.clone());
        Ok(None)
    }

    fn linear(&mut self, stack: &Stack) -> Result<LinearSpan, Boundless> {
        let matrices = self.embedding(stack)?;
        if !stack.bias {
            return Ok(matrices);
        }
        let bias = self.take(&[stack.outputs()], Element::Bf16)?;
        self.put(stack.biases().map(|vector| (vector, None)), bias, Element::Bf16);
        Ok(LinearSpan {
            bias: Some(bias),
            ..matrices
        })
    }

    /// The matrices of a stack.
    fn embedding(&mut self, stack: &Stack) -> Result<LinearSpan, Boundless> {
        let weight = self.take(&[stack.outputs(), stack.inputs], Element::Bf16)?;
        let matrix = |(name, rows)| (Vector::plain(name, rows), Some(stack.inputs));
        self.put(stack.weights().map(matrix), weight, Element::Bf16);
        Ok(LinearSpan {
            weight,
            bias: None,
            outputs: stack.outputs(),
            inputs: stack.inputs,
        })
    }

    /// In the same place.
    fn tied(&mut self, embedding: &LinearSpan) -> LinearSpan {
        *embedding
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use plimsoll_kernels::Activation;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::OutputHead;
    use crate::rope::{RopeScaling, RopeSpec};
    use crate::spec::{AttentionSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, NormSpec, Projections, shared};

    fn projections(rng: &mut StdRng) -> Projections {
        [Projections::Separate, Projections::Fused][rng.random_range(0..2)]
    }

    /// Layers that differ.
    pub(in super::super) fn random_spec(rng: &mut StdRng) -> DecoderSpec {
        let norm = NormSpec {
            eps: 1e-5,
            unit_offset: rng.random(),
        };
        let layer = |rng: &mut StdRng| {
            let kv_heads = rng.random_range(1..4);
            let head_dim = 2 * rng.random_range(1..20);
            LayerSpec {
                norm,
                post_norms: rng.random(),
                mixer: Mixer::Attention(AttentionSpec {
                    heads: kv_heads * rng.random_range(1..4),
                    kv_heads,
                    head_dim,
                    window: None,
                    rope: Some(Arc::new(RopeSpec {
                        theta: 1e4,
                        rotary_dim: 2 * rng.random_range(1..=head_dim / 2),
                        scaling: RopeScaling::None,
                        query_scale: None,
                    })),
                    qk_norm: rng.random(),
                    qkv_bias: rng.random(),
                    scale: 1.0,
                    soft_cap: None,
                    sinks: rng.random(),
                    projections: projections(rng),
                }),
                mlp: Mlp::Dense(DenseMlpSpec {
                    intermediate_size: rng.random_range(1..100),
                    activation: Activation::Silu,
                    projections: projections(rng),
                }),
            }
        };
        DecoderSpec {
            vocab_size: rng.random_range(1..300),
            hidden_size: rng.random_range(1..100),
            max_position_embeddings: 100,
            embedding_scale: 1.0,
            layers: shared((0..rng.random_range(1..5)).map(|_| layer(rng))),
            final_norm: norm,
            head: [OutputHead::Own, OutputHead::Tied, OutputHead::None][rng.random_range(0..3)],
            logit_soft_cap: None,
        }
    }

    /// Every tensor has a place of its own; what lies between two is less than the alignment, but for the tables of turns,
    /// which no tensor holds.
    #[test]
    fn parts_cover_the_memory_without_overlap() {
        for seed in (0..200).chain([rand::random()]) {
            let spec = random_spec(&mut StdRng::seed_from_u64(seed));
            let layout = Layout::new(&spec).unwrap();
            let places = layout.parts.iter().map(|part| (part.start, part.bytes()));
            let turns = layout.turns.iter().flatten();
            let turns = turns.map(|span| (span.start, span.len));
            let mut places: Vec<_> = places.chain(turns).collect();
            places.sort_unstable();
            let mut end = 0;
            for (start, bytes) in places {
                assert!(start >= end && start - end < ALIGN, "seed {seed}");
                end = start + bytes;
            }
            assert!(layout.bytes >= end && layout.bytes - end < ALIGN, "seed {seed}");
        }
    }

    #[test]
    fn stacked_tensors_follow_each_other() {
        for seed in (0..50).chain([rand::random()]) {
            let spec = random_spec(&mut StdRng::seed_from_u64(seed));
            let mut places = Places::default();
            let decoder = Decoder::visit(&spec, &mut places).unwrap();
            match (spec.head, decoder.head) {
                (OutputHead::None, None) => {}
                (OutputHead::Tied, Some(head)) => assert_eq!(head, decoder.embedding, "seed {seed}"),
                (OutputHead::Own, Some(head)) => assert_ne!(head, decoder.embedding, "seed {seed}"),
                other => panic!("seed {seed}: {other:?}"),
            }
            let start = |name: String| {
                let part = places.parts.iter().find(|part| part.vector.name == name);
                part.unwrap_or_else(|| panic!("seed {seed}: {name}")).start
            };
            for (index, (layer, found)) in spec.layers.iter().zip(&decoder.layers).enumerate() {
                let name = |part: &str| format!("model.layers.{index}.{part}");
                let (attention, hidden) = (layer.attention(), spec.hidden_size);
                let (q, kv) = (attention.q_size(), attention.kv_size());
                let (qkv, gate_up) = (found.mixer.qkv, found.mlp.gate_up);
                assert_eq!(qkv.weight.len, (q + 2 * kv) * hidden * 2, "seed {seed}");
                assert_eq!(qkv.bias.is_some(), attention.qkv_bias, "seed {seed}");
                match attention.projections {
                    Projections::Fused => {
                        assert_eq!(start(name("self_attn.qkv_proj.weight")), qkv.weight.start);
                    }
                    Projections::Separate => {
                        let rows = [("q", 0), ("k", q), ("v", q + kv)];
                        for (part, row) in rows {
                            let at = start(name(&format!("self_attn.{part}_proj.weight")));
                            assert_eq!(at, qkv.weight.start + row * hidden * 2, "seed {seed}");
                            if let Some(bias) = qkv.bias {
                                let at = start(name(&format!("self_attn.{part}_proj.bias")));
                                assert_eq!(at, bias.start + row * 2, "seed {seed}");
                            }
                        }
                    }
                }
                if layer.dense_mlp().projections == Projections::Separate {
                    let up = gate_up.weight.start + layer.dense_mlp().intermediate_size * hidden * 2;
                    assert_eq!(start(name("mlp.up_proj.weight")), up, "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn what_no_memory_holds_is_no_layout() {
        let mut spec = random_spec(&mut StdRng::seed_from_u64(1));
        (spec.vocab_size, spec.hidden_size) = (1 << 28, 1 << 28);
        assert!(Layout::new(&spec).is_some());
        let mut layer = spec.layers[0].as_ref().clone();
        let attention = layer.attention_mut();
        (attention.heads, attention.kv_heads, attention.head_dim) = (1 << 28, 1 << 28, 256);
        spec.layers = shared([layer]);
        assert!(Layout::new(&spec).is_none());
    }
}
