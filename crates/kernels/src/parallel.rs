//! A parallel-for for operations of a few microseconds.
//!
//! A decode step of a small model is some two hundred operations of 5 to 50 µs. A general work-stealing pool puts its
//! workers to sleep between them and pays a futex round trip for each; here workers spin for a moment (as OpenMP's and
//! ggml's do) before they park, so that a fork and join costs well under a microsecond.

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks. Longer than the serial gaps inside a step, far shorter than anything a
/// person or a power meter would notice.
const SPIN: Duration = Duration::from_micros(100);

static POOL: OnceLock<Pool> = OnceLock::new();

/// Fixes the number of threads that work on one operation, the calling one included. Has an effect once, before the
/// first operation; returns the number in force. Without it, one thread per available CPU.
pub fn set_threads(threads: usize) -> usize {
    POOL.get_or_init(|| Pool::new(threads.max(1))).threads()
}

/// Threads that work on one operation.
pub fn threads() -> usize {
    pool().threads()
}

fn pool() -> &'static Pool {
    POOL.get_or_init(|| Pool::new(thread::available_parallelism().map_or(1, |n| n.get())))
}

/// Calls `task(worker, i)` for every `i` in `0..tasks`, in parallel, and returns when all are done. `worker` is below
/// [`threads`] and no two tasks run on one worker at a time, so it can index scratch. A panic in a task is passed on.
///
/// A call from inside a task, or while another thread uses the pool, runs serially on the calling thread.
pub(crate) fn run(tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
    if tasks <= 1 {
        (0..tasks).for_each(|i| task(0, i));
    } else {
        pool().run(tasks, task);
    }
}

/// Splits `0..len` into about `threads × 4` ranges of multiples of `grain` and runs them in parallel.
pub(crate) fn run_ranges(len: usize, grain: usize, task: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
    let grains = len.div_ceil(grain);
    let per_task = grains.div_ceil(threads() * 4).max(1) * grain;
    run(len.div_ceil(per_task), &|_, i| {
        task(i * per_task..((i + 1) * per_task).min(len))
    });
}

type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    /// Held while a job is published: one job at a time.
    busy: Mutex<()>,
}

/// A job: valid from its publication until `Shared::state` is closed with no active worker.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

struct Shared {
    /// `generation << 32 | CLOSED? | workers active in this generation`.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    next: AtomicUsize,
    parked: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const CLOSED: u64 = 1 << 31;
const ACTIVE: u64 = CLOSED - 1;

// SAFETY: `job` is written only while the state is closed and no worker is active, and read only by workers that
// entered the generation it was published for; `state` orders the two.
unsafe impl Sync for Shared {}
// SAFETY: the task behind the pointer is `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(CLOSED),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            panic: Mutex::new(None),
        });
        let spawn = |worker: usize| {
            let shared = Arc::clone(&shared);
            let body = move || shared.work(worker);
            // Fewer threads than asked for is slower but right.
            thread::Builder::new()
                .name(format!("plimsoll-op-{worker}"))
                .spawn(body)
                .ok()
        };
        let workers = (1..threads)
            .filter_map(spawn)
            .map(|handle| handle.thread().clone())
            .collect();
        Self {
            shared,
            workers,
            busy: Mutex::new(()),
        }
    }

    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn run(&self, tasks: usize, task: &Task<'_>) {
        let _guard = match self.busy.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..tasks).for_each(|i| task(0, i)),
        };
        let shared = &*self.shared;
        // SAFETY: the lifetime is erased only until this function returns, and it does not return before the
        // generation is closed and every worker that entered it has left.
        let erased = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
        // SAFETY: the state is closed with nobody active, so no worker reads the job.
        unsafe { *shared.job.get() = Some(Job { task: erased, tasks }) };
        shared.next.store(0, Ordering::Relaxed);
        let generation = (shared.state.load(Ordering::Relaxed) >> 32) + 1;
        shared.state.store(generation << 32, Ordering::SeqCst);
        if shared.parked.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(Thread::unpark);
        }
        shared.claim(0, task, tasks);
        shared.state.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins += 1;
            if spins < 10_000 {
                std::hint::spin_loop()
            } else {
                thread::yield_now()
            }
        }
        let panic = shared.panic.lock().unwrap_or_else(|p| p.into_inner()).take();
        if let Some(panic) = panic {
            drop(_guard);
            resume_unwind(panic);
        }
    }
}

impl Shared {
    /// Takes tasks until none is left. A panic ends the job early and is kept for the caller.
    fn claim(&self, worker: usize, task: &Task<'_>, tasks: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                task(worker, i);
            }
        }));
        if let Err(panic) = result {
            self.next.store(tasks, Ordering::Relaxed);
            *self.panic.lock().unwrap_or_else(|p| p.into_inner()) = Some(panic);
        }
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let state = self.wait_for_news(seen);
            seen = state >> 32;
            if self.enter(seen) {
                // SAFETY: this generation is open and counts this worker, so the job stays valid until it leaves.
                let Job { task, tasks } =
                    unsafe { (*self.job.get()).expect("published before it was opened") };
                // SAFETY: as above.
                self.claim(worker, unsafe { &*task }, tasks);
                self.state.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Counts this worker in, unless the generation is over.
    fn enter(&self, generation: u64) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        while state >> 32 == generation && state & CLOSED == 0 {
            match self
                .state
                .compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    fn wait_for_news(&self, seen: u64) -> u64 {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                let state = self.state.load(Ordering::Acquire);
                if state >> 32 != seen {
                    return state;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                break;
            }
        }
        // Announce, then look again: the publisher stores the state before it reads `parked`.
        self.parked.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            let state = self.state.load(Ordering::SeqCst);
            if state >> 32 != seen {
                break state;
            }
            thread::park();
        };
        self.parked.fetch_sub(1, Ordering::SeqCst);
        state
    }
}

/// A slice of which parallel tasks write disjoint parts, and read those that none writes.
pub(crate) struct Disjoint<'a, T> {
    data: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: hands out parts to threads as `&mut [T]` would be sent, or `&[T]`; disjointness is the callers' promise.
unsafe impl<T: Send + Sync> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            data: slice.as_mut_ptr(),
            len: slice.len(),
            _borrow: PhantomData,
        }
    }

    /// The part `start..start + len`.
    ///
    /// # Safety
    /// No other live part may overlap it.
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        self.check(start, len);
        // SAFETY: in bounds, and disjoint from other parts by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }

    /// The part `start..start + len`, to be read by several tasks.
    ///
    /// # Safety
    /// No other live part that may be written may overlap it.
    pub(crate) unsafe fn shared(&self, start: usize, len: usize) -> &'a [T] {
        self.check(start, len);
        // SAFETY: in bounds, and disjoint from parts that are written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.add(start), len) }
    }

    fn check(&self, start: usize, len: usize) {
        assert!(
            start <= self.len && len <= self.len - start,
            "part {start}+{len} of {}",
            self.len
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Waits until every worker has announced that it parks.
    fn until_parked(pool: &Pool) {
        let begun = Instant::now();
        while pool.shared.parked.load(Ordering::SeqCst) < pool.workers.len() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "an idle worker spins on"
            );
            thread::yield_now();
        }
    }

    #[test]
    fn every_task_runs_once_whatever_the_worker_count() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for round in 0..2000 {
                let counts: Vec<AtomicU32> = (0..round % 37).map(|_| AtomicU32::new(0)).collect();
                pool.run(counts.len(), &|worker, i| {
                    assert!(worker < threads);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "round {round}"
                );
                if round % 500 == 0 {
                    // The next round must wake them or do without.
                    until_parked(&pool);
                }
            }
        }
    }

    #[test]
    fn panics_reach_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|_, i| assert!(i != 5, "task five"))
        }));
        assert!(
            result
                .unwrap_err()
                .downcast_ref::<&str>()
                .is_some_and(|m| m.contains("task five"))
        );
        let sum = AtomicUsize::new(0);
        pool.run(8, &|_, i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }

    #[test]
    fn nested_and_concurrent_calls_run_serially() {
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    run(4, &|_, _| {
                        run(4, &|_, i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    });
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 4 * 6);
    }
}
