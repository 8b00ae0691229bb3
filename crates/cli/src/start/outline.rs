//! A model as it would be loaded, without its weights: what can be predicted of its profile.

use std::path::Path;
use std::rc::Rc;

use plimsoll_core::{Component, Meters, Oom, RefusedBy};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::cuda::{GpuFootprint, GpuOptions, GpuStateShape};
use plimsoll_model::{ModelConfig, ModelError};
use plimsoll_profiler::{Footprint, Prediction, ProfileError, ProfileSpec, Setting, predict};
use plimsoll_sim::SimModel;

use super::spec::{Subject, profile_spec, step_limits};
use super::weights::{CPU, GPU, load_options};
use super::{embedding, sim_model_len};
use crate::args::EngineArgs;
use crate::device::{Device, Site};
use crate::error::Error;
use crate::simulated::SimSpec;
use crate::source::Source;
use crate::target::{CpuPlan, GpuPlan, SIM_KV_BYTES_PER_TOKEN, SimPlan, holding};

/// Enough to predict what the profile will find.
#[allow(missing_debug_implementations, reason = "nobody prints it")]
pub struct Outline {
    footprint: Box<dyn Footprint>,
    spec: ProfileSpec,
}

impl Outline {
    /// Reads the configuration, and the headers of weights that are there.
    ///
    /// # Errors
    /// As [`super::Loaded::new`], as far as what is read tells.
    pub fn new(source: &Source, args: &EngineArgs, site: &Site) -> Result<Self, Error> {
        if let Some(threads) = args.limits.threads {
            plimsoll_kernels::set_threads(threads);
        }
        match (source, site) {
            (Source::Files { model, .. }, Site::There(Device::Cpu(budget))) => {
                budget.look();
                Self::on_cpu(model, args, budget.meters())
            }
            (Source::Files { model, .. }, Site::There(Device::Gpu(gpu))) => Self::on_gpu(model, args, gpu),
            (Source::Files { model, .. }, Site::AssumedGpu(bytes)) => {
                Self::on_assumed_gpu(model, args, *bytes)
            }
            (Source::Sim, Site::There(device)) => Self::simulated(args, device.meters()),
            (Source::Sim, Site::AssumedGpu(_)) => unreachable!("the simulated model has a device of its own"),
        }
    }

    /// What [`super::Loaded::profile`] would find.
    ///
    /// # Errors
    /// [`Error::Predicted`]: what it would end with.
    pub fn predict(&self) -> Result<Prediction, Error> {
        let idle = self.footprint.idle();
        let (weights, room) = (
            idle.by_component.get(Component::Weights),
            idle.total.saturating_sub(idle.peers()),
        );
        let predicted = match idle.reserved > room {
            true => Err(Error::WeightsDoNotFit(Oom {
                requested: weights,
                component: Component::Weights,
                refused_by: RefusedBy::Device,
                meters: Box::new(idle),
            })),
            false => predict(&self.spec, &*self.footprint).map_err(Error::from),
        };
        predicted.map_err(|error| Error::Predicted(Box::new(error)))
    }

    /// `error` of a start of this, with the size of the device that would be enough where nothing could be measured.
    pub(crate) fn enough_for(source: &Source, args: &EngineArgs, device: &Device, error: Error) -> Error {
        if error.exit_code() == 4 {
            device.log_neighbours();
        }
        let unmeasured = match &error {
            Error::WeightsDoNotFit(_) => true,
            error => error
                .diagnostic()
                .is_some_and(|diagnostic| diagnostic.knobs.is_empty() && diagnostic.measured_peak.is_none()),
        };
        if !unmeasured {
            return error;
        }
        let outline = Self::new(source, args, &Site::There(device.clone()));
        let refused = outline
            .ok()
            .and_then(|outline| predict(&outline.spec, &*outline.footprint).err());
        let knobs = match refused {
            Some(ProfileError::DoesNotFit(diagnostic)) => diagnostic.knobs,
            _ => Vec::new(),
        };
        let bytes = knobs.iter().find_map(|knob| match knob.settings[..] {
            [Setting::DeviceMemory(bytes)] => Some(bytes),
            _ => None,
        });
        match bytes {
            Some(bytes) => Error::NeedsLargerDevice {
                error: Box::new(error),
                bytes,
            },
            None => error,
        }
    }

    fn on_cpu(path: &Path, args: &EngineArgs, device: Meters) -> Result<Self, Error> {
        let model = plimsoll_model::Footprint::read(path, load_options(args))?;
        let config = model.config();
        let limits = step_limits(args, config.max_tokens(), CPU)?;
        let subject = Subject {
            limits,
            vocab_size: config.spec.vocab_size,
            pooling: config.pooling(),
            groups: model.config().spec.cache_groups(),
            kv_bytes_per_token: model.kv_bytes_per_token(),
            total: device.total,
            is_gpu: false,
            largest: None,
        };
        Ok(Self {
            spec: profile_spec(&subject, args),
            footprint: Box::new(CpuPlan {
                model: Rc::new(model),
                limits,
                device,
            }),
        })
    }

    fn on_gpu(path: &Path, args: &EngineArgs, gpu: &Gpu) -> Result<Self, Error> {
        let model = GpuFootprint::on(gpu, path, gpu_shape(path, args)?)?;
        let meters = gpu.meters();
        Ok(Self::of_gpu(model, args, meters, Some(gpu.info().total_bytes)))
    }

    /// The runtime is as large as on the GPU where it was measured.
    fn on_assumed_gpu(path: &Path, args: &EngineArgs, bytes: u64) -> Result<Self, Error> {
        let model = GpuFootprint::assumed(path, gpu_shape(path, args)?)?;
        let empty = Meters {
            total: bytes,
            free: bytes,
            ..Meters::default()
        };
        let runtime = [(Component::Runtime, GpuFootprint::ASSUMED_RUNTIME_BYTES)];
        Ok(Self::of_gpu(model, args, holding(&empty, &runtime, 0), None))
    }

    fn of_gpu(model: GpuFootprint, args: &EngineArgs, device: Meters, largest: Option<u64>) -> Self {
        let subject = Subject {
            limits: model.shape().limits,
            vocab_size: model.config().spec.vocab_size,
            pooling: model.config().pooling(),
            groups: model.config().spec.cache_groups(),
            kv_bytes_per_token: model.kv_bytes_per_token(),
            total: device.total,
            is_gpu: true,
            largest,
        };
        Self {
            spec: profile_spec(&subject, args),
            footprint: Box::new(GpuPlan {
                model: Rc::new(model),
                device,
            }),
        }
    }

    fn simulated(args: &EngineArgs, device: Meters) -> Result<Self, Error> {
        let subject = Subject {
            limits: step_limits(args, sim_model_len(args), CPU)?,
            vocab_size: SimModel::text().vocab_size(),
            pooling: embedding::simulated(args)?.map(|embedding| embedding.pooling),
            groups: SimSpec::parse(args.model.model())
                .unwrap_or_default()
                .cache_groups(),
            kv_bytes_per_token: SIM_KV_BYTES_PER_TOKEN,
            total: device.total,
            is_gpu: false,
            largest: None,
        };
        Ok(Self {
            spec: profile_spec(&subject, args),
            footprint: Box::new(SimPlan { device }),
        })
    }
}

fn gpu_shape(path: &Path, args: &EngineArgs) -> Result<GpuStateShape, Error> {
    let serve_as = args.serve_as();
    let config = ModelConfig::read(path, &serve_as).map_err(|error: ModelError| Error::from(error))?;
    Ok(GpuStateShape {
        limits: step_limits(args, config.max_tokens(), GPU)?,
        serve_as,
        block_size: args.limits.block_size,
        options: GpuOptions {
            enforce_eager: args.device.enforce_eager(),
        },
    })
}
