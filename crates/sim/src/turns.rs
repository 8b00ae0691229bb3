use std::collections::{BTreeMap, HashMap};

use plimsoll_core::{Request, RequestId, TenantId};

/// Requests that waited too long come before every priority.
type Class = Option<i64>;

/// Class and turn.
type Rank = (Class, u64);

/// Whose turn it is, by the letter of the rules: every request is looked at every time.
#[derive(Debug)]
pub(crate) struct Turns {
    patience: u64,
    given: u64,
    waiting: Vec<Waiting>,
    running: BTreeMap<Rank, Waiting>,
    lines: HashMap<i64, Line>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    id: RequestId,
    priority: i64,
    tenant: TenantId,
    /// Turns given before it came.
    before: u64,
    /// Of one that ran before.
    rank: Option<Rank>,
}

/// Turns of each tenant of a class for as long as anybody waits there.
#[derive(Debug, Default)]
struct Line {
    clock: u64,
    turns: HashMap<TenantId, u64>,
}

impl Line {
    fn of(&self, tenant: TenantId) -> u64 {
        self.turns.get(&tenant).copied().unwrap_or(0)
    }
}

impl Waiting {
    fn class(&self) -> Class {
        self.rank.map_or(Some(self.priority), |(class, _)| class)
    }
}

impl Turns {
    pub(crate) fn new(patience: u64) -> Self {
        Self {
            patience,
            given: 0,
            waiting: Vec::new(),
            running: BTreeMap::new(),
            lines: HashMap::new(),
        }
    }

    /// Requests come in the order of their ids.
    pub(crate) fn arrives(&mut self, request: &Request) {
        let (priority, tenant) = (request.priority(), request.tenant());
        let in_line = |other: &&Waiting| other.rank.is_none() && other.priority == priority;
        let line = self.lines.entry(priority).or_default();
        if !self
            .waiting
            .iter()
            .filter(in_line)
            .any(|other| other.tenant == tenant)
        {
            let turns = line.of(tenant).max(line.clock);
            line.turns.insert(tenant, turns);
        }
        self.waiting.push(Waiting {
            id: request.id(),
            priority,
            tenant,
            before: self.given,
            rank: None,
        });
    }

    /// The request to be admitted next.
    pub(crate) fn next(&self) -> Option<RequestId> {
        self.choose().map(|(chosen, _)| chosen.id)
    }

    /// The next, and the class in which it then runs.
    fn choose(&self) -> Option<(Waiting, Class)> {
        let by_rule = |waiting: &&Waiting| match waiting.rank {
            Some((class, turn)) => (class, false, turn, waiting.id),
            None => {
                let turns = self.lines[&waiting.priority].of(waiting.tenant);
                (Some(waiting.priority), true, turns, waiting.id)
            }
        };
        let first = *self.waiting.iter().min_by_key(by_rule)?;
        let oldest = *self.waiting.iter().min_by_key(|waiting| waiting.id)?;
        let lowest = self.running.keys().next().map(|(class, _)| *class);
        let behind = first.id != oldest.id || lowest.is_some_and(|lowest| lowest < oldest.class());
        if behind && first.class().is_some() && self.given >= oldest.before + self.patience {
            return Some((oldest, None));
        }
        Some((first, first.class()))
    }

    /// The next is admitted.
    pub(crate) fn admitted(&mut self) {
        let Some((chosen, class)) = self.choose() else {
            return;
        };
        if chosen.rank.is_none()
            && let Some(line) = self.lines.get_mut(&chosen.priority)
        {
            let turns = line.of(chosen.tenant);
            if class == chosen.class() {
                line.clock = turns;
            }
            line.turns.insert(chosen.tenant, turns + 1);
        }
        self.waiting.retain(|waiting| waiting.id != chosen.id);
        self.close_lines();
        let turn = chosen.rank.map_or(self.given, |(_, turn)| turn);
        self.running.insert((class, turn), chosen);
        self.given += 1;
    }

    /// The `count` of the highest ranks gave up their blocks.
    pub(crate) fn preempted(&mut self, count: u64) {
        for _ in 0..count {
            if let Some((rank, sequence)) = self.running.pop_last() {
                self.waiting.push(Waiting {
                    rank: Some(rank),
                    ..sequence
                });
            }
        }
    }

    /// All that ran lost their blocks.
    pub(crate) fn reset(&mut self) {
        self.preempted(self.running.len() as u64);
    }

    /// A request is over, wherever it was.
    pub(crate) fn ended(&mut self, id: RequestId) {
        self.waiting.retain(|waiting| waiting.id != id);
        self.running.retain(|_, running| running.id != id);
        self.close_lines();
    }

    /// Whether requests that run stand in the order of their ranks.
    pub(crate) fn is_sorted(&self, ids: impl Iterator<Item = RequestId>) -> bool {
        let rank = |id| {
            let found = self.running.iter().find(|(_, running)| running.id == id);
            found.map(|(rank, _)| *rank)
        };
        ids.map(rank).is_sorted()
    }

    fn close_lines(&mut self) {
        let waiting = &self.waiting;
        self.lines.retain(|priority, _| {
            waiting
                .iter()
                .any(|waiting| waiting.rank.is_none() && waiting.priority == *priority)
        });
    }
}
