//! Tokenizers of model directories, against the `tokenizers` crate itself.

use std::fs;
use std::path::Path;

use plimsoll_text::{Fim, TextError, Tokenizer};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

/// Llama 2's shape: SentencePiece with byte fallback, a BOS from the post-processor.
fn sentencepiece() -> Value {
    let mut vocab = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    vocab.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    vocab.extend(["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"].map(str::to_owned));
    let vocab: serde_json::Map<_, _> = vocab
        .into_iter()
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab,
            "merges": [["▁", "h"], ["e", "l"], ["l", "o"], ["▁h", "el"], ["▁hel", "lo"]],
        },
    })
}

/// CodeLlama's tokens, of a tokenizer that puts a space before a text: the prefix has it, the suffix does not.
#[test]
fn a_suffix_begins_without_a_space() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = sentencepiece();
    for (id, name) in (269..).zip(["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]) {
        let token = json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        spec["added_tokens"].as_array_mut().unwrap().push(token);
    }
    write(directory.path(), "tokenizer.json", &spec);
    let tokenizer = Tokenizer::from_dir(directory.path()).unwrap();
    let named = |name: &str| tokenizer.special_token(name).unwrap();
    let text = |text: &str| tokenizer.encode_literal(text).unwrap();
    let [pre, mid, suf, eot] = ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"].map(named);
    let fim = Fim::detect(&tokenizer).unwrap();
    assert_eq!(fim.ends(), [pre, suf, mid, eot]);
    let hello = text("hello");
    assert_eq!(tokenizer.token_str(hello[0]), " hello");
    let prompt = fim.prompt(&tokenizer, hello.clone(), "hello", true).unwrap();
    let suffix: Vec<_> = prompt
        .iter()
        .skip_while(|token| **token != suf)
        .skip(1)
        .copied()
        .collect();
    let (last, suffix) = suffix.split_last().unwrap();
    assert_eq!((prompt[0], prompt[1], *last), (1, pre, mid));
    assert_eq!(prompt[2..2 + hello.len()], hello);
    assert_eq!(
        suffix
            .iter()
            .map(|&token| tokenizer.token_str(token))
            .collect::<String>(),
        "hello"
    );
}

/// Codestral has no token before the middle: the suffix comes first.
#[test]
fn the_suffix_may_come_first() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = sentencepiece();
    for (id, name) in (269..).zip(["[PREFIX]", "[SUFFIX]"]) {
        let token = json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        spec["added_tokens"].as_array_mut().unwrap().push(token);
    }
    write(directory.path(), "tokenizer.json", &spec);
    let tokenizer = Tokenizer::from_dir(directory.path()).unwrap();
    let fim = Fim::detect(&tokenizer).unwrap();
    let prompt = fim.prompt(&tokenizer, vec![7, 8], "", false).unwrap();
    assert_eq!(prompt, [270, 269, 7, 8]);
}

fn write(directory: &Path, name: &str, value: &Value) {
    fs::write(directory.join(name), value.to_string()).unwrap();
}

#[test]
fn text_is_what_the_tokenizers_crate_makes_of_it() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "tokenizer.json", &sentencepiece());
    let ours = Tokenizer::from_dir(directory.path()).unwrap();
    let mut theirs = tokenizers::Tokenizer::from_file(directory.path().join("tokenizer.json")).unwrap();
    theirs.with_truncation(None).unwrap();

    let config = ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let outcome = TestRunner::new(config).run(
        &("(hello|[helo ]|</s>|é|🦙){0,20}", any::<bool>()),
        |(text, special)| {
            let encoding = theirs.encode_fast(text.as_str(), special).unwrap();
            let tokens = ours.encode(&text, special).unwrap();
            prop_assert_eq!(&tokens, encoding.get_ids());
            prop_assert!(ours.count_at_least(&text) <= tokens.len());
            for skip in [false, true] {
                prop_assert_eq!(ours.decode(&tokens, skip), theirs.decode(&tokens, skip).unwrap());
            }
            Ok(())
        },
    );
    outcome.unwrap();
    // The file asks to cut after two tokens; prompts are never cut.
    assert_eq!(ours.encode("hello hello hello hello", true).unwrap().len(), 5);
    assert_eq!(ours.encode("</s>", false).unwrap(), [2]);
    assert!(!ours.encode_literal("</s>").unwrap().contains(&2));
}

#[test]
fn special_tokens_come_from_all_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    write(directory, "tokenizer.json", &sentencepiece());
    write(
        directory,
        "special_tokens_map.json",
        &json!({"bos_token": "<s>", "eos_token": "<unk>"}),
    );
    write(
        directory,
        "tokenizer_config.json",
        &json!({"eos_token": {"content": "</s>"}}),
    );
    write(
        directory,
        "generation_config.json",
        &json!({"eos_token_id": [2, 7]}),
    );
    let tokenizer = Tokenizer::from_dir(directory).unwrap();
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids()),
        (Some(1), [2, 7].as_slice())
    );
    assert_eq!(tokenizer.special_tokens()["eos_token"], "</s>");
    assert_eq!(tokenizer.encode("hello", true).unwrap().first(), Some(&1));

    // Said outright, it wins over the post-processor.
    let config = json!({"eos_token": "</s>", "add_bos_token": false, "add_eos_token": true});
    write(directory, "tokenizer_config.json", &config);
    let tokens = Tokenizer::from_dir(directory)
        .unwrap()
        .encode("hello", true)
        .unwrap();
    assert_eq!((tokens.first(), tokens.last()), (Some(&268), Some(&2)));
}

#[test]
fn errors_name_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let error = Tokenizer::from_dir(directory).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    fs::write(directory.join("tokenizer.json"), "{").unwrap();
    let error = Tokenizer::from_dir(directory).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    let mut json = sentencepiece();
    json["decoder"] =
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    write(directory, "tokenizer.json", &json);
    let error = Tokenizer::from_dir(directory).unwrap_err();
    assert!(
        matches!(&error, TextError::Unsupported { found, .. } if found.contains("CTC")),
        "{error}"
    );
    write(directory, "tokenizer.json", &sentencepiece());
    fs::write(directory.join("tokenizer_config.json"), "nonsense").unwrap();
    let error = Tokenizer::from_dir(directory).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
}

/// A bound by bytes alone, where nothing of a text can get lost.
#[test]
fn bytes_bound_tokens_where_nothing_gets_lost() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = sentencepiece();
    let bound = |spec: &Value| {
        write(directory.path(), "tokenizer.json", spec);
        Tokenizer::from_dir(directory.path())
            .unwrap()
            .count_at_least(&"h".repeat(24))
    };
    // ` hello` has six bytes.
    assert_eq!(bound(&spec), 4);
    spec["normalizer"] = json!({"type": "NFC"});
    assert_eq!(bound(&spec), 1);
    let worst = "\u{1fbe}\u{308}\u{301}".repeat(50);
    let tokenizer = Tokenizer::from_dir(directory.path()).unwrap();
    let tokens = tokenizer.encode(&worst, false).unwrap();
    assert!(tokenizer.count_at_least(&worst) <= tokens.len() && tokens.len() <= 100);
    for (place, loses) in [
        ("/normalizer", json!({"type": "Lowercase"})),
        ("/pre_tokenizer", json!({"type": "Whitespace"})),
        ("/added_tokens/2/rstrip", json!(true)),
    ] {
        let mut spec = sentencepiece();
        *spec.pointer_mut(place).unwrap() = loses;
        assert_eq!(bound(&spec), 0, "{place}");
    }
}
