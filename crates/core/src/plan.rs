use std::sync::Arc;

use crate::{CacheGroup, Logprobs, PageId, Pooling, PromptLogprob, RequestId, SamplingParams, TokenId};

/// One step: what the device does between two decisions of the scheduler. Pure data.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Counts the steps of this process.
    pub step: u64,
    /// At most one run per request.
    pub runs: Vec<Run>,
}

impl StepPlan {
    /// Tokens over all runs.
    pub fn num_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.input.len()).sum()
    }

    /// Rows whose next token is a prompt's and scored, over all runs.
    pub fn num_scored(&self) -> usize {
        let scores = self.runs.iter().filter_map(|run| run.score.as_ref());
        scores.map(|score| score.targets.len()).sum()
    }

    /// True where there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs whose token is chosen under a mask, by their index in the plan. Where there are any, the whole step is sampled
    /// only once [`crate::Executor::sample`] brings the masks.
    pub fn constrained(&self) -> impl Iterator<Item = (usize, &Run)> {
        let constrained = |run: &Run| run.sample.as_ref().is_some_and(|spec| spec.constrained);
        self.runs
            .iter()
            .enumerate()
            .filter(move |(_, run)| constrained(run))
    }

    /// Whether any run is constrained.
    pub fn awaits_masks(&self) -> bool {
        self.constrained().next().is_some()
    }
}

/// Consecutive tokens of one request. Prefill, a chunk of it and decode differ only in length.
#[derive(Clone, Debug)]
pub struct Run {
    /// Whose tokens.
    pub request: RequestId,
    /// Position of the first token = tokens of this request already in the KV cache.
    pub start: usize,
    /// The tokens to compute.
    pub input: RunInput,
    /// The request's tables, one for each group of the KV cache, long enough for `start + input.len()` tokens.
    pub tables: Vec<GroupTable>,
    /// Sample after the last token of the run; `None` where the prompt goes on in a later step.
    pub sample: Option<SampleSpec>,
    /// Find log-probabilities of prompt tokens that follow tokens of the run.
    pub score: Option<ScoreSpec>,
    /// Give out rows behind the last norm: the last one of the run, or the sum of all. `None` in requests that generate, and
    /// where only the last row counts and the prompt goes on in a later step.
    pub pool: Option<Pooling>,
}

impl Run {
    /// Tokens of the request in the KV cache after this run.
    pub fn end(&self) -> usize {
        self.start + self.input.len()
    }
}

/// Where the tokens of a request are in one group of the KV cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupTable {
    /// Index of the first block that is held; those before it lie behind the group's window.
    pub first: usize,
    /// The pages of each block from `first` on: [`crate::CacheGroup::pages_per_block`] at a time.
    pub pages: Vec<PageId>,
}

impl GroupTable {
    /// A table of all blocks from the first on.
    pub fn whole(pages: Vec<PageId>) -> Self {
        Self { first: 0, pages }
    }

    /// Index of the block after the last one.
    pub fn end(&self, group: &CacheGroup) -> usize {
        self.first + self.pages.len() / group.pages_per_block
    }

    /// The pages of block `index`, which is held.
    pub fn block(&self, group: &CacheGroup, index: usize) -> &[PageId] {
        &self.pages[(index - self.first) * group.pages_per_block..][..group.pages_per_block]
    }
}

/// Where a run's tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunInput {
    /// The scheduler knows them.
    Known(Vec<TokenId>),
    /// One token: the one sampled for this request in the step before, which may still be on the device.
    LastSampled,
}

impl RunInput {
    /// Number of tokens, at least 1.
    pub fn len(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::LastSampled => 1,
        }
    }

    /// True where there are no tokens, which no plan of the scheduler contains.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How to choose the token after a run.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// The request's parameters.
    pub params: Arc<SamplingParams>,
    /// The request's seed. A draw depends on `(seed, index)` alone, never on the batch.
    pub seed: u64,
    /// Index of the token to be sampled among the request's output tokens.
    pub index: usize,
    /// Prompt then output tokens so far; filled only where `params.needs_history()`.
    pub history: Vec<TokenId>,
    /// How many of `history` are the prompt's.
    pub prompt_len: usize,
    /// A mask says which tokens may be chosen. It may depend on a token that is being sampled while the step is launched,
    /// so it comes later, with [`crate::Executor::sample`].
    pub constrained: bool,
}

/// Of which prompt tokens the log-probabilities are wanted: each stands right after a token of the run, from which it is
/// predicted. The row that is sampled from is not among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreSpec {
    /// The token of the run, counted from 0, after which the first of them stands.
    pub first: usize,
    /// The prompt's tokens from there on, at least one.
    pub targets: Vec<TokenId>,
    /// How many of the likeliest tokens to report at each place.
    pub top: usize,
}

impl ScoreSpec {
    /// The tokens of the run after which they stand.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.targets.len()
    }
}

/// What a step produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One entry per run of the plan, in its order; `None` where the run did not sample.
    pub samples: Vec<Option<Sampled>>,
    /// One entry per run that has a `score`, in the plan's order: one element per target.
    pub scores: Vec<Vec<PromptLogprob>>,
    /// What [`Run::pool`] asked for, `hidden_size` numbers each: one entry per run, or none at all where no run asked. Sums
    /// of chunks are added up as `f64`; a device may add up a chunk in less.
    pub pooled: Vec<Option<Vec<f64>>>,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Present where the request asked for logprobs.
    pub logprobs: Option<Logprobs>,
}
