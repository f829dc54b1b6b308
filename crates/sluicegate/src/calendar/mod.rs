//! Calendar windows: the days, weeks, months, quarters and years of a time zone, for [`Limit::fixed_window`].
//!
//! ```
//! use sluicegate::{Limit, Rule, calendar::{Anchor, CalendarUnit, Zone}};
//!
//! // 10,000 a month, from the 15th, 00:00 in Berlin
//! let berlin = Zone::named("Europe/Berlin")?;
//! let month = berlin.calendar(CalendarUnit::Month, Some(Anchor::DayOfMonth(15)))?;
//! let rule = Rule::new("quota", Limit::fixed_window(10_000, month)?).per(["tenant"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A period starts at the first moment of its first day in the zone, also if clocks skip midnight that day, and lasts until the next
//! one starts: a day has 23 or 25 hours when clocks change. Quarters start in January, April, July and October, years in January. An
//! anchor beyond the end of a month means its last day.
//!
//! The time zone database is compiled into the program. Zone data of the system is not used, so that all processes with one version of
//! the program agree on the periods.
//!
//! [`Limit::fixed_window`]: crate::Limit::fixed_window

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    sync::{LazyLock, OnceLock},
};

use jiff::{
    Timestamp as Instant, ToSpan,
    civil::{Date, Time, date},
    tz::{TimeZone, TimeZoneDatabase},
};
use parking_lot::RwLock;
use sluicegate_core::{Timestamp, calendar::PeriodEdges, calendar::PeriodSource};

pub use sluicegate_core::calendar::{Anchor, Calendar, CalendarError, CalendarUnit, Weekday};

/// The number of calendars of one zone: days, weeks from 7 weekdays, and months, quarters and years from 31 days.
const CALENDARS_PER_ZONE: usize = 1 + 7 + 3 * 31;

static DATABASE: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// Every zone that was used. Its size is bounded by the number of zones in the database.
static ZONES: LazyLock<RwLock<HashMap<String, &'static ZoneEntry>>> = LazyLock::new(RwLock::default);

/// A time zone of the IANA database.
///
/// ```
/// use sluicegate::calendar::Zone;
///
/// assert_eq!(Zone::named("europe/berlin")?.name(), "Europe/Berlin");
/// assert!(Zone::named("Europe/Atlantis").is_err());
/// # Ok::<(), sluicegate::calendar::CalendarError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Zone(&'static ZoneEntry);

struct ZoneEntry {
    name: String,
    time_zone: TimeZone,
    /// The calendars that were used, at most [`CALENDARS_PER_ZONE`]. They are never freed, so that a limit can refer to one.
    calendars: RwLock<HashMap<(CalendarUnit, Option<Anchor>), &'static Calendar>>,
}

impl Zone {
    /// Returns the zone of this name, in any case.
    ///
    /// # Errors
    /// If the database has no such zone.
    pub fn named(name: &str) -> Result<Self, CalendarError> {
        if let Some(known) = ZONES.read().get(name) {
            return Ok(Self(known));
        }
        let found = DATABASE.get(name).ok().filter(|found| !found.is_unknown());
        let Some((time_zone, name)) =
            found.and_then(|zone| Some((zone.clone(), zone.iana_name()?.to_owned())))
        else {
            return Err(CalendarError::Zone(name.to_owned()));
        };
        let mut zones = ZONES.write();
        let entry = zones.entry(name.clone()).or_insert_with(|| {
            Box::leak(Box::new(ZoneEntry { name, time_zone, calendars: RwLock::default() }))
        });
        Ok(Self(entry))
    }

    /// Returns Coordinated Universal Time.
    pub fn utc() -> Self {
        static UTC: OnceLock<Zone> = OnceLock::new();
        *UTC.get_or_init(|| Self::named("UTC").expect("the database has UTC"))
    }

    /// Returns the IANA name.
    pub fn name(self) -> &'static str {
        &self.0.name
    }

    /// Returns the names of all zones, in order.
    pub fn names() -> impl Iterator<Item = String> {
        DATABASE.available().map(|name| name.as_str().to_owned())
    }

    /// Returns the calendar of this unit in this zone. Its periods start on `anchor`, or on the first day of the month or Monday.
    ///
    /// # Errors
    /// If periods of the unit cannot start on that day.
    pub fn calendar(
        self,
        unit: CalendarUnit,
        anchor: Option<Anchor>,
    ) -> Result<&'static Calendar, CalendarError> {
        let settings = (unit, anchor.or(unit.default_anchor()));
        if let Some(known) = self.0.calendars.read().get(&settings) {
            return Ok(known);
        }
        // validated before anything is kept
        anchor.map_or(Ok(()), |anchor| unit.check_anchor(anchor))?;
        let mut calendars = self.0.calendars.write();
        if let Some(known) = calendars.get(&settings) {
            return Ok(known);
        }
        let source =
            CivilPeriods { starts: Starts::of(unit, settings.1), zone: self, last: RwLock::new(None) };
        let calendar = Calendar::new(unit, anchor, self.name(), Box::leak(Box::new(source)))?;
        let calendar: &'static Calendar = Box::leak(Box::new(calendar));
        calendars.insert(settings, calendar);
        debug_assert!(calendars.len() <= CALENDARS_PER_ZONE);
        Ok(calendar)
    }
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Zone {}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zone({})", self.name())
    }
}

/// The dates on which periods start.
#[derive(Clone, Copy)]
enum Starts {
    /// Every `length` days, counted from `first`.
    Days { length: i32, first: Date },
    /// On a day of every `length`th month, counted from January; the last day of a shorter month.
    Months { length: i32, day: i8 },
}

/// A Monday.
const MONDAY: Date = date(1970, 1, 5);

impl Starts {
    fn of(unit: CalendarUnit, anchor: Option<Anchor>) -> Self {
        let months = |length| Self::Months {
            length,
            day: match anchor {
                Some(Anchor::DayOfMonth(day)) => i8::try_from(day).unwrap_or(i8::MAX),
                _ => 1,
            },
        };
        match unit {
            CalendarUnit::Day => Self::Days { length: 1, first: MONDAY },
            CalendarUnit::Week => {
                let weekday = match anchor {
                    Some(Anchor::Weekday(weekday)) => weekday as i32,
                    _ => 0,
                };
                Self::Days { length: 7, first: MONDAY.saturating_add(weekday.days()) }
            }
            CalendarUnit::Month => months(1),
            CalendarUnit::Quarter => months(3),
            CalendarUnit::Year => months(12),
        }
    }

    /// Returns the number of the period whose dates include `day`. Periods are numbered in order.
    fn number_of(self, day: Date) -> i32 {
        match self {
            Self::Days { length, first } => days_between(first, day).div_euclid(length),
            Self::Months { length, .. } => {
                let month = i32::from(day.year()) * 12 + i32::from(day.month()) - 1;
                let number = month.div_euclid(length);
                if day < self.start(number) { number - 1 } else { number }
            }
        }
    }

    /// Returns the first date of a period.
    fn start(self, number: i32) -> Date {
        match self {
            Self::Days { length, first } => first.saturating_add((number * length).days()),
            Self::Months { length, day } => {
                let month = number * length;
                let year = i16::try_from(month.div_euclid(12)).unwrap_or(i16::MAX);
                let month = i8::try_from(month.rem_euclid(12) + 1).unwrap_or(1);
                let first = Date::new(year, month, 1).unwrap_or(Date::MAX);
                Date::new(year, month, day.min(first.days_in_month())).unwrap_or(first)
            }
        }
    }
}

fn days_between(from: Date, to: Date) -> i32 {
    i32::try_from(to.duration_since(from).as_hours() / 24).unwrap_or(i32::MAX)
}

/// The periods of one calendar.
struct CivilPeriods {
    starts: Starts,
    zone: Zone,
    /// The edges around the last time: nearly all times of a process are in one period.
    last: RwLock<Option<PeriodEdges>>,
}

impl PeriodSource for CivilPeriods {
    fn edges_at(&self, at: Timestamp) -> PeriodEdges {
        let at_us = at.as_micros();
        let known = *self.last.read();
        if let Some(known) = known.filter(|known| (known.start_us..known.end_us).contains(&at_us)) {
            return known;
        }
        let edges = self.compute(at_us);
        *self.last.write() = Some(edges);
        edges
    }
}

impl CivilPeriods {
    fn compute(&self, at_us: u64) -> PeriodEdges {
        // The period of the date may have ended: when clocks are set back across midnight, the end of a day repeats after the next
        // one has started. A day that the zone skips has no time.
        let next_after = |mut number: i32, time_us: u64| {
            while self.edge(number) <= time_us {
                number += 1;
            }
            number
        };
        let next = next_after(self.starts.number_of(self.date_at(at_us)), at_us);
        let end_us = self.edge(next);
        let next_end_us = self.edge(next_after(next + 1, end_us));
        PeriodEdges { start_us: self.edge(next - 1), end_us, next_end_us }
    }

    fn date_at(&self, at_us: u64) -> Date {
        let instant =
            Instant::from_microsecond(i64::try_from(at_us).unwrap_or(i64::MAX)).unwrap_or(Instant::MAX);
        self.zone.0.time_zone.to_datetime(instant).date()
    }

    /// Returns the first moment of a period, in microseconds since the epoch; 0 if it is earlier.
    fn edge(&self, number: i32) -> u64 {
        let midnight = self.starts.start(number).to_datetime(Time::midnight());
        // of a repeated midnight the first one; if midnight is skipped, the end of the gap
        let first = self.zone.0.time_zone.to_ambiguous_timestamp(midnight).compatible();
        u64::try_from(first.unwrap_or(Instant::MAX).as_microsecond()).unwrap_or(0)
    }
}
