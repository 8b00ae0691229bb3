//! What `plimsoll serve` goes by: flags, environment, and the files that they name, read before anything is loaded.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_device::Machine;
use plimsoll_kv_events::Config;
use plimsoll_model::{GenerationConfig, ModelError};
use plimsoll_server::{AnswerStyle, FileStore, GenerationDefaults, RequestSink, ServerOptions};
use plimsoll_text::{ChatTemplate, SpecialTokens};

use crate::access_log::AccessLog;
use crate::args::{ChatArgs, FileArgs, SchedulingPolicy, ServeArgs};
use crate::error::Error;
use crate::keys::{self, KeySource};
use crate::listen::Address;
use crate::patience::{Patience, StepTimeouts};
use crate::request_log::RequestLog;
use crate::settings::EngineSettings;
use crate::simulated::SimSpec;
use crate::tls::Certificate;
use crate::traces::Traces;

/// Host memory for images of requests: an eighth of what is free, but at least enough for a few large ones: also where the machine
/// does not say what is free. (A start on a CPU needs to know it, and ends with that error.)
fn image_bytes() -> usize {
    const LEAST: u64 = 1 << 30;
    let free = Machine::this().room().map_or(0, |room| room.bytes());
    usize::try_from((free / 8).max(LEAST)).unwrap_or(usize::MAX)
}

/// Everything that decides how the server serves.
pub(crate) struct ServeSettings {
    pub(crate) engine: Arc<EngineSettings>,
    /// Names of the model in the API, at least one.
    pub(crate) names: Vec<String>,
    /// Where it listens.
    pub(crate) address: Address,
    /// Requests that may wait.
    pub(crate) max_queue: usize,
    pub(crate) drain_timeout: Duration,
    pub(crate) kv_events: Config,
    pub(crate) traces: Option<Arc<Traces>>,
    pub(crate) access_log: Option<Arc<AccessLog>>,
    /// Source of the chat template, which compiles; the model's where there is none.
    template: Option<String>,
    /// Sampling defaults; the model's where there are none.
    defaults: Option<GenerationDefaults>,
    chat: ChatArgs,
    step_timeouts: StepTimeouts,
    /// All but what depends on the proof.
    options: ServerOptions,
    keys: KeySource,
    certificate: Option<Certificate>,
}

/// Refuses a MODEL that a list of names has taken.
///
/// # Errors
/// Where there is no MODEL, and the last name could be one.
pub(crate) fn check_names(args: &ServeArgs) -> Result<(), Error> {
    let names = args.server.served_model_name.as_deref();
    if let (Some([_, .., last]), None) = (names, args.engine.model.given())
        && (SimSpec::parse(last).is_some() || last.contains('/') || Path::new(last).exists())
    {
        let message = format!(
            "no MODEL was given, and `{last}` is taken as a name; put MODEL first, or name it with --model"
        );
        return Err(Error::configuration("--served-model-name", message));
    }
    Ok(())
}

impl ServeSettings {
    /// # Errors
    /// Where a file that flags name cannot be read or used, or flags do not go together.
    pub(crate) async fn new(args: ServeArgs) -> Result<Self, Error> {
        check_names(&args)?;
        let ServeArgs {
            engine,
            server,
            api,
            chat,
            media,
            responses,
            files,
            pages,
            events,
        } = args;
        let engine = Arc::new(EngineSettings::new(engine)?);
        let template = server.chat_template.as_deref().map(chat_template).transpose()?;
        if let Some(source) = &template {
            // The special tokens are the model's; they are no matter of syntax.
            ChatTemplate::new(source, &SpecialTokens::new(), &engine.renderer)?;
        }
        let traces = server.otlp_traces_endpoint.as_deref().map(Traces::to);
        let traces = traces.transpose()?.map(Arc::new);
        let access_log = server.access_log.as_deref().map(AccessLog::open);
        let access_log = access_log.transpose()?.map(Arc::new);
        let mut sinks: Vec<Arc<dyn RequestSink>> = Vec::new();
        sinks.extend(access_log.clone().map(|log| log as Arc<dyn RequestSink>));
        if server.request_log_rate > 0 {
            sinks.push(Arc::new(RequestLog::new(server.request_log_rate)));
        }
        sinks.extend(traces.clone().map(|traces| traces as Arc<dyn RequestSink>));
        let keys = KeySource::read(&server.access)?;
        let certificate = Certificate::read(&server.access).await?;
        let options = ServerOptions {
            max_body_bytes: usize::try_from(server.max_body_size.0).unwrap_or(usize::MAX),
            slow_client_timeout: server.slow_client_timeout,
            drain_timeout: server.drain_timeout,
            enable_admin_api: server.enable_admin_api,
            seed: engine.seed,
            enable_sleep_mode: server.enable_sleep_mode,
            pages: pages.pages(),
            allowed_origins: server.allowed_origins(),
            keys: keys.keys.clone(),
            metrics_require_key: server.access.metrics_require_key,
            key_limits: keys::limits(&server.access),
            queue_timeout: server.queue_timeout,
            request_timeout: server.request_timeout,
            trust_request_chat_template: chat.trust_request_chat_template,
            unknown_fields: server.unknown_fields.into(),
            isolate_prefix_cache: server.access.isolate_prefix_cache,
            priorities: server.scheduling_policy == SchedulingPolicy::Priority,
            sinks,
            tls: certificate.as_ref().map(|certificate| certificate.tls.clone()),
            max_connections: server.max_connections,
            header_timeout: server.header_timeout,
            root_path: api.root_path.clone().unwrap_or_default(),
            tokenizer_info: api.enable_tokenizer_info_endpoint,
            load_tracking: api.enable_server_load_tracking,
            return_tokens_as_token_ids: api.return_tokens_as_token_ids,
            force_include_usage: api.enable_force_include_usage,
            files: file_store(&files)?,
            media: media.limits(engine.max_images),
            image_bytes: image_bytes(),
            response_store: responses.limits(),
            ..ServerOptions::default()
        };
        Ok(Self {
            names: match server.served_model_name {
                Some(names) => names,
                None => vec![engine.model.clone()],
            },
            address: match api.uds {
                Some(path) => Address::Unix(path),
                None => Address::Tcp(server.host, server.port),
            },
            max_queue: server.max_queue,
            drain_timeout: server.drain_timeout,
            kv_events: events.kv_events_config.unwrap_or_default(),
            defaults: generation_defaults(&server.generation_config)?,
            step_timeouts: StepTimeouts {
                stall: server.stall_timeout,
                watchdog: server.watchdog_timeout,
            },
            engine,
            traces,
            access_log,
            template,
            chat,
            options,
            keys,
            certificate,
        })
    }

    /// Before every path, as in `--root-path`.
    pub(crate) fn root_path(&self) -> &str {
        &self.options.root_path
    }

    /// Whether browsers get pages.
    pub(crate) fn has_pages(&self) -> bool {
        self.options.pages
    }

    pub(crate) fn scheme(&self) -> &'static str {
        match self.certificate {
            Some(_) => "https",
            None => "http",
        }
    }

    /// The chat template in place of the model's, where there is one.
    pub(crate) fn template(
        &self,
        of_model: Option<ChatTemplate>,
        special_tokens: &SpecialTokens,
    ) -> Result<Option<ChatTemplate>, Error> {
        match &self.template {
            None => Ok(of_model),
            Some(source) => Ok(Some(ChatTemplate::new(
                source,
                special_tokens,
                &self.engine.renderer,
            )?)),
        }
    }

    /// How answers under `template` are read.
    pub(crate) fn answers(&self, template: Option<&ChatTemplate>) -> AnswerStyle {
        self.chat.answer_style(template)
    }

    /// Sampling defaults, for a model that brings `of_model` along.
    pub(crate) fn generation_defaults(&self, of_model: &GenerationConfig) -> GenerationDefaults {
        self.defaults.unwrap_or_else(|| defaults_of(of_model))
    }

    /// Of the API; before there is a proof, of connections alone. `slowest` is how long a step may take by that proof.
    pub(crate) fn options(&self, proved: Option<Duration>) -> ServerOptions {
        let slowest = proved.unwrap_or_default();
        let patience = Patience::new(self.step_timeouts, slowest);
        if proved.is_some() {
            patience.log(slowest);
        }
        ServerOptions {
            ready_patience: patience.stall,
            watchdog_timeout: patience.watchdog,
            ..self.options.clone()
        }
    }

    /// Follows files that may change.
    pub(crate) async fn watch(self) {
        let certificate = async {
            if let Some(certificate) = self.certificate {
                certificate.watch().await;
            }
        };
        tokio::join!(self.keys.watch(), certificate);
    }
}

/// The store of files and batches, if there is to be one.
fn file_store(args: &FileArgs) -> Result<Option<Arc<FileStore>>, Error> {
    let dir = args.file_store_dir.as_deref();
    let open = |limits| FileStore::open(dir, limits).map(Arc::new);
    let shown = dir.unwrap_or(Path::new("temporary directory"));
    let opened = args.limits().map(open).transpose();
    opened.map_err(Error::unreadable("--file-store-dir", shown))
}

/// A file, or the template itself, which has braces, or the name of a format.
fn chat_template(given: &str) -> Result<String, Error> {
    let path = Path::new(given);
    if !path.exists() && (given.contains('{') || given == ChatTemplate::HARMONY) {
        return Ok(given.to_owned());
    }
    std::fs::read_to_string(path).map_err(Error::unreadable("--chat-template", path))
}

/// `--generation-config`, with vLLM's values. `None`: the model's.
fn generation_defaults(given: &str) -> Result<Option<GenerationDefaults>, Error> {
    Ok(match given {
        "vllm" => Some(GenerationDefaults::default()),
        "auto" => None,
        directory => {
            let path = Path::new(directory).join("generation_config.json");
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(Error::unreadable("--generation-config", &path))?;
            let wrong = |error: ModelError| Error::configuration("--generation-config", error.to_string());
            let config = GenerationConfig::from_json(&path, &text).map_err(wrong)?;
            Some(defaults_of(&config))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_configs() {
        let text = r#"{"temperature": 0.6, "top_k": 20, "do_sample": true}"#;
        let model = GenerationConfig::from_json(Path::new("generation_config.json"), text).unwrap();
        assert_eq!(generation_defaults("auto").unwrap(), None);
        let auto = defaults_of(&model);
        assert_eq!((auto.temperature, auto.top_k), (Some(0.6), Some(20)));
        assert_eq!(
            generation_defaults("vllm").unwrap(),
            Some(GenerationDefaults::default())
        );

        let dir = tempfile::tempdir().unwrap();
        let dir_name = dir.path().to_str().unwrap();
        let missing = generation_defaults(dir_name).unwrap_err().to_string();
        assert!(
            missing.starts_with("--generation-config: cannot read "),
            "{missing}"
        );
        let file = dir.path().join("generation_config.json");
        std::fs::write(&file, r#"{"temperature": 0.6, "do_sample": false}"#).unwrap();
        assert_eq!(
            generation_defaults(dir_name).unwrap().unwrap().temperature,
            Some(0.0)
        );
        std::fs::write(&file, r#"{"temperature": "hot"}"#).unwrap();
        let wrong = generation_defaults(dir_name).unwrap_err();
        assert!(matches!(wrong, Error::Configuration { .. }));
        let wrong = wrong.to_string();
        assert!(
            wrong.starts_with("--generation-config: ")
                && wrong.contains("`temperature` is \"hot\", not a number"),
            "{wrong}"
        );
    }

    #[test]
    fn templates_are_files_or_text() {
        assert_eq!(chat_template("{{ messages }}").unwrap(), "{{ messages }}");
        assert_eq!(chat_template("harmony").unwrap(), ChatTemplate::HARMONY);
        assert!(chat_template("/no/such/template.jinja").is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{{ bos_token }}").unwrap();
        assert_eq!(
            chat_template(file.path().to_str().unwrap()).unwrap(),
            "{{ bos_token }}"
        );
    }
}
