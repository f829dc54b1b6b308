//! Which server it is, and what is known to be wrong with that version.

use std::fmt::{self, Display, Formatter};

use super::super::{
    facts::Info,
    finding::{Finding, see},
};

/// Who makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    Redis,
    Valkey,
}

/// A version of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    product: Product,
    /// Major and minor.
    series: (u32, u32),
    patch: u32,
}

/// The oldest that tollgate is tested with.
const OLDEST: (u32, u32) = (6, 2);

/// A flaw that lets callers do more than they may, and with which patch of each series it ends. `docs/doctor.md` has the sources.
struct Flaw {
    product: Product,
    name: &'static str,
    what: &'static str,
    /// Whether only servers that speak TLS have it.
    is_of_tls: bool,
    fixed: &'static [((u32, u32), u32)],
    /// Whether series that are not named, and older than those that are, have it for ever.
    is_in_older_series: bool,
}

const FLAWS: [Flaw; 5] = [
    Flaw {
        product: Product::Redis,
        name: "CVE-2025-49844",
        what: "who may send scripts may run code on the server",
        is_of_tls: false,
        fixed: &[((6, 2), 20), ((7, 2), 11), ((7, 4), 6), ((8, 0), 4), ((8, 2), 2)],
        is_in_older_series: true,
    },
    Flaw {
        product: Product::Redis,
        name: "CVE-2026-81934",
        what: "who can connect by TLS may run code on the server",
        is_of_tls: true,
        fixed: &[((8, 2), 9), ((8, 4), 6), ((8, 6), 6), ((8, 8), 2), ((8, 10), 1)],
        is_in_older_series: false,
    },
    Flaw {
        product: Product::Valkey,
        name: "CVE-2025-49844",
        what: "who may send scripts may run code on the server",
        is_of_tls: false,
        fixed: &[((7, 2), 11), ((8, 0), 6), ((8, 1), 4)],
        is_in_older_series: true,
    },
    Flaw {
        product: Product::Valkey,
        name: "CVE-2026-56684",
        what: "who may send CLIENT KILL by TLS may run code on the server",
        is_of_tls: true,
        fixed: &[((8, 1), 9), ((9, 0), 5), ((9, 1), 1)],
        is_in_older_series: false,
    },
    Flaw {
        product: Product::Valkey,
        name: "GHSA-fq2f-crmw-q97r",
        what: "memory of the script engine is used after it is freed, also for who has not logged in",
        is_of_tls: false,
        fixed: &[((9, 1), 2)],
        is_in_older_series: false,
    },
];

pub(super) fn judge(info: &Info, is_encrypted: bool) -> Finding {
    let Some(version) = Version::read(info) else {
        return Finding::unseen("version", "its version: INFO names none")
            .remedy("look whether this is Redis 6.2 or newer, or Valkey", see::VERSIONS);
    };
    if version.product == Product::Redis && version.series < OLDEST {
        return Finding::problem("version", format!("{version} is older than tollgate supports"))
            .why("scripts, commands and rights that it needs may be missing, and no test says otherwise")
            .remedy("use Redis 6.2 or newer, or Valkey", see::VERSIONS);
    }
    let has = |flaw: &&Flaw| version.has(flaw) && (is_encrypted || !flaw.is_of_tls);
    let flaws: Vec<&Flaw> = FLAWS.iter().filter(has).collect();
    if flaws.is_empty() {
        return Finding::fine("version", version.to_string());
    }
    let names: Vec<String> = flaws.iter().map(|flaw| format!("{} ({})", flaw.name, flaw.what)).collect();
    let releases: Vec<String> = flaws.iter().map(|flaw| flaw.releases()).collect();
    Finding::advice("version", format!("{version} came before the fix of {}", names.join(", ")))
        .why("a password that leaks would then open more than counters")
        .remedy(
            format!(
                "upgrade to {}; if a distribution or a provider patches this version without changing its number, \
                 ask there whether the fix is in",
                releases.join(", and for the other to ")
            ),
            see::VERSIONS,
        )
}

impl Version {
    pub(crate) fn read(info: &Info) -> Option<Self> {
        let (product, text) = match info.text("valkey_version") {
            Some(text) => (Product::Valkey, text),
            None => (Product::Redis, info.text("redis_version")?),
        };
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        let (major, minor, patch) = (numbers.next()??, numbers.next()??, numbers.next()??);
        Some(Self { product, series: (major, minor), patch })
    }

    fn has(self, flaw: &Flaw) -> bool {
        if self.product != flaw.product {
            return false;
        }
        let fixed = flaw.fixed.iter().find(|(series, _)| *series == self.series);
        let is_older = flaw.fixed.iter().any(|(series, _)| self.series < *series);
        match fixed {
            Some((_, patch)) => self.patch < *patch,
            None => flaw.is_in_older_series && is_older,
        }
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { product, series: (major, minor), patch } = self;
        write!(f, "{product:?} {major}.{minor}.{patch}")
    }
}

impl Flaw {
    /// From where on it is gone.
    fn releases(&self) -> String {
        let release = |((major, minor), patch): &((u32, u32), u32)| format!("{major}.{minor}.{patch}");
        self.fixed.iter().map(release).collect::<Vec<_>>().join(", ") + " or newer"
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, troubles},
        *,
    };
    use crate::doctor::finding::Severity;

    fn found(lines: &str, is_encrypted: bool) -> Option<(Severity, String)> {
        let finding = judge(&info(lines), is_encrypted);
        let trouble = troubles(std::slice::from_ref(&finding)).pop()?;
        Some((trouble.0, finding.what))
    }

    #[test]
    fn versions_are_judged_by_the_releases_that_mended_them() {
        let flawed = |lines: &str, is_encrypted, flaw: &str| {
            let (severity, what) = found(lines, is_encrypted).unwrap_or_else(|| panic!("{lines} is fine"));
            assert_eq!(severity, Severity::Advice, "{lines}");
            assert!(what.contains(flaw), "{lines}: {what}");
        };
        flawed("redis_version:7.0.15", false, "CVE-2025-49844");
        flawed("redis_version:6.2.14", false, "CVE-2025-49844");
        flawed("redis_version:8.8.1", true, "CVE-2026-81934");
        flawed("redis_version:7.2.4\nvalkey_version:8.1.3", false, "CVE-2025-49844");
        flawed("redis_version:7.2.4\nvalkey_version:9.1.0", true, "CVE-2026-56684");
        flawed("redis_version:7.2.4\nvalkey_version:9.1.1", false, "GHSA-fq2f-crmw-q97r");
        for (lines, is_encrypted) in [
            ("redis_version:6.2.20", false),
            ("redis_version:7.2.11", true),
            ("redis_version:8.8.1", false),
            ("redis_version:8.4.0", false),
            ("redis_version:8.12.0", true),
            ("redis_version:7.2.4\nvalkey_version:9.1.2", true),
            ("redis_version:7.2.4\nvalkey_version:9.0.0", false),
        ] {
            assert_eq!(found(lines, is_encrypted), None, "{lines}");
        }
    }

    #[test]
    fn a_version_that_is_too_old_is_a_problem_and_none_is_not_seen() {
        assert_eq!(found("redis_version:5.0.14", false).unwrap().0, Severity::Problem);
        assert_eq!(found("redis_version:unstable", false).unwrap().0, Severity::Unseen);
    }
}
