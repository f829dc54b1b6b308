//! What is no TOML, and what would be: people write it as they write other languages.
//!
//! What they wrote is not repeated: without its quotes, nobody knows that it is a secret.

use std::{ops::Range, sync::Arc};

use super::error::{File, Place, Problem};

/// Everything that is no TOML. Of one mistake the parser may complain twice.
pub(super) fn problems(file: &Arc<File>, errors: &[toml::de::Error]) -> Vec<Problem> {
    let text = &file.text;
    let place = |span| Place::In { file: Arc::clone(file), span };
    if let Some(Other { name, span, help }) = other_language(text) {
        let message = format!("this is {name}: write rules and settings in TOML");
        return vec![Problem::new(&place(span), message).help(help)];
    }
    let complaint = |error: &toml::de::Error| error.message().trim_end_matches('\n').to_owned();
    let mut errors: Vec<_> =
        errors.iter().map(|error| (error.span().unwrap_or(0..0), complaint(error))).collect();
    errors.sort_by_key(|(span, _)| span.start);
    let mut problems = Vec::new();
    let mut last: Option<(usize, String)> = None;
    for (span, complaint) in errors {
        let message = remedy(text, &span, &complaint).map_or(complaint, str::to_owned);
        let is_same_line = |from: usize| !text.get(from..span.start).unwrap_or_default().contains('\n');
        if !last.is_some_and(|(from, said)| said == message && is_same_line(from)) {
            problems.push(Problem::new(&place(span.clone()), format!("this is not TOML: {message}")));
        }
        last = Some((span.start, message));
    }
    problems
}

/// What would be right.
fn remedy(text: &str, span: &Range<usize>, complaint: &str) -> Option<&'static str> {
    let (before, found) = (text.get(..span.start)?.trim_end_matches([' ', '\t']), text.get(span.clone())?);
    let is_table = before.rsplit('\n').next()?.trim_start().chars().all(|c| c == '[');
    let is_value = !is_table && before.ends_with(['=', '[', ',']);
    if is_value && found.starts_with(['“', '”', '„', '‘', '’', '«']) {
        return Some("write straight quotes, as in \"1m\"");
    }
    if is_value && found.starts_with(char::is_alphanumeric) {
        return Some(match found.to_ascii_lowercase().as_str() {
            "true" | "false" | "yes" | "no" | "on" | "off" => "write true or false, in small letters",
            _ => "a text needs quotes, and a number digits: write for example \"1m\" or 5",
        });
    }
    if found.starts_with(':') || complaint.starts_with("key with no value") {
        return Some("write = between a key and its value");
    }
    complaint.contains("expected newline").then_some(
        "the line goes on behind its value: write one setting to the line, and numbers without commas",
    )
}

/// Something that people write settings in, too.
struct Other {
    name: &'static str,
    /// Where it shows.
    span: Range<usize>,
    help: &'static str,
}

/// The language of a text, if it is known by its first line.
fn other_language(text: &str) -> Option<Other> {
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
        "tollgate rules import envoy makes TOML of the files of envoyproxy/ratelimit"
    } else {
        "begin for example with\n[[rule]]\nname = \"login-per-ip\""
    };
    Some(Other { name, span: start..start + first.len(), help })
}

/// The first line that says something, and where it begins.
fn first_line(text: &str) -> Option<(usize, &str)> {
    let mut end = 0;
    let mut lines = text.split_inclusive('\n').map(|line| {
        end += line.len();
        (end - line.trim_start().len(), line.trim())
    });
    lines.find(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}
