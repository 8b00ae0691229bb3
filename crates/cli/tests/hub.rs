//! Downloads against a local stand-in of the Hub: its API, ETags, redirects, and the ways in which it fails.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_cli::hub::{HubError, HubOptions, RepoId, Weights, fetch};
use plimsoll_cli::start::StartProgress;
use sha2::{Digest, Sha256};

const REPO: &str = "acme/tiny";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_right";

/// How the stand-in misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    /// The first transfers of weights end after half of the bytes.
    BreaksOff(usize),
    /// The first transfers of weights bring as many wrong bytes.
    Damages(usize),
    /// The repository needs a token, and its licence accepted.
    Gated,
}

#[derive(Clone)]
struct Hub {
    files: Arc<BTreeMap<String, Vec<u8>>>,
    mood: Mood,
    weights_sent: Arc<AtomicUsize>,
    /// Method and path of every request.
    seen: Arc<Mutex<Vec<String>>>,
}

struct Fixture {
    hub: Hub,
    address: SocketAddr,
    cache: tempfile::TempDir,
}

impl Fixture {
    async fn new(mood: Mood, files: &[(&str, &[u8])]) -> Self {
        let files = files
            .iter()
            .map(|&(name, data)| (name.to_owned(), data.to_vec()))
            .collect();
        let hub = Hub {
            files: Arc::new(files),
            mood,
            weights_sent: Arc::default(),
            seen: Arc::default(),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(answer).with_state(hub.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self {
            hub,
            address,
            cache: tempfile::tempdir().unwrap(),
        }
    }

    fn options(&self) -> HubOptions {
        HubOptions {
            endpoint: Some(format!("http://{}", self.address)),
            cache_dir: Some(self.cache.path().to_owned()),
            token: Some(TOKEN.to_owned()),
            revision: "main".to_owned(),
            offline: false,
            progress: StartProgress::default(),
        }
    }

    async fn fetch(&self, options: &HubOptions) -> Result<PathBuf, HubError> {
        fetch(&RepoId::parse(REPO).unwrap(), Weights::Any, options).await
    }

    /// Paths of GET requests for files.
    fn downloads(&self) -> Vec<String> {
        let seen = self.hub.seen.lock().unwrap();
        let mut files: Vec<_> = seen
            .iter()
            .filter_map(|s| s.strip_prefix("GET /cdn/"))
            .map(str::to_owned)
            .collect();
        files.sort();
        files
    }
}

async fn answer(State(hub): State<Hub>, request: Request) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    hub.seen.lock().unwrap().push(format!("{method} {path}"));
    let error = |status: StatusCode, code: &str, message: &str| {
        (
            status,
            [
                ("x-error-code", code.to_owned()),
                ("x-error-message", message.to_owned()),
            ],
            "{}",
        )
            .into_response()
    };
    let authorization = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    match authorization {
        _ if path.starts_with("/cdn/") => return transfer(&hub, &path["/cdn/".len()..]),
        Some(value) if value != format!("Bearer {TOKEN}") => {
            return error(
                StatusCode::UNAUTHORIZED,
                "",
                "Invalid credentials in Authorization header",
            );
        }
        _ => {}
    }
    if let Some(rest) = path.strip_prefix(&format!("/api/models/{REPO}/")) {
        return match rest.split_once('/') {
            Some(("revision", "main" | COMMIT)) => {
                axum::Json(serde_json::json!({"sha": COMMIT})).into_response()
            }
            Some(("tree", "main" | COMMIT)) => axum::Json(tree(&hub)).into_response(),
            _ => error(StatusCode::NOT_FOUND, "RevisionNotFound", "Invalid rev id"),
        };
    }
    let file = path
        .strip_prefix(&format!("/{REPO}/resolve/"))
        .and_then(|rest| rest.split_once('/'));
    match file.and_then(|(_, name)| hub.files.get(name).map(|data| (name, data))) {
        Some(_) if hub.mood == Mood::Gated => {
            error(StatusCode::FORBIDDEN, "GatedRepo", "Access to it is restricted")
        }
        Some((name, data)) => resolve(name, data, &method),
        None => error(StatusCode::NOT_FOUND, "RepoNotFound", "Repository not found"),
    }
}

fn tree(hub: &Hub) -> serde_json::Value {
    let files = hub.files.iter().map(|(name, data)| {
        let mut entry = serde_json::json!({"type": "file", "oid": "0", "size": data.len(), "path": name});
        if is_weights(name) {
            entry["lfs"] = serde_json::json!({"oid": sha256(data), "size": data.len(), "pointerSize": 134});
        }
        entry
    });
    let directory = serde_json::json!({"type": "directory", "oid": "1", "size": 0, "path": "original"});
    files.chain([directory]).collect()
}

fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// What the Hub answers on `resolve`: metadata in the headers, and a redirect to the storage.
fn resolve(name: &str, data: &[u8], method: &Method) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert("x-repo-commit", COMMIT.parse().unwrap());
    headers.insert("x-linked-size", data.len().to_string().parse().unwrap());
    // git's SHA-1 of small files, SHA-256 of large ones.
    let etag = if is_weights(name) {
        sha256(data)
    } else {
        sha256(data)[..40].to_owned()
    };
    headers.insert("x-linked-etag", format!("\"{etag}\"").parse().unwrap());
    headers.insert(header::ETAG, format!("\"{etag}\"").parse().unwrap());
    headers.insert(header::LOCATION, format!("/cdn/{name}").parse().unwrap());
    if method == Method::HEAD {
        headers.remove(header::LOCATION);
        return (StatusCode::OK, headers).into_response();
    }
    (StatusCode::FOUND, headers).into_response()
}

fn transfer(hub: &Hub, name: &str) -> Response {
    let mut data = hub.files[name].clone();
    if is_weights(name) {
        let sent = hub.weights_sent.fetch_add(1, Ordering::SeqCst);
        match hub.mood {
            Mood::Damages(times) if sent < times => data[0] ^= 1,
            Mood::BreaksOff(times) if sent < times => return broken_off(&data),
            _ => {}
        }
    }
    data.into_response()
}

/// Announces all bytes, sends half, and closes the connection.
fn broken_off(data: &[u8]) -> Response {
    let half = Bytes::copy_from_slice(&data[..data.len() / 2]);
    let parts = [Ok(half), Err(std::io::Error::other("gone"))];
    let body = Body::from_stream(futures::stream::iter(parts));
    ([(header::CONTENT_LENGTH, data.len())], body).into_response()
}

const WEIGHTS: &[u8] = &[7; 100_000];

fn repository() -> Vec<(&'static str, &'static [u8])> {
    vec![
        ("README.md", b"# tiny"),
        ("config.json", b"{}"),
        ("model.safetensors", WEIGHTS),
        ("original/model.safetensors", b"not this one"),
        ("pytorch_model.bin", b"nor this one"),
        ("tokenizer.json", b"{\"model\": {}}"),
    ]
}

fn read(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[tokio::test]
async fn downloads_what_is_needed_once() {
    let fixture = Fixture::new(Mood::Well, &repository()).await;
    let snapshot = fixture.fetch(&fixture.options()).await.unwrap();
    // The layout that Python's huggingface_hub reads.
    assert_eq!(
        snapshot,
        fixture
            .cache
            .path()
            .join(format!("models--acme--tiny/snapshots/{COMMIT}"))
    );
    let main = std::fs::read_to_string(fixture.cache.path().join("models--acme--tiny/refs/main")).unwrap();
    assert_eq!(main.trim(), COMMIT);
    assert!(read(&snapshot, "model.safetensors") == WEIGHTS);
    let needed = ["config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(fixture.downloads(), needed);

    let again = fixture.fetch(&fixture.options()).await.unwrap();
    assert_eq!(again, snapshot);
    assert_eq!(
        fixture.downloads(),
        needed,
        "the second time nothing is transferred"
    );
}

#[tokio::test]
async fn a_gguf_file_is_chosen_by_name() {
    let files = [("tiny-Q4_K_M.gguf", WEIGHTS), ("tiny-Q8_0.gguf", b"x".as_slice())];
    let fixture = Fixture::new(Mood::Well, &files).await;
    let repo = RepoId::parse("acme/tiny:q4_k_m").unwrap();
    let path = fetch(&repo, Weights::Any, &fixture.options()).await.unwrap();
    assert!(path.ends_with("tiny-Q4_K_M.gguf"), "{}", path.display());
    assert_eq!(fixture.downloads(), ["tiny-Q4_K_M.gguf"]);
    let error = fixture.fetch(&fixture.options()).await.unwrap_err().to_string();
    assert!(error.contains("tiny-Q8_0.gguf"), "{error}");
}

#[tokio::test]
async fn a_transfer_that_breaks_off_or_is_damaged_is_tried_again() {
    for mood in [Mood::BreaksOff(2), Mood::Damages(2)] {
        let fixture = Fixture::new(mood, &repository()).await;
        let snapshot = fixture
            .fetch(&fixture.options())
            .await
            .unwrap_or_else(|e| panic!("{mood:?}: {e}"));
        assert!(read(&snapshot, "model.safetensors") == WEIGHTS, "{mood:?}");
        assert_eq!(fixture.hub.weights_sent.load(Ordering::SeqCst), 3, "{mood:?}");
    }
}

#[tokio::test]
async fn damage_that_stays_is_an_error_and_leaves_nothing_behind() {
    let fixture = Fixture::new(Mood::Damages(usize::MAX), &repository()).await;
    let error = fixture.fetch(&fixture.options()).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Damaged { file, .. } if file == "model.safetensors"),
        "{error}"
    );
    let offline = HubOptions {
        offline: true,
        ..fixture.options()
    };
    assert!(matches!(
        fixture.fetch(&offline).await,
        Err(HubError::NotCached { .. })
    ));

    let fixture = Fixture::new(Mood::BreaksOff(usize::MAX), &repository()).await;
    let error = fixture.fetch(&fixture.options()).await.unwrap_err();
    assert!(matches!(error, HubError::Transfer { .. }), "{error}");
}

#[tokio::test]
async fn errors_say_what_to_do() {
    let fixture = Fixture::new(Mood::Well, &repository()).await;
    let wrong_token = HubOptions {
        token: Some("hf_wrong".to_owned()),
        ..fixture.options()
    };
    let error = fixture.fetch(&wrong_token).await.unwrap_err();
    assert!(matches!(error, HubError::BadToken { .. }), "{error}");

    let error = fetch(
        &RepoId::parse("acme/none").unwrap(),
        Weights::Any,
        &fixture.options(),
    )
    .await
    .unwrap_err();
    assert!(
        matches!(&error, HubError::NotFound { repo, .. } if repo == "acme/none"),
        "{error}"
    );

    let no_revision = HubOptions {
        revision: "v9".to_owned(),
        ..fixture.options()
    };
    let error = fixture.fetch(&no_revision).await.unwrap_err();
    assert!(
        matches!(&error, HubError::NotFound { revision, .. } if revision == "v9"),
        "{error}"
    );

    // Nothing can be written below a file.
    let file = tempfile::NamedTempFile::new().unwrap();
    let unwritable = HubOptions {
        cache_dir: Some(file.path().join("hub")),
        ..fixture.options()
    };
    let error = fixture.fetch(&unwritable).await.unwrap_err();
    assert!(matches!(error, HubError::NotStored { .. }), "{error}");
    assert!(error.to_string().contains("--download-dir"), "{error}");

    let gated = Fixture::new(Mood::Gated, &repository()).await;
    let error = gated.fetch(&gated.options()).await.unwrap_err();
    assert!(matches!(error, HubError::Gated { .. }), "{error}");
    assert!(error.to_string().contains("licence"), "{error}");
}

#[tokio::test]
async fn offline_uses_a_complete_cache_and_nothing_else() {
    let fixture = Fixture::new(Mood::Well, &repository()).await;
    let offline = HubOptions {
        offline: true,
        ..fixture.options()
    };
    let error = fixture.fetch(&offline).await.unwrap_err();
    assert!(matches!(error, HubError::NotCached { .. }), "{error}");
    let snapshot = fixture.fetch(&fixture.options()).await.unwrap();

    let requests = fixture.hub.seen.lock().unwrap().len();
    assert_eq!(fixture.fetch(&offline).await.unwrap(), snapshot);
    assert_eq!(
        fixture.hub.seen.lock().unwrap().len(),
        requests,
        "offline means offline"
    );

    std::fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    let error = fixture.fetch(&offline).await.unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[tokio::test]
async fn offline_misses_a_shard() {
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let files = [
        ("config.json", b"{}".as_slice()),
        ("model-00001-of-00002.safetensors", WEIGHTS),
        ("model-00002-of-00002.safetensors", b"second"),
        ("model.safetensors.index.json", index),
        ("tokenizer.json", b"{}"),
    ];
    let fixture = Fixture::new(Mood::Well, &files).await;
    let snapshot = fixture.fetch(&fixture.options()).await.unwrap();
    std::fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).unwrap();
    let offline = HubOptions {
        offline: true,
        ..fixture.options()
    };
    let error = fixture.fetch(&offline).await.unwrap_err().to_string();
    assert!(error.contains("model-00002-of-00002.safetensors"), "{error}");
    // Online it is fetched again, without the rest.
    let before = fixture.downloads().len();
    fixture.fetch(&fixture.options()).await.unwrap();
    assert!(fixture.downloads().len() <= before + 1);
    assert_eq!(read(&snapshot, "model-00002-of-00002.safetensors"), b"second");
}

#[tokio::test]
async fn a_hub_that_is_gone_is_replaced_by_the_cache() {
    let fixture = Fixture::new(Mood::Well, &repository()).await;
    let snapshot = fixture.fetch(&fixture.options()).await.unwrap();
    // A port on which nobody listens.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let gone = HubOptions {
        endpoint: Some(nobody),
        ..fixture.options()
    };
    assert_eq!(fixture.fetch(&gone).await.unwrap(), snapshot);
    let empty = tempfile::tempdir().unwrap();
    let error = fixture
        .fetch(&HubOptions {
            cache_dir: Some(empty.path().to_owned()),
            ..gone
        })
        .await
        .unwrap_err();
    assert!(matches!(error, HubError::Transfer { .. }), "{error}");
}
