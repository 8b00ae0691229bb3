//! What the server proved, and what follows for a load that goes there.

use serde::{Deserialize, Serialize};

/// The limits that the server says it proved (`GET /memory`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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

impl Limits {
    /// Prompt plus output tokens of the longest request.
    pub(super) fn longest(&self) -> usize {
        self.max_model_len.min(self.kv_tokens)
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
        // A tenth more than fits, where there are rows for it: the cache runs full, and somebody is preempted.
        let each = (self.kv_tokens + self.kv_tokens / 10).div_ceil(rows) + self.block_size;
        let each = each.min(self.longest());
        // The first to begin generates a token in each step until the prompts of all others are computed.
        let steps = (rows * each).div_ceil(self.max_num_batched_tokens.max(1));
        let output = (steps + 2 * self.block_size).min(each / 2).max(1);
        let (prompt, output) = self.fit(each.saturating_sub(output), output);
        let usage = (rows * prompt) as f64 / self.kv_tokens.max(1) as f64;
        Filling {
            prompt,
            output,
            usage: FULL * usage.min(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Limits = Limits {
        max_model_len: 8192,
        max_num_seqs: 32,
        max_num_batched_tokens: 512,
        kv_tokens: 131072,
        block_size: 16,
    };

    #[test]
    fn all_rows_together_fill_the_cache() {
        let filling = CPU.filling();
        let together = 32 * (filling.prompt + filling.output);
        assert!((131072..150_000).contains(&together), "{filling:?}");
        // The output lasts while 32 prompts are computed.
        assert!(filling.output > 32 * filling.prompt / 512, "{filling:?}");
        assert_eq!(filling.usage, FULL);
    }

    #[test]
    fn few_rows_of_full_length_need_not_fill_it() {
        let few = Limits {
            max_num_seqs: 4,
            ..CPU
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
            ..CPU
        };
        assert_eq!((CPU.rows(), small.rows()), (32, 10));
        let filling = small.filling();
        assert!(
            filling.prompt > 0 && filling.prompt + filling.output <= 512,
            "{filling:?}"
        );
        let tiny = Limits {
            max_model_len: 16,
            kv_tokens: 16,
            max_num_seqs: 1,
            ..CPU
        };
        assert_eq!(tiny.filling().prompt + tiny.filling().output, 16);
        assert_eq!(tiny.fit(100, 100), (15, 1));
        assert_eq!(tiny.fit(1, 100), (1, 15));
    }
}
