//! `plimsoll serve`.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_engine::Drained;
use plimsoll_model::GenerationConfig;
use plimsoll_profiler::Report;
use plimsoll_server::{
    AppState, GenerationDefaults, Memory, ModelInfo, RequestSink, ServeError, Server, ServerOptions, Start,
    StartPhase, StartStatus,
};
use plimsoll_text::{ChatTemplate, SpecialTokens};
use tokio::net::{TcpListener, TcpSocket, lookup_host};

use crate::access_log::AccessLog;
use crate::args::{EngineArgs, SchedulingPolicy, ServeArgs, ServerArgs};
use crate::device::Device;
use crate::error::Error;
use crate::keys::{self, KeySource};
use crate::kv_events;
use crate::lock::DeviceLock;
use crate::logging;
use crate::patience::Patience;
use crate::plan_cache::PlanCache;
use crate::request_log::RequestLog;
use crate::signals::{self, Signal};
use crate::source::{Source, resolve};
use crate::standing::Standing;
use crate::start::{Loaded, Outline, Ready, ReportFile, StartContext, StartTimes, Text};
use crate::tls::Certificate;
use crate::traces::Traces;

/// Connections the operating system may hold before they are accepted.
const BACKLOG: u32 = 1024;

/// Serves until a signal says stop.
pub async fn serve(args: ServeArgs) -> Result<(), Error> {
    let report_file = ReportFile::new(&args.engine.memory)?;
    let mut context = StartContext::new(PlanCache::from_flags(&args.engine.memory));
    let times = context.times.clone();
    let mut signal = signals::first()?;
    let given = Given::read(&args.server).await?;
    let name = args.server.served_names(&args.engine.model).remove(0);
    // It answers that it starts; an address that is taken is found out now, not after minutes of loading.
    let listener = listen(&args.server, &times).await?;
    let bound = listener.local_addr()?;
    context.cache_listener = kv_events::publish(&args)?;
    let progress = Arc::new(times.progress().clone());
    let server = Server::listen(listener, &name, &given.options(&args, None), progress);
    let scheme = given.scheme();
    tracing::info!("starting {name}: {scheme}://{bound}/ready says how far it is");
    let started = async {
        let source = resolve_timed(&args.engine, &times).await?;
        let args = args.clone();
        tokio::task::spawn_blocking(move || prepare(&source, &args, given, context)).await?
    };
    let prepared = tokio::select! {
        prepared = started => prepared?,
        Ok(signal) = &mut signal => return Err(interrupted(signal, &times)),
    };
    if !logging::is_json() {
        say(&prepared.report.table());
    }
    let Prepared {
        state,
        standing,
        example,
        given,
        ..
    } = prepared;
    let total = times.ready();
    // Clients are connected by now: no reason to end.
    if let Err(error) = report_file.write(&standing.report()) {
        tracing::error!("no --profile-report: {error}");
    }
    let (traces, access_log) = (given.traces.clone(), given.access_log.clone());
    let watch = tokio::spawn(given.watch());
    let shutdown = async {
        match signal.await {
            Ok(signal) => {
                tracing::info!("stopping at {signal}: requests may finish; once more to stop at once")
            }
            Err(_) => std::future::pending().await,
        }
    };
    server.open(&state);
    announce(scheme, bound, &name, total, example);
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
            timeout: args.server.drain_timeout,
        }),
    }
}

fn interrupted(signal: Signal, times: &StartTimes) -> Error {
    let StartStatus { phase, elapsed, .. } = times.progress().status();
    Error::Interrupted {
        signal,
        phase: phase.name(),
        after: elapsed,
    }
}

pub(crate) async fn resolve_timed(args: &EngineArgs, times: &StartTimes) -> Result<Source, Error> {
    let begin = Instant::now();
    let source = resolve(&args.model, times.progress()).await?;
    times.add("resolve", begin.elapsed());
    Ok(source)
}

/// The device, open. To wait for others that measure it is a stage of its own.
pub(crate) fn open_timed(
    source: &Source,
    args: &EngineArgs,
    times: &StartTimes,
) -> Result<(Device, DeviceLock), Error> {
    let begin = Instant::now();
    times.progress().enter(StartPhase::Device);
    let (device, lock) = Device::open(source, args)?;
    times.add("wait", lock.waited());
    times.add("device", begin.elapsed().saturating_sub(lock.waited()));
    Ok((device, lock))
}

/// Everything the HTTP server needs, and what is to be said about it.
struct Prepared {
    state: AppState,
    report: Report,
    standing: Arc<Standing>,
    example: Example,
    given: Given,
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

/// From files to everything the HTTP server needs; blocks for as long as loading and profiling take.
fn prepare(
    source: &Source,
    args: &ServeArgs,
    given: Given,
    mut context: StartContext,
) -> Result<Prepared, Error> {
    let (device, lock) = open_timed(source, &args.engine, &context.times)?;
    context.relock = lock.relock();
    let enough = |error| Outline::enough_for(source, &args.engine, &device, error);
    let loaded = Loaded::with(source, &args.engine, device.clone(), context).map_err(enough)?;
    let started = loaded.start(&args.engine, args.server.max_queue);
    let Ready {
        engine,
        report,
        standing,
        ..
    } = started.map_err(enough)?;
    // All memory is taken: whoever starts next sees what is left.
    drop(lock);
    let Text {
        tokenizer,
        template,
        eos_token_ids,
        generation,
    } = loaded.text;
    let template = match &given.template {
        None => template,
        Some(source) => Some(ChatTemplate::new(source, tokenizer.special_tokens())?),
    };
    let example = match &loaded.embedding {
        None => CHAT,
        Some(_) => EMBEDDINGS,
    };
    let mut names = args.server.served_names(&args.engine.model);
    let model = ModelInfo {
        id: names.remove(0),
        aliases: names,
        tokenizer,
        answers: args.chat.answer_style(template.as_ref()),
        template,
        eos_token_ids,
        defaults: given.defaults.unwrap_or_else(|| defaults_of(&generation)),
        embedding: loaded.embedding,
    };
    let options = given.options(args, Some(&report));
    Ok(Prepared {
        state: AppState::new(engine, model, Arc::clone(&standing) as _, options),
        report,
        standing,
        example,
        given,
    })
}

/// What flags name in place of the model's own, read before anything is loaded: a typo is told at once.
struct Given {
    /// Source of the chat template, which compiles.
    template: Option<String>,
    /// Sampling defaults; the model's where there are none.
    defaults: Option<GenerationDefaults>,
    keys: KeySource,
    certificate: Option<Certificate>,
    sinks: Vec<Arc<dyn RequestSink>>,
    traces: Option<Arc<Traces>>,
    access_log: Option<Arc<AccessLog>>,
}

impl Given {
    async fn read(args: &ServerArgs) -> Result<Self, Error> {
        let template = args.chat_template.as_deref().map(chat_template).transpose()?;
        if let Some(source) = &template {
            // The special tokens are the model's; they are no matter of syntax.
            ChatTemplate::new(source, &SpecialTokens::new())?;
        }
        let traces = args.otlp_traces_endpoint.as_deref().map(Traces::to).transpose()?;
        let traces = traces.map(Arc::new);
        let mut sinks: Vec<Arc<dyn RequestSink>> = Vec::new();
        let access_log = args.access_log.as_deref().map(AccessLog::open).transpose()?;
        let access_log = access_log.map(Arc::new);
        sinks.extend(access_log.clone().map(|log| log as Arc<dyn RequestSink>));
        if args.request_log_rate > 0 {
            sinks.push(Arc::new(RequestLog::new(args.request_log_rate)));
        }
        sinks.extend(traces.clone().map(|traces| traces as Arc<dyn RequestSink>));
        Ok(Self {
            template,
            defaults: generation_defaults(&args.generation_config)?,
            keys: KeySource::read(&args.access)?,
            certificate: Certificate::read(&args.access).await?,
            sinks,
            traces,
            access_log,
        })
    }

    fn scheme(&self) -> &'static str {
        match self.certificate {
            Some(_) => "https",
            None => "http",
        }
    }

    /// What the API is told; before there is a proof, what connections are to be like.
    fn options(&self, args: &ServeArgs, proof: Option<&Report>) -> ServerOptions {
        let server = &args.server;
        let slowest = proof.map(Report::slowest_step).unwrap_or_default();
        let patience = Patience::new(server, slowest);
        if proof.is_some() {
            patience.log(slowest);
        }
        ServerOptions {
            max_body_bytes: usize::try_from(server.max_body_size.0).unwrap_or(usize::MAX),
            slow_client_timeout: server.slow_client_timeout,
            drain_timeout: server.drain_timeout,
            ready_patience: patience.stall,
            watchdog_timeout: patience.watchdog,
            enable_admin_api: server.enable_admin_api(),
            seed: args.engine.limits.seed,
            enable_sleep_mode: server.enable_sleep_mode(),
            pages: args.pages.pages(),
            allowed_origins: server.allowed_origins(),
            keys: self.keys.keys.clone(),
            metrics_require_key: server.access.metrics_require_key(),
            key_limits: keys::limits(&server.access),
            queue_timeout: server.queue_timeout,
            request_timeout: server.request_timeout,
            trust_request_chat_template: args.chat.trust_request_chat_template,
            isolate_prefix_cache: server.access.isolate_prefix_cache(),
            priorities: server.scheduling_policy == SchedulingPolicy::Priority,
            sinks: self.sinks.clone(),
            tls: self
                .certificate
                .as_ref()
                .map(|certificate| certificate.tls.clone()),
            max_connections: server.max_connections,
            header_timeout: server.header_timeout,
            response_store: args.responses.limits(),
            ..ServerOptions::default()
        }
    }

    /// Follows files that may change.
    async fn watch(self) {
        let Self {
            keys, certificate, ..
        } = self;
        let certificate = async {
            if let Some(certificate) = certificate {
                certificate.watch().await;
            }
        };
        tokio::join!(keys.watch(), certificate);
    }
}

/// A file, or the template itself, which is told by its braces.
fn chat_template(given: &str) -> Result<String, Error> {
    let path = Path::new(given);
    if !path.exists() && given.contains('{') {
        return Ok(given.to_owned());
    }
    std::fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })
}

/// `--generation-config`, with vLLM's values. `None`: the model's.
fn generation_defaults(given: &str) -> Result<Option<GenerationDefaults>, Error> {
    Ok(match given {
        "vllm" => Some(GenerationDefaults::default()),
        "auto" => None,
        directory => {
            let path = Path::new(directory).join("generation_config.json");
            let text = std::fs::read_to_string(&path).map_err(|source| Error::Read {
                path: path.clone(),
                source,
            })?;
            let wrong = |e: serde_json::Error| Error::Configuration {
                origin: path.display().to_string(),
                message: e.to_string(),
            };
            Some(defaults_of(&serde_json::from_str(&text).map_err(wrong)?))
        }
    })
}

fn defaults_of(config: &GenerationConfig) -> GenerationDefaults {
    GenerationDefaults {
        // transformers samples greedily, whatever the temperature, where sampling is off.
        temperature: if config.do_sample == Some(false) {
            Some(0.0)
        } else {
            config.temperature
        },
        top_p: config.top_p,
        top_k: config.top_k,
        min_p: config.min_p,
        repetition_penalty: config.repetition_penalty,
        max_new_tokens: None,
    }
}

async fn listen(args: &ServerArgs, times: &StartTimes) -> Result<TcpListener, Error> {
    let begin = Instant::now();
    let failed = |source| Error::Bind {
        address: format!("{}:{}", args.host, args.port),
        source,
    };
    let mut last = std::io::Error::other("the name has no address");
    for address in lookup_host((&*args.host, args.port)).await.map_err(failed)? {
        match listen_on(address) {
            Ok(listener) => {
                times.add("listen", begin.elapsed());
                return Ok(listener);
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    // A port whose last server just ended is free.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Tells people how to talk to the server.
fn announce(
    scheme: &str,
    address: SocketAddr,
    model: &str,
    after: Duration,
    Example { path, body }: Example,
) {
    // Who collects JSON collects stdout with it.
    if logging::is_json() {
        return tracing::info!(
            model,
            url = format!("{scheme}://{address}"),
            seconds = after.as_secs_f64(),
            "ready"
        );
    }
    let host = if address.ip().is_unspecified() {
        "127.0.0.1".to_owned()
    } else {
        address.ip().to_string()
    };
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host
    };
    say(&format!(
        "ready: {model} after {seconds:.1} s at {scheme}://{address}\n\n  \
         curl {scheme}://{host}:{port}{path} -H 'content-type: application/json' \\\n    -d '{body}'\n",
        port = address.port(),
        seconds = after.as_secs_f64(),
    ));
}

/// What the command is for, on stdout. A server does not end because nobody reads it.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn generation_configs() {
        let model: GenerationConfig =
            serde_json::from_str(r#"{"temperature": 0.6, "top_k": 20, "do_sample": true}"#).unwrap();
        assert_eq!(generation_defaults("auto").unwrap(), None);
        let auto = defaults_of(&model);
        assert_eq!((auto.temperature, auto.top_k), (Some(0.6), Some(20)));
        assert_eq!(
            generation_defaults("vllm").unwrap(),
            Some(GenerationDefaults::default())
        );

        let dir = tempfile::tempdir().unwrap();
        let dir_name = dir.path().to_str().unwrap();
        assert!(matches!(generation_defaults(dir_name), Err(Error::Read { .. })));
        let file = dir.path().join("generation_config.json");
        std::fs::write(&file, r#"{"temperature": 0.6, "do_sample": false}"#).unwrap();
        assert_eq!(
            generation_defaults(dir_name).unwrap().unwrap().temperature,
            Some(0.0)
        );
        std::fs::write(&file, r#"{"temperature": "hot"}"#).unwrap();
        assert!(matches!(
            generation_defaults(dir_name),
            Err(Error::Configuration { .. })
        ));
    }

    #[test]
    fn templates_are_files_or_text() {
        assert_eq!(chat_template("{{ messages }}").unwrap(), "{{ messages }}");
        assert!(chat_template("/no/such/template.jinja").is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{{ bos_token }}").unwrap();
        assert_eq!(
            chat_template(file.path().to_str().unwrap()).unwrap(),
            "{{ bos_token }}"
        );
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_found_out_at_once() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let times = StartTimes::begin();
        let args = |host: &str, port: u16| {
            let argv = ["plimsoll", "serve", "--host", host, "--port", &port.to_string()];
            match crate::args::Cli::try_parse_from(argv).unwrap().command {
                crate::args::Command::Serve(args) => args.server,
                other => panic!("not serve: {other:?}"),
            }
        };
        assert!(matches!(
            listen(&args("127.0.0.1", port), &times).await,
            Err(Error::Bind { .. })
        ));
        assert!(matches!(
            listen(&args("no-such-host.invalid", 1), &times).await,
            Err(Error::Bind { .. })
        ));
        let listener = listen(&args("127.0.0.1", 0), &times).await.unwrap();
        let address = listener.local_addr().unwrap();
        assert!(tokio::net::TcpStream::connect(address).await.is_ok());
    }
}
