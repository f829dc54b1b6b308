//! Generates `docs/rules.md` from the JSON Schema of the configuration, whose descriptions are the doc comments in
//! `sluicegate-server/src/config/schema.rs`. After a change there:
//!
//! ```sh
//! SLUICEGATE_GENERATE=1 cargo test -p sluicegate-cli --test it documentation::reference
//! ```

use std::{fmt::Write, fs};

use serde_json::{Map, Value};
use sluicegate_server::config::{self, Colour, Environment, Flags, Source};

use super::markdown::root;

const PAGE: &str = "docs/rules.md";

/// The introduction of the page.
const INTRODUCTION: &str = "\
# Reference: every key of `sluicegate.toml`

<!-- generated from the schema by `SLUICEGATE_GENERATE=1 cargo test -p sluicegate-cli --test it documentation::reference`; do not edit -->

This page lists every key. [Configuration](configuration.md) explains how the file is found, how values are written and how they work
together. `sluicegate rules schema` prints the JSON Schema for editors.
";

/// The tables of the file: heading, name of the struct in the schema, and additional text.
const TABLES: [(&str, &str, &str); 8] = [
    (
        "`[[rule]]`",
        "Rule",
        "All rules that match a request apply together: it is charged to all of them or to none. At most 10,000 rules.\n\n\
         ```toml\n[[rule]]\nname = \"login-per-ip\"\nwhen = { route = \"login\" }\nunless = { plan = \"internal\" }\n\
         per = [\"ip\"]\nalgorithm = \"sliding-log\"\namount = 10\nwindow = \"1m\"\non_store_failure = \"closed\"\n```\n",
    ),
    (
        "`[[rule.override]]`",
        "Override",
        "Different limits for matching requests, with the same counter. Write an override below its rule.\n\n\
         ```toml\n[defaults]\non_store_failure = \"local\"\n\n[[rule]]\nname = \"per-tenant\"\nper = [\"tenant\"]\namount = 100\nwindow = \"1m\"\n\n\
         [[rule.override]]\nwhen = { tenant = \"acme\" }\namount = 1000\n\n\
         [[rule.override]]\nwhen = { tenant = [\"trial-*\", \"test\"] }\namount = 10\n```\n",
    ),
    (
        "`[defaults]`",
        "",
        "Default values for all rules. Every key of a rule except `name`.\n\n\
         ```toml\n[defaults]\nwindow = \"1m\"\non_store_failure = \"local\"\n```\n",
    ),
    (
        "`[labels]`",
        "Label",
        "How labels are normalized, on every front end. Labels that are not listed are not changed, except `ip`, `remote_address` and\n\
         `masked_remote_address`, which are addresses.\n\n\
         ```toml\n[labels]\nip = { kind = \"ip\", ipv6_prefix = 56 }\napi_key = { header = \"x-api-key\", secret = true }\n```\n",
    ),
    ("`[server]`", "Server", ""),
    ("`[server.tls]`", "Tls", ""),
    ("`[[server.token]]`", "Token", ""),
    ("`[store]`", "Store", ""),
];

/// The keys to list first; the others follow in alphabetical order.
const FIRST: [&str; 17] = [
    "name",
    "when",
    "unless",
    "per",
    "algorithm",
    "amount",
    "window",
    "zone",
    "anchor",
    "burst",
    "unit",
    "cost",
    "http",
    "grpc",
    "resp",
    "url",
    "deadline",
];

#[test]
fn the_reference_page_matches_the_schema() {
    let page = page();
    if std::env::var_os("SLUICEGATE_GENERATE").is_some() {
        fs::write(root().join(PAGE), &page).unwrap();
    }
    let written = fs::read_to_string(root().join(PAGE)).unwrap();
    assert!(
        written == page,
        "{PAGE} does not match the schema: run SLUICEGATE_GENERATE=1 cargo test -p sluicegate-cli --test it documentation::reference"
    );
}

fn page() -> String {
    let schema = config::schema();
    let mut page = INTRODUCTION.to_owned();
    for (heading, definition, text) in TABLES {
        write!(page, "\n## {heading}\n\n").unwrap();
        if let Some(definition) = schema["$defs"].get(definition) {
            if text.is_empty() {
                writeln!(page, "{}.\n", description(definition)).unwrap();
            } else {
                writeln!(page, "{text}").unwrap();
            }
            page += &table(definition);
        } else {
            assert!(definition.is_empty(), "the schema has no {definition}");
            page += text;
        }
    }
    let documented = TABLES.iter().filter(|(_, definition, _)| !definition.is_empty()).count();
    let defined = schema["$defs"].as_object().unwrap().len();
    assert_eq!(defined, documented + 1, "a struct is not documented: {:?}", schema["$defs"]);
    page
}

fn table(definition: &Value) -> String {
    let required: Vec<_> = definition["required"].as_array().into_iter().flatten().collect();
    let is_required = |key: &str| required.iter().any(|required| required.as_str() == Some(key));
    let properties: &Map<String, Value> = definition["properties"].as_object().unwrap();
    let mut keys: Vec<_> = properties.iter().collect();
    keys.sort_by_key(|(key, _)| FIRST.iter().position(|first| first == key).unwrap_or(FIRST.len()));
    let mut table = "| key | type | default | description |\n|---|---|---|---|\n".to_owned();
    for (key, property) in keys {
        let default = match property.get("default") {
            _ if is_required(key) => "required".to_owned(),
            Some(default) => format!("`{default}`"),
            None => String::new(),
        };
        writeln!(table, "| `{key}` | {} | {default} | {} |", kind(property), description(property)).unwrap();
    }
    table
}

#[test]
fn documented_defaults_are_the_actual_defaults() {
    let schema = config::schema();
    let written = |definition: &str| -> String {
        let properties = schema["$defs"][definition]["properties"].as_object().unwrap();
        let default =
            |(key, property): (&String, &Value)| Some(format!("{key} = {}\n", property.get("default")?));
        properties.iter().filter_map(default).collect()
    };
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("sluicegate.toml");
    let load = |server: &str, store: &str, rule: &str| {
        let rules = format!("[[rule]]\nname = \"r\"\namount = 5\nwindow = \"1m\"\n{rule}");
        fs::write(&path, format!("[server]\n{server}[store]\n{store}{rules}")).unwrap();
        let flags = Flags { config: Some(path.clone()), ..Flags::default() };
        let source = Source { flags, environment: Environment::of([]), directory: home.path().to_owned() };
        config::load(&source).unwrap_or_else(|error| panic!("{}", error.render(Colour::Never)))
    };
    let explicit = load(&written("Server"), &written("Store"), &written("Rule"));
    let implicit = load("", "", "");
    assert_eq!(
        (explicit.server, explicit.store, explicit.rules),
        (implicit.server, implicit.store, implicit.rules)
    );
}

fn description(schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_else(|| panic!("no description in {schema}"));
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The type of a value.
fn kind(property: &Value) -> String {
    if let Some(words) = property["enum"].as_array() {
        let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    if property.get("$ref").is_some() || property["additionalProperties"].is_object() {
        return "table".to_owned();
    }
    match (property["title"].as_str(), property["type"].as_str()) {
        (Some(title), _) => title.to_owned(),
        (None, Some("array")) if property["items"].get("$ref").is_some() => "tables".to_owned(),
        (None, Some("array")) => match kind(&property["items"]) {
            words if words.contains('`') => format!("list of {words}"),
            noun => format!("list of {noun}s"),
        },
        (None, Some("boolean")) => "`true`, `false`".to_owned(),
        (None, Some("integer")) => {
            let most = property["maximum"].as_u64().map_or("2^64 - 1".to_owned(), grouped);
            format!("{} to {most}", property["minimum"].as_u64().unwrap_or(0))
        }
        (None, Some("string")) => "string".to_owned(),
        other => panic!("unknown type {other:?} of {property}"),
    }
}

/// A number with commas.
fn grouped(number: u64) -> String {
    if number == (1 << 53) - 1 {
        return "2^53 - 1".to_owned();
    }
    let digits = number.to_string();
    let groups: Vec<_> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}
