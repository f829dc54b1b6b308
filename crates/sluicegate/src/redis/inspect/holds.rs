//! The holds of counters: live ones, expired ones that are not released or settled yet, and those that cannot be settled.

use redis::{FromRedisValue, Value};
use sluicegate_core::{
    Timestamp,
    hold::{LiveHolds, MAX_LIVE_HOLDS},
};

use super::InspectedServer;
use crate::{
    redis::{
        keys::{Name, hold_key_beside, parse},
        snapshot::{IndexedHold, units_of_score},
    },
    store::StoreError,
};

/// The most holds of one counter that are read: those that are removed from its index first.
const MAX_READ: usize = 1_000;

/// Releases the expired holds of a concurrency counter, as a check does, and sets its units to the sum of the other holds. KEYS: the counter.
/// ARGV: the most holds to release. Returns their number, and 1 if the units were wrong.
const REPAIR: &str = "\
local key = KEYS[1]
if redis.call('TYPE', key).ok ~= 'zset' then return {0, 0} end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local function units_of(members)
  local units = 0
  for _, member in ipairs(members) do
    if #member < 17 then return nil end
    local _, _, own = struct.unpack('<Bdd', member)
    units = units + own
  end
  return units
end
local score = redis.call('ZSCORE', key, '')
local all = units_of(redis.call('ZRANGEBYSCORE', key, '0', '+inf'))
local expired = redis.call('ZRANGEBYSCORE', key, '0', now, 'LIMIT', '0', ARGV[1])
local released = units_of(expired)
if not all or not released then return {0, 0} end
local is_wrong = not score or -1 - tonumber(score) ~= all
if #expired == 0 and not is_wrong then return {0, 0} end
if #expired > 0 then redis.call('ZREM', key, unpack(expired)) end
if redis.call('ZCOUNT', key, '0', '+inf') == 0 then
  redis.call('DEL', key)
else
  redis.call('ZADD', key, string.format('%.0f', -1 - all + released), '')
end
return {#expired, is_wrong and 1 or 0}
";
/// The most holds that one call of [`REPAIR`] releases.
const MAX_REPAIRED: usize = 1_000;

/// The holds of one counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterHolds {
    /// The live holds.
    pub live: LiveHolds,
    /// Expired holds that are not released yet and therefore count as live.
    pub expired: ExpiredHolds,
    /// Expired holds that were not settled and whose estimate stays charged. They are in the index until their records expire, a minute after
    /// the holds.
    pub unsettled: ExpiredHolds,
    /// Live holds whose records were lost: they cannot be settled, released or renewed, and count until they expire.
    pub without_record: u64,
    /// The time at which the last of these expires; 0 if there are none.
    pub without_record_until_us: u64,
    /// The units of a concurrency counter and the sum of its holds, if they differ.
    pub unequal_units: Option<(u64, u64)>,
    /// Whether the counter has more holds than were read.
    pub is_partial: bool,
    /// Whether this is a concurrency counter, which [`InspectedServer::repair_holds`] can repair.
    pub is_concurrency: bool,
}

/// Expired holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpiredHolds {
    /// Their number.
    pub count: u64,
    /// The sum of their units.
    pub units: u64,
    /// The time at which the first of them expired; 0 if there are none.
    pub first_us: u64,
}

impl ExpiredHolds {
    fn add(&mut self, hold: &IndexedHold<'_>) {
        self.first_us = if self.count == 0 { hold.expires_us } else { self.first_us.min(hold.expires_us) };
        self.count += 1;
        self.units = self.units.saturating_add(hold.units);
    }
}

impl InspectedServer {
    /// Returns the time of the server, and the holds of the counters with these indexes. A key that is not an index has no holds.
    ///
    /// # Errors
    /// If a command is rejected or has no reply.
    pub async fn holds(&self, indexes: &[Vec<u8>]) -> Result<(Timestamp, Vec<CounterHolds>), StoreError> {
        let reply = self.ask(&redis::cmd("TIME")).await?;
        let (seconds, micros) =
            <(u64, u64)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("TIME"))?;
        let now = Timestamp::from_micros(seconds * 1_000_000 + micros);
        let mut all = Vec::with_capacity(indexes.len());
        for index in indexes {
            all.push(self.holds_of(index, now).await?);
        }
        Ok((now, all))
    }

    async fn holds_of(&self, index: &[u8], now: Timestamp) -> Result<CounterHolds, StoreError> {
        let mut range = redis::cmd("ZRANGE");
        // the empty member of a concurrency counter comes first, and one more shows whether all were read
        range.arg(index).arg(0).arg(MAX_READ + 1).arg("WITHSCORES");
        let reply = match self.ask(&range).await {
            // another type: reported as unreadable
            Err(StoreError::Rejected { code, .. }) if code == "WRONGTYPE" => {
                return Ok(CounterHolds::default());
            }
            reply => reply?,
        };
        let members = <Vec<(Vec<u8>, f64)>>::from_redis_value(reply);
        let members = members.map_err(|_| self.unexpected_reply("ZRANGE"))?;
        let is_counter = matches!(parse(&self.prefix, index), Some(Name::Counter { .. }));
        let (mut holds, unrecorded) = summarize(&members, is_counter, now);
        let lost = self.without_record(index, unrecorded).await?;
        holds.without_record = lost.len() as u64;
        holds.without_record_until_us = lost.iter().map(|hold| hold.expires_us).max().unwrap_or_default();
        Ok(holds)
    }

    /// Returns the live holds that have no record and are still in the index.
    async fn without_record<'a>(
        &self,
        index: &[u8],
        live: Vec<(&'a [u8], IndexedHold<'a>)>,
    ) -> Result<Vec<IndexedHold<'a>>, StoreError> {
        let record = |hold: &IndexedHold<'_>| hold_key_beside(&self.prefix, index, hold.id);
        let records: Vec<Vec<u8>> = live.iter().filter_map(|(_, hold)| record(hold)).collect();
        let exist = self.of_each("EXISTS", &records).await?;
        let missing: Vec<_> = live
            .into_iter()
            .zip(exist)
            .filter(|(_, exists)| *exists == Value::Int(0))
            .map(|(hold, _)| hold)
            .collect();
        // a hold that was reverted since the index was read has left it
        let mut scores = redis::pipe();
        for (member, _) in &missing {
            scores.cmd("ZSCORE").arg(index).arg(*member);
        }
        let scores = self.replies(&scores, missing.len()).await?;
        let remains = |(_, score): &((&[u8], IndexedHold<'a>), Value)| *score != Value::Nil;
        Ok(missing.into_iter().zip(scores).filter(remains).map(|((_, hold), _)| hold).collect())
    }

    /// Releases the expired holds of these concurrency counters, as a check does, and sets the units of each counter to the sum of its holds.
    /// Returns the number of released holds, and the number of counters with wrong units. Other keys are not changed.
    ///
    /// # Errors
    /// If a command is rejected or has no reply; some counters may have been repaired.
    pub async fn repair_holds(&self, counters: &[Vec<u8>]) -> Result<(u64, u64), StoreError> {
        let is_concurrency = |name: &&Vec<u8>| matches!(parse(&self.prefix, name), Some(Name::Counter { algorithm, .. }) if !algorithm.properties().has_window);
        let (mut released, mut corrected) = (0, 0);
        for name in counters.iter().filter(is_concurrency) {
            for _ in 0..MAX_LIVE_HOLDS.div_ceil(MAX_REPAIRED) {
                let mut repair = redis::cmd("EVAL");
                let reply = self.ask(repair.arg(REPAIR).arg(1).arg(name).arg(MAX_REPAIRED)).await?;
                let (holds, is_wrong) =
                    <(u64, u64)>::from_redis_value(reply).map_err(|_| self.unexpected_reply("EVAL"))?;
                released += holds;
                corrected += is_wrong;
                if holds < MAX_REPAIRED as u64 {
                    break;
                }
            }
        }
        Ok((released, corrected))
    }
}

/// Sums up the members of an index. Also returns the live holds with their members.
fn summarize(
    members: &[(Vec<u8>, f64)],
    is_counter: bool,
    now: Timestamp,
) -> (CounterHolds, Vec<(&[u8], IndexedHold<'_>)>) {
    let mut holds = CounterHolds { is_concurrency: is_counter, ..CounterHolds::default() };
    let mut live = Vec::new();
    let (mut units, mut total) = (0, 0_u64);
    for (position, (member, score)) in members.iter().enumerate() {
        if member.is_empty() {
            units = units_of_score(*score);
            continue;
        }
        if position > MAX_READ {
            holds.is_partial = true;
            break;
        }
        let Some(hold) = IndexedHold::read(member, *score) else { continue };
        total = total.saturating_add(hold.units);
        if hold.expires_us > now.as_micros() {
            holds.live = holds.live.and(hold.at_us, hold.units);
            live.push((&**member, hold));
        } else if hold.is_released {
            holds.expired.add(&hold);
        } else {
            holds.unsettled.add(&hold);
        }
    }
    if is_counter && !holds.is_partial && units != total {
        holds.unequal_units = Some((units, total));
    }
    (holds, live)
}
