//! Columns of text.

use textwrap::core::display_width;

use super::style::wrap;

/// Between two columns.
const GAP: &str = "  ";
/// A column is made no narrower to fit a terminal.
const LEAST: usize = 4;

/// Where the text of a column stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    #[default]
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells, which may be styled.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Without rows yet. Further columns are aligned left.
    pub(crate) fn new(columns: Vec<Align>) -> Self {
        Self {
            columns,
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub(crate) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Adds a cell to the last row.
    pub(super) fn push_cell(&mut self, cell: String) {
        if let Some(row) = self.rows.last_mut() {
            row.push(cell);
        }
    }

    /// The lines of each row, which are no wider than `width` as far as that is possible: cells are then broken into lines.
    pub(crate) fn layout(&self, width: usize) -> Vec<Vec<String>> {
        let widths = self.widths(width);
        self.rows.iter().map(|row| self.row(row, &widths)).collect()
    }

    /// Columns of the widest line that [`Self::layout`] makes.
    pub(super) fn width(&self, width: usize) -> usize {
        let widths = self.widths(width);
        widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
    }

    fn widths(&self, width: usize) -> Vec<usize> {
        let count = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widest = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| display_width(cell)).max().unwrap_or(0)
        };
        let mut widths: Vec<_> = (0..count).map(widest).collect();
        let room = width.saturating_sub(GAP.len() * count.saturating_sub(1));
        while widths.iter().sum::<usize>() > room
            && let Some(widest) = widths.iter_mut().max()
            && *widest > LEAST
        {
            *widest -= 1;
        }
        widths
    }

    fn row(&self, row: &[String], widths: &[usize]) -> Vec<String> {
        let wrapped = row.iter().zip(widths).map(|(cell, &width)| wrap(cell, width));
        let wrapped: Vec<_> = wrapped.collect();
        let height = wrapped.iter().map(Vec::len).max().unwrap_or(0);
        let line = |at: usize| {
            let mut line = String::new();
            for (column, cell) in wrapped.iter().enumerate() {
                let text = cell.get(at).map_or("", String::as_str);
                let space = " ".repeat(widths[column].saturating_sub(display_width(text)));
                if column > 0 {
                    line += GAP;
                }
                line += &match self.columns.get(column) {
                    Some(Align::Right) => space + text,
                    _ => text.to_owned() + &space,
                };
            }
            line.truncate(line.trim_end().len());
            line
        };
        (0..height).map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[&[&str]]) -> Table {
        let mut table = Table::new(vec![Align::Left, Align::Right]);
        for row in rows {
            table.push(row.iter().map(|&cell| cell.to_owned()).collect());
        }
        table
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let table = table(&[&["MODEL", "SIZE"], &["a/漢", "1.0 GiB"], &["b"]]);
        let lines: Vec<_> = table.layout(usize::MAX).concat();
        assert_eq!(lines, ["MODEL     SIZE", "a/漢   1.0 GiB", "b"]);
    }

    #[test]
    fn what_is_too_wide_is_broken_into_lines() {
        let table = table(&[&["one two three four", "9"]]);
        assert_eq!(table.layout(13), [["one two     9", "three four"]]);
        assert!(table.layout(2)[0].iter().all(|line| display_width(line) <= 8));
    }
}
