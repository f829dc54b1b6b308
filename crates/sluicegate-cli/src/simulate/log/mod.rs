//! Access logs of any size as a stream of records.
//!
//! | file | contents |
//! |---|---|
//! | `record` | requested fields, and the values of one line |
//! | `combined`, `json`, `csv` | the formats |
//! | `time` | parser of times |
//!
//! Several logs, for example of several servers, are merged by time. Each log has one buffer; reading a line allocates nothing. Unreadable
//! lines are counted and skipped; the first ones are reported.

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
use self::{combined::Combined, csv::Csv, json::Json, time::TimeParser};

/// The buffer size per log, which is also the longest line.
const BUFFER: usize = 256 << 10;
/// The maximum number of merged logs: each has a buffer.
pub(crate) const MAX_LOGS: usize = 256;
/// The number of unreadable lines that are reported.
const MAX_SHOWN: usize = 5;
/// The reported length of an unreadable line.
const MAX_SHOWN_BYTES: usize = 100;
/// The path of the standard input.
const STDIN: &str = "-";
/// The magic bytes of gzip.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Unsupported compression formats: magic bytes, name, command to decompress.
const UNSUPPORTED_COMPRESSION: [(&[u8], &str, &str); 4] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "zstdcat"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
];

/// The format of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccessLogFormat {
    /// Detected by the first line
    Auto,
    /// Apache and nginx access logs
    Combined,
    /// Access logs without referer and user agent
    Common,
    /// One JSON object per line
    Json,
    /// CSV with a header line
    Csv,
}

/// Options of reading logs.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) format: AccessLogFormat,
    pub(crate) fields: Fields,
    pub(crate) time_format: Option<String>,
}

/// Several logs, merged by time.
pub(crate) struct Logs {
    sources: Vec<LogSource>,
    reading: Reading,
    /// The index of the last record's source.
    current: usize,
    /// The number of records.
    pub(crate) read: u64,
    /// Bytes read from the files, before decompression.
    bytes: Rc<Cell<u64>>,
    pub(crate) unreadable: UnreadableLines,
}

/// Unreadable lines.
#[derive(Debug, Default)]
pub(crate) struct UnreadableLines {
    pub(crate) lines: u64,
    /// The first ones.
    pub(crate) shown: Vec<Unreadable>,
}

/// An unreadable line.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Unreadable {
    pub(crate) log: String,
    pub(crate) line: u64,
    /// What was expected.
    pub(crate) problem: String,
    /// The start of the line.
    pub(crate) text: String,
}

/// The reason why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error("cannot read log {0:?}: {1}{remedy}", remedy = remedy(.1))]
    Io(String, io::Error),
    #[error(
        "{0} logs are too many: use at most {MAX_LOGS}, or concatenate some: zcat a b | sluicegate simulate --log - …"
    )]
    TooMany(usize),
    #[error(
        "{log:?} is compressed with {name}, only gzip is supported: {decompress} {log} | sluicegate simulate --log - …"
    )]
    Compression { log: String, name: &'static str, decompress: &'static str },
    #[error(
        "{0:?} is a JSON array, expected one object per line: jq -c '.[]' {0} | sluicegate simulate --log - …"
    )]
    JsonArray(String),
    #[error(
        "cannot detect the format of {0:?} by its first line: it is not an access log, a JSON object or a CSV header; set \
         --format to combined, json or csv, or convert it to CSV, for example with the columns time,ip,path"
    )]
    Format(String),
    #[error(
        "{log:?} looks like CSV with unknown columns ({columns}): set the column of the time with --time COLUMN, others with \
         --field ip=COLUMN; set --format if it is another format"
    )]
    Columns { log: String, columns: String },
    #[error("{log:?} has no time column (expected {names}, found {columns}): set it with --time COLUMN")]
    NoTime { log: String, names: String, columns: String },
    #[error("no requests in {0}: use another log, such as an older one (access.log.1)")]
    Empty(String),
    #[error("no line of the logs is readable{0}")]
    Unreadable(String),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": correct its path",
        io::ErrorKind::IsADirectory => ": use the files in it, for example with *.log",
        io::ErrorKind::PermissionDenied => ": grant this user read permission",
        // errors of the decompressor
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            ": the file is truncated or corrupt, check it with gzip -t"
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
        let sources = paths.iter().map(|path| LogSource::open(path, &reading, &bytes));
        let sources = sources.collect::<Result<_, _>>()?;
        Ok(Self { sources, reading, current: 0, read: 0, bytes, unreadable: UnreadableLines::default() })
    }

    /// Returns the next record: the earliest of the logs' next records.
    pub(crate) fn next(&mut self) -> Result<Option<&Record>, LogError> {
        if let [only] = &mut self.sources[..] {
            only.advance(&self.reading, &mut self.unreadable)?;
        } else {
            for source in &mut self.sources {
                if source.state == RecordState::Taken {
                    source.advance(&self.reading, &mut self.unreadable)?;
                }
            }
            let waiting =
                self.sources.iter().enumerate().filter(|(_, source)| source.state == RecordState::Ready);
            let earliest = waiting.min_by_key(|(_, source)| source.record.time_us);
            self.current = earliest.map_or(0, |(at, _)| at);
        }
        let source = &mut self.sources[self.current];
        if source.state == RecordState::Ended {
            return Ok(None);
        }
        source.state = RecordState::Taken;
        self.read += 1;
        Ok(Some(&source.record))
    }

    /// Counts the last record as unreadable.
    pub(crate) fn reject(&mut self, problem: String) {
        let source = &self.sources[self.current];
        self.read -= 1;
        self.unreadable.add(&source.name, source.line, problem, source.last());
    }

    /// The number of bytes read from the files, before decompression.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// The error if there was no readable line.
    pub(crate) fn no_requests_error(&self) -> LogError {
        match self.unreadable.shown.first() {
            Some(line) if self.reading.format == AccessLogFormat::Auto => {
                LogError::Unreadable(format!("; {line}"))
            }
            Some(line) => LogError::Unreadable(format!("; {line}; omit --format to detect it")),
            None => {
                let names: Vec<_> = self.sources.iter().map(|source| format!("{:?}", source.name)).collect();
                LogError::Empty(names.join(", "))
            }
        }
    }
}

impl UnreadableLines {
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
struct LogSource {
    name: String,
    input: Box<dyn Read>,
    buffer: Vec<u8>,
    /// The range of the buffer not yet consumed.
    left: (usize, usize),
    /// The range of the last line.
    last: (usize, usize),
    /// The number of lines read.
    line: u64,
    format: Option<LineParser>,
    times: TimeParser,
    record: Record,
    state: RecordState,
}

/// The state of a source's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordState {
    /// The record is available.
    Ready,
    /// The record was returned; the next one must be read.
    Taken,
    /// There are no more records.
    Ended,
}

/// The parser of a format.
enum LineParser {
    Combined(Combined),
    Json(Json),
    Csv(Box<Csv>),
}

/// The result of reading a line.
enum LineRead {
    Line,
    TooLong,
    End,
}

impl LogSource {
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
            times: TimeParser::new(reading.time_format.as_deref()),
            record: Record::new(&reading.fields),
            state: RecordState::Taken,
        })
    }

    /// Reads to the next readable line.
    #[inline]
    fn advance(&mut self, reading: &Reading, unreadable: &mut UnreadableLines) -> Result<(), LogError> {
        loop {
            match self.next_line().map_err(|error| LogError::Io(self.name.clone(), error))? {
                LineRead::Line => {}
                LineRead::TooLong => {
                    let problem = format!("expected a line of at most {BUFFER} bytes");
                    unreadable.add(&self.name, self.line, problem, self.last());
                    continue;
                }
                LineRead::End => {
                    self.state = RecordState::Ended;
                    return Ok(());
                }
            }
            if self.last().trim_ascii().is_empty() {
                continue;
            }
            if self.format.is_none() {
                let (parser, is_header) = self.detect_format(reading)?;
                self.format = Some(parser);
                if is_header {
                    continue;
                }
            }
            match self.read_last(reading) {
                Ok(()) => {
                    self.state = RecordState::Ready;
                    return Ok(());
                }
                Err(expected) => {
                    unreadable.add(&self.name, self.line, format!("expected {expected}"), self.last())
                }
            }
        }
    }

    fn last(&self) -> &[u8] {
        &self.buffer[self.last.0..self.last.1]
    }

    /// Finds the next line, without its terminator.
    #[inline]
    fn next_line(&mut self) -> io::Result<LineRead> {
        let mut searched = 0;
        loop {
            let (start, end) = self.left;
            if let Some(at) = memchr(b'\n', &self.buffer[start + searched..end]) {
                let stop = start + searched + at;
                self.left.0 = stop + 1;
                self.take(start, stop);
                return Ok(LineRead::Line);
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
                    return Ok(LineRead::End);
                }
                self.left = (0, 0);
                self.take(0, searched);
                return Ok(LineRead::Line);
            }
        }
    }

    #[inline]
    fn take(&mut self, start: usize, stop: usize) {
        let carriage = stop > start && self.buffer[stop - 1] == b'\r';
        self.last = (start, stop - usize::from(carriage));
        self.line += 1;
    }

    /// Skips a line that does not fit the buffer; its end remains in the buffer.
    #[cold]
    fn skip_line(&mut self) -> io::Result<LineRead> {
        loop {
            let got = read_some(&mut *self.input, &mut self.buffer)?;
            self.left = (0, got);
            let end = memchr(b'\n', &self.buffer[..got]);
            if got == 0 || end.is_some() {
                let end = end.unwrap_or(0);
                self.left.0 = (end + 1).min(got);
                self.take(0, end);
                return Ok(LineRead::TooLong);
            }
        }
    }

    /// Detects the format by the first line. Returns the parser and whether the line is a header.
    fn detect_format(&self, reading: &Reading) -> Result<(LineParser, bool), LogError> {
        let line = self.last();
        let fields = &reading.fields;
        let format = match reading.format {
            AccessLogFormat::Auto if line.trim_ascii_start().starts_with(b"{") => AccessLogFormat::Json,
            AccessLogFormat::Auto if Combined::matches(line) => AccessLogFormat::Combined,
            AccessLogFormat::Auto | AccessLogFormat::Json if is_json_array(line) => {
                return Err(LogError::JsonArray(self.name.clone()));
            }
            AccessLogFormat::Auto => AccessLogFormat::Csv,
            named => named,
        };
        Ok(match format {
            AccessLogFormat::Json => (LineParser::Json(Json::new(fields)), false),
            AccessLogFormat::Combined | AccessLogFormat::Common => {
                (LineParser::Combined(Combined::new(fields)), false)
            }
            AccessLogFormat::Csv | AccessLogFormat::Auto => {
                let csv = Csv::new(line, fields).ok_or_else(|| LogError::Format(self.name.clone()))?;
                if !csv.has(record::TIME) {
                    let (log, columns) = (self.name.clone(), csv.header());
                    return Err(match reading.format {
                        AccessLogFormat::Auto if !csv.has_any() && !fields.is_time_named() => {
                            LogError::Columns { log, columns }
                        }
                        _ => LogError::NoTime { log, names: fields.time_names(), columns },
                    });
                }
                (LineParser::Csv(Box::new(csv)), true)
            }
        })
    }

    /// Parses the last line into the record.
    #[inline]
    fn read_last(&mut self, reading: &Reading) -> Result<(), String> {
        let line = &self.buffer[self.last.0..self.last.1];
        self.record.clear();
        let format = self.format.as_mut().expect("the format was detected by the first line");
        let time = match format {
            LineParser::Combined(combined) => {
                let time = combined.read(line, &mut self.record);
                self.times.read(time.ok_or_else(|| combined::EXPECTED.to_owned())?)
            }
            LineParser::Json(json) => {
                if !json.read(line, &mut self.record) {
                    return Err(json::EXPECTED.to_owned());
                }
                named_fields(&mut self.record, &mut self.times, &reading.fields)?
            }
            LineParser::Csv(csv) => {
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

/// Returns the time of a record with named fields, and takes method and path from a request line if they have no field.
fn named_fields(record: &mut Record, times: &mut TimeParser, fields: &Fields) -> Result<Option<u64>, String> {
    let (method, path) = (fields.slot_of("method"), fields.slot_of("path"));
    if let Some(path) = path {
        record.narrow(path, combined::path_within);
    }
    if let Some(request) = record.get(record::REQUEST) {
        let (method_range, path_range) = combined::method_and_path(request);
        for (slot, range) in [(method, method_range), (path, path_range)] {
            if let Some(slot) = slot {
                record.put_part(slot, record::REQUEST, range);
            }
        }
    }
    match record.get(record::TIME) {
        Some(time) => Ok(times.read(time)),
        None if fields.is_time_named() => {
            Err(format!("a time in the field {} of --time", fields.time_names()))
        }
        None => Err(format!("a time in one of {}; --time sets another field", fields.time_names())),
    }
}

/// Whether a line is the start of an array of objects.
fn is_json_array(line: &[u8]) -> bool {
    let first = line.trim_ascii_start();
    first.strip_prefix(b"[").is_some_and(|rest| matches!(rest.trim_ascii_start(), [] | [b'{', ..]))
}

/// Opens a log, decompressed; the bytes of the file are counted.
fn input(path: &Path, bytes: Rc<Cell<u64>>) -> Result<Box<dyn Read>, LogError> {
    let log = path.display().to_string();
    let failed = |error| LogError::Io(log.clone(), error);
    let raw: Box<dyn Read> = if path == Path::new(STDIN) {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(failed)?)
    };
    let mut raw = BufReader::new(CountingReader { raw, bytes });
    let first = raw.fill_buf().map_err(failed)?;
    if let Some((_, name, decompress)) =
        UNSUPPORTED_COMPRESSION.iter().find(|(magic, ..)| first.starts_with(magic))
    {
        return Err(LogError::Compression { log, name, decompress });
    }
    let is_gzip = first.starts_with(&GZIP);
    Ok(if is_gzip { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) })
}

/// Counts the bytes read.
struct CountingReader {
    raw: Box<dyn Read>,
    bytes: Rc<Cell<u64>>,
}

impl Read for CountingReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let got = self.raw.read(into)?;
        self.bytes.set(self.bytes.get() + got as u64);
        Ok(got)
    }
}

/// Reads some bytes, or none at the end of the input.
fn read_some(input: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
