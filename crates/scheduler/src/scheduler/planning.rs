//! Which requests have runs in the next step.

use std::ops::Bound;

use plimsoll_core::Run;

use super::{Place, Scheduler, room::Room};
use crate::{queue::Rank, sequence::Running};

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
        while room.for_prompts() > 0 && !self.short_of_blocks && self.running.len() < self.limits.max_num_seqs
        {
            let lowest = self.running.first_key_value().map(|(rank, _)| rank.class);
            let Some(next) = self.waiting.next(self.counters.admissions, lowest) else {
                return;
            };
            // One more block of each group for each that runs, lest the newcomer be preempted as soon as they grow.
            let headroom = self.running.len() * self.kv.config().groups.pages_per_block();
            let sequence = self.waiting.peek(next);
            // Most likely too little for a chunk, whatever the prefix cache has: not worth taking blocks to find out.
            if room.for_prompts() < self.kv.state_chunk().min(sequence.tokens.len()) {
                return;
            }
            let Ok(table) = self.kv.open(&sequence.tokens, sequence.sharing(), headroom) else {
                return;
            };
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
}
