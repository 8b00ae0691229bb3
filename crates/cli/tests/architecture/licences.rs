//! Licences, sources and bans of all dependencies: what `cargo deny` checks offline, from the same deny.toml.

use std::sync::LazyLock;

use serde_json::Value;

use crate::packages::metadata;
use crate::{assert_none, root};

/// What a rule looks at of one package.
struct Package<'a> {
    name: &'a str,
    licence: Option<&'a str>,
    source: Option<&'a str>,
}

/// The libraries of the web pages.
static VENDORED: LazyLock<Value> = LazyLock::new(|| {
    let path = root().join("crates/server/src/pages/vendor/packages.json");
    let text = std::fs::read_to_string(path).expect("packages.json exists");
    serde_json::from_str(&text).expect("packages.json is JSON")
});

fn packages() -> Vec<Package<'static>> {
    let crates = metadata()["packages"].as_array().expect("packages");
    let vendored = VENDORED.as_array().expect("packages");
    let package = |p: &'static Value| Package {
        name: p["name"].as_str().expect("a name"),
        licence: p["license"].as_str(),
        source: p["source"].as_str(),
    };
    crates.iter().chain(vendored).map(package).collect()
}

fn deny() -> toml::Table {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml exists");
    text.parse().expect("deny.toml is TOML")
}

fn strings<'a>(table: &'a toml::Table, section: &str, key: &str) -> Vec<&'a str> {
    let list = table[section][key].as_array().expect("a list");
    list.iter()
        .map(|item| item.as_str().or_else(|| item["crate"].as_str()).expect("a name"))
        .collect()
}

fn licences(packages: &[Package<'_>], allowed: &[&str]) -> Vec<String> {
    let wrong = packages
        .iter()
        .filter(|p| !p.licence.is_some_and(|text| satisfied(text, allowed)));
    wrong
        .map(|p| format!("{}: licence {:?} is not allowed by deny.toml", p.name, p.licence))
        .collect()
}

/// Dependencies come from the registry, never from a branch somewhere; ours from the checkout.
fn origins(packages: &[Package<'_>]) -> Vec<String> {
    let wrong = packages
        .iter()
        .filter(|p| p.source.is_some_and(|source| !source.starts_with("registry+")));
    wrong
        .map(|p| format!("{}: comes from {:?}", p.name, p.source))
        .collect()
}

fn bans(packages: &[Package<'_>], banned: &[&str]) -> Vec<String> {
    packages
        .iter()
        .filter(|p| banned.contains(&p.name))
        .map(|p| format!("{} is banned by deny.toml", p.name))
        .collect()
}

/// Whether an SPDX expression can be fulfilled with the allowed licences; `/` is an old spelling of OR.
fn satisfied(expression: &str, allowed: &[&str]) -> bool {
    let expression = spdx::Expression::parse_mode(expression, spdx::ParseMode::LAX);
    expression.is_ok_and(|expression| expression.evaluate(|term| allowed.contains(&&*term.to_string())))
}

#[test]
fn licences_are_allowed() {
    let deny = deny();
    assert_none(licences(&packages(), &strings(&deny, "licenses", "allow")));
}

#[test]
fn dependencies_come_from_the_registry() {
    assert_none(origins(&packages()));
}

#[test]
fn nothing_banned_is_built() {
    assert_none(bans(&packages(), &strings(&deny(), "bans", "deny")));
}

#[test]
fn every_rule_can_fail() {
    let package = |licence, source| {
        [Package {
            name: "x",
            licence,
            source,
        }]
    };
    assert_eq!(licences(&package(Some("GPL-3.0"), None), &["MIT"]).len(), 1);
    assert_eq!(licences(&package(None, None), &["MIT"]).len(), 1);
    assert_eq!(
        licences(&package(Some("MIT AND GPL-3.0"), None), &["MIT"]).len(),
        1
    );
    assert_none(licences(&package(Some("MIT/Zlib"), None), &["MIT"]));
    assert_none(licences(&package(Some("GPL-3.0 OR MIT"), None), &["MIT"]));
    assert_eq!(
        origins(&package(None, Some("git+https://example.org/x"))).len(),
        1
    );
    assert_none(origins(&package(None, Some("registry+x"))));
    assert_eq!(bans(&package(None, None), &["x"]).len(), 1);
}
