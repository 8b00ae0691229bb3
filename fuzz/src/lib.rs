//! The checks that the binaries of `fuzz_targets` run: those of the crates' own tests, which run them in every `make test`.

#[path = "../../crates/text/tests/fuzz/answers.rs"]
mod answers;
#[path = "../../crates/text/tests/fuzz/corpus.rs"]
mod corpus;
#[path = "../../crates/cli/tests/hostile/files.rs"]
#[allow(dead_code, reason = "shared with the tests of hostile files, which use the rest")]
mod files;
#[path = "../../crates/server/tests/api/fuzz.rs"]
mod fuzz;
#[path = "../../crates/text/tests/fuzz/grammars.rs"]
mod grammars;
#[path = "../../crates/cli/tests/hostile/targets.rs"]
mod readers;
#[path = "../../crates/server/tests/api/rig.rs"]
pub mod rig;
#[path = "../../crates/images/tests/decoded.rs"]
mod decoded;
#[path = "../../crates/text/tests/fuzz/targets.rs"]
mod targets;

use std::fmt::Write as _;
use std::path::Path;
use std::sync::OnceLock;
use std::{env, fs, io, panic, process};

use plimsoll_text::{WorkerProgram, run_template_worker};

struct Target {
    /// Panics where a promise does not hold.
    check: fn(&[u8]),
    /// Inputs to start from.
    inputs: Vec<Vec<u8>>,
    /// Pieces of inputs.
    words: Vec<String>,
}

impl Target {
    fn named(name: &str) -> Option<Self> {
        let of = |check, inputs: &[&str], words: &[&str]| Self {
            check,
            inputs: inputs.iter().map(|text| text.as_bytes().to_vec()).collect(),
            words: words.iter().map(ToString::to_string).collect(),
        };
        let file = |check, model: files::Model, name: &str, words: &[&str]| Self {
            check,
            inputs: vec![model.files[name].clone()],
            words: words.iter().map(ToString::to_string).collect(),
        };
        let (tiny, embedder, reranker) = (files::Model::tiny, files::Model::embedder, files::Model::reranker);
        Some(match name {
            "config" => file(readers::config, tiny(), "config.json", corpus::JSON),
            "generation_config" => file(readers::generation_config, tiny(), "generation_config.json", corpus::JSON),
            "gguf" => file(readers::gguf, files::Model::gguf(), files::GGUF, GGUF_WORDS),
            "safetensors" => file(readers::safetensors, tiny(), files::SAFETENSORS, corpus::JSON),
            "tokenizer" => file(readers::tokenizer, tiny(), files::TOKENIZER, corpus::JSON),
            "tokenizer_config" => file(readers::tokenizer_config, tiny(), "tokenizer_config.json", corpus::JSON),
            "shard_index" => file(readers::shard_index, files::Model::sharded(), files::INDEX, corpus::JSON),
            "modules" => file(readers::modules, embedder(), files::MODULES, corpus::JSON),
            "pooling" => file(readers::pooling, embedder(), files::POOLING, corpus::JSON),
            "logit_score" => file(readers::logit_score, reranker(), files::LOGIT_SCORE, corpus::JSON),
            "sentence_bert" => file(readers::sentence_bert, reranker(), files::BERT, corpus::JSON),
            "sentence_transformers" => file(
                readers::sentence_transformers,
                reranker(),
                files::SENTENCE_TRANSFORMERS,
                corpus::JSON,
            ),
            "image_processor" => Self {
                check: readers::image_processor,
                inputs: readers::PROCESSORS
                    .as_object()
                    .expect("families by name")
                    .values()
                    .map(|family| family["preprocessor"].to_string().into_bytes())
                    .collect(),
                words: corpus::JSON.iter().map(ToString::to_string).collect(),
            },
            "answer" => of(answers::answer, corpus::ANSWERS, corpus::MARKUP),
            "detokenizer" => of(targets::detokenizer, corpus::TEXTS, corpus::TEXTS),
            "grammar" => of(grammars::grammar, corpus::GRAMMARS, corpus::GRAMMAR_WORDS),
            "image" => Self {
                check: |data| {
                    decoded::check(data, "an image");
                },
                inputs: decoded::files().into_iter().map(|(_, bytes)| bytes).collect(),
                words: ["IHDR", "IDAT", "PLTE", "tRNS", "eXIf", "acTL", "RIFF", "VP8L", "GIF89a", "Exif"].map(str::to_owned).into(),
            },
            "messages" => of(targets::messages, corpus::CONVERSATIONS, corpus::JSON),
            "request" => Self {
                check: fuzz::request,
                inputs: fuzz::corpus().into_iter().map(String::into_bytes).collect(),
                words: fuzz::words(),
            },
            "stop" => of(targets::stop, corpus::STOPS, corpus::STOP_PIECES),
            "template" => of(
                targets::template,
                &[corpus::TEMPLATES, corpus::HOSTILE].concat(),
                corpus::JINJA,
            ),
            _ => return None,
        })
    }

    /// Writes where libFuzzer starts: inputs, and a dictionary.
    fn write(&self, name: &str) -> io::Result<()> {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        fs::create_dir_all(&corpus)?;
        for (i, input) in self.inputs.iter().enumerate() {
            fs::write(corpus.join(format!("known-{i}")), input)?;
        }
        let mut dictionary = String::new();
        for word in self.words.iter().filter(|word| word.len() <= LONGEST) {
            let bytes = word.bytes().fold(String::new(), |mut text, byte| {
                let _ = write!(text, "\\x{byte:02x}");
                text
            });
            dictionary += &format!("\"{bytes}\"\n");
        }
        fs::write(corpus.with_extension("dict"), dictionary)
    }
}

/// Pieces of GGUF headers.
const GGUF_WORDS: &[&str] = &[
    "GGUF",
    "general.architecture",
    "general.alignment",
    "llama.block_count",
    "llama.context_length",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "token_embd.weight",
];

/// Options of the address sanitizer, for workers too, which do not get the environment: a worker tells an overflow of its stack
/// by a signal; and garbage that waits for an epoch when a process ends is no leak.
#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const std::ffi::c_char {
    c"handle_segv=0:detect_leaks=0".as_ptr()
}

/// Longest entry of a dictionary that libFuzzer takes.
const LONGEST: usize = 64;

static CHECK: OnceLock<fn(&[u8])> = OnceLock::new();

/// The argument that makes a fuzz target a worker of its own.
const WORKER: &str = "render-templates";

/// libFuzzer's `main` is not Rust's, which would catch the signal.
pub(crate) const NAMES_OVERFLOWS: bool = false;

pub(crate) fn template_worker() -> WorkerProgram {
    WorkerProgram {
        path: "/proc/self/exe".into(),
        args: vec![WORKER.into()],
    }
}

/// Prepares the target of this name, before libFuzzer reads what it starts from.
pub fn begin(name: &str) {
    if env::args().nth(1).is_some_and(|arg| arg == WORKER) {
        run_template_worker().expect("a worker is started with a socket");
        process::exit(0);
    }
    let target = Target::named(name).expect("the name of a target");
    target.write(name).expect("fuzz/corpus can be written");
    CHECK.get_or_init(|| target.check);
    // libFuzzer's hook aborts on every panic. Those of the template and grammar engines are caught where these are called, and
    // are no finding.
    let abort = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if panic.location().is_none_or(|at| at.file().contains("crates/")) {
            abort(panic);
        }
    }));
}

/// Checks one input.
pub fn check(data: &[u8]) {
    CHECK.get().expect("it was prepared")(data);
}
