//! The common and combined log formats of Apache, nginx and others:
//!
//! ```text
//! 203.0.113.9 - ann [16/Nov/2026:04:54:28 +0000] "GET /login?x=1 HTTP/1.1" 200 512 "referer" "agent"
//! ```
//!
//! Everything after the user agent is ignored. A line may begin with the virtual host (`example.org:443`), as in Apache's
//! `vhost_combined`.

use std::ops::Range;

use memchr::{memchr, memrchr};

use super::record::{Fields, Record};

/// A part of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Host,
    Ip,
    User,
    Method,
    Path,
    Status,
    Bytes,
    Referer,
    UserAgent,
}

const COLUMNS: [(&str, Column); 9] = [
    ("host", Column::Host),
    ("ip", Column::Ip),
    ("user", Column::User),
    ("method", Column::Method),
    ("path", Column::Path),
    ("status", Column::Status),
    ("bytes", Column::Bytes),
    ("referer", Column::Referer),
    ("user_agent", Column::UserAgent),
];

/// The requested columns and their slots.
#[derive(Debug)]
pub(super) struct Combined {
    wanted: Vec<(Column, usize)>,
    /// Whether columns after the request are needed.
    needs_tail: bool,
}

/// The expected form of a line, for messages.
pub(super) const EXPECTED: &str = "ADDRESS - USER [TIME] \"REQUEST\" STATUS BYTES …";

impl Combined {
    pub(super) fn new(fields: &Fields) -> Self {
        let column = |name: &str| COLUMNS.iter().find(|(known, _)| *known == name).map(|(_, column)| *column);
        let wanted: Vec<_> =
            fields.names().filter_map(|(name, slot, _)| Some((column(name)?, slot))).collect();
        let late = [Column::Status, Column::Bytes, Column::Referer, Column::UserAgent];
        let needs_tail = wanted.iter().any(|(column, _)| late.contains(column));
        Self { wanted, needs_tail }
    }

    /// Whether a line has this format.
    pub(super) fn matches(line: &[u8]) -> bool {
        split(line).is_some()
    }

    /// Reads the requested columns of a line into `record`. Returns the text of its time.
    pub(super) fn read<'l>(&self, line: &'l [u8], record: &mut Record) -> Option<&'l [u8]> {
        let Parts { before, time, request, after } = split(line)?;
        let (host, ip, user) = host_ip_user(before)?;
        let (method, path) = method_and_path(request);
        let tail = if self.needs_tail { Tail::parse(after) } else { Tail::default() };
        for &(column, slot) in &self.wanted {
            let value = match column {
                Column::Host => host,
                Column::Ip => ip,
                Column::User => user,
                Column::Method => &request[method.clone()],
                Column::Path => &request[path.clone()],
                Column::Status => tail.status,
                Column::Bytes => tail.bytes,
                Column::Referer => tail.referer,
                Column::UserAgent => tail.user_agent,
            };
            record.put(slot, 0, value);
        }
        Some(time)
    }
}

struct Parts<'l> {
    before: &'l [u8],
    time: &'l [u8],
    request: &'l [u8],
    after: &'l [u8],
}

#[inline]
fn split(line: &[u8]) -> Option<Parts<'_>> {
    let opened = memchr(b'[', line)?;
    let (before, rest) = (&line[..opened], &line[opened + 1..]);
    let closed = memchr(b']', rest)?;
    let (time, rest) = (&rest[..closed], &rest[closed + 1..]);
    let (request, after) = quoted(rest)?;
    Some(Parts { before, time, request, after })
}

/// Splits at the next quoted string: its content, and the rest. A quote after a backslash is part of the string.
#[inline]
fn quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = &text[memchr(b'"', text)? + 1..];
    let mut end = memchr(b'"', text)?;
    while is_escaped(&text[..end]) {
        end += 1 + memchr(b'"', &text[end + 1..])?;
    }
    Some((&text[..end], &text[end + 1..]))
}

/// Whether the text ends with an odd number of backslashes.
#[inline]
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|&&byte| byte == b'\\').count() % 2 == 1
}

/// Returns virtual host, address and user. The second or third word is identd's and is always `-`.
#[inline]
fn host_ip_user(before: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (first, rest) = word(before);
    let (second, after) = word(rest);
    let (host, ip, user) = match second {
        b"-" => (&b""[..], first, after),
        _ => match word(after) {
            (b"-", user) => (without_port(first), second, user),
            _ => (&b""[..], first, after),
        },
    };
    (!ip.is_empty()).then(|| (host, ip, user.trim_ascii_end()))
}

fn without_port(host: &[u8]) -> &[u8] {
    match memrchr(b':', host) {
        Some(colon) if host[colon + 1..].iter().all(u8::is_ascii_digit) => &host[..colon],
        _ => host,
    }
}

#[inline]
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr(b' ', text) {
        Some(end) => (&text[..end], &text[end + 1..]),
        None => (text, b""),
    }
}

/// The ranges of method and path in a request line; empty for other data, such as a TLS handshake on the wrong port.
#[inline]
pub(super) fn method_and_path(request: &[u8]) -> (Range<usize>, Range<usize>) {
    let (method, rest) = word(request);
    if method.is_empty() || !method.iter().all(u8::is_ascii_uppercase) {
        return (0..0, 0..0);
    }
    let target = match memrchr(b' ', rest) {
        Some(space) if rest[space + 1..].starts_with(b"HTTP/") => &rest[..space],
        _ => rest,
    };
    let path = path_within(target);
    let before = request.len() - rest.len();
    (0..method.len(), before + path.start..before + path.end)
}

/// The range of the path in a request target, without scheme, host and query.
#[inline]
pub(super) fn path_within(target: &[u8]) -> Range<usize> {
    let end = memchr(b'?', target).unwrap_or(target.len());
    let host = [&b"http://"[..], b"https://"].into_iter().find(|scheme| target.starts_with(scheme));
    let start = host.map_or(0, |scheme| {
        let host = scheme.len().min(end);
        host + memchr(b'/', &target[host..end]).unwrap_or(0)
    });
    start..end
}

/// The columns after the request.
#[derive(Default)]
struct Tail<'l> {
    status: &'l [u8],
    bytes: &'l [u8],
    referer: &'l [u8],
    user_agent: &'l [u8],
}

impl<'l> Tail<'l> {
    fn parse(after: &'l [u8]) -> Self {
        let (status, rest) = word(after.strip_prefix(b" ").unwrap_or(after));
        let (bytes, rest) = word(rest);
        let (referer, rest) = quoted(rest).unwrap_or_default();
        let (user_agent, _) = quoted(rest).unwrap_or_default();
        Self { status, bytes, referer, user_agent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Option<(String, Vec<Option<String>>)> {
        let mut fields = Fields::new(None);
        let slots = COLUMNS.map(|(name, _)| fields.label(name, None));
        let mut record = Record::new(&fields);
        let time = Combined::new(&fields).read(line.as_bytes(), &mut record)?;
        let text = |slot| record.get(slot).map(|value| String::from_utf8_lossy(value).into_owned());
        Some((String::from_utf8_lossy(time).into_owned(), slots.map(text).into()))
    }

    fn values(line: &str) -> Vec<String> {
        read(line).unwrap().1.into_iter().map(|value| value.unwrap_or("none".to_owned())).collect()
    }

    #[test]
    fn a_combined_line_has_all_columns() {
        let line = r#"203.0.113.9 - ann [16/Nov/2026:04:54:28 +0000] "GET /a/b?c=d HTTP/1.1" 200 512 "http://x/" "curl \"8\" [x]" "more" 0.01"#;
        assert_eq!(read(line).unwrap().0, "16/Nov/2026:04:54:28 +0000");
        assert_eq!(
            values(line),
            ["none", "203.0.113.9", "ann", "GET", "/a/b", "200", "512", "http://x/", r#"curl \"8\" [x]"#]
        );
    }

    #[test]
    fn a_common_line_ends_with_its_bytes() {
        let line = r#"2001:db8::1 - - [16/Nov/2026:04:54:28 +0000] "POST /login HTTP/2.0" 401 -"#;
        assert_eq!(
            values(line),
            ["none", "2001:db8::1", "none", "POST", "/login", "401", "none", "none", "none"]
        );
    }

    #[test]
    fn a_virtual_host_may_come_first() {
        let line =
            r#"example.org:443 203.0.113.9 - ann lee [16/Nov/2026:04:54:28 +0000] "GET / HTTP/1.1" 200 1"#;
        assert_eq!(values(line)[..5], ["example.org", "203.0.113.9", "ann lee", "GET", "/"]);
    }

    #[test]
    fn invalid_request_lines_have_no_method_and_path() {
        for (request, method, path) in [
            ("-", "none", "none"),
            (r"\x16\x03\x01", "none", "none"),
            ("", "none", "none"),
            ("GET http://h:80/p?q HTTP/1.1", "GET", "/p"),
            ("GET https://h/p HTTP/1.1", "GET", "/p"),
            ("GET /with space HTTP/1.1", "GET", "/with space"),
            ("GET /old", "GET", "/old"),
            ("OPTIONS * HTTP/1.1", "OPTIONS", "*"),
            (r#"GET /q\"uote HTTP/1.1"#, "GET", r#"/q\"uote"#),
        ] {
            let line = format!("h - - [16/Nov/2026:04:54:28 +0000] \"{request}\" 400 0");
            assert_eq!(values(&line)[3..5], [method, path], "{request}");
        }
    }

    #[test]
    fn lines_of_other_formats_are_not_read() {
        for line in [
            "",
            "hello",
            "[x] \"y\"",
            "a - - [time \"GET / HTTP/1.1\" 200 1",
            "a - - [t] \"GET",
            "{\"a\":[1]}",
        ] {
            assert_eq!(read(line), None, "{line}");
        }
    }
}
