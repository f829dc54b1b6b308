//! Finds the frame boundaries of a RESP stream that arrives in chunks.
//!
//! The scanner keeps counts, not bytes, and the command name of a request. It does not interpret frames. Bytes of another protocol,
//! such as TLS, are reported as not RESP from then on.

/// Maximum length of a command name; a longer one is truncated.
const MAX_NAME_LEN: usize = 32;

/// Maximum length of a line with a number: sign, 20 digits and some slack.
const MAX_NUMBER_LEN: usize = 24;

/// A position in a stream of frames.
#[derive(Debug)]
pub(crate) struct Scanner {
    position_in_frame: Position,
    /// Number of values that must still begin before the frame is complete. Nesting needs no stack: an array of n adds n values on
    /// any level.
    values_left: u64,
    /// The first word of the frame: the command, if the frame is a request.
    name: Vec<u8>,
    name_is_complete: bool,
}

#[derive(Debug)]
enum Position {
    /// Before the first byte of a value, or of a frame if `values_left` is 0.
    Nothing,
    /// In a line that began with `kind`; `number` is its content so far.
    Line { kind: u8, number: Vec<u8> },
    /// In a payload, this many bytes before its end, including the line break.
    Payload { bytes_left: u64 },
    /// In bytes that are not RESP, permanently.
    NotResp,
}

impl Scanner {
    pub(crate) fn new() -> Scanner {
        Scanner {
            position_in_frame: Position::Nothing,
            values_left: 0,
            name: Vec::new(),
            name_is_complete: false,
        }
    }

    /// Returns whether the next byte begins a frame.
    pub(crate) fn is_between_frames(&self) -> bool {
        self.values_left == 0 && matches!(self.position_in_frame, Position::Nothing)
    }

    /// Consumes bytes up to the end of the frame, or all of them, and returns how many. [`Scanner::is_between_frames`] returns whether
    /// the frame has ended.
    pub(crate) fn advance(&mut self, bytes: &[u8]) -> usize {
        let mut position = 0;
        while let Some(&byte) = bytes.get(position) {
            match &mut self.position_in_frame {
                Position::NotResp => return bytes.len(),
                Position::Nothing => {
                    if self.values_left == 0 {
                        self.name.clear();
                        self.name_is_complete = false;
                        self.values_left = 1;
                    }
                    position += 1;
                    self.begin_value(byte);
                }
                Position::Line { kind, number } => {
                    position += 1;
                    if byte == b'\n' {
                        let (kind, number) = (*kind, std::mem::take(number));
                        self.end_line(kind, &number);
                    } else if number.len() < MAX_NUMBER_LEN.max(MAX_NAME_LEN) {
                        number.push(byte);
                    }
                }
                Position::Payload { bytes_left } => {
                    let rest = bytes.len() - position;
                    let taken = usize::try_from(*bytes_left).map_or(rest, |left| left.min(rest));
                    *bytes_left -= taken as u64;
                    let is_over = *bytes_left == 0;
                    self.append_name(&bytes[position..position + taken]);
                    position += taken;
                    if is_over {
                        self.end_value();
                    }
                }
            }
            if self.is_between_frames() {
                break;
            }
        }
        position
    }

    /// Returns the first word of the frame that [`Scanner::advance`] has just ended, in upper case.
    pub(crate) fn name(&self) -> String {
        String::from_utf8_lossy(self.name.trim_ascii_end()).to_ascii_uppercase()
    }

    fn begin_value(&mut self, kind: u8) {
        self.position_in_frame = match kind {
            b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' | b'$' | b'!' | b'=' | b'*' | b'~' | b'>'
            | b'%' | b'|' => Position::Line { kind, number: Vec::new() },
            // An inline command, such as `PING`.
            _ if kind.is_ascii_alphabetic() && self.values_left == 1 => {
                Position::Line { kind: INLINE, number: vec![kind] }
            }
            _ => Position::NotResp,
        };
    }

    fn end_line(&mut self, kind: u8, line: &[u8]) {
        let line = line.trim_ascii_end();
        let number = std::str::from_utf8(line).ok().and_then(|line| line.parse::<i64>().ok());
        match (kind, number) {
            (INLINE, _) => {
                self.append_name(line.split(|byte| *byte == b' ').next().unwrap_or_default());
                self.end_value();
            }
            // -1 is RESP2's null, of either kind.
            (b'$' | b'!' | b'=' | b'*', Some(-1)) => self.end_value(),
            (b'$' | b'!' | b'=', Some(len @ 0..)) => {
                self.position_in_frame = Position::Payload { bytes_left: len.unsigned_abs() + 2 };
            }
            (b'*' | b'~' | b'>', Some(count @ 0..)) => self.end_head(count.unsigned_abs()),
            (b'%', Some(count @ 0..)) => self.end_head(count.unsigned_abs().saturating_mul(2)),
            // Attributes come before the value they describe.
            (b'|', Some(count @ 0..)) => {
                self.end_head(count.unsigned_abs().saturating_mul(2).saturating_add(1))
            }
            (b'$' | b'!' | b'=' | b'*' | b'~' | b'>' | b'%' | b'|', _) => {
                self.position_in_frame = Position::NotResp
            }
            _ => self.end_value(),
        }
    }

    /// Ends the header of an aggregate with this many values.
    fn end_head(&mut self, more: u64) {
        self.values_left = self.values_left.saturating_add(more);
        self.end_value();
    }

    fn end_value(&mut self) {
        self.values_left -= 1;
        self.position_in_frame = Position::Nothing;
        self.name_is_complete |= !self.name.is_empty();
    }

    fn append_name(&mut self, bytes: &[u8]) {
        if !self.name_is_complete {
            let room = MAX_NAME_LEN - self.name.len();
            self.name.extend(bytes.iter().take(room));
        }
    }
}

/// The kind of an inline command, which has no type byte.
const INLINE: u8 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a stream that arrives in chunks of `step` bytes into frames.
    fn frames(stream: &[u8], step: usize) -> Vec<Vec<u8>> {
        let mut scanner = Scanner::new();
        let mut frames = Vec::new();
        let mut frame = Vec::new();
        for mut piece in stream.chunks(step) {
            while !piece.is_empty() {
                let (head, tail) = piece.split_at(scanner.advance(piece));
                frame.extend(head);
                piece = tail;
                if scanner.is_between_frames() {
                    frames.push(std::mem::take(&mut frame));
                }
            }
        }
        assert!(frame.is_empty(), "incomplete frame: {:?}", String::from_utf8_lossy(&frame));
        frames
    }

    #[test]
    fn every_kind_of_frame_ends_correctly_however_it_is_split() {
        let expected: [&[u8]; 22] = [
            b"+OK\r\n",
            b"-ERR a line much longer than any number that could be parsed from it, even in the worst case\r\n",
            b":-12\r\n",
            b"$5\r\na\r\nb\n\r\n",
            b"$0\r\n\r\n",
            b"$-1\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*2\r\n$3\r\nfoo\r\n:1\r\n",
            b"*3\r\n*2\r\n:1\r\n*1\r\n$1\r\n*\r\n$-1\r\n+x\r\n",
            b"_\r\n",
            b",1.5\r\n",
            b"#t\r\n",
            b"(123456789012345678901234567890\r\n",
            b"=7\r\ntxt:a\r\n\r\n",
            b"!3\r\nE x\r\n",
            b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
            b"~1\r\n:1\r\n",
            b">2\r\n+message\r\n+x\r\n",
            b"|1\r\n+ttl\r\n:3\r\n:4\r\n",
            b"*1\r\n%0\r\n",
            b"+last\r\n",
        ];
        let stream = expected.concat();
        for step in [1, 2, 3, 7, stream.len()] {
            assert_eq!(frames(&stream, step), expected, "in chunks of {step}");
        }
    }

    #[test]
    fn the_name_of_a_request_is_its_command() {
        for step in [1, 4, 1_000] {
            let mut scanner = Scanner::new();
            let mut names = Vec::new();
            let stream =
                b"*3\r\n$7\r\nevalSha\r\n$2\r\nab\r\n$1\r\n0\r\nping\r\nGET key\r\n*1\r\n$4\r\nINFO\r\n";
            for mut piece in stream.chunks(step) {
                while !piece.is_empty() {
                    piece = &piece[scanner.advance(piece)..];
                    if scanner.is_between_frames() {
                        names.push(scanner.name());
                    }
                }
            }
            assert_eq!(names, ["EVALSHA", "PING", "GET", "INFO"], "in chunks of {step}");
        }
    }

    #[test]
    fn other_protocols_are_not_parsed() {
        for noise in [&b"\x16\x03\x01\x02\x00"[..], b"$x\r\n", b"*-2\r\n", b"$99999999999999999999\r\n"] {
            let mut scanner = Scanner::new();
            assert_eq!(scanner.advance(noise), noise.len());
            assert!(matches!(scanner.position_in_frame, Position::NotResp), "{noise:?}");
            assert!(!scanner.is_between_frames());
        }
    }

    #[test]
    fn a_length_is_only_counted_and_not_allocated() {
        let mut scanner = Scanner::new();
        scanner.advance(b"*9223372036854775807\r\n$9223372036854775807\r\nabc");
        assert!(matches!(scanner.position_in_frame, Position::Payload { .. }));
    }
}
