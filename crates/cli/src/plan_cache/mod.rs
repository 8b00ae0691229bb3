//! What the auto-profile measured, kept on disk: the next start of the same model, build, device and shape need not measure
//! again. It still proves the size. Choices of linear layers are kept likewise; they do not depend on the shape.
//!
//! One file per key, named by its hash. Nothing in a file is believed without its checksum, and nothing that goes wrong
//! here ends a start: a file that cannot be used is a miss, a directory that cannot be written a warning.

mod file;
mod key;

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::start::PhaseSeconds;
use file::Stored;
pub use key::DeviceKey;
pub(crate) use key::{CacheKey, Key, LinearKey, ModelKey, ShapeKey};

/// Most plans that are kept, and most choices; the least recently used go first.
const MAX_PLANS: usize = 64;

/// Begins the names of files that are not whole yet.
const UNFINISHED: &str = ".unfinished-";

/// An unfinished file that is older was left behind by a process that was killed.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// A directory of plans, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanCache {
    dir: Option<PathBuf>,
    write_only: bool,
}

/// What the cache knows about a key.
#[derive(Debug, PartialEq)]
pub(crate) enum Lookup<P> {
    Hit { plan: P, path: PathBuf },
    Miss(Miss),
}

/// Why there is no plan; its `Display` is the rest of a log line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// Nothing is known about this model on this device.
    NoneStored,
    /// The most similar plan of this model on this device differs in these parts.
    Changed(Vec<String>),
    /// The file of this key belongs to another user, who keeps it private.
    NotAllowed { path: PathBuf },
    /// The file of this key is not whole.
    Damaged { path: PathBuf, reason: String },
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoneStored => f.write_str("reason=none-stored"),
            Self::Changed(parts) => write!(f, "reason=changed parts=\"{}\"", parts.join(", ")),
            Self::NotAllowed { path } => write!(
                f,
                "reason=not-allowed file={} problem=\"this user may not read it\"",
                path.display()
            ),
            Self::Damaged { path, reason } => {
                write!(f, "reason=damaged file={} problem=\"{reason}\"", path.display())
            }
        }
    }
}

impl PlanCache {
    /// Neither read nor written.
    pub fn off() -> Self {
        Self::default()
    }

    /// The plans of `dir`, which is made when the first is stored.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: Some(dir.into()),
            write_only: false,
        }
    }

    /// The same for who wants to measure, and leave what it finds to others.
    #[must_use]
    pub fn write_only(self) -> Self {
        Self {
            write_only: true,
            ..self
        }
    }

    /// Whether plans are kept.
    pub(crate) fn is_on(&self) -> bool {
        self.dir.is_some()
    }

    /// In `dir`, or else where the environment says that caches are.
    pub fn in_dir(dir: Option<PathBuf>) -> Self {
        let dir = dir.or_else(|| {
            // A relative path is to be ignored, says the XDG specification.
            let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let caches = xdg.filter(|path| path.is_absolute());
            let caches = caches.or_else(|| Some(std::env::home_dir()?.join(".cache")));
            Some(caches?.join("plimsoll/profiles"))
        });
        Self {
            dir,
            write_only: false,
        }
    }

    /// What was stored for `key`. `None` where nobody shall look.
    pub(crate) fn load<P: DeserializeOwned>(&self, key: &impl CacheKey) -> Option<Lookup<P>> {
        let dir = self.dir.as_ref().filter(|_| !self.write_only)?;
        let path = file_of(dir, key);
        let damaged = |reason: String| {
            Lookup::Miss(Miss::Damaged {
                path: path.clone(),
                reason,
            })
        };
        let stored = match Stored::read(&path) {
            Ok(stored) => stored,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Some(Lookup::Miss(
                    nearest(dir, key).map_or(Miss::NoneStored, Miss::Changed),
                ));
            }
            Err(error) => return Some(Lookup::Miss(unreadable(path, &error))),
        };
        if stored.key != key.to_json() {
            return Some(damaged("the key in it is not that of its name".to_owned()));
        }
        Some(match serde_json::from_value(stored.plan) {
            Ok(plan) => {
                touch(&path);
                Lookup::Hit { plan, path }
            }
            Err(error) => damaged(error.to_string()),
        })
    }

    /// Keeps nothing for `key`.
    pub(crate) fn remove(&self, key: &impl CacheKey) -> io::Result<()> {
        let removed = self.dir.as_ref().map(|dir| fs::remove_file(file_of(dir, key)));
        match removed {
            Some(Err(error)) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// What the phases took of the last start of `model` whose plan was kept, on whatever device and of whatever shape: for
    /// whoever wants to know how long this one will take.
    pub(crate) fn seconds_of(&self, model: &ModelKey) -> Option<PhaseSeconds> {
        let dir = self.dir.as_ref().filter(|_| !self.write_only)?;
        let model = serde_json::to_value(model).ok()?;
        let mut plans = files(dir, Key::EXTENSION);
        plans.sort_unstable_by(|a, b| b.cmp(a));
        let stored = plans.into_iter().filter_map(|(_, path)| Stored::read(&path).ok());
        let mut alike = stored.filter(|stored| stored.key["model"] == model && !stored.seconds.is_empty());
        alike.next().map(|stored| stored.seconds)
    }

    /// Keeps `plan` for the next start with `key`, in the place of what was there, and what the phases of this start took.
    /// The path, or `None` where the cache is off.
    pub(crate) fn store<K: CacheKey, P: Serialize>(
        &self,
        key: &K,
        plan: &P,
        seconds: &PhaseSeconds,
    ) -> io::Result<Option<PathBuf>> {
        let Some(dir) = &self.dir else {
            return Ok(None);
        };
        let bytes = file::encode(&key.to_json(), plan, seconds)?;
        let path = file_of(dir, key);
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(named)?;
        // Whole or not at all, whoever else writes or reads meanwhile.
        let mut unfinished = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(dir)
            .map_err(named)?;
        unfinished.write_all(&bytes).map_err(named)?;
        unfinished.persist(&path).map_err(|e| named(e.error))?;
        prune(dir, K::EXTENSION);
        Ok(Some(path))
    }
}

/// A file that is there and cannot be read.
fn unreadable(path: PathBuf, error: &io::Error) -> Miss {
    match error.kind() {
        ErrorKind::PermissionDenied => Miss::NotAllowed { path },
        _ => Miss::Damaged {
            path,
            reason: error.to_string(),
        },
    }
}

fn file_of<K: CacheKey>(dir: &Path, key: &K) -> PathBuf {
    dir.join(key.hash()).with_extension(K::EXTENSION)
}

/// In what the plan of the same model and device that is most like `key` differs from it.
fn nearest<K: CacheKey>(dir: &Path, key: &K) -> Option<Vec<String>> {
    let key = key.to_json();
    let alike = files(dir, K::EXTENSION)
        .into_iter()
        .filter_map(|(used, path)| Some((used, Stored::read(&path).ok()?.key)))
        .filter(|(_, stored)| key::same_subject(stored, &key))
        .map(|(used, stored)| (used, key::differences(&stored, &key)));
    let (_, parts) = alike.min_by_key(|(used, parts)| (parts.len(), std::cmp::Reverse(*used)))?;
    Some(parts)
}

/// When each file of a kind was last used, and where it lies.
fn files(dir: &Path, extension: &str) -> Vec<(SystemTime, PathBuf)> {
    entries(dir)
        .filter(|(_, path)| path.extension().is_some_and(|of| of == extension))
        .collect()
}

fn entries(dir: &Path) -> impl Iterator<Item = (SystemTime, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
}

/// Keeps the directory small. What cannot be removed now will be another time.
fn prune(dir: &Path, extension: &str) {
    let mut files = files(dir, extension);
    files.sort_unstable_by(|a, b| b.cmp(a));
    let surplus = files.into_iter().skip(MAX_PLANS);
    let abandoned = entries(dir).filter(|(modified, path)| {
        let unfinished = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED));
        unfinished && modified.elapsed().is_ok_and(|age| age > ABANDONED_AFTER)
    });
    for (_, path) in surplus.chain(abandoned) {
        if let Err(error) = fs::remove_file(&path) {
            tracing::debug!("cannot remove {}: {error}", path.display());
        }
    }
}

/// A plan in use is not the least recently used. A directory that is read-only keeps its times.
fn touch(path: &Path) {
    let touched = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
    if let Err(error) = touched {
        tracing::debug!("cannot touch {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests;
