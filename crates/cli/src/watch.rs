//! Files that may change while the server runs.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::Error;

/// How soon changed files are noticed.
const EVERY: Duration = Duration::from_secs(2);

/// A file, and the flag that names it.
pub(crate) type NamedFile = (&'static str, PathBuf);

/// Contents of all of `files`.
///
/// # Errors
/// Where one cannot be read.
pub(crate) fn read_files<const N: usize>(files: &[NamedFile; N]) -> Result<[Vec<u8>; N], Error> {
    let mut contents = [const { Vec::new() }; N];
    for (content, (flag, path)) in contents.iter_mut().zip(files) {
        *content = std::fs::read(path).map_err(Error::unreadable(flag, path))?;
    }
    Ok(contents)
}

/// Follows `files` for as long as it is polled: `changed` gets the contents of all whenever those of one are not `last` any
/// more. What is wrong is told once, and not again until it is something else: files may be about to be replaced.
pub(crate) async fn watch_files<const N: usize, F>(
    what: &str,
    files: [NamedFile; N],
    last: [Vec<u8>; N],
    mut changed: impl FnMut([Vec<u8>; N]) -> F,
) where
    F: Future<Output = Result<(), String>>,
{
    let mut watch = Watch {
        files,
        last,
        told: None,
    };
    let mut every = tokio::time::interval(EVERY);
    loop {
        every.tick().await;
        if let Some(wrong) = watch.look(&mut changed).await {
            tracing::warn!("{what} is unchanged: {wrong}");
        }
    }
}

struct Watch<const N: usize> {
    files: [NamedFile; N],
    /// Contents that `changed` has seen.
    last: [Vec<u8>; N],
    /// What was wrong when it was last looked.
    told: Option<String>,
}

impl<const N: usize> Watch<N> {
    /// What is wrong now and was not before.
    async fn look<F>(&mut self, changed: &mut impl FnMut([Vec<u8>; N]) -> F) -> Option<String>
    where
        F: Future<Output = Result<(), String>>,
    {
        // A few lines: no matter for the blocking pool.
        let result = match read_files(&self.files) {
            Ok(contents) if contents == self.last => Ok(()),
            Ok(contents) => {
                self.last.clone_from(&contents);
                changed(contents).await
            }
            Err(error) => Err(error.to_string()),
        };
        let now = result.err();
        let before = std::mem::replace(&mut self.told, now.clone());
        now.filter(|now| before.as_ref() != Some(now))
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test]
    async fn changes_are_seen_and_what_is_wrong_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let mut seen = Vec::new();
        let mut changed = |[content]: [Vec<u8>; 1]| {
            seen.push(String::from_utf8(content).unwrap());
            let is_bad = seen.last().is_some_and(|content| content == "bad");
            ready(if is_bad {
                Err("it is bad".to_owned())
            } else {
                Ok(())
            })
        };
        let mut watch = Watch {
            files: [("--flag", path.clone())],
            last: [b"one".to_vec()],
            told: None,
        };
        let mut told = Vec::new();
        let mut steps = Vec::new();
        for content in [
            Some("one"),
            Some("two"),
            None,
            None,
            Some("two"),
            None,
            Some("bad"),
            Some("bad"),
            Some("three"),
        ] {
            match content {
                Some(content) => std::fs::write(&path, content).unwrap(),
                None => drop(std::fs::remove_file(&path)),
            }
            let wrong = watch.look(&mut changed).await;
            steps.push(wrong.is_some());
            told.extend(wrong);
        }
        assert_eq!(
            steps,
            [false, false, true, false, false, true, true, false, false]
        );
        assert!(
            told[0].contains("file") && told[0] == told[1] && told[2] == "it is bad",
            "{told:?}"
        );
        assert_eq!(seen, ["two", "bad", "three"]);
    }
}
