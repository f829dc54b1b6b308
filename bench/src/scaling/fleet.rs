//! Calculates how many primaries, clients and connections a rate needs.

use super::costs::Costs;

/// Decisions per second.
pub const SIZES: [f64; 3] = [1e6, 10e6, 100e6];
/// The planned utilization of a primary's core, with headroom for bursts.
pub const BUSY: f64 = 0.6;
/// Decisions per second of one client process, as in a medium-sized service.
pub const PER_INSTANCE: f64 = 20_000.0;
/// The same with a few large processes that decide for all callers, such as `sluicegate serve`.
pub const PER_LARGE_INSTANCE: f64 = 200_000.0;
/// The default of Redis's `maxclients`.
pub const MAX_CLIENTS: f64 = 10_000.0;
/// The number of nodes that the Redis Cluster specification is designed for.
pub const MAX_NODES: f64 = 1000.0;
/// Bytes of a call and its reply on the wire, with headers: an upper bound from the script's arguments, not measured.
pub const CALL_BYTES: f64 = 450.0;

/// The requirements of one rate.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub decisions_per_s: f64,
    pub instances: f64,
    /// Primaries of a Cluster, one key per call.
    pub primaries: f64,
    /// Primaries of a Cluster, 16 keys per call.
    pub primaries_16: f64,
    /// Primaries of a Cluster, 64 keys per call.
    pub primaries_64: f64,
    /// Cores that the clients need for decisions.
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

/// Returns the number of primaries that a rate needs with this number of keys per call.
pub fn primaries(decisions_per_s: f64, costs: &Costs, keys_per_call: f64) -> f64 {
    (decisions_per_s * costs.with_keys_per_call(keys_per_call) / 1e6 / BUSY).ceil()
}
