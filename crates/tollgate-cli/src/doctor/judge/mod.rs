//! From what servers told to findings: no IO, so that each judgement can be read and tested by itself.

mod clock;
mod durability;
mod memory;
mod rights;
mod topology;
mod version;

use std::time::Duration;

use tollgate::{
    StoreError,
    redis::inspect::{Inspection, Shape},
};

use super::{
    facts::{Facts, Info, Settings},
    finding::{Finding, see},
};
use crate::output;

pub(crate) use self::{durability::Persistence, version::Version};

/// What matters beside what the server told.
pub(crate) struct Context<'a> {
    pub(crate) shape: Shape,
    pub(crate) is_encrypted: bool,
    /// How long a decision may take.
    pub(crate) deadline: Duration,
    /// What keys begin with.
    pub(crate) prefix: &'a str,
    /// Whose rights were looked at, if not those of the user that is connected.
    pub(crate) user: Option<&'a str>,
}

/// What is to be said of one server.
pub(crate) fn server(facts: &Facts, context: &Context<'_>) -> Vec<Finding> {
    let mut findings = vec![latency(facts, context.deadline), decisions(&facts.decides)];
    match &facts.info {
        Ok(info) => {
            findings.push(version::judge(info, context.is_encrypted));
            findings.extend(memory::judge(info));
            findings.extend(durability::judge(info, &facts.settings));
            findings.extend(topology::server(info, &facts.settings, context.shape));
            findings.extend(clients(info, &facts.settings));
        }
        Err(error) => findings.push(
            Finding::unseen("info", format!("version, memory, persistence and replicas: {error}"))
                .remedy("run the doctor as a user with +info", see::DOCTORS_USER),
        ),
    }
    if facts.settings.0.is_empty() {
        findings.push(
            Finding::unseen("settings", "its settings: CONFIG GET is not allowed")
                .remedy("run the doctor as a user with +config|get", see::DOCTORS_USER),
        );
    }
    findings.push(clock::judge(&facts.clock));
    findings.extend(rights::judge(&facts.rights, context));
    findings.into_iter().map(|finding| finding.at(&facts.address)).collect()
}

/// What is to be said of all servers together.
pub(crate) fn together(inspection: &Inspection) -> Vec<Finding> {
    topology::together(inspection)
}

fn latency(facts: &Facts, deadline: Duration) -> Finding {
    let (half, most) = (facts.round_trip(50), facts.round_trip(99));
    let (half_text, most_text) = (output::duration(half), output::duration(most));
    let what = format!("half of the round trips take at most {half_text}, nearly all at most {most_text}");
    let limit = output::duration(deadline);
    let why = format!("a decision that takes longer than {limit} (store.deadline) is its rule's policy's");
    let remedy = "bring tollgate nearer to Redis, or raise store.deadline; redis-cli --latency and SLOWLOG GET tell \
                  whether the network or Redis is slow";
    if half >= deadline {
        Finding::problem("latency", what).why(why).remedy(remedy, see::WRONG)
    } else if half >= deadline / 2 {
        Finding::advice("latency", what).why(why).remedy(remedy, see::WRONG)
    } else {
        Finding::fine("latency", what)
    }
}

/// Whether a decision would be made now, and what to do if not.
fn decisions(decides: &Result<(), StoreError>) -> Finding {
    let error = match decides {
        Ok(()) => return Finding::fine("decisions", "a decision would be made now"),
        Err(error) => error,
    };
    let remedy = match error {
        StoreError::Rejected { code, .. } => refusal_remedy(code),
        _ => "look whether it is up and not overloaded: redis-cli PING, SLOWLOG GET",
    };
    Finding::problem("decisions", format!("no decision would be made now: {error}"))
        .why("until that ends, each rule's on_store_failure decides")
        .remedy(remedy, see::WRONG)
}

/// What to do about a refusal, by its first word.
pub(crate) fn refusal_remedy(code: &str) -> &'static str {
    match code {
        "OOM" => "raise maxmemory, or find out whose keys these are: redis-cli --bigkeys",
        "NOREPLICAS" => {
            "bring the replicas back (INFO replication shows them), or lower min-replicas-to-write"
        }
        "MISCONF" => "make room on the disk, or CONFIG SET stop-writes-on-bgsave-error no",
        "READONLY" => {
            "this is a replica: use redis-sentinel:// or redis-cluster://, which follow the primary"
        }
        "LOADING" => "wait until it has read its data",
        "BUSY" => "somebody's script runs without end: SCRIPT KILL",
        "CLUSTERDOWN" => "restart the nodes that are down, and set cluster-require-full-coverage no",
        "MOVED" | "ASK" => "this is a node of a Cluster: use redis-cluster://",
        "NOPERM" | "NOAUTH" | "WRONGPASS" => "give the user the rights that the documentation lists",
        _ => "look into the log of the server",
    }
}

/// Of how many in a hundred places on a server nobody should be short.
const CROWDED_PERCENT: u64 = 80;

fn clients(info: &Info, settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let most = info.number("maxclients").or_else(|| settings.number("maxclients"));
    if let (Some(connected), Some(most)) = (info.number("connected_clients"), most) {
        let verb = if connected == 1 { "is" } else { "are" };
        let what = format!("{connected} of {most} clients {verb} connected");
        findings.push(if connected * 100 >= most * CROWDED_PERCENT {
            Finding::advice("clients", what)
                .why("beyond maxclients nobody is let in, and the rules' policies decide")
                .remedy("raise maxclients, or find out who connects: CLIENT LIST", see::SETTINGS)
        } else {
            Finding::fine("clients", what)
        });
    }
    if let Some(seconds) = settings.number("timeout").filter(|seconds| *seconds > 0) {
        findings.push(
            Finding::advice(
                "idle-timeout",
                format!("connections that are silent for {seconds} s are closed"),
            )
            .why("tollgate's are few and long; a quiet process would connect anew for its next decision")
            .remedy("CONFIG SET timeout 0", see::SETTINGS),
        );
    }
    findings
}

#[cfg(test)]
pub(crate) mod tests {
    use tollgate::{
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
    pub(crate) fn troubles(findings: &[Finding]) -> Vec<(Severity, &'static str)> {
        let trouble = |finding: &Finding| (finding.severity, finding.id);
        findings.iter().filter(|finding| finding.severity != Severity::Fine).map(trouble).collect()
    }

    fn facts() -> Facts {
        let user = User {
            name: "tollgate".to_owned(),
            needs_no_password: false,
            commands: "-@all +eval".to_owned(),
        };
        let reading =
            ClockReading { skew: Skew::Ahead(Duration::from_micros(3)), uncertainty: Duration::ZERO };
        Facts {
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
                dangerous: Vec::new(),
                other_keys: Permission::Denied,
            },
        }
    }

    fn judged(facts: &Facts) -> Vec<(Severity, &'static str)> {
        let context = Context {
            shape: Shape::Single,
            is_encrypted: false,
            deadline: Duration::from_millis(10),
            prefix: "tg",
            user: None,
        };
        troubles(&server(facts, &context))
    }

    #[test]
    fn a_server_that_is_well_run_has_no_troubles() {
        assert_eq!(judged(&facts()), []);
    }

    #[test]
    fn round_trips_are_measured_by_the_deadline() {
        let mut slow = facts();
        for (half_ms, found) in [(4, None), (5, Some(Severity::Advice)), (10, Some(Severity::Problem))] {
            slow.round_trips = vec![Duration::from_millis(half_ms); 50];
            assert_eq!(
                judged(&slow),
                found.map(|severity| (severity, "latency")).into_iter().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn a_server_that_would_refuse_is_a_problem_with_a_remedy_of_its_own() {
        for code in ["OOM", "NOREPLICAS", "MISCONF", "READONLY", "LOADING", "BUSY", "CLUSTERDOWN", "MOVED"] {
            let refused = StoreError::Rejected { code: code.to_owned(), detail: "x".to_owned() };
            let finding = decisions(&Err(refused));
            assert_eq!(finding.severity, Severity::Problem);
            assert_ne!(finding.remedy, refusal_remedy("?"), "{code}");
        }
    }

    #[test]
    fn a_crowd_and_impatience_are_named() {
        let mut crowded = facts();
        crowded.settings = settings(&[("maxclients", "3"), ("timeout", "300")]);
        let advice = [(Severity::Advice, "clients"), (Severity::Advice, "idle-timeout")];
        assert_eq!(judged(&crowded), advice);
    }
}
