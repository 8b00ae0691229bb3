//! Choosing tokens, with vLLM's meaning of the parameters.

use std::cmp::Ordering;

use plimsoll_core::{Logprobs, Oom, SampleSpec, Sampled, TokenId, TokenLogprob};
use plimsoll_device::{Arena, DryArena};

use crate::parallel::{Disjoint, run, threads};
use crate::philox::uniform;
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, exp};

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// Every logit is NaN or -inf, or one is +inf.
    #[error(
        "the model's logits are not numbers, so no token can be chosen: the weights are damaged, or overflow in the \
         precision they are computed in"
    )]
    NotFinite,
}

/// Samples one token per row of `logits`, `[rows, vocab]`, one spec per row. The logits are changed in place.
///
/// In this order, behind [`apply_mask`]: logit bias; repetition penalty (prompt and output), frequency and presence penalty (output); log
/// softmax for logprobs; temperature; `min_p`; `top_k`; `top_p`; a draw. Temperature 0 takes the largest logit. Equal logits
/// rank by lower token id, everywhere. NaN counts as -inf. The draw for `(seed, index)` is Philox4x32-10's, see `philox`.
///
/// # Errors
/// [`Oom`] if the arena has no room for the scratch; a [`SampleError`] concerns one row.
pub fn sample(
    logits: &mut [f32],
    specs: &[&SampleSpec],
    arena: &Arena,
) -> Result<Vec<Result<Sampled, SampleError>>, Oom> {
    if specs.is_empty() {
        return Ok(Vec::new());
    }
    let vocab = logits.len() / specs.len();
    assert_eq!(logits.len(), specs.len() * vocab, "logits are not [rows, vocab]");
    let frame = arena.frame();
    let weights: &mut [f32] = frame.alloc(scratch_len(vocab))?;
    let tokens: &mut [u32] = frame.alloc(scratch_len(vocab))?;
    let (weights, tokens) = (Disjoint::new(weights), Disjoint::new(tokens));
    let logits = Disjoint::new(logits);
    let mut results = vec![Err(SampleError::NotFinite); specs.len()];
    let sampled = Disjoint::new(&mut results);
    run(specs.len(), &|worker, row| {
        // SAFETY: rows are disjoint, and one task at a time runs on a worker.
        let (logits, scratch, sampled) = unsafe {
            let scratch = Scratch {
                weights: weights.part(worker * vocab, vocab),
                tokens: tokens.part(worker * vocab, vocab),
            };
            (logits.part(row * vocab, vocab), scratch, sampled.part(row, 1))
        };
        sampled[0] = sample_row(Level::detect(), logits, specs[row], scratch);
    });
    Ok(results)
}

/// Leaves a row's choice to the tokens of `mask`: bit `t % 32` of word `t / 32` is 1 where token `t` is allowed. Comes before
/// all that [`sample`] does.
///
/// # Panics
/// Where the mask is shorter than the row.
pub fn apply_mask(logits: &mut [f32], mask: &[u32]) {
    assert!(mask.len() >= logits.len().div_ceil(32), "one bit per logit");
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        if word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// Counts what [`sample`] takes for any number of rows, in a frame of its own.
pub fn sample_scratch(vocab: usize, arena: &mut DryArena) -> Option<()> {
    arena.frame(|frame| {
        frame.alloc::<f32>(scratch_len(vocab))?;
        frame.alloc::<u32>(scratch_len(vocab))
    })
}

/// Weights, and tokens, of all workers.
fn scratch_len(vocab: usize) -> usize {
    threads() * vocab
}

/// A vocabulary's worth of memory.
struct Scratch<'a> {
    weights: &'a mut [f32],
    /// Occurrences while penalties are applied, then the candidates.
    tokens: &'a mut [u32],
}

fn sample_row(
    level: Level,
    logits: &mut [f32],
    spec: &SampleSpec,
    scratch: Scratch<'_>,
) -> Result<Sampled, SampleError> {
    let params = &*spec.params;
    for &(token, bias) in params.logit_bias() {
        logits[token as usize] += bias;
    }
    if params.needs_history() {
        penalize(logits, spec, scratch.tokens);
    }
    let best = argmax(logits)?;
    let max = logits[best as usize];
    let token = if params.is_greedy() {
        best
    } else {
        let temperature = params.temperature();
        let weights = Weights {
            logits,
            max,
            temperature,
            out: scratch.weights,
        };
        let total = dispatch(level, weights);
        draw(spec, total, scratch)
    };
    let logprobs = params.logprobs().map(|k| {
        let log_sum = dispatch(level, LogSumExp { logits, max });
        let logprob = |token: TokenId| logits[token as usize] - max - log_sum;
        let top = top(logits, k).into_iter().map(|token| TokenLogprob {
            token,
            logprob: logprob(token),
        });
        Logprobs {
            sampled: logprob(token),
            top: top.collect(),
        }
    });
    Ok(Sampled { token, logprobs })
}

/// Applies the penalties, each token once; `marks` is `[vocab]`.
fn penalize(logits: &mut [f32], spec: &SampleSpec, marks: &mut [u32]) {
    const IN_PROMPT: u32 = 1 << 31;
    let params = &*spec.params;
    let (prompt, output) = spec.history.split_at(spec.prompt_len);
    marks.fill(0);
    prompt
        .iter()
        .for_each(|&token| marks[token as usize] |= IN_PROMPT);
    output.iter().for_each(|&token| marks[token as usize] += 1);
    for &token in &spec.history {
        let mark = std::mem::take(&mut marks[token as usize]);
        if mark == 0 {
            continue;
        }
        let logit = &mut logits[token as usize];
        let repetition = params.repetition_penalty();
        *logit = if *logit > 0.0 {
            *logit / repetition
        } else {
            *logit * repetition
        };
        let count = mark & !IN_PROMPT;
        if count > 0 {
            *logit -= params.frequency_penalty() * count as f32 + params.presence_penalty();
        }
    }
}

/// The token with the largest logit. Turns NaN into -inf on the way.
pub(crate) fn argmax(logits: &mut [f32]) -> Result<TokenId, SampleError> {
    let (mut best, mut max) = (0, f32::NEG_INFINITY);
    for (token, logit) in logits.iter_mut().enumerate() {
        if logit.is_nan() {
            *logit = f32::NEG_INFINITY;
        }
        if *logit > max {
            (best, max) = (token, *logit);
        }
    }
    if max.is_finite() {
        Ok(best as TokenId)
    } else {
        Err(SampleError::NotFinite)
    }
}

/// `out = exp((logits - max) / temperature)`; returns the sum.
struct Weights<'a> {
    logits: &'a [f32],
    max: f32,
    temperature: f32,
    out: &'a mut [f32],
}

impl Kernel for Weights<'_> {
    type Out = f64;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f64 {
        let mut total = 0.0;
        for (x, y) in self.logits.chunks(LANES).zip(self.out.chunks_mut(LANES)) {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            lanes[..x.len()].copy_from_slice(x);
            // SAFETY: the features are there, the array has sixteen elements.
            unsafe {
                let scaled = S::div(
                    S::sub(S::load(lanes.as_ptr()), S::splat(self.max)),
                    S::splat(self.temperature),
                );
                let weights = exp::<S>(scaled);
                S::store(lanes.as_mut_ptr(), weights);
                total += f64::from(S::sum(weights));
            }
            y.copy_from_slice(&lanes[..x.len()]);
        }
        total
    }
}

/// `ln Σ exp(logit - max)`.
pub(crate) struct LogSumExp<'a> {
    pub(crate) logits: &'a [f32],
    pub(crate) max: f32,
}

impl Kernel for LogSumExp<'_> {
    type Out = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let mut total = 0.0;
        for x in self.logits.chunks(LANES) {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            lanes[..x.len()].copy_from_slice(x);
            // SAFETY: the features are there, the array has sixteen elements.
            total +=
                f64::from(unsafe { S::sum(exp::<S>(S::sub(S::load(lanes.as_ptr()), S::splat(self.max)))) });
        }
        total.ln() as f32
    }
}

/// The `k` tokens with the largest logits, best first.
pub(crate) fn top(logits: &[f32], k: usize) -> Vec<TokenId> {
    let mut best: Vec<TokenId> = Vec::with_capacity(k + 1);
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if k == 0 || best.len() == k && logit <= least {
            continue;
        }
        let at = best.partition_point(|&b| logits[b as usize] >= logit);
        best.insert(at, token as TokenId);
        best.truncate(k);
        least = logits[best[best.len() - 1] as usize];
    }
    best
}

/// Draws from `scratch.weights`, which sum to `total` and whose largest is 1.
fn draw(spec: &SampleSpec, total: f64, scratch: Scratch<'_>) -> TokenId {
    let params = &*spec.params;
    let point = uniform(spec.seed, spec.index as u64);
    let weights = &*scratch.weights;
    let truncated = params.top_k() < weights.len() || params.top_p() < 1.0;
    if !truncated && params.min_p() == 0.0 {
        return pick(
            weights
                .iter()
                .enumerate()
                .map(|(token, &w)| (token as TokenId, w)),
            point * total,
        );
    }

    let mut len = 0;
    for (token, &w) in weights.iter().enumerate() {
        if w >= params.min_p() && w > 0.0 {
            scratch.tokens[len] = token as TokenId;
            len += 1;
        }
    }
    let mut candidates = &mut scratch.tokens[..len];
    let weight = |token: &TokenId| weights[*token as usize];
    let rank = |a: &TokenId, b: &TokenId| {
        weight(b)
            .partial_cmp(&weight(a))
            .unwrap_or(Ordering::Equal)
            .then(a.cmp(b))
    };
    if params.top_k() < candidates.len() {
        let k = params.top_k();
        candidates.select_nth_unstable_by(k - 1, rank);
        candidates = &mut candidates[..k];
    }
    let mut mass: f64 = candidates.iter().map(|t| f64::from(weight(t))).sum();
    if params.top_p() < 1.0 {
        let enough = f64::from(params.top_p()) * mass;
        // Tokens below this weigh less than 1 - top_p together, so the nucleus is among the others.
        let least = ((mass - enough) / candidates.len() as f64) as f32;
        let kept = partition(candidates, |t| weight(t) >= least);
        candidates = &mut candidates[..kept];
        candidates.sort_unstable_by(rank);
        mass = 0.0;
        let mut kept = 0;
        while kept < candidates.len() && (kept == 0 || mass < enough) {
            mass += f64::from(weight(&candidates[kept]));
            kept += 1;
        }
        candidates = &mut candidates[..kept];
    } else if truncated {
        candidates.sort_unstable();
    }
    pick(candidates.iter().map(|t| (*t, weight(t))), point * mass)
}

/// Moves the elements that satisfy `keep` to the front, in order, and counts them.
fn partition(tokens: &mut [TokenId], keep: impl Fn(&TokenId) -> bool) -> usize {
    let mut kept = 0;
    for i in 0..tokens.len() {
        if keep(&tokens[i]) {
            tokens.swap(kept, i);
            kept += 1;
        }
    }
    kept
}

/// The candidate at which the running sum of weights passes `point`.
fn pick(candidates: impl Iterator<Item = (TokenId, f32)>, point: f64) -> TokenId {
    let (mut sum, mut last) = (0.0, 0);
    for (token, weight) in candidates {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = token;
            if sum > point {
                break;
            }
        }
    }
    // Rounding may leave the sum a hair below the point: then the last possible token.
    last
}

#[cfg(test)]
mod tests;
