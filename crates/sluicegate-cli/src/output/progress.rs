//! A progress bar, shown on terminals only.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::OutputFormat;

/// Maximum redraws per second.
const MAX_REDRAW_HZ: u8 = 10;
/// Redraw interval while no progress is reported.
const TICK: Duration = Duration::from_millis(250);

/// A progress bar on stderr, removed on drop.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Starts a progress bar; it stays hidden with JSON output.
    pub(crate) fn new(format: OutputFormat, label: &'static str, total: u64) -> Self {
        let target = match format {
            OutputFormat::Text => ProgressDrawTarget::stderr_with_hz(MAX_REDRAW_HZ),
            OutputFormat::Json => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = "{prefix} {bar:30.green} {percent:>3} %  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸ "));
        }
        bar.set_prefix(label);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    pub(crate) fn update(&self, done: u64, message: String) {
        self.0.set_position(done);
        self.0.set_message(message);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
