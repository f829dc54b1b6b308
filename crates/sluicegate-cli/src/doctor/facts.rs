//! Data collected once from a server.

use std::{collections::BTreeMap, time::Duration};

use sluicegate::{
    StoreError,
    redis::inspect::{AclSubject, ClockReading, InspectedServer, Rights},
};

/// The number of measured round trips.
const ROUND_TRIPS: usize = 50;

/// The settings that the checks use.
const SETTINGS: [&str; 9] = [
    "appendfsync",
    "save",
    "stop-writes-on-bgsave-error",
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "timeout",
    "maxclients",
    "cluster-require-full-coverage",
    "cluster-node-timeout",
];

/// The data of one server.
#[derive(Debug)]
pub(crate) struct ServerFacts {
    pub(crate) address: String,
    /// In ascending order.
    pub(crate) round_trips: Vec<Duration>,
    pub(crate) info: Result<Info, StoreError>,
    pub(crate) settings: Settings,
    pub(crate) clock: Result<ClockReading, StoreError>,
    /// Whether a decision would succeed now.
    pub(crate) decides: Result<(), StoreError>,
    pub(crate) rights: Rights,
}

/// The fields of `INFO`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Info(pub(crate) BTreeMap<String, String>);

/// The results of `CONFIG GET`; empty if it is not permitted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings(pub(crate) BTreeMap<&'static str, String>);

impl ServerFacts {
    /// Collects all data, one command at a time.
    pub(crate) async fn collect(server: &InspectedServer, whose: AclSubject<'_>) -> Result<Self, StoreError> {
        let mut round_trips = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            round_trips.push(server.round_trip().await?);
        }
        round_trips.sort_unstable();
        let mut settings = Settings::default();
        for name in SETTINGS {
            match server.setting(name).await {
                Ok(value) => settings.0.extend(value.map(|value| (name, value))),
                Err(_) => break,
            }
        }
        Ok(Self {
            address: server.address(),
            round_trips,
            info: server.info().await.map(Info),
            settings,
            clock: server.clock().await,
            decides: server.probe().await,
            rights: server.rights(whose).await,
        })
    }

    /// A percentile of the round trips.
    pub(crate) fn round_trip(&self, percent: usize) -> Duration {
        let place = (self.round_trips.len() * percent).div_ceil(100).saturating_sub(1);
        self.round_trips.get(place).copied().unwrap_or_default()
    }
}

impl Info {
    pub(crate) fn text(&self, field: &str) -> Option<&str> {
        self.0.get(field).map(String::as_str)
    }

    pub(crate) fn number(&self, field: &str) -> Option<u64> {
        self.text(field)?.parse().ok()
    }

    pub(crate) fn is(&self, field: &str, value: &str) -> bool {
        self.text(field) == Some(value)
    }

    /// The number of replicas in sync.
    pub(crate) fn replicas(&self) -> usize {
        let is_replica = |name: &str| {
            name.strip_prefix("slave").is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let replicas = self.0.iter().filter(|(name, _)| is_replica(name));
        replicas.filter(|(_, value)| value.split(',').any(|part| part == "state=online")).count()
    }

    /// The number of replicas in sync required for writes. If the setting is unreadable, `INFO` shows whether it is at least one.
    pub(crate) fn needs_replicas(&self, settings: &Settings) -> u64 {
        let setting = settings.number("min-replicas-to-write");
        setting.unwrap_or_else(|| u64::from(self.text("min_slaves_good_slaves").is_some()))
    }
}

impl Settings {
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    pub(crate) fn is(&self, name: &str, value: &str) -> bool {
        self.text(name) == Some(value)
    }
}
