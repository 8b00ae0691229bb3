use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_core::{
    Component, EncodeCost, Executor, FillMasks, Image, Oom, Pooling, PromptLogprob, RequestId, Run,
    SampleSpec, Sampled, StateConfig, StepError, StepLimits, StepOutput, StepPlan, TokenId,
};
use plimsoll_device::{Arena, Budget, Slab};
use plimsoll_kernels::{Exchange, SampleError, ScoreRow, apply_mask, sample, score, sum_rows};

use crate::Model;
use crate::batch::{Batch, Bounds, StepPages};
use crate::decoder::{Decoder, LOGIT_ROWS, logit_elements};
use crate::encoder::EncoderState;
use crate::images;
use crate::state::{KvCache, Staging, StateCache, mask_words};

/// One engine state: everything that serves a model besides its weights. Dropped whole.
#[derive(Debug)]
pub struct Runner {
    model: Arc<Model>,
    bounds: Bounds,
    kv: KvCache,
    states: StateCache,
    encoder: Option<EncoderState>,
    arena: Arena,
    staging: Staging,
    canary: Option<Slab>,
    budget: Budget,
    /// What the step before sampled.
    last: HashMap<RequestId, TokenId>,
    /// Launched, and computed once its masks are there.
    awaiting: Option<StepPlan>,
    /// Launched and done: on a CPU, launching computes.
    done: VecDeque<StepOutput>,
}

impl Model {
    /// Everything that serves: KV cache, step arena, staging, canary, as one value that is dropped whole. `touches` is called
    /// again and again while the KV cache is made.
    ///
    /// # Errors
    /// [`Oom`], with everything given back.
    pub fn build_state(
        self: &Arc<Self>,
        config: &StateConfig,
        limits: &StepLimits,
        budget: &Budget,
        touches: &mut dyn FnMut(),
    ) -> Result<Runner, Oom> {
        Runner::new(Arc::clone(self), config, limits, budget, touches)
    }
}

impl Runner {
    pub(crate) fn new(
        model: Arc<Model>,
        config: &StateConfig,
        limits: &StepLimits,
        budget: &Budget,
        touches: &mut dyn FnMut(),
    ) -> Result<Self, Oom> {
        let spec = model.spec();
        // Before all else: what the rest is measured with holds it.
        let encoder = match &model.encoder {
            None => None,
            Some(encoder) => {
                let state = EncoderState::new(encoder, budget)?;
                model.slowest_encode.add(state.largest());
                Some(state)
            }
        };
        let kv = KvCache::new(budget, spec, model.kv_element, config.kv, touches)?;
        let states = StateCache::new(budget, spec, kv.config.state_slots, touches)?;
        let canary = usize::try_from(config.canary_bytes)
            .map_err(|_| budget.oom(Component::Canary, config.canary_bytes))
            .and_then(|bytes| {
                (bytes > 0)
                    .then(|| Slab::new(budget, Component::Canary, bytes))
                    .transpose()
            })?;
        Ok(Self {
            bounds: Bounds {
                limits: *limits,
                kv: kv.config,
                vocab_size: spec.vocab_size,
                pooling: model.config().pooling(),
                images: model.config().image_input(),
            },
            encoder,
            kv,
            states,
            arena: Arena::new(budget, config.scratch)?,
            staging: Staging::new(budget, limits, spec.num_logits())?,
            canary,
            budget: budget.clone(),
            last: HashMap::new(),
            awaiting: None,
            done: VecDeque::new(),
            model,
        })
    }

    /// Gives the canary's memory back: the last thing before serving.
    pub fn release_canary(&mut self) {
        self.canary = None;
        // All tokens of the proof are alike.
        if let Some(loads) = self.model.expert_loads() {
            loads.clear();
        }
    }

    /// The model that runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Most bytes of the step arena used at once since this was last taken: with a fixed arena of this size the same steps fit.
    pub fn take_arena_high_water(&mut self) -> u64 {
        self.arena.take_high_water() as u64
    }

    /// Runs `plan` and returns the logits of the given rows of its batch (tokens, run after run), ascending, as
    /// `[rows, vocab_size]`, in place of sampling. For oracles.
    ///
    /// # Errors
    /// As [`Executor::launch`].
    pub fn logits(&mut self, plan: &StepPlan, rows: &[usize]) -> Result<Vec<f32>, StepError> {
        let tokens = plan.num_tokens();
        if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&row| row >= tokens) {
            return Err(StepError::Failed(format!(
                "rows {rows:?} of a batch of {tokens} are not ascending rows of it"
            )));
        }
        self.bounds.check(plan, &self.last).map_err(StepError::Failed)?;
        let mut out = Vec::with_capacity(rows.len() * self.bounds.vocab_size);
        if let Some(exchange) = &self.model.exchange {
            lock(exchange).begin_step();
        }
        self.or_abandon(|runner| {
            runner.run(plan, rows, |_, logits, _, _| {
                out.extend_from_slice(logits);
                Ok(())
            })
        })?;
        Ok(out)
    }

    /// Rows of an image, `[rows, out_size × (1 + features)]`: each its embedding, then what it adds to the output of the decoder's
    /// first layers. For oracles.
    ///
    /// # Errors
    /// [`StepError`] where the model takes no images, or the image is larger than limits allow.
    pub fn encode(&mut self, image: &Image) -> Result<Vec<f32>, StepError> {
        let (Some(state), Some(encoder)) = (&mut self.encoder, &self.model.encoder) else {
            return Err(StepError::Failed("the model is served without images".to_owned()));
        };
        let encoded = state.encode(encoder, image)?;
        let rows = encoder.spec.input.rows(image.grid).unwrap_or(0);
        let parts = 1 + encoder.spec.features.len();
        let all = (0..rows).flat_map(|row| (0..parts).map(move |part| (row, part)));
        let mut out = Vec::with_capacity(rows * encoder.spec.row_size());
        all.for_each(|(row, part)| out.extend_from_slice(state.embeddings.row(&encoded, row, part)));
        Ok(out)
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        self.bounds.check(plan, &self.last).map_err(StepError::Failed)?;
        match self.bounds.pooling {
            Some(_) => self.pool(plan),
            None => self.read_logits(plan),
        }
    }

    /// The other ranks learn if this one cannot go on with its step, whatever the reason: they do not wait for it.
    fn or_abandon<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        let mut guard = Abandon(self.model.exchange.clone());
        let done = work(self);
        // Nobody waits for it where it only could not go on without another: all know of that one.
        if let Ok(_) | Err(StepError::OtherRank(_) | StepError::RankLost(_)) = done {
            guard.0 = None;
        }
        done
    }

    /// Runs a checked plan and gives the rows out that its runs ask for.
    fn pool(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        let width = self.model.spec().hidden_size;
        let count = |run: &Run| match run.pool {
            None => 0,
            Some(Pooling::Last) => 1,
            Some(Pooling::Mean) => run.input.len(),
        };
        let mut end = 0;
        let rows = plan.runs.iter().flat_map(|run| {
            end += run.input.len();
            end.saturating_sub(count(run))..end
        });
        let exchange = self.model.exchange.clone();
        let mut exchange = exchange.as_deref().map(lock);
        let Forward { mut normed, .. } =
            self.forward(plan, &rows.collect::<Vec<_>>(), exchange.as_deref_mut())?;
        let mut not_finite = Vec::new();
        let pooled = plan.runs.iter().enumerate().map(|(index, run)| {
            let own;
            (own, normed) = normed.split_at(count(run) * width);
            run.pool?;
            let mut sum = vec![0.0; width];
            sum_rows(own, &mut sum);
            let is_finite = sum.iter().all(|x| x.is_finite());
            not_finite.extend((!is_finite).then_some(index));
            is_finite.then_some(sum)
        });
        Ok(StepOutput {
            pooled: pooled.collect(),
            samples: vec![None; plan.runs.len()],
            scores: Vec::new(),
            not_finite,
        })
    }

    /// Runs a checked plan, samples from the rows that ask for it and scores others.
    fn read_logits(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        let read = ReadRow::all(plan);
        let rows: Vec<usize> = read.iter().map(|read| read.row).collect();
        let (vocab, words) = (self.bounds.vocab_size, mask_words(self.bounds.vocab_size));
        let mut samples: Vec<Option<Sampled>> = vec![None; plan.runs.len()];
        let mut scores: Vec<Vec<PromptLogprob>> = vec![Vec::new(); plan.runs.len()];
        let mut not_finite = BTreeSet::new();
        self.run(plan, &rows, |first, mut logits, masks, arena| {
            let read = &read[first..first + logits.len() / vocab];
            for alike in read.chunk_by(ReadRow::is_alike) {
                let (of, rest) = std::mem::take(&mut logits).split_at_mut(alike.len() * vocab);
                logits = rest;
                let specs: Vec<_> = alike.iter().filter_map(ReadRow::sampled).collect();
                let scored: Vec<_> = alike.iter().filter_map(ReadRow::scored).collect();
                if !specs.is_empty() {
                    for (logits, read) in of.chunks_mut(vocab).zip(alike) {
                        if let Some(mask) = read.mask {
                            apply_mask(logits, &masks[mask * words..][..words]);
                        }
                    }
                    for (read, sampled) in alike.iter().zip(sample(of, &specs, arena)?) {
                        match sampled {
                            Ok(sampled) => samples[read.run] = Some(sampled),
                            Err(SampleError::NotFinite) => drop(not_finite.insert(read.run)),
                        }
                    }
                } else {
                    for (read, scored) in alike.iter().zip(score(of, &scored)) {
                        match scored {
                            Ok(scored) => scores[read.run].push(scored),
                            Err(SampleError::NotFinite) => drop(not_finite.insert(read.run)),
                        }
                    }
                }
            }
            Ok(())
        })?;
        for &index in &not_finite {
            samples[index] = None;
            scores[index].clear();
        }
        // The step behind this one may be planned before anybody knows that a request failed: it goes on with any token.
        let sampled = plan.runs.iter().zip(&samples);
        self.last = sampled
            .filter(|(run, _)| run.sample.is_some())
            .map(|(run, sample)| (run.request, sample.as_ref().map_or(0, |sampled| sampled.token)))
            .collect();
        let scored = plan.runs.iter().zip(scores);
        let scores = scored
            .filter_map(|(run, scores)| run.score.as_ref().map(|_| scores))
            .collect();
        Ok(StepOutput {
            samples,
            scores,
            pooled: Vec::new(),
            not_finite: not_finite.into_iter().collect(),
        })
    }

    /// Runs a checked plan through the decoder and hands the logits of the given rows, ascending, to `consume`, chunk after chunk,
    /// with the index of the chunk's first, and the masks of the step.
    fn run(
        &mut self,
        plan: &StepPlan,
        rows: &[usize],
        mut consume: impl FnMut(usize, &mut [f32], &[u32], &Arena) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let model = Arc::clone(&self.model);
        let spec = model.spec();
        let (width, vocab, vocab_rows) = (spec.hidden_size, spec.vocab_size, spec.vocab_rows());
        let exchange = self.model.exchange.clone();
        let mut exchange = exchange.as_deref().map(lock);
        let Forward {
            normed,
            decoder,
            arena,
            masks,
        } = self.forward(plan, rows, exchange.as_deref_mut())?;
        let no_head = || StepError::Failed("a model that is served for embeddings has no logits".to_owned());
        let head = decoder.head().ok_or_else(no_head)?;
        // What no memory could hold, the arena refuses.
        let elements = logit_elements(spec, normed.len() / width).unwrap_or([usize::MAX; 2]);
        let [logits, part] = elements.map(|elements| arena.alloc::<f32>(elements));
        let (logits, part) = (logits?, part?);
        for (chunk, normed) in normed.chunks(LOGIT_ROWS * width).enumerate() {
            let rows = normed.len() / width;
            let logits = &mut logits[..rows * vocab];
            let of_rank = part.len().min(rows * vocab_rows);
            let part = &mut part[..of_rank];
            head.forward(normed, part, logits, arena, exchange.as_deref_mut())?;
            consume(chunk * LOGIT_ROWS, logits, masks, arena)?;
        }
        Ok(())
    }

    /// Runs a checked plan through the decoder: the given rows of its batch, ascending, behind the last norm.
    fn forward(
        &mut self,
        plan: &StepPlan,
        rows: &[usize],
        exchange: Option<&mut Exchange>,
    ) -> Result<Forward<'_>, StepError> {
        self.arena.reset();
        let Self {
            arena,
            kv,
            states,
            staging,
            bounds,
            encoder,
            ..
        } = self;
        let (arena, decoder): (&Arena, _) = (arena, &self.model.decoder);
        let (tokens, masks) = staging.parts_mut(plan.num_tokens());
        let pages = StepPages::new(plan, bounds.kv);
        let mut batch = Batch::pack(plan, &self.last, &pages, tokens);
        if let (Some(state), Some(encoder)) = (encoder, &self.model.encoder) {
            images::prepare(state, encoder, plan, decoder.has_axes(), &mut batch)?;
        }
        let normed = match plan.is_empty() {
            true => &[],
            false => {
                let max_model_len = bounds.limits.max_model_len;
                decoder.forward(&batch, rows, (kv, states), max_model_len, arena, exchange)?
            }
        };
        Ok(Forward {
            normed,
            decoder,
            arena,
            masks,
        })
    }
}

/// Abandons the step when it is dropped.
struct Abandon(Option<Arc<Mutex<Exchange>>>);

impl Drop for Abandon {
    fn drop(&mut self) {
        if let Some(exchange) = &self.0 {
            lock(exchange).abandon();
        }
    }
}

/// A step that panicked has left it whole.
fn lock(exchange: &Mutex<Exchange>) -> MutexGuard<'_, Exchange> {
    exchange.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A step behind the last norm.
struct Forward<'a> {
    /// `[rows, hidden_size]`.
    normed: &'a [f32],
    decoder: &'a Decoder,
    arena: &'a Arena,
    /// Of the step.
    masks: &'a [u32],
}

/// A row of a step whose logits are read.
struct ReadRow<'a> {
    /// Index of its run.
    run: usize,
    row: usize,
    why: Why<'a>,
    /// Which of the step's masks it has.
    mask: Option<usize>,
}

enum Why<'a> {
    Sample(&'a SampleSpec),
    Score(ScoreRow),
}

impl<'a> ReadRow<'a> {
    /// All of a checked plan, ascending.
    fn all(plan: &'a StepPlan) -> Vec<Self> {
        let (mut first_row, mut masks, mut all) = (0, 0.., Vec::new());
        for (index, run) in plan.runs.iter().enumerate() {
            let read = |row, why, mask| Self {
                run: index,
                row: first_row + row,
                why,
                mask,
            };
            if let Some(score) = &run.score {
                let top = score.top;
                let targets = score.rows().zip(&score.targets);
                all.extend(
                    targets.map(|(row, &target)| read(row, Why::Score(ScoreRow { target, top }), None)),
                );
            }
            let last = run.input.len() - 1;
            all.extend(run.sample.as_ref().map(|spec| {
                let mask = if spec.constrained { masks.next() } else { None };
                read(last, Why::Sample(spec), mask)
            }));
            first_row += run.input.len();
        }
        all
    }

    fn is_alike(&self, other: &Self) -> bool {
        self.sampled().is_some() == other.sampled().is_some()
    }

    fn sampled(&self) -> Option<&'a SampleSpec> {
        match self.why {
            Why::Sample(spec) => Some(spec),
            Why::Score(_) => None,
        }
    }

    fn scored(&self) -> Option<ScoreRow> {
        match self.why {
            Why::Sample(_) => None,
            Why::Score(row) => Some(row),
        }
    }
}

impl Executor for Runner {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        if let Some(exchange) = &self.model.exchange {
            lock(exchange).begin_step();
        }
        self.or_abandon(|runner| {
            runner.budget.begin_step()?;
            if runner.awaiting.is_some() {
                return Err(StepError::Failed("the previous step needs its masks".to_owned()));
            }
            if plan.awaits_masks() {
                runner.awaiting = Some(plan.clone());
                return Ok(());
            }
            let output = runner.step(plan)?;
            runner.done.push_back(output);
            Ok(())
        })
    }

    /// On a CPU there is nothing to be done in the meantime: all of the step is computed here.
    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        self.or_abandon(|runner| {
            let plan = runner.awaiting.take();
            let plan = plan.ok_or_else(|| StepError::Failed("no step needs masks".to_owned()))?;
            let words = mask_words(runner.bounds.vocab_size);
            let masks = runner.staging.masks.as_mut_slice().chunks_exact_mut(words);
            let mut masks: Vec<_> = masks.take(plan.constrained().count()).collect();
            fill(&mut masks);
            let output = runner.step(&plan)?;
            runner.done.push_back(output);
            Ok(())
        })
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        self.done
            .pop_front()
            .ok_or_else(|| StepError::Failed("no step was launched".to_owned()))
    }

    fn encode_cost(&self) -> Option<EncodeCost> {
        let state = self.encoder.as_ref()?;
        self.model.encoder.as_ref().map(|encoder| state.cost(encoder))
    }
}
