//! Curves and HTML reports.

use serde_json::Value;

use super::{TestDir, combined, rule, traffic};

fn rules(amount: u64, algorithm: &str, more: &str) -> String {
    format!(
        "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\nalgorithm = \"{algorithm}\"\namount = {amount}\nwindow = \"10s\"\n{more}"
    )
}

fn points(report: &Value) -> Vec<(u64, u64)> {
    let points = rule(&report["rules"], "per-ip")["curve"]["points"].as_array().unwrap();
    points
        .iter()
        .map(|point| (point["amount"].as_u64().unwrap(), point["denied"].as_u64().unwrap()))
        .collect()
}

#[test]
fn a_curve_equals_separate_simulations_of_each_amount() {
    let dir = TestDir::new();
    dir.write("access.log", combined(&traffic(1, 3_000)));
    let burst = "burst = 6\n[[rule.override]]\nwhen = { ip = \"203.0.113.3\" }\namount = 5\n";
    let own = "[[rule.override]]\nwhen = { ip = \"203.0.113.3\" }\namount = 8\n";
    for (algorithm, more) in [
        ("fixed-window", ""),
        ("sliding-log", own),
        ("sliding-counter", "cost = 2\n"),
        ("token-bucket", ""),
        ("token-bucket", burst),
    ] {
        dir.write("rules.toml", rules(8, algorithm, more));
        let curve = points(&dir.json(&["--config", "rules.toml", "--log", "access.log", "--curve"]));
        assert!(curve.len() > 10, "{curve:?}");
        assert!(curve.iter().any(|(amount, _)| *amount == 8));
        for &(amount, denied) in curve.iter().step_by(3) {
            dir.write("one.toml", rules(amount, algorithm, more));
            let alone = dir.json(&["--config", "one.toml", "--log", "access.log"]);
            assert_eq!(alone["rules"]["denied"], denied, "{algorithm} {amount} {more}");
        }
    }
}

#[test]
fn a_curve_names_the_smallest_amounts_that_meet_its_targets() {
    let dir = TestDir::new();
    dir.write("access.log", combined(&traffic(2, 3_000))).write("rules.toml", rules(8, "sliding-log", ""));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log", "--curve=4,8,12,16,20,24"]);
    let curve = points(&report);
    let expected = |share: f64| {
        curve.iter().find(|(_, denied)| *denied as f64 / 3_000.0 <= share).map(|(amount, _)| *amount)
    };
    let targets = rule(&report["rules"], "per-ip")["curve"]["targets"].as_array().unwrap();
    let amounts: Vec<_> = targets.iter().map(|target| target["amount"].as_u64()).collect();
    assert_eq!(amounts, [0.001, 0.01, 0.05].map(expected));
    let text = dir.text(&["--config", "rules.toml", "--log", "access.log", "--curve=4,8,12,16,20,24"]);
    assert!(text.contains("denies at most 5 %"), "{text}");
    assert!(text.contains("→           8"), "{text}");
}

#[test]
fn the_html_report_is_self_contained_and_has_the_numbers() {
    let dir = TestDir::new();
    dir.write("access.log", combined(&traffic(3, 2_000)) + "<script>alert(1)</script>\n");
    dir.write("new.toml", rules(5, "sliding-log", "")).write("old.toml", rules(8, "fixed-window", ""));
    let run = ["--config", "new.toml", "--against", "old.toml", "--log", "access.log", "--curve"];
    let report = dir.json(&[&run[..], &["--html", "report.html"]].concat());
    let page = std::fs::read_to_string(dir.path("report.html")).unwrap();

    for outside in ["http:", "https:", "src=", "href=", "@import", "url(", "<script", "<link"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.starts_with("<!doctype html>") && page.contains("prefers-color-scheme:dark"));
    assert!(page.contains("&lt;script&gt;"), "the line that could not be read is shown, as text");
    let difference = &report["difference"];
    for (number, what) in [
        (&report["requests"], "</b>requests"),
        (&report["rules"]["denied"], "</b>denied by <code>new.toml</code>"),
        (&report["against"]["denied"], "</b>denied by <code>old.toml</code>"),
        (&difference["newly_denied"], "</b>newly denied"),
        (&difference["no_longer_denied"], "</b>no longer denied"),
    ] {
        let number = number.as_u64().unwrap();
        let shown = if number < 1_000 {
            number.to_string()
        } else {
            format!("{},{:03}", number / 1_000, number % 1_000)
        };
        assert!(page.contains(&format!(">{shown}{what}")), "{shown}{what}");
    }
    let share = rule(&report["rules"], "per-ip")["denied_share"].as_f64().unwrap();
    assert!(page.contains(&format!("<title>5: {:.1} %</title>", share * 100.0)), "{share}");
    let opened = page.matches("<svg").count();
    assert!(opened >= 4 && opened == page.matches("</svg>").count(), "{opened}");
}
