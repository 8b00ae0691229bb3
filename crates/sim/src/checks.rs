//! What a run of a plan is checked for.

use plimsoll_core::{CacheGroup, CacheKind, KvConfig, Run, RunInput, ScoreSpec};

/// Each group has the blocks that the run reads and writes; `first_block` says where a group's begin.
pub(crate) fn check_tables(
    kv: &KvConfig,
    run: &Run,
    first_block: impl Fn(&CacheGroup) -> usize,
) -> Result<(), String> {
    if run.tables.len() != kv.groups.as_slice().len() {
        return Err(format!("has {} tables", run.tables.len()));
    }
    for (table, group) in run.tables.iter().zip(&kv.groups) {
        let needed = first_block(group)..kv.block_size.blocks_for(run.end());
        let held = table.first..table.end(group);
        let whole = table.pages.len().is_multiple_of(group.pages_per_block);
        if held.start > needed.start || held.end < needed.end || !whole {
            return Err(format!("has blocks {held:?} of a {}, not {needed:?}", group.kind));
        }
        if let Some(page) = table.pages.iter().find(|page| page.index() >= kv.num_pages) {
            return Err(format!("names page {}", page.0));
        }
    }
    Ok(())
}

/// The first position that a query sees: by the definition, not as the scheduler has it.
pub(crate) fn first_seen(kind: CacheKind, query: usize) -> usize {
    let sees = |key: usize| match kind {
        CacheKind::Full => true,
        CacheKind::Window(window) => query - key < window,
    };
    (0..=query).find(|&key| sees(key)).unwrap_or(query)
}

/// Every scored token follows a token of the run, and is the run's next where there is one; the last row is another's if it
/// is sampled from.
pub(crate) fn check_score(run: &Run, score: &ScoreSpec) -> Result<(), String> {
    let rows = score.rows();
    let last = run.input.len() - usize::from(run.sample.is_some());
    if rows.is_empty() || rows.end > last {
        return Err(format!("scores its rows {rows:?} of {last}"));
    }
    let RunInput::Known(tokens) = &run.input else {
        return Err("scores what it samples".into());
    };
    let next = &tokens[rows.start + 1..tokens.len().min(rows.end + 1)];
    match score.targets.starts_with(next) {
        true => Ok(()),
        false => Err(format!("scores {:?}, but goes on with {next:?}", score.targets)),
    }
}
