use serde::Serialize;
use utoipa::ToSchema;

use super::known::UnknownField;

/// An error, in OpenAI's shape.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody<'a> {
    pub(crate) error: ErrorObject<'a>,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "message": "unknown field `temprature` (did you mean `temperature`?); a server started with --unknown-fields warn ignores it",
    "type": "invalid_request_error",
    "param": "temprature",
    "code": "unknown_parameter"
}))]
pub(crate) struct ErrorObject<'a> {
    /// What is wrong and what would be right.
    pub(crate) message: String,
    /// The kind of error.
    pub(crate) r#type: &'static str,
    /// The field at fault, if any.
    pub(crate) param: Option<&'a str>,
    /// A machine-readable code.
    pub(crate) code: Option<&'static str>,
}

/// Why a request cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FieldError {
    /// A field, or the whole body, is wrong.
    #[error("{message}")]
    Invalid {
        /// What is wrong and what would be right.
        message: String,
        /// The field's name.
        param: Option<String>,
    },
    /// Fields that are not in the API, at least one.
    #[error("{}", unknown(.0))]
    Unknown(Vec<UnknownField>),
    /// A field of the API that this server does not support, or, with ` = VALUE` appended, not with this value.
    #[error("`{field}` is not supported by this server{}", hint.map(|h| format!(": {h}")).unwrap_or_default())]
    Unsupported {
        /// The field's name.
        field: String,
        /// What is supported instead.
        hint: Option<&'static str>,
    },
}

impl FieldError {
    /// A wrong value of `param`.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid {
            message: message.into(),
            param: Some(param.into()),
        }
    }

    /// A field that is not supported, or, with ` = VALUE` appended, not with this value.
    pub(crate) fn unsupported(field: impl Into<String>, hint: impl Into<Option<&'static str>>) -> Self {
        Self::Unsupported {
            field: field.into(),
            hint: hint.into(),
        }
    }

    /// The field at fault, if it is one.
    pub(crate) fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } => param.as_deref(),
            Self::Unknown(fields) => fields.first().map(|field| field.path.as_str()),
            Self::Unsupported { field, .. } => field.split(" = ").next(),
        }
    }
}

fn unknown(fields: &[UnknownField]) -> String {
    let named: Vec<_> = fields
        .iter()
        .map(|UnknownField { path, meant, .. }| match meant {
            Some(meant) => format!("`{path}` (did you mean `{meant}`?)"),
            None => format!("`{path}`"),
        })
        .collect();
    let (noun, pronoun) = match fields.len() {
        1 => ("field", "it"),
        _ => ("fields", "them"),
    };
    format!(
        "unknown {noun} {}; a server started with --unknown-fields warn ignores {pronoun}",
        named.join(", ")
    )
}
