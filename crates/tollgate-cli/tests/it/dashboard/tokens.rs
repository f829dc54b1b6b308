//! Who may see what.

use tollgate_testkit::wait::{self, PATIENCE};

use super::{RULES, browser::Browser, load::Load};
use crate::server_process::{ANY_PORTS, ConfigDir};

#[tokio::test]
async fn the_page_asks_for_a_token_and_shows_what_it_may() {
    let tokens = "[[server.token]]\nname = \"app\"\nfile = \"app\"\nmay = [\"check\"]\n\
                  [[server.token]]\nname = \"ops\"\nfile = \"ops\"\nmay = [\"check\", \"admin\"]\n\
                  [[server.token]]\nname = \"billing\"\nfile = \"billing\"\nmay = [\"adjust\"]\n";
    let home = ConfigDir::new("");
    for (name, secret) in
        [("app", "app-s3cret-token"), ("ops", "ops-s3cret-token"), ("billing", "bill-s3cret-token")]
    {
        home.write(name, secret);
    }
    home.write("tollgate.toml", format!("{ANY_PORTS}{tokens}{RULES}"));
    let program = home.start();
    let _load = Load::on(&program.http, Some("app-s3cret-token"));
    let browser = Browser::open(&program.http).await;
    browser.until_text("#sign-in", "This server requires a token").await;
    browser.until_text("#status", "not signed in").await;
    assert_eq!(browser.eval("document.activeElement.id").await, "token");
    browser.screenshot("sign-in").await;

    let sign_in = async |token: &str| {
        browser.fill("#token", token).await;
        browser.click("#sign-in-form button").await;
    };
    sign_in("wrong").await;
    browser.until_text("#sign-in-reason", "unknown token").await;
    sign_in("bill-s3cret-token").await;
    browser.until_text("#sign-in-reason", "lacks the scope \"check\"").await;
    sign_in("app-s3cret-token").await;
    browser.until_text("#status", "live").await;
    browser.until("document.getElementById('sign-in').hidden").await;
    browser.until("tollgateCharts.decisions.picture.values[0].some((allowed) => allowed > 0)").await;
    browser.until_text("#rules", "Rules need a token with the scope admin").await;
    browser.until_text("#top", "Keys need a token with the scope admin").await;
    browser.fill("#labels", "route=login ip=203.0.113.50").await;
    browser.click("button[value=check]").await;
    browser.until_text("#verdict", "Allowed").await;

    // which rules do not apply, and why, is for who may see rules
    browser.until_text("#reasons", "needs a token with the scope admin").await;
    let reasons = browser.eval("document.getElementById('reasons').textContent").await.to_string();
    assert!(reasons.contains("login-per-ip") && !reasons.contains("export-per-tenant"), "{reasons}");

    let sign_out = async || {
        browser.click("#sign-out").await;
        browser.until_text("#sign-in", "This server requires a token").await;
        browser.until("document.getElementById('sign-out').hidden").await;
        // whoever comes next sees nothing of what was seen and tried here
        browser.until("!document.body.innerHTML.includes('login-per-ip')").await;
        let left = browser.eval("document.body.innerHTML + document.getElementById('labels').value").await;
        for word in ["203.0.113.50", "user-0", "per-tenant", "Bearer", "Allowed", "denied,"] {
            assert!(!left.to_string().contains(word), "{word}: {left}");
        }
    };
    sign_out().await;
    sign_in("ops-s3cret-token").await;
    browser.until_text("#rules", "login-per-ip").await;
    browser.until_text("#top", "user=user-0").await;
    browser.until("document.getElementById('curl').textContent.includes('Bearer')").await;
    browser.fill("#labels", "route=login ip=203.0.113.50").await;
    browser.click("button[value=explain]").await;
    browser.until("document.getElementById('reasons').textContent.includes('export-per-tenant')").await;
    sign_out().await;
    sign_in("ops-s3cret-token").await;
    browser.until_text("#rules", "login-per-ip").await;
    browser.reload().await;
    browser.until_text("#rules", "login-per-ip").await;
    // a look at rules and keys is written down, once and not every second
    let looks = || program.log().matches("action=\"live\"").count();
    wait::until("all three looks are in the log", PATIENCE, || looks() == 3);

    // it is taken back while the page listens
    home.write(
        "tollgate.toml",
        format!("{ANY_PORTS}{}{RULES}", tokens.replacen("\"check\", \"admin\"", "\"check\"", 1)),
    );
    browser.until_text("#rules", "Rules need a token with the scope admin").await;
    home.write("ops", "another-s3cret-token");
    browser.until_text("#status", "not signed in").await;
    for complaint in browser.complaints().await {
        assert!(complaint.contains("401") || complaint.contains("403"), "{complaint}");
    }
    let source = browser.eval("document.documentElement.outerHTML").await.to_string();
    assert!(!source.contains("s3cret"), "{source}");
}
