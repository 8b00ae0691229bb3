//! What MODEL says about the simulated model: `sim`, `sim:0.02` or `sim:0.02,window=64,fail=100,oom=1000,hang=7,device=9`. Faults
//! are of this model alone: nothing makes a step of another fail.

use std::num::NonZeroU64;
use std::time::Duration;

use plimsoll_core::{CacheGroups, CacheKind, CacheLayout};

use crate::args::{SIM_MODEL, duration};

/// What may follow the name, for people.
pub(crate) const SIM_OPTIONS: &str = "the simulated model is `sim`, or `sim:` and options with commas between them: the seconds that a \
                                      step takes (first), window=TOKENS, fail=N and oom=N (every N-th step goes wrong), hang=N (the N-th \
                                      step never ends), device=N (the driver fails at its N-th use during the start); N is at least 1";

/// The simulated model, as MODEL wants it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SimSpec {
    /// How long a step takes, whatever it computes.
    pub(crate) step_time: Option<Duration>,
    /// Tokens that three of its four layers see; without it, all layers see everything.
    pub(crate) window: Option<NonZeroU64>,
    /// What goes wrong while it serves.
    pub(crate) faults: FaultSpec,
}

/// Steps that go wrong, counted from 1 for the first that serves; those of a profile or a proof only by `device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FaultSpec {
    /// Every such step fails.
    pub(crate) fail: Option<NonZeroU64>,
    /// Every such step finds no device memory, which costs the state.
    pub(crate) oom: Option<NonZeroU64>,
    /// This step never ends.
    pub(crate) hang: Option<NonZeroU64>,
    /// During the start, this use of the device (an allocation or a step) and every later one fails with an error of its driver.
    pub(crate) device: Option<NonZeroU64>,
}

/// How a step goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepFault {
    /// It fails, the so many-th that does, from 1.
    Fail(u64),
    /// It finds no memory.
    Oom,
    /// It never ends.
    Hang,
}

impl SimSpec {
    /// `None` where MODEL is another model, or no model.
    pub(crate) fn parse(model: &str) -> Option<Self> {
        let rest = model.strip_prefix(SIM_MODEL)?;
        let mut spec = Self::default();
        if rest.is_empty() {
            return Some(spec);
        }
        for (at, part) in rest.strip_prefix(':')?.split(',').enumerate() {
            let Some((name, step)) = part.split_once('=') else {
                // The time has no name, and stands first.
                spec.step_time = Some(duration(part).ok().filter(|_| at == 0)?);
                continue;
            };
            let number = match name {
                "window" => &mut spec.window,
                "fail" => &mut spec.faults.fail,
                "oom" => &mut spec.faults.oom,
                "hang" => &mut spec.faults.hang,
                "device" => &mut spec.faults.device,
                _ => return None,
            };
            if number.replace(step.parse().ok()?).is_some() {
                return None;
            }
        }
        Some(spec)
    }

    /// The cache groups of its layers.
    pub(crate) fn cache_groups(&self) -> CacheGroups {
        let Some(window) = self.window else {
            return CacheGroups::default();
        };
        let window = CacheKind::Window(usize::try_from(window.get()).unwrap_or(usize::MAX));
        let layout = CacheLayout::new(&[window, window, window, CacheKind::Full], usize::MAX);
        layout.expect("there are two kinds of layers").groups
    }
}

impl FaultSpec {
    /// What goes wrong in the `step`-th step that serves.
    pub(crate) fn at(&self, step: u64) -> Option<StepFault> {
        let every = |n: Option<NonZeroU64>| n.map(NonZeroU64::get).filter(|&n| step.is_multiple_of(n));
        if self.hang.is_some_and(|hang| hang.get() == step) {
            return Some(StepFault::Hang);
        }
        let oom = every(self.oom).map(|_| StepFault::Oom);
        oom.or_else(|| every(self.fail).map(|n| StepFault::Fail(step / n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulated_model_may_say_how_long_its_steps_take_and_which_go_wrong() {
        let parsed = |text| SimSpec::parse(text).unwrap_or_else(|| panic!("{text}"));
        assert_eq!(parsed("sim"), SimSpec::default());
        assert_eq!(parsed("sim:0.02").step_time, Some(Duration::from_millis(20)));
        assert_eq!(parsed("sim:fail=3").faults.fail, NonZeroU64::new(3));
        let all = parsed("sim:0.02,oom=9,fail=3,hang=7");
        assert_eq!(all.step_time, Some(Duration::from_millis(20)));
        assert_eq!(
            (all.faults.fail, all.faults.oom, all.faults.hang),
            (NonZeroU64::new(3), NonZeroU64::new(9), NonZeroU64::new(7))
        );
        let groups = parsed("sim:window=9,fail=3").cache_groups();
        let groups: Vec<_> = groups
            .iter()
            .map(|group| (group.kind, group.pages_per_block))
            .collect();
        assert_eq!(groups, [(CacheKind::Full, 1), (CacheKind::Window(9), 3)]);
        assert_eq!(SimSpec::default().cache_groups(), CacheGroups::default());
        for other in [
            "sim:",
            "sim:window=0",
            "sim:fast",
            "sims",
            "sim/one",
            "org/sim",
            "sim:fail",
            "sim:fail=0",
            "sim:fail=x",
            "sim:,fail=1",
            "sim:fail=1,0.02",
            "sim:fail=1,fail=2",
            "sim:leak=1",
            "org/sim:fail=1",
        ] {
            assert_eq!(SimSpec::parse(other), None, "{other}");
        }
    }

    #[test]
    fn steps_go_wrong_at_their_turn() {
        let SimSpec { faults, .. } = SimSpec::parse("sim:fail=3,oom=6,hang=8").unwrap();
        let at: Vec<_> = (1..=9)
            .filter_map(|step| Some((step, faults.at(step)?)))
            .collect();
        assert_eq!(
            at,
            [
                (3, StepFault::Fail(1)),
                (6, StepFault::Oom),
                (8, StepFault::Hang),
                (9, StepFault::Fail(3))
            ]
        );
        assert!((1..1000).all(|step| FaultSpec::default().at(step).is_none()));
    }
}
