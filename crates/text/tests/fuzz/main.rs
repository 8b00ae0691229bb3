//! The fuzz targets over disturbed known inputs. `fuzz/` runs the same functions under libFuzzer.

mod answers;
mod corpus;
mod grammars;
#[path = "../../../../fuzz/inputs.rs"]
mod inputs;
mod targets;

use corpus::*;
use inputs::inputs;
use plimsoll_text::WorkerProgram;
use proptest::prelude::*;

/// Whether a worker whose stack overflows says so.
pub(crate) const NAMES_OVERFLOWS: bool = true;

/// What renders templates.
pub(crate) fn template_worker() -> WorkerProgram {
    WorkerProgram {
        path: env!("CARGO_BIN_EXE_template-worker").into(),
        args: Vec::new(),
    }
}

#[test]
fn known_templates() {
    for source in TEMPLATES.iter().chain(HOSTILE) {
        targets::template(source.as_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn answer(data in inputs(ANSWERS, MARKUP)) {
        answers::answer(&data);
    }
}

proptest! {
    // Each compiles a grammar.
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn grammar(data in inputs(GRAMMARS, GRAMMAR_WORDS)) {
        grammars::grammar(&data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn detokenizer(data in inputs(TEXTS, TEXTS)) {
        targets::detokenizer(&data);
    }

    #[test]
    fn stop(data in inputs(STOPS, STOP_PIECES)) {
        targets::stop(&data);
    }

    #[test]
    fn template(data in inputs(TEMPLATES, JINJA)) {
        targets::template(&data);
    }

    #[test]
    fn messages(data in inputs(CONVERSATIONS, JSON)) {
        targets::messages(&data);
    }
}
