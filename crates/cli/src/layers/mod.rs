//! Configuration is resolved once: defaults < file < environment < flags.
//!
//! Every layer becomes flags, in that order on one command line where the later wins: one parser, one set of names, one
//! set of checks. What is wrong in a layer is reported under that layer's own names.

mod file;
mod foreign;
mod settings;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, Parser};

use crate::args::{Cli, ServeArgs};
use crate::error::Error;

pub use foreign::{advice, strangers};
pub use settings::{Origin, Setting, Value};

const PREFIX: &str = "PLIMSOLL_";

/// The process's command line and environment.
pub fn from_process() -> Result<Cli, Error> {
    parse(std::env::args_os().collect(), environment())
}

/// Every setting of `plimsoll serve` as this process's layers resolve it.
///
/// # Errors
/// As [`parse`].
pub fn settings_of_process() -> Result<Vec<Setting>, Error> {
    settings(std::env::args_os().collect(), environment())
}

fn environment() -> BTreeMap<String, OsString> {
    std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value)))
        .filter(|(key, _)| key.starts_with(PREFIX))
        .collect()
}

/// Parses `argv` (program name first) over `environment` (only `PLIMSOLL_*` variables) over the file of `--config`.
pub fn parse(argv: Vec<OsString>, environment: BTreeMap<String, OsString>) -> Result<Cli, Error> {
    let merged = Merged::new(argv, &environment)?;
    Cli::try_parse_from(merged.words).map_err(Error::Clap)
}

/// Every setting of `plimsoll serve`, and which of these layers it comes from.
///
/// # Errors
/// As [`parse`].
pub fn settings(argv: Vec<OsString>, environment: BTreeMap<String, OsString>) -> Result<Vec<Setting>, Error> {
    let merged = Merged::new(argv, &environment)?;
    let matches = Cli::command()
        .try_get_matches_from(&merged.words)
        .map_err(Error::Clap)?;
    Ok(settings::of(innermost(&matches).1, &merged.origins))
}

/// The layers as one command line.
struct Merged {
    words: Vec<OsString>,
    /// Where what stands on it comes from, by [`canonical`] names.
    origins: BTreeMap<String, Origin>,
}

impl Merged {
    fn new(argv: Vec<OsString>, environment: &BTreeMap<String, OsString>) -> Result<Self, Error> {
        let argv = with_dashes(argv);
        let matches = Cli::command()
            .try_get_matches_from(&argv)
            .map_err(|error| refused(error, &argv))?;
        let (path, at) = innermost(&matches);
        let command = path.iter().fold(Cli::command(), |command, name| {
            command
                .find_subcommand(name)
                .cloned()
                .expect("clap matched this subcommand")
        });
        let mut origins = BTreeMap::new();
        if !command
            .get_arguments()
            .any(|arg| arg.get_long() == Some("config"))
        {
            return Ok(Self { words: argv, origins });
        }
        let layers = Layers { command };
        let mut environment_flags = layers.environment(environment)?;
        let file = at
            .get_one::<PathBuf>("config")
            .cloned()
            .or_else(|| environment.get("PLIMSOLL_CONFIG").map(Into::into));
        let mut file_flags = file.map_or(Ok(Vec::new()), |file| layers.file(&file))?;
        // The later layer wins over what it contradicts, too.
        let typed = layers.typed(at);
        environment_flags.retain(|flag| !flag.contradicts(&typed));
        let above = environment_flags.iter().map(|flag| &flag.name).chain(&typed);
        let above: Vec<String> = above.cloned().collect();
        file_flags.retain(|flag| !flag.contradicts(&above));
        for flag in file_flags.iter().chain(&environment_flags) {
            origins.insert(canonical(&flag.name), flag.origin.clone());
        }
        origins.extend(typed.iter().map(|name| (canonical(name), Origin::Flag)));
        let words = |flags: Vec<LayerFlag>| flags.into_iter().flat_map(|flag| flag.words);
        let (head, tail) = argv.split_at(1 + path.len());
        let lower = words(file_flags).chain(words(environment_flags));
        let words = head.iter().cloned().chain(lower).chain(tail.iter().cloned());
        let words = words.collect();
        Ok(Self { words, origins })
    }
}

/// Names of the subcommands that were matched, and what the innermost of them was given.
fn innermost(matches: &ArgMatches) -> (Vec<&str>, &ArgMatches) {
    let mut path = Vec::new();
    let mut at = matches;
    while let Some((name, inner)) = at.subcommand() {
        path.push(name);
        at = inner;
    }
    (path, at)
}

/// The same words with flags as clap knows them: vLLM takes `--max_model_len` for `--max-model-len` too, and `-tp 2` and `-tp=2`
/// (Python's argparse has names of several letters behind one dash, clap has none).
fn with_dashes(argv: Vec<OsString>) -> Vec<OsString> {
    let end = argv.iter().position(|word| word == "--").unwrap_or(argv.len());
    let dashed = |(place, word): (usize, OsString)| match word.to_str() {
        Some(text) if place < end && text.starts_with("--") => {
            let name = text.split('=').next().unwrap_or(text);
            (name.replace('_', "-") + &text[name.len()..]).into()
        }
        Some(text) if place < end && text.split('=').next() == Some("-tp") => format!("-{text}").into(),
        _ => word,
    };
    argv.into_iter().enumerate().map(dashed).collect()
}

/// clap's error; where flags of another server stand on the command line, what to do instead of each.
fn refused(error: clap::Error, argv: &[OsString]) -> Error {
    let strangers = match error.kind() {
        ErrorKind::UnknownArgument => foreign::on(argv),
        _ => Vec::new(),
    };
    match strangers.as_slice() {
        [] => Error::Clap(error),
        [(flag, advice)] => Error::configuration(flag, advice),
        several => {
            let lines = several
                .iter()
                .map(|(flag, advice)| format!("\n  {flag}: {advice}"));
            let lines: String = lines.collect();
            Error::configuration(
                "unknown flags",
                format!("{} that other servers have{lines}", several.len()),
            )
        }
    }
}

/// A flag that a layer below the command line sets.
struct LayerFlag {
    /// Without dashes.
    name: String,
    origin: Origin,
    /// As on a command line.
    words: Vec<OsString>,
}

impl LayerFlag {
    /// Within one layer there is no later one: what is said twice, or against something else, has no meaning.
    fn beside(&self, others: &[Self]) -> Result<(), String> {
        let against = contradicted_by(&self.name);
        let same =
            |other: &Self| against.contains(&other.name) || canonical(&self.name) == canonical(&other.name);
        match others.iter().find(|other| same(other)) {
            Some(other) if other.name == self.name => Err(format!(
                "{} is set a second time, after {}",
                self.name, other.origin
            )),
            Some(other) => Err(format!(
                "{} and {} ({}) cannot both be set",
                self.name, other.name, other.origin
            )),
            None => Ok(()),
        }
    }

    /// Whether a later layer that sets `names` says something about the same thing: MODEL and --model, or a list, do not stand
    /// beside each other.
    fn contradicts(&self, names: &[String]) -> bool {
        let others = contradicted_by(&self.name);
        names.iter().any(|name| others.contains(name))
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

/// The name under which a flag's setting is shown: neither an alias nor the opposite of a switch.
fn canonical(name: &str) -> String {
    let long = |name: &str| known(name).ok().and_then(|arg| arg.get_long().map(str::to_owned));
    let name = long(name).unwrap_or_else(|| name.to_owned());
    name.strip_prefix("no-").and_then(long).unwrap_or(name)
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
        // MODEL is named as its flag.
        let name = |arg: &Arg| {
            arg.get_long()
                .or_else(|| arg.is_positional().then_some(arg.get_id().as_str()))
                .map(str::to_owned)
        };
        typed.filter_map(name).collect()
    }

    fn environment(&self, variables: &BTreeMap<String, OsString>) -> Result<Vec<LayerFlag>, Error> {
        let mut flags = Vec::new();
        for (variable, value) in variables {
            let error =
                |message: String| Error::configuration(format!("environment variable {variable}"), message);
            let key = variable[PREFIX.len()..].to_ascii_lowercase().replace('_', "-");
            let not_text = || error("the value is not UTF-8".to_owned());
            let value = value.to_str().ok_or_else(not_text)?;
            let wrong = |message: String| error(message + service_links_hint(variables));
            let arg = known(&key).map_err(wrong)?;
            let value = match (arg.get_action(), value.to_ascii_lowercase().as_str()) {
                (ArgAction::SetTrue, "1" | "true" | "yes" | "on") => toml::Value::Boolean(true),
                (ArgAction::SetTrue, "0" | "false" | "no" | "off") => toml::Value::Boolean(false),
                (ArgAction::SetTrue, _) => return Err(error("true or false is expected".to_owned())),
                _ => toml::Value::String(value.to_owned()),
            };
            let origin = Origin::Environment(variable.clone());
            if let Some(flag) = self.checked(&key, &value, origin).map_err(wrong)? {
                flag.beside(&flags).map_err(error)?;
                flags.push(flag);
            }
        }
        Ok(flags)
    }

    /// `key = value` as flags, alone on a command line they are legal on.
    fn checked(&self, key: &str, value: &toml::Value, origin: Origin) -> Result<Option<LayerFlag>, String> {
        let flag = known(key)?;
        let name = flag.get_long().unwrap_or(key).to_owned();
        let flags = flags(&name, value)?;
        let alone = ["plimsoll", "serve"].iter().map(OsString::from);
        Cli::try_parse_from(alone.chain(flags.iter().cloned())).map_err(|e| message(&e))?;
        let mut arguments = self.command.get_arguments();
        let applies = arguments.any(|arg| arg.get_long() == Some(&*name));
        Ok(applies.then_some(LayerFlag {
            name,
            origin,
            words: flags,
        }))
    }
}

/// The flag of that name, or what is wrong with the name.
fn known(key: &str) -> Result<Arg, String> {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    let is_named = |arg: &&Arg| names(arg).iter().any(|name| name == key);
    if let Some(arg) = command.get_arguments().find(is_named) {
        return Ok(arg.clone());
    }
    if let Some(advice) = advice(key) {
        return Err(format!("there is no setting {key:?}: {advice}"));
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
        // Settings that are JSON can be tables.
        toml::Value::Table(_) if takes_json(&known(key)?) => {
            serde_json::to_string(value).map_err(|error| error.to_string())
        }
        other => Err(format!(
            "a string or number is expected, not {}",
            other.type_str()
        )),
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
        toml::Value::Array(values)
            if values.len() > 1 && matches!(known(key)?.get_num_args(), Some(n) if n.max_values() > 1) =>
        {
            let values = values.iter().map(scalar).collect::<Result<Vec<_>, _>>()?;
            let words = std::iter::once(format!("--{key}")).chain(values);
            words.map(Into::into).collect()
        }
        // `--key=value` keeps a value that begins with a dash a value.
        toml::Value::Array(values) if values.len() == 1 => {
            vec![format!("--{key}={}", scalar(&values[0])?).into()]
        }
        value => vec![format!("--{key}={}", scalar(value)?).into()],
    })
}

fn takes_json(flag: &Arg) -> bool {
    let names = flag.get_value_names().unwrap_or_default();
    names.iter().any(|name| name == "JSON")
}

/// clap's message, with the values that it names, without the usage that follows them: the layer is not a command line.
fn message(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().take_while(|line| !line.is_empty());
    let line = lines.map(str::trim).collect::<Vec<_>>().join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
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
mod tests;
