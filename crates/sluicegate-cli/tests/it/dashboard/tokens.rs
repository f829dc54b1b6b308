//! Tokens and scopes.

use sluicegate_testkit::wait::{self, PATIENCE};

use super::{RULES, browser::Browser, load::Load};
use crate::server_process::{ANY_PORTS, ConfigDir};

#[tokio::test]
async fn the_page_requires_a_token_and_shows_what_its_scopes_allow() {
    let tokens = "[[server.token]]\nname = \"app\"\nfile = \"app\"\nmay = [\"check\"]\n\
                  [[server.token]]\nname = \"ops\"\nfile = \"ops\"\nmay = [\"check\", \"admin\"]\n\
                  [[server.token]]\nname = \"billing\"\nfile = \"billing\"\nmay = [\"adjust\"]\n";
    let home = ConfigDir::new("");
    for (name, secret) in
        [("app", "app-s3cret-token"), ("ops", "ops-s3cret-token"), ("billing", "bill-s3cret-token")]
    {
        home.write(name, secret);
    }
    home.write("sluicegate.toml", format!("{ANY_PORTS}{tokens}{RULES}"));
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
    browser.until("sluicegateCharts.decisions.picture.values[0].some((allowed) => allowed > 0)").await;
    browser.until_text("#rules", "Rules need a token with the scope admin").await;
    browser.until_text("#top", "Keys need a token with the scope admin").await;
    browser.fill("#labels", "route=login ip=203.0.113.50").await;
    browser.click("button[value=check]").await;
    browser.until_text("#verdict", "Allowed").await;

    // rules that do not apply are shown only with the scope admin
    browser.until_text("#reasons", "needs a token with the scope admin").await;
    let reasons = browser.eval("document.getElementById('reasons').textContent").await.to_string();
    assert!(reasons.contains("login-per-ip") && !reasons.contains("export-per-tenant"), "{reasons}");

    let sign_out = async || {
        browser.click("#sign-out").await;
        browser.until_text("#sign-in", "This server requires a token").await;
        browser.until("document.getElementById('sign-out').hidden").await;
        // nothing of the session remains visible
        browser.until("!document.body.innerHTML.includes('login-per-ip')").await;
        let remaining =
            browser.eval("document.body.innerHTML + document.getElementById('labels').value").await;
        for word in ["203.0.113.50", "user-0", "per-tenant", "Bearer", "Allowed", "denied,"] {
            assert!(!remaining.to_string().contains(word), "{word}: {remaining}");
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
    // a stream with rules and keys is audited once, not every second
    let audited = || program.log().matches("action=\"live\"").count();
    wait::until("three streams are audited", PATIENCE, || audited() == 3);

    // the scope is removed while the page is open
    home.write(
        "sluicegate.toml",
        format!("{ANY_PORTS}{}{RULES}", tokens.replacen("\"check\", \"admin\"", "\"check\"", 1)),
    );
    browser.until_text("#rules", "Rules need a token with the scope admin").await;
    home.write("ops", "another-s3cret-token");
    browser.until_text("#status", "not signed in").await;
    for error in browser.console_errors().await {
        assert!(error.contains("401") || error.contains("403"), "{error}");
    }
    let source = browser.eval("document.documentElement.outerHTML").await.to_string();
    assert!(!source.contains("s3cret"), "{source}");
}
