//! Prompts of a cross-encoder: one for each pair of texts.

use std::sync::Arc;

use plimsoll_core::TokenId;
use plimsoll_text::{ChatInput, ChatTemplate};
use serde_json::{Value, json};

use crate::blocking::blocking;
use crate::error::ApiError;
use crate::model::{ModelInfo, Scorer};
use crate::prompt;
use crate::state::AppState;
use crate::vectors::{Cut, Source, check_count};
use crate::wire::completion::Prompt;

/// Texts to pair up: each of the second side with the text of the first, or with that at its place.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub(crate) first: Source,
    pub(crate) second: Source,
    /// Truncates each text of the second side.
    pub(crate) each: Option<Cut>,
    /// Truncates the text of the second side so that the prompt becomes as short.
    pub(crate) whole: Option<Cut>,
}

impl Pairs {
    /// The prompts, under the second side's name: that is where the long texts are.
    pub(crate) async fn prompts(self, state: &AppState, scorer: &Scorer) -> Result<Source, ApiError> {
        check_count([&self.first, &self.second].into_iter())?;
        let model = Arc::clone(state.model());
        let most = state.engine().limits().max_request_tokens();
        let scorer = scorer.clone();
        blocking(move || {
            let Self { first, second, .. } = &self;
            for (index, prompt) in first.prompts.iter().enumerate() {
                if let Prompt::Text(text) = prompt {
                    prompt::check_length(&model, text, Some(most), first.field)
                        .map_err(|error| first.blame(index, error))?;
                }
            }
            let renders = |template: &&ChatTemplate| scorer.always_rendered || has_roles(template);
            let joining = Joining {
                model: &model,
                scorer: &scorer,
                template: model.template.as_ref().filter(renders),
                most,
                pairs: &self,
            };
            let pairs = first.prompts.iter().cycle().zip(&second.prompts).enumerate();
            let prompts = pairs.map(|(index, (one, other))| match (one, other) {
                (Prompt::Text(one), Prompt::Text(other)) => joining
                    .prompt(one, other)
                    .map(Prompt::Tokens)
                    .map_err(|error| second.blame(index, error)),
                _ => Err(ApiError::Internal("a pair of no texts".into())),
            });
            Ok(Source {
                prompts: prompts.collect::<Result<_, _>>()?,
                field: second.field,
                is_list: second.is_list,
                cut: None,
            })
        })
        .await
    }
}

/// Whether a chat template names the roles of pairs.
fn has_roles(template: &ChatTemplate) -> bool {
    ["query", "document"].iter().all(|role| template.mentions(role))
}

/// How the texts of a pair become one prompt.
struct Joining<'a> {
    model: &'a ModelInfo,
    scorer: &'a Scorer,
    template: Option<&'a ChatTemplate>,
    /// Most tokens of a prompt.
    most: usize,
    pairs: &'a Pairs,
}

impl Joining<'_> {
    fn prompt(&self, query: &str, document: &str) -> Result<Vec<TokenId>, ApiError> {
        let Pairs { each, whole, .. } = self.pairs;
        // What will be truncated may be longer.
        let bound = (each.is_none() && whole.is_none()).then_some(self.most);
        prompt::check_length(self.model, document, bound, self.pairs.second.field)?;
        let mut document = match each {
            Some(cut) => self.shortened(document, *cut)?,
            None => document.to_owned(),
        };
        let mut tokens = self.joined(query, &document)?;
        let Some(cut) = whole else {
            return Ok(tokens);
        };
        // A shorter text may be cut into tokens in another way: more than once is rare.
        while let Some(over) = tokens.len().checked_sub(cut.most()).filter(|&over| over > 0) {
            let kept = self.bare(&document)?.len().saturating_sub(over);
            if kept == 0 {
                let message = format!(
                    "what stands around the text takes {} of {} tokens; allow more with truncate_prompt_tokens",
                    self.joined(query, "")?.len(),
                    cut.most()
                );
                return Err(ApiError::invalid(self.pairs.second.field, message));
            }
            document = self.shortened(&document, cut.to(kept))?;
            tokens = self.joined(query, &document)?;
        }
        Ok(tokens)
    }

    fn joined(&self, query: &str, document: &str) -> Result<Vec<TokenId>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        let Some(template) = self.template else {
            return Ok(tokenizer.encode_pair(query, document)?);
        };
        let system = self.scorer.instruction.as_deref().map(|text| ("system", text));
        let texts = [("query", query), ("document", document)];
        let messages = system.into_iter().chain(texts).map(|(role, text)| {
            let mut content = Value::String(text.to_owned());
            tokenizer.guard(&mut content, &[]);
            json!({ "role": role, "content": content })
        });
        let messages: Vec<_> = messages.collect();
        let text = template.render_as_given(&ChatInput {
            messages: &messages,
            add_generation_prompt: self.scorer.add_generation_prompt,
            kwargs: Some(&self.scorer.template_kwargs),
            ..Default::default()
        })?;
        Ok(tokenizer.encode_guarded(&text, false)?)
    }

    fn bare(&self, text: &str) -> Result<Vec<TokenId>, ApiError> {
        Ok(self.model.tokenizer.encode(text, false)?)
    }

    /// As much of a text as a cut leaves.
    fn shortened(&self, text: &str, cut: Cut) -> Result<String, ApiError> {
        let tokens = self.bare(text)?;
        if tokens.len() <= cut.most() {
            return Ok(text.to_owned());
        }
        let kept = cut.apply(tokens, &[]);
        let bytes: Vec<u8> = (kept.iter())
            .flat_map(|&token| self.model.tokenizer.token_bytes(token))
            .copied()
            .collect();
        // A character may have been cut in two.
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.trim_matches(char::REPLACEMENT_CHARACTER).to_owned())
    }
}
