//! Holds in Redis: what is read and written, and the TTL of indexes and records.

use sluicegate_core::hold::{HOLD_RETENTION, OnExpiry};
use sluicegate_testkit::wait;

use super::*;
use crate::{check::HoldOperation, key::HoldId, redis::keys::write_hold_key, store::HoldOutcome};

const HOUR: Duration = Duration::from_secs(3_600);
const SHORT: Duration = Duration::from_millis(1);

fn held(key: &str, limit: &Limit, cost: u64, id: &str, operation: HoldOperation) -> Check {
    check(Operation::Charge, key, limit, cost).with_hold(HoldId::new(id).unwrap(), operation)
}

/// Returns limits that release expired holds.
fn releasing(amount: u64) -> Vec<Limit> {
    let windowed = limits(amount, HOUR).map(|limit| limit.with_on_expiry(OnExpiry::Release).unwrap());
    windowed.into_iter().chain([Limit::concurrency(amount).unwrap()]).collect()
}

impl Subject {
    async fn hold(&self, limit: &Limit, cost: u64, id: &str, ttl: Duration) -> HoldOutcome {
        self.on_hold(limit, cost, id, HoldOperation::Hold { ttl }).await
    }

    async fn on_hold(&self, limit: &Limit, cost: u64, id: &str, operation: HoldOperation) -> HoldOutcome {
        let decided = decide(&self.store, &[held("k", limit, cost, id, operation)]).await.unwrap();
        decided[0].answers[0].hold.outcome
    }

    /// Waits until the server's clock has passed the expiry of a hold made now.
    fn pass(&self, ttl: Duration) {
        let mut redis = self.redis();
        let mut now = || -> (u64, u64) { redis::cmd("TIME").query(&mut redis).unwrap() };
        let (seconds, micros) = now();
        let end = seconds * 1_000_000 + micros + u64::try_from(ttl.as_micros()).unwrap();
        wait::until("the hold expires", wait::PATIENCE, || {
            let (seconds, micros) = now();
            seconds * 1_000_000 + micros > end
        });
    }

    /// Returns the contents of every key.
    fn dump(&self) -> HashMap<String, Vec<u8>> {
        let mut redis = self.redis();
        let keys: Vec<String> = redis.keys("*").unwrap();
        let dump = |key: String| (key.clone(), redis::cmd("DUMP").arg(key).query(&mut redis).unwrap());
        keys.into_iter().map(dump).collect()
    }

    fn ttl(&self, key: &[u8]) -> Duration {
        Duration::from_millis(self.redis().pttl(key).unwrap())
    }
}

fn index(limit: &Limit) -> Vec<u8> {
    holds_key(DEFAULT_PREFIX, &Key::without_rule("k").unwrap(), limit.algorithm())
}

fn record(limit: &Limit, id: &str) -> Vec<u8> {
    let mut name = Vec::new();
    let key = Key::without_rule("k").unwrap();
    write_hold_key(&mut name, DEFAULT_PREFIX, &key, limit.algorithm(), &HoldId::new(id).unwrap());
    name
}

#[tokio::test]
async fn a_peek_and_a_denied_hold_run_in_a_read_only_script_and_change_nothing() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in releasing(3).into_iter().chain(limits(3, HOUR)) {
        subject.redis().flushall::<()>().unwrap();
        subject.hold(&limit, 2, "id", HOUR).await;
        let before = subject.dump();
        let denied = HoldOperation::Hold { ttl: HOUR };
        for check in [check(Operation::Peek, "k", &limit, 1), held("k", &limit, 2, "denied", denied)] {
            let call = encode(DEFAULT_PREFIX, std::slice::from_ref(&check), CallTimes::default()).unwrap();
            let mut request = redis::cmd("EVAL_RO");
            request.arg(SOURCE);
            call.write_to(&mut request, SendTimes { deadline: None, now: Timestamp::default() });
            let reply: Vec<u8> = request.query(&mut subject.redis()).unwrap();
            let decided = decode(&reply, &call, &[check]).unwrap().remove(0).unwrap();
            assert_eq!(decided.answers[0].available, 1, "{limit:?}");
        }
        assert_eq!(subject.dump(), before, "{limit:?}");
    }
}

#[tokio::test]
async fn a_peek_after_the_expiry_of_holds_runs_in_a_read_only_script() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in releasing(3) {
        subject.redis().flushall::<()>().unwrap();
        subject.hold(&limit, 1, "long", HOUR).await;
        subject.hold(&limit, 2, "short", SHORT).await;
        subject.pass(SHORT);
        let before = subject.dump();
        let peek = check(Operation::Peek, "k", &limit, 1);
        let call = encode(DEFAULT_PREFIX, &[peek], CallTimes::default()).unwrap();
        let mut request = redis::cmd("EVAL_RO");
        request.arg(SOURCE);
        call.write_to(&mut request, SendTimes { deadline: None, now: Timestamp::default() });
        request.exec(&mut subject.redis()).unwrap();
        assert_eq!(subject.dump(), before, "{limit:?}");
    }
}

#[tokio::test]
async fn a_record_lives_until_its_id_is_forgotten() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in releasing(10).into_iter().chain(limits(10, HOUR)) {
        subject.redis().flushall::<()>().unwrap();
        let settle = HoldOperation::Settle { kept: 0, max_excess: None };
        let assert_lives = |lifetime: Duration| {
            let ttl = subject.ttl(&record(&limit, "id"));
            assert!(
                (lifetime - SLACK..lifetime + SLACK).contains(&ttl),
                "{limit:?}: {ttl:?} for {lifetime:?}"
            );
        };
        subject.hold(&limit, 2, "id", MINUTE).await;
        assert_lives(MINUTE + HOLD_RETENTION);
        subject.on_hold(&limit, 0, "id", HoldOperation::Renew { ttl: HOUR }).await;
        assert_lives(HOUR + HOLD_RETENTION);
        subject.on_hold(&limit, 1, "id", settle).await;
        assert_lives(HOLD_RETENTION);
    }
}

/// While a counter has units, an index that disappeared would keep expired holds from being refunded.
#[tokio::test]
async fn an_index_lives_until_its_holds_are_refunded() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in releasing(100) {
        subject.redis().flushall::<()>().unwrap();
        let has_window = limit.algorithm().properties().has_window;
        subject.hold(&limit, 10, "long", MINUTE).await;
        subject.hold(&limit, 80, "settled", MINUTE / 2).await;
        let settle = HoldOperation::Settle { kept: 1, max_excess: None };
        subject.on_hold(&limit, 0, "settled", settle).await;
        subject.hold(&limit, 10, "short", SHORT).await;
        subject.pass(SHORT);
        assert_eq!(subject.apply(Operation::Check, "k", &limit, 0).await[0].answers[0].hold.released, 1);
        let reset_after = subject.apply(Operation::Peek, "k", &limit, 0).await[0].answers[0].reset_after_us;
        let counted = if has_window { Duration::from_micros(reset_after) } else { Duration::ZERO };
        let ttl = subject.ttl(&index(&limit));
        assert!(ttl > MINUTE - SLACK + counted, "{limit:?}: {ttl:?}");
        assert!(ttl < MINUTE + SLACK + counted, "{limit:?}: {ttl:?}");
    }
    for limit in limits(100, HOUR) {
        subject.hold(&limit, 10, "charged", MINUTE).await;
        let ttl = subject.ttl(&index(&limit));
        assert!(ttl > MINUTE + HOLD_RETENTION - SLACK && ttl < MINUTE + HOLD_RETENTION + SLACK, "{ttl:?}");
    }
}

#[tokio::test]
async fn ending_the_last_hold_deletes_the_concurrency_counter() {
    let subject = Subject::start(Flavor::Redis7).await;
    let limit = Limit::concurrency(10).unwrap();
    subject.hold(&limit, 2, "id", MINUTE).await;
    subject.on_hold(&limit, 0, "id", HoldOperation::Settle { kept: 0, max_excess: None }).await;
    let keys: Vec<Vec<u8>> = subject.redis().keys("*").unwrap();
    assert_eq!(keys, [record(&limit, "id")]);
}

#[tokio::test]
async fn holds_that_cannot_be_read_affect_only_their_own_checks_and_are_never_changed() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for limit in releasing(10).into_iter().chain(limits(10, HOUR)) {
            for is_record in [true, false] {
                redis.flushall::<()>().unwrap();
                subject.hold(&limit, 2, "id", HOUR).await;
                let broken = if is_record { record(&limit, "id") } else { index(&limit) };
                redis::cmd("SET").arg(&broken).arg("text").arg("PX").arg(100_000).exec(&mut redis).unwrap();
                let before = subject.dump();
                let checks = [
                    held("k", &limit, 2, "id", HoldOperation::Hold { ttl: HOUR }),
                    held("k", &limit, 2, "id", HoldOperation::Settle { kept: 0, max_excess: None }),
                    held("k", &limit, 2, "id", HoldOperation::Renew { ttl: HOUR }),
                ];
                for check in checks {
                    let other = self::check(Operation::Check, "other", &limits(10, HOUR)[0], 1);
                    let decided = subject.store.decide(&[check, other], None).await;
                    let context = format!("{flavor} {limit:?} record: {is_record}");
                    assert!(
                        matches!(decided[0], Err(StoreError::Unreadable { .. })),
                        "{context}: {decided:?}"
                    );
                    assert!(decided[1].is_ok(), "{context}: {decided:?}");
                }
                let mut after = subject.dump();
                after.retain(|key, _| !key.ends_with(":other"));
                assert_eq!(after, before, "{flavor} {limit:?} record: {is_record}");
            }
        }
    }
}

/// An expired member of an index whose units are not a number is removed, and changes no counter.
#[tokio::test]
async fn an_indexed_hold_without_a_number_is_removed_and_not_refunded() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in releasing(10) {
        subject.redis().flushall::<()>().unwrap();
        subject.hold(&limit, 4, "id", HOUR).await;
        let numbers = [1_000_f64.to_le_bytes(), f64::NAN.to_le_bytes()].concat();
        let member = [&[1], &*numbers, b"broken"].concat();
        redis::cmd("ZADD").arg(index(&limit)).arg(1).arg(member).exec(&mut subject.redis()).unwrap();
        let made = subject.apply(Operation::Check, "k", &limit, 0).await;
        let answer = made[0].answers[0];
        assert_eq!((answer.available, answer.hold.released), (6, 1), "{limit:?}");
        assert_eq!(subject.hold(&limit, 6, "further", HOUR).await, HoldOutcome::Held, "{limit:?}");
        assert_eq!(subject.hold(&limit, 1, "denied", HOUR).await, HoldOutcome::NotHeld, "{limit:?}");
    }
}

#[tokio::test]
async fn holding_and_settling_take_the_same_commands_beside_ten_live_holds_and_ten_thousand() {
    /// The holds of one call.
    const BATCH: usize = 100;
    let subject = Subject::start(Flavor::Redis7).await;
    let window = Limit::fixed_window(1_000_000, HOUR).unwrap();
    let releasing = window.with_on_expiry(OnExpiry::Release).unwrap();
    let bucket = Limit::token_bucket(1_000_000, HOUR).unwrap();
    for limit in [Limit::concurrency(1_000_000).unwrap(), window, releasing, bucket] {
        subject.redis().flushall::<()>().unwrap();
        let hold = HoldOperation::Hold { ttl: HOUR };
        // the index lives long enough for it: whether a TTL has to be extended depends on the time
        let shorter = HoldOperation::Hold { ttl: HOUR / 2 };
        let settle = HoldOperation::Settle { kept: 0, max_excess: None };
        let (mut live, mut commands) = (0, Vec::new());
        for count in [10, 10_000] {
            let ids: Vec<String> = (live..count).map(|number| format!("live-{number}")).collect();
            for ids in ids.chunks(BATCH) {
                let checks: Vec<Check> = ids.iter().map(|id| held("k", &limit, 2, id, hold)).collect();
                decide(&subject.store, &checks).await.unwrap();
            }
            live = count;
            let stored: usize = redis::cmd("ZCARD").arg(index(&limit)).query(&mut subject.redis()).unwrap();
            // the index of a concurrency limit also has an entry for its units
            assert!(stored >= live, "{limit:?}: {stored} of {live}");
            let id = format!("measured-{live}");
            let measured = async {
                let held = subject.on_hold(&limit, 2, &id, shorter).await;
                let settled = subject.on_hold(&limit, 1, &id, settle).await;
                assert_eq!((held, settled), (HoldOutcome::Held, HoldOutcome::Settled), "{limit:?}");
            };
            commands.push(subject.commands_during(measured).await);
        }
        assert_eq!(commands[0], commands[1], "{limit:?}");
    }
}
