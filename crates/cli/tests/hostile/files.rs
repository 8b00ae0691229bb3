//! The models that are disturbed: tiny ones of safetensors, and the default model's GGUF file with a smaller vocabulary.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Files by name, and how long each is made with zeros at its end.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) files: BTreeMap<&'static str, Vec<u8>>,
    /// Length of the GGUF file, which holds nothing but its header.
    length: u64,
}

pub(crate) const GGUF: &str = "model.gguf";
pub(crate) const SAFETENSORS: &str = "model.safetensors";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 3] = [
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
];
pub(crate) const MODULES: &str = "modules.json";
pub(crate) const POOLING: &str = "1_Pooling/config.json";
pub(crate) const LOGIT_SCORE: &str = "1_LogitScore/config.json";
pub(crate) const BERT: &str = "sentence_bert_config.json";
pub(crate) const SENTENCE_TRANSFORMERS: &str = "config_sentence_transformers.json";

pub(crate) const TEMPLATE: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}\
    {% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}";

/// The repository, from a crate at any depth.
fn root() -> &'static Path {
    let mut parents = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    parents
        .find(|parent| parent.join(GOLDEN).exists())
        .expect("the repository has golden models")
}

const GOLDEN: &str = "tests/golden";

/// A file of one of the golden models.
pub(crate) fn golden_file(model: &str, name: &str) -> Vec<u8> {
    let path = root().join(GOLDEN).join(model).join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Model {
    /// A Llama of two layers and 160 tokens.
    pub(crate) fn tiny() -> Self {
        Self::golden("llama", &["config.json", "generation_config.json", SAFETENSORS])
    }

    /// A model whose weights are in three files with an index.
    pub(crate) fn sharded() -> Self {
        Self::golden(
            "qwen3-sharded",
            &["config.json", INDEX, SHARDS[0], SHARDS[1], SHARDS[2]],
        )
    }

    /// A model that serves embeddings.
    pub(crate) fn embedder() -> Self {
        let files = ["config.json", MODULES, POOLING, SAFETENSORS];
        let mut model = Self::golden("qwen3-embedding", &files);
        model.set_json(BERT, &json!({"max_seq_length": 64, "do_lower_case": false}));
        model
    }

    /// A model that scores pairs of texts.
    pub(crate) fn reranker() -> Self {
        let files = [
            "config.json",
            MODULES,
            LOGIT_SCORE,
            BERT,
            SENTENCE_TRANSFORMERS,
            SAFETENSORS,
        ];
        Self::golden("qwen3-reranker", &files)
    }

    /// These files of a golden model, with a tokenizer and a chat template.
    fn golden(model: &str, names: &[&'static str]) -> Self {
        let json = |value: &Value| serde_json::to_vec_pretty(value).unwrap();
        let texts = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE});
        let mut files: BTreeMap<_, _> = names
            .iter()
            .map(|&name| (name, golden_file(model, name)))
            .collect();
        files.insert(TOKENIZER, json(&tokenizer()));
        files.insert("tokenizer_config.json", json(&texts));
        Self { files, length: 0 }
    }

    pub(crate) fn gguf() -> Self {
        let path = root().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
        let whole = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self {
            files: [(GGUF, cut_down(&whole))].into(),
            length: whole.len() as u64,
        }
    }

    /// The model's path, where it lies in `directory`.
    pub(crate) fn path(&self, directory: &Path) -> PathBuf {
        match self.length {
            0 => directory.to_owned(),
            _ => directory.join(GGUF),
        }
    }

    pub(crate) fn write(&self, directory: &Path) {
        for (name, bytes) in &self.files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, bytes).unwrap();
            if *name == GGUF {
                let file = fs::OpenOptions::new().write(true).open(path).unwrap();
                file.set_len(self.length.max(bytes.len() as u64)).unwrap();
            }
        }
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.files[name]).unwrap()
    }

    pub(crate) fn set_json(&mut self, name: &'static str, value: &Value) {
        self.files.insert(name, serde_json::to_vec(value).unwrap());
    }
}

/// Bytes as printable characters, with two merges.
fn tokenizer() -> Value {
    let mut vocab = serde_json::Map::new();
    let letters = ('!'..='~').chain(['Ġ', 'Ċ', 'Ã', '©']);
    for text in ["<s>", "</s>"]
        .map(str::to_owned)
        .into_iter()
        .chain(letters.map(String::from))
    {
        vocab.insert(text, json!(vocab.len() + 1));
    }
    for text in ["he", "ll"] {
        vocab.insert(text.to_owned(), json!(vocab.len() + 1));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(1, "<s>"), special(2, "</s>")],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+|[^\\s]+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["h", "e"], ["l", "l"]]}
    })
}

/// Elements that are left of a list.
const KEPT: usize = 600;

/// The header of a GGUF file of version 2 or 3, whose lists are shortened. Where the data begin does not matter: they are zeros.
fn cut_down(whole: &[u8]) -> Vec<u8> {
    let mut at = 8;
    let tensors = number(whole, &mut at);
    let fields = number(whole, &mut at);
    let mut out = whole[..at].to_vec();
    for _ in 0..fields {
        let start = at;
        skip_string(whole, &mut at);
        let kind = u32::from_le_bytes(whole[at..at + 4].try_into().unwrap());
        at += 4;
        if kind != 9 {
            skip(whole, &mut at, kind);
            out.extend_from_slice(&whole[start..at]);
            continue;
        }
        let element = u32::from_le_bytes(whole[at..at + 4].try_into().unwrap());
        at += 4;
        out.extend_from_slice(&whole[start..at]);
        let count = number(whole, &mut at) as usize;
        out.extend_from_slice(&(count.min(KEPT) as u64).to_le_bytes());
        let (begin, mut end) = (at, at);
        for index in 0..count {
            skip(whole, &mut at, element);
            if index < KEPT {
                end = at;
            }
        }
        out.extend_from_slice(&whole[begin..end]);
    }
    let begin = at;
    for _ in 0..tensors {
        skip_string(whole, &mut at);
        let dimensions = u32::from_le_bytes(whole[at..at + 4].try_into().unwrap());
        at += 4 + 8 * dimensions as usize + 12;
    }
    out.extend_from_slice(&whole[begin..at]);
    out
}

fn number(bytes: &[u8], at: &mut usize) -> u64 {
    *at += 8;
    u64::from_le_bytes(bytes[*at - 8..*at].try_into().unwrap())
}

fn skip_string(bytes: &[u8], at: &mut usize) {
    *at += number(bytes, at) as usize;
}

fn skip(bytes: &[u8], at: &mut usize, kind: u32) {
    match kind {
        0 | 1 | 7 => *at += 1,
        2 | 3 => *at += 2,
        4..=6 => *at += 4,
        8 => skip_string(bytes, at),
        _ => *at += 8,
    }
}

/// Bytes of this process's address space.
pub(crate) fn address_space() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}
