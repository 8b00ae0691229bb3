#![no_main]
#![allow(dead_code, reason = "the rig is that of the server's tests")]

#[path = "../../crates/server/tests/api/fuzz.rs"]
mod fuzz;
#[path = "../../crates/server/tests/api/rig.rs"]
mod rig;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::request(data));
