//! The two-pass auto-profile: the server runs the worst steps it will ever run, measures, rebuilds at the size that fits,
//! proves that size with the same worst steps, and only then is ready. Nothing is guessed and there is no fraction to tune.
//!
//! [`profile`] drives a [`Target`] (a device that builds engine states and has meters) through the phases:
//!
//! | phase | does |
//! |---|---|
//! | baseline | reads the meters: weights, runtime, other processes |
//! | probe | a small KV cache, a growable step arena, and every worst step: the [`scenarios`] |
//! | compute | [`Arithmetic`]: what the peak leaves for KV |
//! | rebuild | drops the probe's state whole, checks that its memory came back, builds the final state and a canary |
//! | validate | the same worst steps at the final size with the canary held, then frees the canary |
//! | timing | a few smaller steps, for the scheduler: what a token of a prompt costs ([`StepTimes`]) |
//!
//! A typed out-of-memory in the last two shrinks the target by 5 %, at most three times; then [`ProfileError::DoesNotFit`]
//! says what would fit, as flags. A [`Plan`] of an earlier start replaces the probe, never the validation. Several [`Ranks`]
//! go through the phases together: each measures its own device, all serve the smallest of their sizes, and after every step that
//! can fail the worst outcome holds for all. The result, [`Proved`], cannot be made in any other way.

mod advice;
mod arithmetic;
mod attempt;
mod diagnostic;
mod error;
mod groups;
mod loading;
mod observer;
mod phases;
mod pinned;
mod plan;
mod plausibility;
mod prediction;
mod probe;
mod profiler;
mod proved;
mod ranks;
mod refusal;
mod report;
mod results;
mod scenario;
mod setting;
mod spec;
mod step_times;
mod stress;
mod table;
mod target;
mod timed_shape;
mod timing;

pub use arithmetic::Arithmetic;
pub use diagnostic::{Cause, Diagnostic, Knob};
pub use error::ProfileError;
pub use groups::{GroupReport, StatesReport};
pub use loading::Loading;
pub use observer::{Observer, Phase, PhaseRecord, ScenarioProgress, StepRecord};
pub use phases::{profile, profile_rank};
pub use plan::{DRIFT_WARNING, DiscardReason, DiscardedPlan, Plan, Probed};
pub use prediction::{ArenaUse, Compared, Footprint, PredictedScenario, Prediction, predict, state_slots};
pub use proved::{Proved, ProvedParts};
pub use ranks::{RankLost, Ranks, Solo, Verdict};
pub use report::{ComponentLine, Memory, Report, Sizing, Suggestion};
pub use results::{Attempt, Bound, Disabled, Measured, Origin, Outcome, ScenarioResult};
pub use scenario::{Contexts, LeftOut, Scenario, ScenarioKind, ScenarioShape, scenario_shapes, scenarios};
pub use setting::Setting;
pub use spec::{
    CANARY_BYTES, KvSize, MAX_STEP, MAX_TOKENS, MIN_FRAGMENTATION_BYTES, Margins, MemFraction, ProfileSpec,
};
pub use step_times::{StepTimes, TimedStep};
pub use table::comparison_table;
pub use target::{BuildProgress, Target};
