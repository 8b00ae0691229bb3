//! API keys from flags, environment and file.

use std::future::ready;
use std::path::{Path, PathBuf};

use plimsoll_server::{ApiKey, ApiKeys, KeyLimits};

use crate::args::AccessArgs;
use crate::error::Error;
use crate::watch::{read_files, watch_files};

/// Names the file, here and for clients.
const FLAG: &str = "--api-key-file";

/// The keys that `args` name, read before anything is loaded.
pub(crate) struct KeySource {
    flags: Vec<ApiKey>,
    file: Option<KeyFile>,
    /// What the keys are now.
    pub(crate) keys: ApiKeys,
}

struct KeyFile {
    path: PathBuf,
    /// As last read.
    content: Vec<u8>,
}

impl KeySource {
    /// # Errors
    /// Where a key is none, a file cannot be read or holds none, or limits per key are set without keys.
    pub(crate) fn read(args: &AccessArgs) -> Result<Self, Error> {
        let flags = of_flags(args)?;
        let mut keys = flags.clone();
        let file = match &args.api_key_file {
            None => None,
            Some(path) => {
                let [content] = read_files(&[(FLAG, path.clone())])?;
                let found = parse(path, &content)?;
                if found.is_empty() {
                    return Err(Error::configuration(path.display(), "it has no key"));
                }
                keys.extend(found);
                Some(KeyFile {
                    path: path.clone(),
                    content,
                })
            }
        };
        for (is_asked, message) in [
            (!limits(args).is_none(), "limits per key need keys"),
            (args.isolate_prefix_cache, "--isolate-prefix-cache needs keys"),
            (args.metrics_require_key, "--metrics-require-key needs keys"),
        ] {
            if is_asked && keys.is_empty() {
                let message = format!("{message}: add --api-key-file or --api-key");
                return Err(Error::configuration("--api-key", message));
            }
        }
        Ok(Self {
            flags,
            file,
            keys: ApiKeys::new(keys),
        })
    }

    /// Follows the file for as long as it is polled.
    pub(crate) async fn watch(self) {
        let Some(KeyFile { path, content }) = self.file else {
            return;
        };
        let (flags, keys, at) = (self.flags, self.keys, path.clone());
        let changed = move |[content]: [Vec<u8>; 1]| {
            let replaced = parse(&at, &content).map(|found| {
                let all: Vec<_> = flags.iter().cloned().chain(found).collect();
                tracing::info!(keys = all.len(), "reloaded API keys");
                keys.replace(all);
            });
            ready(replaced.map_err(|error| error.to_string()))
        };
        watch_files("the list of API keys", [(FLAG, path)], [content], changed).await;
    }
}

/// The keys of `--api-key`.
///
/// # Errors
/// If one is invalid; it is not shown.
pub(crate) fn of_flags(args: &AccessArgs) -> Result<Vec<ApiKey>, Error> {
    let keys = args.api_key.iter().map(|key| ApiKey::new(None, key.reveal()));
    let keys: Result<_, _> = keys.collect();
    keys.map_err(|error| Error::configuration("--api-key", error.to_string()))
}

/// What each key may use.
pub(crate) fn limits(args: &AccessArgs) -> KeyLimits {
    KeyLimits {
        concurrent_requests: args.max_concurrent_requests_per_key,
        requests_per_minute: args.requests_per_minute_per_key,
        tokens_per_minute: args.tokens_per_minute_per_key,
    }
}

/// The first key of a file, for those who use it.
pub(crate) fn first_in(path: &Path) -> Result<String, Error> {
    let [content] = read_files(&[(FLAG, path.to_owned())])?;
    parse(path, &content)?;
    let text = String::from_utf8_lossy(&content);
    let mut lines = entries(&text);
    let key = lines.next().and_then(|(_, words)| words.last().copied());
    key.map(str::to_owned)
        .ok_or_else(|| Error::configuration(path.display(), "it has no key"))
}

/// Lines that are more than a comment, as their numbers and words. A comment is a line that begins with #, or what follows a # that
/// stands alone.
fn entries(text: &str) -> impl Iterator<Item = (usize, Vec<&str>)> {
    let lines = text.lines().map(|line| {
        let words = line.split_whitespace();
        words.take_while(|&word| word != "#").collect::<Vec<_>>()
    });
    let is_entry = |words: &[&str]| words.first().is_some_and(|word| !word.starts_with('#'));
    (1..).zip(lines).filter(move |(_, words)| is_entry(words))
}

/// `KEY` or `NAME KEY` on each line. Errors say the line's number, never its text.
fn parse(path: &Path, content: &[u8]) -> Result<Vec<ApiKey>, Error> {
    let wrong = |message: String| Error::configuration(path.display(), message);
    let text = std::str::from_utf8(content).map_err(|_| wrong("it is not text".into()))?;
    let key = |(number, words): (usize, Vec<&str>)| {
        let (name, key) = match words[..] {
            [key] => (None, key),
            // It would be a name for the key before it.
            [_, word, ..] if word.starts_with('#') => {
                let message = "a key must not begin with #; put a space after the # of a comment";
                return Err(wrong(format!("line {number}: {message}")));
            }
            [name, key] => (Some(name), key),
            _ => return Err(wrong(format!("line {number}: KEY or NAME KEY is expected"))),
        };
        ApiKey::new(name, key).map_err(|error| wrong(format!("line {number}: {error}")))
    };
    entries(text).map(key).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn source(flags: &[&str]) -> Result<KeySource, String> {
        let argv = ["plimsoll", "serve", "sim"].iter().chain(flags);
        match crate::args::Cli::try_parse_from(argv).unwrap().command {
            crate::args::Command::Serve(args) => {
                KeySource::read(&args.server.access).map_err(|e| e.to_string())
            }
            other => panic!("not serve: {other:?}"),
        }
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn keys_come_from_flags_and_file() {
        assert!(!source(&[]).unwrap().keys.required());
        assert_eq!(
            source(&["--api-key", "a", "--api-key", "b"]).unwrap().flags.len(),
            2
        );
        let file = file("# team\n\nalice secret-a\n  secret-b  \n");
        let path = file.path().to_str().unwrap();
        let text = b"# team\n\nalice secret-a # first\n  secret-b  \n#x\nsecret-c # laptop\n";
        let keys = parse(file.path(), text).unwrap();
        assert_eq!((keys.len(), keys[0].name()), (3, "alice"));
        for key in &keys[1..] {
            assert!(
                key.name().starts_with("sha256:"),
                "a comment makes no name of a key"
            );
        }
        assert!(source(&["--api-key-file", path]).unwrap().keys.required());
        assert_eq!(first_in(file.path()).unwrap(), "secret-a");
    }

    #[test]
    fn what_is_wrong_is_named_and_no_key_is_shown() {
        let many = file("a b\nname secret word\n");
        let empty = file("# nothing\n");
        let path = |file: &tempfile::NamedTempFile| file.path().to_str().unwrap().to_owned();
        let note = file("secret #laptop\n");
        for (file, expected) in [
            (&many, "line 2"),
            (&empty, "no key"),
            (&note, "line 1: a key must not begin"),
        ] {
            let error = first_in(file.path()).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{error}");
        }
        for (flags, expected) in [
            (vec!["--api-key", ""], "must not be empty"),
            (vec!["--api-key", "secret word"], "without spaces"),
            (vec!["--api-key-file", &path(&many)], "line 2"),
            (vec!["--api-key-file", &path(&empty)], "no key"),
            (
                vec!["--api-key-file", "/no/such/file"],
                "--api-key-file: cannot read /no/such/file: ",
            ),
            (vec!["--requests-per-minute-per-key", "3"], "need keys"),
            (vec!["--isolate-prefix-cache"], "needs keys"),
            (vec!["--metrics-require-key"], "needs keys"),
        ] {
            let error = source(&flags).err().unwrap_or_default();
            assert!(error.contains(expected), "{flags:?}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
