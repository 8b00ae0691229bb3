//! What the server advises, typed as it says: each command that a failed start prints is run by a shell and starts,
//! each suggested size is accepted, the largest size that a refused pin is told starts.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use plimsoll_cli::Error;
use plimsoll_cli::backend::{CpuBackend, CpuRank};
use plimsoll_cli::command_line::CommandLine;
use plimsoll_cli::layers;
use plimsoll_cli::settings::EngineSettings;
use plimsoll_cli::start::{Loaded, StartTimes};
use plimsoll_device::Budget;
use plimsoll_profiler::{Cause, Origin, Setting};
use plimsoll_text::Renderer;

use crate::{BUDGET, Model, stop};

const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

/// A failed start and its surroundings.
#[derive(Default)]
struct Start<'a> {
    /// `tiny` stands for the model's directory.
    flags: &'a str,
    config: &'a str,
    environment: &'a [(&'a str, &'a str)],
}

/// A directory with everything that a start needs beside its flags.
struct Place {
    model: Model,
}

impl Place {
    fn new() -> Self {
        // A name that a shell would take apart.
        let model = Model::new();
        std::fs::create_dir(model.dir.path().join("it's tiny")).unwrap();
        std::fs::rename(
            model.dir.path().join("config.json"),
            model.dir.path().join("it's tiny/config.json"),
        )
        .unwrap();
        Self { model }
    }

    fn path(&self) -> &Path {
        self.model.dir.path()
    }

    fn command(&self, program: &str, start: &Start<'_>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path());
        command.env("PLIMSOLL_DEVICE_LOCK_DIR", self.path());
        command.env("PLIMSOLL_NO_PROFILE_CACHE", "1");
        command.env("PLIMSOLL_LOG_FORMAT", "text");
        command.envs(start.environment.iter().copied());
        command
    }

    fn run(&self, subcommand: &str, start: &Start<'_>) -> Output {
        std::fs::write(self.path().join("plimsoll.toml"), start.config).unwrap();
        let mut command = self.command(BINARY, start);
        command.args([subcommand, "--config", "plimsoll.toml"]);
        for flag in start.flags.split_whitespace() {
            command.arg(if flag == "tiny" { "it's tiny" } else { flag });
        }
        command.output().unwrap()
    }

    /// As somebody types it, or pastes it.
    fn shell(&self, line: &str, start: &Start<'_>) -> Command {
        let mut command = self.command("sh", start);
        // A shell that stays would keep a server from its signals.
        command.args(["-c", &format!("exec {line}")]);
        command
    }
}

/// The commands in the last words of a start.
fn commands(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| line.starts_with(BINARY))
        .map(str::to_owned)
        .collect()
}

const TINY: &str =
    "tiny --load-format dummy --seed 7 --threads 1 --max-num-seqs 4 --max-num-batched-tokens 32";

#[test]
fn every_command_that_a_failed_start_prints_starts() {
    let place = Place::new();
    let tiny = |flags: &str| format!("{TINY} {flags}");
    let cases = [
        // One request of full length does not fit.
        (
            "sim --device-memory 400MiB --max-model-len 8192 --mem-fraction 0.1",
            "",
            &[][..],
            "full length",
        ),
        (
            "sim --max-model-len=8192",
            "device-memory = \"400MiB\"\nmem-fraction = 0.1",
            &[],
            "full length",
        ),
        (
            &tiny("--device-memory 3MiB"),
            "",
            &[("PLIMSOLL_MEM_FRACTION", "0.05")],
            "full length",
        ),
        // The worst step does not fit.
        (
            "sim --device-memory 200MiB --max-num-batched-tokens 8192",
            "",
            &[],
            "worst step",
        ),
        (
            "sim --max-num-batched-tokens 8192",
            "",
            &[("PLIMSOLL_MAX_DEVICE_MEMORY", "220MiB")],
            "worst step",
        ),
        (
            &tiny("--max-device-memory=4MiB --max-num-batched-tokens 2048 --max-num-seqs 64"),
            "",
            &[],
            "worst step",
        ),
        (
            &tiny("--device-memory 1100KiB --max-model-len 64"),
            "",
            &[],
            "worst step",
        ),
        // Not even the weights, or nothing beside them: predicted.
        (&tiny("--device-memory 100KiB"), "", &[], "weights do not fit"),
        (&tiny("--device-memory 300KiB"), "", &[], "worst step"),
        // Pinned too large, pinned too small, one way or the other.
        (
            "sim --device-memory 1GiB --max-total-token-num 10000000",
            "",
            &[],
            "10000000 tokens",
        ),
        (
            &tiny("--device-memory 24MiB"),
            "kv-cache-memory-bytes = \"1GiB\"",
            &[],
            "fit",
        ),
        (
            &tiny("--device-memory 8MiB"),
            "",
            &[("PLIMSOLL_MAX_TOTAL_TOKEN_NUM", "500000")],
            "500000 tokens",
        ),
        (
            &tiny("--device-memory 24MiB --max-total-token-num 64"),
            "",
            &[],
            "less than one request",
        ),
        (
            &tiny("--device-memory 24MiB --kv-cache-memory-bytes 16KiB"),
            "",
            &[],
            "less than one request",
        ),
    ];
    for (flags, config, environment, says) in cases {
        let start = Start {
            flags,
            config,
            environment,
        };
        let failed = place.run("profile", &start);
        let text = String::from_utf8_lossy(&failed.stderr);
        assert_eq!(failed.status.code(), Some(4), "{flags}: {text}");
        assert!(text.contains(says), "{flags}: {text}");
        let commands = commands(&failed);
        assert!(!commands.is_empty(), "{flags}: no advice: {text}");
        for command in commands {
            let output = place.shell(&command, &start).output().unwrap();
            let answer = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{command}\n{answer}\nwas advised by: {text}"
            );
        }
    }
}

/// The same with a server: it becomes ready.
#[test]
fn the_command_of_a_failed_server_serves() {
    let place = Place::new();
    let start = Start {
        flags: "sim --port 0 --device-memory 400MiB --max-model-len 8192 --mem-fraction 0.1 --served-model-name a b",
        ..Start::default()
    };
    let failed = place.run("serve", &start);
    let command = commands(&failed).pop().expect("advice");
    let mut server = Running(
        place
            .shell(&command, &start)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().starts_with("ready      a ")),
        "{command}"
    );
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A device that promises more than it has: the real path, with a budget that cannot be charged in full.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_device_really_gives_is_advised_and_starts() {
    let model = Model::new();
    for (cap, flags) in [
        (BUDGET / 2, "--max-model-len 4096"),
        (BUDGET / 8, "--max-model-len 4096 --max-num-batched-tokens 64"),
        (BUDGET / 2, "--max-total-token-num 60000"),
    ] {
        let budget = Budget::new(BUDGET);
        budget.set_cap(Some(cap));
        let flags = format!("--max-num-seqs 32 --mem-fraction 0.95 {flags}");
        let error = model.start(&flags, &budget).unwrap_err();
        let diagnostic = error.diagnostic().expect("it does not fit");
        assert!(
            matches!(
                diagnostic.cause,
                Cause::Exhausted { .. } | Cause::PinnedTooLarge { .. }
            ),
            "{error}"
        );
        assert!(!diagnostic.knobs.is_empty(), "{error}");
        for knob in &diagnostic.knobs {
            let ready = model
                .start(&format!("{flags} {}", knob.flags()), &budget)
                .unwrap_or_else(|again| panic!("{}: {again}\nwas advised by: {error}", knob.flags()));
            stop(ready, &budget).await;
        }
    }
}

/// Both sizes work, and skip the probe; the second leaves nothing but the margins.
#[tokio::test(flavor = "multi_thread")]
async fn suggested_sizes_start_without_a_probe() {
    let model = Model::new();
    for fraction in ["0.3", "0.95", "1.0"] {
        let budget = Budget::new(BUDGET);
        let flags = format!("--mem-fraction {fraction} --max-num-seqs 32 --max-model-len 4096");
        let ready = model.start(&flags, &budget).unwrap();
        let suggestions = ready.report.suggestions.clone();
        assert_eq!(suggestions.len(), if fraction == "1.0" { 1 } else { 2 });
        let kv_bytes = ready.report.sizing.kv_bytes;
        assert_eq!(suggestions[0].flag, Setting::KvCacheMemoryBytes(kv_bytes));
        stop(ready, &budget).await;
        for suggestion in suggestions {
            let ready = model
                .start(&format!("{flags} {}", suggestion.flag), &budget)
                .unwrap();
            let report = &ready.report;
            assert_eq!(
                (report.origin, &report.probe),
                (Origin::Pinned, &None),
                "{}",
                suggestion.flag
            );
            assert_eq!(
                suggestion.flag,
                Setting::KvCacheMemoryBytes(report.sizing.kv_bytes)
            );
            stop(ready, &budget).await;
        }
    }
}

/// What is printed starts; what is a margin and a block larger does not.
#[tokio::test(flavor = "multi_thread")]
async fn the_largest_size_that_is_named_is_the_largest() {
    let model = Model::new();
    for budget in [BUDGET, BUDGET / 3, 4 * BUDGET] {
        let budget = Budget::new(budget);
        let largest = |flags: &str| {
            let error = model.start(flags, &budget).unwrap_err();
            let Cause::PinnedTooLarge { largest_tokens, .. } = error.diagnostic().unwrap().cause else {
                panic!("{error}")
            };
            largest_tokens
        };
        let named = largest("--max-total-token-num 10000000");
        let ready = model
            .start(&format!("--max-total-token-num {named}"), &budget)
            .unwrap();
        // What the proof does not hold is the buffer for fragmentation; a pin may use it.
        let spare = ready.report.sizing.margins.min_fragmentation_bytes;
        let block = ready.report.sizing.kv_bytes / ready.report.sizing.kv_pages as u64;
        stop(ready, &budget).await;
        let beyond = named + (spare / block + 2) as usize * 16 + (64 << 10) / block as usize * 16;
        assert_eq!(largest(&format!("--max-total-token-num {beyond}")), named);
    }
}

/// The rendering and the parser agree: what is printed over a configuration file is what is advised.
#[test]
fn a_printed_command_parses_to_the_advised_flags() {
    let model = Model::new();
    let path = model.dir.path().to_str().unwrap();
    let argv = [
        "plimsoll",
        "profile",
        path,
        "--load-format",
        "dummy",
        "--max-num-seqs=4",
    ];
    let line = CommandLine::new(argv.iter().map(Into::into));
    let printed = line.with(&[Setting::MaxNumSeqs(2), Setting::MaxModelLen(128)]);
    let words = printed.split(' ').map(Into::into).collect();
    let cli = layers::parse(words, Default::default()).unwrap();
    let plimsoll_cli::args::Command::Profile(args) = cli.command else {
        panic!("{printed}")
    };
    let settings = Arc::new(EngineSettings {
        renderer: Renderer::in_process(),
        ..EngineSettings::new(args.serve.engine).unwrap()
    });
    assert_eq!(
        (settings.max_num_seqs, settings.max_model_len),
        (Some(2), Some(128))
    );
    let small = CpuBackend::new(model.dir.path(), &settings, CpuRank::whole(Budget::new(10 << 10)));
    let loaded = Loaded::new(&model.source(), &settings, Arc::new(small), &StartTimes::begin());
    let error: Error = loaded.unwrap_err();
    assert_eq!(error.exit_code(), 4);
}
