mod experts;
mod head;
mod layers;

use half::bf16;
use plimsoll_core::{Component, KvConfig};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuArena, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::Activation;
use plimsoll_kernels::cuda::{
    DecodeKernels, DeltaKernels, FusedKernels, GpuKv, GpuKvElement, GpuLinear, GpuMatrix, GpuTokens,
    LinearOutput, LinearScratch, LinearUse, Linears, PrefillKernels, SampleKernels,
};

use super::experts::Experts;
use super::input::{StepInput, StepInputs};
use super::masks::Masks;
use super::output::Outputs;
use super::scores::{ScoreSlices, Scores};
use super::states::States;
use super::step::{Activations, StepLayout, dequantised, dequantised_head};
use super::vectors::Vectors;
use super::weights::{GpuLayer, GpuWeights};
use crate::blocks::{Mixer, Operations, Widths};
use crate::spec::AttentionSpec;
use crate::state::LayerPlace;
use head::{Head, Logits};
use layers::{Kind, Step};

/// What the kernels of a step work on.
#[derive(Debug)]
pub(super) struct StepState {
    pub(super) kv: GpuSlab,
    pub(super) kv_config: KvConfig,
    pub(super) kv_element: GpuKvElement,
    /// Of all slots.
    pub(super) states: States,
    /// Where each layer's keys and values are, or its states.
    pub(super) places: Vec<LayerPlace>,
    /// Longest context that is served, in tokens.
    pub(super) max_model_len: usize,
    pub(super) inputs: StepInputs,
    pub(super) outputs: Outputs,
    pub(super) masks: Masks,
    pub(super) scores: Scores,
    /// Of a model for embeddings.
    pub(super) vectors: Option<Vectors>,
    /// Of the attention of decoding runs; zero between launches.
    pub(super) counters: GpuSlab,
}

impl StepState {
    /// K and V of layer `column` of each page: `[num_pages][kv_heads][block_size][head_dim]` each, with these scales.
    fn layer_kv(&self, column: usize, spec: &AttentionSpec, [k_scale, v_scale]: [f32; 2]) -> GpuKv<'_> {
        let KvConfig {
            num_pages,
            block_size,
            ..
        } = self.kv_config;
        let len = num_pages * block_size.tokens() * spec.kv_size() * self.kv_element.bytes();
        let (all, start) = (self.kv.slice(), 2 * column * len);
        GpuKv {
            k: all.range(start..start + len),
            v: all.range(start + len..start + 2 * len),
            element: self.kv_element,
            k_scale,
            v_scale,
        }
    }
}

/// The network on a GPU: the launches of a step, in order.
#[derive(Debug)]
pub(super) struct Decoder {
    gpu: Gpu,
    weights: GpuWeights,
    /// The first layer of each distinct specification and formats, and which of them each layer is like.
    kinds: Vec<usize>,
    kind_of: Vec<usize>,
    /// A model for embeddings has no head, and samples nothing.
    head: Option<Head>,
    fused: FusedKernels,
    linears: Linears,
    /// Of a model that has any.
    experts: Option<Experts>,
    pub(super) decode: DecodeKernels,
    pub(super) prefill: PrefillKernels,
    /// Of a model that has layers with states, or gated attention.
    delta: Option<DeltaKernels>,
}

/// Numbers of rows that linear layers are measured for: those of decode steps, and of prompts.
const MEASURED_ROWS: [usize; 16] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 8192];
/// Most rows that are sampled from are fewer.
const MEASURED_HEAD_ROWS: usize = 256;
/// Most bytes of device memory that this takes while the model is loaded: with the libraries' workspace, and what allocators round up
/// to, it stays below a GiB beside the weights.
const MEASURING_BYTES: usize = 896 << 20;

impl Decoder {
    /// Loads the other kernels.
    pub(super) fn new(gpu: &Gpu, weights: GpuWeights, fused: FusedKernels) -> Result<Self, DeviceError> {
        let workspace = gpu.alloc(Component::Runtime, Linears::WORKSPACE_BYTES)?;
        let layers = &weights.decoder.layers;
        let mut kinds: Vec<usize> = Vec::new();
        let mut kind_of = Vec::with_capacity(layers.len());
        for (index, layer) in layers.iter().enumerate() {
            let known = kinds.iter().position(|&first| is_of_kind(layer, &layers[first]));
            kind_of.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(index);
            }
        }
        let mut decoder = Self {
            gpu: gpu.clone(),
            kind_of,
            kinds,
            head: match &weights.decoder.head {
                None => None,
                Some(linear) => Some(Head {
                    linear: linear.clone(),
                    sampler: SampleKernels::load(gpu)?,
                }),
            },
            experts: Experts::load(gpu, &weights.decoder.layers)?,
            fused,
            linears: Linears::load(gpu, workspace)?,
            decode: DecodeKernels::load(gpu)?,
            prefill: PrefillKernels::load(gpu)?,
            delta: weights
                .spec
                .is_hybrid()
                .then(|| DeltaKernels::load(gpu))
                .transpose()?,
            weights,
        };
        decoder.measure_linears()?;
        Ok(decoder)
    }

    /// Finds the fastest way for each linear layer and number of rows.
    fn measure_linears(&mut self) -> Result<(), DeviceError> {
        let GpuWeights { spec, decoder, .. } = &self.weights;
        let widths = Widths::of(spec);
        let widest = widths.hidden.max(widths.activated).max(widths.attended);
        // Of 16 bits; logits of routers have 32.
        let outputs = widths
            .gate_up
            .max(widths.qkv)
            .max(widths.hidden)
            .max(2 * widths.experts);
        let head: Vec<_> = self.head.iter().map(|head| &head.linear).collect();
        let codes = dequantised(&Widths::beside_experts(spec))
            .unwrap_or(0)
            .max(dequantised_head(spec));
        let logits = head.len() * MEASURED_HEAD_ROWS * spec.vocab_size * size_of::<f32>();
        let taken = |rows: usize| {
            let out = (rows * outputs * size_of::<bf16>()).max(logits);
            [rows * widest * size_of::<bf16>(), out]
        };
        // More are computed as these are.
        let fits = |rows: &&usize| {
            taken(**rows).iter().sum::<usize>() + codes * size_of::<bf16>() <= MEASURING_BYTES
        };
        let most = MEASURED_ROWS.iter().rfind(fits).copied().unwrap_or(1);
        let [_, bytes] = taken(most);
        // Beside the weights there is room for this, or there would be none for KV.
        let x = self
            .gpu
            .alloc(Component::Arena, most * widest * size_of::<bf16>())?;
        let out = self.gpu.alloc(Component::Arena, bytes)?;
        self.fused.fill_random(x.slice(), 0, 1.0)?;
        let weights = self.gpu.alloc(Component::Arena, codes * size_of::<bf16>())?;
        let scratch = LinearScratch {
            x: x.slice(),
            out: out.slice(),
            weights: weights.slice(),
        };
        let layers = &decoder.layers;
        let qkv = by_shape(layers, |layer| match &layer.mixer {
            Mixer::Attention(block) => Some(&block.qkv),
            Mixer::DeltaNet(block) => Some(&block.qkvz),
        });
        let state_gates = by_shape(layers, |layer| match &layer.mixer {
            Mixer::Attention(_) => None,
            Mixer::DeltaNet(block) => Some(&block.ba),
        });
        let output = by_shape(layers, |layer| match &layer.mixer {
            Mixer::Attention(block) => Some(&block.output),
            Mixer::DeltaNet(block) => Some(&block.output),
        });
        let gate_up = by_shape(layers, |layer| Some(&layer.mlp.of_all()?.gate_up));
        let down = by_shape(layers, |layer| Some(&layer.mlp.of_all()?.down));
        let routers = self.experts.iter().flat_map(Experts::routers);
        let routers = alike(routers);
        let plain = |layers, output| LinearUse {
            layers,
            output,
            rows: &MEASURED_ROWS,
        };
        let mut uses = Vec::new();
        let activations = [Activation::Silu, Activation::GeluTanh];
        let used = |activation: &Activation| {
            let mut mlps = spec.layers.iter().filter_map(|layer| layer.mlp_of_all());
            mlps.any(|mlp| mlp.activation == *activation)
        };
        for (groups, kind) in [
            (&qkv, LinearOutput::Bf16),
            (&state_gates, LinearOutput::Bf16),
            (&output, LinearOutput::Bf16),
            (&gate_up, LinearOutput::Bf16),
            (&down, LinearOutput::Bf16),
            (&routers, LinearOutput::F32),
        ] {
            uses.extend(groups.iter().map(|layers| plain(layers, kind)));
        }
        let whole = by_shape(layers, |layer| {
            let gate_up = &layer.mlp.of_all()?.gate_up;
            (gate_up.products().len() == 1).then_some(gate_up)
        });
        for activation in activations.into_iter().filter(used) {
            let kind = LinearOutput::Glu(activation);
            uses.extend(whole.iter().map(|layers| plain(layers, kind)));
        }
        if !head.is_empty() {
            uses.push(LinearUse {
                rows: MEASURED_ROWS
                    .split_at(MEASURED_ROWS.partition_point(|&rows| rows <= MEASURED_HEAD_ROWS))
                    .0,
                ..plain(&head, LinearOutput::F32)
            });
        }
        self.linears.measure(&uses, scratch)?;
        for choice in self.linears.choices() {
            tracing::debug!(%choice, "linear layer");
        }
        Ok(())
    }

    /// Where it runs.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A stored tensor as it lies in device memory.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<Vec<f32>>, GpuError> {
        self.weights.tensor(&self.gpu, name)
    }

    /// Launches a whole step: the batch through all layers, its KV into the cache, logits and samples of the rows that are
    /// asked for, or vectors. With `logits` those are taken out instead of sampled from, which waits for them. Rows that wait
    /// for masks are not sampled from: that is [`Self::sample_behind`]'s.
    pub(super) fn step(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
        logits: Option<&mut Vec<f32>>,
    ) -> Result<(), DeviceError> {
        let spec = &self.weights.spec;
        let (layout, memory) = self.memory(input, state, arena)?;
        // SAFETY: the slot is packed again when this step has ended.
        let scores = unsafe { state.scores.send(input, layout.scores.within(memory))? };
        let act = layout.activations(memory);
        let Some(normed) = self.forward(input, state, scores.as_ref(), act)? else {
            return Ok(());
        };
        let given = layout.given.within(memory);
        let Some(head) = &self.head else {
            return self.pool(input, state, normed, given);
        };
        let (width, vocab) = (spec.hidden_size, spec.vocab_size);
        let room = layout.head_room(memory);
        if let Some(scores) = scores {
            let rows = normed.range(input.samples * width..normed.len());
            self.score(head, input, state, rows, &scores, Logits { out: given, room })?;
            state.scores.fetch(input.slot, &scores)?;
        }
        if input.samples > 0 {
            let found = given.range(0..input.samples * vocab);
            let rows = normed.range(0..input.samples * width);
            self.logits(head, rows, Logits { out: found, room })?;
            match logits {
                Some(out) => *out = self.gpu.download(found)?,
                None if input.deferred.is_some() => {}
                None => self.sample(head, input, state, found)?,
            }
        }
        Ok(())
    }

    /// All that a step takes from its arena.
    fn memory<'a>(
        &self,
        input: &StepInput,
        state: &StepState,
        arena: &'a mut GpuArena,
    ) -> Result<(StepLayout, GpuSlice<'a, u8>), DeviceError> {
        arena.reset();
        let layout = StepLayout::of(&self.weights.spec, input, state.inputs.planners());
        let layout = layout.ok_or_else(|| self.gpu.budget().oom(Component::Arena, u64::MAX))?;
        Ok((layout, arena.alloc(layout.bytes)?))
    }

    /// Samples the rows of the step launched last that waited for masks, which were sent, or that its graph skipped. `arena` has
    /// not been used since.
    pub(super) fn sample_behind(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
    ) -> Result<(), DeviceError> {
        let Some(head) = &self.head else { return Ok(()) };
        // The same memory again, also under a graph.
        let (layout, memory) = self.memory(input, state, arena)?;
        let logits = layout.given.within(memory);
        let logits = logits.range(0..input.samples * self.weights.spec.vocab_size);
        self.sample(head, input, state, logits)?;
        Ok(())
    }

    /// Runs all layers. Returns the normalised rows that are given out, if there are any: first those to sample from or to
    /// pool, then those to be scored.
    fn forward<'a>(
        &self,
        input: &StepInput,
        state: &StepState,
        scores: Option<&ScoreSlices<'_>>,
        act: Activations<'a>,
    ) -> Result<Option<GpuSlice<'a, bf16>>, DeviceError> {
        let GpuWeights { spec, decoder, .. } = &self.weights;
        let tokens = state.inputs.device(input.tokens);
        let tokens = GpuTokens {
            tokens,
            prev_sampled: state.outputs.sampled(),
            resolved: tokens,
        };
        let (table, scale) = (&decoder.embedding, spec.embedding_scale);
        match table.matrix() {
            GpuMatrix::Gguf { .. } => self.linears.gguf().embedding(table, tokens, scale, act.hidden)?,
            _ => self.fused.embedding(table.weight(), tokens, scale, act.hidden)?,
        }
        let kinds = self.kinds.iter().map(|&first| {
            let layer = &decoder.layers[first];
            Kind::new(self, layer, input.rows, state)
        });
        let mut step = Step {
            decoder: self,
            kinds: kinds.collect(),
            input,
            state,
            scores,
            act,
            rows: input.rows,
            is_fresh: true,
            layer: 0,
        };
        decoder.forward(spec, &mut step)?;
        let given = step.rows_given();
        Ok((given > 0).then(|| step.act.normed.range(0..given * spec.hidden_size)))
    }
}

/// Whether what is chosen for one layer is right for another: formats may differ where a checkpoint leaves some matrices in floats.
fn is_of_kind(layer: &GpuLayer, other: &GpuLayer) -> bool {
    let qkv = |layer: &GpuLayer| layer.mixer.attention().map(|block| block.qkv.clone());
    let gate_up = |layer: &GpuLayer| layer.mlp.of_all().map(|mlp| mlp.gate_up.clone());
    let are_alike = |pair: [Option<GpuLinear>; 2]| match pair {
        [Some(a), Some(b)] => a.is_like(&b),
        [a, b] => a.is_none() && b.is_none(),
    };
    layer.spec == other.spec
        && are_alike([qkv(layer), qkv(other)])
        && are_alike([gate_up(layer), gate_up(other)])
}

/// Products of one shape, whose weights a measurement takes in turn.
fn by_shape<'a>(
    layers: &'a [GpuLayer],
    pick: impl Fn(&'a GpuLayer) -> Option<&'a GpuLinear>,
) -> Vec<Vec<&'a GpuLinear>> {
    alike(layers.iter().filter_map(pick).flat_map(GpuLinear::products))
}

fn alike<'a>(linears: impl Iterator<Item = &'a GpuLinear>) -> Vec<Vec<&'a GpuLinear>> {
    let mut groups: Vec<Vec<&GpuLinear>> = Vec::new();
    for linear in linears {
        match groups.iter_mut().find(|group| group[0].is_like(linear)) {
            Some(group) => group.push(linear),
            None => groups.push(vec![linear]),
        }
    }
    groups
}
