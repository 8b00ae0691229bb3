//! Web pages: chat at `/`, the API reference at `/docs`. Everything is in the binary; nothing is loaded from elsewhere.

use std::io::Read as _;

use axum::body::Body;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::read::GzDecoder;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::wire::error::ErrorBody;

/// Files of the pages: name, content compressed with gzip. `build.rs` makes the list.
const ASSETS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/assets.rs"));

/// Only this server's scripts, styles and requests, and no markup from strings: text of a model could run nothing even if it
/// became markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// They need no state: they are served during a start, too.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> OpenApiRouter<S> {
    OpenApiRouter::default()
        .routes(routes!(chat))
        .routes(routes!(docs))
        .routes(routes!(asset))
        .routes(routes!(font))
}

/// Chat page
///
/// Conversations with the model, in a browser, which keeps them. During a start it shows the progress.
#[utoipa::path(
    get, path = "/", tag = "Pages", operation_id = "chatPage",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html"))
)]
async fn chat(headers: HeaderMap) -> Result<Response, ApiError> {
    file("chat.html", &headers)
}

/// Reference page
///
/// The OpenAPI document as a web page, where requests can be tried.
#[utoipa::path(
    get, path = "/docs", tag = "Pages", operation_id = "docsPage",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html"))
)]
async fn docs(headers: HeaderMap) -> Result<Response, ApiError> {
    file("docs.html", &headers)
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
async fn asset(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    file(&name, &headers)
}

/// Fonts of the pages
#[utoipa::path(
    get, path = "/assets/fonts/{name}", tag = "Pages",
    params(("name" = String, Path, description = "The name of a font.")),
    responses(
        (status = 200, description = "The font.", body = String, content_type = "font/woff2"),
        (status = 404, description = "There is no such font.", body = ErrorBody),
    )
)]
async fn font(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    file(&name, &headers)
}

fn file(name: &str, request: &HeaderMap) -> Result<Response, ApiError> {
    let found = ASSETS.iter().find(|(known, _)| *known == name);
    let (name, compressed) = *found.ok_or_else(|| ApiError::PathNotFound(format!("/assets/{name}")))?;
    let tag = tag(compressed);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type(name))),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // The pages may change with the server's version: browsers ask each time whether they have.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::VARY, HeaderValue::from_static("accept-encoding")),
        (header::ETAG, tag.clone()),
    ];
    if request.get(header::IF_NONE_MATCH) == Some(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    if accepts_gzip(request) {
        let encoding = [(header::CONTENT_ENCODING, "gzip")];
        return Ok((headers, encoding, Body::from(compressed)).into_response());
    }
    Ok((headers, inflate(compressed)?).into_response())
}

fn media_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("woff2") => "font/woff2",
        _ => "text/plain; charset=utf-8",
    }
}

/// From checksum and length, gzip's last eight bytes; weak, as it is that of both encodings.
fn tag(compressed: &[u8]) -> HeaderValue {
    let (_, trailer) = compressed.split_at(compressed.len().saturating_sub(8));
    let digits: String = trailer.iter().map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::try_from(format!("W/\"{digits}\"")).expect("hexadecimal digits are a header's value")
}

fn accepts_gzip(request: &HeaderMap) -> bool {
    let values = request.get_all(header::ACCEPT_ENCODING).iter();
    let mut encodings = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','));
    encodings.any(|encoding| {
        let mut parts = encoding.split(';').map(str::trim);
        let refused = |quality: &str| quality.strip_prefix("q=").and_then(|q| q.parse().ok()) == Some(0.0);
        parts.next() == Some("gzip") && !parts.any(refused)
    })
}

fn inflate(compressed: &[u8]) -> Result<Vec<u8>, ApiError> {
    let mut data = Vec::new();
    GzDecoder::new(compressed)
        .read_to_end(&mut data)
        .map_err(|error| ApiError::Internal(format!("a part of the page is damaged: {error}")))?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;
    use std::path::{Path, PathBuf};

    use serde::Deserialize;
    use sha2::{Digest as _, Sha256};

    use super::*;

    const VENDOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/pages/vendor");

    /// Bounds for the binary: all files of the pages, compressed, in bytes.
    const MOST_BYTES: usize = 600_000;

    /// A library as `packages.json` describes it.
    #[derive(Deserialize)]
    struct Library {
        name: String,
        directory: String,
        license: String,
        sha256: BTreeMap<String, String>,
    }

    fn libraries() -> Vec<Library> {
        let text = fs::read_to_string(Path::new(VENDOR).join("packages.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn files(directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        entries
            .flat_map(|path| match path.is_dir() {
                true => files(&path),
                false => vec![path],
            })
            .collect()
    }

    /// Our own scripts, styles and pages as text.
    fn own() -> Vec<(&'static str, String)> {
        let vendored: Vec<_> = libraries()
            .into_iter()
            .flat_map(|library| library.sha256.into_keys())
            .collect();
        let is_own = |name: &str| !vendored.iter().any(|path| path.rsplit('/').next() == Some(name));
        let own = ASSETS
            .iter()
            .filter(|(name, _)| is_own(name) && *name != "licences.txt");
        own.map(|(name, data)| (*name, String::from_utf8(inflate(data).unwrap()).unwrap()))
            .collect()
    }

    #[test]
    fn names_are_distinct_and_all_is_small() {
        let names: BTreeSet<_> = ASSETS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), ASSETS.len());
        let bytes: usize = ASSETS.iter().map(|(_, data)| data.len()).sum();
        assert!(bytes < MOST_BYTES, "{bytes} bytes");
    }

    /// Every file that a page loads is in the binary.
    #[test]
    fn pages_load_only_existing_files_of_this_server() {
        let known = |name: &str| ASSETS.iter().any(|(known, _)| *known == name);
        for (file, text) in own() {
            for mark in ["assets/", "from \"./", "import(\"./"] {
                for part in text.split(mark).skip(1) {
                    let name = part.split(['"', '\'']).next().unwrap();
                    assert!(known(name), "{file}: {name}");
                }
            }
            let addresses = text.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !addresses.contains("http://") && !addresses.contains("https://"),
                "{file}"
            );
        }
    }

    /// Text never becomes markup or code.
    #[test]
    fn scripts_never_write_markup() {
        for (name, text) in own().iter().filter(|(name, _)| name.ends_with(".js")) {
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

    /// `scripts/vendor-pages` writes them; what is changed by hand would be lost with the next version.
    #[test]
    fn libraries_are_as_published_and_have_their_licences() {
        let mut listed =
            BTreeSet::from(["packages.json", "components.json"].map(|name| Path::new(VENDOR).join(name)));
        for library in libraries() {
            let directory = Path::new(VENDOR).join(&library.directory);
            assert!(
                library.sha256.contains_key("LICENSE"),
                "{} ({})",
                library.name,
                library.license
            );
            for (name, expected) in library.sha256 {
                let path = directory.join(name);
                let digest = Sha256::digest(fs::read(&path).unwrap());
                let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(found, expected, "{}", path.display());
                listed.insert(path);
            }
        }
        assert_eq!(
            files(Path::new(VENDOR)).into_iter().collect::<BTreeSet<_>>(),
            listed
        );
    }

    #[test]
    fn encodings_are_negotiated() {
        let accepts = |value| accepts_gzip(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, value)]));
        for value in ["gzip", "br, gzip", "deflate, gzip;q=0.5, br"] {
            assert!(accepts(HeaderValue::from_static(value)), "{value}");
        }
        for value in ["", "br", "gzip;q=0", "gzip; q=0.0", "gzipped"] {
            assert!(!accepts(HeaderValue::from_static(value)), "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
