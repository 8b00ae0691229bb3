//! The page of a server that is not ready.

use crate::start::StartStatus;

use super::catalog::{Name, START_ELAPSED, START_PROGRESS};

/// What there is to scrape while `model` is being started.
pub(crate) fn start_page(model: &str, status: &StartStatus) -> String {
    let labels = format!("model_name={model:?},engine=\"0\"");
    let gauge = |name: &Name, labels: &str, value: f64| {
        let Name(text, _, help) = name;
        format!("# HELP {text} {help}\n# TYPE {text} gauge\n{text}{{{labels}}} {value}\n\n")
    };
    let phase = format!("{labels},phase=\"{}\"", status.phase.name());
    gauge(&START_PROGRESS, &phase, status.done)
        + &gauge(&START_ELAPSED, &labels, status.elapsed.as_secs_f64())
}
