#![no_main]

libfuzzer_sys::fuzz_target!(init: plimsoll_fuzz::begin("modules"), |data: &[u8]| plimsoll_fuzz::check(data));
