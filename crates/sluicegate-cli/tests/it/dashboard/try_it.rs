//! Requests from the page, and the explanation of their decisions.

use fantoccini::key::Key;

use super::{RULES, browser::Browser};
use crate::server_process::{ANY_PORTS, ConfigDir};

#[tokio::test]
async fn a_denial_is_explained_and_drawn() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser.until_text("#rules", "login-per-ip").await;
    browser.click("#rules [data-rule=login-per-ip] button").await;
    assert_eq!(browser.eval("document.getElementById('labels').value").await, "route=login ip=203.0.113.9");
    for left in (0..5).rev() {
        browser.click("button[value=check]").await;
        browser.until_text("#verdict", &format!("{left} of 5 remaining for login-per-ip")).await;
    }
    browser.click("button[value=check]").await;
    browser.until_text("#verdict", "Denied by login-per-ip").await;
    let verdict = browser.text("#verdict").await;
    assert!(verdict.contains("Retry in ") && verdict.contains(" s (at "), "{verdict}");
    browser.until_text("#reasons", "Next request: 5 used + 1 requested = 6 of 5: fits in").await;
    browser.until_text("#reasons", "login-per-ip:203.0.113.9").await;
    browser.until_text("#reasons", "4 rules do not apply").await;
    // the five allowed requests, and the time at which the next one fits
    browser.until("document.querySelectorAll('#reasons .timeline .charge').length === 5").await;
    browser.until("document.querySelector('#reasons .when-text').textContent.startsWith('fits in ')").await;
    browser.screenshot_page("denial", 1200).await;

    // by keyboard, and without charging
    browser.fill("#labels", "route=login ip=203.0.113.10").await;
    browser.click("button[value=peek]").await;
    browser.until_text("#verdict", "Would be allowed").await;
    browser.until_text("#verdict", "Nothing was charged; 5 of 5 remaining").await;
    browser.find("#labels").await.click().await.unwrap();
    browser.press(Key::Enter).await;
    browser.until_text("#verdict", "Allowed").await;

    browser.fill("#labels", "route=login ip=203.0.113.10 user=ann").await;
    browser.fill("#cost", "50").await;
    browser.click("button[value=explain]").await;
    browser.until_text("#verdict", "Would be denied by").await;
    browser.until_text("#verdict", "can never be allowed").await;
    browser.until_text("#reasons", "50 requested exceeds the capacity of 5").await;

    for (labels, cost, message) in [
        ("route", "1", "“route” is not a label: write name=value"),
        ("route=login", "many", "“many” is not a cost"),
        (r#"note="two words" ip=1.2.3.4"#, "requests=1,tokens=5", "No rule applies"),
    ] {
        browser.fill("#labels", labels).await;
        browser.fill("#cost", cost).await;
        browser.click("button[value=explain]").await;
        browser.until_text("#verdict", message).await;
    }
    browser.assert_no_console_errors().await;
}

#[tokio::test]
async fn every_algorithm_is_drawn() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser.until_text("#status", "live").await;
    // each cost uses more than half of the limit
    for (rule, labels, cost) in [
        ("api-per-user", "user=ann", "30"),
        ("search-per-tenant", "route=search tenant=acme", "150"),
        ("export-per-tenant", "route=export tenant=acme", "70"),
        ("login-per-ip", "route=login ip=203.0.113.9", "3"),
    ] {
        browser.fill("#labels", labels).await;
        browser.fill("#cost", cost).await;
        browser.click("button[value=check]").await;
        browser.until_text("#verdict", "Allowed").await;
        browser.click("button[value=peek]").await;
        browser.until_text("#verdict", &format!("Would be denied by {rule}")).await;
        browser.until("document.querySelectorAll('#reasons .timeline .requested.over').length === 1").await;
        let drawn =
            browser.eval("document.querySelector('#reasons .timeline').getAttribute('aria-label')").await;
        assert!(drawn.as_str().unwrap().contains("count now"), "{rule}: {drawn}");
        browser.eval("document.getElementById('try').scrollIntoView()").await;
        browser.screenshot(&format!("drawn-{rule}")).await;
    }
    browser.assert_no_console_errors().await;
}
