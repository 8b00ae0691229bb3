//! Options of the HTTP server.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;

use crate::keys::ApiKeys;
use crate::quota::KeyLimits;
use crate::record::RequestSink;
use crate::tls::Tls;

/// How much the store of responses holds; the oldest of the key that holds the most make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Most responses; 0 keeps none.
    pub responses: usize,
    /// Most bytes of them.
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

/// Knobs of the HTTP side.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Larger bodies get a 413.
    pub max_body_bytes: usize,
    /// Bodies that arrive more slowly get a 408.
    pub body_timeout: Duration,
    /// A streaming client that reads nothing for this long is cut off and its request cancelled.
    pub slow_client_timeout: Duration,
    /// `/ready` fails once there has been work and no step has ended for this long.
    pub ready_patience: Duration,
    /// Serving ends once that has lasted so long.
    pub watchdog_timeout: Option<Duration>,
    /// How long a shutdown lets requests finish.
    pub drain_timeout: Duration,
    /// Seeds the requests that bring no seed; a random one if absent.
    pub seed: Option<u64>,
    /// `/sleep`, `/wake_up` and `/is_sleeping` exist.
    pub enable_sleep_mode: bool,
    /// `/admin/drain` exists.
    pub enable_admin_api: bool,
    /// The pages for browsers, `/` and `/docs`, exist.
    pub pages: bool,
    /// Web pages of these origins may use the server from a browser; `*` for all.
    pub allowed_origins: Vec<HeaderValue>,
    /// Who may use the server.
    pub keys: ApiKeys,
    /// `/metrics` needs a key too.
    pub metrics_require_key: bool,
    /// How much each key may use.
    pub key_limits: KeyLimits,
    /// A request that was not begun after this time gets a 429.
    pub queue_timeout: Option<Duration>,
    /// A request that is not done after this time gets a 504, and holds nothing any more.
    pub request_timeout: Option<Duration>,
    /// Keys share no prefixes: none learns from the cache what another sent.
    pub isolate_prefix_cache: bool,
    /// Bytes of large requests that may be in at once until they are tokens; one more waits, and gets a 503 in the end.
    pub request_bytes: usize,
    /// Requests may say which of them come first.
    pub priorities: bool,
    /// Requests may bring a chat template of their own.
    pub trust_request_chat_template: bool,
    /// Who is told of every request at its end.
    pub sinks: Vec<Arc<dyn RequestSink>>,
    /// Encrypts connections.
    pub tls: Option<Tls>,
    /// Connections at once; one more is closed.
    pub max_connections: usize,
    /// A connection on which no request's head arrives for this long is closed.
    pub header_timeout: Duration,
    /// What is kept of `/v1/responses`.
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
            priorities: false,
            trust_request_chat_template: false,
            sinks: Vec::new(),
            tls: None,
            max_connections: 8192,
            header_timeout: Duration::from_secs(60),
            response_store: StoreLimits::default(),
        }
    }
}
