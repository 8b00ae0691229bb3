//! A model's weights in device memory.

mod convert;
mod layout;
mod transfer;

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::WeightType;
use plimsoll_kernels::cuda::{
    Fp8Scaling, FusedKernels, GgufKernels, GpuKvElement, GpuLinear, GpuMatrix, GpuWeight, Int4Group,
    Int4Kernels, MoeKernels, PairAxes, rope_frequencies,
};

use super::laps::Laps;
use crate::blocks::{self, Matrix, Stack, Vector, Visitor};
use crate::model::Description;
use crate::quantization::Fp8Scales;
use crate::rope::RopeTable;
use crate::weights::{Checked, DUMMY_SCALE, Scales, mix};
use crate::{DecoderSpec, LoadFormat, LoadOptions, LoadProgress, ModelConfig, ModelError};
use convert::{Job, widen_int4, widen_mxfp4};
use layout::{Boundless, Element, KeptScales, Layout, LinearSpan, MatrixSpan, Part, Places, Span, Stored};
pub(super) use layout::{products, rows_together};
use transfer::transfer;

/// All weights of a model on a GPU, in one piece of memory. Matrices are row-major, `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct GpuWeights {
    pub(super) spec: DecoderSpec,
    /// The embedding is `[vocab, hidden]`.
    pub(super) decoder: blocks::Decoder<GpuLinear, GpuLinear, GpuVector>,
    /// Of a model that takes images.
    pub(super) encoder: Option<GpuEncoderWeights>,
    /// Of each kind of rotary positions, its tables.
    pub(super) ropes: Vec<Vec<GpuRopeTable>>,
    /// Of the keys and of the values of each layer in a cache of 8 bits; otherwise 1.
    pub(super) kv_scales: Vec<[f32; 2]>,
    parts: Vec<Part>,
    slab: Arc<GpuSlab>,
}

/// A vector of `f32`.
#[derive(Clone, Debug)]
pub(super) struct GpuVector {
    slab: Arc<GpuSlab>,
    span: Span,
}

/// A [`crate::rope::RopeTable`].
#[derive(Debug)]
pub(super) struct GpuRopeTable {
    /// [`rope_frequencies`] of the frequencies: `[rotary_dim / 2, 2]`.
    pub(super) frequencies: GpuVector,
    /// Multiplies cosines and sines.
    pub(super) factor: f32,
    /// Where positions have three numbers.
    pub(super) axes: Option<PairAxes>,
}

impl GpuVector {
    pub(super) fn slice(&self) -> GpuSlice<'_, f32> {
        view(&self.slab, self.span)
    }
}

/// An encoder of images.
pub(super) type GpuEncoderWeights = blocks::Encoder<GpuLinear, GpuVector>;

/// One layer.
pub(super) type GpuLayer = blocks::Layer<GpuLinear, GpuVector>;

/// Bytes of a model's weights; `None` if no memory could hold them.
pub(super) fn weights_bytes(config: &ModelConfig) -> Option<usize> {
    Layout::new(&config.spec, config.encoder.as_ref()).map(|layout| layout.bytes)
}

impl GpuWeights {
    /// Loads the weights of a model directory or a GGUF file, as far as `spec` has them, which may be a rank's part; `progress` hears
    /// of every few megabytes.
    ///
    /// # Errors
    /// [`ModelError`], which names what is at fault. [`ModelError::Oom`] if the weights do not fit.
    pub(super) fn load(
        description: &Description,
        spec: DecoderSpec,
        options: &LoadOptions,
        kv_element: GpuKvElement,
        gpu: &Gpu,
        kernels: &FusedKernels,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let format = options.format;
        let source = description.source(format)?;
        let mut tensors = Checked::new(&*source);
        let images = description.about.config().encoder.as_ref();
        let layout = Layout::new(&spec, images);
        let bytes = layout.as_ref().map_or(u64::MAX, |layout| layout.bytes as u64);
        let Some(layout) = layout.filter(|_| bytes <= gpu.info().total_bytes) else {
            return Err(gpu.budget().oom(Component::Weights, bytes).into());
        };
        // Matrices that are made up are made on the device.
        let made_up = |part: &Part| format != LoadFormat::Auto && matches!(part.stored, Stored::Matrix(_));
        let stored = layout.parts.iter().filter(|part| !made_up(part));
        let jobs: Vec<Job<'_>> = stored
            .map(|part| Job::new(&mut tensors, part))
            .collect::<Result<_, _>>()?;
        let mut factors = None;
        for vector in &layout.optional {
            let tensor = tensors.optional_vector(vector)?;
            factors = tensor.map(|tensor| tensor.widen()).transpose()?;
        }
        let kv_scales = (0..spec.layers.len()).map(|layer| match kv_element {
            GpuKvElement::Bf16 => Ok([1.0; 2]),
            GpuKvElement::Fp8 => kv_scales(&mut tensors, layer),
        });
        let kv_scales = kv_scales.collect::<Result<_, ModelError>>()?;
        tensors.kv_scales(&layout.kv_scales)?;
        layout.idle.iter().for_each(|name| tensors.idle(name));
        tensors.finish()?;
        log_narrowed(&jobs);

        let mut laps = Laps::begin();
        let slab = Arc::new(gpu.alloc(Component::Weights, layout.bytes)?);
        laps.end("memory of weights");
        let mut views = Views {
            places: Places::default(),
            slab: &slab,
        };
        let Ok(decoder) = blocks::Decoder::visit(&spec, &mut views) else {
            return Err(gpu.budget().oom(Component::Weights, bytes).into());
        };
        let visited = images.map(|images| blocks::Encoder::visit(images, &mut views));
        let Ok(encoder) = visited.transpose() else {
            return Err(gpu.budget().oom(Component::Weights, bytes).into());
        };
        let mut ropes = Vec::new();
        let has_axes = images.is_some() && spec.has_axes();
        for (rope, spans) in spec.ropes().into_iter().zip(&layout.frequencies) {
            let tables = rope.scaled_tables(factors.as_deref());
            let axes = rope.sections.map(|sections| sections.axes()).unwrap_or_default();
            let axes = has_axes.then(|| PairAxes::new(&axes));
            let upload = |(table, &span): (&RopeTable, &Span)| {
                let slab = Arc::clone(&slab);
                let frequencies = GpuVector { slab, span };
                gpu.upload(&rope_frequencies(&table.frequencies), frequencies.slice())?;
                let factor = table.attention_factor;
                Ok(GpuRopeTable {
                    frequencies,
                    factor,
                    axes,
                })
            };
            ropes.push(
                tables
                    .iter()
                    .zip(spans)
                    .map(upload)
                    .collect::<Result<_, GpuError>>()?,
            );
        }
        if let LoadFormat::Dummy { seed } = format {
            fill_matrices(&layout.parts, spec.shard.rank, &slab, gpu, kernels, seed)?;
            gpu.synchronize()?;
            laps.end("random matrices");
        }
        upload_orders(&layout.parts, &jobs, &slab, gpu)?;
        let stored = jobs.iter().map(|job| job.stored_bytes(job.part().rows()) as u64);
        let mut done = LoadProgress {
            done: 0,
            // Of all ranks, which read as much each.
            total: stored.sum::<u64>() * spec.shard.ranks as u64,
        };
        transfer(gpu, &slab, &jobs, &options.cancel, |bytes| {
            done.done += bytes as u64;
            progress(done);
        })?;
        laps.end("stored weights");
        Ok(Self {
            spec,
            decoder,
            encoder,
            ropes,
            kv_scales,
            parts: layout.parts,
            slab,
        })
    }

    /// For layers without rotary positions.
    pub(super) fn no_frequencies(&self) -> GpuSlice<'_, f32> {
        self.slab.slice().range(0..0)
    }

    /// The same, of positions.
    pub(super) fn no_axes(&self) -> Option<PairAxes> {
        let mut tables = self.ropes.iter().flatten();
        let has_axes = tables.any(|table| table.axes.is_some());
        has_axes.then(|| PairAxes::new(&[]))
    }

    /// A stored tensor as it lies in device memory.
    pub(super) fn tensor(&self, gpu: &Gpu, name: &str) -> Result<Option<Vec<f32>>, GpuError> {
        let Some(part) = self.parts.iter().find(|part| part.name() == name) else {
            return Ok(None);
        };
        let span = part.span();
        Ok(Some(match (part.element, part.scales, &part.stored) {
            (Element::Fp8, Some(place), Stored::Matrix(matrix)) => {
                let codes = gpu.download(view::<u8>(&self.slab, span))?;
                let scales = gpu.download(view(&self.slab, place.span(0..part.rows())))?;
                let scales = place.without_padding(&scales);
                let kept = matrix.format.kept_scales().unwrap_or(Fp8Scales::Channel);
                let scales = Scales::new(scales, kept, matrix);
                let rows = codes.chunks_exact(matrix.inputs).enumerate();
                rows.flat_map(|(row, codes)| scales.widen(row, codes)).collect()
            }
            (Element::Mxfp4, _, Stored::Matrix(matrix)) => {
                let rows = gpu.download(view::<u8>(&self.slab, span))?;
                widen_mxfp4(&rows, matrix.inputs).concat()
            }
            (Element::Int4 | Element::ExpertInt4, Some(place), Stored::Matrix(matrix)) => {
                let Some(KeptScales::Int4(group)) = part.kept() else {
                    unreachable!("what has codes of four bits has groups")
                };
                let inputs = matrix.inputs;
                let codes = gpu.download(view::<u8>(&self.slab, span))?;
                let words = gpu.download(view::<u32>(&self.slab, place.span(0..part.rows())))?;
                let order = part.order.map(|span| gpu.download(view::<u32>(&self.slab, span)));
                let order = order.transpose()?.unwrap_or_else(|| (0..inputs as u32).collect());
                let mut elements = Vec::with_capacity(matrix.outputs * inputs);
                for widened in widen_int4(part.element, &codes, &words, group, inputs) {
                    let mut stored = vec![0.0; inputs];
                    for (element, &input) in widened.into_iter().zip(&order) {
                        stored[input as usize] = element;
                    }
                    elements.extend(stored);
                }
                elements
            }
            (Element::Gguf(format), _, Stored::Matrix(matrix)) => {
                let rows = gpu.download(view::<u8>(&self.slab, span))?;
                let mut elements = vec![0.0; matrix.outputs * matrix.inputs];
                let pairs = rows.chunks_exact(part.row_bytes());
                for (row, out) in pairs.zip(elements.chunks_exact_mut(matrix.inputs)) {
                    format.unpack_row(row, out);
                }
                elements
            }
            (Element::Bf16, ..) => {
                let values = gpu.download(view::<bf16>(&self.slab, span))?;
                values.into_iter().map(bf16::to_f32).collect()
            }
            _ => gpu.download(view(&self.slab, span))?,
        }))
    }
}

/// Says once for each type what becomes of matrices that are not kept as they are stored.
fn log_narrowed(jobs: &[Job<'_>]) {
    let mut counts: Vec<(WeightType, usize)> = Vec::new();
    for dtype in jobs.iter().filter_map(Job::narrowed_from) {
        match counts.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, count)) => *count += 1,
            None => counts.push((dtype, 1)),
        }
    }
    for (dtype, count) in counts {
        tracing::info!("{count} matrices in {} become bfloat16 on the GPU", dtype.name());
    }
}

/// What the elements of a layer's keys and values are multiplied by, as calibration found it; 1 where nobody did.
fn kv_scales(tensors: &mut Checked<'_>, layer: usize) -> Result<[f32; 2], ModelError> {
    let mut scale = |part: &str, module: &str| {
        // Beside the projections, as vLLM's own attention has it, and of a projection, as ModelOpt.
        let names = ["", "attn.", module].map(|at| format!("model.layers.{layer}.self_attn.{at}{part}"));
        for name in &names {
            if let Some(scale) = tensors.optional_scale(name)? {
                return Ok(scale);
            }
        }
        Ok::<_, ModelError>(1.0)
    };
    Ok([scale("k_scale", "k_proj.")?, scale("v_scale", "v_proj.")?])
}

/// The orders of inputs that matrices have of their own. Those that are stacked are one product and have one.
fn upload_orders(parts: &[Part], jobs: &[Job<'_>], slab: &GpuSlab, gpu: &Gpu) -> Result<(), ModelError> {
    let mut known: HashMap<usize, (String, Vec<u32>)> = HashMap::new();
    for part in parts {
        let (Some(span), Stored::Matrix(matrix)) = (part.order, &part.stored) else {
            continue;
        };
        // Made-up matrices have none.
        let job = jobs.iter().find(|job| job.part().start == part.start);
        let name = job.map_or_else(|| part.name(), |job| job.name().to_owned());
        let order = job.and_then(Job::order).map(<[u32]>::to_vec);
        let order = order.unwrap_or_else(|| (0..matrix.inputs as u32).collect());
        match known.get(&span.start) {
            None => gpu.upload(&order, view(slab, span))?,
            Some((_, other)) if *other == order => {}
            Some((other, _)) => {
                return Err(ModelError::Weights {
                    name,
                    message: format!(
                        "its inputs are in another order than those of `{other}`, and both are one product on a GPU; \
                         --device cpu takes it"
                    ),
                });
            }
        }
        known.insert(span.start, (name, order));
    }
    Ok(())
}

/// Random matrices that keep the variance of what they are applied to: on all ranks the same, but for those of which each has a part.
fn fill_matrices(
    parts: &[Part],
    rank: usize,
    slab: &GpuSlab,
    gpu: &Gpu,
    kernels: &FusedKernels,
    seed: u64,
) -> Result<(), GpuError> {
    /// Of random codes less 8.
    const CODE_DEVIATION: f32 = 4.64;
    let (mut experts, mut int4, mut gguf) = (None, None, None);
    // Ranks may differ in vectors.
    let matrices = parts.iter().filter_map(|part| match &part.stored {
        Stored::Matrix(matrix) => Some((part, matrix)),
        Stored::Vector(_) => None,
    });
    for (index, (part, matrix)) in (0_u64..).zip(matrices) {
        let of_rank = matrix.share.as_ref().map_or(0, |_| (rank as u64) << 32);
        let seed = seed.wrapping_add(index).wrapping_add(of_rank);
        // Its inputs are those of all ranks.
        let inputs = matrix.stored_shape()[1];
        let deviation = 1.0 / (inputs as f32).sqrt();
        match part.scale_span() {
            None if part.element == Element::Mxfp4 => {
                if experts.is_none() {
                    experts = Some(MoeKernels::load(gpu)?);
                }
                let out = view(slab, part.span());
                experts
                    .iter()
                    .try_for_each(|experts| experts.fill_mxfp4(out, matrix.inputs, seed, deviation))?;
            }
            None if let Element::Gguf(format) = part.element => {
                if gguf.is_none() {
                    gguf = Some(GgufKernels::load(gpu)?);
                }
                let out = view(slab, part.span());
                gguf.iter()
                    .try_for_each(|gguf| gguf.fill(out, matrix.inputs, format, seed, deviation))?;
            }
            None => kernels.fill_random(view(slab, part.span()), seed, deviation)?,
            Some(span) if matches!(part.element, Element::Int4 | Element::ExpertInt4) => {
                if int4.is_none() {
                    int4 = Some(Int4Kernels::load(gpu)?);
                }
                int4.iter()
                    .try_for_each(|int4| int4.fill(view(slab, part.span()), seed))?;
                // The mean of codes is 7.5; with one zero for all, all outputs would share a component that grows from layer to layer.
                let words = [7, 8].map(|zero| Int4Group::word(deviation / CODE_DEVIATION, zero));
                let zero = |group: u64| (mix(seed.wrapping_add(group)) & 1) as usize;
                let count = (span.len / size_of::<u32>()) as u64;
                let groups: Vec<u32> = (0..count).map(|group| words[zero(group)]).collect();
                gpu.upload(&groups, view(slab, span))?;
            }
            Some(span) => {
                kernels.fill_random_e4m3(view(slab, part.span()), seed, deviation / DUMMY_SCALE)?;
                let scales = vec![DUMMY_SCALE; span.len / size_of::<f32>()];
                gpu.upload(&scales, view(slab, span))?;
            }
        }
    }
    Ok(())
}

/// Makes weights of the places in memory that is there.
struct Views<'a> {
    places: Places,
    slab: &'a Arc<GpuSlab>,
}

impl Views<'_> {
    fn weight<T: Pod>(&self, span: Span) -> GpuWeight<T> {
        let element = size_of::<T>();
        GpuWeight::new(self.slab, span.start / element..(span.start + span.len) / element)
    }

    fn at(&self, span: &LinearSpan) -> GpuLinear {
        let mut first = 0;
        let pieces = span.pieces.iter().map(|piece| {
            let bytes = size_of::<bf16>();
            let bias = span.bias.map(|bias| Span {
                start: bias.start + first * bytes,
                len: piece.outputs * bytes,
            });
            first += piece.outputs;
            let bias = bias.map(|bias| self.weight(bias));
            GpuLinear::new(self.matrix(piece), bias, piece.outputs, piece.inputs)
        });
        let mut pieces: Vec<GpuLinear> = pieces.collect();
        match pieces.len() {
            1 => pieces.remove(0),
            _ => {
                let inputs = pieces[0].inputs();
                GpuLinear::new(GpuMatrix::Parts(pieces), None, first, inputs)
            }
        }
    }

    fn matrix(&self, span: &MatrixSpan) -> GpuMatrix {
        match span.scales.map(|scales| (scales.span, scales.kept)) {
            None => match span.element {
                Element::Mxfp4 => GpuMatrix::Mxfp4(self.weight(span.weight)),
                Element::Gguf(format) => GpuMatrix::Gguf {
                    rows: self.weight(span.weight),
                    format,
                },
                _ => GpuMatrix::Bf16(self.weight(span.weight)),
            },
            Some((scales, KeptScales::Fp8(kept))) => GpuMatrix::Fp8 {
                values: self.weight(span.weight),
                scales: self.weight(scales),
                scaling: match kept {
                    Fp8Scales::Block => Fp8Scaling::Blocks,
                    Fp8Scales::Tensor | Fp8Scales::Channel => Fp8Scaling::Rows,
                },
            },
            Some((groups, KeptScales::Int4(group))) if span.element == Element::ExpertInt4 => {
                GpuMatrix::ExpertInt4 {
                    codes: self.weight(span.weight),
                    groups: self.weight(groups),
                    group,
                }
            }
            Some((groups, KeptScales::Int4(group))) => GpuMatrix::Int4 {
                codes: self.weight(span.weight),
                groups: self.weight(groups),
                group,
                order: span.order.map(|order| self.weight(order)),
            },
        }
    }
}

impl Visitor for Views<'_> {
    type Vector = GpuVector;
    type Linear = GpuLinear;
    type Embedding = GpuLinear;
    type Error = Boundless;

    fn vector(&mut self, vector: &Vector) -> Result<GpuVector, Boundless> {
        let span = self.places.vector(vector)?;
        Ok(GpuVector {
            slab: Arc::clone(self.slab),
            span,
        })
    }

    fn optional_vector(&mut self, _: &Vector) -> Result<Option<GpuVector>, Boundless> {
        Ok(None)
    }

    fn linear(&mut self, stack: &Stack) -> Result<GpuLinear, Boundless> {
        let span = self.places.linear(stack)?;
        Ok(self.at(&span))
    }

    fn embedding(&mut self, table: &Matrix) -> Result<GpuLinear, Boundless> {
        let span = self.places.embedding(table)?;
        Ok(self.at(&span))
    }

    /// The same memory.
    fn tied(&mut self, embedding: &GpuLinear) -> GpuLinear {
        embedding.clone()
    }
}

fn view<T: Pod>(slab: &GpuSlab, span: Span) -> GpuSlice<'_, T> {
    slab.slice::<u8>().range(span.range()).cast()
}

#[cfg(test)]
mod tests;
