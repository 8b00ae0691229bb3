//! What the fuzz targets of readers check: any bytes as one file of a model are read, or refused with an error; nothing panics,
//! hangs, or takes more memory than there is. Driven by `main.rs` beside it, and by libFuzzer (`fuzz/`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use plimsoll_device::Budget;
use plimsoll_images::Processor;
use plimsoll_model::{GenerationConfig, GgufFile, HfOverrides, LoadOptions, Model, ModelConfig, ServeAs};
use plimsoll_text::{ChatTemplate, Renderer, Tokenizer};
use tempfile::TempDir;

use crate::files;

fn directory() -> TempDir {
    tempfile::tempdir().expect("there is room for files")
}

/// A directory with `data` as the file `name`.
fn directory_with(name: &str, data: &[u8]) -> (TempDir, PathBuf) {
    let directory = directory();
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
    let (_directory, path) = directory_with("model.gguf", data);
    let Some(file) = told(GgufFile::open(&path)) else {
        return;
    };
    told(file.config(&HfOverrides::default()));
    if let Some(tokenizer) = told(Tokenizer::from_gguf(file.metadata())) {
        use_tokenizer(&tokenizer);
    }
}

pub(crate) fn safetensors(data: &[u8]) {
    let (directory, _path) = directory_with("model.safetensors", data);
    fs::write(directory.path().join("config.json"), &*CONFIG).expect("there is room for a file");
    load(directory.path());
}

fn load(directory: &Path) {
    let budget = Budget::new(64 << 20);
    told(Model::load(
        directory,
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
    let (directory, _path) = directory_with("tokenizer.json", data);
    if let Some(tokenizer) = told(Tokenizer::from_dir(directory.path())) {
        use_tokenizer(&tokenizer);
    }
}

pub(crate) fn tokenizer_config(data: &[u8]) {
    let (directory, _path) = directory_with("tokenizer_config.json", data);
    // Only a text that is no template is compiled here; templates have a target of their own.
    if !data.windows(2).any(|pair| pair == b"{%" || pair == b"{{") {
        told(ChatTemplate::from_dir(directory.path(), &Renderer::in_process()));
    }
}

static SHARDED: LazyLock<files::Model> = LazyLock::new(files::Model::sharded);
static EMBEDDER: LazyLock<files::Model> = LazyLock::new(files::Model::embedder);
static RERANKER: LazyLock<files::Model> = LazyLock::new(files::Model::reranker);

pub(crate) fn shard_index(data: &[u8]) {
    load(with(&SHARDED, files::INDEX, data).path());
}

pub(crate) fn modules(data: &[u8]) {
    configure(&EMBEDDER, files::MODULES, data);
}

pub(crate) fn pooling(data: &[u8]) {
    configure(&EMBEDDER, files::POOLING, data);
}

pub(crate) fn logit_score(data: &[u8]) {
    configure(&RERANKER, files::LOGIT_SCORE, data);
}

pub(crate) fn sentence_bert(data: &[u8]) {
    configure(&EMBEDDER, files::BERT, data);
    configure(&RERANKER, files::BERT, data);
}

pub(crate) fn sentence_transformers(data: &[u8]) {
    configure(&RERANKER, files::SENTENCE_TRANSFORMERS, data);
}

/// A directory with the model's files, but for `data` as the file `name`.
fn with(model: &files::Model, name: &'static str, data: &[u8]) -> TempDir {
    let directory = directory();
    let mut model = model.clone();
    model.files.insert(name, data.to_vec());
    model.write(directory.path());
    directory
}

/// Reads a model's configuration, with `data` as one of the files beside config.json that say what the model is served for.
fn configure(model: &files::Model, name: &'static str, data: &[u8]) {
    let directory = with(model, name, data);
    told(ModelConfig::read(directory.path(), &ServeAs::default()));
}

/// `data` as the settings of an image processor, beside each family's config.json.
pub(crate) fn image_processor(data: &[u8]) {
    let Ok(settings) = serde_json::from_slice(data) else {
        return;
    };
    for family in PROCESSORS.as_object().expect("families by name").values() {
        told(Processor::new(&settings, &family["config"]));
    }
}

/// Settings of each family's image processor, and its config.json.
pub(crate) static PROCESSORS: LazyLock<serde_json::Value> = LazyLock::new(|| {
    let golden: serde_json::Value =
        serde_json::from_slice(&files::golden_file("images", "processors.json")).expect("it is JSON");
    golden["processors"].clone()
});

fn use_tokenizer(tokenizer: &Tokenizer) {
    if let Some(tokens) = told(tokenizer.encode("Hello <s>é 123", true)) {
        tokenizer.decode(&tokens, false);
    }
}
