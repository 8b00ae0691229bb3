/// A bug made by hand.
pub(crate) struct Mutation {
    /// What is wrong.
    pub(crate) name: &'static str,
    /// Where.
    pub(crate) edits: &'static [Edit],
}

/// One change of the source.
pub(crate) struct Edit {
    /// Crate and file.
    pub(crate) file: &'static str,
    /// A piece of the source that stands there once, with the part to replace «so».
    pub(crate) site: &'static str,
    /// Stands instead.
    pub(crate) bug: &'static str,
}

pub(crate) const fn bug(name: &'static str, edits: &'static [Edit]) -> Mutation {
    Mutation { name, edits }
}

pub(crate) const fn edit(file: &'static str, site: &'static str, bug: &'static str) -> Edit {
    Edit { file, site, bug }
}

const JOURNAL: &str = "kv/prefix/journal.rs";
const KNOWN: &str = "kv/manager/known.rs";
const MANAGER: &str = "kv/manager.rs";
const PREFIX: &str = "kv/prefix.rs";
const QUEUE: &str = "scheduler/queue.rs";
const ROOM: &str = "scheduler/scheduler/room.rs";
const PLANNING: &str = "scheduler/scheduler/planning.rs";
const SCHEDULER: &str = "scheduler/scheduler.rs";
const SEQUENCE: &str = "scheduler/sequence.rs";

pub(crate) const MUTATIONS: [Mutation; 79] = [
    bug(
        "who is admitted does not hear of it",
        &[edit(
            SCHEDULER,
            "let cached_tokens = «self.running_mut(run.request)?.1.admitted.take()»?;",
            "None",
        )],
    ),
    bug(
        "what goes with an evicted block stays in the cache",
        &[edit(PREFIX, "if let Some(child) = «node.first_child»", "None")],
    ),
    bug(
        "a block is cached behind one that is gone",
        &[edit(PREFIX, "if «!self.is_cached(before)»", "false")],
    ),
    bug(
        "a router hears nothing of what is evicted",
        &[edit(
            PREFIX,
            "«journal.removed(group, node.name);»",
            "let _ = (journal, group);",
        )],
    ),
    bug(
        "a router hears nothing of a lost cache",
        &[edit(JOURNAL, "«self.events.push(CacheEvent::Cleared);»", "{}")],
    ),
    bug(
        "a router takes blocks for a row that are none",
        &[edit(JOURNAL, "&& «blocks.last() == parent.as_ref()»", "true")],
    ),
    bug(
        "blocks of two salts have one name",
        &[edit(
            JOURNAL,
            "digest.update(«salt.unwrap_or_default()»);",
            "{ let _ = salt; \"\" }",
        )],
    ),
    bug(
        "equal tokens after others have one name",
        &[edit(
            JOURNAL,
            "digest.update(«parent.unwrap_or(0)».to_le_bytes());",
            "{ let _ = parent; 0_u64 }",
        )],
    ),
    bug(
        "a salt begins elsewhere once the cache is emptied",
        &[edit(PREFIX, "salts: «self.salts.clone()»,", "RandomState::new()")],
    ),
    bug(
        "a router hears no salt",
        &[edit(JOURNAL, "salt: «self.salts.get(&name).cloned()»,", "None")],
    ),
    bug(
        "a shared block is not counted",
        &[edit(MANAGER, "«*references += 1;»", "*references = 1;")],
    ),
    bug(
        "a shared block stays in the free list",
        &[edit(MANAGER, "«self.pool.claim(head);»", "{}")],
    ),
    bug(
        "a block is given up by all at once",
        &[edit(MANAGER, "«*references -= 1;»", "*references = 0;")],
    ),
    bug(
        "a freed block is lost",
        &[edit(MANAGER, "«self.pool.put(head, last);»", "{}")],
    ),
    bug(
        "an evicted block stays in the cache",
        &[edit(
            MANAGER,
            "self.evictions += «self.index.evict(page)» as u64;",
            "0_usize",
        )],
    ),
    bug(
        "the whole prompt is taken from the cache",
        &[edit(
            MANAGER,
            "&tokens[..«tokens.len().saturating_sub(1)»]",
            "tokens.len()",
        )],
    ),
    bug(
        "who lacked pages once waits for good",
        &[edit(
            KNOWN,
            "«blocks * pages_per_block + headroom > available»",
            "true",
        )],
    ),
    bug(
        "a table is one block short now and then",
        &[edit(
            MANAGER,
            "let total = self.config.block_size.blocks_for(«tokens»);",
            "tokens - 1",
        )],
    ),
    bug(
        "blocks are cached at the wrong offset",
        &[edit(MANAGER, "tokens[«full * block_size»..]", "0")],
    ),
    bug(
        "more blocks are promised than are free",
        &[edit(
            MANAGER,
            "needed += «idle.count()» * group.pages_per_block;",
            "{ let _ = idle; 0 }",
        )],
    ),
    bug(
        "the tokens of a block are not compared",
        &[edit(
            PREFIX,
            "&& «self.tokens_of(id.index()) == content.tokens»",
            "true",
        )],
    ),
    bug(
        "a block is known by its own tokens alone",
        &[
            edit(
                PREFIX,
                "is_some_and(|node| «node.before == before»)",
                "{ let _ = node; true }",
            ),
            edit(
                PREFIX,
                "«xxh3_64_with_seed(&bytes[..4 * tokens.len()], seed ^ before.name)»",
                "xxh3_64_with_seed(&bytes[..4 * tokens.len()], seed)",
            ),
        ],
    ),
    bug(
        "a block is cached twice",
        &[edit(PREFIX, "«return Some(prefix);»", "{ let _ = prefix; }")],
    ),
    bug(
        "a run starts too early",
        &[edit(SEQUENCE, "planned: «start»,", "start.saturating_sub(1)")],
    ),
    bug(
        "a run starts too late",
        &[edit(
            SEQUENCE,
            "«self.planned = end;»",
            "self.planned = end + usize::from(len > 3);",
        )],
    ),
    bug(
        "the table misses its last block",
        &[edit(
            SEQUENCE,
            "tables: «self.table.up_to(end, &kv.config())»,",
            "self.table.up_to(end - 1, &kv.config())",
        )],
    ),
    bug(
        "the table repeats its first block",
        &[edit(
            SEQUENCE,
            "tables: «self.table.up_to(end, &kv.config())»,",
            "{ let mut tables = self.table.up_to(end, &kv.config()); tables.iter_mut().for_each(|t| if let Some(&page) = t.pages.first() { t.pages.fill(page) }); tables }",
        )],
    ),
    bug(
        "a token in flight is not counted",
        &[edit(
            SEQUENCE,
            "let index = self.sequence.outputs() + «usize::from(self.sampling)»;",
            "0",
        )],
    ),
    bug(
        "a step goes past max_tokens",
        &[edit(
            SEQUENCE,
            "usize::from(«!ends» && ",
            "{ let _ = ends; true }",
        )],
    ),
    bug(
        "a sampler with history runs ahead of it",
        &[edit(SEQUENCE, "&& «!request.needs_output()»", "true")],
    ),
    bug(
        "history is left out",
        &[edit(
            SEQUENCE,
            "let history = if «params.needs_history()»",
            "false",
        )],
    ),
    bug(
        "stop tokens are ignored",
        &[edit(
            SEQUENCE,
            "if «self.request.stop_token_ids().contains(&token)»",
            "false",
        )],
    ),
    bug(
        "max_tokens is ignored",
        &[edit(
            SEQUENCE,
            "Progress::Open if «self.outputs() == self.request.max_tokens()»",
            "false",
        )],
    ),
    bug(
        "a text goes on behind the end of its grammar",
        &[edit(
            SEQUENCE,
            "Progress::Complete => «Some(FinishReason::Complete)»,",
            "None",
        )],
    ),
    bug(
        "a constrained request is sampled like any other",
        &[edit(
            SEQUENCE,
            "constrained: «!constraints.is_free()»,",
            "{ let _ = constraints; false }",
        )],
    ),
    bug(
        "masks are left out",
        &[edit(
            SCHEDULER,
            "«constraints[at] = Some(&mut sequence.constraints);»",
            "let _ = (at, sequence);",
        )],
    ),
    bug(
        "blocks are cached before the step that computes them",
        &[edit(
            PLANNING,
            "«self.running.insert(rank, running);»",
            "let end = running.planned; self.kv.commit(&mut running.table, &running.sequence.tokens[..end]); \
             self.running.insert(rank, running);",
        )],
    ),
    bug(
        "a step commits what the next is still computing",
        &[edit(
            SCHEDULER,
            "running.sequence.tokens[..«run.end()»]",
            "running.planned.min(running.sequence.tokens.len())",
        )],
    ),
    bug(
        "a failed step is committed",
        &[edit(
            SCHEDULER,
            "«self.retire(rank);»\n            self.counters.failed += 1;",
            "if let Some(r) = self.running.get_mut(&rank) { let end = run.end().min(r.sequence.tokens.len()); \
             self.kv.commit(&mut r.table, &r.sequence.tokens[..end]); } self.retire(rank);",
        )],
    ),
    bug(
        "what is not finite stays cached",
        &[edit(SCHEDULER, "«self.kv.distrust(&mut running.table);»", "{}")],
    ),
    bug(
        "a row confirms what lies behind its window",
        &[edit(
            MANAGER,
            "«group.kind.first_visible(table.computed).div_ceil(block_size)»",
            "0",
        )],
    ),
    bug(
        "blocks are confirmed before anybody has seen them",
        &[edit(
            SCHEDULER,
            "if «answer.sampled.is_some() || answer.pooled.is_some()»",
            "true",
        )],
    ),
    bug(
        "a failed request goes on",
        &[edit(
            SCHEDULER,
            "«self.retire(rank);»\n            self.counters.failed += 1;",
            "{}",
        )],
    ),
    bug(
        "a cancelled request's blocks go while a step uses them",
        &[edit(SCHEDULER, "if «in_flight == 0» {", "true")],
    ),
    bug(
        "a cancelled request in flight is forgotten",
        &[edit(
            SCHEDULER,
            "«self.leaving.insert(id, Leaving { table, in_flight });»",
            "drop(table);",
        )],
    ),
    bug(
        "a request is preempted in flight",
        &[edit(
            PLANNING,
            "|entry| «entry.get().in_flight == 0»",
            "{ let _ = entry; true }",
        )],
    ),
    bug(
        "the lowest rank is preempted",
        &[edit(
            PLANNING,
            "= «latest.remove_entry()»;",
            "drop(latest); self.running.pop_first().expect(\"one runs\")",
        )],
    ),
    bug(
        "a preempted request goes to the back of the queue",
        &[edit(
            PLANNING,
            "«self.wait_again(latest, sequence);»\n            self.counters.preemptions",
            "let last = crate::sequence::Arrival(self.next_arrival); self.next_arrival += 1; let _ = latest; \
             self.places.insert(sequence.request.id(), Place::Waiting(last)); \
             self.waiting.push(crate::sequence::Sequence { arrival: last, ..sequence });",
        )],
    ),
    bug(
        "a preempted request loses its blocks",
        &[edit(
            PLANNING,
            "«self.kv.release(table);»\n            self.short_of_blocks = true;",
            "drop(table);",
        )],
    ),
    bug(
        "a preempted request returns to be preempted again",
        &[edit(
            PLANNING,
            "room.for_prompts() > 0 && «!self.short_of_blocks»",
            "true",
        )],
    ),
    bug(
        "nobody returns after a preemption",
        &[edit(
            SCHEDULER,
            "self.kv.release(table);\n        «self.short_of_blocks = false;»",
            "{}",
        )],
    ),
    bug(
        "a lost cache is still in use",
        &[edit(SCHEDULER, "«self.kv.reset(kv);»", "let _ = kv;")],
    ),
    bug(
        "a cache of another size is taken for the old one",
        &[edit(
            MANAGER,
            "self.config = «config»;",
            "{ let _ = config; self.config }",
        )],
    ),
    bug(
        "nobody is admitted after a loss",
        &[edit(
            SCHEDULER,
            "self.kv.reset(kv);\n        «self.short_of_blocks = false;»",
            "{}",
        )],
    ),
    bug(
        "a loss makes requests forget what they said",
        &[edit(
            SCHEDULER,
            "«self.wait_again(rank, sequence);»\n            self.counters.restarts += 1;",
            "let Sequence { request, arrival, turns_before, .. } = sequence; \
             self.wait_again(rank, Sequence::new(request, arrival, turns_before));",
        )],
    ),
    bug(
        "a request too long for the new cache waits for ever",
        &[edit(
            SCHEDULER,
            ".filter(|waiting| «!self.fits(&waiting.request)»)",
            "{ let _ = waiting; false }",
        )],
    ),
    bug(
        "prompt tokens that are to be scored are taken from the cache",
        &[edit(
            SEQUENCE,
            "false => «self.unscored().map_or(usize::MAX, |rows| rows.start)»",
            "usize::MAX",
        )],
    ),
    bug(
        "a prompt is scored again after a preemption",
        &[edit(
            SCHEDULER,
            "«running.sequence.scored += logprobs.len();»",
            "{}",
        )],
    ),
    bug(
        "a token is scored after itself",
        &[edit(SEQUENCE, "prompt()[«from + 1..to + 1»]", "from..to")],
    ),
    bug(
        "a request for no output never ends",
        &[edit(
            SEQUENCE,
            "«(is_scored && end == self.tokens.len()).then_some(FinishReason::Length)»",
            "{ let _ = (is_scored, end); None }",
        )],
    ),
    bug(
        "a step has too many tokens",
        &[edit(ROOM, "«ready.min(start + self.for_prompts())»", "ready")],
    ),
    bug(
        "a step has too many runs",
        &[edit(
            PLANNING,
            "«self.running.len() < self.limits.max_num_seqs»",
            "true",
        )],
    ),
    bug(
        "a token is waited for after it came",
        &[edit(
            SCHEDULER,
            "«running.planned > running.sequence.tokens.len()»",
            "true",
        )],
    ),
    bug(
        "a cancelled request keeps waiting",
        &[edit(
            SCHEDULER,
            "let removed = «self.waiting.remove(arrival)»;",
            "None",
        )],
    ),
    bug(
        "an ended request never leaves",
        &[edit(SCHEDULER, "«leaving.in_flight -= 1;»", "{}")],
    ),
    bug(
        "priorities are ignored",
        &[edit(
            QUEUE,
            "«Self::Priority(request.priority())»",
            "Self::Priority(0)",
        )],
    ),
    bug(
        "the most urgent come last",
        &[edit(
            QUEUE,
            "«Self::Priority(request.priority())»",
            "Self::Priority(-request.priority())",
        )],
    ),
    bug(
        "tenants do not take turns",
        &[edit(QUEUE, "Some((«tenant.turns», arrival))", "0")],
    ),
    bug(
        "a tenant that comes new makes up for all the time before",
        &[edit(
            QUEUE,
            "tenant.turns = «tenant.turns.max(line.clock)»;",
            "tenant.turns",
        )],
    ),
    bug(
        "a turn is not counted",
        &[edit(QUEUE, "«tenant.turns += 1;»", "{}")],
    ),
    bug(
        "a tenant that comes again has a turn at once",
        &[edit(
            QUEUE,
            "|| «tenant.turns > clock»",
            "{ let _ = clock; false }",
        )],
    ),
    bug(
        "an urgent request waits for those preempted",
        &[edit(QUEUE, "if «line.class < returning.class»", "false")],
    ),
    bug(
        "a newcomer passes those preempted",
        &[edit(
            QUEUE,
            "if «line.class < returning.class»",
            "line.class <= returning.class",
        )],
    ),
    bug(
        "a request that nobody wants first waits for ever",
        &[edit(
            QUEUE,
            "«turns - oldest.turns_before >= self.patience»",
            "false",
        )],
    ),
    bug(
        "those that waited long pass each other",
        &[edit(QUEUE, "behind && «first.class != Class::Aged»", "true")],
    ),
    bug(
        "a request that waited long is preempted like any other",
        &[edit(QUEUE, "let class = «Class::Aged»;", "class")],
    ),
    bug(
        "a mean leaves out what the prefix cache holds",
        &[edit(
            SEQUENCE,
            "most: match «self.request.needs_every_row()» {",
            "false",
        )],
    ),
    bug(
        "a mean is that of the last chunk",
        &[edit(SEQUENCE, "if «self.pooled.is_empty()» {", "true")],
    ),
    bug(
        "every chunk gives its last row out",
        &[edit(
            SEQUENCE,
            "|pooling| «end == known || pooling.needs_every_row()»",
            "{ let _ = pooling; true }",
        )],
    ),
];

/// Changes that make nothing wrong: if these were noticed, the check itself would be.
pub(crate) const EQUIVALENT: [Mutation; 1] = [bug(
    "all hashes collide",
    &[edit(
        PREFIX,
        "«xxh3_64_with_seed(&bytes[..4 * tokens.len()], seed ^ before.name)»",
        "0",
    )],
)];
