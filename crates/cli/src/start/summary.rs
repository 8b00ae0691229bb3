//! What a start says about memory when it is proved.

use plimsoll_profiler::Report;

use crate::command_line::CommandLine;

/// Where every byte is, and the commands that make the next start skip the search or use more of the device.
pub(super) fn log(report: &Report) {
    tracing::info!("{}", memory_line(report));
    let line = CommandLine::of_process();
    for suggestion in &report.suggestions {
        tracing::info!(
            "next start, {}: {}",
            suggestion.effect,
            line.with(&[suggestion.flag])
        );
    }
}

/// Bytes as plain numbers, `key=value`.
fn memory_line(report: &Report) -> String {
    let ready = &report.ready;
    let device = [
        ("total", ready.total),
        ("free", ready.free),
        ("peers", ready.peers),
    ];
    let components = ready.components.iter().map(|line| (line.name, line.bytes));
    let slack = [("unattributed", ready.unattributed)];
    let fields = device.into_iter().chain(components).chain(slack);
    let fields: Vec<_> = fields.map(|(name, bytes)| format!("{name}={bytes}")).collect();
    format!("auto-profile ready {}", fields.join(" "))
}
