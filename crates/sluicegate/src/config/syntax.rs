//! Error messages with a fix for text that is not TOML, such as YAML, JSON or unquoted strings.
//!
//! Messages do not repeat the text: an unquoted value may be a secret.

use std::{ops::Range, sync::Arc};

use super::error::{Location, Problem, SourceFile};

/// Returns the syntax errors of a file. The parser may report one error twice on a line; duplicates are removed.
pub(super) fn problems(file: &Arc<SourceFile>, errors: &[toml::de::Error]) -> Vec<Problem> {
    let text = &file.text;
    let location = |span| Location::InFile { file: Arc::clone(file), span };
    if let Some(OtherLanguage { name, span, help }) = other_language(text) {
        let message = format!("the file is {name}: write it in TOML");
        return vec![Problem::new(&location(span), message).help(help)];
    }
    let message_of = |error: &toml::de::Error| error.message().trim_end_matches('\n').to_owned();
    let mut errors: Vec<_> =
        errors.iter().map(|error| (error.span().unwrap_or(0..0), message_of(error))).collect();
    errors.sort_by_key(|(span, _)| span.start);
    let mut problems = Vec::new();
    let mut last: Option<(usize, String)> = None;
    for (span, parser_message) in errors {
        let message = fix(text, &span, &parser_message).map_or(parser_message, str::to_owned);
        let is_same_line = |from: usize| !text.get(from..span.start).unwrap_or_default().contains('\n');
        if !last.is_some_and(|(from, earlier)| earlier == message && is_same_line(from)) {
            problems.push(Problem::new(&location(span.clone()), format!("invalid TOML: {message}")));
        }
        last = Some((span.start, message));
    }
    problems
}

/// Suggests a fix.
fn fix(text: &str, span: &Range<usize>, parser_message: &str) -> Option<&'static str> {
    let (before, found) = (text.get(..span.start)?.trim_end_matches([' ', '\t']), text.get(span.clone())?);
    let is_table = before.rsplit('\n').next()?.trim_start().chars().all(|c| c == '[');
    let is_value = !is_table && before.ends_with(['=', '[', ',']);
    if is_value && found.starts_with(['“', '”', '„', '‘', '’', '«']) {
        return Some("write straight quotes, as in \"1m\"");
    }
    if is_value && found.starts_with(char::is_alphanumeric) {
        return Some(match found.to_ascii_lowercase().as_str() {
            "true" | "false" | "yes" | "no" | "on" | "off" => "write true or false, in lower case",
            _ => "write strings in quotes and numbers as digits, for example \"1m\" or 5",
        });
    }
    if found.starts_with(':') || parser_message.starts_with("key with no value") {
        return Some("write = between a key and its value");
    }
    parser_message
        .contains("expected newline")
        .then_some("unexpected text after the value: write one setting per line, and numbers without commas")
}

/// A configuration language other than TOML.
struct OtherLanguage {
    name: &'static str,
    /// The line that identifies it.
    span: Range<usize>,
    help: &'static str,
}

/// Recognizes JSON and YAML by the first line.
fn other_language(text: &str) -> Option<OtherLanguage> {
    let (start, first) = first_line(text)?;
    let is_key = |key: &str| !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    let is_entry = |line: &str| {
        let entry = line.split_once(':').filter(|(_, value)| value.is_empty() || value.starts_with(' '));
        entry.is_some_and(|(key, _)| is_key(key.trim_matches(['"', '\''])))
    };
    let name = match first {
        "[" => "JSON",
        _ if first.starts_with('{') || first.starts_with("[{") => "JSON",
        "---" => "YAML",
        _ if first.starts_with("- ") || is_entry(first) => "YAML",
        _ => return None,
    };
    let help = if name == "YAML" && text.contains("descriptors:") {
        "`sluicegate rules import envoy` converts the files of envoyproxy/ratelimit to TOML"
    } else {
        "start with for example\n[[rule]]\nname = \"login-per-ip\""
    };
    Some(OtherLanguage { name, span: start..start + first.len(), help })
}

/// The first line that is neither empty nor a comment, and its offset.
fn first_line(text: &str) -> Option<(usize, &str)> {
    let mut end = 0;
    let mut lines = text.split_inclusive('\n').map(|line| {
        end += line.len();
        (end - line.trim_start().len(), line.trim())
    });
    lines.find(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}
