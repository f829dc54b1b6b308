//! Holds through the limiter: rules that change between the calls, the guard, and requests that need a hold.

use std::time::Duration;

use sluicegate::{
    Cost, Costs, Error, Labels, Limit, Limiter, Rule, Source,
    limiter::{HoldToken, OnConcurrency, Request, SettleOutcome},
    store::{HoldId, MAX_TIERS},
};

const HOUR: Duration = Duration::from_secs(3_600);

fn tokens(units: u64) -> Costs {
    Costs::new([("tokens", Cost::new(units).unwrap())]).unwrap()
}

fn budget(name: &str, amount: u64) -> Rule {
    Rule::new(name, Limit::fixed_window(amount, 1_000 * HOUR).unwrap()).unit("tokens")
}

fn in_flight(amount: u64) -> Rule {
    Rule::new("in-flight", Limit::concurrency(amount).unwrap())
}

async fn remaining(limiter: &Limiter) -> Option<u64> {
    limiter.peek(&Labels::default(), tokens(1)).await.unwrap().remaining()
}

#[tokio::test]
async fn a_changed_rule_does_not_change_the_settlement_of_a_hold() {
    let limiter = Limiter::in_memory([budget("tokens", 100)]).unwrap();
    let token = limiter.hold(&Labels::default(), tokens(60)).await.unwrap().into_token();
    limiter.reconfigure([budget("tokens", 80), budget("other", 5)]).unwrap();
    let settlement = limiter.settle(&token, tokens(10)).await.unwrap();
    assert_eq!(settlement.outcome, SettleOutcome::Settled);
    assert_eq!(settlement.tiers.len(), 1, "the new rule has no part in it");
    limiter.reconfigure([budget("tokens", 80)]).unwrap();
    assert_eq!(remaining(&limiter).await, Some(70));
}

#[tokio::test]
async fn a_repeated_hold_is_completed_or_reverted_after_a_rule_was_added() {
    let limiter = Limiter::in_memory([budget("tokens", 100)]).unwrap();
    let id = HoldId::new("request").unwrap();
    let labels = Labels::default();
    let hold = || limiter.hold(&labels, tokens(60)).id(id.clone()).decide();
    assert!(hold().await.unwrap().decision.is_allowed());
    limiter.reconfigure([budget("tokens", 100), budget("wide", 200)]).unwrap();
    let repeated = hold().await.unwrap();
    assert!(repeated.is_repeated && repeated.decision.is_allowed());
    limiter.reconfigure([budget("tokens", 100), budget("small", 1)]).unwrap();
    let denied = hold().await.unwrap();
    assert_eq!((denied.decision.is_allowed(), denied.token), (false, None));
    limiter.reconfigure([budget("tokens", 100)]).unwrap();
    assert_eq!(remaining(&limiter).await, Some(100));
}

#[tokio::test]
async fn a_guard_that_is_dropped_releases_its_hold_unless_its_token_was_taken() {
    let limiter = Limiter::in_memory([in_flight(1), budget("tokens", 100)]).unwrap();
    let labels = Labels::default();
    let hold = limiter.hold(&labels, tokens(60)).await.unwrap();
    let denied = limiter.hold(&labels, tokens(1)).await.unwrap();
    assert!(hold.is_allowed() && !denied.is_allowed());
    assert_eq!((denied.decision().decision.rule(), &denied.decision().token), (Some("in-flight"), &None));
    drop(denied);
    drop(hold);
    let hold = limiter.hold(&labels, tokens(100)).await.unwrap();
    assert!(hold.is_allowed(), "slot and tokens are free");
    let token = hold.into_token();
    assert!(!limiter.hold(&labels, tokens(0)).await.unwrap().is_allowed());
    let token: HoldToken = token.to_string().parse().unwrap();
    assert_eq!(limiter.release(&token).await.unwrap().outcome, SettleOutcome::Released);
    assert_eq!(limiter.release(&token).await.unwrap().outcome, SettleOutcome::Already);
}

#[tokio::test]
async fn a_plain_check_of_an_in_flight_rule_is_an_error_unless_it_skips_it() {
    let limiter = Limiter::in_memory([in_flight(1), budget("tokens", 100)]).unwrap();
    let labels = Labels::default();
    let error = limiter.check(&labels, tokens(1)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "rule \"in-flight\" counts requests in flight: use hold, and settle or release it at the end"
    );
    let limit = Limit::concurrency(1).unwrap();
    assert!(matches!(limiter.check_key("k", &limit, Cost::ONE).await, Err(Error::NeedsHold { rule: None })));
    assert_eq!(remaining(&limiter).await, Some(1), "a peek shows the free slot");

    let request = Request::new(&labels, tokens(7)).on_concurrency(OnConcurrency::Skip);
    let decision = limiter.start(&request).unwrap().decision().await.unwrap();
    assert_eq!((decision.rule(), decision.remaining()), (Some("tokens"), Some(93)));
    assert_eq!(limiter.stats().skipped_concurrency, 1);
    let charged = limiter.charge(&labels, tokens(3)).await.unwrap();
    assert_eq!((charged.tiers.len(), charged.remaining()), (1, Some(90)), "a charge has no part in flight");
}

#[tokio::test]
async fn a_plain_check_skips_a_shadow_concurrency_rule_unless_the_caller_can_hold() {
    let limiter = Limiter::in_memory([in_flight(1).shadow(), budget("tokens", 100)]).unwrap();
    let labels = Labels::default();
    let decision = limiter.check(&labels, tokens(7)).await.unwrap();
    assert_eq!((decision.tiers.len(), decision.remaining()), (1, Some(93)));
    assert_eq!(limiter.stats().skipped_concurrency, 1);
    let request = Request::new(&labels, tokens(7)).on_concurrency(OnConcurrency::RejectShadow);
    assert!(matches!(limiter.start(&request), Err(Error::NeedsHold { .. })));
    for allowed in 0..2 {
        let hold = limiter.hold(&labels, tokens(7)).await.unwrap();
        assert!(hold.is_allowed(), "{allowed} were allowed before");
        hold.into_token();
    }
}

#[tokio::test]
async fn a_settlement_by_labels_that_match_too_many_rules_is_an_error() {
    let rules = (0..=MAX_TIERS).map(|number| budget(&format!("tokens-{number}"), 100));
    let limiter = Limiter::in_memory(rules).unwrap();
    let request = Request::new(Labels::default(), Cost::ZERO);
    let token = limiter.hold_token(&request, HoldId::new("id").unwrap()).unwrap();
    let nothing = Costs::new::<&str>([]).unwrap();
    for costs in [nothing, tokens(1)] {
        assert!(matches!(limiter.settle(&token, costs).await, Err(Error::Check(_))));
    }
}

#[tokio::test]
async fn a_settlement_without_a_bound_charges_what_a_bounded_one_does_not() {
    let limiter = Limiter::in_memory([budget("tokens", 100).max_excess(5)]).unwrap();
    let labels = Labels::default();
    for (is_bounded, charged) in [(true, 15), (false, 40)] {
        let token = limiter.hold(&labels, tokens(10)).await.unwrap().into_token();
        let settlement = match is_bounded {
            true => limiter.settle_bounded(&token, tokens(40)).await.unwrap(),
            false => limiter.settle(&token, tokens(40)).await.unwrap(),
        };
        assert_eq!(settlement.tiers[0].charged, Some(charged));
    }
    assert_eq!(remaining(&limiter).await, Some(45));
}

#[tokio::test]
async fn a_request_that_no_rule_matches_can_be_held_and_settled() {
    let limiter = Limiter::in_memory([]).unwrap();
    let hold = limiter.hold(&Labels::default(), tokens(10)).await.unwrap();
    assert_eq!((hold.is_allowed(), hold.decision().decision.source), (true, Source::Unmatched));
    assert_eq!(hold.settle(tokens(3)).await.unwrap().outcome, SettleOutcome::Settled);
}

#[tokio::test]
async fn labels_and_id_replace_the_token() {
    let limiter = Limiter::in_memory([in_flight(2).per(["user"]), budget("tokens", 100)]).unwrap();
    let labels = Labels::new([("user", "a")]).unwrap();
    let id = HoldId::new("request 1").unwrap();
    let made = limiter.hold(&labels, tokens(10)).id(id.clone()).decide().await.unwrap();
    let token = limiter.hold_token(&Request::new(&labels, tokens(0)), id.clone()).unwrap();
    assert_eq!(Some(token.id()), made.token.as_ref().map(HoldToken::id));
    assert_eq!(limiter.settle(&token, tokens(4)).await.unwrap().outcome, SettleOutcome::Settled);
    assert_eq!(remaining(&limiter).await, Some(96));
    let repeated = limiter.settle(&made.token.unwrap(), tokens(4)).await.unwrap();
    assert_eq!(repeated.outcome, SettleOutcome::Already);
    let conflict = limiter.hold(&labels, tokens(10)).id(id.clone()).decide().await;
    assert_eq!(conflict, Err(Error::HoldConflict(id)));
}
