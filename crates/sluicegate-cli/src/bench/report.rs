//! The report of a load, as text and JSON.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use sluicegate::{Algorithm, Limit};

use super::{
    Bench,
    limit_verifier::ClosestInterval,
    load::{Counts, LoadResult},
    target::Target,
};
use crate::{
    ExitStatus, format,
    output::{self, Align, DIM, ERROR, HEADING, OutputFormat, SUCCESS, Table, WARNING, paint},
};

/// The reported latency percentiles.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];
/// Latencies are recorded in nanoseconds; JSON has microseconds.
const NANOS_PER_MICRO: f64 = 1_000.0;

/// The report.
#[derive(Serialize)]
pub(super) struct BenchReport {
    /// Without user and password.
    target: String,
    callers: u16,
    keys: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    zipf: Option<f64>,
    limit: BenchLimit,
    seconds: f64,
    decisions: u64,
    per_second: f64,
    allowed: u64,
    denied: u64,
    /// Of these, without a call to the store.
    denied_locally: u64,
    degraded: u64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    latency_us: LatencyPercentiles,
    verdict: Option<LimitVerdict>,
    #[serde(skip)]
    latency: Histogram<u64>,
    #[serde(skip)]
    unverified: u64,
}

#[derive(Serialize)]
struct BenchLimit {
    algorithm: &'static str,
    amount: u64,
    window: String,
    capacity: u64,
}

#[derive(Serialize)]
struct LatencyPercentiles {
    p50: f64,
    p90: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p999: f64,
    max: f64,
}

/// Whether the limit held.
#[derive(Serialize)]
struct LimitVerdict {
    kept: bool,
    /// The key of the interval that came closest to the limit.
    key: String,
    admitted: u64,
    allowed: u64,
    from_ms: f64,
    until_ms: f64,
    /// The number of keys with admitted calls.
    keys: usize,
    /// Admitted calls that were not verified.
    unverified: u64,
}

impl BenchReport {
    pub(super) fn new(
        bench: &Bench,
        target: &Target,
        limit: Limit,
        result: LoadResult,
        elapsed: Duration,
    ) -> Self {
        let LoadResult { latency, counts } = result;
        let decisions = counts.decisions();
        let Counts { allowed, denied, denied_locally, degraded, failed, first_failure, unverified } = counts;
        let micros = |share: f64| latency.value_at_quantile(share) as f64 / NANOS_PER_MICRO;
        Self {
            target: target.url().to_owned(),
            callers: bench.concurrency,
            keys: bench.keys,
            zipf: bench.zipf,
            limit: BenchLimit {
                algorithm: limit.algorithm().name(),
                amount: limit.amount(),
                window: bench.limit.window.clone(),
                capacity: limit.capacity(),
            },
            seconds: elapsed.as_secs_f64(),
            decisions,
            per_second: decisions as f64 / elapsed.as_secs_f64().max(f64::EPSILON),
            allowed,
            denied,
            denied_locally,
            degraded,
            errors: failed,
            first_error: first_failure,
            latency_us: LatencyPercentiles {
                p50: micros(0.5),
                p90: micros(0.9),
                p99: micros(0.99),
                p999: micros(0.999),
                max: latency.max() as f64 / NANOS_PER_MICRO,
            },
            verdict: None,
            latency,
            unverified,
        }
    }

    pub(super) fn with_verdict(
        mut self,
        closest: Option<ClosestInterval>,
        keys: usize,
        prefix: String,
    ) -> Self {
        let units = |units: u128| u64::try_from(units).unwrap_or(u64::MAX);
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        self.verdict = closest.map(|closest| LimitVerdict {
            kept: closest.is_within_limit(),
            key: format!("{prefix}{}", closest.key),
            admitted: units(closest.admitted),
            allowed: units(closest.allowed),
            from_ms: millis(closest.from),
            until_ms: millis(closest.until),
            keys,
            unverified: self.unverified,
        });
        self
    }

    pub(super) fn exit_status(&self) -> ExitStatus {
        match &self.verdict {
            Some(LimitVerdict { kept: false, .. }) => ExitStatus::Negative,
            _ => ExitStatus::Success,
        }
    }

    pub(super) fn print(&self, format: OutputFormat) -> Result<(), serde_json::Error> {
        output::report(format, self, || self.print_text())
    }

    fn print_text(&self) {
        let Self { target, callers, keys, limit, .. } = self;
        let BenchLimit { algorithm, amount, window, capacity } = limit;
        let burst = if *algorithm == Algorithm::TokenBucket.name() && capacity != amount {
            format!(", burst {}", format::count(*capacity))
        } else {
            String::new()
        };
        let keys = match (keys, self.zipf) {
            (1, _) => "one key".to_owned(),
            (keys, None) => format!("{} keys, uniform", format::count((*keys).into())),
            (keys, Some(exponent)) => format!("{} keys, Zipf {exponent}", format::count((*keys).into())),
        };
        let callers = format::plural((*callers).into(), "caller", "callers");
        output::line(paint(HEADING, target));
        let load = format!("{callers}, {keys}, {} per {window}{burst} ({algorithm})", format::count(*amount));
        output::line(paint(DIM, load));
        output::line("");
        output::line(format_args!(
            "{} in {}: {} per second",
            format::plural(self.decisions, "decision", "decisions"),
            format::duration(Duration::from_secs_f64(self.seconds)),
            paint(HEADING, format::count(self.per_second as u64)),
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
        let cached = match self.denied_locally {
            0 => String::new(),
            cached => format!("{} of them from the denial cache", format::count(cached)),
        };
        let mut row = |name: &'static str, count: u64, note: String| {
            table.row([name.into(), format::count(count).into(), share(count).into(), note.into()]);
        };
        row("allowed", self.allowed, String::new());
        row("denied", self.denied, cached);
        if self.degraded > 0 {
            row("degraded", self.degraded, "store unavailable, decided by the failure policy".to_owned());
        }
        let table = table.to_string();
        for line in table.lines().skip(1) {
            output::line(format_args!("  {line}"));
        }
        if self.errors > 0 {
            let first = self.first_error.as_deref().unwrap_or_default();
            let errors = format::plural(self.errors, "error", "errors");
            output::line(paint(ERROR, format_args!("  {errors}, the first: {first}")));
        }
    }

    fn print_latency(&self) {
        let shown = |nanos: u64| format::duration(Duration::from_nanos(nanos));
        let quantiles = QUANTILES.map(|(name, share)| {
            format!("{} {}", paint(DIM, name), shown(self.latency.value_at_quantile(share)))
        });
        let most = format!("{} {}", paint(DIM, "max"), shown(self.latency.max()));
        output::line(format_args!("{}  {}   {most}", paint(HEADING, "latency"), quantiles.join("   ")));
        for bar in output::bars(&rows(&self.latency)) {
            output::line(format_args!("  {bar}"));
        }
    }

    fn print_verdict(&self) {
        let Some(LimitVerdict { kept, key, admitted, allowed, from_ms, until_ms, keys, unverified }) =
            &self.verdict
        else {
            let reason = if self.allowed == 0 { "nothing was admitted" } else { "the window is too short" };
            output::line(paint(WARNING, format_args!("limit not verified: {reason}")));
            return;
        };
        let millis = |millis: &f64| format::duration(Duration::from_secs_f64((millis / 1e3).max(0.0)));
        let (admitted, allowed) = (format::count(*admitted), format::count(*allowed));
        let (from, length) = (millis(from_ms), millis(&(until_ms - from_ms)));
        if *kept {
            let keys = format::plural(*keys as u64, "key", "keys");
            output::line(format_args!(
                "{} on {keys}: at most {admitted} of {allowed} were admitted, within {length}",
                paint(SUCCESS, "the limit held")
            ));
        } else {
            output::line(format_args!(
                "{} {admitted} instead of {allowed} were admitted within {length}, {from} after the start, on {key}",
                paint(ERROR, "the limit was exceeded:")
            ));
        }
        if self.degraded > 0 {
            output::line(paint(DIM, "requests allowed by a failure policy are not verified"));
        }
        output::line(paint(DIM, "the keys are unique to this run and expire"));
        if *unverified > 0 {
            let unverified = format::plural(*unverified, "admitted request", "admitted requests");
            output::line(paint(WARNING, format_args!("{unverified} arrived too fast to be verified")));
        }
    }
}

/// Latency histogram rows; each bound is twice the previous one.
fn rows(latency: &Histogram<u64>) -> Vec<(String, u64)> {
    if latency.is_empty() {
        return Vec::new();
    }
    let last = latency.max().next_power_of_two();
    let mut bound = latency.min().max(1).next_power_of_two();
    let (mut rows, mut below) = (Vec::new(), 0);
    while bound <= last {
        let up_to = latency.count_between(0, bound);
        let shown = format::duration(Duration::from_nanos(bound));
        rows.push((format!("≤ {shown}"), up_to - below));
        (below, bound) = (up_to, bound * 2);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_counted_in_one_row() {
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
