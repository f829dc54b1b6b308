//! Themes, narrow screens and keyboard use.

use std::collections::BTreeSet;

use fantoccini::key::Key;

use super::{RULES, browser::Browser, load::Load};
use crate::server_process::{ANY_PORTS, ConfigDir};

/// The widths of a phone, a tablet and a screen.
const WIDTHS: [u32; 4] = [360, 414, 768, 1400];

const BACKGROUND: &str = "getComputedStyle(document.body).backgroundColor";
const DARK: &str = "rgb(16, 21, 28)";
const LIGHT: &str = "rgb(245, 246, 248)";

#[tokio::test]
async fn the_theme_follows_the_system_or_the_users_choice() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let _load = Load::on(&program.http, None);
    let browser = Browser::open(&program.http).await;
    browser.prefer("light").await;
    browser.until(&format!("{BACKGROUND} === '{LIGHT}'")).await;
    browser.prefer("dark").await;
    browser.until(&format!("{BACKGROUND} === '{DARK}'")).await;
    browser.until_text("#theme", "Light").await;
    // the charts use the colours of the theme
    let axis = "sluicegateCharts.decisions.plot.axes[0].stroke()";
    let soft = "getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()";
    browser.until(&format!("{axis} === {soft}")).await;
    browser.until("sluicegateCharts.decisions.picture.values[0].some((allowed) => allowed > 0)").await;
    browser.until_text("#top", "user=").await;
    browser.fill("#labels", "route=login ip=203.0.113.1").await;
    browser.click("button[value=check]").await;
    browser.until("document.querySelectorAll('.timeline').length > 0").await;
    browser.screenshot_page("dark", 1200).await;

    browser.click("#theme").await;
    browser.until(&format!("{BACKGROUND} === '{LIGHT}'")).await;
    browser.reload().await;
    browser.until(&format!("{BACKGROUND} === '{LIGHT}'")).await;
    browser.assert_no_console_errors().await;
}

#[tokio::test]
async fn no_element_is_wider_than_the_screen() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let _load = Load::on(&program.http, None);
    let browser = Browser::open(&program.http).await;
    browser.until_text("#top", "user=").await;
    browser
        .fill("#labels", "route=search user=a-user-with-a-rather-long-name-that-has-no-spaces tenant=acme")
        .await;
    browser.click("button[value=check]").await;
    browser.until("document.querySelectorAll('.timeline').length === 2").await;
    for width in WIDTHS {
        browser.resize(width, 800).await;
        browser.until(&format!("innerWidth === {width}")).await;
        browser.until(&format!("document.documentElement.scrollWidth <= {width}")).await;
        let wide = format!(
            "[...document.querySelectorAll('main *')].filter((node) => node.getBoundingClientRect().right > {width} + 0.5 \
             && !node.closest('.hidden')).map((node) => node.id || node.className || node.tagName).join()"
        );
        browser.until(&format!("{wide} === ''")).await;
        browser.screenshot_page(&format!("width-{width}"), width).await;
    }
    browser.assert_no_console_errors().await;
}

#[tokio::test]
async fn every_control_is_reachable_by_tab_and_shows_its_focus() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let program = home.start();
    let browser = Browser::open(&program.http).await;
    browser.until_text("#rules", "per-key").await;
    let mut reached = BTreeSet::new();
    let mut first = None;
    for _ in 0..60 {
        browser.press(Key::Tab).await;
        let focused = browser
            .eval(
                "(() => {
                    const node = document.activeElement;
                    const shown = node.matches('.segments input') ? node.nextElementSibling : node;
                    const { outlineStyle, outlineWidth } = getComputedStyle(shown);
                    const name = node.getAttribute('aria-label') || node.innerText || node.labels?.[0]?.innerText || '';
                    return [node.id || node.value || node.getAttribute('href') || node.tagName, outlineStyle !== 'none' && parseFloat(outlineWidth) >= 1, name.trim()];
                })()",
            )
            .await;
        let name = focused[0].as_str().unwrap().to_owned();
        if name == "BODY" {
            continue;
        }
        assert_eq!(focused[1], true, "{name} does not show its focus");
        assert_ne!(focused[2], "", "{name} has no accessible name");
        if first.as_ref() == Some(&name) {
            break;
        }
        first.get_or_insert(name.clone());
        reached.insert(name);
    }
    for wanted in
        ["#try", "theme", "view", "300", "labels", "cost", "check", "peek", "explain", "heaviest", "/metrics"]
    {
        assert!(reached.contains(wanted), "{wanted} is not among {reached:?}");
    }
    // arrow keys change a choice
    browser
        .find("#range input[value='300']")
        .await
        .send_keys(&char::from(Key::Right).to_string())
        .await
        .unwrap();
    browser.until("sluicegateCharts.range === 900").await;
    browser.assert_no_console_errors().await;
}
