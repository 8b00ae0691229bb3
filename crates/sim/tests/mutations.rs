//! Who tests the simulations? Bugs are put by hand into copies of the scheduler, the KV manager and the profiler, and the
//! simulations must notice each. The crates themselves know nothing of this.
//!
//! All bugs are compiled into one program, each behind a switch (mutant schemata: Untch, Offutt and Harrold 1993).

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

#[path = "mutations/groups.rs"]
mod groups;
#[path = "mutations/images.rs"]
mod images;
#[path = "mutations/list.rs"]
mod list;
#[path = "mutations/profile.rs"]
mod profile;
#[path = "mutations/states.rs"]
mod states;

use groups::GROUP_MUTATIONS;
use images::IMAGE_MUTATIONS;
use list::{EQUIVALENT, Edit, MUTATIONS, Mutation};
use profile::PROFILE_MUTATIONS;
use states::STATE_MUTATIONS;

/// The verdict on a bug that no seed shows.
const UNNOTICED: &str = "unnoticed";

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A program of bugs, and what looks for them.
struct Program {
    name: &'static str,
    /// The crates that it is built from.
    crates: &'static [&'static str],
    /// Modules of the program: files of this crate.
    modules: &'static [&'static str],
    dependencies: &'static str,
    /// The rest of `main.rs`: `broken` says what a seed shows.
    main: &'static str,
    mutations: &'static [&'static [Mutation]],
    equivalent: &'static [Mutation],
}

const SCHEDULING: Program = Program {
    name: "mutants",
    crates: &["core", "kv", "scheduler"],
    modules: &[
        "src/checks.rs",
        "src/client.rs",
        "src/constraint.rs",
        "src/executor.rs",
        "src/harness.rs",
        "src/images.rs",
        "src/model.rs",
        "src/quote.rs",
        "src/router.rs",
        "src/turns.rs",
        "src/workload.rs",
    ],
    dependencies: "",
    main: SCHEDULING_MAIN,
    mutations: &[&MUTATIONS, &GROUP_MUTATIONS, &STATE_MUTATIONS, &IMAGE_MUTATIONS],
    equivalent: &EQUIVALENT,
};

const PROFILE: Program = Program {
    name: "profile-mutants",
    crates: &["core", "kv", "scheduler", "profiler", "sim"],
    modules: &["tests/profile/cases.rs", "tests/profile/check.rs"],
    dependencies: "plimsoll-profiler.workspace = true\nplimsoll-sim.workspace = true\n",
    main: PROFILE_MAIN,
    mutations: &[&PROFILE_MUTATIONS],
    equivalent: &[],
};

#[test]
fn the_simulation_notices_every_bug() {
    SCHEDULING.notices_every_bug();
}

#[test]
fn the_simulation_of_the_profile_notices_every_bug() {
    PROFILE.notices_every_bug();
}

impl Program {
    fn all(&self) -> impl Iterator<Item = &'static Mutation> {
        self.mutations.iter().copied().flatten().chain(self.equivalent)
    }

    fn notices_every_bug(&self) {
        let names: Vec<_> = self.all().map(|mutation| mutation.name).collect();
        let verdicts = run(&self.build_workspace(), self.name);
        let (without, verdicts) = verdicts.split_first().expect("a verdict without a bug");
        assert_eq!(without, UNNOTICED, "without a bug");
        assert_eq!(verdicts.len(), names.len());
        let mut report = String::new();
        for (name, verdict) in names.iter().zip(verdicts) {
            writeln!(report, "{name}: {verdict}").expect("writing to a string works");
        }
        for (i, verdict) in verdicts.iter().enumerate() {
            assert_eq!(
                verdict == UNNOTICED,
                i >= names.len() - self.equivalent.len(),
                "{}\n\n{report}",
                names[i]
            );
        }
    }

    /// Copies the crates, puts the bugs in, and adds a program that looks for a seed that shows each.
    fn build_workspace(&self) -> PathBuf {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(self.name);
        let repository = Path::new(REPOSITORY);
        let crates = repository.join("crates");
        for file in ["Cargo.toml", "Cargo.lock"] {
            write(&root.join(file), &read(&repository.join(file)));
        }
        for name in self.crates {
            let from = crates.join(name);
            let to = root.join("crates").join(name);
            let manifest = read(&from.join("Cargo.toml"));
            // Tests and benchmarks stay behind.
            let library = manifest.split("\n[dev-dependencies]").next().unwrap_or(&manifest);
            write(&to.join("Cargo.toml"), library);
            let sources = from.join("src");
            for path in files(&sources) {
                let file = path.strip_prefix(&sources).expect("it lies there");
                let file = file.to_str().expect("sources have plain names");
                let mut source = self.mutate(&read(&path), &format!("{name}/{file}"));
                if (*name, file) == ("core", "lib.rs") {
                    source.push_str(SWITCH);
                }
                write(&to.join("src").join(file), &source);
            }
        }
        let program = root.join("crates").join(self.name);
        let manifest = MANIFEST.replace("NAME", self.name) + self.dependencies;
        write(&program.join("Cargo.toml"), &manifest);
        let modules = self.modules.iter().map(|file| {
            let path = crates.join("sim").join(file);
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("sources have plain names");
            format!("#[path = {path:?}]\nmod {name};\n")
        });
        let mutants = self.all().count();
        let modules: String = modules.collect();
        let main = format!(
            "{modules}const MUTANTS: usize = {mutants};\nconst UNNOTICED: &str = {UNNOTICED:?};\n{MAIN}{}",
            self.main
        );
        write(&program.join("src/main.rs"), &main);
        root
    }

    /// Puts all bugs that belong to `file` into `source`.
    fn mutate(&self, source: &str, file: &str) -> String {
        let mut edits = Vec::new();
        for (i, mutation) in self.all().enumerate() {
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
}

/// Builds the program and runs one process of it for each core, as a bug is on in a whole process. Returns the verdicts in order.
fn run(workspace: &Path, program: &str) -> Vec<String> {
    let target = workspace.join("target");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "--package", program])
        .current_dir(workspace)
        .env("CARGO_TARGET_DIR", &target)
        .output()
        .expect("cargo runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let count = thread::available_parallelism().map_or(1, usize::from);
    let processes: Vec<_> = (0..count)
        .map(|first| {
            let arguments = [first, count].map(|number| number.to_string());
            let mut process = Command::new(target.join("debug").join(program));
            let process = process.args(arguments).stdout(Stdio::piped());
            process.spawn().expect("the program runs")
        })
        .collect();
    let mut parts: Vec<_> = processes
        .into_iter()
        .map(|process| {
            let output = process.wait_with_output().expect("the program ends");
            assert!(output.status.success(), "{program}: {}", output.status);
            let verdicts = String::from_utf8(output.stdout).expect("verdicts are text");
            verdicts
                .lines()
                .map(str::to_owned)
                .collect::<Vec<_>>()
                .into_iter()
        })
        .collect();
    (0..count).cycle().map_while(|part| parts[part].next()).collect()
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

/// All files below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("sources can be listed").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        })
        .collect()
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
// Bugs in this crate ask for the switch by its name too.
extern crate self as plimsoll_core;

/// The bug that is on.
pub static MUTANT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Whether this one is.
pub fn mutant(number: usize) -> bool {
    MUTANT.load(std::sync::atomic::Ordering::Relaxed) == number
}
";

const MANIFEST: &str = r#"
[package]
name = "NAME"
version = "0.0.0"
edition = "2024"

[dependencies]
plimsoll-core.workspace = true
plimsoll-kv.workspace = true
plimsoll-scheduler.workspace = true
rand.workspace = true
"#;

const MAIN: &str = r#"
use std::{any::Any, env, panic, sync::atomic::Ordering};

/// Judges the bugs `first`, `first + step` and so on; number 0 is none.
fn main() {
    let number = |text: String| text.parse().expect("a number");
    let [first, step]: [usize; 2] = env::args().skip(1).map(number).collect::<Vec<_>>().try_into().expect("two numbers");
    panic::set_hook(Box::new(|_| {}));
    for mutant in (first..=MUTANTS).step_by(step) {
        plimsoll_core::MUTANT.store(mutant, Ordering::Relaxed);
        println!("{}", verdict().unwrap_or_else(|| UNNOTICED.into()));
    }
}

/// What went wrong, in a line.
fn complaint<T>(life: Result<Result<T, String>, Box<dyn Any + Send>>) -> Option<String> {
    let what = match life {
        Ok(Ok(_)) => return None,
        Ok(Err(what)) => what.replace('\n', " "),
        Err(panic) => match panic.downcast_ref::<String>() {
            Some(message) => format!("panic: {}", message.replace('\n', " ")),
            None => "panic".into(),
        },
    };
    Some(what.chars().take(100).collect())
}
"#;

const SCHEDULING_MAIN: &str = r#"
const WORKLOADS: u64 = 2_000;

/// What is broken, first without and then with audits of the bookkeeping.
fn verdict() -> Option<String> {
    [false, true].into_iter().find_map(|audit| (0..WORKLOADS).find_map(|seed| broken(seed, audit)))
}

fn broken(seed: u64, audit: bool) -> Option<String> {
    let workload = workload::Workload::random(seed);
    [1, 2].into_iter().find_map(|depth| {
        let what = complaint(panic::catch_unwind(panic::AssertUnwindSafe(|| harness::simulate(&workload, depth, audit))))?;
        Some(format!("workload {seed}, depth {depth}{}: {what}", if audit { ", audited" } else { "" }))
    })
}
"#;

const PROFILE_MAIN: &str = r#"
const MIB: u64 = 1 << 20;
const SERVERS: u64 = 4_000;

fn verdict() -> Option<String> {
    (0..SERVERS).find_map(|seed| {
        let what = complaint(panic::catch_unwind(|| check::judge(seed)))?;
        Some(format!("server {seed}: {what}"))
    })
}
"#;
