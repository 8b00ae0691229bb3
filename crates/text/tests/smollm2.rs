//! The default model's tokenizer and chat template, from its GGUF file.

use std::path::Path;

use plimsoll_text::{ChatInput, ChatTemplate, Renderer, TextError, Tokenizer};
use serde_json::json;

#[test]
fn special_tokens() {
    let tokenizer = Tokenizer::from_gguf(&crate::common::smollm2()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49152);
    // <|im_end|> first, as the file says, then <|endoftext|>.
    assert_eq!(tokenizer.eos_ids(), [2, 0]);
    assert_eq!(tokenizer.bos_id(), Some(1));
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(1000) && !tokenizer.is_special(60000));
    assert_eq!(tokenizer.special_tokens()["eos_token"], "<|im_end|>");
    // The file says that no BOS is added.
    assert_eq!(
        tokenizer.encode("Hi", true).unwrap(),
        tokenizer.encode("Hi", false).unwrap()
    );

    assert_eq!(tokenizer.encode("<|im_end|>", false).unwrap(), [2]);
    let literal = tokenizer.encode_literal("<|im_end|>").unwrap();
    assert!(literal.len() > 1 && !literal.contains(&2), "{literal:?}");
    assert_eq!(tokenizer.decode(&literal, true), "<|im_end|>");
    assert_eq!(tokenizer.decode(&[1, 2], true), "");
    assert_eq!(tokenizer.decode(&[1, 2], false), "<|im_start|><|im_end|>");
}

/// What transformers 5 makes of the same file.
#[test]
fn known_ids() {
    let tokenizer = Tokenizer::from_gguf(&crate::common::smollm2()).unwrap();
    let cases: [(&str, &[u32]); 4] = [
        ("Hello, world!", &[19556, 28, 905, 17]),
        (
            "What is the capital of France?",
            &[1780, 314, 260, 3575, 282, 4649, 47],
        ),
        (
            "Zürich 🦙 1234\n\n  x",
            &[74, 7170, 5130, 15107, 116, 243, 216, 33, 34, 35, 36, 8866, 1792],
        ),
        ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
    ];
    for (text, ids) in cases {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    }
}

#[test]
fn chat() {
    let metadata = crate::common::smollm2();
    let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
    let template = ChatTemplate::from_gguf(
        Path::new("smollm2.gguf"),
        &metadata,
        tokenizer.special_tokens(),
        &Renderer::in_process(),
    )
    .unwrap()
    .unwrap();
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                    <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let question = "What is the capital of France?";
    // A text and its only part are the same to a template that knows texts alone.
    for content in [json!(question), json!([{"type": "text", "text": question}])] {
        let messages = [json!({"role": "user", "content": content})];
        let input = ChatInput {
            messages: &messages,
            add_generation_prompt: true,
            ..Default::default()
        };
        assert_eq!(template.render(&input).unwrap(), expected);
    }
    let picture = [json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})];
    let error = template
        .render(&ChatInput {
            messages: &picture,
            ..Default::default()
        })
        .unwrap_err();
    assert!(
        matches!(&error, TextError::Render(m) if m.contains("messages[0]") && m.contains("image_url")),
        "{error}"
    );
    assert!(error.is_client_error());
}
