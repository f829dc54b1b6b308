//! Replies into bytes, one after another, in the version of the protocol that the client chose.

use std::fmt::{self, Write};

/// The longest text of an error, in bytes: a text may quote what was sent.
const MAX_ERROR: usize = 512;

/// The longest number, with its kind, its sign and its end, in bytes.
const MAX_NUMBER: usize = 24;

const DIGITS: &[u8; 10] = b"0123456789";

/// The versions of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Until the client asks for another.
    #[default]
    Resp2,
    /// With maps and a null of its own.
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

/// Replies that wait to be written.
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

    /// Forgets what was written, and gives back the room for more than `keep` bytes.
    pub(super) fn clear(&mut self, keep: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(keep);
    }

    pub(super) fn ok(&mut self) {
        self.simple("OK");
    }

    /// A short text of ours, without a line break.
    pub(super) fn simple(&mut self, text: &str) {
        self.head(b'+', text.as_bytes());
    }

    pub(super) fn integer(&mut self, value: i64) {
        self.number(b':', value.is_negative(), value.unsigned_abs());
    }

    /// A number that is never negative; what does not fit counts as the largest.
    pub(super) fn count(&mut self, value: u64) {
        self.integer(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// A number, or -1 where there is none.
    pub(super) fn count_or_none(&mut self, value: Option<u64>) {
        match value {
            Some(value) => self.count(value),
            None => self.integer(-1),
        }
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

    /// So many replies follow.
    pub(super) fn array(&mut self, len: usize) {
        self.length(b'*', len);
    }

    /// So many pairs follow.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * pairs),
            Protocol::Resp3 => self.length(b'%', pairs),
        }
    }

    /// An error: its first word says what kind it is. Line breaks become spaces.
    pub(super) fn error(&mut self, error: impl fmt::Display) {
        self.bytes.push(b'-');
        let start = self.bytes.len();
        write!(Text(&mut self.bytes, MAX_ERROR), "{error}").expect("writing to memory cannot fail");
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

    /// Written from its end, with what stands around it, so that it is added in one piece: most replies are numbers.
    fn number(&mut self, kind: u8, is_negative: bool, mut value: u64) {
        let mut text = [0; MAX_NUMBER];
        text[MAX_NUMBER - 2..].copy_from_slice(b"\r\n");
        let mut at = MAX_NUMBER - 2;
        loop {
            at -= 1;
            text[at] = DIGITS[usize::try_from(value % 10).unwrap_or_default()];
            value /= 10;
            if value == 0 {
                break;
            }
        }
        if is_negative {
            at -= 1;
            text[at] = b'-';
        }
        at -= 1;
        text[at] = kind;
        self.bytes.extend_from_slice(&text[at..]);
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

/// Writes the beginning of a text, as many bytes as it has room for.
struct Text<'a>(&'a mut Vec<u8>, usize);

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.floor_char_boundary(self.1);
        self.0.extend_from_slice(&text.as_bytes()[..end]);
        // once something does not fit, nothing more does
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
    fn each_kind_has_its_bytes_in_both_versions() {
        let all = |replies: &mut Replies| {
            replies.ok();
            replies.integer(-1);
            replies.count(u64::MAX);
            replies.count_or_none(None);
            replies.bulk(b"a\r\nb");
            replies.null();
            replies.array(2);
            replies.map(3);
        };
        let same = "+OK\r\n:-1\r\n:9223372036854775807\r\n:-1\r\n$4\r\na\r\nb\r\n";
        assert_eq!(written(Protocol::Resp2, all), format!("{same}$-1\r\n*2\r\n*6\r\n"));
        assert_eq!(written(Protocol::Resp3, all), format!("{same}_\r\n*2\r\n%3\r\n"));
    }

    #[test]
    fn an_error_is_one_short_line_whatever_it_quotes() {
        let error = written(Protocol::Resp2, |replies| replies.error("ERR a\r\n+OK\r\nb"));
        assert_eq!(error, "-ERR a  +OK  b\r\n");
        let long =
            written(Protocol::Resp2, |replies| replies.error(format_args!("{}{}", "ä".repeat(400), "b")));
        assert_eq!(long, format!("-{}\r\n", "ä".repeat(256)));
    }

    #[test]
    fn room_is_given_back() {
        let mut replies = Replies::default();
        replies.bulk(&[b'a'; 10_000]);
        replies.clear(100);
        assert!(replies.is_empty() && replies.bytes.capacity() <= 100);
    }
}
