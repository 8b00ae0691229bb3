//! Configuration is resolved once: defaults < file < environment < flags.
//!
//! Every layer becomes flags, in that order on one command line where the later wins: one parser, one set of names, one
//! set of checks. What is wrong in a layer is reported under that layer's own names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, Parser};

use crate::args::{Cli, ServeArgs};
use crate::error::Error;

const PREFIX: &str = "PLIMSOLL_";

/// The process's command line and environment.
pub fn from_process() -> Result<Cli, Error> {
    let environment = std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value)))
        .filter(|(key, _)| key.starts_with(PREFIX));
    parse(std::env::args_os().collect(), environment.collect())
}

/// Parses `argv` (program name first) over `environment` (only `PLIMSOLL_*` variables) over the file of `--config`.
pub fn parse(argv: Vec<OsString>, environment: BTreeMap<String, OsString>) -> Result<Cli, Error> {
    let matches = Cli::command().try_get_matches_from(&argv).map_err(Error::Clap)?;
    let mut path = Vec::new();
    let mut at = &matches;
    while let Some((name, inner)) = at.subcommand() {
        path.push(name);
        at = inner;
    }
    let command = path.iter().fold(Cli::command(), |command, name| {
        command
            .find_subcommand(name)
            .cloned()
            .expect("clap matched this subcommand")
    });
    if !command
        .get_arguments()
        .any(|arg| arg.get_long() == Some("config"))
    {
        return Cli::try_parse_from(argv).map_err(Error::Clap);
    }
    let layers = Layers { command };
    let mut environment_flags = layers.environment(&environment)?;
    let file = at
        .get_one::<PathBuf>("config")
        .cloned()
        .or_else(|| environment.get("PLIMSOLL_CONFIG").map(Into::into));
    let mut file_flags = file.map_or(Ok(Vec::new()), |file| layers.file(&file))?;
    // The later layer wins over what it contradicts, too.
    let typed = layers.typed(at);
    environment_flags.retain(|flag| !flag.contradicts(&typed));
    let above: Vec<String> = environment_flags
        .iter()
        .map(|flag| flag.name.clone())
        .chain(typed)
        .collect();
    file_flags.retain(|flag| !flag.contradicts(&above));
    let words = |flags: Vec<LayerFlag>| flags.into_iter().flat_map(|flag| flag.words);
    let (head, tail) = argv.split_at(1 + path.len());
    let all = head
        .iter()
        .cloned()
        .chain(words(file_flags))
        .chain(words(environment_flags))
        .chain(tail.iter().cloned());
    Cli::try_parse_from(all).map_err(Error::Clap)
}

/// A flag that a layer below the command line sets.
struct LayerFlag {
    /// Without dashes.
    name: String,
    /// Given again it means one more, and not another.
    adds: bool,
    /// As on a command line.
    words: Vec<OsString>,
}

impl LayerFlag {
    /// Whether a later layer that sets `names` says something else about the same thing.
    fn contradicts(&self, names: &[String]) -> bool {
        let others = contradicted_by(&self.name);
        names
            .iter()
            .any(|name| (self.adds || *name != self.name) && others.contains(name))
    }
}

/// Names of the flag `name` and of those that cannot stand beside it, aliases included.
pub(crate) fn contradicted_by(name: &str) -> Vec<String> {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    let Ok(flag) = known(name) else {
        return vec![name.to_owned()];
    };
    let conflict = |of: &Arg, with: &Arg| {
        let conflicts = command.get_arg_conflicts_with(of);
        conflicts.iter().any(|arg| arg.get_id() == with.get_id())
    };
    command
        .get_arguments()
        .filter(|arg| arg.get_id() == flag.get_id() || conflict(arg, &flag) || conflict(&flag, arg))
        .flat_map(names)
        .collect()
}

/// Every name of a flag.
fn names(arg: &Arg) -> Vec<String> {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    let names = arg.get_long().into_iter().chain(aliases);
    names.map(str::to_owned).collect()
}

/// The flags that the layers below the command line may set.
struct Layers {
    /// The subcommand that runs; what only `serve` knows is checked by name and then left out.
    command: Command,
}

impl Layers {
    /// Flags that were typed, without dashes.
    fn typed(&self, matches: &ArgMatches) -> Vec<String> {
        let typed =
            |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        let typed = self.command.get_arguments().filter(typed);
        typed.filter_map(Arg::get_long).map(str::to_owned).collect()
    }

    fn environment(&self, variables: &BTreeMap<String, OsString>) -> Result<Vec<LayerFlag>, Error> {
        let mut flags = Vec::new();
        for (variable, value) in variables {
            let error = |message: String| Error::Configuration {
                origin: format!("environment variable {variable}"),
                message,
            };
            let key = variable[PREFIX.len()..].to_ascii_lowercase().replace('_', "-");
            let value = value
                .to_str()
                .ok_or_else(|| error("the value is not UTF-8".to_owned()))?;
            let arg = known(&key).map_err(|message| error(message + service_links_hint(variables)))?;
            let value = match (arg.get_action(), value.to_ascii_lowercase().as_str()) {
                (ArgAction::SetTrue, "1" | "true" | "yes" | "on") => toml::Value::Boolean(true),
                (ArgAction::SetTrue, "0" | "false" | "no" | "off") => toml::Value::Boolean(false),
                (ArgAction::SetTrue, _) => return Err(error("true or false is expected".to_owned())),
                _ => toml::Value::String(value.to_owned()),
            };
            flags.extend(self.checked(&key, &value).map_err(error)?);
        }
        Ok(flags)
    }

    fn file(&self, path: &Path) -> Result<Vec<LayerFlag>, Error> {
        let error = |message: String| Error::Configuration {
            origin: path.display().to_string(),
            message,
        };
        let text = std::fs::read_to_string(path).map_err(|e| error(format!("it cannot be read: {e}")))?;
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| error(e.to_string()))?;
        let mut flags = Vec::new();
        for (key, value) in &table {
            let name = key.replace('_', "-");
            if name == "config" {
                return Err(error("a configuration file cannot name another one".to_owned()));
            }
            known(&name).map_err(error)?;
            flags.extend(
                self.checked(&name, value)
                    .map_err(|e| error(format!("{key}: {e}")))?,
            );
        }
        Ok(flags)
    }

    /// `key = value` as flags, alone on a command line they are legal on.
    fn checked(&self, key: &str, value: &toml::Value) -> Result<Option<LayerFlag>, String> {
        let flag = known(key)?;
        let name = flag.get_long().unwrap_or(key).to_owned();
        let adds = matches!(flag.get_action(), ArgAction::Append);
        let flags = flags(&name, value)?;
        let alone = ["plimsoll", "serve"]
            .iter()
            .map(OsString::from)
            .chain(flags.iter().cloned());
        Cli::try_parse_from(alone).map_err(|e| first_line(&e))?;
        let applies = self
            .command
            .get_arguments()
            .any(|arg| arg.get_long() == Some(&*name));
        Ok(applies.then_some(LayerFlag {
            name,
            adds,
            words: flags,
        }))
    }
}

/// The flag of that name, or what is wrong with the name.
fn known(key: &str) -> Result<Arg, String> {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    if let Some(arg) = command
        .get_arguments()
        .find(|arg| names(arg).iter().any(|name| name == key))
    {
        return Ok(arg.clone());
    }
    let similar = command
        .get_arguments()
        .filter_map(Arg::get_long)
        .map(|name| (strsim::jaro_winkler(key, name), name))
        .filter(|&(likeness, _)| likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    Err(match similar {
        Some((_, name)) => format!("there is no setting {key:?}; did you mean {name:?}?"),
        None => format!("there is no setting {key:?}; `plimsoll serve --help` lists them"),
    })
}

fn flags(key: &str, value: &toml::Value) -> Result<Vec<OsString>, String> {
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(_) | toml::Value::Float(_) => Ok(value.to_string()),
        other => Err(format!("a {} has no meaning here", other.type_str())),
    };
    let switch = matches!(known(key)?.get_action(), ArgAction::SetTrue);
    Ok(match value {
        toml::Value::Boolean(true) if switch => vec![format!("--{key}").into()],
        toml::Value::Boolean(false) if switch => match key.strip_prefix("no-") {
            Some(positive) => vec![format!("--{positive}").into()],
            None => vec![format!("--no-{key}").into()],
        },
        _ if switch => return Err("true or false is expected".to_owned()),
        toml::Value::Array(values) if matches!(known(key)?.get_action(), ArgAction::Append) => {
            let flag = |value| Ok(format!("--{key}={}", scalar(value)?).into());
            values.iter().map(flag).collect::<Result<_, String>>()?
        }
        // `--key=value` keeps a value that begins with a dash a value.
        toml::Value::Array(values) if matches!(known(key)?.get_num_args(), Some(n) if n.max_values() > 1) => {
            let values = values.iter().map(scalar).collect::<Result<Vec<_>, _>>()?;
            std::iter::once(format!("--{key}"))
                .chain(values)
                .map(Into::into)
                .collect()
        }
        value => vec![format!("--{key}={}", scalar(value)?).into()],
    })
}

/// clap's message without the usage that follows it: the layer is not a command line.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// Kubernetes sets `<SERVICE>_PORT` and more in every container of the namespace.
fn service_links_hint(variables: &BTreeMap<String, OsString>) -> &'static str {
    match variables.contains_key("PLIMSOLL_SERVICE_HOST") {
        true => {
            " (Kubernetes sets such variables for a Service called plimsoll: set enableServiceLinks: false)"
        }
        false => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    fn serve(argv: &str, environment: &[(&str, &str)]) -> Result<ServeArgs, Error> {
        let argv = argv.split(' ').map(OsString::from).collect();
        let environment = environment
            .iter()
            .map(|&(k, v)| (k.to_owned(), v.into()))
            .collect();
        match parse(argv, environment)?.command {
            args::Command::Serve(args) => Ok(*args),
            other => panic!("not serve: {other:?}"),
        }
    }

    fn config(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn flags_beat_environment_beats_file_beats_defaults() {
        let file = config("port = 1\nmax_num_seqs = 1\nblock-size = 8\nserved-model-name = [\"a\", \"b\"]\n");
        let argv = format!("plimsoll serve --port 3 --config {}", file.path().display());
        let args = serve(&argv, &[("PLIMSOLL_PORT", "2"), ("PLIMSOLL_MAX_NUM_SEQS", "2")]).unwrap();
        assert_eq!(args.server.port, 3);
        assert_eq!(args.engine.limits.max_num_seqs, Some(2));
        assert_eq!(args.engine.limits.block_size.tokens(), 8);
        assert_eq!(args.server.served_model_name.unwrap(), ["a", "b"]);
        assert_eq!(args.engine.limits.max_num_batched_tokens, None);
    }

    #[test]
    fn a_later_layer_wins_over_what_it_contradicts() {
        let file = config("max-total-token-num = 64\ngpu-memory-utilization = 0.5\n");
        let file = format!("--config={}", file.path().display());
        let memory = |argv: &str, environment: &[(&str, &str)]| {
            let args = serve(&format!("plimsoll serve {file} {argv}"), environment).unwrap();
            args.engine.memory
        };
        let pins = |memory: &args::MemoryArgs| (memory.max_total_token_num, memory.kv_cache_memory_bytes);
        assert_eq!(pins(&memory("", &[])).0, Some(64));
        let bytes = Some(crate::bytes::Bytes(9));
        assert_eq!(pins(&memory("--kv-cache-memory-bytes 9", &[])), (None, bytes));
        let variable = [("PLIMSOLL_KV_CACHE_MEMORY_BYTES", "9")];
        assert_eq!(pins(&memory("", &variable)), (None, bytes));
        assert_eq!(
            pins(&memory("--max-total-token-num 3", &variable)),
            (Some(3), None)
        );
        let typed = memory("--max-device-memory 1GiB", &[]);
        assert_eq!(typed.device_memory, Some(crate::bytes::Bytes(1 << 30)));
        assert_eq!(typed.gpu_memory_utilization, None);
        // U34: the alias is a name in every layer. What contradicts itself within one is an error.
        let alias = [("PLIMSOLL_MAX_DEVICE_MEMORY", "7")];
        assert_eq!(memory("", &alias).device_memory, Some(crate::bytes::Bytes(7)));
        let both = "plimsoll serve --max-total-token-num 3 --kv-cache-memory-bytes 9";
        assert!(matches!(serve(both, &[]), Err(Error::Clap(_))));
    }

    #[test]
    fn switches_and_lists_and_the_model_are_overridden_whole() {
        let file = config(
            "enable-prefix-caching = false\nmodel = \"from/file\"\nserved-model-name = [\"a\", \"b\"]\n",
        );
        let file = format!("--config={}", file.path().display());
        let args = serve(&format!("plimsoll serve {file}"), &[]).unwrap();
        assert!(!args.engine.limits.prefix_caching());
        assert_eq!(args.engine.model.model(), "from/file");

        let argv = format!("plimsoll serve {file} mine --enable-prefix-caching --served-model-name c");
        let args = serve(&argv, &[]).unwrap();
        assert!(args.engine.limits.prefix_caching());
        assert_eq!(args.engine.model.model(), "mine");
        assert_eq!(args.server.served_model_name.unwrap(), ["c"]);

        let args = serve(&format!("plimsoll serve --model sim {file}"), &[]).unwrap();
        assert_eq!(args.engine.model.model(), args::SIM_MODEL);
        let args = serve("plimsoll serve", &[("PLIMSOLL_ENABLE_PREFIX_CACHING", "0")]).unwrap();
        assert!(!args.engine.limits.prefix_caching());
    }

    #[test]
    fn a_later_layer_replaces_a_list_that_flags_add_to() {
        let file = config("api-key = [\"a\", \"b\"]\n");
        let file = format!("--config={}", file.path().display());
        let keys = |argv: &str, environment: &[(&str, &str)]| {
            let args = serve(&format!("plimsoll serve {file} {argv}"), environment).unwrap();
            let keys = args.server.access.api_key.iter();
            keys.map(|key| key.reveal().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(keys("", &[]), ["a", "b"]);
        assert_eq!(keys("", &[("PLIMSOLL_API_KEY", "c")]), ["c"]);
        assert_eq!(
            keys("--api-key d --api-key e", &[("PLIMSOLL_API_KEY", "c")]),
            ["d", "e"]
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("max-num-seq = 3", "did you mean \"max-num-seqs\""),
            ("port = 99999", "99999"),
            ("port = true", "boolean"),
            ("enable-prefix-caching = 3", "true or false"),
            ("mem-fraction = 1.5", "at most 1.0"),
            ("block-size = 12", "8, 16 or 32"),
            ("config = \"x\"", "another one"),
            ("[server]\nport = 1", "no setting \"server\""),
            ("port = ", "TOML"),
        ];
        for (text, expected) in cases {
            let file = config(text);
            let error = serve(&format!("plimsoll serve --config {}", file.path().display()), &[])
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(
                error.contains(&file.path().display().to_string()),
                "{text}: {error}"
            );
        }
        let error = serve("plimsoll serve", &[("PLIMSOLL_PROT", "1")])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("PLIMSOLL_PROT") && error.contains("\"port\""),
            "{error}"
        );
        let error = serve("plimsoll serve --config /no/such.toml", &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such.toml"), "{error}");
    }

    #[test]
    fn a_layer_may_hold_what_only_serve_knows() {
        let argv = ["plimsoll", "profile", "sim"]
            .iter()
            .map(OsString::from)
            .collect();
        let environment = BTreeMap::from([
            ("PLIMSOLL_PORT".to_owned(), "9".into()),
            ("PLIMSOLL_MAX_NUM_SEQS".to_owned(), "2".into()),
        ]);
        let args::Command::Profile(args) = parse(argv, environment).unwrap().command else {
            panic!("not profile")
        };
        assert_eq!(args.engine.limits.max_num_seqs, Some(2));
    }

    #[test]
    fn every_preset_loads() {
        let presets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
        let mut loaded = 0;
        for entry in std::fs::read_dir(presets).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ext| ext == "toml") {
                serve(&format!("plimsoll serve --config {}", path.display()), &[]).unwrap();
                loaded += 1;
            }
        }
        assert!(loaded > 0, "there are presets");
    }
}
