//! The number of concurrent calls to one server.
//!
//! With too few, requests queue in this process while the server is idle. With too many, no batches form, and a decision
//! costs the server several times the work. The right number is the bandwidth-delay product, which differs by two orders
//! of magnitude between loopback and another data centre. The limit therefore adapts, like TCP Vegas and gradient
//! concurrency limits:
//!
//! ```text
//! limit = limit x (round trip without queueing / round trip now) + allowance
//! ```
//!
//! evaluated once per round: every call of a round was sent under the same limit. In equilibrium, `allowance` calls are
//! queued or served at the bottleneck, whether that is the server, the network or this process: one that is served, one
//! that is ready when it ends, and more if many are in flight, since their arrivals vary. On loopback that equals
//! [`MIN_CALLS`]. Without queueing the limit grows up to [`MAX_CALLS`], so that no check waits.
//!
//! Queueing delays every call of a round, while varying work delays only some, so the shortest round trip of a round is used.
//! The round trip without queueing is the shortest of all. Under constant load no call may be that fast again, so it is
//! measured from time to time by a call that is alone in flight.

use std::time::Duration;

use tokio::time::Instant;

/// One call that is being served, and one that is ready when it ends.
pub(super) const MIN_CALLS: usize = 2;
/// Beyond this, a batch takes longer to fill than a call takes to return.
pub(super) const MAX_CALLS: usize = 256;
/// The limit before anything was measured: enough for a burst at start-up over a network.
const INITIAL_CALLS: usize = 16;
/// The time that each tier adds to a call, which is work and not queueing.
const WORK_PER_TIER: Duration = Duration::from_micros(4);
/// The minimum number of calls in a round.
const MIN_SAMPLES: u32 = 4;
/// How long the shortest round trip stays valid if no call comes close to it.
const BASE_LIFETIME: Duration = Duration::from_secs(5);
/// The same while the limit is [`MIN_CALLS`]: either the server is saturated, or its round trip has become longer. A call that
/// is alone in flight distinguishes the two at little cost.
const BASE_LIFETIME_AT_MIN: Duration = Duration::from_millis(250);
/// Calls are held back for at most this many round trips until one is alone in flight. After that, the shortest recent round
/// trip is used.
const MAX_MEASURING: u32 = 4;

/// Adapts the number of calls in flight. Pure: the caller holds the lock and reads the clock.
#[derive(Debug)]
pub(super) struct CallLimit {
    limit: f64,
    in_flight: usize,
    /// Number of calls sent. Shows whether a call was alone from its sending to its reply.
    sent: u64,
    base: Option<Base>,
    round: Round,
}

/// The round trip without queueing.
#[derive(Clone, Copy, Debug)]
struct Base {
    round_trip: Duration,
    longer: Option<Longer>,
}

/// The time since no call has come close to the base.
#[derive(Clone, Copy, Debug)]
struct Longer {
    since: Instant,
    /// The shortest round trip since then.
    shortest: Duration,
}

#[derive(Debug)]
struct Round {
    started: Instant,
    samples: u32,
    shortest: Duration,
    /// Whether a check had to wait because of the limit.
    was_reached: bool,
}

impl Round {
    fn new(started: Instant) -> Self {
        Self { started, samples: 0, shortest: Duration::MAX, was_reached: false }
    }
}

/// A call in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) at: Instant,
    number: u64,
    was_alone: bool,
}

impl CallLimit {
    pub(super) fn new(now: Instant) -> Self {
        Self { limit: INITIAL_CALLS as f64, in_flight: 0, sent: 0, base: None, round: Round::new(now) }
    }

    /// The current limit.
    pub(super) fn limit(&self) -> usize {
        self.limit as usize
    }

    #[cfg(test)]
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit as f64;
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether another call may be sent.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        if self.in_flight == 0 {
            return true;
        }
        if self.is_measuring(now) {
            return false;
        }
        let admits = self.in_flight < self.limit();
        self.round.was_reached |= !admits;
        admits
    }

    /// Whether calls are held back until one is alone in flight.
    fn is_measuring(&self, now: Instant) -> bool {
        let longer = self.base.and_then(|base| base.longer);
        longer.is_some_and(|longer| {
            let elapsed = now.duration_since(longer.since);
            elapsed > self.base_lifetime()
                && elapsed <= self.base_lifetime() + longer.shortest * MAX_MEASURING
        })
    }

    fn base_lifetime(&self) -> Duration {
        if self.limit() <= MIN_CALLS { BASE_LIFETIME_AT_MIN } else { BASE_LIFETIME }
    }

    /// Records that a call is sent.
    pub(super) fn send(&mut self, now: Instant) -> Sent {
        let was_alone = self.in_flight == 0;
        self.in_flight += 1;
        self.sent += 1;
        Sent { at: now, number: self.sent, was_alone }
    }

    /// Records a call that ended without a measurable round trip.
    pub(super) fn abandon(&mut self) {
        self.in_flight -= 1;
    }

    /// Records the reply to a call of this many tiers.
    pub(super) fn replied(&mut self, call: Sent, tiers: usize, now: Instant) {
        self.in_flight -= 1;
        let took = now.duration_since(call.at);
        let work = WORK_PER_TIER * u32::try_from(tiers).unwrap_or(u32::MAX);
        let round_trip = took.saturating_sub(work).max(took / 8);
        let was_alone = call.was_alone && self.sent == call.number;
        let base = self.measure(round_trip, was_alone, now);
        self.round.samples += 1;
        self.round.shortest = self.round.shortest.min(round_trip);
        if call.at >= self.round.started && self.round.samples >= MIN_SAMPLES {
            self.end_round(base, now);
        }
    }

    /// Records a round trip and returns the one without queueing.
    fn measure(&mut self, round_trip: Duration, was_alone: bool, now: Instant) -> Duration {
        let lifetime = self.base_lifetime();
        let base = self.base.get_or_insert(Base { round_trip, longer: None });
        if round_trip < base.round_trip {
            *base = Base { round_trip, longer: None };
        } else if round_trip <= base.round_trip + base.round_trip / 8 {
            base.longer = None;
        } else {
            let longer = base.longer.get_or_insert(Longer { since: now, shortest: round_trip });
            longer.shortest = longer.shortest.min(round_trip);
            let Longer { since, shortest } = *longer;
            let elapsed = now.duration_since(since);
            if elapsed > lifetime && was_alone {
                *base = Base { round_trip, longer: None };
            } else if elapsed > lifetime + shortest * MAX_MEASURING {
                *base = Base { round_trip: shortest, longer: None };
            }
        }
        base.round_trip
    }

    fn end_round(&mut self, base: Duration, now: Instant) {
        let gradient = if self.round.shortest > base {
            base.as_secs_f64() / self.round.shortest.as_secs_f64()
        } else {
            1.0
        };
        let allowance = self.limit.sqrt().max(MIN_CALLS as f64);
        let target = (self.limit * gradient + allowance).clamp(self.limit / 2.0, self.limit * 2.0);
        if target < self.limit || self.round.was_reached {
            self.limit = target.clamp(MIN_CALLS as f64, MAX_CALLS as f64);
        }
        self.round = Round::new(now);
    }
}

#[cfg(test)]
mod simulation;
