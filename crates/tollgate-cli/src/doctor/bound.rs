//! What this set-up admits at most, whatever happens to it: `docs/promises.md` for these servers and these rules.

use serde::Serialize;
use tollgate::{OnStoreFailure, Rule, redis::inspect::Shape};

use super::{
    facts::{Facts, Info},
    judge::Persistence,
};

/// What is admitted at most in any window when something happens. N is what the limit's algorithm admits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    pub(crate) situation: &'static str,
    pub(crate) most: String,
}

/// What a primary needs beside `min-replicas-max-lag` to notice that it is alone, in seconds.
const HEARTBEATS: u64 = 2;

/// Every situation, for the weakest of the servers.
pub(crate) fn rows(servers: &[Facts], shape: Shape, rules: Option<&[Rule]>) -> Vec<Row> {
    let infos: Vec<(&Facts, &Info)> =
        servers.iter().filter_map(|facts| Some((facts, facts.info.as_ref().ok()?))).collect();
    let mut rows = vec![row("all is well", "N")];
    if infos.is_empty() {
        return rows;
    }
    let persistence = infos.iter().map(|(facts, info)| Persistence::of(info, &facts.settings));
    rows.push(row("Redis restarts", restart(persistence)));
    if infos.iter().any(|(_, info)| !info.is("maxmemory_policy", "noeviction")) {
        rows.push(row("memory ends", "one more quota for each counter that is evicted"));
    } else {
        rows.push(row("memory ends", "N: Redis refuses, and the rules' policies decide"));
    }
    let needs = infos.iter().map(|(facts, info)| info.needs_replicas(&facts.settings)).min().unwrap_or(0);
    let lag = infos.iter().filter_map(|(facts, _)| facts.settings.number("min-replicas-max-lag")).max();
    rows.extend(failover(shape, needs, lag, &infos));
    rows.push(row("Redis is away", away(rules)));
    rows
}

fn row(situation: &'static str, most: impl Into<String>) -> Row {
    Row { situation, most: most.into() }
}

fn restart(persistence: impl Iterator<Item = Persistence>) -> &'static str {
    let weight = |persistence: &Persistence| match persistence {
        Persistence::None => 0,
        Persistence::NoLog => 1,
        Persistence::Snapshots => 2,
        Persistence::Log => 3,
        Persistence::EveryWrite => 4,
    };
    match persistence.min_by_key(weight) {
        None | Some(Persistence::None | Persistence::NoLog) => {
            "one more quota each time: (1 + k) N after k restarts"
        }
        Some(Persistence::Snapshots) => "what was admitted since the last snapshot more, one quota at most",
        Some(Persistence::Log) => "what was admitted in the last second or so more, one quota at most",
        Some(Persistence::EveryWrite) => "N",
    }
}

fn failover(shape: Shape, needs: u64, lag: Option<u64>, infos: &[(&Facts, &Info)]) -> Vec<Row> {
    match shape {
        Shape::Single => Vec::new(),
        Shape::Watched => {
            let parted = match (needs, lag) {
                (0, _) => "2 N, for as long as it is parted".to_owned(),
                (_, Some(lag)) => {
                    format!("2 N, for about {} s; then one side decides nothing", lag + HEARTBEATS)
                }
                (_, None) => {
                    "2 N, for min-replicas-max-lag and about 2 s; then one side decides nothing".to_owned()
                }
            };
            vec![row("a primary dies, or is replaced", "2 N"), row("the network parts", parted)]
        }
        Shape::Cluster => {
            let timeout =
                infos.iter().filter_map(|(facts, _)| facts.settings.number("cluster-node-timeout")).max();
            let timeout = timeout.map_or("cluster-node-timeout".to_owned(), |millis| format!("{millis} ms"));
            let parted = format!("2 N, for about {timeout}: then a primary that is cut off decides nothing");
            vec![row("a primary dies, or is replaced", "2 N for its slots"), row("the network parts", parted)]
        }
    }
}

fn away(rules: Option<&[Rule]>) -> String {
    let Some(rules) = rules else {
        return "by on_store_failure: closed N, local 2 N, open without end".to_owned();
    };
    let count = |policy| rules.iter().filter(|rule| rule.on_store_failure == policy).count();
    let kinds = [
        (OnStoreFailure::Closed, "closed: N"),
        (OnStoreFailure::Local, "local: 2 N"),
        (OnStoreFailure::Open, "open: without end"),
    ];
    let shown = kinds.into_iter().map(|(policy, most)| (count(policy), most)).filter(|(count, _)| *count > 0);
    let shown = shown.map(|(count, most)| match count {
        1 => format!("1 rule is {most}"),
        count => format!("{count} rules are {most}"),
    });
    shown.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate::Limit;

    use super::*;

    #[test]
    fn the_weakest_server_says_what_a_restart_costs() {
        let most = |all: &[Persistence]| restart(all.iter().copied());
        assert_eq!(most(&[Persistence::EveryWrite]), "N");
        assert!(most(&[Persistence::EveryWrite, Persistence::Log]).contains("last second"));
        assert!(most(&[Persistence::Log, Persistence::None]).contains("(1 + k) N"));
    }

    #[test]
    fn policies_are_told_by_the_rules_that_have_them() {
        let limit = Limit::token_bucket(5, Duration::from_secs(60)).unwrap();
        let rule = |policy| Rule::new("r", limit).on_store_failure(policy);
        let rules = [OnStoreFailure::Open, OnStoreFailure::Closed, OnStoreFailure::Open].map(rule);
        assert_eq!(away(Some(&rules)), "1 rule is closed: N; 2 rules are open: without end");
    }

    #[test]
    fn a_parted_network_lasts_as_long_as_the_servers_let_it() {
        let parted = |needs, lag| failover(Shape::Watched, needs, lag, &[]).pop().unwrap().most;
        assert_eq!(parted(0, Some(10)), "2 N, for as long as it is parted");
        assert_eq!(parted(1, Some(2)), "2 N, for about 4 s; then one side decides nothing");
        assert!(failover(Shape::Single, 0, None, &[]).is_empty());
    }
}
