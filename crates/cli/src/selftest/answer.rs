//! What a request must be answered with, and what it was answered with.

use serde_json::Value;

/// Probabilities are rounded: their logarithms may be so much above 0.
const ROUNDING: f64 = 1e-3;

/// What a request's answer must look like, whatever the model says.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    /// Prompt tokens in all; `None` where the chat template decides.
    pub(super) prompt_tokens: Option<usize>,
    /// Choices, those of all prompts.
    pub(super) choices: usize,
    /// Most tokens of each choice: exactly so many, unless it may stop.
    pub(super) max_tokens: usize,
    /// Whether a stop string or an end-of-sequence token may end a choice early.
    pub(super) may_stop: bool,
    /// How many of the likeliest tokens come with each token, if log-probabilities come at all.
    pub(super) logprobs: Option<usize>,
}

/// One choice as it arrived.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Choice {
    pub(super) text: String,
    finish: Option<String>,
    /// Of each token: its log-probability, if it is a number, and how many of the likeliest came with it.
    logprobs: Vec<(Option<f64>, usize)>,
}

/// An answer, whole or put together from a stream.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub(super) choices: Vec<Choice>,
    usage: Value,
}

impl Answer {
    /// Adds a whole response or one chunk of a stream; the error is what is wrong with it.
    pub(super) fn add(&mut self, part: &Value) -> Result<(), String> {
        if let Some(error) = part.get("error") {
            return Err(format!("an error in the stream: {error}"));
        }
        let choices = part["choices"]
            .as_array()
            .ok_or_else(|| format!("an answer without choices: {part}"))?;
        for choice in choices {
            let index = choice["index"]
                .as_u64()
                .ok_or_else(|| format!("a choice without an index: {choice}"))?;
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if index > self.choices.len() + MOST_CHOICES {
                return Err(format!("a choice with index {index}"));
            }
            if index >= self.choices.len() {
                self.choices.resize(index + 1, Choice::default());
            }
            self.choices[index].add(choice);
        }
        if part["usage"].is_object() {
            self.usage = part["usage"].clone();
        }
        Ok(())
    }

    fn count(&self, key: &str) -> Option<usize> {
        usize::try_from(self.usage[key].as_u64()?).ok()
    }

    /// What is wrong with this answer, if anything is.
    pub(super) fn check(&self, expected: &Expected) -> Result<(), String> {
        let Expected {
            choices, max_tokens, ..
        } = *expected;
        if self.choices.len() != choices {
            return Err(format!("{} choices instead of {choices}", self.choices.len()));
        }
        let counts = ["prompt_tokens", "completion_tokens", "total_tokens"].map(|key| self.count(key));
        let [Some(prompt), Some(completion), Some(total)] = counts else {
            return Err(format!("the usage is incomplete: {}", self.usage));
        };
        let most = choices * max_tokens;
        let count_is_right = match expected.may_stop {
            true => (choices..=most).contains(&completion),
            false => completion == most,
        };
        if !count_is_right {
            return Err(format!("{completion} tokens instead of {most}"));
        }
        let wanted = expected.prompt_tokens;
        if wanted.is_some_and(|tokens| tokens != prompt) || prompt == 0 {
            return Err(format!("{prompt} prompt tokens instead of {wanted:?}"));
        }
        if total != prompt + completion {
            let message = format!("{total} tokens in all instead of {prompt} + {completion}");
            return Err(message);
        }
        let tokens = (!expected.may_stop).then_some(max_tokens);
        self.choices
            .iter()
            .try_for_each(|choice| choice.check(expected, tokens))
    }
}

/// No request of ours has more.
const MOST_CHOICES: usize = 1024;

impl Choice {
    fn add(&mut self, part: &Value) {
        let (message, delta) = (&part["message"]["content"], &part["delta"]["content"]);
        let text = [&part["text"], message, delta];
        self.text.extend(text.into_iter().find_map(Value::as_str));
        if let Some(finish) = part["finish_reason"].as_str() {
            self.finish = Some(finish.to_owned());
        }
        let logprobs = &part["logprobs"];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let size = |value: &Value| match value {
            Value::Array(values) => Some(values.len()),
            Value::Object(fields) => Some(fields.len()),
            _ => None,
        };
        for token in list(&logprobs["content"]) {
            let top = size(&token["top_logprobs"]).unwrap_or(0);
            self.logprobs.push((token["logprob"].as_f64(), top));
        }
        let tops = list(&logprobs["top_logprobs"]);
        for (value, top) in list(&logprobs["token_logprobs"]).iter().zip(tops) {
            self.logprobs.push((value.as_f64(), size(&top).unwrap_or(0)));
        }
    }

    /// `tokens` is their exact number, where it is known.
    fn check(&self, expected: &Expected, tokens: Option<usize>) -> Result<(), String> {
        match self.finish.as_deref() {
            Some("length") => {}
            Some("stop") if expected.may_stop => {}
            finish => return Err(format!("a choice that finished with {finish:?}")),
        }
        let Some(top) = expected.logprobs else {
            return match self.logprobs.len() {
                0 => Ok(()),
                count => Err(format!("{count} log-probabilities that were not requested")),
            };
        };
        let count = self.logprobs.len();
        if tokens.is_some_and(|tokens| tokens != count) {
            return Err(format!("{count} log-probabilities for {tokens:?} tokens"));
        }
        // Completions name tokens by their text: two with the same text are one, and the sampled one may be one more.
        let wrong = |&&(value, count): &&(Option<f64>, usize)| {
            value.is_none_or(|value| value > ROUNDING) || count > top + 1 || (count == 0 && top > 0)
        };
        match self.logprobs.iter().find(wrong) {
            Some((value, count)) => Err(format!(
                "a token with log-probability {value:?} and {count} of the {top} likeliest"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn expected() -> Expected {
        Expected {
            prompt_tokens: Some(3),
            choices: 1,
            max_tokens: 2,
            may_stop: false,
            logprobs: Some(1),
        }
    }

    fn whole() -> Value {
        json!({
            "choices": [{"index": 0, "text": "ab", "finish_reason": "length",
                "logprobs": {"token_logprobs": [-0.5, 0.0], "top_logprobs": [{"a": -0.5}, {"b": 0.0, "c": -1.0}]}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        })
    }

    fn check(part: &Value, expected: &Expected) -> Result<(), String> {
        let mut answer = Answer::default();
        answer.add(part)?;
        answer.check(expected)
    }

    #[test]
    fn a_stream_is_its_parts_together() {
        let mut answer = Answer::default();
        for (text, finish) in [("a", json!(null)), ("b", json!("length"))] {
            let logprob = json!({"content": [{"logprob": -1.0, "top_logprobs": [{}]}]});
            let choice =
                json!({"index": 0, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprob});
            answer.add(&json!({"choices": [choice], "usage": null})).unwrap();
        }
        assert!(answer.check(&expected()).unwrap_err().contains("usage"));
        answer
            .add(&json!({"choices": [], "usage": whole()["usage"]}))
            .unwrap();
        assert_eq!(answer.check(&expected()), Ok(()));
        assert_eq!(answer.choices[0].text, "ab");
    }

    #[test]
    fn every_check_can_fail() {
        assert_eq!(check(&whole(), &expected()), Ok(()));
        for (pointer, value) in [
            ("/choices", json!(null)),
            ("/choices", json!([])),
            ("/choices/0/index", json!(1)),
            ("/choices/0/index", json!(null)),
            ("/choices/0/finish_reason", json!("stop")),
            ("/choices/0/finish_reason", json!(null)),
            ("/choices/0/logprobs/token_logprobs", json!([-0.5])),
            ("/choices/0/logprobs/token_logprobs", json!([-0.5, null])),
            ("/choices/0/logprobs/token_logprobs", json!([-0.5, 2.0])),
            ("/choices/0/logprobs/top_logprobs", json!([{}, {}])),
            ("/usage/prompt_tokens", json!(4)),
            ("/usage/completion_tokens", json!(1)),
            ("/usage/total_tokens", json!(6)),
            ("/usage", json!(null)),
        ] {
            let mut wrong = whole();
            *wrong.pointer_mut(pointer).unwrap() = value.clone();
            assert!(check(&wrong, &expected()).is_err(), "{pointer} = {value}");
        }
        assert!(check(&json!({"error": {"message": "no"}}), &expected()).is_err());
        let silent = Expected {
            logprobs: None,
            ..expected()
        };
        assert!(
            check(&whole(), &silent).is_err(),
            "log-probabilities that were not requested"
        );
    }

    #[test]
    fn a_choice_may_stop_where_it_was_asked_to() {
        let mut stopped = whole();
        stopped["choices"][0]["finish_reason"] = json!("stop");
        stopped["usage"] = json!({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4});
        let may_stop = Expected {
            may_stop: true,
            ..expected()
        };
        assert_eq!(check(&stopped, &may_stop), Ok(()));
        assert!(check(&stopped, &expected()).is_err());
    }
}
