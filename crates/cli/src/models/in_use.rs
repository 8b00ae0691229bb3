//! Which processes of this machine use a model, as far as /proc shows them to this user.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::hub::Removal;

/// Commands that load a model.
const COMMANDS: [&str; 4] = ["serve", "profile", "bench", "chat"];

/// Processes that have a file of it open or mapped, or that serve it.
pub(super) fn by(removal: &Removal) -> Vec<String> {
    let blobs: HashSet<&Path> = removal.blobs.iter().map(PathBuf::as_path).collect();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let processes = entries.flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.path()))
    });
    let others = processes.filter(|(pid, _)| *pid != std::process::id());
    let users = others.filter(|(_, dir)| has_open(dir, &blobs) || serves(dir, removal));
    users
        .map(|(pid, dir)| format!("process {pid} ({})", name(&dir)))
        .collect()
}

fn has_open(process: &Path, blobs: &HashSet<&Path>) -> bool {
    let links = |part: &str| {
        let entries = fs::read_dir(process.join(part)).into_iter().flatten().flatten();
        entries.filter_map(|entry| fs::read_link(entry.path()).ok())
    };
    if links("fd").any(|path| blobs.contains(&*path)) {
        return true;
    }
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    // Address, permissions, offset, device, inode, path.
    let mapped = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    mapped.map(Path::new).any(|path| blobs.contains(path))
}

/// Weights that are loaded need no open file.
fn serves(process: &Path, removal: &Removal) -> bool {
    let program = fs::read_link(process.join("exe")).unwrap_or_default();
    let words = fs::read(process.join("cmdline")).unwrap_or_default();
    let words: Vec<_> = words
        .split(|byte| *byte == 0)
        .map(String::from_utf8_lossy)
        .collect();
    let program = program
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("plimsoll"));
    program && names(&words, removal)
}

/// Whether a command line names that model, in a revision that is to be removed.
fn names<T: AsRef<str>>(words: &[T], removal: &Removal) -> bool {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    if !words.get(1).is_some_and(|command| COMMANDS.contains(command)) {
        return false;
    }
    let is_model = |word: &str| {
        let word = word.strip_prefix("--model=").unwrap_or(word);
        word.split(':').next() == Some(&removal.repo)
    };
    let given = words
        .iter()
        .enumerate()
        .find_map(|(at, word)| match word.strip_prefix("--revision")? {
            "" => words.get(at + 1).copied(),
            rest => rest.strip_prefix('='),
        });
    let revision = given.unwrap_or("main");
    let is_revision = || {
        let known = removal.revisions.iter();
        known.into_iter().any(|known| known == revision)
    };
    words.iter().any(|word| is_model(word)) && is_revision()
}

fn name(process: &Path) -> String {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    name.trim().to_owned()
}
