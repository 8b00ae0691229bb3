//! The web pages, without a browser.

use axum::body::Body;
use axum::http::Request;
use plimsoll_server::ServerOptions;

use crate::rig::{Rig, Setup};

#[tokio::test]
async fn pages_have_a_strict_content_security_policy() {
    let rig = Rig::new(Setup::default());
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/assets/chat.js", "text/javascript; charset=utf-8"),
        ("/assets/base.css", "text/css; charset=utf-8"),
        ("/assets/mark.svg", "image/svg+xml"),
        ("/assets/licences.txt", "text/plain; charset=utf-8"),
    ] {
        let answer = rig.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.headers["content-type"], kind);
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none';") && !policy.contains("unsafe"),
            "{policy}"
        );
    }
    assert_eq!(rig.get("/assets/none.js").await.status, 404);
    assert_eq!(rig.get("/assets/../state.rs").await.status, 404);
}

/// Browsers get fonts, and what they already have they do not get again.
#[tokio::test]
async fn pages_are_compressed_and_cached() {
    let rig = Rig::new(Setup::default());
    let get = |path: &str, name: &'static str, value: &str| {
        let request = Request::get(path).header(name, value);
        rig.send(request.body(Body::empty()).unwrap())
    };
    let font = get(
        "/assets/fonts/KaTeX_Main-Regular.woff2",
        "accept-encoding",
        "gzip, br",
    )
    .await;
    assert_eq!(font.status(), 200);
    assert_eq!(font.headers()["content-type"], "font/woff2");
    assert_eq!(font.headers()["content-encoding"], "gzip");
    let tag = font.headers()["etag"].to_str().unwrap().to_owned();
    let again = get("/assets/fonts/KaTeX_Main-Regular.woff2", "if-none-match", &tag).await;
    assert_eq!(again.status(), 304);
    let other = get("/assets/fonts/KaTeX_Main-Bold.woff2", "if-none-match", &tag).await;
    assert_eq!(other.status(), 200);
    assert!(!other.headers().contains_key("content-encoding"));
}

#[tokio::test]
async fn licences_of_the_libraries_are_served() {
    let licences = Rig::new(Setup::default()).get("/assets/licences.txt").await.text;
    for holder in [
        "Khan Academy",
        "markdown-it",
        "Ivan Sagalaev",
        "Jake Archibald",
        "MrHope",
    ] {
        assert!(licences.contains(holder), "{holder}");
    }
}

#[tokio::test]
async fn pages_can_be_disabled() {
    let options = ServerOptions {
        pages: false,
        ..ServerOptions::default()
    };
    let rig = Rig::new(Setup {
        options,
        ..Setup::default()
    });
    for path in ["/", "/docs", "/assets/chat.js"] {
        rig.get(path).await.error(404);
    }
    assert_eq!(rig.get("/openapi.json").await.status, 200);
}
