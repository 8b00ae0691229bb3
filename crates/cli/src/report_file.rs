//! `--profile-report` and `--output-json`: written whole or not at all, and known to be writable before the work begins.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::error::Error;

/// Where the report goes, if anywhere.
#[derive(Clone, Debug)]
pub struct ReportFile(Option<PathBuf>);

impl ReportFile {
    /// At `path`, the value of `flag`, if there is one.
    ///
    /// # Errors
    /// [`Error::Configuration`] where a report could not be written: nobody shall wait minutes for that.
    pub(crate) fn new(flag: &'static str, path: Option<PathBuf>) -> Result<Self, Error> {
        if let Some(path) = &path {
            let writable = match is_special(path) {
                true => fs::OpenOptions::new().write(true).open(path).map(drop),
                false => unfinished(&target(path)).map(drop),
            };
            writable.map_err(|source| {
                let why = match path.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
                        "there is no such directory".to_owned()
                    }
                    _ => source.to_string(),
                };
                Error::configuration(flag, format!("cannot write {}: {why}", path.display()))
            })?;
        }
        Ok(Self(path))
    }

    /// Readers see the whole of it, or what was there before.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub(crate) fn write(&self, report: &Value) -> Result<(), Error> {
        let Some(path) = &self.0 else {
            return Ok(());
        };
        let text = format!("{report:#}\n");
        let written = match is_special(path) {
            true => fs::write(path, text),
            false => replace(&target(path), text.as_bytes()),
        };
        written.map_err(|source| Error::Write {
            path: path.to_owned(),
            source,
        })
    }
}

/// A pipe, a terminal or a directory: nothing to put another file in the place of.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

/// A link stays one: what it leads to is replaced.
fn target(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn unfinished(path: &Path) -> io::Result<NamedTempFile> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    tempfile::Builder::new()
        .prefix(".unfinished-")
        // As any new file's: the umask has its say.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(dir)
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = unfinished(path)?;
    file.write_all(text)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_that_cannot_be_written_is_told_before_it_is_made() {
        let dir = tempfile::tempdir().unwrap();
        for wrong in [dir.path(), &dir.path().join("no/such/report.json")] {
            let error = ReportFile::new("--profile-report", Some(wrong.to_owned())).unwrap_err();
            assert!(
                error.to_string().contains("--profile-report: cannot write"),
                "{error}"
            );
        }
        ReportFile::new("--profile-report", Some("/dev/null".into()))
            .unwrap()
            .write(&json!({}))
            .unwrap();
    }

    #[test]
    fn the_old_report_stays_until_the_new_one_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        fs::write(&path, "old").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let file = ReportFile::new("--profile-report", Some(link.clone())).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        let mut reader = fs::File::open(&path).unwrap();
        file.write(&json!({"kv_tokens": 7})).unwrap();
        // Who has it open reads the old one to its end.
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "old");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\n  \"kv_tokens\": 7\n}\n");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            2,
            "nothing is left behind"
        );
    }
}
