//! Tokenizers of GGUF files against llama.cpp's published token vectors (`ggml-vocab-*.gguf` with `.inp` and `.out`).

use std::collections::BTreeSet;
use std::fs;

use plimsoll_text::{Fim, TextError, Tokenizer};

/// Every vocabulary that comes with vectors.
const PASSED: [&str; 15] = [
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

/// No vectors; what comes of them instead.
const WITHOUT_VECTORS: [&str; 3] = ["aquila", "baichuan", "gpt-neox"];

#[test]
fn nothing_is_left_out() {
    let directory = crate::common::cached("test-data/llama.cpp/vocab", "scripts/fetch-test-data");
    let names = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let found: BTreeSet<_> = names
        .filter_map(|name| name.strip_suffix(".gguf").map(str::to_owned))
        .collect();
    let known = PASSED
        .iter()
        .chain(&WITHOUT_VECTORS)
        .map(|&name| name.to_owned())
        .collect();
    assert_eq!(found, known);
}

/// Prompts as the model cards write them, as one text.
#[test]
fn models_of_code_fill_in_the_middle() {
    for (name, begin, card) in [
        ("qwen2", None, None),
        (
            "starcoder",
            None,
            Some("<fim_prefix>let a<fim_suffix> = 1;<fim_middle>"),
        ),
        (
            "deepseek-coder",
            Some(32013),
            Some("<｜fim▁begin｜>let a<｜fim▁hole｜> = 1;<｜fim▁end｜>"),
        ),
        ("llama-spm", None, None),
        ("gpt-2", None, None),
    ] {
        let tokenizer = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap();
        let fim = Fim::detect(&tokenizer);
        assert_eq!(fim.is_some(), card.is_some(), "{name}");
        let (Some(fim), Some(card)) = (fim, card) else {
            continue;
        };
        let prefix = tokenizer.encode_literal("let a").unwrap();
        let prompt = |special| fim.prompt(&tokenizer, prefix.clone(), " = 1;", special).unwrap();
        let written = tokenizer.encode(card, false).unwrap();
        assert_eq!(prompt(false), written, "{name}");
        let begun: Vec<_> = begin.into_iter().chain(written).collect();
        assert_eq!(prompt(true), begun, "{name}");
        assert!(fim.ends().contains(prompt(false).last().unwrap()), "{name}");
        // The texts of special tokens are text. DeepSeek's are tokens that users define, in any text.
        let literal = fim.prompt(&tokenizer, prefix.clone(), card, false).unwrap();
        let marks = literal
            .iter()
            .filter(|token| fim.ends()[..3].contains(token))
            .count();
        let is_special = tokenizer.is_special(fim.ends()[0]);
        assert_eq!(marks, if is_special { 3 } else { 6 }, "{name}");
    }
}

#[test]
fn vectors_of_llama_cpp() {
    let mut failures = Vec::new();
    for name in PASSED {
        let tokenizer = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap();
        let (texts, expected) = vectors(name);
        for (text, expected) in texts.iter().zip(&expected) {
            // The vectors are made without special tokens, added or parsed.
            let tokens = tokenizer.encode_literal(text).unwrap();
            assert!(tokenizer.count_at_least(text) <= tokens.len(), "{name}: {text:?}");
            if tokens != *expected {
                failures.push(format!(
                    "{name}: {text:?}\n  expected {expected:?}\n  got      {tokens:?}"
                ));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} vectors fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

fn vectors(name: &str) -> (Vec<String>, Vec<Vec<u32>>) {
    let read = |end: &str| {
        let path = format!("test-data/llama.cpp/vocab/{name}.gguf.{end}");
        fs::read_to_string(crate::common::cached(&path, "scripts/fetch-test-data")).unwrap()
    };
    let input = read("inp");
    // In most files the mark also follows the last text.
    let mark = "\n__ggml_vocab_test__\n";
    let texts = input.strip_suffix(mark).unwrap_or(&input);
    let texts: Vec<_> = texts.split(mark).map(str::to_owned).collect();
    let output = read("out");
    let ids = |line: &str| {
        line.split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect::<Vec<u32>>()
    };
    let expected: Vec<_> = output.lines().map(ids).collect();
    assert_eq!(texts.len(), expected.len(), "{name}");
    assert!(texts.len() >= 40, "{name}: only {} vectors", texts.len());
    (texts, expected)
}

#[test]
fn what_is_not_supported_is_named() {
    // Files without `tokenizer.ggml.pre` do not say how words are split; guessing would silently degrade the model.
    for name in ["aquila", "gpt-neox"] {
        let error = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap_err();
        assert!(
            matches!(&error, TextError::Invalid { place, .. } if place == "tokenizer.ggml.pre"),
            "{name}: {error}"
        );
    }
    Tokenizer::from_gguf(&crate::common::vocabulary("baichuan")).unwrap();

    let mut metadata = crate::common::vocabulary("gpt-2");
    metadata.insert(
        "tokenizer.ggml.pre".into(),
        plimsoll_core::MetaValue::Str("no-such".into()),
    );
    let error = Tokenizer::from_gguf(&metadata).unwrap_err().to_string();
    assert!(
        error.contains("\"no-such\"") && error.contains("qwen2"),
        "{error}"
    );
    // No published vectors: not supported until there is something to check it with.
    for model in ["t5", "rwkv", "plamo2"] {
        metadata.insert(
            "tokenizer.ggml.model".into(),
            plimsoll_core::MetaValue::Str(model.into()),
        );
        let error = Tokenizer::from_gguf(&metadata).unwrap_err().to_string();
        assert!(
            error.contains(model) && error.contains("gpt2, gemma4, llama, bert"),
            "{error}"
        );
    }
}

/// Long texts are refused by their length alone.
#[test]
fn bytes_bound_tokens() {
    let mut without = Vec::new();
    for name in PASSED {
        let tokenizer = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap();
        let bound = |bytes| tokenizer.count_at_least(&"a".repeat(bytes));
        if bound(10_000) == 0 {
            without.push(name);
            continue;
        }
        let ids = 0..tokenizer.vocab_size() as u32;
        let longest = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap();
        let bounds = [0, 1, longest, longest + 1].map(bound);
        assert_eq!(bounds, [0, 1, 1, 2], "{name}");
    }
    // A word that it does not know is one token, however long it is.
    assert_eq!(without, ["bert-bge"]);
}

#[test]
fn a_text_begins_and_ends_as_the_model_expects() {
    let cases: [(&str, &[u32], &[u32]); 6] = [
        ("llama-spm", &[1], &[]),
        ("llama-bpe", &[128_000], &[]),
        ("gemma-4", &[2], &[]),
        ("bert-bge", &[101], &[102]),
        ("gpt-2", &[], &[]),
        ("qwen2", &[], &[]),
    ];
    for (name, begin, end) in cases {
        let tokenizer = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap();
        let plain = tokenizer.encode("Hello world", false).unwrap();
        let expected = [begin, &plain, end].concat();
        assert_eq!(tokenizer.encode("Hello world", true).unwrap(), expected, "{name}");
    }
}

#[test]
fn turns_end_with_any_of_the_models_end_tokens() {
    let ends = |name: &str| {
        let tokenizer = Tokenizer::from_gguf(&crate::common::vocabulary(name)).unwrap();
        let texts = tokenizer.eos_ids().iter().map(|&id| tokenizer.token_str(id));
        texts.collect::<Vec<_>>()
    };
    assert_eq!(ends("llama-bpe"), ["<|end_of_text|>", "<|eot_id|>"]);
    assert_eq!(ends("qwen2"), ["<|endoftext|>", "<|im_end|>"]);
    assert_eq!(ends("llama-spm"), ["</s>"]);
    assert_eq!(ends("phi-3"), ["<|endoftext|>", "<|end|>"]);
}
