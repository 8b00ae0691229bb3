//! Cross-encoders: what becomes of the last token's row behind the last norm, where a prompt holds a pair of texts.
//!
//! Two kinds are published: classifiers with one label (`...ForSequenceClassification`, `score.weight`), and networks that
//! generate text whose logits of two tokens say yes or no (sentence-transformers' module `LogitScore`). Both come down to
//! the product of the row with another one, which the host computes: the device makes a vector as for embeddings.

use std::path::Path;

use plimsoll_core::{Pooling, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{EmbeddingConfig, Module, ServeAs, Task, read_json};
use crate::{DecoderSpec, ModelError, OutputHead};

/// How a cross-encoder makes a score of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoringConfig {
    /// Whose product with the last row is the score.
    pub(crate) head: ScoringHead,
    /// The score goes through a sigmoid, so that it is between 0 and 1.
    pub sigmoid: bool,
    /// What the chat template's system message says, if pairs are rendered by it.
    pub instruction: Option<String>,
    /// That template's variables.
    pub template_kwargs: Map<String, Value>,
    /// That prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
}

/// Where a head of one row comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoringHead {
    /// A classifier's only row.
    Classifier,
    /// The LM head's row of one token, less that of another.
    Tokens {
        yes: TokenId,
        no: Option<TokenId>,
        /// The LM head is the embedding.
        tied: bool,
    },
}

/// The config.json of sentence-transformers' `LogitScore`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogitScore {
    true_token_id: TokenId,
    false_token_id: Option<TokenId>,
    #[serde(default = "LogitScore::input")]
    module_input_name: String,
}

impl LogitScore {
    fn input() -> String {
        "causal_logits".to_owned()
    }
}

/// Of config_sentence_transformers.json.
#[derive(Debug, Default, Deserialize)]
struct Settings {
    activation_fn: Option<String>,
    #[serde(default)]
    prompts: Map<String, Value>,
    default_prompt_name: Option<String>,
}

/// Of sentence_bert_config.json.
#[derive(Debug, Default, Deserialize)]
struct Processing {
    #[serde(default)]
    processing_kwargs: Calls,
}

/// How the processor is called.
#[derive(Debug, Default, Deserialize)]
struct Calls {
    #[serde(default)]
    chat_template: Map<String, Value>,
}

impl ScoringConfig {
    fn new(head: ScoringHead, sigmoid: bool) -> Self {
        Self {
            head,
            sigmoid,
            instruction: None,
            template_kwargs: Map::new(),
            add_generation_prompt: false,
        }
    }

    /// A classifier with one label, whose config.json has these fields of sentence-transformers.
    pub(crate) fn classifier(activation: Option<&str>) -> Result<Self, ModelError> {
        Ok(Self::new(ScoringHead::Classifier, is_sigmoid(activation)?))
    }

    /// Whether the model is one that generates text, whose logits make the score.
    pub fn is_of_text_model(&self) -> bool {
        matches!(self.head, ScoringHead::Tokens { .. })
    }

    /// The vectors that it makes scores of.
    pub(crate) fn embedding(self) -> EmbeddingConfig {
        EmbeddingConfig {
            pooling: Pooling::Last,
            normalize: false,
            max_tokens: None,
            scoring: Some(self),
        }
    }

    /// Takes what the files beside config.json say in place of what that says.
    pub(crate) fn beside(&mut self, directory: &Path) -> Result<(), ModelError> {
        let path = directory.join("config_sentence_transformers.json");
        let settings = read_json::<Settings>(&path)?.unwrap_or_default();
        if let Some(activation) = &settings.activation_fn {
            self.sigmoid = is_sigmoid(Some(activation))?;
        }
        if let Some(name) = &settings.default_prompt_name {
            let prompt = settings.prompts.get(name).and_then(Value::as_str);
            let missing = || {
                ModelError::config(
                    &path,
                    format!("`default_prompt_name` is `{name}`, which `prompts` does not have"),
                )
            };
            self.instruction = Some(prompt.ok_or_else(missing)?.to_owned());
        }
        let path = directory.join("sentence_bert_config.json");
        let Processing { processing_kwargs } = read_json(&path)?.unwrap_or_default();
        self.template_kwargs = processing_kwargs.chat_template;
        // About truncation, which keeps what is behind the text here.
        self.template_kwargs.remove("restore_suffix");
        let begins = self.template_kwargs.remove("add_generation_prompt");
        self.add_generation_prompt = begins.is_some_and(|begins| begins == true);
        Ok(())
    }

    /// # Errors
    /// Where flags ask for what a cross-encoder cannot do.
    pub(crate) fn check(&self, serve_as: &ServeAs) -> Result<(), ModelError> {
        if serve_as.task == Task::Generate {
            return match self.head {
                ScoringHead::Tokens { .. } => Ok(()),
                ScoringHead::Classifier => Err(ModelError::unsupported(
                    "--runner",
                    "generate",
                    "this model has a classifier's head in place of one for text: it scores pairs of texts",
                )),
            };
        }
        match (serve_as.pooling, serve_as.normalize) {
            (None | Some(Pooling::Last), None | Some(false)) => Ok(()),
            _ => Err(ModelError::unsupported(
                "--pooler-config",
                "given",
                "a cross-encoder makes scores of the last token's row as it is: the model runs without the flag",
            )),
        }
    }

    /// What `spec` means for it, before its LM head is left out.
    pub(crate) fn resolve(&mut self, path: &Path, spec: &DecoderSpec) -> Result<(), ModelError> {
        let ScoringHead::Tokens { yes, no, tied } = &mut self.head else {
            return Ok(());
        };
        *tied = spec.head == OutputHead::Tied;
        if let Some(token) = [Some(*yes), *no]
            .into_iter()
            .flatten()
            .find(|&id| id as usize >= spec.vocab_size)
        {
            let message = format!(
                "LogitScore names token {token}, but `vocab_size` is {}",
                spec.vocab_size
            );
            return Err(ModelError::config(path, message));
        }
        match spec.logit_soft_cap {
            None => Ok(()),
            Some(cap) => Err(ModelError::unsupported(
                "final_logit_softcapping",
                cap,
                "a cross-encoder by tokens (LogitScore) with null is",
            )),
        }
    }
}

/// The module `LogitScore` of a directory.
pub(crate) fn read_module(
    directory: &Path,
    modules: &Path,
    module: &Module,
) -> Result<ScoringConfig, ModelError> {
    let (path, read) = module.read::<LogitScore>(directory, modules)?;
    if read.module_input_name != LogitScore::input() {
        let message = format!(
            "`module_input_name` is `{}`: {} is supported",
            read.module_input_name,
            LogitScore::input()
        );
        return Err(ModelError::config(&path, message));
    }
    let head = ScoringHead::Tokens {
        yes: read.true_token_id,
        no: read.false_token_id,
        tied: false,
    };
    Ok(ScoringConfig::new(head, is_sigmoid(None)?))
}

/// What sentence-transformers does where nobody says: with one score, a sigmoid.
fn is_sigmoid(activation: Option<&str>) -> Result<bool, ModelError> {
    match activation.map(|path| path.rsplit('.').next().unwrap_or_default()) {
        None | Some("Sigmoid") => Ok(true),
        Some("Identity") => Ok(false),
        Some(other) => Err(ModelError::unsupported(
            "activation_fn",
            other,
            "Sigmoid and Identity are",
        )),
    }
}
