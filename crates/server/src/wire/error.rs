use serde::Serialize;
use utoipa::ToSchema;

/// An error, in OpenAI's shape.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody<'a> {
    pub(crate) error: ErrorObject<'a>,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "message": "unknown field `temprature`",
    "type": "invalid_request_error",
    "param": "temprature",
    "code": "unknown_parameter"
}))]
pub(crate) struct ErrorObject<'a> {
    /// What is wrong and what would be right, for people.
    pub(crate) message: String,
    /// The kind of error.
    pub(crate) r#type: &'static str,
    /// The field that is wrong, where one is.
    pub(crate) param: Option<&'a str>,
    /// What is wrong, for programs.
    pub(crate) code: Option<&'static str>,
}
