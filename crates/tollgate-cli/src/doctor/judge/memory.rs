//! Whether counters are forgotten for want of memory.

use super::super::{
    facts::Info,
    finding::{Finding, see},
};
use crate::output;

/// From which share of `maxmemory` on it is time to act, and from which it is too late, in percent.
const FULL_PERCENT: u64 = 80;
const OVERFULL_PERCENT: u64 = 95;

pub(super) fn judge(info: &Info) -> Vec<Finding> {
    let (Some(used), Some(most)) = (info.number("used_memory"), info.number("maxmemory")) else {
        return Vec::new();
    };
    let mut findings = vec![memory(used, most)];
    let policy = info.text("maxmemory_policy").unwrap_or("unknown");
    let evicts = policy != "noeviction";
    let evicted = info.number("evicted_keys").unwrap_or(0);
    findings.push(if evicts {
        let when = if most == 0 { "as soon as maxmemory is set" } else { "when memory is short" };
        Finding::problem("eviction-policy", format!("maxmemory-policy is {policy}: counters go {when}"))
            .why(
                "an evicted counter is a fresh one: whoever was refused gets a whole quota, and who floods Redis with \
                 keys can evict their own refusals",
            )
            .remedy(
                "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf; what else is cached on this server \
                 needs one of its own",
                see::SETTINGS,
            )
    } else {
        Finding::fine("eviction-policy", "maxmemory-policy is noeviction")
    });
    if evicted > 0 {
        let what = format!("{evicted} keys were evicted since the server started");
        let why = "each of them that was a counter granted a quota once more";
        let remedy = "raise maxmemory, and set maxmemory-policy noeviction; CONFIG RESETSTAT counts anew";
        let finding = if evicts { Finding::problem } else { Finding::advice };
        findings.push(finding("evicted-keys", what).why(why).remedy(remedy, see::SETTINGS));
    }
    findings
}

fn memory(used: u64, most: u64) -> Finding {
    let used_text = output::bytes(used);
    if most == 0 {
        return Finding::advice("memory", format!("{used_text} are used, and maxmemory is not set"))
            .why("what ends memory then is the machine: it swaps, which makes decisions late, or kills Redis")
            .remedy(
                "CONFIG SET maxmemory to twice what your counters take, and the same in redis.conf",
                see::SIZING,
            );
    }
    let what = format!("{used_text} of {} are used", output::bytes(most));
    let why = "beyond maxmemory Redis refuses to write (OOM), and the rules' policies decide";
    let remedy = "raise maxmemory, or find out whose keys these are: redis-cli --bigkeys";
    let percent = u128::from(used) * 100 / u128::from(most);
    if percent >= u128::from(OVERFULL_PERCENT) {
        Finding::problem("memory", what).why(why).remedy(remedy, see::SIZING)
    } else if percent >= u128::from(FULL_PERCENT) {
        Finding::advice("memory", what).why(why).remedy(remedy, see::SIZING)
    } else {
        Finding::fine("memory", what)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, troubles},
        *,
    };
    use crate::doctor::finding::Severity::{Advice, Problem};

    #[test]
    fn eviction_is_a_problem_also_before_it_happens_and_what_was_evicted_is_told() {
        let found = |policy: &str, most: u64, evicted: u64| {
            let lines = format!(
                "used_memory:10\nmaxmemory:{most}\nmaxmemory_policy:{policy}\nevicted_keys:{evicted}"
            );
            troubles(&judge(&info(&lines)))
        };
        assert_eq!(found("noeviction", 100, 0), []);
        assert_eq!(found("allkeys-lru", 100, 0), [(Problem, "eviction-policy")]);
        assert_eq!(found("volatile-ttl", 0, 0), [(Advice, "memory"), (Problem, "eviction-policy")]);
        assert_eq!(found("volatile-lru", 100, 2), [(Problem, "eviction-policy"), (Problem, "evicted-keys")]);
        assert_eq!(found("noeviction", 100, 2), [(Advice, "evicted-keys")]);
    }

    #[test]
    fn memory_is_short_before_it_ends() {
        for (used, found) in [(79, None), (80, Some(Advice)), (94, Some(Advice)), (95, Some(Problem))] {
            let lines = format!("used_memory:{used}\nmaxmemory:100\nmaxmemory_policy:noeviction");
            let expected: Vec<_> = found.map(|severity| (severity, "memory")).into_iter().collect();
            assert_eq!(troubles(&judge(&info(&lines))), expected, "{used}");
        }
    }
}
