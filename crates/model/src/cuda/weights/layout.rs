//! Where each weight lies in the one piece of memory, and which stored tensors go there.

mod scales;

use std::ops::Range;

use half::bf16;
use plimsoll_kernels::GgufFormat;
use plimsoll_kernels::cuda::{INT4_ROWS, expert_int4_pitch, int4_pitch, mxfp4_pitch};

use crate::blocks::{Decoder, Encoder, Matrix, Stack, Vector, Visitor};
use crate::quantization::MatrixFormat;
use crate::rope::RopeTable;
use crate::{DecoderSpec, EncoderSpec};
pub(super) use scales::{KeptScales, ScalePlace, ScaleSpan};

/// Alignment of every weight, in bytes: that of a line of L2, and what bulk copies and tensor maps ask for.
const ALIGN: usize = 256;

/// Types of elements in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    F32,
    /// `e4m3`.
    Fp8,
    /// Of experts' matrices: `e2m1`, with exponents behind the codes of each eight rows.
    Mxfp4,
    /// Of matrices: integers of four bits.
    Int4,
    /// The same of experts' matrices, in smaller windows.
    ExpertInt4,
    /// Of matrices: a block type of GGUF's.
    Gguf(GgufFormat),
}

impl Element {
    /// What those of a matrix become.
    fn of(matrix: &Matrix) -> Self {
        match (KeptScales::of(matrix.format), matrix.gguf()) {
            (Some(KeptScales::Fp8(_)), _) => Self::Fp8,
            (Some(KeptScales::Int4(_)), _) if matrix.expert.is_some() => Self::ExpertInt4,
            (Some(KeptScales::Int4(_)), _) => Self::Int4,
            (None, Some(format)) => Self::Gguf(format),
            (None, None) if matrix.format == MatrixFormat::Mxfp4 => Self::Mxfp4,
            (None, None) => Self::Bf16,
        }
    }

    /// Rows that are interleaved in memory: a range of rows that is written begins and ends at multiples of it.
    pub(super) fn rows_together(self) -> usize {
        match self {
            Self::Mxfp4 | Self::Int4 | Self::ExpertInt4 => INT4_ROWS,
            Self::Bf16 | Self::F32 | Self::Fp8 | Self::Gguf(_) => 1,
        }
    }

    /// Bytes of a row of so many; `None` if no memory could hold it.
    pub(super) fn row_bytes(self, elements: usize) -> Option<usize> {
        match self {
            Self::Bf16 => elements.checked_mul(size_of::<bf16>()),
            Self::F32 => elements.checked_mul(size_of::<f32>()),
            Self::Fp8 => Some(elements),
            Self::Mxfp4 => Some(mxfp4_pitch(elements)),
            Self::Int4 => Some(int4_pitch(elements)),
            Self::ExpertInt4 => Some(expert_int4_pitch(elements)),
            Self::Gguf(format) => Some(format.pitch(elements)),
        }
    }
}

/// Of stacked matrices, neighbours that are kept in one type of elements: each of these is a product.
pub(in crate::cuda) fn products(parts: &[Matrix]) -> impl DoubleEndedIterator<Item = &[Matrix]> {
    parts.chunk_by(|a, b| Element::of(a) == Element::of(b))
}

/// How many rows of a matrix are interleaved in memory; its outputs are a multiple.
pub(in crate::cuda) fn rows_together(matrix: &Matrix) -> usize {
    Element::of(matrix).rows_together()
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinearSpan {
    /// Its outputs, some after the others: as many pieces as there are types of elements in a row.
    pub(super) pieces: Vec<MatrixSpan>,
    /// Of all outputs.
    pub(super) bias: Option<Span>,
}

/// Where matrices of one type of elements lie that are one product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatrixSpan {
    pub(super) weight: Span,
    /// Of the weight.
    pub(super) element: Element,
    /// Of a weight in eight bits or four.
    pub(super) scales: Option<ScaleSpan>,
    /// Of the order of inputs, where a weight in four bits has one of its own: `u32`.
    pub(super) order: Option<Span>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// A stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stored {
    Vector(Vector),
    Matrix(Matrix),
}

/// A stored tensor and its place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) stored: Stored,
    /// What its elements become.
    pub(super) element: Element,
    /// Where the first goes, in bytes.
    pub(super) start: usize,
    /// Where the scales of elements of few bits go.
    pub(super) scales: Option<ScalePlace>,
    /// Where the order of its inputs goes, if it has one of its own: one place for all that are stacked.
    pub(super) order: Option<Span>,
}

impl Part {
    pub(super) fn name(&self) -> String {
        match &self.stored {
            Stored::Vector(vector) => vector.name.clone(),
            Stored::Matrix(matrix) => matrix.name(),
        }
    }

    pub(super) fn rows(&self) -> usize {
        match &self.stored {
            Stored::Vector(vector) => vector.len,
            Stored::Matrix(matrix) => matrix.outputs,
        }
    }

    /// Bytes of device memory of a row of a matrix, or of an element of a vector.
    pub(super) fn row_bytes(&self) -> usize {
        let elements = match &self.stored {
            Stored::Vector(_) => 1,
            Stored::Matrix(matrix) => matrix.inputs,
        };
        let bytes = self.element.row_bytes(elements);
        bytes.expect("places are handed out where there is memory")
    }

    pub(super) fn span(&self) -> Span {
        Span {
            start: self.start,
            len: self.bytes(),
        }
    }

    /// Where some of its rows go, and the scales that begin there.
    pub(super) fn spans(&self, rows: Range<usize>) -> (Span, Option<Span>) {
        let elements = Span {
            start: self.start + rows.start * self.row_bytes(),
            len: rows.len() * self.row_bytes(),
        };
        (elements, self.scales.map(|place| place.span(rows)))
    }

    /// Bytes of device memory, without scales.
    pub(super) fn bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// What it has scales for.
    pub(super) fn kept(&self) -> Option<KeptScales> {
        match &self.stored {
            Stored::Matrix(matrix) => KeptScales::of(matrix.format),
            Stored::Vector(_) => None,
        }
    }

    /// Where its scales go.
    pub(super) fn scale_span(&self) -> Option<Span> {
        self.scales.map(|place| place.span(0..self.rows()))
    }
}

/// Places of all weights.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Of each kind of rotary positions, and each of its tables.
    pub(super) frequencies: Vec<Vec<Span>>,
    /// All stored tensors that every source has.
    pub(super) parts: Vec<Part>,
    /// Vectors that a source may have, which are not stored on the device.
    pub(super) optional: Vec<Vector>,
    /// Names of the scales of keys and values that the checkpoint says it stores.
    pub(super) kv_scales: Vec<String>,
    /// Names of tensors that checkpoints may have, and that nothing reads.
    pub(super) idle: Vec<String>,
    /// Bytes of everything.
    pub(super) bytes: usize,
}

impl Layout {
    /// Of a model, with its encoder if it is served; `None` if the weights would not fit into any memory.
    pub(super) fn new(spec: &DecoderSpec, encoder: Option<&EncoderSpec>) -> Option<Self> {
        let mut places = Places::default();
        Decoder::visit(spec, &mut places).ok()?;
        if let Some(encoder) = encoder {
            Encoder::visit(encoder, &mut places).ok()?;
        }
        let mut frequencies = Vec::new();
        for rope in spec.ropes() {
            let tables = rope.tables();
            let table = |table: &RopeTable| places.take(table.frequencies.len(), 2, Element::F32).ok();
            frequencies.push(tables.iter().map(table).collect::<Option<_>>()?);
        }
        Some(Self {
            frequencies,
            parts: places.parts,
            optional: places.optional,
            kv_scales: places.kv_scales,
            idle: places.idle,
            bytes: places.end,
        })
    }
}

/// Hands out places one after another.
#[derive(Debug, Default)]
pub(super) struct Places {
    parts: Vec<Part>,
    optional: Vec<Vector>,
    kv_scales: Vec<String>,
    idle: Vec<String>,
    /// A multiple of [`ALIGN`].
    end: usize,
}

/// No memory could hold it.
#[derive(Debug)]
pub(super) struct Boundless;

impl Places {
    fn take(&mut self, rows: usize, width: usize, element: Element) -> Result<Span, Boundless> {
        let start = self.end;
        let bytes = || {
            let len = element.row_bytes(width)?.checked_mul(rows)?;
            Some((len, start.checked_add(len)?.checked_next_multiple_of(ALIGN)?))
        };
        let (len, end) = bytes().ok_or(Boundless)?;
        self.end = end;
        Ok(Span { start, len })
    }

    /// Vectors one after another.
    fn put_vectors(
        &mut self,
        vectors: impl Iterator<Item = Vector> + Clone,
        element: Element,
    ) -> Result<Span, Boundless> {
        let len = vectors.clone().map(|vector| vector.len).sum();
        let span = self.take(1, len, element)?;
        let mut start = span.start;
        for vector in vectors {
            let part = Part {
                stored: Stored::Vector(vector),
                element,
                start,
                scales: None,
                order: None,
            };
            start += part.bytes();
            self.parts.push(part);
        }
        Ok(span)
    }

    /// Matrices of the same inputs and type of elements one after another, and then their scales.
    pub(super) fn put_matrices(&mut self, matrices: &[Matrix]) -> Result<MatrixSpan, Boundless> {
        let Matrix { inputs, format, .. } = matrices[0];
        let in_experts = matrices[0].expert.is_some();
        let outputs = matrices.iter().map(|matrix| matrix.outputs).sum();
        let kept = KeptScales::of(format);
        let element = Element::of(&matrices[0]);
        let weight = self.take(outputs, inputs, element)?;
        let scales = match kept {
            None => None,
            Some(kept) => {
                let shape = matrices.iter().map(|matrix| kept.shape(matrix.outputs, inputs));
                let rows = shape.map(|[rows, _]| rows).sum();
                let span = self.take(rows, kept.stride(inputs), Element::F32)?;
                Some(ScaleSpan { span, kept })
            }
        };
        let order = match format {
            // Numbers of as many bytes. What goes to experts is never put into another order.
            MatrixFormat::Int4(format) if format.ordered && !in_experts => {
                Some(self.take(1, inputs, Element::F32)?)
            }
            _ => None,
        };
        let mut start = weight.start;
        let mut scale_start = scales.map_or(0, |scales| scales.span.start);
        for matrix in matrices {
            let part = Part {
                element,
                start,
                scales: kept.map(|scales| ScalePlace::new(scales, matrix, scale_start)),
                order,
                stored: Stored::Matrix(matrix.clone()),
            };
            start += part.bytes();
            scale_start += part.scale_span().map_or(0, |span| span.len);
            self.parts.push(part);
        }
        Ok(MatrixSpan {
            weight,
            element,
            scales,
            order,
            outputs,
            inputs,
        })
    }
}

impl Visitor for Places {
    type Vector = Span;
    type Linear = LinearSpan;
    type Embedding = LinearSpan;
    type Error = Boundless;

    fn vector(&mut self, vector: &Vector) -> Result<Span, Boundless> {
        self.put_vectors(std::iter::once(vector.clone()), Element::F32)
    }

    fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Span>, Boundless> {
        self.optional.push(vector.clone());
        Ok(None)
    }

    fn linear(&mut self, stack: &Stack) -> Result<LinearSpan, Boundless> {
        self.kv_scales.extend_from_slice(&stack.kv_scales);
        let pieces = products(&stack.parts).map(|matrices| self.put_matrices(matrices));
        let pieces = pieces.collect::<Result<_, _>>()?;
        let bias = match stack.bias {
            true => Some(self.put_vectors(stack.biases(), Element::Bf16)?),
            false => None,
        };
        Ok(LinearSpan { pieces, bias })
    }

    fn embedding(&mut self, table: &Matrix) -> Result<LinearSpan, Boundless> {
        let table = self.put_matrices(std::slice::from_ref(table))?;
        Ok(LinearSpan {
            pieces: vec![table],
            bias: None,
        })
    }

    fn idle(&mut self, name: String) {
        self.idle.push(name);
    }

    /// In the same place.
    fn tied(&mut self, embedding: &LinearSpan) -> LinearSpan {
        embedding.clone()
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
    use crate::Shard;
    use crate::quantization::{
        Fp8Scales, Int4Format, Int4Groups, Int4Packing, MatrixFormat, ModuleNames, Quantization,
        QuantizationGroup,
    };
    use crate::rope::{RopeScaling, RopeSpec};
    use crate::spec::{
        AttentionSpec, DenseMlpSpec, LayerSpec, Mixer, Mlp, NormSpec, Projections, Values, shared,
    };

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
                    kv_shard: Shard::WHOLE,
                    head_dim,
                    window: None,
                    rope: Some(Arc::new(RopeSpec {
                        theta: 1e4,
                        rotary_dim: 2 * rng.random_range(1..=head_dim / 2),
                        scaling: RopeScaling::None,
                        query_scale: None,
                        sections: None,
                    })),
                    qk_norm: rng.random(),
                    values: Values::Projected,
                    shares_kv: None,
                    qkv_bias: rng.random(),
                    output_bias: rng.random(),
                    scale: 1.0,
                    soft_cap: None,
                    sinks: rng.random(),
                    gated: false,
                    projections: projections(rng),
                }),
                mlp: Mlp::Dense(DenseMlpSpec {
                    intermediate_size: rng.random_range(1..100),
                    activation: Activation::Silu,
                    projections: projections(rng),
                }),
                scalar: false,
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
            per_layer: None,
            shard: Shard::WHOLE,
            vocab_shard: Shard::WHOLE,
            quantization: quantization(rng),
        }
    }

    /// None, or one that leaves some matrices as they are.
    fn quantization(rng: &mut StdRng) -> Quantization {
        let format = match rng.random_range(0..6) {
            0 => MatrixFormat::Plain,
            1 => MatrixFormat::ToFp8,
            5 => MatrixFormat::Int4(Int4Format {
                packing: Int4Packing::Gptq { zeros_less_one: true },
                groups: [Int4Groups::Of32, Int4Groups::Of64, Int4Groups::Channel][rng.random_range(0..3)],
                ordered: rng.random(),
            }),
            scales => MatrixFormat::Fp8 {
                scales: [Fp8Scales::Tensor, Fp8Scales::Channel, Fp8Scales::Block][scales - 2],
                input_scale: rng.random(),
            },
        };
        let ignored = ["lm_head", "re:.*down_proj"].map(str::to_owned);
        Quantization {
            groups: vec![QuantizationGroup {
                modules: ModuleNames::All,
                format,
            }],
            ignored: ModuleNames::named(&ignored).unwrap(),
            kv_scales: rng.random(),
            ..Quantization::default()
        }
    }

    /// Every tensor has a place of its own; what lies between two is less than the alignment, but for the tables of frequencies,
    /// which no tensor holds.
    #[test]
    fn parts_cover_the_memory_without_overlap() {
        for seed in (0..200).chain([rand::random()]) {
            let spec = random_spec(&mut StdRng::seed_from_u64(seed));
            let layout = Layout::new(&spec, None).unwrap();
            let parts = layout.parts.iter();
            let spans = parts.flat_map(|part| std::iter::once(part.span()).chain(part.scale_span()));
            let frequencies = layout.frequencies.iter().flatten().copied();
            let orders = layout.parts.iter().filter_map(|part| part.order);
            let places = spans.chain(frequencies).chain(orders);
            let mut places: Vec<_> = places.map(|span| (span.start, span.len)).collect();
            places.sort_unstable();
            // What is stacked shares an order.
            places.dedup();
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
                let part = places.parts.iter().find(|part| part.name() == name);
                part.unwrap_or_else(|| panic!("seed {seed}: {name}")).start
            };
            for (index, (layer, found)) in spec.layers.iter().zip(&decoder.layers).enumerate() {
                let name = |part: &str| format!("model.layers.{index}.{part}");
                let (attention, hidden) = (layer.attention().unwrap(), spec.hidden_size);
                let (q, kv) = (attention.q_size(), attention.kv_size());
                let bias = found.mixer.projections().bias;
                let qkv = found.mixer.projections().pieces[0];
                let gate_up = found.mlp.of_all().unwrap().gate_up.pieces[0];
                let row_bytes = qkv.element.row_bytes(hidden).unwrap();
                assert_eq!(qkv.weight.len, (q + 2 * kv) * row_bytes, "seed {seed}");
                assert_eq!(bias.is_some(), attention.qkv_bias, "seed {seed}");
                match attention.projections {
                    Projections::Fused => {
                        assert_eq!(start(name("self_attn.qkv_proj.weight")), qkv.weight.start);
                    }
                    Projections::Separate => {
                        let rows = [("q", 0), ("k", q), ("v", q + kv)];
                        for (part, row) in rows {
                            let at = start(name(&format!("self_attn.{part}_proj.weight")));
                            assert_eq!(at, qkv.weight.start + row * row_bytes, "seed {seed}");
                            if let Some(bias) = bias {
                                let at = start(name(&format!("self_attn.{part}_proj.bias")));
                                assert_eq!(at, bias.start + row * 2, "seed {seed}");
                            }
                        }
                    }
                }
                if layer.dense_mlp().projections == Projections::Separate {
                    let up = gate_up.weight.start + layer.dense_mlp().intermediate_size * row_bytes;
                    assert_eq!(start(name("mlp.up_proj.weight")), up, "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn what_no_memory_holds_is_no_layout() {
        let mut spec = random_spec(&mut StdRng::seed_from_u64(1));
        (spec.vocab_size, spec.hidden_size) = (1 << 28, 1 << 28);
        assert!(Layout::new(&spec, None).is_some());
        let mut layer = spec.layers[0].as_ref().clone();
        let attention = layer.attention_mut();
        (attention.heads, attention.kv_heads, attention.head_dim) = (1 << 28, 1 << 28, 256);
        spec.layers = shared([layer]);
        assert!(Layout::new(&spec, None).is_none());
    }
}
