//! The simulated model, on a device whose bytes are only counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_core::{
    BuildError, Component, Executor, FillMasks, KvConfig, Meters, Oom, Scratch, StateConfig, StepError,
    StepLimits, StepOutput, StepPlan,
};
use plimsoll_device::{Budget, Charge};
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::{Cancel, EmbeddingConfig, GenerationConfig, LoadProgress};
use plimsoll_profiler::{ArenaUse, BuildProgress, Footprint, ScenarioShape};
use plimsoll_server::EmbeddingInfo;
use plimsoll_sim::{Fault, SimConfig, SimExecutor, SimModel, StepTime};

use super::predicted::holding;
use super::{
    Backend, CPU_DEFAULTS, Configured, Defaults, Device, EngineState, LoadedModel, ModelFacts, Weights,
};
use crate::error::Error;
use crate::plan_cache::DeviceKey;
use crate::settings::EngineSettings;
use crate::simulated::{FaultSpec, SimSpec, StepFault};

/// Context length, and the longest that may be asked for: agents begin with tens of thousands of tokens.
const MODEL_LEN: usize = 8192;
const LONGEST_MODEL_LEN: usize = 1 << 18;

/// As a GPU's state has, for a few batch sizes. Here they are nothing but the time of a step.
const GRAPHS: usize = 4;

/// Made up, of the order of a small model's.
const KV_BYTES_PER_TOKEN: u64 = 16 << 10;
const SCRATCH_BYTES_PER_TOKEN: u64 = 32 << 10;

/// Long enough that requests meet each other, as they do on a real device.
const STEP_TIME: StepTime = StepTime {
    base: Duration::from_micros(150),
    per_token: Duration::from_micros(1),
};

/// The simulated model on the simulated device.
#[derive(Debug)]
pub struct SimBackend {
    settings: Arc<EngineSettings>,
    budget: Budget,
}

impl SimBackend {
    /// Clones of `budget` share it.
    pub fn new(settings: &Arc<EngineSettings>, budget: Budget) -> Self {
        Self {
            settings: Arc::clone(settings),
            budget,
        }
    }

    fn spec(&self) -> SimSpec {
        SimSpec::parse(&self.settings.model).unwrap_or_default()
    }

    fn facts(&self) -> Result<ModelFacts, Error> {
        if self.settings.serve_as.quantization.is_some() {
            return Err(Error::configuration(
                "--quantization",
                "the simulated model has no weights",
            ));
        }
        let matryoshka = self.settings.serve_as.hf_overrides.matryoshka()?;
        let embedding: Option<EmbeddingConfig> = self.settings.serve_as.resolve(None)?;
        Ok(ModelFacts {
            vocab_size: SimModel::text().vocab_size(),
            images: None,
            embedding: embedding.map(|embedding| EmbeddingInfo {
                scorer: None,
                pooling: embedding.pooling,
                normalize: embedding.normalize,
                size: SimModel::WIDTH,
                matryoshka,
            }),
            groups: self.spec().cache_groups(),
            kv_bytes_per_token: KV_BYTES_PER_TOKEN,
            state_bytes: 0,
            quantization: None,
            num_parameters: None,
            num_active_parameters: None,
            num_parameters_of_rank: None,
        })
    }
}

impl Configured for SimBackend {
    fn max_model_len(&self) -> Result<usize, Error> {
        let asked = self.settings.max_model_len;
        Ok(asked.map_or(MODEL_LEN, |asked| asked.min(LONGEST_MODEL_LEN)))
    }

    fn state_layers(&self) -> Result<usize, Error> {
        Ok(self.spec().cache_groups().state_layers())
    }

    fn vocab_size(&self) -> Result<usize, Error> {
        Ok(self.facts()?.vocab_size)
    }
}

impl Device for SimBackend {
    fn kind(&self) -> &'static str {
        "cpu"
    }

    fn defaults(&self) -> Defaults {
        CPU_DEFAULTS
    }

    fn footprint(&self, _limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error> {
        let device = self.meters();
        Ok((self.facts()?, Box::new(SimFootprint { device })))
    }
}

impl Backend for SimBackend {
    fn load(
        &self,
        _: &[LinearWays],
        _: &Cancel,
        _: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, Error> {
        let SimSpec {
            step_time, faults, ..
        } = self.spec();
        let step_time = step_time.map_or(STEP_TIME, |base| StepTime {
            base,
            ..StepTime::default()
        });
        Ok(LoadedModel {
            facts: self.facts()?,
            generation: GenerationConfig::default(),
            eos_token_ids: Vec::new(),
            expert_loads: None,
            disabled: Vec::new(),
            linear_ways: Vec::new(),
            weights: vec![Arc::new(SimWeights {
                budget: self.budget.clone(),
                step_time,
                faults,
                served: Arc::default(),
                asked: Arc::default(),
            })],
        })
    }

    fn account(&self) -> &Budget {
        &self.budget
    }

    fn plan_key(&self) -> DeviceKey {
        DeviceKey::simulated(self.settings.device_memory)
    }
}

/// What states of the simulated model have in common.
#[derive(Debug)]
struct SimWeights {
    budget: Budget,
    step_time: StepTime,
    faults: FaultSpec,
    /// Steps that served, of all states.
    served: Arc<AtomicU64>,
    /// What was asked of the device before it served.
    asked: Arc<AtomicU64>,
}

/// Bytes of a KV cache.
fn kv_bytes(kv: &KvConfig) -> u64 {
    let columns: usize = kv.groups.iter().map(|group| group.columns).sum();
    let column_bytes = KV_BYTES_PER_TOKEN / columns as u64;
    let page_tokens = (kv.groups.columns_per_page() * kv.block_size.tokens()) as u64;
    (kv.num_pages as u64).saturating_mul(page_tokens * column_bytes)
}

/// What a step takes from its arena.
fn scratch_bytes(tokens: usize) -> u64 {
    tokens as u64 * SCRATCH_BYTES_PER_TOKEN
}

/// What a real engine state owns, as charges.
struct SimState {
    executor: SimExecutor,
    budget: Budget,
    scratch: Scratch,
    /// Grows with the steps where the scratch is growable.
    arena: Charge,
    arena_high: u64,
    canary: Option<Charge>,
    _kv: Charge,
    /// What goes wrong, once it serves.
    faults: FaultSpec,
    serves: bool,
    served: Arc<AtomicU64>,
    asked: Arc<AtomicU64>,
}

/// Counts what is asked of the device during a start, and lets it fail where that is wanted.
fn ask(asked: &AtomicU64, faults: &FaultSpec) -> Result<(), BuildError> {
    let now = asked.fetch_add(1, Ordering::Relaxed) + 1;
    match faults.device {
        Some(device) if device.get() <= now => {
            let words = "simulated: CUDA_ERROR_ILLEGAL_ADDRESS";
            Err(BuildError::Device(words.to_owned()))
        }
        _ => Ok(()),
    }
}

impl SimState {
    /// Makes the step go wrong that is to.
    fn meet_fault(&mut self, plan: &StepPlan) -> Result<(), Oom> {
        if !self.serves {
            return Ok(());
        }
        let step = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        match self.faults.at(step) {
            None => {}
            Some(StepFault::Oom) => {
                return Err(self.budget.oom(Component::Arena, self.budget.meters().free + 1));
            }
            Some(StepFault::Fail(nth)) => {
                // Each of its parts in turn.
                let part = match nth % 3 {
                    0 => Fault::Launch,
                    1 if plan.awaits_masks() => Fault::Sample,
                    _ => Fault::Finish,
                };
                self.executor.inject(plan.step, part);
            }
            Some(StepFault::Hang) => loop {
                thread::park();
            },
        }
        Ok(())
    }

    /// What the step needs at once, as a real arena would find out.
    fn take_scratch(&mut self, plan: &StepPlan) -> Result<(), Oom> {
        let bytes = scratch_bytes(plan.num_tokens());
        if bytes > self.arena.bytes() {
            match self.scratch {
                Scratch::Fixed(_) => return Err(self.budget.oom(Component::Arena, bytes)),
                Scratch::Growable => {
                    let more = bytes - self.arena.bytes();
                    // A growing arena holds its old chunks until the step is over.
                    drop(self.budget.charge(Component::Arena, more)?);
                    self.arena = self.budget.charge(Component::Arena, bytes)?;
                }
            }
        }
        self.arena_high = self.arena_high.max(bytes);
        Ok(())
    }
}

impl Executor for SimState {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.budget.begin_step()?;
        if !self.serves {
            ask(&self.asked, &self.faults)?;
        }
        self.meet_fault(plan)?;
        self.take_scratch(plan)?;
        self.executor.launch(plan)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        self.executor.sample(fill)
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        self.executor.finish()
    }
}

impl Weights for SimWeights {
    fn build(
        &self,
        config: &StateConfig,
        limits: &StepLimits,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Box<dyn EngineState>, BuildError> {
        let charge = |component, bytes| {
            ask(&self.asked, &self.faults)?;
            Ok::<_, BuildError>(self.budget.charge(component, bytes)?)
        };
        let kv = charge(Component::Kv, kv_bytes(&config.kv))?;
        let canary = (config.canary_bytes > 0)
            .then(|| charge(Component::Canary, config.canary_bytes))
            .transpose()?;
        let arena = match config.scratch {
            Scratch::Fixed(bytes) => charge(Component::Arena, bytes)?,
            Scratch::Growable => charge(Component::Arena, 0)?,
        };
        let mut executor = SimExecutor::new(SimConfig {
            kv: config.kv,
            limits: *limits,
            model: SimModel::text(),
            step_time: self.step_time,
        });
        executor.allow_synthetic(true);
        for done in 0..GRAPHS {
            piece(BuildProgress::Graph { done, of: GRAPHS });
            thread::sleep(self.step_time.base);
        }
        Ok(Box::new(SimState {
            executor,
            scratch: config.scratch,
            arena,
            arena_high: 0,
            canary,
            _kv: kv,
            faults: self.faults,
            serves: false,
            served: Arc::clone(&self.served),
            asked: Arc::clone(&self.asked),
            budget: self.budget.clone(),
        }))
    }
}

impl EngineState for SimState {
    fn take_arena_high_water(&mut self) -> u64 {
        std::mem::take(&mut self.arena_high)
    }

    /// From here on plans are checked in earnest.
    fn release_canary(&mut self) {
        self.canary = None;
        self.serves = true;
        self.executor.allow_synthetic(false);
    }
}

/// What the simulated model would take.
struct SimFootprint {
    device: Meters,
}

impl Footprint for SimFootprint {
    fn idle(&self) -> Meters {
        self.device
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let parts = [(Component::Kv, kv_bytes(&kv)), (Component::Arena, arena)];
        holding(&self.device, &parts, 0)
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        let scratch: Vec<u64> = steps.iter().map(|step| scratch_bytes(step.tokens)).collect();
        let (mut held, mut peak) = (0, 0);
        for &bytes in scratch.iter().filter(|&&bytes| bytes > 0) {
            if bytes > held {
                // The old memory is given back when the new one is there.
                peak = peak.max(held + bytes);
                held = bytes;
            }
        }
        ArenaUse { scratch, peak, held }
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        scratch
    }

    fn for_limits(&self, _limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self { device: self.device })
    }
}
