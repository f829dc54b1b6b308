//! The periods of some calendars, found by counting days. It shares neither code nor time zone data with the implementation.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex},
};

use sluicegate_core::calendar::{Anchor, Calendar, CalendarUnit};

/// The years that the tables cover, until the last time that a store represents. The clock rules of all zones below do not change.
const YEARS: std::ops::Range<u64> = 2020..2257;
/// Days from the epoch to the first of these years.
const FIRST_DAY: u64 = 18_262;
/// The weekday of that day, counted from Monday: a Wednesday.
const FIRST_WEEKDAY: u64 = 2;

/// The zones that are known here.
pub const ZONES: [&str; 5] =
    ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "America/Sao_Paulo"];

/// One day, as it is counted from the first one.
struct Day {
    since_epoch: u64,
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    length_of_month: u64,
    /// From Monday, 0.
    weekday: u64,
}

impl Day {
    /// Returns which occurrence of its weekday in the month it is, from 1.
    fn occurrence(&self) -> u64 {
        (self.day - 1) / 7 + 1
    }

    fn is_last_occurrence(&self) -> bool {
        self.day + 7 > self.length_of_month
    }
}

/// The clock of a zone.
struct ZoneClock {
    /// Minutes east of UTC in winter.
    standard_minutes: i64,
    /// Returns whether clocks are set forward in the night that begins with a day.
    sets_forward: fn(&Day) -> bool,
    /// Returns whether clocks are set back in the night that begins with a day.
    sets_back: fn(&Day) -> bool,
}

fn zone_clock(zone: &str) -> ZoneClock {
    const SUNDAY: u64 = 6;
    let never: fn(&Day) -> bool = |_| false;
    let fixed = |standard_minutes| ZoneClock { standard_minutes, sets_forward: never, sets_back: never };
    match zone {
        "UTC" => fixed(0),
        "Asia/Kolkata" => fixed(5 * 60 + 30),
        "America/Sao_Paulo" => fixed(-3 * 60),
        "Europe/Berlin" => ZoneClock {
            standard_minutes: 60,
            sets_forward: |day| day.month == 3 && day.weekday == SUNDAY && day.is_last_occurrence(),
            sets_back: |day| day.month == 10 && day.weekday == SUNDAY && day.is_last_occurrence(),
        },
        "America/New_York" => ZoneClock {
            standard_minutes: -5 * 60,
            sets_forward: |day| day.month == 3 && day.weekday == SUNDAY && day.occurrence() == 2,
            sets_back: |day| day.month == 11 && day.weekday == SUNDAY && day.occurrence() == 1,
        },
        other => panic!("the reference calendar has no zone {other:?}"),
    }
}

fn days() -> impl Iterator<Item = Day> {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let months = YEARS.flat_map(move |year| {
        let february = if is_leap(year) { 29 } else { 28 };
        let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        (1..).zip(lengths).map(move |(month, length)| (year, month, length))
    });
    let days =
        months.flat_map(|(year, month, length)| (1..=length).map(move |day| (year, month, day, length)));
    (0..).zip(days).map(|(number, (year, month, day, length_of_month))| Day {
        since_epoch: FIRST_DAY + number,
        year,
        month,
        day,
        length_of_month,
        weekday: (FIRST_WEEKDAY + number) % 7,
    })
}

fn starts_period(calendar: &Calendar, day: &Day) -> bool {
    let is_anchor = match calendar.anchor() {
        None => true,
        Some(Anchor::Weekday(weekday)) => day.weekday == weekday as u64,
        Some(Anchor::DayOfMonth(anchor)) => day.day == u64::from(anchor).min(day.length_of_month),
    };
    let is_month = match calendar.unit() {
        CalendarUnit::Day | CalendarUnit::Week | CalendarUnit::Month => true,
        CalendarUnit::Quarter => [1, 4, 7, 10].contains(&day.month),
        CalendarUnit::Year => day.month == 1,
    };
    is_anchor && is_month
}

/// Returns the starts of all periods in [`YEARS`], in microseconds since the epoch.
fn starts(calendar: &Calendar) -> Vec<u64> {
    let clock = zone_clock(calendar.zone());
    let (mut starts, mut is_summer) = (Vec::new(), false);
    for day in days() {
        if starts_period(calendar, &day) {
            let minutes = clock.standard_minutes + if is_summer { 60 } else { 0 };
            let midnight = i64::try_from(day.since_epoch * 24 * 60).expect("fits") - minutes;
            starts.push(u64::try_from(midnight).expect("after the epoch") * 60_000_000);
        }
        debug_assert!(day.year >= YEARS.start);
        is_summer = (is_summer || (clock.sets_forward)(&day)) && !(clock.sets_back)(&day);
    }
    starts
}

/// The starts of all periods of each calendar.
type Tables = HashMap<&'static Calendar, Arc<Vec<u64>>>;

/// Returns start and end of the period that contains a time, and the end of the next one.
///
/// # Panics
/// When the zone is not one of [`ZONES`].
pub fn edges(calendar: &'static Calendar, at_us: u64) -> [u64; 3] {
    static KNOWN: LazyLock<Mutex<Tables>> = LazyLock::new(Mutex::default);
    let starts = {
        let mut known = KNOWN.lock().expect("no test panics while it holds the lock");
        Arc::clone(known.entry(calendar).or_insert_with(|| Arc::new(starts(calendar))))
    };
    let next = starts.partition_point(|start| *start <= at_us);
    // beyond the table, time is one period
    let edge = |index: usize| starts.get(index).copied().unwrap_or(u64::MAX);
    [next.checked_sub(1).map_or(0, edge), edge(next), edge(next + 1)]
}
