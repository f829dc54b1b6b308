//! Files of overrides: CSV with a header, one override a row, read as it goes since there may be a million.
//!
//! A column is a field of an override, or a label to match; `when.x` is the label `x` whatever it is called. An empty
//! cell says nothing. Lines that start with `#` are comments.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};

use csv_core::{ReadFieldResult, Reader, ReaderBuilder};
use tollgate::labels::MAX_LABEL_VALUE;

use super::{
    error::{File, MAX_PROBLEMS, Place, Problem},
    kinds::OneOrMore,
    read::Override,
    reader::{Field, FromText, meant},
};

/// The fields of an override that a column can have.
const FIELDS: [&str; 8] =
    ["amount", "window", "burst", "cost", "unlimited", "blocked", "on_store_failure", "shadow"];
/// What makes a column a label, whatever it is called.
const LABEL: &str = "when.";
/// The most columns of a file.
const MAX_COLUMNS: usize = 64;
/// The longest cell: a label's value, or a name.
const MAX_CELL: usize = MAX_LABEL_VALUE + 1;

/// The rows of a file that are left to read.
pub(super) struct Rows {
    file: Arc<File>,
    reader: Reader,
    /// Where in the file reading has come to.
    at: usize,
    columns: Vec<Column>,
}

enum Column {
    Label(String),
    Field(&'static str),
    /// What it is has been asked in vain.
    Unknown,
}

struct Cell {
    text: String,
    span: Range<usize>,
    ends_row: bool,
}

impl Rows {
    /// Reads the header. `labels` are those that the rule names.
    pub(super) fn new(path: PathBuf, bytes: Vec<u8>, labels: &[String], problems: &mut Vec<Problem>) -> Self {
        let (text, is_text) = match String::from_utf8(bytes) {
            Ok(text) => (text, true),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), false),
        };
        let file = Arc::new(File { path, text });
        let reader = ReaderBuilder::new().comment(Some(b'#')).build();
        let mut rows = Self { file, reader, at: 0, columns: Vec::new() };
        if !is_text {
            problems.push(Problem::new(&rows.place(0..0), "this is not UTF-8: save the file as UTF-8"));
            rows.at = rows.file.text.len();
            return rows;
        }
        for cell in rows.row(problems).unwrap_or_default() {
            let column = rows.column(&cell, labels, problems);
            rows.columns.push(column);
        }
        if !rows.columns.iter().any(|column| matches!(column, Column::Label(_))) && problems.is_empty() {
            let message = "the first line names no label to match: start with for example tenant,amount";
            problems.push(Problem::new(&rows.place(0..0), message));
        }
        rows
    }

    /// The next row as an override, and where it stands.
    pub(super) fn next(&mut self, problems: &mut Vec<Problem>) -> Option<(Override, Place)> {
        if problems.len() > MAX_PROBLEMS {
            return None;
        }
        let cells = self.row(problems)?;
        let place = self.place(cells.first()?.span.start..cells.last()?.span.end);
        if cells.len() != self.columns.len() {
            let message = format!(
                "this row has {} cells, and the first line names {}: give each column one",
                cells.len(),
                self.columns.len()
            );
            problems.push(Problem::new(&place, message));
            return None;
        }
        let mut read = Override::default();
        let mut when = BTreeMap::new();
        for (column, cell) in self.columns.iter().zip(&cells) {
            if cell.text.is_empty() {
                continue;
            }
            let at = self.place(cell.span.clone());
            match column {
                Column::Label(label) => {
                    let value = OneOrMore(vec![Field::Given(cell.text.clone(), at.clone())]);
                    when.insert(label.clone(), Field::Given(value, at));
                }
                Column::Field(field) => set(&mut read, field, &cell.text, at, problems),
                Column::Unknown => {}
            }
        }
        read.when = Field::Given(when, place.clone());
        Some((read, place))
    }

    fn place(&self, span: Range<usize>) -> Place {
        Place::In { file: Arc::clone(&self.file), span }
    }

    fn column(&self, cell: &Cell, labels: &[String], problems: &mut Vec<Problem>) -> Column {
        let name = cell.text.as_str();
        let place = self.place(cell.span.clone());
        let field = FIELDS.iter().find(|field| **field == name);
        let label =
            name.strip_prefix(LABEL).or_else(|| labels.iter().any(|label| label == name).then_some(name));
        let is_taken = |column: &Column| match column {
            Column::Label(other) => label == Some(other),
            Column::Field(other) => name == *other,
            Column::Unknown => false,
        };
        if self.columns.iter().any(is_taken) {
            problems.push(Problem::new(&place, format!("column {name:?} is there twice: leave one out")));
        }
        match (field, label) {
            (Some(field), _) => Column::Field(field),
            (None, Some(label)) => Column::Label(label.to_owned()),
            (None, None) => {
                let known: Vec<&str> =
                    FIELDS.iter().copied().chain(labels.iter().map(String::as_str)).collect();
                let help = match meant(name, &known) {
                    Some(other) => format!("did you mean `{other}`?"),
                    None => format!("to match a label that the rule does not name, write {LABEL}{name}"),
                };
                let message =
                    format!("column {name:?} is neither a field of an override nor a label of the rule");
                problems.push(Problem::new(&place, message).help(help));
                Column::Unknown
            }
        }
    }

    /// The cells of the next row.
    fn row(&mut self, problems: &mut Vec<Problem>) -> Option<Vec<Cell>> {
        let mut cells = Vec::with_capacity(self.columns.len());
        loop {
            let cell = match self.cell() {
                Ok(Some(cell)) => cell,
                Ok(None) => return Some(cells).filter(|cells| !cells.is_empty()),
                Err(span) => {
                    let message = format!("this cell has more than {MAX_LABEL_VALUE} bytes: shorten it");
                    problems.push(Problem::new(&self.place(span), message));
                    self.at = self.file.text.len();
                    return None;
                }
            };
            let ends_row = cell.ends_row;
            cells.push(cell);
            if cells.len() > MAX_COLUMNS {
                let message = format!("more than {MAX_COLUMNS} columns are too many");
                problems.push(Problem::new(&self.place(self.at..self.at), message));
                self.at = self.file.text.len();
                return None;
            }
            if ends_row {
                return Some(cells);
            }
        }
    }

    /// The next cell, without spaces around it; an error says where one is too long.
    fn cell(&mut self) -> Result<Option<Cell>, Range<usize>> {
        let mut buffer = [0; MAX_CELL];
        let (mut filled, start) = (0, self.at);
        loop {
            let input = &self.file.text.as_bytes()[self.at..];
            let (result, read, written) = self.reader.read_field(input, &mut buffer[filled..]);
            self.at += read;
            filled += written;
            let ends_row = match result {
                // Once more with nothing: that ends the last cell.
                ReadFieldResult::InputEmpty => continue,
                ReadFieldResult::OutputFull => return Err(start..self.at),
                ReadFieldResult::End => return Ok(None),
                ReadFieldResult::Field { record_end } => record_end,
            };
            // Cut out of valid text at ASCII characters, so it is valid text.
            let text = String::from_utf8_lossy(&buffer[..filled]).trim().to_owned();
            let written = &self.file.text[start..self.at];
            let lead = written.len() - written.trim_start().len();
            let written = written.trim().trim_end_matches(',').trim_end();
            let span = start + lead..start + lead + written.len();
            return Ok(Some(Cell { text, span, ends_row }));
        }
    }
}

fn set(read: &mut Override, field: &str, text: &str, place: Place, problems: &mut Vec<Problem>) {
    match field {
        "amount" => read.amount = cell(field, text, place, problems),
        "window" => read.window = cell(field, text, place, problems),
        "burst" => read.burst = cell(field, text, place, problems),
        "cost" => read.cost = cell(field, text, place, problems),
        "unlimited" => read.unlimited = cell(field, text, place, problems),
        "blocked" => read.blocked = cell(field, text, place, problems),
        "on_store_failure" => read.on_store_failure = cell(field, text, place, problems),
        "shadow" => read.shadow = cell(field, text, place, problems),
        _ => unreachable!("{field} is none of {FIELDS:?}"),
    }
}

fn cell<T: FromText>(field: &str, text: &str, place: Place, problems: &mut Vec<Problem>) -> Field<T> {
    match T::from_text(text) {
        Ok(value) => Field::Given(value, place),
        Err(message) => {
            problems.push(Problem::new(&place, format!("{field}: {message}")));
            Field::Wrong(place)
        }
    }
}
