//! Answers and notes on stdout.

use std::io::{self, Stdout, Write, stderr, stdout};

use crate::display::{DIM, Growing, Kind, Size, painted, printable};
use crate::error::Error;

/// Prints one answer.
#[derive(Debug)]
pub(super) enum Printer {
    /// As it comes.
    Plain {
        /// Whether a terminal must not obey it.
        clean: bool,
        /// Whether reasoning is shown too.
        reasoning: bool,
        /// What came last.
        kind: Option<Kind>,
        /// Whether a line is begun.
        open: bool,
    },
    /// As Markdown.
    Styled(Growing<Stdout>),
}

impl Printer {
    /// For whatever reads stdout: the answer, without reasoning.
    pub(super) fn plain(clean: bool) -> Self {
        Self::Plain {
            clean,
            reasoning: false,
            kind: None,
            open: false,
        }
    }

    /// For a person at a terminal.
    pub(super) fn for_people(styled: bool) -> Self {
        match styled {
            true => Self::Styled(Growing::new(stdout())),
            false => Self::Plain {
                clean: true,
                reasoning: true,
                kind: None,
                open: false,
            },
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) -> Result<(), Error> {
        self.print(Kind::Reasoning, text)
    }

    pub(super) fn content(&mut self, text: &str) -> Result<(), Error> {
        self.print(Kind::Answer, text)
    }

    fn print(&mut self, new: Kind, text: &str) -> Result<(), Error> {
        let printed = match self {
            Self::Styled(growing) => {
                growing.push(new, &printable(text), Size::of_stdout().unwrap_or_default())
            }
            Self::Plain { reasoning: false, .. } if new == Kind::Reasoning => Ok(()),
            Self::Plain {
                clean, kind, open, ..
            } => {
                let mut whole = String::new();
                if kind.is_some_and(|before| before != new) {
                    whole += if *open { "\n\n" } else { "\n" };
                }
                *kind = Some(new);
                whole += &if *clean { printable(text) } else { text.to_owned() };
                *open = !whole.ends_with('\n');
                write(&whole)
            }
        };
        printed.map_err(unwritable)
    }

    /// The answer has ended.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        let ended = match self {
            Self::Styled(growing) => growing.finish(),
            Self::Plain { open, .. } => match std::mem::take(open) {
                true => write("\n"),
                false => Ok(()),
            },
        };
        ended.map_err(unwritable)
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn unwritable(source: io::Error) -> Error {
    Error::Write {
        path: "/dev/stdout".into(),
        source,
    }
}

/// What the program itself says to a person.
#[derive(Clone, Copy, Debug)]
pub(super) struct Note {
    styled: bool,
}

impl Note {
    pub(super) fn on_terminal(styled: bool) -> Self {
        Self { styled }
    }

    /// Prints it, dimmed.
    pub(super) fn say(self, text: &str) {
        let lines = text.lines().map(|line| match self.styled {
            true => painted(&printable(line), DIM),
            false => printable(line),
        });
        let text: String = lines.map(|line| line + "\n").collect();
        // Where the terminal is gone, the next line that is read says so.
        let _ = write(&text);
    }

    /// Says it beside the answer.
    pub(super) fn stderr(text: &str) {
        let _ = writeln!(stderr(), "{text}");
    }
}
