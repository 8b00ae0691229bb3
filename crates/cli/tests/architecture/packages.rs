//! Rules about who depends on whom.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::{assert_none, root};

/// What each crate of ours may use of the others. Arrows point one way, from the vocabulary to the binary.
const MAY_USE: [(&str, &[&str]); 14] = [
    ("core", &[]),
    ("kv", &["core"]),
    ("kv-events", &["core"]),
    ("scheduler", &["core", "kv"]),
    ("profiler", &["core"]),
    ("sim", &["core", "kv", "scheduler", "profiler"]),
    ("device", &["core"]),
    ("kernels", &["core", "device"]),
    ("model", &["core", "device", "kernels"]),
    ("text", &["core"]),
    ("images", &["core"]),
    ("engine", &["core", "kv", "scheduler", "profiler"]),
    (
        "server",
        &["core", "profiler", "scheduler", "engine", "text", "images"],
    ),
    (
        "cli",
        &[
            "core",
            "kv",
            "scheduler",
            "profiler",
            "sim",
            "device",
            "kernels",
            "model",
            "text",
            "images",
            "engine",
            "kv-events",
            "server",
        ],
    ),
];

const CUDARC_CRATES: [&str; 2] = ["plimsoll-device", "plimsoll-kernels"];

/// Package name -> names of what it needs to be built, dev-dependencies left out.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// `cargo metadata` of the workspace with all dependencies on this platform.
pub(crate) fn metadata() -> &'static Value {
    static METADATA: OnceLock<Value> = OnceLock::new();
    METADATA.get_or_init(|| {
        let rustc = Command::new("rustc").arg("-vV").output().expect("rustc runs");
        let rustc = String::from_utf8(rustc.stdout).expect("rustc prints text");
        let host = rustc
            .lines()
            .find_map(|line| line.strip_prefix("host: "))
            .expect("rustc names its host");
        // What other platforms need was never downloaded here.
        let output = Command::new(env!("CARGO"))
            .args([
                "metadata",
                "--format-version=1",
                "--locked",
                "--filter-platform",
                host,
            ])
            .current_dir(root())
            .output()
            .expect("cargo runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
    })
}

fn members() -> Graph {
    let packages = metadata()["packages"].as_array().expect("packages");
    let ours = packages.iter().filter(|package| package["source"].is_null());
    let graph: Graph = ours
        .map(|package| {
            let dependencies = package["dependencies"].as_array().expect("dependencies").iter();
            let needed = dependencies
                .filter(|d| d["kind"] != "dev")
                .filter_map(|d| d["name"].as_str());
            (
                package["name"].as_str().expect("a name").to_owned(),
                needed.map(str::to_owned).collect(),
            )
        })
        .collect();
    assert!(graph.contains_key("plimsoll-core"), "cargo lists the workspace");
    graph
}

fn direction(graph: &Graph) -> Vec<String> {
    let mut complaints = Vec::new();
    for (package, needed) in graph {
        let Some((_, allowed)) = MAY_USE
            .iter()
            .find(|(name, _)| package.strip_prefix("plimsoll-") == Some(name))
        else {
            complaints.push(format!(
                "{package} has no place in the order of crates: give it one in {}",
                file!()
            ));
            continue;
        };
        let used = needed.iter().filter_map(|name| name.strip_prefix("plimsoll-"));
        let wrong = used.filter(|name| !allowed.contains(name));
        complaints.extend(wrong.map(|name| format!("{package} must not depend on plimsoll-{name}")));
    }
    complaints
}

/// Complaints about crates of ours, other than `allowed`, that need a package whose name begins with `what`.
fn confined(graph: &Graph, what: &str, allowed: &[&str]) -> Vec<String> {
    let outside = graph
        .iter()
        .filter(|(package, _)| !allowed.contains(&package.as_str()));
    let guilty = outside.filter(|(_, needed)| needed.iter().any(|name| name.starts_with(what)));
    guilty
        .map(|(package, _)| format!("{package} must not see {what}"))
        .collect()
}

fn candle(graph: &Graph) -> Vec<String> {
    confined(graph, "candle", &[])
}

fn cudarc(graph: &Graph) -> Vec<String> {
    confined(graph, "cudarc", &CUDARC_CRATES)
}

fn vocabulary(graph: &Graph) -> Vec<String> {
    let extra = graph["plimsoll-core"].iter().filter(|name| *name != "thiserror");
    extra
        .map(|name| format!("plimsoll-core depends on thiserror alone, not on {name}"))
        .collect()
}

#[test]
fn crates_depend_one_way() {
    assert_none(direction(&members()));
}

#[test]
fn candle_is_an_oracle_of_tests_alone() {
    assert_none(candle(&members()));
}

#[test]
fn the_driver_stays_behind_two_crates() {
    assert_none(cudarc(&members()));
}

#[test]
fn the_vocabulary_depends_on_nothing() {
    assert_none(vocabulary(&members()));
}

#[test]
fn every_rule_can_fail() {
    let graph = |package: &str, needed: &str| {
        Graph::from([(package.to_owned(), BTreeSet::from([needed.to_owned()]))])
    };
    assert_eq!(direction(&graph("plimsoll-kv", "plimsoll-engine")).len(), 1);
    assert_eq!(direction(&graph("plimsoll-new", "serde")).len(), 1);
    assert_none(direction(&graph("plimsoll-scheduler", "plimsoll-kv")));
    assert_eq!(candle(&graph("plimsoll-model", "candle-core")).len(), 1);
    assert_eq!(cudarc(&graph("plimsoll-model", "cudarc")).len(), 1);
    assert_none(cudarc(&graph("plimsoll-kernels", "cudarc")));
    assert_eq!(vocabulary(&graph("plimsoll-core", "serde")).len(), 1);
    assert_none(vocabulary(&graph("plimsoll-core", "thiserror")));
}
