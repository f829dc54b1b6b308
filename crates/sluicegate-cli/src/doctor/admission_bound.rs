//! The most that this deployment admits in each failure: `docs/promises.md` applied to these servers and rules.

use serde::Serialize;
use sluicegate::{Algorithm, OnStoreFailure, Rule, redis::inspect::Shape, rules::Unit};

use super::{
    checks::Persistence,
    facts::{Info, ServerFacts},
};

/// The most admitted in any window in one situation. N is what the limit's algorithm admits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BoundRow {
    pub(crate) situation: &'static str,
    pub(crate) most: String,
}

/// The most rules that are listed in one row.
const MAX_LISTED_RULES: usize = 5;

/// The time besides `min-replicas-max-lag` until a primary detects its isolation, in seconds.
const DETECTION_SECONDS: u64 = 2;

/// Returns all situations, for the weakest of the servers.
pub(crate) fn rows(servers: &[ServerFacts], shape: Shape, rules: Option<&[Rule]>) -> Vec<BoundRow> {
    let infos: Vec<(&ServerFacts, &Info)> =
        servers.iter().filter_map(|facts| Some((facts, facts.info.as_ref().ok()?))).collect();
    let mut rows = vec![row("normal operation", "N")];
    let known = rules.unwrap_or_default();
    rows.extend([requests_in_flight(known), excess(known), leases(known)].into_iter().flatten());
    if infos.is_empty() {
        return rows;
    }
    let persistence = infos.iter().map(|(facts, info)| Persistence::of(info, &facts.settings));
    rows.push(row("Redis restarts", restart(persistence)));
    if infos.iter().any(|(_, info)| !info.is("maxmemory_policy", "noeviction")) {
        rows.push(row("memory is full", "one more quota for each evicted counter"));
    } else {
        rows.push(row("memory is full", "N: Redis rejects writes, and the failure policies decide"));
    }
    let needs = infos.iter().map(|(facts, info)| info.needs_replicas(&facts.settings)).min().unwrap_or(0);
    let lag = infos.iter().filter_map(|(facts, _)| facts.settings.number("min-replicas-max-lag")).max();
    rows.extend(failover(shape, needs, lag, &infos));
    rows.push(row("Redis is down", outage(rules)));
    rows
}

fn row(situation: &'static str, most: impl Into<String>) -> BoundRow {
    BoundRow { situation, most: most.into() }
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
            "one more quota per restart: (1 + k) N after k restarts"
        }
        Some(Persistence::Snapshots) => "N plus what was admitted since the last snapshot, at most 2 N",
        Some(Persistence::Log) => "N plus what was admitted in about the last second, at most 2 N",
        Some(Persistence::EveryWrite) => "N",
    }
}

fn failover(shape: Shape, needs: u64, lag: Option<u64>, infos: &[(&ServerFacts, &Info)]) -> Vec<BoundRow> {
    match shape {
        Shape::Single => Vec::new(),
        Shape::Watched => {
            let partition = match (needs, lag) {
                (0, _) => "2 N, for the duration of the partition".to_owned(),
                (_, Some(lag)) => {
                    format!("2 N, for about {} s; then only one side decides", lag + DETECTION_SECONDS)
                }
                (_, None) => {
                    "2 N, for min-replicas-max-lag plus about 2 s; then only one side decides".to_owned()
                }
            };
            vec![row("failover of a primary", "2 N"), row("network partition", partition)]
        }
        Shape::Cluster => {
            let timeout =
                infos.iter().filter_map(|(facts, _)| facts.settings.number("cluster-node-timeout")).max();
            let timeout = timeout.map_or("cluster-node-timeout".to_owned(), |millis| format!("{millis} ms"));
            let partition = format!("2 N, for about {timeout}; then an isolated primary decides nothing");
            vec![row("failover of a primary", "2 N for its slots"), row("network partition", partition)]
        }
    }
}

/// Returns the bound of rules that limit the requests in flight, if there are any.
fn requests_in_flight(rules: &[Rule]) -> Option<BoundRow> {
    let limits = rules.iter().filter(|rule| is_concurrency(rule) && !rule.shadow);
    let most = limits.map(|rule| {
        let amount = rule.limit.amount();
        format!("{}: N units in live holds at any time (N is {amount})", rule.name)
    });
    listed("rules for requests in flight", most)
}

/// Returns the bound of rules whose holds may be settled with more than their estimate, if there are any.
fn excess(rules: &[Rule]) -> Option<BoundRow> {
    let held = rules.iter().filter(|rule| is_held(rule) && !is_concurrency(rule) && !rule.shadow);
    let most = held.map(|rule| match rule.limit.max_excess() {
        0 => format!("{}: N", rule.name),
        excess => format!("{}: N + {excess} for each hold that is settled above its estimate", rule.name),
    });
    listed("rules whose holds are settled", most)
}

fn is_concurrency(rule: &Rule) -> bool {
    rule.limit.algorithm() == Algorithm::Concurrency
}

/// Whether a rule is likely to be held. Every rule can be, but a settlement rarely changes the number of requests.
fn is_held(rule: &Rule) -> bool {
    rule.unit != Unit::default() || rule.hold.is_some() || rule.ttl.is_some()
}

/// Returns the bound of rules with leases, if there are any.
fn leases(rules: &[Rule]) -> Option<BoundRow> {
    let leased = rules.iter().filter_map(|rule| {
        let lease = rule.lease.filter(|lease| !lease.is_none())?;
        let (units, amount) = (lease.units_of(rule.limit.amount()), rule.limit.amount());
        Some(format!("{}: N + {units} (N is {amount})", rule.name))
    });
    listed("rules with a lease", leased)
}

/// Returns a row with the bounds of some rules, if there are any.
fn listed(situation: &'static str, bounds: impl Iterator<Item = String>) -> Option<BoundRow> {
    let bounds: Vec<String> = bounds.collect();
    let shown = bounds[..bounds.len().min(MAX_LISTED_RULES)].join("; ");
    let more = bounds.len().saturating_sub(MAX_LISTED_RULES);
    let more = if more > 0 { format!("; {more} more") } else { String::new() };
    (!bounds.is_empty()).then(|| row(situation, shown + &more))
}

fn outage(rules: Option<&[Rule]>) -> String {
    let Some(rules) = rules else {
        return "by on_store_failure: closed N, local 2 N, open unlimited".to_owned();
    };
    let count = |policy| rules.iter().filter(|rule| rule.on_store_failure == policy).count();
    let kinds = [
        (OnStoreFailure::Closed, "closed: N"),
        (OnStoreFailure::Local, "local: 2 N"),
        (OnStoreFailure::Open, "open: unlimited"),
    ];
    let shown = kinds.into_iter().map(|(policy, most)| (count(policy), most)).filter(|(count, _)| *count > 0);
    let shown = shown.map(|(count, most)| match count {
        1 => format!("1 rule {most}"),
        count => format!("{count} rules {most}"),
    });
    shown.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sluicegate::{Limit, rules::LeaseSize};

    use super::*;

    #[test]
    fn the_weakest_persistence_determines_the_cost_of_a_restart() {
        let most = |all: &[Persistence]| restart(all.iter().copied());
        assert_eq!(most(&[Persistence::EveryWrite]), "N");
        assert!(most(&[Persistence::EveryWrite, Persistence::Log]).contains("last second"));
        assert!(most(&[Persistence::Log, Persistence::None]).contains("(1 + k) N"));
    }

    #[test]
    fn an_outage_lists_the_rules_by_failure_policy() {
        let limit = Limit::token_bucket(5, Duration::from_secs(60)).unwrap();
        let rule = |policy| Rule::new("r", limit).on_store_failure(policy);
        let rules = [OnStoreFailure::Open, OnStoreFailure::Closed, OnStoreFailure::Open].map(rule);
        assert_eq!(outage(Some(&rules)), "1 rule closed: N; 2 rules open: unlimited");
    }

    #[test]
    fn rules_with_a_lease_admit_that_much_more() {
        let limit = Limit::token_bucket(500, Duration::from_secs(60)).unwrap();
        let rules = [Rule::new("exact", limit), Rule::new("hot", limit).lease(LeaseSize::percent(2))];
        let most = leases(&rules).map(|row| row.most);
        assert_eq!(most.as_deref(), Some("hot: N + 10 (N is 500)"));
        assert_eq!(leases(&rules[..1]), None);
    }

    #[test]
    fn holds_of_units_admit_the_excess_of_their_settlements() {
        let limit = Limit::token_bucket(500, Duration::from_secs(60)).unwrap();
        let rules = [
            Rule::new("requests", limit),
            Rule::new("tokens", limit).unit("tokens").max_excess(40),
            Rule::new("bytes", limit).unit("bytes").max_excess(0),
            Rule::new("by envoy", limit).hold("request_id"),
            Rule::new("shadow", limit).unit("tokens").shadow(),
            Rule::new("streams", Limit::concurrency(8).unwrap()),
        ];
        let most = excess(&rules).map(|row| row.most);
        let expected = "tokens: N + 40 for each hold that is settled above its estimate; bytes: N; \
                        by envoy: N + 500 for each hold that is settled above its estimate";
        assert_eq!(most.as_deref(), Some(expected));
        assert_eq!(excess(&rules[..1]), None);
    }

    #[test]
    fn rules_for_requests_in_flight_admit_their_amount_at_any_time() {
        let rule = |name: &str, amount| Rule::new(name, Limit::concurrency(amount).unwrap());
        let most = |rules: &[Rule]| requests_in_flight(rules).map(|row| row.most);
        let rules = [rule("streams", 8), rule("shadow", 2).shadow()];
        let expected = "streams: N units in live holds at any time (N is 8)";
        assert_eq!(most(&rules).as_deref(), Some(expected));
        assert_eq!(most(&rules[1..]), None);
        let many: Vec<Rule> = (0..7).map(|number| rule(&format!("r{number}"), 1)).collect();
        assert!(most(&many).unwrap().ends_with("(N is 1); 2 more"));
    }

    #[test]
    fn replica_settings_bound_the_duration_of_a_partition() {
        let partition = |needs, lag| failover(Shape::Watched, needs, lag, &[]).pop().unwrap().most;
        assert_eq!(partition(0, Some(10)), "2 N, for the duration of the partition");
        assert_eq!(partition(1, Some(2)), "2 N, for about 4 s; then only one side decides");
        assert!(failover(Shape::Single, 0, None, &[]).is_empty());
    }
}
