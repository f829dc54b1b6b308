//! A finding: the result of one check.

use anstyle::Style;
use serde::Serialize;

use crate::{
    format,
    output::{DIM, ERROR, SUCCESS, WARNING},
};

/// The severity of a finding, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Limits or decisions fail, or will soon.
    Problem,
    /// It works and could be improved.
    Advice,
    /// It could not be checked.
    Unknown,
    /// It is as recommended.
    Fine,
}

impl Severity {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Advice => "advice",
            Self::Unknown => "unknown",
            Self::Fine => "fine",
        }
    }

    pub(crate) fn style(self) -> Style {
        match self {
            Self::Problem => ERROR,
            Self::Advice => WARNING,
            Self::Unknown => DIM,
            Self::Fine => SUCCESS,
        }
    }
}

/// Links to the documentation.
pub(crate) mod see {
    pub(crate) const WHERE: &str = "docs/redis.md#store-url";
    pub(crate) const USER: &str = "docs/redis.md#acl-user";
    pub(crate) const SETTINGS: &str = "docs/redis.md#server-settings";
    pub(crate) const SENTINEL: &str = "docs/redis.md#sentinel";
    pub(crate) const CLUSTER: &str = "docs/redis.md#cluster";
    pub(crate) const WRONG: &str = "docs/redis.md#troubleshooting";
    pub(crate) const LEASES: &str = "docs/leases.md#where-leases-do-not-help";
    pub(crate) const SIZING: &str = "docs/redis.md#sizing";
    pub(crate) const VERSIONS: &str = "docs/doctor.md#versions";
    pub(crate) const KEYS: &str = "docs/doctor.md#keys";
    pub(crate) const HOLDS: &str = "docs/doctor.md#holds";
    pub(crate) const CLOCKS: &str = "docs/doctor.md#clocks";
    pub(crate) const DOCTORS_USER: &str = "docs/doctor.md#acl-user-for-the-doctor";
}

/// The result of one check. Texts may quote the store, so control characters in them are escaped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// A stable name for scripts, explained in `docs/doctor.md`.
    pub(crate) id: &'static str,
    /// The server; none if it concerns all servers.
    pub(crate) server: Option<String>,
    pub(crate) what: String,
    /// Why it matters.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) why: String,
    /// How to fix it.
    #[serde(rename = "do", skip_serializing_if = "String::is_empty")]
    pub(crate) remedy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) see: Option<&'static str>,
}

impl Finding {
    pub(crate) fn new(severity: Severity, id: &'static str, what: impl Into<String>) -> Self {
        Self {
            severity,
            id,
            server: None,
            what: format::printable(&what.into()),
            why: String::new(),
            remedy: String::new(),
            see: None,
        }
    }

    pub(crate) fn problem(id: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Problem, id, what)
    }

    pub(crate) fn advice(id: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Advice, id, what)
    }

    pub(crate) fn unknown(id: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Unknown, id, what)
    }

    pub(crate) fn fine(id: &'static str, what: impl Into<String>) -> Self {
        Self::new(Severity::Fine, id, what)
    }

    pub(crate) fn why(mut self, why: impl Into<String>) -> Self {
        self.why = format::printable(&why.into());
        self
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>, see: &'static str) -> Self {
        self.remedy = format::printable(&remedy.into());
        self.see = Some(see);
        self
    }

    pub(crate) fn at(mut self, server: &str) -> Self {
        self.server = Some(format::printable(server));
        self
    }
}
