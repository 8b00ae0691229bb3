//! Styled text in lines: every line has all of its style in itself, so that lines can be drawn alone.

use anstyle::{AnsiColor, Reset, Style};
use textwrap::core::display_width;
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// What is beside the point.
pub(crate) const DIM: Style = Style::new().dimmed();
/// Code.
pub(super) const CODE: Style = AnsiColor::Cyan.on_default();

/// Begins every sequence that sets a style.
const ESCAPE: char = '\u{1b}';

/// `text`, of one line, in a style.
pub(crate) fn painted(text: &str, style: Style) -> String {
    match text.is_empty() || style.is_plain() {
        true => text.to_owned(),
        false => format!("{style}{text}{Reset}"),
    }
}

/// Lines of at most `width` columns, broken between words, or within one that is longer than a line.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let options = Options::new(width.max(1))
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    let mut active = String::new();
    let lines = textwrap::wrap(text, options);
    lines.iter().map(|line| closed(line, &mut active)).collect()
}

/// A line of code in pieces of at most `width` columns, with all of its spaces.
pub(super) fn chop(line: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut used = 0;
    for c in line.chars() {
        let wide = display_width(c.encode_utf8(&mut [0; 4]));
        if used + wide > width.max(1) && used > 0 {
            pieces.push(String::new());
            used = 0;
        }
        used += wide;
        pieces.last_mut().expect("there is one").push(c);
    }
    pieces
}

/// The line with the style that is `active` at its beginning, and none left at its end.
fn closed(line: &str, active: &mut String) -> String {
    let begin = active.clone();
    let reset = Reset.to_string();
    let mut rest = line;
    while let Some(at) = rest.find(ESCAPE) {
        let end = rest[at..].find('m').map_or(rest.len(), |end| at + end + 1);
        let sequence = &rest[at..end];
        match sequence == reset {
            true => active.clear(),
            false => active.push_str(sequence),
        }
        rest = &rest[end..];
    }
    match active.is_empty() {
        true => begin + line,
        false => begin + line + &reset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_its_style_in_itself() {
        let bold = Style::new().bold();
        let text = format!("plain {} end", painted("so very bold", bold));
        let lines = wrap(&text, 8);
        let expected = [
            format!("plain {}", painted("so", bold)),
            painted("very", bold),
            format!("{bold}bold{Reset} end"),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn long_words_and_wide_characters_are_broken() {
        assert_eq!(wrap("abcdefgh ij", 3), ["abc", "def", "gh", "ij"]);
        assert_eq!(chop("漢字漢字", 5), ["漢字", "漢字"]);
        assert_eq!(chop("  x  ", 3), ["  x", "  "]);
        assert_eq!(chop("", 3), [""]);
    }
}
