//! Disturbed requests of every endpoint.

#[path = "../../../../fuzz/inputs.rs"]
mod inputs;

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::Value;

use crate::fuzz;

/// Requests with the byte that chooses their endpoint.
static CORPUS: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let valid = fuzz::valid();
    let bodies = valid.values().enumerate().flat_map(|(i, bodies)| {
        let bodies = bodies.as_array().expect("a list");
        bodies
            .iter()
            .map(move |body| format!("{}{body}", char::from(i as u8)))
    });
    bodies.map(|body| &*body.leak()).collect()
});

/// The names and values of all requests, so that fields meet endpoints and places they are not made for.
static WORDS: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let mut words: Vec<String> = [
        "{",
        "}",
        "[",
        "]",
        ",",
        "\"",
        "null",
        "1e400",
        "-1",
        "\u{0}",
        "[[",
        "\\ud800",
        "9".repeat(30).as_str(),
    ]
    .map(str::to_owned)
    .into();
    for body in fuzz::valid()
        .values()
        .flat_map(|bodies| bodies.as_array().expect("a list"))
    {
        let fields: &serde_json::Map<_, _> = body.as_object().expect("an object");
        words.extend(
            fields
                .iter()
                .map(|(name, value): (&String, &Value)| format!("\"{name}\": {value}, ")),
        );
    }
    words.into_iter().map(|word| &*word.leak()).collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn no_body_is_a_server_error(data in inputs::inputs(&CORPUS, &WORDS)) {
        fuzz::request(&data);
    }
}
