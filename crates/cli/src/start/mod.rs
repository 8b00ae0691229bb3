//! From files to an engine that is proved: load, profile, spawn. Nothing listens yet.

mod keeper;
mod spec;
mod text;
mod weights;

use std::path::Path;
use std::sync::Arc;

use plimsoll_core::{Executor, KvConfig, StepLimits};
use plimsoll_device::Budget;
use plimsoll_engine::{EngineConfig, EngineHandle};
use plimsoll_model::Model;
use plimsoll_model::cuda::{GpuModel, GpuOptions};
use plimsoll_profiler::{Proved, Report, Target, profile};
use plimsoll_sim::SimModel;

use crate::args::EngineArgs;
use crate::device::Device;
use crate::error::Error;
use crate::progress::ProfileProgress;
use crate::source::Source;
use crate::standing::Standing;
use crate::target::{GpuTarget, ModelTarget, SimTarget};

use keeper::Keeper;
pub use text::Text;
use weights::Weights;

/// Context length of the simulated model.
const SIM_MODEL_LEN: usize = 8192;

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

/// A model that is loaded: weights and text, but no engine yet.
#[derive(Debug)]
pub struct Loaded {
    /// Text in and out.
    pub text: Text,
    limits: StepLimits,
    vocab_size: usize,
    weights: Weights,
}

impl Loaded {
    /// Reads the model; its weights are charged to `device`.
    pub fn new(source: &Source, args: &EngineArgs, device: impl Into<Device>) -> Result<Self, Error> {
        if let Some(threads) = args.limits.threads {
            plimsoll_kernels::set_threads(threads);
        }
        let (text, weights, trained_for, vocab_size) = match (source, device.into()) {
            (Source::Files { model, tokenizer }, device) => {
                let mut text = Text::read(tokenizer, args.model.load_format)?;
                let (weights, about) = weights::load(model, args, device)?;
                text.generation = about.generation;
                text.eos_token_ids.extend(about.eos_token_ids);
                text.eos_token_ids.sort_unstable();
                text.eos_token_ids.dedup();
                let spec = &about.config.spec;
                (text, weights, spec.max_position_embeddings, spec.vocab_size)
            }
            (Source::Sim, device) => {
                let budget = device.account().clone();
                let vocab_size = SimModel::text().vocab_size();
                (
                    Text::simulated()?,
                    Weights::Sim(budget),
                    SIM_MODEL_LEN,
                    vocab_size,
                )
            }
        };
        Ok(Self {
            text,
            limits: spec::step_limits(args, trained_for, weights.defaults())?,
            vocab_size,
            weights,
        })
    }

    /// Measures and proves, without an engine.
    pub fn profile(&self, args: &EngineArgs) -> Result<Report, Error> {
        Ok(match &self.weights {
            Weights::Cpu(model, budget) => self.prove(self.cpu(model, budget), args)?.report().clone(),
            Weights::Gpu(model) => self.prove(self.gpu(model, args), args)?.report().clone(),
            Weights::Sim(budget) => self.prove(self.sim(budget), args)?.report().clone(),
        })
    }

    /// Measures, proves, and starts the engine; at most `max_queue` requests may wait there.
    pub fn start(&self, args: &EngineArgs, max_queue: usize) -> Result<Ready, Error> {
        match &self.weights {
            Weights::Cpu(model, budget) => {
                self.spawn(self.prove(self.cpu(model, budget), args)?, args, max_queue)
            }
            Weights::Gpu(model) => self.spawn(self.prove(self.gpu(model, args), args)?, args, max_queue),
            Weights::Sim(budget) => self.spawn(self.prove(self.sim(budget), args)?, args, max_queue),
        }
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

    fn sim(&self, budget: &Budget) -> SimTarget {
        SimTarget {
            limits: self.limits,
            budget: budget.clone(),
        }
    }

    fn prove<T: Target>(&self, mut target: T, args: &EngineArgs) -> Result<Proved<T::State>, Error> {
        let spec = spec::profile_spec(&self.weights, self.limits, self.vocab_size, args);
        let mut progress = ProfileProgress::new();
        let proved = profile(&mut target, &spec, &mut progress);
        progress.finish();
        let proved = proved?;
        if let Some(path) = &args.memory.profile_report {
            write_json(path, proved.report())?;
        }
        Ok(proved)
    }

    fn spawn<S: Executor + 'static>(
        &self,
        proved: Proved<S>,
        args: &EngineArgs,
        max_queue: usize,
    ) -> Result<Ready, Error> {
        let (kv, report) = (proved.config().kv, proved.report().clone());
        let config = EngineConfig {
            max_queue,
            vocab_size: self.vocab_size,
            enable_prefix_caching: args.limits.prefix_caching(),
            steps_in_flight: self.weights.defaults().steps_in_flight,
        };
        let standing = Arc::new(Standing::new(self.weights.device(), report.clone()));
        let keeper = Keeper {
            standing: Arc::clone(&standing),
        };
        Ok(Ready {
            engine: EngineHandle::spawn(proved, keeper, &config)?,
            kv,
            report,
            standing,
        })
    }
}

fn write_json(path: &Path, report: &Report) -> Result<(), Error> {
    let mut text = serde_json::to_string_pretty(report).expect("a report is JSON");
    text.push('\n');
    std::fs::write(path, text).map_err(|source| Error::Write {
        path: path.to_owned(),
        source,
    })
}
