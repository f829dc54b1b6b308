//! Windows in text form: a length such as `1h30m`, or a calendar window such as `1 month`.
//!
//! The space distinguishes them: `1 day` is a day of the calendar, and `1d` is 24 hours, aligned to the epoch.

use std::time::Duration;

use sluicegate_core::{
    Limit, Window,
    calendar::{CalendarError, CalendarUnit},
};

use crate::duration::{self, DurationError};

/// A window as it is written. A calendar window also needs a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenWindow {
    /// Always of the same length.
    Length(Duration),
    /// The periods of a calendar.
    Calendar(CalendarUnit),
}

/// The text is not a window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// It is not a length.
    #[error("{0}, or a calendar window such as \"1 month\"")]
    Length(DurationError),
    /// It names a unit of the calendar and is not a calendar window.
    #[error(transparent)]
    Calendar(CalendarError),
}

/// Parses a window.
///
/// # Errors
/// If the text is neither a length nor a calendar window.
pub fn parse(text: &str) -> Result<WrittenWindow, WindowError> {
    // the units, without the number
    let mut names = CalendarUnit::ALL.iter().filter_map(|unit| unit.window().split(' ').next_back());
    if names.any(|name| text.to_ascii_lowercase().contains(name)) {
        return text.parse().map(WrittenWindow::Calendar).map_err(WindowError::Calendar);
    }
    duration::parse(text).map(WrittenWindow::Length).map_err(WindowError::Length)
}

/// Formats the window of a limit so that [`parse`] reads it.
pub fn text(limit: &Limit) -> String {
    match limit.window_setting() {
        Window::Length(length) => duration::text(length),
        Window::Calendar(calendar) => calendar.unit().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calendar::Zone;

    #[test]
    fn a_space_distinguishes_a_day_of_the_calendar_from_24_hours() {
        assert_eq!(parse("1 day"), Ok(WrittenWindow::Calendar(CalendarUnit::Day)));
        assert_eq!(parse("1d"), Ok(WrittenWindow::Length(Duration::from_secs(86_400))));
    }

    #[test]
    fn windows_are_formatted_so_that_they_are_read_again() {
        for unit in CalendarUnit::ALL {
            let limit = Limit::fixed_window(1, Zone::utc().calendar(unit, None).unwrap()).unwrap();
            assert_eq!(parse(&text(&limit)), Ok(WrittenWindow::Calendar(unit)));
        }
        let limit = Limit::fixed_window(1, Duration::from_secs(5_400)).unwrap();
        assert_eq!(text(&limit), "1h30m");
    }

    #[test]
    fn other_texts_are_rejected_with_the_accepted_forms() {
        for text in ["2 months", "month", "1month", "1 Month", "monthly", "1 day ", "7 days"] {
            let message = parse(text).unwrap_err().to_string();
            let expected = "is not a calendar window: use \"1 day\", \"1 week\", \"1 month\", \"1 quarter\" or \"1 year\", \
                            or a length such as \"30d\"";
            assert_eq!(message, format!("{text:?} {expected}"));
        }
        for text in ["1w", "1 m", "", "1 d"] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.ends_with("or a calendar window such as \"1 month\""), "{message}");
        }
    }
}
