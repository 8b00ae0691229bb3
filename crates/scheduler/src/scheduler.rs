mod audit;
mod images;
mod planning;
mod room;

use std::collections::{BTreeMap, HashMap};

use plimsoll_core::{
    CacheEvent, Constraints, Event, FinishReason, KvConfig, PromptEvent, PromptLogprob, Request, RequestId,
    Run, Sampled, StepCosts, StepError, StepLimits, StepOutput, StepPlan, TokenEvent, TokenId,
};
use plimsoll_kv::{BlockTable, KnownPrefix, KvManager};

use crate::{
    Population, PromptBudget, SchedulerStats,
    defect::defect,
    queue::{Queue, Rank},
    scheduler::images::KnownImages,
    sequence::{Arrival, Running, Sequence},
};

/// Steps that may be planned and not yet applied: one on the device, one behind it.
pub const MAX_IN_FLIGHT: usize = 2;

/// Configuration of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The largest step.
    pub limits: StepLimits,
    /// The KV cache.
    pub kv: KvConfig,
    /// [`plimsoll_core::Executor::state_chunk`].
    pub state_chunk: usize,
    /// Share blocks between requests that begin with the same tokens.
    pub enable_prefix_caching: bool,
    /// Later requests that may be admitted before a waiting one, by priority or tenant.
    pub patience: u64,
}

/// A constrained request and the token it gets next.
#[derive(Debug)]
pub struct Follow<'a> {
    sequence: &'a mut Sequence,
    token: TokenId,
}

impl Follow<'_> {
    /// Follows the request's constraints.
    pub fn token(self) {
        self.sequence.foresee(self.token);
    }
}

/// Where a request is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Waiting(Arrival),
    Running(Rank),
}

/// What a step says about a run.
#[derive(Debug)]
struct Answer {
    sampled: Option<Sampled>,
    logprobs: Vec<PromptLogprob>,
    pooled: Option<Vec<f64>>,
}

/// Blocks of an ended request that steps in flight still use.
#[derive(Debug)]
struct Leaving {
    table: BlockTable,
    in_flight: usize,
}

/// Decides what each step computes and owns the KV bookkeeping. A request is in exactly one of the maps below, and only
/// those that run have a block table.
///
/// The caller repeats [`plan`](Self::plan), execute, [`apply`](Self::apply) (or [`fail`](Self::fail)). It may plan one
/// step while another is in flight, up to [`MAX_IN_FLIGHT`], and applies them in order.
#[derive(Debug)]
pub struct Scheduler {
    limits: StepLimits,
    kv: KvManager,
    waiting: Queue,
    running: BTreeMap<Rank, Running>,
    leaving: HashMap<RequestId, Leaving>,
    /// All requests that wait or run.
    places: HashMap<RequestId, Place>,
    next_arrival: u64,
    /// Steps planned and not yet applied or failed.
    in_flight: Vec<u64>,
    /// The request that waits for pages at the head of the queue, and what is cached of its prompt.
    blocked: Option<(Arrival, KnownPrefix)>,
    /// A request was preempted and no blocks came back since: a request admitted now would soon be preempted too.
    short_of_blocks: bool,
    prompt_budget: Option<PromptBudget>,
    population: Population,
    images: KnownImages,
    counters: SchedulerStats,
}

impl Scheduler {
    /// Nothing waits, nothing runs.
    ///
    /// # Panics
    /// Where the limits allow no token or no run: no request would ever end.
    pub fn new(config: SchedulerConfig) -> Self {
        let StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            ..
        } = config.limits;
        assert!(
            max_num_batched_tokens > 0 && max_num_seqs > 0,
            "{:?} allow no step",
            config.limits
        );
        assert!(
            config.state_chunk == 1 || max_num_batched_tokens + 1 >= max_num_seqs + config.state_chunk,
            "{:?} leave no room for a chunk of {} tokens beside requests that generate",
            config.limits,
            config.state_chunk
        );
        Self {
            limits: config.limits,
            kv: KvManager::new(config.kv, max_num_batched_tokens, config.enable_prefix_caching)
                .with_state_chunk(config.state_chunk),
            waiting: Queue::new(config.patience),
            running: BTreeMap::new(),
            leaving: HashMap::new(),
            places: HashMap::new(),
            next_arrival: 0,
            in_flight: Vec::with_capacity(MAX_IN_FLIGHT),
            blocked: None,
            short_of_blocks: false,
            prompt_budget: None,
            population: Population::default(),
            images: KnownImages::default(),
            counters: SchedulerStats::default(),
        }
    }

    /// From now on, `budget` limits the prompt tokens of steps in which requests generate. Without one, prompts fill each step.
    pub fn limit_prompts(&mut self, budget: Option<PromptBudget>) {
        self.prompt_budget = budget.map(|budget| budget.in_chunks_of(self.kv.state_chunk()));
    }

    /// How long steps take, if [`limit_prompts`](Self::limit_prompts) was told.
    pub fn step_costs(&self) -> Option<&StepCosts> {
        self.prompt_budget.as_ref().map(PromptBudget::costs)
    }

    /// True if the KV cache can hold all of `request`. After a [`reset`](Self::reset) it may be smaller than when the request was
    /// validated.
    pub fn fits(&self, request: &Request) -> bool {
        request.longest() <= self.limits.max_model_len && self.kv.fits(request.longest())
    }

    /// Tokens of the longest request that the KV cache holds alone; `usize::MAX` where any fits.
    pub fn longest_request(&self) -> usize {
        self.kv.longest_request()
    }

    /// Queues `request`.
    ///
    /// # Panics
    /// Where its id is in use, or it does not fit.
    pub fn submit(&mut self, request: Request) {
        assert!(
            self.fits(&request),
            "{} of {} tokens was made with other limits than the scheduler's",
            request.id(),
            request.longest()
        );
        let arrival = Arrival(self.next_arrival);
        self.next_arrival += 1;
        let used = self.places.insert(request.id(), Place::Waiting(arrival));
        assert!(used.is_none(), "{} is already known", request.id());
        let turns = self.counters.admissions;
        self.waiting.push(Sequence::new(request, arrival, turns));
        self.population.came(self.places.len());
    }

    /// Cancels a request without further events. False if there is none: it may just have ended.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        // Outputs end this way at stop strings too, and where clients have read enough.
        if let Some((_, running)) = self.running_mut(id)
            && running.sequence.outputs() > 0
        {
            let outputs = running.sequence.outputs();
            let prompt = running.computed_prompt();
            self.population.ended(prompt, outputs);
        }
        let known = self.remove(id);
        self.counters.cancelled += u64::from(known);
        known
    }

    /// Removes a request. False if there is none.
    fn remove(&mut self, id: RequestId) -> bool {
        match self.places.get(&id).copied() {
            None => return false,
            Some(Place::Running(rank)) => self.retire(rank),
            Some(Place::Waiting(arrival)) => {
                let removed = self.waiting.remove(arrival);
                // The blocks that a preempted request gave up are for others now.
                self.short_of_blocks &= removed.is_none_or(|(rank, _)| rank.is_none());
                self.places.remove(&id);
                self.population.left(self.places.len());
            }
        }
        true
    }

    /// True if no request waits, runs or is being removed.
    pub fn is_idle(&self) -> bool {
        self.places.is_empty() && self.leaving.is_empty()
    }

    /// The next step. Empty where there is nothing to do before new requests come or a step in flight is applied; an
    /// empty plan is not to be executed or applied.
    pub fn plan(&mut self) -> StepPlan {
        let mut runs = Vec::new();
        let mut room = self.room();
        if self.in_flight.len() < MAX_IN_FLIGHT {
            self.plan_runs(&mut runs, &mut room);
        }
        if runs.is_empty() && self.in_flight.is_empty() && room.image.is_put_off() {
            // Who generated was preempted: nobody is left whom the image should spare.
            room = self.room();
            room.image.encode_at_once();
            self.plan_runs(&mut runs, &mut room);
        }
        if runs.is_empty() {
            return StepPlan::default();
        }
        let plan = StepPlan {
            step: self.counters.steps,
            runs,
            encode: room.image.encode(),
        };
        self.images.plan(&plan);
        self.in_flight.push(plan.step);
        self.counters.steps += 1;
        self.counters.computed_tokens += plan.num_tokens() as u64;
        plan
    }

    /// `Admitted` events of the requests that `plan` admits.
    pub fn admitted(&mut self, plan: &StepPlan) -> Vec<(RequestId, Event)> {
        // They come last.
        let runs = plan.runs.iter().rev();
        let admitted = runs.map_while(|run| {
            let cached_tokens = self.running_mut(run.request)?.1.admitted.take()?;
            Some((run.request, Event::Admitted { cached_tokens }))
        });
        admitted.collect()
    }

    /// Applies the output of the oldest step in flight.
    pub fn apply(&mut self, plan: &StepPlan, output: StepOutput) -> Vec<(RequestId, Event)> {
        if let Some(defect) = defect(plan, &output) {
            return self.fail(plan, &StepError::Failed(defect));
        }
        self.land(plan);
        let mut events = Vec::with_capacity(plan.runs.len());
        let StepOutput {
            samples,
            scores,
            pooled,
            not_finite,
        } = output;
        let mut scores = scores.into_iter();
        let mut pooled = pooled.into_iter();
        for (index, (run, sampled)) in plan.runs.iter().zip(samples).enumerate() {
            let logprobs = run.score.as_ref().and_then(|_| scores.next());
            let answer = Answer {
                sampled,
                logprobs: logprobs.unwrap_or_default(),
                pooled: pooled.next().flatten(),
            };
            let is_finite = not_finite.binary_search(&index).is_err();
            self.apply_run(run, is_finite.then_some(answer), &mut events);
        }
        events
    }

    /// The constrained requests of a step that goes on to be applied, each with its token: to follow their constraints side by
    /// side ([`Follow::token`]), ahead of [`Self::apply`], which would do so one after the other.
    pub fn followers<'a>(&'a mut self, plan: &StepPlan, output: &StepOutput) -> Vec<Follow<'a>> {
        let tokens = plan
            .constrained()
            .filter_map(|(index, run)| Some((run.request, output.samples.get(index)?.as_ref()?.token)));
        let mut tokens: HashMap<RequestId, TokenId> = tokens.collect();
        let followed = self.running.values_mut().filter_map(|running| {
            let token = tokens.remove(&running.sequence.request.id())?;
            let sequence = &mut running.sequence;
            Some(Follow { sequence, token })
        });
        followed.collect()
    }

    /// The constraints of the runs of a step that have some, in its order, to fill its masks; `None` where the request has ended
    /// and its token will be discarded. Every earlier step has been applied.
    pub fn constraints<'a>(&'a mut self, plan: &StepPlan) -> Vec<Option<&'a mut Constraints>> {
        let order: HashMap<RequestId, usize> = plan
            .constrained()
            .enumerate()
            .map(|(at, (_, run))| (run.request, at))
            .collect();
        let mut constraints: Vec<Option<&mut Constraints>> = order.iter().map(|_| None).collect();
        for Running { sequence, .. } in self.running.values_mut() {
            if let Some(&at) = order.get(&sequence.request.id()) {
                constraints[at] = Some(&mut sequence.constraints);
            }
        }
        constraints
    }

    /// Fails all requests of a failed step.
    pub fn fail(&mut self, plan: &StepPlan, error: &StepError) -> Vec<(RequestId, Event)> {
        self.land(plan);
        self.images = KnownImages::default();
        let mut events = Vec::new();
        for run in &plan.runs {
            let id = run.request;
            let Some((rank, running)) = self.running_mut(id) else {
                self.leave(id);
                continue;
            };
            running.in_flight -= 1;
            self.retire(rank);
            self.counters.failed += 1;
            events.push((id, Event::Failed(error.clone())));
        }
        events
    }

    /// Starts over with an empty KV cache of `kv`, the old one being gone. Requests keep their output: those that ran
    /// wait again, before all others of their class, and are recomputed. The events end those for which `kv` is too small.
    ///
    /// # Panics
    /// Where a step is in flight: what it will say is about the old cache.
    pub fn reset(&mut self, kv: KvConfig) -> Vec<(RequestId, Event)> {
        assert!(
            self.in_flight.is_empty(),
            "steps {:?} are in flight",
            self.in_flight
        );
        self.kv.reset(kv);
        self.short_of_blocks = false;
        self.images = KnownImages::default();
        while let Some((rank, Running { sequence, .. })) = self.running.pop_first() {
            self.wait_again(rank, sequence);
            self.counters.restarts += 1;
        }
        let too_long = self.waiting.iter().filter(|waiting| !self.fits(&waiting.request));
        let too_long: Vec<Arrival> = too_long.map(|waiting| waiting.arrival).collect();
        let lost = too_long
            .into_iter()
            .filter_map(|arrival| self.waiting.remove(arrival));
        let mut events = Vec::new();
        for (_, Sequence { request, .. }) in lost {
            self.places.remove(&request.id());
            self.population.left(self.places.len());
            self.counters.failed += 1;
            let error = StepError::KvTooSmall {
                needed: request.longest(),
                capacity: self.kv.longest_request(),
            };
            events.push((request.id(), Event::Failed(error)));
        }
        events
    }

    /// Ends every request with `error`.
    ///
    /// # Panics
    /// Where a step is in flight.
    pub fn fail_all(&mut self, error: &StepError) -> Vec<(RequestId, Event)> {
        assert!(
            self.in_flight.is_empty(),
            "steps {:?} are in flight",
            self.in_flight
        );
        let running = self.running.values().map(|running| &running.sequence);
        let all = running.chain(self.waiting.iter());
        let events: Vec<_> = all
            .map(|sequence| (sequence.request.id(), Event::Failed(error.clone())))
            .collect();
        for (id, _) in &events {
            self.remove(*id);
        }
        self.counters.failed += events.len() as u64;
        events
    }

    /// Empties the prefix cache; see [`KvManager::forget_cached`].
    pub fn forget_cached(&mut self) {
        self.kv.forget_cached();
    }

    /// Enables event recording of the prefix cache; see [`KvManager::record_events`].
    pub fn record_cache_events(&mut self) {
        self.kv.record_events();
    }

    /// Takes the recorded events of the prefix cache.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.kv.take_events()
    }

    /// A snapshot of the prefix cache as `Stored` events, if recording is on.
    pub fn cached(&self) -> Vec<CacheEvent> {
        self.kv.cached()
    }

    /// Current numbers.
    pub fn stats(&self) -> SchedulerStats {
        let kv = self.kv.stats();
        SchedulerStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            leaving: self.leaving.len(),
            pages_total: kv.total,
            pages_used: kv.used,
            groups: kv.groups,
            slots: kv.slots,
            tail_tokens: self.running.values().map(|running| self.tail(running)).sum(),
            evictions: kv.evictions,
            ..self.counters
        }
    }

    /// A request that ran has no blocks any more.
    fn wait_again(&mut self, rank: Rank, sequence: Sequence) {
        let place = Place::Waiting(sequence.arrival);
        self.places.insert(sequence.request.id(), place);
        self.waiting.put_back(rank, sequence);
    }

    /// Applies what a step says about a run. Without an answer, its output is not finite and its request fails alone: what it computed in
    /// this step is not cached, and what it computed before stays cached only if a finite row saw it ([`KvManager::distrust`]).
    fn apply_run(&mut self, run: &Run, answer: Option<Answer>, events: &mut Vec<(RequestId, Event)>) {
        let id = run.request;
        let rank = match self.places.get(&id) {
            Some(&Place::Running(rank)) => rank,
            Some(Place::Waiting(_)) => unreachable!("a request in flight is not preempted"),
            None => {
                self.counters.discarded_tokens += u64::from(run.sample.is_some());
                return self.leave(id);
            }
        };
        let running = self.running.get_mut(&rank).expect("its place says so");
        running.in_flight -= 1;
        let Some(answer) = answer else {
            self.kv.distrust(&mut running.table);
            self.counters.failed += 1;
            events.push((id, Event::Failed(StepError::NotFinite(id))));
            return self.retire(rank);
        };
        self.kv
            .commit(&mut running.table, &running.sequence.tokens[..run.end()]);
        if answer.sampled.is_some() || answer.pooled.is_some() {
            self.kv.confirm(&running.table);
        }
        let Answer {
            sampled,
            logprobs,
            pooled,
        } = answer;
        if let Some(vector) = pooled.and_then(|rows| running.pool(rows, run.end())) {
            events.push((id, Event::Pooled(vector)));
            self.counters.finished_pooled += 1;
            return self.retire(rank);
        }
        running.sequence.scored += logprobs.len();
        let finish = running.sequence.computed(run.end());
        if !logprobs.is_empty() || finish.is_some() {
            events.push((id, Event::Prompt(PromptEvent { logprobs, finish })));
        }
        if finish.is_some() {
            self.counters.finished_length += 1;
            return self.retire(rank);
        }
        let Some(Sampled { token, logprobs }) = sampled else {
            return;
        };
        // A later step in flight may already sample the next token.
        running.sampling = running.planned > running.sequence.tokens.len();
        let finish = match running.sequence.push(token) {
            Ok(finish) => finish,
            Err(error) => {
                self.retire(rank);
                self.counters.failed += 1;
                return events.push((id, Event::Failed(error.into())));
            }
        };
        self.counters.generated_tokens += 1;
        events.push((
            id,
            Event::Token(TokenEvent {
                token,
                logprobs,
                finish,
            }),
        ));
        match finish {
            None => return,
            Some(FinishReason::Stop | FinishReason::Complete) => self.counters.finished_stop += 1,
            Some(FinishReason::Length) => self.counters.finished_length += 1,
        }
        let (prompt, outputs) = (running.computed_prompt(), running.sequence.outputs());
        self.population.ended(prompt, outputs);
        self.retire(rank);
    }

    /// Takes a request out of the running ones; its blocks go now, or with the last step in flight that uses them.
    fn retire(&mut self, rank: Rank) {
        let Some(Running {
            sequence,
            table,
            in_flight,
            ..
        }) = self.running.remove(&rank)
        else {
            return;
        };
        let id = sequence.request.id();
        self.places.remove(&id);
        self.population.left(self.places.len());
        if in_flight == 0 {
            self.give_back(table);
        } else {
            self.leaving.insert(id, Leaving { table, in_flight });
        }
    }

    /// One step in flight with a run of an ended request is over.
    fn leave(&mut self, id: RequestId) {
        let Some(leaving) = self.leaving.get_mut(&id) else {
            return;
        };
        leaving.in_flight -= 1;
        if leaving.in_flight == 0
            && let Some(Leaving { table, .. }) = self.leaving.remove(&id)
        {
            self.give_back(table);
        }
    }

    /// Blocks of a request that has ended.
    fn give_back(&mut self, table: BlockTable) {
        self.kv.release(table);
        self.short_of_blocks = false;
    }

    fn running_mut(&mut self, id: RequestId) -> Option<(Rank, &mut Running)> {
        match *self.places.get(&id)? {
            Place::Running(rank) => Some((rank, self.running.get_mut(&rank)?)),
            Place::Waiting(_) => None,
        }
    }

    fn land(&mut self, plan: &StepPlan) {
        let known = self.in_flight.iter().position(|&step| step == plan.step);
        let position = known.unwrap_or_else(|| panic!("step {} is not in flight", plan.step));
        self.in_flight.remove(position);
    }
}
