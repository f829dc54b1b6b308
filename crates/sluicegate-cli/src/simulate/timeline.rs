//! Counts over time in a bounded number of buckets, which are widened as needed.

use sluicegate_core::Timestamp;

/// The maximum number of buckets.
const MAX_BUCKETS: usize = 360;

/// Bucket widths in seconds, each a multiple of the previous one. Beyond the last, the width doubles.
const WIDTHS: [u64; 12] = [1, 5, 10, 30, 60, 300, 600, 1_800, 3_600, 21_600, 86_400, 604_800];

const SECOND_US: u64 = 1_000_000;

/// Rows of counts with the same buckets.
#[derive(Debug)]
pub(super) struct Timeline {
    start_us: u64,
    width_us: u64,
    /// The current bucket, and its end.
    at: usize,
    ends_us: u64,
    rows: Vec<Vec<u64>>,
}

impl Timeline {
    pub(super) fn new(rows: usize) -> Self {
        Self { start_us: 0, width_us: 0, at: 0, ends_us: 0, rows: vec![Vec::new(); rows] }
    }

    /// Moves to `now`, which must not be earlier than before.
    #[inline]
    pub(super) fn advance(&mut self, now: Timestamp) {
        if now.as_micros() >= self.ends_us {
            self.next_bucket(now.as_micros());
        }
    }

    /// Adds one to the current bucket of a row.
    #[inline]
    pub(super) fn count(&mut self, row: usize) {
        let row = &mut self.rows[row];
        if row.len() <= self.at {
            row.resize(self.at + 1, 0);
        }
        row[self.at] += 1;
    }

    /// The start of the first bucket, in microseconds since the epoch.
    pub(super) fn start_us(&self) -> u64 {
        self.start_us
    }

    pub(super) fn width_us(&self) -> u64 {
        self.width_us
    }

    /// A row, padded to the current bucket.
    pub(super) fn row(&self, row: usize) -> Vec<u64> {
        let mut row = self.rows[row].clone();
        row.resize(self.at + 1, 0);
        row
    }

    #[cold]
    fn next_bucket(&mut self, now_us: u64) {
        if self.width_us == 0 {
            self.width_us = SECOND_US;
            self.start_us = floor(now_us, SECOND_US);
        }
        while (now_us - self.start_us) / self.width_us >= MAX_BUCKETS as u64 {
            self.widen();
        }
        let at = (now_us - self.start_us) / self.width_us;
        self.at = usize::try_from(at).expect("the index is below MAX_BUCKETS");
        self.ends_us = self.start_us + (at + 1) * self.width_us;
    }

    fn widen(&mut self) {
        let next = WIDTHS.iter().map(|seconds| seconds * SECOND_US).find(|&width| width > self.width_us);
        let width_us = next.unwrap_or(2 * self.width_us);
        let start_us = floor(self.start_us, width_us);
        for row in &mut self.rows {
            let mut wider = Vec::new();
            for (at, &count) in row.iter().enumerate() {
                let bucket = (self.start_us + at as u64 * self.width_us - start_us) / width_us;
                let bucket = usize::try_from(bucket).expect("the index does not increase");
                if wider.len() <= bucket {
                    wider.resize(bucket + 1, 0);
                }
                wider[bucket] += count;
            }
            *row = wider;
        }
        (self.start_us, self.width_us) = (start_us, width_us);
    }
}

fn floor(time_us: u64, width_us: u64) -> u64 {
    time_us - time_us % width_us
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_preserved_when_buckets_are_widened() {
        let mut timeline = Timeline::new(2);
        for second in 1_000_000_007..1_000_100_000_u64 {
            timeline.advance(Timestamp::from_micros(second * SECOND_US));
            timeline.count(0);
            if second % 10 == 0 {
                timeline.count(1);
            }
        }
        assert_eq!(timeline.width_us(), 300 * SECOND_US);
        assert_eq!(timeline.start_us() % timeline.width_us(), 0);
        let (all, some) = (timeline.row(0), timeline.row(1));
        assert!(all.len() <= MAX_BUCKETS && all.len() == some.len());
        assert_eq!(all.iter().sum::<u64>(), 99_993);
        assert!(all[1..all.len() - 1].iter().all(|&count| count == 300), "{all:?}");
        assert!(some[1..some.len() - 1].iter().all(|&count| count == 30), "{some:?}");
    }

    #[test]
    fn a_jump_of_centuries_keeps_the_number_of_buckets_bounded() {
        let mut timeline = Timeline::new(1);
        for time in [0, 1 << 52] {
            timeline.advance(Timestamp::from_micros(time));
            timeline.count(0);
        }
        assert!(timeline.row(0).len() <= MAX_BUCKETS);
        assert_eq!(timeline.row(0).iter().sum::<u64>(), 2);
    }
}
