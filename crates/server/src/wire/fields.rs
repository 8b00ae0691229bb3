//! Fields that the server knows but does not implement: accepted, accepted with values that have no effect, or refused by name.

use serde_json::{Map, Value};

use super::error::FieldError;

/// A field that is refused, except with harmless values.
pub(crate) type Unsupported = (&'static str, Harmless);

/// Values of a field that have no effect.
#[derive(Debug)]
pub(crate) enum Harmless {
    /// None.
    Never,
    /// All: the field is meant for other servers, or only affects reporting.
    Always,
    /// `false`.
    False,
    /// `true`.
    True,
    /// 0.
    Zero,
    /// 1.
    One,
    /// An empty list, object or string.
    Empty,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A list of only this word.
    Only(&'static str),
    /// `[]`, `none` and `auto`; otherwise there is a newer field, which this names.
    Older(&'static str),
}

impl Harmless {
    fn allows(&self, value: &Value) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Zero => value.as_f64() == Some(0.0),
            Self::One => value.as_f64() == Some(1.0),
            Self::Empty => match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::String(text) => text.is_empty(),
                _ => false,
            },
            Self::Word(words) => value.as_str().is_some_and(|word| words.contains(&word)),
            Self::Only(word) => value
                .as_array()
                .is_some_and(|list| list.iter().all(|v| v == word)),
            Self::Older(_) => {
                value == "none" || value == "auto" || value.as_array().is_some_and(Vec::is_empty)
            }
        }
    }
}

/// Whether the field that no struct has is listed here, as accepted without effect or in `unsupported`.
pub(crate) fn is_listed(name: &str, unsupported: &[&[Unsupported]]) -> bool {
    ACCEPTED.contains(&name) || find(name, unsupported).is_some()
}

/// Checks the values of the fields that no struct has: an error names the first that is neither accepted nor harmless.
pub(crate) fn check_values(
    rest: &Map<String, Value>,
    unsupported: &[&[Unsupported]],
) -> Result<(), FieldError> {
    for (name, value) in rest {
        if let Some(harmless) = find(name, unsupported).filter(|harmless| !harmless.allows(value)) {
            return Err(FieldError::unsupported(name.clone(), harmless.hint()));
        }
    }
    Ok(())
}

fn find<'a>(name: &str, unsupported: &[&'a [Unsupported]]) -> Option<&'a Harmless> {
    let mut all = unsupported.iter().flat_map(|list| list.iter());
    all.find(|(field, _)| *field == name)
        .map(|(_, harmless)| harmless)
}

impl Harmless {
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::False => Some("only false is"),
            Self::True => Some("only true is"),
            Self::Zero => Some("only 0 is"),
            Self::One => Some("only 1 is"),
            Self::Only("text") => Some("only `text` is"),
            Self::Older(hint) => Some(hint),
            _ => None,
        }
    }
}

/// OpenAI's fields without effect on a self-hosted server.
pub(crate) const ACCEPTED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// Refused in chat and completions; most are vLLM's.
pub(crate) const UNSUPPORTED: &[Unsupported] = &[
    ("structural_tag", Harmless::Never),
    ("use_beam_search", Harmless::False),
    ("length_penalty", Harmless::One),
    ("spaces_between_special_tokens", Harmless::True),
    ("logits_processors", Harmless::Empty),
    ("kv_transfer_params", Harmless::Never),
    ("vllm_xargs", Harmless::Never),
];

/// Refused in chat.
pub(crate) const CHAT_UNSUPPORTED: &[Unsupported] = &[
    ("functions", Harmless::Older("send tools")),
    ("function_call", Harmless::Older("send tool_choice")),
    ("audio", Harmless::Never),
    ("modalities", Harmless::Only("text")),
    ("prediction", Harmless::Never),
    ("verbosity", Harmless::Word(&["medium"])),
    ("web_search_options", Harmless::Never),
    ("moderation", Harmless::Never),
    ("prompt_cache_options", Harmless::Never),
    ("add_special_tokens", Harmless::False),
    ("media_io_kwargs", Harmless::Empty),
];

/// Refused in responses. Codex sends `client_metadata`.
pub(crate) const RESPONSES_UNSUPPORTED: &[Unsupported] = &[
    ("background", Harmless::False),
    ("conversation", Harmless::Never),
    ("prompt", Harmless::Never),
    ("context_management", Harmless::Empty),
    ("moderation", Harmless::Never),
    ("access_programs", Harmless::Never),
    ("image", Harmless::Never),
    ("prompt_cache_options", Harmless::Never),
    ("personality", Harmless::Never),
    ("modalities", Harmless::Only("text")),
    ("client_metadata", Harmless::Always),
    ("thinking_token_budget", Harmless::Never),
];

/// Refused in messages.
pub(crate) const MESSAGES_UNSUPPORTED: &[Unsupported] = &[
    ("mcp_servers", Harmless::Empty),
    ("container", Harmless::Never),
    ("inference_geo", Harmless::Never),
    (THREAD, Harmless::Never),
    ("compaction", Harmless::Never),
    ("fallbacks", Harmless::Empty),
    ("fallback_credit_token", Harmless::Never),
    ("billing_policy", Harmless::Never),
    ("user_profile_id", Harmless::Never),
    ("workspace_id", Harmless::Never),
    ("speed", Harmless::Word(&["standard"])),
    ("cache_control", Harmless::Always),
    ("diagnostics", Harmless::Always),
];

/// Without effect on token counts.
pub(crate) const COUNTED_LATER: &[Unsupported] = &[("stop_sequences", Harmless::Always)];

/// Refused where the API's responses cannot report them.
pub(crate) const NO_REPORTS: &[Unsupported] = &[
    ("prompt_logprobs", Harmless::Never),
    ("return_token_ids", Harmless::False),
    ("return_tokens_as_token_ids", Harmless::False),
];

/// When this field is refused, Anthropic's clients send the whole conversation instead of a part.
pub(crate) const THREAD: &str = "thread";

/// Refused in `/tokenize`.
pub(crate) const TOKENIZE_UNSUPPORTED: &[Unsupported] = &[("media_io_kwargs", Harmless::Empty)];

/// Refused in scores and rankings.
pub(crate) const SCORING_UNSUPPORTED: &[Unsupported] = &[
    ("priority", Harmless::Zero),
    ("cache_salt", Harmless::Never),
    ("use_activation", Harmless::Never),
    ("mm_processor_kwargs", Harmless::Empty),
];

/// Refused in embeddings.
pub(crate) const EMBEDDING_UNSUPPORTED: &[Unsupported] = &[
    ("priority", Harmless::Zero),
    ("cache_salt", Harmless::Never),
    ("embed_dtype", Harmless::Word(&["float32"])),
    ("endianness", Harmless::Word(&["native", "little"])),
    ("normalize", Harmless::Never),
    ("use_activation", Harmless::Never),
    ("mm_processor_kwargs", Harmless::Empty),
];

/// Refused in completions.
pub(crate) const COMPLETION_UNSUPPORTED: &[Unsupported] = &[
    ("prompt_embeds", Harmless::Never),
    ("thinking_token_budget", Harmless::Never),
    ("mm_processor_kwargs", Harmless::Empty),
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(value: Value) -> Result<(), String> {
        let Value::Object(object) = value else {
            panic!("an object")
        };
        let lists = [UNSUPPORTED, CHAT_UNSUPPORTED];
        assert!(object.keys().all(|name| is_listed(name, &lists)));
        check_values(&object, &lists).map_err(|e| e.to_string())?;
        Ok(())
    }

    #[test]
    fn harmless_values_are_accepted() {
        let body = json!({
            "user": "u", "modalities": ["text"], "spaces_between_special_tokens": true, "length_penalty": 1.0,
        });
        assert_eq!(check(body), Ok(()));
    }

    #[test]
    fn refused_fields_are_named() {
        for (name, value) in [
            ("audio", json!({})),
            ("web_search_options", json!({})),
            ("use_beam_search", json!(true)),
        ] {
            let error = check(json!({ name: value })).unwrap_err();
            assert!(
                error.starts_with(&format!("`{name}` is not supported")),
                "{error}"
            );
        }
    }
}
