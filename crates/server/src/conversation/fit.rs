//! Conversations that are longer than the context.

use serde_json::Value;

use super::Prompt;
use super::prompt::{Encoded, Rendered};
use crate::error::ApiError;
use crate::model::ModelInfo;

/// What to do where a prompt and its answer do not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Refuse the request.
    #[default]
    Refuse,
    /// Lower `max_tokens` to what fits.
    CutAnswer,
    /// Drop the oldest turns of the conversation.
    DropOldest,
}

impl Prompt {
    /// Drops as many of the oldest turns as needed to have at most `wanted` tokens. System messages at the beginning and the
    /// last turn are kept, so the result may still be longer; more than `most` is refused as by [`Self::rendered`].
    pub(super) fn rendered_within(
        &mut self,
        model: &ModelInfo,
        wanted: usize,
        most: usize,
    ) -> Result<Rendered, ApiError> {
        let messages = std::mem::take(&mut self.messages);
        let (text, tokens) = within(&messages, |messages| {
            self.messages = messages;
            let text = self.text(model)?;
            let may_fit = model.tokenizer.count_at_least(&text) <= wanted;
            let tokens = may_fit.then(|| self.encode(model, &text, None)).transpose()?;
            let fits = tokens
                .as_ref()
                .is_some_and(|encoded: &Encoded| encoded.tokens.len() <= wanted);
            Ok(((text, tokens), fits))
        })?;
        let Encoded { tokens, images } = match tokens {
            Some(encoded) => encoded,
            None => self.encode(model, &text, Some(most))?,
        };
        Ok(Rendered { text, tokens, images })
    }
}

/// Renders the messages without as few of the oldest turns as possible so that they fit; if nothing fits, with only the last
/// turn.
fn within<T>(
    messages: &[Value],
    mut render: impl FnMut(Vec<Value>) -> Result<(T, bool), ApiError>,
) -> Result<T, ApiError> {
    let (kept, starts) = turns(messages);
    let (mut best, mut fits) = render(messages.to_vec())?;
    if fits {
        return Ok(best);
    }
    // Binary search: dropping more turns leaves fewer tokens.
    let (mut few, mut many) = (1, starts.len().saturating_sub(1));
    while few <= many {
        let dropped = few.midpoint(many);
        let rest = [&messages[..kept], &messages[starts[dropped]..]].concat();
        let (rendered, enough) = render(rest)?;
        if enough || !fits {
            best = rendered;
        }
        fits |= enough;
        match enough {
            true => many = dropped - 1,
            false => few = dropped + 1,
        }
    }
    Ok(best)
}

/// The number of messages kept at the beginning, and the start of each turn after them. A turn starts with a user message, so
/// that no tool result loses its call.
fn turns(messages: &[Value]) -> (usize, Vec<usize>) {
    let role = |message: &Value, role: &str| message["role"] == role;
    let kept = messages
        .iter()
        .take_while(|message| role(message, "system"))
        .count();
    let users = (kept..messages.len()).filter(|&i| i == kept || role(&messages[i], "user"));
    (kept, users.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn as_few_old_turns_as_possible_are_dropped() {
        let messages = [
            ("system", "sys "),
            ("user", "aaaa"),
            ("assistant", "bbbb"),
            ("tool", "cccc"),
            ("user", "dddd"),
            ("assistant", "eeee"),
            ("user", "ffff"),
        ];
        let messages: Vec<Value> = messages
            .into_iter()
            .map(|(role, content)| json!({ "role": role, "content": content }))
            .collect();
        let text = |limit| {
            let render = |messages: Vec<Value>| {
                let text: String = messages
                    .iter()
                    .filter_map(|message| message["content"].as_str())
                    .collect();
                let fits = text.len() <= limit;
                Ok((text, fits))
            };
            within(&messages, render).unwrap()
        };
        assert_eq!(text(28), "sys aaaabbbbccccddddeeeeffff");
        for limit in [16, 27] {
            assert_eq!(text(limit), "sys ddddeeeeffff");
        }
        for limit in [0, 8, 15] {
            assert_eq!(text(limit), "sys ffff");
        }
    }
}
