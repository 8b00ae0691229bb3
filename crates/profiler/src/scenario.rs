use std::sync::Arc;

use plimsoll_core::{
    GroupTable, KvConfig, PageId, Pooling, RequestId, Run, RunInput, RunState, SampleSpec, SamplingOptions,
    SamplingParams, ScoreSpec, StateSlot, StepLimits, StepPlan, TokenId,
};
use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use crate::timed_shape::TimedShape;

/// A worst case of the steps the scheduler can plan.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Display, IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ScenarioKind {
    /// One new prompt that fills the step, where there is no [`Self::LongPrefix`].
    Prefill,
    /// A chunk that fills the step and ends at the longest context, sampling with everything a client can ask for.
    ///
    /// In a probe of a device on which contexts take no memory of a step the prefix is short.
    LongPrefix,
    /// As many rows as may run, one token each: as many of them at the longest context as the cache holds, the others short. All are
    /// at the longest context where there is no [`Self::Mixed`].
    Decode,
    /// As many rows and as many tokens as a step may have: decodes at the longest context and new prompts, every row sampling
    /// with everything a client can ask for, and every token of the prompts with its log-probabilities.
    ///
    /// In a probe as many contexts are the longest as its cache holds: what a step allocates follows from the number of its rows and tokens
    /// and from the longest context. That all are is the proof's concern, which is also how long a step takes that shares one prefix.
    Mixed,
    /// The log-probabilities of as many prompt tokens as a step may have, where there is no [`Self::Mixed`].
    PromptLogprobs,
    /// Sampling with a full sort, penalties, bias and logprobs, as many rows as may run, all at the longest context, where there
    /// is no [`Self::Mixed`].
    SampleSort,
    /// Sampling among the largest top-k that is not all, as many rows as may run, all short: how the candidates are chosen
    /// does not depend on the context, and what does is in [`Self::Mixed`] or [`Self::SampleSort`].
    SampleTopK,
}

impl ScenarioKind {
    /// All kinds, largest memory first as a rule, so that big allocations meet unfragmented memory.
    pub const ALL: [Self; 7] = [
        Self::Mixed,
        Self::PromptLogprobs,
        Self::Prefill,
        Self::LongPrefix,
        Self::SampleSort,
        Self::SampleTopK,
        Self::Decode,
    ];

    /// Name in logs and reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// One worst step.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Which worst case.
    pub kind: ScenarioKind,
    /// The step.
    pub plan: StepPlan,
}

/// A worst case that these limits cannot reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Which one.
    pub kind: ScenarioKind,
    /// Why not.
    pub reason: String,
}

/// How many rows of one token of [`ScenarioKind::Mixed`] are at the longest context. The others are short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contexts {
    /// All, as of requests that share all they read: in a proof.
    All,
    /// As many as the cache holds of requests that share nothing, but at least one: in a probe, which measures what steps take.
    Held,
    /// So many too, but the prefix of [`ScenarioKind::LongPrefix`] is short: in a probe where a step takes as much however far its
    /// rows look back.
    Short,
}

/// The worst steps that the scheduler can plan under `limits` in a KV cache of `kv`, and the worst cases left out.
///
/// Contents do not matter, shapes do: a context may be longer than the cache, and then its blocks repeat. Blocks that a step
/// writes never do. With `pooling`, steps are those of a model that is served for embeddings.
pub fn scenarios(
    contexts: Contexts,
    limits: &StepLimits,
    vocab_size: usize,
    kv: KvConfig,
    pooling: Option<Pooling>,
) -> (Vec<Scenario>, Vec<LeftOut>) {
    Shapes {
        vocab_size,
        contexts,
        ..Shapes::new(limits, kv, pooling)
    }
    .scenarios()
}

/// A step of this shape, to see how long it takes: greedy sampling, contexts that share no pages while these last.
pub(crate) fn timed_step(
    limits: &StepLimits,
    vocab_size: usize,
    kv: KvConfig,
    shape: TimedShape,
) -> StepPlan {
    let shapes = Shapes {
        vocab_size,
        apart: true,
        ..Shapes::new(limits, kv, None)
    };
    shapes.plan(0, &shape.lines(limits.max_model_len), ScenarioKind::Decode)
}

impl TimedShape {
    /// Its requests.
    fn lines(&self, max_model_len: usize) -> Vec<Row> {
        let decoding = self.decoding;
        let one = Row {
            start: self.context,
            end: self.context + 1,
        };
        let mut rows: Vec<Row> = (0..decoding).map(|_| one).collect();
        let prompt = max_model_len.min(LONGEST_TIMED_PROMPT);
        let mut left = self.rows - decoding;
        while left > 0 {
            let end = left.min(prompt);
            rows.push(Row { start: 0, end });
            left -= end;
        }
        rows
    }

    /// Whether it is within the limits, with pages of its own for all of its contexts.
    pub(crate) fn fits(&self, limits: &StepLimits, kv: KvConfig) -> bool {
        let rows = self.lines(limits.max_model_len);
        let blocks: usize = rows.iter().map(|row| kv.block_size.blocks_for(row.end)).sum();
        let pages = blocks * kv.groups.pages_per_block();
        self.decoding > 0 && rows.len() <= limits.max_num_seqs && pages <= kv.num_pages
    }
}

/// Attention within longer ones would cost as much as their other work.
const LONGEST_TIMED_PROMPT: usize = 512;

/// How large a worst step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScenarioShape {
    /// Which worst case.
    pub kind: ScenarioKind,
    /// Rows in the step.
    pub rows: usize,
    /// Tokens in the step.
    pub tokens: usize,
}

impl ScenarioShape {
    /// Rows that are sampled from: all but a prompt that goes on, where no row has more than one token.
    pub fn sampled(&self) -> usize {
        let goes_on = self.kind == ScenarioKind::PromptLogprobs && self.tokens == self.rows;
        self.rows - usize::from(goes_on)
    }

    /// Tokens whose logits say how likely the prompt's next token is.
    pub fn scored(&self) -> usize {
        match self.kind {
            ScenarioKind::Mixed | ScenarioKind::PromptLogprobs => self.tokens - self.sampled(),
            _ => 0,
        }
    }
}

/// The sizes of what [`scenarios`] returns, without the steps.
pub fn scenario_shapes(
    limits: &StepLimits,
    kv: KvConfig,
    pooling: Option<Pooling>,
) -> (Vec<ScenarioShape>, Vec<LeftOut>) {
    let (reached, left_out) = Shapes::new(limits, kv, pooling).reached();
    let sizes = reached.into_iter().map(|(kind, rows)| ScenarioShape {
        kind,
        rows: rows.len(),
        tokens: rows.iter().map(Row::len).sum(),
    });
    (sizes.collect(), left_out)
}

struct Shapes {
    limits: StepLimits,
    kv: KvConfig,
    vocab_size: usize,
    /// Rows are pooled, nothing is sampled.
    pooling: Option<Pooling>,
    /// Contexts share no pages, as far as there are enough.
    apart: bool,
    /// Of the decodes of [`ScenarioKind::Mixed`].
    contexts: Contexts,
}

/// Tokens `start..end` of one request.
#[derive(Clone, Copy)]
struct Row {
    start: usize,
    end: usize,
}

impl Row {
    fn len(&self) -> usize {
        self.end - self.start
    }
}

impl Shapes {
    /// Without a vocabulary: for sizes alone.
    fn new(limits: &StepLimits, kv: KvConfig, pooling: Option<Pooling>) -> Self {
        Self {
            limits: *limits,
            kv,
            vocab_size: 0,
            pooling,
            apart: false,
            contexts: Contexts::All,
        }
    }

    fn scenarios(&self) -> (Vec<Scenario>, Vec<LeftOut>) {
        let (reached, left_out) = self.reached();
        let reached = reached.into_iter().enumerate();
        let scenarios = reached.map(|(step, (kind, rows))| Scenario {
            kind,
            plan: self.plan(step as u64, &rows, kind),
        });
        (scenarios.collect(), left_out)
    }

    /// Blocks that every group can have at once.
    fn blocks(&self) -> usize {
        self.kv.num_pages / self.kv.groups.pages_per_block()
    }

    /// Most rows of a step: every row has a token, and writes to a block of its own.
    fn max_rows(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = self.limits;
        max_num_seqs.min(max_num_batched_tokens).min(self.blocks())
    }

    /// Longest row that fits the step, the context and the cache.
    fn longest_row(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_model_len,
            ..
        } = self.limits;
        max_num_batched_tokens
            .min(max_model_len)
            .min(self.kv.capacity_tokens())
    }

    /// The rows of each worst case that can be reached, and the others.
    fn reached(&self) -> (Vec<(ScenarioKind, Vec<Row>)>, Vec<LeftOut>) {
        let (mut reached, mut left_out) = (Vec::new(), Vec::new());
        for kind in ScenarioKind::ALL {
            match self.rows(kind) {
                Ok(rows) => reached.push((kind, rows)),
                Err(reason) => left_out.push(LeftOut { kind, reason }),
            }
        }
        (reached, left_out)
    }

    fn rows(&self, kind: ScenarioKind) -> Result<Vec<Row>, String> {
        let StepLimits {
            max_num_batched_tokens: batched,
            max_num_seqs: seqs,
            max_model_len: context,
        } = self.limits;
        match kind {
            ScenarioKind::PromptLogprobs | ScenarioKind::SampleSort | ScenarioKind::SampleTopK
                if self.pooling.is_some() =>
            {
                Err("a model that is served for embeddings has no logits".into())
            }
            ScenarioKind::Prefill if context > batched => Err("the step `long_prefix` includes it".into()),
            ScenarioKind::Prefill => Ok(vec![Row {
                start: 0,
                end: self.longest_row(),
            }]),
            ScenarioKind::LongPrefix if context <= batched => Err(format!(
                "a request of {context} tokens is never split: a step has room for {batched} (--max-num-batched-tokens)"
            )),
            ScenarioKind::LongPrefix => {
                let (row, longest) = (self.longest_row(), context - self.longest_row());
                let start = match self.contexts {
                    Contexts::All | Contexts::Held => longest,
                    Contexts::Short => longest.min(SHORT_PREFIX),
                };
                Ok(vec![Row {
                    start,
                    end: start + row,
                }])
            }
            ScenarioKind::Mixed | ScenarioKind::PromptLogprobs if context == 1 => {
                Err("no request is longer than one token".into())
            }
            ScenarioKind::Mixed if seqs == 1 => {
                Err("a step has one request (--max-num-seqs): a prompt or a decode, never both".into())
            }
            ScenarioKind::Mixed if batched <= seqs => Err(format!(
                "{seqs} decodes (--max-num-seqs) fill a step of {batched} tokens (--max-num-batched-tokens)"
            )),
            ScenarioKind::PromptLogprobs | ScenarioKind::SampleSort
                if seqs > 1 && batched > seqs && context > 1 =>
            {
                Err("the step `mixed` includes it".into())
            }
            ScenarioKind::Mixed | ScenarioKind::PromptLogprobs => Ok(self.mixed_rows()),
            ScenarioKind::Decode if self.rows(ScenarioKind::Mixed).is_ok() => {
                Ok(self.one_token_rows(Contexts::Held).collect())
            }
            ScenarioKind::Decode | ScenarioKind::SampleSort => {
                Ok(self.one_token_rows(Contexts::All).collect())
            }
            ScenarioKind::SampleTopK => Ok((0..self.max_rows()).map(|_| Row { start: 0, end: 1 }).collect()),
        }
    }

    /// As many rows as there may be, which generate; those at the longest context come first.
    fn one_token_rows(&self, contexts: Contexts) -> impl Iterator<Item = Row> {
        let (rows, context) = (self.max_rows(), self.limits.max_model_len);
        let held = self.blocks() / self.kv.block_size.blocks_for(context);
        let longest = match contexts {
            Contexts::All => rows,
            Contexts::Held | Contexts::Short => held.max(1),
        };
        (0..rows).map(move |index| {
            let start = if index < longest {
                context - 1
            } else {
                1.min(context - 1)
            };
            Row {
                start,
                end: start + 1,
            }
        })
    }

    /// As many rows as there may be; all but the last ones decode, the last ones are prompts that share the rest of the tokens.
    ///
    /// The prompts look back at nothing: attention over a long prefix is the most expensive computation there is, its memory is
    /// [`ScenarioKind::LongPrefix`]'s concern, and a step gives it back before it has logits to sample from.
    fn mixed_rows(&self) -> Vec<Row> {
        let StepLimits {
            max_num_batched_tokens,
            max_model_len,
            ..
        } = self.limits;
        let (rows, block) = (self.max_rows(), self.kv.block_size.tokens());
        // Beyond the one token and the one block that each row has.
        let mut tokens_left = max_num_batched_tokens - rows;
        let mut blocks_left = self.blocks() - rows;
        let mut plan: Vec<Row> = self.one_token_rows(self.contexts).collect();
        for row in plan.iter_mut().rev() {
            let len = (1 + tokens_left)
                .min(max_model_len)
                .min((1 + blocks_left) * block);
            tokens_left -= len - 1;
            blocks_left -= (len - 1) / block;
            if len > 1 {
                *row = Row { start: 0, end: len };
            }
        }
        plan
    }

    fn sampling(&self, kind: ScenarioKind) -> Arc<SamplingParams> {
        let everything = SamplingOptions {
            temperature: Some(1.0),
            top_p: Some(0.9),
            min_p: Some(0.001),
            presence_penalty: Some(0.5),
            frequency_penalty: Some(0.5),
            repetition_penalty: Some(1.1),
            logit_bias: (0..self.vocab_size.min(BIASED_TOKENS))
                .map(|token| (token as TokenId, 1.0))
                .collect(),
            logprobs: Some(TOP_LOGPROBS),
            ..Default::default()
        };
        let options = match kind {
            ScenarioKind::Mixed
            | ScenarioKind::PromptLogprobs
            | ScenarioKind::LongPrefix
            | ScenarioKind::SampleSort => everything,
            ScenarioKind::SampleTopK => {
                let k = i64::try_from(self.vocab_size).unwrap_or(i64::MAX) - 1;
                SamplingOptions {
                    top_p: None,
                    top_k: Some(k.max(1)),
                    ..everything
                }
            }
            ScenarioKind::Prefill | ScenarioKind::Decode => return Arc::new(SamplingParams::greedy()),
        };
        Arc::new(SamplingParams::new(&options, self.vocab_size).expect("the scenario's parameters are legal"))
    }

    fn plan(&self, step: u64, rows: &[Row], kind: ScenarioKind) -> StepPlan {
        let params = self.sampling(kind);
        let scores = matches!(kind, ScenarioKind::Mixed | ScenarioKind::PromptLogprobs);
        // Where no prompt has two tokens in the step, one goes on in the next.
        let goes_on = scores && rows.iter().all(|row| row.len() == 1);
        let (mut written, mut read) = (0, 0);
        let total_written: usize = rows.iter().map(|row| self.written(row)).sum();
        let runs = rows.iter().enumerate().map(|(index, row)| {
            let tables = self.tables(row, &mut written, total_written, read);
            if self.apart {
                read += row.start.div_ceil(self.kv.block_size.tokens()) * self.kv.groups.pages_per_block();
            }
            let history = if params.needs_history() {
                self.tokens(index, 0..row.end)
            } else {
                Vec::new()
            };
            let goes_on = goes_on && index == 0;
            let sample = SampleSpec {
                params: Arc::clone(&params),
                seed: index as u64,
                index: 0,
                prompt_len: history.len(),
                history,
                // As everything else that a client can ask for.
                constrained: params.needs_history(),
            };
            let scored = if goes_on { 1 } else { row.len() - 1 };
            let score = ScoreSpec {
                first: 0,
                targets: self.tokens(index, row.start + 1..row.start + 1 + scored),
                top: TOP_LOGPROBS as usize,
            };
            Run {
                // Far from the ids of real requests, which count from 0.
                request: RequestId(u64::MAX - index as u64),
                start: row.start,
                input: RunInput::Known(self.tokens(index, row.start..row.end)),
                images: None,
                tables,
                state: self.state(row, index, rows.len()),
                sample: (!goes_on && self.pooling.is_none()).then_some(sample),
                score: (scores && scored > 0 && self.pooling.is_none()).then_some(score),
                pool: self.pooling,
            }
        });
        StepPlan {
            step,
            runs: runs.collect(),
            encode: None,
        }
    }

    /// The state of row `index` of so many: as that of a request that hits a snapshot, where there are slots for some.
    fn state(&self, row: &Row, index: usize, rows: usize) -> Option<RunState> {
        let slot = |index| StateSlot(index as u32);
        let snapshot = Some(rows + index).filter(|&snapshot| snapshot < self.kv.state_slots);
        (self.kv.state_slots > 0).then(|| RunState {
            before: (row.start > 0).then_some(slot(snapshot.unwrap_or(index))),
            after: slot(index),
            in_chunks: row.len() > 1,
        })
    }

    /// Pages that a row writes.
    fn written(&self, row: &Row) -> usize {
        let blocks = self.kv.block_size.blocks_for(row.end) - row.start / self.kv.block_size.tokens();
        blocks * self.kv.groups.pages_per_block()
    }

    /// The tables of a row whose own pages follow the `written` ones of those before it, and whose context begins `apart` pages
    /// behind the first one's. Contexts share pages that no row writes, or all pages if everything is written.
    fn tables(&self, row: &Row, written: &mut usize, total_written: usize, apart: usize) -> Vec<GroupTable> {
        let block_size = self.kv.block_size;
        let unwritten = self.kv.num_pages.saturating_sub(total_written);
        let few = SHARED_BLOCKS * self.kv.groups.pages_per_block();
        let shared = if self.apart { unwritten } else { unwritten.min(few) };
        let tables = self.kv.groups.iter().map(|group| {
            let first = group.first_block(block_size, row.start);
            let own = row.start / block_size.tokens() * group.pages_per_block;
            let end = block_size.blocks_for(row.end) * group.pages_per_block;
            let read = (first * group.pages_per_block..own).map(|page| match shared {
                0 => page % self.kv.num_pages,
                shared => total_written + (apart + page) % shared,
            });
            let written = std::mem::replace(written, *written + end - own)..;
            let pages = read.chain(written.take(end - own));
            let pages = pages.map(|page| PageId(page as u32)).collect();
            GroupTable { first, pages }
        });
        tables.collect()
    }

    /// Tokens of row `index` that differ as long as the vocabulary lasts: the most work for whatever counts them. Different rows have
    /// different tokens at the same position, as equal ones would choose the same few experts.
    fn tokens(&self, index: usize, positions: std::ops::Range<usize>) -> Vec<TokenId> {
        let mut next = (positions.start + index * TOKENS_APART) % self.vocab_size;
        let mut tokens = Vec::with_capacity(positions.len());
        while tokens.len() < positions.len() {
            let end = self.vocab_size.min(next + positions.len() - tokens.len());
            tokens.extend((next..end).map(|token| token as TokenId));
            next = 0;
        }
        tokens
    }
}

/// Blocks that all contexts of a worst step share. What a step allocates follows from the number of keys, not from where they lie;
/// few blocks stay in the device's cache, so that reading hundreds of contexts of the longest length does not take seconds.
const SHARED_BLOCKS: usize = 64;

/// Tokens of a prefix that is short.
const SHORT_PREFIX: usize = 1024;

/// Distance between the tokens of neighbouring rows at the same position. A prime, so that rows rarely have the same token.
const TOKENS_APART: usize = 7919;

/// Entries of `logit_bias` in a scenario: more than clients send. More take no more memory, which is that of a vocabulary.
const BIASED_TOKENS: usize = 1024;

/// Most `top_logprobs` a request may ask for.
const TOP_LOGPROBS: u32 = SamplingParams::MAX_LOGPROBS;

#[cfg(test)]
mod tests;
