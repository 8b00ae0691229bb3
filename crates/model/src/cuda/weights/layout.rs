//! Where each weight lies in the one piece of memory, and which stored tensors go there.

use std::ops::Range;

use half::bf16;

use crate::weights::{LayerTensors, OuterTensors, Stack, Vector};
use crate::{DecoderSpec, OutputHead};

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

    /// The same within something that begins at `base`.
    pub(super) fn after(self, base: usize) -> Self {
        Self {
            start: base + self.start,
            ..self
        }
    }
}

/// Places of all weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) turns: Span,
    pub(super) final_norm: Span,
    pub(super) embedding: Span,
    /// The embedding's where tied; a model for embeddings has none.
    pub(super) lm_head: Option<Span>,
    /// Relative to the block's start.
    pub(super) layer: LayerLayout,
    /// Where the blocks begin.
    layers_start: usize,
    /// Bytes of one block.
    layer_bytes: usize,
    /// Bytes of everything.
    pub(super) bytes: usize,
}

/// Places of one block's weights; see [`super::GpuLayer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerLayout {
    pub(super) attention_norm: Span,
    pub(super) qkv: Span,
    pub(super) qkv_bias: Option<Span>,
    pub(super) qk_norm: Option<[Span; 2]>,
    pub(super) output: Span,
    pub(super) mlp_norm: Span,
    pub(super) gate_up: Span,
    pub(super) down: Span,
}

/// A stored tensor and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// As Hugging Face checkpoints call it.
    pub(super) name: String,
    pub(super) rows: usize,
    /// Elements of a row; `None` for a vector of `rows` elements.
    pub(super) cols: Option<usize>,
    /// What its elements become.
    pub(super) element: Element,
    /// Where the first goes, in bytes.
    pub(super) start: usize,
}

impl Part {
    pub(super) fn shape(&self) -> Vec<usize> {
        std::iter::once(self.rows).chain(self.cols).collect()
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.rows * self.cols.unwrap_or(1) * self.element.bytes()
    }
}

impl Layout {
    /// `None` if the weights would not fit into any memory.
    pub(super) fn new(spec: &DecoderSpec) -> Option<Self> {
        let tensors = OuterTensors::new(spec);
        let mut cursor = Cursor::default();
        let turns = cursor.take(&[tensors.rope_factors.len, 2], Element::F32)?;
        let final_norm = cursor.vector(&tensors.final_norm)?;
        let embedding = cursor.stack(&tensors.embedding)?;
        let lm_head = match (&tensors.lm_head, spec.head) {
            (Some(stack), _) => Some(cursor.stack(stack)?),
            (None, OutputHead::None) => None,
            (None, _) => Some(embedding),
        };
        let layers_start = cursor.end;
        let (layer, layer_bytes) = LayerLayout::new(spec)?;
        let bytes = layer_bytes
            .checked_mul(spec.num_layers)?
            .checked_add(layers_start)?;
        Some(Self {
            turns,
            final_norm,
            embedding,
            lm_head,
            layer,
            layers_start,
            layer_bytes,
            bytes,
        })
    }

    /// Where block `index` begins.
    pub(super) fn layer_start(&self, index: usize) -> usize {
        self.layers_start + index * self.layer_bytes
    }

    /// All stored tensors that every source has, block by block.
    pub(super) fn parts(&self, spec: &DecoderSpec) -> impl Iterator<Item = Part> {
        let tensors = OuterTensors::new(spec);
        let mut outer = Vec::new();
        put_stack(&mut outer, &tensors.embedding, self.embedding);
        if let (Some(stack), Some(span)) = (&tensors.lm_head, self.lm_head) {
            put_stack(&mut outer, stack, span);
        }
        outer.push(vector_part(tensors.final_norm, self.final_norm, Element::F32));
        let layers = (0..spec.num_layers).flat_map(move |index| {
            let mut parts = self.layer.parts(LayerTensors::new(spec, index));
            for part in &mut parts {
                part.start += self.layer_start(index);
            }
            parts
        });
        outer.into_iter().chain(layers)
    }
}

impl LayerLayout {
    /// With the bytes of one block.
    fn new(spec: &DecoderSpec) -> Option<(Self, usize)> {
        let tensors = LayerTensors::new(spec, 0);
        let mut cursor = Cursor::default();
        let layout = Self {
            attention_norm: cursor.vector(&tensors.attention_norm)?,
            qkv: cursor.stack(&tensors.qkv)?,
            qkv_bias: match tensors.qkv.bias {
                false => None,
                true => Some(cursor.take(&[tensors.qkv.outputs()], Element::Bf16)?),
            },
            qk_norm: match &tensors.qk_norm {
                None => None,
                Some([q, k]) => Some([cursor.vector(q)?, cursor.vector(k)?]),
            },
            output: cursor.stack(&tensors.output)?,
            mlp_norm: cursor.vector(&tensors.mlp_norm)?,
            gate_up: cursor.stack(&tensors.gate_up)?,
            down: cursor.stack(&tensors.down)?,
        };
        Some((layout, cursor.end))
    }

    fn parts(&self, tensors: LayerTensors) -> Vec<Part> {
        let mut parts = Vec::new();
        for (stack, span) in [
            (&tensors.qkv, self.qkv),
            (&tensors.output, self.output),
            (&tensors.gate_up, self.gate_up),
            (&tensors.down, self.down),
        ] {
            put_stack(&mut parts, stack, span);
        }
        if let Some(span) = self.qkv_bias {
            put_biases(&mut parts, &tensors.qkv, span);
        }
        let qk_norm = tensors.qk_norm.into_iter().flatten();
        let norms = [
            (tensors.attention_norm, self.attention_norm),
            (tensors.mlp_norm, self.mlp_norm),
        ];
        let norms = norms
            .into_iter()
            .chain(qk_norm.zip(self.qk_norm.into_iter().flatten()));
        parts.extend(norms.map(|(vector, span)| vector_part(vector, span, Element::F32)));
        parts
    }
}

fn put_stack(parts: &mut Vec<Part>, stack: &Stack, span: Span) {
    let mut start = span.start;
    for (name, rows) in stack.weights() {
        let part = Part {
            name,
            rows,
            cols: Some(stack.inputs),
            element: Element::Bf16,
            start,
        };
        start += part.bytes();
        parts.push(part);
    }
}

fn put_biases(parts: &mut Vec<Part>, stack: &Stack, span: Span) {
    let mut start = span.start;
    for vector in stack.biases() {
        let len = vector.len * Element::Bf16.bytes();
        parts.push(vector_part(vector, Span { start, len }, Element::Bf16));
        start += len;
    }
}

fn vector_part(vector: Vector, span: Span, element: Element) -> Part {
    Part {
        name: vector.name,
        rows: vector.len,
        cols: None,
        element,
        start: span.start,
    }
}

/// Hands out places one after another.
#[derive(Default)]
struct Cursor {
    /// A multiple of [`ALIGN`].
    end: usize,
}

impl Cursor {
    fn vector(&mut self, vector: &Vector) -> Option<Span> {
        self.take(&[vector.len], Element::F32)
    }

    fn stack(&mut self, stack: &Stack) -> Option<Span> {
        self.take(&[stack.outputs(), stack.inputs], Element::Bf16)
    }

    fn take(&mut self, shape: &[usize], element: Element) -> Option<Span> {
        let start = self.end;
        let len = shape
            .iter()
            .try_fold(element.bytes(), |bytes, &n| bytes.checked_mul(n))?;
        self.end = start.checked_add(len)?.checked_next_multiple_of(ALIGN)?;
        Some(Span { start, len })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::rope::{RopeScaling, RopeSpec};

    pub(in super::super) fn random_spec(rng: &mut StdRng) -> DecoderSpec {
        let num_kv_heads = rng.random_range(1..4);
        DecoderSpec {
            vocab_size: rng.random_range(1..300),
            hidden_size: rng.random_range(1..100),
            intermediate_size: rng.random_range(1..100),
            num_layers: rng.random_range(1..5),
            num_heads: num_kv_heads * rng.random_range(1..4),
            num_kv_heads,
            head_dim: 2 * rng.random_range(1..20),
            rms_norm_eps: 1e-5,
            rope: RopeSpec {
                theta: 1e4,
                scaling: RopeScaling::None,
            },
            qkv_bias: rng.random(),
            qk_norm: rng.random(),
            sliding_window: None,
            head: [OutputHead::Own, OutputHead::Tied, OutputHead::None][rng.random_range(0..3)],
            max_position_embeddings: 100,
        }
    }

    /// Every tensor has a place of its own; what lies between two is less than the alignment, but for the table of turns,
    /// which no tensor holds.
    #[test]
    fn parts_cover_the_memory_without_overlap() {
        for seed in (0..200).chain([rand::random()]) {
            let spec = random_spec(&mut StdRng::seed_from_u64(seed));
            let layout = Layout::new(&spec).unwrap();
            let places = layout.parts(&spec).map(|part| (part.start, part.bytes()));
            let mut places: Vec<_> = places.chain([(layout.turns.start, layout.turns.len)]).collect();
            places.sort_unstable();
            let mut end = 0;
            for (start, bytes) in places {
                assert!(start >= end && start - end < ALIGN, "seed {seed}");
                end = start + bytes;
            }
            assert!(layout.bytes >= end && layout.bytes - end < ALIGN, "seed {seed}");
            let whole = [
                layout.embedding,
                layout.lm_head.unwrap_or(layout.embedding),
                layout.final_norm,
                layout.layer.down.after(layout.layer_start(spec.num_layers - 1)),
            ];
            assert!(whole.iter().all(|span| span.start % ALIGN == 0), "seed {seed}");
            let head = match layout.lm_head {
                Some(head) if head == layout.embedding => OutputHead::Tied,
                Some(_) => OutputHead::Own,
                None => OutputHead::None,
            };
            assert_eq!(head, spec.head, "seed {seed}");
        }
    }

    #[test]
    fn stacked_tensors_follow_each_other() {
        let mut spec = random_spec(&mut StdRng::seed_from_u64(1));
        (spec.qkv_bias, spec.num_layers) = (true, 2);
        let layout = Layout::new(&spec).unwrap();
        let start = |name: &str| {
            let part = layout.parts(&spec).find(|part| part.name == name);
            part.unwrap().start - layout.layer_start(1)
        };
        let (hidden, q, kv) = (spec.hidden_size, spec.q_size(), spec.kv_size());
        let (qkv, gate_up) = (layout.layer.qkv, layout.layer.gate_up);
        let bias = layout.layer.qkv_bias.unwrap();
        let expected = [
            ("self_attn.q_proj.weight", qkv.start),
            ("self_attn.k_proj.weight", qkv.start + q * hidden * 2),
            ("self_attn.v_proj.weight", qkv.start + (q + kv) * hidden * 2),
            ("self_attn.v_proj.bias", bias.start + (q + kv) * 2),
            ("mlp.gate_proj.weight", gate_up.start),
            (
                "mlp.up_proj.weight",
                gate_up.start + spec.intermediate_size * hidden * 2,
            ),
        ];
        for (name, at) in expected {
            assert_eq!(start(&format!("model.layers.1.{name}")), at, "{name}");
        }
        assert_eq!(qkv.len, (q + 2 * kv) * hidden * 2);
    }

    #[test]
    fn what_no_memory_holds_is_no_layout() {
        let mut spec = random_spec(&mut StdRng::seed_from_u64(1));
        spec.num_layers = 1 << 28;
        assert!(Layout::new(&spec).is_some());
        (spec.hidden_size, spec.num_heads, spec.num_kv_heads) = (1 << 28, 1 << 28, 1 << 28);
        spec.head_dim = 256;
        assert_eq!(Layout::new(&spec), None);
    }
}
