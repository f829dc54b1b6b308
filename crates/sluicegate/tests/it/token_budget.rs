//! A token budget under concurrent streams whose cost is known only when they have ended: the number of tokens that pass with each method.
//! `docs/budgets.md` publishes the figures.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate::{Cost, Costs, Labels, Limit, Limiter, MemoryStore, Options, RedisStore, Rule, store::Store};
use sluicegate_testkit::server::{Flavor, Server};
use tokio::sync::{Barrier, Notify};

/// The limit in tokens.
const LIMIT: u64 = 100;
/// Concurrent requests. Their streams have 5 to 9 tokens, 700 in total.
const REQUESTS: u64 = 100;
const LOW_ESTIMATE: u64 = 5;
const SUFFICIENT_ESTIMATE: u64 = 9;

fn tokens_of(request: u64) -> u64 {
    5 + request % 5
}

fn tokens(units: u64) -> Costs {
    Costs::new([("tokens", Cost::new(units).unwrap())]).unwrap()
}

fn limiter(store: impl Into<Store>, has_overdraft: Overdraft) -> Arc<Limiter> {
    let limit = Limit::fixed_window(LIMIT, Duration::from_secs(3_600 * 24 * 365)).unwrap();
    let mut rule = Rule::new("tokens", limit).unit("tokens");
    rule.overdraft = has_overdraft == Overdraft::Yes;
    let options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::ZERO);
    Arc::new(Limiter::builder().store(store).rules([rule]).options(options).build().unwrap())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Overdraft {
    Yes,
    No,
}

/// Every request is checked before the first one ends, and its tokens are charged at its end.
async fn charged_afterwards(limiter: Arc<Limiter>, estimate: u64) -> u64 {
    let all_checked = Arc::new(Barrier::new(REQUESTS as usize));
    let requests = (0..REQUESTS).map(|request| {
        let (limiter, all_checked) = (Arc::clone(&limiter), Arc::clone(&all_checked));
        tokio::spawn(async move {
            let labels = Labels::default();
            let is_allowed = limiter.check(&labels, tokens(estimate)).await.unwrap().is_allowed();
            all_checked.wait().await;
            if !is_allowed {
                return 0;
            }
            let actual = tokens_of(request);
            limiter.charge(&labels, tokens(actual - estimate)).await.unwrap();
            actual
        })
    });
    join_all(requests).await.into_iter().map(|passed| passed.unwrap()).sum()
}

/// Every request holds an estimate and is settled at its end. Denied requests try again when another one has been settled.
async fn held(limiter: Arc<Limiter>, estimate: u64) -> u64 {
    let settled = Arc::new(Notify::new());
    let all_tried = Arc::new(Barrier::new(REQUESTS as usize));
    let requests = (0..REQUESTS).map(|request| {
        let (limiter, settled) = (Arc::clone(&limiter), Arc::clone(&settled));
        let all_tried = Arc::clone(&all_tried);
        tokio::spawn(async move {
            let labels = Labels::default();
            let mut hold = limiter.hold(&labels, tokens(estimate)).await.unwrap();
            all_tried.wait().await;
            loop {
                let next = settled.notified();
                if !hold.is_allowed() {
                    hold = limiter.hold(&labels, tokens(estimate)).await.unwrap();
                }
                if hold.is_allowed() {
                    let actual = tokens_of(request);
                    hold.settle(tokens(actual)).await.unwrap();
                    settled.notify_waiters();
                    return actual;
                }
                if tokio::time::timeout(Duration::from_millis(200), next).await.is_err() {
                    return 0;
                }
            }
        })
    });
    join_all(requests).await.into_iter().map(|passed| passed.unwrap()).sum()
}

async fn assert_tokens_that_pass(store: impl Fn() -> Store) {
    let passed = charged_afterwards(limiter(store(), Overdraft::No), 0).await;
    assert_eq!(passed, 7 * REQUESTS, "a check without cost limits nothing that runs at the same time");

    let passed = charged_afterwards(limiter(store(), Overdraft::Yes), LOW_ESTIMATE).await;
    assert!((101..=180).contains(&passed), "{passed} tokens with overdraft: twenty requests start");

    let low = limiter(store(), Overdraft::No);
    let passed = held(Arc::clone(&low), LOW_ESTIMATE).await;
    let debt = debt(&low).await;
    assert_eq!(passed, LIMIT + debt, "the excess is charged, and denies later requests");
    assert!((101..=180).contains(&passed), "{passed} tokens with a low estimate");

    let passed = held(limiter(store(), Overdraft::No), SUFFICIENT_ESTIMATE).await;
    assert!(passed <= LIMIT, "{passed} tokens with a sufficient estimate");
    assert!(passed > LIMIT - SUFFICIENT_ESTIMATE, "{passed} tokens: what is refunded is used again");
}

/// Returns the usage beyond the limit.
async fn debt(limiter: &Limiter) -> u64 {
    limiter.peek(&Labels::default(), tokens(1)).await.unwrap().tiers[0].debt
}

#[tokio::test(flavor = "multi_thread")]
async fn only_sufficient_holds_keep_a_token_budget_in_memory() {
    assert_tokens_that_pass(|| MemoryStore::new().into()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_sufficient_holds_keep_a_token_budget_on_redis() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    let number = std::sync::atomic::AtomicU64::new(0);
    assert_tokens_that_pass(|| {
        let prefix = format!("t{}", number.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        RedisStore::connect_later(&url).unwrap().with_prefix(&prefix).unwrap().into()
    })
    .await;
}
