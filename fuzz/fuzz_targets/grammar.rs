#![no_main]

#[path = "../../crates/text/tests/fuzz/grammars.rs"]
mod grammars;

// libFuzzer's hook aborts on every panic; those of the grammar engine are caught where it is called, and are no finding.
fn forgive_the_grammar_engine() {
    let abort = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let ours = panic
            .location()
            .is_none_or(|at| at.file().contains("crates/text"));
        if ours {
            abort(panic);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: forgive_the_grammar_engine(), |data: &[u8]| grammars::grammar(data));
