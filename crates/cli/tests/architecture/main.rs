//! The rules of ARCHITECTURE.md that a machine can check. Every rule is a function from sources or packages to complaints,
//! and has a self-check: an example that breaks it.

mod cycles;
mod lexer;
mod licences;
mod packages;
mod sources;

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the workspace exists")
}

/// Fails with all complaints at once.
fn assert_none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}
