//! Text tables with aligned columns.

use std::fmt::{self, Display, Formatter};

use anstyle::Style;
use unicode_width::UnicodeWidthStr;

use super::{DIM, paint};

/// The space between two columns.
const GAP: &str = "  ";

/// Rows of cells under column titles.
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

struct Column {
    title: &'static str,
    align: Align,
}

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A text and its style.
pub(crate) struct Cell {
    text: String,
    style: Style,
}

impl<T: Display> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.to_string(), style: Style::new() }
    }
}

impl Cell {
    pub(crate) fn painted(style: Style, text: impl Display) -> Self {
        Self { text: text.to_string(), style }
    }
}

impl Table {
    /// Creates a table with these column titles.
    pub(crate) fn new(titles: impl IntoIterator<Item = (&'static str, Align)>) -> Self {
        let columns = titles.into_iter().map(|(title, align)| Column { title, align }).collect();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row, which must have one cell per column.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.columns.len(), "one cell per column");
        self.rows.push(cells);
    }

    fn widths(&self) -> Vec<usize> {
        let width = |(at, column): (usize, &Column)| {
            let cells = self.rows.iter().map(|row| row[at].text.width());
            cells.chain([column.title.width()]).max().unwrap_or_default()
        };
        self.columns.iter().enumerate().map(width).collect()
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let lines = |cells: Vec<(&str, Style)>| {
            let mut line = String::new();
            for ((&(text, style), column), width) in cells.iter().zip(&self.columns).zip(&widths) {
                let space = " ".repeat(width.saturating_sub(text.width()));
                let painted = paint(style, text);
                match column.align {
                    Align::Left => line.push_str(&format!("{painted}{space}{GAP}")),
                    Align::Right => line.push_str(&format!("{space}{painted}{GAP}")),
                }
            }
            line.trim_end().to_owned()
        };
        f.write_str(&lines(self.columns.iter().map(|column| (column.title, DIM)).collect()))?;
        for row in &self.rows {
            write!(f, "\n{}", lines(row.iter().map(|cell| (cell.text.as_str(), cell.style)).collect()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let mut table = Table::new([("rule", Align::Left), ("denials", Align::Right)]);
        table.row(["login".into(), 7.into()]);
        table.row(["é".into(), 1_234_567.into()]);
        let plain = anstream::adapter::strip_str(&table.to_string()).to_string();
        assert_eq!(plain, "rule   denials\nlogin        7\né      1234567");
    }
}
