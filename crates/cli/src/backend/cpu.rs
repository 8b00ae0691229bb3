//! The CPU, within a budget of bytes.

use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use plimsoll_core::{BuildError, Component, KvConfig, Meters, Oom, StateConfig, StepLimits};
use plimsoll_device::{Budget, Charge, Machine};
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_kernels::{Exchange, WeightType, instruction_set};
use plimsoll_model::{Cancel, LoadOptions, LoadProgress, Model, ModelConfig, Runner, Shard};
use plimsoll_profiler::{ArenaUse, BuildProgress, Disabled, Footprint, ScenarioShape};

use super::predicted::{arena_use, holding, step_size};
use super::{
    Backend, CPU_DEFAULTS, Defaults, Device, EngineState, Hardware, LoadedModel, ModelFacts, ModelOn,
    SharedExchange, Weights,
};
use crate::args::{DType, DeviceChoice};
use crate::error::Error;
use crate::plan_cache::DeviceKey;
use crate::settings::EngineSettings;

/// A model on the CPU, within a budget of bytes, or a rank's part of it. Clones of the budget share it.
pub type CpuBackend = ModelOn<CpuRank>;

/// A rank on the CPU, or all of it.
#[derive(Debug)]
pub struct CpuRank {
    budget: Budget,
    shard: Shard,
    /// Where it meets the other ranks, if there are any.
    exchange: Option<SharedExchange>,
    /// What the exchange takes.
    _charge: Option<Charge>,
}

impl CpuRank {
    /// All of a model.
    pub fn whole(budget: Budget) -> Self {
        Self {
            budget,
            shard: Shard::WHOLE,
            exchange: None,
            _charge: None,
        }
    }

    /// A part of one.
    ///
    /// # Errors
    /// Where the budget has no room for what ranks exchange.
    pub fn part(budget: Budget, exchange: SharedExchange) -> Result<Self, Oom> {
        let charge = budget.charge(Component::Runtime, Exchange::BYTES as u64)?;
        let shard = {
            let exchange = exchange.lock().unwrap_or_else(PoisonError::into_inner);
            Shard {
                rank: exchange.rank(),
                ranks: exchange.ranks(),
            }
        };
        Ok(Self {
            budget,
            shard,
            exchange: Some(exchange),
            _charge: Some(charge),
        })
    }
}

impl Hardware for CpuRank {
    fn check(&self, settings: &EngineSettings, config: &ModelConfig) -> Result<(), Error> {
        check_dtype(settings.dtype, config.dtype)
    }
}

impl CpuBackend {
    /// Compute threads are of the whole process.
    fn set_threads(&self) {
        if let Some(threads) = self.settings.threads {
            plimsoll_kernels::set_threads(threads);
        }
    }
}

impl Device for CpuBackend {
    fn kind(&self) -> &'static str {
        "cpu"
    }

    fn defaults(&self) -> Defaults {
        CPU_DEFAULTS
    }

    /// The memory of this machine, or what a flag grants beyond it, as for a plan of another.
    fn largest(&self) -> Option<u64> {
        let ranks = self.settings.tensor_parallel_size as u64;
        let size = Machine::this().size()? / ranks;
        Some(size.max(self.device.budget.meters().total))
    }

    fn footprint(&self, limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error> {
        self.set_threads();
        let options = LoadOptions {
            shard: self.device.shard,
            ..self.settings.load_options()
        };
        let model = plimsoll_model::Footprint::read(&self.model, options)?;
        let facts = ModelFacts::of(
            model.config(),
            None,
            self.settings.block_size,
            model.kv_bytes_per_token(),
            model.state_bytes(),
        );
        let footprint = CpuFootprint {
            model: Rc::new(model),
            limits,
            device: self.meters(),
        };
        Ok((facts, Box::new(footprint)))
    }
}

impl Backend for CpuBackend {
    fn load(
        &self,
        _earlier: &[LinearWays],
        cancel: &Cancel,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, Error> {
        self.set_threads();
        let load_options = LoadOptions {
            shard: self.device.shard,
            cancel: cancel.clone(),
            ..self.settings.load_options()
        };
        let CpuRank { budget, exchange, .. } = &self.device;
        let model = Model::load_rank(&self.model, load_options, budget, exchange.clone(), progress)?;
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
            disabled: disabled(instruction_set(), &self.settings.device),
            linear_ways: Vec::new(),
            weights: vec![Arc::new(CpuWeights {
                model,
                budget: self.device.budget.clone(),
            })],
        })
    }

    fn account(&self) -> &Budget {
        &self.device.budget
    }

    /// Its memory is that of everybody, so only what a flag grants of it is the same at each start.
    fn plan_key(&self) -> DeviceKey {
        DeviceKey::cpu(self.settings.device_memory, plimsoll_kernels::threads())
    }
}

/// A CPU keeps weights as they are stored: no other type can be asked for.
fn check_dtype(asked: DType, stored: Option<WeightType>) -> Result<(), Error> {
    let same = match asked {
        DType::Auto => return Ok(()),
        DType::Bfloat16 => WeightType::Bf16,
        DType::Float16 => WeightType::F16,
        DType::Float32 => WeightType::F32,
    };
    if stored == Some(same) {
        return Ok(());
    }
    let stored = match stored {
        Some(WeightType::Bf16) => "bfloat16",
        Some(WeightType::F16) => "float16",
        Some(WeightType::F32) => "float32",
        _ => "quantised or of several types",
    };
    Err(Error::configuration(
        "--dtype",
        format!(
            "a CPU keeps weights as the model stores them, here {stored}, and computes in float32; leave it at auto"
        ),
    ))
}

#[derive(Debug)]
struct CpuWeights {
    model: Arc<Model>,
    budget: Budget,
}

impl Weights for CpuWeights {
    fn build(
        &self,
        config: &StateConfig,
        limits: &StepLimits,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<Box<dyn EngineState>, BuildError> {
        let touched = &mut || piece(BuildProgress::Memory);
        let state = self.model.build_state(config, limits, &self.budget, touched)?;
        Ok(Box::new(state))
    }

    fn slowest_encode(&self) -> Duration {
        self.model.slowest_encode()
    }
}

impl EngineState for Runner {
    fn take_arena_high_water(&mut self) -> u64 {
        Self::take_arena_high_water(self)
    }

    fn release_canary(&mut self) {
        Self::release_canary(self);
    }
}

fn disabled(instruction_set: &str, choice: &DeviceChoice) -> Vec<Disabled> {
    let mut disabled = Vec::new();
    if instruction_set != "avx512-vnni" {
        disabled.push(Disabled {
            path: "AVX-512 VNNI kernels",
            reason: format!("this CPU does not have all of it: {instruction_set} is used"),
        });
    }
    disabled.push(Disabled {
        path: "step overlap",
        reason: "a CPU computes one step at a time".to_owned(),
    });
    if *choice == DeviceChoice::Auto {
        disabled.push(Disabled {
            path: "GPU",
            reason: "not in use, see the log line about the device".to_owned(),
        });
    }
    disabled
}

/// What a model on a CPU would take.
struct CpuFootprint {
    model: Rc<plimsoll_model::Footprint>,
    limits: StepLimits,
    /// Before the model is loaded.
    device: Meters,
}

impl Footprint for CpuFootprint {
    fn idle(&self) -> Meters {
        let weights = [(Component::Weights, self.model.weights_bytes())];
        holding(&self.device, &weights, 0)
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let parts = [
            (Component::Kv, self.model.kv_bytes(kv)),
            (
                Component::States,
                self.model.state_bytes().saturating_mul(kv.state_slots as u64),
            ),
            (Component::Staging, self.model.staging_bytes(&self.limits)),
            (Component::Encoder, self.model.encoder_bytes()),
            (Component::Arena, arena),
        ];
        holding(&self.idle(), &parts, 0)
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        let steps: Vec<_> = steps.iter().map(step_size).collect();
        arena_use(self.model.arena(&steps))
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        scratch
    }

    fn for_limits(&self, limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::clone(&self.model),
            limits: *limits,
            device: self.device,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_stay_as_they_are_stored() {
        for stored in [None, Some(WeightType::Bf16), Some(WeightType::Q4K)] {
            check_dtype(DType::Auto, stored).unwrap();
        }
        check_dtype(DType::Bfloat16, Some(WeightType::Bf16)).unwrap();
        check_dtype(DType::Float16, Some(WeightType::F16)).unwrap();
        check_dtype(DType::Float32, Some(WeightType::F32)).unwrap();
        for (stored, said) in [
            (Some(WeightType::F32), "float32"),
            (Some(WeightType::Q4K), "quantised"),
            (None, "quantised"),
        ] {
            let error = check_dtype(DType::Bfloat16, stored).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let text = error.to_string();
            assert!(text.starts_with("--dtype") && text.contains(said), "{text}");
        }
    }

    #[test]
    fn what_a_cpu_does_without_is_named() {
        let paths = |set, choice: &DeviceChoice| {
            let disabled = disabled(set, choice);
            disabled.iter().map(|disabled| disabled.path).collect::<Vec<_>>()
        };
        assert_eq!(paths("avx512-vnni", &DeviceChoice::Cpu), ["step overlap"]);
        assert_eq!(
            paths("scalar", &DeviceChoice::Auto),
            ["AVX-512 VNNI kernels", "step overlap", "GPU"]
        );
    }
}
