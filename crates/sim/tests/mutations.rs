//! Who tests the simulation? Bugs are put by hand into copies of the scheduler and the KV manager, and the simulation must
//! notice each. The crates themselves know nothing of this.
//!
//! All bugs are compiled into one program, each behind a switch (mutant schemata: Untch, Offutt and Harrold 1993).

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

#[path = "mutations/list.rs"]
mod list;

use list::{EQUIVALENT, Edit, MUTATIONS};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn the_simulation_notices_every_bug() {
    let names: Vec<_> = MUTATIONS
        .iter()
        .chain(&EQUIVALENT)
        .map(|mutation| mutation.name)
        .collect();
    let output = run(&build_workspace());
    let verdicts: Vec<_> = output.lines().collect();
    assert_eq!(verdicts.len(), names.len(), "{output}");
    let mut report = String::new();
    for (name, verdict) in names.iter().zip(&verdicts) {
        writeln!(report, "{name}: {verdict}").expect("writing to a string works");
    }
    for (i, verdict) in verdicts.iter().enumerate() {
        assert_eq!(
            *verdict == "unnoticed",
            i >= MUTATIONS.len(),
            "{}\n\n{report}",
            names[i]
        );
    }
}

/// Copies the crates, puts the bugs in, and adds a program that looks for a workload that shows each.
fn build_workspace() -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutants");
    let repository = Path::new(REPOSITORY);
    let crates = repository.join("crates");
    for file in ["Cargo.toml", "Cargo.lock"] {
        write(&root.join(file), &read(&repository.join(file)));
    }
    for name in ["core", "kv", "scheduler"] {
        let from = crates.join(name);
        let to = root.join("crates").join(name);
        let manifest = read(&from.join("Cargo.toml"));
        // Tests and benchmarks stay behind.
        let library = manifest.split("\n[dev-dependencies]").next().unwrap_or(&manifest);
        write(&to.join("Cargo.toml"), library);
        for entry in fs::read_dir(from.join("src")).expect("a crate has sources") {
            let path = entry.expect("sources can be listed").path();
            let file = path
                .file_name()
                .and_then(|name| name.to_str())
                .expect("sources have plain names");
            let mut source = mutate(&read(&path), &format!("{name}/{file}"));
            if (name, file) == ("core", "lib.rs") {
                source.push_str(SWITCH);
            }
            write(&to.join("src").join(file), &source);
        }
    }
    let program = root.join("crates/mutants");
    write(&program.join("Cargo.toml"), MANIFEST);
    let sources = crates.join("sim/src");
    let modules = ["executor", "harness", "model", "workload"].map(|module| {
        format!(
            "#[path = {:?}]\nmod {module};\n",
            sources.join(format!("{module}.rs"))
        )
    });
    let mutants = MUTATIONS.len() + EQUIVALENT.len();
    let main = format!("{}const MUTANTS: usize = {mutants};\n{MAIN}", modules.concat());
    write(&program.join("src/main.rs"), &main);
    root
}

fn run(workspace: &Path) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["run", "--quiet", "--offline", "--package", "mutants"])
        .current_dir(workspace);
    let output = cargo
        .env("CARGO_TARGET_DIR", workspace.join("target"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("verdicts are text")
}

/// Puts all bugs that belong to `file` into `source`.
fn mutate(source: &str, file: &str) -> String {
    let mut edits = Vec::new();
    for (i, mutation) in MUTATIONS.iter().chain(&EQUIVALENT).enumerate() {
        for edit in mutation.edits.iter().filter(|edit| edit.file == file) {
            let (start, end) = locate(source, edit, mutation.name);
            edits.push((start, end, i + 1, edit.bug));
        }
    }
    edits.sort();
    let mut mutated = String::new();
    let mut done = 0;
    for group in edits.chunk_by(|a, b| a.1 > b.0) {
        let (start, end, ..) = group[0];
        assert!(
            group.iter().all(|edit| (edit.0, edit.1) == (start, end)),
            "bugs overlap in {file}: {group:?}"
        );
        mutated.push_str(&source[done..start]);
        let (right, mut switch) = (&source[start..end], String::new());
        for (.., mutant, bug) in group {
            switch += &format!("if ::plimsoll_core::mutant({mutant}) {{ {bug} }} else ");
        }
        switch += &format!("{{ {right} }}");
        // An expression may stand within another, a statement may not stand in parentheses.
        mutated += &if right.ends_with(';') {
            switch
        } else {
            format!("({switch})")
        };
        done = end;
    }
    mutated + &source[done..]
}

/// The marked part of an edit's site, which must stand in the source once.
fn locate(source: &str, edit: &Edit, name: &str) -> (usize, usize) {
    let (before, rest) = edit.site.split_once('«').expect("a site has a marked part");
    let (part, after) = rest.split_once('»').expect("a site has a marked part");
    let site = [before, part, after].concat();
    let found: Vec<_> = source
        .match_indices(&site)
        .map(|(at, _)| at + before.len())
        .collect();
    let &[start] = found.as_slice() else {
        panic!(
            "{name}: {site:?} stands {} times in {}; adapt the mutation",
            found.len(),
            edit.file
        )
    };
    (start, start + part.len())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Leaves what is already so alone, lest it be compiled again.
fn write(path: &Path, content: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == content) {
        return;
    }
    let folder = path.parent().expect("files lie in folders");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, content))
        .expect("the target folder is writable");
}

const SWITCH: &str = "
/// The bug that is on.
pub static MUTANT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Whether this one is.
pub fn mutant(number: usize) -> bool {
    MUTANT.load(std::sync::atomic::Ordering::Relaxed) == number
}
";

const MANIFEST: &str = r#"
[package]
name = "mutants"
version = "0.0.0"
edition = "2024"

[dependencies]
plimsoll-core.workspace = true
plimsoll-kv.workspace = true
plimsoll-scheduler.workspace = true
rand.workspace = true
"#;

const MAIN: &str = r#"
use std::{panic, sync::atomic::Ordering};

const WORKLOADS: u64 = 2_000;

fn main() {
    if let Some(broken) = verdict() {
        panic!("without a bug: {broken}");
    }
    panic::set_hook(Box::new(|_| {}));
    for mutant in 1..=MUTANTS {
        plimsoll_core::MUTANT.store(mutant, Ordering::Relaxed);
        println!("{}", verdict().unwrap_or_else(|| "unnoticed".into()));
    }
}

/// What is broken, first without and then with audits of the bookkeeping.
fn verdict() -> Option<String> {
    [false, true].into_iter().find_map(|audit| (0..WORKLOADS).find_map(|seed| broken(seed, audit)))
}

fn broken(seed: u64, audit: bool) -> Option<String> {
    let workload = workload::Workload::random(seed);
    [1, 2].into_iter().find_map(|depth| {
        let life = panic::catch_unwind(|| harness::simulate(&workload, depth, audit));
        let what = match life {
            Ok(Ok(_)) => return None,
            Ok(Err(what)) => what.replace('\n', " "),
            Err(panic) => match panic.downcast_ref::<String>() {
                Some(message) => format!("panic: {}", message.replace('\n', " ")),
                None => "panic".into(),
            },
        };
        let what: String = what.chars().take(100).collect();
        Some(format!("workload {seed}, depth {depth}{}: {what}", if audit { ", audited" } else { "" }))
    })
}
"#;
