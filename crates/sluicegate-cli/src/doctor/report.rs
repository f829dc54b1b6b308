//! The report, as text and JSON.

use std::time::Duration;

use serde::Serialize;
use sluicegate::{redis::inspect::Shape, stats::Skew};

use super::{
    admission_bound::BoundRow,
    checks::Version,
    facts::ServerFacts,
    finding::{Finding, Severity},
    holds::{HOLD_FINDINGS, HoldScan, RuleHolds},
    keys::{KeyScan, RuleMemory},
    repair::Repaired,
};
use crate::{
    ExitStatus, format,
    output::{self, Align, Cell, DIM, HEADING, OutputFormat, Table, paint},
};

/// The line width of reasons and remedies.
const TEXT_WIDTH: usize = 90;

/// The report.
#[derive(Serialize)]
pub(crate) struct DoctorReport {
    /// Without user and password.
    store: String,
    shape: Option<&'static str>,
    problems: usize,
    advice: usize,
    servers: Vec<ServerSummary>,
    /// Worst first.
    findings: Vec<Finding>,
    rules: Vec<RuleMemory>,
    holds: Vec<RuleHolds>,
    keys: Option<KeySummary>,
    bound: Vec<BoundRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repaired: Option<Repaired>,
    #[serde(skip)]
    round_trips: Vec<Vec<Duration>>,
}

#[derive(Serialize)]
struct ServerSummary {
    address: String,
    version: Option<String>,
    median_us: u64,
    slowest_us: u64,
    /// Positive if the server's clock is ahead.
    clock_skew_us: Option<i64>,
    used_memory: Option<u64>,
    maxmemory: Option<u64>,
    evicted_keys: Option<u64>,
    replicas: Option<usize>,
}

#[derive(Serialize)]
struct KeySummary {
    #[serde(rename = "looked_at")]
    scanned: u64,
    #[serde(rename = "ours")]
    own: u64,
    without_ttl: u64,
    orphans: u64,
    complete: bool,
}

impl DoctorReport {
    /// Creates a report with findings only.
    pub(crate) fn new(store: String, findings: Vec<Finding>) -> Self {
        let mut report = Self {
            store,
            shape: None,
            problems: 0,
            advice: 0,
            servers: Vec::new(),
            findings,
            rules: Vec::new(),
            holds: Vec::new(),
            keys: None,
            bound: Vec::new(),
            repaired: None,
            round_trips: Vec::new(),
        };
        report.sort_and_count();
        report
    }

    pub(crate) fn with_servers(mut self, shape: Shape, servers: &[ServerFacts]) -> Self {
        self.shape = Some(match shape {
            Shape::Single => "single",
            Shape::Watched => "sentinel",
            Shape::Cluster => "cluster",
        });
        self.servers = servers.iter().map(ServerSummary::new).collect();
        self.round_trips = servers.iter().map(|facts| facts.round_trips.clone()).collect();
        self
    }

    pub(crate) fn with_keys(mut self, keys: &KeyScan) -> Self {
        self.rules = keys.memory();
        self.keys = Some(KeySummary {
            scanned: keys.scanned,
            own: keys.own,
            without_ttl: keys.without_ttl.count,
            orphans: keys.orphans.count,
            complete: keys.is_complete,
        });
        self
    }

    /// Adds the holds and their findings.
    pub(crate) fn with_holds(mut self, holds: &HoldScan) -> Self {
        self.findings.extend(holds.findings());
        self.holds = holds.rules.clone();
        self.sort_and_count();
        self
    }

    /// Replaces the holds and their findings, after a repair.
    pub(crate) fn replace_holds(&mut self, holds: HoldScan) {
        self.findings.retain(|finding| !HOLD_FINDINGS.contains(&finding.id));
        self.findings.extend(holds.findings());
        self.holds = holds.rules;
        self.sort_and_count();
    }

    pub(crate) fn with_bound(mut self, bound: Vec<BoundRow>) -> Self {
        self.bound = bound;
        self
    }

    /// Replaces the findings of fixed problems.
    pub(crate) fn mark_repaired(&mut self, repaired: Repaired, keys: &KeyScan) {
        let replace = |id: &str, done: String, findings: &mut Vec<Finding>| {
            for finding in findings.iter_mut().filter(|finding| finding.id == id) {
                *finding = Finding::fine(finding.id, done.clone());
            }
        };
        if repaired.expiring > 0 && keys.without_ttl.keys.len() as u64 == keys.without_ttl.count {
            let done = format!("fixed: set a TTL on {}", format::plural(repaired.expiring, "key", "keys"));
            replace("no-ttl", done, &mut self.findings);
        }
        if repaired.removed > 0 {
            let removed = format::plural(repaired.removed, "orphaned counter", "orphaned counters");
            let done = match keys.orphans.count.saturating_sub(repaired.removed) {
                0 => format!("fixed: removed {removed}"),
                kept => format!("fixed: removed {removed}; {kept} are kept until they expire"),
            };
            replace("orphans", done, &mut self.findings);
        }
        self.repaired = Some(repaired);
        self.sort_and_count();
    }

    fn sort_and_count(&mut self) {
        self.findings.sort_by_key(|finding| finding.severity);
        let count = |severity| self.findings.iter().filter(|finding| finding.severity == severity).count();
        (self.problems, self.advice) = (count(Severity::Problem), count(Severity::Advice));
    }

    pub(crate) fn exit_status(&self) -> ExitStatus {
        if self.problems > 0 { ExitStatus::Negative } else { ExitStatus::Success }
    }

    pub(crate) fn print(&self, format: OutputFormat) -> Result<(), serde_json::Error> {
        output::report(format, self, || self.print_text())
    }

    fn print_text(&self) {
        let shape = match self.shape {
            Some("sentinel") => " (Sentinel)",
            Some("cluster") => " (Cluster)",
            _ => "",
        };
        output::line(paint(HEADING, format_args!("{}{shape}", self.store)));
        for (server, round_trips) in self.servers.iter().zip(&self.round_trips) {
            output::line("");
            let version = server.version.as_deref().unwrap_or("version unknown");
            output::line(format_args!("{}  {}", paint(HEADING, &server.address), paint(DIM, version)));
            output::line(paint(DIM, format_args!("  {} round trips", round_trips.len())));
            for bar in output::bars(&histogram(round_trips)) {
                output::line(format_args!("  {bar}"));
            }
        }
        self.print_findings();
        if self.rules.iter().any(|of_rule| of_rule.sampled > 0) {
            output::line("");
            output::line(paint(HEADING, "Memory by rule"));
            output::line(memory(&self.rules));
        }
        if !self.holds.is_empty() {
            output::line("");
            output::line(paint(HEADING, "Holds by rule"));
            output::line(holds(&self.holds));
        }
        if !self.bound.is_empty() {
            output::line("");
            output::line(format_args!(
                "{} {}",
                paint(HEADING, "Maximum admitted in any window"),
                paint(DIM, "(N: what the limit's algorithm admits)")
            ));
            let mut table = Table::new([("situation", Align::Left), ("maximum", Align::Left)]);
            for BoundRow { situation, most } in &self.bound {
                table.row([situation.into(), most.into()]);
            }
            output::line(table);
        }
        output::line("");
        output::line(self.summary());
    }

    /// Prints problems in full and fine checks on one line each.
    fn print_findings(&self) {
        let (several, mut is_fine) = (self.servers.len() > 1, false);
        for finding in &self.findings {
            let Finding { severity, id, server, what, why, remedy, see } = finding;
            if *severity != Severity::Fine || !is_fine {
                output::line("");
            }
            is_fine = *severity == Severity::Fine;
            let name = paint(severity.style(), format_args!("{:<8}", severity.name()));
            let place = match server {
                Some(server) if several => paint(DIM, format_args!(" {server}")),
                _ => String::new(),
            };
            output::line(format_args!("{name} {what}{place} {}", paint(DIM, format_args!("[{id}]"))));
            let words = [("why", why.as_str()), ("do", remedy), ("see", see.unwrap_or(""))];
            for (title, text) in words.into_iter().filter(|(_, text)| !text.is_empty()) {
                let mut title = paint(DIM, format_args!("{title:<3}"));
                for line in textwrap::wrap(text, TEXT_WIDTH) {
                    output::line(format_args!("         {title} {line}"));
                    "   ".clone_into(&mut title);
                }
            }
        }
    }

    fn summary(&self) -> String {
        let problems = format::plural(self.problems as u64, "problem", "problems");
        let advice = format::plural(self.advice as u64, "piece of advice", "pieces of advice");
        let unknown = self.findings.iter().filter(|finding| finding.severity == Severity::Unknown).count();
        let unknown = if unknown == 0 { String::new() } else { format!(", {unknown} not checked") };
        let style = match (self.problems, self.advice) {
            (0, 0) => Severity::Fine.style(),
            (0, _) => Severity::Advice.style(),
            _ => Severity::Problem.style(),
        };
        paint(style, format_args!("{problems}, {advice}{unknown}"))
    }
}

impl ServerSummary {
    fn new(facts: &ServerFacts) -> Self {
        let info = facts.info.as_ref().ok();
        let number = |field: &str| info.and_then(|info| info.number(field));
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let signed = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self {
            address: format::printable(&facts.address),
            version: info.and_then(Version::read).map(|version| version.to_string()),
            median_us: micros(facts.round_trip(50)),
            slowest_us: micros(facts.round_trip(100)),
            clock_skew_us: facts.clock.as_ref().ok().map(|reading| match reading.skew {
                Skew::Ahead(size) => signed(size),
                Skew::Behind(size) => -signed(size),
            }),
            used_memory: number("used_memory"),
            maxmemory: number("maxmemory"),
            evicted_keys: number("evicted_keys"),
            replicas: info.map(|info| info.replicas()),
        }
    }
}

/// Histogram of round trips; each bound is twice the previous one.
fn histogram(round_trips: &[Duration]) -> Vec<(String, u64)> {
    let bucket = |duration: &Duration| duration.as_micros().max(1).next_power_of_two();
    let (first, last) = (round_trips.iter().map(bucket).min(), round_trips.iter().map(bucket).max());
    let (Some(first), Some(last)) = (first, last) else { return Vec::new() };
    let mut rows = Vec::new();
    let mut bound = first;
    while bound <= last {
        let count = round_trips.iter().filter(|duration| bucket(duration) == bound).count();
        let shown = format::duration(Duration::from_micros(u64::try_from(bound).unwrap_or(u64::MAX)));
        rows.push((format!("≤ {shown}"), count as u64));
        bound *= 2;
    }
    rows
}

fn memory(rules: &[RuleMemory]) -> Table {
    let columns =
        [("rule", Align::Left), ("keys", Align::Right), ("per key", Align::Right), ("total", Align::Right)];
    let mut table = Table::new(columns);
    for RuleMemory { rule, keys, bytes_each, bytes, .. } in rules {
        table.row([
            rule_cell(rule),
            format::count(*keys).into(),
            format::bytes(*bytes_each).into(),
            format::bytes(*bytes).into(),
        ]);
    }
    table
}

fn holds(rules: &[RuleHolds]) -> Table {
    let columns = [
        ("rule", Align::Left),
        ("counters", Align::Right),
        ("live", Align::Right),
        ("units", Align::Right),
        ("oldest", Align::Right),
        ("expired", Align::Right),
        ("unsettled", Align::Right),
    ];
    let mut table = Table::new(columns);
    for holds in rules {
        let oldest = holds.oldest_ms.map_or_else(|| "-".to_owned(), format::short_wait);
        table.row([
            rule_cell(&holds.rule),
            format::count(holds.counters).into(),
            format::count(holds.live).into(),
            format::count(holds.units).into(),
            oldest.into(),
            format::count(holds.expired).into(),
            format::count(holds.unsettled).into(),
        ]);
    }
    table
}

/// The name of a rule; limits of requests have names for storage only.
fn rule_cell(rule: &str) -> Cell {
    match rule {
        "!key" => Cell::painted(DIM, "keys without rules"),
        "!labels" => Cell::painted(DIM, "requests with their own limit"),
        rule => rule.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_bounds_double() {
        let micros = [80, 90, 128, 129, 700].map(Duration::from_micros);
        let rows = [("≤ 128 us", 3), ("≤ 256 us", 1), ("≤ 512 us", 0), ("≤ 1.02 ms", 1)];
        assert_eq!(histogram(&micros), rows.map(|(name, count)| (name.to_owned(), count)));
        assert_eq!(histogram(&[]), []);
    }
}
