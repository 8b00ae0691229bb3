//! Starts a server and holds what happened against what must hold whatever happens.

use std::thread;

use plimsoll_core::{Component, Executor, KvConfig, Meters, StepError};
use plimsoll_profiler::{
    Bound, Cause, Contexts, Diagnostic, KvSize, Observer, Origin, Outcome, Phase, PhaseRecord, Plan,
    ProfileError, ProfileSpec, Proved, RankLost, Ranks, Report, ScenarioKind, ScenarioProgress, Solo, Target,
    Verdict, profile_rank, scenarios,
};
use plimsoll_sim::{Member, VirtualDevice, VirtualState, World};

use crate::cases::{Case, Plans, RankCase};

/// What the ranks' agreements are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sound,
    /// Everyone keeps its own size.
    OwnSize,
    /// Everyone goes by its own outcome.
    OwnOutcome,
    /// Nobody even asks how it went.
    NoMeeting,
    /// Another rank's want of memory is not heard.
    DeafToShortage,
    /// Another rank's failure is not heard.
    DeafToFailure,
}

struct Agreement {
    member: Member,
    reduction: Reduction,
}

impl Ranks for Agreement {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn count(&self) -> usize {
        self.member.count()
    }

    fn min(&mut self, value: usize) -> Result<usize, RankLost> {
        let least = self.member.min(value)?;
        Ok(match self.reduction {
            Reduction::OwnSize => value,
            _ => least,
        })
    }

    fn worst(&mut self, verdict: Verdict) -> Result<(Verdict, usize), RankLost> {
        let own = (verdict, self.rank());
        if self.reduction == Reduction::NoMeeting {
            return Ok(own);
        }
        let worst = self.member.worst(verdict)?;
        Ok(match (self.reduction, worst.0) {
            (Reduction::OwnOutcome, _)
            | (Reduction::DeafToShortage, Verdict::OutOfMemory)
            | (Reduction::DeafToFailure, Verdict::Failed) => own,
            _ => worst,
        })
    }
}

/// Checks the order of phases as they pass, and counts the work.
#[derive(Default)]
struct Watch {
    phases: Vec<Phase>,
    steps: Vec<(Phase, ScenarioKind)>,
}

impl Observer for Watch {
    fn phase(&mut self, record: &PhaseRecord) {
        self.phases.push(record.phase);
    }

    fn progress(&mut self, progress: ScenarioProgress) {
        self.steps.push((progress.phase, progress.scenario));
    }
}

/// What came of one rank.
struct RankEnd {
    before: Meters,
    device: VirtualDevice,
    watch: Watch,
    result: Result<Proved<VirtualState>, ProfileError>,
}

fn spec(case: &Case, rank: &RankCase) -> ProfileSpec {
    // A rank with pages of twice the size has twice the heads.
    let heads = rank.device.page_bytes / case.spec.page_bytes();
    ProfileSpec {
        plan: rank.plan.clone(),
        kv_bytes_per_token: case.spec.kv_bytes_per_token * heads,
        ..case.spec.clone()
    }
}

fn start_rank(spec: &ProfileSpec, rank: &RankCase, ranks: &mut dyn Ranks, device: VirtualDevice) -> RankEnd {
    let before = device.meters();
    if let Some(n) = rank.fault {
        device.fail_allocation(n);
    }
    let (mut watch, mut target) = (Watch::default(), device.clone());
    let result = profile_rank(&mut target, spec, ranks, &mut watch);
    RankEnd {
        before,
        device,
        watch,
        result,
    }
}

fn start(case: &Case, reduction: Reduction) -> Result<Vec<RankEnd>, String> {
    let device = |rank: &RankCase| VirtualDevice::new(rank.device.clone());
    if let [alone] = &*case.ranks {
        return Ok(vec![start_rank(
            &spec(case, alone),
            alone,
            &mut Solo,
            device(alone),
        )]);
    }
    thread::scope(|scope| {
        let members = World::of(case.ranks.len());
        let threads = members.into_iter().zip(&case.ranks).map(|(member, rank)| {
            let (spec, device) = (spec(case, rank), device(rank));
            device.join(&member);
            let mut ranks = Agreement { member, reduction };
            scope.spawn(move || start_rank(&spec, rank, &mut ranks, device))
        });
        let threads: Vec<_> = threads.collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        ends.collect::<Result<_, _>>()
            .map_err(|_| "a rank panicked".to_owned())
    })
}

/// The plans of a start of all ranks; none if it failed or was pinned.
pub(crate) fn plans(case: &Case) -> Vec<Plan> {
    let spec = ProfileSpec {
        size: KvSize::Auto,
        ..case.spec.clone()
    };
    let case = Case { spec, ..case.clone() };
    let ends = start(&case, Reduction::Sound).unwrap_or_default();
    let plans = ends.into_iter().map(|end| end.result.ok()?.plan().cloned());
    plans.collect::<Option<_>>().unwrap_or_default()
}

/// How a start ended, in words for the tally.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) proved: bool,
    pub(crate) blocks: usize,
    pub(crate) attempts: usize,
    pub(crate) cached: bool,
    pub(crate) discarded: bool,
    /// Bound or stopped by another rank.
    pub(crate) other_rank: bool,
    pub(crate) leak: bool,
    pub(crate) broken: bool,
}

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}

/// Starts the server of `case`.
///
/// # Errors
/// What does not hold.
pub(crate) fn check(case: &Case, reduction: Reduction) -> Result<End, String> {
    let ends = start(case, reduction)?;
    let mut end = End {
        proved: ends[0].result.is_ok(),
        blocks: 0,
        attempts: 0,
        cached: false,
        discarded: false,
        other_rank: false,
        leak: false,
        broken: false,
    };
    let errors: Vec<_> = ends
        .iter()
        .map(|end| end.result.as_ref().err().cloned())
        .collect();
    let blocks = |end: &RankEnd| end.result.as_ref().ok().map(|p| p.config().kv.num_pages);
    for other in &ends {
        ensure!(
            blocks(other) == blocks(&ends[0]),
            "the ranks end with {:?} and {:?} blocks",
            blocks(&ends[0]),
            blocks(other)
        );
        ensure!(
            other.watch.steps == ends[0].watch.steps,
            "the ranks ran different steps"
        );
    }
    for (index, (rank, rank_end)) in case.ranks.iter().zip(ends).enumerate() {
        let in_rank = |what| format!("rank {index}: {what}");
        // The probe, its parts, a plan's attempt and four of two passes; and for the advice at most a dozen values of each of
        // three limits, a few contexts, and the parts again.
        let (steps, tries) = (rank_end.watch.steps.len(), 12 * 3 + 8 + 5);
        ensure!(
            steps <= 6 * (1 + 5 + 1 + 2 * 4 + tries),
            "rank {index}: {steps} steps"
        );
        match rank_end.result {
            Ok(proved) => {
                ensure!(
                    !rank_end.device.has_leaked(),
                    "rank {index} is ready although it leaks"
                );
                ensure!(
                    rank_end.watch.phases.last() == Some(&Phase::Validate),
                    "rank {index} is ready without a validation"
                );
                let report = proved.report();
                check_report(report, case).map_err(in_rank)?;
                end.blocks = report.sizing.kv_pages;
                end.attempts = end.attempts.max(report.attempts.len());
                end.cached |= matches!(report.origin, Origin::Cached { .. });
                end.discarded |= report.discarded_plan.is_some();
                end.other_rank |= report.sizing.bound == Bound::OtherRank;
                let again = case.ranks.len() == 1;
                check_state(proved, &rank_end.device, rank, &case.spec, again).map_err(in_rank)?;
            }
            Err(error) => {
                check_error(&error, index, case, &errors)?;
                end.leak |= matches!(error, ProfileError::TeardownLeak { .. });
                end.broken |= matches!(error, ProfileError::Device { .. });
                end.other_rank |= matches!(error, ProfileError::OtherRank { .. });
            }
        }
        if rank.device.leak_at.is_none() {
            let mut device = rank_end.device;
            device.trim();
            let kept = |meters: &Meters| meters.reserved - meters.by_component.get(Component::Runtime);
            let (before, after) = (kept(&rank_end.before), kept(&device.meters()));
            ensure!(before == after, "rank {index}: {before} bytes became {after}");
        }
    }
    Ok(end)
}

/// An error is typed, has its cause on this very rank, or names the rank that has it.
fn check_error(
    error: &ProfileError,
    index: usize,
    case: &Case,
    errors: &[Option<ProfileError>],
) -> Result<(), String> {
    let rank = &case.ranks[index];
    let justified = match error {
        ProfileError::TeardownLeak { .. } => rank.device.leak_at.is_some(),
        ProfileError::Device { error, .. } => {
            rank.device.broken_step.is_some() && error.starts_with(VirtualDevice::BROKEN)
        }
        ProfileError::DoesNotFit(diagnostic) => {
            // What was computed to fit and did not is each rank's own estimate.
            let estimated = |of: &Diagnostic| of.oom.is_some();
            let same = |other: &ProfileError| match other {
                ProfileError::DoesNotFit(other) if estimated(other) || estimated(diagnostic) => true,
                ProfileError::DoesNotFit(other) => other.cause == diagnostic.cause,
                _ => true,
            };
            let unlike = match diagnostic.cause {
                Cause::ContextDoesNotFit => diagnostic.initial_tokens >= Some(case.spec.limits.max_model_len),
                _ => errors.iter().flatten().any(|other| !same(other)),
            };
            !unlike && diagnostic.knobs.iter().all(|knob| !knob.settings.is_empty())
        }
        ProfileError::OtherRank { rank: other, .. } => matches!(
            &errors[*other],
            Some(cause) if !matches!(cause, ProfileError::OtherRank { .. })
        ),
        _ => false,
    };
    ensure!(justified, "rank {index}: no reason for this error: {error}");
    Ok(())
}

/// Every byte is attributed, and the size is the one that was proved.
fn check_report(report: &Report, case: &Case) -> Result<(), String> {
    let (ready, spec) = (&report.ready, &case.spec);
    let parts = ready.components.iter().map(|line| line.bytes).sum::<u64>() + ready.unattributed;
    ensure!(parts == ready.reserved, "the parts do not add up: {ready:?}");
    ensure!(
        ready.reserved + ready.peers + ready.free == ready.total,
        "bytes are nobody's: {ready:?}"
    );
    // What the canary held is free now.
    ensure!(
        ready.free >= report.sizing.margins.canary_bytes,
        "too little is free: {ready:?}"
    );
    let Some((last, failed)) = report.attempts.split_last() else {
        return Err("no attempt".into());
    };
    ensure!(failed.len() < 4, "{} attempts", failed.len() + 1);
    ensure!(
        (&last.outcome, last.kv_tokens) == (&Outcome::Proved, report.sizing.kv_tokens),
        "the last attempt is not the size in use: {last:?}"
    );
    ensure!(
        last.scenarios.len() + report.left_out.len() == ScenarioKind::ALL.len(),
        "worst cases are missing"
    );
    ensure!(
        failed.iter().all(|attempt| attempt.outcome != Outcome::Proved),
        "a proved size was given up"
    );
    // A pinned size stays what it is, with an arena that no longer grows.
    let auto = spec.size == KvSize::Auto;
    let mut pairs = report.attempts.windows(2);
    // A page less may be as many whole blocks.
    let same = spec.groups.pages_per_block() > 1;
    let shrinks = pairs.all(|pair| match auto {
        true => pair[1].kv_tokens < pair[0].kv_tokens + usize::from(same),
        false => pair[1].kv_tokens == pair[0].kv_tokens,
    });
    ensure!(shrinks, "attempts do not shrink");
    let kv = KvConfig {
        block_size: spec.block_size,
        num_pages: report.sizing.kv_pages,
        groups: spec.groups,
        state_slots: 0,
    };
    let request = kv.request_pages(spec.limits.max_model_len, spec.limits.max_num_batched_tokens);
    ensure!(report.sizing.kv_pages >= request, "no request fits");
    ensure!(
        (report.origin == Origin::Pinned) == (spec.size != KvSize::Auto),
        "{:?}",
        report.origin
    );
    if let (KvSize::Auto, Some(useful)) = (spec.size, spec.useful_tokens) {
        // One request of full length is always of use.
        let useful = useful.max(spec.limits.max_model_len);
        ensure!(
            report.sizing.kv_tokens < useful + spec.block_size.tokens(),
            "more than is useful"
        );
    }
    let calm_fresh = case.is_calm() && case.plans == Plans::Fresh && spec.size == KvSize::Auto;
    ensure!(
        !calm_fresh || report.origin == (Origin::Cached { drift: 0.0 }),
        "a fresh plan was of no use: {:?}, {:?}",
        report.origin,
        report.discarded_plan
    );
    let doubtful = case.plans == Plans::Doubtful;
    ensure!(
        failed.is_empty() || doubtful || !case.is_calm() || !case.is_honest(),
        "what was computed to fit does not: {failed:?}"
    );
    ensure!(report.table(None).lines().count() > 3, "{}", report.table(None));
    Ok(())
}

/// The device knows it too: every worst step ran beside the canary, at this size, and they all run `again` where they do not
/// need the other ranks.
fn check_state(
    proved: Proved<VirtualState>,
    device: &VirtualDevice,
    rank: &RankCase,
    spec: &ProfileSpec,
    again: bool,
) -> Result<(), String> {
    let (config, meters) = (proved.config(), device.meters());
    let held = |component| meters.by_component.get(component);
    ensure!(held(Component::Canary) == 0, "the canary is held");
    ensure!(
        held(Component::Kv) >= config.kv.num_pages as u64 * rank.device.page_bytes,
        "the KV cache is smaller than said"
    );
    let (steps, _) = scenarios(
        Contexts::All,
        &spec.limits,
        spec.vocab_size,
        config.kv,
        spec.pooling,
    );
    let mut state = proved.into_parts().state;
    let ran = state.steps_beside_canary().len();
    ensure!(
        spec.margins.canary_bytes == 0 || ran >= steps.len(),
        "{ran} steps of {} were proved",
        steps.len()
    );
    for step in steps.into_iter().filter(|_| again) {
        match state.execute(&step.plan) {
            Ok(_) => {}
            // What was planned and did not come before, or a neighbour or jitter beyond the margins.
            Err(StepError::Oom(oom)) if oom.component == Component::Graphs => {}
            Err(StepError::Device(_)) if rank.device.broken_step.is_some() => {}
            Err(error) => return Err(format!("a proved step fails: {error}")),
        }
    }
    let arena = device.meters().by_component.get(Component::Arena);
    ensure!(arena == held(Component::Arena), "the arena has grown");
    Ok(())
}

/// Starts the server of a seed, every third one of several ranks; one with plans on a quiet day starts without them too.
///
/// # Errors
/// What does not hold.
pub(crate) fn judge(seed: u64) -> Result<(Case, End), String> {
    let case = Case::random(seed, seed.is_multiple_of(3));
    let end = check(&case, Reduction::Sound)?;
    if case.is_calm() && case.plans != Plans::None {
        let searched = check(&case.without_plans(), Reduction::Sound)?;
        ensure!(end.proved || !searched.proved, "a plan made the start fail");
        // A pinned size may fit with the plan's arena and not with one that has to grow.
        let same = searched.blocks == end.blocks || case.spec.size != KvSize::Auto;
        ensure!(
            same || case.plans != Plans::Fresh,
            "a fresh plan leads to {} blocks, the search to {}",
            end.blocks,
            searched.blocks
        );
    }
    Ok((case, end))
}
