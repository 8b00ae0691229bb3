//! The plan of an earlier start of the same model, build, device and shape.

use plimsoll_core::Pooling;
use plimsoll_profiler::{Origin, Plan, Report};

use super::PhaseSeconds;
use super::spec::Subject;
use super::weights::Weights;
use crate::args::{EngineArgs, LoadFormat};
use crate::plan_cache::{DeviceKey, Key, Lookup, Miss, ModelKey, PlanCache, ShapeKey};
use crate::simulated::SimSpec;
use crate::source::Source;

/// Tells the model before its weights are read: if somebody replaces the files meanwhile, the plan is kept for the old ones.
pub(super) fn model_key(source: &Source, args: &EngineArgs) -> Option<ModelKey> {
    let seed = (args.model.load_format == LoadFormat::Dummy).then(|| args.limits.fixed_seed());
    match source {
        Source::Sim => {
            let spec = SimSpec::parse(args.model.model()).unwrap_or_default();
            Some(ModelKey::simulated(spec.window))
        }
        Source::Files { model, .. } => match ModelKey::of_files(model, args.serve_as().hf_overrides, seed) {
            Ok(key) => Some(key),
            Err(error) => {
                tracing::warn!(
                    "profile-cache outcome=off problem=\"{}: {error}\"",
                    model.display()
                );
                None
            }
        },
    }
}

pub(super) fn key(model: ModelKey, weights: &Weights, subject: &Subject, args: &EngineArgs) -> Key {
    let limits = subject.limits;
    let granted = args.memory.device_memory.map(|bytes| bytes.0);
    let (device, threads) = match weights {
        Weights::Gpu(model) => (DeviceKey::gpu(model.gpu()), None),
        Weights::Cpu(..) => (DeviceKey::cpu(granted), Some(plimsoll_kernels::threads())),
        Weights::Sim(..) => (DeviceKey::simulated(granted), None),
    };
    let shape = ShapeKey {
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_num_seqs: limits.max_num_seqs,
        max_model_len: limits.max_model_len,
        block_size: args.limits.block_size.tokens(),
        kv_bytes_per_token: weights.kv_bytes_per_token(),
        kv_cache_dtype: format!("{:?}", args.limits.kv_cache_dtype),
        dtype: format!("{:?}", args.device.dtype),
        // There are no graphs to do without on a CPU.
        enforce_eager: matches!(weights, Weights::Gpu(_)) && args.device.enforce_eager(),
        threads,
        pooling: subject.pooling.map(Pooling::name),
        ranks: 1,
    };
    Key::new(model, device, shape)
}

/// What is known, with a line in the log that says so.
pub(super) fn find(plans: &PlanCache, key: &Key) -> Option<Plan> {
    match plans.load(key)? {
        Lookup::Hit { plan, path } => {
            tracing::info!("profile-cache outcome=hit file={}", path.display());
            Some(plan)
        }
        Lookup::Miss(miss @ (Miss::Damaged { .. } | Miss::NotAllowed { .. })) => {
            tracing::warn!("profile-cache outcome=miss {miss}");
            None
        }
        Lookup::Miss(miss) => {
            tracing::info!("profile-cache outcome=miss {miss}");
            None
        }
    }
}

/// Keeps what was measured, or the size that an older measurement led to now: drift is the change since the last start, so
/// a flag or a neighbour that stays is told once. That a plan cannot be kept is no reason not to serve.
pub(super) fn keep(plans: &PlanCache, key: &Key, plan: &Plan, report: &Report, seconds: &PhaseSeconds) {
    if plan.kv_blocks != report.kv_blocks {
        let plan = Plan {
            kv_blocks: report.kv_blocks,
            ..plan.clone()
        };
        if let Err(error) = plans.store(key, &plan, seconds) {
            tracing::debug!("profile-cache outcome=not-updated problem=\"{error}\"");
        }
    } else if report.origin == Origin::Measured {
        match plans.store(key, plan, seconds) {
            Ok(Some(path)) => tracing::info!("profile-cache outcome=stored file={}", path.display()),
            Ok(None) => {}
            Err(error) => tracing::warn!(
                "profile-cache outcome=not-stored problem=\"{error}\": the next start measures again; --profile-cache-dir \
                 names another directory, --no-profile-cache keeps nothing"
            ),
        }
    }
}

/// The proof contradicts what the plan predicts: the next start measures.
pub(super) fn forget(plans: &PlanCache, key: &Key) {
    match plans.remove(key) {
        Ok(()) => tracing::warn!(
            "profile-cache outcome=removed: memory is not as it was measured; the next start measures"
        ),
        Err(error) => tracing::warn!("profile-cache outcome=not-removed problem=\"{error}\""),
    }
}
