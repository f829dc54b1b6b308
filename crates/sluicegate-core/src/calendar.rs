//! Calendar windows: the days, weeks, months, quarters and years of a time zone.
//!
//! This crate has no time zone data. A [`Calendar`] gets the edges of its periods as whole microseconds from a
//! [`PeriodSource`], which is a pure function of time. The crate `sluicegate` has one for the zones of the IANA time zone
//! database.

use std::{fmt, str::FromStr, time::Duration};

use crate::time::Timestamp;

const HOUR_SECS: u64 = 60 * 60;
const DAY_SECS: u64 = 24 * HOUR_SECS;
/// How much longer than its days of 24 hours a period can be. Since 1970, no zone has set its clocks back by more than seven
/// hours at once.
const MAX_EXTRA_SECS: u64 = 12 * HOUR_SECS;

/// The kind of a calendar period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CalendarUnit {
    /// From midnight to midnight.
    Day,
    /// Seven days, from Monday unless anchored to another weekday.
    Week,
    /// From the first day of a month, unless anchored to another day.
    Month,
    /// Three months that begin in January, April, July or October.
    Quarter,
    /// Twelve months that begin in January.
    Year,
}

/// A day of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Weekday {
    /// Monday.
    Monday,
    /// Tuesday.
    Tuesday,
    /// Wednesday.
    Wednesday,
    /// Thursday.
    Thursday,
    /// Friday.
    Friday,
    /// Saturday.
    Saturday,
    /// Sunday.
    Sunday,
}

/// The day on which periods start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Anchor {
    /// A day of the first month of the period, 1 to 31. In a shorter month, the last day.
    DayOfMonth(u8),
    /// A day of the week.
    Weekday(Weekday),
}

/// Why a calendar window is invalid. Each message names the accepted values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalendarError {
    /// The text is not a calendar window.
    #[error("{0:?} is not a calendar window: use {windows}, or a length such as \"30d\"", windows = CalendarUnit::list())]
    Window(String),
    /// The text is not an anchor.
    #[error("anchor {0:?} is unknown: use a day of the month, 1 to 31, or a weekday, for example \"monday\"")]
    Anchor(String),
    /// The anchor is not the day of any month.
    #[error("anchor {0} is out of range: use a day of the month, 1 to 31")]
    DayOfMonth(u8),
    /// A week starts on a weekday.
    #[error("anchor {0} does not fit \"1 week\": use a weekday, for example \"monday\"")]
    WeekAnchor(Anchor),
    /// Months, quarters and years start on a day of a month.
    #[error("anchor {anchor} does not fit \"{unit}\": use a day of the month, 1 to 31")]
    MonthAnchor {
        /// The unit.
        unit: CalendarUnit,
        /// The anchor.
        anchor: Anchor,
    },
    /// A day starts at midnight.
    #[error("\"1 day\" has no anchor: remove it, or use \"1 week\" or \"1 month\"")]
    DayAnchor,
    /// The time zone database has no such zone.
    #[error(
        "zone {0:?} is unknown: use a name of the IANA time zone database, for example \"Europe/Berlin\" or \"UTC\""
    )]
    Zone(String),
}

/// The edges of the period that contains a time, and of the next one, in microseconds since the epoch. A period contains its
/// start and not its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeriodEdges {
    /// Start of the period; 0 if it began before the epoch.
    pub start_us: u64,
    /// End of the period and start of the next one.
    pub end_us: u64,
    /// End of the next period.
    pub next_end_us: u64,
}

/// Computes the periods of one calendar. The periods cover all time since the epoch without gap or overlap.
pub trait PeriodSource: Send + Sync {
    /// Returns the edges of the period that contains `at` and of the next one. Equal times have equal edges.
    fn edges_at(&self, at: Timestamp) -> PeriodEdges;
}

/// The periods of one unit in one time zone.
pub struct Calendar {
    unit: CalendarUnit,
    anchor: Option<Anchor>,
    zone: &'static str,
    source: &'static dyn PeriodSource,
}

impl CalendarUnit {
    /// Every unit, shortest first.
    pub const ALL: [Self; 5] = [Self::Day, Self::Week, Self::Month, Self::Quarter, Self::Year];

    /// Returns the window as it is written in the configuration. The space distinguishes the calendar window `1 day` from `1d`,
    /// which is 24 hours and aligned to the epoch.
    pub const fn window(self) -> &'static str {
        match self {
            Self::Day => "1 day",
            Self::Week => "1 week",
            Self::Month => "1 month",
            Self::Quarter => "1 quarter",
            Self::Year => "1 year",
        }
    }

    /// Returns an upper bound of the length of a period.
    pub const fn longest(self) -> Duration {
        let days = match self {
            Self::Day => 1,
            Self::Week => 7,
            Self::Month => 31,
            Self::Quarter => 92,
            Self::Year => 366,
        };
        Duration::from_secs(days * DAY_SECS + MAX_EXTRA_SECS)
    }

    /// Returns a lower bound of the length of a period. A zone that moves to the other side of the date line skips a day.
    pub const fn shortest(self) -> Duration {
        Duration::from_secs(match self {
            Self::Day => 12 * HOUR_SECS,
            Self::Week => 6 * DAY_SECS,
            Self::Month => 27 * DAY_SECS,
            Self::Quarter => 88 * DAY_SECS,
            Self::Year => 364 * DAY_SECS,
        })
    }

    /// Returns the anchor of a calendar without one.
    pub const fn default_anchor(self) -> Option<Anchor> {
        match self {
            Self::Day => None,
            Self::Week => Some(Anchor::Weekday(Weekday::Monday)),
            Self::Month | Self::Quarter | Self::Year => Some(Anchor::DayOfMonth(1)),
        }
    }

    /// Validates an anchor.
    ///
    /// # Errors
    /// If periods of this unit cannot start on that day.
    pub const fn check_anchor(self, anchor: Anchor) -> Result<(), CalendarError> {
        match (self, anchor) {
            (Self::Day, _) => Err(CalendarError::DayAnchor),
            (Self::Week, Anchor::Weekday(_)) => Ok(()),
            (Self::Week, Anchor::DayOfMonth(_)) => Err(CalendarError::WeekAnchor(anchor)),
            (unit, Anchor::Weekday(_)) => Err(CalendarError::MonthAnchor { unit, anchor }),
            (_, Anchor::DayOfMonth(1..=31)) => Ok(()),
            (_, Anchor::DayOfMonth(day)) => Err(CalendarError::DayOfMonth(day)),
        }
    }

    /// Returns all windows in one phrase, for error messages.
    pub fn list() -> String {
        let [others @ .., last] = Self::ALL.map(|unit| format!("{:?}", unit.window()));
        format!("{} or {last}", others.join(", "))
    }
}

impl fmt::Display for CalendarUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.window())
    }
}

impl FromStr for CalendarUnit {
    type Err = CalendarError;

    fn from_str(text: &str) -> Result<Self, CalendarError> {
        let found = Self::ALL.into_iter().find(|unit| unit.window() == text);
        found.ok_or_else(|| CalendarError::Window(text.to_owned()))
    }
}

impl Weekday {
    /// Every day of the week, from Monday.
    pub const ALL: [Self; 7] = [
        Self::Monday,
        Self::Tuesday,
        Self::Wednesday,
        Self::Thursday,
        Self::Friday,
        Self::Saturday,
        Self::Sunday,
    ];

    /// Returns the name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Monday => "monday",
            Self::Tuesday => "tuesday",
            Self::Wednesday => "wednesday",
            Self::Thursday => "thursday",
            Self::Friday => "friday",
            Self::Saturday => "saturday",
            Self::Sunday => "sunday",
        }
    }
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DayOfMonth(day) => write!(f, "{day}"),
            Self::Weekday(weekday) => write!(f, "\"{}\"", weekday.name()),
        }
    }
}

impl FromStr for Anchor {
    type Err = CalendarError;

    fn from_str(text: &str) -> Result<Self, CalendarError> {
        if let Some(weekday) = Weekday::ALL.into_iter().find(|weekday| weekday.name() == text) {
            return Ok(Self::Weekday(weekday));
        }
        match text.parse() {
            Ok(day @ 1..=31) => Ok(Self::DayOfMonth(day)),
            _ => Err(CalendarError::Anchor(text.to_owned())),
        }
    }
}

impl Calendar {
    /// Creates a calendar of periods that start on `anchor`, or on the default day of the unit.
    ///
    /// # Errors
    /// If periods of the unit cannot start on that day.
    pub fn new(
        unit: CalendarUnit,
        anchor: Option<Anchor>,
        zone: &'static str,
        source: &'static dyn PeriodSource,
    ) -> Result<Self, CalendarError> {
        anchor.map_or(Ok(()), |anchor| unit.check_anchor(anchor))?;
        Ok(Self { unit, anchor: anchor.or(unit.default_anchor()), zone, source })
    }

    /// Returns the kind of its periods.
    pub const fn unit(&self) -> CalendarUnit {
        self.unit
    }

    /// Returns the day on which its periods start; `None` for days.
    pub const fn anchor(&self) -> Option<Anchor> {
        self.anchor
    }

    /// Returns the IANA name of its time zone.
    pub const fn zone(&self) -> &'static str {
        self.zone
    }

    /// Returns the edges of the period that contains `at` and of the next one.
    pub fn edges_at(&self, at: Timestamp) -> PeriodEdges {
        self.source.edges_at(at)
    }

    fn settings(&self) -> (CalendarUnit, Option<Anchor>, &'static str) {
        (self.unit, self.anchor, self.zone)
    }
}

impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        self.settings() == other.settings()
    }
}

impl Eq for Calendar {}

impl std::hash::Hash for Calendar {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.settings().hash(state);
    }
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calendar({self})")
    }
}

/// As in a sentence: `1 month in Europe/Berlin from day 15`. Defaults are omitted.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.unit, self.zone)?;
        match self.anchor {
            anchor if anchor == self.unit.default_anchor() => Ok(()),
            Some(Anchor::Weekday(weekday)) => write!(f, " from {}", weekday.name()),
            Some(Anchor::DayOfMonth(day)) => write!(f, " from day {day}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Epoch;

    impl PeriodSource for Epoch {
        fn edges_at(&self, _: Timestamp) -> PeriodEdges {
            PeriodEdges { start_us: 0, end_us: 1, next_end_us: 2 }
        }
    }

    fn calendar(unit: CalendarUnit, anchor: Option<Anchor>) -> Result<Calendar, CalendarError> {
        Calendar::new(unit, anchor, "UTC", &Epoch)
    }

    #[test]
    fn windows_and_anchors_round_trip() {
        for unit in CalendarUnit::ALL {
            assert_eq!(unit.window().parse(), Ok(unit));
        }
        for weekday in Weekday::ALL {
            assert_eq!(weekday.name().parse(), Ok(Anchor::Weekday(weekday)));
        }
        for day in 1..=31 {
            assert_eq!(day.to_string().parse(), Ok(Anchor::DayOfMonth(day)));
        }
        for text in ["0", "32", "Monday", "mon", "", "-1", "1.5", "256"] {
            assert_eq!(text.parse::<Anchor>(), Err(CalendarError::Anchor(text.to_owned())), "{text}");
        }
        for text in ["1d", "2 months", "month", "1 months", "1  month", "1 Month", ""] {
            assert_eq!(text.parse::<CalendarUnit>(), Err(CalendarError::Window(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn an_anchor_that_does_not_fit_the_unit_is_rejected_with_the_fix() {
        let sunday = Anchor::Weekday(Weekday::Sunday);
        let table = [
            (
                CalendarUnit::Day,
                Anchor::DayOfMonth(1),
                "\"1 day\" has no anchor: remove it, or use \"1 week\" or \"1 month\"",
            ),
            (
                CalendarUnit::Week,
                Anchor::DayOfMonth(3),
                "anchor 3 does not fit \"1 week\": use a weekday, for example \"monday\"",
            ),
            (
                CalendarUnit::Quarter,
                sunday,
                "anchor \"sunday\" does not fit \"1 quarter\": use a day of the month, 1 to 31",
            ),
            (
                CalendarUnit::Month,
                Anchor::DayOfMonth(32),
                "anchor 32 is out of range: use a day of the month, 1 to 31",
            ),
        ];
        for (unit, anchor, message) in table {
            assert_eq!(calendar(unit, Some(anchor)).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn calendars_with_equal_settings_are_equal() {
        let month = calendar(CalendarUnit::Month, None).unwrap();
        assert_eq!(month, calendar(CalendarUnit::Month, Some(Anchor::DayOfMonth(1))).unwrap());
        assert_ne!(month, calendar(CalendarUnit::Month, Some(Anchor::DayOfMonth(2))).unwrap());
        assert_ne!(month, calendar(CalendarUnit::Year, None).unwrap());
        assert_ne!(month, Calendar::new(CalendarUnit::Month, None, "Europe/Berlin", &Epoch).unwrap());
    }

    #[test]
    fn a_calendar_is_shown_without_its_defaults() {
        let text = |unit, anchor| calendar(unit, anchor).unwrap().to_string();
        assert_eq!(text(CalendarUnit::Month, None), "1 month in UTC");
        assert_eq!(text(CalendarUnit::Month, Some(Anchor::DayOfMonth(15))), "1 month in UTC from day 15");
        assert_eq!(
            text(CalendarUnit::Week, Some(Anchor::Weekday(Weekday::Sunday))),
            "1 week in UTC from sunday"
        );
        assert_eq!(text(CalendarUnit::Day, None), "1 day in UTC");
    }
}
