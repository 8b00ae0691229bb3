//! The life of the server: it listens while the engine is made, serves, drains and ends.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use axum::routing::future::RouteFuture;
use axum_server::Handle;
use plimsoll_core::Meters;
use plimsoll_engine::{Drained, Phase, Stall};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tower::Service;

use crate::app::router;
use crate::connect;
use crate::options::ServerOptions;
use crate::start::Start;
use crate::starting;
use crate::state::AppState;

/// Why serving ended other than by the shutdown that was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listener failed.
    #[error("cannot serve: {0}")]
    Io(#[from] io::Error),
    /// The engine ended by a defect.
    #[error("the engine died: {0}")]
    EngineDied(String),
    /// The watchdog ended it. The engine's thread may hang for ever: the process is to end without waiting for it.
    #[error("{0}")]
    Stalled(String),
}

/// A server that listens. Until [`Self::serve`] it says how far the start is and refuses everything else; connections of
/// that time live on.
#[derive(Debug)]
pub struct Server {
    connections: JoinHandle<io::Result<()>>,
    handle: Handle<SocketAddr>,
    serving: Arc<OnceLock<Router>>,
}

impl Server {
    /// Answers on `listener` from now on, for a server of `model` that is being started.
    pub fn listen(
        listener: TcpListener,
        model: &str,
        options: &ServerOptions,
        start: Arc<dyn Start>,
    ) -> Self {
        let handle = Handle::new();
        let serving = Arc::default();
        let front = Front {
            starting: starting::router(model, options, start),
            serving: Arc::clone(&serving),
        };
        let (options, used) = (options.clone(), handle.clone());
        let app = Router::new().fallback_service(front);
        Self {
            connections: tokio::spawn(async move { connect::serve(listener, &options, used, app).await }),
            handle,
            serving,
        }
    }

    /// The API answers from here on.
    pub fn open(&self, state: &AppState) {
        self.serving.get_or_init(|| router(state.clone()));
    }

    /// [`Self::open`], and serves until `shutdown` is ready or somebody asks for a drain, then drains: `/ready` fails and new requests get a 503
    /// while those that are in may finish for [`ServerOptions::drain_timeout`]; what is left is failed, and the connections
    /// are closed. Also ends, with an error, where the engine dies or hangs: a supervisor shall start a new process.
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
            // A drain may be long, and what hangs does not end by waiting.
            stall = watchdog(&state) => return Err(self.give_up(&state, &stall).await),
        };
        if was_busy {
            tokio::time::sleep(LINGER).await;
        }
        // Responses are complete; what remains are clients that have not read them yet.
        let left = timeout.saturating_sub(began.elapsed());
        self.handle.graceful_shutdown(Some(left.max(FLUSH)));
        self.connections.await.map_err(io::Error::other)??;
        upkeep.abort();
        let health = engine.health();
        match health.phase {
            Phase::Dead => Err(ServeError::EngineDied(health.last_error.unwrap_or_default())),
            _ => Ok(drained),
        }
    }

    /// Says what is known, fails what is in, and leaves clients a moment to hear of it.
    async fn give_up(self, state: &AppState, stall: &Stall) -> ServeError {
        let meters = state.meters().await;
        tracing::error!("watchdog: {stall} {}: {NEXT}", account(&meters));
        let why = format!(
            "the watchdog ended the server: no step had ended for {:.1} s ({stall})",
            stall.waited.as_secs_f64()
        );
        state.engine().give_up(&why);
        self.handle.graceful_shutdown(Some(LAST_WORDS));
        // Whoever is not done by then is cut off.
        let _ = tokio::time::timeout(LAST_WORDS, self.connections).await;
        ServeError::Stalled(why)
    }
}

/// How long responses that are complete may take to reach their clients at shutdown, at least.
const FLUSH: Duration = Duration::from_secs(5);

/// Whoever read the last answer may send another request on the same connection before it is closed: that one shall hear
/// that the server drains, too.
const LINGER: Duration = Duration::from_millis(300);

/// How long a server that hangs waits for its clients to hear of it.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The end of the watchdog's record.
const NEXT: &str = "the engine's thread hangs and the process ends, so that a supervisor starts another; look for the device \
                    in the kernel's log (NVIDIA: dmesg | grep Xid), and where steps are only slow raise --watchdog-timeout";

/// Bytes as plain numbers.
fn account(meters: &Meters) -> String {
    let Meters {
        total,
        free,
        reserved,
        used,
        reserved_high,
        ..
    } = meters;
    format!("total={total} free={free} reserved={reserved} used={used} reserved_high={reserved_high}")
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

/// The API once there is one. The same listener and connections serve before and after.
#[derive(Clone)]
struct Front {
    starting: Router,
    serving: Arc<OnceLock<Router>>,
}

impl Service<Request> for Front {
    type Response = Response;
    type Error = Infallible;
    type Future = RouteFuture<Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let app = self.serving.get().unwrap_or(&self.starting);
        app.clone().call(request)
    }
}
