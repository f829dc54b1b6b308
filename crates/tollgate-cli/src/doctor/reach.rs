//! Why a store cannot be reached, and what to do about it: for the doctor, and for every command that meets one.

use std::fmt;

use tollgate::{RedisSetupError, redis::inspect::Inspection};
use tollgate_server::{config::StoreSettings, store::StoreUrl};

use super::finding::{Finding, see};

/// How the client of Redis begins to complain of an answer that is none of Redis's.
const NO_REDIS: &str = "Incompatible type - Parse error";

/// A store that does not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// What was said, in one line.
    pub(crate) reason: String,
    /// What to do about it.
    pub(crate) remedy: &'static str,
    see: &'static str,
}

/// How a server was to be reached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    InTheClear,
    Encrypted,
    /// It was reached before.
    Known,
}

impl Way {
    pub(super) fn of(url: &str) -> Self {
        if url.starts_with("rediss") { Self::Encrypted } else { Self::InTheClear }
    }
}

/// Asks the servers of a store once whether they would decide; takes seconds at most. None if they would.
pub(crate) async fn trouble(settings: &StoreSettings) -> Option<Trouble> {
    let StoreUrl::Redis(url) = &settings.url else { return None };
    let inspection = match Inspection::of(url, &settings.redis, &settings.prefix).await {
        Ok(inspection) => inspection,
        Err(RedisSetupError::Connect(reason)) => return Some(Trouble::new(&reason, Way::of(url))),
        Err(error) => return Some(Trouble::new(&error.to_string(), Way::Known)),
    };
    if let Some((_, reason)) = inspection.away.first() {
        return Some(Trouble::new(reason, Way::of(url)));
    }
    for server in &inspection.servers {
        if let Err(error) = server.probe().await {
            return Some(Trouble::new(&error.to_string(), Way::Known));
        }
    }
    None
}

impl Trouble {
    /// What to do, by what was said.
    pub(super) fn new(reason: &str, way: Way) -> Self {
        let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
        // who speaks TLS to a server that does not waits for an answer; who does not, to one that does, is hung up on
        let is_other_way = match way {
            Way::InTheClear => says(&["end of file", "reset by peer", "terminated", "closed"]),
            Way::Encrypted => says(&["timed out", "no answer", "end of file", "reset by peer"]),
            Way::Known => false,
        };
        let (remedy, see) = if says(&["WRONGPASS", "NOAUTH", "NOPERM", "authentication failed", "AUTH"]) {
            (
                "user or password are wrong, or its rights: put them right in the URL or in store.password_file",
                see::USER,
            )
        } else if says(&["refused to switch database", "DB index is out of range"]) {
            (
                "the number at the end of the URL is a database that it does not have: use one from 0 to 15, as far as its \
                 setting databases goes; a Cluster has only 0",
                see::WHERE,
            )
        } else if says(&[NO_REDIS]) {
            ("something else than Redis listens there: correct host and port, 6379 is usual", see::WHERE)
        } else if is_other_way || says(&["ertificate", "TLS", "tls", "handshake"]) {
            (
                "look whether it is up; use a URL that begins with rediss if it speaks TLS, and one that begins with redis \
                 if not; store.ca names the authority of its certificate",
                see::WHERE,
            )
        } else if says(&["max number of clients"]) {
            ("raise maxclients, or find out who connects: CLIENT LIST", see::SETTINGS)
        } else if says(&["no primary of that name", "no sentinel"]) {
            (
                "look whether the sentinels are up, and whether the URL ends with the name that they know: SENTINEL \
                 MASTERS",
                see::SENTINEL,
            )
        } else if says(&["cluster support disabled", "empty slot map"]) {
            ("this is no Cluster, or an empty one: use redis://, or redis-cli --cluster create", see::CLUSTER)
        } else {
            (
                "look whether it is up, whether host and port are right, and whether a firewall is between: redis-cli -u \
                 URL PING",
                see::WRONG,
            )
        };
        Self { reason: in_one_line(reason), remedy, see }
    }

    /// The same as the doctor says it.
    pub(super) fn finding(self) -> Finding {
        Finding::problem("reachable", format!("it cannot be reached: {}", self.reason))
            .why("each rule's on_store_failure decides until it can")
            .remedy(self.remedy, self.see)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.remedy)
    }
}

/// The client of Redis lists, line by line, which bytes it did not expect: that they are not Redis's is enough.
fn in_one_line(reason: &str) -> String {
    match reason.split_once(NO_REDIS) {
        Some((before, _)) => format!("{before}what answers there does not speak Redis's protocol"),
        None => reason.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_speak_redis_is_said_in_one_line() {
        let said = "cannot connect to h:80: Incompatible type - Parse error at 1\nUnexpected `72`\nUnexpected `84`\n";
        let trouble = Trouble::new(said, Way::InTheClear);
        assert_eq!(
            trouble.to_string(),
            "cannot connect to h:80: what answers there does not speak Redis's protocol: something else than Redis listens \
             there: correct host and port, 6379 is usual"
        );
        assert_eq!(Trouble::new("a\n b ", Way::Known).reason, "a b");
    }
}
