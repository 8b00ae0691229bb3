//! Files that are known to have done harm, and what is said of them: exit code 3, the file and the field.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::BINARY;
use crate::files::{GGUF, Model, SAFETENSORS, TOKENIZER};

fn plimsoll(command: &str, model: &Path, flags: &str) -> Output {
    let locks = tempfile::tempdir().unwrap();
    Command::new(BINARY)
        .arg(command)
        .arg(model)
        .args(flags.split_whitespace())
        .args([
            "--device",
            "cpu",
            "--device-memory",
            "256MiB",
            "--threads",
            "1",
            "--no-profile-cache",
        ])
        .arg("--device-lock-dir")
        .arg(locks.path())
        .env_remove("RUST_LOG")
        .output()
        .unwrap()
}

/// `command` refuses it with exit code 3, and says `parts`.
fn refused(command: &str, model: &Path, flags: &str, parts: &[&str]) {
    let output = plimsoll(command, model, flags);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{parts:?}: {said}");
    let last = said.split_once("\nerror: ").map_or(&*said, |(_, last)| last);
    for part in parts {
        assert!(last.contains(part), "no {part:?} in {said}");
    }
    assert!(!said.contains("request 18446744073709551615"), "{said}");
}

fn written(model: &Model) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path());
    directory
}

/// The tiny model with this in place of a field.
fn with(file: &'static str, pointer: &str, value: Value) -> TempDir {
    let mut model = Model::tiny();
    let mut json = model.json(file);
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    json.pointer_mut(parent).unwrap()[field.replace("~1", "/")] = value;
    model.set_json(file, &json);
    written(&model)
}

#[test]
fn what_is_not_disturbed_is_measured() {
    let output = plimsoll("profile", written(&Model::tiny()).path(), "");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn ids_beyond_the_vocabulary_are_refused_before_weights_are_read() {
    for (file, field) in [
        ("config.json", "eos_token_id"),
        ("config.json", "bos_token_id"),
        ("config.json", "pad_token_id"),
        ("generation_config.json", "eos_token_id"),
    ] {
        let model = with(file, &format!("/{field}"), json!(160));
        // What is no weight is not read.
        fs::write(model.path().join(SAFETENSORS), "no weights").unwrap();
        let parts = [file, &format!("`{field}` is 160"), "160 tokens"];
        refused("plan", model.path(), "", &parts);
        refused("profile", model.path(), "", &parts);
    }
    let model = with(TOKENIZER, "/added_tokens/1/id", json!(1_000_000_000));
    refused(
        "profile",
        model.path(),
        "",
        &[TOKENIZER, "added_tokens[1].id", "1000000000"],
    );
    // One that the tokenizer may have, and the model does not.
    let mut model = Model::tiny();
    let mut tokenizer = model.json(TOKENIZER);
    tokenizer["added_tokens"][1]["id"] = json!(200);
    tokenizer["model"]["vocab"]["</s>"] = json!(200);
    model.set_json(TOKENIZER, &tokenizer);
    let parts = [
        TOKENIZER,
        "`eos_token` is `</s>`, token 200",
        "vocabulary of 160 tokens",
    ];
    refused("profile", written(&model).path(), "", &parts);
    // `vocab` has it too, which is right to be elsewhere.
    let model = with(TOKENIZER, "/model/vocab/<~1s>", json!(4_000_000_000_u32));
    refused("profile", model.path(), "", &[TOKENIZER, "model.vocab[\"</s>\"]"]);
}

#[test]
fn a_context_beyond_the_models_is_refused_before_weights_are_read() {
    let model = written(&Model::tiny());
    fs::write(model.path().join(SAFETENSORS), "no weights").unwrap();
    for (command, flags) in [("plan", ""), ("profile", ""), ("serve", "--port 0")] {
        let parts = ["--max-model-len", "at most 256 tokens", "257"];
        refused(
            command,
            model.path(),
            &format!("--max-model-len 257 {flags}"),
            &parts,
        );
    }
}

/// The tiny model with NaN as an element of a tensor, which `name` ends the name of.
fn with_nan(name: &str, elements: usize) -> TempDir {
    let mut model = Model::tiny();
    let bytes = model.files.get_mut(SAFETENSORS).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let header = header.as_object().unwrap();
    let tensor = header
        .iter()
        .find(|(tensor, _)| tensor.ends_with(name))
        .unwrap()
        .1;
    let start = 8 + length + tensor["data_offsets"][0].as_u64().unwrap() as usize;
    for element in bytes[start..].chunks_mut(4).take(elements) {
        element.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    written(&model)
}

#[test]
fn weights_that_are_not_numbers_are_named() {
    let norm = with_nan("model.norm.weight", 1);
    refused("profile", norm.path(), "", &["model.norm.weight", "not a number"]);
    let matrix = with_nan("layers.1.mlp.down_proj.weight", 1000);
    refused("profile", matrix.path(), "", &["weights are damaged"]);
}

#[test]
fn tensors_do_not_overlap() {
    let mut model = Model::gguf();
    let bytes = model.files.get_mut(GGUF).unwrap();
    // The last tensor's place is the last number.
    let end = bytes.len();
    bytes[end - 8..].copy_from_slice(&0_u64.to_le_bytes());
    let model = written(&model);
    refused("plan", &model.path().join(GGUF), "", &[GGUF, "overlap"]);
}

#[test]
fn templates_are_bounded() {
    let template = |source: &str| with("tokenizer_config.json", "/chat_template", json!(source));
    for (source, bound) in [
        (
            "{% set ns = namespace() %}{% set ns.i = ns %}{{ ns.i }}",
            "overflowed the stack",
        ),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "more than 512 MiB of memory",
        ),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 50000000 steps",
        ),
        ("{% if %}", "not valid Jinja"),
    ] {
        let model = template(source);
        refused(
            "profile",
            model.path(),
            "",
            &["chat_template of", "tokenizer_config.json", bound],
        );
    }
}

#[test]
fn a_regular_expression_that_explodes_is_found_at_start() {
    let place = "/pre_tokenizer/pretokenizers/0/pattern/Regex";
    // Exponential, cubic and quadratic.
    for regex in ["(a+)+$", "a*a*a*b", r"(?:.*,)*;"] {
        let model = with(TOKENIZER, place, json!(regex));
        let field = "`pre_tokenizer.pretokenizers[0].pattern.Regex`";
        refused("profile", model.path(), "", &[TOKENIZER, field, "takes too long"]);
    }
}

#[test]
fn what_is_no_model_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    refused("plan", &fifo, "", &["neither a directory nor a file"]);
    let circle = directory.path().join("circle");
    symlink(&circle, &circle).unwrap();
    refused("plan", &circle, "", &["cannot read", "symbolic links"]);
    let model = written(&Model::tiny());
    fs::remove_file(model.path().join("config.json")).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(model.path().join("config.json"))
            .status()
            .unwrap()
            .success()
    );
    refused("plan", model.path(), "", &["config.json"]);
    let model = with("config.json", "/hidden_size", json!("64"));
    refused(
        "plan",
        model.path(),
        "",
        &["`hidden_size`", "expected a whole number"],
    );
}
