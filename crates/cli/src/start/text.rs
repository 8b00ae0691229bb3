//! Text in and out of a model: tokenizer, chat template, and what ends a text.

use std::path::Path;

use plimsoll_core::TokenId;
use plimsoll_model::{GenerationConfig, GgufFile};
use plimsoll_text::{ChatTemplate, Tokenizer};

use crate::args::LoadFormat;
use crate::error::Error;

/// Where a directory has its tokenizer.
const FILE: &str = "tokenizer.json";

/// Turns messages and text into tokens and back, the way the model was trained.
#[derive(Debug)]
pub struct Text {
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Messages to text, if the model says how.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<TokenId>,
    /// Sampling defaults the model brings along.
    pub generation: GenerationConfig,
}

impl Text {
    pub(super) fn simulated() -> Result<Self, Error> {
        let tokenizer = Tokenizer::bytes();
        let template = Some(ChatTemplate::new(SIM_TEMPLATE, tokenizer.special_tokens())?);
        Ok(Self::new(tokenizer, template))
    }

    /// Whether there is nothing to read from.
    pub(super) fn is_absent(path: &Path) -> bool {
        path.is_dir() && !path.join(FILE).exists()
    }

    /// From a directory or a GGUF file. Dummy weights need no tokenizer: without one, bytes are tokens.
    pub(super) fn read(path: &Path, format: LoadFormat) -> Result<Self, Error> {
        let (tokenizer, template) = if path.is_dir() {
            if format == LoadFormat::Dummy && Self::is_absent(path) {
                tracing::warn!("{} has no {FILE}: every byte is a token", path.display());
                return Self::simulated();
            }
            (Tokenizer::from_dir(path)?, ChatTemplate::from_dir(path)?)
        } else {
            let file = GgufFile::open(path)?;
            let tokenizer = Tokenizer::from_gguf(file.metadata())?;
            let template = ChatTemplate::from_gguf(file.metadata(), tokenizer.special_tokens())?;
            (tokenizer, template)
        };
        Ok(Self::new(tokenizer, template))
    }

    /// What the weights' files say comes later.
    fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        Self {
            eos_token_ids: tokenizer.eos_ids().to_vec(),
            tokenizer,
            template,
            generation: GenerationConfig::default(),
        }
    }
}

/// For a model that was trained on no chats.
const SIM_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";
