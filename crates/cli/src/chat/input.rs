//! Lines that a person types, with editing and history.

use std::fs;
use std::io::{Stdin, stdin};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Helper};

use super::session::{NAMES, QUOTES};
use crate::error::Error;

/// Lines of history that are kept.
const HISTORY: usize = 1000;
const PROMPT: &str = ">>> ";

/// Values of `TERM` for which the line editor leaves editing to the terminal.
const UNEDITED: [&str; 3] = ["dumb", "cons25", "emacs"];

/// What was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the terminal is gone.
    End,
}

/// Reads lines.
pub(super) struct Editor {
    inner: Box<rustyline::Editor<Lines, FileHistory>>,
    history: Option<PathBuf>,
    /// Why the last line was not added to the history.
    problem: Option<String>,
}

impl Editor {
    /// Loads the history of earlier chats.
    ///
    /// # Errors
    /// Where the terminal cannot be used.
    pub(super) fn new(styled: bool) -> Result<Self, Error> {
        let config = Config::builder()
            .max_history_size(HISTORY)
            .map_err(unreadable)?
            .auto_add_history(true)
            .history_ignore_space(true)
            .bracketed_paste(styled)
            .build();
        let mut inner = rustyline::Editor::with_config(config).map_err(unreadable)?;
        inner.set_helper(Some(Lines));
        let mut editor = Self {
            inner: Box::new(inner),
            history: None,
            problem: None,
        };
        editor.problem = editor.load_history().err();
        Ok(editor)
    }

    /// Why no history is kept, once.
    pub(super) fn problem(&mut self) -> Option<String> {
        let problem = self.problem.take()?;
        Some(format!("no history is kept: {problem}"))
    }

    fn load_history(&mut self) -> Result<(), String> {
        let path = history_file().ok_or("there is no home directory; set HOME or XDG_STATE_HOME")?;
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let dir = path.parent().unwrap_or(Path::new("/"));
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| failed(&error))?;
        if path.exists() {
            self.inner.load_history(&path).map_err(|error| failed(&error))?;
        }
        self.history = Some(path);
        Ok(())
    }

    /// Reads the next line, and returns the editor with it.
    ///
    /// # Errors
    /// Where the terminal cannot be read.
    pub(super) async fn read(mut self) -> Result<(Self, Line), Error> {
        let work = move || {
            let line = self.inner.readline(PROMPT);
            (self, line)
        };
        let (mut editor, line) = tokio::task::spawn_blocking(work).await?;
        let line = match line {
            Ok(text) => Line::Text(text),
            Err(ReadlineError::Interrupted) => Line::Interrupted,
            Err(ReadlineError::Eof) => Line::End,
            Err(error) => return Err(unreadable(error)),
        };
        // At once: a chat may end without notice.
        if let Some(path) = &editor.history
            && matches!(line, Line::Text(_))
            && let Err(error) = editor.inner.append_history(path)
        {
            editor.problem = Some(format!("{}: {error}", path.display()));
            editor.history = None;
        }
        Ok((editor, line))
    }
}

fn unreadable(error: ReadlineError) -> Error {
    Error::System(match error {
        ReadlineError::Io(error) => error,
        error => std::io::Error::other(error),
    })
}

/// Among the user's files that programs write and nobody needs to save.
fn history_file() -> Option<PathBuf> {
    let given = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = match given("XDG_STATE_HOME") {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(given("HOME")?).join(".local/state"),
    };
    Some(state.join("plimsoll/chat_history"))
}

/// Whether lines are whole, and which commands they may become.
struct Lines;

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_whole(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

/// Whether quotes that a text begins with are closed at its end.
fn is_whole(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => rest.trim_end().ends_with(QUOTES),
        None => true,
    }
}

impl Completer for Lines {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let begun = &line[..at];
        let fitting = NAMES
            .iter()
            .filter(|name| begun.starts_with('/') && name.starts_with(begun));
        Ok((0, fitting.map(|&name| name.to_owned()).collect()))
    }
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

impl Helper for Lines {}

/// The terminal's mode, which comes back with the end of the value however the chat ends.
pub(super) struct TerminalMode(Option<(Stdin, Termios)>);

impl TerminalMode {
    /// Remembers the present mode.
    pub(super) fn saved() -> Self {
        let mode = tcgetattr(stdin()).ok();
        Self(mode.map(|mode| (stdin(), mode)))
    }

    /// Lets keys that are typed while an answer comes wait for the line editor: they are not echoed into the answer, Ctrl-C discards none,
    /// and Ctrl-D stays a key; where the terminal itself edits lines, it becomes an end of input that the editor never sees.
    ///
    /// # Errors
    /// Where the terminal refuses the mode.
    pub(super) fn keep_keys_for_the_editor(&self) -> Result<(), Error> {
        let term = std::env::var("TERM").unwrap_or_default();
        if let Some((terminal, mode)) = &self.0
            && !UNEDITED.iter().any(|name| name.eq_ignore_ascii_case(&term))
        {
            let mut mode = mode.clone();
            mode.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            mode.local_modes.insert(LocalModes::NOFLSH);
            tcsetattr(terminal, OptionalActions::Drain, &mode).map_err(std::io::Error::from)?;
        }
        Ok(())
    }
}

impl Drop for TerminalMode {
    fn drop(&mut self) {
        if let Some((terminal, mode)) = &self.0 {
            // A terminal that is gone has no mode.
            let _ = tcsetattr(terminal, OptionalActions::Now, mode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_take_several_lines() {
        for (text, whole) in [
            ("hello", true),
            ("\"\"\"", false),
            ("\"\"\"one line\"\"\"", true),
            ("\"\"\"\na\n", false),
            ("\"\"\"\na\n\"\"\"", true),
            ("say \"\"\"", true),
        ] {
            assert_eq!(is_whole(text), whole, "{text:?}");
        }
    }
}
