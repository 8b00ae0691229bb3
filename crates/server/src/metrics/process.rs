//! Process metrics under the names of Prometheus's client libraries. Linux only: read from /proc.

use std::fmt::Write;
use std::fs;
use std::sync::LazyLock;

use super::catalog::*;
use super::head;

/// USER_HZ: clock ticks per second in /proc, 100 on all supported platforms.
const TICKS: f64 = 100.0;
/// Bytes per unit of /proc/self/status.
const KIB: f64 = 1024.0;

/// Appends the metrics that can be read.
pub(super) fn write(page: &mut String) {
    let kib = |name| status(name).map(|kib| kib * KIB);
    for (Name(name, _, help), kind, value) in [
        (PROCESS_CPU, "counter", cpu_seconds()),
        (PROCESS_RESIDENT, "gauge", kib("VmRSS:")),
        (PROCESS_VIRTUAL, "gauge", kib("VmSize:")),
        (PROCESS_THREADS, "gauge", status("Threads:")),
        (PROCESS_OPEN_FILES, "gauge", open_files()),
        (PROCESS_MAX_FILES, "gauge", most_files()),
        (PROCESS_START, "gauge", *START),
    ] {
        if let Some(value) = value {
            let _ = writeln!(page, "{}{name} {value}\n", head(name, kind, help));
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
