//! A real browser: Debian's Chromium, driven through its chromedriver.

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
use tempfile::TempDir;
use tollgate_testkit::wait::{self, PATIENCE};

/// How Chromium runs without a screen, and in a container.
const ARGUMENTS: [&str; 5] =
    ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"];

/// Where screenshots go, unless `TOLLGATE_SCREENSHOTS` says otherwise.
const SCREENSHOTS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/dashboard");

/// A window that shows one page. It ends with the test.
pub(crate) struct Browser {
    page: Client,
    _driver: Driver,
}

struct Driver {
    process: Child,
    home: TempDir,
}

/// What only Chromium's driver knows: its log, and its debugging protocol.
#[derive(Debug)]
struct Vendor {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for Vendor {
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
        // everything that it writes goes with the test; and so does everything that it starts
        command.env("HOME", home.path()).env("TMPDIR", home.path()).process_group(0);
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut process = process.expect("chromedriver is missing: run scripts/servers");
        let said = BufReader::new(process.stdout.take().unwrap());
        let driver = Self { process, home };
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                if let Some(port) = line.strip_prefix("ChromeDriver was started successfully on port ") {
                    let _ = tell.send(port.trim_end_matches('.').parse().unwrap());
                }
            }
        });
        let port = told.recv_timeout(PATIENCE).expect("chromedriver says where it listens");
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
    /// Opens a page in a window of a usual size.
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
        let page = page.expect("Chromium starts: is it installed by scripts/servers?");
        let browser = Self { page, _driver: driver };
        browser.resize(1200, 900).await;
        browser.page.goto(&format!("http://{address}/")).await.unwrap();
        browser
    }

    async fn debug(&self, command: &str, parameters: Value) -> Value {
        self.vendor("goog/cdp/execute", json!({"cmd": command, "params": parameters})).await
    }

    async fn vendor(&self, path: &'static str, body: Value) -> Value {
        self.page.issue_cmd(Vendor { path, body }).await.unwrap()
    }

    /// Makes the window so large, in CSS pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.debug("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Has the system prefer this colour scheme.
    pub(crate) async fn prefer(&self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.debug("Emulation.setEmulatedMedia", features).await;
    }

    /// The value of an expression of JavaScript.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        self.page.execute(&format!("return {expression};"), Vec::new()).await.unwrap()
    }

    /// Waits until an expression is true.
    pub(crate) async fn until(&self, expression: &str) {
        wait::until_async(expression, PATIENCE, async || self.eval(expression).await == Value::Bool(true))
            .await;
    }

    /// The text of the first element that a selector finds.
    pub(crate) async fn text(&self, selector: &str) -> String {
        self.find(selector).await.text().await.unwrap()
    }

    /// Waits until an element's text has this part.
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

    /// Puts a text into a field, in the place of what is there.
    pub(crate) async fn fill(&self, selector: &str, text: &str) {
        let field = self.find(selector).await;
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    /// Presses a key where the focus is.
    pub(crate) async fn press(&self, key: Key) {
        let focused = self.page.active_element().await.unwrap();
        focused.send_keys(&char::from(key).to_string()).await.unwrap();
    }

    pub(crate) async fn reload(&self) {
        self.page.refresh().await.unwrap();
    }

    /// What the browser has complained about since this was last asked.
    pub(crate) async fn complaints(&self) -> Vec<String> {
        let log = self.vendor("se/log", json!({"type": "browser"})).await;
        let entries = log.as_array().unwrap().iter();
        let bad = entries.filter(|entry| entry["level"] != "INFO" && entry["level"] != "DEBUG");
        let said = bad.map(|entry| entry["message"].as_str().unwrap().to_owned());
        // that tests look at pixels is not the page's fault
        said.filter(|message| !message.contains("getImageData")).collect()
    }

    /// Fails if the browser has complained about anything.
    pub(crate) async fn assert_no_complaints(&self) {
        assert_eq!(self.complaints().await, Vec::<String>::new());
    }

    /// Keeps a picture of what the window shows, or of the whole page.
    pub(crate) async fn screenshot(&self, name: &str) {
        let directory = std::env::var_os("TOLLGATE_SCREENSHOTS").map_or(SCREENSHOTS.into(), PathBuf::from);
        std::fs::create_dir_all(&directory).unwrap();
        let picture = self.page.screenshot().await.unwrap();
        std::fs::write(directory.join(format!("{name}.png")), picture).unwrap();
    }

    /// Keeps a picture of the whole page.
    pub(crate) async fn screenshot_whole(&self, name: &str, width: u32) {
        let height = self.eval("document.documentElement.scrollHeight").await.as_u64().unwrap();
        self.resize(width, u32::try_from(height).unwrap()).await;
        // what depends on the size is drawn with the next frame
        self.page
            .execute_async("requestAnimationFrame(() => setTimeout(arguments[0], 100))", Vec::new())
            .await
            .unwrap();
        self.screenshot(name).await;
    }
}
