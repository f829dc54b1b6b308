//! How many calls to one server may be in flight at once.
//!
//! Too few, and requests wait in this process while the server is idle; too many, and no batches form, which costs the
//! server several times the work per decision. The right number is what fills the round trip, and that differs by two
//! orders of magnitude between loopback and another data centre. So the limit follows what is measured:
//!
//! ```text
//! limit = limit x (round trip without queueing / round trip now) + allowance
//! ```
//!
//! evaluated once per round (every call of a round was sent under the same limit). In equilibrium, `allowance` calls are
//! queued or served at the bottleneck, whether that is the server, the network or this process: one that is served and
//! one that is ready when it ends, and more where there are many, since their arrivals vary. On loopback that comes to
//! [`MIN_CALLS`]. Without queueing the limit grows, up to [`MAX_CALLS`], so that nothing waits.
//!
//! The round trip without queueing is the shortest of late. Under constant load no call might see it again, so it is
//! measured now and then by a call that is alone in flight.

use std::time::Duration;

use tokio::time::Instant;

/// One call that the server works on, and one that is ready when it ends.
pub(super) const MIN_CALLS: usize = 2;
/// Beyond this, a batch takes longer to fill than a call takes to return.
pub(super) const MAX_CALLS: usize = 256;
/// The limit before anything was measured: enough for a burst at start-up over a network.
const INITIAL_CALLS: usize = 16;
/// What a tier adds to the time of a call by itself, which is work and not queueing.
const WORK_PER_TIER: Duration = Duration::from_micros(4);
/// The fewest calls of which a round is made.
const MIN_SAMPLES: u32 = 4;
/// How long the shortest round trip holds if no call comes near it.
const BASE_LIFETIME: Duration = Duration::from_secs(5);
/// The same when the limit is down to [`MIN_CALLS`]: either the server is saturated, or its round trip has become longer,
/// and a call that is alone tells which at little cost.
const BASE_LIFETIME_AT_MIN: Duration = Duration::from_millis(250);

/// Adapts the number of calls in flight. Pure: the caller holds the lock and reads the clock.
#[derive(Debug)]
pub(super) struct CallLimit {
    limit: f64,
    in_flight: usize,
    /// Calls sent so far: tells whether a call was alone from its sending to its reply.
    sent: u64,
    base: Option<Base>,
    round: Round,
}

/// The round trip without queueing.
#[derive(Clone, Copy, Debug)]
struct Base {
    round_trip: Duration,
    /// When a call last came near it.
    confirmed: Instant,
}

#[derive(Debug)]
struct Round {
    began: Instant,
    samples: u32,
    /// The time that the calls of this round were queued.
    queued: Duration,
    /// Whether a request had to wait because of the limit.
    was_reached: bool,
}

impl Round {
    fn new(began: Instant) -> Self {
        Self { began, samples: 0, queued: Duration::ZERO, was_reached: false }
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

    /// The limit in force.
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

    /// Whether a further call may be sent. Called only when a request waits for it.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        let limit = if self.must_measure(now) { 1 } else { self.limit() };
        let admits = self.in_flight < limit;
        self.round.was_reached |= !admits;
        admits
    }

    /// Whether the next call has to be alone, to measure the round trip without queueing.
    fn must_measure(&self, now: Instant) -> bool {
        self.base.is_some_and(|base| now.duration_since(base.confirmed) > self.base_lifetime())
    }

    fn base_lifetime(&self) -> Duration {
        if self.limit() <= MIN_CALLS { BASE_LIFETIME_AT_MIN } else { BASE_LIFETIME }
    }

    /// Notes that a call is sent.
    pub(super) fn send(&mut self, now: Instant) -> Sent {
        let was_alone = self.in_flight == 0;
        self.in_flight += 1;
        self.sent += 1;
        Sent { at: now, number: self.sent, was_alone }
    }

    /// Notes that a call ended without telling anything about the round trip.
    pub(super) fn abandon(&mut self) {
        self.in_flight -= 1;
    }

    /// Notes the reply to a call over this many tiers.
    pub(super) fn replied(&mut self, call: Sent, tiers: usize, now: Instant) {
        self.in_flight -= 1;
        let work = WORK_PER_TIER * u32::try_from(tiers).unwrap_or(u32::MAX);
        let round_trip = now.duration_since(call.at).saturating_sub(work);
        let was_alone = call.was_alone && self.sent == call.number;
        let base = self.measure(round_trip, was_alone, now);
        self.round.samples += 1;
        self.round.queued += round_trip.saturating_sub(base);
        if call.at >= self.round.began && self.round.samples >= MIN_SAMPLES {
            self.end_round(base, now);
        }
    }

    /// Takes a round trip into account; returns the one without queueing.
    fn measure(&mut self, round_trip: Duration, was_alone: bool, now: Instant) -> Duration {
        let has_expired = self.must_measure(now);
        let base = self.base.get_or_insert(Base { round_trip, confirmed: now });
        if round_trip < base.round_trip || (has_expired && was_alone) {
            *base = Base { round_trip, confirmed: now };
        } else if round_trip <= base.round_trip + base.round_trip / 8 {
            base.confirmed = now;
        }
        base.round_trip
    }

    fn end_round(&mut self, base: Duration, now: Instant) {
        let queued = (self.round.queued / self.round.samples).as_secs_f64();
        let base = base.as_secs_f64();
        let gradient = if queued > 0.0 { base / (base + queued) } else { 1.0 };
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
