//! How the stages share the time: first each has a turn until its goal is reached, then each has its part of what is left.

use std::collections::VecDeque;
use std::time::Duration;

use super::stage::Stage;

/// What a turn is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    /// Reaching the goal of the stage, and no more.
    Goal,
    /// Loading the server for a part of the time.
    Load,
}

/// One turn of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) stage: Stage,
    pub(super) aim: Aim,
    /// Shares of this turn and of all that come after it.
    shares: u32,
}

impl Turn {
    /// Its part of the time that is left.
    pub(super) fn time(&self, left: Duration) -> Duration {
        left * self.stage.share() / self.shares.max(1)
    }

    /// Whether it sends no more requests, when its time is over (`late`) or its goal reached. What was not reached is tried again, and
    /// then for as long as it takes; a stage that adds up to its goal would have to begin anew, and is not interrupted.
    pub(super) fn is_over(&self, late: bool, reached: bool) -> bool {
        match self.aim {
            Aim::Goal => reached || (late && !self.stage.adds_up()),
            Aim::Load => reached && late,
        }
    }
}

/// The turns to come.
#[derive(Debug)]
pub(super) struct Plan(VecDeque<Turn>);

impl Plan {
    /// `stages` in the order in which they run.
    pub(super) fn new(stages: &[Stage]) -> Self {
        let of = |aim: Aim, without: Stage| {
            let stages = stages.iter().filter(move |&&stage| stage != without);
            stages.map(move |&stage| (stage, aim))
        };
        // The mix has no goal, and every feature is asked for once.
        let all: Vec<_> = of(Aim::Goal, Stage::Mix)
            .chain(of(Aim::Load, Stage::Features))
            .collect();
        let mut shares = all.iter().map(|(stage, _)| stage.share()).sum();
        let turns = all.into_iter().map(|(stage, aim)| {
            let turn = Turn { stage, aim, shares };
            shares -= stage.share();
            turn
        });
        Self(turns.collect())
    }

    /// The next turn. A goal that other stages reached on their way needs none.
    pub(super) fn next(&mut self, is_reached: impl Fn(Stage) -> bool) -> Option<Turn> {
        loop {
            let turn = self.0.pop_front()?;
            if turn.aim == Aim::Load || !is_reached(turn.stage) {
                return Some(turn);
            }
        }
    }
}

/// Part of the time left to a turn in which the server should have computed all prompts under way.
const IN_TIME: f64 = 0.25;

/// Tokens of prompts that a turn may have under way, if the server computes `pace` tokens a second: a turn ends when all that it sent is
/// answered, and one that sends more than there is time for takes that of the stages after it. A step is always allowed.
pub(super) fn allowance(pace: f64, left: Duration, step: usize) -> usize {
    ((IN_TIME * pace * left.as_secs_f64()) as usize).max(step)
}

/// Tokens of prompts under way.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    tokens: usize,
    is_exceeded: bool,
}

/// Tokens of one request in a [`Backlog`].
#[derive(Debug)]
#[must_use]
pub(super) struct Permit {
    tokens: usize,
    exceeds: bool,
}

impl Backlog {
    /// Adds a request of so many tokens where there is room in the allowance. Beyond it one is let in at a time: any request can be sent.
    pub(super) fn add(&mut self, tokens: usize, allowance: usize) -> Option<Permit> {
        let exceeds = self.tokens + tokens > allowance;
        if exceeds && self.is_exceeded {
            return None;
        }
        self.tokens += tokens;
        self.is_exceeded |= exceeds;
        Some(Permit { tokens, exceeds })
    }

    /// The request is over.
    pub(super) fn remove(&mut self, permit: &Permit) {
        self.tokens -= permit.tokens;
        self.is_exceeded &= !permit.exceeds;
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    fn turns(stages: &[Stage], reached: &[Stage]) -> Vec<Turn> {
        let mut plan = Plan::new(stages);
        std::iter::from_fn(|| plan.next(|stage| reached.contains(&stage))).collect()
    }

    #[test]
    fn goals_come_first_and_no_turn_takes_the_time_of_others() {
        let stages: Vec<Stage> = Stage::iter().collect();
        let all = turns(&stages, &[]);
        let (goals, loads) = all.split_at(stages.len() - 1);
        assert!(
            goals
                .iter()
                .all(|turn| turn.aim == Aim::Goal && turn.stage != Stage::Mix)
        );
        assert!(
            loads
                .iter()
                .all(|turn| turn.aim == Aim::Load && turn.stage != Stage::Features)
        );
        let mut left = Duration::from_secs(480);
        for turn in &all {
            // The cache has at least half of the time to be filled.
            assert!(turn.stage != Stage::Full || turn.aim == Aim::Load || left > Duration::from_secs(240));
            left -= turn.time(left);
        }
        assert!(left < Duration::from_millis(1), "{left:?}");
        let without = turns(&[Stage::Full, Stage::Rows], &[Stage::Rows]);
        let order: Vec<_> = without.iter().map(|turn| (turn.stage, turn.aim)).collect();
        let expected = [
            (Stage::Full, Aim::Goal),
            (Stage::Full, Aim::Load),
            (Stage::Rows, Aim::Load),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_turn_for_a_goal_ends_with_it() {
        let all = turns(&[Stage::Mixed, Stage::Full], &[]);
        // Late, and reached.
        let over = |turn: &Turn| {
            let cases = [(false, false), (true, false), (false, true), (true, true)];
            cases.map(|(late, reached)| turn.is_over(late, reached))
        };
        assert_eq!(
            over(&all[0]),
            [false, true, true, true],
            "mixed comes again if it must"
        );
        assert_eq!(over(&all[1]), [false, false, true, true], "what fills goes on");
        for load in &all[2..] {
            assert_eq!(over(load), [false, false, false, true]);
        }
    }

    #[test]
    fn as_much_is_under_way_as_there_is_time_for() {
        let second = Duration::from_secs(1);
        assert_eq!(allowance(1000.0, 8 * second, 512), 2000);
        assert_eq!(allowance(1000.0, second, 512), 512, "a step");
        assert_eq!(
            allowance(0.0, 8 * second, 512),
            512,
            "nothing is known of the server"
        );
        let mut backlog = Backlog::default();
        let within = backlog.add(400, 512).unwrap();
        let beyond = backlog.add(30_000, 512).unwrap();
        assert!(backlog.add(1, 512).is_none() && backlog.add(30_000, 512).is_none());
        backlog.remove(&within);
        assert!(backlog.add(400, 512).is_none());
        backlog.remove(&beyond);
        assert!(backlog.add(500, 512).is_some() && backlog.add(12, 512).is_some());
    }
}
