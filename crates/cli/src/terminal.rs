//! stderr for people: one line for each phase of a command, and a bar while something is under way. Where `--log-format` is
//! JSON, or `-v` or a log level asks for the log's own lines, there are no lines for phases.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{LazyLock, OnceLock};

use console::{Term, is_dumb, measure_text_width};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};
use tracing_subscriber::fmt::MakeWriter;

/// What stderr is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Style {
    /// A line for each phase, and warnings.
    Phases,
    /// The lines of the log, as text.
    #[default]
    Lines,
    /// One JSON object per line.
    Json,
}

static STYLE: OnceLock<Style> = OnceLock::new();

/// All bars of the process: whoever writes a line has them redrawn below it.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| {
    MultiProgress::with_draw_target(match draws(style(), &Term::stderr(), is_dumb()) {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    })
});

/// Columns of a phase's name.
pub(crate) const NAME: usize = 11;

/// Columns of lines that no terminal limits.
const WIDEST: usize = 100;

/// Says what stderr is used for, once.
pub(crate) fn set_style(style: Style) {
    // A second call finds everything as it is.
    let _ = STYLE.set(style);
}

fn style() -> Style {
    STYLE.get().copied().unwrap_or_default()
}

/// Bars need a terminal that can move its cursor.
fn draws(style: Style, term: &Term, is_dumb: bool) -> bool {
    style != Style::Json && term.is_term() && !is_dumb
}

/// Whether lines on stderr are coloured: on terminals, unless `NO_COLOR` or `TERM=dumb` says no.
pub(crate) fn is_coloured() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Term::stderr().is_term() && !is_dumb() && !refused
}

/// Columns of stdout, if it is a terminal.
pub(crate) fn stdout_columns() -> Option<usize> {
    columns(&Term::stdout())
}

/// Columns of stderr, if it is a terminal.
pub(crate) fn stderr_columns() -> Option<usize> {
    columns(&Term::stderr())
}

fn columns(term: &Term) -> Option<usize> {
    let (_, columns) = term.is_term().then(|| term.size_checked()).flatten()?;
    // Terminals that do not know say 0.
    (columns > 0).then_some(columns.into())
}

/// Columns of a line on stderr.
pub(crate) fn width() -> usize {
    stderr_columns().map_or(WIDEST, |columns| columns.min(WIDEST))
}

/// Columns beside a phase's name.
pub(crate) fn room() -> usize {
    width().saturating_sub(NAME).max(1)
}

/// Whether people are shown phases instead of the log's details.
pub(crate) fn shows_phases() -> bool {
    style() == Style::Phases
}

/// Writes the line of a phase to stderr and returns true, or returns false where phases are not shown.
pub(crate) fn phase(name: &str, text: impl Display) -> bool {
    let shown = shows_phases();
    if shown {
        // A command does not end because nobody reads its progress.
        let _ = writeln!(Stderr, "{}", labelled(name, text, width()));
    }
    shown
}

/// `text` beside `name`, in lines of at most `columns` where its words allow that.
pub(crate) fn labelled(name: &str, text: impl Display, columns: usize) -> String {
    let lines = wrapped(&text.to_string(), columns.saturating_sub(NAME));
    let names = std::iter::once(name).chain(std::iter::repeat(""));
    let lines: Vec<_> = names
        .zip(&lines)
        .map(|(name, line)| format!("{name:NAME$}{line}"))
        .collect();
    lines.join("\n")
}

/// Lines of at most `columns`, broken between words but not behind a number, each with the indentation of `line`.
pub(crate) fn wrapped(line: &str, columns: usize) -> Vec<String> {
    let indent = &line[..line.len() - line.trim_start().len()];
    let mut lines: Vec<String> = Vec::new();
    for word in with_units(line) {
        let word = word.as_str();
        match lines.last_mut() {
            Some(last) if measure_text_width(last) + 1 + measure_text_width(word) <= columns => {
                *last += " ";
                *last += word;
            }
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

/// The words of `line`, a number and what it counts as one.
fn with_units(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut after_number = false;
    for word in line.split_whitespace() {
        match words.last_mut() {
            Some(number) if after_number => {
                *number += " ";
                *number += word;
            }
            _ => words.push(word.to_owned()),
        }
        after_number = word.starts_with(|c: char| c.is_ascii_digit()) && !word.ends_with([',', ';']);
    }
    words
}

/// `text` with its lines as long as stdout's terminal is wide; in a file they stay whole.
pub(crate) fn fitted(text: &str) -> String {
    match stdout_columns() {
        None => text.to_owned(),
        Some(columns) => fitted_to(text, columns),
    }
}

/// `text` for stderr: what is longer than its terminal is wide is broken between words, but for indented lines, which are commands
/// to copy and tables.
pub(crate) fn prose(text: &str) -> String {
    match stderr_columns() {
        None => text.to_owned(),
        Some(columns) => prose_in(text, columns),
    }
}

fn prose_in(text: &str, columns: usize) -> String {
    let lines = text.lines().flat_map(|line| {
        let is_long = measure_text_width(line) > columns;
        match is_long && !line.starts_with(' ') {
            true => wrapped(line, columns),
            false => vec![line.to_owned()],
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn fitted_to(text: &str, columns: usize) -> String {
    let lines = text
        .lines()
        .flat_map(|line| match measure_text_width(line) > columns {
            true => wrapped(line, columns),
            false => vec![line.to_owned()],
        });
    lines.collect::<Vec<_>>().join("\n")
}

/// The same bar, in the one place on the terminal where bars are.
pub(crate) fn shown(bar: ProgressBar) -> ProgressBar {
    BARS.add(bar)
}

/// No bar is drawn from here on, whoever still works.
pub(crate) fn end_bars() {
    // A terminal that is gone needs no clearing.
    let _ = BARS.clear();
    BARS.set_draw_target(ProgressDrawTarget::hidden());
}

/// stderr, with the bars out of the way of what is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write_all(text))?;
        Ok(text.len())
    }

    /// One write for a line: bars do not come between its parts.
    fn write_fmt(&mut self, text: std::fmt::Arguments<'_>) -> io::Result<()> {
        self.write_all(text.to_string().as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_wrapped_between_words() {
        let text = "32,768 tokens in 720.00 MiB: 4.0 requests of 8,192 tokens";
        assert_eq!(labelled("KV cache", text, 100), format!("KV cache   {text}"));
        assert_eq!(
            labelled("KV cache", text, 40),
            "KV cache   32,768 tokens in 720.00 MiB:\n           4.0 requests of 8,192 tokens"
        );
        // A word that is longer than a line stays whole.
        let lines = wrapped("  /a/very/long/path b", 8);
        assert_eq!(lines, ["  /a/very/long/path", "  b"]);
        assert_eq!(labelled("", "x", 3), "           x");
    }

    #[test]
    fn errors_are_wrapped_and_their_commands_are_not() {
        let text =
            "error: there is no server: start one, such as\n  plimsoll chat a/very-long-name-of-a-model";
        assert_eq!(
            prose_in(text, 30),
            "error: there is no server:\nstart one, such as\n  plimsoll chat a/very-long-name-of-a-model"
        );
        assert_eq!(prose_in(text, 45), text);
    }

    #[test]
    fn bars_are_for_terminals_that_move_their_cursor() {
        // In tests it is none.
        assert!(!draws(Style::Phases, &Term::stderr(), true));
        assert!(!draws(Style::Json, &Term::stderr(), false));
        assert!(WIDEST > NAME && room() > 0);
    }
}
