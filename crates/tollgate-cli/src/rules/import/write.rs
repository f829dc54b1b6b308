//! Rules as TOML, with what is not the same beside them.

use std::path::PathBuf;

use tollgate_server::labels::IP;
use toml_writer::{ToTomlKey, ToTomlValue};

use super::tree::{DOMAIN, Imported, Rule};

/// What stands above all rules.
const ABOUT: &str = "\
# Requests come here by gRPC, as Envoy sends them; see docs/envoy.md. Unlike there, a request that is refused is not counted.
";

/// A configuration of these rules.
pub(super) fn toml(files: &[PathBuf], imported: &Imported) -> String {
    let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    let mut toml = comment(&format!("Made by tollgate rules import envoy {}", names.join(" ")));
    toml.push_str(ABOUT);
    if !imported.lost.is_empty() {
        toml.push_str("#\n# Not the same as there:\n");
        for lost in &imported.lost {
            toml.push_str(&comment(lost));
        }
    }
    if imported.labels().contains(IP) {
        toml.push_str("\n# compared as it is written, as there; without this it would be an address\n");
        toml.push_str(&format!("[labels]\n{IP} = {{ kind = \"text\" }}\n"));
    }
    for rule in &imported.rules {
        toml.push('\n');
        toml.push_str(&one(rule));
    }
    toml
}

fn one(rule: &Rule) -> String {
    let mut lines: Vec<String> =
        rule.remarks.iter().map(|remark| comment(remark).trim_end().to_owned()).collect();
    lines.push("[[rule]]".to_owned());
    let mut set = |key: &str, value: String| lines.push(format!("{key} = {value}"));
    let domain = (DOMAIN.to_owned(), vec![rule.domain.clone()]);
    let when = rule.when.iter().map(|(label, pattern)| (label.clone(), vec![pattern.clone()]));
    set("name", rule.name.to_toml_value());
    set("when", conditions(std::iter::once(domain.clone()).chain(when)));
    if !rule.unless.is_empty() {
        set("unless", conditions(rule.unless.iter().cloned()));
    }
    if !rule.per.is_empty() {
        set("per", list(&rule.per));
    }
    set("exact", "true".to_owned());
    set("algorithm", "\"fixed-window\"".to_owned());
    set("amount", rule.amount.to_string());
    set("window", rule.window.to_toml_value());
    if rule.is_shadow {
        set("shadow", "true".to_owned());
    }
    if rule.is_blocked {
        lines.push("# requests_per_unit is 0: nothing passes".to_owned());
        lines.push(format!(
            "override = [{{ when = {}, blocked = true }}]",
            conditions(std::iter::once(domain))
        ));
    }
    lines.join("\n") + "\n"
}

fn conditions(pairs: impl Iterator<Item = (String, Vec<String>)>) -> String {
    let pair = |(label, patterns): (String, Vec<String>)| {
        let patterns = match &*patterns {
            [one] => one.to_toml_value(),
            several => list(several),
        };
        format!("{} = {patterns}", label.to_toml_key())
    };
    format!("{{ {} }}", pairs.map(pair).collect::<Vec<_>>().join(", "))
}

fn list(texts: &[String]) -> String {
    let texts: Vec<_> = texts.iter().map(ToTomlValue::to_toml_value).collect();
    format!("[{}]", texts.join(", "))
}

/// One line that is no setting, whatever is in the text.
fn comment(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("# {text}\n")
}
