//! Horizontal bar charts.

use crate::format;
use unicode_width::UnicodeWidthStr;

/// The longest bar, in columns.
const WIDTH: u64 = 40;
/// Blocks that fill a column, by eighths.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Draws one line per count: name, bar relative to the largest count, count. A nonzero count always has a visible bar.
pub(crate) fn bars(rows: &[(String, u64)]) -> Vec<String> {
    let most = rows.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
    let width = rows.iter().map(|(name, _)| name.width()).max().unwrap_or(0);
    rows.iter()
        .map(|(name, count)| {
            let space = " ".repeat(width - name.width());
            format!("{space}{name}  {} {}", bar(*count, most), format::count(*count)).trim_end().to_owned()
        })
        .collect()
}

fn bar(count: u64, most: u64) -> String {
    let eighths = (u128::from(count) * u128::from(WIDTH) * 8).div_ceil(u128::from(most));
    let (whole, part) = (eighths / 8, eighths % 8);
    let whole = "█".repeat(usize::try_from(whole).unwrap_or_default());
    format!("{whole}{}", EIGHTHS[usize::try_from(part).unwrap_or_default()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_proportional_and_nonzero_counts_are_visible() {
        let rows = [("a", 80_000), ("bc", 1), ("d", 0)].map(|(name, count)| (name.to_owned(), count));
        let whole = "█".repeat(40);
        assert_eq!(bars(&rows), [format!(" a  {whole} 80,000"), "bc  ▏ 1".to_owned(), " d   0".to_owned()]);
        assert_eq!(bars(&[]), Vec::<String>::new());
    }
}
