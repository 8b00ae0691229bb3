//! `plimsoll rm`.

use std::io::{BufRead, IsTerminal, Write, stdin, stdout};

use super::in_use;
use crate::args::RmArgs;
use crate::bytes::Bytes;
use crate::error::Error;
use crate::hub::{self, Contents, ModelName, Removal};
use crate::serve::say;

/// Removes models from the Hub cache, after a question.
///
/// # Errors
/// Where one is not there or in use: then none is removed.
pub async fn rm(args: RmArgs) -> Result<(), Error> {
    let cache = hub::models(args.download_dir.as_deref()).await?;
    // It waits for the answer of the user, so not on a thread of the runtime.
    tokio::task::spawn_blocking(move || remove(&cache, &args.models, args.yes)).await?
}

fn remove(cache: &Contents, names: &[ModelName], yes: bool) -> Result<(), Error> {
    let refused = |name: &ModelName| {
        let name = name.to_string();
        move |why: String| Error::configuration(name.clone(), why)
    };
    let mut removals = Vec::new();
    let once = names.iter().enumerate();
    let once = once.filter(|&(at, name)| !names[..at].contains(name));
    for (_, name) in once {
        let removal = Removal::plan(cache, name).map_err(refused(name))?;
        check_unused(&removal).map_err(refused(name))?;
        removals.push((name, removal));
    }
    for (name, removal) in removals {
        let what = format!("{name} ({})", Bytes(removal.bytes));
        if !yes && !agreed(&what)? {
            say(&format!("kept {name}"));
            continue;
        }
        let failed = |source| Error::Write {
            path: cache.dir.clone(),
            source,
        };
        removal.carry_out().map_err(failed)?;
        say(&format!("removed {what}"));
    }
    Ok(())
}

fn check_unused(removal: &Removal) -> Result<(), String> {
    if removal.is_downloading() {
        return Err("it is being downloaded; end that first".to_owned());
    }
    match in_use::by(removal).as_slice() {
        [] => Ok(()),
        users => Err(format!("it is in use by {}; end that first", users.join(" and "))),
    }
}

fn agreed(what: &str) -> Result<bool, Error> {
    if !stdin().is_terminal() {
        let message = format!("nobody can be asked whether to remove {what}: add --yes");
        return Err(Error::configuration("standard input", message));
    }
    let mut out = stdout();
    write!(out, "remove {what}? [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
