//! Names, labels and help texts of all metrics, and their OpenMetrics output.
//!
//! Every series is exported from the start, with 0 as the initial value. Labels are rule names and fixed keywords, never
//! request content, so that the output is bounded: see [`MAX_COUNTED_RULES`]. A test compares the metrics with
//! `docs/metrics.md`.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, MetricEncoder, NoLabelSet,
        text::encode,
    },
    metrics::MetricType,
    registry::Registry,
};
use sluicegate::{
    rules::RuleSet,
    stats::{BOUNDS, Durations, HoldStats, LeaseStats, Skew, Stats},
};

use super::{
    Observer,
    counters::{CounterTable, sum},
    key_scans::KeyCounts,
    log_queue::LineCounts,
    logs,
};
use crate::engine::Transport;

pub use super::counters::{KEY_RULE, MAX_COUNTED_RULES, OTHER_RULES};

/// The content type of the output.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The prefix of every metric name.
const PREFIX: &str = "sluicegate";

/// The results of configuration reloads.
#[derive(Debug, Default)]
pub struct Reloads {
    succeeded: AtomicU64,
    failed: AtomicU64,
    /// Seconds since 1970.
    last_success: AtomicU64,
    is_stale: AtomicU64,
}

/// A metric family.
struct Metric {
    /// The name without [`PREFIX`], and for a counter without `_total`.
    name: &'static str,
    help: &'static str,
    kind: MetricType,
}

const fn counter(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricType::Counter }
}

const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricType::Gauge }
}

const fn histogram(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help, kind: MetricType::Histogram }
}

const REQUESTS: Metric = counter("requests", "Requests by operation and outcome");
const DECISION_SOURCES: Metric = counter(
    "decision_sources",
    "Checks by what decided them: the store, this process by leased units or the denial cache, or a failure policy",
);
const DECISIONS: Metric = counter("decisions", "Checks by matching rule and its outcome");
const DECISION_RATE: Metric =
    gauge("decision_rate", "Checks per second by matching rule and its outcome, over the last 10 seconds");
const DECISION_COST: Metric = counter("decision_cost", "Cost in the rule's unit, before the rule's factor");
const DECISION_DURATION: Metric = histogram(
    "decision_duration_seconds",
    "Time to decide, without parsing the request and writing the response",
);
const INFLIGHT: Metric = gauge("inflight_requests", "Requests in progress");
const WAITING: Metric = gauge("waiting_callers", "Callers waiting for the store");
const STORE_CALLS: Metric = gauge("store_calls_in_flight", "Calls to the store in flight");
const STORE_CALL_LIMIT: Metric = gauge(
    "store_call_limit",
    "Limit of calls in flight to one server, which adapts to the round trip; the largest over all servers",
);
const STORE_ROUND_TRIP: Metric = gauge(
    "store_round_trip_seconds",
    "Lower quartile of the last second's round trips to the slowest server; 0 if unknown",
);
const STORE_LATE: Metric = counter("store_late_answers", "Answers of the store after the caller's deadline");
const STORE_UNSENT: Metric = counter(
    "store_unsent",
    "Requests neither sent to the store nor charged because their remaining time was shorter than the round trip",
);
const UNREADABLE: Metric = counter(
    "unreadable_counters",
    "Checks not decided by the store because the stored state of a counter cannot be read",
);
const LEASE_UNITS: Metric = counter(
    "lease_units",
    "Units charged in advance for hot keys: drawn, and what became of them (spent, returned, or lost until their window ends)",
);
const HOLDS: Metric = counter("holds", "Holds that were made, settled, released or expired, by outcome");
const RELEASING_HOLDS: Metric =
    counter("releasing_holds", "Holds that were made, once for each counter that releases expired holds");
const QUEUED_SETTLEMENTS: Metric = gauge(
    "queued_settlements",
    "Settlements and releases that are repeated in the background because the store did not answer",
);
const SKIPPED_CONCURRENCY: Metric = counter(
    "skipped_concurrency_checks",
    "Checks that skipped a concurrency rule, because they are not holds",
);
const STORE_DURATION: Metric =
    histogram("store_operation_duration_seconds", "Duration of successful calls to the store");
const STORE_ERRORS: Metric = counter("store_errors", "Failed calls to the store by kind");
const STORE_AMBIGUOUS: Metric = counter("store_ambiguous", "Requests that may or may not have been charged");
const STORE_DEGRADED: Metric = counter("store_degraded", "Requests decided without the store");
const STORE_CONNECTIONS: Metric = counter("store_connections", "Connections established to servers");
const STORE_SCRIPT_RELOADS: Metric =
    counter("store_script_reloads", "Uploads of the script to servers that did not have it");
const STORE_GENERATIONS: Metric =
    counter("store_generation_changes", "Restarts and replacements of servers: counters may be lost");
const STORE_EVICTED: Metric =
    counter("store_evicted_keys", "Keys that servers evicted to free memory: counters are lost");
const STORE_UNRELEASED: Metric = counter(
    "store_unreleased_reservations",
    "Reservations on Cluster nodes without a confirmed release: their units may count until their window ends",
);
const STORE_KEYS: Metric = gauge("store_keys", "Counters in the memory store");
const STORE_BYTES: Metric = gauge("store_bytes", "Memory used by the memory store");
const STORE_MAX_BYTES: Metric = gauge(
    "store_max_bytes",
    "Memory that the memory store can use: the limit without the part for the allocator",
);
const STORE_FULL: Metric = gauge(
    "store_full",
    "1 if new keys shared overflow counters in the last minute because the memory store is full",
);
const STORE_OVERFLOW: Metric = counter(
    "store_overflow_decisions",
    "Checks and charges on overflow counters because the memory store is full, once for each matching rule",
);
const SCANNED_KEYS: Metric =
    gauge("store_scanned_keys", "sluicegate's keys that the last key scan found in Redis");
const KEYS_WITHOUT_TTL: Metric = gauge(
    "store_keys_without_ttl",
    "sluicegate's keys without a TTL, which never expire, that the last key scan found in Redis",
);
const KEY_SCAN_SUCCESSFUL: Metric =
    gauge("store_last_key_scan_successful", "1 unless the last scan of the keys in Redis failed");
const BREAKER: Metric = gauge("breaker_open", "Servers whose circuit breaker is open");
const CLOCK_SKEW: Metric = gauge(
    "clock_skew_seconds",
    "Largest offset of a server's clock from this machine's clock; positive if the server is ahead",
);
const RULES: Metric = gauge("rules", "Active rules");
const RELOADS: Metric = counter("config_reloads", "Configuration reloads by result");
const RELOAD_SUCCESSFUL: Metric =
    gauge("config_last_reload_successful", "1 if the active configuration is the one in the file");
const RELOAD_TIMESTAMP: Metric = gauge(
    "config_last_reload_success_timestamp_seconds",
    "Time of the last successful configuration reload, since 1970",
);
const LOG_DROPPED: Metric = counter(
    "log_lines_dropped",
    "Log lines that were dropped because standard error was not read in time, by kind",
);
const BUILD: Metric = gauge("build_info", "Always 1");

impl Reloads {
    /// Records a successful reload.
    #[expect(clippy::disallowed_methods, reason = "the time is only displayed")]
    pub fn succeeded(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_success.store(now.as_secs(), Relaxed);
        self.is_stale.store(0, Relaxed);
        self.succeeded.fetch_add(1, Relaxed);
    }

    /// Records a rejected configuration; the previous one stays active.
    pub fn failed(&self) {
        self.is_stale.store(1, Relaxed);
        self.failed.fetch_add(1, Relaxed);
    }

    /// Time of the last successful reload, in seconds since 1970.
    pub fn last_success(&self) -> u64 {
        self.last_success.load(Relaxed)
    }

    /// Whether the active configuration differs from the file.
    pub fn is_stale(&self) -> bool {
        self.is_stale.load(Relaxed) == 1
    }
}

impl Observer {
    /// Returns all metrics as OpenMetrics text.
    pub fn exposition(self: &Arc<Self>, stats: Stats, rules: Arc<RuleSet>) -> String {
        let table = self.follow(rules);
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(Scrape { observer: Arc::clone(self), table, stats }));
        let mut text = String::new();
        encode(&mut text, &registry).expect("writing to a string cannot fail");
        text
    }
}

/// The values of one scrape.
struct Scrape {
    observer: Arc<Observer>,
    table: Arc<CounterTable>,
    stats: Stats,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut text = Text(&mut encoder);
        self.decisions(&mut text)?;
        self.holds(&mut text)?;
        self.store(&mut text)?;
        self.configuration(&mut text)
    }
}

impl Scrape {
    fn decisions(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let Observer { requests, sources, transports, .. } = &*self.observer;
        let mut family = text.family(&REQUESTS)?;
        for (operation, outcome, count) in requests.all() {
            count_of(&mut family, &[("operation", operation), ("outcome", outcome)], &count)?;
        }
        let mut family = text.family(&DECISION_SOURCES)?;
        for (source, count) in sources.all() {
            count_of(&mut family, &[("source", source)], &count)?;
        }
        let mut family = text.family(&DECISIONS)?;
        for (rule, counters) in self.table.all() {
            for (outcome, count) in counters.decisions() {
                count_of(&mut family, &[("rule", rule), ("outcome", outcome)], &count)?;
            }
        }
        let (mut family, period) = (text.family(&DECISION_RATE)?, self.observer.rates.period());
        for (rule, _) in self.table.all() {
            for (outcome, rate) in period.rates(rule) {
                level_of(&mut family, &[("rule", rule), ("outcome", outcome)], &rate)?;
            }
        }
        let mut family = text.family(&DECISION_COST)?;
        for (rule, counters) in self.table.all() {
            for (outcome, cost) in counters.costs() {
                count_of(&mut family, &[("rule", rule), ("outcome", outcome)], &cost)?;
            }
        }
        let by_transport = || Transport::ALL.into_iter().zip(transports);
        let mut family = text.family(&DECISION_DURATION)?;
        for (transport, counters) in by_transport() {
            let labels = [("transport", transport.name())];
            durations_of(&mut family.encode_family(&labels)?, &counters.durations())?;
        }
        let mut family = text.family(&INFLIGHT)?;
        for (transport, counters) in by_transport() {
            level_of(&mut family, &[("transport", transport.name())], &counters.inflight())?;
        }
        Ok(())
    }

    fn holds(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let mut family = text.family(&HOLDS)?;
        for (outcome, count) in hold_outcomes(&self.stats.holds) {
            count_of(&mut family, &[("outcome", outcome)], &count)?;
        }
        text.count(&RELEASING_HOLDS, &self.stats.holds.releasing)?;
        text.level(&QUEUED_SETTLEMENTS, &whole(self.stats.holds.waiting))?;
        text.count(&SKIPPED_CONCURRENCY, &self.stats.skipped_concurrency)
    }

    fn store(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let Stats { calls, errors, ambiguous, degraded, open_breakers, waiting, store, .. } = &self.stats;
        let Stats { in_flight, call_limit, round_trip, late_answers, unsent, unreadable, .. } = &self.stats;
        durations_of(&mut text.family(&STORE_DURATION)?, calls)?;
        let mut family = text.family(&STORE_ERRORS)?;
        for (kind, count) in errors {
            count_of(&mut family, &[("kind", *kind)], count)?;
        }
        let mut family = text.family(&STORE_DEGRADED)?;
        for (policy, count) in degraded {
            count_of(&mut family, &[("policy", *policy)], count)?;
        }
        let LeaseStats { drawn, spent, returned, lost, .. } = &self.stats.leases;
        let mut family = text.family(&LEASE_UNITS)?;
        for (event, units) in [("drawn", drawn), ("spent", spent), ("returned", returned), ("lost", lost)] {
            count_of(&mut family, &[("event", event)], units)?;
        }
        text.count(&STORE_AMBIGUOUS, ambiguous)?;
        text.count(&STORE_LATE, late_answers)?;
        text.count(&STORE_UNSENT, unsent)?;
        text.count(&UNREADABLE, unreadable)?;
        text.count(&STORE_CONNECTIONS, &store.connections)?;
        text.count(&STORE_SCRIPT_RELOADS, &store.script_reloads)?;
        text.count(&STORE_GENERATIONS, &store.generation_changes)?;
        text.count(&STORE_EVICTED, &store.evicted_keys)?;
        text.count(&STORE_UNRELEASED, &store.unreleased_reservations)?;
        text.level(&STORE_KEYS, &store.keys)?;
        text.level(&STORE_BYTES, &store.bytes)?;
        text.level(&STORE_MAX_BYTES, &store.max_bytes)?;
        text.level(&STORE_FULL, &u64::from(self.observer.overflow.is_full()))?;
        text.count(&STORE_OVERFLOW, &store.overflow_decisions)?;
        let scans = self.observer.key_scans();
        let KeyCounts { keys, without_ttl } = scans.counts();
        text.level(&SCANNED_KEYS, &keys)?;
        text.level(&KEYS_WITHOUT_TTL, &without_ttl)?;
        text.level(&KEY_SCAN_SUCCESSFUL, &u64::from(!scans.is_failed()))?;
        text.level(&BREAKER, &whole(*open_breakers))?;
        text.level(&WAITING, &whole(*waiting))?;
        text.level(&STORE_CALLS, &whole(*in_flight))?;
        text.level(&STORE_CALL_LIMIT, &whole(*call_limit))?;
        text.level(&STORE_ROUND_TRIP, &round_trip.unwrap_or_default().as_secs_f64())?;
        let skew = match store.clock_skew {
            Some(Skew::Ahead(size)) => size.as_secs_f64(),
            Some(Skew::Behind(size)) => -size.as_secs_f64(),
            None => 0.0,
        };
        text.level(&CLOCK_SKEW, &skew)
    }

    fn configuration(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let Reloads { succeeded, failed, last_success, is_stale } = self.observer.reloads();
        let mut family = text.family(&RELOADS)?;
        for (result, count) in [("success", succeeded), ("failure", failed)] {
            count_of(&mut family, &[("result", result)], &count.load(Relaxed))?;
        }
        text.level(&RELOAD_SUCCESSFUL, &(1 - is_stale.load(Relaxed)))?;
        text.level(&RELOAD_TIMESTAMP, &last_success.load(Relaxed))?;
        text.level(&RULES, &whole(self.table.rules().len()))?;
        let LineCounts { audit, ordinary } = logs::dropped_lines();
        let mut family = text.family(&LOG_DROPPED)?;
        for (kind, count) in [("audit", audit), ("other", ordinary)] {
            count_of(&mut family, &[("kind", kind)], &count)?;
        }
        let build = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("revision", option_env!("SLUICEGATE_REVISION").unwrap_or("")),
        ];
        level_of(&mut text.family(&BUILD)?, &build, &1_u64)
    }
}

/// The counts of holds, with the names of their outcomes.
fn hold_outcomes(holds: &HoldStats) -> [(&'static str, u64); 8] {
    let HoldStats { held, settled, released, expired, already, late, unknown, queued, .. } = *holds;
    [
        ("held", held),
        ("settled", settled),
        ("released", released),
        ("expired", expired),
        ("already", already),
        ("late", late),
        ("unknown", unknown),
        ("queued", queued),
    ]
}

/// Writes metric families.
struct Text<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Text<'_, '_> {
    fn family(&mut self, metric: &Metric) -> Result<MetricEncoder<'_>, fmt::Error> {
        let Metric { name, help, kind } = *metric;
        self.0.encode_descriptor(name, help, None, kind)
    }

    fn count(&mut self, metric: &Metric, count: &u64) -> fmt::Result {
        self.family(metric)?.encode_counter::<NoLabelSet, _, f64>(count, None)
    }

    fn level(&mut self, metric: &Metric, level: &impl EncodeGaugeValue) -> fmt::Result {
        self.family(metric)?.encode_gauge(level)
    }
}

fn count_of(
    family: &mut MetricEncoder<'_>,
    labels: &impl EncodeLabelSet,
    count: &impl EncodeCounterValue,
) -> fmt::Result {
    family.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(count, None)
}

fn level_of(
    family: &mut MetricEncoder<'_>,
    labels: &impl EncodeLabelSet,
    level: &impl EncodeGaugeValue,
) -> fmt::Result {
    family.encode_family(labels)?.encode_gauge(level)
}

fn durations_of(encoder: &mut MetricEncoder<'_>, durations: &Durations) -> fmt::Result {
    let bounds = BOUNDS.iter().map(|bound| bound.as_secs_f64()).chain([f64::INFINITY]);
    let buckets: Vec<_> = bounds.zip(durations.counts).collect();
    let count = sum(durations.counts);
    encoder.encode_histogram::<NoLabelSet>(durations.total.as_secs_f64(), count, &buckets, None)
}

fn whole(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
