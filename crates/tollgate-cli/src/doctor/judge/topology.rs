//! Who stands in for whom: replicas, sentinels, the nodes of a Cluster.

use std::collections::BTreeSet;

use tollgate::redis::inspect::{Inspection, SentinelReport, Shape};

use super::super::{
    facts::{Info, Settings},
    finding::{Finding, see},
};

/// The fewest sentinels of which one may fail.
const FEWEST_SENTINELS: usize = 3;
/// The shortest silence that is worth a failover, in milliseconds.
const SHORTEST_SILENCE_MS: u64 = 1_000;

/// What one server says about who stands in for it.
pub(super) fn server(info: &Info, settings: &Settings, shape: Shape) -> Vec<Finding> {
    let mut findings = Vec::new();
    if info.is("role", "slave") {
        findings.push(
            Finding::problem("role", "this is a replica")
                .why("it decides nothing (READONLY), and what it holds is what its primary sends")
                .remedy(
                    "name the primary, or use redis-sentinel:// or redis-cluster://, which find it",
                    see::WHERE,
                ),
        );
        return findings;
    }
    if shape == Shape::Single && info.is("cluster_enabled", "1") {
        findings.push(
            Finding::problem(
                "cluster-as-one-server",
                "this is a node of a Cluster, addressed as if it were alone",
            )
            .why("it decides only what lies in its own slots, and sends all else elsewhere (MOVED)")
            .remedy("use redis-cluster://", see::CLUSTER),
        );
    }
    findings.push(replicas(info, settings, shape));
    if shape == Shape::Watched && info.needs_replicas(settings) == 0 {
        findings.push(
            Finding::advice("min-replicas", "min-replicas-to-write is 0")
                .why(
                    "when the network parts, a primary that is cut off goes on deciding for those on its side: two quotas \
                     for as long as that lasts",
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
                .why("one dead shard then stops all of them: every node answers CLUSTERDOWN")
                .remedy("CONFIG SET cluster-require-full-coverage no on all nodes", see::CLUSTER),
        );
    }
    findings
}

fn replicas(info: &Info, settings: &Settings, shape: Shape) -> Finding {
    let (online, needed) = (info.replicas(), info.needs_replicas(settings));
    let known = info.number("connected_slaves").unwrap_or(0);
    let what = match (online, known) {
        (0, 0) => "it has no replica".to_owned(),
        (0, known) => format!("none of its {known} replicas is in step"),
        (1, _) => "one replica is in step".to_owned(),
        (online, _) => format!("{online} replicas are in step"),
    };
    if needed > online as u64 {
        return Finding::problem("replicas", format!("{what}, and it writes only with {needed}"))
            .why("it refuses to write (NOREPLICAS), and the rules' policies decide")
            .remedy(super::refusal_remedy("NOREPLICAS"), see::SETTINGS);
    }
    if online > 0 {
        return Finding::fine("replicas", what);
    }
    let remedy = "start a replica: REPLICAOF on another server, or replicaof in its redis.conf";
    match shape {
        Shape::Watched => Finding::problem("replicas", what)
            .why("there is nobody whom the sentinels could make the primary when this one dies")
            .remedy(remedy, see::SENTINEL),
        Shape::Cluster => Finding::problem("replicas", what)
            .why("when it dies, its slots are away until it is restarted, and so are their counters")
            .remedy("redis-cli --cluster add-node NEW EXISTING --cluster-slave", see::CLUSTER),
        Shape::Single => Finding::advice("replicas", what)
            .why("when it dies, its counters go, and until it is back the rules' policies decide")
            .remedy("add a replica and three sentinels, and use redis-sentinel://", see::SENTINEL),
    }
}

/// What is to be said of all servers together.
pub(super) fn together(inspection: &Inspection) -> Vec<Finding> {
    let mut findings: Vec<Finding> = inspection.away.iter().map(away).collect();
    if inspection.unserved_slots > 0 {
        findings.push(
            Finding::problem("slots", format!("{} of 16384 slots are served by nobody", inspection.unserved_slots))
                .why("whoever is counted there has the rules' policies, or everybody has if full coverage is required")
                .remedy("redis-cli --cluster fix NODE", see::CLUSTER),
        );
    }
    if inspection.shape == Shape::Watched {
        findings.extend(sentinels(&inspection.sentinels));
    }
    findings
}

fn away((address, reason): &(String, String)) -> Finding {
    Finding::problem("reachable", format!("it cannot be reached: {reason}"))
        .why("its slots have the rules' policies until it is back, or until a replica takes over")
        .remedy("look whether it is up, and whether cluster-announce-ip names an address that is reached from here", see::CLUSTER)
        .at(address)
}

fn sentinels(sentinels: &[SentinelReport]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut named = BTreeSet::new();
    for SentinelReport { address, says } in sentinels {
        match says {
            Ok((primary, _)) => _ = named.insert(primary.as_str()),
            Err(reason) => findings.push(
                Finding::problem(
                    "sentinel-away",
                    format!("this sentinel does not tell the primary: {reason}"),
                )
                .why("with one sentinel less, the next failure may find no majority")
                .remedy(
                    "look whether it is up, and whether its user may ask: see the user for sentinels",
                    see::USER,
                )
                .at(address),
            ),
        }
    }
    if named.len() > 1 {
        let named: Vec<&str> = named.into_iter().collect();
        findings.push(
            Finding::problem(
                "sentinels-disagree",
                format!("the sentinels name several primaries: {}", named.join(", ")),
            )
            .why("a failover is under way, or the network is parted")
            .remedy(
                "run the doctor again in a minute; if it stays so, SENTINEL RESET on those that are wrong",
                see::SENTINEL,
            ),
        );
    }
    let first = sentinels.iter().find_map(|sentinel| sentinel.says.as_ref().ok());
    if let Some((_, fields)) = first {
        findings.extend(watch(&|field| fields.get(field)?.parse().ok(), sentinels.len()));
        if let Some(flags) = fields.get("flags").filter(|flags| flags.contains("down")) {
            findings.push(
                Finding::problem("primary-down", format!("the sentinels take the primary for gone: {flags}"))
                    .why("a failover follows, or cannot: meanwhile the rules' policies decide")
                    .remedy("SENTINEL CKQUORUM NAME tells whether there is a majority", see::SENTINEL),
            );
        }
    }
    if findings.is_empty() {
        findings
            .push(Finding::fine("sentinels", format!("{} sentinels watch it and agree", sentinels.len())));
    }
    findings
}

/// How they watch, by one of them.
fn watch(number: &dyn Fn(&str) -> Option<u64>, in_url: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    let all = number("num-other-sentinels").and_then(|others| usize::try_from(others + 1).ok());
    if let Some(all) = all {
        if all < FEWEST_SENTINELS {
            findings.push(
                Finding::advice("few-sentinels", format!("{all} sentinels watch the primary"))
                    .why("when one of them fails with the primary, there is no majority to replace it")
                    .remedy("run three or more, on machines that fail independently", see::SENTINEL),
            );
        }
        if in_url < all {
            findings.push(
                Finding::advice("sentinels-unnamed", format!("the URL names {in_url} of {all} sentinels"))
                    .why("when those are away, the primary is not found, though the others know it")
                    .remedy("name each of them in the URL", see::SENTINEL),
            );
        }
        if let Some(quorum) = number("quorum").filter(|quorum| quorum * 2 <= all as u64) {
            findings.push(
                Finding::advice(
                    "quorum",
                    format!("{quorum} of {all} sentinels suffice to call the primary gone"),
                )
                .why("less than most of them may be the side of a parted network that is cut off")
                .remedy(format!("SENTINEL SET NAME quorum {} on each sentinel", all / 2 + 1), see::SENTINEL),
            );
        }
    }
    if let Some(silence) = number("down-after-milliseconds").filter(|silence| *silence < SHORTEST_SILENCE_MS)
    {
        findings.push(
            Finding::advice("down-after", format!("a silence of {silence} ms is taken for death"))
                .why("a pause of the machine becomes a failover, which can cost a quota")
                .remedy("SENTINEL SET NAME down-after-milliseconds 5000 on each sentinel", see::SENTINEL),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, settings, troubles},
        *,
    };
    use crate::doctor::finding::Severity::{Advice, Problem};

    const WITH_REPLICA: &str =
        "role:master\nconnected_slaves:1\nslave0:ip=127.0.0.1,port=7000,state=online,offset=3,lag=1";

    #[test]
    fn a_missing_replica_weighs_as_much_as_it_is_needed() {
        let found = |lines: &str, needed: &str, shape| {
            troubles(&server(&info(lines), &settings(&[("min-replicas-to-write", needed)]), shape))
        };
        let alone = "role:master\nconnected_slaves:0";
        assert_eq!(found(alone, "0", Shape::Single), [(Advice, "replicas")]);
        assert_eq!(found(alone, "0", Shape::Cluster), [(Problem, "replicas")]);
        assert_eq!(found(alone, "0", Shape::Watched), [(Problem, "replicas"), (Advice, "min-replicas")]);
        assert_eq!(found(alone, "1", Shape::Single), [(Problem, "replicas")]);
        assert_eq!(found(WITH_REPLICA, "1", Shape::Watched), []);
        assert_eq!(found(WITH_REPLICA, "0", Shape::Single), []);
        let syncing = WITH_REPLICA.replace("online", "wait_bgsave");
        assert_eq!(found(&syncing, "0", Shape::Cluster), [(Problem, "replicas")]);
    }

    #[test]
    fn without_its_settings_a_server_still_tells_that_it_needs_a_replica() {
        let lines = format!("{WITH_REPLICA}\nmin_slaves_good_slaves:1");
        assert_eq!(troubles(&server(&info(&lines), &settings(&[]), Shape::Watched)), []);
        let cut_off = "role:master\nconnected_slaves:0\nmin_slaves_good_slaves:0";
        assert_eq!(
            troubles(&server(&info(cut_off), &settings(&[]), Shape::Watched)),
            [(Problem, "replicas")]
        );
    }

    #[test]
    fn a_replica_or_a_node_that_is_taken_for_the_whole_is_a_problem() {
        let none = settings(&[]);
        assert_eq!(troubles(&server(&info("role:slave"), &none, Shape::Single)), [(Problem, "role")]);
        let node = info(&format!("{WITH_REPLICA}\ncluster_enabled:1"));
        assert_eq!(troubles(&server(&node, &none, Shape::Single)), [(Problem, "cluster-as-one-server")]);
        assert_eq!(troubles(&server(&node, &none, Shape::Cluster)), []);
        let covered = settings(&[("cluster-require-full-coverage", "yes")]);
        assert_eq!(troubles(&server(&node, &covered, Shape::Cluster)), [(Advice, "full-coverage")]);
    }

    #[test]
    fn sentinels_are_judged_by_what_they_say() {
        let says = |primary: &str, fields: &[(&str, &str)]| SentinelReport {
            address: "s:1".to_owned(),
            says: Ok((
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
        let three = [says("a:1", &good), says("a:1", &good), says("a:1", &good)];
        assert_eq!(troubles(&sentinels(&three)), []);
        assert_eq!(troubles(&sentinels(&three[..2])), [(Advice, "sentinels-unnamed")]);
        let parted = [says("a:1", &good), says("b:1", &good), says("a:1", &good)];
        assert_eq!(troubles(&sentinels(&parted)), [(Problem, "sentinels-disagree")]);
        let away = SentinelReport { address: "s:2".to_owned(), says: Err("refused".to_owned()) };
        let two = [three[0].clone(), three[1].clone(), away];
        assert_eq!(troubles(&sentinels(&two)), [(Problem, "sentinel-away")]);
        let hasty = [
            ("num-other-sentinels", "1"),
            ("quorum", "1"),
            ("down-after-milliseconds", "300"),
            ("flags", "master,o_down"),
        ];
        let pair = [says("a:1", &hasty), says("a:1", &hasty)];
        let expected = [
            (Advice, "few-sentinels"),
            (Advice, "quorum"),
            (Advice, "down-after"),
            (Problem, "primary-down"),
        ];
        assert_eq!(troubles(&sentinels(&pair)), expected);
    }
}
