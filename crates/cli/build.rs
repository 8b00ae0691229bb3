//! Puts the commit into the binary, where there is one.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .args(args)
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Images are built without the repository, and told.
    println!("cargo::rerun-if-env-changed=BUILD_COMMIT");
    let given = std::env::var("BUILD_COMMIT").ok();
    let commit = given.or_else(|| git(&["rev-parse", "HEAD"])).map_or_else(
        || "unknown".to_owned(),
        |commit| commit.chars().take(12).collect(),
    );
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    // Only what moves HEAD: looking at the working tree would rebuild this crate at every change of any file.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name])
            && Path::new(&path).exists()
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
}
