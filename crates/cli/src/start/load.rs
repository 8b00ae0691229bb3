//! The first step of a start: a model's weights on its device, and its text.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_core::ExpertLoads;
use plimsoll_images::Processor;
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::Cancel;
use plimsoll_profiler::{Disabled, Loading, ProfileSpec};
use plimsoll_server::{EmbeddingInfo, StartPhase};

use super::disabled::disabled;
use super::spec::{Limits, limits, profile_spec};
use super::{StartTimes, Text, plans};
use crate::backend::{Backend, Defaults, LoadedModel, weights_bytes};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::images;
use crate::plan_cache::ModelKey;
use crate::progress::bytes_bar;
use crate::settings::EngineSettings;
use crate::source::Source;
use crate::terminal;

/// A model that is loaded, and not measured yet.
#[derive(Debug)]
pub struct Loaded {
    /// Text in and out.
    pub text: Text,
    pub(super) settings: Arc<EngineSettings>,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) model: LoadedModel,
    /// How prompts take images, if they are served.
    pub(crate) processor: Option<Processor>,
    /// Device memory while it was loaded.
    pub(super) loading: Option<Loading>,
    pub(super) limits: Limits,
    pub(super) times: StartTimes,
    /// Names the model in plans of starts; `None` where none are kept.
    pub(super) model_key: Option<ModelKey>,
}

impl Loaded {
    /// Reads the model of `source`, which is that of `backend` too.
    ///
    /// # Errors
    /// Where it cannot be read or served, or does not fit.
    pub fn new(
        source: &Source,
        settings: &Arc<EngineSettings>,
        backend: Arc<dyn Backend>,
        times: &StartTimes,
    ) -> Result<Self, Error> {
        // Before the weights are read: if somebody replaces the files meanwhile, a plan is kept for the old ones.
        let model_key = plans::model_key(source, settings);
        let earlier = model_key.as_ref().and_then(|key| settings.plans.seconds_of(key));
        if let Some(seconds) = earlier {
            times.progress().expect(&seconds);
        }
        let linear_key = model_key
            .clone()
            .filter(|_| backend.kind() == "cuda")
            .map(|model| plans::linear_key(model, &*backend, settings));
        let find_ways = |key| plans::find_linear_ways(&settings.plans, key);
        let earlier = linear_key.as_ref().map_or_else(Vec::new, find_ways);
        times.progress().enter(StartPhase::Weights);
        let overrides = &settings.serve_as.hf_overrides;
        if !overrides.is_empty() {
            tracing::info!("config.json with --hf-overrides {overrides}");
        }
        // What no model of this configuration could do is found out before minutes of loading.
        let limits = limits(settings, &*backend)?;
        let cancel = Cancel::default();
        let read_text = || {
            let text = times.measure("text", || read_text(source, settings, &*backend));
            // Nobody waits for the weights of a model whose text cannot be read.
            text.inspect_err(|_| cancel.cancel())
        };
        let load = || times.measure("weights", || load(source, &*backend, &earlier, &cancel, times));
        let (text, model) = if Text::is_absent(source) {
            (Ok(read_text()?), load())
        } else {
            // Neither needs the other, and a large vocabulary takes a second.
            thread::scope(|scope| {
                let text = scope.spawn(read_text);
                let model = load();
                (text.join().unwrap_or_else(|panic| resume_unwind(panic)), model)
            })
        };
        let (mut text, (mut model, loading)) = (text?, model?);
        if let Some(key) = &linear_key {
            plans::keep_linear_ways(&settings.plans, key, &model.linear_ways);
        }
        text.generation = model.generation.clone();
        text.eos_token_ids.extend(&model.eos_token_ids);
        text.eos_token_ids.sort_unstable();
        text.eos_token_ids.dedup();
        model.disabled.extend(disabled(&model.facts, settings));
        let processor = match (source, model.facts.images) {
            (Source::Files { model, .. }, Some(_)) => images::processor(model, settings)?,
            _ => None,
        };
        Ok(Self {
            text,
            processor,
            settings: Arc::clone(settings),
            backend,
            model,
            loading,
            limits,
            times: times.clone(),
            model_key,
        })
    }

    /// How it makes vectors, if it is served for embeddings: it generates no text then.
    pub fn embedding(&self) -> Option<&EmbeddingInfo> {
        self.model.facts.embedding.as_ref()
    }

    /// How much longer than the worst of the proof a step may take: as long as the largest image took to encode.
    pub(crate) fn slowest_encode(&self) -> Duration {
        let ranks = self.model.weights.iter();
        ranks
            .map(|weights| weights.slowest_encode())
            .max()
            .unwrap_or_default()
    }

    /// Weights of the model, and those of them that are read for one token.
    pub(crate) fn num_parameters(&self) -> [Option<u64>; 2] {
        let facts = &self.model.facts;
        [facts.num_parameters, facts.num_active_parameters]
    }

    /// Where tokens go, if the model has experts and its device counts that.
    pub(crate) fn expert_loads(&self) -> Option<Arc<ExpertLoads>> {
        self.model.expert_loads.clone()
    }

    /// What is asked of the auto-profile.
    pub(super) fn spec(&self) -> ProfileSpec {
        let total = self.backend.account().meters().total;
        let disabled: &[Disabled] = &self.model.disabled;
        let Defaults {
            steps_in_flight,
            contexts_take_memory,
            ..
        } = self.backend.defaults();
        ProfileSpec {
            timed_in_flight: steps_in_flight,
            contexts_take_memory,
            loading: self.loading,
            disabled: disabled.to_vec(),
            ..profile_spec(
                &self.settings,
                &*self.backend,
                self.limits,
                &self.model.facts,
                total,
            )
        }
    }
}

/// The text of a model, if it is one that the model can be given.
fn read_text(source: &Source, settings: &EngineSettings, backend: &dyn Backend) -> Result<Text, Error> {
    let text = Text::read(source, settings)?;
    if let Source::Files { tokenizer, .. } = source
        && !Text::is_absent(source)
    {
        text.check_ids(tokenizer, backend.vocab_size()?)?;
    }
    Ok(text)
}

fn load(
    source: &Source,
    backend: &dyn Backend,
    earlier: &[LinearWays],
    cancel: &Cancel,
    times: &StartTimes,
) -> Result<(LoadedModel, Option<Loading>), Error> {
    let mut bar = None;
    let begin = Instant::now();
    backend.reset_high_water();
    let before = backend.account().meters().reserved;
    let loaded = backend.load(earlier, cancel, &mut |progress| {
        let bar = bar.get_or_insert_with(|| bytes_bar("weights", progress.total));
        bar.set_position(progress.done);
        times.progress().bytes(progress.done, progress.total);
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let loaded = loaded?;
    let Source::Files { model, .. } = source else {
        return Ok((loaded, None));
    };
    let (weights, seconds) = (weights_bytes(backend), begin.elapsed().as_secs_f64());
    let bytes = Bytes(weights);
    let each = match backend.ranks() {
        1 => String::new(),
        ranks => format!(" on each of {ranks} ranks"),
    };
    tracing::info!("loaded {}: {bytes}{each} in {seconds:.1} s", model.display());
    terminal::phase("weights", format_args!("{bytes}{each} in {seconds:.1} s"));
    let loading = Loading::new(before, backend.account().meters().reserved_high, weights);
    if !loading.is_bounded() {
        tracing::warn!("{loading}");
    }
    Ok((loaded, Some(loading)))
}
