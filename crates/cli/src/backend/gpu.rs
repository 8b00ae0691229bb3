//! An NVIDIA GPU, and one that is only planned for.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::{BlockSize, BuildError, Component, KvConfig, Meters, StateConfig, StepLimits};
use plimsoll_device::Budget;
use plimsoll_device::cuda::{self, Gpu, GpuError, Holder};
use plimsoll_kernels::WeightType;
use plimsoll_kernels::cuda::{DeltaKernels, FP8_CAPABILITY, GpuKvElement, LinearWays, hopper_head_dims};
use plimsoll_model::cuda::{GpuFootprint, GpuModel, GpuOptions, GpuRunner, GpuStateShape, RankLink};
use plimsoll_model::{Cancel, LoadOptions, LoadProgress, ModelConfig, ModelError, Shard};
use plimsoll_profiler::{ArenaUse, BuildProgress, Disabled, Footprint, ScenarioKind, ScenarioShape};

use super::predicted::{arena_use, holding, step_size};
use super::{Backend, Defaults, Device, EngineState, Hardware, LoadedModel, ModelFacts, ModelOn, Weights};
use crate::args::KvDtype;
use crate::bytes::Bytes;
use crate::error::Error;
use crate::plan_cache::DeviceKey;
use crate::settings::EngineSettings;

/// What suits a GPU of `total` bytes. On large ones vLLM has as many requests at once too.
fn defaults(total: u64) -> Defaults {
    Defaults {
        max_num_seqs: if total >= LARGE_GPU { 1024 } else { 512 },
        max_num_batched_tokens: 8192,
        steps_in_flight: 2,
        // What a step takes follows from its rows, tokens and samples; partial results of attention have room for any step.
        contexts_take_memory: false,
        useful_tokens: None,
    }
}

/// GPUs that are sold with 80 GB have somewhat less.
const LARGE_GPU: u64 = 70 << 30;

/// A model on a GPU, or a rank's part of it.
pub type GpuBackend = ModelOn<GpuPart>;

/// A rank on a GPU, or all of them.
#[derive(Debug)]
pub struct GpuPart {
    gpu: Gpu,
    shard: Shard,
    /// Where it meets the other ranks, if there are any and they are to serve.
    link: Option<RankLink>,
}

impl GpuPart {
    /// All of a model.
    pub fn whole(gpu: Gpu) -> Self {
        Self {
            gpu,
            shard: Shard::WHOLE,
            link: None,
        }
    }

    /// A part of one. Without a link it is only planned for.
    pub fn part(gpu: Gpu, shard: Shard, link: Option<RankLink>) -> Self {
        Self { gpu, shard, link }
    }
}

/// A model on GPUs that are not here, one for each rank: like an H200, but for the size of their memory. It is planned for, and not
/// loaded.
pub type AssumedGpu = ModelOn<AssumedBytes>;

/// Memory of each GPU that is not here.
#[derive(Clone, Copy, Debug)]
pub struct AssumedBytes(pub u64);

impl Hardware for GpuPart {}

impl Hardware for AssumedBytes {}

fn state_shape(settings: &EngineSettings, shard: Shard, limits: StepLimits) -> GpuStateShape {
    GpuStateShape {
        limits,
        shard,
        serve_as: settings.serve_as.clone(),
        block_size: settings.block_size,
        kv_cache_dtype: settings.load_options().kv_cache_dtype,
        options: options(settings),
    }
}

fn options(settings: &EngineSettings) -> GpuOptions {
    GpuOptions {
        enforce_eager: settings.enforce_eager,
    }
}

fn facts_and_footprint(
    model: GpuFootprint,
    block_size: BlockSize,
    device: Meters,
) -> (ModelFacts, Box<dyn Footprint>) {
    let facts = ModelFacts::of(
        model.config(),
        None,
        block_size,
        model.kv_bytes_per_token(),
        model.state_bytes(),
    );
    let held = device.by_component.get(Component::Communication);
    let predicted = PredictedGpu {
        communication: model.communication_bytes().saturating_sub(held),
        model: Rc::new(model),
        device,
    };
    (facts, Box::new(predicted))
}

impl Device for GpuBackend {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> String {
        let info = self.device.gpu.info();
        format!("cuda:{} ({})", info.ordinal, info.name)
    }

    fn defaults(&self) -> Defaults {
        defaults(self.device.gpu.info().total_bytes)
    }

    fn largest(&self) -> Option<u64> {
        Some(self.device.gpu.info().total_bytes)
    }

    fn state_chunk(&self) -> usize {
        DeltaKernels::CHUNK
    }

    fn footprint(&self, limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error> {
        let shape = state_shape(&self.settings, self.device.shard, limits);
        let model = GpuFootprint::on(&self.device.gpu, &self.model, shape)?;
        Ok(facts_and_footprint(
            model,
            self.settings.block_size,
            self.device.gpu.meters(),
        ))
    }
}

impl Backend for GpuBackend {
    fn load(
        &self,
        earlier: &[LinearWays],
        cancel: &Cancel,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, Error> {
        let GpuPart { gpu, shard, link } = &self.device;
        let load_options = LoadOptions {
            shard: *shard,
            cancel: cancel.clone(),
            linear_ways: earlier.first().cloned(),
            ..self.settings.load_options()
        };
        let model = GpuModel::load_rank(&self.model, load_options, gpu, link.clone(), progress)
            .map_err(|error| not_loaded(error, gpu.info().ordinal, holders))?;
        let mut head_dims: Vec<usize> = model
            .spec()
            .attention()
            .map(|attention| attention.head_dim)
            .collect();
        head_dims.sort_unstable();
        head_dims.dedup();
        let fp8_weights = model.spec().quantization.kept_scales().next().is_some();
        let kernels = Kernels {
            capability: gpu.info().compute_capability,
            hopper: plimsoll_kernels::cuda::has_hopper_kernels(gpu),
            hopper_head_dims: hopper_head_dims(match self.settings.kv_cache_dtype {
                KvDtype::Fp8 => GpuKvElement::Fp8,
                _ => GpuKvElement::Bf16,
            }),
        };
        let mut disabled = disabled(kernels, &head_dims, fp8_weights, self.settings.enforce_eager);
        if let Some(stored) = converted_from(&self.model, &self.settings, model.config()) {
            disabled.push(Disabled {
                path: "weights as they are stored",
                reason: format!("stored as {stored}, a GPU computes with them as bfloat16"),
            });
        }
        Ok(LoadedModel {
            facts: ModelFacts::of(
                model.config(),
                model.scoring_row(),
                self.settings.block_size,
                model.kv_bytes_per_token(),
                model.state_bytes(),
            ),
            generation: model.generation().clone(),
            eos_token_ids: model.eos_token_ids(),
            expert_loads: model.expert_loads().cloned(),
            disabled,
            linear_ways: model.measured_linear_ways().into_iter().collect(),
            weights: vec![Arc::new(GpuWeights {
                model,
                options: options(&self.settings),
            })],
        })
    }

    fn account(&self) -> &Budget {
        self.device.gpu.budget()
    }

    fn meters(&self) -> Meters {
        self.device.gpu.meters()
    }

    fn allocations(&self) -> u64 {
        self.device.gpu.allocations()
    }

    fn reset_high_water(&self) {
        report(self.device.gpu.reset_high_water());
    }

    fn settle_runtime(&self) {
        report(self.device.gpu.settle_runtime());
    }

    fn trim(&self) {
        report(self.device.gpu.trim());
    }

    fn plan_key(&self) -> DeviceKey {
        DeviceKey::gpu(&self.device.gpu, self.settings.enforce_eager)
    }

    fn log_neighbours(&self) {
        if self.device.gpu.meters().peers() > 0 {
            let ordinal = self.device.gpu.info().ordinal;
            for holder in holders(ordinal) {
                tracing::warn!("memory of cuda:{ordinal}: {holder}");
            }
        }
    }

    fn watch(&self, on: bool) -> Result<(), Error> {
        self.device
            .gpu
            .watch(on)
            .map_err(|error| Error::Bench(error.to_string()))
    }
}

/// Other processes that hold memory of a GPU.
pub(super) fn holders(ordinal: usize) -> Vec<Holder> {
    let mut holders = cuda::uuid(ordinal).map_or_else(|_| Vec::new(), |uuid| cuda::holders(&uuid));
    holders.retain(|holder| holder.pid != std::process::id());
    holders
}

/// Why a model could not be loaded. Loading kernels needs memory too, which other processes may have used up.
fn not_loaded(error: ModelError, ordinal: usize, holders: impl FnOnce(usize) -> Vec<Holder>) -> Error {
    match error {
        ModelError::Gpu(error) if error.is_out_of_memory() => Error::GpuFull {
            ordinal,
            holders: holders(ordinal),
            error,
        },
        error => error.into(),
    }
}

/// A GPU that fails here fails at the next step too, which says so to whoever asked.
fn report(result: Result<(), GpuError>) {
    if let Err(error) = result {
        tracing::error!(%error, "the GPU failed between two steps");
    }
}

/// The number formats of stored weights that became bfloat16 as they were loaded.
fn converted_from(path: &Path, settings: &EngineSettings, config: &ModelConfig) -> Option<String> {
    let quantization = &config.spec.quantization;
    if settings.is_dummy() {
        return None;
    }
    if path.is_file() && settings.serve_as.quantization.is_none() {
        let mut formats: Vec<String> = (quantization.only_on_cpus().into_iter())
            .map(str::to_owned)
            .collect();
        match quantization.is_some() {
            true if config.spec.mixtures().next().is_some() => {
                formats.push("a GGUF file's experts".to_owned())
            }
            true => {}
            false => formats.push("a GGUF file's floats".to_owned()),
        }
        return (!formats.is_empty()).then(|| formats.join(" and "));
    }
    let format = match config.dtype {
        _ if quantization.is_some() => return None,
        Some(WeightType::F32) => "float32",
        Some(WeightType::F16) => "float16",
        _ => return None,
    };
    Some(format.to_owned())
}

/// What decides which kernels a GPU takes.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    /// Its compute capability.
    capability: (u32, u32),
    /// Whether those made for Hopper run.
    hopper: bool,
    /// Head sizes that have one of those for prompts.
    hopper_head_dims: &'static [usize],
}

/// `head_dims` are those of layers; `fp8_weights`: weights are kept in FP8.
fn disabled(kernels: Kernels, head_dims: &[usize], fp8_weights: bool, enforce_eager: bool) -> Vec<Disabled> {
    let Kernels {
        capability,
        hopper,
        hopper_head_dims,
    } = kernels;
    let (major, minor) = capability;
    let mut disabled = Vec::new();
    let mut add = |path, reason| disabled.push(Disabled { path, reason });
    if enforce_eager {
        let reason = "every kernel is launched separately (--enforce-eager)";
        add("CUDA graphs", reason.to_owned());
    }
    if capability != (9, 0) {
        let reason =
            format!("made for compute capability 9.0, this GPU has {major}.{minor}: portable ones are used");
        add("Hopper prefill attention", reason);
    } else if !hopper {
        let reason = "built without code for Hopper: the portable kernels are used, which are slower; build with 90a in CUDA_ARCHS";
        add("Hopper kernels", reason.to_owned());
    } else if let Some(other) = head_dims.iter().find(|dim| !hopper_head_dims.contains(dim)) {
        let reason = format!("not made for heads of {other}: layers that have them take the portable kernel");
        add("Hopper prefill attention", reason);
    }
    if fp8_weights && capability < FP8_CAPABILITY {
        let (least_major, least_minor) = FP8_CAPABILITY;
        let reason = format!(
            "they need compute capability {least_major}.{least_minor}, this GPU has {major}.{minor}: weights stay FP8, prompts take longer"
        );
        add("FP8 products", reason);
    }
    if capability < (9, 0) {
        let reason = format!("they need compute capability 9.0, this GPU has {major}.{minor}");
        add("thread block clusters in sampling", reason);
    }
    disabled
}

#[derive(Debug)]
struct GpuWeights {
    model: Arc<GpuModel>,
    options: GpuOptions,
}

impl Weights for GpuWeights {
    fn build(
        &self,
        config: &StateConfig,
        limits: &StepLimits,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Box<dyn EngineState>, BuildError> {
        let graphs = &mut |done, of| piece(BuildProgress::Graph { done, of });
        let state = self.model.build_state(config, limits, self.options, graphs)?;
        Ok(Box::new(state))
    }

    fn slowest_encode(&self) -> Duration {
        self.model.slowest_encode()
    }
}

impl EngineState for GpuRunner {
    fn take_arena_high_water(&mut self) -> u64 {
        Self::take_arena_high_water(self)
    }

    fn release_canary(&mut self) {
        Self::release_canary(self);
    }
}

impl Device for AssumedGpu {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> String {
        let bytes = Bytes(self.device.0);
        match self.ranks() {
            1 => format!("a GPU of {bytes} (not here; assumed to be like an H200)"),
            ranks => format!("{ranks} GPUs of {bytes} each (not here; assumed to be like H200s)"),
        }
    }

    fn ranks(&self) -> usize {
        self.settings.tensor_parallel_size
    }

    fn is_assumed(&self) -> bool {
        true
    }

    fn defaults(&self) -> Defaults {
        defaults(self.device.0)
    }

    fn state_chunk(&self) -> usize {
        DeltaKernels::CHUNK
    }

    fn footprint(&self, limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error> {
        let first = Shard {
            rank: 0,
            ranks: self.ranks(),
        };
        let shape = state_shape(&self.settings, first, limits);
        let model = GpuFootprint::assumed(&self.model, shape)?;
        let empty = Meters {
            total: self.device.0,
            free: self.device.0,
            ..Meters::default()
        };
        let runtime = [(Component::Runtime, GpuFootprint::ASSUMED_RUNTIME_BYTES)];
        Ok(facts_and_footprint(
            model,
            self.settings.block_size,
            holding(&empty, &runtime, 0),
        ))
    }
}

/// What a model on a GPU would take.
struct PredictedGpu {
    model: Rc<GpuFootprint>,
    /// What ranks exchange sums in before there is a state, as far as it is not there yet.
    communication: u64,
    /// With what the runtime takes, before the model is loaded.
    device: Meters,
}

impl Footprint for PredictedGpu {
    fn idle(&self) -> Meters {
        let parts = [
            (Component::Communication, self.communication),
            (Component::Weights, self.model.weights_bytes()),
        ];
        holding(&self.device, &parts, self.model.slack_bytes(0))
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let staging = self.model.staging_bytes();
        let parts = [
            (
                Component::Communication,
                self.communication + self.model.sent_bytes(),
            ),
            (Component::Weights, self.model.weights_bytes()),
            (Component::Kv, self.model.kv_bytes(kv)),
            (Component::States, self.model.states_bytes(kv.state_slots)),
            (Component::Staging, staging),
            (Component::Encoder, self.model.encoder_bytes()),
            (Component::Arena, arena),
            (Component::Graphs, self.model.graph_bytes()),
        ];
        holding(&self.device, &parts, self.model.slack_bytes(staging))
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        // Plain decodes are the only steps that graphs have room for.
        let steps = steps
            .iter()
            .map(|step| (step_size(step), step.kind == ScenarioKind::Decode));
        arena_use(self.model.arena(&steps.collect::<Vec<_>>()))
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        self.model.fixed_arena(scratch)
    }

    fn for_limits(&self, limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::new(self.model.for_limits(limits)),
            communication: self.communication,
            device: self.device,
        })
    }
}

#[cfg(test)]
mod tests;
