//! Bounds of a tokenizer.json, checked before the `tokenizers` crate reads it, which has none.

use plimsoll_core::TokenId;
use serde_json::Value;

use crate::TextError;

/// Most bytes of a tokenizer.json; the largest known have a quarter.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Most bytes of a chat template.
pub(crate) const MAX_TEMPLATE_BYTES: u64 = 4 << 20;
/// Most bytes of all tokens that are found in a text before it is split: an automaton holds them.
const MAX_SPECIAL_BYTES: usize = 8 << 20;
/// Ids that no token has, for each tokenizer: there is a table of all ids.
const MAX_GAPS: u64 = 1 << 20;
/// By which factor a normalizer may lengthen a text: a space becomes the three bytes of `▁`.
const MAX_GROWTH: usize = 64;
/// Characters of a word that WordPiece divides, in time that is their cube; published models have 100.
pub(crate) const MAX_WORD_CHARS: usize = 1000;

/// Refuses what would take more memory than the file, or multiply a text.
pub(crate) fn check(spec: &Value, place: &str) -> Result<(), TextError> {
    let wrong = |problem: String| TextError::invalid(place, problem);
    check_ids(spec).map_err(wrong)?;
    if growth(&spec["normalizer"]) > MAX_GROWTH {
        let problem = format!("`normalizer` makes a text more than {MAX_GROWTH} times as long");
        return Err(wrong(problem));
    }
    let word = &spec["model"]["max_input_chars_per_word"];
    if word.as_u64().is_some_and(|chars| chars > MAX_WORD_CHARS as u64) {
        let problem = format!("`model.max_input_chars_per_word` is {word}, more than {MAX_WORD_CHARS}");
        return Err(wrong(problem));
    }
    if copies(&spec["post_processor"]) > 1 {
        return Err(wrong("`post_processor` repeats the text".to_owned()));
    }
    Ok(())
}

/// Refuses special tokens that are too long together.
pub(crate) fn check_special<'a>(texts: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let bytes: usize = texts.map(str::len).sum();
    match bytes > MAX_SPECIAL_BYTES {
        true => Err(format!(
            "special and added tokens have {bytes} bytes, more than {} MiB",
            MAX_SPECIAL_BYTES >> 20
        )),
        false => Ok(()),
    }
}

fn check_ids(spec: &Value) -> Result<(), String> {
    let added = spec["added_tokens"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    check_special(added.iter().filter_map(|token| token["content"].as_str()))?;
    let vocab = &spec["model"]["vocab"];
    let listed = vocab.as_array().map_or(0, Vec::len) + vocab.as_object().map_or(0, serde_json::Map::len);
    let tokens = (listed + added.len()) as u64;
    let most = (tokens + MAX_GAPS).min(TokenId::MAX.into());
    let is_beyond = |id: &Value| id.as_u64().is_some_and(|id| id >= most);
    let in_vocab = vocab.as_object().into_iter().flatten();
    let in_vocab = in_vocab.map(|(token, id)| (format!("model.vocab[{token:?}]"), id));
    let in_added = added.iter().enumerate();
    let in_added = in_added.map(|(index, token)| (format!("added_tokens[{index}].id"), &token["id"]));
    match in_vocab.chain(in_added).find(|(_, id)| is_beyond(id)) {
        Some((field, id)) => Err(format!("`{field}` is {id}, but there are {tokens} tokens")),
        None => Ok(()),
    }
}

/// By which factor a `normalizer` may lengthen a text, as far as its replacements go: others lengthen it by a small constant.
fn growth(step: &Value) -> usize {
    match step["type"].as_str() {
        Some("Sequence") => {
            let steps = step["normalizers"].as_array().into_iter().flatten();
            steps.map(growth).fold(1, usize::saturating_mul)
        }
        Some("Replace") => {
            let content = step["content"].as_str().map_or(0, str::len);
            match step["pattern"]["String"].as_str().map_or(0, str::len) {
                // A regular expression may match between any two characters.
                0 => content.saturating_add(1),
                pattern => content.div_ceil(pattern).max(1),
            }
        }
        _ => 1,
    }
}

/// How often a `post_processor` writes the text of one sequence.
fn copies(step: &Value) -> usize {
    match step["type"].as_str() {
        Some("Sequence") => {
            let steps = step["processors"].as_array().into_iter().flatten();
            steps.map(copies).fold(1, usize::saturating_mul)
        }
        Some("TemplateProcessing") => {
            let pieces = step["single"].as_array().into_iter().flatten();
            pieces.filter(|piece| piece.get("Sequence").is_some()).count()
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problem(spec: &Value) -> String {
        check(spec, "tokenizer.json").map_or_else(|error| error.to_string(), |()| "none".to_owned())
    }

    #[test]
    fn ids_are_those_of_tokens_with_few_gaps() {
        let with = |id: u64| {
            let added = json!([{"id": 3, "content": "<s>"}, {"id": id, "content": "</s>"}]);
            problem(&json!({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}))
        };
        assert_eq!(with(4), "none");
        assert_eq!(with(70_000), "none");
        assert_eq!(
            with(1_000_000_000),
            "tokenizer.json: `added_tokens[1].id` is 1000000000, but there are 4 tokens"
        );
        let vocab = problem(&json!({"model": {"vocab": {"a": 4_000_000_000_u64}}}));
        assert!(vocab.contains("model.vocab[\"a\"]"), "{vocab}");
    }

    #[test]
    fn words_have_a_length() {
        let with = |chars: u64| problem(&json!({"model": {"max_input_chars_per_word": chars}}));
        assert_eq!(with(100), "none");
        assert!(with(100_000).contains("`model.max_input_chars_per_word` is 100000"));
    }

    #[test]
    fn texts_are_not_multiplied() {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let steps = |step: &Value, times: usize| {
            let steps = vec![step.clone(); times];
            problem(&json!({"normalizer": {"type": "Sequence", "normalizers": steps}}))
        };
        assert_eq!(steps(&space, 2), "none");
        assert_eq!(steps(&double, 6), "none");
        assert!(steps(&double, 60).contains("`normalizer`"));
        let single = |times: usize| {
            let single = vec![json!({"Sequence": {"id": "A", "type_id": 0}}); times];
            problem(&json!({"post_processor": {"type": "TemplateProcessing", "single": single}}))
        };
        assert_eq!(single(1), "none");
        assert!(single(2).contains("`post_processor`"));
    }
}
