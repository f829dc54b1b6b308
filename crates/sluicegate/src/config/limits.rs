//! Builds the limit of a rule from its fields.

use std::time::Duration;

use sluicegate_core::{Algorithm, Limit, LimitError, OnExpiry, Window, limit::MAX_AMOUNT};

use super::{
    error::{Location, Problem},
    schema::Rule,
    values::{Keyword, WindowValue},
};
use crate::{calendar::Zone, window::WrittenWindow};

/// The fields of a rule that make its limit.
pub(super) struct LimitFields<'a> {
    /// The rule with defaults.
    pub(super) read: &'a Rule,
    /// The rule as written.
    pub(super) own: &'a Rule,
    /// The rule in messages.
    pub(super) shown: &'a str,
}

/// Returns a limit of the algorithm, to validate other fields against.
pub(super) fn any(algorithm: Algorithm) -> Limit {
    const VALID: &str = "the smallest amount is valid";
    if algorithm.properties().has_window {
        Limit::new(algorithm, 1, Duration::from_secs(1)).expect(VALID)
    } else {
        Limit::concurrency(1).expect(VALID)
    }
}

impl LimitFields<'_> {
    /// Builds the limit without the burst and the lease. Returns `None` after reporting an invalid amount or window.
    pub(super) fn limit(&self, algorithm: Algorithm, problems: &mut Vec<Problem>) -> Option<Limit> {
        if !algorithm.properties().has_window {
            return self.concurrency(algorithm, problems);
        }
        let limit = self.windowed(algorithm, problems);
        self.reject_unused_calendar_settings(problems);
        let max_excess = self.max_excess(problems);
        let on_expiry = self.read.on_expiry.get().map_or(OnExpiry::default(), |word| word.0);
        let limit = limit?.with_on_expiry(on_expiry).expect("the limit has no lease yet");
        Some(max_excess.map_or(limit, |units| limit.with_max_excess(units)))
    }

    fn report(&self, at: &Location, message: impl std::fmt::Display, problems: &mut Vec<Problem>) {
        problems.push(Problem::new(at, format!("{}: {message}", self.shown)));
    }

    /// Builds a limit of live holds, and reports the fields that it does not have.
    fn concurrency(&self, algorithm: Algorithm, problems: &mut Vec<Problem>) -> Option<Limit> {
        let Rule { window, zone, anchor, max_excess, .. } = self.own;
        for (is_given, location, key) in [
            (window.get().is_some(), window.location(), "window"),
            (zone.get().is_some(), zone.location(), "zone"),
            (anchor.get().is_some(), anchor.location(), "anchor"),
        ] {
            if is_given {
                let message =
                    format!("{algorithm} has no {key}: remove it; units count until their hold ends");
                self.report(&location, message, problems);
            }
        }
        if max_excess.get().is_some() {
            let message =
                format!("{algorithm} has no max_excess: remove it; settling frees all units of a hold");
            self.report(&max_excess.location(), message, problems);
        }
        if self.own.on_expiry.get() == Some(&Keyword(OnExpiry::Charge)) {
            let message = format!("{algorithm} always releases expired holds: remove on_expiry");
            self.report(&self.own.on_expiry.location(), message, problems);
        }
        let limit = Limit::concurrency(*self.read.amount.get()?);
        limit.map_err(|error| self.report(&self.read.amount.location(), error, problems)).ok()
    }

    fn windowed(&self, algorithm: Algorithm, problems: &mut Vec<Problem>) -> Option<Limit> {
        let window = self.window(problems);
        let (amount, window) = (*self.read.amount.get()?, window?);
        let error = match Limit::new(algorithm, amount, window) {
            Ok(limit) => return Some(limit),
            Err(error) => error,
        };
        let mut report = |error: &LimitError| {
            let location = match error {
                LimitError::Amount { .. } => self.read.amount.location(),
                _ => self.read.window.location(),
            };
            self.report(&location, error, problems);
        };
        report(&error);
        // the first error hides one of the window
        if let LimitError::Amount { .. } = error
            && let Err(error) = Limit::new(algorithm, 1, window)
        {
            report(&error);
        }
        None
    }

    fn window(&self, problems: &mut Vec<Problem>) -> Option<Window> {
        let unit = match self.read.window.get()?.0 {
            WrittenWindow::Length(length) => return Some(length.into()),
            WrittenWindow::Calendar(unit) => unit,
        };
        let zone = self.read.zone.get().map_or_else(Zone::utc, |zone| zone.0);
        match zone.calendar(unit, self.read.anchor.get().map(|anchor| anchor.0)) {
            Ok(calendar) => Some(calendar.into()),
            Err(error) => {
                self.report(&self.read.anchor.location(), error, problems);
                None
            }
        }
    }

    /// Reports a zone or an anchor of a rule without a calendar window.
    fn reject_unused_calendar_settings(&self, problems: &mut Vec<Problem>) {
        if !matches!(self.read.window.get(), Some(WindowValue(WrittenWindow::Length(_)))) {
            return;
        }
        let Rule { zone, anchor, .. } = self.own;
        for (is_given, location, key) in [
            (zone.get().is_some(), zone.location(), "zone"),
            (anchor.get().is_some(), anchor.location(), "anchor"),
        ] {
            if is_given {
                let message = format!(
                    "{key} needs a calendar window: use window = \"1 day\" (with a space), \"1 week\", \"1 month\", \
                     \"1 quarter\" or \"1 year\", or remove {key}"
                );
                self.report(&location, message, problems);
            }
        }
    }

    fn max_excess(&self, problems: &mut Vec<Problem>) -> Option<u64> {
        let units = *self.read.max_excess.get()?;
        if units > MAX_AMOUNT {
            let message = format!("max_excess {units} is out of range: use 0 to {MAX_AMOUNT}");
            self.report(&self.read.max_excess.location(), message, problems);
            return None;
        }
        Some(units)
    }
}
