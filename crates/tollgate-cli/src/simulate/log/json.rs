//! JSON lines: one object to the line, fields found by name. `request.uri` is the field `uri` of the object `request`.

use std::{collections::HashMap, fmt, io::Write};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::record::{Fields, Record};

/// What is expected of a line.
pub(super) const EXPECTED: &str = "one JSON object to the line";

/// The wanted fields, as the objects of a line nest.
#[derive(Debug, Default)]
pub(super) struct Json {
    root: Object,
}

#[derive(Debug, Default)]
struct Object(HashMap<Box<str>, Node, foldhash::fast::RandomState>);

#[derive(Debug, Default)]
struct Node {
    /// Where the value goes, each with how good a name this is.
    slots: Vec<(usize, usize)>,
    /// Wanted fields within it.
    within: Object,
}

impl Json {
    pub(super) fn new(fields: &Fields) -> Self {
        let mut json = Self::default();
        for (name, slot, rank) in fields.names() {
            let mut object = &mut json.root;
            let mut parts = name.split('.').peekable();
            while let Some(part) = parts.next() {
                let node = object.0.entry(part.into()).or_default();
                if parts.peek().is_none() {
                    node.slots.push((slot, rank));
                }
                object = &mut node.within;
            }
        }
        json
    }

    /// Reads what is wanted of a line into `record`. Whether it is an object.
    pub(super) fn read(&self, line: &[u8], record: &mut Record) -> bool {
        let mut reader = serde_json::Deserializer::from_slice(line);
        let root = Walk { slots: &[], within: &self.root, record };
        root.deserialize(&mut reader).is_ok_and(|kind| kind == Kind::Object) && reader.end().is_ok()
    }
}

/// What a value turned out to be.
#[derive(PartialEq, Eq)]
enum Kind {
    Object,
    Other,
}

/// Goes through one value, keeps it and what is wanted within it.
struct Walk<'a> {
    slots: &'a [(usize, usize)],
    within: &'a Object,
    record: &'a mut Record,
}

impl Walk<'_> {
    fn keep(self, value: &[u8]) -> Kind {
        for &(slot, rank) in self.slots {
            self.record.put(slot, rank, value);
        }
        Kind::Other
    }

    fn keep_shown(self, value: impl fmt::Display) -> Kind {
        let mut text = [0; 32];
        let mut rest = &mut text[..];
        let written = write!(rest, "{value}").map(|()| 32 - rest.len());
        match written {
            Ok(length) => self.keep(&text[..length]),
            Err(_) => Kind::Other,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = Kind;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Kind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = Kind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E>(self, value: &str) -> Result<Kind, E> {
        Ok(self.keep(value.as_bytes()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Kind, E> {
        Ok(self.keep(if value { b"true" } else { b"false" }))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Kind, E> {
        Ok(self.keep_shown(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Kind, E> {
        Ok(self.keep_shown(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Kind, E> {
        Ok(self.keep_shown(value))
    }

    fn visit_unit<E>(self) -> Result<Kind, E> {
        Ok(Kind::Other)
    }

    /// The first of several counts, as of headers.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Kind, A::Error> {
        seq.next_element_seed(self)?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Kind::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Kind, A::Error> {
        while let Some(node) = map.next_key_seed(Name(self.within))? {
            match node {
                Some(Node { slots, within }) => {
                    map.next_value_seed(Walk { slots, within, record: &mut *self.record })?;
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(Kind::Object)
    }
}

/// Finds what is wanted of a field by its name.
struct Name<'a>(&'a Object);

impl<'de, 'a> DeserializeSeed<'de> for Name<'a> {
    type Value = Option<&'a Node>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for Name<'a> {
    type Value = Option<&'a Node>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.0.0.get(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name_also_within_objects_and_lists() {
        let mut fields = Fields::new(None);
        let slots =
            ["ip", "path", "user_agent", "tenant", "tokens", "up"].map(|name| fields.label(name, None));
        let json = Json::new(&fields);
        let mut record = Record::new(&fields);
        let line = br#"{"ts":1794804868.5,"request":{"remote_ip":"203.0.113.9","uri":"/a\"b?x","headers":{"User-Agent":["curl","x"]},
            "tenant":"inner"},"list":[{"tenant":"x"}],"tenant":"acme","tokens":850,"up":true,"ip":null}"#;
        assert!(json.read(line, &mut record));
        let text = |slot: usize| record.get(slot).map(|value| String::from_utf8_lossy(value).into_owned());
        assert_eq!(
            slots.map(text).map(Option::unwrap_or_default),
            ["203.0.113.9", "/a\"b?x", "curl", "acme", "850", "true"]
        );
        assert_eq!(text(super::super::record::TIME).unwrap(), "1794804868.5");
    }

    #[test]
    fn the_better_name_wins_whatever_the_order() {
        let mut fields = Fields::new(None);
        let slot = fields.label("ip", None);
        let json = Json::new(&fields);
        for line in
            [r#"{"remote_ip":"b","ip":"a"}"#, r#"{"ip":"a","remote_ip":"b"}"#, r#"{"remote_ip":"a","ip":""}"#]
        {
            let mut record = Record::new(&fields);
            assert!(json.read(line.as_bytes(), &mut record));
            assert_eq!(record.get(slot), Some(&b"a"[..]), "{line}");
        }
    }

    #[test]
    fn what_is_no_object_is_not_read() {
        let fields = Fields::new(None);
        let json = Json::new(&fields);
        for line in ["", "[]", "1", "{", "{\"a\":1} x", "{\"a\" 1}", "{\"ts\":\"\u{1}\"}"] {
            assert!(!json.read(line.as_bytes(), &mut Record::new(&fields)), "{line}");
        }
    }
}
