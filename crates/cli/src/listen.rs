//! Where the server listens: on a TCP port or a Unix socket.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use plimsoll_server::Listener;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream, lookup_host};

use crate::error::Error;
use crate::start::StartTimes;

/// Connections the operating system may hold before they are accepted.
const BACKLOG: u32 = 1024;

/// Where to listen.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    /// A host and a port.
    Tcp(String, u16),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// Where the server listens. A Unix socket is removed with it.
#[derive(Debug)]
pub(crate) enum Bound {
    Tcp(SocketAddr),
    Unix(SocketFile),
}

/// The path of a socket of this process.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Where it is gone already, that was the aim.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Bound {
    /// What logs say.
    pub(crate) fn url(&self, scheme: &str) -> String {
        match self {
            Self::Tcp(address) => format!("{scheme}://{address}"),
            Self::Unix(SocketFile(path)) => format!("unix:{}", path.display()),
        }
    }

    /// What a browser on this machine opens; a Unix socket has none.
    pub(crate) fn browser_url(&self, scheme: &str) -> Option<String> {
        match self {
            Self::Tcp(_) => Some(self.curl(scheme)),
            Self::Unix(_) => None,
        }
    }

    /// What curl is given before the path.
    pub(crate) fn curl(&self, scheme: &str) -> String {
        match self {
            Self::Tcp(address) if address.ip().is_unspecified() => {
                format!("{scheme}://127.0.0.1:{}", address.port())
            }
            Self::Tcp(address) => format!("{scheme}://{address}"),
            Self::Unix(SocketFile(path)) => format!("--unix-socket {} {scheme}://localhost", path.display()),
        }
    }
}

impl Address {
    /// Listens.
    ///
    /// # Errors
    /// [`Error::Bind`] if the address is taken or no address.
    pub(crate) async fn listen(&self, times: &StartTimes) -> Result<(Listener, Bound), Error> {
        let begin = Instant::now();
        let (listener, bound) = match self {
            Self::Tcp(host, port) => {
                let failed = |source| Error::Bind {
                    address: format!("{host}:{port}"),
                    flags: "--host and --port",
                    source,
                };
                let listener = listen(host, *port).await.map_err(failed)?;
                let bound = Bound::Tcp(listener.local_addr()?);
                (Listener::Tcp(listener), bound)
            }
            Self::Unix(path) => {
                let failed = |source| Error::Bind {
                    address: path.display().to_string(),
                    flags: "--uds",
                    source,
                };
                let listener = listen_at(path).await.map_err(failed)?;
                (Listener::Unix(listener), Bound::Unix(SocketFile(path.clone())))
            }
        };
        times.add("listen", begin.elapsed());
        Ok((listener, bound))
    }
}

async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut last = io::Error::other("the name has no address");
    for address in lookup_host((host, port)).await? {
        match listen_on(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    // A port whose last server just ended is free.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// A socket that a process left behind when it was killed is replaced; one at which a process listens, or any other file, is not.
async fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let is_dead = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).await.is_err_and(is_dead) {
        std::fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn tcp(host: &str, port: u16) -> Result<(Listener, Bound), Error> {
        Address::Tcp(host.to_owned(), port)
            .listen(&StartTimes::begin())
            .await
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_found_out_at_once() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(matches!(tcp("127.0.0.1", port).await, Err(Error::Bind { .. })));
        assert!(matches!(
            tcp("no-such-host.invalid", 1).await,
            Err(Error::Bind { .. })
        ));
        let (_listener, bound) = tcp("127.0.0.1", 0).await.unwrap();
        let Bound::Tcp(address) = bound else {
            panic!("{bound:?}")
        };
        assert!(tokio::net::TcpStream::connect(address).await.is_ok());
    }

    #[tokio::test]
    async fn dead_sockets_are_replaced_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = Address::Unix(path.clone());
        let times = StartTimes::begin();
        // What a killed process leaves.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (listener, bound) = address.listen(&times).await.unwrap();
        assert!(UnixStream::connect(&path).await.is_ok());
        let taken = address.listen(&times).await.err().unwrap();
        assert!(
            matches!(taken, Error::Bind { .. }) && taken.to_string().contains("--uds"),
            "{taken}"
        );
        drop((listener, bound));
        assert!(!path.exists());
        std::fs::write(&path, "x").unwrap();
        assert!(matches!(address.listen(&times).await, Err(Error::Bind { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"x");
    }
}
