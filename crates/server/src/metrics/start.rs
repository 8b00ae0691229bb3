//! The metrics page while the server is starting.

use crate::start::StartStatus;
use crate::status::Status;

use super::catalog::{Name, START_ELAPSED, START_PROGRESS, STATUS};
use super::{label, process};

/// The page while `model` is being started.
pub(crate) fn start_page(model: &str, start: &StartStatus) -> String {
    let labels = format!("{},{}", label("model_name", model), label("engine", "0"));
    let head = |Name(text, _, help): &Name| format!("# HELP {text} {help}\n# TYPE {text} gauge\n");
    let mut page = head(&STATUS);
    for status in Status::ALL {
        let value = u8::from(status == Status::Starting);
        page += &format!(
            "{}{{{labels},{}}} {value}\n",
            STATUS.0,
            label("status", status.name())
        );
    }
    let phase = label("phase", start.phase.name());
    page += &format!(
        "\n{}{}{{{labels},{phase}}} {}\n",
        head(&START_PROGRESS),
        START_PROGRESS.0,
        start.done
    );
    page += &format!(
        "\n{}{}{{{labels}}} {}\n\n",
        head(&START_ELAPSED),
        START_ELAPSED.0,
        start.elapsed.as_secs_f64()
    );
    process::write(&mut page);
    page
}
