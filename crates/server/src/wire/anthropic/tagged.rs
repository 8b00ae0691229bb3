//! Objects of several types. Each is read into a struct with the fields of all types: of an enum with a tag, serde forgets where
//! in the value an error is. Fields of another type are unknown ones, which are found by the schema.

use serde::Deserialize;
use serde::de::Error as _;
use serde::de::value::Error;
use utoipa::ToSchema;

use super::Display;

/// Where an image is.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ImageSource)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[serde(try_from = "ImageSourceFields")]
pub(crate) enum ImageSource {
    /// In the request.
    Base64 {
        /// Such as `image/png`; the data itself says what it is.
        media_type: String,
        /// The file in base64.
        data: String,
    },
    /// Elsewhere.
    Url {
        /// An address that the server may fetch, or a data URL.
        url: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageSourceFields {
    r#type: SourceType,
    media_type: Option<String>,
    data: Option<String>,
    url: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum SourceType {
    Base64,
    Url,
}

impl TryFrom<ImageSourceFields> for ImageSource {
    type Error = Error;

    fn try_from(fields: ImageSourceFields) -> Result<Self, Error> {
        Ok(match fields.r#type {
            SourceType::Base64 => Self::Base64 {
                media_type: required(fields.media_type, "media_type")?,
                data: required(fields.data, "data")?,
            },
            SourceType::Url => Self::Url {
                url: required(fields.url, "url")?,
            },
        })
    }
}

/// Which tools may or must be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::ToolChoice)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[serde(try_from = "ToolChoiceFields")]
pub(crate) enum ToolChoice {
    /// The model decides.
    Auto {
        /// At most one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// At least one call.
    Any {
        /// Exactly one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// This tool.
    Tool {
        /// Its name.
        name: String,
        /// Exactly one call in an answer.
        disable_parallel_tool_use: Option<bool>,
    },
    /// No calls.
    None {},
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolChoiceFields {
    r#type: ToolChoiceType,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToolChoiceType {
    Auto,
    Any,
    Tool,
    None,
}

impl TryFrom<ToolChoiceFields> for ToolChoice {
    type Error = Error;

    fn try_from(fields: ToolChoiceFields) -> Result<Self, Error> {
        let disable_parallel_tool_use = fields.disable_parallel_tool_use;
        Ok(match fields.r#type {
            ToolChoiceType::Auto => Self::Auto {
                disable_parallel_tool_use,
            },
            ToolChoiceType::Any => Self::Any {
                disable_parallel_tool_use,
            },
            ToolChoiceType::Tool => Self::Tool {
                name: required(fields.name, "name")?,
                disable_parallel_tool_use,
            },
            ToolChoiceType::None => Self::None {},
        })
    }
}

/// Whether the model reasons before it answers.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = messages::Thinking)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[serde(from = "ThinkingFields")]
pub(crate) enum Thinking {
    /// Switched on, if the chat template has a switch.
    Enabled {
        /// Thinking ends after this many tokens.
        budget_tokens: Option<usize>,
        /// Whether thinking is shown.
        display: Option<Display>,
    },
    /// The model decides.
    Adaptive {
        /// Whether thinking is shown.
        display: Option<Display>,
    },
    /// Switched off; if the chat template has no switch, thinking is hidden.
    Disabled {},
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ThinkingFields {
    r#type: ThinkingType,
    budget_tokens: Option<usize>,
    display: Option<Display>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ThinkingType {
    Enabled,
    Adaptive,
    Disabled,
}

impl From<ThinkingFields> for Thinking {
    fn from(fields: ThinkingFields) -> Self {
        let ThinkingFields {
            r#type,
            budget_tokens,
            display,
        } = fields;
        match r#type {
            ThinkingType::Enabled => Self::Enabled {
                budget_tokens,
                display,
            },
            ThinkingType::Adaptive => Self::Adaptive { display },
            ThinkingType::Disabled => Self::Disabled {},
        }
    }
}

fn required<T>(value: Option<T>, name: &'static str) -> Result<T, Error> {
    value.ok_or_else(|| Error::missing_field(name))
}
