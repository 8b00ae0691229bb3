//! Texts of messages in prompts: they may contain the texts of special tokens, but never the tokens.

use plimsoll_core::TokenId;
use serde_json::{Map, Value};

use crate::{TextError, Tokenizer};

/// Stands within the text of a special token that is no token. Unicode gives this character to no text.
const GUARD: char = '\u{FDD0}';

impl Tokenizer {
    /// Guards the texts of special tokens in all strings of `value`, but those in `kept`: rendered into a prompt, they are text
    /// to [`Self::encode_guarded`].
    pub fn guard(&self, value: &mut Value, kept: &[&str]) {
        match value {
            Value::String(text) => {
                if let Some(guarded) = self.guarded(text, kept) {
                    *text = guarded;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.guard(value, kept)),
            Value::Object(fields) => {
                fields.values_mut().for_each(|value| self.guard(value, kept));
                if fields.keys().any(|name| self.guarded(name, kept).is_some()) {
                    let guarded = |name: String| self.guarded(&name, kept).unwrap_or(name);
                    let renamed = std::mem::take(fields).into_iter();
                    *fields = renamed
                        .map(|(name, value)| (guarded(name), value))
                        .collect::<Map<_, _>>();
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// `text` with guards, if it needs any.
    fn guarded(&self, text: &str, kept: &[&str]) -> Option<String> {
        let mut guarded = String::new();
        let mut from = 0;
        for (start, end) in self.special_texts().find(text) {
            if !kept.contains(&&text[start..end]) {
                let first = text[start..].chars().next().map_or(0, char::len_utf8);
                guarded += &text[from..start + first];
                guarded.push(GUARD);
                from = start + first;
            }
        }
        (from > 0).then(|| guarded + &text[from..])
    }

    /// [`Self::encode`] of a prompt with guarded texts, whose guards are taken out.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_guarded(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let mut clean = String::with_capacity(text.len());
        let mut guards = Vec::new();
        for piece in text.split(GUARD) {
            clean += piece;
            guards.push(clean.len());
        }
        // The last piece has no guard behind it.
        guards.pop();
        if guards.is_empty() {
            return self.encode(text, add_special);
        }
        let mut guards = guards.into_iter().peekable();
        let mut tokens = Vec::new();
        // How much is encoded, and the end of the last special token.
        let (mut done, mut from) = (0, 0);
        let mut is_guarded = false;
        let ends = self
            .special_texts()
            .find(&clean)
            .chain([(clean.len(), clean.len())]);
        for (start, end) in ends {
            while guards.next_if(|&guard| guard <= start).is_some() {}
            if guards.next_if(|&guard| guard < end).is_some() {
                is_guarded = true;
                continue;
            }
            if std::mem::take(&mut is_guarded) {
                tokens.extend(self.encode(&clean[done..from], add_special && done == 0)?);
                tokens.extend(self.encode_literal(&clean[from..start])?);
                done = start;
            }
            from = end;
        }
        tokens.extend(self.encode(&clean[done..], false)?);
        Ok(tokens)
    }
}
