//! Cross-origin requests and CORS.

use axum::body::Body;
use axum::http::{HeaderValue, Method, Request, Response};
use plimsoll_server::{ApiKey, ApiKeys, KeyLimits, ServerOptions};

use crate::rig::{Rig, Setup};

const HOST: &str = "127.0.0.1:8000";
const PAGE: &str = "https://chat.example";

fn rig(allowed: &[&'static str], options: ServerOptions) -> Rig {
    let origins = allowed.iter().copied().map(HeaderValue::from_static);
    Rig::new(Setup {
        options: ServerOptions {
            allowed_origins: origins.collect(),
            enable_sleep_mode: true,
            ..options
        },
        ..Default::default()
    })
}

async fn ask(rig: &Rig, method: Method, path: &str, headers: &[(&str, &str)]) -> Response<Body> {
    let mut request = Request::builder().method(method).uri(path).header("host", HOST);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    rig.send(request.body(Body::from(r#"{"prompt": "x"}"#)).unwrap())
        .await
}

#[tokio::test]
async fn cross_origin_requests_have_no_effect() {
    let rig = rig(&[], ServerOptions::default());
    for origin in [
        PAGE,
        "null",
        "",
        "http://127.0.0.1",
        "http://127.0.0.1:8001",
        "x",
        "http://127.0.0.1:8000.evil",
    ] {
        for (method, path) in [
            (Method::POST, "/tokenize"),
            (Method::POST, "/sleep"),
            (Method::DELETE, "/v1/responses/x"),
        ] {
            let refused = ask(&rig, method.clone(), path, &[("origin", origin)]).await;
            assert_eq!(refused.status(), 403, "{method} {path} {origin}");
        }
        // Without CORS headers browsers hide the response.
        let read = ask(&rig, Method::GET, "/v1/models", &[("origin", origin)]).await;
        assert_eq!(read.status(), 200);
    }
    for own in ["http://127.0.0.1:8000", "https://127.0.0.1:8000"] {
        let page = ask(&rig, Method::POST, "/tokenize", &[("origin", own)]).await;
        assert_eq!(page.status(), 200, "{own}");
    }
    assert_eq!(ask(&rig, Method::POST, "/tokenize", &[]).await.status(), 200);
}

#[tokio::test]
async fn allowed_pages_and_those_with_a_key_are_served() {
    for (allowed, origin, status) in [
        ([PAGE], PAGE, 200),
        (["*"], "https://any.example", 200),
        ([PAGE], "https://other.example", 403),
    ] {
        let rig = rig(&allowed, ServerOptions::default());
        let answer = ask(&rig, Method::POST, "/tokenize", &[("origin", origin)]).await;
        assert_eq!(answer.status(), status, "{origin}");
    }
    let keys = ApiKeys::new(vec![ApiKey::new(None, "secret").unwrap()]);
    let rig = rig(
        &[],
        ServerOptions {
            keys,
            ..Default::default()
        },
    );
    let of_an_app = [("origin", "app://notes"), ("authorization", "Bearer secret")];
    assert_eq!(
        ask(&rig, Method::POST, "/tokenize", &of_an_app).await.status(),
        200
    );
    let keyless = ask(&rig, Method::POST, "/tokenize", &[("origin", PAGE)]).await;
    assert_eq!(keyless.status(), 401);
}

#[tokio::test]
async fn pages_may_send_keys_and_read_their_limits() {
    let keys = ApiKeys::new(vec![ApiKey::new(None, "secret").unwrap()]);
    let options = ServerOptions {
        keys,
        key_limits: KeyLimits {
            requests_per_minute: Some(1),
            tokens_per_minute: Some(1000),
            ..Default::default()
        },
        ..Default::default()
    };
    let rig = rig(&[PAGE], options);
    let wanted = "authorization,content-type,x-request-timeout";
    let preflight = [
        ("origin", PAGE),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", wanted),
    ];
    let allowed = ask(&rig, Method::OPTIONS, "/v1/completions", &preflight).await;
    // `*` includes every header except Authorization.
    assert_eq!(allowed.headers()["access-control-allow-headers"], wanted);

    let by_key = [("origin", PAGE), ("authorization", "Bearer secret")];
    assert_eq!(ask(&rig, Method::GET, "/v1/models", &by_key).await.status(), 200);
    // GET requests count too.
    let refused = ask(&rig, Method::GET, "/v1/models", &by_key).await;
    assert_eq!(refused.status(), 429);
    let exposed = refused.headers()["access-control-expose-headers"]
        .to_str()
        .unwrap();
    for header in [
        "retry-after",
        "x-request-id",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-tokens",
    ] {
        assert!(exposed.contains(header), "{header}: {exposed}");
        assert!(refused.headers().contains_key(header), "{header}");
    }
    assert!(exposed.contains("request-id") && exposed.contains("x-should-retry"));
}
