//! Markdown as lines of a terminal.

use std::mem;

use anstyle::{Reset, Style};
use pulldown_cmark::{Alignment, Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use super::style::{CODE, DIM, chop, painted, wrap};
use super::table::{Align, Table};

/// Columns of a rule, if there is room for them.
const RULE: usize = 40;

fn parser(source: &str) -> Parser<'_> {
    let extensions = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    Parser::new_ext(source, extensions)
}

/// Where the last top-level block of `source` begins. All before it is final, whatever text follows. A line that is not whole
/// begins none: it may become anything.
pub(super) fn last_block(source: &str) -> usize {
    let source = &source[..source.rfind('\n').map_or(0, |at| at + 1)];
    let (mut depth, mut begin) = (0, 0);
    for (event, range) in parser(source).into_offset_iter() {
        match event {
            Event::Start(_) => {
                if depth == 0 {
                    begin = range.start;
                }
                depth += 1;
            }
            Event::End(_) => depth -= 1,
            Event::Rule if depth == 0 => begin = range.start,
            _ => {}
        }
    }
    // With its indentation.
    source[..begin].rfind('\n').map_or(0, |at| at + 1)
}

/// The lines of `source`, of at most `width` columns.
pub(super) fn render(source: &str, width: usize) -> Vec<String> {
    let mut page = Page {
        width,
        ..Page::default()
    };
    for event in parser(source) {
        page.take(event);
    }
    page.paragraph();
    page.lines
}

/// What stands before the lines of a block.
struct Indent {
    /// Before the first, until that is there.
    first: Option<String>,
    rest: String,
}

#[derive(Default)]
struct Page {
    width: usize,
    lines: Vec<String>,
    indents: Vec<Indent>,
    /// From the outermost; each has all that holds inside it.
    styles: Vec<Style>,
    /// Numbers of the next items.
    lists: Vec<Option<u64>>,
    /// The paragraph, item or cell so far.
    inline: String,
    /// Targets of links, and where their text begins.
    links: Vec<(String, usize)>,
    code: Option<String>,
    table: Option<Table>,
    /// Whether a blank line is to come before the next block.
    gap: bool,
}

impl Page {
    fn take(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start(tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) => match &mut self.code {
                Some(code) => code.push_str(&text),
                None => self.inline.push_str(&text),
            },
            Event::Code(text) | Event::InlineMath(text) | Event::DisplayMath(text) => {
                self.open(|style| style.fg_color(CODE.get_fg_color()));
                self.inline.push_str(&text);
                self.close();
            }
            Event::Html(text) | Event::InlineHtml(text) => self.inline.push_str(&text),
            Event::FootnoteReference(name) => self.inline.push_str(&format!("[{name}]")),
            // Models end lines where they mean it.
            Event::SoftBreak | Event::HardBreak => self.inline.push('\n'),
            Event::TaskListMarker(done) => self.inline.push_str(if done { "[x] " } else { "[ ] " }),
            Event::Rule => {
                self.paragraph();
                let width = self.room().min(RULE);
                self.block(vec![painted(&"─".repeat(width), DIM)]);
                self.gap = true;
            }
        }
    }

    fn start(&mut self, tag: Tag<'_>) {
        match tag {
            Tag::Heading { level, .. } => {
                self.paragraph();
                self.open(|style| match level {
                    HeadingLevel::H1 => style.bold().underline(),
                    _ => style.bold(),
                });
            }
            Tag::BlockQuote(_) => {
                self.paragraph();
                let bar = painted("│", DIM) + " ";
                self.indent(bar.clone(), bar);
            }
            Tag::CodeBlock(_) => {
                self.paragraph();
                self.code = Some(String::new());
            }
            Tag::List(first) => {
                self.paragraph();
                self.lists.push(first);
            }
            Tag::Item => {
                self.paragraph();
                let marker = match self.lists.last_mut() {
                    Some(Some(number)) => {
                        *number += 1;
                        format!("{}. ", *number - 1)
                    }
                    _ => "• ".to_owned(),
                };
                let rest = " ".repeat(marker.chars().count());
                self.indent(marker, rest);
            }
            Tag::Table(alignments) => {
                self.paragraph();
                let columns = alignments.into_iter().map(|alignment| match alignment {
                    Alignment::Right => Align::Right,
                    _ => Align::Left,
                });
                self.table = Some(Table::new(columns.collect()));
            }
            Tag::TableHead => {
                self.open(Style::bold);
                self.inline.clear();
                self.row();
            }
            Tag::TableRow => self.row(),
            Tag::TableCell => {
                // A cell has all of its style in itself.
                let style = self.style();
                self.inline = style.to_string();
            }
            Tag::Emphasis => self.open(Style::italic),
            Tag::Strong => self.open(Style::bold),
            Tag::Strikethrough => self.open(Style::strikethrough),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                self.links.push((dest_url.into_string(), self.inline.len()));
                self.open(Style::underline);
            }
            Tag::Paragraph
            | Tag::HtmlBlock
            | Tag::FootnoteDefinition(_)
            | Tag::DefinitionList
            | Tag::DefinitionListTitle
            | Tag::DefinitionListDefinition
            | Tag::Superscript
            | Tag::Subscript
            | Tag::MetadataBlock(_) => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::HtmlBlock => {
                self.paragraph();
                self.gap = true;
            }
            TagEnd::Heading(_) => {
                self.close();
                self.paragraph();
                self.gap = true;
            }
            TagEnd::BlockQuote(_) => {
                self.paragraph();
                self.indents.pop();
                self.gap = true;
            }
            TagEnd::CodeBlock => {
                let code = self.code.take().unwrap_or_default();
                let width = self.room().saturating_sub(2);
                let lines = code.lines().flat_map(|line| chop(line, width));
                let lines = lines.map(|line| format!("  {}", painted(&line, CODE)));
                self.block(lines.collect());
                self.gap = true;
            }
            TagEnd::List(_) => {
                self.lists.pop();
                self.gap |= self.lists.is_empty();
            }
            TagEnd::Item => {
                self.paragraph();
                if self.indents.last().is_some_and(|indent| indent.first.is_some()) {
                    self.block(vec![String::new()]);
                }
                self.indents.pop();
            }
            TagEnd::TableHead => self.close(),
            TagEnd::TableCell => {
                let mut cell = mem::take(&mut self.inline);
                if !self.style().is_plain() {
                    cell += &Reset.to_string();
                }
                if let Some(table) = &mut self.table {
                    table.push_cell(cell);
                }
            }
            TagEnd::Table => {
                let table = self.table.take().unwrap_or_default();
                let room = self.room();
                let rule = painted(&"─".repeat(table.width(room).min(room)), DIM);
                let mut rows = table.layout(room).into_iter();
                let head = rows.next().unwrap_or_default();
                let lines = head.into_iter().chain([rule]).chain(rows.flatten());
                self.block(lines.collect());
                self.gap = true;
            }
            TagEnd::Emphasis | TagEnd::Strong | TagEnd::Strikethrough => self.close(),
            TagEnd::Link | TagEnd::Image => {
                self.close();
                if let Some((target, begin)) = self.links.pop()
                    && !target.is_empty()
                    && !self.inline[begin..].contains(&*target)
                {
                    self.open(Style::dimmed);
                    self.inline.push_str(&format!(" ({target})"));
                    self.close();
                }
            }
            TagEnd::TableRow
            | TagEnd::FootnoteDefinition
            | TagEnd::DefinitionList
            | TagEnd::DefinitionListTitle
            | TagEnd::DefinitionListDefinition
            | TagEnd::Superscript
            | TagEnd::Subscript
            | TagEnd::MetadataBlock(_) => {}
        }
    }

    fn row(&mut self) {
        if let Some(table) = &mut self.table {
            table.push(Vec::new());
        }
    }

    fn style(&self) -> Style {
        self.styles.last().copied().unwrap_or_default()
    }

    /// What follows has a style too.
    fn open(&mut self, more: impl FnOnce(Style) -> Style) {
        let style = more(self.style());
        self.styles.push(style);
        self.inline.push_str(&style.to_string());
    }

    /// The innermost style ends.
    fn close(&mut self) {
        self.styles.pop();
        let outer = self.style();
        self.inline.push_str(&format!("{Reset}{outer}"));
    }

    fn indent(&mut self, first: String, rest: String) {
        self.indents.push(Indent {
            first: Some(first),
            rest,
        });
    }

    /// Columns for the text of a block.
    fn room(&self) -> usize {
        let indents = self.indents.iter();
        let used: usize = indents
            .map(|indent| textwrap::core::display_width(&indent.rest))
            .sum();
        self.width.saturating_sub(used).max(1)
    }

    /// Ends the paragraph, if there is text in it.
    fn paragraph(&mut self) {
        let text = mem::take(&mut self.inline);
        let visible = textwrap::core::display_width(text.trim());
        if visible > 0 {
            self.block(wrap(text.trim_end_matches('\n'), self.room()));
        }
    }

    fn block(&mut self, lines: Vec<String>) {
        if mem::take(&mut self.gap) && !self.lines.is_empty() {
            let begun = self.indents.iter().filter(|indent| indent.first.is_none());
            let blank: String = begun.map(|indent| &*indent.rest).collect();
            self.lines.push(blank.trim_end().to_owned());
        }
        for line in lines {
            let mut whole = String::new();
            for indent in &mut self.indents {
                whole += indent.first.take().as_ref().unwrap_or(&indent.rest);
            }
            self.lines.push(whole + &line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without styles.
    fn plain(source: &str, width: usize) -> Vec<String> {
        let lines = render(source, width);
        let strip = |line: String| {
            let mut parts = line.split('\x1b');
            let first = parts.next().unwrap_or_default().to_owned();
            parts.fold(first, |text, part| text + part.split_once('m').unwrap().1)
        };
        lines.into_iter().map(strip).collect()
    }

    #[test]
    fn blocks() {
        let cases: [(&str, &[&str]); 11] = [
            ("# One\n## Two\ntext", &["One", "", "Two", "", "text"]),
            ("a\nb\n\nc  \nd", &["a", "b", "", "c", "d"]),
            ("- a\n- b\n  - c\n- d", &["• a", "• b", "  • c", "• d"]),
            (
                "9. a\n\n10. b\n\n    more",
                &["9. a", "", "10. b", "", "    more"],
            ),
            ("- [ ] a\n- [x] b\n-", &["• [ ] a", "• [x] b", "• "]),
            (
                "> quote\n>\n> more\n\nend",
                &["│ quote", "│", "│ more", "", "end"],
            ),
            (
                "```py\nif x:\n    y\n\n```\nend",
                &["  if x:", "      y", "  ", "", "end"],
            ),
            ("a\n\n---\n\nb", &["a", "", "────────────────────", "", "b"]),
            (
                "|n|x|\n|-|-:|\n|a|**10**|\n|bc|2|",
                &["n    x", "──────", "a   10", "bc   2"],
            ),
            (
                "see [docs](http://a.b) and <http://c.d>",
                &["see docs", "(http://a.b) and", "http://c.d"],
            ),
            ("1. a\n   ```\n   code\n   ```", &["1. a", "     code"]),
        ];
        for (source, expected) in cases {
            assert_eq!(plain(source, 20), expected, "{source:?}");
        }
    }

    #[test]
    fn text_has_its_style() {
        let bold = Style::new().bold();
        assert_eq!(
            render("**b** `c`", 20),
            [format!("{bold}b{Reset} {CODE}c{Reset}")]
        );
        let both = bold.italic();
        let italic = Style::new().italic();
        assert_eq!(
            render("*i **b** i*", 20),
            [format!("{italic}i {both}b{Reset}{italic} i{Reset}")]
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let source = "# A long heading for this\n\n- a list with [a link](https://example.org/long)\n  > and a quote in it\n\n\
            ```\na long line of code, longer than that\n```\n\n|a long head|another|\n|-|-|\n|some text in a cell|more of it|";
        for width in [12, 20, 33] {
            for line in plain(source, width) {
                assert!(textwrap::core::display_width(&line) <= width, "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn what_was_final_stays_final() {
        let source = "# T\n\ntext\nmore\n===\n\n- a\n\n- b\n\n    code\n\n1. x\n---\n\n|a|b|\n|-|-|\n|c|d|\n\n<div>\nx\n</div>\n\n```\n# no\n\n```\nend";
        let whole = render(source, 40);
        for (at, _) in source.char_indices() {
            let end = last_block(&source[..at]);
            let mut parts = render(&source[..end], 40);
            let rest = render(&source[end..], 40);
            if !parts.is_empty() && !rest.is_empty() {
                parts.push(String::new());
            }
            parts.extend(rest);
            assert_eq!(parts, whole, "cut at {at}, {:?}", &source[..end]);
        }
    }
}
