//! Text on a terminal: what it can show, Markdown, tables, and text that grows.

mod live;
mod markdown;
mod style;
mod table;

use std::io::{IsTerminal, stdout};

use rustix::termios::tcgetwinsize;

pub(crate) use live::{Growing, Kind};
pub(crate) use style::{DIM, painted};
pub(crate) use table::{Align, Table};

/// Columns and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) columns: usize,
    pub(crate) rows: usize,
}

impl Size {
    /// Of the terminal that stdout is, if it is one and says how large it is.
    pub(crate) fn of_stdout() -> Option<Self> {
        let size = tcgetwinsize(stdout()).ok()?;
        (size.ws_col > 0 && size.ws_row > 0).then_some(Self {
            columns: size.ws_col.into(),
            rows: size.ws_row.into(),
        })
    }
}

/// Of terminals that do not say.
impl Default for Size {
    fn default() -> Self {
        Self {
            columns: 80,
            rows: 24,
        }
    }
}

/// Whether stdout is a terminal that takes colours and movements of the cursor, and nobody asked for plain text.
pub(crate) fn is_styled() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    stdout().is_terminal() && !no_color && !dumb
}

/// Without what a terminal would obey: whoever wrote the text is not trusted. Tabs become spaces.
pub(crate) fn printable(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => clean.push_str("    "),
            '\n' => clean.push(c),
            c if c.is_control() => {}
            c => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_nothing_to_obey() {
        let hostile = "a\u{1b}]0;title\u{7}b\r\u{9b}31mc\n\td\u{8}é漢";
        assert_eq!(printable(hostile), "a]0;titleb31mc\n    dé漢");
    }
}
