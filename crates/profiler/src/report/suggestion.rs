//! Flags for the next run.

use plimsoll_core::human_bytes;
use serde::Serialize;

use super::Start;
use crate::attempt::Search;
use crate::{Outcome, ProfileSpec, Setting};

/// A flag that makes the next start skip the search, or use more of the device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// Such as `--kv-cache-memory-bytes=1073741824`.
    pub flag: Setting,
    /// What it does.
    pub effect: String,
}

/// This size without the search, where there was one; and the size that uses the device fully, where that is more and
/// nothing says that the device has less than it promises.
pub(crate) fn suggestions(spec: &ProfileSpec, start: &Start, search: &Search) -> Vec<Suggestion> {
    // As the flag is read: in pages of the declared size, whatever a device rounds them up to.
    let bytes = |pages: usize| spec.page_bytes().saturating_mul(pages as u64);
    let suggest = |pages: usize, effect: String| Suggestion {
        flag: Setting::KvCacheMemoryBytes(bytes(pages)),
        effect,
    };
    let now = start.kv_pages;
    let searched = spec.pinned_pages().is_none();
    let again = searched.then(|| suggest(now, "the same size without the search".to_owned()));
    let full = full_pages(spec, start, search).filter(|&pages| pages > now);
    let full = full.map(|pages| {
        let more = human_bytes(bytes(pages - now));
        suggest(pages, format!("the whole device less margins ({more} more)"))
    });
    again.into_iter().chain(full).collect()
}

/// Pages of which the probe's arithmetic, or a pinned size's own proof, says that they fit with every margin.
fn full_pages(spec: &ProfileSpec, start: &Start, search: &Search) -> Option<usize> {
    let failed = |outcome: &Outcome| *outcome != Outcome::Proved;
    if search.attempts.iter().any(|attempt| failed(&attempt.outcome)) {
        return None;
    }
    if let Some((.., arithmetic)) = &search.probe {
        return Some(arithmetic.full_pages());
    }
    // The steps of a smaller cache than a probe's are smaller too.
    if start.kv_pages < spec.probe_kv().num_pages {
        return None;
    }
    let ready = &start.ready;
    let peak = search.attempts.last()?.peak_reserved;
    let spare = ready
        .total
        .checked_sub(ready.peers)?
        .checked_sub(peak)?
        .checked_sub(spec.margins.fragmentation_buffer(0))?;
    let pages = usize::try_from(spare / spec.page_bytes()).ok()?;
    Some(start.kv_pages.saturating_add(pages))
}
