//! Random requests, served as a scheduler would serve them, only less orderly.

use std::collections::VecDeque;
use std::sync::Arc;

use plimsoll_core::{
    Executor, PageId, Run, RunInput, SampleSpec, Sampled, SamplingOptions, SamplingParams, StepLimits,
    StepOutput, TokenId,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::{blocks, plan, run};

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: u64,
    pub prompt: Vec<TokenId>,
    pub params: Arc<SamplingParams>,
    pub max_tokens: usize,
    /// A mask that depends on the output so far says what may be sampled.
    pub constrained: bool,
    /// Layers keep a state, which cannot forget a token: where one is replaced, it is computed from the beginning.
    pub has_state: bool,
    pub output: Vec<TokenId>,
    /// Tokens in the cache, or on their way to it.
    pub computed: usize,
    pub blocks: Vec<PageId>,
    /// The step launched last samples for it, and nothing was found wrong with that token.
    fresh: bool,
    /// A token is being sampled: it counts, but is not known yet.
    sampling: bool,
    /// Steps in flight with a run of this request.
    in_flight: usize,
    /// Counts the tokens that were replaced: what follows them in flight was in vain.
    replaced: usize,
}

impl Request {
    /// A prompt of 1 to `longest` tokens, sampled in one of several ways.
    pub fn new(id: u64, rng: &mut StdRng, vocab: usize, longest: usize) -> Self {
        let prompt = (0..rng.random_range(1..longest))
            .map(|_| rng.random_range(0..vocab as u32))
            .collect();
        let options = match rng.random_range(0..4) {
            0 => SamplingOptions {
                temperature: Some(0.0),
                ..Default::default()
            },
            1 => SamplingOptions {
                temperature: Some(0.8),
                top_p: Some(0.9),
                ..Default::default()
            },
            kind => SamplingOptions {
                temperature: Some(if kind == 2 { 0.0 } else { 1.2 }),
                top_k: Some(20),
                repetition_penalty: Some(1.3),
                frequency_penalty: Some(0.5),
                logit_bias: vec![(7, 1.5), (9, -50.0)],
                logprobs: Some(3),
                ..Default::default()
            },
        };
        let params = Arc::new(SamplingParams::new(&options, vocab).unwrap());
        Self {
            constrained: rng.random_bool(0.4),
            ..Self::with_params(id, prompt, params, rng.random_range(1..12))
        }
    }

    pub fn greedy(id: u64, prompt: Vec<TokenId>, max_tokens: usize) -> Self {
        Self::with_params(id, prompt, Arc::new(SamplingParams::greedy()), max_tokens)
    }

    fn with_params(id: u64, prompt: Vec<TokenId>, params: Arc<SamplingParams>, max_tokens: usize) -> Self {
        Self {
            id,
            prompt,
            params,
            max_tokens,
            constrained: false,
            has_state: false,
            output: vec![],
            computed: 0,
            blocks: vec![],
            fresh: false,
            sampling: false,
            in_flight: 0,
            replaced: 0,
        }
    }

    /// The same `count` requests for the same seed.
    pub fn random(count: u64, seed: u64, vocab: usize, longest: usize) -> Vec<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..count)
            .map(|id| Self::new(id, &mut rng, vocab, longest))
            .collect()
    }

    pub fn tokens(&self) -> Vec<TokenId> {
        [self.prompt.as_slice(), &self.output].concat()
    }

    pub fn is_done(&self) -> bool {
        self.output.len() == self.max_tokens
    }

    /// The next `len` tokens that are known but not computed.
    pub fn run(&self, len: usize) -> Run {
        let tokens = self.tokens();
        let end = self.computed + len;
        let mut run = run(self.id, self.computed, &tokens[self.computed..end], &self.blocks);
        run.sample = (end == tokens.len()).then(|| self.sample_spec());
        run
    }

    /// The token that the step before samples.
    fn run_last_sampled(&self) -> Run {
        let mut run = run(self.id, self.computed, &[], &self.blocks);
        run.input = RunInput::LastSampled;
        run.sample = Some(self.sample_spec());
        run
    }

    pub fn sample_spec(&self) -> SampleSpec {
        let history = if self.params.needs_history() {
            self.tokens()
        } else {
            Vec::new()
        };
        SampleSpec {
            params: Arc::clone(&self.params),
            seed: self.id,
            index: self.output.len() + usize::from(self.sampling),
            history,
            prompt_len: self.prompt.len(),
            constrained: self.constrained,
        }
    }

    /// Allows about half of all tokens.
    pub fn fill_mask(&self, mask: &mut [u32]) {
        let seed = self.output.iter().fold(self.id, |seed, &token| {
            seed.wrapping_mul(31).wrapping_add(u64::from(token) + 1)
        });
        StdRng::seed_from_u64(seed).fill(mask);
    }

    /// The next `len` tokens alone in a step, to be sampled from.
    pub fn execute(&self, runner: &mut impl Executor, len: usize) -> StepOutput {
        let plan = plan(vec![self.run(len)]);
        runner.launch(&plan).unwrap();
        if plan.awaits_masks() {
            runner.sample(&mut |masks| self.fill_mask(masks[0])).unwrap();
        }
        runner.finish().unwrap()
    }

    /// What may run next: known tokens that are not computed, or the one being sampled.
    fn ready(&self) -> usize {
        let ends = self.output.len() + usize::from(self.sampling) == self.max_tokens;
        match self.sampling {
            _ if ends => 0,
            true => usize::from(self.fresh && !self.params.needs_history()),
            false => self.prompt.len() + self.output.len() - self.computed,
        }
    }

    /// Begins again. Nothing of it is in flight.
    fn preempt(&mut self) -> Vec<PageId> {
        (self.computed, self.fresh) = (0, false);
        std::mem::take(&mut self.blocks)
    }

    fn push(&mut self, token: TokenId, sampled: TokenId) {
        self.output.push(token);
        if token != sampled {
            self.replaced += 1;
            self.computed = match self.has_state {
                false => self.prompt.len() + self.output.len() - 1,
                true => 0,
            };
            (self.sampling, self.fresh) = (false, false);
        }
    }
}

/// How requests are disturbed.
#[derive(Clone, Copy, Debug)]
pub struct Disturbance {
    pub block_size: usize,
    pub num_blocks: u32,
    pub limits: StepLimits,
    pub seed: u64,
    /// Steps in flight at once.
    pub depth: usize,
}

/// A run in flight.
struct Flight {
    request: usize,
    samples: bool,
    replaced: usize,
}

/// Serves `requests` together: random batches of random chunks over random blocks, with random preemptions. `judge` sees
/// each sample, with the request as it was before, and says what the text goes on with. Returns the number of steps.
pub fn serve(
    runner: &mut impl Executor,
    requests: &mut [Request],
    how: Disturbance,
    judge: &mut dyn FnMut(&Request, &Sampled) -> TokenId,
) -> usize {
    let mut rng = StdRng::seed_from_u64(how.seed);
    let mut free = blocks(0..how.num_blocks);
    free.shuffle(&mut rng);
    let mut flights = VecDeque::new();
    let mut steps = 0;
    while requests.iter().any(|request| !request.is_done()) || !flights.is_empty() {
        if rng.random_bool(0.05) {
            let victim = rng.random_range(0..requests.len());
            if requests[victim].in_flight == 0 {
                free.append(&mut requests[victim].preempt());
                free.shuffle(&mut rng);
            }
        }
        let (runs, flight) = next_step(requests, &mut free, &how, &mut rng);
        if !runs.is_empty() {
            let plan = plan(runs);
            runner.launch(&plan).unwrap();
            flights.push_back(flight);
            steps += 1;
            if plan.awaits_masks() {
                // They depend on what the step before samples.
                while flights.len() > 1
                    && let Some(flight) = flights.pop_front()
                {
                    finish(runner, requests, flight, &mut free, judge);
                }
                let constrained: Vec<_> = plan
                    .constrained()
                    .map(|(_, run)| run.request.0 as usize)
                    .collect();
                let mut fill = |masks: &mut [&mut [u32]]| {
                    for (mask, &index) in masks.iter_mut().zip(&constrained) {
                        requests[index].fill_mask(mask);
                    }
                };
                runner.sample(&mut fill).unwrap();
            }
        }
        if (flights.len() == how.depth || rng.random_bool(0.2))
            && let Some(flight) = flights.pop_front()
        {
            finish(runner, requests, flight, &mut free, judge);
        }
    }
    steps
}

fn next_step(
    requests: &mut [Request],
    free: &mut Vec<PageId>,
    how: &Disturbance,
    rng: &mut StdRng,
) -> (Vec<Run>, Vec<Flight>) {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.shuffle(rng);
    let (mut runs, mut flight) = (Vec::new(), Vec::new());
    let mut room = how.limits.max_num_batched_tokens;
    for index in order {
        let request = &mut requests[index];
        let ready = request.ready().min(room);
        if ready == 0 || runs.len() == how.limits.max_num_seqs || rng.random_bool(0.3) {
            continue;
        }
        // All of it as often as a part.
        let len = match rng.random_bool(0.5) {
            true => ready,
            false => rng.random_range(1..=ready),
        };
        let needed = (request.computed + len).div_ceil(how.block_size);
        let missing = needed.saturating_sub(request.blocks.len());
        if missing > free.len() {
            continue;
        }
        request.blocks.extend(free.drain(..missing));
        let known = request.prompt.len() + request.output.len() - request.computed;
        let last = request.sampling || request.fresh && known == 1 && rng.random_bool(0.5);
        let run = match last {
            true => request.run_last_sampled(),
            false => request.run(len),
        };
        flight.push(Flight {
            request: index,
            samples: run.sample.is_some(),
            replaced: request.replaced,
        });
        request.computed += len;
        room -= len;
        runs.push(run);
    }
    if !runs.is_empty() {
        requests.iter_mut().for_each(|request| request.fresh = false);
        for entry in &flight {
            let request = &mut requests[entry.request];
            request.in_flight += 1;
            (request.fresh, request.sampling) = (entry.samples, entry.samples);
        }
    }
    (runs, flight)
}

fn finish(
    runner: &mut impl Executor,
    requests: &mut [Request],
    flight: Vec<Flight>,
    free: &mut Vec<PageId>,
    judge: &mut dyn FnMut(&Request, &Sampled) -> TokenId,
) {
    let output = runner.finish().unwrap();
    assert_eq!(output.samples.len(), flight.len());
    for (entry, sample) in flight.into_iter().zip(output.samples) {
        let request = &mut requests[entry.request];
        request.in_flight -= 1;
        assert_eq!(sample.is_some(), entry.samples);
        if let Some(sampled) = sample.filter(|_| entry.replaced == request.replaced) {
            assert_eq!(sampled.logprobs.is_some(), request.params.logprobs().is_some());
            let token = judge(request, &sampled);
            // Unless the next one is being sampled already.
            request.sampling = request.in_flight > 0 && request.sampling;
            request.push(token, sampled.token);
        }
        if request.is_done() && request.in_flight == 0 {
            free.append(&mut request.blocks);
        }
    }
}
