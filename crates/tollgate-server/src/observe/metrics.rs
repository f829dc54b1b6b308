//! Every metric: its name, its labels, its meaning; and the text that Prometheus reads.
//!
//! Each is listed from the start, with 0 where nothing has happened. Labels are rules, outcomes and other words of
//! ours, never anything that a request names, so that the text has a bound: see [`MAX_RULES_APART`].
//! `docs/metrics.md` is the same list for people; a test compares them.

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
use tollgate::{
    RuleSet, Stats,
    stats::{BOUNDS, Durations, Skew},
};

use super::{
    Observer,
    tally::{Table, sum},
};
use crate::engine::Transport;

pub use super::tally::{KEYED, MAX_RULES_APART, OTHER};

/// How the text is described to who asked for it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// In front of every name.
const PREFIX: &str = "tollgate";

/// How often the configuration was read, and how that went.
#[derive(Debug, Default)]
pub struct Reloads {
    succeeded: AtomicU64,
    failed: AtomicU64,
    /// In seconds, on the wall clock.
    last_success: AtomicU64,
    is_stale: AtomicU64,
}

/// One metric.
struct Metric {
    /// Without [`PREFIX`], and of a counter without `_total`.
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

const REQUESTS: Metric = counter("requests", "Requests, by what was asked and what became of them");
const DECISIONS: Metric = counter("decisions", "Checks that met a rule, by what they were for that rule");
const DECISION_COST: Metric =
    counter("decision_cost", "What callers asked for in the rule's unit, before its factor");
const DECISION_DURATION: Metric =
    histogram("decision_duration_seconds", "Time from question to answer, without reading and writing them");
const INFLIGHT: Metric = gauge("inflight_requests", "Requests being decided now");
const WAITING: Metric = gauge("waiting_callers", "Callers that wait for a call to the store now");
const STORE_CALLS: Metric = gauge("store_calls_in_flight", "Calls to the store that are in flight now");
const STORE_CALL_LIMIT: Metric = gauge(
    "store_call_limit",
    "Calls that may be in flight to one server now, which follows the round trip; the largest over all servers",
);
const STORE_ROUND_TRIP: Metric = gauge(
    "store_round_trip_seconds",
    "Round trip that most calls of the last second took at least, of the slowest server; 0 while unknown",
);
const STORE_LATE: Metric =
    counter("store_late_answers", "Answers of the store that came after the caller's deadline");
const STORE_UNSENT: Metric = counter(
    "store_unsent",
    "Requests not sent to the store, nor charged, because their remaining time was shorter than the round trip",
);
const STORE_DURATION: Metric =
    histogram("store_operation_duration_seconds", "Time of calls to the store that were answered");
const STORE_ERRORS: Metric = counter("store_errors", "Calls to the store that failed, by kind");
const STORE_AMBIGUOUS: Metric =
    counter("store_ambiguous", "Requests of which nobody knows whether they were charged");
const STORE_DEGRADED: Metric = counter("store_degraded", "Requests decided without the store");
const STORE_CONNECTIONS: Metric = counter("store_connections", "Connections made to servers");
const STORE_SCRIPT_RELOADS: Metric =
    counter("store_script_reloads", "Times a server did not know the script and was sent it");
const STORE_GENERATIONS: Metric =
    counter("store_generation_changes", "Times a server had restarted or was another: counters may be lost");
const STORE_EVICTED: Metric =
    counter("store_evicted_keys", "Keys that servers evicted for want of memory: counters are lost");
const STORE_KEYS: Metric = gauge("store_keys", "Counters that the memory store holds");
const STORE_BYTES: Metric = gauge("store_bytes", "Memory that the memory store has");
const BREAKER: Metric = gauge("breaker_open", "Servers that are not asked now, since they did not answer");
const CLOCK_SKEW: Metric =
    gauge("clock_skew_seconds", "How far a server's clock is ahead of ours, of the one that is off the most");
const RULES: Metric = gauge("rules", "Rules in force");
const RELOADS: Metric = counter("config_reloads", "Times the configuration was read again, by result");
const RELOAD_SUCCESSFUL: Metric =
    gauge("config_last_reload_successful", "Whether the configuration in force is the one in the file");
const RELOAD_TIMESTAMP: Metric = gauge(
    "config_last_reload_success_timestamp_seconds",
    "When the configuration was last read with success, since 1970",
);
const BUILD: Metric = gauge("build_info", "Always 1");

impl Reloads {
    /// The configuration was read, and is in force.
    #[expect(clippy::disallowed_methods, reason = "the time is shown to people, and decides nothing")]
    pub fn succeeded(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_success.store(now.as_secs(), Relaxed);
        self.is_stale.store(0, Relaxed);
        self.succeeded.fetch_add(1, Relaxed);
    }

    /// The configuration could not be used: the one before stays in force.
    pub fn failed(&self) {
        self.is_stale.store(1, Relaxed);
        self.failed.fetch_add(1, Relaxed);
    }

    /// When the configuration was last read and put in force, in seconds of the epoch.
    pub fn last_success(&self) -> u64 {
        self.last_success.load(Relaxed)
    }

    /// Whether what is in force is not what the file says.
    pub fn is_stale(&self) -> bool {
        self.is_stale.load(Relaxed) == 1
    }
}

impl Observer {
    /// The text that Prometheus reads, described by [`CONTENT_TYPE`].
    pub fn exposition(self: &Arc<Self>, stats: Stats, rules: Arc<RuleSet>) -> String {
        let table = self.follow(rules);
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(Scrape { observer: Arc::clone(self), table, stats }));
        let mut text = String::new();
        encode(&mut text, &registry).expect("writing to a string cannot fail");
        text
    }
}

/// Everything that one text says.
struct Scrape {
    observer: Arc<Observer>,
    table: Arc<Table>,
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
        self.store(&mut text)?;
        self.configuration(&mut text)
    }
}

impl Scrape {
    fn decisions(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let Observer { requests, transports, .. } = &*self.observer;
        let mut family = text.family(&REQUESTS)?;
        for (operation, outcome, count) in requests.all() {
            count_of(&mut family, &[("operation", operation), ("outcome", outcome)], &count)?;
        }
        let mut family = text.family(&DECISIONS)?;
        for (rule, tally) in self.table.all() {
            for (outcome, count) in tally.decisions() {
                count_of(&mut family, &[("rule", rule), ("outcome", outcome)], &count)?;
            }
        }
        let mut family = text.family(&DECISION_COST)?;
        for (rule, tally) in self.table.all() {
            for (outcome, cost) in tally.costs() {
                count_of(&mut family, &[("rule", rule), ("outcome", outcome)], &cost)?;
            }
        }
        let by_transport = || Transport::ALL.into_iter().zip(transports);
        let mut family = text.family(&DECISION_DURATION)?;
        for (transport, tally) in by_transport() {
            let labels = [("transport", transport.name())];
            durations_of(&mut family.encode_family(&labels)?, &tally.durations())?;
        }
        let mut family = text.family(&INFLIGHT)?;
        for (transport, tally) in by_transport() {
            level_of(&mut family, &[("transport", transport.name())], &tally.inflight())?;
        }
        Ok(())
    }

    fn store(&self, text: &mut Text<'_, '_>) -> fmt::Result {
        let Stats { calls, errors, ambiguous, degraded, left_alone, waiting, store, .. } = &self.stats;
        let Stats { in_flight, call_limit, round_trip, late_answers, unsent, .. } = &self.stats;
        durations_of(&mut text.family(&STORE_DURATION)?, calls)?;
        let mut family = text.family(&STORE_ERRORS)?;
        for (kind, count) in errors {
            count_of(&mut family, &[("kind", *kind)], count)?;
        }
        let mut family = text.family(&STORE_DEGRADED)?;
        for (policy, count) in degraded {
            count_of(&mut family, &[("policy", *policy)], count)?;
        }
        text.count(&STORE_AMBIGUOUS, ambiguous)?;
        text.count(&STORE_LATE, late_answers)?;
        text.count(&STORE_UNSENT, unsent)?;
        text.count(&STORE_CONNECTIONS, &store.connections)?;
        text.count(&STORE_SCRIPT_RELOADS, &store.script_reloads)?;
        text.count(&STORE_GENERATIONS, &store.generation_changes)?;
        text.count(&STORE_EVICTED, &store.evicted_keys)?;
        text.level(&STORE_KEYS, &store.keys)?;
        text.level(&STORE_BYTES, &store.bytes)?;
        text.level(&BREAKER, &whole(*left_alone))?;
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
        let build = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("revision", option_env!("TOLLGATE_REVISION").unwrap_or("")),
        ];
        level_of(&mut text.family(&BUILD)?, &build, &1_u64)
    }
}

/// The text as it is written.
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
