//! Configuration is resolved once: defaults < file < environment < flags.
//!
//! Every layer becomes flags, in that order on one command line where the later wins: one parser, one set of names, one
//! set of checks. What is wrong in a layer is reported under that layer's own names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command, CommandFactory, Parser};

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
    let environment_flags = layers.environment(&environment)?;
    let file = at
        .get_one::<PathBuf>("config")
        .cloned()
        .or_else(|| environment.get("PLIMSOLL_CONFIG").map(Into::into));
    let file_flags = file.map_or(Ok(Vec::new()), |file| layers.file(&file))?;
    let (head, tail) = argv.split_at(1 + path.len());
    let all = head
        .iter()
        .cloned()
        .chain(file_flags)
        .chain(environment_flags)
        .chain(tail.iter().cloned());
    Cli::try_parse_from(all).map_err(Error::Clap)
}

/// The flags that the layers below the command line may set.
struct Layers {
    /// The subcommand that runs; what only `serve` knows is checked by name and then left out.
    command: Command,
}

impl Layers {
    fn environment(&self, variables: &BTreeMap<String, OsString>) -> Result<Vec<OsString>, Error> {
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

    fn file(&self, path: &Path) -> Result<Vec<OsString>, Error> {
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
    fn checked(&self, key: &str, value: &toml::Value) -> Result<Vec<OsString>, String> {
        let flags = flags(key, value)?;
        let alone = ["plimsoll", "serve"]
            .iter()
            .map(OsString::from)
            .chain(flags.iter().cloned());
        Cli::try_parse_from(alone).map_err(|e| first_line(&e))?;
        let applies = self
            .command
            .get_arguments()
            .any(|arg| arg.get_long() == Some(key));
        Ok(if applies { flags } else { Vec::new() })
    }
}

/// The flag of that name, or what is wrong with the name.
fn known(key: &str) -> Result<Arg, String> {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    if let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(key)) {
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
