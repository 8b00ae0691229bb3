//! What all layers come to, setting by setting.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use plimsoll_profiler::MemFraction;

use super::{canonical, known};
use crate::args::{DEFAULT_MODEL, ServeArgs};
use crate::bytes::Bytes;
use crate::secrets::is_secret;

/// A setting of `plimsoll serve`, resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Its flag without dashes, its key in a file.
    pub name: String,
    /// Heading of its group in `--help`.
    pub group: String,
    /// What it is set to.
    pub value: Value,
    /// What is done where it is not set.
    pub otherwise: Option<String>,
    /// Where the value comes from.
    pub origin: Origin,
}

/// What a setting is set to.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing: see [`Setting::otherwise`].
    Unset,
    /// On or off.
    Switch(bool),
    /// A whole number.
    Whole(u64),
    /// Another number.
    Number(f64),
    /// Bytes, and as they were written.
    Size(Bytes, String),
    /// A time, and as it was written.
    Time(Duration, String),
    /// Anything else.
    Text(String),
    /// Several.
    List(Vec<String>),
    /// It is set, and not shown.
    Secret,
}

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The file of `--config`.
    File {
        /// Of the file.
        path: PathBuf,
        /// From 1.
        line: usize,
    },
    /// This variable.
    Environment(String),
    /// The command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(variable) => f.write_str(variable),
            Self::Flag => f.write_str("flag"),
        }
    }
}

/// The settings of `serve` that `matches` holds, in the order of `--help`: by heading.
pub(super) fn of(matches: &ArgMatches, origins: &BTreeMap<String, Origin>) -> Vec<Setting> {
    let command = <ServeArgs as clap::Args>::augment_args(Command::new("serve"));
    let setting = |arg: &Arg| {
        // MODEL is the positional form of --model, which has no help of its own.
        let name = match arg.get_long() {
            Some("model") => return None,
            Some(long) => long.to_owned(),
            None => "model".to_owned(),
        };
        // The other half of a switch.
        if canonical(&name) != name {
            return None;
        }
        let typed = matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        let origin = match (arg.is_positional(), typed) {
            (true, true) => Some(Origin::Flag),
            _ => origins.get(&name).cloned(),
        };
        Some(Setting {
            group: arg.get_help_heading().unwrap_or("General").to_owned(),
            value: match (arg.is_positional(), arg.get_action()) {
                (true, _) => Value::Text(model(matches)),
                (_, ArgAction::SetTrue) => Value::Switch(switch(matches, &name)),
                _ if is_secret(&name) && typed => Value::Secret,
                _ => value(matches, arg),
            },
            otherwise: otherwise(arg),
            origin: origin.unwrap_or(Origin::Default),
            name,
        })
    };
    let mut settings: Vec<Setting> = command.get_arguments().filter_map(setting).collect();
    let mut headings: Vec<String> = Vec::new();
    for setting in &settings {
        if !headings.contains(&setting.group) {
            headings.push(setting.group.clone());
        }
    }
    settings.sort_by_key(|setting| headings.iter().position(|heading| *heading == setting.group));
    settings
}

fn model(matches: &ArgMatches) -> String {
    let of = |id: &str| matches.get_one::<String>(id).cloned();
    of("model")
        .or_else(|| of("model_flag"))
        .unwrap_or_else(|| DEFAULT_MODEL.to_owned())
}

/// What the switch `name` or its opposite says, else what the help calls the default.
fn switch(matches: &ArgMatches, name: &str) -> bool {
    let opposite = known(&format!("no-{name}")).ok();
    let on = known(name).ok();
    let set = |arg: &Option<Arg>| {
        arg.as_ref()
            .is_some_and(|arg| matches.get_flag(arg.get_id().as_str()))
    };
    match (set(&on), set(&opposite)) {
        (true, _) => true,
        (_, true) => false,
        _ => on.is_some_and(|arg| is_default(&arg)),
    }
}

/// Whether this half of a switch is the one that goes without saying.
pub(super) fn is_default(switch: &Arg) -> bool {
    help(switch).contains("(the default)")
}

fn help(arg: &Arg) -> String {
    arg.get_help().map(ToString::to_string).unwrap_or_default()
}

fn value(matches: &ArgMatches, arg: &Arg) -> Value {
    let id = arg.get_id().as_str();
    let raw: Vec<String> = matches.get_raw(id).map_or_else(Vec::new, |words| {
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    });
    let several = arg.get_num_args().is_some_and(|n| n.max_values() > 1);
    if several || matches!(arg.get_action(), ArgAction::Append) {
        return match raw.is_empty() {
            true => Value::Unset,
            false => Value::List(raw),
        };
    }
    let Some(text) = raw.into_iter().next() else {
        return Value::Unset;
    };
    // Another type than asked for is an error, not a value.
    fn typed<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, id: &str) -> Option<T> {
        matches.try_get_one::<T>(id).ok().flatten().cloned()
    }
    let whole = typed::<u64>(matches, id)
        .or_else(|| typed::<usize>(matches, id).map(|n| n as u64))
        .or_else(|| typed::<u32>(matches, id).map(u64::from))
        .or_else(|| typed::<u16>(matches, id).map(u64::from));
    if let Some(number) = whole {
        Value::Whole(number)
    } else if let Some(fraction) = typed::<MemFraction>(matches, id) {
        Value::Number(fraction.get())
    } else if let Some(bytes) = typed::<Bytes>(matches, id) {
        Value::Size(bytes, text)
    } else if let Some(time) = typed::<Duration>(matches, id) {
        Value::Time(time, text)
    } else {
        Value::Text(text)
    }
}

/// What the help says about a flag that is not given.
fn otherwise(arg: &Arg) -> Option<String> {
    let help = help(arg);
    let (_, rest) = help.rsplit_once("[default: ")?;
    Some(rest.split_once(']')?.0.to_owned())
}
