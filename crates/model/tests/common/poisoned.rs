//! Requests of which one meets a token that is not a number.

use candle_core::{Device, Tensor};
use plimsoll_core::{Executor, PageId, Pooling, Run, RunInput, ScoreSpec, StepOutput, TokenId};
use tempfile::TempDir;

use super::embeddings::pooled_run;
use super::experts::edited;
use super::{LIMITS, blocks, greedy_spec, plan, run};

/// A token whose embedding is NaN, and which is never sampled: so is its row of the head, where that is not the same.
pub const POISON: TokenId = 77;

/// A golden model with such a token.
pub fn poisoned(name: &str) -> TempDir {
    edited(name, |tensors| {
        let tables = ["embed_tokens.weight", "lm_head.weight"];
        for (name, table) in tensors {
            if !tables.iter().any(|end| name.ends_with(end)) {
                continue;
            }
            let (vocab, width) = table.dims2().unwrap();
            let at = POISON as usize;
            let row = Tensor::full(f32::NAN, (1, width), &Device::Cpu).unwrap();
            let row = row.to_dtype(table.dtype()).unwrap();
            let before = table.narrow(0, 0, at).unwrap();
            let behind = table.narrow(0, at + 1, vocab - at - 1).unwrap();
            *table = Tensor::cat(&[before, row, behind], 0).unwrap();
        }
    })
}

/// A prompt of `len` tokens, without [`POISON`].
pub fn harmless(len: usize, first: TokenId) -> Vec<TokenId> {
    let tokens = (0..).map(|at| (first + at * 29) % 150);
    tokens.filter(|&token| token != POISON).take(len).collect()
}

/// A prompt whose first tokens are harmless, and one is not if it `is_poisoned`.
pub fn unlucky(is_poisoned: bool) -> Vec<TokenId> {
    let mut prompt = harmless(UNLUCKY, 5);
    if is_poisoned {
        prompt[3] = POISON;
    }
    prompt
}

const UNLUCKY: usize = 20;
const CUT: usize = 12;
/// Tokens of the neighbours' prompts: their last blocks are partly filled, whatever the size of blocks.
const GOOD: usize = 13;
const LATE: usize = 11;
/// The unlucky request, and one that gets its blocks and its slot.
const UNLUCKY_ID: u64 = 1;
const LATE_ID: u64 = UNLUCKY_ID + LIMITS.max_num_seqs as u64;

/// A request as it goes on, a token a step.
struct Generating {
    id: u64,
    table: Vec<PageId>,
    prompt: Vec<TokenId>,
    text: Vec<TokenId>,
}

impl Generating {
    fn new(id: u64, prompt: Vec<TokenId>, table: Vec<PageId>) -> Self {
        Self {
            id,
            table,
            prompt,
            text: Vec::new(),
        }
    }

    /// Its whole prompt, or its last token.
    fn next(&self) -> Run {
        let mut run = match self.text.split_last() {
            None => run(self.id, 0, &self.prompt, &self.table),
            Some((last, before)) => run(self.id, self.prompt.len() + before.len(), &[*last], &self.table),
        };
        run.sample = Some(greedy_spec(self.text.len()));
        run
    }

    /// The token that a step in flight samples.
    fn ahead(&self) -> Run {
        let mut run = run(self.id, self.prompt.len() + self.text.len(), &[0], &self.table);
        run.input = RunInput::LastSampled;
        run.sample = Some(greedy_spec(self.text.len() + 1));
        run
    }

    fn take(&mut self, output: &StepOutput, index: usize) {
        let sampled = output.samples[index].as_ref();
        self.text.push(sampled.expect("a token of a neighbour").token);
    }
}

/// Serves a request with an unlucky prompt in chunks, with log-probabilities and a step ahead, and a good one beside it; then one
/// that gets the first one's blocks and its state slot, as the good one does where it grows. Returns the texts of both neighbours. A
/// block has at least eight tokens, and the cache eight blocks.
pub fn neighbours(runner: &mut impl Executor, is_poisoned: bool) -> [Vec<TokenId>; 2] {
    let mut unlucky = Generating::new(UNLUCKY_ID, unlucky(is_poisoned), blocks(0..3));
    let failed = if is_poisoned { vec![1] } else { vec![] };
    let mut good = Generating::new(2, good_prompt(), [3, 4, 2, 5].map(PageId).to_vec());

    // Nobody has looked at a row of it yet.
    let chunk = run(UNLUCKY_ID, 0, &unlucky.prompt[..CUT], &unlucky.table);
    let output = runner.execute(&plan(vec![good.next(), chunk])).unwrap();
    assert_eq!(output.not_finite, [0; 0]);
    good.take(&output, 0);

    let mut rest = run(UNLUCKY_ID, CUT, &unlucky.prompt[CUT..], &unlucky.table);
    rest.sample = Some(greedy_spec(0));
    rest.score = Some(ScoreSpec {
        first: 0,
        targets: unlucky.prompt[CUT + 1..].to_vec(),
        top: 2,
    });
    let step = plan(vec![good.next(), rest]);
    let behind = plan(vec![good.ahead(), unlucky.ahead()]);
    runner.launch(&step).unwrap();
    runner.launch(&behind).unwrap();
    for is_first in [true, false] {
        let output = runner.finish().unwrap();
        assert_eq!(output.not_finite, failed, "the step ahead: {}", !is_first);
        assert_eq!(output.samples[1].is_none(), is_poisoned);
        let scored = if is_poisoned { 0 } else { UNLUCKY - CUT - 1 };
        let scores: Vec<_> = output.scores.iter().map(Vec::len).collect();
        assert_eq!(scores, if is_first { vec![scored] } else { vec![] });
        good.take(&output, 0);
    }

    let mut late = Generating::new(LATE_ID, late_prompt(), [0, 1, 6, 7].map(PageId).to_vec());
    for _ in 0..8 {
        let output = runner.execute(&plan(vec![good.next(), late.next()])).unwrap();
        assert_eq!(output.not_finite, [0; 0]);
        good.take(&output, 0);
        late.take(&output, 1);
    }
    // Alone, as some kernels compute only one row.
    (unlucky.id, unlucky.table) = (good.id, good.table);
    for run in [unlucky.next(), unlucky.ahead()] {
        let output = runner.execute(&plan(vec![run])).unwrap();
        assert_eq!(output.not_finite.is_empty(), !is_poisoned);
    }
    for _ in 0..4 {
        let output = runner.execute(&plan(vec![late.next()])).unwrap();
        late.take(&output, 0);
    }
    [good.text, late.text]
}

/// The prompts of [`neighbours`].
pub fn good_prompt() -> Vec<TokenId> {
    harmless(GOOD, 40)
}

pub fn late_prompt() -> Vec<TokenId> {
    harmless(LATE, 90)
}

/// A vector is as it is beside a request whose vector is finite.
pub fn check_vectors(runner: &mut impl Executor, pooling: Pooling) {
    let mut vectors = |is_poisoned: bool| {
        let prompts = [good_prompt(), unlucky(is_poisoned)];
        let runs = (1..).zip(&prompts).map(|(id, prompt)| {
            let pages = blocks(4 * (id as u32 - 1)..4 * id as u32);
            pooled_run(id, prompt, (0, prompt.len()), &pages, pooling)
        });
        runner.execute(&plan(runs.collect())).unwrap()
    };
    let (found, expected) = (vectors(true), vectors(false));
    assert_eq!((found.not_finite, expected.not_finite), (vec![1], vec![]));
    assert!(found.pooled[1].is_none() && expected.pooled[1].is_some());
    assert_eq!(found.pooled[0], expected.pooled[0]);
}
