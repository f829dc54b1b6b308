//! The screenshots of the documentation: `scripts/screenshots` takes them after minutes, the test after seconds.

use std::time::Duration;

use sluicegate_testkit::{
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};

use super::{RULES, browser::Browser, load::Load};
use crate::server_process::{ANY_PORTS, ConfigDir};

/// The default time span of the charts in seconds; `SLUICEGATE_PICTURE_SECONDS` overrides it.
const SECONDS: u64 = 5;
/// The length of the store outage: this fraction of the time span.
const OUTAGE_FRACTION: u64 = 16;

#[tokio::test]
async fn screenshots_of_the_documentation() {
    let seconds = std::env::var("SLUICEGATE_PICTURE_SECONDS").map_or(SECONDS, |text| text.parse().unwrap());
    let redis = Server::start(Flavor::Redis7);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"200ms\"\n{RULES}",
        redis.url()
    ));
    let program = home.start();
    let _load = Load::on(&program.http, None);
    let browser = Browser::open(&program.http).await;
    browser.prefer("light").await;
    let points = async || {
        browser.eval("window.sluicegateCharts?.decisions.plot?.data[0].length ?? 0").await.as_u64().unwrap()
    };
    let until = async |wanted: u64| {
        let bound = Duration::from_secs(wanted) + PATIENCE;
        wait::until_async(format_args!("{wanted} seconds are drawn"), bound, async || {
            points().await >= wanted
        })
        .await;
    };
    until(seconds / 2).await;
    if seconds / OUTAGE_FRACTION > 0 {
        redis.suspend();
        until(seconds / 2 + seconds / OUTAGE_FRACTION).await;
        redis.resume();
    }
    // allowed requests at different times and a denied one, all within the window of the rule
    until(seconds - seconds / 10).await;
    browser.fill("#labels", "route=login ip=203.0.113.77").await;
    for (cost, left) in [("2", 3), ("1", 2), ("2", 0)] {
        browser.fill("#cost", cost).await;
        browser.click("button[value=check]").await;
        browser.until_text("#verdict", &format!("{left} of 5 remaining")).await;
        until(points().await + seconds / 30).await;
    }
    browser.fill("#cost", "1").await;
    browser.click("button[value=peek]").await;
    browser.until_text("#verdict", "Would be denied by login-per-ip").await;
    browser.eval("document.activeElement.blur()").await;
    for (name, theme) in [("dashboard", "light"), ("dashboard-dark", "dark")] {
        browser.prefer(theme).await;
        browser.until_text("#theme", if theme == "dark" { "Light" } else { "Dark" }).await;
        browser.resize(1200, 1330).await;
        browser.screenshot(name).await;
    }
    browser.assert_no_console_errors().await;
}
