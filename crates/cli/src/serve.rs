//! `plimsoll serve`.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_core::CacheListener;
use plimsoll_engine::Drained;
use plimsoll_server::{AppState, Memory, ModelInfo, ServeError, Server, Start, StartPhase, StartStatus};

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

/// Serves until a signal says stop.
pub async fn serve(args: ServeArgs) -> Result<(), Error> {
    let times = StartTimes::begin();
    let mut signal = signals::first()?;
    let settings = ServeSettings::new(args).await?;
    let name = settings.names[0].clone();
    // It answers that it starts; an address that is taken is found out now, not after minutes of loading.
    let (listener, bound) = settings.address.listen(&times).await?;
    let cache_listener = kv_events::publish(&settings)?;
    let progress = Arc::new(times.progress().clone());
    let server = Server::listen(listener, &name, &settings.options(None), progress);
    let (scheme, drain_timeout) = (settings.scheme(), settings.drain_timeout);
    tracing::info!("starting {name}; progress: {}/ready", bound.url(scheme));
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
    let Started { report, memory, .. } = &started;
    if !logging::is_json() {
        say(&report.table());
    }
    let memory = Arc::clone(memory);
    let example = match loaded.embedding() {
        None => CHAT,
        Some(_) => EMBEDDINGS,
    };
    let state = app_state(&settings, loaded, started)?;
    let total = times.ready();
    // Clients are connected by now: no reason to end.
    if let Err(error) = report_file.write(&memory.report()) {
        tracing::error!("no --profile-report: {error}");
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
    announce(scheme, &bound, &name, total, example);
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
    let Text {
        tokenizer,
        template,
        eos_token_ids,
        generation,
        config,
    } = loaded.text;
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
    };
    let Started {
        engine,
        report,
        memory,
        ..
    } = started;
    let options = settings.options(Some(&report));
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
    path: &'static str,
    body: &'static str,
}

const CHAT: Example = Example {
    path: "/v1/chat/completions",
    body: r#"{"messages": [{"role": "user", "content": "What is the capital of France?"}]}"#,
};

const EMBEDDINGS: Example = Example {
    path: "/v1/embeddings",
    body: r#"{"input": ["The capital of France", "Paris"]}"#,
};

/// Tells people how to talk to the server.
fn announce(scheme: &str, bound: &Bound, model: &str, after: Duration, Example { path, body }: Example) {
    // Who collects JSON collects stdout with it.
    if logging::is_json() {
        return tracing::info!(
            model,
            url = bound.url(scheme),
            seconds = after.as_secs_f64(),
            "ready"
        );
    }
    say(&format!(
        "ready: {model} after {seconds:.1} s at {url}\n\n  \
         curl {target}{path} -H 'content-type: application/json' \\\n    -d '{body}'\n",
        url = bound.url(scheme),
        target = bound.curl(scheme),
        seconds = after.as_secs_f64(),
    ));
}

/// What the command is for, on stdout. A server does not end because nobody reads it.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
