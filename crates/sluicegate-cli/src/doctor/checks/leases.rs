//! Whether the leases of the rules can help with these servers and instances.

use std::time::Duration;

use sluicegate::Rule;

use crate::{
    doctor::finding::{Finding, see},
    format,
};

/// A lease helps if it lasts longer than this many round trips under demand at the limit.
const LEAST_ROUND_TRIPS: u32 = 2;
/// The most rules in one finding.
const MAX_RULES: usize = 5;

/// Checks the leases of the rules; `None` if no rule has one.
pub(crate) fn check(rules: &[Rule], instances: u32, round_trip: Duration) -> Option<Finding> {
    let leased = rules.iter().filter(|rule| rule.lease.is_some_and(|lease| !lease.is_none())).count();
    let useless: Vec<String> = rules.iter().filter_map(|rule| problem(rule, instances, round_trip)).collect();
    if leased == 0 {
        return None;
    }
    if useless.is_empty() {
        return Some(Finding::fine("leases", format!("{leased} of the rules have leases that can be drawn")));
    }
    let shown = useless.iter().take(MAX_RULES).cloned().collect::<Vec<_>>().join("; ");
    let why = "such a lease does not make hot keys faster";
    let remedy = "use a larger lease, or remove it";
    Some(Finding::advice("leases", shown).why(why).remedy(remedy, see::LEASES))
}

/// Describes why a lease does not help.
fn problem(rule: &Rule, instances: u32, round_trip: Duration) -> Option<String> {
    let lease = rule.lease.filter(|lease| !lease.is_none())?;
    let (amount, name) = (rule.limit.amount(), &rule.name);
    let units = lease.units_of(amount);
    if units < u64::from(instances) {
        return Some(format!(
            "rule {name:?}: a lease of {units} units is less than one unit for each of {instances} instances, and never drawn"
        ));
    }
    let micros = u128::from(rule.limit.window_us()) * u128::from(units) / u128::from(amount);
    let lasts = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
    (lasts < round_trip * LEAST_ROUND_TRIPS).then(|| {
        let (lasts, round_trip) = (format::duration(lasts), format::duration(round_trip));
        format!("rule {name:?}: demand at the limit uses up a lease within {lasts}, and a round trip takes {round_trip}")
    })
}

#[cfg(test)]
mod tests {
    use sluicegate::{Limit, rules::LeaseSize};

    use super::*;
    use crate::doctor::finding::Severity;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn finding(lease: LeaseSize, instances: u32, round_trip: Duration) -> Option<Finding> {
        let limit = Limit::token_bucket(1_000, Duration::from_secs(1)).unwrap();
        check(&[Rule::new("hot", limit).lease(lease)], instances, round_trip)
    }

    #[test]
    fn a_lease_that_is_too_small_is_reported() {
        let severity =
            |lease, instances, round_trip| finding(lease, instances, round_trip).map(|found| found.severity);
        let percent = LeaseSize::percent(1);
        assert_eq!(severity(percent, 10, 5 * MILLISECOND), Some(Severity::Fine));
        assert_eq!(
            severity(percent, 11, MILLISECOND),
            Some(Severity::Advice),
            "less than one unit per instance"
        );
        assert_eq!(severity(percent, 1, 6 * MILLISECOND), Some(Severity::Advice), "10 ms at full demand");
        assert_eq!(severity(LeaseSize::NONE, 1, MILLISECOND), None);
    }
}
