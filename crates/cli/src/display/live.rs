//! Text that grows at the end of a terminal's output: what is not final yet is drawn again in place.

use std::io::{self, Write};
use std::mem;

use super::style::{DIM, painted, wrap};
use super::{Size, markdown};

/// What a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain and dimmed.
    Reasoning,
    /// Markdown.
    Answer,
}

impl Kind {
    fn render(self, source: &str, width: usize) -> Vec<String> {
        match self {
            Self::Answer => markdown::render(source, width),
            Self::Reasoning => {
                let lines = wrap(source.trim_end(), width);
                lines.iter().map(|line| painted(line, DIM)).collect()
            }
        }
    }

    /// Where that begins which later text may still change.
    fn unfinished(self, source: &str) -> usize {
        match self {
            Self::Answer => markdown::last_block(source),
            // Blank lines go with what follows, if anything does.
            Self::Reasoning => {
                let before = source.trim_end().rfind('\n').map_or("", |at| &source[..at]);
                match before.trim_end_matches('\n').len() {
                    0 => 0,
                    end => end + 1,
                }
            }
        }
    }

    /// Lines between a finished part and the next.
    fn gap(self) -> usize {
        match self {
            Self::Answer => 1,
            Self::Reasoning => 0,
        }
    }
}

/// A text of one kind after the other on a terminal.
#[derive(Debug)]
pub(crate) struct Growing<W: Write> {
    region: Region<W>,
    kind: Option<Kind>,
    /// What is not finished yet.
    source: String,
    /// Blank lines before it.
    gap: usize,
}

impl<W: Write> Growing<W> {
    /// Written to `out`.
    pub(crate) fn new(out: W) -> Self {
        Self {
            region: Region {
                out,
                size: Size::default(),
                shown: Vec::new(),
            },
            kind: None,
            source: String::new(),
            gap: 0,
        }
    }

    /// Adds text, and shows it on a terminal of that size. It must be [`super::printable`].
    ///
    /// # Errors
    /// Where the terminal is gone.
    pub(crate) fn push(&mut self, kind: Kind, text: &str, size: Size) -> io::Result<()> {
        if self.region.size != size {
            // How the terminal has broken the lines on it is not known.
            self.region.leave()?;
            self.region.size = size;
        }
        if self.kind.is_some_and(|before| before != kind) {
            self.finish()?;
            self.gap = 1;
        }
        if self.kind.is_none() && text.trim_start_matches('\n').is_empty() {
            return Ok(());
        }
        self.source.push_str(match self.kind.replace(kind) {
            Some(_) => text,
            None => text.trim_start_matches('\n'),
        });
        let end = kind.unfinished(&self.source);
        if end > 0 {
            let rest = self.source.split_off(end);
            if self.draw(kind)? {
                self.region.leave()?;
                self.gap = kind.gap();
            }
            self.source = rest;
        }
        self.draw(kind).map(drop)
    }

    /// The text has ended.
    ///
    /// # Errors
    /// Where the terminal is gone.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.source.clear();
        self.kind = None;
        self.gap = 0;
        self.region.leave()
    }

    /// Draws what is not finished; false if there is nothing to see.
    fn draw(&mut self, kind: Kind) -> io::Result<bool> {
        // A line that is full would leave the cursor where the next one is.
        let width = self.region.size.columns.saturating_sub(1).max(1);
        let lines = kind.render(&self.source, width);
        if lines.is_empty() {
            return Ok(false);
        }
        let gap = std::iter::repeat_n(String::new(), self.gap);
        self.region.show(gap.chain(lines).collect())?;
        Ok(true)
    }
}

/// The last lines of a terminal's output. The cursor is behind the last of them.
#[derive(Debug)]
struct Region<W: Write> {
    out: W,
    size: Size,
    shown: Vec<String>,
}

impl<W: Write> Region<W> {
    /// Shows these lines in place of those that it has. Lines that have left the screen stay as they are.
    fn show(&mut self, lines: Vec<String>) -> io::Result<()> {
        let both = self.shown.iter().zip(&lines);
        let same = both.take_while(|(old, new)| old == new).count();
        if same == self.shown.len() && same == lines.len() {
            return Ok(());
        }
        let left_the_screen = self.shown.len().saturating_sub(self.size.rows);
        let from = same.max(left_the_screen).min(lines.len().saturating_sub(1));
        let mut text = String::new();
        match self.shown.len().checked_sub(1) {
            None => {}
            Some(last) if from > last => text += "\n",
            Some(last) if from == last => text += "\r",
            Some(last) => text += &format!("\x1b[{}A\r", last - from),
        }
        let drawn: Vec<_> = lines[from..].iter().map(|line| format!("{line}\x1b[K")).collect();
        text += &drawn.join("\n");
        text += "\x1b[J";
        self.shown = lines;
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }

    /// Lets the lines stay as they are, and goes on below them.
    fn leave(&mut self) -> io::Result<()> {
        if !mem::take(&mut self.shown).is_empty() {
            self.out.write_all(b"\n")?;
            self.out.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A terminal that knows the movements that are used here.
    struct Screen {
        lines: Vec<String>,
        row: usize,
        column: usize,
    }

    impl Screen {
        fn of(bytes: &[u8]) -> Self {
            let mut screen = Self {
                lines: vec![String::new()],
                row: 0,
                column: 0,
            };
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            let mut rest = text.chars();
            while let Some(c) = rest.next() {
                match c {
                    '\r' => screen.column = 0,
                    '\n' => {
                        screen.column = 0;
                        screen.row += 1;
                        if screen.row == screen.lines.len() {
                            screen.lines.push(String::new());
                        }
                    }
                    '\x1b' => {
                        assert_eq!(rest.next(), Some('['));
                        let sequence = up_to_letter(&mut rest);
                        screen.obey(&sequence);
                    }
                    c => {
                        let line = &mut screen.lines[screen.row];
                        let mut all: Vec<char> = line.chars().collect();
                        all.resize(all.len().max(screen.column + 1), ' ');
                        all[screen.column] = c;
                        *line = all.into_iter().collect();
                        screen.column += 1;
                    }
                }
            }
            screen
        }

        fn obey(&mut self, sequence: &str) {
            match sequence.split_at(sequence.len() - 1) {
                (count, "A") => self.row -= count.parse::<usize>().unwrap(),
                ("", "K") => {
                    let line = &mut self.lines[self.row];
                    *line = line.chars().take(self.column).collect();
                }
                ("", "J") => {
                    self.lines.truncate(self.row + 1);
                    self.obey("K");
                }
                (_, "m") => {}
                other => panic!("{other:?}"),
            }
        }

        fn text(&self) -> String {
            self.lines.join("\n")
        }
    }

    /// Up to the first letter, with it.
    fn up_to_letter(rest: &mut impl Iterator<Item = char>) -> String {
        let mut found = String::new();
        for c in rest {
            found.push(c);
            if c.is_ascii_alphabetic() {
                break;
            }
        }
        found
    }

    const ANSWER: &str = "# Title\n\nSome **bold** text that is *longer* than one line of this terminal.\n\n1. one\n2. two\n   - deep\n\n\
        ```rust\nfn main() {}\n```\n\n| a | b |\n|---|--:|\n| x | 10 |\n| longer | 2 |\n\nThe end.";

    fn shown(pieces: &[&str], size: Size) -> String {
        let mut out = Vec::new();
        let mut growing = Growing::new(&mut out);
        growing
            .push(Kind::Reasoning, "First this.\nThen\n\nthat.", size)
            .unwrap();
        for piece in pieces {
            growing.push(Kind::Answer, piece, size).unwrap();
        }
        growing.finish().unwrap();
        Screen::of(&out).text()
    }

    #[test]
    fn the_end_looks_the_same_however_the_text_came() {
        let size = Size {
            columns: 30,
            rows: 50,
        };
        let at_once = shown(&[ANSWER], size);
        assert!(
            at_once.starts_with("First this.\nThen\n\nthat.\n\nTitle\n\nSome bold text that is longer\n"),
            "{at_once}"
        );
        assert!(at_once.ends_with("\n\nThe end.\n"), "{at_once}");
        for length in 1..12 {
            let characters: Vec<char> = ANSWER.chars().collect();
            let pieces: Vec<String> = characters
                .chunks(length)
                .map(|piece| piece.iter().collect())
                .collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(shown(&pieces, size), at_once, "in pieces of {length}");
        }
    }

    #[test]
    fn what_has_left_the_screen_is_not_drawn_again() {
        let mut out = Vec::new();
        let size = Size { columns: 20, rows: 5 };
        let mut growing = Growing::new(&mut out);
        for number in 0..40 {
            growing
                .push(Kind::Answer, &format!("- item {number}\n"), size)
                .unwrap();
        }
        growing.finish().unwrap();
        let text = String::from_utf8(out.clone()).unwrap();
        assert!(!text.contains("\x1b[5A"), "{text:?}");
        let screen = Screen::of(&out).text();
        let items: Vec<String> = (0..40).map(|number| format!("• item {number}")).collect();
        assert_eq!(screen.trim_end(), items.join("\n"));
    }
}
