//! Chromium, controlled through chromedriver.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use fantoccini::{
    Client, ClientBuilder, Locator, elements::Element, key::Key, wd::WebDriverCompatibleCommand,
};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use sluicegate_testkit::wait::{self, PATIENCE};
use tempfile::TempDir;

/// Options for running without a screen and in a container.
const ARGUMENTS: [&str; 5] =
    ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"];

/// The default directory of screenshots; `SLUICEGATE_SCREENSHOTS` overrides it.
const SCREENSHOTS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/dashboard");

/// A browser window with one page. It is closed at the end of the test.
pub(crate) struct Browser {
    page: Client,
    _driver: Driver,
}

struct Driver {
    process: Child,
    home: TempDir,
}

/// A command that only chromedriver supports: its log and its debugging protocol.
#[derive(Debug)]
struct VendorCommand {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for VendorCommand {
    fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.path))
    }

    fn method_and_body(&self, _: &url::Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(self.body.to_string()))
    }
}

impl Driver {
    fn start() -> (Self, u16) {
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new("chromedriver");
        command.args(["--port=0", "--allowed-ips=127.0.0.1"]);
        // its files and its child processes are removed with the test
        command.env("HOME", home.path()).env("TMPDIR", home.path()).process_group(0);
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut process = process.expect("chromedriver is missing: run scripts/servers");
        let output = BufReader::new(process.stdout.take().unwrap());
        let driver = Self { process, home };
        let (sender, port) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(port) = line.strip_prefix("ChromeDriver was started successfully on port ") {
                    let _ = sender.send(port.trim_end_matches('.').parse().unwrap());
                }
            }
        });
        let port = port.recv_timeout(PATIENCE).expect("chromedriver should print its port");
        (driver, port)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.process.wait();
    }
}

impl Browser {
    /// Opens the dashboard of this server.
    pub(crate) async fn open(address: &str) -> Self {
        let (driver, port) = Driver::start();
        let profile = format!("--user-data-dir={}", driver.home.path().join("profile").display());
        let mut arguments: Vec<&str> = ARGUMENTS.to_vec();
        arguments.push(&profile);
        let capabilities = json!({
            "goog:chromeOptions": {"args": arguments, "binary": "/usr/bin/chromium"},
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let mut builder = ClientBuilder::new(HttpConnector::new());
        builder.capabilities(capabilities.as_object().unwrap().clone());
        let page = builder.connect(&format!("http://127.0.0.1:{port}")).await;
        let page = page.expect("Chromium does not start: run scripts/servers");
        let browser = Self { page, _driver: driver };
        browser.resize(1200, 900).await;
        browser.page.goto(&format!("http://{address}/")).await.unwrap();
        browser
    }

    async fn debug(&self, command: &str, parameters: Value) -> Value {
        self.vendor("goog/cdp/execute", json!({"cmd": command, "params": parameters})).await
    }

    async fn vendor(&self, path: &'static str, body: Value) -> Value {
        self.page.issue_cmd(VendorCommand { path, body }).await.unwrap()
    }

    /// Sets the size of the window, in CSS pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.debug("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Sets the colour scheme that the system prefers.
    pub(crate) async fn prefer(&self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.debug("Emulation.setEmulatedMedia", features).await;
    }

    /// Evaluates a JavaScript expression.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        self.page.execute(&format!("return {expression};"), Vec::new()).await.unwrap()
    }

    /// Waits until an expression is true.
    pub(crate) async fn until(&self, expression: &str) {
        wait::until_async(expression, PATIENCE, async || self.eval(expression).await == Value::Bool(true))
            .await;
    }

    /// Returns the text of the first element that matches a selector.
    pub(crate) async fn text(&self, selector: &str) -> String {
        self.find(selector).await.text().await.unwrap()
    }

    /// Waits until the text of an element contains this part.
    pub(crate) async fn until_text(&self, selector: &str, part: &str) {
        let has = format!("document.querySelector({}).innerText.includes({})", json!(selector), json!(part));
        self.until(&has).await;
    }

    pub(crate) async fn find(&self, selector: &str) -> Element {
        let found = self.page.find(Locator::Css(selector)).await;
        found.unwrap_or_else(|error| panic!("{selector}: {error}"))
    }

    pub(crate) async fn click(&self, selector: &str) {
        self.find(selector).await.click().await.unwrap();
    }

    /// Replaces the text of a field.
    pub(crate) async fn fill(&self, selector: &str, text: &str) {
        let field = self.find(selector).await;
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    /// Presses a key in the focused element.
    pub(crate) async fn press(&self, key: Key) {
        let focused = self.page.active_element().await.unwrap();
        focused.send_keys(&char::from(key).to_string()).await.unwrap();
    }

    pub(crate) async fn reload(&self) {
        self.page.refresh().await.unwrap();
    }

    /// Returns the warnings and errors of the console since the last call.
    pub(crate) async fn console_errors(&self) -> Vec<String> {
        let log = self.vendor("se/log", json!({"type": "browser"})).await;
        let entries = log.as_array().unwrap().iter();
        let bad = entries.filter(|entry| entry["level"] != "INFO" && entry["level"] != "DEBUG");
        let messages = bad.map(|entry| entry["message"].as_str().unwrap().to_owned());
        // caused by tests that read pixels
        messages.filter(|message| !message.contains("getImageData")).collect()
    }

    /// Asserts that the console has no warnings or errors.
    pub(crate) async fn assert_no_console_errors(&self) {
        assert_eq!(self.console_errors().await, Vec::<String>::new());
    }

    /// Saves a screenshot of the window.
    pub(crate) async fn screenshot(&self, name: &str) {
        let directory = std::env::var_os("SLUICEGATE_SCREENSHOTS").map_or(SCREENSHOTS.into(), PathBuf::from);
        std::fs::create_dir_all(&directory).unwrap();
        let image = self.page.screenshot().await.unwrap();
        std::fs::write(directory.join(format!("{name}.png")), image).unwrap();
    }

    /// Saves a screenshot of the whole page.
    pub(crate) async fn screenshot_page(&self, name: &str, width: u32) {
        let height = self.eval("document.documentElement.scrollHeight").await.as_u64().unwrap();
        self.resize(width, u32::try_from(height).unwrap()).await;
        // size-dependent elements are drawn in the next frame
        self.page
            .execute_async("requestAnimationFrame(() => setTimeout(arguments[0], 100))", Vec::new())
            .await
            .unwrap();
        self.screenshot(name).await;
    }
}
