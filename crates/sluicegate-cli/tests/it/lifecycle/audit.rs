//! Clients that disconnect during a call that writes an audit line.

use std::{io::Write, net::TcpStream, time::Duration};

use sluicegate_server::grpc::messages::{
    RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};
use tonic::transport::Endpoint;

use crate::server_process::{ANY_PORTS, ConfigDir, ServerProcess};

/// The delay of each direction to Redis: clients disconnect long before the reply.
const ONE_WAY: Duration = Duration::from_millis(250);

struct SlowServer {
    program: ServerProcess,
    _home: ConfigDir,
    _slow: Proxy,
    _redis: Server,
}

fn start() -> SlowServer {
    let redis = Server::start(Flavor::Redis7);
    let slow = Proxy::start(redis.addr());
    slow.delay(ONE_WAY);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n\
         [[rule]]\nname = \"all\"\nper = [\"user\"]\namount = 100\nwindow = \"1h\"\n",
        slow.url()
    ));
    let program = home.start();
    let healthy = (200, r#"{"ready":true,"store":"ok","rules":"ok"}"#.to_owned());
    wait::until("the server is ready", PATIENCE, || program.get("/readyz") == healthy);
    SlowServer { program, _home: home, _slow: slow, _redis: redis }
}

/// The time in which the server receives a request, long before the reply of Redis.
#[expect(clippy::disallowed_methods, reason = "the server runs in real time")]
fn let_the_request_arrive() {
    std::thread::sleep(ONE_WAY / 2);
}

#[test]
fn a_call_that_was_not_sent_to_the_store_is_logged_as_rejected() {
    let mut redis = Server::start(Flavor::Redis7);
    redis.kill();
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\n\
         [[rule]]\nname = \"all\"\nper = [\"user\"]\namount = 100\nwindow = \"1h\"\n",
        redis.url()
    ));
    let program = home.start();
    let (mut client, body) = (program.client(), r#"{"labels":{"user":"42"}}"#);
    wait::until("the breaker is open", PATIENCE, || {
        client.post("/v1/check", body).unwrap();
        let response = client.post("/v1/reset", body).unwrap();
        assert_eq!(response.status, 503, "{}", response.body);
        response.body.contains("circuit breaker open")
    });
    for action in ["reset", "charge", "refund"] {
        client.post(&format!("/v1/{action}"), body).unwrap();
        let line = program.wait_for_line(&format!("action=\"{action}\""), "circuit breaker open");
        assert!(line.contains("result=\"rejected\"") && line.contains("nothing changed"), "{line}");
    }
}

#[test]
fn an_http_client_that_disconnects_during_a_call_leaves_an_audit_line() {
    let server = start();
    for action in ["charge", "refund", "reset"] {
        let mut stream = TcpStream::connect(&server.program.http).unwrap();
        let body = format!(r#"{{"labels":{{"user":"{action}"}}}}"#);
        let length = body.len();
        write!(
            stream,
            "POST /v1/{action} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let_the_request_arrive();
        drop(stream);
        let subject = format!("subject=\"user={action}\" result=\"done\"");
        server.program.wait_for_line(&format!("action=\"{action}\""), &subject);
    }
}

#[test]
fn a_redis_client_that_disconnects_during_a_command_leaves_an_audit_line() {
    let server = start();
    for (action, command) in [("charge", "SG.CHARGE 1"), ("refund", "SG.REFUND 1"), ("reset", "SG.RESET")] {
        let mut stream = TcpStream::connect(&server.program.resp).unwrap();
        write!(stream, "{command} user {action}\r\n").unwrap();
        let_the_request_arrive();
        drop(stream);
        let subject = format!("subject=\"user={action}\" result=\"done\"");
        server.program.wait_for_line(&format!("action=\"{action}\""), &subject);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_client_that_disconnects_during_a_refund_leaves_an_audit_line() {
    let server = start();
    let endpoint = Endpoint::from_shared(format!("http://{}", server.program.grpc)).unwrap();
    let entry = Entry { key: "user".to_owned(), value: b"a".to_vec() };
    let descriptor = RateLimitDescriptor {
        entries: vec![entry],
        is_negative_hits: true,
        ..RateLimitDescriptor::default()
    };
    let request = RateLimitRequest { domain: "d".to_owned(), descriptors: vec![descriptor], hits_addend: 0 };
    let mut client = RateLimitServiceClient::new(endpoint.connect().await.unwrap());
    let call = tokio::time::timeout(ONE_WAY / 2, client.should_rate_limit(request)).await;
    assert!(call.is_err(), "the store is slow");
    drop(client);
    server.program.wait_for_line("action=\"refund\"", "subject=\"domain \\\"d\\\"\" result=\"done\"");
}
