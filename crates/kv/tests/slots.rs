//! What the manager promises where layers keep a state of fixed size.

use plimsoll_core::{
    BlockSize, CacheContent, CacheEvent, CacheGroups, CacheKind, KvConfig, RunState, StateSlot, TokenId,
};
use plimsoll_kv::{BlockTable, KvManager, NoRoom, Sharing, SlotStats};

const BLOCK: usize = 8;

fn config(num_pages: usize, state_slots: usize) -> KvConfig {
    KvConfig {
        block_size: BlockSize::new(BLOCK).expect("8 is legal"),
        num_pages,
        groups: CacheGroups::default().with_states(3),
        state_slots,
    }
}

fn manager(num_pages: usize, state_slots: usize) -> KvManager {
    KvManager::new(config(num_pages, state_slots), 1000, true)
}

fn open(manager: &mut KvManager, tokens: &[TokenId]) -> Result<BlockTable, NoRoom> {
    manager.open(tokens, Sharing::default(), 0)
}

/// Computes `tokens[..end]` as a scheduler would, and returns the states and ends of the runs.
fn compute(
    manager: &mut KvManager,
    table: &mut BlockTable,
    tokens: &[TokenId],
    end: usize,
) -> Vec<(RunState, usize)> {
    let mut runs = Vec::new();
    while table.computed() < end {
        let end = manager.cut(table, table.computed(), end);
        manager.reserve(table, end).unwrap();
        let state = manager.next_state(table, end).expect("layers have states");
        manager.commit(table, &tokens[..end]);
        manager.check_invariants([&*table]).unwrap();
        runs.push((state, end));
    }
    runs
}

/// The life of a request that generates `tokens` beyond a prompt of so many. Returns how many were found.
fn live(manager: &mut KvManager, tokens: &[TokenId], prompt: usize) -> usize {
    let mut table = open(manager, &tokens[..prompt]).unwrap();
    let found = table.computed();
    compute(manager, &mut table, tokens, prompt);
    for end in prompt + 1..tokens.len() {
        compute(manager, &mut table, tokens, end);
    }
    manager.release(table);
    manager.check_invariants([]).unwrap();
    found
}

/// Tokens that all differ.
fn text(first: usize, len: usize) -> Vec<TokenId> {
    (first..first + len).map(|token| token as TokenId).collect()
}

fn state(before: Option<u32>, after: u32) -> RunState {
    RunState {
        before: before.map(StateSlot),
        after: StateSlot(after),
        in_chunks: true,
    }
}

#[test]
fn a_table_has_a_slot_of_its_own_until_it_is_released() {
    let mut manager = manager(20, 2);
    let tokens = text(0, 20);
    let (mut first, mut second) = (
        open(&mut manager, &tokens).unwrap(),
        open(&mut manager, &tokens).unwrap(),
    );
    assert_eq!(manager.next_state(&mut first, 5), Some(state(None, 0)));
    assert_eq!(manager.next_state(&mut first, 6), Some(state(Some(0), 0)));
    assert_eq!(manager.next_state(&mut second, 5), Some(state(None, 1)));
    let full = SlotStats {
        total: 2,
        used: 2,
        ..SlotStats::default()
    };
    assert_eq!(manager.stats().slots, full);
    // There are pages, and no slot: nothing is taken.
    let available = manager.available();
    assert_eq!(open(&mut manager, &tokens).unwrap_err(), NoRoom::Slots(2));
    assert_eq!(manager.available(), available);
    manager.check_invariants([&first, &second]).unwrap();
    manager.release(first);
    let mut third = open(&mut manager, &tokens).unwrap();
    assert_eq!(manager.next_state(&mut third, 5), Some(state(None, 0)));
    manager.check_invariants([&second, &third]).unwrap();
    manager.release(second);
    // Without pages, no slot is taken either.
    assert!(matches!(open(&mut manager, &[1; 200]), Err(NoRoom::Pages(_))));
    assert_eq!(manager.stats().slots.used, 1);
    manager.release(third);
    assert_eq!(manager.stats().slots, SlotStats { used: 0, ..full });
    manager.check_invariants([]).unwrap();
}

/// The run behind the place leaves its state in another slot; that of the place stays, for as many as come.
#[test]
fn a_prompt_leaves_a_snapshot_before_its_end() {
    let mut manager = manager(100, 4);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    let runs = compute(&mut manager, &mut table, &tokens, 60);
    // 52 tokens are not among those that the next turn may leave out, and 48 of them are whole blocks.
    assert_eq!(runs, [(state(None, 0), 48), (state(Some(0), 1), 60)]);
    let SlotStats { used, snapshots, .. } = manager.stats().slots;
    assert_eq!((used, snapshots), (1, 1));
    let next = [&tokens[..50], &text(100, 30)].concat();
    let mut tables = Vec::new();
    for own in [2, 3] {
        let mut table = open(&mut manager, &next).unwrap();
        assert_eq!(table.computed(), 48);
        assert_eq!(manager.next_state(&mut table, 60), Some(state(Some(0), own)));
        tables.push(table);
    }
    // While runs that begin with it are not computed, it is not given up.
    assert_eq!(open(&mut manager, &next).unwrap_err(), NoRoom::Slots(4));
    tables.push(table);
    manager.check_invariants(&tables).unwrap();
    tables.drain(..).for_each(|table| manager.release(table));
    assert_eq!(manager.stats().slots.used, 0);
}

#[test]
fn the_state_of_a_step_in_flight_is_a_snapshot_once_that_is_computed() {
    let mut manager = manager(100, 4);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    manager.next_state(&mut table, 48);
    assert_eq!(manager.next_state(&mut table, 60), Some(state(Some(0), 1)));
    let early = open(&mut manager, &tokens).unwrap();
    assert_eq!((early.computed(), manager.stats().slots.snapshots), (0, 0));
    manager.release(early);
    manager.commit(&mut table, &tokens[..48]);
    let late = open(&mut manager, &tokens).unwrap();
    assert_eq!((late.computed(), manager.stats().slots.snapshots), (48, 1));
    manager.check_invariants([&table, &late]).unwrap();
    manager.release(late);
    // Cancelled, with the run behind it in flight.
    manager.release(table);
    manager.check_invariants([]).unwrap();
    assert_eq!(open(&mut manager, &tokens).unwrap().computed(), 48);
}

#[test]
fn a_run_that_fails_leaves_no_snapshot() {
    let mut manager = manager(100, 4);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    manager.next_state(&mut table, 48);
    manager.next_state(&mut table, 60);
    manager.release(table);
    assert_eq!(manager.stats().slots.snapshots, 0);
    assert_eq!(live(&mut manager, &tokens, 60), 0);
}

#[test]
fn a_turn_leaves_one_snapshot_at_its_end() {
    let mut manager = manager(100, 8);
    let tokens = text(0, 150);
    live(&mut manager, &tokens[..100], 60);
    // Before the end of the prompt, and behind 96 of 99 computed tokens; those in between made way.
    let SlotStats {
        snapshots, given_up, ..
    } = manager.stats().slots;
    assert_eq!((snapshots, given_up), (2, 4));
    assert_eq!(live(&mut manager, &tokens, 130), 96);
    // A turn that goes on from elsewhere finds less.
    assert_eq!(
        live(&mut manager, &[&tokens[..90], &text(500, 60)].concat(), 140),
        48
    );
}

/// As a request that is preempted finds its own states again.
#[test]
fn a_table_that_ends_with_a_block_leaves_its_state() {
    let mut manager = manager(100, 2);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    compute(&mut manager, &mut table, &tokens, 40);
    manager.release(table);
    assert_eq!(manager.stats().slots.snapshots, 1);
    assert_eq!(open(&mut manager, &tokens).unwrap().computed(), 40);
}

/// What two requests have in common, others will have too.
#[test]
fn where_two_prompts_part_is_a_snapshot_for_the_third() {
    let mut manager = manager(200, 8);
    let shared = text(0, 64);
    let prompt = |own: usize| [shared.as_slice(), &text(own, 60)].concat();
    assert_eq!(live(&mut manager, &prompt(1000), 124), 0);
    assert_eq!(live(&mut manager, &prompt(2000), 124), 0);
    assert_eq!(live(&mut manager, &prompt(3000), 124), 64);
}

#[test]
fn the_least_recently_used_snapshot_is_given_up_first() {
    let mut manager = manager(200, 3);
    let prompts = [text(0, 44), text(100, 44), text(200, 44)];
    for prompt in &prompts[..2] {
        live(&mut manager, prompt, 44);
    }
    // Used again.
    assert_eq!(live(&mut manager, &prompts[0], 44), 32);
    live(&mut manager, &prompts[2], 44);
    assert_eq!(manager.stats().slots.snapshots, 2);
    let mut found = |prompt: &[TokenId]| {
        let table = open(&mut manager, prompt).unwrap();
        let found = table.computed();
        manager.release(table);
        found
    };
    assert_eq!(prompts.each_ref().map(|prompt| found(prompt)), [32, 0, 32]);
}

/// Where slots are short, a chat takes those of its own last turn first.
#[test]
fn a_turn_takes_the_place_of_the_last_one() {
    for in_flight in [false, true] {
        let mut manager = manager(200, 3);
        let (tokens, other) = (text(0, 150), text(1000, 44));
        live(&mut manager, &tokens[..60], 60);
        live(&mut manager, &other, 44);
        let mut table = open(&mut manager, &tokens[..100]).unwrap();
        assert_eq!(table.computed(), 48);
        manager.next_state(&mut table, 88);
        if !in_flight {
            manager.commit(&mut table, &tokens[..88]);
        }
        manager.next_state(&mut table, 100);
        manager.commit(&mut table, &tokens[..88]);
        manager.commit(&mut table, &tokens[..100]);
        manager.check_invariants([&table]).unwrap();
        manager.release(table);
        assert_eq!(live(&mut manager, &other, 44), 32);
        assert_eq!(live(&mut manager, &tokens, 120), 88);
    }
}

#[test]
fn those_within_prompts_are_given_up_before_others() {
    let mut manager = KvManager::new(config(200, 3), 40, true);
    let prompt = text(0, 44);
    live(&mut manager, &prompt, 44);
    // Two chunks end within a long prompt, and the second takes the slot of the first.
    let long = text(1000, 150);
    let mut table = open(&mut manager, &long).unwrap();
    for end in [40, 80, 120] {
        compute(&mut manager, &mut table, &long, end);
    }
    manager.release(table);
    assert_eq!(live(&mut manager, &prompt, 44), 32);
}

/// A request that finds no other slot goes on in that of the snapshot.
#[test]
fn the_only_slot_is_handed_on() {
    let mut manager = manager(100, 1);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    compute(&mut manager, &mut table, &tokens, 40);
    manager.release(table);
    let mut table = open(&mut manager, &tokens).unwrap();
    assert_eq!(table.computed(), 40);
    assert_eq!(manager.next_state(&mut table, 60), Some(state(Some(0), 0)));
    let SlotStats {
        snapshots, given_up, ..
    } = manager.stats().slots;
    assert_eq!((snapshots, given_up), (0, 1));
    manager.check_invariants([&table]).unwrap();
}

#[test]
fn a_snapshot_goes_with_its_blocks() {
    let mut manager = manager(10, 4);
    live(&mut manager, &text(0, 44), 44);
    assert_eq!(manager.stats().slots.snapshots, 1);
    let table = open(&mut manager, &text(100, 80)).unwrap();
    assert_eq!(
        (manager.stats().cached(), manager.stats().slots.snapshots),
        (0, 0)
    );
    manager.check_invariants([&table]).unwrap();
    manager.release(table);
    assert_eq!(live(&mut manager, &text(0, 44), 44), 0);
}

#[test]
fn a_cache_that_is_emptied_has_no_snapshots() {
    let mut manager = manager(100, 4);
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    compute(&mut manager, &mut table, &tokens, 50);
    manager.forget_cached();
    assert_eq!(manager.stats().slots.snapshots, 0);
    compute(&mut manager, &mut table, &tokens, 60);
    manager.release(table);
    assert_eq!(live(&mut manager, &tokens, 60), 0);

    let lost = open(&mut manager, &tokens).unwrap();
    manager.reset(config(50, 3));
    drop(lost);
    let full = SlotStats {
        total: 3,
        given_up: manager.stats().slots.given_up,
        ..SlotStats::default()
    };
    assert_eq!(manager.stats().slots, full);
    let tables: Vec<_> = (0..3).map(|_| open(&mut manager, &tokens).unwrap()).collect();
    assert!(tables.iter().all(|table| table.computed() == 0));
    manager.check_invariants(&tables).unwrap();
    tables.into_iter().for_each(|table| manager.release(table));
}

/// Where a recurrence goes through chunks of 32 tokens, prompts are cut between them, and their snapshots lie there.
#[test]
fn prompts_are_cut_between_chunks_of_the_recurrence() {
    let mut manager = manager(100, 4).with_state_chunk(32);
    let tokens = text(0, 120);
    let table = open(&mut manager, &tokens).unwrap();
    // Also where a turn may go on, at least eight tokens before the end; nothing where there is room for no chunk.
    let cuts = [(0, 50), (64, 120), (96, 120), (0, 30), (40, 60)];
    let cuts = cuts.map(|(start, end)| manager.cut(&table, start, end));
    assert_eq!(cuts, [32, 96, 120, 0, 40]);
    manager.release(table);
    // An answer that is computed again is not, and no run of the prompt goes on into it.
    let prompt = Sharing {
        prompt: 110,
        ..Sharing::default()
    };
    let mut table = manager.open(&tokens, prompt, 0).unwrap();
    let cuts = [(96, 120), (110, 119)].map(|(start, end)| manager.cut(&table, start, end));
    assert_eq!(cuts, [110, 119]);
    let in_chunks = [110, 120].map(|end| manager.next_state(&mut table, end).unwrap().in_chunks);
    assert_eq!(in_chunks, [true, false]);
    manager.release(table);
    // A chunk that the end of a prompt cuts short leaves nothing: that of a longer prompt is another.
    let longer = text(500, 120);
    let mut table = open(&mut manager, &longer[..72]).unwrap();
    compute(&mut manager, &mut table, &longer[..72], 72);
    manager.release(table);
    let table = open(&mut manager, &longer).unwrap();
    assert_eq!(table.computed(), 64);
    manager.release(table);
    // What is left of a prompt that was not computed to its end.
    for computed in [32, 64, 96] {
        let mut table = open(&mut manager, &tokens).unwrap();
        compute(&mut manager, &mut table, &tokens, computed);
        manager.release(table);
        let table = open(&mut manager, &tokens).unwrap();
        assert_eq!(table.computed(), computed);
        manager.release(table);
    }
}

#[test]
fn without_a_prefix_cache_nothing_stays() {
    let mut manager = KvManager::new(config(100, 8), 1000, false);
    let tokens = text(0, 100);
    for _ in 0..2 {
        assert_eq!(live(&mut manager, &tokens, 60), 0);
        assert_eq!(manager.stats().slots.snapshots, 0);
    }
}

/// Where no hit ends, routers are told of nothing.
#[test]
fn listeners_hear_of_what_can_be_hit() {
    let mut manager = manager(100, 4);
    manager.record_events();
    let tokens = text(0, 60);
    let mut table = open(&mut manager, &tokens).unwrap();
    compute(&mut manager, &mut table, &tokens, 48);
    assert_eq!(manager.stats().cached(), 6);
    assert_eq!(manager.take_events(), []);
    compute(&mut manager, &mut table, &tokens, 60);
    let events = manager.take_events();
    let [
        CacheEvent::Stored {
            group: 0,
            content: CacheContent::Kv(CacheKind::Full),
            blocks,
            parent: None,
            ..
        },
        CacheEvent::Stored {
            group: 1,
            content: CacheContent::State,
            blocks: state,
            parent,
            tokens: last,
            ..
        },
    ] = events.as_slice()
    else {
        panic!("{events:?}");
    };
    assert_eq!(
        (blocks.len(), state, parent),
        (6, &vec![blocks[5]], &Some(blocks[4]))
    );
    assert_eq!(last, &tokens[40..48]);
    assert_eq!(manager.cached(), events);
    manager.release(table);
    // All slots are taken.
    let tables: Vec<_> = (0..4)
        .map(|first| open(&mut manager, &text(100 * (first + 1), 9)).unwrap())
        .collect();
    let [state, removed] = [vec![blocks[5]], blocks.iter().rev().copied().collect()];
    let removed = [
        CacheEvent::Removed {
            group: 1,
            blocks: state,
        },
        CacheEvent::Removed {
            group: 0,
            blocks: removed,
        },
    ];
    assert_eq!(manager.take_events(), removed);
    assert_eq!((manager.cached(), manager.stats().cached()), (Vec::new(), 7));
    tables.into_iter().for_each(|table| manager.release(table));
}
