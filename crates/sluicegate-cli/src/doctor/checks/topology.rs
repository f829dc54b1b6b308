//! Checks of replicas, sentinels and Cluster nodes.

use std::collections::BTreeSet;

use sluicegate::redis::inspect::{Inspection, SentinelReport, Shape};

use super::super::{
    facts::{Info, Settings},
    finding::{Finding, see},
};

/// The number of sentinels needed to tolerate the failure of one.
const MIN_SENTINELS: usize = 3;
/// The shortest recommended `down-after-milliseconds`.
const MIN_DOWN_AFTER_MS: u64 = 1_000;

/// Checks the role and replicas of one server.
pub(super) fn server(info: &Info, settings: &Settings, shape: Shape) -> Vec<Finding> {
    let mut findings = Vec::new();
    if info.is("role", "slave") {
        findings.push(
            Finding::problem("role", "this is a replica").why("it rejects writes (READONLY)").remedy(
                "use the address of the primary, or redis-sentinel:// or redis-cluster://, which find it",
                see::WHERE,
            ),
        );
        return findings;
    }
    if shape == Shape::Single && info.is("cluster_enabled", "1") {
        findings.push(
            Finding::problem("cluster-as-one-server", "this is a Cluster node, used as a single server")
                .why("it handles only its own slots and redirects all others (MOVED)")
                .remedy("use redis-cluster://", see::CLUSTER),
        );
    }
    findings.push(replicas(info, settings, shape));
    if shape == Shape::Watched && info.needs_replicas(settings) == 0 {
        findings.push(
            Finding::advice("min-replicas", "min-replicas-to-write is 0")
                .why(
                    "in a network partition, an isolated primary continues to decide for its side: two quotas for the duration \
                     of the partition",
                )
                .remedy(
                    "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 2 on all servers, with two replicas or \
                     more",
                    see::SETTINGS,
                ),
        );
    }
    if shape == Shape::Cluster && settings.is("cluster-require-full-coverage", "yes") {
        findings.push(
            Finding::advice("full-coverage", "cluster-require-full-coverage is yes")
                .why("one failed shard then stops all of them: every node replies CLUSTERDOWN")
                .remedy("CONFIG SET cluster-require-full-coverage no on all nodes", see::CLUSTER),
        );
    }
    findings
}

fn replicas(info: &Info, settings: &Settings, shape: Shape) -> Finding {
    let (online, needed) = (info.replicas(), info.needs_replicas(settings));
    let known = info.number("connected_slaves").unwrap_or(0);
    let what = match (online, known) {
        (0, 0) => "no replica".to_owned(),
        (0, known) => format!("none of {known} replicas is in sync"),
        (1, _) => "1 replica in sync".to_owned(),
        (online, _) => format!("{online} replicas in sync"),
    };
    if needed > online as u64 {
        return Finding::problem("replicas", format!("{what}, writes require {needed}"))
            .why("it rejects writes (NOREPLICAS), and the failure policies decide")
            .remedy(super::rejection_remedy("NOREPLICAS"), see::SETTINGS);
    }
    if online > 0 {
        return Finding::fine("replicas", what);
    }
    let remedy = "start a replica: REPLICAOF on another server, or replicaof in its redis.conf";
    match shape {
        Shape::Watched => Finding::problem("replicas", what)
            .why("if this server fails, the sentinels have no replica to promote")
            .remedy(remedy, see::SENTINEL),
        Shape::Cluster => Finding::problem("replicas", what)
            .why("if this server fails, its slots and counters are unavailable until it restarts")
            .remedy("redis-cli --cluster add-node NEW EXISTING --cluster-slave", see::CLUSTER),
        Shape::Single => Finding::advice("replicas", what)
            .why("if this server fails, its counters are lost, and the failure policies decide until it restarts")
            .remedy("add a replica and three sentinels, and use redis-sentinel://", see::SENTINEL),
    }
}

/// Checks the deployment as a whole.
pub(super) fn deployment(inspection: &Inspection) -> Vec<Finding> {
    let mut findings: Vec<Finding> = inspection.away.iter().map(unreachable_node).collect();
    if inspection.unserved_slots > 0 {
        findings.push(
            Finding::problem("slots", format!("{} of 16384 slots are not served", inspection.unserved_slots))
                .why("the failure policies decide for keys in these slots, or for all keys if full coverage is required")
                .remedy("redis-cli --cluster fix NODE", see::CLUSTER),
        );
    }
    if inspection.shape == Shape::Watched {
        findings.extend(sentinels(&inspection.sentinels));
    }
    findings
}

fn unreachable_node((address, reason): &(String, String)) -> Finding {
    Finding::problem("reachable", format!("unreachable: {reason}"))
        .why("the failure policies decide for its slots until it recovers or a replica takes over")
        .remedy("check that it is running, and that cluster-announce-ip is reachable from here", see::CLUSTER)
        .at(address)
}

fn sentinels(sentinels: &[SentinelReport]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut named = BTreeSet::new();
    for SentinelReport { address, report } in sentinels {
        match report {
            Ok((primary, _)) => _ = named.insert(primary.as_str()),
            Err(reason) => findings.push(
                Finding::problem(
                    "sentinel-away",
                    format!("this sentinel does not return the primary: {reason}"),
                )
                .why("with one sentinel fewer, the next failure may leave no majority")
                .remedy("check that it is running, and the permissions of its user", see::USER)
                .at(address),
            ),
        }
    }
    if named.len() > 1 {
        let named: Vec<&str> = named.into_iter().collect();
        findings.push(
            Finding::problem(
                "sentinels-disagree",
                format!("the sentinels report different primaries: {}", named.join(", ")),
            )
            .why("a failover or a network partition is in progress")
            .remedy(
                "run the doctor again in a minute; if it persists, SENTINEL RESET on the wrong ones",
                see::SENTINEL,
            ),
        );
    }
    let first = sentinels.iter().find_map(|sentinel| sentinel.report.as_ref().ok());
    if let Some((_, fields)) = first {
        findings.extend(sentinel_settings(&|field| fields.get(field)?.parse().ok(), sentinels.len()));
        if let Some(flags) = fields.get("flags").filter(|flags| flags.contains("down")) {
            findings.push(
                Finding::problem("primary-down", format!("the sentinels consider the primary down: {flags}"))
                    .why("until a failover completes, the failure policies decide")
                    .remedy("SENTINEL CKQUORUM NAME shows whether there is a majority", see::SENTINEL),
            );
        }
    }
    if findings.is_empty() {
        findings
            .push(Finding::fine("sentinels", format!("{} sentinels agree on the primary", sentinels.len())));
    }
    findings
}

/// Checks the sentinels' settings, as reported by one of them.
fn sentinel_settings(number: &dyn Fn(&str) -> Option<u64>, in_url: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    let all = number("num-other-sentinels").and_then(|others| usize::try_from(others + 1).ok());
    if let Some(all) = all {
        if all < MIN_SENTINELS {
            findings.push(
                Finding::advice("few-sentinels", format!("{all} sentinels monitor the primary"))
                    .why(
                        "if one of them fails together with the primary, there is no majority for a failover",
                    )
                    .remedy("run three or more, on machines that fail independently", see::SENTINEL),
            );
        }
        if in_url < all {
            findings.push(
                Finding::advice("sentinels-unnamed", format!("the URL lists {in_url} of {all} sentinels"))
                    .why("if those fail, the primary cannot be found, though other sentinels are running")
                    .remedy("list all of them in the URL", see::SENTINEL),
            );
        }
        if let Some(quorum) = number("quorum").filter(|quorum| quorum * 2 <= all as u64) {
            findings.push(
                Finding::advice(
                    "quorum",
                    format!("the quorum is {quorum} of {all} sentinels"),
                )
                .why("without a majority, the isolated side of a network partition can declare the primary down")
                .remedy(format!("SENTINEL SET NAME quorum {} on each sentinel", all / 2 + 1), see::SENTINEL),
            );
        }
    }
    if let Some(millis) = number("down-after-milliseconds").filter(|millis| *millis < MIN_DOWN_AFTER_MS) {
        findings.push(
            Finding::advice("down-after", format!("down-after-milliseconds is {millis}"))
                .why("a short pause of the server causes a failover, which can cost a quota")
                .remedy("SENTINEL SET NAME down-after-milliseconds 5000 on each sentinel", see::SENTINEL),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, issues, settings},
        *,
    };
    use crate::doctor::finding::Severity::{Advice, Problem};

    const WITH_REPLICA: &str =
        "role:master\nconnected_slaves:1\nslave0:ip=127.0.0.1,port=7000,state=online,offset=3,lag=1";

    #[test]
    fn the_severity_of_a_missing_replica_depends_on_the_deployment() {
        let found = |lines: &str, needed: &str, shape| {
            issues(&server(&info(lines), &settings(&[("min-replicas-to-write", needed)]), shape))
        };
        let single = "role:master\nconnected_slaves:0";
        assert_eq!(found(single, "0", Shape::Single), [(Advice, "replicas")]);
        assert_eq!(found(single, "0", Shape::Cluster), [(Problem, "replicas")]);
        assert_eq!(found(single, "0", Shape::Watched), [(Problem, "replicas"), (Advice, "min-replicas")]);
        assert_eq!(found(single, "1", Shape::Single), [(Problem, "replicas")]);
        assert_eq!(found(WITH_REPLICA, "1", Shape::Watched), []);
        assert_eq!(found(WITH_REPLICA, "0", Shape::Single), []);
        let syncing = WITH_REPLICA.replace("online", "wait_bgsave");
        assert_eq!(found(&syncing, "0", Shape::Cluster), [(Problem, "replicas")]);
    }

    #[test]
    fn without_settings_info_shows_that_a_replica_is_required() {
        let lines = format!("{WITH_REPLICA}\nmin_slaves_good_slaves:1");
        assert_eq!(issues(&server(&info(&lines), &settings(&[]), Shape::Watched)), []);
        let cut_off = "role:master\nconnected_slaves:0\nmin_slaves_good_slaves:0";
        assert_eq!(issues(&server(&info(cut_off), &settings(&[]), Shape::Watched)), [(Problem, "replicas")]);
    }

    #[test]
    fn a_replica_or_a_cluster_node_used_as_a_single_server_is_a_problem() {
        let none = settings(&[]);
        assert_eq!(issues(&server(&info("role:slave"), &none, Shape::Single)), [(Problem, "role")]);
        let node = info(&format!("{WITH_REPLICA}\ncluster_enabled:1"));
        assert_eq!(issues(&server(&node, &none, Shape::Single)), [(Problem, "cluster-as-one-server")]);
        assert_eq!(issues(&server(&node, &none, Shape::Cluster)), []);
        let covered = settings(&[("cluster-require-full-coverage", "yes")]);
        assert_eq!(issues(&server(&node, &covered, Shape::Cluster)), [(Advice, "full-coverage")]);
    }

    #[test]
    fn sentinel_settings_and_agreement_are_checked() {
        let report = |primary: &str, fields: &[(&str, &str)]| SentinelReport {
            address: "s:1".to_owned(),
            report: Ok((
                primary.to_owned(),
                fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            )),
        };
        let good = [
            ("num-other-sentinels", "2"),
            ("quorum", "2"),
            ("down-after-milliseconds", "5000"),
            ("flags", "master"),
        ];
        let three = [report("a:1", &good), report("a:1", &good), report("a:1", &good)];
        assert_eq!(issues(&sentinels(&three)), []);
        assert_eq!(issues(&sentinels(&three[..2])), [(Advice, "sentinels-unnamed")]);
        let parted = [report("a:1", &good), report("b:1", &good), report("a:1", &good)];
        assert_eq!(issues(&sentinels(&parted)), [(Problem, "sentinels-disagree")]);
        let away = SentinelReport { address: "s:2".to_owned(), report: Err("connection refused".to_owned()) };
        let two = [three[0].clone(), three[1].clone(), away];
        assert_eq!(issues(&sentinels(&two)), [(Problem, "sentinel-away")]);
        let hasty = [
            ("num-other-sentinels", "1"),
            ("quorum", "1"),
            ("down-after-milliseconds", "300"),
            ("flags", "master,o_down"),
        ];
        let pair = [report("a:1", &hasty), report("a:1", &hasty)];
        let expected = [
            (Advice, "few-sentinels"),
            (Advice, "quorum"),
            (Advice, "down-after"),
            (Problem, "primary-down"),
        ];
        assert_eq!(issues(&sentinels(&pair)), expected);
    }
}
