use std::fmt;
use std::sync::Arc;

use plimsoll_core::{
    BlockId, KvConfig, RequestId, Run, RunInput, SampleSpec, SamplingOptions, SamplingParams, StepLimits,
    StepPlan, TokenId,
};
use serde::{Deserialize, Serialize};

/// A worst case of the steps the scheduler can plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScenarioKind {
    /// One new prompt that fills the step.
    Prefill,
    /// A chunk that fills the step and ends at the longest context, sampling with everything a client can ask for.
    LongPrefix,
    /// As many rows as may run, one token each, all at the longest context.
    Decode,
    /// As many rows and as many tokens as a step may have: decodes at the longest context and new prompts, every row sampling
    /// with everything a client can ask for.
    Mixed,
    /// Sampling with a full sort, penalties, bias and logprobs, as many rows as may run, all at the longest context.
    SampleSort,
    /// Sampling among the largest top-k that is not all, as many rows as may run, all short: how the candidates are chosen
    /// does not depend on the context, and what does is in [`Self::SampleSort`].
    SampleTopK,
}

impl ScenarioKind {
    /// All kinds, largest memory first as a rule, so that big allocations meet unfragmented memory.
    pub const ALL: [Self; 6] = [
        Self::Mixed,
        Self::Prefill,
        Self::LongPrefix,
        Self::SampleSort,
        Self::SampleTopK,
        Self::Decode,
    ];

    /// Name in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::LongPrefix => "long_prefix",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::SampleSort => "sample_sort",
            Self::SampleTopK => "sample_top_k",
        }
    }
}

impl fmt::Display for ScenarioKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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

/// The worst steps that the scheduler can plan under `limits` in a KV cache of `kv`, and the worst cases left out.
///
/// Contents do not matter, shapes do: a context may be longer than the cache, and then its blocks repeat. Blocks that a step
/// writes never do.
pub fn scenarios(limits: &StepLimits, vocab_size: usize, kv: KvConfig) -> (Vec<Scenario>, Vec<LeftOut>) {
    let shapes = Shapes {
        limits: *limits,
        kv,
        vocab_size,
    };
    let (reached, left_out) = shapes.reached();
    let scenarios = reached
        .into_iter()
        .enumerate()
        .map(|(step, (kind, rows))| Scenario {
            kind,
            plan: shapes.plan(step as u64, &rows, &shapes.sampling(kind)),
        });
    (scenarios.collect(), left_out)
}

/// How large a worst step is; each of its rows is sampled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScenarioShape {
    /// Which worst case.
    pub kind: ScenarioKind,
    /// Rows in the step.
    pub rows: usize,
    /// Tokens in the step.
    pub tokens: usize,
}

/// The sizes of what [`scenarios`] returns, without the steps.
pub fn scenario_shapes(limits: &StepLimits, kv: KvConfig) -> (Vec<ScenarioShape>, Vec<LeftOut>) {
    let shapes = Shapes {
        limits: *limits,
        kv,
        vocab_size: 0,
    };
    let (reached, left_out) = shapes.reached();
    let sizes = reached.into_iter().map(|(kind, rows)| ScenarioShape {
        kind,
        rows: rows.len(),
        tokens: rows.iter().map(|row| row.end - row.start).sum(),
    });
    (sizes.collect(), left_out)
}

struct Shapes {
    limits: StepLimits,
    kv: KvConfig,
    vocab_size: usize,
}

/// Tokens `start..end` of one request.
struct Row {
    start: usize,
    end: usize,
}

impl Shapes {
    /// Most rows of a step: every row has a token, and writes to a block of its own.
    fn max_rows(&self) -> usize {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = self.limits;
        max_num_seqs.min(max_num_batched_tokens).min(self.kv.num_blocks)
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
        let last = || Row {
            start: context - 1,
            end: context,
        };
        match kind {
            ScenarioKind::Prefill => Ok(vec![Row {
                start: 0,
                end: self.longest_row(),
            }]),
            ScenarioKind::LongPrefix if context <= batched => Err(format!(
                "a request of {context} tokens is never cut: a step takes {batched} (--max-num-batched-tokens)"
            )),
            ScenarioKind::LongPrefix => Ok(vec![Row {
                start: context - self.longest_row(),
                end: context,
            }]),
            ScenarioKind::Mixed if seqs == 1 => {
                Err("there is one row only (--max-num-seqs): a prompt or a decode, never both".into())
            }
            ScenarioKind::Mixed if batched <= seqs => Err(format!(
                "{seqs} rows (--max-num-seqs) of one token fill a step of {batched} (--max-num-batched-tokens)"
            )),
            ScenarioKind::Mixed if context == 1 => Err("no request is longer than one token".into()),
            ScenarioKind::Mixed => Ok(self.mixed_rows()),
            ScenarioKind::Decode | ScenarioKind::SampleSort => {
                Ok((0..self.max_rows()).map(|_| last()).collect())
            }
            ScenarioKind::SampleTopK => Ok((0..self.max_rows()).map(|_| Row { start: 0, end: 1 }).collect()),
        }
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
        let mut blocks_left = self.kv.num_blocks - rows;
        let mut plan = Vec::with_capacity(rows);
        for _ in 0..rows {
            let len = (1 + tokens_left)
                .min(max_model_len)
                .min((1 + blocks_left) * block);
            tokens_left -= len - 1;
            blocks_left -= (len - 1) / block;
            let start = if len > 1 { 0 } else { max_model_len - 1 };
            plan.push(Row {
                start,
                end: start + len,
            });
        }
        plan.reverse();
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
            ScenarioKind::Mixed | ScenarioKind::LongPrefix | ScenarioKind::SampleSort => everything,
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

    fn plan(&self, step: u64, rows: &[Row], params: &Arc<SamplingParams>) -> StepPlan {
        let mut written = 0;
        let total_written: usize = rows.iter().map(|row| self.written(row)).sum();
        let runs = rows.iter().enumerate().map(|(index, row)| {
            let prefix = row.start / self.kv.block_size.tokens();
            // Contexts share what nobody writes, or all blocks if everything is written.
            let shared = self.kv.num_blocks.saturating_sub(total_written);
            let read = |i: usize| {
                if shared > 0 {
                    total_written + i % shared
                } else {
                    i % self.kv.num_blocks
                }
            };
            let own = written..written + self.written(row);
            written = own.end;
            let blocks = (0..prefix)
                .map(read)
                .chain(own)
                .map(|block| BlockId(block as u32))
                .collect();
            let history = if params.needs_history() {
                self.tokens(0..row.end)
            } else {
                Vec::new()
            };
            let sample = SampleSpec {
                params: Arc::clone(params),
                seed: index as u64,
                index: 0,
                prompt_len: history.len(),
                history,
            };
            Run {
                // Far from the ids of real requests, which count from 0.
                request: RequestId(u64::MAX - index as u64),
                start: row.start,
                input: RunInput::Known(self.tokens(row.start..row.end)),
                blocks,
                sample: Some(sample),
            }
        });
        StepPlan {
            step,
            runs: runs.collect(),
        }
    }

    /// Blocks that a row writes.
    fn written(&self, row: &Row) -> usize {
        self.kv.block_size.blocks_for(row.end) - row.start / self.kv.block_size.tokens()
    }

    /// Tokens that differ as long as the vocabulary lasts: the most work for whatever counts them.
    fn tokens(&self, positions: std::ops::Range<usize>) -> Vec<TokenId> {
        positions
            .map(|position| (position % self.vocab_size) as TokenId)
            .collect()
    }
}

/// Entries of `logit_bias` in a scenario; clients send at most a few hundred.
const BIASED_TOKENS: usize = 1024;

/// Most `top_logprobs` a request may ask for.
const TOP_LOGPROBS: u32 = 20;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use plimsoll_core::BlockSize;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::ProfileSpec;

    fn limits(batched: usize, seqs: usize, model_len: usize) -> StepLimits {
        StepLimits {
            max_num_batched_tokens: batched,
            max_num_seqs: seqs,
            max_model_len: model_len,
        }
    }

    fn kv(num_blocks: usize) -> KvConfig {
        KvConfig {
            block_size: BlockSize::default(),
            num_blocks,
        }
    }

    fn shapes(scenarios: &[Scenario], kind: ScenarioKind) -> Vec<(usize, usize)> {
        let scenario = scenarios.iter().find(|scenario| scenario.kind == kind).unwrap();
        scenario
            .plan
            .runs
            .iter()
            .map(|run| (run.start, run.end()))
            .collect()
    }

    #[test]
    fn a4_every_worst_case_is_in() {
        let (all, left_out) = scenarios(&limits(512, 4, 2048), 1000, kv(512));
        assert!(left_out.is_empty());
        assert_eq!(shapes(&all, ScenarioKind::Prefill), [(0, 512)]);
        assert_eq!(shapes(&all, ScenarioKind::LongPrefix), [(1536, 2048)]);
        assert_eq!(shapes(&all, ScenarioKind::Decode), [(2047, 2048); 4]);
        assert_eq!(shapes(&all, ScenarioKind::SampleSort), [(2047, 2048); 4]);
        assert_eq!(shapes(&all, ScenarioKind::SampleTopK), [(0, 1); 4]);
        let mixed = [(2047, 2048), (2047, 2048), (2047, 2048), (0, 509)];
        assert_eq!(shapes(&all, ScenarioKind::Mixed), mixed);
        let everything = [
            ScenarioKind::Mixed,
            ScenarioKind::LongPrefix,
            ScenarioKind::SampleSort,
        ];
        for Scenario { plan, .. } in all.iter().filter(|scenario| everything.contains(&scenario.kind)) {
            for run in &plan.runs {
                let spec = run.sample.as_ref().unwrap();
                assert_eq!(
                    (spec.params.logprobs(), spec.history.len()),
                    (Some(20), run.end())
                );
                assert!(spec.params.top_p() < 1.0 && !spec.params.logit_bias().is_empty());
            }
        }
    }

    #[test]
    fn unreachable_shapes_are_left_out_with_the_reason() {
        let left_out = |limits| {
            let (reached, left_out) = scenarios(&limits, 1000, kv(1024));
            assert_eq!(reached.len() + left_out.len(), ScenarioKind::ALL.len());
            left_out
                .into_iter()
                .map(|left| (left.kind, left.reason))
                .collect::<Vec<_>>()
        };
        let reasons = left_out(limits(4096, 8, 2048));
        assert_eq!(reasons[0].0, ScenarioKind::LongPrefix);
        assert!(reasons[0].1.contains("--max-num-batched-tokens"), "{reasons:?}");
        assert_eq!(left_out(limits(64, 1, 2048))[0].0, ScenarioKind::Mixed);
        assert_eq!(left_out(limits(8, 8, 2048))[0].0, ScenarioKind::Mixed);
        assert_eq!(left_out(limits(8, 4, 1)).len(), 2);
    }

    #[test]
    fn a_full_step_of_short_requests_is_several_prompts() {
        let (all, _) = scenarios(&limits(100, 8, 40), 1000, kv(512));
        let mixed = shapes(&all, ScenarioKind::Mixed);
        assert_eq!(
            (
                mixed.len(),
                mixed.iter().map(|(start, end)| end - start).sum::<usize>()
            ),
            (8, 100)
        );
        assert_eq!(mixed[5..], [(0, 15), (0, 40), (0, 40)]);
    }

    /// No plan exceeds the limits, every table is long enough, and no step writes a block twice; and the probe's cache holds
    /// the largest steps in full.
    #[test]
    fn plans_are_legal_under_any_limits() {
        for seed in 0..3000 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut up_to = |most: usize| rng.random_range(1..=most);
            let limits = limits(up_to(700), up_to(60), up_to(900));
            let block_size = BlockSize::new([8, 16, 32][up_to(3) - 1]).unwrap();
            let vocab = up_to(300);
            let spec = ProfileSpec::new(limits, vocab, block_size, 1);
            let request = spec.request_blocks();
            let probe = block_size.blocks_for(spec.probe_tokens());
            let final_size = request + up_to(200) - 1;
            for num_blocks in [probe, final_size] {
                let kv = KvConfig {
                    block_size,
                    num_blocks,
                };
                let (all, left_out) = scenarios(&limits, vocab, kv);
                let (sizes, left_out_sizes) = scenario_shapes(&limits, kv);
                assert_eq!(
                    (sizes.len(), left_out_sizes),
                    (all.len(), left_out),
                    "seed {seed}"
                );
                for (Scenario { kind, plan }, size) in all.iter().zip(&sizes) {
                    let expected = ScenarioShape {
                        kind: *kind,
                        rows: plan.runs.iter().filter(|run| run.sample.is_some()).count(),
                        tokens: plan.num_tokens(),
                    };
                    assert_eq!(*size, expected, "seed {seed}");
                    check(plan, &limits, kv, vocab, &format!("seed {seed}, {kind}"));
                }
                if num_blocks == probe {
                    let most = all
                        .iter()
                        .map(|scenario| scenario.plan.num_tokens())
                        .max()
                        .unwrap();
                    let reachable = limits
                        .max_num_batched_tokens
                        .min(limits.max_num_seqs * limits.max_model_len);
                    assert_eq!(most, reachable, "seed {seed}");
                }
            }
        }
    }

    fn check(plan: &StepPlan, limits: &StepLimits, kv: KvConfig, vocab: usize, context: &str) {
        assert!(
            !plan.is_empty() && plan.runs.len() <= limits.max_num_seqs,
            "{context}"
        );
        assert!(plan.num_tokens() <= limits.max_num_batched_tokens, "{context}");
        let block_size = kv.block_size;
        let mut written = HashSet::new();
        let mut requests = HashSet::new();
        for run in &plan.runs {
            assert!(requests.insert(run.request), "{context}");
            assert!(
                !run.input.is_empty() && run.end() <= limits.max_model_len,
                "{context}"
            );
            assert_eq!(run.blocks.len(), block_size.blocks_for(run.end()), "{context}");
            assert!(
                run.blocks.iter().all(|block| block.index() < kv.num_blocks),
                "{context}"
            );
            for block in &run.blocks[run.start / block_size.tokens()..] {
                assert!(written.insert(*block), "{context}: {block:?} is written twice");
            }
            let RunInput::Known(tokens) = &run.input else {
                panic!("{context}")
            };
            assert!(tokens.iter().all(|&token| (token as usize) < vocab), "{context}");
        }
    }
}
