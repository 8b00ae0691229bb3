//! `plimsoll pull`.

use super::files;
use crate::args::PullArgs;
use crate::bytes::Bytes;
use crate::error::Error;
use crate::hub::{self, Weights};
use crate::serve::say;
use crate::simulated::SimSpec;
use crate::source::hub_options;
use crate::start::StartProgress;

/// Downloads a model into the Hub cache, and says where it lies.
///
/// # Errors
/// Where it cannot be had, or a revision is given twice.
pub async fn pull(args: PullArgs) -> Result<(), Error> {
    let (name, mut at) = (args.model, args.hub);
    if SimSpec::parse(&name.to_string()).is_some() {
        let message = "the simulated model is built in: there is nothing to download";
        return Err(Error::configuration("MODEL", message));
    }
    if let Some(revision) = &name.revision {
        if at.has_revision() && at.revision != *revision {
            let message = format!("{} is given too, and MODEL says {revision}", at.revision);
            return Err(Error::configuration("--revision", message));
        }
        at.revision.clone_from(revision);
    }
    let options = hub_options(&at, &StartProgress::default())?;
    let pulled = hub::pull(&name.repo, Weights::Any, &options).await?;
    let what = format!("{name}: {}, {}", files(pulled.files), Bytes(pulled.bytes));
    let how = match pulled.new {
        0 => "all there, nothing to download".to_owned(),
        new if new == pulled.files => "downloaded".to_owned(),
        new => format!("{new} of them downloaded now"),
    };
    say(&format!("{what}; {how}\n{}", pulled.path.display()));
    Ok(())
}
