//! Reads the rules file of the server, so that a service can share it: `[labels]`, `[defaults]` and `[[rule]]`.
//!
//! | module | contents |
//! |---|---|
//! | `files` | size-limited reading of files |
//! | `toml_reader`, `values` | from TOML to the structs of `schema`; every value keeps its location |
//! | `schema` | the structs of the file, which also define the JSON Schema |
//! | `syntax` | error messages for text that is not TOML |
//! | `labels` | from `[labels]` to the label policy |
//! | `rules`, `limits`, `overrides` | from `[[rule]]` and CSV files of overrides to rules |
//! | `defaults` | absent fields of a rule, from `[defaults]` |
//! | `error` | problems with their location and fix |
//!
//! The modules are public for the server only and may change in any release.

mod defaults;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod labels;
mod limits;
mod overrides;
#[doc(hidden)]
pub mod rules;
#[doc(hidden)]
pub mod schema;
mod syntax;
#[doc(hidden)]
pub mod toml_reader;
#[doc(hidden)]
pub mod values;

use std::path::Path;

pub use self::error::{Colour, ConfigError, Problem};
use self::{
    error::Location,
    files::{Files, MAX_CONFIG_BYTES},
    schema::{Defaults, Label, Rule as RuleTable},
    toml_reader::{Field, FromToml, TomlReader, TomlValue},
};
use crate::{label_policy::LabelPolicy, rules::Rule};

/// The rules of a configuration file, and how labels are normalized before rules match them.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use sluicegate::{Cost, Limiter, MemoryStore, config::RulesFile};
///
/// let file = RulesFile::parse(
///     r#"
///     [[rule]]
///     name = "login-per-ip"
///     when = { route = "login" }
///     per = ["ip"]
///     algorithm = "sliding-log"
///     amount = 10
///     window = "1m"
///     "#,
/// )?;
/// let limiter = Limiter::new(MemoryStore::new(), file.rules)?;
/// let labels = file.labels.clean([("route", "login"), ("ip", "2001:db8::1")])?;
/// assert_eq!(limiter.check(&labels, Cost::ONE).await?.remaining(), Some(9));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RulesFile {
    /// The rules, valid and with unique names.
    pub rules: Vec<Rule>,
    /// How the server normalizes labels. Use [`LabelPolicy::clean`] to share counters with it.
    pub labels: LabelPolicy,
    /// Valid settings that are probably not intended.
    pub warnings: Vec<String>,
}

/// The tables of a configuration file that concern rules. The server's other settings are skipped.
#[derive(Default)]
struct RulesDocument {
    labels: Field<std::collections::BTreeMap<String, Field<Label>>>,
    defaults: Field<Defaults>,
    rule: Field<Vec<Field<RuleTable>>>,
    hash_secret_file: Field<String>,
    /// Settings that change the decisions of a server and have no effect here.
    unused: Vec<String>,
}

impl RulesFile {
    /// Reads a configuration file of the server. Its settings for the server and the store are not used, except
    /// `store.hash_secret_file`.
    ///
    /// # Errors
    /// Lists every problem found, each with its location and fix.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let mut files = Files::beside(path);
        let bytes = files.bytes(path, MAX_CONFIG_BYTES);
        let bytes = bytes.map_err(|error| files::unreadable(path, &error, &Location::Default))?;
        Self::from_bytes(path, bytes, &mut files)
    }

    /// Reads the text of a configuration file. Paths in it are relative to the working directory.
    ///
    /// # Errors
    /// As [`RulesFile::read`].
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let path = Path::new("rules.toml");
        Self::from_bytes(path, text.as_bytes().to_vec(), &mut Files::beside(path))
    }

    fn from_bytes(path: &Path, bytes: Vec<u8>, files: &mut Files) -> Result<Self, ConfigError> {
        let (document, mut problems) = toml_reader::read_bytes::<RulesDocument>(path, bytes)?;
        let mut warnings = Vec::new();
        let secret = labels::hash_secret(&document.hash_secret_file, files, &mut problems);
        let labels = labels::policy(document.labels, secret, &mut problems, &mut warnings);
        if document.rule.is_absent() {
            let message = "the file has no rules, so nothing is limited: add a [[rule]], or write rule = []";
            warnings.push(message.to_owned());
        }
        if !document.unused.is_empty() {
            let unused = document.unused.join(", ");
            warnings.push(format!("only the server uses {unused}: set them in the program"));
        }
        let mut builder = rules::Builder {
            labels: &labels,
            files,
            problems: &mut problems,
            without_policy: Vec::new(),
            without_absent: Vec::new(),
        };
        let rules = builder.rules(document.defaults, document.rule);
        if problems.is_empty() {
            let rules = rules.into_iter().map(|(rule, _)| rule).collect();
            Ok(Self { rules, labels, warnings })
        } else {
            Err(ConfigError::new(problems))
        }
    }
}

impl FromToml for RulesDocument {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        const KNOWN: [&str; 5] = ["server", "store", "labels", "defaults", "rule"];
        let mut read = Self::default();
        for (key, value) in reader.table(value, "write it as a table")? {
            match &**key.get_ref() {
                "labels" => read.labels = reader.field("labels", value),
                "defaults" => read.defaults = reader.field("defaults", value),
                "rule" => read.rule = reader.field("rule", value),
                "server" | "store" => {
                    for (setting, value) in value.get_ref().as_table().into_iter().flatten() {
                        match (&**key.get_ref(), &**setting.get_ref()) {
                            ("store", "hash_secret_file") => {
                                read.hash_secret_file = reader.field("store.hash_secret_file", value);
                            }
                            ("store", name) => read.unused.push(format!("store.{name}")),
                            ("server", name @ "trusted_proxies") => {
                                read.unused.push(format!("server.{name}"))
                            }
                            _ => {}
                        }
                    }
                }
                _ => reader.unknown(key, &KNOWN),
            }
        }
        Some(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: &str = "[[rule]]\nname = \"logins\"\nper = [\"user\"]\namount = 5\nwindow = \"1m\"\n";

    #[test]
    fn settings_of_the_server_and_the_store_are_ignored() {
        let text = format!("[server]\nhttp = 1\n[store]\nurl = \"redis://db\"\nprefix = \"x\"\n{RULE}");
        let file = RulesFile::parse(&text).unwrap();
        let names: Vec<_> = file.rules.iter().map(|rule| &*rule.name).collect();
        assert_eq!(names, ["logins"]);
        assert_eq!(file.warnings, ["only the server uses store.prefix, store.url: set them in the program"]);
    }

    #[test]
    fn a_file_without_rules_is_a_warning_unless_that_is_explicit() {
        assert!(RulesFile::parse("").unwrap().warnings[0].starts_with("the file has no rules"));
        assert_eq!(RulesFile::parse("rule = []").unwrap().warnings, [""; 0]);
    }

    #[test]
    fn every_problem_is_reported_with_its_location() {
        let text = RULE.replace("5", "0").replace("window", "windw") + "[limits]\n";
        let error = RulesFile::parse(&text).unwrap_err();
        let located: Vec<_> =
            error.problems().iter().map(|problem| problem.line_and_column().unwrap().0).collect();
        assert_eq!(located, [2, 5, 6], "{error}");
        assert!(error.to_string().contains("did you mean `window`?"), "{error}");
        assert!(format!("{error:?}").contains("--> rules.toml:2:"), "{error:?}");
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_its_path() {
        let error = RulesFile::read("missing/rules.toml").unwrap_err();
        assert!(error.to_string().starts_with("cannot read missing/rules.toml"), "{error}");
    }

    #[test]
    fn secret_labels_without_a_shared_key_are_a_warning() {
        let file = RulesFile::parse("rule = []\n[labels]\napi_key = { secret = true }\n").unwrap();
        assert!(file.warnings[0].starts_with("store.hash_secret_file is not set"), "{:?}", file.warnings);
    }
}
