//! Redis-backed contestants: one private server, callers in closed loops.
//!
//! Each scenario fills a table and defines its contestants, figures and targets.

pub mod batch;
pub mod bounds;
mod compare;
mod crowd;
mod exact;
pub mod hand;
pub mod keys;
#[cfg(feature = "limitador-redis")]
mod limitador;
mod log;
mod ours;
mod peer;
pub mod run;
mod scenarios;

use anyhow::Result;

use self::keys::Keys;
pub use self::{crowd::most_callers, peer::versions as peer_versions};
use crate::{args::Args, progress::Progress, server::Server, stats::Table};

/// Number of callers, unless the scenario varies it.
const CALLERS: usize = 64;
/// Keys of the users.
const USERS: Keys = Keys::Random(100_000);

/// Contestants' names.
pub const HAND: &str = "hand-written";
pub const OURS: &str = "sluicegate";

/// All tables, in order.
pub const TABLES: [&str; 10] = [
    scenarios::RANDOM_KEYS,
    scenarios::HOT_ALLOWED,
    scenarios::HOT_DENIED,
    scenarios::TWO_TIERS,
    scenarios::IDLE,
    crowd::NAME,
    exact::NAME,
    log::GROWING,
    log::CHURN,
    batch::NAME,
];

/// Fills the selected tables.
pub async fn tables(args: &Args, server: &Server, progress: &Progress) -> Result<Vec<Table>> {
    let (url, effort) = (server.url(), args.effort());
    let mut tables = Vec::new();
    for name in TABLES.into_iter().filter(|name| args.wants(name)) {
        let scenario = match name {
            scenarios::RANDOM_KEYS => scenarios::random_keys(args, url).await?,
            scenarios::HOT_ALLOWED => scenarios::hot_allowed(args, url).await?,
            scenarios::HOT_DENIED => scenarios::hot_denied(args, url).await?,
            scenarios::TWO_TIERS => scenarios::two_tiers(url).await?,
            scenarios::IDLE => scenarios::idle(url).await?,
            log::CHURN => log::churn(url).await?,
            _ => {
                tables.push(match name {
                    crowd::NAME => crowd::table(effort, server, progress).await?,
                    exact::NAME => exact::table(effort, server, progress).await?,
                    batch::NAME => batch::table(effort, server, progress).await?,
                    _ => log::table(effort, server, progress).await?,
                });
                continue;
            }
        };
        let effort = match name {
            scenarios::IDLE => {
                effort.for_targets(scenario.compare.iter().map(|it| it.target)).in_short_turns()
            }
            log::CHURN => log::until_steady(effort),
            _ => effort,
        };
        tables.push(scenario.run(args, effort, server, progress).await?);
    }
    Ok(tables)
}
