use std::{
    collections::{HashMap, HashSet, VecDeque},
    thread,
    time::Duration,
};

use plimsoll_core::{
    CacheGroup, Executor, FillMasks, KvConfig, PageId, Pooling, PromptLogprob, RequestId, Run, RunInput,
    RunState, Sampled, ScoreSpec, StepError, StepLimits, StepOutput, StepPlan, TokenId, mask,
};

use crate::checks::{check_score, check_tables, first_seen};
use crate::images::EncodedImages;
use crate::model::{Context, SimModel};

/// How long simulated steps take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// Of any step.
    pub base: Duration,
    /// Added for each token.
    pub per_token: Duration,
}

/// What a simulated device is made of.
#[derive(Clone, Copy, Debug)]
pub struct SimConfig {
    /// The KV cache.
    pub kv: KvConfig,
    /// Larger steps are refused.
    pub limits: StepLimits,
    /// Decides the text.
    pub model: SimModel,
    /// Zero in tests.
    pub step_time: StepTime,
}

/// Part of a step at which a failure is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `launch` fails, nothing is computed.
    Launch,
    /// `sample` fails, where the step awaits masks: it is forgotten.
    Sample,
    /// `finish` fails, and what the step wrote is garbage.
    Finish,
    /// The answer of one run is not finite, nor is anything that it sees and no finite answer has seen.
    NotFinite,
}

/// A device that stores, in each KV slot of each group, the whole context up to that token; a query reads the slots that its
/// window lets it see. Where layers have states, each state slot holds the whole context of its request too. A wrong block table,
/// slot, start or stale block thus changes the text; and every plan is checked before it runs: a violation is an error that
/// names it.
#[derive(Debug)]
pub struct SimExecutor {
    config: SimConfig,
    slots: Vec<Slot>,
    /// Of each state slot; `None` where it holds garbage.
    states: Vec<Option<Context>>,
    launched: VecDeque<Launched>,
    /// Tokens that the step before sampled.
    last_sampled: HashMap<RequestId, TokenId>,
    faults: HashMap<u64, Fault>,
    synthetic: bool,
    images: EncodedImages,
    spares_readers: bool,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    before: Context,
    after: Context,
    token: TokenId,
    /// Group and plane that wrote it.
    place: (usize, usize),
    /// By a row that was sampled from, or pooled.
    seen: bool,
}

#[derive(Debug)]
struct Launched {
    plan: StepPlan,
    /// Requests whose KV an earlier step left as garbage after this one was planned.
    ruined: HashSet<RequestId>,
    /// Of the constrained runs, once they came.
    masks: Option<Vec<Vec<u32>>>,
}

impl SimExecutor {
    /// Failures made by [`Self::inject`] say this.
    pub const INJECTED: &str = "injected";

    /// A device with an empty cache.
    pub fn new(config: SimConfig) -> Self {
        Self {
            config,
            slots: vec![GARBAGE; config.kv.num_pages * config.kv.block_size.tokens()],
            states: vec![None; config.kv.state_slots],
            launched: VecDeque::new(),
            last_sampled: HashMap::new(),
            faults: HashMap::new(),
            synthetic: false,
            images: EncodedImages::default(),
            spares_readers: false,
        }
    }

    /// Makes step number `step` fail.
    pub fn inject(&mut self, step: u64, fault: Fault) {
        self.faults.insert(step, fault);
    }

    /// While true, plans may refer to KV that was never computed and share blocks at will, as a profile's worst cases do.
    pub fn allow_synthetic(&mut self, allow: bool) {
        self.synthetic = allow;
    }

    /// From now on, steps in which requests generate find their image encoded.
    pub fn spare_readers(&mut self) {
        self.spares_readers = true;
    }

    /// Whether the step launched last does.
    fn awaits_masks(&self) -> bool {
        let awaits = |last: &Launched| last.masks.is_none() && last.plan.awaits_masks();
        self.launched.back().is_some_and(awaits)
    }

    fn check(&self, plan: &StepPlan) -> Result<(), String> {
        let limits = &self.config.limits;
        if plan.runs.len() > limits.max_num_seqs || plan.num_tokens() > limits.max_num_batched_tokens {
            return Err(format!(
                "{} runs of {} tokens exceed {limits:?}",
                plan.runs.len(),
                plan.num_tokens()
            ));
        }
        let mut requests = HashSet::new();
        for run in &plan.runs {
            let id = run.request;
            if !requests.insert(id) {
                return Err(format!("{id} has two runs"));
            }
            if run.input.is_empty() || run.end() > limits.max_model_len {
                return Err(format!(
                    "{id} computes tokens {}..{} of {}",
                    run.start,
                    run.end(),
                    limits.max_model_len
                ));
            }
            if let Some(score) = &run.score {
                check_score(run, score).map_err(|broken| format!("{id} {broken}"))?;
            }
            check_tables(&self.config.kv, run, |group| self.first_block(group, run))
                .map_err(|broken| format!("{id} {broken}"))?;
            let slots = self.config.kv.state_slots;
            let has_slot = run.state.is_some_and(|state| {
                let before = state.before.is_some() == (run.start > 0);
                before
                    && state
                        .before
                        .iter()
                        .chain([&state.after])
                        .all(|slot| slot.index() < slots)
            });
            if has_slot != (self.config.kv.groups.state_layers() > 0) {
                return Err(format!("{id} has its state in {:?} of {slots}", run.state));
            }
            let vocab_size = self.config.model.vocab_size();
            if matches!(&run.input, RunInput::Known(tokens) if tokens.iter().any(|&t| t as usize >= vocab_size))
            {
                return Err(format!("{id} holds a token outside the vocabulary"));
            }
        }
        if self.synthetic {
            Ok(())
        } else {
            self.check_sharing(plan)
        }
    }

    /// A page that a run writes is in no other table, of this step or of one in flight, and twice in none; nor does anyone else
    /// read or write the state slot that it writes.
    fn check_sharing(&self, plan: &StepPlan) -> Result<(), String> {
        let block_size = self.config.kv.block_size;
        let (mut writers, mut owners) = (HashMap::new(), HashMap::new());
        let in_flight = self.launched.iter().flat_map(|launched| &launched.plan.runs);
        for run in in_flight.clone().chain(&plan.runs) {
            if let Some(RunState { after: slot, .. }) = run.state
                && *owners.entry(slot).or_insert(run.request) != run.request
            {
                return Err(format!("two requests write state slot {}", slot.0));
            }
            for page in self.pages(run, |_| run.start / block_size.tokens()) {
                if *writers.entry(page).or_insert(run.request) != run.request {
                    return Err(format!("two requests write page {}", page.0));
                }
            }
        }
        for run in in_flight.chain(&plan.runs) {
            if let Some(slot) = run.state.and_then(|state| state.before)
                && owners.get(&slot).is_some_and(|&owner| owner != run.request)
            {
                return Err(format!(
                    "{} begins with state slot {}, which is written meanwhile",
                    run.request, slot.0
                ));
            }
        }
        for run in &plan.runs {
            let mut seen = HashSet::new();
            for page in self.pages(run, |group| self.first_block(group, run)) {
                if writers.get(&page).is_some_and(|&writer| writer != run.request) || !seen.insert(page) {
                    return Err(format!(
                        "{} uses page {}, which is written meanwhile",
                        run.request, page.0
                    ));
                }
            }
        }
        Ok(())
    }

    /// The pages of all groups, each from block `first` on, as far as the run writes.
    fn pages<'a>(
        &'a self,
        run: &'a Run,
        first: impl Fn(&CacheGroup) -> usize,
    ) -> impl Iterator<Item = PageId> {
        let end = self.config.kv.block_size.blocks_for(run.end());
        let tables = run.tables.iter().zip(&self.config.kv.groups);
        tables.flat_map(move |(table, group)| {
            let blocks = first(group)..end;
            blocks.flat_map(move |block| table.block(group, block).iter().copied())
        })
    }

    /// The first block that the run reads.
    fn first_block(&self, group: &CacheGroup, run: &Run) -> usize {
        first_seen(group.kind, run.start) / self.config.kv.block_size.tokens()
    }

    /// Where each plane of a group keeps a token.
    fn slots<'a>(
        &self,
        run: &'a Run,
        group: usize,
        position: usize,
    ) -> impl Iterator<Item = usize> + use<'a> {
        let block_size = self.config.kv.block_size.tokens();
        let described = &self.config.kv.groups.as_slice()[group];
        let pages = run.tables[group].block(described, position / block_size);
        pages
            .iter()
            .map(move |page| page.index() * block_size + position % block_size)
    }

    fn write(&mut self, run: &Run, position: usize, slot: Slot) {
        for group in 0..run.tables.len() {
            for (plane, at) in self.slots(run, group, position).enumerate() {
                self.slots[at] = Slot {
                    place: (group, plane),
                    ..slot
                };
            }
        }
    }

    /// What a group holds of a token, which is to be the same in all its planes.
    fn read(&self, run: &Run, group: usize, position: usize) -> Result<Slot, String> {
        let mut all = self
            .slots(run, group, position)
            .map(|at| self.slots[at])
            .enumerate();
        let (_, first) = all.next().ok_or("a block without pages")?;
        let same = |(plane, slot): (usize, Slot)| slot.place == (group, plane) && slot.after == first.after;
        match first.place == (group, 0) && all.all(same) {
            true => Ok(first),
            false => Err(format!(
                "the KV of {} at {position} belongs to another group",
                run.request
            )),
        }
    }

    /// The log-probabilities that the run asks for go to `output`, and its rows; or only that they are not finite.
    fn execute_run(
        &mut self,
        run: &Run,
        overflows: bool,
        mask: Option<&[u32]>,
        output: &mut StepOutput,
    ) -> Result<Option<Sampled>, String> {
        let mut context = self.context_before(run)?;
        if overflows {
            self.overflow(run);
            context = Context::NOT_FINITE;
        }
        let last;
        let tokens = match &run.input {
            RunInput::Known(tokens) => tokens.as_slice(),
            RunInput::LastSampled => {
                let sampled = self.last_sampled.get(&run.request);
                last = [*sampled.ok_or_else(|| format!("no token of {} was sampled last", run.request))?];
                &last
            }
        };
        let images = run.images.as_deref().unwrap_or_default();
        let (mut scored, mut sum) = (Vec::new(), [0.0; SimModel::WIDTH]);
        for (row, &token) in tokens.iter().enumerate() {
            let after = context.then_at(run.start + row, token, images);
            let slot = Slot {
                before: context,
                after,
                token,
                place: (0, 0),
                seen: false,
            };
            self.write(run, run.start + row, slot);
            context = after;
            if let Some(score) = run.score.as_ref().filter(|score| score.rows().contains(&row)) {
                let target = score.targets[row - score.first];
                scored.push(self.config.model.score(context, target, score.top));
            }
            if run.pool == Some(Pooling::Mean) || row + 1 == tokens.len() {
                let row = SimModel::row(context);
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
        }
        if let Some(state) = run.state {
            self.states[state.after.index()] = Some(context);
        }
        if context == Context::NOT_FINITE && reads(run) {
            output.scores.extend(run.score.as_ref().map(|_| Vec::new()));
            output.pooled.push(None);
            output.not_finite.push(output.samples.len());
            return Ok(None);
        }
        if run.sample.is_some() || run.pool.is_some() {
            self.see(run);
        }
        output.scores.extend(run.score.as_ref().map(|_| scored));
        output.pooled.push(run.pool.map(|_| sum.to_vec()));
        let Some(spec) = &run.sample else { return Ok(None) };
        let history: &[TokenId] = &spec.history;
        let right = if spec.params.needs_history() {
            self.synthetic || (history.len() == run.end() && Context::with_images(history, images) == context)
        } else {
            history.is_empty()
        };
        if !right || (!self.synthetic && spec.prompt_len + spec.index != run.end()) {
            return Err(format!(
                "{} samples output {} with a wrong history",
                run.request, spec.index
            ));
        }
        let model = &self.config.model;
        let token_at = |position| self.read(run, 0, position).map_or(0, |slot| slot.token);
        Ok(Some(model.say(context, spec, mask, token_at)))
    }

    /// The context up to the run, after making sure that in each group every slot that the run sees continues the one before
    /// it, and that all groups agree.
    fn context_before(&self, run: &Run) -> Result<Context, String> {
        if self.synthetic {
            let last = run.start.checked_sub(1);
            let slot = last.and_then(|last| self.slots(run, 0, last).next());
            return Ok(slot.map_or(Context::EMPTY, |at| self.slots[at].after));
        }
        let mut context = (run.start == 0).then_some(Context::EMPTY);
        for (index, group) in self.config.kv.groups.iter().enumerate() {
            let first = first_seen(group.kind, run.start);
            // What lies behind the window is known by what follows it alone.
            let mut last = (first == 0).then_some(Context::EMPTY);
            for position in first..run.start {
                let Slot { before, after, .. } = self.read(run, index, position)?;
                if after == Context::NOT_FINITE {
                    return Ok(after);
                }
                if last.is_some_and(|last| last != before) {
                    return Err(format!(
                        "the KV of {} at {position} belongs to another context",
                        run.request
                    ));
                }
                last = Some(after);
            }
            let seen = last.filter(|_| first < run.start);
            if context.is_some() && seen.is_some() && context != seen {
                return Err(format!("the groups of {} hold different contexts", run.request));
            }
            context = context.or(seen);
        }
        let context = context.ok_or_else(|| format!("{} sees nothing of its context", run.request))?;
        match run.state.and_then(|state| state.before) {
            Some(slot) if self.states[slot.index()] == Some(Context::NOT_FINITE) => Ok(Context::NOT_FINITE),
            Some(slot) if self.states[slot.index()] != Some(context) => Err(format!(
                "the state of {} in slot {} belongs to another context",
                run.request, slot.0
            )),
            _ => Ok(context),
        }
    }

    /// A finite row tells of all that the run's last token sees.
    fn see(&mut self, run: &Run) {
        let groups = self.config.kv.groups;
        for (index, group) in groups.iter().enumerate() {
            for position in first_seen(group.kind, run.end() - 1)..run.end() {
                for at in self.slots(run, index, position) {
                    self.slots[at].seen = true;
                }
            }
        }
    }

    /// What no finite row has seen of the context of a run, it finds not to be finite.
    fn overflow(&mut self, run: &Run) {
        let groups = self.config.kv.groups;
        for (index, group) in groups.iter().enumerate() {
            for position in (first_seen(group.kind, run.start)..run.start).rev() {
                let slots: Vec<_> = self.slots(run, index, position).collect();
                if slots.iter().any(|&at| self.slots[at].seen) {
                    break;
                }
                (slots.into_iter()).for_each(|at| self.slots[at].after = Context::NOT_FINITE);
            }
        }
    }

    /// A failed step leaves garbage wherever it was to write.
    fn ruin(&mut self, run: &Run) {
        for position in run.start..run.end() {
            self.write(run, position, GARBAGE);
        }
        if let Some(state) = run.state {
            self.states[state.after.index()] = None;
        }
        for later in &mut self.launched {
            later.ruined.insert(run.request);
        }
    }
}

/// Whether a step is to say anything about a run.
fn reads(run: &Run) -> bool {
    run.sample.is_some() || run.score.is_some() || run.pool.is_some()
}

/// What a ruined run says about the prompt.
pub(crate) fn garbage(score: &ScoreSpec) -> Vec<PromptLogprob> {
    let nothing = |&token| PromptLogprob {
        token,
        logprob: f32::NAN,
        rank: 0,
        top: Vec::new(),
    };
    score.targets.iter().map(nothing).collect()
}

const GARBAGE: Slot = Slot {
    before: Context::GARBAGE,
    after: Context::GARBAGE,
    token: 0,
    place: (0, 0),
    seen: false,
};

impl Executor for SimExecutor {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        if self.faults.get(&plan.step) == Some(&Fault::Launch) {
            return Err(StepError::Failed(Self::INJECTED.into()));
        }
        let checked = self
            .check(plan)
            .and_then(|()| self.images.check(plan, self.spares_readers));
        checked.map_err(StepError::Failed)?;
        if self.awaits_masks() {
            return Err(StepError::Failed("the step before still awaits its masks".into()));
        }
        self.launched.push_back(Launched {
            plan: plan.clone(),
            ruined: HashSet::new(),
            masks: None,
        });
        Ok(())
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        if !self.awaits_masks() {
            return Err(StepError::Failed("no step awaits masks".into()));
        }
        let vocab_size = self.config.model.vocab_size();
        let Some(last) = self.launched.back_mut() else {
            return Ok(());
        };
        if self.faults.get(&last.plan.step) == Some(&Fault::Sample) {
            self.launched.pop_back();
            return Err(StepError::Failed(Self::INJECTED.into()));
        }
        // What is not written shows.
        let mut masks = vec![vec![0; mask::words(vocab_size)]; last.plan.constrained().count()];
        fill(&mut masks.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        let allows = |mask: &Vec<u32>| (0..vocab_size as TokenId).any(|token| mask::allows(mask, token));
        if !masks.iter().all(allows) {
            return Err(StepError::Failed("a mask allows nothing".into()));
        }
        last.masks = Some(masks);
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let Some(Launched { plan, ruined, masks }) = self.launched.pop_front() else {
            return Err(StepError::Failed("no step is in flight".into()));
        };
        let StepTime { base, per_token } = self.config.step_time;
        let time = base + per_token * u32::try_from(plan.num_tokens()).unwrap_or(u32::MAX);
        if !time.is_zero() {
            thread::sleep(time);
        }
        let fault = self.faults.get(&plan.step).copied();
        let failed = fault == Some(Fault::Finish);
        let mut output = StepOutput::default();
        let mut last_sampled = HashMap::new();
        if masks.is_none() && plan.awaits_masks() {
            return Err(StepError::Failed("a step is finished without its masks".into()));
        }
        let overflows = plan.runs.iter().position(reads);
        let overflows = overflows.filter(|_| fault == Some(Fault::NotFinite));
        let mut masks = masks.iter().flatten();
        for (index, run) in plan.runs.iter().enumerate() {
            let constrained = run.sample.as_ref().is_some_and(|spec| spec.constrained);
            let mask = if constrained { masks.next() } else { None };
            let sampled = if failed || ruined.contains(&run.request) {
                self.ruin(run);
                output.scores.extend(run.score.as_ref().map(garbage));
                let vector = run.pool.map(|_| vec![f64::NAN; SimModel::WIDTH]);
                output.pooled.push(vector);
                run.sample.as_ref().map(|_| Sampled {
                    token: 0,
                    logprobs: None,
                })
            } else {
                let overflows = overflows == Some(index);
                self.execute_run(run, overflows, mask.map(Vec::as_slice), &mut output)
                    .map_err(StepError::Failed)?
            };
            // The step behind this one goes on with something in any case.
            let token = sampled.as_ref().map_or(0, |sampled| sampled.token);
            last_sampled.extend(run.sample.as_ref().map(|_| (run.request, token)));
            output.samples.push(sampled);
        }
        self.last_sampled = last_sampled;
        if failed {
            Err(StepError::Failed(Self::INJECTED.into()))
        } else {
            Ok(output)
        }
    }
}
