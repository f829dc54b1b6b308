//! Several processes on one Redis together get exactly the limit.
//!
//! The admitted calls are verified twice: by their send and receive times on the clock of the callers, and by the decision times of the
//! store, which are more precise and must lie between the former.

use std::collections::HashMap;
use std::time::Duration;

use sluicegate::{Algorithm, Cost, Limit, Limiter, Options, RedisStore};
use sluicegate_core::limit::MAX_WINDOW;
use sluicegate_testkit::delay_proxy::DelayProxy;
use sluicegate_testkit::hammer::{
    self, AdmittedCall, Hammer, HammerProcess, HammerReport, SkewedClock, Workload,
};
use sluicegate_testkit::oracle::{Admitted, bucket_violation, window_violation};
use sluicegate_testkit::server::{Flavor, Server};

const PROGRAM: &str = env!("CARGO_BIN_EXE_hammer");
const PROCESSES: usize = 4;
const CALLERS: usize = 8;
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::from_secs(1));

/// How much longer than twice its window Redis may keep a key.
const TTL_SLACK: Duration = Duration::from_secs(10);

/// Returns a limit that admits `capacity` once and nothing more during a test: its window is ten years.
fn once(algorithm: Algorithm, capacity: u64) -> Limit {
    Limit::new(algorithm, capacity, MAX_WINDOW).expect("within the range")
}

/// Returns a hammer of eight callers on the key `hot` at a cost of 1.
fn hammer(server: &Server, limit: Limit, workload: Workload) -> Hammer {
    let keys = vec!["hot".to_owned()];
    Hammer {
        url: server.url(),
        limit,
        keys,
        user: None,
        costs: vec![1],
        callers: CALLERS,
        workload,
        clock: None,
    }
}

/// Runs four processes with the same work.
fn run_together(hammer: &Hammer) -> Vec<AdmittedCall> {
    let reports = hammer::run(PROGRAM, &vec![hammer.clone(); PROCESSES]);
    reports.into_iter().flat_map(|report| report.admitted).collect()
}

fn cost_of<'a>(admitted: impl IntoIterator<Item = &'a AdmittedCall>) -> u64 {
    admitted.into_iter().map(|call| call.call.cost).sum()
}

/// Returns the usage of each tier of a key.
fn used(hammer: &Hammer, key: &str) -> Vec<u64> {
    let peek = async {
        let store = RedisStore::connect(&hammer.url).await.expect("the server answers");
        let limiter = Limiter::builder()
            .store(store)
            .rules(hammer.rules())
            .options(OPTIONS)
            .build()
            .expect("the rules are valid");
        let peeked = limiter.peek(&hammer.labels(key), Cost::ZERO).await.expect("the request is valid");
        assert!(!peeked.is_degraded(), "{} does not answer", hammer.url);
        peeked.tiers.iter().map(|tier| tier.limit - tier.remaining).collect()
    };
    tokio::runtime::Runtime::new().expect("a runtime starts").block_on(peek)
}

/// Asserts that the admitted calls on one key are within the bound of the algorithm.
fn assert_within(limit: &Limit, admitted: &[AdmittedCall]) {
    let calls: Vec<_> = admitted.iter().map(|call| call.call).collect();
    for (witness, calls) in [("the callers' clock", calls), ("the store's clock", decisions(admitted))] {
        assert_calls_within(limit, witness, &calls);
    }
}

/// Returns the calls with the times of the store.
fn decisions(admitted: &[AdmittedCall]) -> Vec<Admitted> {
    admitted.iter().map(|call| Admitted { sent: call.at, received: call.at, cost: call.call.cost }).collect()
}

fn assert_calls_within(limit: &Limit, witness: &str, calls: &[Admitted]) {
    let (amount, window) = (limit.amount(), limit.window());
    let violation = match limit.algorithm() {
        Algorithm::FixedWindow => {
            assert_within_aligned_windows(limit, calls);
            window_violation(calls, 2 * amount, window)
        }
        Algorithm::SlidingLog => window_violation(calls, amount, window),
        Algorithm::SlidingCounter => window_violation(calls, 2 * amount - 1, window),
        Algorithm::TokenBucket => bucket_violation(calls, limit.capacity(), amount, window),
        Algorithm::Concurrency => unreachable!("its requests are holds"),
    };
    if let Some(violation) = violation {
        panic!("{}, by {witness}: {violation}", limit.algorithm());
    }
}

/// Asserts the limit for calls that were certainly decided within one window of the clock.
fn assert_within_aligned_windows(limit: &Limit, calls: &[Admitted]) {
    let window = |moment: Duration| moment.as_micros() / limit.window().as_micros();
    let mut admitted: HashMap<u128, u64> = HashMap::new();
    for call in calls.iter().filter(|call| window(call.sent) == window(call.received)) {
        *admitted.entry(window(call.sent)).or_default() += call.cost;
    }
    let most = admitted.values().max().copied().unwrap_or(0);
    assert!(most <= limit.amount(), "{most} in one window of {limit:?}");
}

#[test]
fn processes_together_get_exactly_the_limit_on_every_server() {
    const AMOUNT: u64 = 300;
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        for algorithm in Algorithm::WINDOWED {
            let hammer = hammer(&server, once(algorithm, AMOUNT), Workload::Calls(200));
            let admitted = run_together(&hammer);
            assert_within(&hammer.limit, &admitted);
            assert_eq!(cost_of(&admitted), AMOUNT, "{algorithm} on {flavor}");
            assert_eq!(used(&hammer, "hot"), [AMOUNT], "{algorithm} on {flavor}");
        }
    }
}

#[test]
fn processes_with_a_round_trip_of_1_ms_together_get_exactly_the_limit_and_keep_its_bound() {
    const AMOUNT: u64 = 300;
    let server = Server::start(Flavor::Redis7);
    let proxy = DelayProxy::start(server.addr(), Duration::from_millis(1));
    for algorithm in Algorithm::WINDOWED {
        let plan = hammer(&server, once(algorithm, AMOUNT), Workload::Calls(200));
        let plan = Hammer { url: proxy.url(), ..plan };
        let admitted = run_together(&plan);
        assert_within(&plan.limit, &admitted);
        assert_eq!(cost_of(&admitted), AMOUNT, "{algorithm}");
        assert_eq!(used(&plan, "hot"), [AMOUNT], "{algorithm}");

        let short = Limit::new(algorithm, 50, Duration::from_millis(100)).expect("within the range");
        let plan = hammer(&server, short, Workload::Time(Duration::from_millis(800)));
        let plan = Hammer { url: proxy.url(), keys: vec!["short".to_owned()], ..plan };
        let admitted = run_together(&plan);
        assert_within(&short, &admitted);
        assert!(cost_of(&admitted) > short.amount(), "{algorithm} admits only {}", cost_of(&admitted));
    }
}

#[test]
fn processes_with_skewed_clocks_together_get_exactly_the_limit() {
    const AMOUNT: u64 = 300;
    let clocks = [(3_600, 10), (-86_400, 10), (0, 30), (-7, 3)]
        .map(|(offset_seconds, seconds_in_ten)| Some(SkewedClock { offset_seconds, seconds_in_ten }));
    let together = |plan: &Hammer| {
        let hammers = clocks.clone().map(|clock| Hammer { clock, ..plan.clone() });
        hammer::run(PROGRAM, &hammers)
    };
    let server = Server::start(Flavor::Redis7);
    for algorithm in Algorithm::WINDOWED {
        let plan = hammer(&server, once(algorithm, AMOUNT), Workload::Calls(200));
        let reports = together(&plan);
        let admitted: Vec<_> = reports.iter().flat_map(|report| report.admitted.clone()).collect();
        assert_eq!(cost_of(&admitted), AMOUNT, "{algorithm}");
        assert_eq!(used(&plan, "hot"), [AMOUNT], "{algorithm}");

        // over many windows, which end for all processes at the same time
        let short = Limit::new(algorithm, 50, Duration::from_millis(100)).expect("within the range");
        let plan = Hammer {
            keys: vec!["short".to_owned()],
            ..hammer(&server, short, Workload::Time(Duration::from_millis(800)))
        };
        let reports = together(&plan);
        let admitted: Vec<_> = reports.iter().flat_map(|report| report.admitted.clone()).collect();
        assert_calls_within(&short, "the store's clock", &decisions(&admitted));
        assert!(cost_of(&admitted) > short.amount(), "{algorithm} admits only {}", cost_of(&admitted));

        // the clocks are indeed skewed
        let ahead =
            reports[0].admitted.iter().all(|call| call.call.sent > call.at + Duration::from_secs(3_000));
        let behind =
            reports[1].admitted.iter().all(|call| call.call.sent + Duration::from_secs(80_000) < call.at);
        assert!(ahead && behind, "libfaketime does not change the clocks");
    }
}

#[test]
fn unlimited_demand_gets_at_least_99_percent_of_the_limit() {
    const AMOUNT: u64 = 400;
    const WINDOW: Duration = Duration::from_secs(1);
    let server = Server::start(Flavor::Redis7);
    for algorithm in Algorithm::WINDOWED {
        let limit = Limit::new(algorithm, AMOUNT, WINDOW).expect("within the range");
        let plan = hammer(&server, limit, Workload::Time(Duration::from_millis(4_500)));
        let reports = hammer::run(PROGRAM, &[plan]);
        let admitted = &reports[0].admitted;
        assert_calls_within(&limit, "the store's clock", &decisions(admitted));
        // three complete windows under demand, from the first call or the next window boundary
        let first = admitted[0].at;
        let from = match algorithm {
            Algorithm::SlidingLog | Algorithm::TokenBucket => first,
            Algorithm::FixedWindow | Algorithm::SlidingCounter => {
                Duration::from_secs(first.as_secs()) + WINDOW
            }
            Algorithm::Concurrency => unreachable!("its requests are holds"),
        };
        let span = from..from + 3 * WINDOW;
        let admitted = cost_of(admitted.iter().filter(|call| span.contains(&call.at)));
        assert!(admitted * 100 >= 3 * AMOUNT * 99, "{algorithm}: {admitted} of {}", 3 * AMOUNT);
    }
}

#[test]
fn costs_of_several_units_fill_each_keys_limit_exactly() {
    const AMOUNT: u64 = 100;
    let server = Server::start(Flavor::Redis7);
    for algorithm in Algorithm::WINDOWED {
        let keys: Vec<_> = ["one", "two", "three"].map(String::from).to_vec();
        // A third of the calls costs 1, a third of those goes to each key: 4 x 33 of them fill what the others leave.
        let plan = hammer(&server, once(algorithm, AMOUNT), Workload::Calls(300));
        let hammer = Hammer { keys: keys.clone(), costs: vec![3, 1, 2], ..plan };
        let admitted = run_together(&hammer);
        for key in keys {
            let admitted: Vec<_> = admitted.iter().filter(|call| call.key == key).cloned().collect();
            assert_within(&hammer.limit, &admitted);
            assert_eq!(cost_of(&admitted), AMOUNT, "{algorithm}, key {key}");
            assert_eq!(used(&hammer, &key), [AMOUNT], "{algorithm}, key {key}");
        }
    }
}

/// Asserts that the bound holds over many windows under saturating demand.
fn keeps_its_bound_over_many_windows(algorithm: Algorithm) {
    const AMOUNT: u64 = 50;
    let server = Server::start(Flavor::Redis7);
    let limit = Limit::new(algorithm, AMOUNT, Duration::from_millis(100)).expect("within the range");
    let limit = match algorithm {
        Algorithm::TokenBucket => limit.with_burst(20).expect("within the range"),
        _ => limit,
    };
    let admitted = run_together(&hammer(&server, limit, Workload::Time(Duration::from_millis(1_200))));
    assert_within(&limit, &admitted);
    assert!(cost_of(&admitted) > AMOUNT, "{algorithm} admits only {} in twelve windows", cost_of(&admitted));
}

#[test]
fn a_fixed_window_keeps_its_bound_over_many_windows() {
    keeps_its_bound_over_many_windows(Algorithm::FixedWindow);
}

#[test]
fn a_sliding_log_keeps_its_bound_over_many_windows() {
    keeps_its_bound_over_many_windows(Algorithm::SlidingLog);
}

#[test]
fn a_sliding_counter_keeps_its_bound_over_many_windows() {
    keeps_its_bound_over_many_windows(Algorithm::SlidingCounter);
}

#[test]
fn a_token_bucket_keeps_its_bound_over_many_windows() {
    keeps_its_bound_over_many_windows(Algorithm::TokenBucket);
}

/// By the times at which units were charged, the limit itself holds. They are spent up to a lifetime later: by the callers' clock, the
/// bound of the algorithm plus the lease holds.
#[test]
fn with_leases_processes_that_come_and_go_keep_the_bound_plus_the_lease() {
    const AMOUNT: u64 = 400;
    const LEASE: u64 = 80;
    const WINDOW: Duration = Duration::from_millis(500);
    for algorithm in Algorithm::WINDOWED {
        let server = Server::start(Flavor::Redis7);
        let limit = Limit::new(algorithm, AMOUNT, WINDOW).expect("within the range");
        let leased = limit.with_lease(LEASE, Duration::from_millis(100)).expect("within the range");
        let stays = hammer(&server, leased, Workload::Time(6 * WINDOW));
        let ends = Hammer { workload: Workload::Time(WINDOW), ..stays.clone() };
        let mut processes = hammer::start(PROGRAM, &[stays.clone(), stays.clone()]);
        let mut reports = Vec::new();
        for _ in 0..3 {
            let mut others = hammer::start(PROGRAM, &[ends.clone(), stays.clone()]);
            let mut killed = others.pop().expect("two were started");
            killed.wait_for_admitted(40);
            reports.push(killed.kill());
            reports.extend(others.into_iter().map(HammerProcess::finish));
        }
        reports.extend(processes.drain(..).map(HammerProcess::finish));
        let admitted: Vec<_> = reports.into_iter().flat_map(|report| report.admitted).collect();
        assert_calls_within(&limit, "the times of the charges", &decisions(&admitted));
        let calls: Vec<_> = admitted.iter().map(|call| call.call).collect();
        let violation = match algorithm {
            Algorithm::FixedWindow => window_violation(&calls, 2 * AMOUNT + LEASE, WINDOW),
            Algorithm::SlidingLog => window_violation(&calls, AMOUNT + LEASE, WINDOW),
            Algorithm::SlidingCounter => window_violation(&calls, 2 * AMOUNT - 1 + LEASE, WINDOW),
            Algorithm::TokenBucket => bucket_violation(&calls, AMOUNT + LEASE, AMOUNT, WINDOW),
            Algorithm::Concurrency => unreachable!("it has no lease"),
        };
        if let Some(violation) = violation {
            panic!("{algorithm}: {violation}");
        }
        let is_leased = |call: &&AdmittedCall| call.at < call.call.sent;
        assert!(admitted.iter().filter(is_leased).count() > 50, "{algorithm}: hardly any call was leased");
    }
}

#[test]
fn the_usage_of_each_of_two_tiers_equals_what_was_admitted() {
    const AMOUNT: u64 = 300;
    let users_algorithms = Algorithm::WINDOWED.into_iter().cycle().skip(1);
    for (algorithm, users_algorithm) in Algorithm::WINDOWED.into_iter().zip(users_algorithms) {
        // Four users could take 400: both tiers deny, and the shared tier decides the total.
        for (costs, least) in [(vec![1], AMOUNT), (vec![2, 3], AMOUNT - 2)] {
            let server = Server::start(Flavor::Redis7);
            let plan = hammer(&server, once(algorithm, AMOUNT), Workload::Calls(250));
            let per_user = once(users_algorithm, 100);
            let users = ["ann", "bob", "cy", "dee"];
            let hammers = users.map(|user| Hammer {
                user: Some((user.to_owned(), per_user)),
                costs: costs.clone(),
                ..plan.clone()
            });
            let reports = hammer::run(PROGRAM, &hammers);

            let together: u64 = reports.iter().map(|report| cost_of(&report.admitted)).sum();
            assert!((least..=AMOUNT).contains(&together), "{together} admitted by {algorithm}");
            for (hammer, report) in hammers.iter().zip(&reports) {
                let alone = cost_of(&report.admitted);
                assert!(alone <= per_user.capacity(), "{alone} admitted by {users_algorithm}");
                assert_eq!(used(hammer, "hot"), [together, alone], "{algorithm}, {users_algorithm}");
            }
        }
    }
}

#[test]
fn a_process_killed_at_any_time_leaves_expiring_keys_and_calls_charged_once() {
    const ROUNDS: usize = 12;
    const MANY: u64 = 200_000;
    let server = Server::start(Flavor::Redis7);
    for (round, algorithm) in (0..ROUNDS).zip(Algorithm::WINDOWED.into_iter().cycle()) {
        let key = format!("round-{round}");
        let limit = once(algorithm, MANY);
        let hammer = Hammer { keys: vec![key.clone()], ..hammer(&server, limit, Workload::Calls(MANY)) };
        let moments = [0, rand::random_range(1..100), rand::random_range(1..500)];
        let processes = hammer::start(PROGRAM, &vec![hammer.clone(); moments.len()]);
        let wait_and_kill = |(mut process, admitted): (HammerProcess, usize)| {
            process.wait_for_admitted(admitted);
            process.kill()
        };
        let reports: Vec<HammerReport> = processes.into_iter().zip(moments).map(wait_and_kill).collect();
        settle(&server);

        // All calls are reported except those in flight: at most one per caller, charged or not.
        let reported: u64 = reports.iter().map(|report| cost_of(&report.admitted)).sum();
        let in_flight = u64::try_from(moments.len() * CALLERS).unwrap();
        let [used] = used(&hammer, &key)[..] else { panic!("there is one tier") };
        assert!(reports.iter().all(|report| report.calls.is_none()), "a hammer ended before it was killed");
        assert!(
            (reported..=reported + in_flight).contains(&used),
            "{algorithm}: {used} used, {reported} reported and up to {in_flight} in flight; killed after {moments:?}"
        );
        assert_every_key_expires_in_time(&server, 2 * limit.window() + TTL_SLACK);
    }
}

/// Waits until the server has executed all requests of the killed processes and closed their connections.
fn settle(server: &Server) {
    let mut connection = server.connection();
    for _ in 0..100_000 {
        let clients: String =
            redis::cmd("CLIENT").arg("LIST").query(&mut connection).expect("the server answers");
        if clients.lines().count() == 1 {
            return;
        }
    }
    panic!("{server} still has connections of killed clients");
}

pub(crate) fn assert_every_key_expires_in_time(server: &Server, longest: Duration) {
    let mut connection = server.connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("the server answers");
    for key in keys {
        let millis: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("the server answers");
        let ttl = u64::try_from(millis).map(Duration::from_millis);
        assert!(ttl.is_ok_and(|ttl| ttl <= longest), "{key} has a TTL of {millis} ms");
    }
}
