//! How far something is, while somebody watches: on a terminal, and only there.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Form;

/// How often it is drawn, at most, in a second.
const DRAWN_PER_SECOND: u8 = 10;
/// How often it is drawn anew while nothing is reported.
const TICK: Duration = Duration::from_millis(250);

/// A line at the bottom of the terminal; gone when this is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Something of `total` parts, of which nobody sees anything in JSON.
    pub(crate) fn new(form: Form, what: &'static str, total: u64) -> Self {
        let target = match form {
            Form::Text => ProgressDrawTarget::stderr_with_hz(DRAWN_PER_SECOND),
            Form::Json => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = "{prefix} {bar:30.green} {percent:>3} %  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸ "));
        }
        bar.set_prefix(what);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// So much is done, and this is how it goes.
    pub(crate) fn is_at(&self, done: u64, how: String) {
        self.0.set_position(done);
        self.0.set_message(how);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
