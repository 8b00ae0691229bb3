//! From files to an engine that is proved: load, profile, spawn. Nothing is served yet.

mod disabled;
mod embedding;
mod keeper;
mod outline;
mod plans;
mod progress;
mod report_file;
mod spec;
mod summary;
mod text;
mod times;
mod weights;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use plimsoll_core::{CacheListener, KvConfig, Pooling, StepLimits};
use plimsoll_device::Budget;
use plimsoll_engine::{EngineConfig, EngineHandle};
use plimsoll_model::cuda::{GpuModel, GpuOptions};
use plimsoll_model::{Model, ModelConfig};
use plimsoll_profiler::{Disabled, KvSize, ProfileSpec, Proved, Report, Target, profile};
use plimsoll_server::{EmbeddingInfo, StartPhase};
use plimsoll_sim::{SimModel, StepTime};
use serde_json::Value;

use crate::args::EngineArgs;
use crate::device::Device;
use crate::error::Error;
use crate::lock::Relock;
use crate::plan_cache::{ModelKey, PlanCache};
use crate::progress::ProfileProgress;
use crate::simulated::SimSpec;
use crate::source::Source;
use crate::standing::Standing;
use crate::target::{GpuTarget, ModelTarget, SIM_STEP_TIME, SimTarget};

pub(crate) use disabled::TEXT_GENERATION;
use keeper::Keeper;
pub use outline::Outline;
pub(crate) use progress::PhaseSeconds;
pub use progress::StartProgress;
pub(crate) use report_file::ReportFile;
use spec::Subject;
pub use text::Text;
pub use times::StartTimes;
use weights::Weights;

/// Context length of the simulated model: up to 262,144 where it is asked for, as agents begin with tens of thousands of tokens.
fn sim_model_len(args: &EngineArgs) -> usize {
    args.limits.max_model_len.map_or(8192, |asked| asked.min(1 << 18))
}

/// How long requests wait where device memory ran out and too little of it comes back for a KV cache.
const OUTAGE_PATIENCE: Duration = Duration::from_secs(30);

/// An engine that may serve.
#[derive(Debug)]
pub struct Ready {
    /// Where requests go.
    pub engine: EngineHandle,
    /// The proved KV cache.
    pub kv: KvConfig,
    /// How it came to that size.
    pub report: Report,
    /// The same and the device's meters, as they are from now on.
    pub standing: Arc<Standing>,
}

/// What a start goes by beside its flags. By default it learns from no other start.
#[derive(Clone, Debug)]
pub struct StartContext {
    /// Plans of earlier starts.
    pub plans: PlanCache,
    /// The start's clock.
    pub times: StartTimes,
    /// Keeps others from the device while a state is built again.
    pub relock: Relock,
    /// Who hears what the prefix cache holds.
    pub cache_listener: Option<Arc<dyn CacheListener>>,
}

impl StartContext {
    /// A start that begins now.
    pub fn new(plans: PlanCache) -> Self {
        Self {
            plans,
            times: StartTimes::begin(),
            relock: Relock::default(),
            cache_listener: None,
        }
    }
}

impl Default for StartContext {
    fn default() -> Self {
        Self::new(PlanCache::off())
    }
}

/// A model that is loaded: weights and text, but no engine yet.
#[derive(Debug)]
pub struct Loaded {
    /// Text in and out.
    pub text: Text,
    /// How it makes vectors, if it is served for embeddings: it generates no text then.
    pub embedding: Option<EmbeddingInfo>,
    limits: StepLimits,
    vocab_size: usize,
    weights: Weights,
    /// What it does without.
    disabled: Vec<Disabled>,
    context: StartContext,
    /// Where plans are kept.
    model_key: Option<ModelKey>,
}

impl Loaded {
    /// Reads the model; its weights are charged to `device`.
    pub fn new(source: &Source, args: &EngineArgs, device: impl Into<Device>) -> Result<Self, Error> {
        Self::with(source, args, device, StartContext::default())
    }

    /// The same in a start that has begun already.
    pub fn with(
        source: &Source,
        args: &EngineArgs,
        device: impl Into<Device>,
        context: StartContext,
    ) -> Result<Self, Error> {
        let times = &context.times;
        let is_kept = context.plans.is_on();
        let model_key = is_kept.then(|| plans::model_key(source, args)).flatten();
        let earlier = model_key.as_ref().and_then(|key| context.plans.seconds_of(key));
        if let Some(seconds) = earlier {
            times.progress().expect(&seconds);
        }
        times.progress().enter(StartPhase::Weights);
        if let Some(threads) = args.limits.threads {
            plimsoll_kernels::set_threads(threads);
        }
        let device = device.into();
        if let Source::Files { model, .. } = source {
            // What no model of this configuration could do is found out before minutes of loading.
            let config = ModelConfig::read(model, &args.serve_as())?;
            spec::step_limits(args, config.max_tokens(), weights::defaults(&device))?;
        }
        let (text, weights, trained_for, vocab_size, stored_as, embedding) = match (source, device) {
            (Source::Files { model, tokenizer }, device) => {
                let read_text = || times.measure("text", || Text::read(tokenizer, args.model.load_format));
                let load = || weights::load(model, args, device, times.progress());
                let load_weights = || times.measure("weights", load);
                let (text, loaded) = if Text::is_absent(tokenizer) {
                    // That is to be found out now, not after minutes of loading.
                    (Ok(read_text()?), load_weights())
                } else {
                    // Neither needs the other, and a large vocabulary takes a second.
                    thread::scope(|scope| {
                        let text = scope.spawn(read_text);
                        let loaded = load_weights();
                        (text.join().unwrap_or_else(|panic| resume_unwind(panic)), loaded)
                    })
                };
                let mut text = text?;
                let (weights, about) = loaded?;
                text.generation = about.generation;
                text.eos_token_ids.extend(about.eos_token_ids);
                text.eos_token_ids.sort_unstable();
                text.eos_token_ids.dedup();
                let config = &about.config;
                let embedding = embedding::of_model(config);
                let (longest, vocab_size) = (config.max_tokens(), config.spec.vocab_size);
                (text, weights, longest, vocab_size, about.stored_as, embedding)
            }
            (Source::Sim, device) => {
                let budget = device.account().clone();
                let vocab_size = SimModel::text().vocab_size();
                (
                    Text::simulated()?,
                    Weights::Sim(
                        budget,
                        SimSpec::parse(args.model.model())
                            .unwrap_or_default()
                            .cache_groups(),
                    ),
                    sim_model_len(args),
                    vocab_size,
                    None,
                    embedding::simulated(args)?,
                )
            }
        };
        Ok(Self {
            text,
            limits: spec::step_limits(args, trained_for, weights.defaults())?,
            vocab_size,
            disabled: disabled::disabled(&weights, stored_as, embedding.as_ref(), args),
            weights,
            embedding,
            context,
            model_key,
        })
    }

    /// Measures and proves, without an engine.
    pub fn profile(&self, args: &EngineArgs) -> Result<Report, Error> {
        Ok(match &self.weights {
            Weights::Cpu(model, budget) => self.measure(self.cpu(model, budget), args)?,
            Weights::Gpu(model) => self.measure(self.gpu(model, args), args)?,
            Weights::Sim(budget, _) => self.measure(self.sim(budget, args), args)?,
        })
    }

    /// Measures, proves, and starts the engine; at most `max_queue` requests may wait there.
    pub fn start(&self, args: &EngineArgs, max_queue: usize) -> Result<Ready, Error> {
        match &self.weights {
            Weights::Cpu(model, budget) => self.spawn(self.cpu(model, budget), args, max_queue),
            Weights::Gpu(model) => self.spawn(self.gpu(model, args), args, max_queue),
            Weights::Sim(budget, _) => self.spawn(self.sim(budget, args), args, max_queue),
        }
    }

    fn measure<T: Target>(&self, mut target: T, args: &EngineArgs) -> Result<Report, Error> {
        Ok(self.prove(&mut target, args)?.report().clone())
    }

    fn cpu(&self, model: &Arc<Model>, budget: &Budget) -> ModelTarget {
        ModelTarget {
            model: Arc::clone(model),
            limits: self.limits,
            budget: budget.clone(),
        }
    }

    fn gpu(&self, model: &Arc<GpuModel>, args: &EngineArgs) -> GpuTarget {
        GpuTarget {
            model: Arc::clone(model),
            limits: self.limits,
            options: GpuOptions {
                enforce_eager: args.device.enforce_eager(),
            },
        }
    }

    fn sim(&self, budget: &Budget, args: &EngineArgs) -> SimTarget {
        let SimSpec {
            step_time, faults, ..
        } = SimSpec::parse(args.model.model()).unwrap_or_default();
        let step_time = step_time.map_or(SIM_STEP_TIME, |base| StepTime {
            base,
            ..StepTime::default()
        });
        SimTarget::new(self.limits, budget.clone(), step_time, faults)
    }

    fn pooling(&self) -> Option<Pooling> {
        self.embedding.as_ref().map(|embedding| embedding.pooling)
    }

    fn subject(&self) -> Subject {
        Subject {
            limits: self.limits,
            vocab_size: self.vocab_size,
            pooling: self.pooling(),
            groups: self.weights.cache_groups(),
            kv_bytes_per_token: self.weights.kv_bytes_per_token(),
            total: self.weights.account().meters().total,
            is_gpu: self.weights.gpu_bytes().is_some(),
            largest: self.weights.gpu_bytes(),
        }
    }

    fn prove<T: Target>(&self, target: &mut T, args: &EngineArgs) -> Result<Proved<T::State>, Error> {
        let StartContext { plans, times, .. } = &self.context;
        let mut spec = self.spec(args);
        for Disabled { path, reason } in &spec.disabled {
            tracing::info!("{path}: off ({reason})");
        }
        // A pinned size needs no measurement.
        let model_key = self.model_key.clone().filter(|_| spec.size == KvSize::Auto);
        let key = model_key.map(|model| plans::key(model, &self.weights, &self.subject(), args));
        spec.plan = key.as_ref().and_then(|key| plans::find(plans, key));
        match &spec.plan {
            Some(plan) => {
                let steps = plan.probe.scenarios.iter();
                let seconds = steps.map(|step| step.seconds).sum();
                times.progress().expect_validation(seconds);
            }
            None if spec.size == KvSize::Auto => times.progress().enter(StartPhase::Probe),
            None => {}
        }
        let mut progress = ProfileProgress::new(times.clone());
        let proved = profile(target, &spec, &mut progress);
        progress.finish();
        let proved = proved?;
        match (&key, proved.plan()) {
            (Some(key), Some(plan)) => {
                plans::keep(plans, key, plan, proved.report(), &times.progress().taken())
            }
            (Some(key), None) => plans::forget(plans, key),
            (None, _) => {}
        }
        summary::log(proved.report());
        Ok(proved)
    }

    fn spec(&self, args: &EngineArgs) -> ProfileSpec {
        let mut spec = spec::profile_spec(&self.subject(), args);
        spec.disabled.clone_from(&self.disabled);
        spec
    }

    fn spawn<T>(&self, mut target: T, args: &EngineArgs, max_queue: usize) -> Result<Ready, Error>
    where
        T: Target<State: 'static> + Send + 'static,
    {
        let proved = self.prove(&mut target, args)?;
        let times = &self.context.times;
        let (kv, report) = (proved.config().kv, proved.report().clone());
        let enable_prefix_caching =
            args.limits.prefix_caching() && !self.pooling().is_some_and(Pooling::needs_every_row);
        let cache_listener = self.context.cache_listener.clone();
        if cache_listener.is_some() && !enable_prefix_caching {
            tracing::warn!("there will be no KV events: a mean over all rows uses no prefix cache");
        }
        let config = EngineConfig {
            max_queue,
            vocab_size: self.vocab_size,
            enable_prefix_caching,
            steps_in_flight: self.weights.defaults().steps_in_flight,
            outage_patience: OUTAGE_PATIENCE,
            cache_listener,
        };
        let standing = Arc::new(Standing::new(
            self.weights.device(),
            report.clone(),
            times.clone(),
        ));
        let keeper = Keeper {
            target,
            spec: ProfileSpec {
                gives_advice: false,
                plan: proved.plan().cloned(),
                ..self.spec(args)
            },
            standing: Arc::clone(&standing),
            relock: self.context.relock.clone(),
        };
        Ok(Ready {
            engine: times.measure("engine", || EngineHandle::spawn(proved, keeper, &config))?,
            kv,
            report,
            standing,
        })
    }
}

/// What the profile found, and how long the start took.
pub(crate) fn report_json(report: &Report, times: &StartTimes) -> Value {
    let mut json = serde_json::to_value(report).expect("a report is JSON");
    json["start"] = times.to_json();
    json
}
