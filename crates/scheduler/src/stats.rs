use plimsoll_core::CacheGroups;
use plimsoll_kv::{GroupStats, SlotStats};

/// Numbers for metrics, logs and tests. Counters count since the scheduler was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests without blocks.
    pub waiting: usize,
    /// Requests with blocks that go on.
    pub running: usize,
    /// Ended requests whose blocks a step in flight still uses.
    pub leaving: usize,
    /// KV pages in all.
    pub pages_total: usize,
    /// KV pages that a request holds.
    pub pages_used: usize,
    /// Blocks of each cache group.
    pub groups: [GroupStats; CacheGroups::MAX],
    /// Slots for states of fixed size.
    pub slots: SlotStats,
    /// Token slots behind the last token of each running request: what whole blocks waste, on average half a block each.
    pub tail_tokens: usize,
    /// Cached blocks given up because their memory was needed.
    pub evictions: u64,
    /// Non-empty steps planned.
    pub steps: u64,
    /// Admissions, those after a preemption included.
    pub admissions: u64,
    /// Requests sent back to wait because no block was available.
    pub preemptions: u64,
    /// Requests sent back to wait because the KV cache was lost.
    pub restarts: u64,
    /// Requests that ended with a stop token, or where nothing may follow.
    pub finished_stop: u64,
    /// Requests that generated `max_tokens`.
    pub finished_length: u64,
    /// Requests that were answered with a vector.
    pub finished_pooled: u64,
    /// Requests cancelled before they ended.
    pub cancelled: u64,
    /// Requests whose step or constraint failed, or for which a smaller KV cache has no room.
    pub failed: u64,
    /// Tokens that were looked up in the prefix cache when a request was admitted first.
    pub prefix_queried_tokens: u64,
    /// Of these, tokens found.
    pub prefix_hit_tokens: u64,
    /// Tokens planned to be computed.
    pub computed_tokens: u64,
    /// Tokens sampled and delivered.
    pub generated_tokens: u64,
    /// Tokens sampled for requests that had ended meanwhile.
    pub discarded_tokens: u64,
}

impl SchedulerStats {
    /// Blocks of all groups that the prefix cache can share.
    pub fn blocks_cached(&self) -> usize {
        self.groups.iter().map(|group| group.cached).sum()
    }
}
