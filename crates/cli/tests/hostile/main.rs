//! Files of models that anybody may have made: thousands that a seeded mutator disturbs, read under a limit of the address space,
//! and those that are known to have done harm.

mod files;
mod known;
mod mutator;
mod targets;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use plimsoll_cli::args::{Cli, Command as Subcommand};
use plimsoll_cli::backend::{CpuBackend, CpuRank};
use plimsoll_cli::settings::EngineSettings;
use plimsoll_cli::source::Source;
use plimsoll_cli::start::{Loaded, StartTimes, predict};
use plimsoll_device::Budget;
use plimsoll_model::GgufFile;
use plimsoll_text::{ChatTemplate, Renderer, Tokenizer, WorkerProgram};
use rustix::process::{Resource, Rlimit, setrlimit};

use files::Model;

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Files that are read, by as many processes as there are CPUs here.
const CASES: u64 = 3000;
const PROCESSES: u64 = 2;
/// Address space beside that of the program: some hundred times the files.
const MAX_BYTES: u64 = 2 << 30;
/// What one file may take: the template worker's own limit, and a little.
const PATIENCE: Duration = Duration::from_secs(40);
/// Says which cases a child reads: `first,step`.
const PART: &str = "HOSTILE_TEST_PART";

#[test]
#[allow(clippy::print_stderr, reason = "how long it took")]
fn mutated_files_are_read_or_refused() {
    if let Ok(part) = std::env::var(PART) {
        let (first, step) = part.split_once(',').unwrap();
        return read_part(first.parse().unwrap(), step.parse().unwrap());
    }
    let began = Instant::now();
    let parts: Vec<_> = (0..PROCESSES)
        .map(|first| thread::spawn(move || watch(first, start(first))))
        .collect();
    let read: u64 = parts.into_iter().map(|part| part.join().unwrap()).sum();
    eprintln!("{read} of {CASES} files could be used; {:?}", began.elapsed());
    // Neither were all refused, nor was nothing disturbed.
    assert!((CASES / 50..CASES * 19 / 20).contains(&read), "{read}");
}

/// Every beginning of each file, in steps.
#[test]
fn files_that_are_cut_off_are_read_or_refused() {
    let (tiny, gguf, sharded) = (Model::tiny(), Model::gguf(), Model::sharded());
    let (embedder, reranker) = (Model::embedder(), Model::reranker());
    let processor = targets::PROCESSORS["qwen3-vl"]["preprocessor"].to_string();
    type Target = fn(&[u8]);
    let targets: [(&[u8], Target); 13] = [
        (&gguf.files[files::GGUF], targets::gguf),
        (&tiny.files[files::SAFETENSORS], targets::safetensors),
        (&tiny.files["config.json"], targets::config),
        (&tiny.files["generation_config.json"], targets::generation_config),
        (&tiny.files[files::TOKENIZER], targets::tokenizer),
        (&tiny.files["tokenizer_config.json"], targets::tokenizer_config),
        (&sharded.files[files::INDEX], targets::shard_index),
        (&embedder.files[files::MODULES], targets::modules),
        (&embedder.files[files::POOLING], targets::pooling),
        (&reranker.files[files::LOGIT_SCORE], targets::logit_score),
        (&reranker.files[files::BERT], targets::sentence_bert),
        (
            &reranker.files[files::SENTENCE_TRANSFORMERS],
            targets::sentence_transformers,
        ),
        (processor.as_bytes(), targets::image_processor),
    ];
    for (bytes, target) in targets {
        (0..=40).for_each(|part| target(&bytes[..bytes.len() * part / 40]));
    }
}

fn start(first: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mutated_files_are_read_or_refused", "--nocapture"])
        .env(PART, format!("{first},{PROCESSES}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

/// Follows a child to its end; gives how many files it could use.
fn watch(first: u64, mut child: Child) -> u64 {
    let (sender, lines) = channel();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    thread::spawn(move || {
        stdout
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    let (mut last, mut used) = (String::new(), 0);
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) if line.starts_with("case ") => last = line,
            Ok(line) => used += u64::from(line == "used"),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{last} hangs");
            }
        }
    }
    let status = child.wait().unwrap();
    assert!(status.success(), "part {first} ended with {status} at {last}");
    used
}

#[allow(clippy::print_stdout, reason = "the parent reads it")]
/// In a child: reads every `step`-th case.
fn read_part(first: u64, step: u64) {
    let bytes = files::address_space() + MAX_BYTES;
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    setrlimit(Resource::As, limit).unwrap();
    let renderer = Renderer::workers(WorkerProgram {
        path: BINARY.into(),
        args: vec!["render-templates".into()],
    });
    // The first two have the most to read: they get four of five cases.
    let models = [
        Model::tiny(),
        Model::gguf(),
        Model::sharded(),
        Model::embedder(),
        Model::reranker(),
    ];
    let models = models.map(|model| (model, tempfile::tempdir().unwrap()));
    for (model, directory) in &models {
        model.write(directory.path());
        if let Err(error) = read(model, directory.path(), &renderer) {
            panic!("what is not disturbed: {error}");
        }
    }
    for case in (first..CASES).step_by(step as usize) {
        let turn = (case / step) as usize;
        let (model, directory) = &models[match turn % 5 {
            4 => 2 + turn / 5 % 3,
            other => other % 2,
        }];
        let (model, what) = mutator::disturb(model, case);
        println!("case {case}: {what}");
        model.write(directory.path());
        match read(&model, directory.path(), &renderer) {
            Ok(()) => println!("used"),
            Err(error) => check(case, &error),
        }
    }
}

/// A refusal says something, in words for people.
fn check(case: u64, error: &str) {
    for leaked in [
        "expected usize",
        "called `Option",
        "thread '",
        "panicked",
        "internal error",
    ] {
        assert!(!error.contains(leaked), "case {case}: {error}");
    }
    assert!(!error.is_empty() && error.len() < 20_000, "case {case}: {error}");
}

/// All that a start does before it measures; of a GGUF file, without the weights.
fn read(model: &Model, directory: &Path, renderer: &Renderer) -> Result<(), String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let path = model.path(directory);
    let settings = settings(&path, renderer);
    let backend = Arc::new(CpuBackend::new(
        &path,
        &settings,
        CpuRank::whole(Budget::new(1 << 30)),
    ));
    predict(&settings, &*backend).map_err(|error| said(&error))?;
    if path.is_dir() {
        let source = Source::Files {
            model: path.clone(),
            tokenizer: path,
        };
        let loaded = Loaded::new(&source, &settings, backend, &StartTimes::begin());
        return loaded.map(drop).map_err(|error| said(&error));
    }
    let file = GgufFile::open(&path).map_err(|error| said(&error))?;
    let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|error| said(&error))?;
    let tokens = tokenizer
        .encode("Hello <|im_start|>é 123", true)
        .map_err(|error| said(&error))?;
    tokenizer.decode(&tokens, false);
    let template = ChatTemplate::from_gguf(&path, file.metadata(), tokenizer.special_tokens(), renderer);
    template.map(drop).map_err(|error| said(&error))
}

fn settings(path: &Path, renderer: &Renderer) -> Arc<EngineSettings> {
    let fixed = "--device cpu --threads 1 --max-num-seqs 2 --max-num-batched-tokens 16 --no-profile-cache";
    let argv = ["plimsoll", "profile", path.to_str().unwrap()].into_iter();
    match Cli::try_parse_from(argv.chain(fixed.split(' '))).unwrap().command {
        Subcommand::Profile(args) => Arc::new(EngineSettings {
            renderer: renderer.clone(),
            ..EngineSettings::new(args.serve.engine).unwrap()
        }),
        other => panic!("not profile: {other:?}"),
    }
}
