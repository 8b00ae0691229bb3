//! What the manager promises where layers keep a state of fixed size.

use plimsoll_core::{BlockSize, CacheGroups, KvConfig, StateSlot};
use plimsoll_kv::{KvManager, NoRoom, Sharing, SlotStats};

fn config(num_pages: usize, state_slots: usize) -> KvConfig {
    KvConfig {
        block_size: BlockSize::new(8).expect("8 is legal"),
        num_pages,
        groups: CacheGroups::default().with_states(3),
        state_slots,
    }
}

#[test]
fn a_table_has_a_slot_of_its_own_until_it_is_released() {
    let mut manager = KvManager::new(config(20, 2), 64, true);
    let open = |manager: &mut KvManager| manager.open(&[1; 20], Sharing::default(), 0);
    let (first, second) = (open(&mut manager).unwrap(), open(&mut manager).unwrap());
    assert_eq!(
        (first.state(), second.state()),
        (Some(StateSlot(0)), Some(StateSlot(1)))
    );
    assert_eq!(manager.stats().slots, SlotStats { total: 2, used: 2 });
    // There are pages, and no slot: nothing is taken.
    let available = manager.available();
    assert_eq!(open(&mut manager).unwrap_err(), NoRoom::Slots(2));
    assert_eq!(manager.available(), available);
    manager.check_invariants([&first, &second]).unwrap();
    manager.release(first);
    let third = open(&mut manager).unwrap();
    assert_eq!(third.state(), Some(StateSlot(0)));
    manager.check_invariants([&second, &third]).unwrap();
    // Without pages, no slot is taken either.
    assert!(matches!(
        manager.open(&[1; 200], Sharing::default(), 0),
        Err(NoRoom::Slots(2)) | Err(NoRoom::Pages(_))
    ));
    manager.release(second);
    assert!(matches!(
        manager.open(&[1; 200], Sharing::default(), 0),
        Err(NoRoom::Pages(_))
    ));
    assert_eq!(manager.stats().slots.used, 1);
    manager.release(third);
    assert_eq!(manager.stats().slots.used, 0);
    manager.check_invariants([]).unwrap();
}

/// Pages of the same tokens are of no use without the state behind them.
#[test]
fn nothing_is_shared() {
    let mut manager = KvManager::new(config(20, 2), 64, true);
    assert!(!manager.looks_up(&Sharing::default()));
    let mut first = manager.open(&[1; 20], Sharing::default(), 0).unwrap();
    manager.commit(&mut first, &[1; 20]);
    let second = manager.open(&[1; 20], Sharing::default(), 0).unwrap();
    assert_eq!((second.computed(), manager.stats().cached()), (0, 0));
    manager.check_invariants([&first, &second]).unwrap();
    manager.release(first);
    manager.release(second);
}

#[test]
fn a_new_cache_has_all_its_slots() {
    let mut manager = KvManager::new(config(20, 2), 64, true);
    let lost = manager.open(&[1; 20], Sharing::default(), 0).unwrap();
    manager.reset(config(10, 3));
    drop(lost);
    let tables: Vec<_> = (0..3)
        .map(|_| manager.open(&[1; 20], Sharing::default(), 0).unwrap())
        .collect();
    manager.check_invariants(&tables).unwrap();
    tables.into_iter().for_each(|table| manager.release(table));
}
