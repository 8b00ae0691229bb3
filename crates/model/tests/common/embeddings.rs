//! Vectors: what transformers computed, and how to ask for them.

use plimsoll_core::{Executor, PageId, Pooling, Run, TokenId};
use plimsoll_model::{ServeAs, Task};
use serde::Deserialize;

use super::{blocks, golden_path, plan, run};

/// A model without a head, as embedding models are published.
pub const EMBEDDER: &str = "qwen3-embedding";

pub const POOLINGS: [Pooling; 2] = [Pooling::Last, Pooling::Mean];

#[derive(Deserialize)]
pub struct Vectors {
    pub cases: Vec<VectorCase>,
}

#[derive(Deserialize)]
pub struct VectorCase {
    pub prompt: Vec<TokenId>,
    last: Vec<f32>,
    mean: Vec<f32>,
    bf16_error: Errors,
}

#[derive(Deserialize)]
struct Errors {
    last: f64,
    mean: f64,
}

impl VectorCase {
    pub fn expected(&self, pooling: Pooling) -> &[f32] {
        match pooling {
            Pooling::Last => &self.last,
            Pooling::Mean => &self.mean,
        }
    }

    /// How far transformers is off in bf16, by norm, relative.
    pub fn bf16_error(&self, pooling: Pooling) -> f64 {
        match pooling {
            Pooling::Last => self.bf16_error.last,
            Pooling::Mean => self.bf16_error.mean,
        }
    }
}

pub fn golden_vectors(name: &str) -> Vec<VectorCase> {
    let path = golden_path(name).join("embedding.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str::<Vectors>(&text).unwrap().cases
}

pub fn serve_as(pooling: Pooling) -> ServeAs {
    ServeAs {
        task: Task::Embed,
        pooling: Some(pooling),
        normalize: None,
        ..ServeAs::default()
    }
}

/// The run of tokens `start..end` of a prompt that is pooled.
pub fn pooled_run(
    request: u64,
    prompt: &[TokenId],
    (start, end): (usize, usize),
    blocks: &[PageId],
    pooling: Pooling,
) -> Run {
    let mut run = run(request, start, &prompt[start..end], blocks);
    run.pool = (end == prompt.len() || pooling == Pooling::Mean).then_some(pooling);
    run
}

/// The vector of a prompt that is cut at `cuts`, ascending; each step also has the neighbours' runs before and behind its own.
pub fn vector(
    runner: &mut impl Executor,
    prompt: &[TokenId],
    pooling: Pooling,
    cuts: &[usize],
    neighbours: [&[Run]; 2],
) -> Vec<f32> {
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([prompt.len()]);
    let mut sum: Vec<f64> = Vec::new();
    for range in starts.zip(ends) {
        let own = pooled_run(1, prompt, range, &blocks(0..8), pooling);
        let asked = own.pool.is_some();
        let [before, behind] = neighbours;
        let runs = [before, &[own], behind].concat();
        let mut output = runner.execute(&plan(runs)).unwrap();
        let rows = output.pooled.swap_remove(before.len());
        assert_eq!(rows.is_some(), asked);
        let rows = rows.unwrap_or_default();
        sum.resize(rows.len().max(sum.len()), 0.0);
        sum.iter_mut().zip(rows).for_each(|(sum, x)| *sum += x);
    }
    let rows = match pooling {
        Pooling::Last => 1,
        Pooling::Mean => prompt.len(),
    };
    sum.into_iter().map(|sum| (sum / rows as f64) as f32).collect()
}
