//! What the manager promises where layers keep different things.

use plimsoll_core::{BlockSize, CacheKind, CacheLayout, KvConfig, TokenId};
use plimsoll_kv::{BlockTable, KvManager, Sharing};

const CHUNK: usize = 16;

/// Blocks of 8 tokens; layers of `kinds`, one of each kind in a page.
fn manager(kinds: &[CacheKind], num_pages: usize) -> KvManager {
    let config = KvConfig {
        block_size: BlockSize::new(8).expect("8 is legal"),
        num_pages,
        groups: CacheLayout::new(kinds, 1 << 20)
            .expect("the kinds are few")
            .groups,
        state_slots: 0,
    };
    KvManager::new(config, CHUNK, true)
}

fn tokens(kind: TokenId, n: usize) -> Vec<TokenId> {
    (0..n as TokenId).map(|i| 1000 * kind + i).collect()
}

/// Computes a prompt chunk by chunk.
fn compute(manager: &mut KvManager, tokens: &[TokenId]) -> BlockTable {
    let mut table = manager
        .open(tokens, Sharing::default(), 0)
        .expect("there is room");
    while table.computed() < tokens.len() {
        let end = tokens.len().min(table.computed() + CHUNK);
        manager.reserve(&mut table, end).expect("there is room");
        manager.commit(&mut table, &tokens[..end]);
        manager.check_invariants([&table]).unwrap();
    }
    table
}

#[test]
fn blocks_behind_a_window_return_while_the_request_runs() {
    let mut manager = manager(&[CacheKind::Full, CacheKind::Window(20)], 30);
    let table = compute(&mut manager, &tokens(1, 100));
    let held: Vec<_> = table
        .groups()
        .iter()
        .map(|held| (held.first, held.pages.len()))
        .collect();
    // The token at 100 sees those from 81 on.
    assert_eq!(held, [(0, 13), (10, 3)]);
    assert_eq!(manager.stats().used, 16);
    manager.release(table);
    assert_eq!(manager.stats().used, 0);
}

#[test]
fn a_block_of_several_layers_takes_several_pages() {
    let mut kinds = vec![CacheKind::Full; 2];
    kinds.extend([CacheKind::Window(20); 6]);
    let mut manager = manager(&kinds, 40);
    let table = compute(&mut manager, &tokens(1, 40));
    let pages: Vec<_> = table.groups().iter().map(|held| held.pages.len()).collect();
    // Blocks 0 to 4 once, blocks 2 to 4 three times.
    assert_eq!((pages, manager.stats().used), (vec![5, 9], 14));
    manager.release(table);
    let again = manager.open(&tokens(1, 41), Sharing::default(), 0).unwrap();
    assert_eq!(again.computed(), 40, "all planes are found");
    manager.check_invariants([&again]).unwrap();
    manager.release(again);
}

#[test]
fn a_hit_needs_the_blocks_of_the_window_before_it_and_no_others() {
    let mut manager = manager(&[CacheKind::Full, CacheKind::Window(8)], 21);
    let prompt = tokens(1, 64);
    let table = compute(&mut manager, &prompt);
    manager.release(table);
    // 8 full blocks are cached, and as many of the window; another request takes the oldest of those.
    let other = compute(&mut manager, &tokens(2, 33));
    assert!(manager.stats().evictions > 0);
    manager.release(other);
    let table = manager.open(&tokens(1, 65), Sharing::default(), 0).unwrap();
    assert_eq!(table.computed(), 64, "the last window is there");
    assert_eq!(table.groups()[1].first, 7);
    manager.check_invariants([&table]).unwrap();
    manager.release(table);
    // Half of the prompt ends where the window is gone.
    let half = manager.open(&prompt[..25], Sharing::default(), 0).unwrap();
    assert_eq!(half.computed(), 0);
    manager.release(half);
}

#[test]
fn windows_alone_share_and_forget_their_past() {
    let mut manager = manager(&[CacheKind::Window(16)], 8);
    let prompt = tokens(1, 200);
    let table = compute(&mut manager, &prompt);
    assert!(manager.stats().used <= 3, "{:?}", manager.stats());
    manager.release(table);
    for kind in 2..6 {
        let table = compute(&mut manager, &tokens(kind, 200));
        manager.check_invariants([&table]).unwrap();
        manager.release(table);
    }
    let table = manager.open(&prompt, Sharing::default(), 0).unwrap();
    assert_eq!(table.computed(), 0, "its blocks were needed");
    manager.release(table);
    let again = manager.open(&tokens(5, 200), Sharing::default(), 0).unwrap();
    manager.check_invariants([&again]).unwrap();
    manager.release(again);
}

#[test]
fn the_longest_request_that_fits_alone_can_be_computed() {
    let kinds = [CacheKind::Full, CacheKind::Window(20), CacheKind::Window(5)];
    for num_pages in 12..60 {
        let mut manager = manager(&kinds, num_pages);
        let longest = manager.longest_request();
        assert!(manager.fits(longest) && !manager.fits(longest + 1));
        let table = compute(&mut manager, &tokens(1, longest));
        manager.release(table);
    }
}
