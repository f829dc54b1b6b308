//! The requested fields of a log line.

use std::ops::Range;

/// The slot of the time, which every log has.
pub(super) const TIME: usize = 0;
/// The slot of the request line (`GET /path HTTP/1.1`), for logs with such a field.
pub(super) const REQUEST: usize = 1;

/// Field names of well-known labels in the logs of common servers, best first.
const ALIASES: [(&str, &[&str]); 8] = [
    (
        "time",
        &[
            "time",
            "timestamp",
            "@timestamp",
            "ts",
            "time_iso8601",
            "time_local",
            "datetime",
            "date",
            "msec",
            "start_time",
            "StartUTC",
        ],
    ),
    (
        "ip",
        &[
            "ip",
            "remote_addr",
            "client_ip",
            "clientip",
            "request.client_ip",
            "request.remote_ip",
            "remote_ip",
            "client_addr",
            "ClientHost",
            "remote_host",
            "c-ip",
        ],
    ),
    ("method", &["method", "request_method", "request.method", "RequestMethod", "http_method", "cs-method"]),
    ("path", &["path", "uri", "request_uri", "request.uri", "RequestPath", "url", "cs-uri-stem"]),
    ("host", &["host", "http_host", "request.host", "server_name", "RequestHost", "vhost", "cs-host"]),
    ("status", &["status", "status_code", "DownstreamStatus", "sc-status"]),
    ("user", &["user", "remote_user", "user_id", "ClientUsername", "cs-username"]),
    ("user_agent", &["user_agent", "http_user_agent", "agent", "request.headers.User-Agent"]),
];

/// The requested fields.
#[derive(Clone, Debug)]
pub(crate) struct Fields(Vec<Field>);

/// A requested field.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    /// The label it becomes.
    label: String,
    /// Its possible names in the log, best first.
    names: Vec<String>,
}

/// The values of one line, in reusable buffers.
#[derive(Debug)]
pub(crate) struct Record {
    /// In microseconds since the epoch.
    pub(crate) time_us: u64,
    bytes: Vec<u8>,
    slots: Vec<Option<Slot>>,
}

/// The position of a value, and the rank of its field name: 0 is the best.
#[derive(Clone, Copy, Debug)]
struct Slot {
    start: usize,
    end: usize,
    rank: usize,
}

impl Fields {
    /// Requests the time and the request line.
    pub(crate) fn new(time: Option<&str>) -> Self {
        let mut fields = Self(Vec::new());
        match time {
            Some(name) => fields.0.push(Field { label: "time".to_owned(), names: vec![name.to_owned()] }),
            None => fields.0.push(Field::of_label("time")),
        }
        fields.0.push(Field { label: "request".to_owned(), names: vec!["request".to_owned()] });
        fields
    }

    /// Requests a label by the given field name, or by its usual names. Returns its slot.
    pub(crate) fn label(&mut self, label: &str, given: Option<&str>) -> usize {
        let field = match given {
            Some(name) => Field { label: label.to_owned(), names: vec![name.to_owned()] },
            None => Field::of_label(label),
        };
        self.request(field)
    }

    /// Requests a field by its name. Returns its slot.
    pub(crate) fn named(&mut self, name: &str) -> usize {
        self.request(Field { label: String::new(), names: vec![name.to_owned()] })
    }

    fn request(&mut self, field: Field) -> usize {
        let same = |other: &Field| other.label == field.label && other.names == field.names;
        if let Some(at) = self.0.iter().position(same) {
            return at;
        }
        self.0.push(field);
        self.0.len() - 1
    }

    /// All possible field names, with slot and rank.
    pub(super) fn names(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.0.iter().enumerate().flat_map(|(slot, field)| {
            field.names.iter().enumerate().map(move |(rank, name)| (name.as_str(), slot, rank))
        })
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The slot of a label, if requested.
    pub(super) fn slot_of(&self, label: &str) -> Option<usize> {
        self.0.iter().position(|field| field.label == label)
    }

    /// Whether the field of the time was set explicitly.
    pub(super) fn is_time_named(&self) -> bool {
        self.0[TIME].names.len() == 1
    }

    /// The possible fields of the time, for messages.
    pub(super) fn time_names(&self) -> String {
        self.0[TIME].names.join(", ")
    }
}

impl Field {
    fn of_label(label: &str) -> Self {
        let aliases = ALIASES.iter().find(|(name, _)| *name == label);
        let names = match aliases {
            Some((_, names)) => names.iter().map(|&name| name.to_owned()).collect(),
            None => vec![label.to_owned()],
        };
        Self { label: label.to_owned(), names }
    }
}

impl Record {
    pub(crate) fn new(fields: &Fields) -> Self {
        Self { time_us: 0, bytes: Vec::new(), slots: vec![None; fields.len()] }
    }

    /// The value in a slot, if the line has it.
    pub(crate) fn get(&self, slot: usize) -> Option<&[u8]> {
        self.slots[slot].map(|Slot { start, end, .. }| &self.bytes[start..end])
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.slots.fill(None);
    }

    /// Stores a value, unless one with a better rank is stored. Empty values and `-` are ignored.
    pub(super) fn put(&mut self, slot: usize, rank: usize, value: &[u8]) {
        if matches!(value, b"" | b"-") || self.slots[slot].is_some_and(|kept| kept.rank <= rank) {
            return;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(value);
        self.slots[slot] = Some(Slot { start, end: self.bytes.len(), rank });
    }

    /// Stores a part of another value, unless the slot is filled.
    pub(super) fn put_part(&mut self, slot: usize, of: usize, part: Range<usize>) {
        if let (None, Some(whole)) = (self.slots[slot], self.slots[of])
            && !part.is_empty()
        {
            let (start, end) = (whole.start + part.start, whole.start + part.end);
            self.slots[slot] = Some(Slot { start, end, rank: usize::MAX });
        }
    }

    /// Reduces a value to a part of it.
    pub(super) fn narrow(&mut self, slot: usize, cut: impl FnOnce(&[u8]) -> Range<usize>) {
        let Some(Slot { start, end, rank }) = self.slots[slot] else { return };
        let part = cut(&self.bytes[start..end]);
        self.slots[slot] = Some(Slot { start: start + part.start, end: start + part.end, rank });
    }
}
