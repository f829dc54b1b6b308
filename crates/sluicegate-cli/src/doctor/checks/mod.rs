//! Checks of the collected facts. They do no I/O, so that each can be tested separately.

mod clock;
mod durability;
mod leases;
mod memory;
mod permissions;
mod topology;
mod version;

use std::time::Duration;

use sluicegate::{
    StoreError,
    redis::inspect::{Inspection, Shape},
};

use super::{
    facts::{Info, ServerFacts, Settings},
    finding::{Finding, see},
};
use crate::format;

pub(crate) use self::{durability::Persistence, leases::check as leases, version::Version};

/// The circumstances of a check.
pub(crate) struct Context<'a> {
    pub(crate) shape: Shape,
    pub(crate) is_encrypted: bool,
    /// The deadline of a decision.
    pub(crate) deadline: Duration,
    /// The prefix of keys.
    pub(crate) prefix: &'a str,
    /// The user whose permissions were examined, if not the connected one.
    pub(crate) user: Option<&'a str>,
}

/// Checks one server.
pub(crate) fn server(facts: &ServerFacts, context: &Context<'_>) -> Vec<Finding> {
    let mut findings = vec![latency(facts, context.deadline), decisions(&facts.decides)];
    match &facts.info {
        Ok(info) => {
            findings.push(version::check(info, context.is_encrypted));
            findings.extend(memory::check(info));
            findings.extend(durability::check(info, &facts.settings));
            findings.extend(topology::server(info, &facts.settings, context.shape));
            findings.extend(clients(info, &facts.settings));
        }
        Err(error) => findings.push(
            Finding::unknown(
                "info",
                format!("version, memory, persistence and replicas not checked: {error}"),
            )
            .remedy("run the doctor as a user with +info", see::DOCTORS_USER),
        ),
    }
    if facts.settings.0.is_empty() {
        findings.push(
            Finding::unknown("settings", "settings not checked: CONFIG GET is not permitted")
                .remedy("run the doctor as a user with +config|get", see::DOCTORS_USER),
        );
    }
    findings.push(clock::check(&facts.clock));
    findings.extend(permissions::check(&facts.rights, context));
    findings.into_iter().map(|finding| finding.at(&facts.address)).collect()
}

/// Checks the deployment as a whole.
pub(crate) fn deployment(inspection: &Inspection) -> Vec<Finding> {
    topology::deployment(inspection)
}

fn latency(facts: &ServerFacts, deadline: Duration) -> Finding {
    let (median, p99) = (facts.round_trip(50), facts.round_trip(99));
    let (median_text, p99_text) = (format::duration(median), format::duration(p99));
    let what = format!("round trips take {median_text} (p50), {p99_text} (p99)");
    let limit = format::duration(deadline);
    let why = format!("if a decision takes longer than {limit} (store.deadline), the failure policy decides");
    let remedy = "move sluicegate closer to Redis, or raise store.deadline; redis-cli --latency and SLOWLOG GET show \
                  whether the network or Redis is slow";
    if median >= deadline {
        Finding::problem("latency", what).why(why).remedy(remedy, see::WRONG)
    } else if median >= deadline / 2 {
        Finding::advice("latency", what).why(why).remedy(remedy, see::WRONG)
    } else {
        Finding::fine("latency", what)
    }
}

/// Checks whether a decision would succeed now.
fn decisions(decides: &Result<(), StoreError>) -> Finding {
    let error = match decides {
        Ok(()) => return Finding::fine("decisions", "a test decision succeeded"),
        Err(error) => error,
    };
    let remedy = match error {
        StoreError::Rejected { code, .. } => rejection_remedy(code),
        _ => "check that the server is running and not overloaded: redis-cli PING, SLOWLOG GET",
    };
    Finding::problem("decisions", format!("a test decision failed: {error}"))
        .why("until this is fixed, the rules' failure policies decide")
        .remedy(remedy, see::WRONG)
}

/// Returns the remedy for an error reply, by its code.
pub(crate) fn rejection_remedy(code: &str) -> &'static str {
    match code {
        "OOM" => "raise maxmemory, or find the largest keys: redis-cli --bigkeys",
        "NOREPLICAS" => "restore the replicas (INFO replication lists them), or lower min-replicas-to-write",
        "MISCONF" => "free disk space, or CONFIG SET stop-writes-on-bgsave-error no",
        "READONLY" => {
            "this is a replica: use redis-sentinel:// or redis-cluster://, which follow the primary"
        }
        "LOADING" => "wait until it has loaded its data",
        "BUSY" => "a script does not terminate: SCRIPT KILL",
        "CLUSTERDOWN" => "restart the nodes that are down, and set cluster-require-full-coverage no",
        "MOVED" | "ASK" => "this is a node of a Cluster: use redis-cluster://",
        "NOPERM" | "NOAUTH" | "WRONGPASS" => "grant the user the permissions listed in the documentation",
        _ => "check the server's log",
    }
}

/// Minimum share of `maxclients` in use that is reported as advice.
const MANY_CLIENTS_PERCENT: u64 = 80;

fn clients(info: &Info, settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let most = info.number("maxclients").or_else(|| settings.number("maxclients"));
    if let (Some(connected), Some(most)) = (info.number("connected_clients"), most) {
        let verb = if connected == 1 { "is" } else { "are" };
        let what = format!("{connected} of {most} clients {verb} connected");
        findings.push(if connected * 100 >= most * MANY_CLIENTS_PERCENT {
            Finding::advice("clients", what)
                .why("beyond maxclients, connections are rejected and the failure policies decide")
                .remedy("raise maxclients, or list the clients with CLIENT LIST", see::SETTINGS)
        } else {
            Finding::fine("clients", what)
        });
    }
    if let Some(seconds) = settings.number("timeout").filter(|seconds| *seconds > 0) {
        findings.push(
            Finding::advice("idle-timeout", format!("idle connections are closed after {seconds} s"))
                .why("sluicegate's connections are few and persistent; an idle process would have to reconnect")
                .remedy("CONFIG SET timeout 0", see::SETTINGS),
        );
    }
    findings
}

#[cfg(test)]
pub(crate) mod tests {
    use sluicegate::{
        redis::inspect::{ClockReading, Permission, Rights, User},
        stats::Skew,
    };

    use super::*;
    use crate::doctor::finding::Severity;

    /// The fields of `INFO`, as lines.
    pub(crate) fn info(lines: &str) -> Info {
        Info(
            lines
                .lines()
                .filter_map(|line| line.trim().split_once(':'))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    pub(crate) fn settings(pairs: &[(&'static str, &str)]) -> Settings {
        Settings(pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect())
    }

    /// The findings that are not fine, by name.
    pub(crate) fn issues(findings: &[Finding]) -> Vec<(Severity, &'static str)> {
        let trouble = |finding: &Finding| (finding.severity, finding.id);
        findings.iter().filter(|finding| finding.severity != Severity::Fine).map(trouble).collect()
    }

    fn facts() -> ServerFacts {
        let user = User {
            name: "sluicegate".to_owned(),
            needs_no_password: false,
            commands: "-@all +eval".to_owned(),
        };
        let reading =
            ClockReading { skew: Skew::Ahead(Duration::from_micros(3)), uncertainty: Duration::ZERO };
        ServerFacts {
            address: "h:1".to_owned(),
            round_trips: vec![Duration::from_micros(80); 50],
            info: Ok(info(
                "redis_version:8.8.2\nused_memory:1000\nmaxmemory:10000\nmaxmemory_policy:noeviction\n\
                 evicted_keys:0\nrole:master\nconnected_slaves:1\nslave0:ip=h,port=2,state=online,offset=1,lag=0\n\
                 aof_enabled:1\naof_last_write_status:ok\nrdb_last_bgsave_status:ok\nconnected_clients:3",
            )),
            settings: settings(&[("save", ""), ("appendfsync", "everysec"), ("maxclients", "100")]),
            clock: Ok(reading),
            decides: Ok(()),
            rights: Rights {
                user: Ok(user),
                needed: Vec::new(),
                holds: Vec::new(),
                dangerous: Vec::new(),
                other_keys: Permission::Denied,
            },
        }
    }

    fn check_server(facts: &ServerFacts) -> Vec<(Severity, &'static str)> {
        let context = Context {
            shape: Shape::Single,
            is_encrypted: false,
            deadline: Duration::from_millis(10),
            prefix: "sg",
            user: None,
        };
        issues(&server(facts, &context))
    }

    #[test]
    fn a_well_configured_server_has_no_issues() {
        assert_eq!(check_server(&facts()), []);
    }

    #[test]
    fn round_trips_are_compared_with_the_deadline() {
        let mut slow = facts();
        for (half_ms, found) in [(4, None), (5, Some(Severity::Advice)), (10, Some(Severity::Problem))] {
            slow.round_trips = vec![Duration::from_millis(half_ms); 50];
            assert_eq!(
                check_server(&slow),
                found.map(|severity| (severity, "latency")).into_iter().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn each_error_code_has_its_own_remedy() {
        for code in ["OOM", "NOREPLICAS", "MISCONF", "READONLY", "LOADING", "BUSY", "CLUSTERDOWN", "MOVED"] {
            let rejected = StoreError::Rejected { code: code.to_owned(), detail: "x".to_owned() };
            let finding = decisions(&Err(rejected));
            assert_eq!(finding.severity, Severity::Problem);
            assert_ne!(finding.remedy, rejection_remedy("?"), "{code}");
        }
    }

    #[test]
    fn many_clients_and_an_idle_timeout_are_reported() {
        let mut crowded = facts();
        crowded.settings = settings(&[("maxclients", "3"), ("timeout", "300")]);
        let advice = [(Severity::Advice, "clients"), (Severity::Advice, "idle-timeout")];
        assert_eq!(check_server(&crowded), advice);
    }
}
