//! Where the ranks of a server meet: threads of one process, each with a part of the model.
//!
//! Every rank makes the same calls in the same order. What one gives is copied to memory that all can read; when all have come,
//! each reads what the others gave, in the order of ranks, so that all get the same bits. No wait lasts longer than a bound, and a
//! rank that cannot go on says so ([`Exchange::abandon`]), so that nobody waits for it.

use std::cmp::Reverse;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_core::StepError;

/// Elements that a rank gives at a time: more are given one part after the other.
const PART: usize = 1 << 15;

/// Parts of a rank that are kept.
const TURNS: usize = 4;

/// Longest wait for a rank in a step. Ranks have equal parts, so that none is much slower than the others.
const STEP_PATIENCE: Duration = Duration::from_secs(60);

/// Longest wait for a rank that loads weights or builds a state.
const BUILD_PATIENCE: Duration = Duration::from_secs(900);

/// Looks at the others before a rank that waits for them sleeps.
const SPINS: usize = 64;

/// One rank's end. It has left once this is dropped: the others' next exchange is an error.
#[derive(Debug)]
pub struct Exchange {
    shared: Arc<Shared>,
    rank: usize,
    /// Where it is: the step, and how many exchanges of the step it has begun.
    at: Place,
    /// Parts it has given in this step.
    given: usize,
}

#[derive(Debug)]
struct Shared {
    ranks: Mutex<Vec<Rank>>,
    changed: Condvar,
    /// What each rank gave last and before that, in this step and in the one before: while one is read, the next may be written.
    parts: Vec<[RwLock<Box<[f32]>>; TURNS]>,
    step_patience: Duration,
    build_patience: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    step: u64,
    exchange: u64,
}

/// What is known of a rank.
#[derive(Clone, Debug, Default)]
struct Rank {
    at: Place,
    /// The step that it cannot go on with.
    abandoned: Option<u64>,
    /// What it brought to the last agreement.
    value: usize,
    /// It left, or did not come in time: for good.
    lost: Option<String>,
}

impl Exchange {
    /// Bytes of memory that each rank of several takes; one alone takes none.
    pub const BYTES: usize = TURNS * PART * size_of::<f32>();

    /// The ends of `ranks` ranks, in order.
    pub fn group(ranks: usize) -> Vec<Self> {
        Self::group_with(ranks, STEP_PATIENCE, BUILD_PATIENCE)
    }

    /// As [`Self::group`], with other bounds for waits in steps and between them.
    pub fn group_with(ranks: usize, step_patience: Duration, build_patience: Duration) -> Vec<Self> {
        let part = || RwLock::new(vec![0.0; if ranks > 1 { PART } else { 0 }].into_boxed_slice());
        let shared = Arc::new(Shared {
            ranks: Mutex::new(vec![Rank::default(); ranks]),
            changed: Condvar::new(),
            parts: (0..ranks).map(|_| std::array::from_fn(|_| part())).collect(),
            step_patience,
            build_patience,
        });
        let end = |rank| Self {
            shared: Arc::clone(&shared),
            rank,
            at: Place::default(),
            given: 0,
        };
        (0..ranks).map(end).collect()
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.shared.parts.len()
    }

    /// A step begins. To be called on every rank for every step, before anything of it can fail.
    pub fn begin_step(&mut self) {
        self.at = Place {
            step: self.at.step + 1,
            exchange: 0,
        };
        self.given = 0;
    }

    /// This rank cannot go on with its step: exchanges of that step in which others wait for it end with
    /// [`StepError::OtherRank`].
    pub fn abandon(&self) {
        self.shared.lock()[self.rank].abandoned = Some(self.at.step);
        self.shared.changed.notify_all();
    }

    /// The rank that has abandoned a step last.
    pub fn abandoned_by(&self) -> Option<usize> {
        let ranks = self.shared.lock();
        let abandoned = ranks.iter().enumerate();
        let abandoned = abandoned.filter_map(|(rank, known)| Some((known.abandoned?, Reverse(rank))));
        abandoned.max().map(|(_, Reverse(rank))| rank)
    }

    /// This rank takes part in nothing any more: whatever others wait for ends with [`StepError::RankLost`].
    pub fn leave(&self) {
        let why = || "has ended".to_owned();
        self.shared.lock()[self.rank].lost.get_or_insert_with(why);
        self.shared.changed.notify_all();
    }

    /// Waits until all ranks have come as far in this step: each has what it needs to go on with it.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn agree(&mut self) -> Result<(), StepError> {
        self.meet(self.shared.step_patience).map(drop)
    }

    /// As [`Self::agree`], where ranks come at their own pace: they load and build.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn agree_in_time(&mut self) -> Result<(), StepError> {
        self.meet(self.shared.build_patience).map(drop)
    }

    /// Replaces `values` by their sums over all ranks, added in the order of ranks.
    ///
    /// # Errors
    /// [`StepError::OtherRank`] or [`StepError::RankLost`]; `values` are of no use then.
    pub fn sum(&mut self, values: &mut [f32]) -> Result<(), StepError> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Ok(());
        }
        for values in values.chunks_mut(PART) {
            let turn = self.give(values)?;
            for rank in 0..ranks {
                let part = read(&self.shared.parts[rank][turn]);
                match rank {
                    0 => values.copy_from_slice(&part[..values.len()]),
                    _ => (values.iter_mut().zip(part.iter())).for_each(|(sum, value)| *sum += value),
                }
            }
        }
        Ok(())
    }

    /// From the ranks' columns of a matrix, `[rows, width]` each, to all of it: `[rows, ranks × width]`, on every rank.
    ///
    /// # Errors
    /// As [`Self::sum`].
    ///
    /// # Panics
    /// If `all` is not as many times as large as `mine` as there are ranks, or `mine` has another number of rows.
    pub fn gather(&mut self, mine: &[f32], rows: usize, all: &mut [f32]) -> Result<(), StepError> {
        let ranks = self.ranks();
        assert_eq!(all.len(), ranks * mine.len(), "columns of {ranks} ranks");
        if ranks == 1 || mine.is_empty() {
            all.copy_from_slice(mine);
            return Ok(());
        }
        let width = mine.len() / rows;
        assert_eq!(mine.len(), rows * width, "columns of {rows} rows");
        for (index, values) in mine.chunks(PART).enumerate() {
            let turn = self.give(values)?;
            for rank in 0..ranks {
                let part = read(&self.shared.parts[rank][turn]);
                let (mut from, mut at) = (&part[..values.len()], index * PART);
                while !from.is_empty() {
                    let (row, column) = (at / width, at % width);
                    let of_row;
                    (of_row, from) = from.split_at(from.len().min(width - column));
                    all[row * ranks * width + rank * width + column..][..of_row.len()]
                        .copy_from_slice(of_row);
                    at += of_row.len();
                }
            }
        }
        Ok(())
    }

    /// The least of all ranks' values, outside a step. Ranks may come later to it than to an exchange of a step: they load and
    /// build at their own pace.
    ///
    /// # Errors
    /// [`StepError::RankLost`].
    pub fn least(&mut self, value: usize) -> Result<usize, StepError> {
        self.begin_step();
        self.shared.lock()[self.rank].value = value;
        let ranks = self.meet(self.shared.build_patience)?;
        let least = ranks.iter().map(|rank| rank.value).min().unwrap_or(value);
        drop(ranks);
        // The next agreement must not begin before all have read this one.
        drop(self.meet(self.shared.step_patience)?);
        Ok(least)
    }

    /// Gives a part to the others, waits for theirs, and says where they are.
    fn give(&mut self, values: &[f32]) -> Result<usize, StepError> {
        // The same on all ranks, also where one gave less than others in a step that it abandoned.
        let turn = usize::from(self.at.step % 2 == 1) * 2 + self.given % 2;
        self.given += 1;
        let own = &self.shared.parts[self.rank][turn];
        own.write().unwrap_or_else(PoisonError::into_inner)[..values.len()].copy_from_slice(values);
        drop(self.meet(self.shared.step_patience)?);
        Ok(turn)
    }

    /// Waits until all ranks are here.
    fn meet(&mut self, patience: Duration) -> Result<MutexGuard<'_, Vec<Rank>>, StepError> {
        self.at.exchange += 1;
        let (shared, at) = (&*self.shared, self.at);
        let mut ranks = shared.lock();
        ranks[self.rank].at = at;
        shared.changed.notify_all();
        let begun = Instant::now();
        for turn in 0.. {
            if all_are_there(&ranks, self.rank)? {
                return Ok(ranks);
            }
            if turn < SPINS && begun.elapsed() < patience {
                drop(ranks);
                thread::yield_now();
                ranks = shared.lock();
                continue;
            }
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                for rank in ranks.iter_mut().filter(|rank| rank.at < at) {
                    let why = format!("did not come to the others within {} s", patience.as_secs_f64());
                    rank.lost.get_or_insert(why);
                }
                shared.changed.notify_all();
                continue;
            }
            let woken = shared.changed.wait_timeout(ranks, left);
            (ranks, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        unreachable!("there is no last turn")
    }
}

/// Whether nobody is behind rank `here`.
fn all_are_there(ranks: &[Rank], here: usize) -> Result<bool, StepError> {
    let at = ranks[here].at;
    for (rank, other) in ranks.iter().enumerate() {
        if let Some(why) = &other.lost
            && (other.at < at || rank == here)
        {
            return Err(StepError::RankLost(format!("rank {rank} {why}")));
        }
        if other.abandoned == Some(at.step) && (other.at < at || other.at.step > at.step) {
            return Err(StepError::OtherRank(rank));
        }
    }
    Ok(ranks.iter().all(|rank| rank.at >= at))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Rank>> {
        // Every critical section leaves the ranks whole.
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.leave();
    }
}

fn read(part: &RwLock<Box<[f32]>>) -> impl std::ops::Deref<Target = Box<[f32]>> {
    part.read().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const SHORT: Duration = Duration::from_millis(300);
    /// Longer than any rank takes to come, unless it is lost.
    const LONG: Duration = Duration::from_secs(60);

    /// What each rank of `ranks` comes to.
    fn on_all<T: Send>(group: Vec<Exchange>, work: impl Fn(Exchange) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = (group.into_iter())
                .map(|exchange| scope.spawn(|| work(exchange)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn values(rank: usize, len: usize) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(rank as u64);
        (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    #[test]
    fn sums_have_the_same_bits_on_all_ranks() {
        for ranks in [1, 2, 3, 4, 8] {
            for len in [0, 1, 77, PART, 2 * PART + 5] {
                let mut want = values(0, len);
                for rank in 1..ranks {
                    want.iter_mut()
                        .zip(values(rank, len))
                        .for_each(|(sum, value)| *sum += value);
                }
                let found = on_all(Exchange::group(ranks), |mut exchange| {
                    let mut sums = values(exchange.rank(), len);
                    exchange.begin_step();
                    exchange.sum(&mut sums).unwrap();
                    // The memory is used again at once.
                    exchange.sum(&mut [1.0; 3]).unwrap();
                    exchange.sum(&mut [2.0; 3]).unwrap();
                    sums
                });
                found
                    .iter()
                    .for_each(|found| assert_eq!(*found, want, "{ranks} ranks, {len}"));
            }
        }
    }

    /// Nobody goes on before all have come, or one says that it will not.
    #[test]
    fn ranks_agree_to_go_on() {
        for patient in [false, true] {
            let begun = Instant::now();
            let found = on_all(Exchange::group_with(3, LONG, LONG), |mut exchange| {
                let agree = |exchange: &mut Exchange| match patient {
                    false => exchange.agree(),
                    true => exchange.agree_in_time(),
                };
                assert_eq!(exchange.abandoned_by(), None);
                exchange.begin_step();
                let first = agree(&mut exchange);
                exchange.begin_step();
                let second = match exchange.rank() {
                    1 => {
                        exchange.abandon();
                        Err(StepError::OtherRank(1))
                    }
                    _ => agree(&mut exchange),
                };
                // Also when the next step has begun.
                exchange.begin_step();
                assert_eq!(exchange.abandoned_by(), Some(1));
                (first, second, agree(&mut exchange))
            });
            let other = Err(StepError::OtherRank(1));
            found
                .iter()
                .for_each(|found| assert_eq!(*found, (Ok(()), other.clone(), Ok(()))));
            assert!(begun.elapsed() < LONG, "nobody waits in vain");
        }
        // As long as is said: rank 0 comes later than a step waits, and then not at all.
        let given_up = Barrier::new(2);
        let found = on_all(Exchange::group_with(2, SHORT, LONG), |mut exchange| {
            exchange.begin_step();
            if exchange.rank() == 0 {
                thread::sleep(2 * SHORT);
                let late = exchange.agree_in_time();
                given_up.wait();
                return late.and_then(|()| exchange.agree());
            }
            let found = exchange.agree_in_time().and_then(|()| exchange.agree());
            given_up.wait();
            found
        });
        assert!(
            matches!(&found[1], Err(StepError::RankLost(why)) if why.contains("rank 0")),
            "{found:?}"
        );
    }

    #[test]
    fn columns_come_together() {
        for (ranks, rows, width) in [(2, 3, 5), (4, 1, PART + 3), (3, 2 * PART / 7 + 1, 7), (2, 0, 4)] {
            let found = on_all(Exchange::group(ranks), |mut exchange| {
                let mut all = vec![f32::NAN; rows * ranks * width];
                exchange.begin_step();
                let mine = values(exchange.rank(), rows * width);
                exchange.gather(&mine, rows, &mut all).unwrap();
                all
            });
            let parts: Vec<_> = (0..ranks).map(|rank| values(rank, rows * width)).collect();
            let want: Vec<f32> = (0..rows)
                .flat_map(|row| {
                    parts
                        .iter()
                        .flat_map(move |part| part[row * width..][..width].to_vec())
                })
                .collect();
            found
                .iter()
                .for_each(|found| assert!(*found == want, "{ranks} ranks, {rows} x {width}"));
        }
    }

    #[test]
    fn ranks_agree_again_and_again() {
        let found = on_all(Exchange::group(4), |mut exchange| {
            let rank = exchange.rank();
            (0..200)
                .map(|round| exchange.least((rank + round) % 4 + round).unwrap())
                .collect::<Vec<_>>()
        });
        found
            .iter()
            .for_each(|found| assert_eq!(*found, (0..200).collect::<Vec<_>>()));
    }

    /// Who abandons a step costs nobody the next one.
    #[test]
    fn an_abandoned_step_ends_everywhere_and_the_next_one_runs() {
        for bad in 0..3 {
            let found = on_all(Exchange::group(3), |mut exchange| {
                let rank = exchange.rank();
                exchange.begin_step();
                let first = exchange.sum(&mut [1.0]);
                let first = if rank == bad {
                    exchange.abandon();
                    first
                } else {
                    first.and_then(|()| exchange.sum(&mut [1.0]))
                };
                let agreed = exchange.least(rank);
                exchange.begin_step();
                let mut sums = [rank as f32];
                (first, agreed, exchange.sum(&mut sums).map(|()| sums[0]))
            });
            for (rank, (first, agreed, next)) in found.into_iter().enumerate() {
                let want = if rank == bad {
                    Ok(())
                } else {
                    Err(StepError::OtherRank(bad))
                };
                assert_eq!(
                    (first, agreed, next),
                    (want, Ok(0), Ok(3.0)),
                    "rank {rank}, {bad}"
                );
            }
        }
    }

    /// As a rank whose device hangs: it holds its end and never comes.
    #[test]
    fn a_rank_that_does_not_come_is_named_on_all_others_and_for_good() {
        for bad in 0..3 {
            let group = Exchange::group_with(3, SHORT, SHORT);
            let given_up = Barrier::new(3);
            let found = on_all(group, |mut exchange| {
                exchange.begin_step();
                if exchange.rank() == bad {
                    given_up.wait();
                    return (exchange.sum(&mut [1.0]), Ok(0));
                }
                let found = (exchange.sum(&mut [1.0]), exchange.least(1));
                given_up.wait();
                found
            });
            for (first, then) in found {
                let is_named = |error: &StepError| matches!(error, StepError::RankLost(why) if why.starts_with(&format!("rank {bad} did not")));
                assert!(is_named(first.as_ref().unwrap_err()), "{first:?}");
                assert!(then == Ok(0) || is_named(then.as_ref().unwrap_err()), "{then:?}");
            }
        }
    }

    #[test]
    fn a_rank_that_ended_is_not_waited_for() {
        let begun = Instant::now();
        let found = on_all(Exchange::group(2), |mut exchange| {
            exchange.begin_step();
            match exchange.rank() {
                0 => Ok(()),
                _ => exchange.sum(&mut [1.0]),
            }
        });
        assert_eq!(found[1], Err(StepError::RankLost("rank 0 has ended".to_owned())));
        assert!(begun.elapsed() < STEP_PATIENCE);
    }
}
