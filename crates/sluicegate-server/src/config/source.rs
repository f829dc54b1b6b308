//! Sources of settings. Precedence: flags, environment, file, defaults.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sluicegate::config::{
    error::{Location, Problem},
    toml_reader::{Field, FromText},
};

use super::schema::Document;

/// The configuration file that is used if none is given and it exists.
pub const DEFAULT_FILE: &str = "sluicegate.toml";

/// The sources of a configuration.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// Command line flags.
    pub flags: Flags,
    /// Environment variables.
    pub environment: Environment,
    /// The directory of [`DEFAULT_FILE`]; the working directory if empty.
    pub directory: PathBuf,
}

/// Command line flags as text. They are parsed here so that all errors have the same form.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--store`; may contain a password.
    pub store: Option<String>,
    /// `--http`
    pub http: Option<String>,
    /// `--grpc`
    pub grpc: Option<String>,
    /// `--resp`
    pub resp: Option<String>,
}

/// Environment variables. `Debug` does not print them because some are secrets.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

/// Returns the value of a variable.
type Lookup = dyn Fn(&str) -> Option<String> + Send + Sync;

impl Environment {
    /// The environment of this process. Variables that are not Unicode count as unset.
    pub fn of_process() -> Self {
        Self(Arc::new(|name| std::env::var(name).ok()))
    }

    /// An environment with only these variables.
    pub fn of<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let variables: BTreeMap<String, String> = variables.into_iter().map(own).collect();
        Self(Arc::new(move |name| variables.get(name).cloned()))
    }

    /// Returns the value of a variable; an empty value counts as unset.
    pub fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }
}

impl Default for Environment {
    fn default() -> Self {
        Self::of_process()
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Environment(…)")
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, store, http, grpc, resp } = self;
        f.debug_struct("Flags")
            .field("config", config)
            .field("store", &store.as_ref().map(|_| "…"))
            .field("http", http)
            .field("grpc", grpc)
            .field("resp", resp)
            .finish()
    }
}

impl Source {
    /// These flags with the environment and working directory of this process.
    pub fn new(flags: Flags) -> Self {
        Self { flags, environment: Environment::of_process(), directory: PathBuf::new() }
    }

    /// The file given by flag or environment, and which of them.
    pub(super) fn named_file(&self) -> Option<(PathBuf, Location)> {
        if let Some(path) = &self.flags.config {
            return Some((path.clone(), Location::Flag("--config")));
        }
        let path = self.environment.get("SLUICEGATE_CONFIG")?;
        Some((path.into(), Location::Variable("SLUICEGATE_CONFIG")))
    }

    /// The file that is used if none is given and it exists.
    pub(super) fn default_file(&self) -> PathBuf {
        self.directory.join(Path::new(DEFAULT_FILE))
    }

    /// Overwrites the settings of the file with those of environment and flags.
    pub(super) fn apply_to(&self, document: &mut Document, problems: &mut Vec<Problem>) {
        let mut overlay = Overlay { environment: &self.environment, problems };
        let Flags { config: _, store: store_url, http, grpc, resp } = &self.flags;
        let server = table(&mut document.server);
        overlay.set(&mut server.http, "SLUICEGATE_HTTP", Some(("--http", http)));
        overlay.set(&mut server.grpc, "SLUICEGATE_GRPC", Some(("--grpc", grpc)));
        overlay.set(&mut server.resp, "SLUICEGATE_RESP", Some(("--resp", resp)));
        overlay.set_list(&mut server.trusted_proxies, "SLUICEGATE_TRUSTED_PROXIES");
        overlay.set(&mut server.headers, "SLUICEGATE_HEADERS", None);
        overlay.set(&mut server.insecure, "SLUICEGATE_INSECURE", None);
        overlay.set(&mut server.envoy_closed, "SLUICEGATE_ENVOY_CLOSED", None);
        let store = table(&mut document.store);
        overlay.set(&mut store.url, "SLUICEGATE_STORE_URL", Some(("--store", store_url)));
        overlay.set(&mut store.deadline, "SLUICEGATE_STORE_DEADLINE", None);
        overlay.set(&mut store.prefix, "SLUICEGATE_STORE_PREFIX", None);
        overlay.set(&mut store.max_memory, "SLUICEGATE_STORE_MAX_MEMORY", None);
        overlay.set(&mut store.denial_cache, "SLUICEGATE_STORE_DENIAL_CACHE", None);
        overlay.set(&mut store.instances, "SLUICEGATE_STORE_INSTANCES", None);
        overlay.set(&mut store.key_scan_interval, "SLUICEGATE_STORE_KEY_SCAN_INTERVAL", None);
        overlay.set(&mut store.password_file, "SLUICEGATE_STORE_PASSWORD_FILE", None);
        overlay.set(&mut store.hash_secret_file, "SLUICEGATE_STORE_HASH_SECRET_FILE", None);
    }
}

/// Returns a table for writing; creates it if the file has none.
fn table<T: Default>(table: &mut Field<T>) -> &mut T {
    if !matches!(table, Field::Given(..)) {
        // An invalid table has been reported and fails the load.
        *table = Field::Given(T::default(), Location::Default);
    }
    match table {
        Field::Given(table, _) => table,
        _ => unreachable!("the table was just created"),
    }
}

struct Overlay<'a> {
    environment: &'a Environment,
    problems: &'a mut Vec<Problem>,
}

impl Overlay<'_> {
    fn set<T: FromText>(
        &mut self,
        field: &mut Field<T>,
        variable: &'static str,
        flag: Option<(&'static str, &Option<String>)>,
    ) {
        let by_flag = flag.and_then(|(name, text)| Some((Location::Flag(name), text.clone()?)));
        let value = by_flag.or_else(|| Some((Location::Variable(variable), self.environment.get(variable)?)));
        if let Some((location, text)) = value {
            *field = self.read(&text, location);
        }
    }

    fn set_list<T: FromText>(&mut self, field: &mut Field<Vec<Field<T>>>, variable: &'static str) {
        if let Some(text) = self.environment.get(variable) {
            let location = Location::Variable(variable);
            let elements =
                text.split(',').map(|element| self.read(element.trim(), location.clone())).collect();
            *field = Field::Given(elements, location);
        }
    }

    fn read<T: FromText>(&mut self, text: &str, location: Location) -> Field<T> {
        match T::from_text(text) {
            Ok(value) => Field::Given(value, location),
            Err(message) => {
                self.problems.push(Problem::new(&location, message));
                Field::Wrong(location)
            }
        }
    }
}
