//! Compares the output of a command with the page.
//!
//! `...` or `…` matches anything; on a separate line, any lines. Numbers of four digits and more, fractions and times
//! match any number or time, because they differ from run to run. Two spaces and `#` begin a remark.

use std::sync::LazyLock;

use regex::Regex;

static VOLATILE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?x) (?<any> \.\.\. | … ) | (?<time> \d{4}-\d\d-\d\d [T\x20] \d\d:\d\d(:\d\d)?(\.\d+)?Z? ) | (?<number> \d[\d,]*\.\d+ | \d[\d,]{3,} ) | (?<gap> \x20{2,} )")
        .unwrap()
});

static REMARK: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\s\s+#\s.*$").unwrap());

/// Returns a description of the difference, if any.
pub(crate) fn difference(shown: &str, actual: &str) -> Option<String> {
    let actual: String = actual.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    let pattern: String = shown.lines().map(pattern_of_line).collect();
    let pattern = Regex::new(&format!("^{pattern}$")).unwrap();
    (!pattern.is_match(actual.trim_end_matches('\n')) && !pattern.is_match(&actual))
        .then(|| format!("the page shows\n{shown}\nbut the output is\n{actual}"))
}

fn pattern_of_line(line: &str) -> String {
    let line = REMARK.replace(line, "");
    let line = line.trim_end();
    if matches!(line, "..." | "…") {
        return r"(?:.*\n)*?".to_owned();
    }
    let mut pattern = String::new();
    let mut end = 0;
    for found in VOLATILE.captures_iter(line) {
        let all = found.get(0).unwrap();
        pattern.push_str(&regex::escape(&line[end..all.start()]));
        end = all.end();
        pattern.push_str(if found.name("any").is_some() {
            ".*"
        } else if found.name("time").is_some() {
            r"[\d:.T\x20Z-]+"
        } else if found.name("gap").is_some() {
            r"\x20+"
        } else {
            r"\d[\d,.]*"
        });
    }
    pattern + &regex::escape(&line[end..]) + r"\n"
}

#[test]
fn a_page_may_omit_only_volatile_output() {
    let fits = [
        ("a\n", "a\n"),
        ("a\n...\nd\n", "a\nb\nc\nd\n"),
        ("a\n...\nd\n", "a\nd\n"),
        ("{\"wait\":59873,...}\n", "{\"wait\":999,\"x\":1}\n"),
        ("1) (integer) 0        # allowed\n", "1) (integer) 0\n"),
        ("at 2026-11-15T12:00:00.000000Z, 1,234 in 0.5 s\n", "at 2027-01-01T00:00:00Z, 77 in 12.25 s\n"),
    ];
    for (shown, actual) in fits {
        assert_eq!(difference(shown, actual), None);
    }
    let differ =
        [("a\n", "b\n"), ("a\n", "a\nb\n"), ("5 of 10\n", "6 of 10\n"), ("a\n...\n", "b\na\n"), ("a\n", "")];
    for (shown, actual) in differ {
        assert!(difference(shown, actual).is_some(), "{shown} {actual}");
    }
}
