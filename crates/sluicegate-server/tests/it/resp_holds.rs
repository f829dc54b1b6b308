//! Holds over the Redis protocol, bytes in and bytes out, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use sluicegate::{Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    engine::Engine,
    resp::Endpoint,
};
use sluicegate_testkit::failing_store::FailingStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

const HOUR: Duration = Duration::from_secs(3_600);
const NOW_US: u64 = 1_794_765_441_799_839;

/// More bytes than any test sends without reading.
const PIPE: usize = 1 << 20;

struct Api {
    endpoint: Endpoint,
    clock: ManualClock,
}

impl Api {
    fn new(access: Access) -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
        let limiter = Limiter::new(MemoryStore::new().with_clock(clock.clone()), budget()).unwrap();
        Self { endpoint: Endpoint::new(Engine::new(limiter), access), clock }
    }

    async fn run(&self, lines: &[&str]) -> String {
        replies(&self.endpoint, lines).await
    }
}

/// A thousand tokens per hour and two requests in flight, for each tenant.
fn budget() -> [Rule; 2] {
    let tokens = Limit::fixed_window(1_000, HOUR).unwrap();
    [
        Rule::new("tokens", tokens).per(["tenant"]).unit("tokens").max_excess(100),
        Rule::new("in-flight", Limit::concurrency(2).unwrap()).per(["tenant"]),
    ]
}

/// Returns all replies of one connection to these lines, without line breaks.
pub(crate) async fn replies(endpoint: &Endpoint, lines: &[&str]) -> String {
    let (mut io, served) = duplex(PIPE);
    let endpoint = endpoint.clone();
    let server = tokio::spawn(async move { endpoint.serve(served).await });
    let bytes: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\r\n").into_bytes()).collect();
    io.write_all(&bytes).await.unwrap();
    io.shutdown().await.unwrap();
    let mut replies = Vec::new();
    io.read_to_end(&mut replies).await.unwrap();
    server.await.unwrap();
    String::from_utf8(replies).unwrap().trim_end().replace("\r\n", " ")
}

#[tokio::test]
async fn a_hold_is_answered_like_a_check_with_its_expiry_and_settled_by_its_id() {
    let api = Api::new(Access::default());
    let hold = "SG.HOLD a 0 requests=1,tokens=500 tenant acme";
    let held = format!("*9 :1 :2 :1 :-1 :60000 $9 in-flight :0 :{NOW_US} :{}", NOW_US + 60_000_000);
    assert_eq!(api.run(&[hold]).await, held);
    assert_eq!(api.run(&[hold]).await, held, "the same hold again");
    assert_eq!(api.run(&["SG.SETTLE a tokens=120 tenant acme"]).await, "$7 settled");
    assert_eq!(api.run(&["SG.SETTLE a tokens=120 tenant acme"]).await, "$7 already");
    assert_eq!(api.run(&["SG.SETTLE b 1 tenant acme"]).await, "$7 unknown");
    let peek = api.run(&["SG.PEEK tenant acme"]).await;
    assert!(peek.starts_with("*8 :1 :2 :2"), "{peek}");
    let held = api.run(&["SG.HOLD b 1000 tokens=880 tenant acme"]).await;
    assert_eq!(held, format!("*9 :1 :1000 :0 :-1 :158201 $6 tokens :0 :{NOW_US} :{}", NOW_US + 1_000_000));
    let denied = api.run(&["SG.HOLD c 0 tokens=1 tenant acme"]).await;
    assert_eq!(denied, format!("*9 :0 :1000 :0 :158201 :158201 $6 tokens :0 :{NOW_US} :0"));
}

#[tokio::test]
async fn a_hold_is_renewed_and_released() {
    let api = Api::new(Access::default());
    api.run(&["SG.HOLD a 1000 1 tenant acme"]).await;
    assert_eq!(api.run(&["sg.renew a 2000 tenant acme"]).await, "$7 renewed");
    api.clock.advance(Duration::from_millis(1_500));
    assert_eq!(api.run(&["SG.RELEASE a tenant acme"]).await, "$8 released");
    api.run(&["SG.HOLD b 1000 1 tenant acme"]).await;
    api.clock.advance(Duration::from_millis(1_001));
    assert_eq!(api.run(&["SG.RENEW b 2000 tenant acme"]).await, "$4 late");
}

#[tokio::test]
async fn a_pipeline_of_holds_is_answered_in_order() {
    let api = Api::new(Access::default());
    let lines = [
        "SG.HOLD a 0 1 tenant acme",
        "SG.HOLD b 0 1 tenant acme",
        "SG.HOLD c 0 1 tenant acme", // denied
        "SG.RELEASE a tenant acme",
        "SG.HOLD d 0 1 tenant acme",
        "PING",
        "SG.SETTLE d 1 tenant acme",
    ];
    let piped = api.run(&lines).await;
    let single = Api::new(Access::default());
    let mut one_by_one = Vec::new();
    for line in lines {
        one_by_one.push(single.run(&[line]).await);
    }
    assert_eq!(piped, one_by_one.join(" "));
    let allowed: Vec<_> = one_by_one.iter().map(|reply| &reply[..5]).collect();
    assert_eq!(allowed, ["*9 :1", "*9 :1", "*9 :0", "$8 re", "*9 :1", "+PONG", "$7 se"]);
}

#[tokio::test]
async fn errors_name_the_fix() {
    let api = Api::new(Access::default());
    let long = format!("SG.HOLD {} 0 1 tenant acme", "i".repeat(129));
    let table = [
        (&*long, "-ERR id has 129 bytes: use at most 128, or a hash of it"),
        (
            "SG.HOLD '' 0 1 tenant acme",
            "-ERR id is empty: use one that is unique to the request, or leave it out",
        ),
        ("SG.HOLD a x 1 tenant acme", "-ERR ttl_ms 'x' is not a whole number: use milliseconds"),
        (
            "SG.HOLD a 86400001 1 tenant acme",
            "-ERR ttl 86400.001s is out of range: use 1ms to 86400s, and renew the hold for longer work",
        ),
        ("SG.HOLD a 0 1 tenant", "-ERR wrong number of arguments for 'sg.hold' command"),
        ("SG.HOLD a 0 1 tenant acme x", "-ERR a label has no value: send label value [label value ...]"),
        (
            "SG.RENEW a 0 tenant acme",
            "-ERR ttl 0ns is out of range: use 1ms to 86400s, and renew the hold for longer work",
        ),
        ("SG.RELEASE a tenant", "-ERR wrong number of arguments for 'sg.release' command"),
        (
            "SG.CHECK 1 tenant acme",
            "-ERR rule \"in-flight\" counts requests in flight: use hold, and settle or release it at the end",
        ),
    ];
    for (line, error) in table {
        assert_eq!(api.run(&[line]).await, error, "{line}");
    }
    let settled = api.run(&["SG.SETTLE a x tenant acme"]).await;
    assert!(settled.starts_with("-ERR cost 'x' is not a whole number"), "{settled}");
    api.run(&["SG.HOLD a 0 1 tenant acme"]).await;
    assert_eq!(
        api.run(&["SG.HOLD a 0 2 tenant acme"]).await,
        "-CONFLICT id \"a\" belongs to a hold with another cost, or to one that has ended: use another id"
    );
}

#[tokio::test]
async fn only_the_scope_adjust_may_charge_more_than_the_excess_of_the_rule() {
    let check = Scopes { check: true, ..Scopes::default() };
    let both = Scopes { adjust: true, ..check };
    let none = Scopes::default();
    let tokens = [("app", check), ("billing", both), ("unscoped", none)];
    let api = Api::new(Access::new(tokens.map(|(name, may)| Token::new(name, name.as_bytes(), may)).into()));
    for (user, remaining) in [("app", 400), ("billing", 100)] {
        let hold = format!("SG.HOLD {user} 0 tokens=500 tenant {user}");
        let settle = format!("SG.SETTLE {user} tokens=900 tenant {user}");
        let peek = format!("SG.PEEK tenant {user}");
        let replies = api.run(&[&*format!("AUTH {user}"), &hold, &settle, &peek]).await;
        let expected = format!(" $7 settled *8 :1 :2 :2 :-1 :0 $9 in-flight :0 :{NOW_US}");
        assert!(replies.ends_with(&expected), "{replies}");
        let check = format!("SG.HOLD rest 0 tokens=1000 tenant {user}");
        let denied = api.run(&["AUTH app", &check]).await;
        assert!(denied.starts_with(&format!("+OK *9 :0 :1000 :{remaining} ")), "{denied}");
    }
    for line in ["SG.HOLD a 0 1 t x", "SG.SETTLE a 1 t x", "SG.RELEASE a t x", "SG.RENEW a 5 t x"] {
        let rejected = api.run(&["AUTH unscoped", line]).await;
        assert!(rejected.starts_with("+OK -NOPERM"), "{line}: {rejected}");
    }
}

#[tokio::test]
async fn while_the_store_is_down_a_settlement_is_queued_and_a_renewal_is_unavailable() {
    let limiter = Limiter::new(FailingStore::not_run(), budget()).unwrap();
    let endpoint = Endpoint::new(Engine::new(limiter), Access::default());
    let lines = ["SG.HOLD a 0 1 tenant acme", "SG.RELEASE a tenant acme", "SG.RENEW a 5 tenant acme"];
    let replies = replies(&endpoint, &lines).await;
    assert!(replies.starts_with("*9 :1 :-1 :-1 :-1 :-1 $-1 :1 :-1 :0 $6 queued -UNAVAILABLE "), "{replies}");
}
