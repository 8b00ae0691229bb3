//! One executor made of several: the ranks of a server, each with a part of the model and a thread of its own.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use plimsoll_core::{DeviceTime, EncodeCost, Executor, FillMasks, StepError, StepOutput, StepPlan, mask};

use crate::thread::guard;

/// Longest wait for a rank after another has done its part: longer than ranks wait for each other in a step.
const PATIENCE: Duration = Duration::from_secs(90);

/// What a rank's thread does with its executor.
type Job<S> = Box<dyn FnOnce(&mut Part<S>) + Send>;

/// Executors that compute each step together: all get the same plans and come to the same output, of which that of rank 0 is
/// given out. A step ends well on all of them or on none. Dropped whole, with its threads.
pub struct FanOut<S> {
    ranks: Vec<Rank<S>>,
    patience: Duration,
    /// Words of a mask.
    mask_words: usize,
    /// Constrained runs of the step launched last.
    constrained: usize,
    /// Why no step can be computed any more.
    lost: Option<String>,
}

struct Rank<S> {
    jobs: Option<Sender<Job<S>>>,
    thread: Option<JoinHandle<()>>,
}

/// The executor of a rank, and its steps.
struct Part<S> {
    state: S,
    /// Steps that were launched and not waited for.
    launched: usize,
    /// Results of steps that were waited for early because a later one was undone, the oldest first.
    ended: VecDeque<Result<StepOutput, StepError>>,
}

impl<S: Executor> Part<S> {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.state.launch(plan)?;
        self.launched += 1;
        Ok(())
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        // An error or a panic ends the step.
        self.launched = self.launched.saturating_sub(1);
        self.state.sample(fill)?;
        self.launched += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        self.ended.pop_front().unwrap_or_else(|| self.wait())
    }

    /// Waits for the oldest step that was not waited for yet.
    fn wait(&mut self) -> Result<StepOutput, StepError> {
        self.launched = self.launched.saturating_sub(1);
        self.state.finish()
    }

    /// Ends the step launched last. The results of the steps before it are still wanted, and kept.
    fn undo(&mut self) {
        while self.launched > 1 {
            let ended = guard(|| self.wait());
            self.ended.push_back(ended);
        }
        // Its result is not wanted.
        let _ = self.wait();
    }
}

impl<S> fmt::Debug for FanOut<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FanOut")
            .field("ranks", &self.ranks.len())
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

impl<S: Executor + 'static> FanOut<S> {
    /// Of the states of all ranks, in their order, for a vocabulary of so many tokens.
    ///
    /// # Errors
    /// Where the operating system gives no thread.
    pub fn new(states: Vec<S>, vocab_size: usize) -> std::io::Result<Self> {
        let ranks = states.into_iter().enumerate().map(|(rank, state)| {
            let (jobs, queue) = channel::<Job<S>>();
            let mut part = Part {
                state,
                launched: 0,
                ended: VecDeque::new(),
            };
            let thread = thread::Builder::new()
                .name(format!("plimsoll-rank-{rank}"))
                .spawn(move || queue.into_iter().for_each(|job| job(&mut part)))?;
            Ok(Rank {
                jobs: Some(jobs),
                thread: Some(thread),
            })
        });
        Ok(Self {
            ranks: ranks.collect::<std::io::Result<_>>()?,
            patience: PATIENCE,
            mask_words: mask::words(vocab_size),
            constrained: 0,
            lost: None,
        })
    }

    /// With another bound.
    #[cfg(test)]
    pub(crate) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// What `work` comes to on each rank of `ranks`, in their order.
    ///
    /// # Errors
    /// [`StepError::RankLost`] where one does not answer, or knows that another is lost: that one is not waited for.
    fn on<R: Send + 'static>(
        &self,
        ranks: &[usize],
        work: impl Fn(&mut Part<S>) -> Result<R, StepError> + Send + Sync + 'static,
    ) -> Result<Vec<Result<R, StepError>>, StepError> {
        if let Some(why) = &self.lost {
            return Err(StepError::RankLost(why.clone()));
        }
        let work = Arc::new(work);
        let (answers, answered) = channel();
        for &rank in ranks {
            let (work, answers) = (Arc::clone(&work), answers.clone());
            let job: Job<S> = Box::new(move |part| {
                // Nobody waits any more where a rank was lost.
                let _ = answers.send((rank, guard(|| work(part))));
            });
            let sent = self.ranks[rank].jobs.as_ref().map(|jobs| jobs.send(job));
            if !matches!(sent, Some(Ok(()))) {
                return Err(StepError::RankLost(format!("rank {rank} has ended")));
            }
        }
        drop(answers);
        let mut done: Vec<Option<Result<R, StepError>>> = ranks.iter().map(|_| None).collect();
        for count in 0..ranks.len() {
            // How long a step takes is for the stall detection to judge; ranks differ little.
            let answer = match count {
                0 => answered.recv().map_err(RecvTimeoutError::from),
                _ => answered.recv_timeout(self.patience),
            };
            let Ok((rank, result)) = answer else {
                let missing = ranks.iter().zip(&done).find(|(_, done)| done.is_none());
                let rank = missing.map_or(0, |(rank, _)| *rank);
                return Err(StepError::RankLost(format!(
                    "rank {rank} did not end its part of a step within {} s after the others",
                    self.patience.as_secs_f64()
                )));
            };
            if let Err(lost @ StepError::RankLost(_)) = result {
                return Err(lost);
            }
            if let Some(at) = ranks.iter().position(|&known| known == rank) {
                done[at] = Some(result);
            }
        }
        Ok(done.into_iter().flatten().collect())
    }

    /// The same on all ranks, whose work may fail: what they came to, if it is well on all of them. Where it is not, those on which
    /// it is `undo` it.
    fn agreed<R: Send + 'static>(
        &mut self,
        work: impl Fn(&mut Part<S>) -> Result<R, StepError> + Send + Sync + 'static,
        undo: impl Fn(&mut Part<S>) + Send + Sync + 'static,
    ) -> Result<Vec<R>, StepError> {
        let all: Vec<usize> = (0..self.ranks.len()).collect();
        let done = match self.on(&all, work) {
            Ok(done) => done,
            Err(lost) => return Err(self.lose(lost)),
        };
        let errors = done.iter().filter_map(|done| done.as_ref().err());
        // One that only could not go on without another says the least.
        let worst = errors.min_by_key(|error| match error {
            StepError::Oom(_) => 0,
            StepError::OtherRank(_) => 2,
            _ => 1,
        });
        let Some(worst) = worst.cloned() else {
            return Ok(done.into_iter().flatten().collect());
        };
        let well: Vec<usize> = all.into_iter().filter(|&rank| done[rank].is_ok()).collect();
        let undo = move |part: &mut Part<S>| {
            undo(part);
            Ok(())
        };
        if let Err(lost) = self.on(&well, undo) {
            return Err(self.lose(lost));
        }
        for (rank, error) in done
            .iter()
            .enumerate()
            .filter_map(|(rank, done)| Some((rank, done.as_ref().err()?)))
        {
            if !matches!(error, StepError::OtherRank(_)) {
                tracing::error!(rank, %error, "a rank could not compute its part of a step");
            }
        }
        Err(worst)
    }

    fn lose(&mut self, error: StepError) -> StepError {
        if let StepError::RankLost(why) = &error {
            self.lost.get_or_insert_with(|| why.clone());
        }
        error
    }
}

impl<S: Executor + 'static> Executor for FanOut<S> {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.constrained = plan.constrained().count();
        let (plan, awaits) = (plan.clone(), plan.awaits_masks());
        let undo = move |part: &mut Part<S>| match awaits {
            // Masks that cannot be filled end the step.
            true => {
                let stop = &mut |_: &mut [&mut [u32]]| panic!("the step ended on another rank");
                let _ = guard(|| part.sample(stop));
            }
            false => part.undo(),
        };
        self.agreed(move |part| part.launch(&plan), undo).map(drop)
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        let mut masks = vec![vec![0; self.mask_words]; self.constrained];
        let mut slices: Vec<&mut [u32]> = masks.iter_mut().map(Vec::as_mut_slice).collect();
        let filled = catch_unwind(AssertUnwindSafe(|| fill(&mut slices)));
        let masks = filled.is_ok().then_some(masks);
        let work = move |part: &mut Part<S>| {
            part.sample(&mut |own| match &masks {
                Some(masks) => own
                    .iter_mut()
                    .zip(masks)
                    .for_each(|(own, mask)| own.copy_from_slice(mask)),
                None => panic!("there are no masks"),
            })
        };
        let sampled = self.agreed(work, Part::undo).map(drop);
        match filled {
            Ok(()) => sampled,
            Err(panic) => resume_unwind(panic),
        }
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let mut outputs = self.agreed(Part::finish, |_| {})?.into_iter();
        let first = outputs.next().unwrap_or_default();
        match outputs.position(|output| output != first) {
            None => Ok(first),
            Some(at) => Err(StepError::Failed(format!(
                "rank {} came to another output than rank 0: this is a bug in the server, please report it",
                at + 1
            ))),
        }
    }

    fn rest(&mut self) {
        for jobs in self.ranks.iter().filter_map(|rank| rank.jobs.as_ref()) {
            // The next step finds out where a rank has ended.
            let _ = jobs.send(Box::new(|part| part.state.rest()));
        }
    }

    fn device_time(&self) -> Option<DeviceTime> {
        let mut times = self.on(&[0], |part| Ok(part.state.device_time())).ok()?;
        times.pop()?.ok()?
    }

    fn encode_cost(&self) -> Option<EncodeCost> {
        let mut costs = self.on(&[0], |part| Ok(part.state.encode_cost())).ok()?;
        costs.pop()?.ok()?
    }

    fn state_chunk(&self) -> usize {
        let chunks = self.on(&[0], |part| Ok(part.state.state_chunk()));
        // If the rank is lost, the first step says so, and where prompts are cut does not matter.
        chunks.ok().and_then(|mut chunks| chunks.pop()?.ok()).unwrap_or(1)
    }
}

impl<S> Drop for FanOut<S> {
    fn drop(&mut self) {
        self.ranks.iter_mut().for_each(|rank| rank.jobs = None);
        // A rank that hangs would never end.
        if self.lost.is_none() {
            for thread in self.ranks.iter_mut().filter_map(|rank| rank.thread.take()) {
                let _ = thread.join();
            }
        }
    }
}
