//! Text in and out of a model: tokenizer, chat template, and what ends a text.

use std::path::{Path, PathBuf};

use plimsoll_core::{MetaValue, TokenId};
use plimsoll_model::{GenerationConfig, GgufFile};
use plimsoll_text::{ChatTemplate, Renderer, TextError, Tokenizer};
use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::settings::EngineSettings;
use crate::source::Source;

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
    /// What the model's files say about its tokenizer.
    pub config: Map<String, Value>,
}

impl Text {
    /// From a directory or a GGUF file. The simulated model and dummy weights need no tokenizer: without one, bytes are tokens.
    ///
    /// # Errors
    /// Where there is none, or it cannot be read.
    pub(super) fn read(source: &Source, settings: &EngineSettings) -> Result<Self, Error> {
        let renderer = &settings.renderer;
        let Source::Files { tokenizer: path, .. } = source else {
            return Self::simulated(renderer);
        };
        let (tokenizer, template, config) = if path.is_dir() {
            if settings.is_dummy() && Self::is_absent(source) {
                tracing::warn!("{} has no {FILE}: every byte is a token", path.display());
                return Self::simulated(renderer);
            }
            let config = plimsoll_text::tokenizer_config(path)?;
            let template = ChatTemplate::from_dir(path, renderer)?;
            (Tokenizer::from_dir(path)?, template, config)
        } else {
            let file = GgufFile::open(path)?;
            let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|error| error.in_file(path))?;
            let template =
                ChatTemplate::from_gguf(path, file.metadata(), tokenizer.special_tokens(), renderer)?;
            let class = file
                .metadata()
                .get("tokenizer.ggml.model")
                .and_then(MetaValue::as_str);
            let config = config(&tokenizer, class.unwrap_or("unknown"));
            (tokenizer, template, config)
        };
        Ok(Self {
            config,
            ..Self::new(tokenizer, template)
        })
    }

    /// Whether there is nothing to read from: that is found out at once, and not after minutes of loading weights.
    pub(crate) fn is_absent(source: &Source) -> bool {
        match source {
            Source::Sim => false,
            Source::Files { tokenizer, .. } => tokenizer.is_dir() && !tokenizer.join(FILE).exists(),
        }
    }

    /// Refuses a tokenizer of another model, whose texts would begin or end with tokens that this one does not have.
    pub(super) fn check_ids(&self, path: &Path, vocab_size: usize) -> Result<(), Error> {
        let ends = self.tokenizer.eos_ids().iter().map(|&id| ("eos_token", id));
        let begins = self.tokenizer.bos_id().map(|id| ("bos_token", id));
        let beyond = ends.chain(begins).find(|&(_, id)| id as usize >= vocab_size);
        match beyond {
            None => Ok(()),
            Some((field, id)) => Err(Error::Text(TextError::Invalid {
                place: file_of(path).display().to_string(),
                problem: format!(
                    "`{field}` is `{}`, token {id}, beyond the model's vocabulary of {vocab_size} tokens: the tokenizer is that \
                     of another model",
                    self.tokenizer.token_str(id)
                ),
            })),
        }
    }

    fn simulated(renderer: &Renderer) -> Result<Self, Error> {
        let tokenizer = Tokenizer::bytes();
        let template = Some(ChatTemplate::new(
            SIM_TEMPLATE,
            tokenizer.special_tokens(),
            renderer,
        )?);
        let config = config(&tokenizer, "bytes");
        Ok(Self {
            config,
            ..Self::new(tokenizer, template)
        })
    }

    /// What the weights' files say comes later.
    fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        Self {
            eos_token_ids: tokenizer.eos_ids().to_vec(),
            tokenizer,
            template,
            generation: GenerationConfig::default(),
            config: Map::new(),
        }
    }
}

/// The file of a tokenizer in a directory or a GGUF file.
fn file_of(path: &Path) -> PathBuf {
    match path.is_dir() {
        true => path.join(FILE),
        false => path.to_owned(),
    }
}

/// What is known without a tokenizer_config.json: the kind of tokenizer, and the special tokens.
fn config(tokenizer: &Tokenizer, class: &str) -> Map<String, Value> {
    let special = tokenizer.special_tokens().iter();
    let special = special.map(|(role, text)| (role.clone(), json!(text)));
    let class = ("tokenizer_class".to_owned(), json!(class));
    special.chain([class]).collect()
}

/// For a model that was trained on no chats.
const SIM_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";
