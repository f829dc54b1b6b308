//! Where settings come from: flags beat the environment, which beats the file, which beats the defaults.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    error::{Place, Problem},
    read::Document,
    reader::{Field, FromText},
};

/// The file that is read when none is named, if it is there.
pub const DEFAULT_FILE: &str = "tollgate.toml";

/// Everything that a configuration is read from.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// What the command line says.
    pub flags: Flags,
    /// The environment.
    pub environment: Environment,
    /// Where [`DEFAULT_FILE`] is looked for: the working directory, unless set.
    pub directory: PathBuf,
}

/// What the command line says, as it was written: reading it is done here, so that errors read alike.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--store`; it may hold a password.
    pub store: Option<String>,
    /// `--http`
    pub http: Option<String>,
    /// `--grpc`
    pub grpc: Option<String>,
    /// `--resp`
    pub resp: Option<String>,
}

/// The variables of the environment. Not shown: some are secrets.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

/// From the name of a variable to its value.
type Lookup = dyn Fn(&str) -> Option<String> + Send + Sync;

impl Environment {
    /// That of this process. Variables that are not Unicode count as not set.
    pub fn of_process() -> Self {
        Self(Arc::new(|name| std::env::var(name).ok()))
    }

    /// One with these variables only.
    pub fn of<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let variables: BTreeMap<String, String> = variables.into_iter().map(own).collect();
        Self(Arc::new(move |name| variables.get(name).cloned()))
    }

    /// The value of a variable; an empty one counts as not set.
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
    /// The flags of this command, and the environment and directory of this process.
    pub fn new(flags: Flags) -> Self {
        Self { flags, environment: Environment::of_process(), directory: PathBuf::new() }
    }

    /// The file that is named, and where.
    pub(super) fn named_file(&self) -> Option<(PathBuf, Place)> {
        if let Some(path) = &self.flags.config {
            return Some((path.clone(), Place::Flag("--config")));
        }
        let path = self.environment.get("TOLLGATE_CONFIG")?;
        Some((path.into(), Place::Variable("TOLLGATE_CONFIG")))
    }

    /// The file that is read, if it is there, when none is named.
    pub(super) fn default_file(&self) -> PathBuf {
        self.directory.join(Path::new(DEFAULT_FILE))
    }

    /// Lays environment and flags over what the file says.
    pub(super) fn lay_over(&self, document: &mut Document, problems: &mut Vec<Problem>) {
        let mut layer = Layer { environment: &self.environment, problems };
        let Flags { config: _, store: store_url, http, grpc, resp } = &self.flags;
        let server = given(&mut document.server);
        layer.set(&mut server.http, "TOLLGATE_HTTP", Some(("--http", http)));
        layer.set(&mut server.grpc, "TOLLGATE_GRPC", Some(("--grpc", grpc)));
        layer.set(&mut server.resp, "TOLLGATE_RESP", Some(("--resp", resp)));
        layer.set_list(&mut server.trusted_proxies, "TOLLGATE_TRUSTED_PROXIES");
        layer.set(&mut server.headers, "TOLLGATE_HEADERS", None);
        layer.set(&mut server.insecure, "TOLLGATE_INSECURE", None);
        layer.set(&mut server.envoy_closed, "TOLLGATE_ENVOY_CLOSED", None);
        let store = given(&mut document.store);
        layer.set(&mut store.url, "TOLLGATE_STORE_URL", Some(("--store", store_url)));
        layer.set(&mut store.deadline, "TOLLGATE_STORE_DEADLINE", None);
        layer.set(&mut store.prefix, "TOLLGATE_STORE_PREFIX", None);
        layer.set(&mut store.max_memory, "TOLLGATE_STORE_MAX_MEMORY", None);
        layer.set(&mut store.denial_cache, "TOLLGATE_STORE_REFUSAL_CACHE", None);
        layer.set(&mut store.password_file, "TOLLGATE_STORE_PASSWORD_FILE", None);
        layer.set(&mut store.hash_secret_file, "TOLLGATE_STORE_HASH_SECRET_FILE", None);
    }
}

/// A table to write into, made if the file has none.
fn given<T: Default>(table: &mut Field<T>) -> &mut T {
    if !matches!(table, Field::Given(..)) {
        // One that could not be read has been reported, and ends the load.
        *table = Field::Given(T::default(), Place::Nowhere);
    }
    match table {
        Field::Given(table, _) => table,
        _ => unreachable!("it was just made"),
    }
}

struct Layer<'a> {
    environment: &'a Environment,
    problems: &'a mut Vec<Problem>,
}

impl Layer<'_> {
    fn set<T: FromText>(
        &mut self,
        field: &mut Field<T>,
        variable: &'static str,
        flag: Option<(&'static str, &Option<String>)>,
    ) {
        let by_flag = flag.and_then(|(name, text)| Some((Place::Flag(name), text.clone()?)));
        let said = by_flag.or_else(|| Some((Place::Variable(variable), self.environment.get(variable)?)));
        if let Some((place, text)) = said {
            *field = self.read(&text, place);
        }
    }

    fn set_list<T: FromText>(&mut self, field: &mut Field<Vec<Field<T>>>, variable: &'static str) {
        if let Some(text) = self.environment.get(variable) {
            let place = Place::Variable(variable);
            let elements = text.split(',').map(|element| self.read(element.trim(), place.clone())).collect();
            *field = Field::Given(elements, place);
        }
    }

    fn read<T: FromText>(&mut self, text: &str, place: Place) -> Field<T> {
        match T::from_text(text) {
            Ok(value) => Field::Given(value, place),
            Err(message) => {
                self.problems.push(Problem::new(&place, message));
                Field::Wrong(place)
            }
        }
    }
}
