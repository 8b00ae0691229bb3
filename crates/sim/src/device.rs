//! A device that exists on paper: for proving the profiler against everything that goes wrong on real ones.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_core::{
    BuildError, Component, ComponentBytes, Executor, FillMasks, KvConfig, Meters, Oom, RefusedBy, Run,
    Sampled, Scratch, StateConfig, StepError, StepOutput, StepPlan,
};
use plimsoll_profiler::{BuildProgress, Target};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::checks::check_tables;
use crate::executor::garbage;
use crate::ranks::{Member, Seat};

/// What a virtual device is like. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct DeviceModel {
    /// Capacity.
    pub total: u64,
    /// What allocations say cannot be had although `total` promises it.
    pub missing: u64,
    /// Weights, there from the start.
    pub weights: u64,
    /// Runtime, there from the start.
    pub runtime: u64,
    /// One page of the KV cache.
    pub page_bytes: u64,
    /// Inputs and outputs of a step, owned by a state.
    pub staging: u64,
    /// Step memory.
    pub step: StepMemory,
    /// Allocations are rounded up to this, and freed ones are kept for others of their size until a trim: fragmentation.
    pub granularity: u64,
    /// What is kept serves smaller allocations too, down to half its size, and is then taken whole.
    pub reuses_larger: bool,
    /// What the allocator holds for itself, for no purpose it could name, and never returns.
    pub slack: u64,
    /// Runtime that is loaded by the first step and stays.
    pub lazy_runtime: u64,
    /// A step takes up to this much outside the arena, at random.
    pub jitter: u64,
    /// Neighbours change by up to this much at each of our allocations.
    pub peer_swing: u64,
    /// Neighbours at the start.
    pub peers: u64,
    /// At which of our allocations neighbours come to use how much: they start, grow, free or end.
    pub peer_steps: Vec<(u64, u64)>,
    /// Dropping a state of this number (0 is the first) keeps its KV: a defect.
    pub leak_at: Option<usize>,
    /// The step of this number (0 is the first) fails with an error of the driver.
    pub broken_step: Option<u64>,
    /// That shows only when the step is waited for.
    pub breaks_late: bool,
    /// Seeds everything random.
    pub seed: u64,
}

/// Step memory as a function of the step's shape, in bytes per unit. Real devices weigh these differently, and each term is
/// the dominant one somewhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepMemory {
    /// Per token: activations.
    pub token: u64,
    /// Per sampled row: logits.
    pub row: u64,
    /// Per prompt token with log-probabilities.
    pub score: u64,
    /// Per row that sorts its whole vocabulary.
    pub sort: u64,
    /// Per row that keeps a top-k below the vocabulary.
    pub top_k: u64,
    /// Per token of the longest row: padding to it.
    pub longest: u64,
    /// Per token and 64 positions it looks back, of rows of several tokens that start beyond 0: attention to a prefix.
    pub prefix: u64,
    /// Per token of the longest row that starts at 0: attention within a prompt.
    pub prompt: u64,
    /// Per row of one token that samples greedily: a fast path with buffers of its own.
    pub greedy: u64,
    /// Per position of the longest context of a row of one token: partial results of attention to it.
    pub context: u64,
}

impl StepMemory {
    /// Bytes of the step arena that `plan` takes.
    pub fn bytes(&self, plan: &StepPlan) -> u64 {
        let sum = |of: &dyn Fn(&Run) -> u64| plan.runs.iter().map(of).sum::<u64>();
        let longest = |of: &dyn Fn(&&Run) -> bool| {
            plan.runs
                .iter()
                .filter(of)
                .map(|run| run.input.len() as u64)
                .max()
                .unwrap_or(0)
        };
        let sorts = |run: &Run| run.sample.as_ref().is_some_and(|s| s.params.top_p() < 1.0);
        let keeps = |run: &Run| {
            run.sample
                .as_ref()
                .is_some_and(|s| !s.params.is_greedy() && s.params.top_p() == 1.0)
        };
        let greedy =
            |run: &Run| run.input.len() == 1 && run.sample.as_ref().is_some_and(|s| s.params.is_greedy());
        let context = plan.runs.iter().filter(|run| run.input.len() == 1);
        let context = context.map(Run::end).max().unwrap_or(0);
        let looks_back = |run: &Run| {
            if run.input.len() > 1 && run.start > 0 {
                (run.input.len() * run.end() / 64) as u64
            } else {
                0
            }
        };
        self.token * plan.num_tokens() as u64
            + self.row * sum(&|run| u64::from(run.sample.is_some()))
            + self.score * plan.num_scored() as u64
            + self.sort * sum(&|run| u64::from(sorts(run)))
            + self.top_k * sum(&|run| u64::from(keeps(run)))
            + self.greedy * sum(&|run| u64::from(greedy(run)))
            + self.context * context as u64
            + self.longest * longest(&|_| true)
            + self.prefix * sum(&looks_back)
            + self.prompt * longest(&|run| run.start == 0)
    }
}

/// The device. Clones share it.
#[derive(Clone, Debug)]
pub struct VirtualDevice(Arc<Mutex<Pool>>);

#[derive(Debug)]
struct Pool {
    model: DeviceModel,
    rng: StdRng,
    used: u64,
    used_high: u64,
    reserved_high: u64,
    /// Rounded sizes of live allocations.
    by_component: ComponentBytes,
    /// Freed, not returned.
    cached: Vec<u64>,
    peers: u64,
    allocations: u64,
    fault_at: Option<u64>,
    broken_at: Option<u64>,
    states_dropped: usize,
    steps: u64,
    seat: Option<Seat>,
}

impl VirtualDevice {
    /// What the driver of a broken one says.
    pub const BROKEN: &'static str = "the driver reports an illegal address";

    /// A device with its weights loaded.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn new(model: DeviceModel) -> Self {
        let mut by_component = ComponentBytes::default();
        *by_component.get_mut(Component::Weights) = model.weights;
        *by_component.get_mut(Component::Runtime) = model.runtime;
        let fixed = model.weights + model.runtime + model.slack;
        let room = model
            .total
            .checked_sub(model.missing + fixed)
            .expect("what is there from the start fits");
        Self(Arc::new(Mutex::new(Pool {
            rng: StdRng::seed_from_u64(model.seed),
            used: fixed - model.slack,
            used_high: fixed - model.slack,
            reserved_high: fixed,
            by_component,
            cached: Vec::new(),
            peers: model.peers.min(room),
            allocations: 0,
            fault_at: None,
            broken_at: None,
            states_dropped: 0,
            steps: 0,
            seat: None,
            model,
        })))
    }

    /// The `n`-th allocation from now fails, once.
    pub fn fail_allocation(&self, n: u64) {
        let mut pool = self.pool();
        pool.fault_at = Some(pool.allocations + n);
    }

    /// The `n`-th allocation from now, and every later one, fails with an error of the driver: nothing helps such a device.
    pub fn break_allocation(&self, n: u64) {
        let mut pool = self.pool();
        pool.broken_at = Some(pool.allocations + n);
    }

    /// From now on every step is computed together with the devices of the other ranks.
    pub fn join(&self, member: &Member) {
        self.pool().seat = Some(member.seat());
    }

    /// A state was dropped whose KV stayed.
    pub fn has_leaked(&self) -> bool {
        let pool = self.pool();
        pool.model
            .leak_at
            .is_some_and(|state| state < pool.states_dropped)
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, component: Component, bytes: u64) -> Result<Block, BuildError> {
        let mut pool = self.pool();
        let rounded = pool.allocate(component, bytes)?;
        Ok(Block {
            device: self.clone(),
            component,
            bytes,
            rounded,
            leaked: false,
        })
    }
}

impl Pool {
    fn reserved(&self) -> u64 {
        self.by_component.total() + self.model.slack + self.cached.iter().sum::<u64>()
    }

    fn meters(&self) -> Meters {
        let reserved = self.reserved();
        Meters {
            total: self.model.total,
            free: self.model.total - reserved - self.peers,
            used: self.used,
            reserved,
            used_high: self.used_high,
            reserved_high: self.reserved_high,
            by_component: self.by_component,
            allocations: self.allocations,
        }
    }

    fn neighbours_move(&mut self) {
        let swing = self.model.peer_swing;
        if swing > 0 {
            let target = (self.peers + self.rng.random_range(0..=2 * swing)).saturating_sub(swing);
            // Other processes can take only what is free.
            self.peers = target.min(self.model.total - self.reserved());
        }
        let now = self.allocations;
        let step = self.model.peer_steps.iter().find(|&&(at, _)| at == now);
        if let Some(&(_, bytes)) = step {
            self.peers = bytes.min(self.model.total - self.reserved());
        }
    }

    fn check_step(&self, late: bool) -> Result<(), StepError> {
        let broken = self.model.broken_step.is_some_and(|step| step + 1 == self.steps);
        match broken && self.model.breaks_late == late {
            true => Err(StepError::Device(VirtualDevice::BROKEN.to_owned())),
            false => Ok(()),
        }
    }

    /// The step's memory, and how much of it is outside the arena.
    fn begin_step(&mut self) -> Result<(StepMemory, u64), StepError> {
        if self.steps == 0 && self.model.lazy_runtime > 0 {
            // Never freed.
            self.allocate(Component::Runtime, self.model.lazy_runtime)?;
        }
        self.steps += 1;
        self.check_step(false)?;
        let most = self.model.jitter;
        Ok((self.model.step, self.rng.random_range(0..=most)))
    }

    /// Takes `bytes`; returns what they really take.
    fn allocate(&mut self, component: Component, bytes: u64) -> Result<u64, BuildError> {
        self.neighbours_move();
        self.allocations += 1;
        if self.broken_at.is_some_and(|at| at <= self.allocations) {
            return Err(BuildError::Device(VirtualDevice::BROKEN.to_owned()));
        }
        let rounded = bytes.next_multiple_of(self.model.granularity);
        let limit = self.model.total - self.model.missing;
        let fits = |pool: &Self| {
            (pool.reserved() + pool.peers)
                .checked_add(rounded)
                .is_some_and(|all| all <= limit)
        };
        let largest = match self.model.reuses_larger {
            true => rounded.saturating_mul(2),
            false => rounded,
        };
        let fitting = self.cached.iter().enumerate();
        let fitting = fitting.filter(|&(_, size)| (rounded..=largest).contains(size));
        let reusable = fitting.min_by_key(|&(_, size)| size).map(|(index, _)| index);
        if self.fault_at == Some(self.allocations) {
            return Err(self.oom(component, bytes).into());
        }
        let mut taken = rounded;
        if let Some(index) = reusable {
            taken = self.cached.swap_remove(index);
        } else if !fits(self) {
            self.cached.clear();
            if !fits(self) {
                return Err(self.oom(component, bytes).into());
            }
        }
        *self.by_component.get_mut(component) += taken;
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved_high = self.reserved_high.max(self.reserved());
        assert!(
            self.reserved() + self.peers <= self.model.total,
            "the device is overcommitted"
        );
        Ok(taken)
    }

    fn oom(&self, component: Component, requested: u64) -> Oom {
        Oom {
            requested,
            component,
            refused_by: RefusedBy::Device,
            meters: Box::new(self.meters()),
        }
    }
}

/// One allocation.
#[derive(Debug)]
struct Block {
    device: VirtualDevice,
    component: Component,
    bytes: u64,
    rounded: u64,
    leaked: bool,
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.leaked {
            return;
        }
        let mut pool = self.device.pool();
        pool.used -= self.bytes;
        *pool.by_component.get_mut(self.component) -= self.rounded;
        if self.rounded > 0 {
            pool.cached.push(self.rounded);
        }
    }
}

/// An engine state on a virtual device: it computes nothing, and takes what a real one would.
#[derive(Debug)]
pub struct VirtualState {
    device: VirtualDevice,
    kv_config: KvConfig,
    scratch: Scratch,
    kv: Block,
    arena: Block,
    _staging: Block,
    canary: Option<Block>,
    arena_high: u64,
    launched: VecDeque<StepPlan>,
    steps_beside_canary: Vec<usize>,
}

impl VirtualState {
    /// Tokens of each step that ran while the canary was held, in order.
    pub fn steps_beside_canary(&self) -> &[usize] {
        &self.steps_beside_canary
    }
}

/// Every run has its pages in every group, and no page is written twice.
fn check_pages(kv: &KvConfig, plan: &StepPlan) -> Result<(), String> {
    let mut written = HashSet::new();
    for run in &plan.runs {
        check_tables(kv, run, |group| group.first_block(kv.block_size, run.start))
            .map_err(|broken| format!("{} {broken}", run.request))?;
        let blocks = run.start / kv.block_size.tokens()..kv.block_size.blocks_for(run.end());
        for (table, group) in run.tables.iter().zip(&kv.groups) {
            let mut pages = blocks.clone().flat_map(|block| table.block(group, block));
            if let Some(page) = pages.find(|page| !written.insert(page.0)) {
                return Err(format!("page {} is written twice", page.0));
            }
        }
    }
    Ok(())
}

impl Executor for VirtualState {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        check_pages(&self.kv_config, plan).map_err(StepError::Failed)?;
        let (step, jitter) = self.device.pool().begin_step()?;
        let bytes = step.bytes(plan);
        if bytes > self.arena.bytes {
            if self.scratch != Scratch::Growable {
                return Err(self.device.pool().oom(Component::Arena, bytes).into());
            }
            self.arena = self.device.allocate(Component::Arena, bytes)?;
        }
        self.arena_high = self.arena_high.max(bytes);
        drop(self.device.allocate(Component::Graphs, jitter)?);
        self.launched.push_back(plan.clone());
        Ok(())
    }

    /// Masks lie in the staging, which is there before.
    fn sample(&mut self, _: &mut FillMasks<'_>) -> Result<(), StepError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let plan = self
            .launched
            .pop_front()
            .ok_or_else(|| StepError::Failed("nothing was launched".into()))?;
        let seat = self.device.pool().seat.clone();
        if let Some(seat) = seat {
            seat.meet().map_err(|lost| StepError::Failed(lost.to_string()))?;
        }
        self.device.pool().check_step(true)?;
        if self.canary.is_some() {
            self.steps_beside_canary.push(plan.num_tokens());
        }
        let sampled = || Sampled {
            token: 0,
            logprobs: None,
        };
        let scores = plan.runs.iter().filter_map(|run| run.score.as_ref());
        Ok(StepOutput {
            samples: plan
                .runs
                .iter()
                .map(|run| run.sample.as_ref().map(|_| sampled()))
                .collect(),
            scores: scores.map(garbage).collect(),
            pooled: plan.runs.iter().map(|run| run.pool.map(|_| Vec::new())).collect(),
            not_finite: Vec::new(),
        })
    }
}

impl Drop for VirtualState {
    fn drop(&mut self) {
        let mut pool = self.device.pool();
        self.kv.leaked = pool.model.leak_at == Some(pool.states_dropped);
        pool.states_dropped += 1;
    }
}

impl Target for VirtualDevice {
    type State = VirtualState;

    fn build(
        &mut self,
        config: &StateConfig,
        piece: &mut dyn FnMut(BuildProgress),
    ) -> Result<VirtualState, BuildError> {
        let (page_bytes, staging) = {
            let pool = self.pool();
            (pool.model.page_bytes, pool.model.staging)
        };
        let kv = self.allocate(
            Component::Kv,
            page_bytes.saturating_mul(config.kv.num_pages as u64),
        )?;
        piece(BuildProgress::Memory);
        let arena = match config.scratch {
            Scratch::Fixed(bytes) => bytes,
            Scratch::Growable => 0,
        };
        let arena = self.allocate(Component::Arena, arena)?;
        let staging = self.allocate(Component::Staging, staging)?;
        let canary = (config.canary_bytes > 0)
            .then(|| self.allocate(Component::Canary, config.canary_bytes))
            .transpose()?;
        Ok(VirtualState {
            device: self.clone(),
            kv_config: config.kv,
            scratch: config.scratch,
            kv,
            arena,
            _staging: staging,
            canary,
            arena_high: 0,
            launched: VecDeque::new(),
            steps_beside_canary: Vec::new(),
        })
    }

    fn meters(&self) -> Meters {
        self.pool().meters()
    }

    fn reset_high_water(&mut self) {
        let mut pool = self.pool();
        pool.used_high = pool.used;
        pool.reserved_high = pool.reserved();
    }

    fn trim(&mut self) {
        self.pool().cached.clear();
    }

    fn take_scratch_high_water(&mut self, state: &mut VirtualState) -> u64 {
        std::mem::take(&mut state.arena_high)
    }

    fn release_canary(&mut self, state: &mut VirtualState) {
        state.canary = None;
        self.trim();
    }
}
