//! Keeps private vocabulary and unidiomatic phrases out of documentation, messages, comments and names.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use regex::{Regex, RegexBuilder};

/// A phrase that does not belong in the repository.
struct Phrase {
    /// Matched case-insensitively against the text of a file. Underscores count as spaces, so that names are matched too.
    pattern: &'static str,
    /// Ignores matches on lines that also match this.
    unless: &'static str,
    advice: &'static str,
}

const fn phrase(pattern: &'static str, advice: &'static str) -> Phrase {
    Phrase { pattern, unless: "", advice }
}

const PHRASES: &[Phrase] = &[
    // people where a program is meant
    phrase(
        r"\b(whoever|whomever|somebody|someone|nobody|no one|anybody|anyone|everybody|everyone)\b",
        "name the subject: the caller, the client, the server, the operator",
    ),
    phrase(
        r"\bwho (asks?|waits?|comes?|sends?|calls?|reads?|writes?|gets?|wants?|knows?|leaves?|is|are|has|does)\b",
        "name the subject: the caller that waits, the client that sends",
    ),
    phrase(r"\b(told|tells)\b", "code reports, returns, logs or notifies"),
    phrase(r"\b(says|said)\b", "code reports, states or returns; a file contains; a setting specifies"),
    phrase(r"\bknows\b", "code has, stores, caches or is configured with"),
    phrase(r"\b(hears|heard|listens to)\b", "code receives or detects"),
    phrase(
        r"\b(is|are|was|were|be|been) asked\b|\basks (the|a|an|it|each|every|about)\b",
        "code calls, queries or requests",
    ),
    phrase(r"\bbeliev(e|es|ed|ing)\b", "a header, proxy or clock is trusted"),
    phrase(r"\b(comes?|came|coming) back\b", "a server recovers; a client retries or reconnects"),
    phrase(r"\b(in trouble|stands? still|stood still)\b", "fails, is unavailable, is paused"),
    // phrases that an English reader has to read twice
    phrase(r"\b(left|leaves?|leaving) (\w+ )?alone\b", "is ignored, is unchanged, is not called"),
    phrase(r"\b(do|does|did|doing|done) without\b", "does not need, does not use"),
    phrase(r"\b(makes?|made|making) room\b", "evicts, frees memory, reserves space"),
    phrase(r"\bby TLS\b", "over TLS, with TLS"),
    Phrase {
        pattern: r"\bof (its|their) own\b",
        unless: r"own (authority|counters|window)",
        advice: "its own ..., a separate ..., a dedicated ...",
    },
    phrase(r"\bwhat is more\b", "also, in addition"),
    phrase(r"\breckon(s|ed|ing)?\b", "calculates, counts"),
    phrase(r"\bmend(s|ed|ing)?\b", "fixes, repairs"),
    phrase(r"\bin the meantime\b", "until then, concurrently, while ..."),
    phrase(r"\bat work\b", "running, busy, active"),
    phrase(r"\bhalf within\b|\b99 of 100 within\b", "p50, p99"),
    phrase(r"\ball free in\b", "resets in"),
    phrase(r"\b(in force|is taken over|are taken over)\b", "active, applied"),
    phrase(r"\b(seen from|for certain|for good)\b", "state the fact plainly"),
    phrase(r"\b(from which on|again and again)\b", "minimum, after which, repeatedly"),
    phrase(r"\ba helper of a test\b", "a test helper"),
    // the vocabulary before the redesign
    phrase(
        r"\b(desk|guests?|voices?|gatehouse|unhurried|lively)\b",
        "engine, connection, activity, forward-auth, server",
    ),
    Phrase {
        pattern: r"\bcrowds?\b",
        unless: r"crowd::|mod crowd",
        advice: "many callers, connection limit",
    },
    phrase(r"\brefusals?\b", "a decision is a denial; invalid input is rejected; a store call fails"),
    Phrase {
        pattern: r"\brefus(e|es|ed|ing)\b",
        unless: r"connect|Mode::Refuse|Refuse,|socket",
        advice: "a decision is denied; invalid input is rejected; only connections are refused",
    },
    phrase(r"\b(give|gives|gave|given|giving) back\b", "refund, release, return"),
    // claims that age
    phrase(
        r"\bonly (rate )?limiter (that|with|which|to)\b|\bno other (rate )?limiter\b|\bno other (product|tool)\b",
        "state what this product does; others change",
    ),
    phrase(
        r"\b(seamless(ly)?|blazing(ly)?|battle-tested|world-class)\b",
        "state the measurement or the test",
    ),
];

/// Phrases that are needed: a path, the text around the phrase, and the reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("crates/sluicegate/src/label_policy.rs", "\"somebody\"", "a value that is not an address"),
    ("crates/sluicegate/src/lib.rs", "Rule::new(\"everybody\"", "the name of a rule"),
    (
        "crates/sluicegate-cli/src/doctor/connectivity.rs",
        "refused to switch database",
        "an error of the Redis client",
    ),
];

/// Texts by others, history, recorded data, and this list.
const SKIPPED: &[&str] = &[
    "CHANGELOG.md",
    "LICENSE",
    "Cargo.lock",
    "bench/Cargo.lock",
    "bench/src/report/outage/before.json",
    "crates/sluicegate-server/proto/envoy",
    "crates/sluicegate-server/src/dashboard/assets/vendor",
    "crates/sluicegate-server/src/grpc/generated",
    "crates/sluicegate-testkit/tests/it/wording.rs",
];

/// The text of a file as one line, so that phrases match across line breaks.
struct Text {
    joined: String,
    /// Offset in `joined` at which each line starts.
    starts: Vec<usize>,
}

impl Text {
    fn new(content: &str) -> Self {
        let (mut joined, mut starts) = (String::with_capacity(content.len()), Vec::new());
        for line in content.lines() {
            starts.push(joined.len());
            let markers = |c: char| c.is_whitespace() || matches!(c, '/' | '!' | '#' | '-' | '*' | '>');
            joined.push_str(&line.trim_start_matches(markers).replace('_', " "));
            joined.push(' ');
        }
        Self { joined, starts }
    }

    /// Index of the line with this offset.
    fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|start| *start <= offset) - 1
    }
}

/// The phrases with their patterns compiled.
struct Checker(Vec<(Regex, Option<Regex>, &'static str)>);

impl Checker {
    fn new() -> Self {
        let regex = |pattern| {
            RegexBuilder::new(pattern).case_insensitive(true).build().expect("the pattern is valid")
        };
        let compiled = PHRASES.iter().map(|phrase| {
            let unless = (!phrase.unless.is_empty()).then(|| regex(phrase.unless));
            (regex(phrase.pattern), unless, phrase.advice)
        });
        Self(compiled.collect())
    }

    /// Returns one line for each phrase found in a file: the place, the phrase and the advice.
    fn findings(&self, path: &str, content: &str) -> String {
        let (text, lines): (_, Vec<&str>) = (Text::new(content), content.lines().collect());
        let mut findings = String::new();
        for (pattern, unless, advice) in &self.0 {
            for found in pattern.find_iter(&text.joined) {
                let index = text.line(found.start());
                let line = lines[index];
                let is_exception =
                    EXCEPTIONS.iter().any(|(file, around, _)| path == *file && line.contains(around));
                if !is_exception && !unless.as_ref().is_some_and(|unless| unless.is_match(line)) {
                    _ = writeln!(findings, "{path}:{}: {:?}: {advice}", index + 1, found.as_str());
                }
            }
        }
        findings
    }
}

#[test]
fn texts_use_plain_words() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = Command::new("git").arg("ls-files").current_dir(&root).output().expect("git lists the files");
    let files = String::from_utf8(files.stdout).expect("paths are UTF-8");
    assert!(files.lines().count() > 100, "the repository has files");
    let read = files.lines().filter(|path| !SKIPPED.iter().any(|skipped| path.starts_with(skipped)));
    // images and compressed logs are not UTF-8
    let texts = read.filter_map(|path| Some((path, fs::read_to_string(root.join(path)).ok()?)));
    let checker = Checker::new();
    let findings: String = texts.map(|(path, content)| checker.findings(path, &content)).collect();
    assert!(findings.is_empty(), "{} phrases to replace:\n{findings}", findings.lines().count());
}

#[test]
fn phrases_are_found_in_comments_names_and_across_lines() {
    let content = "/// The caller is\n/// told.\nfn nobody_waits() {}\nlet text = \"Connection refused\";\n";
    let expected = "a.rs:3: \"nobody\": name the subject: the caller, the client, the server, the operator\n\
                    a.rs:2: \"told\": code reports, returns, logs or notifies\n";
    let checker = Checker::new();
    assert_eq!(checker.findings("a.rs", content), expected);
    assert_eq!(checker.findings("a.rs", "// left\n// alone").lines().count(), 1);
}

#[test]
fn every_exception_is_still_needed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (path, around, reason) in EXCEPTIONS {
        let content = fs::read_to_string(root.join(path)).unwrap_or_default();
        assert!(
            content.contains(around),
            "{path} no longer contains {around:?} ({reason}): remove the exception"
        );
    }
}
