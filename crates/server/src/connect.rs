//! Connections: plain or TLS, no more than so many, none that says nothing.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum_server::accept::{Accept, DefaultAcceptor};
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use crate::state::ServerOptions;

/// The certificate that connections are encrypted with; clones share it.
#[derive(Clone)]
pub struct Tls(RustlsConfig);

impl Tls {
    /// A chain of certificates and its private key, both PEM.
    ///
    /// # Errors
    /// Where they are no such thing, or do not belong together.
    pub async fn from_pem(certificates: Vec<u8>, key: Vec<u8>) -> io::Result<Self> {
        RustlsConfig::from_pem(certificates, key).await.map(Self)
    }

    /// New connections see these.
    ///
    /// # Errors
    /// As [`Self::from_pem`]; the old ones stay.
    pub async fn replace(&self, certificates: Vec<u8>, key: Vec<u8>) -> io::Result<()> {
        self.0.reload_from_pem(certificates, key).await
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Answers connections until `handle` says stop.
pub(crate) async fn serve(
    listener: TcpListener,
    options: &ServerOptions,
    handle: Handle<SocketAddr>,
    app: Router,
) -> io::Result<()> {
    let app = app.into_make_service();
    match &options.tls {
        None => {
            let gate = Gate::new(DefaultAcceptor::new(), options);
            server(listener, gate, handle, options).serve(app).await
        }
        Some(tls) => {
            let gate = Gate::new(RustlsAcceptor::new(tls.0.clone()), options);
            server(listener, gate, handle, options).serve(app).await
        }
    }
}

fn server<A>(
    listener: TcpListener,
    acceptor: A,
    handle: Handle<SocketAddr>,
    options: &ServerOptions,
) -> Server<SocketAddr, A> {
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

/// Requests at once on one connection.
const MAX_HTTP2_STREAMS: u32 = 256;
/// A silent client is asked whether it is still there, and is gone if it does not say so.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// Lets so many connections in at once.
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

    /// A client that is gone without a word is noticed: one that owes acknowledgements as soon as one that reads nothing,
    /// one that owes nothing by probes.
    fn prepare(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(stream);
        let probes = TcpKeepalive::new()
            .with_time(PROBE_AFTER)
            .with_interval(PROBE_EVERY)
            .with_retries(PROBES);
        socket.set_tcp_keepalive(&probes)?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(self.slow_client_timeout))?;
        Ok(())
    }
}

impl<A, S> Accept<TcpStream, S> for Gate<A>
where
    A: Accept<TcpStream, S> + 'static,
    A::Future: Send + 'static,
    S: 'static,
    A::Stream: Send,
    A::Service: Send,
{
    type Stream = Connection<A::Stream>;
    type Service = A::Service;
    type Future = Pin<Box<dyn Future<Output = io::Result<(Self::Stream, Self::Service)>> + Send>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            tracing::warn!("a connection is closed at once: there are as many as may be");
            return Box::pin(async { Err(io::Error::other("too many connections")) });
        };
        if let Err(error) = self.prepare(&stream) {
            return Box::pin(async { Err(error) });
        }
        let accepted = self.inner.accept(stream, service);
        let header_timeout = self.header_timeout;
        Box::pin(async move {
            let (stream, service) = accepted.await?;
            let connection = Connection {
                stream,
                _place: place,
                silence: Some((Box::pin(tokio::time::sleep(header_timeout)), 0)),
            };
            Ok((connection, service))
        })
    }
}

/// A connection that holds its place. It fails where the client has not said in time which HTTP it speaks; from then on
/// that protocol has its own timeouts.
struct Connection<S> {
    stream: S,
    _place: OwnedSemaphorePermit,
    /// When that time is over, and bytes read so far.
    silence: Option<(Pin<Box<Sleep>>, usize)>,
}

/// Length of HTTP/2's preface: the protocol is known by then.
const PREFACE: usize = 24;

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let Some((sleep, bytes)) = &mut self.silence else {
            return read;
        };
        *bytes += buffer.filled().len() - before;
        if *bytes >= PREFACE {
            self.silence = None;
        } else if read.is_pending() {
            ready!(sleep.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
