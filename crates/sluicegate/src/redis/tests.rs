//! Properties that are visible only in Redis: TTLs, unchanged bytes, the number of commands per decision.

mod holds;

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use redis::{Commands, Connection};
use sluicegate_core::{
    Cost, Limit, Operation, Terms, Timestamp,
    limit::{MAX_LOG_AMOUNT, MAX_LOG_UNITS},
};
use sluicegate_testkit::server::{Flavor, Server};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{script::SendTimes, *};
use crate::{
    calendar::{CalendarUnit, Zone},
    check::Tier,
};

/// Decides a batch on a store that has one server.
async fn decide(store: &RedisStore, checks: &[Check]) -> Result<Vec<CheckAnswer>, StoreError> {
    let Backend::Primary(primary) = &store.backend else { panic!("a store with one server") };
    store.decide_on(primary, checks, None).await?.into_iter().collect()
}

const MINUTE: Duration = Duration::from_secs(60);
/// The largest amount of every algorithm.
const MANY: u64 = MAX_LOG_AMOUNT;
const SLACK: Duration = Duration::from_secs(10);

struct Subject {
    store: RedisStore,
    server: Server,
}

impl Subject {
    async fn start(flavor: Flavor) -> Self {
        let server = Server::start(flavor);
        Self { store: RedisStore::connect(&server.url()).await.unwrap(), server }
    }

    async fn apply(&self, operation: Operation, key: &str, limit: &Limit, cost: u64) -> Vec<CheckAnswer> {
        decide(&self.store, &[check(operation, key, limit, cost)]).await.unwrap()
    }

    fn redis(&self) -> Connection {
        self.server.connection()
    }

    /// Returns how often each command has run, including within scripts.
    fn commands(&self) -> HashMap<String, u64> {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.redis()).unwrap();
        info.lines()
            .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="))
            .map(|(name, rest)| (name.to_owned(), rest.split(',').next().unwrap().parse().unwrap()))
            .collect()
    }

    /// Returns how often each command runs during `during`.
    async fn commands_during(&self, during: impl Future) -> HashMap<String, u64> {
        let before = self.commands();
        during.await;
        let mut after = self.commands();
        after.retain(|name, calls| {
            *calls -= before.get(name).unwrap_or(&0);
            *calls > 0 && name != "info"
        });
        after
    }
}

fn tier(key: &str, limit: &Limit, cost: u64) -> Tier {
    Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(*limit, Cost::new(cost).unwrap()) }
}

fn check(operation: Operation, key: &str, limit: &Limit, cost: u64) -> Check {
    Check::new(operation, vec![tier(key, limit, cost)]).unwrap()
}

fn limits(amount: u64, window: Duration) -> [Limit; 4] {
    Algorithm::WINDOWED.map(|algorithm| Limit::new(algorithm, amount, window).unwrap())
}

fn per_calendar_period(amount: u64, unit: CalendarUnit) -> Limit {
    Limit::fixed_window(amount, Zone::utc().calendar(unit, None).unwrap()).unwrap()
}

fn stored(key: &str, limit: &Limit) -> Vec<u8> {
    redis_key(DEFAULT_PREFIX, &Key::without_rule(key).unwrap(), limit.algorithm())
}

#[tokio::test]
async fn a_denial_leaves_the_stored_bytes_and_the_ttl_unchanged() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for limit in limits(3, 60 * MINUTE) {
            subject.apply(Operation::Check, "k", &limit, 3).await;
            let key = stored("k", &limit);
            let before: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut redis).unwrap();
            let ttl = |redis: &mut Connection| -> u64 {
                if flavor == Flavor::Redis6 {
                    redis.pttl(&key).unwrap()
                } else {
                    redis.pexpire_time(&key).unwrap()
                }
            };
            let (ttl_before, commands) = (ttl(&mut redis), async {
                for _ in 0..50 {
                    assert_eq!(
                        subject.apply(Operation::Check, "k", &limit, 1).await[0].answers[0].charged,
                        0
                    );
                    subject.apply(Operation::Peek, "k", &limit, 1).await;
                    subject.apply(Operation::Charge, "k", &limit, 0).await;
                    subject
                        .apply(Operation::Refund { at: Some(Timestamp::from_micros(1)) }, "k", &limit, 0)
                        .await;
                }
            });
            let commands = subject.commands_during(commands).await;
            for write in ["set", "setrange", "pexpire", "del", "unlink"] {
                assert!(!commands.contains_key(write), "{flavor} {limit:?}: {commands:?}");
            }
            let after: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut redis).unwrap();
            assert_eq!(before, after, "{flavor} {limit:?}");
            if flavor != Flavor::Redis6 {
                assert_eq!(ttl(&mut redis), ttl_before, "{flavor} {limit:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_peek_and_a_denial_run_in_a_read_only_script() {
    let subject = Subject::start(Flavor::Redis7).await;
    for limit in limits(3, MINUTE) {
        subject.apply(Operation::Check, "k", &limit, 2).await;
        for (operation, cost) in [(Operation::Peek, 1), (Operation::Check, 2)] {
            let checks = [check(operation, "k", &limit, cost)];
            let call = encode(DEFAULT_PREFIX, &checks, CallTimes::default()).unwrap();
            let mut request = redis::cmd("EVAL_RO");
            request.arg(SOURCE);
            call.write_to(&mut request, SendTimes { deadline: None, now: Timestamp::default() });
            let reply: Vec<u8> = request.query(&mut subject.redis()).unwrap();
            let decided = decode(&reply, &call, &checks).unwrap().remove(0).unwrap();
            assert_eq!(decided.answers[0].available, 1, "{limit:?}");
        }
    }
}

#[tokio::test]
async fn every_write_leaves_a_ttl_that_covers_what_counts_and_little_more() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for window in [Duration::from_millis(250), MINUTE, 24 * 60 * MINUTE] {
            for limit in limits(10, window) {
                for operation in [Operation::Check, Operation::Charge, Operation::Refund { at: None }] {
                    for cost in [5, 1, 40] {
                        let answer = subject.apply(operation, "k", &limit, cost).await[0].answers[0];
                        let ttl: i64 = redis.pttl(stored("k", &limit)).unwrap();
                        let needed = Duration::from_micros(answer.reset_after_us);
                        let context =
                            format!("{flavor} {limit:?} {operation:?} {cost}: {ttl} ms for {needed:?}");
                        if ttl == -2 {
                            assert!(needed < Duration::from_millis(2), "{context}");
                            continue;
                        }
                        let ttl = Duration::from_millis(u64::try_from(ttl).expect(&context));
                        // some time has passed between the decision and PTTL
                        assert!(ttl + Duration::from_secs(2) >= needed, "{context}");
                        assert!(ttl <= needed.max(2 * window) + SLACK, "{context}");
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn the_ttl_of_a_calendar_counter_covers_the_period_and_little_more() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for unit in CalendarUnit::ALL {
            let limit = per_calendar_period(10, unit);
            for operation in [Operation::Check, Operation::Charge, Operation::Refund { at: None }] {
                let CheckAnswer { at, answers } = subject.apply(operation, "k", &limit, 2).await.remove(0);
                let ttl = Duration::from_millis(redis.pttl(stored("k", &limit)).unwrap());
                let needed = Duration::from_micros(answers[0].reset_after_us);
                let context = format!("{flavor} {limit:?} {operation:?}: {ttl:?} for {needed:?}");
                assert!(ttl + Duration::from_secs(2) >= needed, "{context}");
                assert!(ttl <= needed.max(2 * limit.window_at(at)) + SLACK, "{context}");
            }
        }
    }
}

/// The first call of a connection assumes the time of this process.
#[tokio::test]
async fn a_call_in_an_unexpected_calendar_period_is_sent_once_more_and_charged_once() {
    let clock = ManualClock::new(Timestamp::from_micros(0));
    let mut subject = Subject::start(Flavor::Redis7).await;
    subject.store = subject.store.with_clock(clock.clone());
    let limit = per_calendar_period(10, CalendarUnit::Day);
    const DAY: Duration = Duration::from_secs(86_400);
    let noon = |day: u32| Timestamp::from_micros(0).plus(DAY * day + DAY / 2);
    // the day of the store's clock, how often the call is sent, and what remains
    let table =
        [(30_000, 2, 9), (30_000, 1, 8), (30_001, 1, 9), (30_003, 2, 9), (30_002, 2, 8), (29_000, 2, 9)];
    for (day, sends, remaining) in table {
        clock.set(noon(day));
        let mut answer = None;
        let commands = subject
            .commands_during(async {
                let decided = subject.apply(Operation::Check, "k", &limit, 1).await.remove(0);
                assert_eq!(decided.at, clock.now());
                answer = Some(decided.answers[0]);
            })
            .await;
        let count = |name: &str| commands.get(name).copied().unwrap_or_default();
        assert_eq!(count("evalsha") + count("eval"), sends, "day {day}: {commands:?}");
        assert_eq!(count("set") + count("setrange"), 1, "day {day}: {commands:?}");
        assert_eq!(answer.map(|answer| answer.available), Some(remaining), "day {day}");
    }
}

#[tokio::test]
async fn a_call_in_an_unexpected_calendar_period_changes_nothing() {
    let subject = Subject::start(Flavor::Redis7).await;
    let (day, bucket) =
        (per_calendar_period(10, CalendarUnit::Day), Limit::token_bucket(10, MINUTE).unwrap());
    let checks = [check(Operation::Check, "day", &day, 1), check(Operation::Check, "bucket", &bucket, 1)];
    let now = Timestamp::from_micros(1_794_765_441_799_839);
    let call = encode(DEFAULT_PREFIX, &checks, CallTimes { now: Some(now), ..CallTimes::default() }).unwrap();
    let days = |days: u32| Duration::from_secs(86_400) * days;
    for (expected, has_period) in
        [(now.minus(days(2)), false), (now.minus(days(1)), true), (now, true), (now.plus(days(1)), false)]
    {
        let mut request = redis::cmd("EVAL");
        request.arg(SOURCE);
        call.write_to(&mut request, SendTimes { deadline: None, now: expected });
        let reply: Vec<u8> = request.query(&mut subject.redis()).unwrap();
        let decided = decode(&reply, &call, &checks);
        assert_eq!(decided.is_ok(), has_period, "{expected:?}: {decided:?}");
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut subject.redis()).unwrap();
        assert_eq!(keys.len(), if has_period { 2 } else { 0 }, "{expected:?}: {keys:?}");
        let _: () = redis::cmd("FLUSHALL").query(&mut subject.redis()).unwrap();
    }
}

/// Returns states that the script cannot have stored, made from one that it has stored.
fn invalid_states(written: &[u8]) -> Vec<Vec<u8>> {
    let header = written.len().min(snapshot::HEADER_BYTES);
    let mut states = vec![b"x".to_vec(), vec![0; written.len()], vec![0xff; written.len()]];
    states.push(written[..header - 1].to_vec());
    for number in 0..header / 8 {
        for value in [-1.0, 0.5, 1e300, f64::NAN, f64::INFINITY] {
            let mut state = written.to_vec();
            state[number * 8..][..8].copy_from_slice(&f64::to_le_bytes(value));
            states.push(state);
        }
    }
    states
}

#[tokio::test]
async fn an_invalid_counter_has_no_snapshot_and_others_do() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for limit in limits(3, MINUTE) {
            for key in ["bad", "good"] {
                subject.apply(Operation::Check, key, &limit, 1).await;
            }
            let counters = ["bad", "good"].map(|key| (Key::without_rule(key).unwrap(), limit));
            let key = stored("bad", &limit);
            for bytes in invalid_states(&redis.get::<_, Vec<u8>>(&key).unwrap()) {
                redis.set_ex::<_, _, ()>(&key, &bytes, 60).unwrap();
                let snapshots = subject.store.inspect(&counters).await.unwrap();
                assert_eq!(snapshots[0], None, "{limit:?}: {bytes:?}");
                assert!(snapshots[1].is_some());
            }
            let () = redis::pipe().del(&key).rpush(&key, "x").expire(&key, 60).query(&mut redis).unwrap();
            assert_eq!(subject.store.inspect(&counters).await.unwrap()[0], None, "{limit:?}: a list");
        }
    }
}

#[tokio::test]
async fn a_counter_that_cannot_be_read_affects_only_its_own_checks_and_is_never_changed() {
    for flavor in Flavor::ALL {
        let subject = Subject::start(flavor).await;
        let mut redis = subject.redis();
        for limit in limits(MANY, 100_000 * MINUTE) {
            subject.apply(Operation::Check, "bad", &limit, 1).await;
            let key = stored("bad", &limit);
            let written: Vec<u8> = redis.get(&key).unwrap();
            for bytes in invalid_states(&written).into_iter().chain([Vec::new()]) {
                redis.set_ex::<_, _, ()>(&key, &bytes, 600).unwrap();
                assert_only_bad_is_unreadable(&subject, &limit, &format!("{flavor} {limit:?}: {bytes:?}"))
                    .await;
            }
            for command in ["RPUSH", "SADD", "PFADD"] {
                let mut fill = redis::pipe();
                fill.del(&key).cmd(command).arg(&key).arg("x").expire(&key, 600);
                let () = fill.query(&mut redis).unwrap();
                assert_only_bad_is_unreadable(&subject, &limit, &format!("{flavor} {limit:?}: {command}"))
                    .await;
            }
        }
    }
}

/// Sends batches in which some checks use the counter `bad`.
async fn assert_only_bad_is_unreadable(subject: &Subject, limit: &Limit, context: &str) {
    let mut redis = subject.redis();
    let key = stored("bad", limit);
    let dump = |redis: &mut Connection| -> Vec<u8> { redis::cmd("DUMP").arg(&key).query(redis).unwrap() };
    let before = dump(&mut redis);
    let bucket = Limit::token_bucket(MANY, 1_000_000 * MINUTE).unwrap();
    let used = async |key: &str, limit: &Limit| {
        i64::try_from(MANY).unwrap()
            - subject.apply(Operation::Peek, key, limit, 0).await[0].answers[0].available
    };
    let mut used_before = Vec::new();
    for (name, limit) in [("other", &bucket), ("tier", limit), ("fresh", limit)] {
        let () = redis.del(stored(name, limit)).unwrap();
        subject.apply(Operation::Check, name, limit, 1).await;
        used_before.push(used(name, limit).await);
    }
    let refund = Operation::Refund { at: None };
    for operation in [Operation::Check, Operation::Peek, Operation::Charge, refund] {
        let both = Check::new(operation, vec![tier("tier", limit, 1), tier("bad", limit, 1)]).unwrap();
        let checks = [
            check(Operation::Charge, "other", &bucket, 5),
            check(operation, "bad", limit, 1),
            both,
            check(operation, "bad", limit, 1),
            check(Operation::Charge, "fresh", limit, 5),
        ];
        let Backend::Primary(primary) = &subject.store.backend else { panic!("a store with one server") };
        let decided = subject.store.decide_on(primary, &checks, None).await.expect(context);
        let unreadable = Err(StoreError::Unreadable { key: String::from_utf8(key.clone()).unwrap() });
        assert_eq!(
            decided[1..4],
            [unreadable.clone(), unreadable.clone(), unreadable],
            "{context}, {operation:?}"
        );
        assert!(decided[0].is_ok() && decided[4].is_ok(), "{context}, {operation:?}: {decided:?}");
        assert_eq!(dump(&mut redis), before, "{context}, {operation:?}");
    }
    let expected = [used_before[0] + 20, used_before[1], used_before[2] + 20];
    let found = [used("other", &bucket).await, used("tier", limit).await, used("fresh", limit).await];
    assert_eq!(found, expected, "{context}: a check is charged as a whole, or not at all");
}

#[tokio::test]
async fn a_shorter_window_shortens_the_ttl_with_the_next_write() {
    let subject = Subject::start(Flavor::Redis7).await;
    for algorithm in Algorithm::WINDOWED {
        let limit = |window| Limit::new(algorithm, 10, window).unwrap();
        subject.apply(Operation::Check, "k", &limit(24 * 60 * MINUTE), 1).await;
        subject.apply(Operation::Check, "k", &limit(MINUTE), 1).await;
        let ttl: u64 = subject.redis().pttl(stored("k", &limit(MINUTE))).unwrap();
        assert!(ttl <= 130_000, "{algorithm}: {ttl} ms");
    }
}

#[tokio::test]
async fn a_ttl_is_renewed_when_it_no_longer_covers_what_counts_and_only_then() {
    let subject = Subject::start(Flavor::Redis7).await;
    // 25 s into a window: the one after next has begun when the TTL is nearly over
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_445_000_000));
    let store = subject.store.clone().with_clock(clock.clone());
    let ceiling = Limit::token_bucket(1_000_000, 1000 * MINUTE).unwrap();
    for limit in limits(10, MINUTE) {
        // alone, and together with another tier
        for other in [None, Some(tier("global", &ceiling, 1))] {
            let key = format!("k{}", other.is_some());
            let check = |cost| {
                let tiers = [tier(&key, &limit, cost)].into_iter().chain(other.clone()).collect();
                Check::new(Operation::Check, tiers).unwrap()
            };
            // until a log has a free slot: it grows by half
            for _ in 0..3 {
                decide(&store, &[check(1)]).await.unwrap();
                clock.advance(Duration::from_micros(1));
            }
            for (passing, cost, renews) in [(MINUTE / 10, 1, false), (MINUTE * 18 / 10, 2, true)] {
                clock.advance(passing);
                let decided = async { decide(&store, &[check(cost)]).await.unwrap() };
                let commands = subject.commands_during(decided).await;
                let renewed = commands.contains_key("set") || commands.contains_key("pexpire");
                assert_eq!(renewed, renews, "{limit:?} {commands:?}");
            }
            clock.advance(8 * MINUTE + MINUTE / 10 - Duration::from_micros(3));
        }
    }
}

#[tokio::test]
async fn after_a_warm_up_the_first_decision_is_one_call_and_the_clock_is_known() {
    let server = Server::start(Flavor::Redis7);
    let subject = Subject { store: RedisStore::connect_later(&server.url()).unwrap(), server };
    let limit = Limit::fixed_window(100, MINUTE).unwrap();
    let commands = subject.commands_during(async { subject.store.warm_up().await.unwrap() }).await;
    assert_eq!((commands["evalsha"], commands["eval"], commands.get("mget")), (1, 1, None), "{commands:?}");
    let Backend::Primary(primary) = &subject.store.backend else { panic!("not a Cluster") };
    assert!(primary.connection().server_time(tokio::time::Instant::now()).is_some());
    let first = subject.commands_during(subject.apply(Operation::Check, "k", &limit, 1)).await;
    let not_needed = ["eval", "client|setname", "client"].map(|name| first.get(name));
    assert_eq!((first["evalsha"], not_needed), (1, [None; 3]), "{first:?}");
}

#[tokio::test]
async fn connecting_needs_only_the_permissions_of_a_decision() {
    let server = Server::start(Flavor::Redis7);
    let rules = [
        "on",
        ">word",
        "~shop1:*",
        "-@all",
        "+evalsha",
        "+eval",
        "+time",
        "+mget",
        "+exists",
        "+set",
        "+setrange",
    ];
    server.set_user("limiter", &rules);
    let url = server.url().replace("redis://", "redis://limiter:word@");
    let store = RedisStore::connect(&url).await.unwrap().with_prefix("shop").unwrap();
    let limit = Limit::fixed_window(100, MINUTE).unwrap();
    let decided = decide(&store, &[check(Operation::Check, "k", &limit, 1)]).await.unwrap();
    assert_eq!(decided[0].answers[0].available, 99);
}

#[tokio::test]
async fn a_lost_script_is_sent_again_within_the_same_call() {
    let subject = Subject::start(Flavor::Redis7).await;
    let limit = Limit::sliding_log(100, MINUTE).unwrap();
    for left in (80..100).rev() {
        let () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut subject.redis()).unwrap();
        assert_eq!(subject.apply(Operation::Check, "k", &limit, 1).await[0].answers[0].available, left);
    }
}

#[tokio::test]
async fn a_key_is_read_once_and_written_once_per_batch() {
    let subject = Subject::start(Flavor::Redis7).await;
    let ceiling = Limit::token_bucket(1_000_000, MINUTE).unwrap();
    let per_user = Limit::fixed_window(10, MINUTE).unwrap();
    let checks: Vec<Check> = (0..64)
        .map(|user| {
            let tiers = vec![tier("global", &ceiling, 1), tier(&format!("user:{user}"), &per_user, 1)];
            Check::new(Operation::Check, tiers).unwrap()
        })
        .collect();
    for _ in 0..2 {
        let commands =
            subject.commands_during(async { decide(&subject.store, &checks).await.unwrap() }).await;
        let writes = commands.get("set").unwrap_or(&0) + commands.get("setrange").unwrap_or(&0);
        assert_eq!((commands["mget"], writes, commands.get("get")), (1, 65, None), "{commands:?}");
    }
}

#[tokio::test]
async fn a_decision_on_a_long_log_takes_no_more_commands_than_on_a_short_one() {
    let subject = Subject::start(Flavor::Redis7).await;
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = subject.store.clone().with_clock(clock.clone());
    let limit = Limit::sliding_log(20_000, MINUTE).unwrap();
    let decide = async |cost| {
        clock.advance(Duration::from_micros(7));
        decide(&store, &[check(Operation::Check, "k", &limit, cost)]).await.unwrap()
    };
    let mut most = 0;
    for entries in 0..30_000 {
        let cost = if entries < 20_000 || entries % 3 == 0 { 1 } else { 9_000 };
        if entries % 500 == 0 || (19_990..20_010).contains(&entries) {
            let commands = subject.commands_during(decide(cost)).await;
            most = most.max(commands.values().sum());
        } else {
            decide(cost).await;
        }
        if entries == 25_000 {
            clock.advance(MINUTE);
        }
    }
    assert!(most <= 40, "one decision took {most} commands: a binary search over 20,000 takes 15 reads");
}

/// Stores a log of `length` entries of one unit, one microsecond apart, in a full ring that starts at `head`.
fn store_full_log(
    redis: &mut Connection,
    key: &[u8],
    limit: &Limit,
    first: Timestamp,
    length: u64,
    head: u64,
) {
    let first = first.as_micros();
    let last = first + length - 1;
    let ttl_until = last + 2 * limit.window_us();
    let header = [last, 0, length, first, head, length, ttl_until, limit.window_us(), length];
    let mut state: Vec<u8> = header.iter().flat_map(|number| (*number as f64).to_le_bytes()).collect();
    for slot in 0..length {
        let index = (slot + length - head) % length;
        state.extend(&(first + index).to_le_bytes()[..7]);
        state.extend(&(index + 1).to_le_bytes()[..3]);
    }
    redis.set_ex::<_, _, ()>(key, state, 3_600).unwrap();
}

/// Returns how long scripts have run, in microseconds.
fn script_micros(redis: &mut Connection) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(redis).unwrap();
    let stats = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")).unwrap_or_default();
    let micros = stats.split(',').find_map(|field| field.strip_prefix("usec="));
    micros.map_or(0, |micros| micros.parse().unwrap())
}

#[tokio::test]
async fn no_operation_on_the_longest_log_blocks_redis() {
    /// Moving half of the longest ring takes about one millisecond, a pass over all entries in Lua a hundred times as long.
    const SLOWEST_US: u64 = 10_000;
    let subject = Subject::start(Flavor::Redis7).await;
    let mut redis = subject.redis();
    let start = Timestamp::from_micros(1_794_765_441_799_839);
    let clock = ManualClock::new(start);
    let store = subject.store.clone().with_clock(clock.clone());
    let limit = Limit::sliding_log(MANY, MINUTE).unwrap();
    let length = MANY * 2 / 3;
    let newest = start.plus(Duration::from_micros(length - 1));
    let reach = start.plus(Duration::from_micros(length - 1_000));
    let operations = [
        ("grow", Operation::Check, 1, 1),
        ("drop all entries in debt", Operation::Charge, 1 << 40, 0),
        ("drop most entries in debt", Operation::Charge, MAX_LOG_UNITS - 1_000, 0),
        ("grow in debt", Operation::Charge, 2 * MANY, 0),
        ("refund nearly all", Operation::Refund { at: None }, length - 3, 3 - length as i64),
        ("refund the newest charge", Operation::Refund { at: Some(newest) }, 1, -1),
        ("refund a charge in reach", Operation::Refund { at: Some(reach) }, 1, -1),
        ("refund a charge out of reach", Operation::Refund { at: Some(start) }, 1, 0),
    ];
    for (name, operation, cost, change) in operations {
        for head in [0, length / 2, length / 2 + 1, length - 1] {
            let mut fastest = u64::MAX;
            // other processes may use the CPU
            for _ in 0..3 {
                clock.set(start.plus(Duration::from_micros(length + 7)));
                store_full_log(&mut redis, &stored("k", &limit), &limit, start, length, head);
                let before = script_micros(&mut redis);
                let decided = decide(&store, &[check(operation, "k", &limit, cost)]).await.unwrap();
                fastest = fastest.min(script_micros(&mut redis) - before);
                if cost <= MANY {
                    let used = MANY as i64 - decided[0].answers[0].available;
                    assert_eq!(used, length as i64 + change, "{name}, head {head}");
                }
            }
            assert!(fastest < SLOWEST_US, "{name}, head {head}: {fastest} us");
            if name == "grow" {
                // each entry is where it expires
                for expired in [1, 2, length / 3, length / 2, length - 1, length] {
                    clock.set(start.plus(MINUTE + Duration::from_micros(expired - 1)));
                    let peeked = decide(&store, &[check(Operation::Peek, "k", &limit, 0)]).await.unwrap();
                    let used = MANY as i64 - peeked[0].answers[0].available;
                    assert_eq!(used, (length + 1 - expired) as i64, "head {head}, {expired} expired");
                }
            }
        }
    }
}

#[tokio::test]
async fn long_logs_that_wrap_around_and_grow_agree_with_memory() {
    let subject = Subject::start(Flavor::Redis7).await;
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = subject.store.clone().with_clock(clock.clone());
    let memory = crate::MemoryStore::new().with_clock(clock.clone());
    let limit = Limit::sliding_log(50_000, MINUTE / 60).unwrap();
    // the ring starts with some hundred entries, and wraps around before each time that it grows
    let mut times = Vec::new();
    for (pause_us, steps) in
        [(1_000, 2_500), (400, 4_000), (200, 8_000), (120, 12_000), (400, 3_000), (90, 16_000)]
    {
        for step in 0..steps {
            clock.advance(Duration::from_micros(pause_us));
            let operation = match step % 997 {
                500 => Operation::Refund { at: None },
                700 => Operation::Refund { at: Some(times[times.len() - 300]) },
                _ => Operation::Check,
            };
            times.push(clock.now());
            let cost = if operation == Operation::Check { 1 } else { 40 };
            let checks = [check(operation, "k", &limit, cost)];
            let decided = decide(&store, &checks).await.unwrap();
            assert_eq!(decided, memory.decide_all(&checks), "{pause_us} us, step {step}: {operation:?}");
        }
    }
    let length: u64 = redis::cmd("STRLEN").arg(stored("k", &limit)).query(&mut subject.redis()).unwrap();
    assert!(length > 11_000 * 10, "the log became long: {length} bytes");
}

#[tokio::test]
async fn a_log_of_a_thousand_entries_takes_a_tenth_of_a_sorted_set() {
    let subject = Subject::start(Flavor::Redis7).await;
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = subject.store.clone().with_clock(clock.clone());
    let limit = Limit::sliding_log(1_000, MINUTE).unwrap();
    let mut redis = subject.redis();
    for entry in 0..1_000_u64 {
        clock.advance(Duration::from_micros(7));
        decide(&store, &[check(Operation::Check, "k", &limit, 1)]).await.unwrap();
        let score = clock.now().as_micros();
        let () = redis.zadd("sorted", format!("{score}:{entry}"), score).unwrap();
    }
    let size = |redis: &mut Connection, key: &[u8]| -> u64 {
        redis::cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0).query(redis).unwrap()
    };
    let (log, sorted) = (size(&mut redis, &stored("k", &limit)), size(&mut redis, b"sorted"));
    let () = redis.del("sorted").unwrap();
    assert!(log * 100 <= sorted * 12, "{log} bytes against {sorted}");
}

#[tokio::test]
async fn a_reset_touches_one_key() {
    let subject = Subject::start(Flavor::Redis7).await;
    let limit = Limit::sliding_log(10, MINUTE).unwrap();
    for user in 0..50 {
        subject.apply(Operation::Check, &format!("user:{user}"), &limit, 1).await;
    }
    let key = Key::without_rule("user:7").unwrap();
    let reset = async { subject.store.reset(&[(key, Algorithm::SlidingLog)]).await.unwrap() };
    let commands = subject.commands_during(reset).await;
    assert_eq!(commands, HashMap::from([("unlink".to_owned(), 1)]));
    let left: u64 = redis::cmd("DBSIZE").query(&mut subject.redis()).unwrap();
    assert_eq!(left, 49);
}

#[tokio::test]
async fn a_batch_beyond_the_bound_is_rejected_and_the_largest_is_not() {
    let subject = Subject::start(Flavor::Redis7).await;
    let limit = Limit::token_bucket(10, MINUTE).unwrap();
    let batch = |size: usize| -> Vec<Check> {
        (0..size).map(|key| check(Operation::Check, &key.to_string(), &limit, 1)).collect()
    };
    let decided = decide(&subject.store, &batch(MAX_BATCH)).await.unwrap();
    assert!(decided.iter().all(|check| check.answers[0].charged == 1));
    let error = decide(&subject.store, &batch(MAX_BATCH + 1)).await.unwrap_err();
    assert_eq!(error, StoreError::TooLarge { tiers: 1025, max: MAX_BATCH });
}

#[tokio::test]
async fn stores_with_different_prefixes_share_no_counters() {
    let subject = Subject::start(Flavor::Redis7).await;
    let limit = Limit::fixed_window(1, 24 * 60 * MINUTE).unwrap();
    for prefix in ["a", "b"] {
        let store = subject.store.clone().with_prefix(prefix).unwrap();
        let decided = decide(&store, &[check(Operation::Check, "k", &limit, 1)]).await.unwrap();
        assert_eq!(decided[0].answers[0].charged, 1, "{prefix}");
    }
    for bad in ["", "a:b", "{x}", "é", &"x".repeat(33)] {
        assert!(matches!(subject.store.clone().with_prefix(bad), Err(RedisSetupError::Prefix(_))), "{bad}");
    }
}

#[tokio::test]
async fn an_invalid_url_and_an_unreachable_server_are_different_errors() {
    assert!(matches!(RedisStore::connect("http://x").await, Err(RedisSetupError::Url(_))));
    let absent = RedisStore::connect("redis://127.0.0.1:1").await;
    assert!(matches!(absent, Err(RedisSetupError::Connect(_))));
}

#[tokio::test]
async fn a_store_recovers_when_its_password_is_valid_again() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url().replace("redis://", "redis://:right@");
    let mut admin = server.connection();
    let mut set_password = |password: &str| {
        let () = redis::cmd("CONFIG").arg("SET").arg("requirepass").arg(password).query(&mut admin).unwrap();
        let () = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("SKIPME")
            .arg("yes")
            .arg("TYPE")
            .arg("normal")
            .query(&mut admin)
            .unwrap();
    };
    set_password("right");
    let store = RedisStore::connect(&url).await.unwrap();
    let hit = [check(Operation::Check, "k", &Limit::sliding_log(1_000, MINUTE).unwrap(), 1)];
    decide(&store, &hit).await.unwrap();
    set_password("wrong");
    let rejected = |error: &StoreError| error.to_string().to_lowercase().contains("password");
    // the client itself tries for a while before it gives up
    while !decide(&store, &hit).await.is_err_and(|error| rejected(&error)) {}
    set_password("right");
    while decide(&store, &hit).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    set_password("");
}

/// A proxy that drops the connection instead of forwarding the next reply while `swallow` is set.
async fn proxy_that_swallows(server: u16, swallow: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let swallow = Arc::clone(&swallow);
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let (mut from_server, mut to_server) = server.into_split();
                let requests =
                    tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                let mut reply = [0; 4096];
                while let Ok(length @ 1..) = from_server.read(&mut reply).await {
                    if swallow.swap(false, Ordering::SeqCst)
                        || to_client.write_all(&reply[..length]).await.is_err()
                    {
                        break;
                    }
                }
                requests.abort();
            });
        }
    });
    port
}

#[tokio::test]
async fn a_call_whose_reply_is_lost_is_not_sent_again() {
    let server = Server::start(Flavor::Redis7);
    let swallow = Arc::new(AtomicBool::new(false));
    let port = proxy_that_swallows(server.port(), Arc::clone(&swallow)).await;
    let store = RedisStore::connect(&format!("redis://127.0.0.1:{port}")).await.unwrap();
    let limit = Limit::sliding_log(10_000, 60 * MINUTE).unwrap();
    let hit = [check(Operation::Check, "k", &limit, 1)];
    let (mut answered, mut lost) = (0, 0);
    for call in 0..200 {
        swallow.store(call % 40 == 0, Ordering::SeqCst);
        match decide(&store, &hit).await {
            Ok(_) => answered += 1,
            Err(StoreError::Ambiguous(_)) => lost += 1,
            Err(other) => panic!("unexpected error: {other}"),
        }
    }
    swallow.store(false, Ordering::SeqCst);
    assert_eq!((answered, lost), (195, 5));
    let peeked = decide(&store, &[check(Operation::Peek, "k", &limit, 0)]).await.unwrap();
    assert_eq!(peeked[0].answers[0].available, 10_000 - 200, "each call was charged once");
}
