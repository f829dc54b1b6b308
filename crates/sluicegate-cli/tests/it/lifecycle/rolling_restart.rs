//! Rolling restarts of two instances with one Redis, as seen by clients that use ready instances only.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use redis::{Value, cmd};
use sluicegate_server::grpc::messages::{
    Code, RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::{
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    http_client::Client,
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

/// The number of restarts of each instance.
const ROUNDS: usize = 2;
const NO_LABELS: &str = r#"{"labels":{}}"#;

#[derive(Clone)]
struct Addresses {
    http: String,
    grpc: String,
    resp: String,
}

/// A load balancer that selects ready instances.
#[derive(Default)]
struct Balancer {
    instances: Mutex<Vec<Addresses>>,
    ready: Mutex<Vec<Addresses>>,
    turn: AtomicU64,
}

impl Balancer {
    /// Polls the readiness of every instance.
    fn poll(&self) {
        let instances = self.instances.lock().unwrap().clone();
        *self.ready.lock().unwrap() = instances.into_iter().filter(|at| is_ready(&at.http)).collect();
    }

    fn pick(&self) -> Addresses {
        let ready = self.ready.lock().unwrap();
        let turn = usize::try_from(self.turn.fetch_add(1, Ordering::Relaxed)).unwrap();
        ready[turn % ready.len()].clone()
    }

    fn selects(&self, http: &str) -> bool {
        self.ready.lock().unwrap().iter().any(|at| at.http == http)
    }
}

fn is_ready(http: &str) -> bool {
    let response = Client::connect(http).and_then(|mut client| client.get("/readyz"));
    response.is_ok_and(|response| response.status == 200)
}

fn start(home: &ConfigDir, balancer: &Balancer) -> ServerProcess {
    let program = home.start();
    wait::until("it is ready", PATIENCE, || is_ready(&program.http));
    assert_eq!(
        program.metric("sluicegate_store_connections_total"),
        "1",
        "the store is connected before the first request"
    );
    let ServerProcess { http, grpc, resp, .. } = &program;
    let addresses = Addresses { http: http.clone(), grpc: grpc.clone(), resp: resp.clone() };
    balancer.instances.lock().unwrap().push(addresses);
    wait::until("the balancer selects it", PATIENCE, || balancer.selects(&program.http));
    program
}

/// The load of all clients.
struct Load {
    balancer: Balancer,
    checks: AtomicU64,
    is_over: AtomicBool,
}

impl Load {
    fn continues_at(&self, http: &str) -> bool {
        !self.is_over() && self.balancer.selects(http)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn record(&self) {
        self.checks.fetch_add(1, Ordering::Relaxed);
    }

    /// Keeps its connection until the server closes it or the balancer no longer selects the instance.
    fn by_http(&self) {
        let Addresses { http, .. } = self.balancer.pick();
        let mut client = Client::connect(&http).unwrap();
        while self.continues_at(&http) {
            let response = client.post("/v1/check", NO_LABELS).unwrap();
            assert_eq!(response.status, 200, "{}", response.body);
            let decision = response.json();
            assert_eq!(
                (&decision["allowed"], &decision["degraded"]),
                (&true.into(), &false.into()),
                "{decision}"
            );
            self.record();
            if response.closes_connection() {
                return;
            }
        }
    }

    fn by_redis_protocol(&self) {
        let Addresses { http, resp, .. } = self.balancer.pick();
        let client = redis::Client::open(format!("redis://{resp}")).unwrap();
        let mut connection = client.get_connection_with_timeout(PATIENCE).unwrap();
        while self.continues_at(&http) {
            let response: Vec<Value> = cmd("SG.CHECK").arg(&["1", "a", "b"]).query(&mut connection).unwrap();
            let (allowed, degraded) = (&response[0], &response[6]);
            assert_eq!((allowed, degraded), (&Value::Int(1), &Value::Int(0)), "{response:?}");
            self.record();
        }
    }

    fn by_grpc(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let Addresses { http, grpc, .. } = self.balancer.pick();
        runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://{grpc}")).unwrap();
            let mut client = RateLimitServiceClient::new(endpoint.connect().await.unwrap());
            while self.continues_at(&http) {
                let entry = Entry { key: "a".to_owned(), value: b"b".to_vec() };
                let descriptor =
                    RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
                let request = RateLimitRequest {
                    domain: "d".to_owned(),
                    descriptors: vec![descriptor],
                    hits_addend: 0,
                };
                let response = client.should_rate_limit(request).await.unwrap().into_inner();
                assert_eq!(response.overall_code(), Code::Ok, "{response:?}");
                self.record();
            }
        });
    }
}

/// Stops the load on drop, also when the test fails.
struct StopOnDrop<'a>(&'a Load);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_rolling_restart_degrades_no_call_and_counts_each_once() {
    let redis = Server::start(Flavor::Redis7);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n\
         [[rule]]\nname = \"all\"\nper = []\nalgorithm = \"fixed-window\"\namount = 1000000\nwindow = \"3650d\"\n",
        redis.url()
    ));
    let load =
        Load { balancer: Balancer::default(), checks: AtomicU64::new(0), is_over: AtomicBool::new(false) };
    // the last instances outlive their clients
    let mut instances = Vec::new();
    thread::scope(|scope| {
        let _stop = StopOnDrop(&load);
        scope.spawn(|| {
            while !load.is_over() {
                load.balancer.poll();
                thread::yield_now();
            }
        });
        instances.extend([start(&home, &load.balancer), start(&home, &load.balancer)]);
        for client in [Load::by_http, Load::by_http, Load::by_redis_protocol, Load::by_grpc] {
            let load = &load;
            scope.spawn(move || {
                let _stop = StopOnDrop(load);
                while !load.is_over() {
                    client(load);
                }
            });
        }
        for _ in 0..ROUNDS {
            for instance in &mut instances {
                let before = load.checks.load(Ordering::Relaxed);
                instance.signal("-TERM");
                assert_eq!(instance.wait_for_exit().code(), Some(0));
                *instance = start(&home, &load.balancer);
                assert!(load.checks.load(Ordering::Relaxed) > before, "no checks during the restart");
            }
        }
    });
    drop(instances);
    let program = home.start();
    wait::until("it is ready", PATIENCE, || is_ready(&program.http));
    let response = program.client().post("/v1/peek", NO_LABELS).unwrap().json();
    assert_eq!(response["remaining"].as_u64(), Some(1_000_000 - load.checks.into_inner()), "{response}");
}

#[tokio::test]
async fn a_draining_server_reports_it_on_every_front_end_and_still_responds() {
    let home = ConfigDir::new(ANY_PORTS);
    let mut program = home.start();
    let endpoint = Endpoint::from_shared(format!("http://{}", program.grpc)).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let status = async |health: &mut HealthClient<_>| {
        health.check(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner().status()
    };
    assert_eq!(status(&mut health).await, ServingStatus::Serving);
    let mut client = program.client();
    assert!(!client.get("/readyz").unwrap().closes_connection());
    program.signal("-TERM");
    let draining = wait::for_some("it drains", PATIENCE, || {
        let response = client.get("/readyz").unwrap();
        (response.status == 503).then_some(response)
    });
    assert_eq!(draining.body, r#"{"ready":false,"store":"ok","rules":"ok"}"#);
    assert!(draining.closes_connection());
    assert_eq!(program.client().post("/v1/check", NO_LABELS).unwrap().status, 200);
    assert_eq!(status(&mut health).await, ServingStatus::NotServing);
    drop(health);
    assert_eq!(program.wait_for_exit().code(), Some(0));
    assert!(program.output().contains("stopped"));
}
