//! What the fuzz targets of readers check: any bytes as one file of a model are read, or refused with an error; nothing panics,
//! hangs, or takes more memory than there is. Driven by `main.rs` beside it, and by libFuzzer (`fuzz/`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use plimsoll_device::Budget;
use plimsoll_model::{GenerationConfig, GgufFile, HfOverrides, LoadOptions, Model, ModelConfig};
use plimsoll_text::{ChatTemplate, Renderer, Tokenizer};
use tempfile::TempDir;

use crate::files;

/// A directory with `data` as the file `name`.
fn directory(name: &str, data: &[u8]) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("there is room for files");
    let path = directory.path().join(name);
    fs::write(&path, data).expect("there is room for a file");
    (directory, path)
}

/// An error says something.
fn told<T, E: std::fmt::Display>(result: Result<T, E>) -> Option<T> {
    result
        .map_err(|error| assert!(!error.to_string().is_empty()))
        .ok()
}

pub(crate) fn gguf(data: &[u8]) {
    let (_directory, path) = directory("model.gguf", data);
    let Some(file) = told(GgufFile::open(&path)) else {
        return;
    };
    told(file.config(&HfOverrides::default()));
    if let Some(tokenizer) = told(Tokenizer::from_gguf(file.metadata())) {
        use_tokenizer(&tokenizer);
    }
}

pub(crate) fn safetensors(data: &[u8]) {
    let (directory, _path) = directory("model.safetensors", data);
    fs::write(directory.path().join("config.json"), &*CONFIG).expect("there is room for a file");
    let budget = Budget::new(64 << 20);
    told(Model::load(
        directory.path(),
        LoadOptions::default(),
        &budget,
        &mut |_| (),
    ));
}

static CONFIG: LazyLock<Vec<u8>> = LazyLock::new(|| files::Model::tiny().files["config.json"].clone());

pub(crate) fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    told(ModelConfig::from_json(
        Path::new("config.json"),
        &text,
        &HfOverrides::default(),
    ));
}

pub(crate) fn generation_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    told(GenerationConfig::from_json(
        Path::new("generation_config.json"),
        &text,
    ));
}

pub(crate) fn tokenizer(data: &[u8]) {
    let (directory, _path) = directory("tokenizer.json", data);
    if let Some(tokenizer) = told(Tokenizer::from_dir(directory.path())) {
        use_tokenizer(&tokenizer);
    }
}

pub(crate) fn tokenizer_config(data: &[u8]) {
    let (directory, _path) = directory("tokenizer_config.json", data);
    // Only a text that is no template is compiled here; templates have a target of their own.
    if !data.windows(2).any(|pair| pair == b"{%" || pair == b"{{") {
        told(ChatTemplate::from_dir(directory.path(), &Renderer::in_process()));
    }
}

fn use_tokenizer(tokenizer: &Tokenizer) {
    if let Some(tokens) = told(tokenizer.encode("Hello <s>é 123", true)) {
        tokenizer.decode(&tokens, false);
    }
}
