//! Which requests have runs in the next step.

use std::ops::Bound;

use plimsoll_core::{CacheKind, Run};
use plimsoll_kv::KnownPrefix;

use super::{Place, Scheduler, room::Room};
use crate::growth::{Forecast, Growth};
use crate::queue::{Class, Rank};
use crate::sequence::Running;

impl Scheduler {
    pub(super) fn plan_runs(&mut self, runs: &mut Vec<Run>, room: &mut Room) {
        if self.plan_running(runs, room) {
            self.plan_waiting(runs, room);
        }
    }

    /// Plans runs of running requests, the lowest rank first. False where blocks ran out.
    fn plan_running(&mut self, runs: &mut Vec<Run>, room: &mut Room) -> bool {
        let mut after = Bound::Unbounded;
        while let Some((&rank, running)) = self.running.range((after, Bound::Unbounded)).next() {
            after = Bound::Excluded(rank);
            let len = room.take(running, &self.kv);
            if len == 0 {
                continue;
            }
            let end = running.planned + len;
            if !self.make_room(rank, end) {
                return false;
            }
            let running = self.running.get_mut(&rank).expect("room was made for it");
            runs.push(running.next_run(len, &mut self.kv));
        }
        true
    }

    /// Reserves blocks for `tokens` tokens of a running request, preempting the highest ranks as needed. False where its own
    /// was the highest and it is preempted, or where the highest is in flight and cannot be.
    fn make_room(&mut self, rank: Rank, tokens: usize) -> bool {
        loop {
            let Some(running) = self.running.get_mut(&rank) else {
                return false;
            };
            if self.kv.reserve(&mut running.table, tokens).is_ok() {
                return true;
            }
            // No higher rank than that of a request that lacks blocks is planned, so the highest soon is out of flight.
            let Some(latest) = self
                .running
                .last_entry()
                .filter(|entry| entry.get().in_flight == 0)
            else {
                return false;
            };
            let (latest, Running { sequence, table, .. }) = latest.remove_entry();
            self.kv.release(table);
            self.short_of_blocks = true;
            self.wait_again(latest, sequence);
            self.counters.preemptions += 1;
        }
    }

    /// Admits waiting requests, each in its turn, while tokens, runs and blocks last.
    fn plan_waiting(&mut self, runs: &mut Vec<Run>, room: &mut Room) {
        let mut growth: Option<(Class, Forecast, Growth)> = None;
        while room.for_prompts() > 0 && !self.short_of_blocks && self.running.len() < self.limits.max_num_seqs
        {
            let lowest = self.running.first_key_value().map(|(rank, _)| rank.class);
            let Some(next) = self.waiting.next(self.counters.admissions, lowest) else {
                return;
            };
            let sequence = self.waiting.peek(next);
            // Most likely too little for a chunk, whatever the prefix cache has: not worth taking blocks to find out.
            if room.for_prompts() < self.kv.state_chunk().min(sequence.tokens.len()) {
                return;
            }
            // Those of higher classes give way if they grow.
            if growth.as_ref().is_none_or(|(class, ..)| *class != next.class) {
                let forecast: Forecast = self.population.outputs().collect();
                let ahead = self.running.iter().filter(|(rank, _)| rank.class <= next.class);
                let all = ahead.map(|(_, running)| forecast.of(&running.sequence)).collect();
                growth = Some((next.class, forecast, all));
            }
            let (_, forecast, growth) = growth.as_mut().expect("just made");
            let headroom = self.pages_to_grow(growth.add(forecast.of(sequence)));
            let (arrival, sharing) = (sequence.arrival, sequence.sharing());
            if let Some((_, known)) = self.blocked.as_mut().filter(|blocked| blocked.0 == arrival)
                && self.kv.is_short(known, &sequence.tokens, sharing, headroom)
            {
                return;
            }
            let Ok(table) = self.kv.open(&sequence.tokens, sharing, headroom) else {
                // Most likely it is asked for again before the next step.
                self.blocked = Some((arrival, KnownPrefix::default()));
                return;
            };
            self.blocked = None;
            let (start, tokens) = (table.computed(), sequence.tokens.len());
            if room.of_prompt(&sequence.request, &table, start, tokens - start, &self.kv) == 0 {
                return self.kv.release(table);
            }
            let (rank, mut sequence) = self.waiting.take(next, self.counters.admissions);
            self.counters.admissions += 1;
            // Hits on its own blocks after a preemption do not count.
            if sequence.is_new() && self.kv.looks_up(&sequence.sharing()) {
                self.counters.prefix_queried_tokens += sequence.tokens.len() as u64;
                self.counters.prefix_hit_tokens += table.computed() as u64;
            }
            self.places.insert(sequence.request.id(), Place::Running(rank));
            let mut running = Running::new(sequence, table);
            let len = room.take(&running, &self.kv);
            runs.push(running.next_run(len, &mut self.kv));
            self.running.insert(rank, running);
        }
    }

    /// Pages that must stay free beside a newcomer's: one more block of each group for each that runs, or those for `tokens` more
    /// tokens, if that is more. What lies behind a window is given back as a request grows. None if it is alone, where every request
    /// fits.
    fn pages_to_grow(&self, tokens: usize) -> usize {
        let config = self.kv.config();
        let of_kind = |is_full: bool| {
            let groups = config
                .groups
                .iter()
                .filter(move |group| (group.kind == CacheKind::Full) == is_full);
            groups.map(|group| group.pages_per_block).sum::<usize>()
        };
        let running = self.running.len();
        let grown = match running {
            0 => 0,
            _ => running.max(config.block_size.blocks_for(tokens)),
        };
        grown * of_kind(true) + running * of_kind(false)
    }
}
