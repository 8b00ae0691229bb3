#![no_main]
#![allow(dead_code, reason = "each binary is one target")]

#[path = "../../crates/text/tests/fuzz/targets.rs"]
mod targets;

// libFuzzer's hook aborts on every panic; those of the template engine are caught where it is called, and are no finding.
fn forgive_the_template_engine() {
    let abort = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let engine = panic.location().is_some_and(|at| at.file().contains("minijinja"));
        if !engine {
            abort(panic);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: forgive_the_template_engine(), |data: &[u8]| targets::template(data));
