//! Checks of persistence: what a restart loses, and whether disk errors can stop decisions.

use super::super::{
    facts::{Info, Settings},
    finding::{Finding, see},
};

/// What survives a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Persistence {
    /// Nothing.
    None,
    /// The last snapshot.
    Snapshots,
    /// All but about the last second.
    Log,
    /// Everything.
    EveryWrite,
    /// No append-only file; whether there are snapshots is unknown.
    NoLog,
}

impl Persistence {
    pub(crate) fn of(info: &Info, settings: &Settings) -> Self {
        match (info.is("aof_enabled", "1"), settings.text("appendfsync"), settings.text("save")) {
            (true, Some("always"), _) => Self::EveryWrite,
            (true, ..) => Self::Log,
            (false, _, Some("")) => Self::None,
            (false, _, Some(_)) => Self::Snapshots,
            (false, _, None) => Self::NoLog,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::None => "no persistence: a restart grants one more quota",
            Self::Snapshots => "snapshots: a restart loses what was counted since the last one",
            Self::Log => "append-only file: a restart loses about the last second",
            Self::EveryWrite => "append-only file, written synchronously: a restart loses nothing",
            Self::NoLog => "no append-only file: a restart grants at most one more quota",
        }
    }
}

pub(super) fn check(info: &Info, settings: &Settings) -> Vec<Finding> {
    let persistence = Persistence::of(info, settings);
    let mut findings = Vec::new();
    let log_fails = info.text("aof_last_write_status").is_some_and(|status| status != "ok");
    if info.is("aof_enabled", "1") && log_fails {
        findings.push(
            Finding::problem("append-only-file", "the last write to the append-only file failed")
                .why("Redis rejects writes while it cannot append (MISCONF), and the failure policies decide")
                .remedy("free disk space, or CONFIG SET appendonly no", see::WRONG),
        );
    }
    let stops = settings.text("stop-writes-on-bgsave-error");
    let snapshot_fails = info.text("rdb_last_bgsave_status").is_some_and(|status| status != "ok");
    if snapshot_fails && stops != Some("no") {
        findings.push(
            Finding::problem("snapshots", "the last snapshot failed")
                .why("by default this stops all writes (MISCONF), and the failure policies decide")
                .remedy(
                    "free disk space, CONFIG SET stop-writes-on-bgsave-error no, or disable snapshots: CONFIG SET save \"\"",
                    see::SETTINGS,
                ),
        );
    } else if stops == Some("yes") && settings.text("save").is_some_and(|times| !times.is_empty()) {
        findings.push(
            Finding::advice("snapshots", "a failed snapshot would stop all decisions")
                .why("with stop-writes-on-bgsave-error yes, a full disk makes Redis reject writes (MISCONF)")
                .remedy("CONFIG SET stop-writes-on-bgsave-error no, or CONFIG SET save \"\"", see::SETTINGS),
        );
    }
    if persistence == Persistence::EveryWrite {
        findings.push(
            Finding::advice("append-only-file", "appendfsync is always")
                .why("each decision waits for the disk, although counters have little value after a restart")
                .remedy("CONFIG SET appendfsync everysec", see::SETTINGS),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::fine("persistence", persistence.text()));
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

    #[test]
    fn disk_errors_that_can_stop_decisions_are_reported() {
        let found =
            |lines: &str, pairs: &[(&'static str, &str)]| issues(&check(&info(lines), &settings(pairs)));
        let keeps = ("stop-writes-on-bgsave-error", "no");
        let stops = ("stop-writes-on-bgsave-error", "yes");
        assert_eq!(found("aof_enabled:0\nrdb_last_bgsave_status:ok", &[("save", ""), stops]), []);
        assert_eq!(found("rdb_last_bgsave_status:ok", &[("save", "60 1"), keeps]), []);
        assert_eq!(found("rdb_last_bgsave_status:ok", &[("save", "60 1"), stops]), [(Advice, "snapshots")]);
        assert_eq!(found("rdb_last_bgsave_status:err", &[("save", "60 1"), stops]), [(Problem, "snapshots")]);
        assert_eq!(found("rdb_last_bgsave_status:err", &[]), [(Problem, "snapshots")]);
        assert_eq!(found("rdb_last_bgsave_status:err", &[("save", "60 1"), keeps]), []);
        let log = "aof_enabled:1\naof_last_write_status:err";
        assert_eq!(found(log, &[]), [(Problem, "append-only-file")]);
        let always = [("appendfsync", "always")];
        assert_eq!(found("aof_enabled:1\naof_last_write_status:ok", &always), [(Advice, "append-only-file")]);
    }

    #[test]
    fn persistence_is_derived_from_info_and_settings() {
        let of =
            |lines: &str, pairs: &[(&'static str, &str)]| Persistence::of(&info(lines), &settings(pairs));
        assert_eq!(of("aof_enabled:0", &[("save", "")]), Persistence::None);
        assert_eq!(of("aof_enabled:0", &[("save", "3600 1")]), Persistence::Snapshots);
        assert_eq!(of("aof_enabled:0", &[]), Persistence::NoLog);
        assert_eq!(of("aof_enabled:1", &[]), Persistence::Log);
        assert_eq!(of("aof_enabled:1", &[("appendfsync", "always")]), Persistence::EveryWrite);
    }
}
