//! Runs or reads each block of a page, in order and in one session, so that later blocks can use the results of earlier ones.

use std::{fs, path::Path};

use serde_json::Value;
use sluicegate_server::config::{self, Colour, Environment, Flags, Source};
use sluicegate_testkit::tls::Certificates;

use super::{
    markdown::{Block, Mark, Page, below, root},
    output,
    session::Session,
};

/// Languages of blocks that are not checked: no commands, or commands of other programs.
const UNCHECKED: &[&str] = &[
    "text",
    "csv",
    "yaml",
    "http",
    "lua",
    "go",
    "nginx",
    "caddyfile",
    "dockerfile",
    "ini",
    "diff",
    "mermaid",
];

/// The file that a server reads by default.
const CONFIGURATION: &str = "sluicegate.toml";

/// Checks each block of the page according to its language.
pub(crate) fn check(path: &str) {
    let page = Page::read(path);
    let mut session = None;
    for block in page.blocks() {
        let place = page.place(&block);
        if let Mark::File(name) = &block.mark {
            let session = session.get_or_insert_with(Session::start);
            let before = (name == CONFIGURATION).then(|| session.reloads()).flatten();
            session.write(name, &block.text);
            if let Some(before) = before {
                session.await_reload(&before);
            }
        }
        let is_run = block.mark == Mark::None;
        let words: Vec<_> = block.language.split(',').collect();
        match words[0] {
            "sh" | "console" | "python" | "js" | "json" if is_run => {
                run(session.get_or_insert_with(Session::start), &block, &place);
            }
            "sh" | "console" | "python" | "js" => {}
            "json" => drop(json(&block, &place)),
            "toml" => read_configuration(&block, &place),
            "rust" => assert_is_compiled(&page, &words, &place),
            other if UNCHECKED.contains(&other) => {}
            "" => panic!("{place}: write a language after the fence; text, if there is none"),
            other => panic!("{place}: unknown language `{other}`: add it to {}", file!()),
        }
    }
}

fn run(session: &mut Session, block: &Block, place: &str) {
    prepare(session, &block.text);
    let (before, reloads) = (fs::read(session.work().join(CONFIGURATION)).ok(), session.reloads());
    match &*block.language {
        "sh" => run_successfully(session, &block.text, place),
        "console" => run_console(session, block, place),
        "python" => {
            session.write("block.py", &block.text);
            run_successfully(session, "python3 block.py", place);
        }
        "js" => {
            // an open connection would keep the process running
            session.write("block.mjs", &format!("{}\nprocess.exit(0);\n", block.text));
            run_successfully(session, "node block.mjs", place);
        }
        _ => send_request(session, &json(block, place), place),
    }
    // a reader is slower than a background process or a reload
    session.await_background(&block.text);
    if let Some(reloads) = reloads
        && before != fs::read(session.work().join(CONFIGURATION)).ok()
    {
        session.await_reload(&reloads);
    }
}

/// Starts the Redis or the server that these commands require.
fn prepare(session: &mut Session, text: &str) {
    let mentions = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if mentions(&["redis://127.0.0.1:6379", "redis://127.0.0.1/", "redis-cli", "6379"]) {
        session.need_redis();
    }
    let starts_server = mentions(&["sluicegate serve", "-- serve"]);
    let needs_server = mentions(&[":8080", ":8081", "6380"])
        || ["check", "peek", "charge", "refund", "reset", "explain"].iter().any(|command| {
            let lines = text.lines().filter(|line| line.contains(&format!("sluicegate {command} ")));
            lines.into_iter().any(|line| !line.contains("--store") && !line.contains("--config"))
        });
    if needs_server && !starts_server {
        session.need_server();
    }
}

fn run_successfully(session: &mut Session, script: &str, place: &str) {
    let ran = session.run(script);
    if let Some(failed) = ran.failed {
        panic!("{place}: command failed: {failed}\n{}", ran.output);
    }
    assert_eq!(ran.status, 0, "{place}: {}", ran.output);
}

/// Runs each command that follows a `$` and compares its output with the lines below. A command with output may fail,
/// because a denial has an exit code too.
fn run_console(session: &mut Session, block: &Block, place: &str) {
    let mut steps: Vec<(String, String)> = Vec::new();
    for line in block.text.lines() {
        let is_continued =
            steps.last().is_some_and(|(command, shown)| shown.is_empty() && command.ends_with("\\\n"));
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push((format!("{command}\n"), String::new()));
            continue;
        }
        let (command, shown) =
            steps.last_mut().unwrap_or_else(|| panic!("{place}: the first line does not begin with `$ `"));
        if is_continued || (shown.is_empty() && line.starts_with("> ")) {
            *command += &format!("{}\n", line.strip_prefix("> ").unwrap_or(line));
        } else {
            *shown += &format!("{line}\n");
        }
    }
    for (command, shown) in steps {
        let ran = session.run(&command);
        if shown.is_empty() {
            assert_eq!(ran.status, 0, "{place}: {command}{}", ran.output);
        } else if let Some(difference) = output::difference(&shown, &ran.output) {
            panic!("{place}: $ {command}{difference}");
        }
    }
}

fn json(block: &Block, place: &str) -> Value {
    serde_json::from_str(&block.text).unwrap_or_else(|error| panic!("{place}: {error}"))
}

/// Sends the JSON to the server, if it is a request.
fn send_request(session: &mut Session, value: &Value, place: &str) {
    let has = |field: &str| value.get(field).is_some();
    if !(has("labels") || has("checks") || (has("key") && has("limit"))) {
        return;
    }
    let call = if has("rules") || has("at_us") {
        "refund"
    } else if has("id") {
        "hold"
    } else {
        "check"
    };
    session.need_server();
    session.write("body.json", &value.to_string());
    run_successfully(
        session,
        &format!("curl -sS --fail-with-body 127.0.0.1:8080/v1/{call} -d @body.json"),
        place,
    );
}

/// Reads a configuration as the server does; the files that it refers to are generated.
fn read_configuration(block: &Block, place: &str) {
    let table: toml::Table = block.text.parse().unwrap_or_else(|error| panic!("{place}: {error}"));
    let belongs_to_cargo = ["dependencies", "package", "book"].iter().any(|key| table.contains_key(*key));
    if belongs_to_cargo {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let certificates = Certificates::issue(home.path(), [127, 0, 0, 1].into());
    generate_files(&toml::Value::Table(table), home.path(), &certificates);
    let path = home.path().join("sluicegate.toml");
    fs::write(&path, &block.text).unwrap();
    let flags = Flags { config: Some(path), ..Flags::default() };
    let environment = Environment::of([("TOKEN", "a-secret"), ("APP_TOKEN", "another-secret")]);
    let source = Source { flags, environment, directory: home.path().to_owned() };
    if let Err(error) = config::load(&source) {
        panic!("{place}: {}", error.render(Colour::Never));
    }
    assert_sets_failure_policies(source, place);
}

/// Asserts that no rule fails open without setting `on_store_failure`, if the configuration is used with a remote store.
pub(super) fn assert_sets_failure_policies(mut source: Source, place: &str) {
    source.flags.store = Some("redis://127.0.0.1".to_owned());
    let config = config::load(&source).unwrap_or_else(|error| panic!("{place}: {error}"));
    assert_eq!(config.policy_warning, None, "{place}");
}

/// Generates the files that a configuration refers to.
fn generate_files(value: &toml::Value, home: &Path, certificates: &Certificates) {
    let copy = |from: &Path, name: &str| write_below(home, name, &fs::read_to_string(from).unwrap());
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                match (&**key, value.as_str()) {
                    ("cert", Some(name)) => copy(&certificates.server_certificate, name),
                    ("key", Some(name)) => copy(&certificates.server_key, name),
                    ("ca" | "client_ca", Some(name)) => copy(&certificates.authority, name),
                    ("overrides_file", Some(name)) => write_below(home, name, "tenant,amount\nacme,5\n"),
                    (key, Some(name)) if key == "file" || key.ends_with("_file") => {
                        write_below(home, name, "generated-and-long-enough-for-a-key\n");
                    }
                    _ => generate_files(value, home, certificates),
                }
            }
        }
        toml::Value::Array(array) => array.iter().for_each(|value| generate_files(value, home, certificates)),
        _ => {}
    }
}

fn write_below(home: &Path, name: &str, text: &str) {
    let path = home.join(name);
    assert!(path.starts_with(home), "{name} is an absolute path: use a relative one");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Asserts that a crate includes the page: `cargo test --doc` compiles and runs its Rust.
fn assert_is_compiled(page: &Page, words: &[&str], place: &str) {
    assert!(!words.contains(&"ignore"), "{place}: make it compile; use no_run if it cannot run");
    let included = format!("{}\")]", page.path.display());
    let is_included = below("crates", "rs").iter().any(|source| {
        let text = fs::read_to_string(root().join(source)).unwrap();
        text.lines().any(|line| line.contains("include_str!") && line.ends_with(&included))
    });
    assert!(is_included, "{place}: no crate includes this page as documentation, under cfg(doctest)");
}
