//! What the server proved, and what follows for a load that goes there.

use std::iter::repeat_n;

use plimsoll_core::{BlockSize, CacheGroups, CacheKind, CacheLayout, KvConfig};
use serde::{Deserialize, Serialize};

/// The limits that the server says it proved (`GET /memory`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Limits {
    /// Prompt plus output tokens of one request.
    pub(super) max_model_len: usize,
    /// Requests that run at once.
    pub(super) max_num_seqs: usize,
    /// Tokens of one step.
    pub(super) max_num_batched_tokens: usize,
    /// Tokens that the KV cache holds.
    pub(super) kv_tokens: usize,
    /// Tokens of one block of it.
    pub(super) block_size: usize,
    /// Its cache groups.
    pub(super) groups: Vec<Group>,
}

/// Layers that keep the same part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Group {
    /// Pages of one block of what they keep.
    pub(super) pages_per_block: usize,
    /// Tokens that they see; `None` for all.
    pub(super) window: Option<usize>,
}

/// Requests that fill rows and KV cache at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Filling {
    /// Prompt tokens of each.
    pub(super) prompt: usize,
    /// Output tokens of each.
    pub(super) output: usize,
    /// Part of the KV cache that all rows together then use, less what chance may take.
    pub(super) usage: f64,
}

/// What counts as full: blocks are handed out with some kept back for those that run.
const FULL: f64 = 0.95;

/// Part of the KV cache that requests which fill it ask for together, where there are rows for it: the cache runs full, and somebody is
/// preempted. With 1.1, the blocks that the scheduler keeps free for the outputs of running requests may be all that is left, and the
/// cache stays below [`FULL`].
const FILLING: f64 = 1.2;

impl Limits {
    /// Prompt plus output tokens of the longest request.
    pub(super) fn longest(&self) -> usize {
        self.max_model_len
            .min(self.kv().longest_request(self.max_num_batched_tokens))
    }

    /// The KV cache.
    fn kv(&self) -> KvConfig {
        // Pages stand for layers: only how groups compare matters.
        let pages = self.groups.iter().flat_map(|group| {
            let kind = group.window.map_or(CacheKind::Full, CacheKind::Window);
            repeat_n(kind, group.pages_per_block)
        });
        let layout = CacheLayout::new(&pages.collect::<Vec<_>>(), usize::MAX);
        let groups = layout.map_or_else(|_| CacheGroups::default(), |layout| layout.groups);
        KvConfig {
            block_size: BlockSize::new(self.block_size).unwrap_or_default(),
            num_pages: self.kv_tokens / self.block_size.max(1) * groups.pages_per_block(),
            groups,
            state_slots: 0,
        }
    }

    /// Part of the KV cache that this many requests are sure to hold at once when each has computed `tokens` tokens.
    fn usage(&self, requests: usize, tokens: usize) -> f64 {
        let kv = self.kv();
        let pages = kv.groups.iter().map(|group| {
            let seen = match group.kind {
                CacheKind::Full => tokens,
                CacheKind::Window(window) => tokens.min(window),
            };
            kv.block_size.blocks_for(seen) * group.pages_per_block
        });
        (requests * pages.sum::<usize>()) as f64 / kv.num_pages.max(1) as f64
    }

    /// Rows that are sure to run at once: each grows into its second block, and the scheduler keeps one back for each.
    pub(super) fn rows(&self) -> usize {
        let blocks = self.kv_tokens / self.block_size.max(1);
        self.max_num_seqs.min(blocks / 3).max(1)
    }

    /// Prompt and output lengths that are as near to those wanted as one request may have.
    pub(super) fn fit(&self, prompt: usize, output: usize) -> (usize, usize) {
        let prompt = prompt.clamp(1, self.longest().saturating_sub(1).max(1));
        (
            prompt,
            output.clamp(1, self.longest().saturating_sub(prompt).max(1)),
        )
    }

    /// Requests of this shape, one in each row, are the most that the KV cache can be asked for at once.
    pub(super) fn filling(&self) -> Filling {
        let rows = self.rows();
        let mut lengths = (self.block_size..self.longest()).step_by(self.block_size.max(1));
        let each = lengths.find(|&each| self.usage(rows, each) > FILLING);
        let each = each.unwrap_or(usize::MAX).min(self.longest());
        // The first to begin generates a token in each step until the prompts of all others are computed.
        let steps = (rows * each).div_ceil(self.max_num_batched_tokens.max(1));
        let output = (steps + 2 * self.block_size).min(each / 2).max(1);
        let (prompt, output) = self.fit(each.saturating_sub(output), output);
        Filling {
            prompt,
            output,
            usage: FULL * self.usage(rows, prompt).min(1.0),
        }
    }

    /// Prompt and output lengths of the request in this `place` among `clients` that begin at the same time. Steps beside requests that
    /// generate may be much smaller than the largest; so that the first requests still run when the last prompts are computed, they
    /// generate up to seven times as long as those, and have up to a quarter less of a prompt.
    pub(super) fn filling_lengths(&self, place: usize, clients: usize) -> (usize, usize) {
        let least = self.filling();
        let each = least.prompt + least.output;
        let most = (4 * least.output).min(each / 4).max(least.output) - least.output;
        let more = most * clients.saturating_sub(place) / clients.max(1);
        self.fit(least.prompt - more, least.output + 2 * more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu() -> Limits {
        Limits {
            max_model_len: 8192,
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            kv_tokens: 131072,
            block_size: 16,
            groups: vec![Group {
                pages_per_block: 1,
                window: None,
            }],
        }
    }

    #[test]
    fn windows_fill_less() {
        let [all, window] = [None, Some(1024)];
        let groups = vec![
            Group {
                pages_per_block: 1,
                window: all,
            },
            Group {
                pages_per_block: 3,
                window,
            },
        ];
        // Of 8192 tokens, three of four layers keep 1024.
        let limits = Limits {
            groups,
            kv_tokens: 32768,
            max_num_seqs: 8,
            ..cpu()
        };
        assert_eq!(
            limits.usage(8, 8192),
            (8192.0 + 3.0 * 1024.0) / (4.0 * 32768.0) * 8.0
        );
        assert_eq!(
            (limits.longest(), limits.filling().usage),
            (8192, FULL * limits.usage(8, limits.filling().prompt))
        );
        let short = Limits {
            kv_tokens: 4096,
            max_num_seqs: 1,
            ..limits
        };
        assert_eq!(short.longest(), 8192, "longer than what all layers together hold");
    }

    #[test]
    fn all_rows_together_fill_the_cache() {
        let filling = cpu().filling();
        let together = 32 * (filling.prompt + filling.output);
        assert!((131072..165_000).contains(&together), "{filling:?}");
        // The output lasts while 32 prompts are computed.
        assert!(filling.output > 32 * filling.prompt / 512, "{filling:?}");
        assert_eq!(filling.usage, FULL);
    }

    #[test]
    fn the_first_requests_last_until_the_last_prompts_are_computed() {
        // Qwen3.5-27B on an H200, if steps beside requests that generate compute no more tokens of prompts than this.
        const STEP: usize = 1600;
        let hybrid = Limits {
            max_model_len: 32_768,
            max_num_seqs: 220,
            max_num_batched_tokens: 8192,
            kv_tokens: 902_416,
            ..cpu()
        };
        let lengths: Vec<_> = (0..220).map(|place| hybrid.filling_lengths(place, 249)).collect();
        let all: usize = lengths.iter().map(|(prompt, _)| prompt).sum();
        let mut computed = 0;
        for (place, (prompt, output)) in lengths.iter().enumerate() {
            computed += prompt;
            let steps_left = (all - computed).div_ceil(STEP);
            assert!(
                steps_left < *output,
                "{place}: {steps_left} steps, {output} tokens"
            );
        }
        // Their prompts alone are as much as is wanted.
        assert!(all as f64 > hybrid.filling().usage * 902_416.0, "{all}");
        let filling = cpu().filling();
        assert_eq!(cpu().filling_lengths(32, 32), (filling.prompt, filling.output));
    }

    #[test]
    fn few_rows_of_full_length_need_not_fill_it() {
        let few = Limits {
            max_num_seqs: 4,
            ..cpu()
        };
        let filling = few.filling();
        assert_eq!(filling.prompt + filling.output, 8192);
        assert!((0.2..0.25).contains(&filling.usage), "{filling:?}");
    }

    #[test]
    fn small_caches_have_fewer_rows() {
        let small = Limits {
            max_model_len: 512,
            kv_tokens: 512,
            ..cpu()
        };
        assert_eq!((cpu().rows(), small.rows()), (32, 10));
        let filling = small.filling();
        assert!(
            filling.prompt > 0 && filling.prompt + filling.output <= 512,
            "{filling:?}"
        );
        let tiny = Limits {
            max_model_len: 16,
            kv_tokens: 16,
            max_num_seqs: 1,
            ..cpu()
        };
        assert_eq!(tiny.filling().prompt + tiny.filling().output, 16);
        assert_eq!(tiny.fit(100, 100), (15, 1));
        assert_eq!(tiny.fit(1, 100), (1, 15));
    }
}
