//! How likely given tokens are: log-probability, rank and the likeliest, for the tokens of a prompt.

use plimsoll_core::{PromptLogprob, TokenId, TokenLogprob};

use crate::SampleError;
use crate::parallel::{Disjoint, run};
use crate::sample::{LogSumExp, argmax, top};
use crate::simd::{Level, dispatch};

/// What is asked about one row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRow {
    /// Whose log-probability and rank.
    pub target: TokenId,
    /// How many of the likeliest tokens.
    pub top: usize,
}

/// Scores one token per row of `logits`, `[rows, vocab]`. NaN counts as -inf and becomes it. Equal logits rank by lower token
/// id. Takes no memory from the step's.
///
/// # Errors
/// Of a row: [`SampleError`], as for sampling.
pub fn score(logits: &mut [f32], rows: &[ScoreRow]) -> Vec<Result<PromptLogprob, SampleError>> {
    if rows.is_empty() {
        return Vec::new();
    }
    let vocab = logits.len() / rows.len();
    assert_eq!(logits.len(), rows.len() * vocab, "logits are not [rows, vocab]");
    let logits = Disjoint::new(logits);
    let mut results = vec![Err(SampleError::NotFinite); rows.len()];
    let scored = Disjoint::new(&mut results);
    run(rows.len(), &|_, row| {
        // SAFETY: rows are disjoint.
        let (logits, scored) = unsafe { (logits.part(row * vocab, vocab), scored.part(row, 1)) };
        scored[0] = score_row(logits, rows[row]);
    });
    results
}

fn score_row(logits: &mut [f32], row: ScoreRow) -> Result<PromptLogprob, SampleError> {
    let max = logits[argmax(logits)? as usize];
    let logits = &*logits;
    let log_sum = dispatch(Level::detect(), LogSumExp { logits, max });
    let logprob = |token: TokenId| logits[token as usize] - max - log_sum;
    let target = row.target as usize;
    let logit = logits[target];
    let likelier = logits.iter().filter(|&&other| other > logit).count();
    let equal_before = logits[..target].iter().filter(|&&other| other == logit).count();
    let top = top(logits, row.top).into_iter().map(|token| TokenLogprob {
        token,
        logprob: logprob(token),
    });
    Ok(PromptLogprob {
        token: row.target,
        logprob: logprob(row.target),
        rank: (likelier + equal_before) as u32 + 1,
        top: top.collect(),
    })
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn agrees_with_the_definition() {
        for seed in (0..40).chain([rand::random()]) {
            let mut rng = StdRng::seed_from_u64(seed);
            let (vocab, count) = (rng.random_range(1..700), rng.random_range(1..9));
            // Few values: equal logits are common.
            let mut logits: Vec<f32> = (0..vocab * count)
                .map(|_| rng.random_range(-40..40) as f32 / 4.0)
                .collect();
            let rows: Vec<_> = (0..count)
                .map(|_| ScoreRow {
                    target: rng.random_range(0..vocab) as TokenId,
                    top: rng.random_range(0..21),
                })
                .collect();
            let original = logits.clone();
            let scored = score(&mut logits, &rows);
            for ((logits, row), scored) in original.chunks(vocab).zip(&rows).zip(scored) {
                let scored = scored.unwrap();
                let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                let logprob = |token: TokenId| f64::from(logits[token as usize]) - sum.ln();
                let mut order: Vec<_> = (0..vocab as TokenId).collect();
                // Stable: equal ones stay in the order of their ids.
                order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
                let close = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-4;
                assert!(close(scored.logprob, logprob(row.target)), "seed {seed}");
                assert_eq!(order[scored.rank as usize - 1], row.target, "seed {seed}");
                let likeliest: Vec<_> = scored.top.iter().map(|top| top.token).collect();
                assert_eq!(likeliest, order[..row.top.min(vocab)], "seed {seed}");
                assert!(
                    scored
                        .top
                        .iter()
                        .all(|top| close(top.logprob, logprob(top.token))),
                    "seed {seed}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_number_is_unlikely_or_an_error() {
        let row = |target| ScoreRow { target, top: 2 };
        let scored = score(&mut [f32::NAN, 1.0, 1.0], &[row(0)]);
        let scored = scored[0].as_ref().unwrap();
        assert_eq!((scored.logprob, scored.rank), (f32::NEG_INFINITY, 3));
        let broken = [f32::NAN, f32::NAN, f32::NAN, 1.0, f32::INFINITY, 1.0];
        let scored = score(&mut broken.clone(), &[row(0), row(0)]);
        assert_eq!(scored, [Err(SampleError::NotFinite), Err(SampleError::NotFinite)]);
    }
}
