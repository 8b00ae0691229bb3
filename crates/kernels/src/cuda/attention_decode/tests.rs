use std::ops::Range;

use plimsoll_core::BlockSize;
use rand::Rng;
use rand::rngs::StdRng;

use super::*;
use crate::testing::{rng, seeds};

fn layout(kv_heads: usize) -> KvLayout {
    KvLayout {
        kv_heads,
        head_dim: 128,
        block_size: BlockSize::default(),
    }
}

/// The keys of a split, as the kernel computes them: `None` if it has none.
fn keys_of(context: usize, window: usize, chunk: usize, split: usize) -> Option<Range<usize>> {
    let seen = context.saturating_sub(window);
    let start = seen / TILE * TILE;
    let keys = context - start;
    let splits = keys.div_ceil(chunk);
    let size = keys.div_ceil(splits).next_multiple_of(TILE);
    let begin = start + split * size;
    (split < splits).then(|| begin.max(seen)..(begin + size).min(context))
}

fn random_contexts(rng: &mut StdRng) -> Vec<usize> {
    let longest = [1, 20, 700, 5000, 200_000][rng.random_range(0..5)];
    let runs = rng.random_range(1..300);
    (0..runs).map(|_| rng.random_range(1..=longest)).collect()
}

#[test]
fn splits_cover_what_is_seen_once() {
    for seed in seeds(40) {
        let rng = &mut rng(seed);
        let contexts = random_contexts(rng);
        let kv_heads = rng.random_range(1..33);
        let heads = kv_heads * [1, 3, 8, 16, 17, 64][rng.random_range(0..6)];
        let window = [None, Some(rng.random_range(1..5000))][rng.random_range(0..2)];
        let slots = rng.random_range(1..600);
        let planner = DecodePlanner::new(layout(kv_heads), heads, window, slots, contexts.len());
        let mut items = vec![DecodeItem::default(); planner.max_items()];
        let header = planner.plan(contexts.iter().copied().enumerate(), &mut items);
        let context = format!("seed {seed}, {planner:?}, {header:?}");
        assert_eq!(header.runs as usize, contexts.len(), "{context}");

        // A layer whose window is shorter may use the list too.
        for window in [window.unwrap_or(usize::MAX), window.unwrap_or(300).div_ceil(3)] {
            let mut rest = &items[..header.items as usize];
            for (run, &tokens) in contexts.iter().enumerate() {
                let mut next = tokens.saturating_sub(window);
                let count = rest.iter().take_while(|item| item.run as usize == run).count();
                let (here, after) = rest.split_at(count);
                rest = after;
                for (split, item) in here.iter().enumerate() {
                    assert_eq!(item.split as usize, split, "{context}");
                    let Some(keys) = keys_of(tokens, window, header.chunk as usize, split) else {
                        continue;
                    };
                    assert_eq!(keys.start, next, "{context}, run {run}, split {split}");
                    assert!(keys.end > next, "{context}, run {run}, split {split}");
                    next = keys.end;
                }
                assert_eq!(next, tokens, "{context}, run {run}");
            }
            assert!(rest.is_empty(), "{context}");
        }
    }
}

#[test]
fn a_long_context_fills_the_gpu() {
    let slots = 264;
    for (kv_heads, context) in [
        (8, 131_072),
        (8, 32_768),
        (2, 131_072),
        (1, 100_000),
        (32, 100_000),
    ] {
        let planner = DecodePlanner::new(layout(kv_heads), kv_heads * 4, None, slots, 1);
        let mut items = vec![DecodeItem::default(); planner.max_items()];
        let header = planner.plan([(0, context)].into_iter(), &mut items);
        let units = header.items as usize * kv_heads;
        assert!(units * 2 >= slots, "{units} units: {header:?}");
    }
}

#[test]
fn short_contexts_are_not_split() {
    let planner = DecodePlanner::new(layout(8), 32, None, 264, 256);
    let mut items = vec![DecodeItem::default(); planner.max_items()];
    let header = planner.plan((0..256).map(|run| (run, 600)), &mut items);
    assert_eq!(header.items, 256);
    let header = planner.plan((0..4).map(|run| (run, SHORTEST_SPLIT)), &mut items);
    assert_eq!(header.items, 4);
}

#[test]
fn no_requests_are_no_work() {
    let planner = DecodePlanner::new(layout(8), 32, None, 264, 256);
    let mut items = vec![DecodeItem::default(); planner.max_items()];
    assert_eq!(planner.plan(std::iter::empty(), &mut items).items, 0);
}

#[test]
fn blocks_fit_on_every_gpu() {
    // `Shared` of the kernels, at least.
    const STATIC: usize = 1 << 10;
    for gpu in AssumedGpu::EACH {
        for head_dim in HEAD_DIMS {
            let shared = Shape::new(head_dim).shared_bytes() + STATIC;
            assert!(gpu.blocks(shared) >= 1, "{shared} bytes on {gpu:?}");
        }
    }
}
