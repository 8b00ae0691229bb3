//! What the manager promises, one promise at a time.

use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheEvent, CacheGroups, Image, ImageGrid, ImageSpan, KvConfig, PatchShape, TokenId,
};
use plimsoll_kv::{BlockTable, KvManager, NoRoom, OutOfPages, Sharing};

fn manager(num_blocks: usize) -> KvManager {
    KvManager::new(
        KvConfig {
            block_size: BlockSize::new(8).expect("8 is legal"),
            num_pages: num_blocks,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        64,
        true,
    )
}

/// `n` tokens that begin with those of any shorter prompt of the same kind.
fn tokens(kind: TokenId, n: usize) -> Vec<TokenId> {
    (0..n as TokenId).map(|i| 1000 * kind + i).collect()
}

fn compute(manager: &mut KvManager, tokens: &[TokenId]) -> BlockTable {
    let mut table = manager
        .open(tokens, Sharing::default(), 0)
        .expect("there is room");
    manager.commit(&mut table, tokens);
    table
}

#[test]
fn blocks_are_shared_once_computed_and_counted() {
    let mut manager = manager(8);
    let mut first = manager.open(&tokens(1, 20), Sharing::default(), 0).unwrap();
    let second = manager.open(&tokens(1, 20), Sharing::default(), 0).unwrap();
    assert_eq!(
        (first.computed(), second.computed(), manager.stats().used),
        (0, 0, 6),
        "nothing is computed yet"
    );
    manager.commit(&mut first, &tokens(1, 17));
    let third = manager.open(&tokens(1, 20), Sharing::default(), 0).unwrap();
    assert_eq!((third.computed(), manager.stats().used), (16, 7));
    assert_eq!(third.groups()[0].pages[..2], first.groups()[0].pages[..2]);
    assert_ne!(third.groups()[0].pages[2], first.groups()[0].pages[2]);
    manager.release(first);
    manager.release(second);
    assert_eq!(manager.stats().used, 3);
    manager.check_invariants([&third]).unwrap();
    manager.release(third);
    assert_eq!((manager.stats().used, manager.stats().cached()), (0, 2));
}

#[test]
fn the_last_token_is_always_computed() {
    let mut manager = manager(8);
    let table = compute(&mut manager, &tokens(1, 16));
    manager.release(table);
    let table = manager.open(&tokens(1, 16), Sharing::default(), 0).unwrap();
    assert_eq!(table.computed(), 8, "the second block holds the last token");
    manager.release(table);
    assert_eq!(
        manager
            .open(&tokens(1, 17), Sharing::default(), 0)
            .unwrap()
            .computed(),
        16
    );
}

#[test]
fn all_or_nothing() {
    let mut manager = manager(4);
    let mut table = compute(&mut manager, &tokens(1, 16));
    assert_eq!(
        manager.open(&tokens(2, 17), Sharing::default(), 0).unwrap_err(),
        NoRoom::Pages(OutOfPages {
            needed: 3,
            available: 2
        })
    );
    assert_eq!(
        manager.open(&tokens(2, 9), Sharing::default(), 1).unwrap_err(),
        NoRoom::Pages(OutOfPages {
            needed: 3,
            available: 2
        })
    );
    assert_eq!(
        manager.reserve(&mut table, 40).unwrap_err(),
        OutOfPages {
            needed: 3,
            available: 2
        }
    );
    assert_eq!((manager.available(), table.groups()[0].pages.len()), (2, 2));
    manager.reserve(&mut table, 32).unwrap();
    assert_eq!(manager.available(), 0);
}

#[test]
fn the_least_recently_used_goes_first_and_ends_before_beginnings() {
    let mut manager = manager(4);
    for kind in [1, 2] {
        let table = compute(&mut manager, &tokens(kind, 16));
        manager.release(table);
    }
    // Used again: now 2 is the oldest.
    let table = manager.open(&tokens(1, 17), Sharing::default(), 0).unwrap();
    assert_eq!(
        (table.computed(), manager.stats().evictions),
        (16, 1),
        "the third block was the end of 2"
    );
    manager.release(table);
    assert_eq!(
        manager
            .open(&tokens(2, 17), Sharing::default(), 0)
            .unwrap()
            .computed(),
        8
    );
}

#[test]
fn a_block_whose_beginning_is_gone_is_not_found_after_another() {
    let mut manager = manager(4);
    let (a, b, rest) = (tokens(1, 8), tokens(2, 8), tokens(3, 9));
    let then_rest = |first: &[TokenId]| [first, &rest].concat();
    // Both compute `a`; one copy is cached and its owner leaves, the other goes on and caches what follows `a`.
    let mut short = manager.open(&a, Sharing::default(), 0).unwrap();
    let mut long = manager.open(&then_rest(&a), Sharing::default(), 0).unwrap();
    manager.commit(&mut short, &a);
    manager.commit(&mut long, &then_rest(&a)[..16]);
    let reused = short.groups()[0].pages[0];
    manager.release(short);
    // `b` takes the block that held `a`.
    let table = compute(&mut manager, &b);
    assert_eq!(table.groups()[0].pages, [reused]);
    manager.release(long);
    let table = manager.open(&then_rest(&b), Sharing::default(), 0).unwrap();
    assert_eq!(
        table.computed(),
        8,
        "what is cached after `a` is not what comes after `b`"
    );
}

#[test]
fn equal_prompts_share_nothing_across_salts() {
    let mut manager = manager(8);
    let tokens = tokens(1, 20);
    let salted = |salt| Sharing {
        salt,
        ..Sharing::default()
    };
    for salt in [None, Some("ours"), Some("theirs"), Some("")] {
        let mut table = manager.open(&tokens, salted(salt), 0).unwrap();
        assert_eq!(table.computed(), 0, "{salt:?}");
        manager.commit(&mut table, &tokens);
        manager.release(table);
        let again = manager.open(&tokens, salted(salt), 0).unwrap();
        assert_eq!(again.computed(), 16, "{salt:?}");
        manager.release(again);
    }
}

/// A table goes on where it began, and what it computes from then on is found and told of once.
#[test]
fn a_salt_stays_the_same_when_the_cache_is_emptied() {
    let mut manager = manager(8);
    let tokens = tokens(1, 20);
    let sharing = Sharing {
        salt: Some("ours"),
        ..Sharing::default()
    };
    let mut table = manager.open(&tokens, sharing, 0).unwrap();
    manager.forget_cached();
    manager.commit(&mut table, &tokens);
    manager.release(table);
    let again = manager.open(&tokens, sharing, 0).unwrap();
    assert_eq!(again.computed(), 16);
    manager.release(again);
}

/// Blocks of 8 tokens, all placeholders: what tells them apart is which rows of which images they are.
#[test]
fn equal_placeholders_share_only_the_rows_of_equal_images() {
    let image = |hash: u8| {
        let grid = ImageGrid {
            frames: 1,
            height: 1,
            width: 12,
        };
        let shape = PatchShape { pixels: 1, frames: 1 };
        Arc::new(Image::blank([hash; 32], grid, shape))
    };
    let span = |start, len, hash| ImageSpan {
        start,
        len,
        first: 0,
        image: image(hash),
    };
    let tokens = vec![7; 30];
    let mut manager = manager(64);
    let mut hit = |images: Vec<ImageSpan>| {
        let images: Option<Arc<[ImageSpan]>> = (!images.is_empty()).then(|| images.into());
        let sharing = Sharing {
            images: images.as_ref(),
            ..Sharing::default()
        };
        let mut table = manager.open(&tokens, sharing, 0).unwrap();
        let hit = table.computed();
        manager.commit(&mut table, &tokens);
        manager.release(table);
        manager.check_invariants([]).unwrap();
        hit
    };
    assert_eq!(hit(vec![]), 0);
    assert_eq!(hit(vec![span(2, 12, 1)]), 0);
    assert_eq!(hit(vec![span(2, 12, 1)]), 24);
    assert_eq!(hit(vec![span(2, 12, 2)]), 0, "another picture");
    assert_eq!(hit(vec![span(3, 12, 1)]), 0, "another place");
    assert_eq!(hit(vec![span(2, 6, 1), span(8, 6, 1)]), 8, "its first rows again");
    assert_eq!(
        hit(vec![span(2, 12, 1), span(16, 4, 2)]),
        16,
        "two blocks of it, then another"
    );
    assert_eq!(hit(vec![]), 24);
}

#[test]
fn no_more_is_shared_than_may_be() {
    let mut manager = manager(8);
    let tokens = tokens(1, 20);
    let table = compute(&mut manager, &tokens);
    manager.release(table);
    for (most, shared) in [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (20, 16)] {
        let sharing = Sharing {
            most,
            ..Sharing::default()
        };
        let table = manager.open(&tokens, sharing, 0).unwrap();
        assert_eq!(table.computed(), shared, "{most}");
        manager.release(table);
    }
}

#[test]
fn without_prefix_caching_nothing_is_kept() {
    let mut manager = KvManager::new(
        KvConfig {
            block_size: BlockSize::default(),
            num_pages: 4,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        64,
        false,
    );
    let table = compute(&mut manager, &tokens(1, 40));
    manager.release(table);
    assert_eq!(
        (
            manager.stats().cached(),
            manager
                .open(&tokens(1, 40), Sharing::default(), 0)
                .unwrap()
                .computed()
        ),
        (0, 0)
    );
}

#[test]
fn blocks_have_equal_names_everywhere_and_each_its_own() {
    let names = |prompts: &[(&[TokenId], Option<&str>)]| -> Vec<Vec<u64>> {
        let mut manager = manager(16);
        manager.record_events();
        let stored = prompts.iter().map(|&(tokens, salt)| {
            let sharing = Sharing {
                salt,
                ..Sharing::default()
            };
            let mut table = manager.open(tokens, sharing, 0).expect("there is room");
            manager.commit(&mut table, tokens);
            manager.release(table);
            match &manager.take_events()[..] {
                [CacheEvent::Stored { blocks, .. }] => blocks.clone(),
                events => panic!("{events:?}"),
            }
        });
        stored.collect()
    };
    let repeated = [[7; 8], [7; 8]].concat();
    let prompts: [(&[TokenId], Option<&str>); 4] = [
        (&tokens(1, 16), None),
        (&tokens(1, 16), Some("a")),
        (&tokens(1, 16), Some("b")),
        (&repeated, None),
    ];
    let mut there = names(&prompts);
    // Another server gets them in another order.
    let mut backwards = prompts;
    backwards.reverse();
    let mut here = names(&backwards);
    here.reverse();
    assert_eq!(there, here);
    let mut all: Vec<u64> = there.drain(..).flatten().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 8, "one has the name of another");
    assert!(!all.contains(&0));
}
