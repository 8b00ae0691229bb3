//! Web pages: chat at `/`, the API reference at `/docs`. Everything is in the binary; nothing is loaded from elsewhere.

use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::state::AppState;
use crate::wire::error::ErrorBody;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Files that the pages load: name, media type, content.
const ASSETS: &[(&str, &str, &str)] = &[
    ("base.css", CSS, include_str!("pages/base.css")),
    ("chat.css", CSS, include_str!("pages/chat.css")),
    ("chat.js", SCRIPT, include_str!("pages/chat.js")),
    ("client.js", SCRIPT, include_str!("pages/client.js")),
    ("docs.css", CSS, include_str!("pages/docs.css")),
    ("docs.js", SCRIPT, include_str!("pages/docs.js")),
    ("mark.svg", SVG, include_str!("pages/mark.svg")),
    ("markdown.js", SCRIPT, include_str!("pages/markdown.js")),
    ("memory.js", SCRIPT, include_str!("pages/memory.js")),
];

/// Only this server's scripts, styles and requests: text of a model could run nothing even if it became markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(chat))
        .routes(routes!(docs))
        .routes(routes!(asset))
}

/// Chat page
///
/// A conversation with the model, in a browser.
#[utoipa::path(
    get, path = "/", tag = "Pages", operation_id = "chatPage",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html"))
)]
async fn chat() -> Response {
    page(HTML, include_str!("pages/chat.html"))
}

/// Reference page
///
/// The OpenAPI document as a web page.
#[utoipa::path(
    get, path = "/docs", tag = "Pages", operation_id = "docsPage",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html"))
)]
async fn docs() -> Response {
    page(HTML, include_str!("pages/docs.html"))
}

/// Parts of the pages
#[utoipa::path(
    get, path = "/assets/{name}", tag = "Pages",
    params(("name" = String, Path, description = "The name of a script, a style or a picture.")),
    responses(
        (status = 200, description = "The part.", body = String, content_type = "text/plain"),
        (status = 404, description = "There is no such part.", body = ErrorBody),
    )
)]
async fn asset(Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = ASSETS.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) = found.ok_or_else(|| ApiError::PathNotFound(format!("/assets/{name}")))?;
    Ok(page(kind, text))
}

fn page(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The pages may change with the server's version.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every file that a page loads is in the binary.
    #[test]
    fn pages_load_only_existing_files_of_this_server() {
        let pages = [include_str!("pages/chat.html"), include_str!("pages/docs.html")];
        let texts = pages.iter().chain(ASSETS.iter().map(|(_, _, text)| text));
        for text in texts {
            for part in text.split("assets/").skip(1) {
                let name = part.split(['"', '\'']).next().unwrap();
                assert!(ASSETS.iter().any(|(known, ..)| *known == name), "{name}");
            }
            for part in text.split("from \"./").skip(1) {
                let name = part.split('"').next().unwrap();
                assert!(ASSETS.iter().any(|(known, ..)| *known == name), "{name}");
            }
            let own = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!own.contains("http://") && !own.contains("https://"), "{own}");
        }
    }

    /// Text never becomes markup or code.
    #[test]
    fn scripts_never_write_markup() {
        for (name, _, text) in ASSETS.iter().filter(|(_, kind, _)| *kind == SCRIPT) {
            for wrong in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
            ] {
                assert!(!text.contains(wrong), "{name} has {wrong}");
            }
        }
    }
}
