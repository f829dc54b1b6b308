//! Encodes replies in the protocol version that the client selected.

use std::fmt::{self, Write};

/// The longest text of an error, in bytes. A text may quote arguments.
const MAX_ERROR: usize = 512;

/// The longest number with its type byte, sign and CRLF, in bytes.
const MAX_NUMBER: usize = 24;

/// The most numbers of one [`Replies::counts`].
const MAX_COUNTS: usize = 5;

/// The largest number of the protocol.
const MAX_COUNT: u64 = i64::MAX.unsigned_abs();

/// The protocol versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Protocol {
    /// The default.
    #[default]
    Resp2,
    /// With maps and a null type.
    Resp3,
}

impl Protocol {
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Encoded replies that are not yet written to the connection.
#[derive(Debug, Default)]
pub(super) struct Replies {
    bytes: Vec<u8>,
    pub(super) protocol: Protocol,
}

impl Replies {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Removes all replies and shrinks the buffer to `keep` bytes.
    pub(super) fn clear(&mut self, keep: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(keep);
    }

    pub(super) fn ok(&mut self) {
        self.simple("OK");
    }

    /// A short text without line breaks.
    pub(super) fn simple(&mut self, text: &str) {
        self.head(b'+', text.as_bytes());
    }

    pub(super) fn integer(&mut self, value: i64) {
        self.number(b':', value.is_negative(), value.unsigned_abs());
    }

    /// A count, limited to the largest integer of the protocol.
    pub(super) fn count(&mut self, value: u64) {
        self.number(b':', false, value.min(MAX_COUNT));
    }

    /// A count, or -1 for `None`.
    pub(super) fn count_or_none(&mut self, value: Option<u64>) {
        match value {
            Some(value) => self.count(value),
            None => self.integer(-1),
        }
    }

    /// An array of counts, with -1 for `None`.
    pub(super) fn counts<const N: usize>(&mut self, values: [Option<u64>; N]) {
        const { assert!(N <= MAX_COUNTS) };
        let mut text = [0; (MAX_COUNTS + 1) * MAX_NUMBER];
        let mut start = text.len();
        for value in values.into_iter().rev() {
            let (is_negative, value) = value.map_or((true, 1), |value| (false, value.min(MAX_COUNT)));
            start = number_before(start, &mut text, b':', is_negative, value);
        }
        start = number_before(start, &mut text, b'*', false, N as u64);
        self.bytes.extend_from_slice(&text[start..]);
    }

    pub(super) fn bulk(&mut self, text: &[u8]) {
        self.length(b'$', text.len());
        self.bytes.extend_from_slice(text);
        self.end();
    }

    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// The header of an array of `len` replies.
    pub(super) fn array(&mut self, len: usize) {
        self.length(b'*', len);
    }

    /// The header of a map of `pairs`.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * pairs),
            Protocol::Resp3 => self.length(b'%', pairs),
        }
    }

    /// An error. Line breaks become spaces.
    pub(super) fn error(&mut self, error: impl fmt::Display) {
        self.bytes.push(b'-');
        let start = self.bytes.len();
        write!(TruncatingWriter(&mut self.bytes, MAX_ERROR), "{error}")
            .expect("writing to memory cannot fail");
        for byte in &mut self.bytes[start..] {
            if matches!(byte, b'\r' | b'\n') {
                *byte = b' ';
            }
        }
        self.end();
    }

    fn length(&mut self, kind: u8, len: usize) {
        self.number(kind, false, u64::try_from(len).unwrap_or(u64::MAX));
    }

    fn number(&mut self, kind: u8, is_negative: bool, value: u64) {
        let mut text = [0; MAX_NUMBER];
        let start = number_before(text.len(), &mut text, kind, is_negative, value);
        self.bytes.extend_from_slice(&text[start..]);
    }

    fn head(&mut self, kind: u8, text: &[u8]) {
        self.bytes.reserve(text.len() + 3);
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.end();
    }

    fn end(&mut self) {
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// Writes a number with its type byte and CRLF so that it ends at `end`, and returns its start. Most replies are numbers, so they are
/// appended to the buffer in one step.
#[inline(always)]
fn number_before(end: usize, text: &mut [u8], kind: u8, is_negative: bool, mut value: u64) -> usize {
    let mut start = end;
    let mut put = |bytes: &[u8]| {
        let end = start;
        start -= bytes.len();
        text[start..end].copy_from_slice(bytes);
    };
    if value < 10 {
        let one = PAIRS[usize::try_from(value).unwrap_or_default()][1];
        if is_negative {
            put(&[kind, b'-', one, b'\r', b'\n']);
        } else {
            put(&[kind, one, b'\r', b'\n']);
        }
        return start;
    }
    put(b"\r\n");
    while value >= 100 {
        put(&PAIRS[usize::try_from(value % 100).unwrap_or_default()]);
        value /= 100;
    }
    let [ten, one] = PAIRS[usize::try_from(value).unwrap_or_default()];
    match (value >= 10, is_negative) {
        (true, false) => put(&[kind, ten, one]),
        (false, false) => put(&[kind, one]),
        (true, true) => put(&[kind, b'-', ten, one]),
        (false, true) => put(&[kind, b'-', one]),
    }
    start
}

/// The numbers 0 to 99 as two digits.
const PAIRS: [[u8; 2]; 100] = {
    let (mut pairs, mut number) = ([[b'0'; 2]; 100], 0);
    while number < 100 {
        pairs[number as usize] = [b'0' + number / 10, b'0' + number % 10];
        number += 1;
    }
    pairs
};

/// A writer that truncates after a number of bytes.
struct TruncatingWriter<'a>(&'a mut Vec<u8>, usize);

impl Write for TruncatingWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.floor_char_boundary(self.1);
        self.0.extend_from_slice(&text.as_bytes()[..end]);
        // after the first truncation nothing is appended
        self.1 = if end < text.len() { 0 } else { self.1 - end };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(protocol: Protocol, write: impl FnOnce(&mut Replies)) -> String {
        let mut replies = Replies { protocol, ..Replies::default() };
        write(&mut replies);
        String::from_utf8(replies.bytes().to_vec()).unwrap()
    }

    #[test]
    fn every_reply_type_is_encoded_in_both_versions() {
        let all = |replies: &mut Replies| {
            replies.ok();
            replies.integer(-1);
            replies.count(u64::MAX);
            replies.count_or_none(None);
            replies.bulk(b"a\r\nb");
            replies.null();
            replies.array(2);
            replies.map(3);
            replies.counts([Some(0), None, Some(u64::MAX), Some(10), Some(1_234_567)]);
        };
        let same = "+OK\r\n:-1\r\n:9223372036854775807\r\n:-1\r\n$4\r\na\r\nb\r\n";
        let counts = "*5\r\n:0\r\n:-1\r\n:9223372036854775807\r\n:10\r\n:1234567\r\n";
        assert_eq!(written(Protocol::Resp2, all), format!("{same}$-1\r\n*2\r\n*6\r\n{counts}"));
        assert_eq!(written(Protocol::Resp3, all), format!("{same}_\r\n*2\r\n%3\r\n{counts}"));
    }

    #[test]
    fn numbers_of_any_length_are_written_in_full() {
        let around = |ten: i64| [ten - 1, ten, ten + 1, 1 - ten, -ten, -ten - 1];
        let powers = (0..=18).flat_map(|power| around(10_i64.pow(power)));
        for number in powers.chain([i64::MIN, i64::MAX, 102, 1_001, 123_456_789]) {
            let text = written(Protocol::Resp2, |replies| replies.integer(number));
            assert_eq!(text, format!(":{number}\r\n"));
        }
    }

    #[test]
    fn an_error_is_one_short_line() {
        let error = written(Protocol::Resp2, |replies| replies.error("ERR a\r\n+OK\r\nb"));
        assert_eq!(error, "-ERR a  +OK  b\r\n");
        let long =
            written(Protocol::Resp2, |replies| replies.error(format_args!("{}{}", "ä".repeat(400), "b")));
        assert_eq!(long, format!("-{}\r\n", "ä".repeat(256)));
    }

    #[test]
    fn the_buffer_shrinks() {
        let mut replies = Replies::default();
        replies.bulk(&[b'a'; 10_000]);
        replies.clear(100);
        assert!(replies.is_empty() && replies.bytes.capacity() <= 100);
    }
}
