//! Cross-origin requests. Browsers send them on behalf of any web page to any server they can reach, also on localhost, and
//! only hide the response from the page.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;

/// Refuses cross-origin requests to the operator's endpoints.
pub(crate) async fn same_origin(request: Request, next: Next) -> Response {
    match is_foreign(request.uri(), request.headers()) {
        true => ApiError::CrossOrigin.into_response(),
        false => next.run(request).await,
    }
}

/// Whether a request is cross-origin, by headers that only browsers send: `Sec-Fetch-Site`, or `Origin` from older ones.
pub(crate) fn is_foreign(uri: &Uri, headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    if let Some(site) = text(HeaderName::from_static("sec-fetch-site")) {
        return !matches!(site, "same-origin" | "none");
    }
    let Some(origin) = text(header::ORIGIN) else {
        return false;
    };
    let here = uri.authority().map(|authority| authority.as_str());
    match (origin.split_once("://"), here.or_else(|| text(header::HOST))) {
        (Some((_, there)), Some(here)) => !there.eq_ignore_ascii_case(here),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreign(uri: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::post(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        is_foreign(request.uri(), request.headers())
    }

    #[test]
    fn cross_origin_requests_are_detected_by_browser_headers() {
        let host = ("host", "127.0.0.1:8000");
        assert!(!foreign("/", &[host]));
        assert!(!foreign("/", &[host, ("origin", "http://127.0.0.1:8000")]));
        assert!(!foreign("https://a:1/", &[("origin", "https://A:1")]));
        assert!(!foreign("/", &[host, ("sec-fetch-site", "same-origin")]));
        for origin in ["http://evil.example", "http://127.0.0.1:8001", "null", "", "ä"] {
            assert!(foreign("/", &[host, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site", "?"] {
            assert!(foreign("/", &[host, ("sec-fetch-site", site)]), "{site}");
        }
    }
}
