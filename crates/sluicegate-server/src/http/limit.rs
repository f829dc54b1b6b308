//! Reads and validates a limit that is given in a request.

use sluicegate::{
    Algorithm, Limit, Window,
    calendar::{Calendar, CalendarError, CalendarUnit, Zone},
    duration,
    rules::LeaseSize,
    window::{self, WrittenWindow},
};
use sluicegate_core::{hold::OnExpiry, limit::MAX_AMOUNT};

use super::{
    body::{self, OnExpiryValue, Whole},
    problem::Problem,
};

/// The algorithm of a limit that does not name one.
const DEFAULT_ALGORITHM: Algorithm = Algorithm::TokenBucket;

pub(super) fn read_limit(limit: &body::Limit) -> Result<Limit, Problem> {
    let algorithm = match &limit.algorithm {
        Some(name) => name.parse().map_err(in_limit)?,
        None => DEFAULT_ALGORITHM,
    };
    match algorithm {
        Algorithm::Concurrency => read_concurrency(limit),
        algorithm => read_with_window(limit, algorithm),
    }
}

/// Prefixes an error with the field.
fn in_limit(error: impl std::fmt::Display) -> Problem {
    Problem::bad_request(format_args!("limit: {error}"))
}

/// An in-flight limit. An expired hold always frees its units, and settling frees them whatever the actual cost is.
fn read_concurrency(limit: &body::Limit) -> Result<Limit, Problem> {
    let fields = [
        ("window", limit.window.is_some()),
        ("zone", limit.zone.is_some()),
        ("anchor", limit.anchor.is_some()),
        ("burst", limit.burst.is_some()),
        ("lease", limit.lease.is_some()),
        ("lease_for", limit.lease_for.is_some()),
        ("on_expiry", limit.on_expiry.is_some()),
        ("max_excess", limit.max_excess.is_some()),
    ];
    match fields.into_iter().find(|(_, is_given)| *is_given) {
        Some((field, _)) => {
            let algorithm = Algorithm::Concurrency;
            Err(in_limit(format_args!("{field} has no effect with {algorithm}: remove it")))
        }
        None => Limit::concurrency(limit.amount.0).map_err(in_limit),
    }
}

fn read_with_window(limit: &body::Limit, algorithm: Algorithm) -> Result<Limit, Problem> {
    let Some(window) = &limit.window else {
        return Err(in_limit(format_args!("missing field `window`: {algorithm} counts units per window")));
    };
    let window = match window::parse(window).map_err(in_limit)? {
        WrittenWindow::Length(length) => length.into(),
        WrittenWindow::Calendar(unit) => read_calendar(limit, unit).map_err(in_limit)?.into(),
    };
    for (is_given, field) in [(limit.zone.is_some(), "zone"), (limit.anchor.is_some(), "anchor")] {
        if is_given && matches!(window, Window::Length(_)) {
            return Err(in_limit(format_args!(
                "{field} needs a calendar window: use {}, or remove {field}",
                CalendarUnit::list()
            )));
        }
    }
    let read = Limit::new(algorithm, limit.amount.0, window).map_err(in_limit)?;
    let read = match limit.burst {
        Some(burst) => read.with_burst(burst.0).map_err(in_limit)?,
        None => read,
    };
    read_holds(limit, read_lease(limit, read)?)
}

/// Adds what applies to holds.
fn read_holds(limit: &body::Limit, read: Limit) -> Result<Limit, Problem> {
    let read = match limit.on_expiry {
        Some(OnExpiryValue::Charge) => read.with_on_expiry(OnExpiry::Charge),
        Some(OnExpiryValue::Release) => read.with_on_expiry(OnExpiry::Release),
        None => Ok(read),
    };
    let read = read.map_err(in_limit)?;
    match limit.max_excess {
        Some(Whole(units)) if units > MAX_AMOUNT => {
            Err(in_limit(format_args!("max_excess {units} is out of range: use 0 to {MAX_AMOUNT}")))
        }
        Some(Whole(units)) => Ok(read.with_max_excess(units)),
        None => Ok(read),
    }
}

fn read_lease(limit: &body::Limit, read: Limit) -> Result<Limit, Problem> {
    let size = limit.lease.as_ref().map_or(LeaseSize::NONE, |lease| lease.0);
    if size.is_none() {
        return match limit.lease_for {
            Some(_) => Err(in_limit("lease_for has no effect without lease: add it")),
            None => Ok(read),
        };
    }
    let lifetime = match &limit.lease_for {
        Some(text) => duration::parse(text).map_err(in_limit)?,
        None => read.default_lease_lifetime(),
    };
    read.with_lease(size.units_of(read.amount()), lifetime).map_err(in_limit)
}

fn read_calendar(limit: &body::Limit, unit: CalendarUnit) -> Result<&'static Calendar, CalendarError> {
    let zone = limit.zone.as_deref().map_or_else(|| Ok(Zone::utc()), Zone::named)?;
    zone.calendar(unit, limit.anchor.as_ref().map(|anchor| anchor.0))
}
