//! Where chat templates are rendered.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::engine::{Clock, Engine};
use super::text::TemplateText;
use super::workers::{WorkerProgram, Workers};
use super::{ChatInput, harmony};
use crate::TextError;

/// Where chat templates are rendered. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Renderer(Place);

#[derive(Clone, Debug)]
enum Place {
    Here(Clock),
    Workers(Arc<Workers>),
}

impl Renderer {
    /// In processes of their own, each for one rendering at a time, as many as there are CPUs: for templates that come with
    /// models and requests. Their memory, stack, steps, output and time are bounded.
    pub fn workers(program: WorkerProgram) -> Self {
        Self(Place::Workers(Arc::new(Workers::new(program))))
    }

    /// [`Self::workers`] with another limit for the time of one rendering.
    pub fn workers_within(program: WorkerProgram, time: Duration) -> Self {
        Self(Place::Workers(Arc::new(Workers::new(program).within(time))))
    }

    /// In this process, with bounds for steps and output alone: for templates that are trusted, as those of tests.
    pub fn in_process() -> Self {
        Self::in_process_at(SystemTime::now)
    }

    /// [`Self::in_process`] with another clock.
    pub fn in_process_at(clock: Clock) -> Self {
        Self(Place::Here(clock))
    }

    /// The format of gpt-oss, which needs no template.
    pub(super) fn harmony(&self) -> Compiled {
        Compiled::Harmony(match &self.0 {
            Place::Here(clock) => *clock,
            Place::Workers(_) => SystemTime::now,
        })
    }

    pub(super) fn compile(&self, text: Arc<TemplateText>) -> Result<Compiled, TextError> {
        Ok(match &self.0 {
            Place::Here(clock) => Compiled::Here(Engine::compile(text, *clock)?),
            Place::Workers(workers) => Compiled::InWorkers(Arc::clone(workers), text),
        })
    }
}

/// Templates that can be rendered.
#[derive(Clone, Debug)]
pub(super) enum Compiled {
    Here(Engine),
    /// They are compiled where they are rendered.
    InWorkers(Arc<Workers>, Arc<TemplateText>),
    /// In Rust.
    Harmony(Clock),
}

impl Compiled {
    pub(super) fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        match self {
            Self::Here(engine) => engine.render(input),
            Self::InWorkers(workers, text) => workers.render(text, input),
            Self::Harmony(clock) => harmony::render(input, *clock),
        }
    }
}
