//! Holds while replies are lost and while the store is down: each is charged and settled once.

use std::time::Duration;

use sluicegate::{
    Cost, Costs, Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source,
    limiter::{HoldDecision, HoldToken, SettleOutcome},
    store::{HoldId, Key, LiveHolds, RemoteStore},
};
use sluicegate_testkit::{
    proxy::{AfterDrop, DropReplies, Mode, Occurrence, Proxy, RequestFilter},
    server::{Flavor, Server},
    wait,
};

const HOUR: Duration = Duration::from_secs(3_600);
/// The deadline of tests in which every call is answered.
const LONG: Duration = Duration::from_secs(5);
/// The deadline of tests in which calls are not answered: long enough for a busy machine, and short enough to wait for.
const SHORT: Duration = Duration::from_secs(2);

fn window() -> Limit {
    Limit::fixed_window(1_000, 24 * HOUR).unwrap()
}

fn in_flight() -> Limit {
    Limit::concurrency(3).unwrap()
}

/// A limiter whose store is behind a proxy, with a token rule and a concurrency rule.
struct Subject {
    server: Server,
    proxy: Proxy,
    limiter: Limiter,
    /// The store without the proxy.
    direct: RedisStore,
    rules: [Rule; 2],
}

impl Subject {
    async fn start(policy: OnStoreFailure, deadline: Duration) -> Self {
        let server = Server::start(Flavor::Redis7);
        let proxy = Proxy::start(server.addr());
        let rules = [
            Rule::new("tokens", window()).per(["user"]).unit("tokens").on_store_failure(policy),
            Rule::new("in-flight", in_flight()).per(["user"]).on_store_failure(policy),
        ];
        let options = Options::default().deadline(deadline);
        let store = RedisStore::connect(&proxy.url()).await.unwrap();
        let builder = Limiter::builder().store(store).rules(rules.clone()).options(options);
        let limiter = builder.build().unwrap();
        let direct = RedisStore::connect(&server.url()).await.unwrap();
        Self { server, proxy, limiter, direct, rules }
    }

    async fn hold(&self, id: &str) -> HoldDecision {
        let request = self.limiter.hold(&USER, tokens(100)).id(HoldId::new(id).unwrap());
        request.decide().await.unwrap()
    }

    async fn settle(&self, token: &HoldToken, used: u64) -> SettleOutcome {
        self.limiter.settle(token, tokens(used)).await.unwrap().outcome
    }

    /// Returns the used tokens, and the live holds of both counters.
    async fn usage(&self) -> (u64, [LiveHolds; 2]) {
        let counters = [("tokens", window()), ("in-flight", in_flight())].map(|(rule, limit)| {
            (Key::of_rule(&sluicegate::store::encoded_rule(rule), &[Some(b"a")], None), limit)
        });
        let seen = self.direct.inspect(&counters).await.unwrap();
        let [tokens, in_flight] = [0, 1].map(|counter: usize| seen[counter].clone().unwrap());
        let sluicegate::store::Snapshot::FixedWindow(span) = tokens.snapshot else { panic!("{tokens:?}") };
        (span.units, [tokens.holds, in_flight.holds])
    }

    async fn live(&self) -> [u64; 2] {
        self.usage().await.1.map(|live| live.count)
    }

    fn drop_all_replies(&self) {
        self.proxy.set(Mode::DropReplies(DropReplies {
            requests: RequestFilter::SCRIPTS,
            occurrence: Occurrence::Every(1),
            after: AfterDrop::Close,
        }));
    }

    async fn wait_for_store(&self) {
        wait::until_async("the store decides", wait::PATIENCE, async || {
            self.limiter.peek(&USER, 0).await.unwrap().source == Source::Store
        })
        .await;
    }
}

static USER: std::sync::LazyLock<Labels> = std::sync::LazyLock::new(|| Labels::new([("user", "a")]).unwrap());

fn tokens(units: u64) -> Costs {
    Costs::new([("requests", Cost::ONE), ("tokens", Cost::new(units).unwrap())]).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_leads_to_one_charge_and_one_settlement() {
    let subject = Subject::start(OnStoreFailure::Closed, LONG).await;
    subject.wait_for_store().await;
    for round in 1..=5 {
        subject.proxy.drop_next_reply(RequestFilter::SCRIPTS);
        let held = subject.hold(&format!("id-{round}")).await;
        assert_eq!((held.decision.is_allowed(), held.decision.source), (true, Source::Store), "{held:?}");
        assert!(held.is_repeated, "the first reply was lost");
        let used = 30 * (round - 1);
        assert_eq!((subject.usage().await.0, subject.live().await), (used + 100, [1, 1]));

        subject.proxy.drop_next_reply(RequestFilter::SCRIPTS);
        let outcome = subject.settle(&held.token.clone().unwrap(), 30).await;
        assert_eq!(outcome, SettleOutcome::Already, "the settlement whose reply was lost");
        assert_eq!((subject.usage().await.0, subject.live().await), (used + 30, [0, 0]));
        assert_eq!(subject.settle(&held.token.unwrap(), 70).await, SettleOutcome::Already);
        assert_eq!(subject.usage().await.0, used + 30);
    }
    assert_eq!(subject.limiter.stats().holds.waiting, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reply_leads_to_one_charge_and_one_settlement() {
    let subject = Subject::start(OnStoreFailure::Closed, Duration::from_millis(1_500)).await;
    subject.wait_for_store().await;
    // a reply takes more than half of the deadline: the operation is sent again before it is answered
    subject.proxy.delay(Duration::from_millis(450));
    let held = subject.hold("slow").await;
    assert_eq!((held.decision.is_allowed(), held.decision.source), (true, Source::Store), "{held:?}");
    let outcome = subject.settle(&held.token.clone().unwrap(), 30).await;
    assert!(matches!(outcome, SettleOutcome::Settled | SettleOutcome::Already), "{outcome:?}");
    subject.proxy.pass();
    assert_eq!((subject.usage().await.0, subject.live().await), (30, [0, 0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settlement_during_an_outage_is_queued_and_done_after_it() {
    let subject = Subject::start(OnStoreFailure::Closed, SHORT).await;
    subject.wait_for_store().await;
    let (one, other) = (subject.hold("one").await.token.unwrap(), subject.hold("other").await.token.unwrap());
    subject.server.suspend();
    assert_eq!(subject.settle(&one, 30).await, SettleOutcome::Queued);
    assert_eq!(subject.limiter.release(&other).await.unwrap().outcome, SettleOutcome::Queued);
    assert!(subject.limiter.renew(&one, HOUR).await.is_err(), "a renewal is not repeated");
    let stats = subject.limiter.stats().holds;
    assert_eq!((stats.queued, stats.waiting), (2, 2));
    subject.server.resume();
    wait::until_async("the settlements are done", wait::PATIENCE, async || {
        subject.limiter.stats().holds.waiting == 0
    })
    .await;
    wait::until_async("the counters have them", wait::PATIENCE, async || {
        (subject.usage().await.0, subject.live().await) == (30, [0, 0])
    })
    .await;
    wait::until_async("the hold has been settled before", wait::PATIENCE, async || {
        subject.settle(&one, 70).await == SettleOutcome::Already
    })
    .await;
    assert_eq!(subject.usage().await.0, 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_the_policy_local_makes_is_settled_in_this_process() {
    let subject = Subject::start(OnStoreFailure::Local, SHORT).await;
    subject.wait_for_store().await;
    subject.server.suspend();
    let mut held = Vec::new();
    for number in 0..3 {
        let made = subject.hold(&format!("local-{number}")).await;
        assert_eq!((made.decision.is_allowed(), made.decision.source), (true, Source::Fallback), "{made:?}");
        held.push(made.token.unwrap());
    }
    let denied = subject.hold("denied").await;
    assert_eq!((denied.decision.is_allowed(), denied.decision.rule()), (false, Some("in-flight")));
    let repeated = subject.hold("local-0").await;
    assert!(repeated.decision.is_allowed() && repeated.is_repeated);
    assert_eq!(subject.settle(&held[0], 30).await, SettleOutcome::Settled);
    assert_eq!(subject.settle(&held[0], 30).await, SettleOutcome::Already);
    assert!(subject.hold("next").await.decision.is_allowed(), "its slot is free");
    assert!(!subject.hold("beyond").await.decision.is_allowed());
    subject.server.resume();
    subject.wait_for_store().await;
    // made here, settled after the outage
    assert_eq!(subject.settle(&held[1], 30).await, SettleOutcome::Settled);
    wait::until_async("nothing is queued", wait::PATIENCE, async || {
        subject.limiter.stats().holds.waiting == 0
    })
    .await;
    // the store may have made a hold whose call was in flight when it resumed: the settlement applies to it as well
    wait::until_async("no settled hold is live", wait::PATIENCE, async || {
        subject.live().await.iter().all(|count| *count <= 2)
    })
    .await;
    let used = subject.usage().await.0;
    let unsettled = 100 * subject.live().await[0];
    assert!([0, 30, 60].contains(&(used - unsettled)), "{used} tokens are used");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_whose_replies_are_all_lost_is_released_if_the_policy_denies_it_and_its_id_is_random() {
    let subject = Subject::start(OnStoreFailure::Closed, SHORT).await;
    subject.wait_for_store().await;
    subject.drop_all_replies();
    let held = subject.limiter.hold(&USER, tokens(100)).decide().await.unwrap();
    assert_eq!((held.decision.is_allowed(), held.decision.source), (false, Source::Closed));
    assert_eq!(held.token, None);
    assert_eq!(subject.live().await, [1, 1], "the store made the hold");
    subject.proxy.pass();
    wait::until_async("the hold is released", wait::PATIENCE, async || {
        (subject.usage().await.0, subject.live().await) == (0, [0, 0])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_whose_replies_are_all_lost_can_be_repeated_with_the_id_of_the_caller() {
    let subject = Subject::start(OnStoreFailure::Closed, SHORT).await;
    subject.wait_for_store().await;
    subject.drop_all_replies();
    let held = subject.hold("lost").await;
    assert_eq!((held.decision.is_allowed(), held.decision.source), (false, Source::Closed));
    assert_eq!(held.token, None);
    subject.proxy.pass();
    let mut repeated = held;
    wait::until_async("the store decides", wait::PATIENCE, async || {
        repeated = subject.hold("lost").await;
        repeated.decision.source == Source::Store
    })
    .await;
    assert!(repeated.decision.is_allowed() && repeated.is_repeated, "{repeated:?}");
    assert_eq!((subject.usage().await.0, subject.live().await), (100, [1, 1]));
    subject.settle(&repeated.token.unwrap(), 30).await;
    wait::until_async("the hold is settled", wait::PATIENCE, async || {
        (subject.usage().await.0, subject.live().await) == (30, [0, 0])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_whose_replies_are_all_lost_can_be_settled_if_the_policy_allows_it() {
    for policy in [OnStoreFailure::Open, OnStoreFailure::Local] {
        let subject = Subject::start(policy, SHORT).await;
        subject.wait_for_store().await;
        subject.drop_all_replies();
        let held = subject.hold("lost").await;
        assert!(held.decision.is_allowed() && held.decision.is_degraded());
        subject.proxy.pass();
        wait::until_async("the store has the hold", wait::PATIENCE, async || subject.live().await == [1, 1])
            .await;
        subject.settle(&held.token.unwrap(), 30).await;
        wait::until_async("the hold is settled", wait::PATIENCE, async || {
            (subject.usage().await.0, subject.live().await) == (30, [0, 0])
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_settles_with_the_text_of_the_token() {
    let subject = Subject::start(OnStoreFailure::Closed, LONG).await;
    subject.wait_for_store().await;
    let text = subject.hold("id").await.token.unwrap().to_string();
    let other = Limiter::new(subject.direct.clone(), subject.rules.clone()).unwrap();
    let settlement = other.settle(&text.parse().unwrap(), tokens(40)).await.unwrap();
    assert_eq!(settlement.outcome, SettleOutcome::Settled);
    assert_eq!((subject.usage().await.0, subject.live().await), (40, [0, 0]));
}
