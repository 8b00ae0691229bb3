//! Flags for the next run.

use serde::Serialize;

use super::Findings;
use crate::results::human;
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
pub(crate) fn suggestions(spec: &ProfileSpec, findings: &Findings) -> Vec<Suggestion> {
    // As the flag is read: in blocks of the declared size, whatever a device rounds them up to.
    let bytes = |blocks: usize| spec.block_bytes().saturating_mul(blocks as u64);
    let suggest = |blocks: usize, effect: String| Suggestion {
        flag: Setting::KvCacheMemoryBytes(bytes(blocks)),
        effect,
    };
    let now = findings.kv_blocks;
    let searched = spec.pinned_blocks().is_none();
    let again = searched.then(|| suggest(now, "the same size without the search".to_owned()));
    let full = full_blocks(spec, findings).filter(|&blocks| blocks > now);
    let full = full.map(|blocks| {
        let more = human(bytes(blocks - now));
        suggest(blocks, format!("the whole device less margins ({more} more)"))
    });
    again.into_iter().chain(full).collect()
}

/// Blocks of which the probe's arithmetic, or a pinned size's own proof, says that they fit with every margin.
fn full_blocks(spec: &ProfileSpec, findings: &Findings) -> Option<usize> {
    let failed = |outcome: &Outcome| *outcome != Outcome::Proved;
    if findings.attempts.iter().any(|attempt| failed(&attempt.outcome)) {
        return None;
    }
    if let Some((.., arithmetic)) = &findings.probe {
        return Some(arithmetic.full_blocks());
    }
    // The steps of a smaller cache than a probe's are smaller too.
    if findings.kv_blocks < spec.probe_kv().num_pages {
        return None;
    }
    let ready = &findings.ready;
    let peak = findings.attempts.last()?.peak_reserved;
    let spare = ready
        .total
        .checked_sub(ready.peers)?
        .checked_sub(peak)?
        .checked_sub(spec.margins.fragmentation_buffer(0))?;
    let blocks = usize::try_from(spare / spec.block_bytes()).ok()?;
    Some(findings.kv_blocks.saturating_add(blocks))
}
