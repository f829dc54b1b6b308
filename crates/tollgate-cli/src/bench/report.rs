//! What a load showed, for people and for programs.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use tollgate::{Algorithm, Limit};

use super::{
    Bench,
    judge::Closest,
    load::{Counts, Notes},
    target::Target,
};
use crate::{
    Verdict,
    output::{self, Align, BAD, FAINT, Form, GOOD, ODD, TITLE, Table, paint},
};

/// The shares of calls whose time is told.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];
/// Times are kept in nanoseconds, and told to programs in microseconds.
const NANOS_PER_MICRO: f64 = 1_000.0;

/// Everything that is said.
#[derive(Serialize)]
pub(super) struct Report {
    /// Without its user and password.
    target: String,
    callers: u16,
    keys: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    zipf: Option<f64>,
    limit: LimitView,
    seconds: f64,
    decisions: u64,
    per_second: f64,
    allowed: u64,
    refused: u64,
    /// Of these, by the process that was asked, without asking the store.
    refused_locally: u64,
    degraded: u64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    latency_us: Latency,
    verdict: Option<VerdictView>,
    #[serde(skip)]
    latency: Histogram<u64>,
    #[serde(skip)]
    unjudged: u64,
}

#[derive(Serialize)]
struct LimitView {
    algorithm: &'static str,
    amount: u64,
    window: String,
    capacity: u64,
}

#[derive(Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p999: f64,
    max: f64,
}

/// Whether the limit held.
#[derive(Serialize)]
struct VerdictView {
    kept: bool,
    /// Where most was admitted, measured by what is allowed.
    key: String,
    admitted: u64,
    allowed: u64,
    from_ms: f64,
    until_ms: f64,
    /// How many keys were admitted anything.
    keys: usize,
    /// Admitted calls that there was no time to judge.
    unjudged: u64,
}

impl Report {
    pub(super) fn new(bench: &Bench, target: &Target, limit: Limit, notes: Notes, took: Duration) -> Self {
        let Notes { latency, counts } = notes;
        let decisions = counts.decisions();
        let Counts { allowed, refused, refused_here, degraded, failed, first_failure, unjudged } = counts;
        let micros = |share: f64| latency.value_at_quantile(share) as f64 / NANOS_PER_MICRO;
        Self {
            target: target.shown().to_owned(),
            callers: bench.concurrency,
            keys: bench.keys,
            zipf: bench.zipf,
            limit: LimitView {
                algorithm: limit.algorithm().name(),
                amount: limit.amount(),
                window: bench.limit.window.clone(),
                capacity: limit.capacity(),
            },
            seconds: took.as_secs_f64(),
            decisions,
            per_second: decisions as f64 / took.as_secs_f64().max(f64::EPSILON),
            allowed,
            refused,
            refused_locally: refused_here,
            degraded,
            errors: failed,
            first_error: first_failure,
            latency_us: Latency {
                p50: micros(0.5),
                p90: micros(0.9),
                p99: micros(0.99),
                p999: micros(0.999),
                max: latency.max() as f64 / NANOS_PER_MICRO,
            },
            verdict: None,
            latency,
            unjudged,
        }
    }

    pub(super) fn with_verdict(mut self, closest: Option<Closest>, keys: usize, prefix: String) -> Self {
        let units = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        let millis = |moment: Duration| moment.as_secs_f64() * 1e3;
        self.verdict = closest.map(|closest| VerdictView {
            kept: closest.is_kept(),
            key: format!("{prefix}{}", closest.key),
            admitted: units(closest.admitted),
            allowed: units(closest.allowed),
            from_ms: millis(closest.from),
            until_ms: millis(closest.until),
            keys,
            unjudged: self.unjudged,
        });
        self
    }

    pub(super) fn verdict(&self) -> Verdict {
        match &self.verdict {
            Some(VerdictView { kept: false, .. }) => Verdict::Found,
            _ => Verdict::Fine,
        }
    }

    pub(super) fn print(&self, form: Form) -> Result<(), serde_json::Error> {
        output::report(form, self, || self.print_text())
    }

    fn print_text(&self) {
        let Self { target, callers, keys, limit, .. } = self;
        let LimitView { algorithm, amount, window, capacity } = limit;
        let burst = if *algorithm == Algorithm::TokenBucket.name() && capacity != amount {
            format!(", burst {}", output::count(*capacity))
        } else {
            String::new()
        };
        let keys = match (keys, self.zipf) {
            (1, _) => "one key".to_owned(),
            (keys, None) => format!("{} keys alike", output::count((*keys).into())),
            (keys, Some(exponent)) => format!("{} keys by Zipf {exponent}", output::count((*keys).into())),
        };
        let callers = output::several((*callers).into(), "caller", "callers");
        output::line(paint(TITLE, target));
        let load =
            format!("{callers}, {keys}, {} per {window} by {algorithm}{burst}", output::count(*amount));
        output::line(paint(FAINT, load));
        output::line("");
        output::line(format_args!(
            "{} in {}: {} a second",
            output::several(self.decisions, "decision", "decisions"),
            output::duration(Duration::from_secs_f64(self.seconds)),
            paint(TITLE, output::count(self.per_second as u64)),
        ));
        self.print_counts();
        output::line("");
        self.print_latency();
        output::line("");
        self.print_verdict();
    }

    fn print_counts(&self) {
        let share = |count: u64| format!("{:.1} %", count as f64 * 100.0 / self.decisions.max(1) as f64);
        let mut table =
            Table::new([("", Align::Left), ("", Align::Right), ("", Align::Right), ("", Align::Left)]);
        let here = match self.refused_locally {
            0 => String::new(),
            here => format!("{} of them certain, without asking the store", output::count(here)),
        };
        let mut row = |name: &'static str, count: u64, note: String| {
            table.row([name.into(), output::count(count).into(), share(count).into(), note.into()]);
        };
        row("allowed", self.allowed, String::new());
        row("refused", self.refused, here);
        if self.degraded > 0 {
            row("degraded", self.degraded, "without the store, which did not answer in time".to_owned());
        }
        let table = table.to_string();
        for line in table.lines().skip(1) {
            output::line(format_args!("  {line}"));
        }
        if self.errors > 0 {
            let first = self.first_error.as_deref().unwrap_or_default();
            let errors = output::several(self.errors, "error", "errors");
            output::line(paint(BAD, format_args!("  {errors}, the first: {first}")));
        }
    }

    fn print_latency(&self) {
        let shown = |nanos: u64| output::duration(Duration::from_nanos(nanos));
        let quantiles = QUANTILES.map(|(name, share)| {
            format!("{} {}", paint(FAINT, name), shown(self.latency.value_at_quantile(share)))
        });
        let most = format!("{} {}", paint(FAINT, "max"), shown(self.latency.max()));
        output::line(format_args!("{}  {}   {most}", paint(TITLE, "latency"), quantiles.join("   ")));
        for bar in output::bars(&rows(&self.latency)) {
            output::line(format_args!("  {bar}"));
        }
    }

    fn print_verdict(&self) {
        let Some(VerdictView { kept, key, admitted, allowed, from_ms, until_ms, keys, unjudged }) =
            &self.verdict
        else {
            let why =
                if self.allowed == 0 { "nothing was admitted" } else { "the window is too short to tell" };
            output::line(paint(ODD, format_args!("whether the limit held is not known: {why}")));
            return;
        };
        let millis = |millis: &f64| output::duration(Duration::from_secs_f64((millis / 1e3).max(0.0)));
        let (admitted, allowed) = (output::count(*admitted), output::count(*allowed));
        let (from, length) = (millis(from_ms), millis(&(until_ms - from_ms)));
        if *kept {
            let keys = output::several(*keys as u64, "key", "keys");
            output::line(format_args!(
                "{} on {keys}: at the closest, {admitted} passed within {length}, where {allowed} may",
                paint(GOOD, "the limit held")
            ));
        } else {
            output::line(format_args!(
                "{} {admitted} passed within {length}, where {allowed} may, {from} after the beginning, on {key}",
                paint(BAD, "the limit did not hold:")
            ));
        }
        if self.degraded > 0 {
            output::line(paint(FAINT, "what passed without the store is not judged: it is the policy's"));
        }
        output::line(paint(FAINT, "keys of this run's own were asked for; they expire by themselves"));
        if *unjudged > 0 {
            let unjudged = output::several(*unjudged, "admitted request", "admitted requests");
            output::line(paint(ODD, format_args!("{unjudged} came too fast to be judged")));
        }
    }
}

/// How many took how long, each bound twice the one before.
fn rows(latency: &Histogram<u64>) -> Vec<(String, u64)> {
    if latency.is_empty() {
        return Vec::new();
    }
    let last = latency.max().next_power_of_two();
    let mut bound = latency.min().max(1).next_power_of_two();
    let (mut rows, mut below) = (Vec::new(), 0);
    while bound <= last {
        let up_to = latency.count_between(0, bound);
        let shown = output::duration(Duration::from_nanos(bound));
        rows.push((format!("≤ {shown}"), up_to - below));
        (below, bound) = (up_to, bound * 2);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_in_one_row() {
        let mut latency = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3).unwrap();
        for nanos in [300, 500, 511, 600, 40_000, 1_000_000] {
            latency.record(nanos).unwrap();
        }
        let rows = rows(&latency);
        assert_eq!(rows.iter().map(|(_, count)| count).sum::<u64>(), 6);
        assert_eq!((rows[0].0.as_str(), rows[0].1), ("≤ 512 ns", 3));
        assert_eq!(rows.last().unwrap().1, 1);
    }
}
