//! Check of the server's version against known vulnerabilities.

use std::fmt::{self, Display, Formatter};

use super::super::{
    facts::Info,
    finding::{Finding, see},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    Redis,
    Valkey,
}

/// The version of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    product: Product,
    /// Major and minor.
    series: (u32, u32),
    patch: u32,
}

/// The oldest Redis that sluicegate is tested with.
const OLDEST_REDIS: (u32, u32) = (6, 2);

/// A vulnerability and its first fixed patch in each series. `docs/doctor.md` has the sources.
struct Vulnerability {
    product: Product,
    name: &'static str,
    what: &'static str,
    /// Whether only servers with TLS are affected.
    tls_only: bool,
    fixed: &'static [((u32, u32), u32)],
    /// Whether series older than those listed are affected.
    affects_older_series: bool,
}

const VULNERABILITIES: [Vulnerability; 5] = [
    Vulnerability {
        product: Product::Redis,
        name: "CVE-2025-49844",
        what: "clients that can run scripts can execute code on the server",
        tls_only: false,
        fixed: &[((6, 2), 20), ((7, 2), 11), ((7, 4), 6), ((8, 0), 4), ((8, 2), 2)],
        affects_older_series: true,
    },
    Vulnerability {
        product: Product::Redis,
        name: "CVE-2026-81934",
        what: "clients that can connect over TLS can execute code on the server",
        tls_only: true,
        fixed: &[((8, 2), 9), ((8, 4), 6), ((8, 6), 6), ((8, 8), 2), ((8, 10), 1)],
        affects_older_series: false,
    },
    Vulnerability {
        product: Product::Valkey,
        name: "CVE-2025-49844",
        what: "clients that can run scripts can execute code on the server",
        tls_only: false,
        fixed: &[((7, 2), 11), ((8, 0), 6), ((8, 1), 4)],
        affects_older_series: true,
    },
    Vulnerability {
        product: Product::Valkey,
        name: "CVE-2026-56684",
        what: "clients that can send CLIENT KILL over TLS can execute code on the server",
        tls_only: true,
        fixed: &[((8, 1), 9), ((9, 0), 5), ((9, 1), 1)],
        affects_older_series: false,
    },
    Vulnerability {
        product: Product::Valkey,
        name: "GHSA-fq2f-crmw-q97r",
        what: "use after free in the script engine, without authentication",
        tls_only: false,
        fixed: &[((9, 1), 2)],
        affects_older_series: false,
    },
];

pub(super) fn check(info: &Info, is_encrypted: bool) -> Finding {
    let Some(version) = Version::read(info) else {
        return Finding::unknown("version", "version not checked: INFO contains none")
            .remedy("check that this is Redis 6.2 or newer, or Valkey", see::VERSIONS);
    };
    if version.product == Product::Redis && version.series < OLDEST_REDIS {
        return Finding::problem("version", format!("{version} is not supported"))
            .why("required scripting features, commands and ACL rules may be missing; sluicegate is not tested with it")
            .remedy("use Redis 6.2 or newer, or Valkey", see::VERSIONS);
    }
    let has = |vulnerability: &&Vulnerability| {
        version.has(vulnerability) && (is_encrypted || !vulnerability.tls_only)
    };
    let vulnerabilities: Vec<&Vulnerability> = VULNERABILITIES.iter().filter(has).collect();
    if vulnerabilities.is_empty() {
        return Finding::fine("version", version.to_string());
    }
    let names: Vec<String> = vulnerabilities
        .iter()
        .map(|vulnerability| format!("{} ({})", vulnerability.name, vulnerability.what))
        .collect();
    let releases: Vec<String> =
        vulnerabilities.iter().map(|vulnerability| vulnerability.releases()).collect();
    Finding::advice("version", format!("{version} is affected by {}", names.join(", ")))
        .why("a leaked password would then give access to more than counters")
        .remedy(
            format!(
                "upgrade to {}; if your distribution or provider backports fixes without changing the version number, check \
                 there whether it is fixed",
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

    fn has(self, vulnerability: &Vulnerability) -> bool {
        if self.product != vulnerability.product {
            return false;
        }
        let fixed = vulnerability.fixed.iter().find(|(series, _)| *series == self.series);
        let is_older = vulnerability.fixed.iter().any(|(series, _)| self.series < *series);
        match fixed {
            Some((_, patch)) => self.patch < *patch,
            None => vulnerability.affects_older_series && is_older,
        }
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { product, series: (major, minor), patch } = self;
        write!(f, "{product:?} {major}.{minor}.{patch}")
    }
}

impl Vulnerability {
    /// The fixed releases.
    fn releases(&self) -> String {
        let release = |((major, minor), patch): &((u32, u32), u32)| format!("{major}.{minor}.{patch}");
        self.fixed.iter().map(release).collect::<Vec<_>>().join(", ") + " or newer"
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{info, issues},
        *,
    };
    use crate::doctor::finding::Severity;

    fn found(lines: &str, is_encrypted: bool) -> Option<(Severity, String)> {
        let finding = check(&info(lines), is_encrypted);
        let issue = issues(std::slice::from_ref(&finding)).pop()?;
        Some((issue.0, finding.what))
    }

    #[test]
    fn versions_before_a_fixed_release_are_reported() {
        let affected = |lines: &str, is_encrypted, vulnerability: &str| {
            let (severity, what) = found(lines, is_encrypted).unwrap_or_else(|| panic!("{lines} is fine"));
            assert_eq!(severity, Severity::Advice, "{lines}");
            assert!(what.contains(vulnerability), "{lines}: {what}");
        };
        affected("redis_version:7.0.15", false, "CVE-2025-49844");
        affected("redis_version:6.2.14", false, "CVE-2025-49844");
        affected("redis_version:8.8.1", true, "CVE-2026-81934");
        affected("redis_version:7.2.4\nvalkey_version:8.1.3", false, "CVE-2025-49844");
        affected("redis_version:7.2.4\nvalkey_version:9.1.0", true, "CVE-2026-56684");
        affected("redis_version:7.2.4\nvalkey_version:9.1.1", false, "GHSA-fq2f-crmw-q97r");
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
    fn an_unsupported_version_is_a_problem_and_an_unknown_one_is_not_checked() {
        assert_eq!(found("redis_version:5.0.14", false).unwrap().0, Severity::Problem);
        assert_eq!(found("redis_version:unstable", false).unwrap().0, Severity::Unknown);
    }
}
