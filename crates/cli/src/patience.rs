//! How long a step may take until it counts as hanging: the proof measured how long the worst ones do.

use std::time::Duration;

/// What flags say of that.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTimeouts {
    /// `--stall-timeout`.
    pub(crate) stall: Option<Duration>,
    /// `--watchdog-timeout`; zero: never.
    pub(crate) watchdog: Option<Duration>,
}

/// How long there may be work without the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// Until `/ready` fails.
    pub(crate) stall: Duration,
    /// Until the process ends.
    pub(crate) watchdog: Option<Duration>,
}

/// Shortest bounds that nobody asked for.
const LEAST_STALL: Duration = Duration::from_secs(5);
const LEAST_WATCHDOG: Duration = Duration::from_secs(120);

/// How many times the slowest step of the proof they are. Neighbours may take most of a CPU, and a GPU that is too hot is
/// slower than one that was just started; but no step of a process that lives takes thirty times as long.
const STALL_FACTOR: u32 = 5;
const WATCHDOG_FACTOR: u32 = 30;

impl Patience {
    /// As the flags say, or else as the slowest step of the proof does.
    pub(crate) fn new(flags: StepTimeouts, slowest: Duration) -> Self {
        let derived = |least: Duration, factor| least.max(slowest.saturating_mul(factor));
        let stall = flags.stall.unwrap_or(derived(LEAST_STALL, STALL_FACTOR));
        let watchdog = flags
            .watchdog
            // Whoever is patient with /ready is no less so with the process.
            .unwrap_or_else(|| derived(LEAST_WATCHDOG, WATCHDOG_FACTOR).max(stall.saturating_mul(2)));
        Self {
            stall,
            watchdog: (!watchdog.is_zero()).then_some(watchdog),
        }
    }

    /// Says in the log what is in force.
    pub(crate) fn log(&self, slowest: Duration) {
        let (slowest, stall) = (slowest.as_secs_f64(), self.stall.as_secs_f64());
        match self.watchdog {
            Some(watchdog) => tracing::info!(
                "timeouts of a step: slowest_proved={slowest:.3} stall_timeout={stall:.1} watchdog_timeout={:.1}",
                watchdog.as_secs_f64()
            ),
            None => tracing::info!(
                "timeouts of a step: slowest_proved={slowest:.3} stall_timeout={stall:.1} watchdog_timeout=off"
            ),
        }
        let shorter = |flag: &str, bound: f64| {
            if bound <= slowest {
                tracing::warn!("{flag} is shorter than the slowest worst step, {slowest:.3} s: raise it");
            }
        };
        shorter("--stall-timeout", stall);
        shorter(
            "--watchdog-timeout",
            self.watchdog.map_or(f64::INFINITY, |bound| bound.as_secs_f64()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience(stall: Option<f64>, watchdog: Option<f64>, slowest: f64) -> (f64, Option<f64>) {
        let flags = StepTimeouts {
            stall: stall.map(Duration::from_secs_f64),
            watchdog: watchdog.map(Duration::from_secs_f64),
        };
        let patience = Patience::new(flags, Duration::from_secs_f64(slowest));
        let watchdog = patience.watchdog.map(|watchdog| watchdog.as_secs_f64());
        (patience.stall.as_secs_f64(), watchdog)
    }

    #[test]
    fn bounds_follow_the_slowest_step_of_the_proof_unless_flags_say() {
        assert_eq!(patience(None, None, 0.01), (5.0, Some(120.0)));
        assert_eq!(patience(None, None, 10.0), (50.0, Some(300.0)));
        assert_eq!(patience(Some(2.0), None, 10.0), (2.0, Some(300.0)));
        assert_eq!(patience(Some(90.0), None, 0.01), (90.0, Some(180.0)));
        assert_eq!(patience(None, Some(7.0), 10.0), (50.0, Some(7.0)));
        assert_eq!(patience(None, Some(0.0), 10.0), (50.0, None));
    }
}
