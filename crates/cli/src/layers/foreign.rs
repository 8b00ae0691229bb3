//! What is said to somebody who brings the command line of another server.

use std::ffi::OsString;

use clap::{Command, CommandFactory};

use crate::args::Cli;

/// A flag of another server that is none here, without dashes.
pub(super) struct Stranger {
    server: &'static str,
    pub(super) flag: &'static str,
    /// What to do instead.
    pub(super) advice: &'static str,
    /// Operators meet it often.
    listed: bool,
}

/// All of them, as `strangers.txt` has them.
pub(super) fn all() -> impl Iterator<Item = Stranger> {
    let (mut server, mut advice, mut listed) = ("", "", false);
    let lines = include_str!("strangers.txt").lines();
    lines.filter(|line| !line.starts_with('#')).flat_map(move |line| {
        let flags = match line.trim_start().split_once(' ') {
            _ if !line.starts_with(' ') => {
                advice = line;
                ""
            }
            Some((mark @ ("*" | "-"), rest)) => {
                let (name, flags) = rest.split_once(": ").unwrap_or((rest, ""));
                (server, listed) = (name, mark == "*");
                flags
            }
            _ => line,
        };
        let stranger = move |flag| Stranger {
            server,
            flag,
            advice,
            listed,
        };
        flags.split_whitespace().map(stranger)
    })
}

/// What to do instead of the flag `name`, without dashes, if it is one of another server.
pub fn advice(name: &str) -> Option<String> {
    // vLLM's switches have opposites.
    let positive = name.strip_prefix("no-").unwrap_or(name);
    let mut servers: Vec<(&str, Vec<&str>)> = Vec::new();
    for Stranger { server, advice, .. } in all().filter(|stranger| stranger.flag == positive) {
        match servers.iter_mut().find(|(of, _)| *of == advice) {
            Some((_, names)) => names.push(server),
            None => servers.push((advice, vec![server])),
        }
    }
    let advice: Vec<String> = servers
        .iter()
        .map(|(advice, names)| format!("a flag of {}: {advice}", names.join(" and ")))
        .collect();
    (!advice.is_empty()).then(|| advice.join("; "))
}

/// The flags on a command line that are none here, as they stand there, each with what to do instead; none where no other
/// server knows any of them.
pub(super) fn on(argv: &[OsString]) -> Vec<(String, String)> {
    let ours = every_flag(&Cli::command());
    let flags = argv.iter().skip(1).map_while(|word| word.to_str());
    let flags = flags.take_while(|word| *word != "--");
    let mut explained = false;
    let told = flags.filter_map(|word| {
        let flag = word.split('=').next().unwrap_or(word);
        let name = flag.strip_prefix("--").or_else(|| flag.strip_prefix('-'))?;
        if ours.iter().any(|ours| ours == name) || is_number(name) {
            return None;
        }
        // vLLM takes the keys of JSON one by one.
        let whole = name.split('.').next().unwrap_or(name);
        let advice = match advice(whole) {
            None if whole != name && ours.iter().any(|ours| ours == whole) => {
                Some(format!("set --{whole} to one JSON document with all keys"))
            }
            advice => advice,
        };
        explained |= advice.is_some();
        match advice {
            Some(advice) => Some((flag.to_owned(), advice)),
            None if flag.starts_with("--") => Some((flag.to_owned(), "there is no such flag".to_owned())),
            None => None,
        }
    });
    let told: Vec<_> = told.collect();
    if explained { told } else { Vec::new() }
}

fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok()
}

/// Names of every flag of `command` and of those below it.
fn every_flag(command: &Command) -> Vec<String> {
    let own = command.get_arguments().flat_map(super::names);
    let below = command.get_subcommands().flat_map(every_flag);
    let all = own.chain(below);
    all.chain(["help", "h", "version", "V"].map(str::to_owned))
        .collect()
}

/// The flags of other servers that the documents list, without dashes.
pub fn strangers() -> impl Iterator<Item = &'static str> {
    all()
        .filter(|stranger| stranger.listed)
        .map(|stranger| stranger.flag)
}
