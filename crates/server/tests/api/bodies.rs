//! Mutated requests of every endpoint.

#[path = "../../../../fuzz/inputs.rs"]
mod inputs;

use std::sync::LazyLock;

use proptest::prelude::*;

use crate::fuzz;

static CORPUS: LazyLock<Vec<&'static str>> = LazyLock::new(|| leaked(fuzz::corpus()));
static WORDS: LazyLock<Vec<&'static str>> = LazyLock::new(|| leaked(fuzz::words()));

fn leaked(texts: Vec<String>) -> Vec<&'static str> {
    texts.into_iter().map(|text| &*text.leak()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn no_body_is_a_server_error(data in inputs::inputs(&CORPUS, &WORDS)) {
        fuzz::request(&data);
    }
}
