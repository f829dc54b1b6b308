//! Problems of a configuration, each with its location and fix.
//!
//! A [`ConfigError`] holds every problem of one load. Its `Display` output is one line, for logs; [`ConfigError::render`]
//! shows the affected lines of the file as a compiler does. Neither shows secrets: values that may be secret are
//! masked when a file's text is stored.

use std::{fmt, ops::Range, path::PathBuf, sync::Arc};

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet, renderer::DecorStyle};

/// Number of problems reported in full; further ones are only counted.
pub const MAX_PROBLEMS: usize = 20;
/// Number of lines of a file shown for one problem.
const MAX_DRAWN_LINES: usize = 8;

/// A configuration was rejected: at least one problem, each with its location.
///
/// `Debug` is [`ConfigError::render`], because programs print the `Debug` of an error that `main` returns.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    problems: Vec<Problem>,
    /// Number of problems beyond [`MAX_PROBLEMS`].
    further: usize,
}

/// One problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    message: String,
    location: Location,
    /// A related location and its note.
    also: Option<(Location, &'static str)>,
    help: Option<String>,
}

/// The text of a file for error messages, with secrets masked.
#[derive(PartialEq, Eq)]
pub struct SourceFile {
    pub path: PathBuf,
    pub text: String,
}

/// Where a setting comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Location {
    /// The setting is absent and has its default value.
    #[default]
    Default,
    InFile {
        file: Arc<SourceFile>,
        span: Range<usize>,
    },
    Flag(&'static str),
    Variable(&'static str),
}

impl ConfigError {
    /// Creates an error from problems, ordered by their location.
    pub fn new(mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(|problem| match &problem.location {
            Location::InFile { span, .. } => span.start,
            _ => usize::MAX,
        });
        problems.dedup();
        let further = problems.len().saturating_sub(MAX_PROBLEMS);
        problems.truncate(MAX_PROBLEMS);
        Self { problems, further }
    }

    /// The problems; never empty.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Renders the problems with the lines they occur in, as a compiler does.
    pub fn render(&self, colour: Colour) -> String {
        let renderer = match colour {
            Colour::Never => Renderer::plain().decor_style(DecorStyle::Ascii),
            Colour::Always => Renderer::styled(),
        };
        let mut drawn: Vec<_> =
            self.problems.iter().map(|problem| renderer.render(&problem.report())).collect();
        if self.further > 0 {
            drawn.push(format!("and {} more", self.further));
        }
        drawn.join("\n\n")
    }
}

/// Whether [`ConfigError::render`] uses colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// For files and logs.
    Never,
    /// For terminals.
    Always,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if index == 0 { "" } else { "; " })?;
        }
        if self.further > 0 {
            write!(f, "; and {} more", self.further)?;
        }
        Ok(())
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(Colour::Never))
    }
}

impl std::error::Error for ConfigError {}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self::new(vec![problem])
    }
}

impl Problem {
    pub fn new(location: &Location, message: impl Into<String>) -> Self {
        Self { message: message.into(), location: location.clone(), also: None, help: None }
    }

    pub fn also(mut self, location: &Location, why: &'static str) -> Self {
        self.also = Some((location.clone(), why));
        self
    }

    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// The problem and its fix, without the location.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Line and column in the file, both from 1; columns count characters.
    pub fn line_and_column(&self) -> Option<(usize, usize)> {
        match &self.location {
            Location::InFile { file, span } => Some(file.line_and_column(span.start)),
            _ => None,
        }
    }

    fn report(&self) -> Vec<Group<'_>> {
        let mut group = Group::with_title(Level::ERROR.primary_title(&*self.message));
        group = annotated(group, &self.location);
        if let Some((location, why)) = &self.also {
            group = annotated(group.element(Level::NOTE.message(*why)), location);
        }
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(&**help));
        }
        vec![group]
    }
}

/// Adds the lines of a location, or the name of a flag or variable.
fn annotated<'a>(group: Group<'a>, location: &'a Location) -> Group<'a> {
    match location {
        Location::Default => group,
        Location::Flag(_) | Location::Variable(_) => {
            group.element(Level::NOTE.message(format!("in {location}")))
        }
        Location::InFile { file, span } => {
            let (excerpt, first_line, span) = file.excerpt(span);
            group.element(
                Snippet::source(excerpt)
                    .path(file.path.display().to_string())
                    .line_start(first_line)
                    .annotation(AnnotationKind::Primary.span(span)),
            )
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Location::Default => f.write_str(&self.message)?,
            location => write!(f, "{location}: {}", self.message)?,
        }
        if let Some((location, why)) = &self.also {
            write!(f, " ({location}: {why})")?;
        }
        match &self.help {
            Some(help) => write!(f, " ({})", help.replace('\n', " ")),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("the defaults"),
            Self::InFile { file, span } => {
                let (line, column) = file.line_and_column(span.start);
                write!(f, "{}:{line}:{column}", file.path.display())
            }
            Self::Flag(name) | Self::Variable(name) => f.write_str(name),
        }
    }
}

impl SourceFile {
    /// Keeps the text of a file for messages, with secrets masked.
    pub fn new(path: PathBuf, text: &str) -> Self {
        Self { path, text: masked(text) }
    }

    fn line_and_column(&self, offset: usize) -> (usize, usize) {
        let before = self.text.get(..offset).unwrap_or(&self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        (line, before[line_start..].chars().count() + 1)
    }

    /// Returns the lines that `span` touches, the number of the first, and the span relative to them.
    fn excerpt(&self, span: &Range<usize>) -> (&str, usize, Range<usize>) {
        let start = char_boundary(&self.text, span.start);
        let first = self.text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let lines = self.text[first..].split_inclusive('\n').scan(first, |end, line| {
            *end += line.len();
            Some(*end)
        });
        let ends: Vec<usize> = lines.take(MAX_DRAWN_LINES).collect();
        let last = ends.iter().copied().find(|end| *end >= span.end).or(ends.last().copied());
        let last = last.unwrap_or(self.text.len());
        let end = char_boundary(&self.text, span.end.clamp(start, last));
        let excerpt = self.text[first..last].trim_end_matches(['\n', '\r']);
        let line = self.line_and_column(start).0;
        (excerpt, line, (start - first).min(excerpt.len())..(end - first).min(excerpt.len()))
    }
}

/// Returns the last boundary between characters that is not after `offset`.
fn char_boundary(text: &str, offset: usize) -> usize {
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    (0..=offset.min(text.len())).rev().find(is_boundary).unwrap_or_default()
}

impl fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceFile({})", self.path.display())
    }
}

/// Masks credentials in URLs and values of keys with secret-like names, byte for byte, so that offsets stay valid.
fn masked(text: &str) -> String {
    text.split_inclusive('\n').map(masked_line).collect()
}

fn masked_line(line: &str) -> String {
    const SECRET_KEYS: [&str; 6] = ["secret", "password", "passwd", "token", "api_key", "auth"];
    let mut bytes = line.as_bytes().to_vec();
    if let Some(start) = line.find("://").map(|at| at + 3)
        && let Some(end) = line.rfind('@').filter(|end| *end > start)
    {
        bytes[start..end].fill(b'*');
    }
    for (at, _) in line.match_indices('=') {
        let key = line[..at].trim_end().trim_end_matches(['"', '\'']);
        let is_separator = |c: char| !(c.is_alphanumeric() || c == '_' || c == '-');
        let key = key.rsplit(is_separator).next().unwrap_or_default();
        let value = line[at + 1..].trim_start();
        if SECRET_KEYS.contains(&key.to_ascii_lowercase().as_str()) && value.starts_with(['"', '\'']) {
            let from = line.len() - value.len() + 1;
            let length = value[1..].trim_end().trim_end_matches(['"', '\'']).len();
            bytes[from..from + length].fill(b'*');
        }
    }
    // Masking may split a multi-byte character; then the whole line is masked.
    String::from_utf8(bytes).unwrap_or_else(|_| "*".repeat(line.len() - 1) + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str, span: Range<usize>) -> Problem {
        let file = Arc::new(SourceFile::new("t.toml".into(), text));
        Problem::new(&Location::InFile { file, span }, "wrong")
    }

    #[test]
    fn a_problem_has_a_line_and_a_column_counted_in_characters() {
        for (text, start, expected) in [
            ("abc", 1, (1, 2)),
            ("a\nbc", 2, (2, 1)),
            ("a\r\nbc", 4, (2, 2)),
            ("ä = 1", 3, (1, 3)),
            ("a\n", 2, (2, 1)),
            ("", 0, (1, 1)),
        ] {
            assert_eq!(problem(text, start..start).line_and_column(), Some(expected), "{text:?}");
        }
        assert_eq!(problem("a\n b", 3..4).to_string(), "t.toml:2:2: wrong");
    }

    #[test]
    fn a_rendered_problem_shows_its_line_and_marks_the_span() {
        let drawn = ConfigError::from(problem("a = 1\nbc = 22\nd = 3\n", 11..13).help("do this"))
            .render(Colour::Never);
        assert!(drawn.contains("error: wrong") && drawn.contains("--> t.toml:2:6"), "{drawn}");
        assert!(drawn.contains("2 | bc = 22") && drawn.contains("help: do this"), "{drawn}");
        assert!(!drawn.contains("a = 1") && !drawn.contains("d = 3"), "{drawn}");
    }

    #[test]
    fn any_span_can_be_rendered() {
        let text = "ä = 1\n\nö = \"ü\"\nx = 1\nx = 1\nx = 1\nx = 1\nx = 1\nx = 1\nx = 1\nx = 1";
        for start in 0..=text.len() + 1 {
            for end in start..=text.len() + 2 {
                ConfigError::from(problem(text, start..end)).render(Colour::Never);
            }
        }
        ConfigError::from(problem("", 0..0)).render(Colour::Always);
    }

    #[test]
    fn secrets_are_masked_without_moving_other_text() {
        for (line, shown) in [
            ("url = \"redis://me:s3cret@h:1\"\n", "url = \"redis://*********@h:1\"\n"),
            ("url = \"redis://:ä@b@h\"", "url = \"redis://*****@h\""),
            ("secret = \"s3cret\" ", "secret = \"******\" "),
            ("{ name = 'x', password = 's3cret' }", "{ name = 'x', password = '********' }"),
            ("\"password\"=\"ä\"", "\"password\"=\"**\""),
            ("password_file = \"x\"\n", "password_file = \"x\"\n"),
            ("# 10 € = much\n", "# 10 € = much\n"),
            ("\u{a0}\u{a0}per = [\"ip\"]\n", "\u{a0}\u{a0}per = [\"ip\"]\n"),
            ("“amount” = 5\n", "“amount” = 5\n"),
            ("€password = 's3cret'\n", "€password = '******'\n"),
            ("url = \"redis://h\"\n", "url = \"redis://h\"\n"),
        ] {
            let masked = masked(line);
            assert!(!masked.contains("s3cret") && masked.len() == line.len(), "{masked}");
            if !line.contains("name") {
                assert_eq!(masked, shown);
            }
        }
    }
}
