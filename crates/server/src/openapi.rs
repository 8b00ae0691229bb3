//! The OpenAPI 3.1 document, generated from the routes and the types that parse requests.

use std::collections::BTreeMap;

use axum::Extension;
use axum::body::Bytes;
use axum::http::header;
use axum::response::IntoResponse;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, ObjectBuilder, Ref, RefOr, Response, SecurityRequirement};
use utoipa::{IntoResponses, OpenApi};

use crate::wire::error::ErrorBody;

/// The document's general information.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Plimsoll",
        description = "The OpenAI API with vLLM's extensions. An unsupported field or value is a 400 that names it; with \
                       `--unknown-fields warn` the header `X-Ignored-Fields` names those that are not described here.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    servers((url = "/", description = "this server")),
    components(schemas(ErrorBody)),
    tags(
        (name = "Generation", description = "Text from prompts and conversations."),
        (name = "Embeddings", description = "Vectors from texts."),
        (name = "Batches", description = "Files of requests that are answered in the background."),
        (name = "Models", description = "What is served."),
        (name = "Tokens", description = "Text to tokens and back, as in vLLM."),
        (name = "Operation", description = "Probes, metrics, memory, sleep."),
        (name = "Pages", description = "For browsers."),
    )
)]
struct About;

/// The document before any route has been added.
pub(crate) fn about() -> utoipa::openapi::OpenApi {
    let mut api = About::openapi();
    let components = api.components.get_or_insert_default();
    components.add_security_scheme("bearer", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    let key = ApiKeyValue::with_description("x-api-key", "As Anthropic's clients send it.");
    components.add_security_scheme("x-api-key", SecurityScheme::ApiKey(ApiKey::Header(key)));
    // The operator decides whether keys are required.
    let none: [&str; 0] = [];
    api.security = Some(vec![
        SecurityRequirement::default(),
        SecurityRequirement::new("bearer", none),
        SecurityRequirement::new("x-api-key", none),
    ]);
    api
}

/// The serialized document.
#[derive(Clone, Debug)]
pub(crate) struct Document(Bytes);

impl Document {
    /// `root_path`: what clients put before every path; empty for nothing.
    pub(crate) fn new(mut api: utoipa::openapi::OpenApi, root_path: &str) -> Self {
        if !root_path.is_empty() {
            api.servers = Some(vec![utoipa::openapi::Server::new(root_path)]);
        }
        // axum marks parameters that may contain slashes with a star; OpenAPI has no such notation.
        let paths = std::mem::take(&mut api.paths.paths);
        api.paths.paths = paths
            .into_iter()
            .map(|(path, item)| (path.replace("{*", "{"), item))
            .collect();
        let json = serde_json::to_vec(&api).expect("a document of maps and strings is JSON");
        Self(json.into())
    }
}

/// The OpenAPI document
///
/// OpenAPI 3.1, generated from the types that parse requests.
#[utoipa::path(
    get, path = "/openapi.json", tag = "Pages",
    responses((status = 200, description = "The document.", body = serde_json::Value))
)]
pub(crate) async fn openapi(Extension(Document(json)): Extension<Document>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], json)
}

/// The errors of every endpoint with a body.
#[derive(Debug)]
pub(crate) struct Errors;

impl IntoResponses for Errors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let error = |status: &str, description: &str| {
            let content = ContentBuilder::new()
                .schema(Some(Ref::from_schema_name("ErrorBody")))
                .build();
            let response = ResponseBuilder::new()
                .description(description)
                .content("application/json", content);
            let response = match status {
                "429" | "503" => response.header("Retry-After", retry_after()),
                _ => response,
            };
            (status.to_owned(), RefOr::T(response.build()))
        };
        [
            error(
                "400",
                "A field is wrong, unknown or not supported; `param` names it.",
            ),
            error("401", "The key is missing or wrong."),
            error("404", "This server serves no such model."),
            error("408", "The body took too long to arrive."),
            error("413", "The body is too large."),
            error("415", "The body is not JSON."),
            error("429", "Too many requests are waiting."),
            error("500", "A bug in the server."),
            error("503", "The server cannot answer now."),
        ]
        .into()
    }
}

fn retry_after() -> utoipa::openapi::Header {
    HeaderBuilder::new()
        .description(Some("Seconds to wait before retrying, if known."))
        .schema(Some(ObjectBuilder::new().schema_type(Type::Integer)))
        .build()
}
