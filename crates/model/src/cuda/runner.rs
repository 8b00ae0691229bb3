mod batch;
mod images;
mod recording;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use plimsoll_core::{
    Component, DeviceTime, EncodeCost, Executor, FillMasks, KvConfig, RequestId, StateConfig, StepError,
    StepLimits, StepOutput, StepPlan,
};
use plimsoll_device::cuda::{DeviceError, GpuArena, GpuError, GpuSlab, Graph};
use plimsoll_kernels::SampleError;
use plimsoll_kernels::cuda::HostCopies;

use super::GpuModel;
use super::clock::Clocks;
use super::decoder::StepState;
use super::encoder::EncoderState;
use super::graphs::Graphs;
use super::input::{StepInput, StepInputs};
use super::link::{Abandon, RankLink};
use super::loads::Loads;
use super::masks::Masks;
use super::output::Outputs;
use super::planners::attention_counters;
use super::scores::Scores;
use super::shape::{BatchShape, ImageInputs, Sampling};
use super::staging::STEPS_IN_FLIGHT;
use super::states::States;
use super::vectors::Vectors;
use crate::batch::Bounds;
use crate::state::LayerPlace;
use crate::tables::LayerPage;
use batch::{Batch, InFlight, Unsampled};

/// One engine state on a GPU: everything that serves a model besides its weights. Dropped whole.
#[derive(Debug)]
pub struct GpuRunner {
    model: Arc<GpuModel>,
    bounds: Bounds,
    state: StepState,
    arena: GpuArena,
    copies: HostCopies,
    graphs: Graphs,
    canary: Option<GpuSlab>,
    /// Rows of `sampled` that the step launched last fills, by request.
    last: HashMap<RequestId, u32>,
    in_flight: VecDeque<InFlight>,
    /// The step launched last, if it is not sampled yet.
    unsampled: Option<Unsampled>,
    /// Steps launched so far.
    launched: usize,
    clocks: Clocks,
}

impl GpuRunner {
    pub(super) fn new(
        model: Arc<GpuModel>,
        config: &StateConfig,
        limits: &StepLimits,
    ) -> Result<Self, DeviceError> {
        let (gpu, spec) = (model.gpu(), model.spec());
        // Before all else: what the rest is measured with holds it.
        let encoder = match model.encoder.as_ref().zip(model.decoder().encoder()) {
            None => None,
            Some((encoder, products)) => {
                let state = EncoderState::new(gpu, encoder, products)?;
                model.slowest_encode.add(state.largest());
                Some(state)
            }
        };
        let canary = match usize::try_from(config.canary_bytes) {
            Ok(0) => None,
            Ok(bytes) => Some(gpu.alloc(Component::Canary, bytes)?),
            Err(_) => return Err(gpu.budget().oom(Component::Canary, config.canary_bytes).into()),
        };
        let layout = spec.cache_layout(&config.kv.groups, config.kv.block_size);
        let kv = KvConfig {
            groups: layout.groups,
            ..config.kv
        };
        let kv_bytes = usize::try_from(model.kv_bytes(kv))
            .ok()
            .filter(|&bytes| bytes < usize::MAX)
            .ok_or_else(|| gpu.budget().oom(Component::Kv, u64::MAX))?;
        let pages = LayerPage::all(&layout, kv.block_size);
        let planners = model.planners(&pages, limits.max_num_seqs)?;
        let sampling = Sampling::of(model.config());
        let images = ImageInputs::of(model.config());
        let inputs = StepInputs::new(gpu, limits, kv, sampling, images, planners)?;
        let counters = gpu.alloc(
            Component::Staging,
            attention_counters(inputs.planners()) * size_of::<u32>(),
        )?;
        gpu.fill(counters.slice(), 0)?;
        let mut state = StepState {
            kv: gpu.alloc(Component::Kv, kv_bytes)?,
            kv_config: kv,
            kv_element: model.kv_element,
            kv_column: spec.kv_column(),
            states: States::new(gpu, spec, kv.state_slots)?,
            places: LayerPlace::all(spec, &pages),
            kv_maps: Vec::new(),
            max_model_len: limits.max_model_len,
            encoder,
            inputs,
            outputs: Outputs::new(gpu, sampling.most_rows(limits))?,
            masks: Masks::new(gpu, sampling.most_rows(limits), spec.num_logits())?,
            scores: Scores::new(gpu, sampling.most_scored(limits))?,
            vectors: match sampling {
                Sampling::From { .. } => None,
                Sampling::Pooled(_) => Some(Vectors::new(gpu, limits, spec.hidden_size)?),
            },
            counters,
            loads: Loads::new(gpu, spec, model.expert_loads())?,
            _sent: model.decoder().room_for_sums(limits.max_num_batched_tokens)?,
        };
        state.kv_maps = model.decoder().kv_maps(&state)?;
        let clocks = Clocks::new(gpu)?;
        Ok(Self {
            bounds: Bounds {
                limits: *limits,
                kv,
                vocab_size: spec.vocab_size,
                pooling: model.config().pooling(),
                images: model.config().image_input(),
            },
            state,
            arena: GpuArena::new(gpu, config.scratch)?,
            copies: model.decoder().host_copies(),
            graphs: Graphs::none(gpu),
            canary,
            last: HashMap::new(),
            in_flight: VecDeque::new(),
            unsampled: None,
            launched: 0,
            clocks,
            model,
        })
    }

    /// Whether its steps sample: those of a model for embeddings are prompts, which no graph replays.
    pub(super) fn samples(&self) -> bool {
        self.state.vectors.is_none()
    }

    /// Gives the canary's memory back: the last thing before serving.
    pub fn release_canary(&mut self) {
        self.canary = None;
        // All tokens of the proof are alike.
        self.state.loads.clear();
    }

    /// The model that runs.
    pub fn model(&self) -> &Arc<GpuModel> {
        &self.model
    }

    /// Most bytes of the step arena used at once since this was last taken: with a fixed arena of this size the same steps fit.
    pub fn take_arena_high_water(&mut self) -> u64 {
        self.arena.take_high_water() as u64
    }

    /// Runs `plan` and returns the logits of the given rows of its batch (tokens, run after run), ascending, as
    /// `[rows, vocab_size]`, in place of sampling. For oracles.
    ///
    /// # Errors
    /// As [`Executor::launch`].
    pub fn logits(&mut self, plan: &StepPlan, rows: &[usize]) -> Result<Vec<f32>, StepError> {
        if !self.in_flight.is_empty() {
            return Err(StepError::Failed("logits while steps are in flight".to_owned()));
        }
        if self.bounds.pooling.is_some() {
            return Err(StepError::Failed(
                "a model that is served for embeddings has no logits".to_owned(),
            ));
        }
        let tokens = plan.num_tokens();
        if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&row| row >= tokens) {
            return Err(StepError::Failed(format!(
                "rows {rows:?} of a batch of {tokens} are not ascending rows of it"
            )));
        }
        self.on_all_ranks(|runner, guard| runner.compute_logits(plan, rows, guard))
    }

    /// Does what all ranks do, beside their steps: they learn where this one cannot go on.
    fn on_all_ranks<T>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Abandon<'_>) -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        let model = Arc::clone(&self.model);
        let mut guard = Abandon::begin(model.link());
        let done = work(self, &mut guard);
        if let Ok(_) | Err(StepError::OtherRank(_) | StepError::RankLost(_)) = done {
            guard.keep();
        }
        done
    }

    fn compute_logits(
        &mut self,
        plan: &StepPlan,
        rows: &[usize],
        guard: &mut Abandon<'_>,
    ) -> Result<Vec<f32>, StepError> {
        self.bounds.check(plan, &self.last).map_err(StepError::Failed)?;
        let mut logits = Vec::new();
        if plan.is_empty() {
            return Ok(logits);
        }
        let shape = BatchShape::Exact(rows.iter().map(|&row| row as i32).collect());
        let (image, image_rows) = self.look_up_image(plan);
        let inputs = &mut self.state.inputs;
        let input = inputs.pack(0, plan, &self.last, &shape, &image_rows);
        self.last.clear();
        self.agree(Some(&input), guard)?;
        self.encode_image(0, image)?;
        // SAFETY: nothing is in flight.
        unsafe { self.state.inputs.send(0, &input, None) }.map_err(failed)?;
        let decoder = self.model.decoder();
        decoder.step(&input, &mut self.state, &mut self.arena, Some(&mut logits))?;
        self.model.gpu().synchronize().map_err(failed)?;
        self.check_ranks()?;
        Ok(logits)
    }

    /// Goes on only where all ranks have the memory for what they do, a step that is launched kernel by kernel or what takes nothing from
    /// the arena: what is launched from here on waits for the others.
    fn agree(&mut self, step: Option<&StepInput>, guard: &mut Abandon<'_>) -> Result<(), StepError> {
        let Some(link) = self.model.link() else {
            return Ok(());
        };
        if let Some(input) = step {
            let decoder = self.model.decoder();
            decoder.reserve(input, &self.state, &mut self.arena)?;
        }
        link.agree()?;
        guard.launched = true;
        Ok(())
    }

    /// Whether all ranks came to the steps that have ended.
    fn check_ranks(&self) -> Result<(), StepError> {
        self.model.link().map_or(Ok(()), RankLink::check)
    }

    /// Launches all of a checked plan that is not empty, as step `step`, once all ranks can.
    fn launch_step(
        &mut self,
        step: usize,
        plan: &StepPlan,
        batch: &Batch,
        guard: &mut Abandon<'_>,
    ) -> Result<(), StepError> {
        let slot = step % STEPS_IN_FLIGHT;
        let (image, image_rows) = self.look_up_image(plan);
        let inputs = &mut self.state.inputs;
        let mut input = inputs.pack(slot, plan, &self.last, &batch.shape, &image_rows);
        input.scored = self.state.scores.pack(slot, plan);
        let takes = self.graph(batch).is_none().then_some(&input);
        self.agree(takes, guard)?;
        let encoded = self.encode_image(slot, image);
        let launched = encoded.and_then(|()| self.launch_input(step, input, batch));
        launched.map_err(|error| self.error(error))
    }

    /// The graph that replays such a batch, if it is one of decoding requests and there are graphs.
    fn graph(&self, batch: &Batch) -> Option<&Graph> {
        match batch.shape {
            BatchShape::Decode(step) => self.graphs.get(step),
            BatchShape::Exact(_) | BatchShape::Pool(..) => None,
        }
    }

    /// Launches a packed step.
    fn launch_input(&mut self, step: usize, input: StepInput, batch: &Batch) -> Result<(), DeviceError> {
        let slot = step % STEPS_IN_FLIGHT;
        let inputs = &self.state.inputs;
        match self.graph(batch) {
            Some(graph) => {
                // SAFETY: the slot is packed again two steps from now, when this step has ended.
                unsafe { inputs.send(slot, &input, Some(&self.copies))? };
                graph.launch()?;
                if input.late_rows.is_some() {
                    let decoder = self.model.decoder();
                    decoder.sample_behind(&input, &mut self.state, &mut self.arena)?;
                }
            }
            None => {
                // SAFETY: as above.
                unsafe { inputs.send(slot, &input, None)? };
                let decoder = self.model.decoder();
                decoder.step(&input, &mut self.state, &mut self.arena, None)?;
            }
        }
        self.state.loads.fetch(step)?;
        let logprobs = batch.runs.iter().any(|run| matches!(run.sample, Some((_, true))));
        let samples = batch.samples;
        if input.deferred.is_some() {
            self.unsampled = Some(Unsampled {
                step,
                input,
                samples,
                logprobs,
            });
            return Ok(());
        }
        self.state.outputs.fetch(&self.copies, slot, samples, logprobs)?;
        Ok(())
    }

    /// Samples a step whose masks `fill` writes.
    fn sample_step(&mut self, unsampled: &Unsampled, fill: &mut FillMasks<'_>) -> Result<(), DeviceError> {
        let Unsampled {
            step,
            input,
            samples,
            logprobs,
        } = unsampled;
        let slot = step % STEPS_IN_FLIGHT;
        let rows = input.deferred.as_deref().unwrap_or_default();
        self.state.masks.write(slot, rows, fill);
        self.clocks.resume(*step)?;
        // SAFETY: the slot is written again two steps from now, when this step has ended.
        unsafe { self.state.masks.send(slot, rows.len())? };
        let decoder = self.model.decoder();
        decoder.sample_behind(input, &mut self.state, &mut self.arena)?;
        self.state
            .outputs
            .fetch(&self.copies, slot, *samples, *logprobs)?;
        Ok(())
    }

    /// Launches a plan, and abandons the step where this rank cannot.
    fn launch_as_rank(&mut self, plan: &StepPlan, mut guard: Abandon<'_>) -> Result<(), StepError> {
        let ready = self.model.link().map_or(Ok(()), RankLink::check_usable);
        if ready.is_err() {
            // All ranks find the same, so there is nobody to tell.
            guard.keep();
            return ready;
        }
        self.model.gpu().budget().begin_step()?;
        self.bounds.check(plan, &self.last).map_err(StepError::Failed)?;
        let batch = match self.bounds.pooling {
            Some(_) => Batch::pooled(plan),
            None => Batch::new(plan, &self.graphs, self.model.decoder().state_chunk() > 1),
        };
        let step = self.launched;
        self.launched += 1;
        self.clocks.begin(step).map_err(failed)?;
        let launched = match plan.is_empty() {
            true => Ok(()),
            false => self.launch_step(step, plan, &batch, &mut guard),
        };
        // Before anything of it is waited for.
        match launched {
            Ok(()) | Err(StepError::OtherRank(_) | StepError::RankLost(_)) => guard.keep(),
            Err(_) => drop(guard),
        }
        // Also behind half a step, so that whoever waits for it finds an end.
        let ended = match self.unsampled {
            Some(_) => self.clocks.pause(step),
            None => self.clocks.end(step),
        };
        ended.map_err(failed)?;
        if let Some(unsampled) = &mut self.unsampled {
            // The GPU computes the rest meanwhile.
            unsampled.input.add_lists(plan);
        }
        self.last.clear();
        if let Err(error) = launched {
            return self.give_up(step, error);
        }
        self.last.extend(
            batch
                .runs
                .iter()
                .filter_map(|run| Some((run.request, run.sample?.0))),
        );
        self.in_flight.push_back(InFlight {
            step,
            runs: batch.runs,
        });
        Ok(())
    }

    /// Ends a step that could not be launched or sampled: what was launched of it is waited for.
    fn give_up(&mut self, step: usize, error: StepError) -> Result<(), StepError> {
        self.clocks.wait(step).map_err(failed)?;
        Err(error)
    }

    fn error(&self, error: DeviceError) -> StepError {
        self.model.failed(error).into()
    }
}

fn failed(error: GpuError) -> StepError {
    StepError::Device(error.to_string())
}

impl Executor for GpuRunner {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        if self.in_flight.len() == STEPS_IN_FLIGHT {
            return Err(StepError::Failed(format!(
                "{STEPS_IN_FLIGHT} steps are in flight already"
            )));
        }
        if self.unsampled.is_some() {
            return Err(StepError::Failed("the previous step needs its masks".to_owned()));
        }
        let model = Arc::clone(&self.model);
        // Other ranks learn if this one cannot go on with its step, whatever the reason: they do not wait for it.
        let guard = Abandon::begin(model.link());
        self.launch_as_rank(plan, guard)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        let unsampled = self.unsampled.take();
        let unsampled = unsampled.ok_or_else(|| StepError::Failed("no step needs masks".to_owned()))?;
        // It comes back once it is sampled: a panic ends the step as an error does.
        let (launched, last) = (self.in_flight.pop_back(), std::mem::take(&mut self.last));
        let sampled = self.sample_step(&unsampled, fill);
        let ended = self.clocks.end(unsampled.step).map_err(DeviceError::Gpu);
        if let Err(error) = sampled.and(ended) {
            let error = self.error(error);
            return self.give_up(unsampled.step, error);
        }
        self.in_flight.extend(launched);
        self.last = last;
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let InFlight { step, runs } = self
            .in_flight
            .pop_front()
            .ok_or_else(|| StepError::Failed("no step was launched".to_owned()))?;
        self.clocks.wait(step).map_err(failed)?;
        self.check_ranks()?;
        self.state.loads.read(step);
        let StepState {
            outputs,
            scores,
            vectors,
            ..
        } = &self.state;
        let slot = step % STEPS_IN_FLIGHT;
        let mut output = StepOutput::default();
        for (index, run) in runs.iter().enumerate() {
            let sampled = run
                .sample
                .map(|(row, logprobs)| outputs.sampled_at(slot, row as usize, logprobs));
            let scored = (run.score.as_ref()).map(|(first, spec)| scores.scored(slot, *first, spec));
            let vector = vectors.as_ref().zip(run.vector);
            let pooled = vector.map(|(vectors, index)| vectors.pooled_at(slot, index));
            let answer = sampled
                .transpose()
                .and_then(|sampled| Ok((sampled, scored.transpose()?, pooled.transpose()?)));
            let (sampled, scored, pooled) = answer.unwrap_or_else(|SampleError::NotFinite| {
                output.not_finite.push(index);
                (None, run.score.as_ref().map(|_| Vec::new()), None)
            });
            output.samples.push(sampled);
            output.scores.extend(scored);
            output.pooled.extend(vectors.is_some().then_some(pooled));
        }
        Ok(output)
    }

    fn rest(&mut self) {
        self.clocks.rest();
        self.state.loads.read_all(self.launched);
    }

    fn device_time(&self) -> Option<DeviceTime> {
        Some(self.clocks.time())
    }

    fn encode_cost(&self) -> Option<EncodeCost> {
        self.state.encoder.as_ref().map(EncoderState::cost)
    }

    fn state_chunk(&self) -> usize {
        self.model.decoder().state_chunk()
    }
}

impl Drop for GpuRunner {
    /// What the GPU still reads must not be freed under it.
    fn drop(&mut self) {
        if let Err(error) = self.model.gpu().synchronize() {
            tracing::error!(%error, "the last steps did not complete");
        }
    }
}
