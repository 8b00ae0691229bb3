//! The certificate and key of the server.

use std::fmt;
use std::io;

use axum_server::tls_rustls::RustlsConfig;

/// The TLS certificate and key; clones share them.
#[derive(Clone)]
pub struct Tls(pub(crate) RustlsConfig);

impl Tls {
    /// From a certificate chain and its private key, both PEM.
    ///
    /// # Errors
    /// If they cannot be parsed or do not match.
    pub async fn from_pem(certificates: Vec<u8>, key: Vec<u8>) -> io::Result<Self> {
        RustlsConfig::from_pem(certificates, key).await.map(Self)
    }

    /// Replaces them for new connections.
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
