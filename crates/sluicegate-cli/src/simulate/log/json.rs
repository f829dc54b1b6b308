//! JSON lines: one object per line. `request.uri` is the field `uri` of the object `request`.

use std::{collections::HashMap, fmt, io::Write};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::record::{Fields, Record};

/// The expected form of a line, for messages.
pub(super) const EXPECTED: &str = "one JSON object per line";

/// The requested fields, as a tree of nested objects.
#[derive(Debug, Default)]
pub(super) struct Json {
    root: Object,
}

#[derive(Debug, Default)]
struct Object(HashMap<Box<str>, Node, foldhash::fast::RandomState>);

#[derive(Debug, Default)]
struct Node {
    /// The slots of the value and the rank of its name.
    slots: Vec<(usize, usize)>,
    /// Requested fields of the value.
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

    /// Reads the requested fields of a line into `record`. Returns whether it is an object.
    pub(super) fn read(&self, line: &[u8], record: &mut Record) -> bool {
        let mut reader = serde_json::Deserializer::from_slice(line);
        let root = Walk { slots: &[], within: &self.root, record };
        root.deserialize(&mut reader).is_ok_and(|kind| kind == Kind::Object) && reader.end().is_ok()
    }
}

/// The kind of a value.
#[derive(PartialEq, Eq)]
enum Kind {
    Object,
    Other,
}

/// Visits one value, stores it and its requested fields.
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

    fn keep_formatted(self, value: impl fmt::Display) -> Kind {
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
        Ok(self.keep_formatted(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Kind, E> {
        Ok(self.keep_formatted(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Kind, E> {
        Ok(self.keep_formatted(value))
    }

    fn visit_unit<E>(self) -> Result<Kind, E> {
        Ok(Kind::Other)
    }

    /// Only the first element is used, as for headers.
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

/// Looks up a field by its name.
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
    fn nested_fields_and_first_array_elements_are_found() {
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
    fn the_name_with_the_best_rank_wins_in_any_order() {
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
    fn lines_that_are_not_objects_are_not_read() {
        let fields = Fields::new(None);
        let json = Json::new(&fields);
        for line in ["", "[]", "1", "{", "{\"a\":1} x", "{\"a\" 1}", "{\"ts\":\"\u{1}\"}"] {
            assert!(!json.read(line.as_bytes(), &mut Record::new(&fields)), "{line}");
        }
    }
}
