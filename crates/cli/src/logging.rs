//! Log lines on stderr: text for people, one JSON object per line for machines. Where nobody asks for more, people get a
//! line for each phase of a start instead of its details (see `terminal`).

use std::backtrace::Backtrace;
use std::ffi::OsString;
use std::fmt;
use std::io::{IsTerminal, stderr};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

use crate::args::{LogArgs, LogFormat, LogLevels};
use crate::error::Error;
use crate::terminal::{self, Style};

/// Whether the log is JSON, once that is known.
static JSON: OnceLock<bool> = OnceLock::new();

/// Who reads the log where `--log-format` leaves it to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A person who waits for the end, even if it goes to a file.
    Command,
    /// Whoever collects logs, unless it is a terminal.
    Server,
}

/// Begins to log.
///
/// # Errors
/// Where `RUST_LOG` is needed and wrong.
pub fn init(args: &LogArgs, kind: Kind) -> Result<(), Error> {
    let asked = args.log_level.as_ref().map(LogLevels::to_string);
    let asked = asked.or_else(|| {
        std::env::var(EnvFilter::DEFAULT_ENV)
            .ok()
            .filter(|set| !set.trim().is_empty())
    });
    let json = is_json_for(args.log_format, kind);
    if JSON.set(json).is_err() {
        // A second call finds everything as it is.
        return Ok(());
    }
    let style = match (json, &asked) {
        (true, _) => Style::Json,
        (false, None) if !args.verbose => Style::Phases,
        (false, _) => Style::Lines,
    };
    terminal::set_style(style);
    let filter = match (asked, style) {
        (Some(asked), _) => asked,
        (None, Style::Phases) => without_details(),
        (None, _) => LogLevels::default().to_string(),
    };
    let filter: EnvFilter = filter.parse().map_err(|error| {
        let origin = format!("environment variable {}", EnvFilter::DEFAULT_ENV);
        Error::configuration(origin, format!("{error}; --log-level takes levels too"))
    })?;
    let text = tracing_subscriber::fmt()
        .with_writer(terminal::Stderr)
        .with_ansi(terminal::is_coloured())
        .with_target(false);
    match style {
        Style::Json => {
            std::panic::set_hook(Box::new(log_panic));
            install(as_json(filter));
        }
        Style::Lines => install(text.with_env_filter(filter).finish()),
        Style::Phases => install(text.with_timer(Clock).with_env_filter(filter).finish()),
    }
    Ok(())
}

/// Modules whose lines below a warning are details of a start: phases say them in short.
const DETAILS: [&str; 7] = [
    "plimsoll_cli::backend",
    "plimsoll_cli::hub",
    "plimsoll_cli::lock",
    "plimsoll_cli::patience",
    "plimsoll_cli::progress",
    "plimsoll_cli::start",
    "plimsoll_model::weights",
];

/// Whose lines our own errors repeat: the Hub's client says each request that fails.
const REPEATED: &str = "hf_hub::retry";

/// The default levels, less the details.
fn without_details() -> String {
    let details = DETAILS.map(|module| format!(",{module}=warn"));
    format!("{}{},{REPEATED}=off", LogLevels::default(), details.concat())
}

/// The time of day in UTC, to the second.
struct Clock;

impl FormatTime for Clock {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let [hours, minutes, seconds] = time_of_day(now.as_secs());
        write!(writer, "{hours:02}:{minutes:02}:{seconds:02}Z")
    }
}

/// Hours, minutes and seconds of a time in seconds since 1970.
fn time_of_day(since_1970: u64) -> [u64; 3] {
    let today = since_1970 % (24 * 3600);
    [today / 3600, today / 60 % 60, today % 60]
}

/// Whether the log is JSON; before [`init`], what it is going to be as far as these arguments and this variable tell.
pub fn is_json() -> bool {
    let guess = || guess(std::env::args_os(), std::env::var("PLIMSOLL_LOG_FORMAT").ok());
    JSON.get().copied().unwrap_or_else(guess)
}

/// Logs an error that must be read, whatever `--log-level` says, as one line of JSON.
pub fn last_word(text: &str, exit_code: u8) {
    let all = as_json(EnvFilter::default().add_directive(LevelFilter::ERROR.into()));
    tracing::subscriber::with_default(all, || tracing::error!(target: "plimsoll", exit_code, "{text}"));
}

/// Draws no bar from here on.
pub fn end_bars() {
    terminal::end_bars();
}

fn install(subscriber: impl Subscriber + Send + Sync) {
    // Somebody else's subscriber in this process stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

fn as_json(filter: EnvFilter) -> impl Subscriber + Send + Sync {
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .json()
        .flatten_event(true)
        .with_span_list(false)
        .finish()
}

fn is_json_for(format: LogFormat, kind: Kind) -> bool {
    match format {
        LogFormat::Text => false,
        LogFormat::Json => true,
        LogFormat::Auto => kind == Kind::Server && !stderr().is_terminal(),
    }
}

/// What a command line that cannot be parsed wants, or one whose file or environment are wrong.
fn guess(argv: impl Iterator<Item = OsString>, variable: Option<String>) -> bool {
    let words: Vec<String> = argv.map(|word| word.to_string_lossy().into_owned()).collect();
    let flag = words.iter().enumerate().rev().find_map(|(place, word)| {
        let rest = word.replace('_', "-");
        match rest.strip_prefix("--log-format")? {
            "" => words.get(place + 1).cloned(),
            rest => rest.strip_prefix('=').map(str::to_owned),
        }
    });
    let format = match flag.or(variable).as_deref() {
        Some("json") => LogFormat::Json,
        Some("text") => LogFormat::Text,
        _ => LogFormat::Auto,
    };
    let kind = match words.get(1).map(String::as_str) {
        Some("serve") => Kind::Server,
        _ => Kind::Command,
    };
    is_json_for(format, kind)
}

/// The standard library's message has lines of its own.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    tracing::error!(
        thread = thread.name().unwrap_or("unnamed"),
        place = panic.location().map(tracing::field::display),
        backtrace = %Backtrace::force_capture(),
        "panicked: {}",
        panic.payload_as_str().unwrap_or("no message")
    );
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use serde_json::Value;

    use super::*;

    fn json(words: &str, variable: Option<&str>) -> bool {
        guess(words.split(' ').map(OsString::from), variable.map(str::to_owned))
    }

    #[test]
    fn the_format_is_known_before_the_command_line_is_understood() {
        assert!(json("plimsoll serve --oops --log-format json", None));
        assert!(json("plimsoll plan --log_format=json --oops", Some("text")));
        assert!(json("plimsoll bench serve", Some("json")));
        assert!(!json(
            "plimsoll serve --log-format json --log-format=text",
            Some("json")
        ));
        assert!(!json("plimsoll serve --log-format", Some("text")));
        assert!(!json("plimsoll plan --oops", None));
    }

    #[test]
    fn details_are_left_out_by_module() {
        let filter = without_details();
        assert!(filter.starts_with("warn,plimsoll=info,plimsoll_"), "{filter}");
        filter.parse::<EnvFilter>().unwrap();
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for module in DETAILS {
            let (name, path) = module.split_once("::").unwrap();
            let sources = crates.join(name.trim_start_matches("plimsoll_")).join("src");
            let exists = sources.join(path).is_dir() || sources.join(format!("{path}.rs")).is_file();
            assert!(exists, "there is no {module}");
        }
    }

    #[test]
    fn times_of_day() {
        assert_eq!(time_of_day(0), [0, 0, 0]);
        assert_eq!(time_of_day(20_000 * 86_400 - 1), [23, 59, 59]);
    }

    /// In a process of its own: hook and subscriber are the process's.
    #[test]
    fn a_panic_is_one_line_with_its_backtrace() {
        const CHILD: &str = "LOGGING_TEST_PANICS";
        if std::env::var_os(CHILD).is_some() {
            let args = LogArgs {
                log_format: LogFormat::Json,
                ..LogArgs::default()
            };
            init(&args, Kind::Server).unwrap();
            let _request = tracing::error_span!("request", id = "id-1").entered();
            std::thread::scope(|scope| {
                let name = std::thread::Builder::new().name("worker \"1\"".into());
                let panics = name.spawn_scoped(scope, || panic!("first\nsecond"));
                assert!(panics.unwrap().join().is_err());
            });
            let caught = std::panic::catch_unwind(|| panic!("in {}", "a request"));
            assert!(caught.is_err());
            last_word("the \"end\"\nof it", 3);
            return;
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "logging::tests::a_panic_is_one_line_with_its_backtrace",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .env_remove("RUST_LOG")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .collect();
        let [thread, request, last] = lines.as_slice() else {
            panic!("three lines: {text}")
        };
        for line in &lines {
            assert_eq!(line["level"], "ERROR");
            assert!(line["timestamp"].is_string() && line["target"].is_string());
        }
        assert_eq!(thread["message"], "panicked: first\nsecond");
        assert_eq!(thread["thread"], "worker \"1\"");
        assert!(thread["place"].as_str().unwrap().contains("logging.rs:"));
        assert!(
            thread["backtrace"]
                .as_str()
                .unwrap()
                .contains("a_panic_is_one_line")
        );
        assert_eq!(
            (&request["message"], &request["span"]["id"]),
            (&"panicked: in a request".into(), &"id-1".into())
        );
        assert_eq!(
            (&last["message"], &last["exit_code"]),
            (&"the \"end\"\nof it".into(), &3.into())
        );
    }
}
