//! Byte strings for the fuzz targets in ordinary tests: inputs that are known to matter, cut, joined and disturbed. libFuzzer
//! finds more; this needs no other compiler, so that the targets cannot rot.

use proptest::prelude::*;

/// One disturbance: at a part of the length, this many bytes are replaced by others.
type Edit = (f64, usize, Vec<u8>);

/// Inputs made of `corpus`, with pieces of `words` in them.
pub(crate) fn inputs(
    corpus: &'static [&'static str],
    words: &'static [&'static str],
) -> impl Strategy<Value = Vec<u8>> {
    let base = prop_oneof![
        4 => prop::sample::select(corpus).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..64),
        1 => (prop::sample::select(corpus), prop::sample::select(corpus))
            .prop_map(|(one, other)| [&one.as_bytes()[..one.len() / 2], other.as_bytes()].concat()),
    ];
    let piece = prop_oneof![
        3 => prop::sample::select(words).prop_map(|word| word.as_bytes().to_vec()),
        1 => prop::sample::select(corpus).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..6),
    ];
    let edits = prop::collection::vec(
        (0.0..1.0, prop_oneof![Just(0), 0..4usize, 0..64usize], piece),
        0..6,
    );
    (base, edits).prop_map(|(base, edits)| edits.into_iter().fold(base, apply))
}

fn apply(mut input: Vec<u8>, (part, remove, insert): Edit) -> Vec<u8> {
    let at = (part * input.len() as f64) as usize;
    let end = (at + remove).min(input.len());
    input.splice(at..end, insert);
    input
}
