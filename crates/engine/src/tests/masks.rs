//! Constrained requests: when masks come, and that they are those of the right rows.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use plimsoll_core::{
    BlockSize, Constraint, ConstraintError, Executor, FillMasks, FinishReason, Progress, Run, Sampled,
    StepError, StepLimits, StepOutput, StepPlan, TokenId, mask,
};

use super::{config, expected, options, read, start, submit, token, whole};
use crate::EngineHandle;

const VOCAB: u32 = 100;

/// What happened to the executor, in order.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Launch(u64),
    Sample(u64),
    Finish(u64),
}

/// Steps, each with its masks once they came.
type InFlight = VecDeque<(StepPlan, Option<Vec<Vec<u32>>>)>;

/// It takes the next allowed token at or above the one that it would choose by itself.
struct Device {
    calls: Arc<Mutex<Vec<Call>>>,
    in_flight: InFlight,
    /// The step whose sampling fails, with a panic or without.
    fail_sampling_of: Option<(u64, bool)>,
    /// The seed of a request, and which of its outputs is not finite, nor are those behind it.
    not_finite: Option<(u64, usize)>,
}

fn choose(from: TokenId, allows: impl Fn(TokenId) -> bool) -> TokenId {
    let mut around = (0..VOCAB).map(|i| (from + i) % VOCAB);
    around
        .find(|&token| allows(token))
        .expect("a mask allows something")
}

impl Device {
    fn log(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Executor for Device {
    fn launch(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.log(Call::Launch(plan.step));
        let waits = |(plan, masks): &(StepPlan, Option<_>)| plan.awaits_masks() && masks.is_none();
        assert!(!self.in_flight.iter().any(waits), "a step waits to be sampled");
        self.in_flight.push_back((plan.clone(), None));
        Ok(())
    }

    fn sample(&mut self, fill: &mut FillMasks<'_>) -> Result<(), StepError> {
        let (plan, masks) = self.in_flight.back_mut().expect("a step was launched");
        let step = plan.step;
        if let Some((at, panics)) = self.fail_sampling_of
            && at == step
        {
            self.in_flight.pop_back();
            assert!(!panics, "told to panic");
            return Err(StepError::Failed("told to fail".into()));
        }
        let mut all = vec![vec![0; mask::words(VOCAB as usize)]; plan.constrained().count()];
        fill(&mut all.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        assert!(masks.replace(all).is_none(), "a step is sampled once");
        self.log(Call::Sample(step));
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, StepError> {
        let (plan, masks) = self.in_flight.pop_front().expect("a step was launched");
        self.log(Call::Finish(plan.step));
        assert_eq!(
            masks.is_some(),
            plan.awaits_masks(),
            "masks are for those that wait"
        );
        let mut masks = masks.into_iter().flatten();
        let mut sampled = |run: &Run| {
            let spec = run.sample.as_ref()?;
            let own = token(spec.seed, spec.index);
            let token = match spec.constrained {
                true => {
                    let mask = masks.next().expect("each has a mask");
                    choose(own, |token| mask::allows(&mask, token))
                }
                false => own,
            };
            Some(Sampled {
                token,
                logprobs: None,
            })
        };
        let mut samples: Vec<_> = plan.runs.iter().map(&mut sampled).collect();
        let mut not_finite = Vec::new();
        for (index, run) in plan.runs.iter().enumerate() {
            let specs = run.sample.iter().zip(self.not_finite);
            if specs
                .into_iter()
                .any(|(spec, (seed, at))| spec.seed == seed && spec.index >= at)
            {
                samples[index] = None;
                not_finite.push(index);
            }
        }
        Ok(StepOutput {
            samples,
            not_finite,
            ..Default::default()
        })
    }
}

/// The sum of all tokens decides which may come next; `left` of them may.
#[derive(Clone, Debug)]
struct Sum {
    sum: u32,
    left: usize,
    fails_at: Option<usize>,
}

impl Sum {
    fn allows(&self, token: TokenId) -> bool {
        (self.sum + token).is_multiple_of(7)
    }
}

impl Constraint for Sum {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        if self.fails_at == Some(self.left) {
            return Err(ConstraintError("told to fail".into()));
        }
        for token in (0..32 * mask.len() as u32).filter(|&token| !self.allows(token)) {
            mask::forbid(mask, token);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        assert!(self.allows(token), "the token of another request");
        self.sum += token;
        self.left -= 1;
        Ok(match self.left {
            0 => Progress::Complete,
            _ => Progress::Open,
        })
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// What a request under [`Sum`] says.
fn summed(seed: u64, len: usize) -> Vec<TokenId> {
    let mut rule = Sum {
        sum: seed as u32,
        left: usize::MAX,
        fails_at: None,
    };
    let next = |index| {
        let chosen = choose(token(seed, index), |token| rule.allows(token));
        rule.sum += chosen;
        chosen
    };
    (0..len).map(next).collect()
}

struct Rig {
    engine: EngineHandle,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Rig {
    fn new(steps_in_flight: usize, num_blocks: usize, fail_sampling_of: Option<(u64, bool)>) -> Self {
        Self::with(steps_in_flight, num_blocks, |device| {
            device.fail_sampling_of = fail_sampling_of;
        })
    }

    fn with(steps_in_flight: usize, num_blocks: usize, change: impl FnOnce(&mut Device)) -> Self {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let mut device = Device {
            calls: Arc::clone(&calls),
            in_flight: VecDeque::new(),
            fail_sampling_of: None,
            not_finite: None,
        };
        change(&mut device);
        let limits = StepLimits {
            max_num_batched_tokens: 64,
            max_num_seqs: 16,
            max_model_len: 64,
        };
        let (block_size, config) = (BlockSize::new(8).unwrap(), config(1000, steps_in_flight));
        let engine = start(device, limits, block_size, num_blocks, &config);
        Self { engine, calls }
    }

    /// `len` tokens at most, `rule` if there is one.
    fn submit(&self, seed: u64, len: usize, rule: Option<Sum>) -> crate::RequestStream {
        let mut options = options(seed, len);
        options.constraints.extend(rule.map(|rule| Box::new(rule) as _));
        submit(&self.engine, options).unwrap()
    }
}

fn rule(seed: u64, left: usize) -> Option<Sum> {
    Some(Sum {
        sum: seed as u32,
        left,
        fails_at: None,
    })
}

#[tokio::test]
async fn a_step_is_sampled_behind_the_one_it_depends_on_and_before_the_next() {
    use Call::{Finish, Launch, Sample};
    let calls = |steps, constrained: bool| async move {
        let rig = Rig::new(steps, 16, None);
        let rule = if constrained { rule(3, usize::MAX) } else { None };
        read(rig.submit(3, 4, rule)).await.1.unwrap();
        rig.calls.lock().unwrap().clone()
    };
    let next = |step| [Sample(step), Launch(step + 1), Finish(step)];
    let ahead = [
        vec![Launch(0)],
        (0..3).flat_map(next).collect(),
        vec![Sample(3), Finish(3)],
    ]
    .concat();
    assert_eq!(calls(2, true).await, ahead);
    let free: Vec<Call> = ahead
        .into_iter()
        .filter(|call| !matches!(call, Sample(_)))
        .collect();
    assert_eq!(calls(2, false).await, free, "others run as ever");
    let alone = calls(1, true).await;
    let turn = |step| [Launch(step), Sample(step), Finish(step)];
    assert_eq!(alone, (0..4).flat_map(turn).collect::<Vec<_>>());
}

/// Beside each other, preempted for want of blocks, some cancelled: everybody says what they would alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_follows_its_own_rule() {
    for steps_in_flight in [1, 2] {
        let rig = Rig::new(steps_in_flight, 20, None);
        let submit = |seed: u64| {
            let len = 5 + seed as usize % 40;
            let (rule, text, end) = match seed % 3 {
                0 => (None, expected(seed, len), FinishReason::Length),
                1 => (rule(seed, len), summed(seed, len), FinishReason::Complete),
                _ => (rule(seed, len + 1), summed(seed, len), FinishReason::Length),
            };
            let stream = rig.submit(seed, len, rule);
            if seed % 10 == 7 {
                drop(stream);
                return None;
            }
            Some((seed, text, end, tokio::spawn(read(stream))))
        };
        for (seed, text, end, client) in (0..120).filter_map(submit).collect::<Vec<_>>() {
            assert_eq!(client.await.unwrap(), (text, Ok(end)), "seed {seed}");
        }
        let stats = rig.engine.stats();
        assert!(stats.scheduler.preemptions > 0, "{stats:?}");
    }
}

#[tokio::test]
async fn a_constraint_that_fails_ends_its_own_request_alone() {
    for steps_in_flight in [1, 2] {
        let rig = Rig::new(steps_in_flight, 40, None);
        let failing = Sum {
            fails_at: Some(5),
            ..rule(1, 9).unwrap()
        };
        let clients = [
            rig.submit(1, 30, Some(failing)),
            rig.submit(2, 30, rule(2, 50)),
            rig.submit(4, 30, None),
        ];
        let [failed, ruled, free] = clients;
        let (failed, ruled, free) = tokio::join!(read(failed), read(ruled), read(free));
        assert_eq!(failed.0, summed(1, 4));
        assert!(matches!(failed.1, Err(StepError::Constraint(_))), "{failed:?}");
        assert_eq!(ruled, (summed(2, 30), Ok(FinishReason::Length)));
        assert_eq!(free, whole(4, 30));
        let (stats, health) = (rig.engine.stats(), rig.engine.health());
        assert_eq!((stats.failed_steps, health.last_error), (0, None));
    }
}

#[tokio::test]
async fn sampling_that_fails_ends_its_step_alone() {
    for (steps_in_flight, panics) in [(1, false), (2, false), (1, true), (2, true)] {
        let rig = Rig::new(steps_in_flight, 40, Some((3, panics)));
        let (text, end) = read(rig.submit(1, 30, rule(1, 50))).await;
        assert_eq!(text, summed(1, 3));
        let error = end.unwrap_err();
        assert!(error.to_string().contains("told to "), "{error}");
        assert_eq!(matches!(error, StepError::Panicked(_)), panics);
        let after = read(rig.submit(2, 10, rule(2, 50))).await;
        assert_eq!(after, (summed(2, 10), Ok(FinishReason::Length)));
    }
}

/// Its constraints are not followed, and masks of the step behind go to the right rows all the same.
#[tokio::test]
async fn a_constrained_request_that_is_not_finite_ends_alone() {
    for steps_in_flight in [1, 2] {
        let rig = Rig::with(steps_in_flight, 40, |device| device.not_finite = Some((1, 4)));
        let clients = [
            rig.submit(1, 30, rule(1, 50)),
            rig.submit(2, 30, rule(2, 50)),
            rig.submit(4, 30, None),
        ];
        let [failed, ruled, free] = clients;
        let (failed, ruled, free) = tokio::join!(read(failed), read(ruled), read(free));
        assert_eq!(failed.0, summed(1, 4));
        assert!(matches!(failed.1, Err(StepError::NotFinite(_))), "{failed:?}");
        assert_eq!(ruled, (summed(2, 30), Ok(FinishReason::Length)));
        assert_eq!(free, whole(4, 30));
        assert_eq!(rig.engine.stats().failed_steps, 0);
    }
}
