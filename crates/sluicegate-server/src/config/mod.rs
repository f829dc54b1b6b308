//! Loads the configuration from a file, the environment and flags, and validates it.
//!
//! Only this module and that of the library read files and the environment. A configuration exists in two forms: as written
//! (`schema`, every value with its location in the file) and validated ([`Config`]).
//!
//! | module | contents |
//! |---|---|
//! | `source` | flags, environment and file, and their precedence |
//! | `schema`, `values` | the structs of the file, which also define the JSON Schema |
//! | `settings` | validated settings of the server and the store |
//! | `validate` | from `schema` to `settings` |
//! | `view` | rules as JSON, and their fingerprint |
//! | `watch` | reloading after a file change |
//!
//! The library reads TOML, labels and rules ([`sluicegate::config`]), so that services can share a rules file with the server.

mod schema;
mod settings;
mod source;
mod validate;
mod values;
mod view;
pub mod watch;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
pub use sluicegate::config::{
    Colour, ConfigError, Problem,
    files::{MAX_CONFIG_BYTES, MAX_OVERRIDES_BYTES, MAX_SMALL_BYTES, STANDARD_INPUT},
};
use sluicegate::{
    Rule,
    config::{
        error::Location,
        files::{self, Files},
        labels, rules, toml_reader,
    },
    label_policy::{HashSecret, LabelPolicy},
};

use self::{schema::Document, validate::Validator};
pub use self::{
    settings::{
        Digest, Listen, MAX_DEADLINE, MAX_DENIAL_CACHE, MAX_TOKENS, MIN_DEADLINE, Scope, Scopes,
        ServerSettings, StoreSettings, Tls, Token,
    },
    source::{DEFAULT_FILE, Environment, Flags, Source},
    view::{AnchorView, ConditionView, RuleView, fingerprint, window_text},
};
use crate::{demo, store::StoreUrl};

/// Settings that a reload can replace. Users load them for each request.
pub type Live<T> = Arc<ArcSwap<T>>;

/// Wraps initial settings for later replacement.
pub fn live<T>(settings: T) -> Live<T> {
    Arc::new(ArcSwap::from_pointee(settings))
}

/// A validated configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The source of this configuration.
    pub origin: Origin,
    /// Listeners, TLS and tokens.
    pub server: ServerSettings,
    /// The store and how it is used.
    pub store: StoreSettings,
    /// How labels are normalized.
    pub labels: LabelPolicy,
    /// The rules, valid and with unique names.
    pub rules: Vec<Rule>,
    /// The line of the file on which each rule starts, in the same order; empty for the demo rules.
    pub rule_lines: Vec<usize>,
    /// The lists that the file sets to `[]`.
    pub explicitly_empty: ExplicitlyEmpty,
    /// Valid settings that are probably not intended.
    pub warnings: Vec<String>,
    /// A warning about rules that set no failure policy, if the store is remote.
    pub policy_warning: Option<String>,
}

/// The lists that the file sets to `[]`. A file in which they are missing may be only partially written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExplicitlyEmpty {
    /// `rule = []`.
    pub rules: bool,
    /// `token = []` under `[server]`.
    pub tokens: bool,
}

/// The source of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No configuration file: the demo rules.
    Demo,
    /// A configuration file.
    File(PathBuf),
}

/// Reads and validates the configuration.
///
/// # Errors
/// Lists every problem found, each with its location and fix.
pub fn load(source: &Source) -> Result<Config, ConfigError> {
    try_load(source).outcome
}

/// Reads a file named by a command's argument, of at most [`MAX_CONFIG_BYTES`].
///
/// # Errors
/// If the file cannot be read or is larger.
pub fn read_argument_file(path: &Path) -> Result<Vec<u8>, ConfigError> {
    file_named(&Location::Default, path)
}

/// Reads a file named by a flag, of at most [`MAX_CONFIG_BYTES`].
///
/// # Errors
/// As [`read_argument_file`].
pub fn read_flag_file(flag: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    file_named(&Location::Flag(flag), path)
}

fn file_named(location: &Location, path: &Path) -> Result<Vec<u8>, ConfigError> {
    let content = Files::beside(path).bytes(path, MAX_CONFIG_BYTES);
    content.map_err(|error| files::unreadable(path, &error, location).into())
}

/// The labels and rules of a configuration: enough to evaluate its rules on a machine without the server's secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleConfig {
    /// The source of this configuration.
    pub origin: Origin,
    /// How labels are normalized. Secret labels are hashed with a random key of this process.
    pub labels: LabelPolicy,
    /// The rules, valid and with unique names.
    pub rules: Vec<Rule>,
    /// Valid settings that are probably not intended.
    pub warnings: Vec<String>,
}

/// Reads and validates labels and rules. Settings of the server and the store are parsed but not validated.
///
/// # Errors
/// Lists every problem found, each with its location and fix.
pub fn load_rule_config(source: &Source) -> Result<RuleConfig, ConfigError> {
    let mut files = Files::beside(&path(source));
    let ParsedDocument { document, mut problems, origin } = read(source, &mut files)?;
    let mut warnings = Vec::new();
    let secret = Some(HashSecret::of_process());
    let labels = labels::policy(document.labels, secret, &mut problems, &mut warnings);
    let mut builder = rules::Builder {
        labels: &labels,
        files: &mut files,
        problems: &mut problems,
        without_policy: Vec::new(),
        without_absent: Vec::new(),
    };
    let rules = match &origin {
        Origin::Demo => demo::rules(),
        Origin::File(_) => {
            builder.rules(document.defaults, document.rule).into_iter().map(|(rule, _)| rule).collect()
        }
    };
    if problems.is_empty() {
        Ok(RuleConfig { origin, labels, rules, warnings })
    } else {
        Err(ConfigError::new(problems))
    }
}

/// Returns the JSON Schema of the configuration file.
pub fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(Document);
    schema.insert("title".to_owned(), DEFAULT_FILE.into());
    schema.to_value()
}

/// The result of one attempt to load the configuration.
struct LoadAttempt {
    outcome: Result<Config, ConfigError>,
    /// Every file that was opened, including those that could not be read.
    files: Vec<PathBuf>,
    /// A hash of their contents.
    digest: [u8; 32],
}

fn try_load(source: &Source) -> LoadAttempt {
    let mut files = Files::beside(&path(source));
    let outcome = read(source, &mut files).and_then(|written| validate(source, &mut files, written));
    let (files, digest) = files.into_parts();
    LoadAttempt { outcome, files, digest }
}

/// A parsed file, not yet validated.
struct ParsedDocument {
    document: Document,
    problems: Vec<Problem>,
    origin: Origin,
}

/// The path of the configuration file.
fn path(source: &Source) -> PathBuf {
    source.named_file().map_or_else(|| source.default_file(), |(path, _)| path)
}

fn read(source: &Source, files: &mut Files) -> Result<ParsedDocument, ConfigError> {
    let path = path(source);
    match (files.bytes(&path, MAX_CONFIG_BYTES), source.named_file()) {
        (Ok(bytes), _) => {
            let (document, problems) = toml_reader::read_bytes(&path, bytes)?;
            Ok(ParsedDocument { document, problems, origin: Origin::File(path) })
        }
        (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => {
            Ok(ParsedDocument { document: Document::default(), problems: Vec::new(), origin: Origin::Demo })
        }
        (Err(error), named) => {
            let location = named.map_or(Location::Default, |(_, location)| location);
            Err(files::unreadable(&path, &error, &location).into())
        }
    }
}

/// Applies environment and flags, then validates everything.
fn validate(source: &Source, files: &mut Files, written: ParsedDocument) -> Result<Config, ConfigError> {
    let ParsedDocument { mut document, mut problems, origin } = written;
    source.apply_to(&mut document, &mut problems);
    let mut warnings = Vec::new();
    let tokens = document.server.get().and_then(|server| server.token.get());
    let explicitly_empty = ExplicitlyEmpty {
        rules: document.rule.get().is_some_and(Vec::is_empty),
        tokens: tokens.is_some_and(Vec::is_empty),
    };
    let store_location = document.store.location();
    let store_read = document.store.into_value().unwrap_or_default();
    let hash_secret = labels::hash_secret(&store_read.hash_secret_file, files, &mut problems);
    let mut validator = Validator {
        files,
        environment: &source.environment,
        problems: &mut problems,
        warnings: &mut warnings,
    };
    let server = validator.server(document.server.into_value().unwrap_or_default());
    let store = validator.store(&store_read, &store_location);
    let labels = labels::policy(document.labels, hash_secret, &mut problems, &mut warnings);
    let mut builder = rules::Builder {
        labels: &labels,
        files,
        problems: &mut problems,
        without_policy: Vec::new(),
        without_absent: Vec::new(),
    };
    let (rules, locations): (_, Vec<_>) = match &origin {
        Origin::Demo => (demo::rules(), Vec::new()),
        Origin::File(_) => builder.rules(document.defaults, document.rule).into_iter().unzip(),
    };
    let is_remote = store.url != StoreUrl::Memory;
    warnings.extend(rules::absent_warnings(&builder.without_absent, &rules, &labels));
    let policy_warning = rules::policy_warning(&builder.without_policy).filter(|_| is_remote);
    if problems.is_empty() {
        let rule_lines = rules::lines(&locations);
        Ok(Config {
            origin,
            server,
            store,
            labels,
            rules,
            rule_lines,
            explicitly_empty,
            warnings,
            policy_warning,
        })
    } else {
        Err(ConfigError::new(problems))
    }
}
