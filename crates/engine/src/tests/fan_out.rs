//! Several ranks as one executor.

use std::sync::mpsc::{Receiver, Sender, channel};

use plimsoll_core::{
    Component, Executor, FillMasks, Oom, RefusedBy, RequestId, Run, RunInput, SampleSpec, SamplingParams,
    StepError, StepOutput, StepPlan,
};

use super::fake::answer;
use super::*;
use crate::FanOut;

const RANKS: usize = 3;

/// What goes wrong on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Launch,
    Sample,
    Finish,
    Panic,
    Hang,
    OtherToken,
}

/// A rank that meets the others nowhere: they launch what it does not.
struct Part {
    fault: Option<(u64, Fault)>,
    /// Ends a hang.
    release: Receiver<()>,
    launched: VecDeque<StepPlan>,
    masks: Sender<Vec<Vec<u32>>>,
}

impl Part {
    fn fails(&self, plan: &StepPlan, fault: Fault) -> bool {
        self.fault == Some((plan.step, fault))
    }
}

fn oom() -> StepError {
    StepError::Oom(Oom {
        requested: 1,
        component: Component::Arena,
        refused_by: RefusedBy::Device,
        meters: Box::default(),
    })
}

impl Executor for Part {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        assert!(!self.fails(plan, Fault::Panic), "told to panic");
        if self.fails(plan, Fault::Hang) {
            let _ = self.release.recv_timeout(PATIENCE);
        }
        if self.fails(plan, Fault::Launch) {
            return Err(oom());
        }
        self.launched.push_back(plan.clone());
        Ok(())
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        let plan = self.launched.pop_back().expect("a step awaits masks");
        let mut masks = vec![vec![7; 2]; plan.constrained().count()];
        fill(&mut masks.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        self.masks.send(masks).unwrap();
        if self.fails(&plan, Fault::Sample) {
            return Err(oom());
        }
        self.launched.push_back(plan);
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let plan = self.launched.pop_front().expect("a step was launched");
        if self.fails(&plan, Fault::Finish) {
            return Err(oom());
        }
        let mut output = answer(&plan);
        if self.fails(&plan, Fault::OtherToken) {
            output.samples[0] = None;
        }
        Ok(output)
    }
}

fn plan_of(step: u64, constrained: bool) -> StepPlan {
    let spec = SampleSpec {
        params: Arc::new(SamplingParams::greedy()),
        seed: 3,
        index: step as usize,
        history: Vec::new(),
        prompt_len: 0,
        constrained,
    };
    StepPlan {
        step,
        runs: vec![Run {
            request: RequestId(1),
            start: 0,
            input: RunInput::Known(vec![1]),
            images: None,
            tables: Vec::new(),
            state: None,
            sample: Some(spec),
            score: None,
            pool: None,
        }],
        encode: None,
    }
}

/// Several ranks, and what they tell and are told.
struct Ranks {
    all: FanOut<Part>,
    masks: Receiver<Vec<Vec<u32>>>,
    releases: Vec<Sender<()>>,
}

fn fan_out(ranks: usize, fault: Option<(usize, u64, Fault)>) -> Ranks {
    let (masks, all_masks) = channel();
    let (releases, held): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
    let parts = held.into_iter().enumerate().map(|(rank, release)| Part {
        fault: fault
            .filter(|(bad, ..)| *bad == rank)
            .map(|(_, step, fault)| (step, fault)),
        release,
        launched: VecDeque::new(),
        masks: masks.clone(),
    });
    Ranks {
        all: FanOut::new(parts.collect(), 64).unwrap(),
        masks: all_masks,
        releases,
    }
}

#[test]
fn steps_end_well_on_all_ranks_or_on_none() {
    for bad in 0..RANKS {
        for fault in [
            Fault::Launch,
            Fault::Sample,
            Fault::Finish,
            Fault::Panic,
            Fault::OtherToken,
        ] {
            let Ranks {
                mut all,
                masks: _masks,
                ..
            } = fan_out(RANKS, Some((bad, 2, fault)));
            for step in 1..5 {
                let constrained = fault == Fault::Sample;
                let result = all.execute(&plan_of(step, constrained));
                let failed = match (step, fault) {
                    // Rank 0 is what others are compared with.
                    (2, Fault::OtherToken) => matches!(result, Err(StepError::Failed(_))),
                    (2, Fault::Panic) => matches!(result, Err(StepError::Panicked(_))),
                    (2, _) => result == Err(oom()),
                    _ => result == Ok(answer(&plan_of(step, constrained))),
                };
                assert!(failed, "{fault:?} on rank {bad}, step {step}");
            }
        }
    }
}

/// What is undone is the step that failed, and none of those before it.
#[test]
fn a_step_in_flight_outlives_one_that_a_rank_cannot_launch() {
    for (fault, constrained) in [
        (Fault::Launch, false),
        (Fault::Launch, true),
        (Fault::Panic, false),
    ] {
        let Ranks {
            mut all,
            masks: _masks,
            ..
        } = fan_out(RANKS, Some((1, 2, fault)));
        all.launch(&plan_of(1, false)).unwrap();
        assert!(all.launch(&plan_of(2, constrained)).is_err());
        all.launch(&plan_of(3, false)).unwrap();
        for step in [1, 3] {
            assert_eq!(all.finish(), Ok(answer(&plan_of(step, false))), "{fault:?}");
        }
    }
}

/// They are computed once, whatever the number of ranks.
#[test]
fn masks_reach_all_ranks() {
    let Ranks { mut all, masks, .. } = fan_out(RANKS, None);
    all.launch(&plan_of(1, true)).unwrap();
    let mut filled = 0;
    all.sample(&mut |masks| {
        filled += 1;
        masks[0].copy_from_slice(&[5, 6]);
    })
    .unwrap();
    assert_eq!(all.finish().unwrap(), answer(&plan_of(1, true)));
    assert_eq!(filled, 1);
    assert_eq!(
        masks.try_iter().collect::<Vec<_>>(),
        vec![vec![vec![5, 6]]; RANKS]
    );
    // Who fills them may panic: that step is over, and no other.
    all.launch(&plan_of(2, true)).unwrap();
    let sampled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        all.sample(&mut |_| panic!("told to panic"))
    }));
    assert!(sampled.is_err());
    assert_eq!(all.execute(&plan_of(3, true)).unwrap(), answer(&plan_of(3, true)));
}

/// The first answer is waited for however long it takes, so with two ranks no time decides which one is lost.
#[test]
fn a_rank_that_hangs_is_named_and_waited_for_no_longer() {
    for bad in 0..2 {
        let ranks = fan_out(2, Some((bad, 2, Fault::Hang)));
        let mut all = ranks.all;
        all.execute(&plan_of(1, false)).unwrap();
        let mut all = all.with_patience(Duration::ZERO);
        for _ in 0..2 {
            match all.execute(&plan_of(2, false)).unwrap_err() {
                StepError::RankLost(why) => assert!(why.contains(&format!("rank {bad} ")), "{why}"),
                other => panic!("{other:?}"),
            }
        }
        drop(all);
        assert!(ranks.releases[bad].send(()).is_ok(), "it still hangs");
    }
}
