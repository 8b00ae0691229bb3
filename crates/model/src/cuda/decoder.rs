mod attention;
mod beside;
mod chain;
mod experts;
mod head;
mod images;
mod layers;
mod measure;
mod ranks;
mod sum;

use half::bf16;
use plimsoll_core::{Component, KvConfig};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuArena, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{
    DecodeKernels, DeltaKernels, FusedKernels, GpuKv, GpuKvElement, GpuTokens, GpuVocabulary, HostCopies,
    LinearLibrary, LinearWays, Linears, PrefillKernels, PrefillMaps, SampleKernels, SentRoom,
};

use super::encoder::{EncoderState, Products};
use super::experts::Experts;
use super::input::{StepInput, StepInputs};
use super::laps::Laps;
use super::link::RankLink;
use super::loads::Loads;
use super::masks::Masks;
use super::output::Outputs;
use super::scores::{ScoreSlices, Scores};
use super::states::States;
use super::step::{Activations, StepLayout};
use super::vectors::Vectors;
use super::weights::{GpuLayer, GpuWeights};
use crate::blocks::Operations;
use crate::spec::AttentionSpec;
use crate::state::LayerPlace;
use crate::tables::LayerPage;
use crate::{DecoderSpec, ModelError};
use head::{Head, Logits};
use images::RowsOfImage;
use layers::{Kind, Step};
use sum::DeltaSum;

/// What the kernels of a step work on.
#[derive(Debug)]
pub(super) struct StepState {
    pub(super) kv: GpuSlab,
    pub(super) kv_config: KvConfig,
    pub(super) kv_element: GpuKvElement,
    /// As [`crate::spec::DecoderSpec::kv_column`].
    pub(super) kv_column: usize,
    /// Of all slots.
    pub(super) states: States,
    /// Where each layer's keys and values are, or its states.
    pub(super) places: Vec<LayerPlace>,
    /// Of each layer, what prefill attention copies keys and values by; as [`Decoder::kv_maps`] makes them.
    pub(super) kv_maps: Vec<Option<PrefillMaps>>,
    /// Longest context that is served, in tokens.
    pub(super) max_model_len: usize,
    /// Of a model that takes images.
    pub(super) encoder: Option<EncoderState>,
    pub(super) inputs: StepInputs,
    pub(super) outputs: Outputs,
    pub(super) masks: Masks,
    pub(super) scores: Scores,
    /// Of a model for embeddings.
    pub(super) vectors: Option<Vectors>,
    /// Of the attention of decoding runs; zero between launches.
    pub(super) counters: GpuSlab,
    /// Of layers with experts.
    pub(super) loads: Loads,
    /// Where the other rank sends its halves of sums: held for it.
    pub(super) _sent: Option<SentRoom>,
}

impl StepState {
    /// K and V of the layer that is in `page`, `[kv_heads][tokens of a slice][head_dim]` each, with these scales. Layers that are
    /// all of one width are column by column one after the other, keys first. Pages of others are one after the other, first those of all
    /// keys: what a page has is its own, whichever layers it serves.
    fn layer_kv(&self, page: LayerPage, spec: &AttentionSpec, [k_scale, v_scale]: [f32; 2]) -> GpuKv<'_> {
        let KvConfig {
            num_pages,
            block_size,
            groups,
            ..
        } = &self.kv_config;
        let (own, column) = (page.slice_size.tokens() * spec.kv_size(), page.column);
        let (start, block_stride, to_values) = match groups.has_wide_layers() {
            false => (2 * column * num_pages * own, own, num_pages * own),
            true => {
                let of_column = self.kv_column * block_size.tokens();
                let stride = groups.columns_per_page() * of_column;
                (column * of_column, stride, num_pages * stride)
            }
        };
        let len = match num_pages {
            0 => 0,
            pages => (pages - 1) * block_stride + own,
        };
        let of = |start: usize| {
            let element = self.kv_element.bytes();
            self.kv.slice().range(start * element..(start + len) * element)
        };
        GpuKv {
            k: of(start),
            v: of(start + to_values),
            block_stride,
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
    /// Where it meets the other ranks, if there are any.
    link: Option<RankLink>,
    weights: GpuWeights,
    /// The first layer of each distinct specification and formats, and which of them each layer is like.
    kinds: Vec<usize>,
    kind_of: Vec<usize>,
    /// Layers that launch all that any layer does: the first two of each kind, as before the very first nothing is added to the
    /// residual stream, and the last, which goes on with the rows that are given out alone.
    samples: Vec<usize>,
    /// A model for embeddings has no head, and samples nothing.
    head: Option<Head>,
    fused: FusedKernels,
    linears: Linears,
    /// Whether this process measured them.
    measures: bool,
    /// Of a model that has any.
    experts: Option<Experts>,
    pub(super) decode: DecodeKernels,
    pub(super) prefill: PrefillKernels,
    /// Of a model that has layers with states, or gated attention.
    delta: Option<DeltaKernels>,
}

impl Decoder {
    /// Loads the other kernels, and measures linear layers unless these ways hold.
    pub(super) fn new(
        gpu: &Gpu,
        weights: GpuWeights,
        fused: FusedKernels,
        library: &LinearLibrary,
        link: Option<RankLink>,
        linear_ways: Option<&LinearWays>,
    ) -> Result<Self, ModelError> {
        let mut laps = Laps::begin();
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
        let is_sample = |&index: &usize| {
            let before = kind_of[..index].iter().filter(|kind| **kind == kind_of[index]);
            before.count() < 2 || index + 1 == kind_of.len()
        };
        let samples = (0..kind_of.len()).filter(is_sample).collect();
        let mut decoder = Self {
            gpu: gpu.clone(),
            link,
            samples,
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
            linears: Linears::load_with(library, gpu, workspace)?,
            measures: false,
            decode: DecodeKernels::load(gpu)?,
            prefill: PrefillKernels::load(gpu)?,
            delta: weights
                .spec
                .is_hybrid()
                .then(|| DeltaKernels::load(gpu))
                .transpose()?,
            weights,
        };
        laps.end("other kernels");
        decoder.measures = decoder.choose_linear_ways(linear_ways)?;
        laps.end(match decoder.measures {
            true => "measurement of linear layers",
            false => "linear layers as an earlier start measured them",
        });
        Ok(decoder)
    }

    /// What was measured of the linear layers; `None` where that of an earlier process held.
    pub(super) fn measured_linear_ways(&self) -> Option<LinearWays> {
        self.measures.then(|| self.linears.ways())
    }

    /// Of a model that takes images.
    pub(super) fn encoder(&self) -> Option<Products<'_>> {
        let weights = self.weights.encoder.as_ref()?;
        Some(Products {
            linears: &self.linears,
            weights,
            fused: &self.fused,
            all_reduce: self.all_reduce(),
        })
    }

    /// Copies of inputs and outputs of steps.
    pub(super) fn host_copies(&self) -> HostCopies {
        self.fused.host_copies()
    }

    /// As [`plimsoll_core::Executor::state_chunk`].
    pub(super) fn state_chunk(&self) -> usize {
        let chunks = self.delta.iter().flat_map(|kernels| {
            let layers = self.weights.spec.delta_nets();
            layers.map(|delta_net| kernels.chunk(&delta_net.layout))
        });
        chunks.max().unwrap_or(1)
    }

    /// What prefill attention copies each layer's keys and values by: they stay where they are as long as the state.
    pub(super) fn kv_maps(&self, state: &StepState) -> Result<Vec<Option<PrefillMaps>>, GpuError> {
        let layers = self.weights.spec.layers.iter().zip(&state.places);
        let maps = layers.map(|(layer, place)| match layer.attention() {
            Some(spec) if state.kv_config.num_pages > 0 => {
                // Whatever the scales are, the elements are the same.
                let kv = state.layer_kv(place.page(), spec, [1.0; 2]);
                self.prefill.maps(spec.head_dim, &kv)
            }
            _ => Ok(None),
        });
        maps.collect()
    }

    /// Where it meets the other ranks, if there are any.
    pub(super) fn link(&self) -> Option<&RankLink> {
        self.link.as_ref()
    }

    /// The network, or a rank's part of it.
    pub(super) fn spec(&self) -> &DecoderSpec {
        &self.weights.spec
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
        let layers = 0..self.kind_of.len();
        self.step_through(layers, input, state, arena, logits)
    }

    /// Launches every kernel that such a step launches, for as few layers as have all of them. Nothing of use is computed.
    pub(super) fn warm_up(
        &self,
        input: &StepInput,
        state: &mut StepState,
        arena: &mut GpuArena,
    ) -> Result<(), DeviceError> {
        let layers = self.samples.iter().copied();
        self.step_through(layers, input, state, arena, None)
    }

    fn step_through(
        &self,
        layers: impl Iterator<Item = usize>,
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
        let Some(normed) = self.forward(layers, input, state, scores.as_ref(), act)? else {
            return Ok(());
        };
        let given = layout.given.within(memory);
        let Some(head) = &self.head else {
            return self.pool(input, state, normed, given);
        };
        let (width, vocab) = (spec.hidden_size, spec.vocab_size);
        let logits_in = |out| Logits {
            out,
            part: layout.part.within(memory),
            room: layout.head_room(memory),
        };
        if let Some(scores) = scores {
            let rows = normed.range(input.samples * width..normed.len());
            self.score(head, input, state, rows, &scores, logits_in(given))?;
            state.scores.fetch(input.slot, &scores)?;
        }
        if input.samples > 0 {
            let found = given.range(0..input.samples * vocab);
            let rows = normed.range(0..input.samples * width);
            self.logits(head, rows, logits_in(found))?;
            match logits {
                Some(out) => *out = self.gpu.download(found)?,
                None if input.deferred.is_some() => {}
                None => self.sample(head, input, state, found)?,
            }
        }
        Ok(())
    }

    /// Memory for what ranks send each other beside the kernels of steps of up to `tokens` tokens, if they do.
    pub(super) fn room_for_sums(&self, tokens: usize) -> Result<Option<SentRoom>, DeviceError> {
        let width = self.weights.spec.hidden_size;
        let made = self.all_reduce().map(|ranks| ranks.make_room(tokens, width));
        made.transpose().map(Option::flatten)
    }

    /// Takes what the step will take from its arena, so that it cannot run out of it later.
    pub(super) fn reserve(
        &self,
        input: &StepInput,
        state: &StepState,
        arena: &mut GpuArena,
    ) -> Result<(), DeviceError> {
        self.memory(input, state, arena).map(drop)
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

    /// Runs these layers. Returns the normalised rows that are given out, if there are any: first those to sample from or to
    /// pool, then those to be scored.
    fn forward<'a>(
        &self,
        layers: impl Iterator<Item = usize>,
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
        // The section may have room for more rows: see `padded_rows`.
        let hidden = act.hidden.range(0..input.rows * spec.hidden_size);
        self.embed(&decoder.embedding, tokens, hidden)?;
        if let (Some(per_layer), Some(own)) = (&decoder.per_layer, &spec.per_layer) {
            // These are resolved by now.
            let (scale, whole) = ((own.width as f32).sqrt(), GpuVocabulary::whole(own.vocab_size));
            let width = own.width * spec.layers.len();
            let inputs = act.layer_inputs.range(0..input.rows * width);
            self.look_up(&per_layer.table, whole, tokens, scale, inputs)?;
        }
        let images = RowsOfImage::of(input, state);
        if let Some(images) = &images {
            images.put(act.hidden, input.rows)?;
        }
        let kinds = self
            .kinds
            .iter()
            .map(|&first| Kind::new(self, first, input.rows, state));
        let mut step = Step {
            decoder: self,
            kinds: kinds.collect(),
            input,
            state,
            scores,
            images,
            act,
            rows: input.rows,
            first: 0,
            is_fresh: true,
            chain: Vec::new(),
            sum: DeltaSum::Done,
            unsettled: None,
            are_given: false,
            layer: 0,
        };
        decoder.forward_through(layers, spec, &mut step)?;
        let given = step.rows_given();
        Ok((given > 0).then(|| step.act.normed.range(0..given * spec.hidden_size)))
    }
}

/// Whether what is chosen for one layer is right for another: formats may differ where a checkpoint leaves some matrices in floats.
fn is_of_kind(layer: &GpuLayer, other: &GpuLayer) -> bool {
    let mlps_are_alike = match [layer, other].map(|layer| layer.mlp.of_all()) {
        [Some(a), Some(b)] => a.gate_up.is_like(&b.gate_up) && a.down.is_like(&b.down),
        [a, b] => a.is_none() && b.is_none(),
    };
    let experts_are_alike = match [layer, other].map(|layer| layer.mlp.experts()) {
        [Some(a), Some(b)] => {
            let gates = [a, b].map(|moe| moe.shared.as_ref().map(|shared| &shared.gate));
            let gates_are_alike = match gates {
                [Some(a), Some(b)] => a.is_like(b),
                [a, b] => a.is_none() && b.is_none(),
            };
            let pairs = [
                (&a.router, &b.router),
                (&a.gate_up[0], &b.gate_up[0]),
                (&a.down[0], &b.down[0]),
            ];
            gates_are_alike && pairs.iter().all(|(a, b)| a.is_like(b))
        }
        [a, b] => a.is_none() && b.is_none(),
    };
    layer.spec == other.spec
        && layer.mixer.projections().is_like(other.mixer.projections())
        && layer.mixer.output().is_like(other.mixer.output())
        && mlps_are_alike
        && experts_are_alike
}
