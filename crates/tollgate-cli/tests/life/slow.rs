//! A Redis far away: nearer than the deadline of a decision, but not if that has to connect and to load the script as well.

use std::time::Duration;

use crate::program::ANY_PORTS;

/// How long a request takes to Redis, and a reply back. Until the first decision there are four round trips, which take less than
/// the second that a server waits for its store.
pub(crate) const ONE_WAY: Duration = Duration::from_millis(75);

/// A configuration with one rule for everybody.
pub(crate) fn configuration(url: &str) -> String {
    format!(
        "{ANY_PORTS}[store]\nurl = \"{url}\"\ndeadline = \"500ms\"\n\
         [[rule]]\nname = \"all\"\nper = []\nalgorithm = \"sliding-log\"\namount = 1000000\nwindow = \"1d\"\n"
    )
}
