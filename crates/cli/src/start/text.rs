//! Text in and out of a model: tokenizer, chat template, and what ends a text.

use plimsoll_core::{MetaValue, TokenId};
use plimsoll_model::{GenerationConfig, GgufFile};
use plimsoll_text::{ChatTemplate, Tokenizer};
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
        let Source::Files { tokenizer: path, .. } = source else {
            return Self::simulated();
        };
        let (tokenizer, template, config) = if path.is_dir() {
            if settings.is_dummy() && Self::is_absent(source) {
                tracing::warn!("{} has no {FILE}: every byte is a token", path.display());
                return Self::simulated();
            }
            let config = plimsoll_text::tokenizer_config(path)?;
            (Tokenizer::from_dir(path)?, ChatTemplate::from_dir(path)?, config)
        } else {
            let file = GgufFile::open(path)?;
            let tokenizer = Tokenizer::from_gguf(file.metadata())?;
            let template = ChatTemplate::from_gguf(file.metadata(), tokenizer.special_tokens())?;
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
    pub(super) fn is_absent(source: &Source) -> bool {
        match source {
            Source::Sim => false,
            Source::Files { tokenizer, .. } => tokenizer.is_dir() && !tokenizer.join(FILE).exists(),
        }
    }

    fn simulated() -> Result<Self, Error> {
        let tokenizer = Tokenizer::bytes();
        let template = Some(ChatTemplate::new(SIM_TEMPLATE, tokenizer.special_tokens())?);
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
