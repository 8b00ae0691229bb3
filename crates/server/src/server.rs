//! Life cycle of the server: it listens while the engine starts, serves, drains and exits.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::Uri;
use axum::response::Response;
use axum::routing::future::RouteFuture;
use plimsoll_core::Meters;
use plimsoll_engine::{Drained, Phase, Stall};
use tokio::task::JoinHandle;
use tower::Service;

use crate::app::{endpoints, router};
use crate::batches;
use crate::connect::{self, Listener, Stop};
use crate::options::ServerOptions;
use crate::start::Start;
use crate::starting;
use crate::state::AppState;

/// Why serving ended other than by a requested shutdown.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listener failed.
    #[error("cannot serve: {0}")]
    Io(#[from] io::Error),
    /// The engine failed.
    #[error("the engine died: {0}")]
    EngineDied(String),
    /// The watchdog ended it. The engine's thread may hang forever: exit without waiting for it.
    #[error("{0}")]
    Stalled(String),
}

/// A listening server. Until [`Self::open`] it reports the progress of the start and refuses everything else; connections
/// made before stay open.
#[derive(Debug)]
pub struct Server {
    connections: JoinHandle<io::Result<()>>,
    stop: Stop,
    serving: Arc<OnceLock<Router>>,
}

impl Server {
    /// Starts answering on `listener` while `model` is being started.
    pub fn listen(
        listener: impl Into<Listener>,
        model: &str,
        options: &ServerOptions,
        start: Arc<dyn Start>,
    ) -> Self {
        let serving = Arc::default();
        let front = Front {
            starting: starting::router(model, options, start),
            serving: Arc::clone(&serving),
            root_path: options.root_path.as_str().into(),
        };
        let app = Router::new().fallback_service(front);
        let (connections, stop) = connect::serve(listener.into(), options.clone(), app);
        Self {
            connections,
            stop,
            serving,
        }
    }

    /// Serves the API from now on.
    pub fn open(&self, state: &AppState) {
        self.serving.get_or_init(|| {
            batches::resume(state, &endpoints(state));
            router(state.clone())
        });
    }

    /// [`Self::open`], then serves until `shutdown` completes or a drain is requested. A drain fails `/ready` and refuses new
    /// requests with a 503, while those in flight have [`ServerOptions::drain_timeout`] to finish; then the rest are failed
    /// and connections closed. Returns an error if the engine dies or hangs, so that a supervisor restarts the process.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn serve(
        mut self,
        state: AppState,
        shutdown: impl Future<Output = ()>,
    ) -> Result<Drained, ServeError> {
        self.open(&state);
        let upkeep = tokio::spawn(upkeep(state.clone()));
        let engine = state.engine();
        tokio::select! {
            () = shutdown => {}
            () = state.drain_asked() => {}
            () = engine.ended() => {}
            stall = watchdog(&state) => return Err(self.give_up(&state, &stall).await),
            result = &mut self.connections => {
                result.map_err(io::Error::other)??;
                return Err(io::Error::other("the listener ended").into());
            }
        }
        let (began, was_busy) = (Instant::now(), state.begin_drain());
        let timeout = state.options().drain_timeout;
        let drained = tokio::select! {
            drained = engine.drain(timeout) => drained,
            // A hang during a drain would otherwise last until its timeout.
            stall = watchdog(&state) => return Err(self.give_up(&state, &stall).await),
        };
        if was_busy {
            tokio::time::sleep(LINGER).await;
        }
        // All responses are complete; give clients time to read them.
        let left = timeout.saturating_sub(began.elapsed());
        self.stop.graceful_shutdown(left.max(FLUSH));
        self.connections.await.map_err(io::Error::other)??;
        upkeep.abort();
        let health = engine.health();
        match health.phase {
            Phase::Dead => Err(ServeError::EngineDied(health.last_error.unwrap_or_default())),
            _ => Ok(drained),
        }
    }

    /// Logs the state, fails requests in flight, and gives clients a moment to receive the error.
    async fn give_up(self, state: &AppState, stall: &Stall) -> ServeError {
        let meters = state.meters().await;
        let ranks: Vec<_> = meters.iter().map(account).collect();
        tracing::error!("watchdog: {stall} {}: {NEXT}", ranks.join("; "));
        let why = format!(
            "the watchdog ended the server: no step had ended for {:.1} s ({stall})",
            stall.waited.as_secs_f64()
        );
        state.engine().give_up(&why);
        self.stop.graceful_shutdown(ERROR_DELIVERY);
        // The rest is disconnected.
        let _ = tokio::time::timeout(ERROR_DELIVERY, self.connections).await;
        ServeError::Stalled(why)
    }
}

/// Minimum time at shutdown for complete responses to reach their clients.
const FLUSH: Duration = Duration::from_secs(5);

/// Keep-alive connections stay open for a moment after the last response: the client's next request is answered with a 503
/// instead of a closed connection.
const LINGER: Duration = Duration::from_millis(300);

/// How long a hung server waits for its clients to receive the error.
const ERROR_DELIVERY: Duration = Duration::from_secs(1);

/// What the watchdog logs as the next step.
const NEXT: &str = "the engine's thread hangs and the process ends, so that a supervisor starts another; look for the device \
                    in the kernel's log (NVIDIA: dmesg | grep Xid), and where steps are only slow raise --watchdog-timeout";

/// The memory of a rank's device in bytes, for the log.
fn account(meters: &Meters) -> String {
    format!(
        "total={} free={} reserved={} used={} reserved_high={}",
        meters.total, meters.free, meters.reserved, meters.used, meters.reserved_high
    )
}

async fn watchdog(state: &AppState) -> Stall {
    match state.options().watchdog_timeout {
        Some(timeout) => state.engine().stalled(timeout).await,
        None => std::future::pending().await,
    }
}

async fn upkeep(state: AppState) {
    let mut every = tokio::time::interval(Duration::from_secs(5));
    loop {
        every.tick().await;
        state.metrics().run_upkeep();
    }
}

/// Switches from the starting routes to the API on the same listener and connections.
#[derive(Clone)]
struct Front {
    starting: Router,
    serving: Arc<OnceLock<Router>>,
    /// A path before all others, which a proxy may have left.
    root_path: Arc<str>,
}

impl Service<Request> for Front {
    type Response = Response;
    type Error = Infallible;
    type Future = RouteFuture<Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        if let Some(uri) = without_root(request.uri(), &self.root_path) {
            *request.uri_mut() = uri;
        }
        let app = self.serving.get().unwrap_or(&self.starting);
        app.clone().call(request)
    }
}

/// `uri` without `root` before its path; `None` if it has another path.
fn without_root(uri: &Uri, root: &str) -> Option<Uri> {
    if root.is_empty() {
        return None;
    }
    let rest = uri.path_and_query()?.as_str().strip_prefix(root)?;
    let path = match rest.chars().next() {
        Some('/') => rest.to_owned(),
        None | Some('?') => format!("/{rest}"),
        Some(_) => return None,
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = path.parse().ok();
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_path_is_taken_off() {
        let of = |uri: &str, root: &str| without_root(&uri.parse().unwrap(), root).map(|uri| uri.to_string());
        assert_eq!(of("/llm/v1/models?x=1", "/llm"), Some("/v1/models?x=1".into()));
        assert_eq!(
            of("http://host/llm/health", "/llm"),
            Some("http://host/health".into())
        );
        assert_eq!(of("/llm", "/llm"), Some("/".into()));
        assert_eq!(of("/llm?x", "/llm"), Some("/?x".into()));
        for other in ["/v1/models", "/llmx/v1", "/"] {
            assert_eq!(of(other, "/llm"), None, "{other}");
        }
        assert_eq!(of("/llm/x", ""), None);
    }
}
