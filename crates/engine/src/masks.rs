use std::sync::OnceLock;
use std::thread::available_parallelism;

use plimsoll_core::Constraints;
use plimsoll_scheduler::Follow;
use rayon::ThreadPool;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

/// Most threads: a mask takes some 50 us, and a step of hundreds of them takes milliseconds.
const MAX_THREADS: usize = 16;

/// Advances constraints and computes their masks in parallel. Threads start when they are first needed.
#[derive(Debug, Default)]
pub(crate) struct MaskPool(OnceLock<Option<ThreadPool>>);

impl MaskPool {
    /// Writes the mask of each request; one that has ended gets a mask that allows everything.
    pub(crate) fn fill(&self, constraints: Vec<Option<&mut Constraints>>, masks: &mut [&mut [u32]]) {
        let work: Vec<_> = constraints.into_iter().zip(masks).collect();
        self.each(work, |(constraints, mask)| match constraints {
            Some(constraints) => constraints.fill(mask),
            None => mask.fill(u32::MAX),
        });
    }

    /// Advances all constraints.
    pub(crate) fn follow(&self, followers: Vec<Follow<'_>>) {
        self.each(followers, Follow::token);
    }

    fn each<T: Send>(&self, work: Vec<T>, one: impl Fn(T) + Send + Sync) {
        let pool = if work.len() > 1 { self.threads() } else { None };
        match pool {
            Some(pool) => pool.install(|| work.into_par_iter().with_max_len(1).for_each(one)),
            None => work.into_iter().for_each(one),
        }
    }

    /// `None` if there is a single core, or the system gives no threads.
    fn threads(&self) -> Option<&ThreadPool> {
        let pool = self.0.get_or_init(|| {
            let threads = available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("plimsoll-mask-{index}"))
                .build();
            pool.ok().filter(|_| threads > 1)
        });
        pool.as_ref()
    }
}
