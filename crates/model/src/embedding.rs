//! Embedding models: what their files say about how a prompt becomes a vector, and what flags say instead.
//!
//! Directories carry the files of [sentence-transformers](https://sbert.net): `modules.json` names the modules behind the
//! network, `N_Pooling/config.json` says how rows are pooled. GGUF files have `<architecture>.pooling_type`. What a
//! cross-encoder does with its row is in [`scoring`].

mod scoring;

use std::path::{Path, PathBuf};

use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use plimsoll_core::{EncoderLimits, Pooling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{HfOverrides, ModelError, OnlineQuantization};
pub use scoring::ScoringConfig;
pub(crate) use scoring::ScoringHead;

/// How a model that is served for embeddings makes its vectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingConfig {
    /// From rows to a vector.
    pub pooling: Pooling,
    /// Vectors are scaled to length 1.
    pub normalize: bool,
    /// Longest prompt, in tokens, where it is shorter than the network's context.
    pub max_tokens: Option<usize>,
    /// What it makes of the vector of a pair of texts, where it is a cross-encoder.
    pub scoring: Option<ScoringConfig>,
}

impl Default for EmbeddingConfig {
    /// What a decoder that says nothing is taken for.
    fn default() -> Self {
        Self {
            pooling: Pooling::Last,
            normalize: true,
            max_tokens: None,
            scoring: None,
        }
    }
}

/// What a model is served for (`--runner`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// Embeddings if its files say that it is made for them, text otherwise.
    #[default]
    Auto,
    /// Text.
    Generate,
    /// Embeddings.
    Embed,
}

/// What a model is served for, and what takes the place of its own settings for that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServeAs {
    /// Text or embeddings.
    pub task: Task,
    /// How rows become a vector.
    pub pooling: Option<Pooling>,
    /// Whether vectors are scaled to length 1.
    pub normalize: Option<bool>,
    /// Fields of its config.json.
    pub hf_overrides: HfOverrides,
    /// What its linear layers become.
    pub quantization: Option<OnlineQuantization>,
    /// The most that its encoder of images is asked for; without, text alone is served.
    pub images: Option<EncoderLimits>,
}

impl ServeAs {
    /// The same for text alone.
    #[must_use]
    pub fn without_images(&self) -> Self {
        Self {
            images: None,
            ..self.clone()
        }
    }

    /// What the model is served as that says `found` of itself; `None` is text.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] where settings of embeddings are given for a model that generates text.
    pub fn resolve(&self, found: Option<EmbeddingConfig>) -> Result<Option<EmbeddingConfig>, ModelError> {
        let Self {
            task,
            pooling,
            normalize,
            ..
        } = *self;
        if let Some(scoring) = found.as_ref().and_then(|found| found.scoring.as_ref()) {
            scoring.check(self)?;
        }
        let own = match task {
            Task::Auto => found,
            Task::Generate => None,
            Task::Embed => Some(found.unwrap_or_default()),
        };
        let Some(own) = own else {
            return match (pooling, normalize) {
                (None, None) => Ok(None),
                _ => Err(ModelError::unsupported(
                    "--pooler-config",
                    "given",
                    "this model is served for text generation; --runner pooling serves it for embeddings",
                )),
            };
        };
        Ok(Some(EmbeddingConfig {
            pooling: pooling.unwrap_or(own.pooling),
            normalize: normalize.unwrap_or(own.normalize),
            ..own
        }))
    }
}

/// What the files beside a config.json say; `None` where they are not those of an embedding model, or nobody asks. What
/// `serve_as` says in place of them is not read.
pub(crate) fn read_directory(
    directory: &Path,
    serve_as: &ServeAs,
) -> Result<Option<EmbeddingConfig>, ModelError> {
    if serve_as.task == Task::Generate {
        return Ok(None);
    }
    let path = directory.join("modules.json");
    let Some(modules) = read_json::<Vec<Module>>(&path)? else {
        return Ok(None);
    };
    let (mut pooling, mut normalize, mut scoring) = (None, false, None);
    for module in &modules {
        match module.kind.rsplit('.').next().unwrap_or_default() {
            "Transformer" => {}
            "Pooling" => {
                let read = || read_pooling(directory, &path, module);
                pooling = Some(serve_as.pooling.map_or_else(read, Ok)?);
            }
            "Normalize" => normalize = true,
            "LogitScore" => scoring = Some(scoring::read_module(directory, &path, module)?),
            other => {
                return Err(ModelError::unsupported(
                    "type in modules.json",
                    format!("`{other}`"),
                    "Transformer, Pooling, Normalize and LogitScore are",
                ));
            }
        }
    }
    let pooling = match (pooling, &scoring) {
        (Some(_), Some(_)) => {
            return Err(ModelError::config(&path, "it names both Pooling and LogitScore"));
        }
        (pooling, None) => pooling,
        (None, Some(_)) => Some(Pooling::Last),
    };
    let Some(pooling) = pooling else { return Ok(None) };
    let path = directory.join("sentence_bert_config.json");
    let limits = read_json::<SentenceBertConfig>(&path)?.unwrap_or_default();
    if limits.do_lower_case == Some(true) {
        return Err(ModelError::unsupported("do_lower_case", true, "only false is"));
    }
    Ok(Some(EmbeddingConfig {
        pooling,
        normalize,
        max_tokens: limits.max_seq_length,
        scoring,
    }))
}

/// What GGUF's `pooling_type` stands for (`enum llama_pooling_type`).
pub(crate) fn from_gguf(field: String, code: u64) -> Result<Option<EmbeddingConfig>, ModelError> {
    let pooling = match code {
        0 => return Ok(None),
        1 => Pooling::Mean,
        3 => Pooling::Last,
        2 => return Err(first_row(field, "2 (cls)")),
        _ => return Err(ModelError::unsupported(field, code, "1 (mean) and 3 (last) are")),
    };
    Ok(Some(EmbeddingConfig {
        pooling,
        ..EmbeddingConfig::default()
    }))
}

#[derive(Debug, Deserialize)]
pub(crate) struct Module {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

impl Module {
    /// The config.json of a module of `directory`, whose `modules.json` is at `modules`.
    pub(crate) fn read<T: DeserializeOwned>(
        &self,
        directory: &Path,
        modules: &Path,
    ) -> Result<(PathBuf, T), ModelError> {
        // A file must not lead out of its directory.
        let inside = !self.path.is_empty() && !self.path.contains(['/', '\\']) && self.path != "..";
        if !inside {
            let message = format!("`{}` is not the name of a directory in it", self.path);
            return Err(ModelError::config(modules, message));
        }
        let path = directory.join(&self.path).join("config.json");
        let missing = || ModelError::config(&path, "it is missing, although modules.json names it");
        let fields = read_json(&path)?.ok_or_else(missing)?;
        Ok((path, fields))
    }
}

#[derive(Debug, Default, Deserialize)]
struct SentenceBertConfig {
    max_seq_length: Option<usize>,
    do_lower_case: Option<bool>,
}

/// Newer files name the mode, older ones have a switch for each.
fn read_pooling(directory: &Path, modules: &Path, module: &Module) -> Result<Pooling, ModelError> {
    let (_, fields) = module.read::<Map<String, Value>>(directory, modules)?;
    let named = fields.get("pooling_mode").and_then(Value::as_str);
    let switched = fields
        .iter()
        .filter(|(name, value)| name.starts_with("pooling_mode_") && **value == Value::Bool(true))
        .map(|(name, _)| {
            name.trim_start_matches("pooling_mode_")
                .trim_end_matches("_tokens")
        });
    let modes: Vec<&str> = named.into_iter().chain(switched).collect();
    match modes[..] {
        ["lasttoken"] => Ok(Pooling::Last),
        ["mean"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Err(first_row("pooling_mode", "cls")),
        _ => Err(ModelError::unsupported(
            "pooling_mode",
            modes.join(" + "),
            "lasttoken and mean are",
        )),
    }
}

fn first_row(field: impl Into<String>, value: &str) -> ModelError {
    ModelError::unsupported(
        field,
        value,
        "the first token of a decoder has seen no other: last and mean are",
    )
}

/// `None` where there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ModelError> {
    let text = untrusted::if_there(untrusted::read_text(path, MAX_SETTINGS_BYTES));
    let text = text.map_err(ModelError::io(path))?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| ModelError::config(path, error)))
        .transpose()
}
