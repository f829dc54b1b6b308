//! Overrides of calendar windows: unit, zone and anchor, each by itself.

use sluicegate_core::{
    Calendar, Limit, Window,
    calendar::{Anchor, CalendarError, CalendarUnit},
};

use crate::calendar::Zone;

/// Another unit, zone or anchor of a calendar window. Fields that are `None` stay unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CalendarOverride {
    /// Another unit. The window of a rule that has none is then in UTC, unless `zone` is set.
    pub unit: Option<CalendarUnit>,
    /// Another zone.
    pub zone: Option<Zone>,
    /// Another first day of the periods.
    pub anchor: Option<Anchor>,
}

/// Why an override of a calendar window is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalendarOverrideError {
    /// Only a calendar window has a zone and an anchor.
    #[error("{0} needs a calendar window: set window to \"1 month\", for example, or remove {0}")]
    NoCalendar(&'static str),
    /// The anchor does not fit the unit.
    #[error(transparent)]
    Anchor(#[from] CalendarError),
}

impl CalendarOverride {
    /// Whether a field is set.
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the fields of a later override where they are set, otherwise these.
    pub(super) fn then(self, later: &Self) -> Self {
        Self {
            unit: later.unit.or(self.unit),
            zone: later.zone.or(self.zone),
            anchor: later.anchor.or(self.anchor),
        }
    }

    /// Returns the window of a limit with these changes. An anchor that does not fit the unit, which another override has changed,
    /// has no effect.
    pub(super) fn window(&self, limit: &Limit) -> Window {
        let own = limit.calendar();
        let Some(unit) = self.unit.or(own.map(Calendar::unit)) else { return limit.window_setting() };
        let zone = self.zone.or_else(|| Zone::named(own?.zone()).ok()).unwrap_or_else(Zone::utc);
        let anchors = [self.anchor, own.and_then(Calendar::anchor)];
        let anchor = anchors.into_iter().flatten().find(|anchor| unit.check_anchor(*anchor).is_ok());
        Window::Calendar(zone.calendar(unit, anchor).expect("the anchor was checked"))
    }

    /// Validates the override for a rule with this limit.
    pub(super) fn check(&self, limit: &Limit) -> Result<(), CalendarOverrideError> {
        let unit = self.unit.or(limit.calendar().map(Calendar::unit));
        match (unit, self.zone, self.anchor) {
            (None, Some(_), _) => Err(CalendarOverrideError::NoCalendar("zone")),
            (None, None, Some(_)) => Err(CalendarOverrideError::NoCalendar("anchor")),
            (Some(unit), _, Some(anchor)) => Ok(unit.check_anchor(anchor)?),
            (_, _, None) => Ok(()),
        }
    }
}
