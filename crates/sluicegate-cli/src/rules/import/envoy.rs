//! Parser of envoyproxy/ratelimit files, as strict as the original: unknown keys, lists of anything but maps, and fractional numbers
//! are rejected, with the original's messages where they exist.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use sluicegate_server::config::read_argument_file;

/// One file: a domain and its descriptors.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) file: PathBuf,
    pub(super) name: String,
    pub(super) descriptors: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    domain: Option<String>,
    descriptors: Option<Vec<Descriptor>>,
}

/// A node of the descriptor tree.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Descriptor {
    key: Option<String>,
    value: Option<String>,
    pub(super) rate_limit: Option<RateLimit>,
    descriptors: Option<Vec<Descriptor>>,
    shadow_mode: Option<bool>,
    quota_mode: Option<bool>,
    detailed_metric: Option<bool>,
    value_to_metric: Option<bool>,
    share_threshold: Option<bool>,
    metadata: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RateLimit {
    unit: Option<String>,
    requests_per_unit: Option<u32>,
    unlimited: Option<bool>,
    name: Option<String>,
    replaces: Option<Vec<Replaced>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Replaced {
    name: Option<String>,
}

impl Descriptor {
    pub(super) fn key(&self) -> &str {
        self.key.as_deref().unwrap_or_default()
    }

    /// The value; an empty value counts as none.
    pub(super) fn value(&self) -> Option<&str> {
        self.value.as_deref().filter(|value| !value.is_empty())
    }

    pub(super) fn children(&self) -> &[Self] {
        self.descriptors.as_deref().unwrap_or_default()
    }

    pub(super) fn is_shadow(&self) -> bool {
        self.shadow_mode.unwrap_or_default()
    }

    pub(super) fn is_shared(&self) -> bool {
        self.share_threshold.unwrap_or_default()
    }

    pub(super) fn is_quota(&self) -> bool {
        self.quota_mode.unwrap_or_default()
    }

    /// Whether it has settings that only change the names of metrics.
    pub(super) fn has_metric_settings(&self) -> bool {
        self.detailed_metric.unwrap_or_default() || self.value_to_metric.unwrap_or_default()
    }

    pub(super) fn has_metadata(&self) -> bool {
        self.metadata.as_ref().is_some_and(|metadata| !metadata.is_null())
    }
}

impl RateLimit {
    /// The window as a duration of sluicegate.toml. As in the original, a month has 30 days and a year 365.
    pub(super) fn window(&self) -> Result<&'static str, String> {
        let unit = self.unit.as_deref().unwrap_or_default();
        Ok(match &*unit.to_ascii_lowercase() {
            "second" => "1s",
            "minute" => "1m",
            "hour" => "1h",
            "day" => "1d",
            "week" => "7d",
            "month" => "30d",
            "year" => "365d",
            _ => {
                return Err(format!(
                    "invalid rate limit unit '{unit}': use second, minute, hour, day, week, month or year"
                ));
            }
        })
    }

    pub(super) fn amount(&self) -> u64 {
        self.requests_per_unit.unwrap_or_default().into()
    }

    pub(super) fn is_unlimited(&self) -> Result<bool, String> {
        let unlimited = self.unlimited.unwrap_or_default();
        if unlimited && self.window().is_ok() {
            return Err("should not specify rate limit unit when unlimited".to_owned());
        }
        Ok(unlimited)
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|name| !name.is_empty())
    }

    /// The names of the limits that this one replaces.
    pub(super) fn replaces(&self) -> Result<Vec<&str>, String> {
        let replaced =
            self.replaces.iter().flatten().map(|replaced| replaced.name.as_deref().unwrap_or_default());
        let replaced: Vec<&str> = replaced.collect();
        if replaced.contains(&"") {
            return Err("should not have an empty replaces entry".to_owned());
        }
        if self.name().is_some_and(|own| replaced.contains(&own)) {
            return Err("replaces should not contain name of same descriptor".to_owned());
        }
        Ok(replaced)
    }
}

/// Reads and parses a file.
pub(super) fn read(path: &Path) -> Result<Domain, String> {
    let bytes = read_argument_file(path).map_err(|error| error.to_string())?;
    let text = String::from_utf8(bytes)
        .map_err(|_| format!("{}: not valid UTF-8: save the file as UTF-8", path.display()))?;
    parse(path, &text)
}

/// The message for YAML of another kind. Most plain texts are valid YAML.
const NOT_RATELIMIT: &str =
    "not an envoyproxy/ratelimit file: use one that begins with domain: and has descriptors:";

pub(super) fn parse(path: &Path, text: &str) -> Result<Domain, String> {
    let in_file = |message: String| format!("{}: {message}", path.display());
    let unreadable = |error: serde_saphyr::Error| match serde_saphyr::from_str(text) {
        Ok(Value::Null | Value::Object(_)) => with_location(path, &error),
        Err(_) if text.contains("domain") => with_location(path, &error),
        Ok(_) | Err::<Value, _>(_) => in_file(NOT_RATELIMIT.to_owned()),
    };
    let document: Document = serde_saphyr::from_str(text).map_err(unreadable)?;
    let plain: Value = serde_saphyr::from_str(text).map_err(unreadable)?;
    let name = document.domain.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| in_file("config file cannot have empty domain".to_owned()))?;
    let descriptors = document.descriptors.unwrap_or_default();
    reject_fraction("domain", Some(&name), &plain).map_err(in_file)?;
    reject_fractions(&descriptors, &plain).map_err(in_file)?;
    Ok(Domain { file: path.to_owned(), name, descriptors })
}

/// Formats a YAML error with its location first.
fn with_location(path: &Path, error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    match error.location() {
        Some(location) => {
            let (line, column) = (location.line(), location.column());
            let location = format!("column {column}: ");
            let message = first.split_once(&location).map_or(first, |(_, message)| message);
            format!("{}:{line}:{column}: {message}", path.display())
        }
        None => format!("{}: {first}", path.display()),
    }
}

/// Rejects fractional numbers, as the original does: their textual form is ambiguous.
fn reject_fractions(descriptors: &[Descriptor], plain: &Value) -> Result<(), String> {
    let plain = plain.get("descriptors").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for (descriptor, plain) in descriptors.iter().zip(plain) {
        reject_fraction("key", descriptor.key.as_deref(), plain)?;
        reject_fraction("value", descriptor.value.as_deref(), plain)?;
        reject_fractions(descriptor.children(), plain)?;
    }
    Ok(())
}

fn reject_fraction(key: &str, text: Option<&str>, plain: &Value) -> Result<(), String> {
    let is_fraction = |text: &&str| text.contains(['.', 'e', 'E']) && text.parse::<f64>().is_ok();
    match text.filter(is_fraction) {
        Some(text) if plain.get(key).is_some_and(Value::is_number) => {
            Err(format!("{key}: {text} is a fractional number: put it in quotes"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Domain, String> {
        parse(Path::new("a.yaml"), text)
    }

    #[test]
    fn scalars_are_read_as_text() {
        let domain =
            read("domain: 7\ndescriptors:\n- key: 007\n  value: true\n- key: '1.5'\n- key: x\n  value:\n")
                .unwrap();
        assert_eq!(domain.name, "7");
        let pairs: Vec<_> = domain.descriptors.iter().map(|one| (one.key(), one.value())).collect();
        assert_eq!(pairs, [("007", Some("true")), ("1.5", None), ("x", None)]);
    }

    #[test]
    fn invalid_files_are_rejected_with_their_location() {
        let table = [
            ("", "a.yaml: config file cannot have empty domain"),
            ("domain: ''", "a.yaml: config file cannot have empty domain"),
            ("domain: a\nratelimit: 1", "a.yaml:2:1: unknown field `ratelimit`"),
            ("domain: a\ndescriptors:\n- a", "a.yaml:3:3: expected mapping start"),
            ("domain: a\ndescriptors:\n- key: a\n  value: 1.5", "a.yaml: value: 1.5 is a fractional number"),
            (
                "domain: a\ndescriptors:\n- key: a\n  rate_limit:\n    requests_per_unit: -1",
                "a.yaml:5:24: invalid u32",
            ),
            ("domain: a\ndomain: b", "a.yaml:2:1: duplicate mapping key"),
            ("domain: [", "a.yaml:"),
            ("[[rule]]\nname = \"a\"\n", "a.yaml:"),
            ("- domain: a", "a.yaml: not an envoyproxy/ratelimit file: use one that begins with domain:"),
            ("just words", "a.yaml: not an envoyproxy/ratelimit file: use one that begins with domain:"),
        ];
        for (text, start) in table {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(start) && error.lines().count() == 1, "{error}");
        }
    }

    #[test]
    fn contradictory_limits_are_rejected() {
        let limit = |text: &str| -> RateLimit { serde_saphyr::from_str(text).unwrap() };
        assert_eq!(limit("unit: MINUTE").window(), Ok("1m"));
        assert!(limit("unit: foo").window().unwrap_err().starts_with("invalid rate limit unit 'foo'"));
        assert_eq!(limit("unlimited: true").is_unlimited(), Ok(true));
        assert!(limit("unlimited: true\nunit: day").is_unlimited().is_err());
        assert!(limit("replaces: [{name: ''}]").replaces().is_err());
        assert!(limit("name: a\nreplaces: [{name: a}]").replaces().is_err());
        assert_eq!(limit("name: a\nreplaces: [{name: b}]").replaces(), Ok(vec!["b"]));
    }
}
