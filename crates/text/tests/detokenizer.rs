//! Pieces given out one by one are the whole text, for every vocabulary and any tokens.

use plimsoll_text::Tokenizer;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const VOCABULARIES: [&str; 8] = [
    "bert-bge",
    "command-r",
    "falcon",
    "gemma-4",
    "llama-bpe",
    "llama-spm",
    "phi-3",
    "qwen2",
];

fn every_tokenizer() -> Vec<(String, Tokenizer)> {
    let load = |name: &str| {
        (
            name.to_owned(),
            Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap(),
        )
    };
    let mut all: Vec<_> = VOCABULARIES.into_iter().map(load).collect();
    all.push((
        "smollm2".to_owned(),
        Tokenizer::from_gguf(&crate::common::smollm2()).unwrap(),
    ));
    all.push(("bytes".to_owned(), Tokenizer::bytes()));
    all
}

/// The definition, slowly: all bytes, one leading space less where the tokenizer adds one, read as UTF-8.
fn whole(tokenizer: &Tokenizer, tokens: &[u32], skip_special: bool, strips: bool) -> String {
    let kept = tokens
        .iter()
        .filter(|&&token| !(skip_special && tokenizer.is_special(token)));
    let bytes: Vec<u8> = kept
        .flat_map(|&token| tokenizer.token_bytes(token).to_vec())
        .collect();
    let bytes = if strips {
        bytes.strip_prefix(b" ").unwrap_or(&bytes)
    } else {
        &bytes
    };
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn pieces_are_the_whole_text() {
    for (name, tokenizer) in every_tokenizer() {
        let vocab = tokenizer.vocab_size() as u32;
        let strips = ["bert-bge", "llama-spm", "phi-3"].contains(&name.as_str());
        // Single bytes, which make broken UTF-8, are rare among so many tokens: half of the draws are of those.
        let fragments: Vec<u32> = (0..vocab)
            .filter(|&id| std::str::from_utf8(tokenizer.token_bytes(id)).is_err())
            .collect();
        let fragments = if fragments.is_empty() { vec![0] } else { fragments };
        let token = prop_oneof![0..vocab + 3, prop::sample::select(fragments)];
        let config = ProptestConfig {
            cases: 300,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let input = (prop::collection::vec(token, 0..40), any::<bool>());
        let outcome = TestRunner::new(config).run(&input, |(tokens, skip_special)| {
            let mut detokenizer = tokenizer.detokenizer(skip_special);
            let mut text = String::new();
            for &token in &tokens {
                let piece = detokenizer.push(token);
                prop_assert!(tokens.len() > 1 || piece.len() <= 3 * tokenizer.token_bytes(token).len());
                text += &piece;
            }
            text += &detokenizer.flush();
            prop_assert_eq!(&text, &tokenizer.decode(&tokens, skip_special));
            prop_assert_eq!(&text, &whole(&tokenizer, &tokens, skip_special, strips));

            let mut continuing = tokenizer.detokenizer(skip_special).continuing();
            let text: String = tokens.iter().map(|&token| continuing.push(token)).collect();
            prop_assert_eq!(
                text + &continuing.flush(),
                whole(&tokenizer, &tokens, skip_special, false)
            );
            Ok(())
        });
        outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn text_survives_the_round_trip() {
    // BERT lowers case and drops accents.
    for (name, tokenizer) in every_tokenizer()
        .into_iter()
        .filter(|(name, _)| name != "bert-bge")
    {
        let config = ProptestConfig {
            cases: 200,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let text = "([a-zA-Z0-9 ,.!?'\n\täßéñ中文日本語🦙🏳️‍🌈\u{301}]{0,40}|\\PC{0,20})";
        let outcome = TestRunner::new(config).run(&text, |text| {
            // SentencePiece writes a space as `▁` and cannot tell the two apart.
            let text = text.replace('▁', "_");
            let tokens = tokenizer.encode_literal(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&tokens, false), text);
            Ok(())
        });
        outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn a_character_is_given_out_when_it_is_complete() {
    let tokenizer = Tokenizer::bytes();
    let mut detokenizer = tokenizer.detokenizer(true);
    let pieces: Vec<_> = "é🦙".bytes().map(|byte| detokenizer.push(byte.into())).collect();
    assert_eq!(pieces, ["", "é", "", "", "", "🦙"]);
    assert_eq!(detokenizer.push(0xF0), "");
    assert_eq!(detokenizer.push(u32::from(b'x')), "\u{FFFD}x");
    assert_eq!(detokenizer.push(0xE2), "");
    assert_eq!(detokenizer.flush(), "\u{FFFD}");
    assert_eq!(detokenizer.flush(), "");
}
