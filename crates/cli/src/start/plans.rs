//! The plan of an earlier start of the same model, build, device and shape.

use plimsoll_core::Pooling;
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_profiler::{Origin, Plan, ProfileSpec, Report};

use super::PhaseSeconds;
use crate::backend::{Backend, ModelFacts};
use crate::plan_cache::{Key, LinearKey, Lookup, Miss, ModelKey, PlanCache, ShapeKey};
use crate::settings::EngineSettings;
use crate::simulated::SimSpec;
use crate::source::Source;

/// Names the model; `None` where no plans are kept.
pub(super) fn model_key(source: &Source, settings: &EngineSettings) -> Option<ModelKey> {
    if !settings.plans.is_on() {
        return None;
    }
    let Source::Files { model, .. } = source else {
        let spec = SimSpec::parse(&settings.model).unwrap_or_default();
        return Some(ModelKey::simulated(spec.window));
    };
    let seed = settings.is_dummy().then(|| settings.fixed_seed());
    match ModelKey::of_files(model, settings.serve_as.hf_overrides.clone(), seed) {
        Ok(key) => Some(key),
        Err(error) => {
            tracing::warn!(
                "profile-cache outcome=off problem=\"{}: {error}\"",
                model.display()
            );
            None
        }
    }
}

/// For `facts` of that model and what is asked of it, on that device.
pub(super) fn key(
    model: ModelKey,
    device: &dyn Backend,
    settings: &EngineSettings,
    spec: &ProfileSpec,
    facts: &ModelFacts,
) -> Key {
    let limits = &spec.limits;
    let shape = ShapeKey {
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_num_seqs: limits.max_num_seqs,
        max_model_len: limits.max_model_len,
        block_size: settings.block_size.tokens(),
        kv_bytes_per_token: facts.kv_bytes_per_token,
        state_bytes: facts.state_bytes,
        state_slots: spec.state_slots(),
        kv_cache_dtype: format!("{:?}", settings.kv_cache_dtype),
        dtype: format!("{:?}", settings.dtype),
        quantization: facts.quantization.clone(),
        pooling: facts.pooling().map(Pooling::name),
        max_patches: facts.images.map(|images| images.limits.max_patches),
        ranks: device.ranks(),
    };
    Key::new(model, device.plan_key(), shape)
}

/// For the linear layers of that model as the settings want them, on that device.
pub(super) fn linear_key(model: ModelKey, device: &dyn Backend, settings: &EngineSettings) -> LinearKey {
    let quantization = settings.serve_as.quantization;
    LinearKey::new(
        model,
        device.plan_key(),
        format!("{:?}", settings.dtype),
        quantization.map(|quantization| format!("{quantization:?}")),
        device.ranks(),
    )
}

/// The choices of linear layers that an earlier start made on each rank, or none.
pub(super) fn find_linear_ways(plans: &PlanCache, key: &LinearKey) -> Vec<LinearWays> {
    match plans.load(key) {
        Some(Lookup::Hit { plan, path }) => {
            tracing::debug!(
                "profile-cache of=linear-layers outcome=hit file={}",
                path.display()
            );
            plan
        }
        Some(Lookup::Miss(miss @ (Miss::Damaged { .. } | Miss::NotAllowed { .. }))) => {
            tracing::warn!("profile-cache of=linear-layers outcome=miss {miss}");
            Vec::new()
        }
        Some(Lookup::Miss(miss)) => {
            tracing::debug!("profile-cache of=linear-layers outcome=miss {miss}");
            Vec::new()
        }
        None => Vec::new(),
    }
}

/// Keeps what was measured on all ranks, if anything was.
pub(super) fn keep_linear_ways(plans: &PlanCache, key: &LinearKey, ways: &[LinearWays]) {
    if ways.is_empty() {
        return;
    }
    match plans.store(key, &ways, &PhaseSeconds::new()) {
        Ok(Some(path)) => tracing::debug!(
            "profile-cache of=linear-layers outcome=stored file={}",
            path.display()
        ),
        Ok(None) => {}
        Err(error) => tracing::warn!(
            "profile-cache of=linear-layers outcome=not-stored problem=\"{error}\": the next start measures linear layers again"
        ),
    }
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
    if plan.kv_pages != report.sizing.kv_pages {
        let plan = Plan {
            kv_pages: report.sizing.kv_pages,
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
            "profile-cache outcome=removed: memory differs from what was measured; the next start measures again"
        ),
        Err(error) => tracing::warn!("profile-cache outcome=not-removed problem=\"{error}\""),
    }
}
