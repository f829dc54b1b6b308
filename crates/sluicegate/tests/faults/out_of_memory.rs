//! A Redis that runs out of memory during a call: all tiers are charged, or none.

use sluicegate::{
    Algorithm, Cost, Limit, RedisStore, StoreError,
    limiter::Operation,
    store::{Check, Key, Terms, Tier},
};
use sluicegate_testkit::{
    server::{Flavor, Server},
    store_fixture::DecideAll,
};
use tokio::task::block_in_place;

use crate::scenario::{HOUR, run_exclusively};

/// Number of tiers of a call: a few hundred bytes of memory each.
const TIERS: usize = 8;
const AMOUNT: u64 = 10;

/// Returns a check of new counters of all algorithms.
fn check(operation: Operation, round: usize) -> Check {
    let algorithms = Algorithm::WINDOWED.into_iter().cycle().take(TIERS).enumerate();
    let tiers = algorithms.map(|(place, algorithm)| {
        let key = Key::without_rule(format!("{round}-{place}-{}", "x".repeat(100))).unwrap();
        Tier { key, terms: Terms::new(Limit::new(algorithm, AMOUNT, HOUR).unwrap(), Cost::ONE) }
    });
    Check::new(operation, tiers.collect()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn running_out_of_memory_during_a_call_charges_all_tiers_or_none() {
    let _exclusive = run_exclusively().await;
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let mut admin = server.connection();
        let (mut passed, mut rejected, mut crossed) = (0, 0, 0);
        for round in 0..300 {
            let spare = (round % 100) as u64 * 64;
            let most = memory(&mut admin) + spare;
            set_max_memory(&mut admin, most);
            let outcome = store.decide_all(&[check(Operation::Check, round)], None).await;
            let is_beyond = memory(&mut admin) > most;
            set_max_memory(&mut admin, 0);
            let charged = match outcome {
                Ok(_) => {
                    passed += 1;
                    crossed += u32::from(is_beyond);
                    1
                }
                Err(StoreError::Rejected { code, .. }) => {
                    assert_eq!(code, "OOM", "{flavor}");
                    rejected += 1;
                    0
                }
                Err(other) => panic!("{flavor}: {other}"),
            };
            let peeked = store.decide_all(&[check(Operation::Peek, round)], None).await.unwrap();
            for answer in &peeked[0].answers {
                let used = i64::try_from(AMOUNT).unwrap() - answer.available;
                assert_eq!(used, charged, "{flavor}, round {round}");
            }
        }
        let context = format!("{flavor}: {passed} passed, {rejected} did not, {crossed} beyond the limit");
        assert!(passed > 10 && rejected > 10 && crossed > 3, "{context}");
    }
}

fn memory(admin: &mut redis::Connection) -> u64 {
    block_in_place(|| {
        let info: String = redis::cmd("INFO").arg("memory").query(admin).unwrap();
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        used.parse().unwrap()
    })
}

fn set_max_memory(admin: &mut redis::Connection, bytes: u64) {
    block_in_place(|| redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).exec(admin).unwrap());
}
