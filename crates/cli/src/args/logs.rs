//! What is logged, and how.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;

/// The log on stderr.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "General")]
pub struct LogArgs {
    /// Format of the log on stderr: text, json (one object per line), or auto (json if serve's stderr is not a terminal, else
    /// text)
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub log_format: LogFormat,
    /// Log level: off, error, warn, info, debug or trace, optionally with levels of modules: info,plimsoll_engine=debug.
    /// A level without a module applies to this server; libraries log only warnings unless you name them [default: RUST_LOG, or info]
    #[arg(long, value_name = "LEVELS")]
    pub log_level: Option<LogLevels>,
    /// Log every detail of a start as text, with timestamps, instead of one line per phase; so does any --log-level or RUST_LOG.
    /// JSON always has all of them
    #[arg(short, long, overrides_with = "no_verbose")]
    pub verbose: bool,
    /// Log one line per phase (the default)
    #[arg(long, overrides_with = "verbose", hide = true)]
    pub(crate) no_verbose: bool,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// What suits the reader.
    #[default]
    Auto,
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Our crates: their lines are logged under these names behind `plimsoll_`, and the modules below them.
const CRATES: [&str; 14] = [
    "cli",
    "core",
    "device",
    "engine",
    "images",
    "kernels",
    "kv",
    "kv_events",
    "model",
    "profiler",
    "scheduler",
    "server",
    "sim",
    "text",
];

/// `--log-level`: the least level of this server, and those of modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLevels {
    own: LevelFilter,
    /// Beginnings of targets.
    modules: Vec<(String, LevelFilter)>,
}

impl Default for LogLevels {
    fn default() -> Self {
        Self {
            own: LevelFilter::INFO,
            modules: Vec::new(),
        }
    }
}

impl FromStr for LogLevels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut levels = Self::default();
        let mut alone = None;
        for item in text.split(',').map(str::trim) {
            match item.split_once('=') {
                Some((module, level)) => levels.modules.push((target(module)?, self::level(level)?)),
                None if alone.is_some() => {
                    return Err(format!("{item:?} is a second level without a module"));
                }
                None => alone = Some(self::level(item)?),
            }
        }
        levels.own = alone.unwrap_or(levels.own);
        Ok(levels)
    }
}

impl fmt::Display for LogLevels {
    /// As `tracing_subscriber`'s `EnvFilter` reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "warn,plimsoll={}", self.own)?;
        let mut modules = self.modules.iter();
        modules.try_for_each(|(module, level)| write!(f, ",{module}={level}"))
    }
}

fn level(text: &str) -> Result<LevelFilter, String> {
    // Numbers would be legal to `tracing`.
    let named = text.chars().all(|c| c.is_ascii_alphabetic()) && !text.is_empty();
    let level = named.then(|| text.parse().ok()).flatten();
    level
        .ok_or_else(|| format!("{text:?} is not a level: off, error, warn, info, debug or trace is expected"))
}

fn target(module: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if module.is_empty() || !module.chars().all(legal) {
        return Err(format!(
            "{module:?} is not a module path such as plimsoll_engine::thread"
        ));
    }
    // Requests are logged under plimsoll::request. A library that is not there is not known to be none.
    let name = module.split(':').next().unwrap_or(module);
    let of = name.strip_prefix("plimsoll").unwrap_or_default();
    let ours = of.strip_prefix('_').unwrap_or(of);
    if !of.is_empty() && !CRATES.contains(&ours) {
        let likeness = |name: &&&str| (strsim::jaro_winkler(ours, name) * 1e6) as u64;
        let similar = CRATES.iter().max_by_key(likeness).unwrap_or(&CRATES[0]);
        return Err(format!(
            "there is no module {name:?}; did you mean \"plimsoll_{similar}\"?"
        ));
    }
    Ok(module.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_modules() {
        let shown = |text: &str| text.parse::<LogLevels>().map(|levels| levels.to_string());
        assert_eq!(shown("info"), Ok("warn,plimsoll=info".into()));
        assert_eq!(
            shown("warn, plimsoll_engine::thread=TRACE,hyper=debug"),
            Ok("warn,plimsoll=warn,plimsoll_engine::thread=trace,hyper=debug".into())
        );
        assert_eq!(
            shown("plimsoll_kv=off"),
            Ok("warn,plimsoll=info,plimsoll_kv=off".into())
        );
        for (wrong, expected) in [
            ("inof", "\"inof\""),
            ("", "not a level"),
            ("3", "not a level"),
            ("info,debug", "second level"),
            ("info,plimsoll_engine=dbug", "\"dbug\""),
            ("info,plimsol_engine=", "not a level"),
            ("plimsoll_engin=debug", "\"plimsoll_engine\""),
            ("a b=debug", "not a module"),
        ] {
            let error = wrong.parse::<LogLevels>().unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }

    #[test]
    fn every_crate_is_a_target() {
        let crates = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        for entry in std::fs::read_dir(crates).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(CRATES.contains(&&*name.replace('-', "_")), "{name}");
        }
    }
}
