//! Decodes commands from bytes, without I/O.
//!
//! A command is an array of bulk strings (`*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\n`) or an inline command, a line of words
//! (`ECHO hi\r\n`). Arguments refer to the input; only the words of a line are copied, and nothing is allocated for a
//! declared length. The first [`MAX_COMMAND`] bytes determine whether the input starts with a command, an incomplete
//! command, or a protocol error, regardless of how the stream is split.

use std::ops::{Range, RangeInclusive};

/// The most arguments of a command, including its name.
pub const MAX_ARGUMENTS: usize = 64;
/// The longest argument, in bytes: more than any key, label, cost or password needs.
pub const MAX_ARGUMENT: usize = 4 << 10;
/// The largest encoded command, in bytes.
pub const MAX_COMMAND: usize = 64 << 10;

/// Decodes commands. Its buffers are reused for the next command.
#[derive(Debug, Default)]
pub struct Decoder {
    spans: Vec<Span>,
    /// The words of a line, without their quotes.
    words: Vec<u8>,
}

/// The position of an argument.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    end: usize,
}

/// The result of decoding.
#[derive(Debug)]
pub enum Decoded<'a> {
    /// An incomplete command.
    Partial,
    /// An empty line or an empty array of this many bytes, which has no reply.
    Empty(usize),
    /// A command of this many bytes.
    Command(Command<'a>, usize),
}

/// A command: its name and arguments.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
    /// Whether the arguments refer to the input, as opposed to the words of a line.
    is_array: bool,
}

/// A protocol error. The texts are those of Redis, where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The length of an array is invalid or exceeds [`MAX_ARGUMENTS`].
    #[error("invalid multibulk length")]
    Arguments,
    /// The length of an argument is invalid or exceeds [`MAX_ARGUMENT`].
    #[error("invalid bulk length")]
    Argument,
    /// An element of the array is not a bulk string.
    #[error("expected '$', got '{}'", .0.escape_ascii())]
    NotBulk(u8),
    /// An argument is longer than its declared length.
    #[error("expected CRLF after an argument")]
    MissingCrlf,
    /// A quote in a line is not closed, or not followed by a space.
    #[error("unbalanced quotes in request")]
    Quotes,
    /// The command does not end within [`MAX_COMMAND`] bytes.
    #[error("too big request: a command has at most {MAX_COMMAND} bytes")]
    TooLarge,
}

impl<'a> Command<'a> {
    /// The name, as sent.
    pub fn name(&self) -> &'a [u8] {
        self.get(0).unwrap_or_default()
    }

    /// The number of arguments, including the name: at least one.
    #[expect(clippy::len_without_is_empty, reason = "a command is never empty")]
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Returns an argument; the name has the index 0.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        let span = self.spans.get(index)?;
        Some(&self.bytes[span.start..span.end])
    }

    /// Returns the range of an argument in the input; `None` for a line.
    pub fn range(&self, index: usize) -> Option<Range<usize>> {
        let span = self.spans.get(index).filter(|_| self.is_array)?;
        Some(span.start..span.end)
    }

    /// Returns these arguments as sent, with their lengths; `None` for a line. If two commands have the same bytes, the arguments are
    /// equal.
    pub fn sent(&self, indexes: RangeInclusive<usize>) -> Option<&'a [u8]> {
        let before = self.spans.get(indexes.start().checked_sub(1)?).filter(|_| self.is_array)?;
        let last = self.spans.get(*indexes.end())?;
        self.bytes.get(before.end..last.end)
    }

    /// Returns the arguments from an index on.
    pub fn from(&self, index: usize) -> impl ExactSizeIterator<Item = &'a [u8]> + Clone + use<'a> {
        let bytes = self.bytes;
        self.spans.get(index..).unwrap_or_default().iter().map(move |span| &bytes[span.start..span.end])
    }
}

impl Decoder {
    /// Decodes the start of the input.
    ///
    /// # Errors
    /// When it cannot become a command with more input.
    pub fn decode<'a>(&'a mut self, input: &'a [u8]) -> Result<Decoded<'a>, ProtocolError> {
        let input = &input[..input.len().min(MAX_COMMAND)];
        self.spans.clear();
        let (bytes, is_array, read) = match input.first() {
            None => return Ok(Decoded::Partial),
            // a null array
            Some(b'*') if input.get(1).is_none_or(|&sign| sign == b'-') => (input, true, null_array(input)?),
            Some(b'*') => (input, true, self.array(input)?),
            Some(_) => {
                let read = self.line(input)?;
                (&*self.words, false, read)
            }
        };
        match read {
            None if input.len() == MAX_COMMAND => Err(ProtocolError::TooLarge),
            None => Ok(Decoded::Partial),
            Some(read) if self.spans.is_empty() => Ok(Decoded::Empty(read)),
            Some(read) => Ok(Decoded::Command(Command { bytes, spans: &self.spans, is_array }, read)),
        }
    }

    /// Decodes an array of bulk strings. Returns its end if it is complete.
    fn array(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Some((count, mut at)) = length(input, 1, MAX_ARGUMENTS, ProtocolError::Arguments)? else {
            return Ok(None);
        };
        for _ in 0..count {
            match input.get(at) {
                Some(b'$') => {}
                Some(&other) => return Err(ProtocolError::NotBulk(other)),
                None => return Ok(None),
            }
            let Some((len, start)) = length(input, at + 1, MAX_ARGUMENT, ProtocolError::Argument)? else {
                return Ok(None);
            };
            let end = start + len;
            match input.get(end..).unwrap_or_default() {
                [b'\r', b'\n', ..] => {}
                [] | [b'\r'] => return Ok(None),
                _ => return Err(ProtocolError::MissingCrlf),
            }
            self.spans.push(Span { start, end });
            at = end + 2;
        }
        Ok(Some(at))
    }

    /// Decodes a line of words, which may be quoted. Returns its end if it is complete.
    fn line(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Some(end) = input.iter().position(|&byte| byte == b'\n') else { return Ok(None) };
        let line = input[..end].strip_suffix(b"\r").unwrap_or(&input[..end]);
        self.words.clear();
        let mut rest = line.trim_ascii_start();
        while !rest.is_empty() {
            if self.spans.len() == MAX_ARGUMENTS {
                return Err(ProtocolError::Arguments);
            }
            let start = self.words.len();
            rest = word(rest, &mut self.words)?.trim_ascii_start();
            let end = self.words.len();
            if end - start > MAX_ARGUMENT {
                return Err(ProtocolError::Argument);
            }
            self.spans.push(Span { start, end });
        }
        Ok(Some(end + 1))
    }
}

/// Decodes `*-1`. Returns its end if it is complete.
#[cold]
fn null_array(input: &[u8]) -> Result<Option<usize>, ProtocolError> {
    const NULL_ARRAY: &[u8] = b"*-1\r\n";
    if input.starts_with(NULL_ARRAY) {
        Ok(Some(NULL_ARRAY.len()))
    } else if NULL_ARRAY.starts_with(input) {
        Ok(None)
    } else {
        Err(ProtocolError::Arguments)
    }
}

/// Decodes a length followed by CRLF. Returns it and its end if it is complete.
#[inline(always)]
fn length(
    input: &[u8],
    at: usize,
    max: usize,
    error: ProtocolError,
) -> Result<Option<(usize, usize)>, ProtocolError> {
    // nearly all lengths have one or two digits
    match *input.get(at..).unwrap_or_default() {
        [one @ b'0'..=b'9', b'\r', b'\n', ..] => Ok(Some((digit(one), at + 3))),
        [ten @ b'0'..=b'9', one @ b'0'..=b'9', b'\r', b'\n', ..] if 10 * digit(ten) + digit(one) <= max => {
            Ok(Some((10 * digit(ten) + digit(one), at + 4)))
        }
        _ => any_length(input, at, max, error),
    }
}

#[inline(never)]
fn any_length(
    input: &[u8],
    mut at: usize,
    max: usize,
    error: ProtocolError,
) -> Result<Option<(usize, usize)>, ProtocolError> {
    let (start, mut value) = (at, 0);
    loop {
        match input.get(at) {
            None => return Ok(None),
            Some(&byte @ b'0'..=b'9') => value = value * 10 + digit(byte),
            Some(b'\r') if at > start => break,
            Some(_) => return Err(error),
        }
        at += 1;
        // leading zeros are bounded too
        if value > max || at - start > MAX_DIGITS {
            return Err(error);
        }
    }
    match input.get(at + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some((value, at + 2))),
        Some(_) => Err(error),
    }
}

fn digit(byte: u8) -> usize {
    usize::from(byte - b'0')
}

/// The most digits of a length.
const MAX_DIGITS: usize = 10;

/// Appends the first word of a line without quotes, like Redis. Returns the rest of the line.
fn word<'a>(line: &'a [u8], into: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    let mut rest = line;
    loop {
        match rest {
            [] => return Ok(rest),
            [space, ..] if space.is_ascii_whitespace() => return Ok(rest),
            [b'"', quoted @ ..] => return double_quoted(quoted, into),
            [b'\'', quoted @ ..] => return single_quoted(quoted, into),
            [byte, tail @ ..] => {
                into.push(*byte);
                rest = tail;
            }
        }
    }
}

fn double_quoted<'a>(mut rest: &'a [u8], into: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        let (byte, tail) = match rest {
            [b'"', tail @ ..] => return closed(tail),
            [b'\\', b'x', high, low, tail @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (hex(*high) << 4 | hex(*low), tail)
            }
            [b'\\', escaped, tail @ ..] => (unescaped(*escaped), tail),
            [byte, tail @ ..] => (*byte, tail),
            [] => return Err(ProtocolError::Quotes),
        };
        into.push(byte);
        rest = tail;
    }
}

fn single_quoted<'a>(mut rest: &'a [u8], into: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        let (byte, tail) = match rest {
            [b'\'', tail @ ..] => return closed(tail),
            [b'\\', b'\'', tail @ ..] => (b'\'', tail),
            [byte, tail @ ..] => (*byte, tail),
            [] => return Err(ProtocolError::Quotes),
        };
        into.push(byte);
        rest = tail;
    }
}

/// Requires a space or the end after a closing quote.
fn closed(rest: &[u8]) -> Result<&[u8], ProtocolError> {
    match rest.first() {
        Some(byte) if !byte.is_ascii_whitespace() => Err(ProtocolError::Quotes),
        _ => Ok(rest),
    }
}

fn unescaped(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    }
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        letter => letter.to_ascii_lowercase() - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Words = Vec<Vec<u8>>;

    /// Decodes a stream that arrives in these pieces. Returns all commands, and the protocol error if there is one.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Words>, Option<ProtocolError>) {
        let (mut decoder, mut buffer, mut commands) = (Decoder::default(), Vec::new(), Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            let mut at = 0;
            loop {
                match decoder.decode(&buffer[at..]) {
                    Ok(Decoded::Partial) => break,
                    Ok(Decoded::Empty(read)) => at += read,
                    Ok(Decoded::Command(command, read)) => {
                        assert!(command.len() <= MAX_ARGUMENTS && read <= MAX_COMMAND);
                        for (index, argument) in command.from(0).enumerate() {
                            let range = command.range(index);
                            assert_eq!(range.is_some(), buffer[at] == b'*');
                            assert!(range.is_none_or(|range| buffer[at..][range] == *argument));
                        }
                        commands.push(command.from(0).map(<[u8]>::to_vec).collect());
                        at += read;
                    }
                    Err(error) => return (commands, Some(error)),
                }
            }
            buffer.drain(..at);
            assert!(buffer.len() < MAX_COMMAND, "the buffered input is bounded");
        }
        (commands, None)
    }

    fn encoded(words: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes
    }

    fn words(line: &str) -> Words {
        let (mut commands, error) = read([line.as_bytes()]);
        assert_eq!((commands.len(), error), (1, None), "{line:?}");
        commands.remove(0)
    }

    /// Bytes that often resemble the protocol.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            4 => prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 1..5)
                .prop_map(|words| encoded(&words)),
            2 => "(PING|sg\\.peek a b|ECHO \"a\\\\x41\\\\n\"|ECHO 'a b'| |\"|)\r?\n".prop_map(String::into_bytes),
            1 => "[*$]?-?[0-9]{0,5}\r?\n?".prop_map(String::into_bytes),
            1 => prop::collection::vec(any::<u8>(), 0..6),
        ];
        prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_how_the_stream_is_split(
            stream in stream(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)
        ) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            let ends = cuts.iter().copied().chain([stream.len()]);
            let pieces = [0].into_iter().chain(cuts.iter().copied()).zip(ends).map(|(from, to)| &stream[from..to]);
            let whole = read([&stream[..]]);
            prop_assert_eq!(&read(pieces), &whole);
            prop_assert_eq!(&read(stream.chunks(1)), &whole);
        }

        #[test]
        fn encoded_commands_are_decoded(
            commands in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..10), 0..6)
        ) {
            let stream: Vec<u8> = commands.iter().flat_map(|words| encoded(words)).collect();
            prop_assert_eq!(read([&stream[..]]), (commands, None));
        }

        #[test]
        fn arguments_are_equal_exactly_if_their_sent_bytes_are(
            one in prop::collection::vec("[1$\r\n]{0,6}", 2..4), other in prop::collection::vec("[1$\r\n]{0,6}", 2..4)
        ) {
            let streams = [&one, &other].map(|words| {
                encoded(&words.iter().map(|word| word.clone().into_bytes()).collect::<Vec<_>>())
            });
            let mut decoders = [Decoder::default(), Decoder::default()];
            let sent = decoders.iter_mut().zip(&streams).map(|(decoder, stream)| {
                let Ok(Decoded::Command(command, _)) = decoder.decode(stream) else { panic!("no command") };
                command.sent(1..=1).map(<[u8]>::to_vec)
            });
            let sent: Vec<_> = sent.collect();
            prop_assert_eq!(sent[0] == sent[1], one[1] == other[1]);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            read(bytes.chunks(7));
        }
    }

    #[test]
    fn a_line_is_split_into_words_like_redis() {
        assert_eq!(words("PING\r\n"), [b"PING"]);
        assert_eq!(words("  sg.peek \t a   b \n"), [&b"sg.peek"[..], b"a", b"b"]);
        assert_eq!(words("a \"b c\" 'd e'\n"), [&b"a"[..], b"b c", b"d e"]);
        assert_eq!(
            words("a \"\\x41\\xfF\\n\\r\\t\\b\\a\\\"\\\\\\q\" '\\x\\'y'\n"),
            [&b"a"[..], b"A\xff\n\r\t\x08\x07\"\\q", b"\\x'y"]
        );
        assert_eq!(words("a \"\" ''\n"), [&b"a"[..], b"", b""]);
        for bad in ["\"a\n", "'a\n", "\"a\"b\n", "'a'b\n", "a \"\\\n"] {
            assert_eq!(read([bad.as_bytes()]), (vec![], Some(ProtocolError::Quotes)), "{bad:?}");
        }
    }

    #[test]
    fn empty_lines_and_arrays_are_skipped() {
        let (commands, error) = read([&b"\r\n\n*0\r\n*-1\r\n   \r\nPING\r\n"[..]]);
        assert_eq!((commands, error), (vec![vec![b"PING".to_vec()]], None));
    }

    #[test]
    fn an_invalid_length_is_rejected_before_more_input_arrives() {
        let table = [
            ("*65\r", ProtocolError::Arguments),
            ("*2147483648", ProtocolError::Arguments),
            ("*99999999999999999999999", ProtocolError::Arguments),
            ("*00000000000", ProtocolError::Arguments),
            ("*\r", ProtocolError::Arguments),
            ("*-2", ProtocolError::Arguments),
            ("*+1", ProtocolError::Arguments),
            ("*1 ", ProtocolError::Arguments),
            ("*1\rx", ProtocolError::Arguments),
            ("*1\r\n$4097", ProtocolError::Argument),
            ("*1\r\n$536870912", ProtocolError::Argument),
            ("*1\r\n$-1", ProtocolError::Argument),
            ("*1\r\n$\r", ProtocolError::Argument),
            ("*1\r\n*", ProtocolError::NotBulk(b'*')),
            ("*1\r\n:", ProtocolError::NotBulk(b':')),
            ("*1\r\n$1\r\nab", ProtocolError::MissingCrlf),
            ("*1\r\n$1\r\na\rb", ProtocolError::MissingCrlf),
        ];
        for (bytes, error) in table {
            assert_eq!(read([bytes.as_bytes()]), (vec![], Some(error)), "{bytes:?}");
            let (_, cut) = bytes.as_bytes().split_last().unwrap();
            assert!(matches!(Decoder::default().decode(cut), Ok(Decoded::Partial) | Err(_)), "{bytes:?}");
        }
        assert_eq!(ProtocolError::NotBulk(b'\n').to_string(), "expected '$', got '\\n'");
    }

    #[test]
    fn each_bound_accepts_its_maximum_and_rejects_one_more() {
        let most = vec![b"a".to_vec(); MAX_ARGUMENTS];
        assert_eq!(read([&encoded(&most)[..]]), (vec![most.clone()], None));
        assert_eq!(words(&("a ".repeat(MAX_ARGUMENTS) + "\n")), most);
        let too_many = "a ".repeat(MAX_ARGUMENTS + 1) + "\n";
        assert_eq!(read([too_many.as_bytes()]).1, Some(ProtocolError::Arguments));

        let longest = vec![vec![b'a'; MAX_ARGUMENT]];
        assert_eq!(
            read([&encoded(&longest)[..]]),
            (longest.clone().into_iter().map(|word| vec![word]).collect(), None)
        );
        let too_long = "a".repeat(MAX_ARGUMENT + 1) + "\n";
        assert_eq!(read([too_long.as_bytes()]).1, Some(ProtocolError::Argument));

        let with_last = |len: usize| {
            let mut words = vec![vec![b'a'; MAX_ARGUMENT]; 15];
            words.push(vec![b'a'; len]);
            encoded(&words)
        };
        let most = MAX_ARGUMENT - (with_last(MAX_ARGUMENT).len() - MAX_COMMAND);
        assert_eq!(with_last(most).len(), MAX_COMMAND);
        assert_eq!(read([&with_last(most)[..]]).0.len(), 1);
        assert_eq!(read([&with_last(most + 1)[..]]), (vec![], Some(ProtocolError::TooLarge)));
        assert_eq!(read(with_last(most + 1).chunks(1000)), (vec![], Some(ProtocolError::TooLarge)));
        assert_eq!(read([&[b'a'; MAX_COMMAND][..]]), (vec![], Some(ProtocolError::TooLarge)));
    }
}
