//! The dashboard in a real browser, on a real server under load.
//!
//! * `live_updates`: charts, rules and keys under load; a store outage; a restart of the server
//! * `try_it`: requests from the page, and the explanation of a denial
//! * `holds`: holds from the page
//! * `appearance`: themes, narrow screens, keyboard use
//! * `tokens`: permissions
//! * `screenshots`: images of the documentation
//! * `browser`, `load`: the browser, and background load
//!
//! Screenshots are written to `target/tmp/dashboard`, or to `SLUICEGATE_SCREENSHOTS`.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod appearance;
mod browser;
mod holds;
mod live_updates;
mod load;
mod screenshots;
mod tokens;
mod try_it;

/// Rules of every algorithm.
const RULES: &str = r#"
[labels]
api_key = { secret = true }

[defaults]
on_store_failure = "local"

[[rule]]
name = "login-per-ip"
when = { route = "login" }
per = ["ip"]
algorithm = "sliding-log"
amount = 5
window = "1m"
on_store_failure = "closed"

[[rule]]
name = "api-per-user"
per = ["user"]
amount = 20
window = "1s"
burst = 40

[[rule]]
name = "search-per-tenant"
when = { route = "search" }
per = ["tenant"]
algorithm = "sliding-counter"
amount = 200
window = "30s"

[[rule]]
name = "export-per-tenant"
when = { route = "export" }
per = ["tenant"]
algorithm = "fixed-window"
amount = 100
window = "5m"

[[rule]]
name = "per-key"
when = { api_key = "*" }
per = ["api_key"]
algorithm = "sliding-counter"
amount = 100
window = "10s"
shadow = true
"#;
