//! On paper: how many primaries, clients and connections a rate takes.

use super::costs::Costs;

/// Decisions per second.
pub const SIZES: [f64; 3] = [1e6, 10e6, 100e6];
/// How much of its one core a primary may be busy, so that a burst does not become a queue.
pub const BUSY: f64 = 0.6;
/// Decisions per second of one client process: a service of some size.
pub const PER_INSTANCE: f64 = 20_000.0;
/// The same with a few large processes that decide for all callers, such as `sluicegate serve`.
pub const PER_LARGE_INSTANCE: f64 = 200_000.0;
/// Redis's `maxclients` unless set.
pub const MAX_CLIENTS: f64 = 10_000.0;
/// How many nodes the Redis Cluster specification is made for.
pub const MAX_NODES: f64 = 1000.0;
/// Bytes of a call and its reply on the wire, with headers: a bound from the script's arguments, not measured.
pub const CALL_BYTES: f64 = 450.0;

/// What one rate takes.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub decisions_per_s: f64,
    pub instances: f64,
    /// Primaries of a Cluster, one key per call.
    pub primaries: f64,
    /// Primaries if 16 keys shared each call.
    pub primaries_16: f64,
    /// Primaries if 64 did.
    pub primaries_64: f64,
    /// Cores that clients spend on deciding.
    pub client_cores: f64,
    /// Megabit per second at each primary, one key per call.
    pub primary_mbit: f64,
}

impl Plan {
    pub fn of(decisions_per_s: f64, costs: &Costs) -> Self {
        let primaries = primaries(decisions_per_s, costs, 1.0);
        Self {
            decisions_per_s,
            instances: (decisions_per_s / PER_INSTANCE).ceil(),
            primaries,
            primaries_16: self::primaries(decisions_per_s, costs, 16.0),
            primaries_64: self::primaries(decisions_per_s, costs, 64.0),
            client_cores: (decisions_per_s * costs.client_us / 1e6).ceil(),
            primary_mbit: decisions_per_s / primaries * CALL_BYTES * 8.0 / 1e6,
        }
    }
}

/// How many primaries carry a rate with so many keys per call.
pub fn primaries(decisions_per_s: f64, costs: &Costs, keys_per_call: f64) -> f64 {
    (decisions_per_s * costs.with_keys_per_call(keys_per_call) / 1e6 / BUSY).ceil()
}
