//! Holds that the server made are ended by the programs, and the other way round.

use serde_json::{Value, json};

use super::{ALGORITHMS, AMOUNT, ComparableDecision, Deployment, VALUES, WINDOW_MS};

/// Long enough that no hold expires during a test.
const TTL_MS: u64 = 600_000;

/// A request in the forms of the server and of the programs.
struct Subject {
    /// Labels, or a key and a limit.
    request: Value,
    tiers: Vec<Value>,
}

impl Subject {
    /// All algorithms, by a key and by a rule, and all rules together.
    fn all() -> Vec<Self> {
        let algorithms = || ALGORITHMS.into_iter().chain(["concurrency"]);
        let key = VALUES[0];
        let keys = algorithms().map(|algorithm| {
            let window = format!("{WINDOW_MS}ms");
            let limit = match algorithm {
                "concurrency" => json!({"algorithm": algorithm, "amount": AMOUNT}),
                _ => json!({"algorithm": algorithm, "amount": AMOUNT, "window": window}),
            };
            Self { request: json!({"key": key, "limit": limit}), tiers: vec![tier(algorithm, None)] }
        });
        let rules = algorithms().map(|algorithm| Self {
            request: json!({"labels": {"about": algorithm, "user": key}}),
            tiers: vec![tier(algorithm, Some(format!("{algorithm} of user")))],
        });
        let everything = Self {
            request: json!({"labels": {"about": "everything", "user": key}}),
            tiers: algorithms()
                .map(|algorithm| tier(algorithm, Some(format!("{algorithm} of user"))))
                .collect(),
        };
        keys.chain(rules).chain([everything]).collect()
    }
}

/// A tier of a program.
fn tier(algorithm: &str, rule: Option<String>) -> Value {
    match algorithm {
        "concurrency" => {
            json!({"rule": rule, "values": [VALUES[0]], "algorithm": algorithm, "amount": AMOUNT})
        }
        _ => {
            json!({"rule": rule, "values": [VALUES[0]], "algorithm": algorithm, "amount": AMOUNT, "window_ms": WINDOW_MS})
        }
    }
}

/// Calls the server and a program for one subject.
struct Caller<'a> {
    deployment: &'a mut Deployment,
    subject: &'a Subject,
}

impl Caller<'_> {
    fn server(&self, operation: &str, fields: &Value) -> Value {
        let mut request = self.subject.request.clone();
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        self.deployment.post(operation, &request)
    }

    /// The `cost` of the fields is that of each tier.
    fn program(&mut self, operation: &str, fields: &Value) -> Value {
        let mut fields = fields.as_object().unwrap().clone();
        let mut tiers = self.subject.tiers.clone();
        if let Some(cost) = fields.remove("cost") {
            tiers.iter_mut().for_each(|tier| tier["cost"] = cost.clone());
        }
        fields.extend([("operation".to_owned(), json!(operation)), ("tiers".to_owned(), json!(tiers))]);
        self.deployment.program.send(&Value::Object(fields))
    }

    /// Asserts that the server made a hold, or repeated it, as the program did.
    fn assert_same_hold(&self, server: &Value, program: &Value) {
        let context = format!("{:?}\n{server}\n{program}", self.subject.request);
        ComparableDecision::new(server, "_ms", 1000)
            .assert_same(&ComparableDecision::new(program, "_us", 1), &context);
        for field in ["id", "expires_at_us"] {
            assert_eq!(server[field].as_str(), program[field].as_str(), "{context}");
            assert_eq!(server[field].as_u64(), program[field].as_u64(), "{context}");
        }
    }

    fn assert_same_settlement(&self, server: &Value, program: &Value, charged: Option<u64>) {
        let context = format!("{:?}\n{server}\n{program}", self.subject.request);
        let tiers = |settlement: &Value| -> Vec<_> {
            let of = |tier: &Value| {
                let text = |field: &str| tier[field].as_str().map(str::to_owned);
                (text("rule"), tier["charged"].as_u64(), tier["expires_at_us"].as_u64())
            };
            settlement["tiers"].as_array().unwrap_or_else(|| panic!("{context}")).iter().map(of).collect()
        };
        assert_eq!(tiers(server), tiers(program), "{context}");
        let is_window =
            |(rule, ..): &&(Option<String>, _, _)| !rule.iter().any(|rule| rule.contains("concurrency"));
        assert!(tiers(server).iter().filter(is_window).all(|(_, units, _)| *units == charged), "{context}");
    }
}

fn assert_outcome(settlement: &Value, outcome: &str) {
    assert_eq!(settlement["outcome"], outcome, "{settlement}");
}

/// The server and the program each end the holds of the other.
fn assert_shared_holds(example: &str, program: &str) {
    let mut deployment = Deployment::start(example, program);
    for (number, subject) in Subject::all().iter().enumerate() {
        // rules share their counters with all of them together
        let [settled_id, released_id, kept_id, denied_id] =
            ["a b", "é", "kept", "denied"].map(|id| format!("{id}{number}"));
        let mut caller = Caller { deployment: &mut deployment, subject };
        let held = json!({"id": settled_id, "ttl_ms": TTL_MS, "cost": 5});
        let (made, repeated) = (caller.server("hold", &held), caller.program("hold", &held));
        assert_eq!((&made["repeated"], &repeated["repeated"]), (&json!(false), &json!(true)), "{repeated}");
        caller.assert_same_hold(&made, &repeated);
        let settled = caller.program("settle", &json!({"id": settled_id, "cost": 2}));
        assert_outcome(&settled, "settled");
        let already = caller.server("settle", &json!({"id": settled_id, "cost": 9}));
        assert_outcome(&already, "already");
        caller.assert_same_settlement(&already, &settled, Some(2));

        let held = json!({"id": released_id, "ttl_ms": TTL_MS, "cost": 4});
        let (made, repeated) = (caller.program("hold", &held), caller.server("hold", &held));
        assert_eq!((&made["repeated"], &repeated["repeated"]), (&json!(false), &json!(true)), "{repeated}");
        caller.assert_same_hold(&repeated, &made);
        let renewed = caller.program("renew", &json!({"id": released_id, "ttl_ms": 2 * TTL_MS}));
        let unchanged = caller.server("renew", &json!({"id": released_id, "ttl_ms": TTL_MS}));
        assert_outcome(&renewed, "renewed");
        assert_outcome(&unchanged, "renewed");
        caller.assert_same_settlement(&unchanged, &renewed, Some(4));
        let released = caller.server("release", &json!({"id": released_id}));
        let already = caller.program("release", &json!({"id": released_id}));
        assert_outcome(&released, "released");
        assert_outcome(&already, "already");
        caller.assert_same_settlement(&released, &already, Some(0));

        let held = json!({"id": kept_id, "cost": 3});
        caller.server("hold", &held);
        let kept = caller.program("settle", &json!({"id": kept_id}));
        assert_outcome(&kept, "settled");
        caller.assert_same_settlement(&caller.server("release", &json!({"id": kept_id})), &kept, Some(3));

        let denied = json!({"id": denied_id, "cost": AMOUNT + 1});
        let answers = (caller.server("hold", &denied), caller.program("hold", &denied));
        caller.assert_same_hold(&answers.0, &answers.1);
        let unknown = (
            caller.server("release", &json!({"id": denied_id})),
            caller.program("release", &json!({"id": denied_id})),
        );
        assert_outcome(&unknown.0, "unknown");
        assert_outcome(&unknown.1, "unknown");
        caller.assert_same_settlement(&unknown.0, &unknown.1, None);
    }
}

#[test]
fn python_and_the_server_share_holds() {
    assert_shared_holds("sluicegate.py", "python3");
}

#[test]
fn node_and_the_server_share_holds() {
    assert_shared_holds("sluicegate.mjs", "node");
}
