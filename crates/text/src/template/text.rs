//! The text of a model's chat templates, and where it comes from.

use std::path::Path;

use plimsoll_core::{Metadata, untrusted};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{SpecialTokens, TextError, directory, limits};

pub(super) const DEFAULT: &str = "default";
/// Where a model has several templates, transformers takes this one for requests with tools.
pub(super) const TOOL_USE: &str = "tool_use";

/// Templates by name, [`DEFAULT`] among them, and the special tokens that they may write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct TemplateText {
    pub(super) named: Vec<(String, String)>,
    pub(super) special_tokens: SpecialTokens,
}

/// Templates, and the file that they are from.
pub(super) struct Found {
    pub(super) place: String,
    pub(super) named: Vec<(String, String)>,
}

impl TemplateText {
    /// # Errors
    /// Without [`DEFAULT`].
    pub(super) fn new(
        named: Vec<(String, String)>,
        special_tokens: &SpecialTokens,
    ) -> Result<Self, TextError> {
        let text = Self {
            named,
            special_tokens: special_tokens.clone(),
        };
        if text.get(DEFAULT).is_none() {
            let names: Vec<_> = text.named.iter().map(|(name, _)| name.as_str()).collect();
            return Err(TextError::Template(format!(
                "there is no template called \"default\", only {}",
                names.join(", ")
            )));
        }
        Ok(text)
    }

    fn get(&self, wanted: &str) -> Option<&str> {
        let found = self.named.iter().find(|(name, _)| name == wanted);
        found.map(|(_, source)| source.as_str())
    }

    pub(super) fn source(&self) -> &str {
        self.get(DEFAULT).unwrap_or_default()
    }

    pub(super) fn tool_source(&self) -> &str {
        self.get(TOOL_USE).unwrap_or_else(|| self.source())
    }
}

/// The chat templates of a model directory: `chat_template.jinja` and, if it is there, the one for tools; else `chat_template` of
/// `tokenizer_config.json`, one template or several with names; else that of `chat_template.json`, which older image processors
/// write.
pub(super) fn in_dir(dir: &Path) -> Result<Option<Found>, TextError> {
    let path = dir.join("chat_template.jinja");
    if let Some(source) = template(&path)? {
        let mut named = vec![(DEFAULT.to_owned(), source)];
        let for_tools = dir.join(format!("additional_chat_templates/{TOOL_USE}.jinja"));
        named.extend(template(&for_tools)?.map(|source| (TOOL_USE.to_owned(), source)));
        let place = path.display().to_string();
        return Ok(Some(Found { place, named }));
    }
    for file in ["tokenizer_config.json", "chat_template.json"] {
        let config = directory::read_json(dir, file)?.unwrap_or_default();
        let place = dir.join(file).display().to_string();
        if let Some(named) = named(&config["chat_template"], &place)? {
            return Ok(Some(Found { place, named }));
        }
    }
    Ok(None)
}

/// A file with one template; [`None`] if there is no such file.
fn template(path: &Path) -> Result<Option<String>, TextError> {
    let source = untrusted::read_text(path, limits::MAX_TEMPLATE_BYTES);
    untrusted::if_there(source).map_err(TextError::read(path))
}

/// One template, or several with names; [`None`] for null.
fn named(templates: &Value, place: &str) -> Result<Option<Vec<(String, String)>>, TextError> {
    match templates {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(vec![(DEFAULT.to_owned(), source.clone())])),
        several => {
            let text = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
            let entries = several.as_array().into_iter().flatten();
            let named = entries.map(|entry| text(entry, "name").zip(text(entry, "template")));
            let named = named
                .collect::<Option<Vec<_>>>()
                .filter(|named| !named.is_empty());
            let problem = "chat_template is neither a string nor a list of {name, template}";
            named.ok_or_else(|| TextError::invalid(place, problem)).map(Some)
        }
    }
}

/// Whether the `config.json` of a model directory is that of gpt-oss.
pub(super) fn is_gpt_oss(dir: &Path) -> Result<bool, TextError> {
    let config = directory::read_json(dir, "config.json")?.unwrap_or_default();
    Ok(config["model_type"] == "gpt_oss")
}

/// The `tokenizer.chat_template` keys of a GGUF file.
pub(super) fn in_gguf(path: &Path, metadata: &Metadata) -> Option<Found> {
    const KEY: &str = "tokenizer.chat_template";
    let text = |key: &str| metadata.get(key)?.as_str().map(str::to_owned);
    let mut named = vec![(DEFAULT.to_owned(), text(KEY)?)];
    named.extend(text(&format!("{KEY}.{TOOL_USE}")).map(|source| (TOOL_USE.to_owned(), source)));
    Some(Found {
        place: path.display().to_string(),
        named,
    })
}
