//! Accept loop for TCP and Unix sockets: TLS, connection limit, header and slow-client timeouts.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::SocketAddr as UnixAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::middleware::AddExtension;
use axum::{Extension, Router};
use axum_server::accept::{Accept, DefaultAcceptor};
use axum_server::tls_rustls::RustlsAcceptor;
use axum_server::{Address, Handle, Server};
use hyper_util::rt::TokioTimer;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Sleep;
use tower::Layer;

use crate::activity::Activity;
use crate::options::ServerOptions;

/// Where connections come from.
#[derive(Debug)]
pub enum Listener {
    /// The network.
    Tcp(TcpListener),
    /// A Unix socket: processes of this machine.
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

/// Ends the connections of a listener.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    Tcp(Handle<SocketAddr>),
    Unix(Handle<UnixAddr>),
}

impl Stop {
    /// Accepts no more connections, and closes those that are not idle after `grace`.
    pub(crate) fn graceful_shutdown(&self, grace: Duration) {
        match self {
            Self::Tcp(handle) => handle.graceful_shutdown(Some(grace)),
            Self::Unix(handle) => handle.graceful_shutdown(Some(grace)),
        }
    }
}

/// Accepts connections, in a task, until the second value ends them.
pub(crate) fn serve(
    listener: Listener,
    options: ServerOptions,
    app: Router,
) -> (JoinHandle<io::Result<()>>, Stop) {
    match listener {
        Listener::Tcp(listener) => {
            let handle = Handle::new();
            let stop = Stop::Tcp(handle.clone());
            (tokio::spawn(accept(listener, options, handle, app)), stop)
        }
        Listener::Unix(listener) => {
            let handle = Handle::new();
            let stop = Stop::Unix(handle.clone());
            (tokio::spawn(accept(listener, options, handle, app)), stop)
        }
    }
}

async fn accept<Addr>(
    listener: Addr::Listener,
    options: ServerOptions,
    handle: Handle<Addr>,
    app: Router,
) -> io::Result<()>
where
    Addr: Address + Send + 'static,
    Addr::Stream: Socket + AsyncRead + AsyncWrite + Unpin,
{
    let app = app.into_make_service();
    match options.tls.clone() {
        None => {
            let gate = Gate::new(DefaultAcceptor::new(), &options);
            server(listener, gate, handle, &options).serve(app).await
        }
        Some(tls) => {
            let gate = Gate::new(RustlsAcceptor::new(tls.0), &options);
            server(listener, gate, handle, &options).serve(app).await
        }
    }
}

fn server<Addr: Address, A>(
    listener: Addr::Listener,
    acceptor: A,
    handle: Handle<Addr>,
    options: &ServerOptions,
) -> Server<Addr, A> {
    let mut server = Server::from_listener(listener).acceptor(acceptor).handle(handle);
    let builder = server.http_builder();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(options.header_timeout);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_HTTP2_STREAMS)
        .keep_alive_interval(PROBE_AFTER)
        .keep_alive_timeout(PROBE_EVERY * PROBES);
    server
}

/// Concurrent requests per HTTP/2 connection.
const MAX_HTTP2_STREAMS: u32 = 32;
/// Keep-alive probes: a client that does not answer is disconnected.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// Limits the number of connections.
#[derive(Clone, Debug)]
struct Gate<A> {
    inner: A,
    places: Arc<Semaphore>,
    header_timeout: Duration,
    slow_client_timeout: Duration,
}

impl<A> Gate<A> {
    fn new(inner: A, options: &ServerOptions) -> Self {
        Self {
            inner,
            places: Arc::new(Semaphore::new(
                options.max_connections.min(Semaphore::MAX_PERMITS),
            )),
            header_timeout: options.header_timeout,
            slow_client_timeout: options.slow_client_timeout,
        }
    }
}

/// A connection as it was accepted.
trait Socket: Send + 'static {
    /// Detects clients that vanished: by unacknowledged data after the slow-client timeout, on idle connections by keep-alive
    /// probes.
    fn prepare(&self, slow_client_timeout: Duration) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn prepare(&self, slow_client_timeout: Duration) -> io::Result<()> {
        self.set_nodelay(true)?;
        let socket = SockRef::from(self);
        let probes = TcpKeepalive::new()
            .with_time(PROBE_AFTER)
            .with_interval(PROBE_EVERY)
            .with_retries(PROBES);
        socket.set_tcp_keepalive(&probes)?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(slow_client_timeout))?;
        Ok(())
    }
}

/// The kernel knows when the other process has ended.
impl Socket for UnixStream {
    fn prepare(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

impl<I, A, S> Accept<I, S> for Gate<A>
where
    I: Socket,
    A: Accept<I, S> + 'static,
    A::Future: Send + 'static,
    S: 'static,
    A::Stream: Io + 'static,
    A::Service: Send,
{
    type Stream = Connection;
    type Service = AddExtension<A::Service, Arc<Activity>>;
    type Future = Pin<Box<dyn Future<Output = io::Result<(Self::Stream, Self::Service)>> + Send>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            tracing::warn!("connection refused: --max-connections reached");
            return Box::pin(async { Err(io::Error::other("too many connections")) });
        };
        if let Err(error) = stream.prepare(self.slow_client_timeout) {
            return Box::pin(async { Err(error) });
        }
        let accepted = self.inner.accept(stream, service);
        let (header_timeout, slow_client_timeout) = (self.header_timeout, self.slow_client_timeout);
        Box::pin(async move {
            let (stream, service) = accepted.await?;
            let activity = Arc::new(Activity::new(Instant::now));
            let connection = Connection {
                stream: Box::new(stream),
                _place: place,
                activity: Arc::clone(&activity),
                header_timeout,
                slow_client_timeout,
                accepted: Instant::now(),
                read: 0,
                look: Box::pin(tokio::time::sleep(header_timeout.min(slow_client_timeout))),
            };
            Ok((connection, Extension(activity).layer(service)))
        })
    }
}

/// What a connection carries, encrypted or not. Behind a pointer HTTP is compiled once, and not for each kind of connection.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Io for S {}

/// A connection that counts against the limit. It fails with a timeout if the client sends no protocol preface or request,
/// or does not read its responses: on HTTP/2 the socket alone does not show that.
struct Connection {
    stream: Box<dyn Io>,
    _place: OwnedSemaphorePermit,
    activity: Arc<Activity>,
    header_timeout: Duration,
    slow_client_timeout: Duration,
    accepted: Instant,
    /// Bytes read so far, counted to [`PREFACE`].
    read: usize,
    /// When to check the timeouts next.
    look: Pin<Box<Sleep>>,
}

/// Length of HTTP/2's connection preface: after it the protocol is known.
const PREFACE: usize = 24;

impl Connection {
    /// Ready when a timeout has expired.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            ready!(self.look.as_mut().poll(context));
            let now = Instant::now();
            let end = match self.read {
                ..PREFACE => self.accepted.checked_add(self.header_timeout),
                PREFACE.. => self
                    .activity
                    .ends_at(self.header_timeout, self.slow_client_timeout),
            };
            if end.is_some_and(|end| end <= now) {
                return Poll::Ready(io::ErrorKind::TimedOut.into());
            }
            // Timeouts that begin in the meantime may expire earlier.
            let next = now + self.header_timeout.min(self.slow_client_timeout).min(LOOK_EVERY);
            let next = end.map_or(next, |end| end.min(next));
            self.look.as_mut().reset(next.into());
        }
    }

    /// `result`; if pending, an error once a timeout has expired.
    fn unless_over<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match result {
            Poll::Pending => self.poll_end(context).map(Err),
            ready => ready,
        }
    }
}

/// Longest interval between checks of the timeouts.
const LOOK_EVERY: Duration = Duration::from_secs(60);

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.read = PREFACE.min(self.read + (buffer.filled().len() - before));
        self.unless_over(context, read)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.unless_over(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.unless_over(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.unless_over(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
