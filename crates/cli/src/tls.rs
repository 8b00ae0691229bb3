//! The certificate for TLS, from files that may change while the server runs.

use plimsoll_server::Tls;

use crate::args::AccessArgs;
use crate::error::Error;
use crate::watch::{NamedFile, read_files, watch_files};

/// `--ssl-certfile` and `--ssl-keyfile`.
pub(crate) struct Certificate {
    files: [NamedFile; 2],
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
            (Some(certificate), Some(key)) => [
                ("--ssl-certfile", certificate.clone()),
                ("--ssl-keyfile", key.clone()),
            ],
            _ => {
                let message = "it needs --ssl-keyfile, and the other way round";
                return Err(Error::configuration("--ssl-certfile", message));
            }
        };
        let pem = read_files(&files)?;
        let [certificates, key] = pem.clone();
        let tls = Tls::from_pem(certificates, key).await;
        let [(_, certificate), (_, key)] = &files;
        let origin = || format!("{} and {}", certificate.display(), key.display());
        let tls = tls.map_err(|error| Error::configuration(origin(), error.to_string()))?;
        Ok(Some(Self { files, pem, tls }))
    }

    /// Follows the files for as long as it is polled: new connections see what is there.
    pub(crate) async fn watch(self) {
        let Self { files, pem, tls } = self;
        let changed = move |[certificates, key]: [Vec<u8>; 2]| {
            let tls = tls.clone();
            async move {
                // Where one file was replaced and the other will be, they do not belong together.
                let replaced = tls.replace(certificates, key).await;
                replaced.map_err(|error| error.to_string())?;
                tracing::info!("reloaded certificate");
                Ok(())
            }
        };
        watch_files("the certificate", files, pem, changed).await;
    }
}
