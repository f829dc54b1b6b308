//! CSV with a header, one record per line. The delimiter is a comma, tab or semicolon, detected by the header.

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::record::{Fields, Record};

/// The maximum number of columns.
const MAX_COLUMNS: usize = 1_000;
/// The maximum number of columns listed in messages.
const MAX_LISTED: usize = 20;

/// The CSV parser.
#[derive(Debug)]
pub(super) struct Csv {
    reader: Reader,
    /// For each column, its slots and the rank of its name.
    columns: Vec<Vec<(usize, usize)>>,
    cells: Vec<u8>,
    ends: Vec<usize>,
}

impl Csv {
    /// Parses the header.
    pub(super) fn new(header: &[u8], fields: &Fields) -> Option<Self> {
        let header = header.strip_prefix(b"\xef\xbb\xbf").unwrap_or(header);
        let delimiter = [b',', b'\t', b';'].into_iter().find(|mark| header.contains(mark))?;
        let reader = ReaderBuilder::new().delimiter(delimiter).build();
        let mut csv = Self { reader, columns: Vec::new(), cells: Vec::new(), ends: vec![0; MAX_COLUMNS] };
        let count = csv.split(header)?;
        csv.columns = (0..count)
            .map(|column| {
                let name = csv.cell(column).trim_ascii();
                let wanted = fields.names().filter(|(known, _, _)| known.as_bytes() == name);
                wanted.map(|(_, slot, rank)| (slot, rank)).collect()
            })
            .collect();
        Some(csv)
    }

    /// Whether a column is stored in this slot.
    pub(super) fn has(&self, slot: usize) -> bool {
        self.columns.iter().flatten().any(|(wanted, _)| *wanted == slot)
    }

    /// Whether any column is requested.
    pub(super) fn has_any(&self) -> bool {
        self.columns.iter().any(|slots| !slots.is_empty())
    }

    /// The column names, for messages. Valid only before the first record is read.
    pub(super) fn header(&self) -> String {
        let name =
            |column| String::from_utf8_lossy(self.cell(column).trim_ascii()).escape_debug().to_string();
        let names: Vec<_> = (0..self.columns.len()).take(MAX_LISTED).map(name).collect();
        let more = if self.columns.len() > MAX_LISTED { ", …" } else { "" };
        format!("{}{more}", names.join(", "))
    }

    /// The expected number of cells, for messages.
    pub(super) fn expected(&self) -> String {
        format!("{} columns, as in the header", self.columns.len())
    }

    /// Reads the requested columns of a line into `record`. Returns whether it has as many cells as the header.
    pub(super) fn read(&mut self, line: &[u8], record: &mut Record) -> bool {
        if self.split(line) != Some(self.columns.len()) {
            return false;
        }
        for (column, slots) in self.columns.iter().enumerate() {
            for &(slot, rank) in slots {
                record.put(slot, rank, self.cell(column));
            }
        }
        true
    }

    fn cell(&self, column: usize) -> &[u8] {
        let start = if column == 0 { 0 } else { self.ends[column - 1] };
        &self.cells[start..self.ends[column]]
    }

    /// Splits a line into `cells`. Returns their number.
    fn split(&mut self, line: &[u8]) -> Option<usize> {
        if self.cells.len() < line.len() {
            self.cells.resize(line.len(), 0);
        }
        self.reader.reset();
        let (first, read, written, ended) = self.reader.read_record(line, &mut self.cells, &mut self.ends);
        match first {
            ReadRecordResult::Record => (read == line.len()).then_some(ended),
            ReadRecordResult::InputEmpty => {
                let (cells, ends) = (&mut self.cells[written..], &mut self.ends[ended..]);
                let (last, _, _, also) = self.reader.read_record(b"", cells, ends);
                matches!(last, ReadRecordResult::Record).then_some(ended + also)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_the_header() {
        for (header, line) in [
            ("ts,client_ip,path,tenant", "1,203.0.113.9,\"/a,\"\"b\"\"\",acme"),
            ("\u{feff}ts\tclient_ip\tpath\ttenant", "1\t203.0.113.9\t/a,\"b\"\tacme"),
            ("x;ts;client_ip;path;tenant", "-;1;203.0.113.9;\"/a,\"\"b\"\"\";acme"),
        ] {
            let mut fields = Fields::new(None);
            let slots = ["time", "ip", "path", "tenant"].map(|name| fields.label(name, None));
            let mut csv = Csv::new(header.as_bytes(), &fields).unwrap();
            assert!(csv.has(slots[0]));
            for _ in 0..2 {
                let mut record = Record::new(&fields);
                assert!(csv.read(line.as_bytes(), &mut record), "{line}");
                let values =
                    slots.map(|slot| String::from_utf8_lossy(record.get(slot).unwrap()).into_owned());
                assert_eq!(values, ["1", "203.0.113.9", "/a,\"b\"", "acme"], "{header}");
            }
        }
    }

    #[test]
    fn a_line_with_a_different_number_of_cells_is_not_read() {
        let fields = Fields::new(None);
        let mut csv = Csv::new(b"ts,ip", &fields).unwrap();
        for line in ["", "1", "1,2,3", "1,2\n3,4"] {
            assert!(!csv.read(line.as_bytes(), &mut Record::new(&fields)), "{line:?}");
        }
        assert!(csv.read(b"1,2", &mut Record::new(&fields)));
        assert!(Csv::new(b"one column", &fields).is_none());
    }
}
