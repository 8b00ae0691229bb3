//! How long each stage of a start takes.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use plimsoll_profiler::Report;
use serde::Serialize;
use serde_json::Value;

use super::StartProgress;

/// The clock of one start. Clones share it.
#[derive(Clone, Debug)]
pub struct StartTimes {
    times: Arc<Mutex<Times>>,
    progress: StartProgress,
}

#[derive(Debug)]
struct Times {
    begin: Instant,
    stages: Vec<Stage>,
    ready: Option<Duration>,
}

/// One stage. Text and weights are read at the same time, so stages may sum to more than the whole.
#[derive(Clone, Debug, Serialize)]
struct Stage {
    stage: &'static str,
    seconds: f64,
}

impl StartTimes {
    /// Starts the clock.
    pub fn begin() -> Self {
        let times = Times {
            begin: Instant::now(),
            stages: Vec::new(),
            ready: None,
        };
        Self {
            times: Arc::new(Mutex::new(times)),
            progress: StartProgress::default(),
        }
    }

    /// How far the start is.
    pub(crate) fn progress(&self) -> &StartProgress {
        &self.progress
    }

    /// Does `work` and counts its time.
    pub(crate) fn measure<R>(&self, stage: &'static str, work: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = work();
        self.add(stage, begin.elapsed());
        result
    }

    /// Adds to a stage, which is new if there is none of that name.
    pub(crate) fn add(&self, stage: &'static str, time: Duration) {
        let mut times = self.times.lock();
        let seconds = time.as_secs_f64();
        match times.stages.iter_mut().find(|known| known.stage == stage) {
            Some(known) => known.seconds += seconds,
            None => times.stages.push(Stage { stage, seconds }),
        }
    }

    /// Stops the clock, says all in one line of the log, and returns the whole time.
    pub(crate) fn ready(&self) -> Duration {
        let total = {
            let mut times = self.times.lock();
            let total = times.begin.elapsed();
            *times.ready.insert(total)
        };
        tracing::info!("start {self}");
        total
    }

    /// For the report: the stages in their order, and the whole once it is known.
    pub(crate) fn to_json(&self) -> Value {
        let times = self.times.lock();
        serde_json::json!({
            "seconds": times.ready.map(|total| total.as_secs_f64()),
            "stages": times.stages,
        })
    }

    /// The stages in their order, in seconds.
    pub(crate) fn stages(&self) -> Vec<(&'static str, f64)> {
        let times = self.times.lock();
        times
            .stages
            .iter()
            .map(|stage| (stage.stage, stage.seconds))
            .collect()
    }
}

impl fmt::Display for StartTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = self.times.lock();
        let total = times.ready.unwrap_or_else(|| times.begin.elapsed());
        write!(f, "seconds={:.3}", total.as_secs_f64())?;
        times
            .stages
            .iter()
            .try_for_each(|Stage { stage, seconds }| write!(f, " {stage}={seconds:.3}"))
    }
}

/// What the profile found, and how long the start took.
pub(crate) fn report_json(report: &Report, times: &StartTimes) -> Value {
    let mut json = serde_json::to_value(report).expect("a report is JSON");
    json["start"] = times.to_json();
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_by_name_and_stand_in_one_line() {
        let times = StartTimes::begin();
        assert_eq!(times.measure("weights", || 7), 7);
        times.add("validate", Duration::from_millis(500));
        times.add("engine", Duration::from_millis(250));
        times.add("validate", Duration::from_millis(250));
        let json = times.to_json();
        assert!(json["seconds"].is_null());
        assert_eq!(json["stages"][0]["stage"], "weights");
        assert_eq!(
            json["stages"][1],
            serde_json::json!({ "stage": "validate", "seconds": 0.75 })
        );
        let total = times.ready();
        assert_eq!(times.to_json()["seconds"], total.as_secs_f64());
        let line = times.to_string();
        assert!(
            line.starts_with("seconds=0.") && line.ends_with(" validate=0.750 engine=0.250"),
            "{line}"
        );
    }
}
