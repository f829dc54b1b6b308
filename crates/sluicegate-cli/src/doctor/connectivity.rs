//! Diagnosis of connection failures, for the doctor and all commands that use a store.

use std::fmt;

use sluicegate::{
    StoreError,
    redis::{RedisSetupError, inspect::Inspection},
};
use sluicegate_server::{config::StoreSettings, store::StoreUrl};

use super::{
    checks::rejection_remedy,
    finding::{Finding, see},
};
use crate::format;

/// The start of the Redis client's error about a response in another protocol.
const NOT_REDIS: &str = "Incompatible type - Parse error";

/// Part of the error about a server that accepts connections but does not reply.
const NO_REPLY: &str = "but no reply within";

/// The reason why a store does not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionProblem {
    /// The error, on one line.
    pub(crate) reason: String,
    /// How to fix it.
    pub(crate) remedy: &'static str,
    see: &'static str,
}

/// The state of the connection when the error occurred.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Plain,
    Tls,
    /// The connection was established before.
    Established,
}

impl Transport {
    pub(super) fn of(url: &str) -> Self {
        if url.starts_with("rediss") { Self::Tls } else { Self::Plain }
    }
}

/// Checks once whether all servers of a store would decide. Returns the first problem, after a few seconds at most.
pub(crate) async fn diagnose(settings: &StoreSettings) -> Option<ConnectionProblem> {
    let StoreUrl::Redis(url) = &settings.url else { return None };
    let inspection = match Inspection::of(url, &settings.redis, &settings.prefix).await {
        Ok(inspection) => inspection,
        Err(RedisSetupError::Connect(reason)) => {
            return Some(ConnectionProblem::new(&reason, Transport::of(url)));
        }
        Err(error) => return Some(ConnectionProblem::new(&error.to_string(), Transport::Established)),
    };
    if let Some((_, reason)) = inspection.away.first() {
        return Some(ConnectionProblem::new(reason, Transport::of(url)));
    }
    for server in &inspection.servers {
        if let Err(error) = server.probe().await {
            return Some(ConnectionProblem::of(&error));
        }
    }
    None
}

impl ConnectionProblem {
    /// The problem of a server that was reached but did not decide.
    pub(super) fn of(error: &StoreError) -> Self {
        let problem = Self::new(&error.to_string(), Transport::Established);
        match error {
            StoreError::Rejected { code, .. } if !is_denied_access(code) => {
                Self { remedy: rejection_remedy(code), see: see::WRONG, ..problem }
            }
            _ => problem,
        }
    }

    /// Selects the remedy by the error text.
    pub(super) fn new(reason: &str, transport: Transport) -> Self {
        let contains = |words: &[&str]| words.iter().any(|word| reason.contains(word));
        // TLS to a plain server times out; a plain connection to a TLS server is closed
        let is_other_transport = match transport {
            Transport::Plain => contains(&["end of file", "reset by peer", "terminated", "closed"]),
            Transport::Tls => contains(&["timed out", "no answer", "end of file", "reset by peer"]),
            Transport::Established => false,
        };
        let (remedy, see) = if contains(&[NO_REPLY]) {
            ("Redis hangs or runs a long command: check its CPU and SLOWLOG GET", see::WRONG)
        } else if contains(&["WRONGPASS", "NOAUTH", "NOPERM", "authentication failed", "AUTH"]) {
            (
                "wrong user, password or permissions: correct them in the URL or in store.password_file",
                see::USER,
            )
        } else if contains(&["refused to switch database", "DB index is out of range"]) {
            (
                "the database number in the URL does not exist: use 0 to 15, below the server's databases setting; a Cluster has \
                 only 0",
                see::WHERE,
            )
        } else if contains(&[NOT_REDIS]) {
            ("correct host and port; Redis usually listens on 6379", see::WHERE)
        } else if is_other_transport || contains(&["ertificate", "TLS", "tls", "handshake"]) {
            (
                "check that the server is running; use rediss:// if it requires TLS and redis:// if not; set store.ca to the \
                 authority of its certificate",
                see::WHERE,
            )
        } else if contains(&["max number of clients"]) {
            ("raise maxclients, or list the clients with CLIENT LIST", see::SETTINGS)
        } else if contains(&["no primary of that name", "no sentinel"]) {
            (
                "check that the sentinels are running and that the URL ends with their name of the primary: SENTINEL MASTERS",
                see::SENTINEL,
            )
        } else if contains(&["cluster support disabled", "empty slot map"]) {
            ("not a Cluster, or one without slots: use redis://, or redis-cli --cluster create", see::CLUSTER)
        } else {
            (
                "check that the server is running, that host and port are correct, and that no firewall blocks it: redis-cli -u \
                 URL PING",
                see::WRONG,
            )
        };
        Self { reason: format::printable(&single_line(reason)), remedy, see }
    }

    /// Converts the problem to a finding.
    pub(super) fn finding(self) -> Finding {
        let what = if self.reason.contains(NO_REPLY) {
            self.reason
        } else {
            format!("unreachable: {}", self.reason)
        };
        Finding::problem("reachable", what)
            .why("until it is reachable, the rules' failure policies decide")
            .remedy(self.remedy, self.see)
    }
}

impl fmt::Display for ConnectionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.remedy)
    }
}

/// Whether an error reply is about the user, its password or its permissions.
fn is_denied_access(code: &str) -> bool {
    matches!(code, "NOPERM" | "NOAUTH" | "WRONGPASS")
}

/// Joins an error to one line. The Redis client lists all unexpected bytes of another protocol, which are omitted.
fn single_line(reason: &str) -> String {
    match reason.split_once(NOT_REDIS) {
        Some((before, _)) => format!("{before}the server does not speak the Redis protocol"),
        None => reason.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_in_another_protocol_is_reported_on_one_line() {
        let error = "cannot connect to h:80: Incompatible type - Parse error at 1\nUnexpected `72`\nUnexpected `84`\n";
        let problem = ConnectionProblem::new(error, Transport::Plain);
        assert_eq!(
            problem.to_string(),
            "cannot connect to h:80: the server does not speak the Redis protocol: correct host and port; Redis usually \
             listens on 6379"
        );
        assert_eq!(ConnectionProblem::new("a\n b ", Transport::Established).reason, "a b");
    }

    #[test]
    fn an_error_reply_has_the_remedy_of_its_code() {
        let problem = |code: &str| {
            ConnectionProblem::of(&StoreError::Rejected { code: code.to_owned(), detail: "x".to_owned() })
        };
        assert_eq!(problem("OOM").remedy, rejection_remedy("OOM"));
        assert!(problem("NOPERM").remedy.contains("store.password_file"));
    }
}
