//! Chat templates are rendered by processes of this same program, whose limits are lower.

use std::ffi::OsStr;

use plimsoll_text::{Renderer, WorkerProgram};

use crate::error::Error;

/// The argument that makes this program such a process. It is no command for people.
const COMMAND: &str = "render-templates";

/// Renders by processes of this program.
pub fn renderer() -> Renderer {
    Renderer::workers(WorkerProgram {
        // This very file, even if another has taken its place.
        path: "/proc/self/exe".into(),
        args: vec![COMMAND.into()],
    })
}

/// Renders for the process that started this one, if that is what it was started for.
pub fn render_if_asked() -> Option<Result<(), Error>> {
    let command = std::env::args_os().nth(1)?;
    (command == OsStr::new(COMMAND)).then(|| plimsoll_text::run_template_worker().map_err(Error::from))
}
