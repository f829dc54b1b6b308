//! Curves and pages.

use serde_json::Value;

use crate::{Desk, combined, rule, traffic};

fn rules(amount: u64, algorithm: &str, more: &str) -> String {
    format!(
        "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\nalgorithm = \"{algorithm}\"\namount = {amount}\nwindow = \"10s\"\n{more}"
    )
}

fn points(report: &Value) -> Vec<(u64, u64)> {
    let points = rule(&report["rules"], "per-ip")["curve"]["points"].as_array().unwrap();
    points
        .iter()
        .map(|point| (point["amount"].as_u64().unwrap(), point["refused"].as_u64().unwrap()))
        .collect()
}

#[test]
fn a_curve_has_what_simulating_each_amount_would_say() {
    let desk = Desk::new();
    desk.write("access.log", combined(&traffic(1, 3_000)));
    let burst = "burst = 6\n[[rule.override]]\nwhen = { ip = \"203.0.113.3\" }\namount = 5\n";
    let own = "[[rule.override]]\nwhen = { ip = \"203.0.113.3\" }\namount = 8\n";
    for (algorithm, more) in [
        ("fixed-window", ""),
        ("sliding-log", own),
        ("sliding-counter", "cost = 2\n"),
        ("token-bucket", ""),
        ("token-bucket", burst),
    ] {
        desk.write("rules.toml", rules(8, algorithm, more));
        let curve = points(&desk.json(&["--config", "rules.toml", "--log", "access.log", "--curve"]));
        assert!(curve.len() > 10, "{curve:?}");
        assert!(curve.iter().any(|(amount, _)| *amount == 8));
        for &(amount, refused) in curve.iter().step_by(3) {
            desk.write("one.toml", rules(amount, algorithm, more));
            let alone = desk.json(&["--config", "one.toml", "--log", "access.log"]);
            assert_eq!(alone["rules"]["refused"], refused, "{algorithm} {amount} {more}");
        }
    }
}

#[test]
fn a_curve_names_the_amounts_that_refuse_little_enough() {
    let desk = Desk::new();
    desk.write("access.log", combined(&traffic(2, 3_000))).write("rules.toml", rules(8, "sliding-log", ""));
    let report = desk.json(&["--config", "rules.toml", "--log", "access.log", "--curve=4,8,12,16,20,24"]);
    let curve = points(&report);
    let expected = |share: f64| {
        curve.iter().find(|(_, refused)| *refused as f64 / 3_000.0 <= share).map(|(amount, _)| *amount)
    };
    let targets = rule(&report["rules"], "per-ip")["curve"]["targets"].as_array().unwrap();
    let said: Vec<_> = targets.iter().map(|target| target["amount"].as_u64()).collect();
    assert_eq!(said, [0.001, 0.01, 0.05].map(expected));
    let text = desk.text(&["--config", "rules.toml", "--log", "access.log", "--curve=4,8,12,16,20,24"]);
    assert!(text.contains("refuses at most 5 %"), "{text}");
    assert!(text.contains("→           8"), "{text}");
}
