//! `plimsoll serve`.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_core::CacheListener;
use plimsoll_engine::Drained;
use plimsoll_profiler::Report;
use plimsoll_server::{
    AppState, ImageInput, Memory, ModelInfo, ServeError, Server, Start, StartPhase, StartStatus,
};

use crate::args::ServeArgs;
use crate::backend::{self, Backend};
use crate::error::Error;
use crate::kv_events;
use crate::listen::Bound;
use crate::lock::DeviceLock;
use crate::logging;
use crate::serve_settings::ServeSettings;
use crate::settings::EngineSettings;
use crate::signals::{self, Signal};
use crate::source::{Source, resolve};
use crate::start::{Loaded, Serving, StartTimes, Started, Text, with_enough_memory};
use crate::terminal;

/// Serves until a signal says stop.
pub async fn serve(args: ServeArgs) -> Result<(), Error> {
    let times = StartTimes::begin();
    let mut signal = signals::first(args.server.exit_on_stdin_close)?;
    let settings = ServeSettings::new(args).await?;
    let name = settings.names[0].clone();
    // It answers that it starts; an address that is taken is found out now, not after minutes of loading.
    let (listener, bound) = settings.address.listen(&times).await?;
    let cache_listener = kv_events::publish(&settings)?;
    let progress = Arc::new(times.progress().clone());
    let server = Server::listen(listener, &name, &settings.options(None), progress);
    let (scheme, drain_timeout) = (settings.scheme(), settings.drain_timeout);
    let root_path = settings.root_path().to_owned();
    let url = bound.url(scheme);
    if !terminal::phase("starting", format_args!("{name}; progress: {url}/ready")) {
        tracing::info!("starting {name}; progress: {url}/ready");
    }
    let (report_file, clock) = (settings.engine.report_file.clone(), times.clone());
    let started = async {
        let source = resolve_timed(&settings.engine, &times).await?;
        let work = move || start(&source, settings, &clock, cache_listener);
        tokio::task::spawn_blocking(work).await?
    };
    let (settings, loaded, started) = tokio::select! {
        started = started => started?,
        Ok(signal) = &mut signal => return Err(interrupted(signal, &times)),
    };
    show_memory(&started.report);
    let memory = Arc::clone(&started.memory);
    let example = match loaded.embedding() {
        None => CHAT,
        Some(embedding) if embedding.scorer.is_some() => SCORES,
        Some(_) => EMBEDDINGS,
    };
    let has_pages = settings.has_pages();
    let state = app_state(&settings, loaded, started)?;
    let total = times.ready();
    // Clients are connected by now: no reason to end.
    if let Err(error) = report_file.write(&memory.report()) {
        tracing::error!("--profile-report was not written: {error}");
    }
    let (traces, access_log) = (settings.traces.clone(), settings.access_log.clone());
    let watch = tokio::spawn(settings.watch());
    let shutdown = async {
        match signal.await {
            Ok(signal) => {
                tracing::info!("{signal}: draining; a second signal ends the server at once")
            }
            Err(_) => std::future::pending().await,
        }
    };
    server.open(&state);
    Ready {
        model: &name,
        after: total,
        scheme,
        bound: &bound,
        root_path: &root_path,
        has_pages,
        example,
    }
    .announce();
    let served = server.serve(state, shutdown).await;
    watch.abort();
    if let Some(traces) = traces
        && !matches!(served, Err(ServeError::Stalled(_)))
    {
        tokio::task::spawn_blocking(move || traces.finish()).await?;
    }
    if let Some(access_log) = access_log {
        tokio::task::spawn_blocking(move || access_log.finish()).await?;
    }
    match served? {
        Drained::Complete => Ok(()),
        Drained::Failed(requests) => Err(Error::CutOff {
            requests,
            timeout: drain_timeout,
        }),
    }
}

/// Load, prove, spawn; blocks for as long as that takes.
fn start(
    source: &Source,
    settings: ServeSettings,
    times: &StartTimes,
    cache_listener: Option<Arc<dyn CacheListener>>,
) -> Result<(ServeSettings, Loaded, Started), Error> {
    let (backend, lock) = open_timed(source, &settings.engine, times)?;
    let serving = Serving {
        max_queue: settings.max_queue,
        relock: lock.relock(),
        cache_listener,
    };
    let proved = || {
        let loaded = Loaded::new(source, &settings.engine, Arc::clone(&backend), times)?;
        let proof = loaded.prove()?;
        Ok((loaded, proof))
    };
    let (loaded, proof) = proved().map_err(|error| with_enough_memory(&settings.engine, &*backend, error))?;
    let started = loaded.spawn(proof, serving)?;
    // All memory is taken: whoever starts next sees what is left.
    drop(lock);
    Ok((settings, loaded, started))
}

/// Everything the API needs.
fn app_state(settings: &ServeSettings, loaded: Loaded, started: Started) -> Result<AppState, Error> {
    let embedding = loaded.embedding().cloned();
    let [num_parameters, num_active_parameters] = loaded.num_parameters();
    let (slowest_encode, expert_loads) = (loaded.slowest_encode(), loaded.expert_loads());
    let Started {
        engine,
        report,
        memory,
    } = started;
    let Text {
        tokenizer,
        template,
        eos_token_ids,
        generation,
        config,
    } = loaded.text;
    let images = loaded
        .processor
        .map(|processor| ImageInput::new(processor, &tokenizer));
    let images = images.transpose().map_err(Error::ImageTokens)?;
    let template = settings.template(template, tokenizer.special_tokens())?;
    let mut names = settings.names.clone();
    let model = ModelInfo {
        id: names.remove(0),
        aliases: names,
        tokenizer,
        tokenizer_config: config,
        answers: settings.answers(template.as_ref()),
        template,
        renderer: settings.engine.renderer.clone(),
        eos_token_ids,
        defaults: settings.generation_defaults(&generation),
        embedding,
        images,
        quantization: report.sizing.quantization.clone(),
        bits_per_weight: report.sizing.bits_per_weight,
        num_parameters,
        num_active_parameters,
        expert_loads,
    };
    let options = settings.options(Some(report.slowest_step() + slowest_encode));
    Ok(AppState::new(engine, model, memory, options))
}

fn interrupted(signal: Signal, times: &StartTimes) -> Error {
    let StartStatus { phase, elapsed, .. } = times.progress().status();
    Error::Interrupted {
        signal,
        phase: phase.name(),
        after: elapsed,
    }
}

pub(crate) async fn resolve_timed(settings: &EngineSettings, times: &StartTimes) -> Result<Source, Error> {
    let begin = Instant::now();
    let source = resolve(settings, times.progress()).await?;
    times.add("resolve", begin.elapsed());
    Ok(source)
}

/// The device, open. To wait for others that measure it is a stage of its own.
pub(crate) fn open_timed(
    source: &Source,
    settings: &Arc<EngineSettings>,
    times: &StartTimes,
) -> Result<(Arc<dyn Backend>, DeviceLock), Error> {
    let begin = Instant::now();
    times.progress().enter(StartPhase::Device);
    let (backend, lock) = backend::open(source, settings)?;
    times.add("wait", lock.waited());
    times.add("device", begin.elapsed().saturating_sub(lock.waited()));
    Ok((backend, lock))
}

/// A first request.
#[derive(Clone, Copy)]
struct Example {
    is_chat: bool,
    path: &'static str,
    body: &'static str,
}

const CHAT: Example = Example {
    is_chat: true,
    path: "/v1/chat/completions",
    body: r#"{"messages": [{"role": "user", "content": "What is the capital of France?"}]}"#,
};

const EMBEDDINGS: Example = Example {
    is_chat: false,
    path: "/v1/embeddings",
    body: r#"{"input": ["The capital of France", "Paris"]}"#,
};

const SCORES: Example = Example {
    is_chat: false,
    path: "/v1/rerank",
    body: r#"{"query": "What is a load line?", "documents": ["A mark on a hull", "A kind of bread"]}"#,
};

/// What people are told once the server is ready.
struct Ready<'a> {
    model: &'a str,
    after: Duration,
    scheme: &'a str,
    bound: &'a Bound,
    root_path: &'a str,
    has_pages: bool,
    example: Example,
}

impl Ready<'_> {
    /// Tells people how to talk to the server; the addresses are the last line.
    fn announce(&self) {
        let (model, seconds) = (self.model, self.after.as_secs_f64());
        let url = self.bound.url(self.scheme);
        // Who collects JSON collects stdout with it.
        if logging::is_json() {
            return tracing::info!(model, url, seconds, "ready");
        }
        if terminal::shows_phases() {
            let text = format!("{model} after {seconds:.1} s");
            say(&terminal::labelled("ready", text, terminal::width()));
        } else {
            say(&format!("ready: {model} after {seconds:.1} s at {url}"));
        }
        // A socket has no address for browsers.
        let address = self.bound.browser_url(self.scheme);
        if !terminal::shows_phases() || address.is_none() {
            say(&format!("\n{}\n", self.first_request()));
        }
        if let Some(address) = address {
            say(&self.addresses(&address));
        }
    }

    fn first_request(&self) -> String {
        let Example { path, body, .. } = self.example;
        format!(
            "  curl {target}{root}{path} -H 'content-type: application/json' \\\n    -d '{body}'",
            target = self.bound.curl(self.scheme),
            root = self.root_path,
        )
    }

    /// Pages for people, or where the API begins if there are none.
    fn addresses(&self, address: &str) -> String {
        let base = format!("{address}{}", self.root_path);
        match (self.has_pages, self.example.is_chat) {
            (true, true) => {
                let line = format!("Chat: {base} - API: {base}/docs");
                match terminal::stdout_columns().is_some_and(|columns| line.len() > columns) {
                    true => line.replace(" - ", "\n"),
                    false => line,
                }
            }
            (true, false) => format!("API: {base}/docs"),
            (false, _) => format!("API: {base}/v1"),
        }
    }
}

/// Where the device's memory is: in short, or a line for each part.
fn show_memory(report: &Report) {
    if terminal::shows_phases() {
        let [bar, legend] = report.ready.short(terminal::room());
        terminal::phase("memory", bar);
        terminal::phase("", legend);
    } else if !logging::is_json() {
        say(&terminal::fitted(&report.table(terminal::stdout_columns())));
    }
}

/// What the command is for, on stdout. A server does not end because nobody reads it.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
