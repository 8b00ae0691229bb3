//! The web pages, without a browser.

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
