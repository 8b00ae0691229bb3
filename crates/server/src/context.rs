//! Everything known about one HTTP request while it is handled. It ends in a [`RequestRecord`].

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use parking_lot::Mutex;
use plimsoll_core::{FinishReason, TenantId};
use tokio::time::timeout_at;

use crate::activity::{Activity, Ongoing, UnreadData};
use crate::error::ApiError;
use crate::keys::Tenant;
use crate::load::Counted;
use crate::metrics::HttpRequest;
use crate::options::ServerOptions;
use crate::quota::Left;
use crate::record::{Generation, RequestRecord};
use crate::request_memory::Reservation;
use crate::state::AppState;
use crate::wire::common;
use crate::wire::known::UnknownFields;

/// Clones share it. When the last one is dropped the request is over: its slot in the key's concurrency limit is released,
/// metrics are updated and the sinks get the record.
#[derive(Clone)]
pub(crate) struct Context(Arc<Inner>);

struct Inner {
    state: AppState,
    began: SystemTime,
    arrived: Instant,
    /// Generated, for requests without an id of the client's.
    id: String,
    /// The client's id.
    given: OnceLock<String>,
    method: Method,
    path: String,
    /// The matched route.
    route: Option<MatchedPath>,
    traceparent: Option<String>,
    tracestate: Option<String>,
    /// When the request times out.
    deadline: Option<Instant>,
    tenant: OnceLock<Tenant>,
    /// A line of a batch: it yields to all other requests, and is no HTTP request.
    in_background: bool,
    /// It holds a slot in the tenant's concurrency limit.
    entered: AtomicBool,
    /// Keeps it among the requests in progress.
    _counted: Option<Counted>,
    /// Keeps its connection from being idle; absent where the API is called in-process.
    connection: Option<Ongoing>,
    /// HTTP/2: flow control shows what the client reads.
    has_window: bool,
    output_tokens: AtomicUsize,
    first_token: OnceLock<Instant>,
    /// Bytes of its body.
    received: AtomicU64,
    /// Bytes of the response's body.
    sent: AtomicU64,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    status: Option<StatusCode>,
    error: Option<&'static str>,
    complete: bool,
    generation: Option<Generation>,
    /// Memory for its text, until that is tokenized.
    places: Vec<Reservation>,
    /// Fields that were ignored.
    ignored: BTreeSet<String>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.0.id)
    }
}

impl Context {
    /// A request that just arrived. It times out after `timeout` or the server's own limit, whichever is shorter.
    pub(crate) fn new(state: &AppState, request: &Request, timeout: Option<Duration>) -> Self {
        let timeout = [timeout, state.options().request_timeout]
            .into_iter()
            .flatten()
            .min();
        let arrived = Instant::now();
        state.metrics().http_began();
        Self::begin(
            state,
            request,
            arrived,
            timeout.and_then(|timeout| arrived.checked_add(timeout)),
            false,
        )
    }

    /// A request of a batch, of the key called `owner`. It may take as long as the batch.
    pub(crate) fn in_background(state: &AppState, request: &Request, owner: Option<Arc<str>>) -> Self {
        let context = Self::begin(state, request, Instant::now(), None, true);
        if let Some(name) = owner {
            context.belongs_to(Tenant::named(name));
        }
        context
    }

    fn begin(
        state: &AppState,
        request: &Request,
        arrived: Instant,
        deadline: Option<Instant>,
        in_background: bool,
    ) -> Self {
        let headers = request.headers();
        let given = request_id(headers).map(OnceLock::from);
        let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.to_owned());
        let counted = state.load().count(request.method(), request.uri().path());
        Self(Arc::new(Inner {
            in_background,
            state: state.clone(),
            began: SystemTime::now(),
            arrived,
            id: fresh_id(),
            given: given.unwrap_or_default(),
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            route: request.extensions().get().cloned(),
            traceparent: text("traceparent"),
            tracestate: text("tracestate"),
            deadline,
            tenant: OnceLock::new(),
            entered: AtomicBool::new(false),
            _counted: counted.filter(|_| !in_background),
            connection: request.extensions().get::<Arc<Activity>>().map(Ongoing::new),
            has_window: request.version() == Version::HTTP_2,
            output_tokens: AtomicUsize::new(0),
            first_token: OnceLock::new(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            notes: Mutex::default(),
        }))
    }

    pub(crate) fn id(&self) -> &str {
        self.given_id().unwrap_or(&self.0.id)
    }

    /// The client's id.
    pub(crate) fn given_id(&self) -> Option<&str> {
        self.0.given.get().map(String::as_str)
    }

    /// Sets the id given in the body; one in the header takes precedence.
    pub(crate) fn name(&self, id: &str) -> Result<(), ApiError> {
        if !is_id(id) {
            let message = format!("request_id has 1 to {MAX_ID} letters, digits and characters of -_.:/+=@");
            return Err(ApiError::invalid("request_id", message));
        }
        self.0.given.get_or_init(|| id.to_owned());
        Ok(())
    }

    /// The tenant in the engine's queue: the default one where all keys are of one owner, as nobody else needs places.
    pub(crate) fn queued_as(&self) -> TenantId {
        match self.0.state.options().keys.are_several() {
            true => self.tenant(),
            false => TenantId::default(),
        }
    }

    /// The tenant; the default one where no key is required.
    pub(crate) fn tenant(&self) -> TenantId {
        self.0
            .tenant
            .get()
            .map_or_else(TenantId::default, |tenant| tenant.id)
    }

    /// The name of its key, if keys are required.
    pub(crate) fn owner(&self) -> Option<String> {
        self.0.tenant.get().map(|tenant| tenant.name.to_string())
    }

    /// The priority of its requests: those of batches come after all others.
    pub(crate) fn priority(&self, given: i64) -> i64 {
        match self.0.in_background {
            true => given.saturating_add(BACKGROUND),
            false => given,
        }
    }

    /// The deadline: `timeout` after arrival, or earlier by header or flag.
    pub(crate) fn deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        let own = timeout.and_then(|timeout| self.0.arrived.checked_add(timeout));
        [own, self.0.deadline].into_iter().flatten().min()
    }

    /// Runs `work` until the deadline; then it is an error.
    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        match self.deadline(None) {
            None => work.await,
            Some(at) => timeout_at(at.into(), work)
                .await
                .unwrap_or_else(|_| Err(ApiError::DeadlineExceeded(self.age()))),
        }
    }

    /// Time since arrival.
    pub(crate) fn age(&self) -> Duration {
        self.0.arrived.elapsed()
    }

    /// Sets the tenant.
    pub(crate) fn belongs_to(&self, tenant: Tenant) {
        // Set only once.
        let _ = self.0.tenant.set(tenant);
    }

    /// Counts it against its tenant's limits, unless there is an error. Returns what remains of the limits either way.
    pub(crate) fn enter(&self, uses_tokens: bool) -> (Vec<Left>, Result<(), ApiError>) {
        let quotas = self.0.state.quotas();
        let (left, entered) = quotas.enter(self.tenant(), uses_tokens, self.0.arrived);
        self.0.entered.store(entered.is_ok(), Ordering::Relaxed);
        (left, entered)
    }

    /// Keeps memory reserved until the request's text is tokenized, or the request is over.
    pub(crate) fn hold(&self, place: Reservation) {
        self.0.notes.lock().places.push(place);
    }

    /// Marks response data as unread, which starts the slow-client timeout. On HTTP/1 the kernel does this better
    /// (TCP_USER_TIMEOUT): it sees every acknowledged byte.
    pub(crate) fn unread(&self) -> Option<UnreadData> {
        let connection = self.0.connection.as_ref().filter(|_| self.0.has_window);
        connection.map(Ongoing::unread)
    }

    /// The salt of the prefix cache: the client's `salt`, and the tenant where tenants are isolated.
    pub(crate) fn cache_salt(&self, salt: Option<&str>) -> Option<Arc<str>> {
        if !self.0.state.options().isolate_prefix_cache {
            return salt.map(Arc::from);
        }
        let TenantId(tenant) = self.tenant();
        Some(format!("{tenant:016x}/{}", salt.unwrap_or_default()).into())
    }

    /// Options of the server.
    pub(crate) fn options(&self) -> &ServerOptions {
        self.0.state.options()
    }

    /// These fields of its body are ignored.
    pub(crate) fn ignores(&self, fields: impl IntoIterator<Item = String>) {
        let fields = fields.into_iter().map(|field| printable(&field));
        let mut notes = self.0.notes.lock();
        for field in fields {
            if notes.ignored.len() < MAX_IGNORED && notes.ignored.insert(field.clone()) {
                self.0.state.metrics().ignored(&field);
            }
        }
    }

    /// Ignores `field`, which this model has no use for, if the server ignores fields.
    pub(crate) fn may_ignore(&self, field: &str) -> bool {
        let may = self.options().unknown_fields == UnknownFields::Warn;
        if may {
            self.ignores([field.to_owned()]);
        }
        may
    }

    /// The header that names the ignored fields.
    pub(crate) fn ignored(&self) -> Option<HeaderValue> {
        let notes = self.0.notes.lock();
        let names: Vec<_> = notes.ignored.iter().map(String::as_str).collect();
        let value = (!names.is_empty()).then(|| names.join(", "))?;
        HeaderValue::from_str(&value).ok()
    }

    /// The response begins.
    pub(crate) fn answered(&self, status: StatusCode, error: Option<&'static str>) {
        let mut notes = self.0.notes.lock();
        notes.status = Some(status);
        // A stream may have failed already.
        notes.error = error.or(notes.error);
    }

    /// A response that has begun ends with an error.
    pub(crate) fn failed(&self, error: &ApiError) {
        self.0.notes.lock().error = error.code();
    }

    /// Counts bytes of the request's body.
    pub(crate) fn received(&self, bytes: usize) {
        self.0.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes of the response's body.
    pub(crate) fn sent(&self, bytes: usize) {
        self.0.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The response was sent in full.
    pub(crate) fn completed(&self) {
        self.0.notes.lock().complete = true;
    }

    /// Generation begins: the request's text is tokenized, so its memory is released.
    pub(crate) fn generates(&self, generation: Generation) {
        self.0
            .state
            .quotas()
            .spend(self.tenant(), generation.prompt_tokens);
        let mut notes = self.0.notes.lock();
        notes.places.clear();
        notes.generation.get_or_insert(generation);
    }

    /// A choice was admitted; `cached` prompt tokens were found in the prefix cache.
    pub(crate) fn admitted(&self, at: Instant, cached: usize) {
        let age = at - self.0.arrived;
        if let Some(generation) = &mut self.0.notes.lock().generation {
            generation.queued.get_or_insert(age);
            generation.cached_tokens += cached;
        }
    }

    /// A choice generated a token.
    pub(crate) fn token(&self, at: Instant) {
        self.0.first_token.get_or_init(|| at);
        let tokens = 1 + self.0.output_tokens.fetch_add(1, Ordering::Relaxed);
        if tokens.is_multiple_of(SPENT_AT_ONCE) {
            self.0.state.quotas().spend(self.tenant(), SPENT_AT_ONCE);
        }
    }

    /// A choice ended.
    pub(crate) fn finished(&self, reason: FinishReason) {
        if let Some(generation) = &mut self.0.notes.lock().generation {
            generation.finish_reasons.push(common::finish_reason(reason));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let output_tokens = *self.output_tokens.get_mut();
        if *self.entered.get_mut()
            && let Some(tenant) = self.tenant.get()
        {
            let unspent = output_tokens % SPENT_AT_ONCE;
            self.state.quotas().spend(tenant.id, unspent);
            self.state.quotas().leave(tenant.id);
        }
        let notes = std::mem::take(self.notes.get_mut());
        let (status, duration) = (notes.status.unwrap_or(CLIENT_LEFT), self.arrived.elapsed());
        if !self.in_background {
            self.state.metrics().http_ended(&HttpRequest {
                method: &self.method,
                route: self.route.as_ref().map(MatchedPath::as_str),
                status,
                duration,
                received: *self.received.get_mut(),
                sent: *self.sent.get_mut(),
            });
        }
        let sinks = &self.state.options().sinks;
        if sinks.is_empty() {
            return;
        }
        let generation = notes.generation.map(|generation| Generation {
            output_tokens,
            first_token: self.first_token.get().map(|at| *at - self.arrived),
            ..generation
        });
        let record = RequestRecord {
            began: self.began,
            duration,
            request_id: self.given.take().unwrap_or_else(|| std::mem::take(&mut self.id)),
            key: self.tenant.get().map(|tenant| tenant.name.to_string()),
            method: self.method.clone(),
            path: std::mem::take(&mut self.path),
            status,
            error: notes.error,
            complete: notes.complete,
            traceparent: self.traceparent.take(),
            tracestate: self.tracestate.take(),
            generation,
        };
        for sink in sinks {
            sink.ended(&record);
        }
    }
}

/// Added to the priority of batches; lower is earlier.
const BACKGROUND: i64 = 1 << 40;

/// Output tokens are charged to the tenant in batches of this size: all requests share one lock.
const SPENT_AT_ONCE: usize = 16;

/// nginx's status for a client that disconnected before the response began.
const CLIENT_LEFT: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => unreachable!(),
};

/// Longest request id accepted from a client.
const MAX_ID: usize = 128;

/// The client's id, if it is safe in logs and headers.
pub(crate) fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get("x-request-id")?.to_str().ok()?;
    is_id(id).then(|| id.to_owned())
}

fn is_id(id: &str) -> bool {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&byte);
    (1..=MAX_ID).contains(&id.len()) && id.bytes().all(sane)
}

/// Most ignored fields that the header names, and characters of each.
const MAX_IGNORED: usize = 16;
const MAX_IGNORED_NAME: usize = 64;

/// The path of a client's field as headers and labels of metrics can have it.
fn printable(field: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.[]".contains(c);
    let plain = field.chars().map(|c| if is_plain(c) { c } else { '?' });
    plain.take(MAX_IGNORED_NAME).collect()
}

/// A random id.
pub(crate) fn fresh_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// The client's timeout, from a header.
pub(crate) fn header_timeout(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    const HEADER: &str = "x-request-timeout";
    let Some(value) = headers.get(HEADER) else {
        return Ok(None);
    };
    let seconds = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    Ok(Some(common::seconds(HEADER, seconds.unwrap_or(f64::NAN))?))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let name = axum::http::HeaderName::from_static(name);
        HeaderMap::from_iter([(name, HeaderValue::from_bytes(value.as_bytes()).unwrap())])
    }

    #[test]
    fn only_sane_ids_are_taken() {
        for id in ["a", "0190-af", "trace:1/2+3=@x_y.z", &"x".repeat(128)] {
            assert!(is_id(id), "{id}");
        }
        for id in ["", "a b", "a\"b", "{}", "ä", &"x".repeat(129)] {
            assert!(!is_id(id), "{id}");
        }
    }

    #[test]
    fn timeouts_are_seconds_above_zero() {
        let of = |text: &str| header_timeout(&headers("x-request-timeout", text));
        assert_eq!(of("1.5").unwrap(), Some(Duration::from_millis(1500)));
        for wrong in ["", "0", "-1", "nan", "inf", "1e300", "10s"] {
            assert!(matches!(of(wrong), Err(ApiError::Field(_))), "{wrong}");
        }
        assert_eq!(header_timeout(&HeaderMap::new()).unwrap(), None);
    }
}
