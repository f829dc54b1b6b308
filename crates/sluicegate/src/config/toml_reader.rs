//! Deserializes TOML into the structs of `schema`. Every value keeps its location, and every problem is reported, not only
//! the first.
//!
//! A value that cannot be read is reported once and becomes [`Field::Wrong`], so that it is not reported as missing as
//! well. The structs alone define which keys exist ([`tables`]) and the JSON Schema.

use std::{borrow::Cow, collections::BTreeMap, path::Path, sync::Arc};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    error::{ConfigError, Location, Problem, SourceFile},
    syntax,
};

/// Minimum similarity of two words to suggest one for the other (Jaro-Winkler, 0 to 1).
const MIN_SIMILARITY: f64 = 0.8;

/// A TOML value and its span.
pub type TomlValue<'a> = Spanned<DeValue<'a>>;

/// Types that are read from a TOML value.
pub trait FromToml: Sized {
    /// Reads the value. On failure, reports a problem to the reader and returns `None`.
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self>;
}

/// Types that are also read from a flag or an environment variable.
pub trait FromText: Sized {
    /// The expected form and an example; completes the message "… is not …".
    const EXPECTED: &'static str;

    fn from_text(text: &str) -> Result<Self, String>;
}

/// A setting as written in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Field<T> {
    #[default]
    Absent,
    /// Present but invalid; already reported.
    Wrong(Location),
    Given(T, Location),
}

impl<T> Field<T> {
    pub fn get(&self) -> Option<&T> {
        match self {
            Self::Given(value, _) => Some(value),
            _ => None,
        }
    }

    pub fn into_value(self) -> Option<T> {
        match self {
            Self::Given(value, _) => Some(value),
            _ => None,
        }
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    pub fn location(&self) -> Location {
        match self {
            Self::Absent => Location::Default,
            Self::Wrong(location) | Self::Given(_, location) => location.clone(),
        }
    }

    /// The location of this field, or of the table that lacks it.
    pub fn location_or(&self, table: &Location) -> Location {
        if self.is_absent() { table.clone() } else { self.location() }
    }
}

impl<T: Clone> Field<T> {
    /// This field, or the other if this one is absent.
    pub fn or(&self, other: &Self) -> Self {
        if self.is_absent() { other.clone() } else { self.clone() }
    }
}

/// Reads one file and collects its problems.
pub struct TomlReader {
    file: Arc<SourceFile>,
    /// The keys that lead to the current value.
    path: Vec<String>,
    pub problems: Vec<Problem>,
}

/// Reads a document of a file and returns it with its problems.
pub fn read_bytes<T: FromToml>(path: &Path, bytes: Vec<u8>) -> Result<(T, Vec<Problem>), ConfigError> {
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let file = Arc::new(SourceFile::new(path.to_owned(), &String::from_utf8_lossy(error.as_bytes())));
        Problem::new(
            &Location::InFile { file, span: valid..valid },
            "the file is not UTF-8: save it as UTF-8",
        )
    })?;
    read(Arc::new(SourceFile::new(path.to_owned(), &text)), &text)
}

/// Reads a whole document and returns it with its problems.
fn read<T: FromToml>(file: Arc<SourceFile>, text: &str) -> Result<(T, Vec<Problem>), ConfigError> {
    let mut reader = TomlReader { file, path: Vec::new(), problems: Vec::new() };
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // The rest of the document is unreliable: a missing quote can turn a value into a key.
        return Err(ConfigError::new(syntax::problems(&reader.file, &errors)));
    }
    let value = Spanned::new(table.span(), DeValue::Table(table.into_inner()));
    match T::from_toml(&value, &mut reader) {
        Some(read) => Ok((read, reader.problems)),
        None => Err(ConfigError::new(reader.problems)),
    }
}

impl TomlReader {
    pub fn location(&self, span: std::ops::Range<usize>) -> Location {
        Location::InFile { file: Arc::clone(&self.file), span }
    }

    /// Reports a problem with a value, prefixed with the keys that lead to it.
    pub fn wrong(&mut self, value: &TomlValue<'_>, message: impl AsRef<str>) {
        let location = self.location(value.span());
        let message = format!("{}: {}", self.path.join("."), message.as_ref());
        self.problems.push(Problem::new(&location, message));
    }

    /// Returns the value as a table, or reports that it is not one.
    pub fn table<'v, 'i>(&mut self, value: &'v TomlValue<'i>, what: &str) -> Option<&'v DeTable<'i>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            let path = self.path.join(".");
            let message = format!("{} is not a table: {what}", shown(value.get_ref()));
            self.wrong(value, message.replace("{path}", &path));
        }
        table
    }

    /// Reads the value of a key.
    pub fn field<T: FromToml>(&mut self, key: &str, value: &TomlValue<'_>) -> Field<T> {
        self.path.push(key.to_owned());
        let read = T::from_toml(value, self);
        self.path.pop();
        let location = self.location(value.span());
        match read {
            Some(read) => Field::Given(read, location),
            None => Field::Wrong(location),
        }
    }

    pub fn unknown(&mut self, key: &Spanned<Cow<'_, str>>, known: &[&str]) {
        let location = self.location(key.span());
        let table = match self.path.join(".") {
            path if path.is_empty() => "the file".to_owned(),
            path => path,
        };
        let problem = Problem::new(&location, format!("{table}: unknown key `{}`", key.get_ref()));
        let help = match suggestion(key.get_ref(), known) {
            Some(other) => format!("did you mean `{other}`?"),
            None => format!("the keys here are {}", known.join(", ")),
        };
        self.problems.push(problem.help(help));
    }
}

/// Key names of other rate limiters, and the key used here.
const ALIASES: [(&str, &str); 13] = [
    ("limit", "amount"),
    ("max", "amount"),
    ("rate", "amount"),
    ("requests", "amount"),
    ("requests_per_unit", "amount"),
    ("duration", "window"),
    ("interval", "window"),
    ("period", "window"),
    ("by", "per"),
    ("key", "per"),
    ("match", "when"),
    ("strategy", "algorithm"),
    ("type", "algorithm"),
];

/// Returns the element of `known` that was probably intended.
pub fn suggestion<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let elsewhere = ALIASES.iter().find(|(other, _)| *other == word);
    if let Some(ours) = elsewhere.and_then(|(_, ours)| known.iter().find(|known| *known == ours)) {
        return Some(ours);
    }
    let likeness = |other: &&str| strsim::jaro_winkler(&word.to_ascii_lowercase(), other);
    let best = known.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)))?;
    (likeness(best) >= MIN_SIMILARITY).then_some(*best)
}

/// Formats a value for a message.
pub fn shown(value: &DeValue<'_>) -> String {
    const LONGEST: usize = 60;
    match value {
        DeValue::String(text) if text.contains('@') => "this string".to_owned(),
        DeValue::String(text) if text.chars().count() > LONGEST => {
            format!("{:?}", text.chars().take(LONGEST).chain(['…']).collect::<String>())
        }
        DeValue::String(text) => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// Declares structs that are read from tables: a [`Field`] for each key, [`FromToml`] and the JSON Schema.
#[doc(hidden)]
#[macro_export]
macro_rules! config_tables {
    ($(
        $(#[$attribute:meta])*
        struct $name:ident {
            $( $(#[$description:meta])* $field:ident: $kind:ty, )*
        }
    )*) => { $(
        #[derive(Clone, Debug, Default, PartialEq, Eq, schemars::JsonSchema)]
        #[schemars(deny_unknown_fields, default)]
        $(#[$attribute])*
        pub struct $name {
            $( $(#[$description])* pub $field: $crate::config::toml_reader::Field<$kind>, )*
        }

        impl $crate::config::toml_reader::FromToml for $name {
            fn from_toml(
                value: &$crate::config::toml_reader::TomlValue<'_>,
                reader: &mut $crate::config::toml_reader::TomlReader,
            ) -> Option<Self> {
                const KNOWN: &[&str] = &[$( $crate::config::toml_reader::key(stringify!($field)) ),*];
                let mut read = Self::default();
                for (key, value) in reader.table(value, "write it as [{path}]")? {
                    $( if key.get_ref() == $crate::config::toml_reader::key(stringify!($field)) {
                        read.$field = reader.field(key.get_ref(), value);
                        continue;
                    } )*
                    reader.unknown(key, KNOWN);
                }
                Some(read)
            }
        }
    )* };
}
pub use config_tables as tables;

/// The key of a field: its name without the `r#` of raw identifiers.
pub const fn key(field: &str) -> &str {
    match field.as_bytes() {
        [b'r', b'#', ..] => field.split_at(2).1,
        _ => field,
    }
}

impl<T: FromToml> FromToml for Vec<Field<T>> {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let Some(array) = value.get_ref().as_array() else {
            let hint = match value.get_ref() {
                DeValue::Table(_) => format!("write it as [[{}]]", reader.path.join(".")),
                _ => "write it in [ ], as in [\"a\", \"b\"]".to_owned(),
            };
            reader.wrong(value, format!("{} is not a list: {hint}", shown(value.get_ref())));
            return None;
        };
        Some(
            array
                .iter()
                .map(|element| match T::from_toml(element, reader) {
                    Some(read) => Field::Given(read, reader.location(element.span())),
                    None => Field::Wrong(reader.location(element.span())),
                })
                .collect(),
        )
    }
}

impl<T: FromToml> FromToml for BTreeMap<String, Field<T>> {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let table = reader.table(value, "write it as { name = value }")?;
        Some(
            table
                .iter()
                .map(|(key, value)| (key.get_ref().to_string(), reader.field(key.get_ref(), value)))
                .collect(),
        )
    }
}

impl FromToml for String {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            reader.wrong(value, format!("{} is not a string: write it in quotes", shown(value.get_ref())));
        }
        text.map(str::to_owned)
    }
}

impl FromToml for bool {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            let message = format!("{} is not a boolean", shown(value.get_ref()));
            reader.wrong(value, format!("{message}: write true or false, without quotes"));
        }
        flag
    }
}

impl FromToml for u64 {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let number = value.get_ref().as_integer();
        let number = number.and_then(|number| u64::from_str_radix(number.as_str(), number.radix()).ok());
        if number.is_none() {
            let message = format!("{} is not a non-negative integer: write one", shown(value.get_ref()));
            reader.wrong(value, format!("{message}, without quotes"));
        }
        number
    }
}

impl<T: JsonSchema> JsonSchema for Field<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<T>()
    }
}
