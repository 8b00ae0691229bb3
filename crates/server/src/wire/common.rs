use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use plimsoll_core::{FinishReason, TokenId};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};
use utoipa::ToSchema;

use super::error::FieldError;
use super::extra::{Extra, Reports};
use super::request::take;

/// Maximum choices per prompt (OpenAI's limit).
const MAX_N: usize = 128;
/// Maximum number of stop strings; each costs a comparison per token.
const MAX_STOPS: usize = 64;
/// Maximum bytes of a stop string.
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of stop tokens; each costs a comparison per token.
const MAX_STOP_TOKENS: usize = 256;

/// One or several.
#[derive(Clone, Debug, ToSchema)]
#[serde(untagged)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// What one of several can be, apart from a list.
pub(crate) trait Item: DeserializeOwned {
    /// What stands there, for errors.
    const EXPECTED: &str;
}

impl Item for String {
    const EXPECTED: &str = "a string or a list of strings";
}

/// Not derived: for an enum without a tag, serde forgets where in the value the error is.
impl<'de, T: Item> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemOrItems<T>(PhantomData<T>);

        impl<'de, T: Item> Visitor<'de> for ItemOrItems<T> {
            type Value = OneOrMany<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<OneOrMany<T>, E> {
                T::deserialize(text.into_deserializer()).map(OneOrMany::One)
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<OneOrMany<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(OneOrMany::One)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<OneOrMany<T>, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(OneOrMany::Many)
            }
        }

        deserializer.deserialize_any(ItemOrItems(PhantomData))
    }
}

/// The fields that chat and completions share.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Common {
    /// A name from `/v1/models`; the served model if absent.
    pub(crate) model: Option<String>,
    /// Sampling temperature; 0 is greedy. Default: the model's, else 1.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) temperature: Option<f64>,
    /// Nucleus sampling: samples from the likeliest tokens with this total probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub(crate) top_p: Option<f64>,
    /// Samples from this many of the likeliest tokens; 0 or -1 for all.
    #[schema(minimum = -1)]
    pub(crate) top_k: Option<i64>,
    /// Minimum probability of a token, relative to the likeliest.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) min_p: Option<f64>,
    /// Subtracted from the logits of tokens that were already generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) presence_penalty: Option<f64>,
    /// Subtracted from the logits of generated tokens, times how often they were generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) frequency_penalty: Option<f64>,
    /// Repetition penalty for tokens of the prompt and the text so far; 1 has no effect.
    #[schema(minimum = 0.01, maximum = 100)]
    repetition_penalty: Option<f64>,
    /// Ollama's and llama.cpp's name of `repetition_penalty`.
    #[schema(minimum = 0.01, maximum = 100)]
    repeat_penalty: Option<f64>,
    /// Added to the logits of tokens, by token id.
    pub(crate) logit_bias: Option<BTreeMap<String, f64>>,
    /// Seed of sampling: the same seed, request and model give the same text.
    pub(crate) seed: Option<i64>,
    /// Maximum number of tokens to generate; -1: as many as fit.
    #[schema(minimum = -1, value_type = Option<i64>)]
    pub(crate) max_tokens: Option<MaxTokens>,
    /// Choices per prompt.
    #[schema(minimum = 1, maximum = 128)]
    pub(crate) n: Option<usize>,
    /// Stop strings, up to 64 of up to 1024 bytes each; not part of the text.
    #[schema(value_type = Option<OneOrMany<String>>)]
    pub(crate) stop: Option<OneOrMany<String>>,
    /// Stop tokens.
    #[schema(value_type = Option<Vec<u32>>, max_items = 256)]
    pub(crate) stop_token_ids: Option<Vec<TokenId>>,
    /// Continues after the model's end-of-sequence token.
    #[serde(default)]
    pub(crate) ignore_eos: bool,
    /// Streams server-sent events.
    #[serde(default)]
    pub(crate) stream: bool,
    /// Only with `stream`.
    pub(crate) stream_options: Option<StreamOptions>,
    /// vLLM's: requests with a lower value are scheduled first. Needs `--scheduling-policy priority`.
    pub(crate) priority: Option<i64>,
    /// vLLM's: the request's id if there is no `X-Request-Id`. Up to 128 characters: letters, digits and `-_.:/+=@`.
    pub(crate) request_id: Option<String>,
    /// Timeout in seconds from the request's arrival.
    #[schema(exclusive_minimum = 0)]
    timeout: Option<f64>,
    /// Read separately by [`Self::take_from`].
    #[serde(skip)]
    pub(crate) extra: Extra,
    /// Read separately by [`Self::take_with_reports`].
    #[serde(skip)]
    pub(crate) reports: Reports,
}

/// How many tokens a client wants at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MaxTokens {
    /// This many.
    AtMost(usize),
    /// As many as fit: -1.
    Unlimited,
}

impl MaxTokens {
    /// The number, where there is one.
    pub(crate) fn limit(self) -> Option<usize> {
        match self {
            Self::AtMost(most) => Some(most),
            Self::Unlimited => None,
        }
    }
}

impl<'de> Deserialize<'de> for MaxTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = Number::deserialize(deserializer)?;
        let most = number.as_u64().and_then(|most| usize::try_from(most).ok());
        match most {
            Some(most) => Ok(Self::AtMost(most)),
            None if number.as_i64() == Some(-1) => Ok(Self::Unlimited),
            None if number.as_f64().is_some_and(|number| number >= u64::MAX as f64) => {
                Err(D::Error::custom(format!(
                    "must be at most {}, not {number}; -1 is as many as fit",
                    usize::MAX
                )))
            }
            None => Err(D::Error::custom(format!(
                "must be a whole number of at least 1, or -1 for as many as fit, not {number}"
            ))),
        }
    }
}

/// Options of a stream.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// Sends the usage in a last chunk.
    include_usage: Option<bool>,
    /// Padding against network side channels; this server never adds any.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
    /// vLLM's: with `include_usage`, sends the usage so far in every chunk.
    continuous_usage_stats: Option<bool>,
}

/// Which chunks of a stream have the usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageIn {
    /// An extra one at the end.
    pub(crate) last: bool,
    /// Every one: that of the choice so far.
    pub(crate) every: bool,
}

impl UsageIn {
    /// The usage of a chunk: absent, or `null` in streams that only send it at the end.
    pub(crate) fn chunk(self, so_far: Usage) -> MaybeUsage {
        self.last.then_some(self.every.then_some(so_far))
    }
}

impl Common {
    /// Removes these fields and vLLM's sampling fields from `object`.
    pub(crate) fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            extra: take(object)?,
            ..take(object)?
        })
    }

    /// The same with the reporting fields of chat and completions.
    pub(crate) fn take_with_reports(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        Ok(Self {
            reports: take(object)?,
            ..Self::take_from(object)?
        })
    }

    /// The repetition penalty, by either name.
    pub(crate) fn repetition_penalty(&self) -> Result<Option<f64>, FieldError> {
        match (self.repetition_penalty, self.repeat_penalty) {
            (Some(one), Some(other)) if one != other => {
                let message =
                    "repeat_penalty is another name of repetition_penalty, and they differ: send one of them";
                Err(FieldError::invalid("repeat_penalty", message))
            }
            (one, other) => Ok(one.or(other)),
        }
    }

    /// Choices per prompt.
    pub(crate) fn n(&self) -> Result<usize, FieldError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_N => Ok(n),
            n => Err(FieldError::invalid(
                "n",
                format!("n must be between 1 and {MAX_N}, not {n}"),
            )),
        }
    }

    /// Stop strings, none of them empty.
    pub(crate) fn stop(&self) -> Result<Vec<String>, FieldError> {
        let stop = match &self.stop {
            None => &[],
            Some(OneOrMany::One(one)) => std::slice::from_ref(one),
            Some(OneOrMany::Many(many)) => many.as_slice(),
        };
        let wrong = |message: String| Err(FieldError::invalid("stop", message));
        if stop.len() > MAX_STOPS {
            let len = stop.len();
            return wrong(format!(
                "at most {MAX_STOPS} stop strings are supported, not {len}"
            ));
        }
        if stop.iter().any(String::is_empty) {
            return wrong("a stop string must not be empty".to_owned());
        }
        if let Some(long) = stop.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
            let len = long.len();
            return wrong(format!(
                "a stop string must have at most {MAX_STOP_BYTES} bytes, not {len}"
            ));
        }
        Ok(stop.to_vec())
    }

    /// The client's stop tokens.
    pub(crate) fn stop_token_ids(&self) -> Result<Vec<TokenId>, FieldError> {
        let named = self.stop_token_ids.as_deref().unwrap_or_default();
        if named.len() > MAX_STOP_TOKENS {
            let message = format!(
                "at most {MAX_STOP_TOKENS} stop_token_ids are supported, not {}",
                named.len()
            );
            return Err(FieldError::invalid("stop_token_ids", message));
        }
        Ok(named.to_vec())
    }

    /// `enabled`: the server schedules by priority.
    pub(crate) fn priority(&self, enabled: bool) -> Result<i64, FieldError> {
        match self.priority.unwrap_or(0) {
            priority if priority == 0 || enabled => Ok(priority),
            priority => Err(FieldError::invalid(
                "priority",
                format!("priority {priority} needs a server with --scheduling-policy priority"),
            )),
        }
    }

    /// The timeout of the request.
    pub(crate) fn timeout(&self) -> Result<Option<Duration>, FieldError> {
        self.timeout.map(|value| seconds("timeout", value)).transpose()
    }

    /// Which chunks of the stream have the usage. `forced`: the last one has it in any case.
    pub(crate) fn usage_in(&self, forced: bool) -> Result<UsageIn, FieldError> {
        if self.stream_options.is_some() && !self.stream {
            let message = "stream_options is only allowed with stream = true";
            return Err(FieldError::invalid("stream_options", message));
        }
        let asked = |option: fn(&StreamOptions) -> Option<bool>| {
            self.stream_options.as_ref().and_then(option).unwrap_or(false)
        };
        let last = forced || asked(|options| options.include_usage);
        Ok(UsageIn {
            last,
            every: last && asked(|options| options.continuous_usage_stats),
        })
    }

    /// How many of the likeliest tokens to report for each prompt token, if its log-probabilities are requested.
    pub(crate) fn prompt_logprobs(&self) -> Result<Option<u32>, FieldError> {
        let asked = self.reports.prompt_logprobs;
        if asked.is_some() && self.stream {
            let message = "prompt_logprobs is not available with stream = true";
            return Err(FieldError::invalid("prompt_logprobs", message));
        }
        Ok(asked)
    }
}

/// A duration that a client gives in seconds; `field` names it in errors.
pub(crate) fn seconds(field: &str, seconds: f64) -> Result<Duration, FieldError> {
    let valid = Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| !time.is_zero());
    valid.ok_or_else(|| FieldError::invalid(field, format!("{field} must be a number of seconds above 0")))
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Usage {
    /// Tokens of the prompts.
    pub(crate) prompt_tokens: usize,
    /// Generated tokens.
    pub(crate) completion_tokens: usize,
    /// The sum.
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
    /// Of chats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Details of the generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct CompletionTokensDetails {
    /// Tokens of reasoning, including its markup.
    pub(crate) reasoning_tokens: usize,
}

/// Details of the prompts' tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct PromptTokensDetails {
    /// Tokens found in the prefix cache.
    pub(crate) cached_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: None,
        }
    }

    /// That of the prompt, before the first token of the answer.
    pub(crate) fn of_prompt(self) -> Self {
        Self::new(self.prompt_tokens, 0, self.prompt_tokens_details.cached_tokens)
    }

    /// Sets the number of reasoning tokens.
    pub(crate) fn with_reasoning(mut self, reasoning_tokens: usize) -> Self {
        self.completion_tokens_details = Some(CompletionTokensDetails { reasoning_tokens });
        self
    }
}

impl Usage {
    /// The sum of two usages.
    pub(crate) fn plus(self, other: &Self) -> Self {
        let cached = self.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens;
        let completion = self.completion_tokens + other.completion_tokens;
        let details = [self.completion_tokens_details, other.completion_tokens_details];
        let reasoning = details
            .into_iter()
            .flatten()
            .map(|details| details.reasoning_tokens)
            .reduce(|a, b| a + b);
        Self {
            completion_tokens_details: reasoning
                .map(|reasoning_tokens| CompletionTokensDetails { reasoning_tokens }),
            ..Self::new(self.prompt_tokens + other.prompt_tokens, completion, cached)
        }
    }
}

/// The client's stop string or token that ended a choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum StopReason {
    /// A stop string.
    Text(String),
    /// A token of `stop_token_ids`.
    #[schema(value_type = u32)]
    Token(TokenId),
}

impl StopReason {
    /// The stop string, if it was one.
    pub(crate) fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            Self::Token(_) => None,
        }
    }
}

/// OpenAI's name of the reason.
pub(crate) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::Complete => "stop",
        FinishReason::Length => "length",
    }
}

/// Serialized as absent, `null` or the value: with `include_usage`, chunks have `usage: null` before the last one.
pub(crate) type MaybeUsage = Option<Option<Usage>>;
