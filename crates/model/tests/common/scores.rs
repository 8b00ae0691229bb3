//! Log-probabilities of prompts: how to ask for them, and what they are by definition.

use plimsoll_core::{Executor, PageId, PromptLogprob, Run, ScoreSpec, TokenId};

use super::{greedy_spec, plan, run};

/// A chunk of `prompt` that starts at `start`, scored but for the rows before `first`.
pub fn scored_run(prompt: &[TokenId], start: usize, len: usize, first: usize, table: &[PageId]) -> Run {
    let end = start + len;
    let mut run = run(1, start, &prompt[start..end], table);
    let targets = &prompt[start + first + 1..prompt.len().min(end + 1)];
    run.score = (!targets.is_empty()).then(|| ScoreSpec {
        first,
        targets: targets.to_vec(),
        top: 5,
    });
    run.sample = (end == prompt.len()).then(|| greedy_spec(0));
    run
}

/// All of `prompt`, in chunks of `len`.
pub fn in_chunks(
    executor: &mut impl Executor,
    prompt: &[TokenId],
    len: usize,
    table: &[PageId],
) -> Vec<PromptLogprob> {
    let mut found = Vec::new();
    for (index, chunk) in prompt.chunks(len).enumerate() {
        let run = scored_run(prompt, index * len, chunk.len(), 0, table);
        let output = executor.execute(&plan(vec![run])).unwrap();
        found.extend(output.scores.into_iter().flatten());
    }
    assert_eq!(found.len(), prompt.len() - 1);
    found
}

/// Of `token` after a position with these logits, in double precision.
pub fn by_definition(logits: &[f32], token: TokenId, top: usize) -> PromptLogprob {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - max - sum.ln()) as f32;
    let mut order: Vec<_> = (0..logits.len() as TokenId).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let rank = order.iter().position(|&other| other == token).unwrap() as u32 + 1;
    let top = order[..top].iter().map(|&token| plimsoll_core::TokenLogprob {
        token,
        logprob: logprob(token),
    });
    PromptLogprob {
        token,
        logprob: logprob(token),
        rank,
        top: top.collect(),
    }
}

/// The same tokens at the same places, and log-probabilities that differ by no more than `tolerance`.
#[track_caller]
pub fn assert_close(found: &PromptLogprob, expected: &PromptLogprob, tolerance: f32, context: &str) {
    let tokens = |scored: &PromptLogprob| scored.top.iter().map(|top| top.token).collect::<Vec<_>>();
    assert_eq!(
        (found.token, found.rank, tokens(found)),
        (expected.token, expected.rank, tokens(expected)),
        "{context}"
    );
    let pairs = found.top.iter().zip(&expected.top);
    let mut pairs = pairs.map(|(found, expected)| (found.logprob, expected.logprob));
    let own = (found.logprob, expected.logprob);
    assert!(
        pairs.all(|(found, expected)| (found - expected).abs() <= tolerance)
            && (own.0 - own.1).abs() <= tolerance,
        "{context}: {found:?} for {expected:?}"
    );
}
