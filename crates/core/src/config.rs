use crate::{BlockSize, CacheGroups};

/// The size of a paged KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Physical pages, all of them usable by every group.
    pub num_pages: usize,
    /// What the layers keep.
    pub groups: CacheGroups,
    /// States of fixed size beside the pages: those of running requests, and snapshots in the prefix cache; 0 where no layer has
    /// a state.
    pub state_slots: usize,
}

impl KvConfig {
    /// Tokens the cache holds in every group at once.
    pub fn capacity_tokens(&self) -> usize {
        self.num_pages / self.groups.pages_per_block() * self.block_size.tokens()
    }

    /// Pages of `tokens` tokens that are held in every group.
    pub fn pages_for(&self, tokens: usize) -> usize {
        let blocks = self.block_size.blocks_for(tokens);
        blocks.saturating_mul(self.groups.pages_per_block())
    }

    /// Most pages that a request of at most `tokens` tokens holds at once which is computed `chunk` tokens at a time:
    /// [`StepLimits::max_num_batched_tokens`], or 1 for one that generates.
    pub fn request_pages(&self, tokens: usize, chunk: usize) -> usize {
        let pages = self.groups.iter().map(|group| {
            let blocks = group.most_blocks(self.block_size, tokens, chunk);
            blocks.saturating_mul(group.pages_per_block)
        });
        pages.fold(0, usize::saturating_add)
    }

    /// Tokens of the longest request that the cache holds alone, computed `chunk` tokens at a time; `usize::MAX` where no
    /// length is too much, because nothing but windows is kept.
    pub fn longest_request(&self, chunk: usize) -> usize {
        let fits = |blocks: usize| {
            let tokens = blocks.saturating_mul(self.block_size.tokens());
            self.request_pages(tokens, chunk) <= self.num_pages
        };
        if fits(usize::MAX) {
            return usize::MAX;
        }
        // Each block takes at least a page, or nothing more is ever needed.
        let (mut least, mut most) = (0, usize::MAX / self.block_size.tokens());
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            if fits(middle) {
                least = middle
            } else {
                most = middle
            }
        }
        least * self.block_size.tokens()
    }

    /// Requests of `tokens` tokens that the cache holds while they generate.
    pub fn requests_of(&self, tokens: usize) -> f64 {
        self.num_pages as f64 / self.request_pages(tokens, 1).max(1) as f64
    }
}

/// How the step arena gets its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scratch {
    /// Grows on demand; for the probe, which finds out how much is needed.
    Growable,
    /// One allocation of this many bytes; a step that needs more fails with [`crate::Oom`].
    Fixed(u64),
}

/// Everything that decides the memory of one engine state: a state is built from this and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// The KV cache.
    pub kv: KvConfig,
    /// The step arena.
    pub scratch: Scratch,
    /// Bytes held back while the size is proved and freed before serving; 0 for none.
    pub canary_bytes: u64,
}

/// The largest step the scheduler will ever plan. The profiler derives its worst cases from the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in one step, over all runs (`--max-num-batched-tokens`).
    pub max_num_batched_tokens: usize,
    /// Runs in one step (`--max-num-seqs`).
    pub max_num_seqs: usize,
    /// Prompt plus output tokens of one request (`--max-model-len`).
    pub max_model_len: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheKind, CacheLayout};

    fn kv(kinds: &[CacheKind], num_pages: usize) -> KvConfig {
        KvConfig {
            block_size: BlockSize::new(8).expect("8 is legal"),
            num_pages,
            groups: CacheLayout::new(kinds, 1 << 20)
                .expect("the kinds are few")
                .groups,
            state_slots: 0,
        }
    }

    #[test]
    fn with_one_full_group_pages_are_blocks() {
        let kv = kv(&[CacheKind::Full; 4], 10);
        assert_eq!((kv.capacity_tokens(), kv.longest_request(3)), (80, 80));
        assert_eq!((kv.pages_for(17), kv.request_pages(17, 3)), (3, 3));
        assert_eq!(kv.requests_of(16), 5.0);
    }

    #[test]
    fn a_request_holds_of_a_window_what_a_chunk_sees() {
        // A page has two layers: one page per block of each group.
        let mixed = [CacheKind::Full, CacheKind::Window(20)].repeat(2);
        let kv = kv(&mixed, 21);
        assert_eq!(kv.capacity_tokens(), 80);
        assert_eq!(kv.pages_for(80), 20);
        // 19 + 30 tokens lie in at most 7 blocks.
        assert_eq!(kv.request_pages(800, 30), 107);
        assert_eq!(kv.request_pages(24, 30), 6);
        assert_eq!(kv.request_pages(800, 1), 104);
        assert_eq!(kv.longest_request(30), 112);
        assert_eq!(kv.request_pages(113, 30), 22);
    }

    #[test]
    fn windows_alone_hold_requests_of_any_length() {
        let kinds = [CacheKind::Window(20); 2];
        assert_eq!(kv(&kinds, 7).request_pages(1 << 30, 30), 7);
        assert_eq!(kv(&kinds, 7).longest_request(30), usize::MAX);
        assert_eq!(kv(&kinds, 6).longest_request(30), 48);
    }
}
