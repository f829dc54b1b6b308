//! The configuration: from a file, the environment and flags to settings and rules that are known to work.
//!
//! The only module that reads files and the environment. Everything has two types, as written (`read`) and as used
//! ([`Config`]); what lies between is here:
//!
//! | file | has |
//! |---|---|
//! | `source` | where settings come from, and which of them wins |
//! | `files` | the files of a configuration, within bounds |
//! | `reader`, `kinds`, `read` | from TOML to settings as written, each with its place |
//! | `syntax` | what is no TOML, and what would be |
//! | `settings` | the server's and the store's settings as used |
//! | `labels` | how labels are read and cleaned |
//! | `rules`, `overrides` | from rules as written, and files of overrides, to the library's rules |
//! | `error` | what is wrong, where, and what would be right |
//! | `view` | rules as they are shown, and their fingerprint |
//! | `watch` | the same again when a file changes |

mod error;
mod files;
mod kinds;
mod labels;
mod overrides;
mod read;
mod reader;
mod rules;
mod settings;
mod source;
mod syntax;
mod view;
pub mod watch;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use tollgate::Rule;

pub use self::{
    error::{Colour, ConfigError, Problem},
    files::{MAX_CONFIG_BYTES, MAX_OVERRIDES_BYTES, MAX_SMALL_BYTES, STANDARD_INPUT},
    settings::{
        Digest, Listen, MAX_DEADLINE, MAX_REFUSAL_CACHE, MAX_TOKENS, MIN_DEADLINE, MIN_HASH_SECRET, Scope,
        Scopes, ServerSettings, StoreSettings, Tls, Token,
    },
    source::{DEFAULT_FILE, Environment, Flags, Source},
    view::{ConditionView, RuleView, fingerprint},
};
use self::{
    error::{File, Place},
    files::Files,
    read::Document,
    settings::Settle,
};
use crate::{
    demo,
    labels::{HashSecret, LabelPolicy},
};

/// Settings that may change while they are used: whoever uses them loads them each time.
pub type Live<T> = Arc<ArcSwap<T>>;

/// Settings that are these for now.
pub fn live<T>(settings: T) -> Live<T> {
    Arc::new(ArcSwap::from_pointee(settings))
}

/// A configuration that works.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where it comes from.
    pub origin: Origin,
    /// Where the server listens, and who may call.
    pub server: ServerSettings,
    /// Where counters are kept.
    pub store: StoreSettings,
    /// How labels are read and cleaned.
    pub labels: LabelPolicy,
    /// The rules, each possible and with a name of its own.
    pub rules: Vec<Rule>,
    /// On which line of the file each of them begins, in the same order; none of the demo's.
    pub rule_lines: Vec<usize>,
    /// Which lists the file has, and has empty.
    pub given_empty: GivenEmpty,
    /// What works and is probably not meant.
    pub warnings: Vec<String>,
}

/// The lists that are in the file as `[]`. A file that lacks them may be half written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GivenEmpty {
    /// `rule = []`.
    pub rules: bool,
    /// `token = []` under `[server]`.
    pub tokens: bool,
}

/// Where a configuration comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nothing is configured: the demo's rules.
    Demo,
    /// This file.
    File(PathBuf),
}

/// Reads and checks the configuration.
///
/// # Errors
/// Everything that is wrong with it, each with its place and what would be right.
pub fn load(source: &Source) -> Result<Config, ConfigError> {
    attempt(source).outcome
}

/// The content of the file that an argument of a command names, of at most [`MAX_CONFIG_BYTES`].
///
/// # Errors
/// When it cannot be read, or is larger.
pub fn file_of_argument(path: &Path) -> Result<Vec<u8>, ConfigError> {
    file_named(&Place::Nowhere, path)
}

/// The same, of the file that a flag names.
///
/// # Errors
/// As [`file_of_argument`].
pub fn file_of_flag(flag: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    file_named(&Place::Flag(flag), path)
}

fn file_named(place: &Place, path: &Path) -> Result<Vec<u8>, ConfigError> {
    let content = Files::beside(path).bytes(path, MAX_CONFIG_BYTES);
    content.map_err(|error| files::unreadable(path, &error, place).into())
}

/// What decides, of a configuration: enough to try its rules on a machine that has none of the server's secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct Deciding {
    /// Where it comes from.
    pub origin: Origin,
    /// How labels are read and cleaned. Secret ones are hashed with the secret of this process.
    pub labels: LabelPolicy,
    /// The rules, each possible and with a name of its own.
    pub rules: Vec<Rule>,
    /// What works and is probably not meant.
    pub warnings: Vec<String>,
}

/// Reads and checks labels and rules. Of the server's and the store's settings only what cannot be read is found.
///
/// # Errors
/// Everything that is wrong with them, each with its place and what would be right.
pub fn load_deciding(source: &Source) -> Result<Deciding, ConfigError> {
    let mut files = Files::beside(&path(source));
    let Written { document, mut problems, origin } = read(source, &mut files)?;
    let mut warnings = Vec::new();
    let secret = Some(HashSecret::of_process());
    let labels = labels::policy(document.labels, secret, &mut problems, &mut warnings);
    let mut builder = rules::Builder { labels: &labels, files: &mut files, problems: &mut problems };
    let rules = match &origin {
        Origin::Demo => demo::rules(),
        Origin::File(_) => {
            builder.rules(document.defaults, document.rule).into_iter().map(|(rule, _)| rule).collect()
        }
    };
    if problems.is_empty() {
        Ok(Deciding { origin, labels, rules, warnings })
    } else {
        Err(ConfigError::new(problems))
    }
}

/// The JSON Schema of the configuration file.
pub fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(Document);
    schema.insert("title".to_owned(), DEFAULT_FILE.into());
    schema.to_value()
}

/// One reading of the configuration.
struct Attempt {
    outcome: Result<Config, ConfigError>,
    /// The files that took part, also those that could not be read.
    files: Vec<PathBuf>,
    /// A hash of what was in them.
    digest: [u8; 32],
}

fn attempt(source: &Source) -> Attempt {
    let mut files = Files::beside(&path(source));
    let outcome = read(source, &mut files).and_then(|written| settled(source, &mut files, written));
    let (files, digest) = files.into_parts();
    Attempt { outcome, files, digest }
}

/// Everything as written, with what is wrong about how.
struct Written {
    document: Document,
    problems: Vec<Problem>,
    origin: Origin,
}

/// The file that is read, if it is there.
fn path(source: &Source) -> PathBuf {
    source.named_file().map_or_else(|| source.default_file(), |(path, _)| path)
}

fn read(source: &Source, files: &mut Files) -> Result<Written, ConfigError> {
    let path = path(source);
    match (files.bytes(&path, MAX_CONFIG_BYTES), source.named_file()) {
        (Ok(bytes), _) => parsed(&path, bytes),
        (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => {
            Ok(Written { document: Document::default(), problems: Vec::new(), origin: Origin::Demo })
        }
        (Err(error), named) => {
            let place = named.map_or(Place::Nowhere, |(_, place)| place);
            Err(files::unreadable(&path, &error, &place).into())
        }
    }
}

fn parsed(path: &Path, bytes: Vec<u8>) -> Result<Written, ConfigError> {
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let file = Arc::new(File::new(path.to_owned(), &String::from_utf8_lossy(error.as_bytes())));
        Problem::new(&Place::In { file, span: valid..valid }, "this is not UTF-8: save the file as UTF-8")
    })?;
    let file = Arc::new(File::new(path.to_owned(), &text));
    let (document, problems) = reader::read::<Document>(file, &text)?;
    Ok(Written { document, problems, origin: Origin::File(path.to_owned()) })
}

/// From everything as written to everything as used.
fn settled(source: &Source, files: &mut Files, written: Written) -> Result<Config, ConfigError> {
    let Written { mut document, mut problems, origin } = written;
    source.lay_over(&mut document, &mut problems);
    let mut warnings = Vec::new();
    let tokens = document.server.get().and_then(|server| server.token.get());
    let given_empty = GivenEmpty {
        rules: document.rule.get().is_some_and(Vec::is_empty),
        tokens: tokens.is_some_and(Vec::is_empty),
    };
    let store_place = document.store.place();
    let store_read = document.store.into_value().unwrap_or_default();
    let mut settle = Settle { files, environment: &source.environment, problems: &mut problems };
    let hash_secret = settle.hash_secret(&store_read.hash_secret_file);
    let server = settle.server(document.server.into_value().unwrap_or_default());
    let store = settle.store(&store_read, &store_place);
    let labels = labels::policy(document.labels, hash_secret, &mut problems, &mut warnings);
    let mut builder = rules::Builder { labels: &labels, files, problems: &mut problems };
    let (rules, places): (_, Vec<_>) = match &origin {
        Origin::Demo => (demo::rules(), Vec::new()),
        Origin::File(_) => builder.rules(document.defaults, document.rule).into_iter().unzip(),
    };
    if problems.is_empty() {
        let rule_lines = rules::lines(&places);
        Ok(Config { origin, server, store, labels, rules, rule_lines, given_empty, warnings })
    } else {
        Err(ConfigError::new(problems))
    }
}
