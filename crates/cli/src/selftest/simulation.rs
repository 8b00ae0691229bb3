//! The plan of the stages in simulated time: the scheduler is the real one, and its steps take the times that were measured of one.

use std::collections::BTreeMap;
use std::time::Duration;

use plimsoll_core::{
    BlockSize, CacheGroups, Event, KvConfig, Limits as ServerLimits, Request, RequestId, RequestOptions,
    Sampled, StepCost, StepCosts, StepLimits, StepOutput, StepPlan,
};
use plimsoll_scheduler::{PromptBudget, Scheduler, SchedulerConfig};
use serde_json::Value;
use tokio::time::Instant;

use super::TICK;
use super::job::{Job, Leave};
use super::limits::{Group, Limits};
use super::load::Load;
use super::plan::{Backlog, Permit, Plan, Turn, allowance};
use super::stage::Stage;
use super::tally::Tally;
use super::verdict::{Measurements, Subject, Verdict};
use super::watch::{Pace, Peaks, Reading};

/// All of a model that takes no images.
const STAGES: [Stage; 8] = [
    Stage::Features,
    Stage::Longest,
    Stage::Mixed,
    Stage::Prefixes,
    Stage::Disconnects,
    Stage::Full,
    Stage::Rows,
    Stage::Mix,
];

/// A request that is under way.
struct Sent {
    job: Job,
    at: Duration,
    generated: usize,
    permit: Option<Permit>,
}

/// A server and what a selftest knows about it.
struct Simulation {
    load: Load,
    costs: StepCosts,
    scheduler: Scheduler,
    limits: ServerLimits,
    begin: Instant,
    now: Duration,
    steps: u64,
    sent: BTreeMap<RequestId, Sent>,
    ids: u64,
    pace: Pace,
    peaks: Peaks,
    tally: Tally,
    /// When each goal was reached.
    reached: BTreeMap<Stage, Duration>,
}

impl Simulation {
    /// A server with a state for each row, whose steps in which requests generate take at most `target`.
    fn new(limits: Limits, costs: StepCosts, target: Option<Duration>) -> Self {
        let kv = KvConfig {
            block_size: BlockSize::new(limits.block_size).unwrap(),
            num_pages: limits.kv_tokens / limits.block_size,
            groups: CacheGroups::default(),
            state_slots: limits.max_num_seqs,
        };
        let mut scheduler = Scheduler::new(SchedulerConfig {
            limits: StepLimits {
                max_num_batched_tokens: limits.max_num_batched_tokens,
                max_num_seqs: limits.max_num_seqs,
                max_model_len: limits.max_model_len,
            },
            kv,
            state_chunk: 64,
            enable_prefix_caching: true,
            patience: 1000,
        });
        let budget = PromptBudget::new(costs.clone(), limits.max_num_batched_tokens, target);
        scheduler.limit_prompts(Some(budget.in_chunks_of(64)));
        let load = Load {
            model: "m".into(),
            vocab_size: 1 << 16,
            chat: true,
            pictures: None,
            seed: 0,
            limits: limits.clone(),
        };
        Self {
            limits: ServerLimits {
                max_model_len: limits.max_model_len,
                kv_capacity_tokens: kv.capacity_tokens(),
                vocab_size: 1 << 16,
                images: None,
            },
            load,
            costs,
            scheduler,
            begin: Instant::now(),
            now: Duration::ZERO,
            steps: 0,
            sent: BTreeMap::new(),
            ids: 0,
            pace: Pace::default(),
            peaks: Peaks::default(),
            tally: Tally::default(),
            reached: BTreeMap::new(),
        }
    }

    /// A selftest of this time, until its goals are reached.
    fn run(mut self, time: Duration) -> Self {
        let mut plan = Plan::new(&STAGES);
        while let Some(turn) = plan.next(|stage| self.is_reached(stage)) {
            if self.now >= time || self.has_reached_all() {
                break;
            }
            self.turn(&turn, time);
        }
        self
    }

    fn has_reached_all(&self) -> bool {
        STAGES.iter().all(|&stage| self.is_reached(stage))
    }

    /// What the verdict says is enough.
    fn suggested_seconds(&self) -> u64 {
        let computed_tokens = self.scheduler.stats().computed_tokens;
        let measured = Measurements {
            seconds: self.now,
            stage_seconds: BTreeMap::new(),
            pace: self.pace.best,
            before: Reading::default(),
            after: Reading {
                computed_tokens,
                ..Reading::default()
            },
            peaks: self.peaks,
        };
        let subject = Subject {
            url: String::new(),
            model: String::new(),
            seed: 0,
            limits: self.load.limits.clone(),
            pictures: None,
        };
        let goals = STAGES.iter();
        let goals = goals.filter_map(|&stage| self.tally.goal(stage, &self.load, &self.peaks));
        let verdict = Verdict::new(
            subject,
            &measured,
            self.tally.ended(),
            goals.collect(),
            Vec::new(),
        );
        let verdict: Value = serde_json::from_str(&verdict.json()).unwrap();
        verdict["suggested_duration"].as_u64().unwrap()
    }

    fn is_reached(&self, stage: Stage) -> bool {
        let goal = self.tally.goal(stage, &self.load, &self.peaks);
        goal.is_none_or(|goal| goal.is_reached())
    }

    fn turn(&mut self, turn: &Turn, time: Duration) {
        let stage = turn.stage;
        let end = self.now + turn.time(time.saturating_sub(self.now));
        let clients = stage.concurrency(&self.load.limits);
        let mut next = self.tally.begin(stage, self.begin + self.now);
        let mut backlog = Backlog::default();
        let (mut over, mut idle, mut looked) = (false, clients, self.now);
        while self.now < time {
            // Of those without a request each looks for one, and then one at a time.
            let looks = idle + ((self.now - looked).as_secs_f64() / TICK.as_secs_f64()).ceil() as usize;
            looked = self.now;
            let mut exhausted = false;
            for _ in 0..looks {
                if over || exhausted || self.sent.len() == clients {
                    break;
                }
                match self.load.job(stage, next) {
                    None => exhausted = true,
                    Some(job) => self.send(job, end, &mut backlog),
                }
                next += 1;
            }
            if self.sent.is_empty() && (over || exhausted) {
                break;
            }
            idle = self.step(&mut backlog);
            over = turn.is_over(self.now >= end, self.is_reached(stage));
        }
    }

    fn send(&mut self, job: Job, end: Duration, backlog: &mut Backlog) {
        let stats = self.scheduler.stats();
        let permit = job.is_measured().then(|| {
            let left = end.saturating_sub(self.now);
            let allowance = allowance(self.pace.best, left, self.load.limits.max_num_batched_tokens);
            backlog.add(job.computed(stats.prefix_hit_tokens > 0), allowance)
        });
        let permit = match permit {
            Some(None) => return,
            permit => permit.flatten(),
        };
        let tokens = job.body["prompt"].as_array();
        let prompt = tokens.map_or_else(
            || vec![self.ids as u32 % 1000; 20],
            |tokens| {
                tokens
                    .iter()
                    .map(|token| token.as_u64().unwrap() as u32)
                    .collect()
            },
        );
        let options = RequestOptions {
            prompt,
            max_tokens: Some(job.expected.max_tokens),
            ..RequestOptions::default()
        };
        let id = RequestId(self.ids);
        self.ids += 1;
        self.scheduler
            .submit(Request::new(id, options, &self.limits).unwrap());
        self.tally.started += 1;
        let sent = Sent {
            job,
            at: self.now,
            generated: 0,
            permit,
        };
        self.sent.insert(id, sent);
    }

    /// One step, or a moment where there is nothing to do; the number of requests that ended.
    fn step(&mut self, backlog: &mut Backlog) -> usize {
        let before = self.sent.len();
        let plan = self.scheduler.plan();
        let stats = self.scheduler.stats();
        self.peaks.running = self.peaks.running.max(stats.running as u64);
        let usage = stats.pages_used as f64 / stats.pages_total as f64;
        self.peaks.kv_usage = self.peaks.kv_usage.max(usage);
        self.now += match plan.is_empty() {
            true => TICK,
            false => Duration::from_secs_f64(self.seconds(&plan)),
        };
        self.steps += u64::from(!plan.is_empty());
        for (id, event) in self.scheduler.apply(&plan, answer(&plan)) {
            let Event::Token(token) = event else { continue };
            let sent = self.sent.get_mut(&id).unwrap();
            sent.generated += 1;
            if token.finish.is_some() {
                let sent = self.sent.remove(&id).unwrap();
                self.tally.answered(&sent.job, self.load.limits.longest());
                sent.permit.iter().for_each(|permit| backlog.remove(permit));
            }
        }
        let now = self.now;
        let leaves = |sent: &Sent| match sent.job.leave {
            Some(Leave::Events(events)) => sent.generated > events,
            Some(Leave::Millis(millis)) => now >= sent.at + Duration::from_millis(millis),
            None => false,
        };
        for (id, sent) in self.sent.extract_if(.., |_, sent| leaves(sent)) {
            self.scheduler.cancel(id);
            self.tally.left(&sent.job);
            sent.permit.iter().for_each(|permit| backlog.remove(permit));
        }
        let reading = Reading {
            steps: self.steps,
            computed_tokens: stats.computed_tokens,
            ..Reading::default()
        };
        self.pace.read(self.begin + self.now, &reading);
        for stage in STAGES {
            if self.is_reached(stage) {
                self.reached.entry(stage).or_insert(self.now);
            }
        }
        before - self.sent.len()
    }

    fn seconds(&self, plan: &StepPlan) -> f64 {
        let decoding = plan.runs.iter().filter(|run| run.continues_output());
        let (rows, context) = decoding.fold((0, 0), |(rows, context), run| (rows + 1, context + run.start));
        let step = match plan.num_tokens() - rows {
            0 => self.costs.decode_seconds(rows),
            prompts => self.costs.mixed_seconds(rows, prompts),
        };
        step + self.costs.context_seconds() * context as f64
    }
}

fn answer(plan: &StepPlan) -> StepOutput {
    let sampled = |_| Sampled {
        token: 1,
        logprobs: None,
    };
    let samples = plan.runs.iter().map(|run| run.sample.as_ref().map(sampled));
    StepOutput {
        samples: samples.collect(),
        ..StepOutput::default()
    }
}

/// Qwen3.5-27B on one H200 (`tests/bench/h200/profile-qwen3.5-27b.json`).
fn hybrid_27b(target: Option<Duration>) -> Simulation {
    let step = |&(rows, seconds): &(usize, f64)| StepCost { rows, seconds };
    let decode = [(1, 0.01325), (64, 0.01938), (128, 0.02566), (220, 0.03906)];
    let mixed = [
        (32, 0.01694),
        (128, 0.01891),
        (256, 0.02397),
        (384, 0.03554),
        (512, 0.04545),
        (768, 0.06643),
        (1024, 0.08538),
        (2048, 0.16762),
    ];
    let costs = StepCosts::new(
        decode.iter().map(step).collect(),
        mixed.iter().map(step).collect(),
        1.641e-8,
    );
    let limits = Limits {
        max_model_len: 32_768,
        max_num_seqs: 220,
        max_num_batched_tokens: 8192,
        kv_tokens: 902_160,
        block_size: 16,
        groups: vec![Group {
            pages_per_block: 1,
            window: None,
        }],
    };
    Simulation::new(limits, costs.unwrap(), target)
}

#[test]
fn a_cache_is_filled_in_the_time_that_there_is() {
    let end = hybrid_27b(None).run(Duration::from_secs(480));
    let reached = &end.reached;
    assert!(end.has_reached_all(), "{reached:?}");
    assert!(reached[&Stage::Full] < Duration::from_secs(150), "{reached:?}");
    let before = end.tally.stage_seconds(end.begin + end.now);
    assert!(before["mixed"] + before["disconnects"] < 60.0, "{before:?}");
}

#[test]
fn the_time_that_is_suggested_is_enough() {
    let end = hybrid_27b(None).run(Duration::from_secs(60));
    assert!(!end.has_reached_all());
    let suggested = end.suggested_seconds();
    assert!((120..480).contains(&suggested), "{suggested} s");
    let end = hybrid_27b(None).run(Duration::from_secs(suggested));
    assert!(end.has_reached_all(), "{suggested} s: {:?}", end.reached);
}

/// Under a target, steps have so few tokens of prompts that the first requests end before the last begin.
#[test]
fn where_requests_end_too_early_the_next_last_longer() {
    let end = hybrid_27b(Some(Duration::from_millis(80))).run(Duration::from_secs(480));
    assert!(end.has_reached_all(), "{:?} {:?}", end.reached, end.peaks);
}
