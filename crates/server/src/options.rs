//! Options of the HTTP server.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;

use crate::file_store::FileStore;
use crate::keys::ApiKeys;
use crate::quota::KeyLimits;
use crate::record::RequestSink;
use crate::tls::Tls;
use crate::wire::known::UnknownFields;

/// Limits of the response store. When full, the oldest responses of the key that holds the most are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Maximum number of responses; 0 disables the store.
    pub responses: usize,
    /// Maximum bytes.
    pub bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            responses: 10_000,
            bytes: 256 << 20,
        }
    }
}

/// Limits of the images of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaLimits {
    /// Maximum number of images of one request; 0 turns images off.
    pub max_images: usize,
    /// Maximum bytes of an image's file.
    pub max_bytes: usize,
    /// Hosts from which images are fetched, in lower case; none are if empty.
    pub allowed_domains: Vec<String>,
    /// Maximum time to fetch one image.
    pub fetch_timeout: Duration,
}

impl Default for MediaLimits {
    fn default() -> Self {
        Self {
            max_images: 16,
            max_bytes: 20 << 20,
            allowed_domains: Vec::new(),
            fetch_timeout: Duration::from_secs(5),
        }
    }
}

/// Options of the HTTP server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Maximum size of a request body; larger ones get a 413.
    pub max_body_bytes: usize,
    /// Maximum time for a body to arrive; slower ones get a 408.
    pub body_timeout: Duration,
    /// A client that reads nothing for this long is disconnected and its request cancelled.
    pub slow_client_timeout: Duration,
    /// `/ready` fails if there is work but no step has completed for this long.
    pub ready_patience: Duration,
    /// The server exits if there is work but no step has completed for this long.
    pub watchdog_timeout: Option<Duration>,
    /// How long a shutdown waits for requests to finish.
    pub drain_timeout: Duration,
    /// Seed for requests without one; random if absent.
    pub seed: Option<u64>,
    /// Enables `/sleep`, `/wake_up` and `/is_sleeping`.
    pub enable_sleep_mode: bool,
    /// Enables `/admin/drain`.
    pub enable_admin_api: bool,
    /// Enables the web pages `/` and `/docs`.
    pub pages: bool,
    /// CORS: origins whose web pages may use the server; `*` for all.
    pub allowed_origins: Vec<HeaderValue>,
    /// API keys.
    pub keys: ApiKeys,
    /// `/metrics` requires a key too.
    pub metrics_require_key: bool,
    /// Limits of each key.
    pub key_limits: KeyLimits,
    /// Maximum time in the queue; then a request gets a 429.
    pub queue_timeout: Option<Duration>,
    /// Maximum duration of a request; then it is cancelled and gets a 504.
    pub request_timeout: Option<Duration>,
    /// Keys do not share the prefix cache, so that none can probe what another sent.
    pub isolate_prefix_cache: bool,
    /// Memory for the text of large requests until it is tokenized, in bytes. Requests beyond it wait, and in the end get a 503.
    pub request_bytes: usize,
    /// Memory for the images of requests, until these end, and for decoding them, in bytes; one request may have all of it. Requests beyond
    /// it wait, and in the end get a 503.
    pub image_bytes: usize,
    /// Requests may set `priority`.
    pub priorities: bool,
    /// Requests may set `chat_template`.
    pub trust_request_chat_template: bool,
    /// What to do about fields of requests that the API does not have.
    pub unknown_fields: UnknownFields,
    /// Receivers of the records of finished requests.
    pub sinks: Vec<Arc<dyn RequestSink>>,
    /// TLS; plain HTTP if absent.
    pub tls: Option<Tls>,
    /// Maximum number of connections; further ones are closed.
    pub max_connections: usize,
    /// A connection is closed if no request head arrives on it for this long.
    pub header_timeout: Duration,
    /// A path before all others that a proxy adds and may not remove, such as `/llm`; empty for none.
    pub root_path: String,
    /// Enables `/tokenizer_info`.
    pub tokenizer_info: bool,
    /// Enables `/load`.
    pub load_tracking: bool,
    /// Log-probabilities name tokens by id, whatever requests say.
    pub return_tokens_as_token_ids: bool,
    /// Streams report their usage in the last chunk, whatever requests say.
    pub force_include_usage: bool,
    /// Where files and batches are kept; without it there are none.
    pub files: Option<Arc<FileStore>>,
    /// Limits of the images of requests.
    pub media: MediaLimits,
    /// Limits of the responses kept for `/v1/responses`.
    pub response_store: StoreLimits,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            body_timeout: Duration::from_secs(60),
            slow_client_timeout: Duration::from_secs(60),
            ready_patience: Duration::from_secs(60),
            watchdog_timeout: None,
            drain_timeout: Duration::from_secs(30),
            seed: None,
            enable_sleep_mode: false,
            enable_admin_api: false,
            pages: true,
            allowed_origins: Vec::new(),
            keys: ApiKeys::default(),
            metrics_require_key: false,
            key_limits: KeyLimits::default(),
            queue_timeout: None,
            request_timeout: None,
            isolate_prefix_cache: false,
            request_bytes: 128 << 20,
            image_bytes: 1 << 30,
            priorities: false,
            trust_request_chat_template: false,
            unknown_fields: UnknownFields::Error,
            sinks: Vec::new(),
            tls: None,
            max_connections: 8192,
            header_timeout: Duration::from_secs(60),
            root_path: String::new(),
            tokenizer_info: false,
            load_tracking: false,
            return_tokens_as_token_ids: false,
            force_include_usage: false,
            files: None,
            media: MediaLimits::default(),
            response_store: StoreLimits::default(),
        }
    }
}
