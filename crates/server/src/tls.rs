//! The certificate and key of the server.

use std::fmt;
use std::io;

use axum_server::tls_rustls::RustlsConfig;

/// The certificate that connections are encrypted with; clones share it.
#[derive(Clone)]
pub struct Tls(pub(crate) RustlsConfig);

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
