//! Several ranks that serve one model together: each has a part of it, memory of its own, and a thread.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{slice, thread};

use plimsoll_core::{Executor, Meters, StepLimits};
use plimsoll_device::Budget;
use plimsoll_engine::FanOut;
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::{Cancel, LoadProgress};
use plimsoll_profiler::{
    Footprint, Observer, PhaseRecord, ProfileError, ProfileSpec, Proved, RankLost, Ranks, Target, profile,
    profile_rank,
};

use super::{
    Backend, Configured, Defaults, Device, EngineState, LoadedModel, ModelFacts, ProfiledBackend, Weights,
};
use crate::error::Error;
use crate::plan_cache::DeviceKey;

/// How long ranks may take to end once one of them has.
const PATIENCE: Duration = Duration::from_secs(60);

/// A model that several ranks serve. What is said of its memory is that of rank 0, unless it says that of all.
#[derive(Debug)]
pub struct RanksBackend {
    /// At least one.
    ranks: Vec<(Arc<dyn Backend>, SharedExchange)>,
}

/// Where a rank meets the others: one step, or one agreement, at a time.
pub type SharedExchange = Arc<Mutex<Exchange>>;

impl RanksBackend {
    /// Of at least one rank, in order, and where each meets the others.
    pub fn new(ranks: Vec<(Arc<dyn Backend>, SharedExchange)>) -> Self {
        Self { ranks }
    }

    fn first(&self) -> &dyn Backend {
        &*self.ranks[0].0
    }

    fn all(&self) -> impl Iterator<Item = &dyn Backend> {
        self.ranks.iter().map(|(backend, _)| &**backend)
    }
}

impl Configured for RanksBackend {
    fn max_model_len(&self) -> Result<usize, Error> {
        self.first().max_model_len()
    }

    fn state_layers(&self) -> Result<usize, Error> {
        self.first().state_layers()
    }

    fn tokens_at_once(&self) -> Result<usize, Error> {
        self.first().tokens_at_once()
    }

    fn vocab_size(&self) -> Result<usize, Error> {
        self.first().vocab_size()
    }

    fn text_part_of(&self) -> Result<Option<&'static str>, Error> {
        self.first().text_part_of()
    }
}

impl Device for RanksBackend {
    fn kind(&self) -> &'static str {
        self.first().kind()
    }

    fn name(&self) -> String {
        let mut names: Vec<_> = self.all().map(Device::name).collect();
        names.dedup();
        format!("{} ranks on {}", self.ranks.len(), names.join(", "))
    }

    fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn defaults(&self) -> Defaults {
        self.first().defaults()
    }

    fn largest(&self) -> Option<u64> {
        self.all().filter_map(Device::largest).min()
    }

    fn state_chunk(&self) -> usize {
        self.first().state_chunk()
    }

    fn footprint(&self, limits: StepLimits) -> Result<(ModelFacts, Box<dyn Footprint>), Error> {
        self.first().footprint(limits)
    }
}

impl Backend for RanksBackend {
    /// All ranks at once: each reads its own part.
    fn load(
        &self,
        earlier: &[LinearWays],
        cancel: &Cancel,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, Error> {
        let (news, all_news) = channel();
        let loaded = thread::scope(|scope| {
            let loading: Vec<_> = (self.all().enumerate())
                .map(|(rank, backend)| {
                    let news = news.clone();
                    let earlier = earlier.get(rank).map(slice::from_ref).unwrap_or_default();
                    scope.spawn(move || {
                        let loaded = backend.load(earlier, cancel, &mut |progress| {
                            // Nobody listens any more where another rank failed.
                            let _ = news.send((rank, progress));
                        });
                        // Nobody waits for the part of a model that others do not have.
                        loaded.inspect_err(|_| cancel.cancel())
                    })
                })
                .collect();
            drop(news);
            report(&all_news, self.ranks.len(), progress);
            let joined = loading.into_iter().map(|thread| thread.join());
            let results: Vec<_> = joined
                .map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
                .collect();
            first_cause(results)
        })?;
        let mut ranks = loaded.into_iter();
        let Some(mut first) = ranks.next() else {
            unreachable!("there is a rank");
        };
        for rank in ranks {
            first.weights.extend(rank.weights);
            first.linear_ways.extend(rank.linear_ways);
        }
        Ok(first)
    }

    fn account(&self) -> &Budget {
        self.first().account()
    }

    fn accounts(&self) -> Vec<&Budget> {
        self.all().map(|rank| rank.account()).collect()
    }

    fn meters(&self) -> Meters {
        self.first().meters()
    }

    fn allocations(&self) -> u64 {
        self.all().map(Backend::allocations).sum()
    }

    fn reset_high_water(&self) {
        self.all().for_each(|rank| rank.reset_high_water());
    }

    fn settle_runtime(&self) {
        self.all().for_each(|rank| rank.settle_runtime());
    }

    fn trim(&self) {
        self.all().for_each(|rank| rank.trim());
    }

    fn plan_key(&self) -> DeviceKey {
        self.first().plan_key()
    }

    fn log_neighbours(&self) {
        self.all().for_each(Backend::log_neighbours);
    }

    fn watch(&self, on: bool) -> Result<(), Error> {
        self.all().try_for_each(|rank| rank.watch(on))
    }

    fn parts(&self) -> &[(Arc<dyn Backend>, SharedExchange)] {
        &self.ranks
    }
}

/// What all ranks have read, together.
fn report(news: &Receiver<(usize, LoadProgress)>, ranks: usize, progress: &mut dyn FnMut(LoadProgress)) {
    let mut all = vec![0; ranks];
    for (rank, LoadProgress { done, total }) in news {
        all[rank] = done;
        // Each counts what it reads, and in the end all that there is.
        let done = all.iter().sum::<u64>().min(total);
        progress(LoadProgress { done, total });
    }
}

/// The results of all ranks, or the error of the first one that failed for a reason of its own.
fn first_cause<T>(results: Vec<Result<T, Error>>) -> Result<Vec<T>, Error> {
    let mut loaded = Vec::new();
    let mut stopped = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => loaded.push(value),
            Err(error) if error.is_cancelled() => stopped = stopped.or(Some(error)),
            Err(error) => {
                tracing::error!(rank, %error, "a rank could not load its part of the model");
                return Err(error);
            }
        }
    }
    stopped.map_or(Ok(loaded), Err)
}

/// What the auto-profile measures: a device with its loaded model, or those of all ranks.
#[derive(Debug)]
pub(crate) struct Targets {
    ranks: Vec<ProfiledBackend>,
    /// One for each rank of several.
    exchanges: Vec<SharedExchange>,
    vocab_size: usize,
}

impl Targets {
    /// Of a backend with its loaded model, for steps of these limits.
    pub(crate) fn new(
        backend: &Arc<dyn Backend>,
        weights: &[Arc<dyn Weights>],
        limits: StepLimits,
        vocab_size: usize,
    ) -> Self {
        let parts = backend.parts();
        let backends: Vec<_> = match parts.is_empty() {
            true => vec![Arc::clone(backend)],
            false => parts.iter().map(|(backend, _)| Arc::clone(backend)).collect(),
        };
        let ranks = backends.into_iter().zip(weights);
        Self {
            ranks: ranks
                .map(|(backend, weights)| ProfiledBackend {
                    backend,
                    weights: Arc::clone(weights),
                    limits,
                })
                .collect(),
            exchanges: parts.iter().map(|(_, exchange)| Arc::clone(exchange)).collect(),
            vocab_size,
        }
    }

    /// Returns what allocators hold without using it.
    pub(crate) fn trim(&mut self) {
        self.ranks.iter_mut().for_each(Target::trim);
    }

    /// Measures and proves a state: on every rank at once, all of the same size, or on none.
    ///
    /// # Errors
    /// [`ProfileError`] of the device, or of the rank that is at fault.
    pub(crate) fn prove(
        &mut self,
        spec: &ProfileSpec,
        observer: &mut dyn Observer,
    ) -> Result<Proved<Box<dyn Executor>>, ProfileError> {
        if let [alone] = &mut self.ranks[..] {
            let proved = profile(alone, spec, observer)?;
            return Proved::join(vec![proved], |states| Ok(one(states)));
        }
        let (proofs, proved) = channel();
        for (rank, exchange) in self.exchanges.iter().enumerate().skip(1) {
            let (mut target, spec) = (self.ranks[rank].clone(), spec.clone());
            let (exchange, proofs) = (Arc::clone(exchange), proofs.clone());
            let work = move || {
                let proof = prove_rank(&mut target, &spec, &exchange, &mut Quiet(rank));
                // The first rank has given up.
                let _ = proofs.send((rank, proof));
            };
            let name = format!("plimsoll-prove-{rank}");
            let started = thread::Builder::new().name(name).spawn(work);
            if let Err(error) = started {
                lock(&self.exchanges[rank]).leave();
                tracing::error!(rank, %error, "cannot start the thread of a rank");
            }
        }
        drop(proofs);
        let first = prove_rank(&mut self.ranks[0], spec, &self.exchanges[0], observer);
        let mut all: Vec<_> = self.exchanges.iter().map(|_| None).collect();
        all[0] = Some(first);
        while let Ok((rank, proof)) = proved.recv_timeout(PATIENCE) {
            all[rank] = Some(proof);
        }
        let missing = |rank| Err(lost(format!("rank {rank} did not end with the others")));
        let all = all.into_iter().enumerate();
        let all = all.map(|(rank, proof)| proof.unwrap_or_else(|| missing(rank)));
        let proofs = of_all(all.collect())?;
        let vocab_size = self.vocab_size;
        Proved::join(proofs, |states| {
            let fan_out = FanOut::new(states, vocab_size);
            let fan_out = fan_out.map_err(|error| lost(format!("no threads for them: {error}")))?;
            Ok(Box::new(fan_out) as Box<dyn Executor>)
        })
    }
}

/// The state of the only rank.
fn one(states: Vec<Box<dyn EngineState>>) -> Box<dyn Executor> {
    let state = states.into_iter().next();
    state.expect("as many states as proofs")
}

/// The proofs of all ranks, or the error that says most.
fn of_all<T>(proofs: Vec<Result<T, ProfileError>>) -> Result<Vec<T>, ProfileError> {
    let mut proved = Vec::new();
    let mut worst: Option<ProfileError> = None;
    for (rank, proof) in proofs.into_iter().enumerate() {
        match proof {
            Ok(proof) => proved.push(proof),
            Err(error) => {
                if !matches!(error, ProfileError::OtherRank { .. }) {
                    tracing::error!(rank, "{}", error.to_string().lines().next().unwrap_or_default());
                }
                worst = Some(match worst {
                    Some(known) if weight(&known) <= weight(&error) => known,
                    _ => error,
                });
            }
        }
    }
    worst.map_or(Ok(proved), Err)
}

/// Less for what says more.
fn weight(error: &ProfileError) -> usize {
    match error {
        ProfileError::OtherRank { .. } => 2,
        ProfileError::RankLost(_) => 1,
        _ => 0,
    }
}

fn lost(why: String) -> ProfileError {
    RankLost(why).into()
}

fn prove_rank(
    target: &mut ProfiledBackend,
    spec: &ProfileSpec,
    exchange: &SharedExchange,
    observer: &mut dyn Observer,
) -> Result<Proved<Box<dyn EngineState>>, ProfileError> {
    let proved = catch_unwind(AssertUnwindSafe(|| {
        profile_rank(target, spec, &mut Meeting(exchange), observer)
    }));
    proved.unwrap_or_else(|panic| {
        // The others need not wait.
        lock(exchange).leave();
        resume_unwind(panic)
    })
}

/// The agreements of the profile.
struct Meeting<'a>(&'a SharedExchange);

impl Ranks for Meeting<'_> {
    fn rank(&self) -> usize {
        lock(self.0).rank()
    }

    fn count(&self) -> usize {
        lock(self.0).ranks()
    }

    fn min(&mut self, value: usize) -> Result<usize, RankLost> {
        let least = lock(self.0).least(value);
        least.map_err(|error| RankLost(error.to_string()))
    }
}

/// A step that panicked has left it whole.
fn lock(exchange: &SharedExchange) -> MutexGuard<'_, Exchange> {
    exchange.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What other ranks than the first do is said at a lower level: it is much the same.
struct Quiet(usize);

impl Observer for Quiet {
    fn phase(&mut self, record: &PhaseRecord) {
        tracing::debug!(rank = self.0, "auto-profile {record}");
    }
}
