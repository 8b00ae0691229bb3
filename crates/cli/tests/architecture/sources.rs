//! Rules about the text of the repository.

use std::fs;
use std::path::Path;

use crate::lexer::{Lexeme, code, lexemes};
use crate::{assert_none, root};

/// One file: path from the root, text.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Longer files are split.
const MAX_LINES: usize = 600;
/// A family of models is a description and no more.
const MAX_FAMILY_LINES: usize = 40;
const FAMILIES: &str = "crates/model/src/arch/";

const UNSAFE_CRATES: [&str; 3] = ["device", "kernels", "model"];
const FEATURE_CRATES: [&str; 1] = ["kernels"];
/// The one reason not to run a test by default.
const NEEDS_GPU: &str = "needs an NVIDIA GPU: make test-gpu";
/// Terms of the field that look like numbers of requirements: caches, element types, a model.
const TERMS: [&str; 7] = ["L1", "L2", "F16", "F32", "F64", "Q8", "R1"];
const METRICS_FILE: &str = "crates/server/src/metrics/catalog.rs";
const SKIPPED: [&str; 11] = [
    "target",
    ".git",
    ".venv",
    ".cache",
    "node_modules",
    ".cuda",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    // Of the fuzzer.
    "corpus",
    "artifacts",
];

pub(crate) fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    walk(&root(), &root(), &mut found);
    assert!(
        found.iter().any(|source| source.path == "crates/core/src/lib.rs"),
        "the walk finds the sources"
    );
    found
}

fn walk(root: &Path, dir: &Path, found: &mut Vec<Source>) {
    for entry in fs::read_dir(dir).expect("directories are readable") {
        let path = entry.expect("entries are readable").path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if SKIPPED.contains(&&*name) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, found);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let path = path
                .strip_prefix(root)
                .expect("below the root")
                .to_string_lossy()
                .into_owned();
            found.push(Source { path, text });
        }
    }
}

/// The crate a Rust file belongs to.
fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?
        .split('/')
        .next()
        .filter(|_| path.ends_with(".rs"))
}

fn is_build_script(path: &str) -> bool {
    path.ends_with("/build.rs")
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.starts_with("tests/")
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
}

fn unsafe_code(sources: &[Source]) -> Vec<String> {
    let outside = |path: &str| crate_of(path).is_some_and(|name| !UNSAFE_CRATES.contains(&name));
    let guilty = sources
        .iter()
        .filter(|s| outside(&s.path) && words(&code(&s.text)).any(|word| word == "unsafe"));
    guilty
        .map(|s| format!("{}: `unsafe` may stand only in {UNSAFE_CRATES:?}", s.path))
        .collect()
}

fn features(sources: &[Source]) -> Vec<String> {
    let outside = |path: &str| crate_of(path).is_some_and(|name| !FEATURE_CRATES.contains(&name));
    let uses = |text: &str| {
        let code: String = code(text).split_whitespace().collect();
        code.contains("feature=\"\"")
    };
    let guilty = sources.iter().filter(|s| outside(&s.path) && uses(&s.text));
    guilty
        .map(|s| format!("{}: `cfg(feature)` may stand only in {FEATURE_CRATES:?}", s.path))
        .collect()
}

/// What a server does is decided in one place. Cargo talks to build scripts through the environment, and people to tests.
fn environment(sources: &[Source]) -> Vec<String> {
    let outside = |path: &str| {
        crate_of(path).is_some_and(|name| name != "cli") && !is_build_script(path) && !is_test(path)
    };
    let reads = |text: &str| {
        let code: String = code(text).split_whitespace().collect();
        ["env::var(", "env::var_os(", "env::vars(", "env::vars_os("]
            .iter()
            .any(|read| code.contains(read))
    };
    let guilty = sources.iter().filter(|s| outside(&s.path) && reads(&s.text));
    guilty
        .map(|s| format!("{}: the environment is read in crates/cli alone", s.path))
        .collect()
}

/// Cargo finds the programs of tests by itself unless a crate lists them: then none may be forgotten.
fn forgotten_tests(sources: &[Source]) -> Vec<String> {
    let text = |path: &str| {
        let source = sources.iter().find(|source| source.path == path);
        source.map_or("", |source| &source.text)
    };
    let is_forgotten = |source: &&Source| {
        let Some((tests, file)) = source.path.split_once("/tests/") else {
            return false;
        };
        let manifest = text(&format!("{tests}/Cargo.toml"));
        let is_named = match file.split_once('/') {
            None if file == "main.rs" => manifest.contains("path = \"tests/main.rs\""),
            None => text(&format!("{tests}/tests/main.rs"))
                .contains(&format!("\nmod {};", file.trim_end_matches(".rs"))),
            Some((_, "main.rs")) => manifest.contains(&format!("path = \"tests/{file}\"")),
            Some(_) => true,
        };
        file.ends_with(".rs") && manifest.contains("\nautotests = false\n") && !is_named
    };
    let guilty = sources.iter().filter(is_forgotten);
    guilty
        .map(|s| {
            format!(
                "{}: neither tests/main.rs nor Cargo.toml names it: it never runs",
                s.path
            )
        })
        .collect()
}

fn metric_names(sources: &[Source]) -> Vec<String> {
    let is_name = |literal: &str| {
        let own = literal
            .strip_prefix("plimsoll_")
            .or_else(|| literal.strip_prefix("plimsoll:"));
        let rest = own.or_else(|| literal.strip_prefix("vllm:"));
        rest.is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let mut complaints = Vec::new();
    for source in sources {
        let outside =
            crate_of(&source.path).is_some() && source.path != METRICS_FILE && !is_test(&source.path);
        for lexeme in lexemes(&source.text).into_iter().filter(|_| outside) {
            if let Lexeme::Literal(literal) = lexeme
                && is_name(literal)
            {
                complaints.push(format!(
                    "{}: metric {literal} belongs into {METRICS_FILE}",
                    source.path
                ));
            }
        }
    }
    complaints
}

fn lengths(sources: &[Source]) -> Vec<String> {
    let is_code = |path: &str| {
        [".rs", ".py", ".sh", ".cu", ".cuh"]
            .iter()
            .any(|end| path.ends_with(end))
    };
    let is_family = |s: &Source| s.path.starts_with(FAMILIES) && s.text.contains("const FAMILY: Family");
    let long = sources.iter().filter(|s| is_code(&s.path)).map(|s| {
        let most = if is_family(s) { MAX_FAMILY_LINES } else { MAX_LINES };
        (s, s.text.lines().count(), most)
    });
    let long = long.filter(|&(_, lines, most)| lines > most);
    long.map(|(s, lines, most)| format!("{}: {lines} lines, more than {most}: split it", s.path))
        .collect()
}

/// Whether Rust code ignores a test for another reason than [`NEEDS_GPU`].
fn ignores(source: &str) -> bool {
    let mut before = String::new();
    for lexeme in lexemes(source) {
        match lexeme {
            Lexeme::Code(code) => before.extend(code.split_whitespace()),
            Lexeme::Literal(reason) => {
                if reason == NEEDS_GPU
                    && let Some(rest) = before.strip_suffix("#[ignore=")
                {
                    before.truncate(rest.len());
                }
                before.push('"');
            }
        }
    }
    before.contains("#[ignore")
}

/// Tests that do not run prove nothing.
fn skipped_tests(sources: &[Source]) -> Vec<String> {
    let skips = |source: &Source| match source.path.rsplit('.').next() {
        Some("rs") => ignores(&source.text),
        Some("py") => {
            source.text.contains(concat!("pytest.mark.", "skip"))
                || source.text.contains(concat!("xfai", "l"))
        }
        _ => false,
    };
    sources
        .iter()
        .filter(|s| skips(s))
        .map(|s| format!("{}: a test that is skipped", s.path))
        .collect()
}

/// What follows `//` or, in Python, `#` on each line. Slashes within strings count too: comments are read by people.
fn comments(source: &Source) -> impl Iterator<Item = &str> {
    let mark = match source.path.rsplit('.').next() {
        Some("rs" | "cu" | "cuh") => Some("//"),
        Some("py") => Some("#"),
        _ => None,
    };
    let lines = source.text.lines().filter_map(move |line| line.split_once(mark?));
    lines.map(|(_, comment)| comment)
}

/// A letter and one or two digits, as the numbers of requirements and issues that lie elsewhere.
fn is_code(word: &str) -> bool {
    let digits = word
        .strip_prefix(|c: char| c.is_ascii_uppercase())
        .unwrap_or_default();
    (1..=2).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
}

/// Comments cite papers and public pull requests.
fn private_codes(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let codes = comments(source)
            .flat_map(words)
            .filter(|word| is_code(word) && !TERMS.contains(word));
        complaints.extend(
            codes.map(|code| format!("{}: a comment cites {code}, which nothing defines", source.path)),
        );
    }
    complaints
}

/// What a test measures is nothing for the user's own servers.
fn user_caches(sources: &[Source]) -> Vec<String> {
    // Written apart so that this file does not break its own rule.
    let binary = concat!("CARGO_BIN_", "EXE_plimsoll");
    let careless = |text: &str| {
        let text = text.to_lowercase().replace('_', "-");
        !text.contains("no-profile-cache")
    };
    let guilty = sources
        .iter()
        .filter(|s| s.text.contains(binary) && careless(&s.text));
    guilty
        .map(|s| format!("{}: starts the binary without --no-profile-cache", s.path))
        .collect()
}

/// Packages come from whatever index the machine is set to, and nothing lies outside the checkout.
fn outside_places(sources: &[Source]) -> Vec<String> {
    // Written apart so that this file does not break its own rule.
    let places = [
        concat!("pypi", ".org"),
        concat!("pythonhosted", ".org"),
        concat!("registry.npmjs", ".org"),
        concat!("index.crates", ".io"),
        concat!("static.crates", ".io"),
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
    ];
    let mut complaints = Vec::new();
    for source in sources.iter().filter(|s| !s.path.ends_with("Cargo.lock")) {
        let named = places.iter().filter(|place| source.text.contains(**place));
        complaints.extend(named.map(|place| format!("{}: names {place}", source.path)));
    }
    complaints
}

#[test]
fn unsafe_stands_only_where_it_must() {
    assert_none(unsafe_code(&sources()));
}

#[test]
fn features_stay_at_the_kernels() {
    assert_none(features(&sources()));
}

#[test]
fn only_the_cli_reads_the_environment() {
    assert_none(environment(&sources()));
}

#[test]
fn metric_names_stand_in_one_file() {
    assert_none(metric_names(&sources()));
}

#[test]
fn files_are_short() {
    assert_none(lengths(&sources()));
}

#[test]
fn no_test_is_skipped() {
    assert_none(skipped_tests(&sources()));
}

#[test]
fn no_test_is_forgotten() {
    assert_none(forgotten_tests(&sources()));
    let source = |(path, text): (&str, &str)| Source {
        path: format!("crates/kv/{path}"),
        text: text.to_owned(),
    };
    let files = [
        (
            "Cargo.toml",
            "\nautotests = false\n[[test]]\npath = \"tests/main.rs\"",
        ),
        ("tests/main.rs", "\nmod a;\nmod ab;"),
        ("tests/a.rs", ""),
        ("tests/b.rs", ""),
        ("tests/c/main.rs", ""),
        ("tests/common/mod.rs", ""),
    ];
    let found = forgotten_tests(&files.map(source)).join(" ");
    let forgotten = files.map(|(path, _)| found.contains(&format!("crates/kv/{path}:")));
    assert_eq!(forgotten, [false, false, false, true, true, false]);
    // Cargo finds them.
    assert_none(forgotten_tests(
        &files[1..].iter().copied().map(source).collect::<Vec<_>>(),
    ));
}

#[test]
fn comments_cite_what_can_be_read() {
    assert_none(private_codes(&sources()));
}

#[test]
fn tests_leave_the_users_caches_alone() {
    assert_none(user_caches(&sources()));
}

#[test]
fn nothing_points_outside() {
    assert_none(outside_places(&sources()));
}

/// A path and a text.
type Example<'a> = (&'a str, &'a str);
type Rule = fn(&[Source]) -> Vec<String>;

/// A rule, the example that breaks it, and two that do not.
#[test]
fn every_rule_can_fail() {
    let long = "\n".repeat(MAX_LINES + 1);
    let host = format!("pip --index https://{}", concat!("pypi", ".org"));
    let gpu_test = format!("#[ignore = {NEEDS_GPU:?}]\nfn f() {{}}");
    let cites = format!("// The size ({}).", concat!("A", "7"));
    let binary = concat!("env!(\"CARGO_BIN_", "EXE_plimsoll\")");
    let careful = format!("{binary}.env(\"PLIMSOLL_NO_PROFILE_CACHE\", \"true\")");
    let mixed = format!("{gpu_test}\n#[ignore]\nfn g() {{}}");
    let cases: [(Rule, &str, &str, [Example<'_>; 2]); 11] = [
        (
            unsafe_code,
            "crates/kv/src/lib.rs",
            "fn f() { unsafe { g() } }",
            [
                ("crates/device/src/lib.rs", "unsafe {}"),
                (
                    "crates/kv/src/a.rs",
                    "// unsafe\nlet x = \"unsafe\"; not_unsafe();",
                ),
            ],
        ),
        (
            features,
            "crates/engine/src/lib.rs",
            "#[cfg(all(test, feature = \"cuda\"))]",
            [
                ("crates/kernels/src/lib.rs", "#[cfg(feature = \"cuda\")]"),
                ("crates/kv/src/a.rs", "#[cfg(test)]"),
            ],
        ),
        (
            environment,
            "crates/model/src/lib.rs",
            "let home = std::env::var(\"HOME\");",
            [
                ("crates/cli/src/lib.rs", "std::env::var(\"HOME\")"),
                (
                    "crates/kv/build.rs",
                    "env!(\"CARGO_PKG_VERSION\"); std::env::var(\"OUT_DIR\")",
                ),
            ],
        ),
        (
            metric_names,
            "crates/engine/src/lib.rs",
            "gauge(\"vllm:num_requests_running\")",
            [
                (METRICS_FILE, "\"plimsoll_steps_total\""),
                ("crates/server/tests/api.rs", "\"vllm:num_requests_running\""),
            ],
        ),
        (
            lengths,
            "crates/kv/src/lib.rs",
            &long,
            [("README.md", &long), ("crates/kv/src/a.rs", "fn f() {}")],
        ),
        (
            skipped_tests,
            "crates/kv/tests/a.rs",
            "#[test]\n#[ignore = \"slow\"]\nfn f() {}",
            [
                ("crates/kv/src/a.rs", "// #[ignore]"),
                ("crates/kv/src/b.rs", &gpu_test),
            ],
        ),
        (
            skipped_tests,
            "crates/kv/tests/a.rs",
            &mixed,
            [
                ("crates/kv/src/a.rs", "#[test]\nfn f() {}"),
                ("crates/kv/src/b.rs", &gpu_test),
            ],
        ),
        (
            skipped_tests,
            "tests/http/test_a.py",
            concat!("@pytest.mark.", "skip\ndef test_a(): pass"),
            [
                ("tests/http/test_b.py", "def test_b(): pass"),
                ("README.md", "skip"),
            ],
        ),
        (
            private_codes,
            "crates/kv/src/lib.rs",
            &cites,
            [
                (
                    "crates/kv/src/a.rs",
                    "// Past the L2 cache, U+FFFD, H200, vllm#123.",
                ),
                ("scripts/a.py", concat!("A", "7 = 1")),
            ],
        ),
        (
            user_caches,
            "crates/cli/tests/a.rs",
            binary,
            [("crates/cli/tests/b.rs", &careful), ("crates/cli/tests/c.rs", "")],
        ),
        (
            outside_places,
            "scripts/fetch",
            &host,
            [("scripts/fetch", "pip download x"), ("Cargo.lock", &host)],
        ),
    ];
    for (rule, path, bad, good) in cases {
        let source = |path: &str, text: &str| {
            [Source {
                path: path.to_owned(),
                text: text.to_owned(),
            }]
        };
        assert_eq!(
            rule(&source(path, bad)).len(),
            1,
            "{path}: {bad:?} must break the rule"
        );
        for (path, text) in good {
            assert_none(rule(&source(path, text)));
        }
    }
}
