//! Live updates of charts, rules and keys.

use sluicegate_testkit::server::{Flavor, Server};

use super::{RULES, browser::Browser, load::Load};
use crate::server_process::{ANY_PORTS, ConfigDir, ServerProcess};

/// The number of points in the chart of decisions.
const POINTS: &str = "sluicegateCharts.decisions.plot.data[0].length";
/// More sliding logs than fit into the smallest memory store.
const KEYS_OF_A_FULL_STORE: u32 = 8_000;
/// A checksum of the pixels of the chart of decisions.
const PIXELS: &str = "(() => {
    const canvas = document.querySelector('#decisions canvas');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0;
    for (let at = 0; at < data.length; at += 4) sum = (sum * 31 + data[at] * 7 + data[at + 1] * 5 + data[at + 2]) % 1000003;
    return sum;
})()";

#[tokio::test]
async fn charts_move_under_load_and_rules_and_keys_are_shown() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser.until_text("#status", "live").await;
    browser.until("!document.getElementById('decisions-empty').hidden").await;
    let curl = browser.text("#curl").await;
    assert!(curl.starts_with(&format!("curl http://{}/v1/check -d '{{\"labels\":", program.http)), "{curl}");

    let load = Load::on(&program.http, None);
    browser.until("document.getElementById('decisions-empty').hidden").await;
    let (points, pixels) = (browser.eval(POINTS).await.as_u64().unwrap(), browser.eval(PIXELS).await);
    browser.until(&format!("{POINTS} >= {}", points + 3)).await;
    assert_ne!(browser.eval(PIXELS).await, pixels);
    // stacked: the first line is the sum of all, and some requests were denied
    browser.until("sluicegateCharts.decisions.plot.data[1].at(-1) > 10").await;
    browser.until("sluicegateCharts.decisions.picture.values[2].some((denied) => denied > 0)").await;
    browser.until("parseFloat(document.getElementById('rate').innerText) > 10").await;
    browser.until_text("#latency", "memory").await;
    browser.until_text("#state", "Healthy").await;

    for rule in ["login-per-ip", "api-per-user", "search-per-tenant", "export-per-tenant", "per-key"] {
        browser.until_text("#rules", rule).await;
    }
    browser.until_text("#rules", "5 per 1m, per ip · when route=login").await;
    browser.until_text("#rules [data-rule=login-per-ip] .now", "denied").await;
    browser.until_text("#top", "user=user-0").await;
    browser.click("#top-by label:nth-of-type(2)").await;
    browser.until_text("#top", "ip=203.0.113.").await;
    browser.screenshot_page("watch", 1200).await;

    for (view, legend) in
        [("rules", "api-per-user"), ("denials", "login-per-ip"), ("rule:per-key", "would deny")]
    {
        browser.click(&format!("#view option[value='{view}']")).await;
        browser.until_text("#decisions-legend", legend).await;
    }
    browser.click("#view option[value=rules]").await;
    browser.until("sluicegateCharts.decisions.plot.series.length >= 6").await;
    browser.screenshot("by-rule").await;
    for range in [900, 3600] {
        browser.click(&format!("#range input[value='{range}'] + span")).await;
        let shown =
            "sluicegateCharts.decisions.plot.scales.x.max - sluicegateCharts.decisions.plot.scales.x.min";
        browser.until(&format!("Math.round({shown}) === {range}")).await;
    }
    drop(load);

    // a reloaded page shows the history
    browser.reload().await;
    browser.until(&format!("window.sluicegateCharts?.decisions.plot && {POINTS} > {points}")).await;
    browser.assert_no_console_errors().await;
    // secret labels are masked
    let shown = browser.text("body").await;
    assert!(shown.contains("api_key=") && !shown.contains("s3cret-key"), "{shown}");
}

#[tokio::test]
async fn a_store_outage_is_a_band_on_the_charts() {
    let redis = Server::start(Flavor::Redis7);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"100ms\"\n{RULES}",
        redis.url()
    ));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    let _load = Load::on(&program.http, None);
    browser.until("sluicegateCharts.store.picture.values[0].some((ms) => ms > 0)").await;
    browser.until("parseFloat(document.getElementById('latency').innerText) > 0").await;
    browser.until_text("#state", "Healthy").await;

    redis.suspend();
    browser.until_text("#state", "Degraded").await;
    browser.until("sluicegateCharts.decisions.picture.bands.length > 0").await;
    browser
        .until("sluicegateCharts.decisions.picture.bands.at(-1).reduce((from, until) => until - from) > 3")
        .await;
    browser.until_text("#decisions-legend", "decided without the store").await;
    // the mark at the upper edge has the colour of the band
    let marked = "(() => {
        const { plot, picture } = sluicegateCharts.decisions;
        const [from, until] = picture.bands.at(-1);
        const x = Math.round(plot.valToPos((from + until) / 2, 'x', true));
        const [red, green, blue] = plot.ctx.getImageData(x, Math.round(plot.bbox.top) + 1, 1, 1).data;
        return red > 200 && green > 120 && blue < 120;
    })()";
    browser.until(marked).await;
    browser.fill("#labels", "route=login ip=203.0.113.200").await;
    browser.click("button[value=peek]").await;
    browser.until_text("#verdict", "without the store").await;
    browser.screenshot_page("outage", 1200).await;

    redis.resume();
    browser.until_text("#state", "Healthy").await;
    browser.until_text("#state-note", "after a degraded period").await;
    browser.assert_no_console_errors().await;
}

#[tokio::test]
async fn a_full_memory_store_is_shown_and_logged() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}[store]\nmax_memory = \"1MiB\"\n{RULES}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser.until_text("#state", "Healthy").await;
    browser.until_text("#latency-note", "% of 0.9 MiB used").await;

    let mut client = program.client();
    for key in 0..KEYS_OF_A_FULL_STORE {
        let body =
            format!(r#"{{"key":"{key}","limit":{{"algorithm":"sliding-log","amount":1,"window":"1h"}}}}"#);
        assert_eq!(client.call("POST /v1/check", &[], &body).unwrap().status, 200);
    }
    browser.until_text("#state", "Memory full").await;
    browser.until_text("#state-note", "raise store.max_memory").await;
    browser.until("parseFloat(document.getElementById('latency-note').innerText) > 95").await;
    browser.assert_no_console_errors().await;
    assert_eq!(program.log().matches("memory store full").count(), 1, "{}", program.log());
}

#[tokio::test]
async fn the_page_reconnects_after_a_server_restart() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let mut program = home.start();
    let address = program.http.clone();
    let browser = Browser::open(&address).await;
    let load = Load::on(&address, None);
    browser.until(&format!("window.sluicegateCharts?.decisions.plot && {POINTS} >= 3")).await;
    browser.assert_no_console_errors().await;

    // the open stream of the page does not delay the shutdown
    program.signal("-TERM");
    browser.until_text("#status", "reconnecting").await;
    browser.until_text("#state", "Unknown").await;
    assert!(program.wait_for_exit().success());
    drop(program);
    let before = browser.eval(POINTS).await.as_u64().unwrap();

    let mut command = home.serve();
    let _program = ServerProcess::start(command.args(["--http", &address]));
    browser.until_text("#status", "live").await;
    browser.until_text("#state", "Healthy").await;
    // the chart keeps its history and continues
    browser.until(&format!("{POINTS} > {before}")).await;
    browser.until("sluicegateCharts.decisions.picture.values[0].at(-1) > 0").await;
    drop(load);
    // only network errors are expected
    for error in browser.console_errors().await {
        let network = [
            "ERR_CONNECTION_REFUSED",
            "ERR_CONNECTION_RESET",
            "503",
            "ERR_INCOMPLETE_CHUNKED_ENCODING",
            "ERR_EMPTY_RESPONSE",
        ];
        assert!(network.iter().any(|kind| error.contains(kind)), "{error}");
    }
}
