use std::collections::{BTreeMap, BTreeSet};

use plimsoll_core::BlockSize;
use rand::Rng;
use rand::rngs::StdRng;

use super::*;
use crate::testing::{rng, seeds};

fn random_planner(rng: &mut StdRng) -> PrefillPlanner {
    let pick = |rng: &mut StdRng, from: &[usize]| from[rng.random_range(0..from.len())];
    let layout = KvLayout {
        kv_heads: pick(rng, &[1, 2, 3, 8]),
        head_dim: pick(rng, &HEAD_DIMS),
        block_size: BlockSize::new(pick(rng, &[8, 16, 32])).unwrap(),
    };
    let tiling = Tiling {
        rows: pick(rng, &[64, 128]),
        slots: pick(rng, &[1, 20, 132, 264]),
    };
    let window = [None, Some(1), Some(100), Some(5000)][rng.random_range(0..4)];
    let heads = layout.kv_heads * pick(rng, &[1, 3, 4, 8]);
    PrefillPlanner::new(layout, heads, window, tiling)
}

fn random_runs(rng: &mut StdRng) -> Vec<GpuRun> {
    let run = |rng: &mut StdRng| {
        let most = [1, 10, 300, 3000][rng.random_range(0..4)];
        let len = rng.random_range(1..=most);
        let most = [0, 500, 20_000, 200_000][rng.random_range(0..4)];
        GpuRun {
            len,
            context_end: len + rng.random_range(0..=most),
            ..GpuRun::default()
        }
    };
    let mut runs: Vec<GpuRun> = (0..rng.random_range(1..20)).map(|_| run(rng)).collect();
    let mut rows = 0;
    for run in &mut runs {
        run.first_row = rows;
        rows += run.len;
    }
    runs
}

/// What rows see ends at themselves, or at the end of the span that they are of.
fn random_ends(rng: &mut StdRng, runs: &[GpuRun]) -> Vec<i32> {
    let mut ends = Vec::new();
    for run in runs {
        let mut at = run.context_end - run.len;
        while at < run.context_end {
            let span = (at + rng.random_range(1..400)).min(run.context_end);
            match rng.random_bool(0.5) {
                true => ends.extend((at..span).map(|_| span)),
                false => ends.extend(at + 1..=span),
            }
            at = span;
        }
    }
    ends
}

/// Every row meets every key that it sees exactly once, within the promised sizes.
#[test]
fn plans_cover_every_row_and_key_once() {
    for seed in seeds(200) {
        let mut rng = rng(seed);
        let planner = random_planner(&mut rng);
        let runs = random_runs(&mut rng);
        let tokens: usize = runs.iter().map(|run| run.len as usize).sum();
        let ends = rng.random_bool(0.5).then(|| random_ends(&mut rng, &runs));
        let mut items = vec![PrefillItem::default(); planner.max_entries(tokens, runs.len())];
        let plan = planner.plan(&runs, ends.as_deref(), &mut items);
        let (items, merges) = items[..plan.entries()].split_at(plan.items);

        let work = |item: &PrefillItem| item.end - item.begin;
        assert!(items.is_sorted_by_key(|item| Reverse(work(item))), "seed {seed}");

        let mut pieces: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for item in items {
            pieces.entry((item.run, item.row)).or_default().push(*item);
        }
        let mut expected = BTreeSet::new();
        for (index, run) in runs.iter().enumerate() {
            for row in (0..run.len * planner.group() as i32).step_by(planner.tiling.rows) {
                expected.insert((index as i32, row));
            }
        }
        assert!(pieces.keys().eq(&expected), "seed {seed}");

        let mut partials = 0..0;
        for (&(index, row), pieces) in &mut pieces {
            pieces.sort_by_key(|piece| piece.begin);
            let run = &runs[index as usize];
            let position = |row: i32| run.context_end - run.len + row / planner.group() as i32;
            let seen = |position: i32| planner.window.map_or(0, |w| (position + 1 - w as i32).max(0));
            let last = (row + planner.tiling.rows as i32).min(run.len * planner.group() as i32) - 1;
            assert_eq!(pieces[0].begin, seen(position(row)), "seed {seed}");
            let seen = ends.as_ref().map_or(position(last) + 1, |ends| {
                ends[(run.first_row + last / planner.group() as i32) as usize]
            });
            assert_eq!(pieces[pieces.len() - 1].end, seen, "seed {seed}");
            for pair in pieces.windows(2) {
                assert_eq!(pair[0].end, pair[1].begin, "seed {seed}");
                assert_eq!(pair[0].end as usize % UNIT, 0, "seed {seed}");
            }
            let merge = merges.iter().find(|merge| (merge.run, merge.row) == (index, row));
            if pieces.len() == 1 {
                assert_eq!((pieces[0].partial, merge), (-1, None), "seed {seed}");
                continue;
            }
            partials = partials.end..partials.end + pieces.len() as i32;
            let merge = merge.expect("a merge of the pieces");
            assert_eq!((merge.begin..merge.end).len(), pieces.len(), "seed {seed}");
            let own: Vec<i32> = pieces.iter().map(|piece| piece.partial).collect();
            assert!(own.iter().copied().eq(merge.begin..merge.end), "seed {seed}");
        }
        let all: BTreeSet<i32> = items
            .iter()
            .map(|item| item.partial)
            .filter(|&p| p >= 0)
            .collect();
        assert_eq!(all.len() as i32, partials.end, "seed {seed}");
        assert!(partials.end as usize <= planner.max_partials(), "seed {seed}");
    }
}

/// A short chunk over a long prefix occupies the whole GPU.
#[test]
fn a_short_chunk_is_split() {
    let layout = KvLayout {
        kv_heads: 8,
        head_dim: 128,
        block_size: BlockSize::new(16).unwrap(),
    };
    let tiling = Tiling {
        rows: 128,
        slots: 132,
    };
    let planner = PrefillPlanner::new(layout, 32, None, tiling);
    let run = GpuRun {
        len: 64,
        context_end: 100_000,
        ..GpuRun::default()
    };
    let mut items = vec![PrefillItem::default(); planner.max_entries(64, 1)];
    let plan = planner.plan(&[run], None, &mut items);
    assert!(plan.items * layout.kv_heads >= 2 * tiling.slots, "{plan:?}");
    assert_eq!(plan.merges, 2);
}

/// Every GPU has room for a block, and those with 164 KiB of shared memory for a second one.
#[test]
fn blocks_fit_on_every_gpu() {
    for gpu in AssumedGpu::EACH {
        for head_dim in HEAD_DIMS {
            for element in GpuKvElement::ALL {
                let hopper = gpu.compute_capability == (9, 0);
                let shared = Shape::fastest(head_dim, element, hopper).shared;
                assert!(gpu.blocks(shared) >= 1, "{shared} bytes on {gpu:?}");
                let portable = Shape::fastest(head_dim, element, false).shared;
                let wanted = if gpu.sm_shared_bytes >= 164 << 10 { 2 } else { 1 };
                assert!(gpu.blocks(portable) >= wanted, "{portable} bytes on {gpu:?}");
            }
        }
    }
}
