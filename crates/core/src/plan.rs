use std::ops::Range;
use std::sync::Arc;

use crate::{
    CacheGroup, Image, ImageSpan, Logprobs, PageId, Pooling, PromptLogprob, RequestId, SamplingParams,
    StateSlot, TokenId,
};

/// One step: a forward pass over a batch. Plain data.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Number of the step in this process.
    pub step: u64,
    /// At most one run per request.
    pub runs: Vec<Run>,
    /// A part of the encode of an image. Runs have rows of it if that is all that was left.
    pub encode: Option<PartialEncode>,
}

/// A part of an encode that a step computes beside its runs, so that nobody waits for all of it at once.
#[derive(Clone, Debug, PartialEq)]
pub struct PartialEncode {
    /// What is encoded.
    pub image: Arc<Image>,
    /// How much of it is done behind the step, of 1: at least so much, in whole parts as the executor divides it.
    pub share: f64,
}

impl StepPlan {
    /// Tokens over all runs.
    pub fn num_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.input.len()).sum()
    }

    /// Tokens of prompts, and of the parts of answers that are computed again: all but those of runs that continue outputs.
    pub fn prompt_tokens(&self) -> usize {
        let prompts = self.runs.iter().filter(|run| !run.continues_output());
        prompts.map(|run| run.input.len()).sum()
    }

    /// Prompt tokens that are scored, over all runs.
    pub fn num_scored(&self) -> usize {
        let scores = self.runs.iter().filter_map(|run| run.score.as_ref());
        scores.map(|score| score.targets.len()).sum()
    }

    /// True if there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs whose token is sampled with a mask, with their index in the plan. If there are any, the whole step is sampled
    /// by [`crate::Executor::sample`], which brings the masks.
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
    /// All images of the request's prompt, also those before and behind the run: positions depend on them. `None` without any.
    pub images: Option<Arc<[ImageSpan]>>,
    /// The request's tables, one for each group of the KV cache, long enough for `start + input.len()` tokens.
    pub tables: Vec<GroupTable>,
    /// Where the request's state is, in a model whose layers have states.
    pub state: Option<RunState>,
    /// Sample after the last token of the run; `None` if the prompt continues in a later step.
    pub sample: Option<SampleSpec>,
    /// Compute log-probabilities of prompt tokens that follow tokens of the run.
    pub score: Option<ScoreSpec>,
    /// Return rows after the final norm: the last one of the run, or the sum of all. `None` for requests that generate, and if
    /// only the last row counts and the prompt continues in a later step.
    pub pool: Option<Pooling>,
}

impl Run {
    /// Tokens of the request in the KV cache after this run.
    pub fn end(&self) -> usize {
        self.start + self.input.len()
    }

    /// Whether it samples a token after the first one of an output: a client that reads the output waits for this step.
    pub fn continues_output(&self) -> bool {
        self.sample.as_ref().is_some_and(|sample| sample.index > 0)
    }

    /// The images of which tokens of the run are rows, and which.
    pub fn image_rows(&self) -> impl Iterator<Item = (&ImageSpan, Range<usize>)> {
        // A plan that is not checked yet may say anything.
        let tokens = self.start..self.start.saturating_add(self.input.len());
        let spans = self.images.as_deref().unwrap_or_default();
        let rows = spans.iter().map(move |span| (span, span.rows_in(&tokens)));
        rows.filter(|(_, rows)| !rows.is_empty())
    }
}

/// Where a run finds the state of its request, and where it leaves it. While both are the same slot, the state is updated in
/// place; where they differ, what was found stays behind as it was: a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunState {
    /// The state behind the tokens before the run; `None` where there are none: it is zero then, whatever slots hold.
    pub before: Option<StateSlot>,
    /// Where the state behind the last token goes. No other run of the step reads or writes this slot.
    pub after: StateSlot,
    /// Whether the tokens are of the prompt: their states may be computed in chunks of [`crate::Executor::state_chunk`]. Tokens of an
    /// answer are computed one after the other, also where that is done again after a preemption, so that they are rounded as they were
    /// the first time.
    pub in_chunks: bool,
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
    /// One token: the one sampled for this request in the step before, which may still be on the device. If that step's
    /// logits are not finite, it is an arbitrary token, and what this run samples is discarded.
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

    /// True if there are no tokens, which never happens in a plan of the scheduler.
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
    /// Sample with a mask. It may depend on a token that is still being sampled when the step is launched, so it comes later,
    /// with [`crate::Executor::sample`].
    pub constrained: bool,
}

/// Prompt tokens to score: each follows a token of the run, whose row predicts it. The row that is sampled from is not
/// among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreSpec {
    /// Index in the run of the token before the first target.
    pub first: usize,
    /// The prompt tokens that follow, at least one.
    pub targets: Vec<TokenId>,
    /// How many of the most likely tokens to report at each position.
    pub top: usize,
}

impl ScoreSpec {
    /// Indices in the run of the rows that predict the targets.
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
    /// Results of [`Run::pool`], `hidden_size` numbers each: one entry per run, or none at all if no run pools. Sums of chunks
    /// are added up as `f64`; a device may add up a chunk in lower precision.
    pub pooled: Vec<Option<Vec<f64>>>,
    /// Runs of the plan, by index and ascending, whose logits or vectors are NaN or infinite. Their entries above are `None` or empty. Other
    /// runs are not affected, as they do not attend to these tokens.
    pub not_finite: Vec<usize>,
}

impl StepOutput {
    /// Whether the output of the run with this index is finite.
    pub fn is_finite(&self, run: usize) -> bool {
        self.not_finite.binary_search(&run).is_err()
    }
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Present if the request asked for logprobs.
    pub logprobs: Option<Logprobs>,
}
