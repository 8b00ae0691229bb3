//! How a rank on a GPU meets the others.
//!
//! On the device in sums of activations ([`AllReduce`]); on the host before each step and each phase of a build ([`Exchange`]): nobody
//! launches what waits for another GPU before all ranks have the memory for it. So a rank that runs out of memory ends the step on all
//! of them before it has begun, and steps in flight are none the worse for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_core::{BuildError, StepError};
use plimsoll_device::cuda::{DeviceError, GpuError};
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::{AllReduce, TimedWay};

use crate::ModelError;

/// One rank's ends of what connects it with the others, which its model and its states share.
#[derive(Clone, Debug)]
pub struct RankLink {
    /// Where GPUs meet.
    pub all_reduce: Arc<AllReduce>,
    /// Where their threads meet.
    pub exchange: Arc<Mutex<Exchange>>,
}

/// Most ways of one product that are measured.
const MOST_WAYS: usize = 31;

impl RankLink {
    /// Waits until all ranks can go on with their step: from here on they launch work that waits for others.
    ///
    /// # Errors
    /// [`StepError::OtherRank`] where one cannot, [`StepError::RankLost`] where one does not come.
    pub(super) fn agree(&self) -> Result<(), StepError> {
        self.lock().agree()
    }

    /// The same between phases of a build, to which ranks may come later.
    pub(super) fn agree_to_build(&self) -> Result<(), BuildError> {
        let agreed = self.lock().agree_in_time();
        agreed.map_err(|error| match error {
            StepError::OtherRank(rank) => BuildError::OtherRank(rank),
            error => BuildError::RankLost(error.to_string()),
        })
    }

    /// This rank cannot go on with what has begun: others that wait for it on the host learn of it. Where it may have launched
    /// work (`launched`), so do their GPUs, and the group is of no use until a state is built again.
    pub(super) fn abandon(&self, launched: bool) {
        self.lock().abandon();
        if launched {
            self.all_reduce.abandon();
        }
    }

    /// A state is about to be built: no rank has work on its GPU any more, and what was abandoned before is forgotten.
    ///
    /// # Errors
    /// [`BuildError`], also where another rank fails.
    pub(super) fn renew(&self, settle: impl FnOnce() -> Result<(), BuildError>) -> Result<(), BuildError> {
        settle()?;
        self.agree_to_build()?;
        self.all_reduce.renew().map_err(DeviceError::Gpu)?;
        self.agree_to_build()
    }

    /// Whether the GPU has waited for another in vain: to be asked behind a step. What it computed is of no use then.
    ///
    /// # Errors
    /// As [`Self::agree`].
    pub(super) fn check(&self) -> Result<(), StepError> {
        self.all_reduce.check().map_err(|error| match error {
            GpuError::Abandoned { rank } => StepError::OtherRank(self.lock().abandoned_by().unwrap_or(rank)),
            error => StepError::RankLost(error.to_string()),
        })
    }

    /// Whether GPUs can still meet, for a step that begins: once a rank has failed in the middle of one they cannot, until a state is
    /// built again. The engine builds one where memory ran out, and after other failures only a new process helps.
    ///
    /// # Errors
    /// [`StepError::RankLost`].
    pub(super) fn check_usable(&self) -> Result<(), StepError> {
        self.check().map_err(|error| match error {
            StepError::OtherRank(rank) => {
                StepError::RankLost(format!("rank {rank} failed in the middle of a step"))
            }
            error => error,
        })
    }

    /// Waits until all ranks have come so far with loading.
    pub(super) fn agree_to_load(&self) -> Result<(), ModelError> {
        self.lock().agree_in_time().map_err(not_loaded)
    }

    /// Whether all ranks say that a condition holds.
    ///
    /// # Errors
    /// As [`Self::agree_to_load`].
    pub(super) fn holds_on_all_ranks(&self, holds: bool) -> Result<bool, ModelError> {
        holds_on_all_ranks(&mut self.lock(), holds)
    }

    /// Replaces the microseconds of each way of a product by the longest of all ranks, infinite where one has no such way: so all
    /// choose alike, in whatever order their ways are.
    ///
    /// # Errors
    /// As [`Self::agree_to_load`].
    pub(super) fn longest(&self, ways: &mut [TimedWay]) -> Result<(), ModelError> {
        longest(&mut self.lock(), ways)
    }

    fn lock(&self) -> MutexGuard<'_, Exchange> {
        // A step that panicked has left it whole.
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`RankLink::holds_on_all_ranks`].
fn holds_on_all_ranks(exchange: &mut Exchange, holds: bool) -> Result<bool, ModelError> {
    let mut all = vec![0.0; exchange.ranks()];
    exchange.agree_in_time().map_err(not_loaded)?;
    exchange
        .gather(&[f32::from(u8::from(holds))], 1, &mut all)
        .map_err(not_loaded)?;
    Ok(all.iter().all(|one| *one == 1.0))
}

/// See [`RankLink::longest`].
fn longest(exchange: &mut Exchange, ways: &mut [TimedWay]) -> Result<(), ModelError> {
    assert!(ways.len() <= MOST_WAYS, "{} ways of a product", ways.len());
    // Ways by number, which are exact in `f32`, and their times.
    let mut own = [[-1.0, f32::INFINITY]; MOST_WAYS];
    for (own, way) in own.iter_mut().zip(&*ways) {
        *own = [way.way as f32, way.us];
    }
    let mut all = vec![0.0; exchange.ranks() * own.as_flattened().len()];
    exchange
        .gather(own.as_flattened(), 1, &mut all)
        .map_err(not_loaded)?;
    for rank in all.chunks_exact(own.as_flattened().len()) {
        for way in &mut *ways {
            let mut known = rank.as_chunks::<2>().0.iter();
            let found = known.find(|known| known[0] == way.way as f32);
            way.us = found.map_or(f32::INFINITY, |known| way.us.max(known[1]));
        }
    }
    // Of those that the library describes alike its first, which is the same on all ranks.
    for at in 1..ways.len() {
        let (known, rest) = ways.split_at_mut(at);
        if known.iter().any(|known| known.way == rest[0].way) {
            rest[0].us = f32::INFINITY;
        }
    }
    Ok(())
}

/// A rank that fails says why itself.
fn not_loaded(error: StepError) -> ModelError {
    match error {
        StepError::OtherRank(_) => ModelError::Cancelled,
        error => ModelError::RankLost(error.to_string()),
    }
}

/// Abandons what has begun, whatever ends it early, panics too, unless [`Self::keep`] is called.
#[derive(Debug)]
pub(super) struct Abandon<'a> {
    link: Option<&'a RankLink>,
    pub(super) launched: bool,
}

impl<'a> Abandon<'a> {
    /// A step, a build or a load begins: to be called on all ranks, before anything of it can fail.
    pub(super) fn begin(link: Option<&'a RankLink>) -> Self {
        link.iter().for_each(|link| link.lock().begin_step());
        Self {
            link,
            launched: false,
        }
    }

    /// It has come to its end, or ended because of another rank.
    pub(super) fn keep(mut self) {
        self.link = None;
    }
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.link {
            link.abandon(self.launched);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// What each rank comes to with these ways and times.
    fn on_all(ranks: &[&[(u32, f32)]]) -> Vec<Vec<(u32, f32)>> {
        thread::scope(|scope| {
            let ranks = Exchange::group(ranks.len()).into_iter().zip(ranks);
            let threads: Vec<_> = ranks
                .map(|(mut exchange, ways)| {
                    scope.spawn(move || {
                        let mut ways: Vec<_> = ways.iter().map(|&(way, us)| TimedWay { way, us }).collect();
                        exchange.begin_step();
                        longest(&mut exchange, &mut ways).unwrap();
                        ways.into_iter().map(|way| (way.way, way.us)).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_slowest_rank_decides_for_all() {
        let failed = f32::INFINITY;
        let most = (1 << 24) - 1;
        let found = on_all(&[
            &[(1, 3.0), (2, 5.0), (most, 1.0)],
            &[(1, 4.0), (2, 2.0), (most, failed)],
            &[(1, 1.0), (2, 1.0), (most, 1.0)],
        ]);
        for found in found {
            assert_eq!(found, [(1, 4.0), (2, 5.0), (most, failed)]);
        }
        assert_eq!(on_all(&[&[], &[]]), [[], []]);
    }

    #[test]
    fn one_rank_is_enough_for_a_no() {
        for (ranks, expected) in [
            ([true; 3], true),
            ([true, true, false], false),
            ([false; 3], false),
        ] {
            let found: Vec<bool> = thread::scope(|scope| {
                let ranks = Exchange::group(3).into_iter().zip(ranks);
                let threads: Vec<_> = ranks
                    .map(|(mut exchange, holds)| {
                        scope.spawn(move || {
                            exchange.begin_step();
                            holds_on_all_ranks(&mut exchange, holds).unwrap()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(found, [expected; 3]);
        }
    }

    /// Of two chips of one kind, one may run more clusters at once.
    #[test]
    fn ranks_choose_among_ways_that_all_have() {
        let found = on_all(&[
            &[(7, 1.0), (5, 3.0), (6, 2.0)],
            &[(6, 4.0), (8, 0.5), (5, 3.5), (9, 0.5)],
        ]);
        let none = f32::INFINITY;
        assert_eq!(found[0], [(7, none), (5, 3.5), (6, 4.0)]);
        assert_eq!(found[1], [(6, 4.0), (8, none), (5, 3.5), (9, none)]);
        // Of ways with one number the first counts.
        let found = on_all(&[&[(4, 2.0), (4, 1.0)], &[(4, 3.0), (4, 0.5), (1, 9.0)]]);
        assert_eq!(found[0], [(4, 3.0), (4, none)]);
        assert_eq!(found[1], [(4, 3.0), (4, none), (1, none)]);
        // Without any in common nothing is left.
        let found = on_all(&[&[(1, 1.0)], &[(2, 1.0), (3, 1.0)]]);
        assert!(found.iter().flatten().all(|(_, us)| *us == none), "{found:?}");
    }
}
