use std::collections::{BTreeMap, VecDeque};

use plimsoll_core::{
    Event, Executor, FinishReason, KvConfig, Request, RequestId, Run, StepError, StepPlan, TokenId,
};
use plimsoll_scheduler::{Follow, Scheduler, SchedulerStats};

use crate::{
    client::{Client, ClientState},
    executor::{Fault, SimExecutor},
    model::{oracle, pooled_oracle, score_oracle},
    router::Router,
    turns::Turns,
    workload::{Cancel, Reset, Workload, ends_of_chunks, whole_spans},
};

/// What a workload led to.
#[derive(Debug)]
pub struct Report {
    /// Text of each request, whole where it ended by itself.
    pub texts: BTreeMap<RequestId, Vec<TokenId>>,
    /// The scheduler's numbers at the end.
    pub stats: SchedulerStats,
}

/// Runs `workload` with up to `depth` steps in flight and checks what the scheduler promises:
///
/// - each text and each vector equals the oracle's, however requests were scheduled, and so do prompt logprobs, each reported
///   once;
/// - all sampled tokens obey the constraints, and no text goes on after their end;
/// - nothing is computed twice except after a preemption or a loss of the KV cache, and nothing that the prefix cache held;
/// - when the KV cache is lost, only requests for which the new one is too small fail;
/// - requests are admitted in order: by priority, tenants in turn, without starvation; every step serves those admitted
///   earlier first; a preempted request does not return on the blocks that it gave up;
/// - the run ends, within a bounded number of steps, with all blocks free and every request accounted for;
/// - every plan passes the executor's checks; with `audit`, the invariants hold after every call, and a router that knows only
///   the events of the prefix cache predicts exactly how much of a prompt each request finds there.
///
/// # Errors
/// The promise that was broken.
pub fn simulate(workload: &Workload, depth: usize, audit: bool) -> Result<Report, String> {
    let mut life = Life::new(workload, depth, audit);
    let mut arrivals = workload.arrivals.iter().peekable();
    let mut resets = workload.resets.iter().peekable();
    let mut tick = 0;
    loop {
        while let Some((_, request)) = arrivals.next_if(|(at, _)| *at <= tick) {
            life.submit(request)?;
        }
        life.cancel(tick, false)?;
        while let Some(reset) = resets.next_if(|reset| reset.tick <= tick) {
            life.reset(reset)?;
        }
        if workload.forgets.contains(&tick) {
            life.scheduler.forget_cached();
            life.audit()?;
        }
        let launched = life.launch()?;
        life.cancel(tick, true)?;
        let finished = life.finish()?;
        if !launched && !finished {
            if !life.scheduler.is_idle() {
                return Err("requests wait and nothing is planned".into());
            }
            match arrivals.peek() {
                Some((next, _)) => tick = tick.max(next - 1),
                None => break,
            }
        }
        tick += 1;
        if tick > life.patience {
            return Err(format!("not done after {tick} steps"));
        }
    }
    life.end()
}

/// One engine, its clients, and what is known about them.
struct Life<'a> {
    workload: &'a Workload,
    depth: usize,
    audit: bool,
    scheduler: Scheduler,
    executor: SimExecutor,
    kv: KvConfig,
    /// Plans, each with the number of requests whose blocks had been given back when it was made.
    in_flight: VecDeque<(StepPlan, u64)>,
    /// The plan launched last awaits its masks.
    unsampled: bool,
    clients: BTreeMap<RequestId, Client<'a>>,
    turns: Turns,
    /// Listens, if there are audits.
    router: Router,
    /// Requests that ended, however they did.
    ended: u64,
    patience: u64,
}

impl<'a> Life<'a> {
    fn new(workload: &'a Workload, depth: usize, audit: bool) -> Self {
        let arrivals = &workload.arrivals;
        // Every step computes a token; a request restarts at most once for each other that ends, and all restart with a
        // new KV cache.
        let total: u64 = arrivals.iter().map(|(_, request)| request.longest() as u64).sum();
        let lives = 1 + workload.resets.len() as u64;
        let last = arrivals.last().map_or(0, |(tick, _)| *tick);
        let kv = workload.scheduler.kv;
        let mut scheduler = Scheduler::new(workload.scheduler);
        scheduler.limit_prompts(workload.prompt_budget.clone());
        if audit {
            scheduler.record_cache_events();
        }
        Self {
            workload,
            depth,
            audit,
            scheduler,
            executor: workload.executor(kv),
            kv,
            in_flight: VecDeque::new(),
            unsampled: false,
            clients: BTreeMap::new(),
            turns: Turns::new(workload.scheduler.patience),
            router: Router::default(),
            ended: 0,
            patience: last + lives * total * (arrivals.len() as u64 + 1) + 100,
        }
    }

    /// A request that a smaller KV cache cannot hold is turned away.
    fn submit(&mut self, request: &'a Request) -> Result<(), String> {
        let fits = self.fits(request);
        if self.scheduler.fits(request) != fits {
            return Err(format!("{} fits {:?}: {fits}", request.id(), self.kv));
        }
        if !fits {
            return Ok(());
        }
        self.scheduler.submit(request.clone());
        self.turns.arrives(request);
        let client = Client {
            request,
            oracle: oracle(&self.workload.model, request),
            text: Vec::new(),
            scores: score_oracle(&self.workload.model, request),
            scored: 0,
            state: ClientState::Open,
            admissions: 0,
            cached: 0,
            computed: 0,
            freed_at_admission: 0,
            is_suspect: false,
        };
        self.clients.insert(request.id(), client);
        Ok(())
    }

    /// The device loses everything, once the steps in flight are over.
    fn reset(&mut self, reset: &Reset) -> Result<(), String> {
        while self.finish()? {}
        self.kv.num_pages = reset.num_pages;
        self.executor = self.workload.executor(self.kv);
        for client in self.clients.values_mut() {
            // Running requests may return at once.
            client.freed_at_admission = NEVER;
        }
        let events = self.scheduler.reset(self.kv);
        self.turns.reset();
        self.deliver(events, 0)?;
        let open = |client: &&Client<'_>| client.state == ClientState::Open;
        match self
            .clients
            .values()
            .filter(open)
            .find(|client| !self.fits(client.request))
        {
            Some(client) => Err(format!("{} does not fit and waits", client.request.id())),
            None => Ok(()),
        }
    }

    fn fits(&self, request: &Request) -> bool {
        let chunk = self.workload.scheduler.limits.max_num_batched_tokens;
        self.kv.request_pages(request.longest(), chunk) <= self.kv.num_pages
    }

    fn cancel(&mut self, tick: u64, in_flight: bool) -> Result<(), String> {
        let now = |cancel: &&Cancel| cancel.tick == tick && cancel.in_flight == in_flight;
        for cancel in self.workload.cancels.iter().filter(now) {
            let open = match self.clients.get_mut(&cancel.request) {
                Some(client) if client.state == ClientState::Open => {
                    client.state = ClientState::Cancelled;
                    self.ended += 1;
                    self.turns.ended(cancel.request);
                    true
                }
                _ => false,
            };
            if self.scheduler.cancel(cancel.request) != open {
                return Err(format!("{} was cancelled wrongly", cancel.request));
            }
            self.audit()?;
        }
        Ok(())
    }

    /// Plans and launches as many steps as may be in flight. True where at least one was planned.
    fn launch(&mut self) -> Result<bool, String> {
        let mut planned = false;
        while self.in_flight.len() < self.depth {
            let freed = self.ended - self.scheduler.stats().leaving as u64;
            let before = self.scheduler.stats();
            let plan = whole_spans(self.scheduler.plan(), |id| Some(self.clients.get(&id)?.request))?;
            self.check_turns(&plan, &before)?;
            let chunk = self.workload.scheduler.state_chunk;
            ends_of_chunks(&plan, chunk, |id| Some(self.clients.get(&id)?.request))?;
            self.audit()?;
            if plan.is_empty() {
                break;
            }
            planned = true;
            let admitted = self.scheduler.admitted(&plan);
            self.deliver(admitted, freed)?;
            match self.executor.launch(&plan) {
                Ok(()) => {
                    for run in &plan.runs {
                        self.client(run.request)?.computed += run.input.len();
                    }
                    self.unsampled = plan.awaits_masks();
                    self.in_flight.push_back((plan, freed));
                    self.sample()?;
                }
                Err(error) => self.fail(&plan, &error)?,
            }
        }
        Ok(planned)
    }

    /// Brings the step launched last its masks, once it is the only one in flight.
    fn sample(&mut self) -> Result<(), String> {
        if !self.unsampled || self.in_flight.len() > 1 {
            return Ok(());
        }
        self.unsampled = false;
        let Some((plan, freed)) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let scheduler = &mut self.scheduler;
        let sampled = self.executor.sample(&mut |masks| {
            for (constraints, mask) in scheduler.constraints(&plan).into_iter().zip(masks) {
                match constraints {
                    Some(constraints) => constraints.fill(mask),
                    None => mask.fill(u32::MAX),
                }
            }
        });
        match sampled {
            Ok(()) => self.in_flight.push_front((plan, freed)),
            Err(error) => self.fail(&plan, &error)?,
        }
        Ok(())
    }

    /// Those admitted come last in the plan, each in its turn.
    fn check_turns(&mut self, plan: &StepPlan, before: &SchedulerStats) -> Result<(), String> {
        let stats = self.scheduler.stats();
        self.turns.preempted(stats.preemptions - before.preemptions);
        let admitted = (stats.admissions - before.admissions) as usize;
        let Some(running) = plan.runs.len().checked_sub(admitted) else {
            return Err(format!("{admitted} admissions and {} runs", plan.runs.len()));
        };
        let (running, admitted) = plan.runs.split_at(running);
        if !self.turns.is_sorted(running.iter().map(|run| run.request)) {
            return Err(format!("a higher rank comes before a lower one: {plan:?}"));
        }
        let of = |stats: &SchedulerStats| (stats.evictions, stats.slots.given_up, stats.slots.snapshots);
        let is_same = of(&stats) == of(before);
        for run in admitted {
            // The router knows the cache as it was before this plan.
            if self.audit && is_same {
                self.check_prediction(run)?;
            }
            let next = self.turns.next();
            if next != Some(run.request) {
                return Err(format!("{} is admitted and it is {next:?}'s turn", run.request));
            }
            self.turns.admitted();
        }
        Ok(())
    }

    /// A router foretells what a request that is admitted finds in the prefix cache.
    fn check_prediction(&self, run: &Run) -> Result<(), String> {
        let Some(client) = self.clients.get(&run.request) else {
            return Ok(());
        };
        let tokens = [client.request.prompt(), &client.text].concat();
        let most = match client.request.needs_every_row() {
            true => 0,
            false if client.scored < client.scores.len() => client.scored,
            false => tokens.len() - 1,
        };
        let shareable = &tokens[..most.min(tokens.len() - 1)];
        let salt = client.request.cache_salt();
        let images = client.request.images().map_or(&[][..], |images| &images[..]);
        let foretold = self.router.longest(salt, shareable, images, &self.kv);
        (foretold == run.start).then_some(()).ok_or(format!(
            "{} finds {} tokens cached, and a router foretold {foretold}",
            run.request, run.start
        ))
    }

    /// Waits for the oldest step in flight. False where there is none.
    fn finish(&mut self) -> Result<bool, String> {
        let Some((plan, freed)) = self.in_flight.pop_front() else {
            return Ok(false);
        };
        match self.executor.finish() {
            Ok(output) => {
                if self.workload.faults.contains(&(plan.step, Fault::NotFinite)) {
                    // They may share what is not finite, as it was not known when they came.
                    let clients = self.clients.values_mut();
                    clients.for_each(|client| client.is_suspect |= client.admissions > 0);
                }
                // Ahead, or when the token is applied: it must not matter.
                if self.depth > 1 {
                    self.scheduler
                        .followers(&plan, &output)
                        .into_iter()
                        .for_each(Follow::token);
                }
                let events = self.scheduler.apply(&plan, output);
                self.deliver(events, freed)?;
            }
            Err(error) => self.fail(&plan, &error)?,
        }
        self.sample()?;
        Ok(true)
    }

    fn fail(&mut self, plan: &StepPlan, error: &StepError) -> Result<(), String> {
        if *error != StepError::Failed(SimExecutor::INJECTED.into()) {
            return Err(error.to_string());
        }
        let events = self.scheduler.fail(plan, error);
        self.deliver(events, 0)
    }

    /// Hands out the events of a step before whose plan the blocks of `freed` requests had come back.
    fn deliver(&mut self, events: Vec<(RequestId, Event)>, freed: u64) -> Result<(), String> {
        for (id, event) in events {
            let ended = self.ended;
            let client = self.client(id)?;
            if client.state != ClientState::Open {
                return Err(format!("{id} has ended ({:?}) and gets {event:?}", client.state));
            }
            match event {
                Event::Admitted { cached_tokens } => self.admitted(id, cached_tokens, freed)?,
                Event::Token(_) | Event::Prompt(_) | Event::Pooled(_) if client.admissions == 0 => {
                    return Err(format!("{id} runs without admission"));
                }
                Event::Prompt(prompt) => {
                    client
                        .hear_about_prompt(&prompt)
                        .map_err(|broken| format!("{id} {broken}"))?;
                    self.ended = ended + u64::from(prompt.finish.is_some());
                    if prompt.finish.is_some() {
                        self.turns.ended(id);
                    }
                }
                Event::Token(token) => {
                    client.hear(&token).map_err(|broken| format!("{id} {broken}"))?;
                    self.ended = ended + u64::from(token.finish.is_some());
                    if token.finish.is_some() {
                        self.turns.ended(id);
                    }
                }
                Event::Pooled(vector) => {
                    let expected = pooled_oracle(client.request);
                    if Some(&vector) != expected.as_ref() {
                        return Err(format!("{id} gets {vector:?}, not {expected:?}"));
                    }
                    client.state = ClientState::Pooled;
                    self.ended = ended + 1;
                    self.turns.ended(id);
                }
                Event::Failed(StepError::KvTooSmall { needed, capacity }) if needed <= capacity => {
                    return Err(format!("{id} of {needed} tokens fits {capacity}"));
                }
                Event::Failed(StepError::NotFinite(_)) if !client.is_suspect => {
                    return Err(format!(
                        "{id} is given what another left behind that is not finite"
                    ));
                }
                Event::Failed(error @ StepError::Constraint(_)) => return Err(format!("{id}: {error}")),
                Event::Failed(_) => {
                    client.state = ClientState::Failed;
                    self.ended = ended + 1;
                    self.turns.ended(id);
                }
            }
        }
        self.audit()
    }

    fn admitted(&mut self, id: RequestId, cached: usize, freed: u64) -> Result<(), String> {
        let caching = self.workload.scheduler.enable_prefix_caching;
        let client = self.client(id)?;
        client.admissions += 1;
        if client.admissions == 1 {
            client.cached = cached;
        } else if client.freed_at_admission == freed {
            return Err(format!(
                "{id} was preempted and returned though no request had ended"
            ));
        }
        client.freed_at_admission = freed;
        let unscored = client.scored < client.scores.len();
        if unscored && cached > client.scored {
            return Err(format!(
                "{id} is admitted past prompt tokens that it is to hear about"
            ));
        }
        let sharing = caching && !client.request.needs_every_row();
        if (cached > 0 && !sharing) || cached >= client.request.prompt().len() && client.admissions == 1 {
            return Err(format!("{id} has {cached} cached tokens"));
        }
        Ok(())
    }

    fn end(mut self) -> Result<Report, String> {
        self.audit()?;
        self.scheduler.check_invariants()?;
        let mut late = Router::default();
        late.hear(self.scheduler.cached())?;
        if late != self.router {
            return Err("who comes late is told of another cache".into());
        }
        let stats = self.scheduler.stats();
        if stats.pages_used + stats.slots.used != 0 || stats.waiting + stats.running + stats.leaving != 0 {
            return Err(format!("something is left: {stats:?}"));
        }
        let count = |state| {
            self.clients
                .values()
                .filter(|client| client.state == state)
                .count() as u64
        };
        let ends = [
            (
                stats.finished_stop,
                count(ClientState::Finished(FinishReason::Stop))
                    + count(ClientState::Finished(FinishReason::Complete)),
            ),
            (
                stats.finished_length,
                count(ClientState::Finished(FinishReason::Length)),
            ),
            (stats.finished_pooled, count(ClientState::Pooled)),
            (stats.cancelled, count(ClientState::Cancelled)),
            (stats.failed, count(ClientState::Failed)),
        ];
        let requests = self.clients.len() as u64;
        if ends.iter().any(|(counted, seen)| counted != seen) || self.ended != requests {
            return Err(format!("{requests} requests ended as {ends:?}"));
        }
        if stats.preemptions > requests * requests {
            return Err(format!(
                "{} preemptions of {requests} requests",
                stats.preemptions
            ));
        }
        for (id, client) in &self.clients {
            client
                .check(self.depth)
                .map_err(|broken| format!("{id}: {broken}"))?;
        }
        let texts = self
            .clients
            .into_iter()
            .map(|(id, client)| (id, client.text))
            .collect();
        Ok(Report { texts, stats })
    }

    fn client(&mut self, id: RequestId) -> Result<&mut Client<'a>, String> {
        self.clients
            .get_mut(&id)
            .ok_or_else(|| format!("nobody knows {id}"))
    }

    fn audit(&mut self) -> Result<(), String> {
        if !self.audit {
            return Ok(());
        }
        self.scheduler.check_invariants()?;
        self.router.hear(self.scheduler.take_cache_events())?;
        let stats = self.scheduler.stats();
        let (heard, cached) = (self.router.len(), stats.blocks_cached() + stats.slots.snapshots);
        // Of blocks that no hit ends at or behind, routers are not told.
        let has_states = self.kv.groups.state_layers() > 0;
        (heard == cached || has_states && heard < cached)
            .then_some(())
            .ok_or(format!(
                "{cached} blocks are cached, and a router knows of {heard}"
            ))
    }
}

/// No number of requests whose blocks are back.
const NEVER: u64 = u64::MAX;
