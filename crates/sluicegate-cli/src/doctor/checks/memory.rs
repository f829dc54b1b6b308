//! Checks of memory and eviction.

use super::super::{
    facts::Info,
    finding::{Finding, see},
};
use crate::format;

/// Minimum memory use that is reported as advice, in percent of `maxmemory`.
const HIGH_PERCENT: u64 = 80;
/// Minimum memory use that is reported as a problem, in percent of `maxmemory`.
const CRITICAL_PERCENT: u64 = 95;

pub(super) fn check(info: &Info) -> Vec<Finding> {
    let (Some(used), Some(most)) = (info.number("used_memory"), info.number("maxmemory")) else {
        return Vec::new();
    };
    let mut findings = vec![memory(used, most)];
    let policy = info.text("maxmemory_policy").unwrap_or("unknown");
    let evicts = policy != "noeviction";
    let evicted = info.number("evicted_keys").unwrap_or(0);
    findings.push(if evicts {
        let when = if most == 0 { "as soon as maxmemory is set" } else { "when memory is short" };
        Finding::problem("eviction-policy", format!("maxmemory-policy is {policy}: counters are evicted {when}"))
            .why(
                "an evicted counter starts again at zero: a denied client gets a whole quota, and a client that floods \
                 Redis with keys can evict its own counter",
            )
            .remedy(
                "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf; move other caches to another server",
                see::SETTINGS,
            )
    } else {
        Finding::fine("eviction-policy", "maxmemory-policy is noeviction")
    });
    if evicted > 0 {
        let what = format!("{evicted} keys were evicted since the server started");
        let why = "each evicted counter granted one more quota";
        let remedy =
            "raise maxmemory, and set maxmemory-policy noeviction; CONFIG RESETSTAT resets this count";
        let finding = if evicts { Finding::problem } else { Finding::advice };
        findings.push(finding("evicted-keys", what).why(why).remedy(remedy, see::SETTINGS));
    }
    findings
}

fn memory(used: u64, most: u64) -> Finding {
    let used_text = format::bytes(used);
    if most == 0 {
        return Finding::advice("memory", format!("{used_text} used, maxmemory is not set"))
            .why("when memory is full, the machine swaps, which delays decisions, or kills Redis")
            .remedy(
                "CONFIG SET maxmemory to twice the size of your counters, and the same in redis.conf",
                see::SIZING,
            );
    }
    let what = format!("{used_text} of {} used", format::bytes(most));
    let why = "beyond maxmemory Redis rejects writes (OOM), and the failure policies decide";
    let remedy = "raise maxmemory, or find the largest keys: redis-cli --bigkeys";
    let percent = u128::from(used) * 100 / u128::from(most);
    if percent >= u128::from(CRITICAL_PERCENT) {
        Finding::problem("memory", what).why(why).remedy(remedy, see::SIZING)
    } else if percent >= u128::from(HIGH_PERCENT) {
        Finding::advice("memory", what).why(why).remedy(remedy, see::SIZING)
    } else {
        Finding::fine("memory", what)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, issues},
        *,
    };
    use crate::doctor::finding::Severity::{Advice, Problem};

    #[test]
    fn eviction_is_a_problem_before_and_after_it_happens() {
        let found = |policy: &str, most: u64, evicted: u64| {
            let lines = format!(
                "used_memory:10\nmaxmemory:{most}\nmaxmemory_policy:{policy}\nevicted_keys:{evicted}"
            );
            issues(&check(&info(&lines)))
        };
        assert_eq!(found("noeviction", 100, 0), []);
        assert_eq!(found("allkeys-lru", 100, 0), [(Problem, "eviction-policy")]);
        assert_eq!(found("volatile-ttl", 0, 0), [(Advice, "memory"), (Problem, "eviction-policy")]);
        assert_eq!(found("volatile-lru", 100, 2), [(Problem, "eviction-policy"), (Problem, "evicted-keys")]);
        assert_eq!(found("noeviction", 100, 2), [(Advice, "evicted-keys")]);
    }

    #[test]
    fn high_memory_use_is_reported_before_the_maximum_is_reached() {
        for (used, found) in [(79, None), (80, Some(Advice)), (94, Some(Advice)), (95, Some(Problem))] {
            let lines = format!("used_memory:{used}\nmaxmemory:100\nmaxmemory_policy:noeviction");
            let expected: Vec<_> = found.map(|severity| (severity, "memory")).into_iter().collect();
            assert_eq!(issues(&check(&info(&lines))), expected, "{used}");
        }
    }
}
