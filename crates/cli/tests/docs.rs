//! What the documents say exists: every flag is one of the command line, every link leads somewhere, every picture is that of its report.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory;
use plimsoll_cli::args::Cli;

/// Flags of other programs that the documents show.
const FOREIGN: [&str; 14] = [
    "rm",
    "gpus",
    "set",
    "previous",
    "build-arg",
    "read-only",
    "tmpfs",
    "health-cmd",
    "attach",
    "timeout",
    "logs",
    "binary",
    "build-context",
    "engine",
];
/// Below these headings flags are those of other servers, up to the next heading. `tests/migration.rs` checks all of the first
/// two.
const OTHERS: [&str; 3] = [
    "## How other servers size memory",
    "## Coming from another server",
    "## vLLM's own tests",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `README.md` and all of `docs/`, as path and text.
fn documents() -> Vec<(PathBuf, String)> {
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = docs
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .collect();
    assert!(!paths.is_empty(), "docs/ holds documents");
    paths.push(root().join("README.md"));
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Every long flag of a command and of those below it.
fn flags(command: &clap::Command, all: &mut BTreeSet<String>) {
    for argument in command.get_arguments() {
        all.extend(
            argument
                .get_long_and_visible_aliases()
                .into_iter()
                .flatten()
                .map(str::to_owned),
        );
    }
    command.get_subcommands().for_each(|inner| flags(inner, all));
}

/// The flags that a line names, without their dashes.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let starts = line.match_indices("--").map(|(at, _)| at);
    starts.filter_map(|at| {
        let before = line[..at].chars().next_back();
        let rest = &line[at + 2..];
        let end = rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'))
            .unwrap_or(rest.len());
        let is_flag =
            before.is_none_or(|c| " `(=".contains(c)) && rest.starts_with(|c: char| c.is_ascii_lowercase());
        is_flag.then_some(&rest[..end])
    })
}

/// What a document says wrongly.
fn complaints(text: &str, known: &dyn Fn(&[&str]) -> BTreeSet<String>) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut others = false;
    for line in text.lines() {
        if line.starts_with("## ") {
            others = OTHERS.contains(&line);
        }
        if others {
            continue;
        }
        // A command line has the flags of its own subcommand, any other line those of all.
        let words: Vec<_> = line
            .trim_start_matches(['$', ' ', '`'])
            .split_whitespace()
            .collect();
        let subcommands: Vec<_> = match words.as_slice() {
            ["plimsoll", rest @ ..] => rest
                .iter()
                .copied()
                .take_while(|word| word.chars().all(char::is_alphabetic))
                .collect(),
            _ => Vec::new(),
        };
        let known = known(&subcommands);
        let wrong = named(line).filter(|flag| !known.contains(*flag) && !FOREIGN.contains(flag));
        complaints.extend(wrong.map(|flag| format!("there is no --{flag}: {line}")));
    }
    complaints
}

/// The flags of `plimsoll PATH`, as far as the path names subcommands.
fn known(path: &[&str]) -> BTreeSet<String> {
    let mut command = Cli::command();
    for name in path {
        match command.find_subcommand(name) {
            Some(inner) => command = inner.clone(),
            None => break,
        }
    }
    let mut all = BTreeSet::from(["help".to_owned(), "version".to_owned()]);
    flags(&command, &mut all);
    all
}

#[test]
fn every_flag_in_the_documents_exists() {
    for (path, text) in documents() {
        let complaints = complaints(&text, &known);
        assert!(
            complaints.is_empty(),
            "{}:\n{}",
            path.display(),
            complaints.join("\n")
        );
    }
}

#[test]
fn a_flag_that_does_not_exist_is_found() {
    let wrong = "Use `--mem-fraction`, `--no-such-flag=3` or --neither.";
    assert_eq!(complaints(wrong, &known).len(), 2);
    // --url is a flag of another subcommand.
    assert_eq!(
        complaints("plimsoll serve sim --url http://a --port 1", &known).len(),
        1
    );
    assert_eq!(complaints("plimsoll selftest --url http://a", &known).len(), 0);
    assert_eq!(complaints("docker run --rm --gpus all x", &known).len(), 0);
    let others = OTHERS.map(|heading| format!("{heading}\n`--theirs`\n## Ours\n`--theirs`"));
    for text in others {
        assert_eq!(complaints(&text, &known).len(), 1);
    }
    assert_eq!(complaints("| a --- b | c--d | -- |", &known).len(), 0);
}

/// Lines outside blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|line| {
        line.trim_start_matches('#')
            .strip_prefix(' ')
            .filter(|_| line.starts_with('#'))
    });
    let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
    let anchor = |heading: &str| {
        heading
            .to_lowercase()
            .chars()
            .filter(kept)
            .collect::<String>()
            .replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// The targets of a document's links to files of this repository, and to headings.
fn links(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let targets = prose(text).flat_map(|line| {
        let ends = line.match_indices("](").map(|(at, _)| &line[at + 2..]);
        ends.filter_map(|rest| Some(rest.split_once(')')?.0))
    });
    targets
        .filter(|target| !target.starts_with("https://") && !target.starts_with("http://"))
        .map(|target| target.split_once('#').unwrap_or((target, "")))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let more = ["ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| {
        let path = root().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        (path, text)
    });
    let mut checked = 0;
    for (path, text) in documents().into_iter().chain(more) {
        for (file, heading) in links(&text) {
            let target = match file {
                "" => path.clone(),
                _ => path.parent().unwrap().join(file),
            };
            assert!(target.exists(), "{}: there is no {file}", path.display());
            if !heading.is_empty() {
                let there = anchors(&std::fs::read_to_string(&target).unwrap());
                assert!(
                    there.contains(heading),
                    "{}: {file} has no #{heading}",
                    path.display()
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn links_and_headings_are_found() {
    let text = "# The `a_b` of C's\n[x](y.md#z) and [w](#q), [v](https://a.example/#b)\n```\n# no [x](n.md)\n```\n#none\n";
    assert_eq!(anchors(text), BTreeSet::from(["the-a_b-of-cs".to_owned()]));
    assert_eq!(links(text).collect::<Vec<_>>(), [("y.md", "z"), ("", "q")]);
}

/// The exit codes that stand at the beginning of lines.
fn codes<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let lines = lines.map(|line| line.trim_start_matches(['|', ' ']));
    let code = |line: &'a str| match line.starts_with("128 + N") {
        true => Some("128 + N"),
        false => line.split(' ').next().filter(|word| word.parse::<u8>().is_ok()),
    };
    lines.filter_map(code).collect()
}

#[test]
fn the_table_of_exit_codes_is_that_of_the_help() {
    let guide = std::fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let section = guide.split_once("\n## Exit codes\n").unwrap().1;
    let table = codes(section.split("\n## ").next().unwrap().lines());
    let help = Cli::command().render_help().to_string();
    let listed = codes(help.split_once("Exit codes:\n").unwrap().1.lines());
    assert_eq!(table, listed);
    assert!(listed.len() > 10, "{listed:?}");
}

#[test]
fn pictures_are_drawn_from_their_reports() {
    let pictures = [
        (
            "tests/bench/h200/kv-full.json",
            "docs/auto-profile-h200.svg",
            "Llama 3.1 8B's shape on an H200, --mem-fraction 1.0",
        ),
        (
            "tests/bench/cpu/profile.json",
            "docs/auto-profile-cpu.svg",
            "SmolLM2-135M-Instruct (Q4_1) on a CPU, --device-memory 1GiB",
        ),
        (
            "tests/bench/cpu/profile-images.json",
            "docs/auto-profile-images.svg",
            "A model that takes images (random weights) on a CPU, --device-memory 4GiB",
        ),
        (
            "tests/bench/h200/profile-qwen3.5-27b.json",
            "docs/auto-profile-states.svg",
            "Qwen3.5-27B's shape on an H200, --max-model-len 32768 --mem-fraction 1.0",
        ),
    ];
    for (report, picture, title) in pictures {
        let output = Command::new("python3")
            .args(["scripts/draw-report", report, "--title", title])
            .current_dir(root())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let drawn = String::from_utf8(output.stdout).unwrap();
        let stored = std::fs::read_to_string(root().join(picture)).unwrap();
        assert!(
            drawn == stored,
            "{picture} is not that of {report}: scripts/draw-report {report} --title \"{title}\" > {picture}"
        );
    }
}
