//! The metrics page while the server is starting.

use strum::IntoEnumIterator;

use crate::start::StartStatus;
use crate::status::Status;

use super::catalog::{Name, START_ELAPSED, START_PROGRESS, STATUS};
use super::{head, label, process};

/// The page while `model` is being started.
pub(crate) fn start_page(model: &str, start: &StartStatus) -> String {
    let labels = format!("{},{}", label("model_name", model), label("engine", "0"));
    let Name(name, _, help) = STATUS;
    let mut page = head(name, "gauge", help);
    for status in Status::iter() {
        let (value, status) = (
            u8::from(status == Status::Starting),
            label("status", status.name()),
        );
        page += &format!("{name}{{{labels},{status}}} {value}\n");
    }
    let (Name(name, _, help), phase) = (START_PROGRESS, label("phase", start.phase.name()));
    let (head_line, done) = (head(name, "gauge", help), start.done);
    page += &format!("\n{head_line}{name}{{{labels},{phase}}} {done}\n");
    let (Name(name, _, help), seconds) = (START_ELAPSED, start.elapsed.as_secs_f64());
    page += &format!("\n{}{name}{{{labels}}} {seconds}\n\n", head(name, "gauge", help));
    process::write(&mut page);
    page
}
