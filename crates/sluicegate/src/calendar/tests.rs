//! The periods of all zones. `SLUICEGATE_ALL_PERIODS=1` walks through every period instead of a sample: about 100 million, which
//! takes twelve minutes of CPU time with optimization.
//!
//! ```sh
//! SLUICEGATE_ALL_PERIODS=1 cargo test -p sluicegate --lib --config profile.dev.package.jiff.opt-level=3 \
//!     --config profile.dev.package.sluicegate.opt-level=2 periods_of_all_zones -- --nocapture
//! ```

use std::{
    env,
    ops::Range,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use jiff::civil::DateTime;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate_testkit::reference_calendar;

use super::*;

const SECOND: u64 = 1_000_000;
/// 1970 to 2100.
const TIMES: Range<u64> = 0..4_133_980_800 * SECOND;
/// Sampled times per zone and unit, and sampled changes of its clock.
const SAMPLES: usize = 12;

fn utc(year: i16, month: i8, day: i8, hour: i8, minute: i8) -> u64 {
    let instant = date(year, month, day).at(hour, minute, 0, 0).to_zoned(TimeZone::UTC).unwrap();
    u64::try_from(instant.timestamp().as_microsecond()).unwrap()
}

fn calendar(unit: CalendarUnit, zone: &str, anchor: Option<Anchor>) -> &'static Calendar {
    Zone::named(zone).unwrap().calendar(unit, anchor).unwrap()
}

fn edges(calendar: &Calendar, at_us: u64) -> PeriodEdges {
    calendar.edges_at(Timestamp::from_micros(at_us))
}

fn anchors(unit: CalendarUnit) -> Vec<Option<Anchor>> {
    match unit {
        CalendarUnit::Day => vec![None],
        CalendarUnit::Week => Weekday::ALL.map(|weekday| Some(Anchor::Weekday(weekday))).to_vec(),
        _ => (1..=31).map(|day| Some(Anchor::DayOfMonth(day))).collect(),
    }
}

/// Checks the period that contains a time and its borders to the periods before and after. Returns the end.
fn assert_tiles(calendar: &Calendar, at_us: u64) -> u64 {
    let here = edges(calendar, at_us);
    let context = || format!("{calendar} at {at_us}: {here:?}");
    assert!((here.start_us..here.end_us).contains(&at_us), "{}", context());
    let length = Duration::from_micros(here.end_us - here.start_us);
    assert!(length <= calendar.unit().longest(), "{}", context());
    assert!(length >= calendar.unit().shortest() || here.start_us == 0, "{}", context());
    let next = edges(calendar, here.end_us);
    assert_eq!((next.start_us, next.end_us), (here.end_us, here.next_end_us), "{}", context());
    assert_eq!(edges(calendar, here.end_us - 1), here, "{}", context());
    if here.start_us > 0 {
        let before = edges(calendar, here.start_us - 1);
        assert_eq!((before.end_us, before.next_end_us), (here.start_us, here.end_us), "{}", context());
        assert_starts_on_the_anchor(calendar, here.start_us);
    }
    here.end_us
}

/// Checks by the civil time that a period starts with the first moment of its day, and on its anchor unless the zone skips that day.
fn assert_starts_on_the_anchor(calendar: &Calendar, start_us: u64) {
    let zone = &Zone::named(calendar.zone()).unwrap().0.time_zone;
    let civil = |us: u64| -> DateTime {
        zone.to_datetime(Instant::from_microsecond(i64::try_from(us).unwrap()).unwrap())
    };
    let (first, before) = (civil(start_us).date(), civil(start_us - 1).date());
    assert!(before < first, "{calendar} from {first}, after {before}");
    let is_start = |day: Date| {
        let is_anchor = match calendar.anchor() {
            None => true,
            Some(Anchor::Weekday(weekday)) => {
                day.weekday().to_monday_zero_offset() == i8::try_from(weekday as u8).unwrap()
            }
            Some(Anchor::DayOfMonth(anchor)) => {
                day.day() == day.days_in_month().min(i8::try_from(anchor).unwrap())
            }
        };
        is_anchor
            && match calendar.unit() {
                CalendarUnit::Quarter => day.month() % 3 == 1,
                CalendarUnit::Year => day.month() == 1,
                _ => true,
            }
    };
    let mut days = first.series((-1).day()).take_while(|day| *day > before);
    assert!(days.any(is_start), "{calendar} from {first}, after {before}");
}

/// Returns times at which the clock of a zone changes.
fn clock_changes(zone: &str) -> Vec<u64> {
    let zone = DATABASE.get(zone).unwrap();
    let until = i64::try_from(TIMES.end).unwrap();
    let changes = zone.following(Instant::UNIX_EPOCH).map(|change| change.timestamp().as_microsecond());
    changes.take_while(|change| *change < until).map(|change| u64::try_from(change).unwrap()).collect()
}

/// Checks every period of a zone, with all units and anchors. Returns their number.
fn assert_all_periods(zone: &str) -> u64 {
    let mut periods = 0;
    for unit in CalendarUnit::ALL {
        for anchor in anchors(unit) {
            let calendar = calendar(unit, zone, anchor);
            let mut at_us = TIMES.start;
            while at_us < TIMES.end {
                at_us = assert_tiles(calendar, at_us);
                periods += 1;
            }
        }
    }
    periods
}

/// Checks every period of all zones, with a thread for each core.
#[expect(clippy::print_stdout, reason = "the number of periods is the result of this run")]
fn assert_all_periods_of(zones: &[String]) {
    let (next, periods) = (AtomicUsize::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
            scope.spawn(|| {
                while let Some(zone) = zones.get(next.fetch_add(1, Ordering::Relaxed)) {
                    periods.fetch_add(assert_all_periods(zone), Ordering::Relaxed);
                }
            });
        }
    });
    println!("{} periods of {} zones", periods.into_inner(), zones.len());
}

#[test]
fn the_periods_of_all_zones_cover_all_time_without_gap_or_overlap() {
    let mut chance = StdRng::seed_from_u64(1);
    let zones: Vec<String> = Zone::names().collect();
    assert!(zones.len() > 500, "{} zones", zones.len());
    if env::var_os("SLUICEGATE_ALL_PERIODS").is_some() {
        return assert_all_periods_of(&zones);
    }
    for (number, zone) in zones.iter().enumerate() {
        let changes = clock_changes(zone);
        for unit in CalendarUnit::ALL {
            let all = anchors(unit);
            for sample in 0..SAMPLES {
                // all anchors in turn
                let calendar = calendar(unit, zone, all[(number * SAMPLES + sample) % all.len()]);
                assert_tiles(calendar, chance.random_range(TIMES));
                if !changes.is_empty() {
                    let change = changes[chance.random_range(0..changes.len())];
                    let two_days = 2 * 86_400 * SECOND;
                    let near = change.saturating_sub(two_days)..change + two_days;
                    assert_tiles(calendar, chance.random_range(near));
                    assert_tiles(calendar, change);
                }
            }
        }
    }
}

#[test]
fn the_periods_are_those_of_the_reference_calendar() {
    let mut chance = StdRng::seed_from_u64(2);
    for zone in reference_calendar::ZONES {
        for unit in CalendarUnit::ALL {
            for anchor in anchors(unit) {
                let calendar = calendar(unit, zone, anchor);
                for _ in 0..50 {
                    let at_us = chance.random_range(utc(2022, 1, 1, 0, 0)..utc(2100, 1, 1, 0, 0));
                    let PeriodEdges { start_us, end_us, next_end_us } = edges(calendar, at_us);
                    let found = [start_us, end_us, next_end_us];
                    assert_eq!(found, reference_calendar::edges(calendar, at_us), "{calendar} at {at_us}");
                }
            }
        }
    }
}

/// The clock rules of many zones changed before 2007, and some days are unusual.
#[test]
fn unusual_days_have_the_right_length() {
    const HOUR: u64 = 3_600 * SECOND;
    // a time in the zone's day, and the length of that day in hours
    let table = [
        ("Europe/Berlin", utc(2026, 3, 29, 12, 0), 23),
        ("Europe/Berlin", utc(2026, 10, 25, 12, 0), 25),
        // clocks change at midnight
        ("America/Sao_Paulo", utc(2018, 11, 4, 12, 0), 23),
        ("America/Sao_Paulo", utc(2018, 2, 17, 12, 0), 25),
        // at 00:01, one minute of the day has passed when clocks are set back to the day before
        ("America/St_Johns", utc(2006, 10, 28, 12, 0), 24),
        ("America/St_Johns", utc(2006, 10, 29, 12, 0), 25),
        // the days before and after the skipped one
        ("Pacific/Apia", utc(2011, 12, 30, 9, 59), 24),
        ("Pacific/Apia", utc(2011, 12, 30, 10, 0), 24),
        ("Antarctica/Vostok", utc(1994, 1, 31, 12, 0), 31),
    ];
    for (zone, at_us, hours) in table {
        let day = edges(calendar(CalendarUnit::Day, zone, None), at_us);
        assert_eq!(day.end_us - day.start_us, hours * HOUR, "{zone} at {at_us}");
    }
}

/// In Samoa, December 29, 2011 was followed by December 31.
#[test]
fn a_day_that_a_zone_skips_has_no_period() {
    let apia = |unit, anchor| calendar(unit, "Pacific/Apia", anchor);
    let [before, skip, after, later] =
        [29, 30, 31, 32].map(|day| utc(2011, 12, 1, 10, 0) + (day - 1) * 86_400 * SECOND);
    let days = apia(CalendarUnit::Day, None);
    assert_eq!(edges(days, before), PeriodEdges { start_us: before, end_us: skip, next_end_us: after });
    assert_eq!(edges(days, skip), PeriodEdges { start_us: skip, end_us: after, next_end_us: later });
    assert_eq!(edges(days, skip - 1).start_us, before);
    // the period that would start on the skipped day starts with the next one
    let months = apia(CalendarUnit::Month, Some(Anchor::DayOfMonth(30)));
    assert_eq!(edges(months, skip - 1).end_us, skip);
    assert_eq!(edges(months, skip).start_us, skip);
}

#[test]
fn an_anchor_beyond_the_end_of_a_month_is_its_last_day() {
    let month = calendar(CalendarUnit::Month, "UTC", Some(Anchor::DayOfMonth(31)));
    let starts = [(2027, 1, 31), (2027, 2, 28), (2027, 3, 31), (2027, 4, 30), (2027, 5, 31)];
    let starts = starts.map(|(year, month, day)| utc(year, month, day, 0, 0));
    for at in 0..starts.len() - 2 {
        let expected =
            PeriodEdges { start_us: starts[at], end_us: starts[at + 1], next_end_us: starts[at + 2] };
        assert_eq!(edges(month, starts[at]), expected);
        assert_eq!(edges(month, starts[at + 1] - 1), expected);
    }
    let leap = calendar(CalendarUnit::Month, "UTC", Some(Anchor::DayOfMonth(30)));
    assert_eq!(edges(leap, utc(2028, 2, 1, 0, 0)).end_us, utc(2028, 2, 29, 0, 0));
    let year = calendar(CalendarUnit::Year, "UTC", Some(Anchor::DayOfMonth(31)));
    assert_eq!(edges(year, utc(2028, 1, 30, 23, 59)).end_us, utc(2028, 1, 31, 0, 0));
    let quarter = calendar(CalendarUnit::Quarter, "UTC", Some(Anchor::DayOfMonth(31)));
    assert_eq!(edges(quarter, utc(2028, 2, 1, 0, 0)).end_us, utc(2028, 4, 30, 0, 0));
}

#[test]
fn the_first_period_starts_at_the_epoch() {
    for zone in ["UTC", "Asia/Tokyo", "America/Los_Angeles"] {
        for unit in CalendarUnit::ALL {
            assert_eq!(edges(calendar(unit, zone, None), 0).start_us, 0, "{zone} {unit}");
        }
    }
}

#[test]
fn the_last_representable_time_has_a_period() {
    let last = sluicegate_core::time::MAX_EXACT;
    for unit in CalendarUnit::ALL {
        let edges = edges(calendar(unit, "Europe/Berlin", None), last);
        assert!(edges.start_us <= last && last < edges.end_us && edges.end_us < edges.next_end_us);
    }
}

#[test]
fn names_of_zones_are_found_in_any_case_and_others_are_rejected() {
    assert_eq!(Zone::named("europe/BERLIN").unwrap(), Zone::named("Europe/Berlin").unwrap());
    assert_eq!(Zone::utc().name(), "UTC");
    for name in ["", "Berlin", "Europe/Berln", "Etc/Unknown", "+01:00", "../UTC"] {
        assert_eq!(Zone::named(name), Err(CalendarError::Zone(name.to_owned())), "{name}");
    }
}

#[test]
fn a_calendar_with_equal_settings_is_stored_once() {
    let month = |anchor| calendar(CalendarUnit::Month, "Europe/Paris", anchor);
    assert!(std::ptr::eq(month(None), month(Some(Anchor::DayOfMonth(1)))));
    assert!(!std::ptr::eq(month(None), month(Some(Anchor::DayOfMonth(2)))));
    let zone = Zone::named("Europe/Paris").unwrap();
    assert!(zone.calendar(CalendarUnit::Day, Some(Anchor::DayOfMonth(1))).is_err());
    assert!(zone.0.calendars.read().keys().all(|(unit, _)| *unit == CalendarUnit::Month), "{zone:?}");
}
