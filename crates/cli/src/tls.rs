//! The certificate for TLS, from files that may change while the server runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_server::Tls;

use crate::args::AccessArgs;
use crate::error::Error;

/// How soon changed files are noticed.
const WATCH: Duration = Duration::from_secs(2);

/// `--ssl-certfile` and `--ssl-keyfile`.
pub(crate) struct Certificate {
    files: [PathBuf; 2],
    /// As last read.
    pem: [Vec<u8>; 2],
    /// What connections are encrypted with.
    pub(crate) tls: Tls,
}

impl Certificate {
    /// `None` where no files are named.
    ///
    /// # Errors
    /// Where the files cannot be read, or are no certificate and key.
    pub(crate) async fn read(args: &AccessArgs) -> Result<Option<Self>, Error> {
        let files = match (&args.ssl_certfile, &args.ssl_keyfile) {
            (None, None) => return Ok(None),
            (Some(certificate), Some(key)) => [certificate.clone(), key.clone()],
            _ => {
                return Err(Error::Configuration {
                    origin: "--ssl-certfile".into(),
                    message: "it needs --ssl-keyfile, and the other way round".into(),
                });
            }
        };
        let pem = read(&files)?;
        let [certificates, key] = pem.clone();
        let tls = Tls::from_pem(certificates, key).await;
        let tls = tls.map_err(|error| Error::Configuration {
            origin: format!("{} and {}", files[0].display(), files[1].display()),
            message: error.to_string(),
        })?;
        Ok(Some(Self { files, pem, tls }))
    }

    /// Follows the files for as long as it is polled: new connections see what is there.
    pub(crate) async fn watch(mut self) {
        let mut every = tokio::time::interval(WATCH);
        loop {
            every.tick().await;
            let pem = match read(&self.files) {
                Ok(pem) => pem,
                // They may be about to be replaced.
                Err(error) => {
                    tracing::warn!("the certificate stays as it was: {error}");
                    continue;
                }
            };
            if pem == self.pem {
                continue;
            }
            let [certificates, key] = pem.clone();
            match self.tls.replace(certificates, key).await {
                Ok(()) => tracing::info!("certificate read again"),
                // One file was replaced and the other will be.
                Err(error) => tracing::warn!("the certificate stays as it was: {error}"),
            }
            self.pem = pem;
        }
    }
}

fn read(files: &[PathBuf; 2]) -> Result<[Vec<u8>; 2], Error> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|source| Error::Read {
            path: path.to_owned(),
            source,
        })
    };
    Ok([read(&files[0])?, read(&files[1])?])
}
