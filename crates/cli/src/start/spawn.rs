//! The third step of a start: the engine, on a state that is proved.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::CacheListener;
use plimsoll_engine::{EngineConfig, EngineHandle};
use plimsoll_profiler::{ProfileSpec, Report};

use super::rebuild::Rebuilder;
use super::{Loaded, Proof, StateMemory};
use crate::error::Error;
use crate::lock::Relock;

/// How long requests wait where device memory ran out and too little of it comes back for a KV cache.
const OUTAGE_PATIENCE: Duration = Duration::from_secs(30);

/// An engine that may serve.
#[derive(Debug)]
pub struct Started {
    /// Where requests go.
    pub engine: EngineHandle,
    /// How it came to that size.
    pub report: Report,
    /// The same and the device's meters, as they are from now on.
    pub memory: Arc<StateMemory>,
}

/// How an engine serves.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// Requests that may wait.
    pub max_queue: usize,
    /// Keeps others from the device while a state is built again.
    pub relock: Relock,
    /// Who hears what the prefix cache holds.
    pub cache_listener: Option<Arc<dyn CacheListener>>,
}

impl Loaded {
    /// Starts the engine.
    ///
    /// # Errors
    /// Where the operating system gives no thread.
    pub fn spawn(&self, proof: Proof, serving: Serving) -> Result<Started, Error> {
        let Proof { proved, target, spec } = proof;
        let Serving {
            max_queue,
            relock,
            cache_listener,
        } = serving;
        let report = proved.report().clone();
        let enable_prefix_caching = self.model.facts.shares_prefixes(&self.settings);
        if cache_listener.is_some() && !enable_prefix_caching {
            tracing::warn!("no KV events: mean pooling does not use the prefix cache");
        }
        let config = EngineConfig {
            max_queue,
            vocab_size: self.model.facts.vocab_size,
            images: self.model.facts.images,
            enable_prefix_caching,
            steps_in_flight: self.backend.defaults().steps_in_flight,
            outage_patience: OUTAGE_PATIENCE,
            target_itl: self.settings.target_itl,
            cache_listener,
        };
        let memory = StateMemory::new(Arc::clone(&self.backend), report.clone(), self.times.clone());
        let memory = Arc::new(memory);
        let rebuilder = Rebuilder {
            target,
            spec: ProfileSpec {
                gives_advice: false,
                ..spec
            },
            memory: Arc::clone(&memory),
            relock,
        };
        let spawn = || EngineHandle::spawn(proved, rebuilder, &config);
        Ok(Started {
            engine: self.times.measure("engine", spawn)?,
            report,
            memory,
        })
    }
}
