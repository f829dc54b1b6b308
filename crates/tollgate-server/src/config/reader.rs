//! From TOML to settings as they were written: every value keeps its place, and every mistake is noted, not only
//! the first.
//!
//! A value that cannot be read is reported once and then stands as [`Field::Wrong`], so that nobody complains of
//! its absence as well. Which keys exist is known from the structs alone ([`tables`]), as is the JSON Schema.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    error::{ConfigError, File, Place, Problem},
    syntax,
};

/// How alike two words must be for one to be a slip of the other (Jaro-Winkler, 0 to 1).
const ALIKE: f64 = 0.8;

/// A value in the file and where it stands.
pub(super) type Value<'a> = Spanned<DeValue<'a>>;

/// What can be read from a value of TOML.
pub(super) trait FromToml: Sized {
    /// Reads the value; what is wrong with it goes to the reader, and leaves nothing.
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self>;
}

/// What can also be read from a flag or a variable.
pub(super) trait FromText: Sized {
    /// What it is, and an example: it ends the sentence "… is not a …".
    const WHAT: &'static str;

    fn from_text(text: &str) -> Result<Self, String>;
}

/// A setting as it was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Field<T> {
    #[default]
    Absent,
    /// It is there, cannot be read, and that has been said.
    Wrong(Place),
    Given(T, Place),
}

impl<T> Field<T> {
    pub(super) fn get(&self) -> Option<&T> {
        match self {
            Self::Given(value, _) => Some(value),
            _ => None,
        }
    }

    pub(super) fn into_value(self) -> Option<T> {
        match self {
            Self::Given(value, _) => Some(value),
            _ => None,
        }
    }

    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    pub(super) fn place(&self) -> Place {
        match self {
            Self::Absent => Place::Nowhere,
            Self::Wrong(place) | Self::Given(_, place) => place.clone(),
        }
    }

    /// Where this was written, or else the table that lacks it.
    pub(super) fn place_or(&self, table: &Place) -> Place {
        if self.is_absent() { table.clone() } else { self.place() }
    }
}

impl<T: Clone> Field<T> {
    /// This, or when it was not written, the other.
    pub(super) fn or(&self, other: &Self) -> Self {
        if self.is_absent() { other.clone() } else { self.clone() }
    }
}

/// Reads one file and notes what is wrong with it.
pub(super) struct Reader {
    file: Arc<File>,
    /// The keys on the way to the value that is being read.
    path: Vec<String>,
    pub(super) problems: Vec<Problem>,
}

/// Reads a whole document, and says what is wrong with it.
pub(super) fn read<T: FromToml>(file: Arc<File>, text: &str) -> Result<(T, Vec<Problem>), ConfigError> {
    let mut reader = Reader { file, path: Vec::new(), problems: Vec::new() };
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // What could be read beside them may be read wrongly: a lost quote makes a key of a value.
        return Err(ConfigError::new(syntax::problems(&reader.file, &errors)));
    }
    let value = Spanned::new(table.span(), DeValue::Table(table.into_inner()));
    match T::from_toml(&value, &mut reader) {
        Some(read) => Ok((read, reader.problems)),
        None => Err(ConfigError::new(reader.problems)),
    }
}

impl Reader {
    pub(super) fn place(&self, span: std::ops::Range<usize>) -> Place {
        Place::In { file: Arc::clone(&self.file), span }
    }

    /// Notes that this value is wrong, with the keys that lead to it.
    pub(super) fn wrong(&mut self, value: &Value<'_>, message: impl AsRef<str>) {
        let place = self.place(value.span());
        let message = format!("{}: {}", self.path.join("."), message.as_ref());
        self.problems.push(Problem::new(&place, message));
    }

    /// The entries of a table, each with its key.
    pub(super) fn table<'v, 'i>(&mut self, value: &'v Value<'i>, what: &str) -> Option<&'v DeTable<'i>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            let path = self.path.join(".");
            let message = format!("{} is not a table: {what}", shown(value.get_ref()));
            self.wrong(value, message.replace("{path}", &path));
        }
        table
    }

    /// Reads what stands under a key.
    pub(super) fn field<T: FromToml>(&mut self, key: &str, value: &Value<'_>) -> Field<T> {
        self.path.push(key.to_owned());
        let read = T::from_toml(value, self);
        self.path.pop();
        let place = self.place(value.span());
        match read {
            Some(read) => Field::Given(read, place),
            None => Field::Wrong(place),
        }
    }

    pub(super) fn unknown(&mut self, key: &Spanned<Cow<'_, str>>, known: &[&str]) {
        let place = self.place(key.span());
        let table = match self.path.join(".") {
            path if path.is_empty() => "the file".to_owned(),
            path => path,
        };
        let problem = Problem::new(&place, format!("{table}: there is no key `{}`", key.get_ref()));
        let help = match meant(key.get_ref(), known) {
            Some(other) => format!("did you mean `{other}`?"),
            None => format!("the keys here are {}", known.join(", ")),
        };
        self.problems.push(problem.help(help));
    }
}

/// What others call a key of ours.
const ELSEWHERE: [(&str, &str); 13] = [
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

/// The one of `known` that was probably meant.
pub(super) fn meant<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let elsewhere = ELSEWHERE.iter().find(|(other, _)| *other == word);
    if let Some(ours) = elsewhere.and_then(|(_, ours)| known.iter().find(|known| *known == ours)) {
        return Some(ours);
    }
    let likeness = |other: &&str| strsim::jaro_winkler(&word.to_ascii_lowercase(), other);
    let best = known.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)))?;
    (likeness(best) >= ALIKE).then_some(*best)
}

/// A value as a message shows it.
pub(super) fn shown(value: &DeValue<'_>) -> String {
    const LONGEST: usize = 60;
    match value {
        DeValue::String(text) if text.contains('@') => "this text".to_owned(),
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

/// Declares structs that are read from tables: a [`Field`] for each key, and [`FromToml`], and the JSON Schema.
macro_rules! tables {
    ($(
        $(#[$about:meta])*
        struct $name:ident {
            $( $(#[$says:meta])* $field:ident: $kind:ty, )*
        }
    )*) => { $(
        #[derive(Clone, Debug, Default, PartialEq, Eq, schemars::JsonSchema)]
        #[schemars(deny_unknown_fields, default)]
        $(#[$about])*
        pub(super) struct $name {
            $( $(#[$says])* pub(super) $field: $crate::config::reader::Field<$kind>, )*
        }

        impl $crate::config::reader::FromToml for $name {
            fn from_toml(
                value: &$crate::config::reader::Value<'_>,
                reader: &mut $crate::config::reader::Reader,
            ) -> Option<Self> {
                const KNOWN: &[&str] = &[$( $crate::config::reader::key(stringify!($field)) ),*];
                let mut read = Self::default();
                for (key, value) in reader.table(value, "write it as [{path}]")? {
                    $( if key.get_ref() == $crate::config::reader::key(stringify!($field)) {
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
pub(super) use tables;

/// The key of a field: its name, and for a word of Rust without its mark.
pub(super) const fn key(field: &str) -> &str {
    match field.as_bytes() {
        [b'r', b'#', ..] => field.split_at(2).1,
        _ => field,
    }
}

impl<T: FromToml> FromToml for Vec<Field<T>> {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
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
                    Some(read) => Field::Given(read, reader.place(element.span())),
                    None => Field::Wrong(reader.place(element.span())),
                })
                .collect(),
        )
    }
}

impl<T: FromToml> FromToml for BTreeMap<String, Field<T>> {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
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
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            reader.wrong(value, format!("{} is not a text: write it in quotes", shown(value.get_ref())));
        }
        text.map(str::to_owned)
    }
}

impl FromToml for bool {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            let message = format!("{} is neither true nor false", shown(value.get_ref()));
            reader.wrong(value, format!("{message}: write one of these, without quotes"));
        }
        flag
    }
}

impl FromToml for u64 {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        let number = value.get_ref().as_integer();
        let number = number.and_then(|number| u64::from_str_radix(number.as_str(), number.radix()).ok());
        if number.is_none() {
            let message = format!("{} is not a whole number from 0: write one", shown(value.get_ref()));
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
