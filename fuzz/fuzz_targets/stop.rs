#![no_main]
#![allow(dead_code, reason = "each binary is one target")]

#[path = "../../crates/text/tests/fuzz/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::stop(data));
