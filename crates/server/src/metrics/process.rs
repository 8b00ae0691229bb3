//! Process metrics under the names of Prometheus's client libraries. Linux only: read from /proc.

use std::fmt::Write;
use std::fs;
use std::sync::LazyLock;

/// USER_HZ: clock ticks per second in /proc, 100 on all supported platforms.
const TICKS: f64 = 100.0;
/// Bytes per unit of /proc/self/status.
const KIB: f64 = 1024.0;

/// Appends the metrics that can be read.
pub(super) fn write(page: &mut String) {
    for (name, kind, help, value) in [
        (
            "process_cpu_seconds_total",
            "counter",
            "CPU time of the process, in all its threads.",
            cpu_seconds(),
        ),
        (
            "process_resident_memory_bytes",
            "gauge",
            "Host memory that the process has in use.",
            status("VmRSS:").map(|kib| kib * KIB),
        ),
        (
            "process_virtual_memory_bytes",
            "gauge",
            "Addresses that the process has in use.",
            status("VmSize:").map(|kib| kib * KIB),
        ),
        (
            "process_threads",
            "gauge",
            "Threads of the process.",
            status("Threads:"),
        ),
        (
            "process_open_fds",
            "gauge",
            "File descriptors, sockets among them, that the process holds.",
            open_files(),
        ),
        (
            "process_max_fds",
            "gauge",
            "File descriptors that the process may hold.",
            most_files(),
        ),
        (
            "process_start_time_seconds",
            "gauge",
            "When the process began, in seconds since 1970.",
            *START,
        ),
    ] {
        if let Some(value) = value {
            let _ = writeln!(
                page,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n"
            );
        }
    }
}

/// A field of /proc/self/stat after the process name, numbered from 1 as in proc(5).
fn stat(field: usize) -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(field - 3)?.parse().ok()
}

fn cpu_seconds() -> Option<f64> {
    const USER: usize = 14;
    const SYSTEM: usize = 15;
    Some((stat(USER)? + stat(SYSTEM)?) / TICKS)
}

/// Read once: a change of the system clock must not look like a restart.
static START: LazyLock<Option<f64>> = LazyLock::new(start_time);

fn start_time() -> Option<f64> {
    const SINCE_BOOT: usize = 22;
    let text = fs::read_to_string("/proc/stat").ok()?;
    let boot = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(boot.trim().parse::<f64>().ok()? + stat(SINCE_BOOT)? / TICKS)
}

fn status(name: &str) -> Option<f64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_ascii_whitespace().next()?.parse().ok()
}

fn open_files() -> Option<f64> {
    // Without the descriptor of this read.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

fn most_files() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let limits = text
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    limits.split_ascii_whitespace().next()?.parse().ok()
}
