//! Logs of any size as a stream of records, in the order of time as far as they are in order themselves.
//!
//! | file | has |
//! |---|---|
//! | `record` | the fields that are wanted of every line, and one line's values |
//! | `combined`, `json`, `csv` | the formats |
//! | `time` | the ways to write the time |
//!
//! Several logs, as of several servers, are merged by time. One buffer per log; nothing is allocated for a line. A line that cannot be
//! read is counted and skipped; the first few are remembered.

mod combined;
mod csv;
mod json;
mod record;
mod time;

use std::{
    cell::Cell,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    rc::Rc,
};

use clap::ValueEnum;
use flate2::bufread::MultiGzDecoder;
use memchr::memchr;

pub(crate) use self::record::{Fields, Record};
use self::{combined::Combined, csv::Csv, json::Json, time::Times};

/// How much of a log is held at once, and so the longest line that is read.
const BUFFER: usize = 256 << 10;
/// The most logs that are merged: each has its buffer.
pub(crate) const MAX_LOGS: usize = 256;
/// How many unreadable lines are remembered; the rest is counted.
const MAX_SHOWN: usize = 5;
/// How much of an unreadable line is remembered.
const MAX_SHOWN_BYTES: usize = 100;
/// The name of the standard input.
const STDIN: &str = "-";
/// How a gzip file begins.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// How files begin that are packed in another way: how they are called, and what unpacks them.
const PACKED: [(&[u8], &str, &str); 4] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "zstdcat"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
];

/// How the lines of a log look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Found out by the first line
    Auto,
    /// Apache's and nginx's access logs
    Combined,
    /// The same without referer and agent
    Common,
    /// One JSON object to the line
    Json,
    /// With a header that names the columns
    Csv,
}

/// How logs are read.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) format: Format,
    pub(crate) fields: Fields,
    pub(crate) time_format: Option<String>,
}

/// Several logs, merged by time.
pub(crate) struct Logs {
    sources: Vec<Source>,
    reading: Reading,
    /// Where the last record is from.
    current: usize,
    /// Lines that were records.
    pub(crate) read: u64,
    /// Bytes of the files that were read, packed as they are.
    bytes: Rc<Cell<u64>>,
    pub(crate) trouble: Trouble,
}

/// Lines that could not be read.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    pub(crate) lines: u64,
    /// The first few of them.
    pub(crate) shown: Vec<Unreadable>,
}

/// A line that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Unreadable {
    pub(crate) log: String,
    pub(crate) line: u64,
    /// What is wrong, or would be right.
    pub(crate) problem: String,
    /// How it begins.
    pub(crate) text: String,
}

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error("cannot read the log {0:?}: {1}{remedy}", remedy = remedy(.1))]
    Io(String, io::Error),
    #[error(
        "{0} logs are too many: merge at most {MAX_LOGS} at once, or concatenate some: zcat a b | tollgate simulate --log - …"
    )]
    TooMany(usize),
    #[error(
        "{log:?} is packed with {name}, and only gzip is unpacked here: {unpack} {log} | tollgate simulate --log - …"
    )]
    Packed { log: String, name: &'static str, unpack: &'static str },
    #[error(
        "{0:?} is a JSON list, and one object to the line is read: jq -c '.[]' {0} | tollgate simulate --log - …"
    )]
    JsonList(String),
    #[error(
        "cannot tell the format of {0:?} by its first line: it is no access log, no JSON object and no header of CSV; name the \
         format with --format combined, json or csv, or make CSV of it, for example with the columns time,ip,path"
    )]
    Format(String),
    #[error(
        "{log:?} seems to be CSV, and of its columns ({columns}) none is known: name the one with the time with --time COLUMN, \
         and others with --field ip=COLUMN; name the format with --format if it is another"
    )]
    Columns { log: String, columns: String },
    #[error(
        "{log:?} has no column for the time (looked for {names}, found {columns}): name it with --time COLUMN"
    )]
    NoTime { log: String, names: String, columns: String },
    #[error("there is no request in {0}: name a log that has some, such as an older one (access.log.1)")]
    Empty(String),
    #[error("no line of the logs could be read{0}")]
    Nothing(String),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": correct its path",
        io::ErrorKind::IsADirectory => ": name the logs in it, for example with *.log at the end",
        io::ErrorKind::PermissionDenied => ": let this user read it",
        // as the one that unpacks says it
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            ": it is cut off or damaged, gzip -t tells: get it once more"
        }
        _ => "",
    }
}

impl Logs {
    /// Opens logs; `-` is the standard input.
    pub(crate) fn open(paths: &[PathBuf], reading: Reading) -> Result<Self, LogError> {
        if paths.len() > MAX_LOGS {
            return Err(LogError::TooMany(paths.len()));
        }
        let bytes = Rc::new(Cell::new(0));
        let sources = paths.iter().map(|path| Source::open(path, &reading, &bytes));
        let sources = sources.collect::<Result<_, _>>()?;
        Ok(Self { sources, reading, current: 0, read: 0, bytes, trouble: Trouble::default() })
    }

    /// The next record: of those that stand first in their logs, the earliest.
    pub(crate) fn next(&mut self) -> Result<Option<&Record>, LogError> {
        if let [only] = &mut self.sources[..] {
            only.advance(&self.reading, &mut self.trouble)?;
        } else {
            for source in &mut self.sources {
                if source.state == State::Taken {
                    source.advance(&self.reading, &mut self.trouble)?;
                }
            }
            let waiting =
                self.sources.iter().enumerate().filter(|(_, source)| source.state == State::Waiting);
            let earliest = waiting.min_by_key(|(_, source)| source.record.time_us);
            self.current = earliest.map_or(0, |(at, _)| at);
        }
        let source = &mut self.sources[self.current];
        if source.state == State::Ended {
            return Ok(None);
        }
        source.state = State::Taken;
        self.read += 1;
        Ok(Some(&source.record))
    }

    /// Counts the last record as one that could not be read after all.
    pub(crate) fn reject(&mut self, problem: String) {
        let source = &self.sources[self.current];
        self.read -= 1;
        self.trouble.add(&source.name, source.line, problem, source.last());
    }

    /// How many bytes of the files were read, packed as they are.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Nothing at all could be read.
    pub(crate) fn nothing(&self) -> LogError {
        match self.trouble.shown.first() {
            Some(line) if self.reading.format == Format::Auto => LogError::Nothing(format!("; {line}")),
            Some(line) => LogError::Nothing(format!("; {line}; leave --format out to have it found out")),
            None => {
                let names: Vec<_> = self.sources.iter().map(|source| format!("{:?}", source.name)).collect();
                LogError::Empty(names.join(", "))
            }
        }
    }
}

impl Trouble {
    #[cold]
    fn add(&mut self, log: &str, line: u64, problem: String, text: &[u8]) {
        self.lines += 1;
        if self.shown.len() < MAX_SHOWN {
            let text = String::from_utf8_lossy(&text[..text.len().min(MAX_SHOWN_BYTES)]).into_owned();
            self.shown.push(Unreadable { log: log.to_owned(), line, problem, text });
        }
    }
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}, found {:?}", self.log, self.line, self.problem, self.text)
    }
}

/// One log.
struct Source {
    name: String,
    input: Box<dyn Read>,
    buffer: Vec<u8>,
    /// Where the lines that are left begin and end in the buffer.
    left: (usize, usize),
    /// Where the last line begins and ends.
    last: (usize, usize),
    /// How many lines have been read.
    line: u64,
    format: Option<Lines>,
    times: Times,
    record: Record,
    state: State,
}

/// What became of a source's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is there to be taken.
    Waiting,
    /// It was taken; the next one has to be read.
    Taken,
    /// There is none any more.
    Ended,
}

/// A format, ready to read lines.
enum Lines {
    Combined(Combined),
    Json(Json),
    Csv(Box<Csv>),
}

/// What came of looking for the end of a line.
enum Found {
    Line,
    TooLong,
    End,
}

impl Source {
    fn open(path: &Path, reading: &Reading, bytes: &Rc<Cell<u64>>) -> Result<Self, LogError> {
        let name = path.display().to_string();
        let input = input(path, Rc::clone(bytes))?;
        Ok(Self {
            name,
            input,
            buffer: vec![0; BUFFER],
            left: (0, 0),
            last: (0, 0),
            line: 0,
            format: None,
            times: Times::new(reading.time_format.as_deref()),
            record: Record::new(&reading.fields),
            state: State::Taken,
        })
    }

    /// Reads on to the next line that is a record.
    #[inline]
    fn advance(&mut self, reading: &Reading, trouble: &mut Trouble) -> Result<(), LogError> {
        loop {
            match self.next_line().map_err(|error| LogError::Io(self.name.clone(), error))? {
                Found::Line => {}
                Found::TooLong => {
                    let problem = format!("expected a line of at most {BUFFER} bytes");
                    trouble.add(&self.name, self.line, problem, self.last());
                    continue;
                }
                Found::End => {
                    self.state = State::Ended;
                    return Ok(());
                }
            }
            if self.last().trim_ascii().is_empty() {
                continue;
            }
            if self.format.is_none() {
                let (lines, is_header) = self.recognise(reading)?;
                self.format = Some(lines);
                if is_header {
                    continue;
                }
            }
            match self.read_last(reading) {
                Ok(()) => {
                    self.state = State::Waiting;
                    return Ok(());
                }
                Err(expected) => {
                    trouble.add(&self.name, self.line, format!("expected {expected}"), self.last())
                }
            }
        }
    }

    fn last(&self) -> &[u8] {
        &self.buffer[self.last.0..self.last.1]
    }

    /// Finds the next line, without its end.
    #[inline]
    fn next_line(&mut self) -> io::Result<Found> {
        let mut searched = 0;
        loop {
            let (start, end) = self.left;
            if let Some(at) = memchr(b'\n', &self.buffer[start + searched..end]) {
                let stop = start + searched + at;
                self.left.0 = stop + 1;
                self.take(start, stop);
                return Ok(Found::Line);
            }
            searched = end - start;
            if searched == self.buffer.len() {
                return self.skip_line();
            }
            if start > 0 {
                self.buffer.copy_within(start..end, 0);
                self.left = (0, searched);
            }
            let got = read_some(&mut *self.input, &mut self.buffer[searched..])?;
            self.left.1 = searched + got;
            if got == 0 {
                if searched == 0 {
                    return Ok(Found::End);
                }
                self.left = (0, 0);
                self.take(0, searched);
                return Ok(Found::Line);
            }
        }
    }

    #[inline]
    fn take(&mut self, start: usize, stop: usize) {
        let carriage = stop > start && self.buffer[stop - 1] == b'\r';
        self.last = (start, stop - usize::from(carriage));
        self.line += 1;
    }

    /// Leaves a line behind that does not fit the buffer; what is kept of it is its end.
    #[cold]
    fn skip_line(&mut self) -> io::Result<Found> {
        loop {
            let got = read_some(&mut *self.input, &mut self.buffer)?;
            self.left = (0, got);
            let end = memchr(b'\n', &self.buffer[..got]);
            if got == 0 || end.is_some() {
                let end = end.unwrap_or(0);
                self.left.0 = (end + 1).min(got);
                self.take(0, end);
                return Ok(Found::TooLong);
            }
        }
    }

    /// Finds out by the last line, the first of the log, how to read all of them. Whether it is a header.
    fn recognise(&self, reading: &Reading) -> Result<(Lines, bool), LogError> {
        let line = self.last();
        let fields = &reading.fields;
        let format = match reading.format {
            Format::Auto if line.trim_ascii_start().starts_with(b"{") => Format::Json,
            Format::Auto if Combined::is_like(line) => Format::Combined,
            Format::Auto | Format::Json if is_json_list(line) => {
                return Err(LogError::JsonList(self.name.clone()));
            }
            Format::Auto => Format::Csv,
            named => named,
        };
        Ok(match format {
            Format::Json => (Lines::Json(Json::new(fields)), false),
            Format::Combined | Format::Common => (Lines::Combined(Combined::new(fields)), false),
            Format::Csv | Format::Auto => {
                let csv = Csv::new(line, fields).ok_or_else(|| LogError::Format(self.name.clone()))?;
                if !csv.has(record::TIME) {
                    let (log, columns) = (self.name.clone(), csv.header());
                    return Err(match reading.format {
                        Format::Auto if !csv.has_any() && !fields.is_time_named() => {
                            LogError::Columns { log, columns }
                        }
                        _ => LogError::NoTime { log, names: fields.time_names(), columns },
                    });
                }
                (Lines::Csv(Box::new(csv)), true)
            }
        })
    }

    /// Reads the last line into the record.
    #[inline]
    fn read_last(&mut self, reading: &Reading) -> Result<(), String> {
        let line = &self.buffer[self.last.0..self.last.1];
        self.record.clear();
        let format = self.format.as_mut().expect("the first line has shown the format");
        let time = match format {
            Lines::Combined(combined) => {
                let time = combined.read(line, &mut self.record);
                self.times.read(time.ok_or_else(|| combined::EXPECTED.to_owned())?)
            }
            Lines::Json(json) => {
                if !json.read(line, &mut self.record) {
                    return Err(json::EXPECTED.to_owned());
                }
                named_fields(&mut self.record, &mut self.times, &reading.fields)?
            }
            Lines::Csv(csv) => {
                if !csv.read(line, &mut self.record) {
                    return Err(csv.expected());
                }
                named_fields(&mut self.record, &mut self.times, &reading.fields)?
            }
        };
        self.record.time_us = time.ok_or_else(|| self.times.expected())?;
        Ok(())
    }
}

/// The time of a record whose fields have names, and what a whole request line says that no other field did.
fn named_fields(record: &mut Record, times: &mut Times, fields: &Fields) -> Result<Option<u64>, String> {
    let (method, path) = (fields.slot_of("method"), fields.slot_of("path"));
    if let Some(path) = path {
        record.narrow(path, combined::path_within);
    }
    if let Some(request) = record.get(record::REQUEST) {
        let (said_method, said_path) = combined::method_and_path(request);
        for (slot, said) in [(method, said_method), (path, said_path)] {
            if let Some(slot) = slot {
                record.put_part(slot, record::REQUEST, said);
            }
        }
    }
    match record.get(record::TIME) {
        Some(time) => Ok(times.read(time)),
        None if fields.is_time_named() => {
            Err(format!("a time in the field {}, which --time names", fields.time_names()))
        }
        None => Err(format!("a time in one of {}; --time names another field", fields.time_names())),
    }
}

/// Whether a line is how a list of objects begins.
fn is_json_list(line: &[u8]) -> bool {
    let first = line.trim_ascii_start();
    first.strip_prefix(b"[").is_some_and(|rest| matches!(rest.trim_ascii_start(), [] | [b'{', ..]))
}

/// The bytes of a log, unpacked; those of the file are counted.
fn input(path: &Path, bytes: Rc<Cell<u64>>) -> Result<Box<dyn Read>, LogError> {
    let log = path.display().to_string();
    let failed = |error| LogError::Io(log.clone(), error);
    let raw: Box<dyn Read> = if path == Path::new(STDIN) {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(failed)?)
    };
    let mut raw = BufReader::new(Counted { raw, bytes });
    let first = raw.fill_buf().map_err(failed)?;
    if let Some((_, name, unpack)) = PACKED.iter().find(|(magic, ..)| first.starts_with(magic)) {
        return Err(LogError::Packed { log, name, unpack });
    }
    let is_packed = first.starts_with(&GZIP);
    Ok(if is_packed { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) })
}

/// Counts what is read.
struct Counted {
    raw: Box<dyn Read>,
    bytes: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let got = self.raw.read(into)?;
        self.bytes.set(self.bytes.get() + got as u64);
        Ok(got)
    }
}

/// Reads something, or finds the end.
fn read_some(input: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
