//! Reads overrides from CSV files: a header row, then one override per row, parsed row by row because a file may have a
//! million.
//!
//! A column is a field of an override or a label to match; `when.x` always means the label `x`. An empty cell sets
//! nothing. Lines that start with `#` are comments.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};

use csv_core::{ReadFieldResult, Reader, ReaderBuilder};

use super::{
    error::{Location, MAX_PROBLEMS, Problem, SourceFile},
    schema::Override,
    toml_reader::{Field, FromText, suggestion},
    values::Patterns,
};
use crate::labels::MAX_LABEL_VALUE;

/// The fields of an override that can be columns.
const FIELDS: [&str; 12] = [
    "amount",
    "window",
    "zone",
    "anchor",
    "burst",
    "cost",
    "unlimited",
    "blocked",
    "on_store_failure",
    "shadow",
    "lease",
    "lease_for",
];
/// Marks a column as a label, even if a field has the same name.
const LABEL_PREFIX: &str = "when.";
/// Maximum number of columns.
const MAX_COLUMNS: usize = 64;
/// Size of the buffer for one cell: one byte more than the longest label value.
const MAX_CELL: usize = MAX_LABEL_VALUE + 1;

/// The unread rows of a file.
pub(super) struct Rows {
    file: Arc<SourceFile>,
    reader: Reader,
    /// Offset of the next unread byte.
    at: usize,
    columns: Vec<Column>,
}

enum Column {
    Label(String),
    Field(&'static str),
    /// Neither a field nor a known label; already reported.
    Unknown,
}

struct Cell {
    text: String,
    span: Range<usize>,
    ends_row: bool,
}

impl Rows {
    /// Reads the header row. `labels` are the labels that the rule uses.
    pub(super) fn new(path: PathBuf, bytes: Vec<u8>, labels: &[String], problems: &mut Vec<Problem>) -> Self {
        let (text, is_text) = match String::from_utf8(bytes) {
            Ok(text) => (text, true),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), false),
        };
        let file = Arc::new(SourceFile { path, text });
        let reader = ReaderBuilder::new().comment(Some(b'#')).build();
        let mut rows = Self { file, reader, at: 0, columns: Vec::new() };
        if !is_text {
            problems.push(Problem::new(&rows.location(0..0), "the file is not UTF-8: save it as UTF-8"));
            rows.at = rows.file.text.len();
            return rows;
        }
        for cell in rows.row(problems).unwrap_or_default() {
            let column = rows.column(&cell, labels, problems);
            rows.columns.push(column);
        }
        if !rows.columns.iter().any(|column| matches!(column, Column::Label(_))) && problems.is_empty() {
            let message = "the header has no label to match: start with, for example, tenant,amount";
            problems.push(Problem::new(&rows.location(0..0), message));
        }
        rows
    }

    /// Reads the next row as an override, with its location.
    pub(super) fn next(&mut self, problems: &mut Vec<Problem>) -> Option<(Override, Location)> {
        if problems.len() > MAX_PROBLEMS {
            return None;
        }
        let cells = self.row(problems)?;
        let location = self.location(cells.first()?.span.start..cells.last()?.span.end);
        if cells.len() != self.columns.len() {
            let message = format!(
                "the row has {} cells but the header has {}: give every column one cell",
                cells.len(),
                self.columns.len()
            );
            problems.push(Problem::new(&location, message));
            return None;
        }
        let mut read = Override::default();
        let mut when = BTreeMap::new();
        for (column, cell) in self.columns.iter().zip(&cells) {
            if cell.text.is_empty() {
                continue;
            }
            let at = self.location(cell.span.clone());
            match column {
                Column::Label(label) => {
                    let value = Patterns(vec![Field::Given(cell.text.clone(), at.clone())]);
                    when.insert(label.clone(), Field::Given(value, at));
                }
                Column::Field(field) => set(&mut read, field, &cell.text, at, problems),
                Column::Unknown => {}
            }
        }
        read.when = Field::Given(when, location.clone());
        Some((read, location))
    }

    fn location(&self, span: Range<usize>) -> Location {
        Location::InFile { file: Arc::clone(&self.file), span }
    }

    fn column(&self, cell: &Cell, labels: &[String], problems: &mut Vec<Problem>) -> Column {
        let name = cell.text.as_str();
        let location = self.location(cell.span.clone());
        let field = FIELDS.iter().find(|field| **field == name);
        let label = name
            .strip_prefix(LABEL_PREFIX)
            .or_else(|| labels.iter().any(|label| label == name).then_some(name));
        let is_same = |column: &Column| match column {
            Column::Label(other) => label == Some(other),
            Column::Field(other) => name == *other,
            Column::Unknown => false,
        };
        if self.columns.iter().any(is_same) {
            problems.push(Problem::new(&location, format!("column {name:?} appears twice: remove one")));
        }
        match (field, label) {
            (Some(field), _) => Column::Field(field),
            (None, Some(label)) => Column::Label(label.to_owned()),
            (None, None) => {
                let known: Vec<&str> =
                    FIELDS.iter().copied().chain(labels.iter().map(String::as_str)).collect();
                let help = match suggestion(name, &known) {
                    Some(other) => format!("did you mean `{other}`?"),
                    None => {
                        format!("to match a label that the rule does not use, write {LABEL_PREFIX}{name}")
                    }
                };
                let message = format!("column {name:?} is neither an override field nor a label of the rule");
                problems.push(Problem::new(&location, message).help(help));
                Column::Unknown
            }
        }
    }

    /// Reads the cells of the next row.
    fn row(&mut self, problems: &mut Vec<Problem>) -> Option<Vec<Cell>> {
        let mut cells = Vec::with_capacity(self.columns.len());
        loop {
            let cell = match self.cell() {
                Ok(Some(cell)) => cell,
                Ok(None) => return Some(cells).filter(|cells| !cells.is_empty()),
                Err(span) => {
                    let message = format!("the cell has more than {MAX_LABEL_VALUE} bytes: shorten it");
                    problems.push(Problem::new(&self.location(span), message));
                    self.at = self.file.text.len();
                    return None;
                }
            };
            let ends_row = cell.ends_row;
            cells.push(cell);
            if cells.len() > MAX_COLUMNS {
                let message = format!("too many columns: use at most {MAX_COLUMNS}");
                problems.push(Problem::new(&self.location(self.at..self.at), message));
                self.at = self.file.text.len();
                return None;
            }
            if ends_row {
                return Some(cells);
            }
        }
    }

    /// Reads the next cell and trims it. The error is the span of a cell that is too long.
    fn cell(&mut self) -> Result<Option<Cell>, Range<usize>> {
        let mut buffer = [0; MAX_CELL];
        let (mut filled, start) = (0, self.at);
        loop {
            let input = &self.file.text.as_bytes()[self.at..];
            let (result, read, written) = self.reader.read_field(input, &mut buffer[filled..]);
            self.at += read;
            filled += written;
            let ends_row = match result {
                // Reading again with empty input ends the last cell.
                ReadFieldResult::InputEmpty => continue,
                ReadFieldResult::OutputFull => return Err(start..self.at),
                ReadFieldResult::End => return Ok(None),
                ReadFieldResult::Field { record_end } => record_end,
            };
            // Never lossy: the text is valid UTF-8 and is cut at ASCII characters.
            let text = String::from_utf8_lossy(&buffer[..filled]).trim().to_owned();
            let written = &self.file.text[start..self.at];
            let lead = written.len() - written.trim_start().len();
            let written = written.trim().trim_end_matches(',').trim_end();
            let span = start + lead..start + lead + written.len();
            return Ok(Some(Cell { text, span, ends_row }));
        }
    }
}

fn set(read: &mut Override, field: &str, text: &str, location: Location, problems: &mut Vec<Problem>) {
    match field {
        "amount" => read.amount = cell(field, text, location, problems),
        "window" => read.window = cell(field, text, location, problems),
        "zone" => read.zone = cell(field, text, location, problems),
        "anchor" => read.anchor = cell(field, text, location, problems),
        "burst" => read.burst = cell(field, text, location, problems),
        "cost" => read.cost = cell(field, text, location, problems),
        "unlimited" => read.unlimited = cell(field, text, location, problems),
        "blocked" => read.blocked = cell(field, text, location, problems),
        "on_store_failure" => read.on_store_failure = cell(field, text, location, problems),
        "shadow" => read.shadow = cell(field, text, location, problems),
        "lease" => read.lease = cell(field, text, location, problems),
        "lease_for" => read.lease_for = cell(field, text, location, problems),
        _ => unreachable!("{field} is not in {FIELDS:?}"),
    }
}

fn cell<T: FromText>(field: &str, text: &str, location: Location, problems: &mut Vec<Problem>) -> Field<T> {
    match T::from_text(text) {
        Ok(value) => Field::Given(value, location),
        Err(message) => {
            problems.push(Problem::new(&location, format!("{field}: {message}")));
            Field::Wrong(location)
        }
    }
}
