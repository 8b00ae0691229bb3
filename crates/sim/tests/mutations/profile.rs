use super::list::{Mutation, bug, edit};

const ATTEMPT: &str = "profiler/attempt.rs";
const PHASES: &str = "profiler/phases.rs";
const PINNED: &str = "profiler/pinned.rs";
const PROBE: &str = "profiler/probe.rs";
const REPORT: &str = "profiler/report.rs";
const STRESS: &str = "profiler/stress.rs";

pub(crate) const PROFILE_MUTATIONS: [Mutation; 22] = [
    bug(
        "nobody hears of another rank",
        &[edit(STRESS, "if «worst >= verdict» {", "true")],
    ),
    bug(
        "a build that failed elsewhere is not heard of",
        &[edit(
            STRESS,
            "match («self.agree(phase, None, here)», state)",
            "here",
        )],
    ),
    bug(
        "a step is finished that is not launched everywhere",
        &[edit(
            STRESS,
            "«self.agree(phase, Some(kind), launched.map_err(stop))?;»",
            "launched.map_err(stop)?;",
        )],
    ),
    bug(
        "a step that failed elsewhere is not heard of",
        &[edit(
            STRESS,
            "«self.agree(phase, Some(kind), finished)?;»",
            "finished?;",
        )],
    ),
    bug(
        "a leak elsewhere is not heard of",
        &[edit(
            STRESS,
            "let agreed = «self.agree(phase, None, torn.map_err(Stop::Failed))»;",
            "torn.map_err(Stop::Failed)",
        )],
    ),
    bug(
        "a leak of the probe elsewhere is not heard of",
        &[edit(PROBE, "«self.agree(phase, None, torn)?;»", "torn?;")],
    ),
    bug(
        "want of memory is fatal",
        &[edit(
            STRESS,
            "Self::Exhausted(_) => «Verdict::OutOfMemory»",
            "Verdict::Failed",
        )],
    ),
    bug(
        "a failure asks for a smaller size",
        &[edit(
            STRESS,
            "Self::Failed(_) => «Verdict::Failed»",
            "Verdict::OutOfMemory",
        )],
    ),
    bug(
        "a dropped state is kept",
        &[edit(STRESS, "«drop(state);»", "std::mem::forget(state);")],
    ),
    bug(
        "nobody looks whether memory came back",
        &[edit(STRESS, "if «returned < i128::from(expected)» {", "false")],
    ),
    bug(
        "each rank has a size of its own",
        &[edit(PROBE, "let pages = «self.ranks.min(own)?»;", "own")],
    ),
    bug(
        "a planned size forgets its cuts",
        &[edit(
            PROBE,
            "let own = shrunk(arithmetic.pages, «cuts»);",
            "cuts * 0",
        )],
    ),
    bug(
        "a rank goes by a plan that others lack",
        &[edit(
            PHASES,
            "let everywhere = «self.ranks.min(usize::from(here.is_some()))? == 1»;",
            "here.is_some()",
        )],
    ),
    bug(
        "a planned size need not hold one request",
        &[edit(
            PHASES,
            "if «sized.pages < self.spec.request_pages()» {",
            "false",
        )],
    ),
    bug(
        "a size need not hold one request",
        &[edit(
            PHASES,
            "if «pages < self.spec.request_pages()» {\n                break;",
            "false",
        )],
    ),
    bug(
        "there is a fifth attempt",
        &[edit(
            PHASES,
            "while attempts.len() < «MAX_ATTEMPTS as usize» {",
            "MAX_ATTEMPTS as usize + 1",
        )],
    ),
    bug(
        "attempts do not shrink",
        &[edit(
            PHASES,
            "«cuts += 1;»",
            "if attempts.len() > 8 { cuts += 1; }",
        )],
    ),
    bug(
        "a rank tries a pinned size that others cannot conceive of",
        &[edit(
            PINNED,
            "if «self.ranks.min(conceivable)? == 1» && !too_small",
            "conceivable == 1",
        )],
    ),
    bug(
        "each rank has a pinned size of its own",
        &[edit(
            PINNED,
            "let pages = «self.ranks.min(self.spec.pinned_pages().unwrap_or(0))?»;",
            "self.spec.pinned_pages().unwrap_or(0)",
        )],
    ),
    bug(
        "nothing is held back during the proof",
        &[edit(
            ATTEMPT,
            "canary_bytes: «self.spec.margins.canary_bytes»,",
            "0",
        )],
    ),
    bug(
        "the canary is never freed",
        &[edit(ATTEMPT, "«self.target.release_canary(state);»", "{}")],
    ),
    bug(
        "what no component claims is not told",
        &[edit(
            REPORT,
            "unattributed: «meters.reserved.saturating_sub(meters.by_component.total())»,",
            "0",
        )],
    ),
];
