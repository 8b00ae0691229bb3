//! `plimsoll config`: what it prints resolves to itself, it shows no secret, and every key of the examples does something.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{ArgAction, CommandFactory};
use plimsoll_cli::args::Cli;
use plimsoll_cli::layers::{self, Origin, Setting, Value};
use plimsoll_cli::{Error, config};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SECRETS: [&str; 2] = ["api-key", "hf-token"];

fn settings(flags: &[String], environment: &[(String, String)]) -> Result<Vec<Setting>, Error> {
    let words = ["plimsoll", "config"].map(OsString::from);
    let argv = words.into_iter().chain(flags.iter().map(OsString::from));
    let environment = environment.iter().map(|(key, value)| (key.clone(), value.into()));
    layers::settings(argv.collect(), environment.collect())
}

/// Texts of all kinds that flags take.
const TEXTS: [&str; 24] = [
    "1",
    "7",
    "16",
    "0.5",
    "512",
    "3GiB",
    "1.5e2",
    "30s",
    "8m",
    "cpu",
    "fp8",
    "cuda:1",
    "https://a.example",
    "http://localhost:4318/v1/traces",
    r#"{"pooling_type": "LAST"}"#,
    r#"{"is_matryoshka": true}"#,
    r#"{"image": 2}"#,
    r#"{"max_pixels": 4096}"#,
    "info,plimsoll_engine=debug",
    r#"{"enable_kv_cache_events": true}"#,
    "-x",
    "",
    "tcp://*:5557",
    "a \"b\" 'c' \\ é\n[d]\t#",
];

/// A flag of `serve`, and what it takes; a switch takes nothing.
struct Flag {
    name: String,
    switch: bool,
    several: bool,
    values: Vec<String>,
}

fn flags() -> Vec<Flag> {
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let named = serve
        .get_arguments()
        .filter_map(|arg| Some((arg, arg.get_long()?)));
    named
        .filter(|(_, name)| !["help", "config"].contains(name))
        .map(|(arg, name)| {
            let switch = matches!(arg.get_action(), ArgAction::SetTrue);
            let several = matches!(arg.get_action(), ArgAction::Append)
                || arg.get_num_args().is_some_and(|n| n.max_values() > 1);
            let possible = arg.get_possible_values();
            let possible = possible.iter().map(|value| value.get_name().to_owned());
            let all = possible.chain(TEXTS.map(str::to_owned));
            let values: Vec<_> = all
                .filter(|text| settings(&[format!("--{name}={text}")], &[]).is_ok())
                .collect();
            assert!(
                switch || !values.is_empty(),
                "TEXTS holds nothing that --{name} takes"
            );
            Flag {
                name: name.to_owned(),
                switch,
                several,
                values,
            }
        })
        .collect()
}

/// Names and values, but for what a file cannot hold.
fn comparable(settings: &[Setting]) -> Vec<(String, Value)> {
    let kept = settings.iter().filter(|setting| setting.name != "config");
    kept.filter(|setting| setting.value != Value::Secret)
        .map(|setting| (setting.name.clone(), setting.value.clone()))
        .collect()
}

#[test]
fn what_it_prints_resolves_to_the_same() {
    let seed = rand::random();
    let random = &mut StdRng::seed_from_u64(seed);
    let flags = flags();
    let dir = tempfile::tempdir().unwrap();
    let (mut resolved, mut set) = (0, 0);
    for round in 0..30 {
        let mut typed = Vec::new();
        let mut environment = Vec::new();
        let mut file = String::new();
        for flag in &flags {
            let value = flag.values.get(random.random_range(0..flag.values.len().max(1)));
            let value = value.cloned().unwrap_or_default();
            match random.random_range(0..6) {
                0 if flag.switch => typed.push(format!("--{}", flag.name)),
                0 => typed.push(format!("--{}={value}", flag.name)),
                1 => {
                    let variable = format!("PLIMSOLL_{}", flag.name.to_uppercase().replace('-', "_"));
                    let value = if flag.switch {
                        random.random::<bool>().to_string()
                    } else {
                        value
                    };
                    environment.push((variable, value));
                }
                2 if flag.switch => file += &format!("{} = {}\n", flag.name, random.random::<bool>()),
                2 if flag.several => {
                    let value = toml::Value::from(vec![value.clone(), value]);
                    file += &format!("{} = {value}\n", flag.name);
                }
                2 => file += &format!("{} = {}\n", flag.name, toml::Value::from(value)),
                _ => {}
            }
        }
        let source = dir.path().join(format!("{round}.toml"));
        std::fs::write(&source, &file).unwrap();
        typed.push(format!("--config={}", source.display()));
        // Some flags exclude each other.
        let Ok(first) = settings(&typed, &environment) else {
            continue;
        };
        let printed = config::as_toml(&first);
        let again = dir.path().join(format!("{round}-again.toml"));
        std::fs::write(&again, &printed).unwrap();
        let second = settings(&[format!("--config={}", again.display())], &[]);
        let second = second.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{printed}"));
        let is_secret = |setting: &&Setting| SECRETS.contains(&&*setting.name);
        let second: Vec<_> = second
            .into_iter()
            .filter(|setting| {
                let lost = first
                    .iter()
                    .filter(is_secret)
                    .any(|secret| secret.name == setting.name);
                !(lost && setting.value == Value::Unset)
            })
            .collect();
        let first_without: Vec<_> = first
            .iter()
            .filter(|setting| !is_secret(setting))
            .cloned()
            .collect();
        assert_eq!(
            comparable(&first_without),
            comparable(&second),
            "seed {seed}\n{printed}"
        );
        resolved += 1;
        set += first
            .iter()
            .filter(|setting| setting.origin != Origin::Default)
            .count();
    }
    assert!(
        resolved > 3 && set > 10 * resolved,
        "seed {seed}: {resolved} resolved, {set} set"
    );
}

fn plimsoll(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(args)
        .env("PLIMSOLL_HF_TOKEN", "hf_open_sesame")
        .env("PLIMSOLL_NO_PROFILE_CACHE", "1")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_shows_origins_and_no_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plimsoll.toml");
    std::fs::write(&file, "# two\nmax-queue = 3\n").unwrap();
    let file = file.to_str().unwrap();
    let common = [
        "config",
        "sim",
        "--api-key",
        "open-sesame-2",
        "--drain-timeout=8m",
        "--config",
        file,
    ];
    let run = |more: &[&str]| {
        let (code, text, errors) = plimsoll(&[&common, more].concat());
        assert_eq!(code, Some(0), "{errors}");
        assert!(!text.contains("sesame"), "{text}");
        text
    };
    let table = run(&[]);
    let row = |name: &str| {
        let mut rows = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.find(|row| row.first() == Some(&name))
            .unwrap_or_else(|| panic!("{name}:\n{table}"))
    };
    assert_eq!(row("max-queue"), ["max-queue", "3", &format!("{file}:2")]);
    assert_eq!(row("drain-timeout"), ["drain-timeout", "8m", "flag"]);
    assert_eq!(row("hf-token"), ["hf-token", "set", "PLIMSOLL_HF_TOKEN"]);
    assert_eq!(row("port"), ["port", "8000", "default"]);
    assert!(
        row("max-num-seqs").join(" ").contains("(decided at start"),
        "{table}"
    );

    let json: serde_json::Value = serde_json::from_str(&run(&["--json"])).unwrap();
    let settings = &json["settings"];
    assert_eq!(settings["drain-timeout"]["value"], 480.0);
    assert_eq!(
        settings["max-queue"]["from"],
        serde_json::json!({"layer": "file", "file": file, "line": 2})
    );
    assert_eq!(settings["hf-token"]["secret"], "set");
    assert_eq!(settings["max-body-size"]["value"], 32 << 20);
    assert!(settings["max-num-seqs"]["value"].is_null());
    assert!(run(&["--toml"]).contains("\nmax-queue = 3\n"));

    let (code, _, errors) = plimsoll(&["config", "--max-num-seq", "3"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--max-num-seqs"), "{errors}");
    // As serve refuses it.
    let (code, _, errors) = plimsoll(&["config", "--api-key", ""]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--api-key: a key must not be empty"), "{errors}");
}

/// The examples in `config/`.
fn examples() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
    let paths = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut examples: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect();
    examples.sort();
    examples
}

#[test]
fn every_key_of_an_example_changes_what_is_resolved() {
    let names: Vec<_> = examples()
        .iter()
        .map(|path| path.file_stem().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["h200", "laptop", "many-gpus"]);
    let values = |flags: &[String]| -> BTreeMap<String, Value> {
        let settings = settings(flags, &[]).unwrap();
        settings
            .into_iter()
            .map(|setting| (setting.name, setting.value))
            .collect()
    };
    let defaults = values(&[]);
    for example in examples() {
        let text = std::fs::read_to_string(&example).unwrap();
        let keys: toml::Table = text.parse().unwrap();
        assert!(keys.len() > 3, "{}", example.display());
        let with = values(&[format!("--config={}", example.display())]);
        for key in keys.keys() {
            assert_ne!(
                with[key],
                defaults[key],
                "{}: {key} is the default",
                example.display()
            );
        }
    }
}
