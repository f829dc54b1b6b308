//! Checks whether the admitted calls are within a limit, using only the callers' clocks.
//!
//! A decision was made at an unknown moment between sending and receiving its call. Calls that were certainly decided
//! inside one interval are counted against the bound of that interval; calls that may lie outside are not counted. A
//! reported violation is therefore never a false alarm, but the more calls overlap, the fewer violations are detected.
//!
//! The oracle is independent of stores, algorithms and clocks. All times are measured from one origin on one monotonic
//! clock; the caller converts the times of several processes.

use std::fmt::{self, Display};
use std::time::Duration;

/// How much the store's clock may gain on the callers' clock within one window without a violation.
const WINDOW_SLACK: Duration = Duration::from_millis(2);

/// One tick of the store's clock. Times truncated to whole ticks can be up to one tick further apart than the
/// moments themselves, and a bucket refills for that tick too.
const STORE_TICK: Duration = Duration::from_micros(1);

/// An admitted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Just before the call was sent.
    pub sent: Duration,
    /// Just after the answer arrived; not before `sent`.
    pub received: Duration,
    /// The charged units.
    pub cost: u64,
}

/// An interval in which more was admitted than the limit allows. Of several, the one with the largest excess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Start of the interval. No counted call was sent earlier.
    pub from: Duration,
    /// End of the interval. Every counted call was answered by then.
    pub until: Duration,
    /// Units that were certainly admitted within.
    pub admitted: u128,
    /// Units that the limit allows within.
    pub allowed: u128,
}

impl Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { from, until, admitted, allowed } = self;
        let length = until.saturating_sub(*from);
        write!(f, "admitted {admitted} units, allowed {allowed}, from {from:?} until {until:?} ({length:?})")
    }
}

/// Searches for an interval of length `window`, less 2 ms, in which more than `amount` was admitted, in O(n log n).
///
/// Intervals that start at a send are sufficient: the start of any other interval can move to its first send without losing
/// a call.
///
/// # Panics
///
/// If a call was received before it was sent.
#[must_use]
pub fn window_violation(calls: &[Admitted], amount: u64, window: Duration) -> Option<Violation> {
    let length = window.saturating_sub(WINDOW_SLACK);
    let receipts = sorted_receipts(calls);
    let mut admitted_by = PrefixSums::new(receipts.len());
    let mut worst: Option<Violation> = None;

    for call in latest_sends_first(calls) {
        admitted_by.add(rank(&receipts, call.received), call.cost);
        let from = call.sent;
        let until = from.saturating_add(length);
        let admitted = admitted_by.sum_below(rank(&receipts, until));
        if admitted > worst.map_or(u128::from(amount), |violation| violation.admitted) {
            worst = Some(Violation { from, until, admitted, allowed: u128::from(amount) });
        }
    }
    worst
}

/// Searches for a send and a later receipt between which more was admitted than `burst` plus `amount` per `window` of the
/// time between them (plus one microsecond, the tick of the store's clock), in O(n log n). The comparison is exact.
///
/// # Panics
///
/// If a call was received before it was sent, the window is zero, or the numbers exceed 127 bits: cost times
/// nanoseconds of the window, or amount times nanoseconds of the whole history.
#[must_use]
pub fn bucket_violation(calls: &[Admitted], burst: u64, amount: u64, window: Duration) -> Option<Violation> {
    assert!(!window.is_zero(), "the window of a rate must not be zero");
    let receipts = sorted_receipts(calls);
    // Everything is multiplied by the window, so that the rate is the whole number `amount` per nanosecond.
    let window = nanos(window);
    let refill = |elapsed: i128| exact(elapsed.checked_mul(i128::from(amount)));
    let full = exact(exact(window.checked_mul(i128::from(burst))).checked_add(refill(nanos(STORE_TICK))));

    let mut excess =
        PrefixExcess::new(receipts.iter().map(|receipt| refill(nanos(*receipt))).collect(), window);
    let mut worst: Option<(i128, Violation)> = None;

    for call in latest_sends_first(calls) {
        excess.add(rank(&receipts, call.received), call.cost);
        let from = call.sent;
        let best = excess.maximum();
        // cost x window - amount x (until - from) - burst x window: above zero is a violation.
        let over = exact(exact(best.value.checked_add(refill(nanos(from)))).checked_sub(full));
        if over > worst.as_ref().map_or(0, |(most, _)| *most) {
            let until = receipts[best.rank];
            let allowed = exact(full.checked_add(refill(nanos(until) - nanos(from)))) / window;
            // Exact, as the value is this multiple of the window less the refill.
            let admitted = exact(best.value.checked_add(refill(nanos(until)))) / window;
            let (admitted, allowed) = (admitted.unsigned_abs(), allowed.unsigned_abs());
            worst = Some((over, Violation { from, until, admitted, allowed }));
        }
    }
    worst.map(|(_, violation)| violation)
}

/// Returns the distinct receipts in order. The index of a receipt is its rank.
fn sorted_receipts(calls: &[Admitted]) -> Vec<Duration> {
    let mut receipts: Vec<Duration> = calls.iter().map(|call| call.received).collect();
    receipts.sort_unstable();
    receipts.dedup();
    receipts
}

/// Returns the calls in the order in which both searches add them. Of calls sent at one moment, the last one includes all of
/// them; the others include fewer, so they raise no false alarm.
fn latest_sends_first(calls: &[Admitted]) -> Vec<Admitted> {
    let mut calls = calls.to_vec();
    for call in &calls {
        assert!(call.sent <= call.received, "received before it was sent: {call:?}");
    }
    calls.sort_unstable_by_key(|call| std::cmp::Reverse(call.sent));
    calls
}

/// Returns the number of receipts before a moment.
fn rank(receipts: &[Duration], moment: Duration) -> usize {
    receipts.partition_point(|receipt| *receipt < moment)
}

fn nanos(duration: Duration) -> i128 {
    // At most 2^64 s of 10^9 ns each: below 2^94.
    i128::try_from(duration.as_nanos()).expect("nanoseconds of a Duration fit 94 bits")
}

fn exact(result: Option<i128>) -> i128 {
    result.expect("cost and amount times nanoseconds fit 127 bits")
}

/// A Fenwick tree of costs by rank: their sum below a rank in O(log n).
struct PrefixSums {
    tree: Vec<u128>,
}

impl PrefixSums {
    fn new(ranks: usize) -> PrefixSums {
        PrefixSums { tree: vec![0; ranks + 1] }
    }

    fn add(&mut self, rank: usize, cost: u64) {
        let mut node = rank + 1;
        while node < self.tree.len() {
            self.tree[node] += u128::from(cost);
            node += lowest_bit(node);
        }
    }

    fn sum_below(&self, rank: usize) -> u128 {
        let mut sum = 0;
        let mut node = rank;
        while node > 0 {
            sum += self.tree[node];
            node -= lowest_bit(node);
        }
        sum
    }
}

fn lowest_bit(n: usize) -> usize {
    n & n.wrapping_neg()
}

/// A segment tree over the receipts. It holds, for each receipt with a call, the cost up to it times the window, less the
/// refill up to it. The root holds the maximum; adding a call takes O(log n).
///
/// Receipts without a call so far are excluded: they belong to calls sent earlier, which could only add refill, or lie
/// before the start of the interval.
struct PrefixExcess {
    /// The tree as an array: node `n` has children `2n` and `2n + 1`, the leaves are the second half.
    nodes: Vec<Node>,
    refill: Vec<i128>,
    window: i128,
}

#[derive(Clone, Copy)]
struct Node {
    cost: u128,
    best: Option<Best>,
}

#[derive(Clone, Copy)]
struct Best {
    value: i128,
    rank: usize,
}

impl PrefixExcess {
    fn new(refill: Vec<i128>, window: i128) -> PrefixExcess {
        let leaves = refill.len().next_power_of_two();
        PrefixExcess { nodes: vec![Node { cost: 0, best: None }; 2 * leaves], refill, window }
    }

    fn add(&mut self, rank: usize, cost: u64) {
        let mut node = self.nodes.len() / 2 + rank;
        let leaf_cost = self.nodes[node].cost + u128::from(cost);
        let value = exact(self.scaled(leaf_cost).checked_sub(self.refill[rank]));
        self.nodes[node] = Node { cost: leaf_cost, best: Some(Best { value, rank }) };
        while node > 1 {
            node /= 2;
            self.nodes[node] = self.combine(self.nodes[2 * node], self.nodes[2 * node + 1]);
        }
    }

    /// Combines two neighbours. The left cost precedes everything on the right.
    fn combine(&self, left: Node, right: Node) -> Node {
        let right_best = right
            .best
            .map(|best| Best { value: exact(best.value.checked_add(self.scaled(left.cost))), ..best });
        let best = left.best.into_iter().chain(right_best).max_by_key(|best| best.value);
        Node { cost: left.cost + right.cost, best }
    }

    fn maximum(&self) -> Best {
        self.nodes[1].best.expect("a call was added before the maximum is read")
    }

    fn scaled(&self, cost: u128) -> i128 {
        exact(i128::try_from(cost).ok().and_then(|cost| cost.checked_mul(self.window)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    const SECOND: Duration = Duration::from_secs(1);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn call(sent: Duration, received: Duration, cost: u64) -> Admitted {
        Admitted { sent, received, cost }
    }

    #[test]
    fn a_window_may_hold_its_amount_and_not_one_more() {
        let mut calls: Vec<_> = (0..100).map(|n| call(ms(n), ms(n + 1), 1)).collect();
        assert_eq!(window_violation(&calls, 100, SECOND), None);

        calls.push(call(ms(990), ms(991), 1));
        let violation = window_violation(&calls, 100, SECOND).unwrap();
        assert_eq!(violation, Violation { from: ms(0), until: ms(998), admitted: 101, allowed: 100 });
        assert_eq!(violation.to_string(), "admitted 101 units, allowed 100, from 0ns until 998ms (998ms)");
    }

    #[test]
    fn a_window_ends_2_ms_early_and_excludes_its_end() {
        let calls_until = |received| [call(ms(5), ms(6), 10), call(ms(7), received, 1)];
        assert_eq!(window_violation(&calls_until(ms(5 + 998)), 10, SECOND), None);
        let just_inside = ms(5 + 998) - Duration::from_nanos(1);
        assert!(window_violation(&calls_until(just_inside), 10, SECOND).is_some());
    }

    #[test]
    fn a_call_sent_before_the_window_does_not_count_even_if_answered_inside() {
        let calls = [call(ms(0), ms(1_500), 1), call(ms(600), ms(601), 10)];
        assert_eq!(window_violation(&calls, 10, SECOND), None);
    }

    #[test]
    fn calls_sent_at_the_same_moment_count_together() {
        let calls = [call(ms(3), ms(4), 6), call(ms(3), ms(9), 5), call(ms(3), ms(4), 1)];
        assert_eq!(window_violation(&calls, 12, SECOND), None);
        assert_eq!(window_violation(&calls, 11, SECOND).unwrap().admitted, 12);
    }

    #[test]
    fn windows_up_to_2_ms_and_no_calls_are_never_in_violation() {
        let calls = [call(ms(1), ms(1), 9)];
        assert_eq!(window_violation(&calls, 0, ms(2)), None);
        assert_eq!(window_violation(&[], 0, SECOND), None);
        assert_eq!(bucket_violation(&[], 0, 0, SECOND), None);
    }

    #[test]
    fn a_bucket_may_admit_its_burst_and_refill_and_not_one_more() {
        // 100 per second: the burst at once, then one call every 10 ms, exactly when it is refilled
        let mut calls = vec![call(ms(0), ms(0), 10)];
        calls.extend((1..=50).map(|n| call(ms(10 * n), ms(10 * n), 1)));
        assert_eq!(bucket_violation(&calls, 10, 100, SECOND), None);

        calls[30].cost += 1;
        let violation = bucket_violation(&calls, 10, 100, SECOND).unwrap();
        assert_eq!(
            (violation.from, violation.admitted, violation.allowed),
            (ms(0), violation.allowed + 1, violation.allowed)
        );
        assert!((ms(300)..=ms(500)).contains(&violation.until), "{violation}");
    }

    #[test]
    fn a_bucket_tolerates_one_tick_of_the_store_clock_and_no_more() {
        // one unit per 10 ms: the second call is early by a tick, then by a nanosecond more
        let early = |by| [call(ms(0), ms(0), 10), call(ms(10) - by, ms(10) - by, 1)];
        let tick = Duration::from_micros(1);
        assert_eq!(bucket_violation(&early(tick), 10, 100, SECOND), None);
        let violation = bucket_violation(&early(tick + Duration::from_nanos(1)), 10, 100, SECOND).unwrap();
        assert_eq!((violation.admitted, violation.allowed), (11, 10));
    }

    #[test]
    fn a_bucket_counts_no_refill_outside_the_interval() {
        // idle time before and after must not hide the burst
        let calls =
            [call(ms(0), ms(1), 1), call(ms(90_000), ms(90_001), 11), call(ms(500_000), ms(500_001), 1)];
        assert_eq!(bucket_violation(&calls, 11, 100, SECOND), None);
        let violation = bucket_violation(&calls, 10, 100, SECOND).unwrap();
        assert_eq!((violation.from, violation.until), (ms(90_000), ms(90_001)));
    }

    #[test]
    fn both_searches_agree_with_the_definition_on_random_histories() {
        let (mut windows, mut buckets) = (Tally::default(), Tally::default());
        for seed in 0..3_000 {
            let mut random = StdRng::seed_from_u64(seed);
            // whole milliseconds in a short span: equal times and exact edges are frequent
            let span = random.random_range(1..60);
            let calls: Vec<_> = (0..random.random_range(0..24))
                .map(|_| {
                    let sent = random.random_range(0..span);
                    let received = sent + random.random_range(0..12);
                    call(ms(sent), ms(received), random.random_range(0..4))
                })
                .collect();
            let (amount, burst) = (random.random_range(0..30), random.random_range(0..20));
            let window = ms(random.random_range(1..40));

            let found = window_violation(&calls, amount, window);
            let most = naive_window(&calls, window).filter(|most| *most > u128::from(amount));
            assert_eq!(found.map(|violation| violation.admitted), most, "window, seed {seed}");
            windows.count(found);

            let found = bucket_violation(&calls, burst, amount, window);
            let over = naive_bucket(&calls, burst, amount, window).filter(|over| *over > 0);
            let found_over = found.map(|v| excess(v.admitted, burst, amount, window, v.until - v.from));
            assert_eq!(found_over, over, "bucket, seed {seed}");
            if let Some(v) = found {
                assert_eq!(
                    v.admitted,
                    naive_sum(&calls, |c| c.sent >= v.from && c.received <= v.until),
                    "seed {seed}"
                );
                assert!(v.admitted > v.allowed, "seed {seed}: {v}");
            }
            buckets.count(found);
        }
        // both outcomes were frequent, so the agreement is meaningful
        for tally in [windows, buckets] {
            assert!(tally.violated > 300 && tally.kept > 300, "{tally:?}");
        }
    }

    #[test]
    fn a_long_history_is_checked_exactly() {
        // 20,000 calls, exactly at the limit everywhere
        let calls: Vec<_> = (0..20_000).map(|n| call(ms(10 * n), ms(10 * n), 1)).collect();
        assert_eq!(window_violation(&calls, 100, SECOND + WINDOW_SLACK), None);
        assert_eq!(window_violation(&calls, 99, SECOND + WINDOW_SLACK).unwrap().admitted, 100);
        assert_eq!(bucket_violation(&calls, 1, 100, SECOND), None);
        assert!(bucket_violation(&calls, 1, 99, SECOND).is_some());
    }

    #[derive(Debug, Default)]
    struct Tally {
        violated: u32,
        kept: u32,
    }

    impl Tally {
        fn count(&mut self, violation: Option<Violation>) {
            *if violation.is_some() { &mut self.violated } else { &mut self.kept } += 1;
        }
    }

    fn naive_sum(calls: &[Admitted], counts: impl Fn(&Admitted) -> bool) -> u128 {
        calls.iter().filter(|call| counts(call)).map(|call| u128::from(call.cost)).sum()
    }

    /// Returns the largest cost in any window, computed from the definition.
    fn naive_window(calls: &[Admitted], window: Duration) -> Option<u128> {
        let sum_from = |s: Duration| {
            naive_sum(calls, |call| call.sent >= s && call.received + WINDOW_SLACK < s + window)
        };
        calls.iter().map(|call| sum_from(call.sent)).max()
    }

    /// Returns the largest excess over the bound of a bucket between any send and any later receipt.
    fn naive_bucket(calls: &[Admitted], burst: u64, amount: u64, window: Duration) -> Option<i128> {
        let pairs = calls.iter().flat_map(|a| calls.iter().map(|b| (a.sent, b.received)));
        pairs
            .filter(|(s, r)| r >= s)
            .map(|(s, r)| {
                let admitted = naive_sum(calls, |call| call.sent >= s && call.received <= r);
                excess(admitted, burst, amount, window, r - s)
            })
            .max()
    }

    /// Returns the admitted units less those that the bucket allows in the time and a tick, times the window in nanoseconds.
    fn excess(admitted: u128, burst: u64, amount: u64, window: Duration, elapsed: Duration) -> i128 {
        let window = nanos(window);
        let above_burst = i128::try_from(admitted).unwrap() - i128::from(burst);
        above_burst * window - i128::from(amount) * nanos(elapsed + STORE_TICK)
    }
}
