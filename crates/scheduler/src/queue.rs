//! The queue of waiting requests.

use std::collections::BTreeMap;

use plimsoll_core::{Request, TenantId};

use crate::sequence::{Arrival, Sequence};

/// Position among those that had their turn: the lowest is planned first, the highest preempted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) class: Class,
    pub(crate) turn: u64,
}

/// Requests of a lower class get their turn earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Waited for as long as requests may.
    Aged,
    /// As the client asked for.
    Priority(i64),
}

impl Class {
    fn of(request: &Request) -> Self {
        Self::Priority(request.priority())
    }
}

/// Requests without blocks. The lowest class comes first; within it those that ran before, by rank, and then the tenants in
/// turn, each with its oldest request. Before all of them comes the request that arrived first, once others have had
/// `patience` turns since, and no other that ran with that privilege waits.
#[derive(Debug)]
pub(crate) struct Queue {
    patience: u64,
    /// All of them.
    spots: BTreeMap<Arrival, Spot>,
    /// Ran before.
    returning: BTreeMap<Rank, Sequence>,
    /// Never ran.
    lines: BTreeMap<Class, Line>,
}

#[derive(Clone, Copy, Debug)]
enum Spot {
    Returning(Rank),
    InLine(Class, TenantId),
}

/// The tenants of one class. The one with the fewest turns comes first, and a new one starts with as many as those that
/// are being served (start-time fair queueing: Goyal, Vin and Cheng 1996).
#[derive(Debug, Default)]
struct Line {
    /// Turns that the tenant served last had had.
    clock: u64,
    tenants: BTreeMap<TenantId, Tenant>,
}

#[derive(Debug, Default)]
struct Tenant {
    turns: u64,
    waiting: BTreeMap<Arrival, Sequence>,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next {
    arrival: Arrival,
    pub(crate) class: Class,
}

impl Queue {
    pub(crate) fn new(patience: u64) -> Self {
        Self {
            patience,
            spots: BTreeMap::new(),
            returning: BTreeMap::new(),
            lines: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.spots.len()
    }

    /// Adds a new request.
    pub(crate) fn push(&mut self, sequence: Sequence) {
        let (arrival, class) = (sequence.arrival, Class::of(&sequence.request));
        let name = sequence.request.tenant();
        let line = self.lines.entry(class).or_default();
        let tenant = line.tenants.entry(name).or_default();
        if tenant.waiting.is_empty() {
            tenant.turns = tenant.turns.max(line.clock);
        }
        tenant.waiting.insert(arrival, sequence);
        self.spots.insert(arrival, Spot::InLine(class, name));
    }

    /// Returns a preempted request.
    pub(crate) fn put_back(&mut self, rank: Rank, sequence: Sequence) {
        self.spots.insert(sequence.arrival, Spot::Returning(rank));
        self.returning.insert(rank, sequence);
    }

    /// Whose turn it is after `turns`, where the lowest class that runs is `running`.
    pub(crate) fn next(&self, turns: u64, running: Option<Class>) -> Option<Next> {
        let first = self.first()?;
        let (&arrival, spot) = self.spots.first_key_value()?;
        let oldest = self.get(arrival)?;
        let class = match spot {
            Spot::Returning(rank) => rank.class,
            Spot::InLine(class, _) => *class,
        };
        // The first needs no privilege, and requests that have it keep their order.
        let behind = first.arrival != arrival || running.is_some_and(|running| running < class);
        if behind && first.class != Class::Aged && turns - oldest.turns_before >= self.patience {
            let class = Class::Aged;
            return Some(Next { arrival, class });
        }
        Some(first)
    }

    /// The first by class and turn.
    fn first(&self) -> Option<Next> {
        let returning = self.returning.first_key_value().map(|(rank, sequence)| Next {
            arrival: sequence.arrival,
            class: rank.class,
        });
        let line = self.lines.first_key_value().and_then(|(&class, line)| {
            let arrival = line.first()?;
            Some(Next { arrival, class })
        });
        match (returning, line) {
            (Some(returning), Some(line)) if line.class < returning.class => Some(line),
            (returning, line) => returning.or(line),
        }
    }

    pub(crate) fn get(&self, arrival: Arrival) -> Option<&Sequence> {
        match self.spots.get(&arrival)? {
            Spot::Returning(rank) => self.returning.get(rank),
            Spot::InLine(class, tenant) => self.lines.get(class)?.tenants.get(tenant)?.waiting.get(&arrival),
        }
    }

    /// What `next` is about.
    pub(crate) fn peek(&self, next: Next) -> &Sequence {
        self.get(next.arrival).expect("it waits")
    }

    /// Gives `next` the turn `turn`, and the rank that comes with it.
    pub(crate) fn take(&mut self, next: Next, turn: u64) -> (Rank, Sequence) {
        let class = next.class;
        if let Some(Spot::InLine(own, tenant)) = self.spots.get(&next.arrival)
            && let Some(line) = self.lines.get_mut(own)
        {
            line.serve(*tenant, class == *own);
        }
        let (rank, sequence) = self.remove(next.arrival).expect("it waits");
        let turn = rank.map_or(turn, |rank| rank.turn);
        (Rank { class, turn }, sequence)
    }

    /// Removes a request; with its rank if it ran before.
    pub(crate) fn remove(&mut self, arrival: Arrival) -> Option<(Option<Rank>, Sequence)> {
        match self.spots.remove(&arrival)? {
            Spot::Returning(rank) => Some((Some(rank), self.returning.remove(&rank)?)),
            Spot::InLine(class, tenant) => {
                let line = self.lines.get_mut(&class)?;
                let sequence = line.tenants.get_mut(&tenant)?.waiting.remove(&arrival)?;
                if line.tenants.values().all(|tenant| tenant.waiting.is_empty()) {
                    self.lines.remove(&class);
                }
                Some((None, sequence))
            }
        }
    }

    /// All waiting requests, in order of arrival.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.spots.keys().filter_map(|&arrival| self.get(arrival))
    }

    /// Audits the bookkeeping; `running` are the ranks of those that run.
    pub(crate) fn check_invariants(&self, running: impl Iterator<Item = Rank>) -> Result<(), String> {
        if self.iter().count() != self.spots.len() {
            return Err("a waiting request is lost".into());
        }
        let in_line = self.lines.values().flat_map(|line| line.tenants.values());
        let in_line: usize = in_line.map(|tenant| tenant.waiting.len()).sum();
        if in_line + self.returning.len() != self.spots.len() {
            return Err("a waiting request is in two places".into());
        }
        for rank in running {
            let first = self.returning.range(..rank).next_back();
            if first.is_some_and(|(first, _)| first.class == rank.class) {
                return Err("a request runs while an older one of its class waits".into());
            }
        }
        Ok(())
    }
}

impl Line {
    fn first(&self) -> Option<Arrival> {
        let heads = self.tenants.values().filter_map(|tenant| {
            let (&arrival, _) = tenant.waiting.first_key_value()?;
            Some((tenant.turns, arrival))
        });
        heads.min().map(|(_, arrival)| arrival)
    }

    /// A tenant has its turn; `regular` where it is because of the line.
    fn serve(&mut self, name: TenantId, regular: bool) {
        let Some(tenant) = self.tenants.get_mut(&name) else {
            return;
        };
        if regular {
            self.clock = tenant.turns;
        }
        tenant.turns += 1;
        let clock = self.clock;
        // A tenant that is not ahead of the others is treated as a new one.
        self.tenants
            .retain(|_, tenant| !tenant.waiting.is_empty() || tenant.turns > clock);
    }
}
