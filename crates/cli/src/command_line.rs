//! The command line this process was started with, and what to type instead: advice comes as whole commands to copy.

use std::ffi::OsString;

use plimsoll_profiler::{Cause, Diagnostic, Setting};

use crate::error::Error;
use crate::{layers, secrets};

/// A command line as it was typed, program first.
#[derive(Clone, Debug)]
pub struct CommandLine(Vec<String>);

impl CommandLine {
    /// This process's.
    pub fn of_process() -> Self {
        Self::new(std::env::args_os())
    }

    /// Made of these arguments, program first.
    pub fn new(argv: impl Iterator<Item = OsString>) -> Self {
        Self(argv.map(|arg| arg.to_string_lossy().into_owned()).collect())
    }

    /// The same command with `settings`, for a shell: flags that they replace or contradict are gone, those in files and
    /// variables lose against them.
    pub fn with(&self, settings: &[Setting]) -> String {
        let replaced: Vec<String> = settings
            .iter()
            .flat_map(|setting| layers::contradicted_by(setting.name()))
            .collect();
        let is_replaced = |arg: &str| {
            let name = arg
                .strip_prefix("--")
                .map(|rest| rest.split('=').next().unwrap_or(rest).replace('_', "-"));
            name.is_some_and(|name| replaced.contains(&name))
        };
        let shown = secrets::hidden(self.0.iter().cloned());
        let end = shown.iter().position(|word| word == "--").unwrap_or(shown.len());
        let (flags, operands) = shown.split_at(end);
        let mut words = Vec::new();
        let mut flags = flags.iter();
        while let Some(arg) = flags.next() {
            if !is_replaced(arg) {
                words.push(quoted(arg));
            } else if !arg.contains('=') {
                // All of these flags take a value.
                flags.next();
            }
        }
        words.extend(settings.iter().map(Setting::to_string));
        words.extend(operands.iter().map(|arg| quoted(arg)));
        words.join(" ")
    }

    /// `error` as the last word of this process: what would work instead comes as commands.
    pub fn explain(&self, error: &Error) -> String {
        match error {
            Error::Predicted(error) => format!("predicted, nothing was measured: {}", self.explain(error)),
            Error::NeedsLargerDevice { error, bytes } => {
                let command = self.with(&[Setting::DeviceMemory(*bytes)]);
                format!("{error}\npredicted to fit:\n  # a larger budget\n  {command}")
            }
            _ => match error.diagnostic() {
                Some(diagnostic) => self.advice(diagnostic),
                None => error.to_string(),
            },
        }
    }

    fn advice(&self, diagnostic: &Diagnostic) -> String {
        let mut text = diagnostic.facts();
        if diagnostic.knobs.is_empty() {
            return text + &diagnostic.no_flag();
        }
        // A device that promises more than it has is no fault of the flags.
        let tried = match diagnostic.cause {
            Cause::Exhausted { .. } => "the memory that the device really has is enough for",
            _ => "any one of these fits",
        };
        text += &format!("\n{tried}:");
        for knob in &diagnostic.knobs {
            text += &format!("\n  # {}\n  {}", knob.effect, self.with(&knob.settings));
        }
        text
    }
}

/// A word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    // A shell may take a word that begins with = for a path.
    match !word.is_empty() && !word.starts_with('=') && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(line: &[&str], settings: &[Setting]) -> String {
        CommandLine::new(line.iter().map(OsString::from)).with(settings)
    }

    #[test]
    fn a_flag_replaces_itself_and_what_it_contradicts() {
        let line = "plimsoll serve m --max-num-seqs 64 --port=0 --gpu-memory-utilization=0.5";
        let pinned = "plimsoll profile --max-total-token-num 64 --max-device-memory 1GiB m";
        for (line, settings, expected) in [
            (
                line,
                &[Setting::MaxNumSeqs(8)][..],
                "plimsoll serve m --port=0 --gpu-memory-utilization=0.5 --max-num-seqs=8",
            ),
            (
                line,
                &[Setting::DeviceMemory(9), Setting::MaxModelLen(4)],
                "plimsoll serve m --max-num-seqs 64 --port=0 --device-memory=9 --max-model-len=4",
            ),
            (
                pinned,
                &[Setting::KvCacheMemoryBytes(5)],
                "plimsoll profile --max-device-memory 1GiB m --kv-cache-memory-bytes=5",
            ),
            (
                pinned,
                &[Setting::DeviceMemory(5)],
                "plimsoll profile --max-total-token-num 64 m --device-memory=5",
            ),
        ] {
            let line: Vec<_> = line.split(' ').collect();
            assert_eq!(with(&line, settings), expected);
        }
    }

    #[test]
    fn words_survive_a_shell_and_secrets_stay_here() {
        let line = [
            "./my plimsoll",
            "serve",
            "--hf-token",
            "secret",
            "--chat-template={{ it's }}",
            "--",
            "-m",
        ];
        assert_eq!(
            with(&line, &[Setting::MemFraction(0.5)]),
            r"'./my plimsoll' serve '--hf-token=***' '--chat-template={{ it'\''s }}' --mem-fraction=0.5 -- -m"
        );
        let words = [
            "plain",
            "$HOME",
            "a b",
            "",
            "'",
            "*",
            "=x",
            "\"q\"",
            "back\\slash",
            "new\nline",
        ];
        for word in words {
            let script = format!("printf %s {}", quoted(word));
            let output = std::process::Command::new("sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
