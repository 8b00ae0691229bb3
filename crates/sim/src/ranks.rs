//! Ranks as threads: their collectives notice when they could only wait for ever.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plimsoll_profiler::{RankLost, Ranks};

/// What ranks meet for. A real server has a communicator for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    /// The profile's agreements.
    Control,
    /// The sums of a step that is computed by all.
    Step,
}

/// All ranks of a server.
#[derive(Debug)]
pub struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<At>,
    /// Result of the last meeting; the next one begins after all ranks have read it.
    least: usize,
    meetings: u64,
    fault: Option<String>,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Work,
    Wait(Channel, usize),
    Left,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work => f.write_str("works"),
            Self::Wait(channel, _) => write!(f, "waits for {channel:?}"),
            Self::Left => f.write_str("has left"),
        }
    }
}

/// Longest time a rank works while others wait, before that counts as a hang.
const PATIENCE: Duration = Duration::from_secs(20);

impl World {
    /// The ranks of a server of `count`.
    pub fn of(count: usize) -> Vec<Member> {
        let world = Arc::new(Self {
            state: Mutex::new(State {
                ranks: vec![At::Work; count],
                least: 0,
                meetings: 0,
                fault: None,
            }),
            changed: Condvar::new(),
        });
        let member = |rank| Member {
            seat: Seat {
                world: Arc::clone(&world),
                rank,
                count,
            },
        };
        (0..count).map(member).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn meet(&self, rank: usize, channel: Channel, value: usize) -> Result<usize, RankLost> {
        let mut state = self.state();
        state.ranks[rank] = At::Wait(channel, value);
        state.check();
        let meeting = state.meetings;
        if state.complete(channel) {
            self.changed.notify_all();
        }
        loop {
            if let Some(fault) = &state.fault {
                let lost = RankLost(fault.clone());
                self.changed.notify_all();
                return Err(lost);
            }
            if state.meetings > meeting {
                return Ok(state.least);
            }
            let (next, timeout) = self
                .changed
                .wait_timeout(state, PATIENCE)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            if timeout.timed_out() && state.meetings == meeting {
                state.fail();
            }
        }
    }
}

impl State {
    /// Ends the meeting if all are there.
    fn complete(&mut self, channel: Channel) -> bool {
        let values = self.ranks.iter().map(|at| match at {
            At::Wait(there, value) if *there == channel => Some(*value),
            _ => None,
        });
        let Some(values) = values.collect::<Option<Vec<_>>>() else {
            return false;
        };
        self.least = values.into_iter().min().unwrap_or(usize::MAX);
        self.meetings += 1;
        self.ranks.fill(At::Work);
        true
    }

    /// Ranks that wait for different things, or for one that has left, wait for ever.
    fn check(&mut self) {
        let waits = |at: &At| match at {
            At::Wait(channel, _) => Some(*channel),
            _ => None,
        };
        let mut channels = self.ranks.iter().filter_map(waits);
        if let Some(first) = channels.next()
            && (self.ranks.contains(&At::Left) || channels.any(|channel| channel != first))
        {
            self.fail();
        }
    }

    fn fail(&mut self) {
        let ranks = self.ranks.iter().enumerate();
        let places: Vec<_> = ranks.map(|(rank, at)| format!("rank {rank} {at}")).collect();
        self.fault.get_or_insert(places.join(", "));
    }
}

/// One rank: its part in the profile's agreements. It has left once this is dropped.
#[derive(Debug)]
pub struct Member {
    seat: Seat,
}

/// Where a rank computes its part of a step with the others.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    world: Arc<World>,
    rank: usize,
    count: usize,
}

impl Seat {
    /// Waits until all ranks are in the step.
    pub(crate) fn meet(&self) -> Result<(), RankLost> {
        self.world.meet(self.rank, Channel::Step, 0).map(drop)
    }
}

impl Member {
    pub(crate) fn seat(&self) -> Seat {
        self.seat.clone()
    }
}

impl Ranks for Member {
    fn rank(&self) -> usize {
        self.seat.rank
    }

    fn count(&self) -> usize {
        self.seat.count
    }

    fn min(&mut self, value: usize) -> Result<usize, RankLost> {
        self.seat.world.meet(self.seat.rank, Channel::Control, value)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.seat.world.state();
        state.ranks[self.seat.rank] = At::Left;
        state.check();
        self.seat.world.changed.notify_all();
    }
}
