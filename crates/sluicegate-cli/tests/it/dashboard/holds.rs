//! The dashboard makes and releases holds, and shows the live holds of a counter and the chart of holds.

use super::browser::Browser;
use crate::server_process::{ANY_PORTS, ConfigDir};

/// Two requests in flight, and tokens per hour.
const BUDGET: &str = r#"
[[rule]]
name = "in-flight"
when = { route = "chat" }
per = ["tenant"]
algorithm = "concurrency"
amount = 2
ttl = "5m"
hold = "request_id"

[[rule]]
name = "tokens"
when = { route = "chat" }
per = ["tenant"]
algorithm = "fixed-window"
amount = 1000
window = "1h"
unit = "tokens"
max_excess = 50
"#;

#[tokio::test]
async fn a_request_is_held_and_released() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{BUDGET}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser
        .until_text("#rules", "2 in flight, holds expire after 5m, hold id in request_id, per tenant")
        .await;
    browser.until_text("#rules", "1000 tokens per 1h, at most 50 above the estimate, per tenant").await;
    browser.fill("#labels", "route=chat tenant=acme").await;
    browser.fill("#cost", "requests=1,tokens=400").await;
    browser.click("button[value=check]").await;
    browser.until_text("#verdict", "\"in-flight\" counts requests in flight: use hold").await;
    for left in [1, 0] {
        browser.click("button[value=hold]").await;
        browser.until_text("#verdict", &format!("{left} of 2 remaining for in-flight")).await;
        browser.until_text("#verdict", "Held until").await;
    }
    browser.until_text("#reasons", "2 live holds of 2 units, the oldest made").await;
    browser.until_text("#reasons", "2 live holds of 800 units, the oldest made").await;
    browser.until_text("#reasons", "2 used + 1 requested = 3 of 2: fits in").await;
    browser.until("document.querySelectorAll('#reasons .timeline').length === 2").await;
    browser.eval("document.getElementById('try').scrollIntoView()").await;
    browser.screenshot_page("holds", 1200).await;

    browser.click("#verdict button").await;
    browser.until_text("#verdict", "Hold: released").await;
    browser.until_text("#reasons", "1 live hold of 1 unit, the oldest made").await;
    browser.click("button[value=hold]").await;
    browser.until_text("#verdict", "Held until").await;
    browser.click("button[value=hold]").await;
    browser.until_text("#verdict", "Denied by").await;

    browser.eval("document.getElementById('view').value = 'holds'").await;
    browser.eval("document.getElementById('view').dispatchEvent(new Event('change'))").await;
    browser.until_text("#decisions-legend", "settled or released").await;
    browser.until("window.sluicegateCharts.decisions.plot.data[1].some((held) => held > 0)").await;
    browser.eval("document.getElementById('decisions').scrollIntoView()").await;
    browser.screenshot("holds-chart").await;
    // that of the check
    let errors = browser.console_errors().await;
    assert!(errors.len() == 1 && errors[0].contains("/v1/check"), "{errors:?}");
}
