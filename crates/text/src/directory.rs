//! Tokenizers of Hugging Face model directories.

use std::path::Path;

use plimsoll_core::TokenId;
use plimsoll_core::untrusted::quotable;
use plimsoll_core::untrusted::{self, MAX_SETTINGS_BYTES};
use serde_json::{Map, Value};

use crate::pipeline::{self, Pipeline};
use crate::tokenizer::{Parts, SpecialTokens, Tokenizer, Wrap};
use crate::vocab::{self, Vocab};
use crate::{TextError, limits};

/// The JSON file `name` of a model directory, if it is there.
pub(crate) fn read_json(dir: &Path, name: &str) -> Result<Option<Value>, TextError> {
    let path = dir.join(name);
    let bytes = untrusted::if_there(untrusted::read_file(&path, MAX_SETTINGS_BYTES));
    let bytes = bytes.map_err(TextError::read(&path))?;
    let parse = |bytes: Vec<u8>| serde_json::from_slice(&bytes);
    let value = bytes.map(parse).transpose();
    value.map_err(|e| TextError::invalid(path.display().to_string(), format!("not valid JSON: {e}")))
}

/// What a model directory says about its tokenizer: `tokenizer_config.json`, special tokens as their texts, without names of files.
/// Empty if there is no such file.
///
/// # Errors
/// [`TextError`] if it is no JSON.
pub fn tokenizer_config(dir: &Path) -> Result<Map<String, Value>, TextError> {
    let Some(Value::Object(mut config)) = read_json(dir, "tokenizer_config.json")? else {
        return Ok(Map::new());
    };
    config.retain(|key, _| !matches!(key.as_str(), "vocab_file" | "merges_file" | "name_or_path"));
    config.values_mut().for_each(name_tokens);
    Ok(config)
}

/// Replaces serialised `AddedToken`s by their texts.
fn name_tokens(value: &mut Value) {
    match value {
        Value::Object(fields) if fields.contains_key("content") => {
            *value = fields.remove("content").unwrap_or_default();
        }
        Value::Object(fields) => fields.values_mut().for_each(name_tokens),
        Value::Array(values) => values.iter_mut().for_each(name_tokens),
        _ => {}
    }
}

/// Special tokens by role, from `tokenizer_config.json` and, where that is silent, `special_tokens_map.json`.
pub(crate) fn special_tokens(dir: &Path) -> Result<SpecialTokens, TextError> {
    let mut tokens = SpecialTokens::new();
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let Some(Value::Object(fields)) = read_json(dir, file)? else {
            continue;
        };
        for (role, value) in fields.iter().filter(|(role, _)| role.ends_with("_token")) {
            // Either the text itself or a serialised `AddedToken`.
            if let Some(text) = value.as_str().or_else(|| value.get("content")?.as_str()) {
                tokens.entry(role.clone()).or_insert_with(|| text.to_owned());
            }
        }
    }
    Ok(tokens)
}

impl Tokenizer {
    /// From a model directory: `tokenizer.json`, with what `tokenizer_config.json`, `special_tokens_map.json` and
    /// `generation_config.json` say about special tokens.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        load(dir).map(Self::new)
    }
}

fn load(dir: &Path) -> Result<Parts, TextError> {
    let path = dir.join("tokenizer.json");
    let place = path.display().to_string();
    if !path.exists() {
        let problem = "missing; other formats (tokenizer.model, vocab.json) are not read: convert with transformers' \
                       AutoTokenizer.from_pretrained(..).save_pretrained(..)";
        return Err(TextError::invalid(place, problem));
    }
    let json = untrusted::read_file(&path, limits::MAX_TOKENIZER_BYTES).map_err(TextError::read(&path))?;
    let spec: Value = serde_json::from_slice(&json)
        .map_err(|error| TextError::invalid(&place, format!("not valid JSON: {error}")))?;
    limits::check(&spec, &place)?;
    let mut inner = pipeline::guarded(|| pipeline::Inner::from_bytes(&json))
        .map_err(|problem| TextError::invalid(&place, problem))?;
    drop(json);
    // The engine checks limits; a tokenizer would truncate or pad silently.
    inner.with_padding(None);
    inner
        .with_truncation(None)
        .map_err(|e| TextError::invalid(&place, e.to_string()))?;

    let vocab = read_vocab(&inner, &Decoder::from_json(&spec["decoder"], &place)?);
    let special_tokens = special_tokens(dir)?;
    let id_of = |role: &str| special_tokens.get(role).and_then(|text| inner.token_to_id(text));
    let (bos, eos_token) = (id_of("bos_token"), id_of("eos_token"));

    let config = read_json(dir, "tokenizer_config.json")?.unwrap_or_default();
    let flag = |name: &str| config.get(name).and_then(Value::as_bool);
    // Explicit flags of `tokenizer_config.json` override the post-processor of `tokenizer.json`.
    let wrap = match (flag("add_bos_token"), flag("add_eos_token")) {
        (None, None) => Wrap::Encoder,
        (add_bos, add_eos) => Wrap::Explicit {
            bos: bos.filter(|_| add_bos == Some(true)),
            eos: eos_token.filter(|_| add_eos == Some(true)),
        },
    };
    let mut eos: Vec<_> = eos_token.into_iter().collect();
    let generation = read_json(dir, "generation_config.json")?.unwrap_or_default();
    for id in token_ids(&generation["eos_token_id"]) {
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    let pipeline = Pipeline::new(inner);
    pipeline
        .try_out()
        .map_err(|error| TextError::invalid(&place, error.to_string()))?;
    Ok(Parts {
        encoder: Box::new(pipeline),
        wrap,
        shrinks: shrinks(&spec),
        vocab,
        special_tokens,
        bos,
        eos,
    })
}

/// One id or a list of them.
fn token_ids(value: &Value) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    value.as_array().map_or_else(
        || one(value).into_iter().collect(),
        |ids| ids.iter().filter_map(one).collect(),
    )
}

/// By which factor normalisation of a `tokenizer.json` may at most shorten a text; `None` if it may drop any part of it, or
/// if that is unknown.
fn shrinks(spec: &Value) -> Option<usize> {
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    let added = spec["added_tokens"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let keeps =
        spec["model"]["type"] == "BPE" && !added.iter().any(strips) && keeps_all(&spec["pre_tokenizer"]);
    keeps.then(|| shrinks_by(&spec["normalizer"])).flatten()
}

/// True if a `pre_tokenizer` only splits.
fn keeps_all(step: &Value) -> bool {
    match step["type"].as_str() {
        None => step.is_null(),
        Some("Sequence") => step["pretokenizers"]
            .as_array()
            .is_some_and(|steps| steps.iter().all(keeps_all)),
        Some("Split" | "Punctuation") => step["behavior"] != "Removed",
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some(_) => false,
    }
}

/// By how much a `normalizer` shortens a text at most.
fn shrinks_by(step: &Value) -> Option<usize> {
    match step["type"].as_str() {
        None => step.is_null().then_some(1),
        Some("Sequence") => step["normalizers"].as_array()?.iter().map(shrinks_by).product(),
        // U+1FBE U+0308 U+0301 is the worst: 7 bytes become the 2 of U+0390.
        Some("NFC") => Some(4),
        Some("Prepend") => Some(1),
        Some("Replace") => (step["pattern"]["String"] == " " && step["content"] == "▁").then_some(1),
        Some(_) => None,
    }
}

/// The `decoder` of a `tokenizer.json`, as far as language models use it.
#[derive(Debug, Default, PartialEq)]
struct Decoder {
    byte_level: bool,
    byte_fallback: bool,
    /// `▁` is a space.
    metaspace: bool,
    /// Continuations of a word carry this prefix, every other token begins a word.
    word_piece: Option<String>,
    strip_leading_space: bool,
}

impl Decoder {
    fn from_json(spec: &Value, place: &str) -> Result<Self, TextError> {
        let mut decoder = Self::default();
        decoder.add(spec, place)?;
        Ok(decoder)
    }

    fn add(&mut self, spec: &Value, place: &str) -> Result<(), TextError> {
        let Some(kind) = spec["type"].as_str() else {
            return Ok(());
        };
        match kind {
            "Sequence" => {
                let steps = spec["decoders"].as_array().map(Vec::as_slice).unwrap_or_default();
                return steps.iter().try_for_each(|step| self.add(step, place));
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Metaspace" if spec["replacement"] == "▁" => {
                self.metaspace = true;
                let legacy = spec["add_prefix_space"].as_bool().unwrap_or(true);
                self.strip_leading_space = spec["prepend_scheme"]
                    .as_str()
                    .map_or(legacy, |scheme| scheme != "never");
            }
            "Replace" if spec["pattern"]["String"] == "▁" && spec["content"] == " " => {
                self.metaspace = true
            }
            "Strip" if spec["content"] == " " && spec["start"] == 1 && spec["stop"] == 0 => {
                self.strip_leading_space = true
            }
            "WordPiece" => {
                self.word_piece = Some(spec["prefix"].as_str().unwrap_or("##").to_owned());
                self.strip_leading_space = true;
            }
            _ => {
                let supported = "ByteLevel, Metaspace, WordPiece, and sequences of Replace(▁), ByteFallback, Fuse and \
                                 Strip(one leading space)";
                return Err(TextError::Unsupported {
                    place: place.to_owned(),
                    what: "decoder",
                    found: quotable(&spec.to_string()),
                    supported: supported.to_owned(),
                });
            }
        }
        Ok(())
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        if self.byte_level {
            return vocab::byte_level(token);
        }
        if let Some(byte) = self.byte_fallback.then(|| vocab::byte_fallback(token)).flatten() {
            return vec![byte];
        }
        match &self.word_piece {
            Some(prefix) => token
                .strip_prefix(prefix)
                .map_or_else(|| format!(" {token}"), str::to_owned)
                .into_bytes(),
            None if self.metaspace => vocab::sentencepiece(token),
            None => token.into(),
        }
    }
}

fn read_vocab(inner: &pipeline::Inner, decoder: &Decoder) -> Vocab {
    let added = inner.get_added_tokens_decoder();
    let largest = inner.get_vocab(true).into_values().max();
    let mut vocab = Vocab::new(decoder.strip_leading_space);
    for id in 0..largest.map_or(0, |id| id + 1) {
        match (added.get(&id), inner.id_to_token(id)) {
            // Added tokens are text as it stands, whatever alphabet the model's own tokens are written in.
            (Some(token), _) => vocab.push(token.content.as_bytes(), token.special),
            (None, Some(token)) => vocab.push(&decoder.bytes(&token), false),
            (None, None) => vocab.push(&[], false),
        }
    }
    vocab
}
