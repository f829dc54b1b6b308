//! What a restart loses, and whether the disk can stop decisions.

use super::super::{
    facts::{Info, Settings},
    finding::{Finding, see},
};

/// What is left after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Persistence {
    /// Nothing.
    None,
    /// The last snapshot.
    Snapshots,
    /// All but the last second or so.
    Log,
    /// Everything.
    EveryWrite,
    /// It does not tell whether there are snapshots.
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
            Self::None => "nothing is kept on disk: a restart grants one more quota",
            Self::Snapshots => "snapshots are kept: a restart forgets what was counted since the last",
            Self::Log => "an append-only file is kept: a restart forgets about the last second",
            Self::EveryWrite => "every write is kept on disk",
            Self::NoLog => "no append-only file is kept: a restart grants at most one more quota",
        }
    }
}

pub(super) fn judge(info: &Info, settings: &Settings) -> Vec<Finding> {
    let persistence = Persistence::of(info, settings);
    let mut findings = Vec::new();
    let log_fails = info.text("aof_last_write_status").is_some_and(|status| status != "ok");
    if info.is("aof_enabled", "1") && log_fails {
        findings.push(
            Finding::problem("append-only-file", "the last write to the append-only file failed")
                .why(
                    "Redis refuses to write while it cannot append (MISCONF), and the rules' policies decide",
                )
                .remedy("make room on the disk, or CONFIG SET appendonly no", see::WRONG),
        );
    }
    let stops = settings.text("stop-writes-on-bgsave-error");
    let snapshot_fails = info.text("rdb_last_bgsave_status").is_some_and(|status| status != "ok");
    if snapshot_fails && stops != Some("no") {
        findings.push(
            Finding::problem("snapshots", "the last snapshot failed")
                .why("by default that stops every decision (MISCONF), and the rules' policies decide")
                .remedy(
                    "make room on the disk, CONFIG SET stop-writes-on-bgsave-error no, or turn snapshots off: \
                     CONFIG SET save \"\"",
                    see::SETTINGS,
                ),
        );
    } else if stops == Some("yes") && settings.text("save").is_some_and(|times| !times.is_empty()) {
        findings.push(
            Finding::advice("snapshots", "a snapshot that fails would stop every decision")
                .why(
                    "with stop-writes-on-bgsave-error yes, a full disk makes Redis refuse to write (MISCONF)",
                )
                .remedy("CONFIG SET stop-writes-on-bgsave-error no, or CONFIG SET save \"\"", see::SETTINGS),
        );
    }
    if persistence == Persistence::EveryWrite {
        findings.push(
            Finding::advice("append-only-file", "appendfsync is always")
                .why("each decision waits for the disk, for counters that are worth little after a restart")
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
        super::tests::{info, settings, troubles},
        *,
    };
    use crate::doctor::finding::Severity::{Advice, Problem};

    #[test]
    fn a_disk_that_can_stop_decisions_is_named_before_and_after_it_does() {
        let found =
            |lines: &str, pairs: &[(&'static str, &str)]| troubles(&judge(&info(lines), &settings(pairs)));
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
    fn what_a_restart_leaves_is_known() {
        let of =
            |lines: &str, pairs: &[(&'static str, &str)]| Persistence::of(&info(lines), &settings(pairs));
        assert_eq!(of("aof_enabled:0", &[("save", "")]), Persistence::None);
        assert_eq!(of("aof_enabled:0", &[("save", "3600 1")]), Persistence::Snapshots);
        assert_eq!(of("aof_enabled:0", &[]), Persistence::NoLog);
        assert_eq!(of("aof_enabled:1", &[]), Persistence::Log);
        assert_eq!(of("aof_enabled:1", &[("appendfsync", "always")]), Persistence::EveryWrite);
    }
}
