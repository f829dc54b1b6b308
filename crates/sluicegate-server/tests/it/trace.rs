//! Log lines as written, and spans as received by a collector.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use ::http::Request;
use axum::{Router, body::Body};
use serde_json::Value;
use sluicegate::{Limit, Limiter, MemoryStore, Rule, StoreError};
use sluicegate_server::{
    engine::{Engine, Transport},
    grpc, http,
    http::HttpService,
    observe::{
        logs::{Audit, AuditResult, Format, Logs, Settings, audit},
        trace::RequestSpans,
    },
};
use sluicegate_testkit::failing_store::FailingStore;
use tower::ServiceExt;
use tracing::subscriber::set_default;

use crate::{
    grpc_front::{Front, descriptor, request},
    log_lines::{Lines, logged, subscriber},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
const PARENT: &str = "00f067aa0ba902b7";

fn service() -> HttpService {
    let limit = Limit::sliding_log(1, Duration::from_secs(60)).unwrap();
    let rule = Rule::new("login-per-ip", limit).when("route", "login").per(["ip"]);
    let engine = Engine::new(Limiter::new(MemoryStore::new(), [rule]).unwrap());
    HttpService::new(engine, http::Settings::default())
}

fn login() -> Request<Body> {
    Request::post("/v1/check?secret=1")
        .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
        .body(r#"{"labels":{"route":"login","ip":"203.0.113.9"}}"#.into())
        .unwrap()
}

#[test]
fn an_audit_line_passes_every_filter_and_is_one_line() {
    let settings = Settings { format: Format::Json, filter: Some("error".to_owned()), ..Settings::default() };
    let lines = logged(&settings, || {
        tracing::info!("filtered out");
        let from = Some(CLIENT);
        audit(&Audit {
            who: "deploy",
            from,
            action: "reset",
            subject: &"a\nb\"c",
            result: AuditResult::Done,
        });
        let (subject, result) = (&"sluicegate.toml", AuditResult::Rejected(&"line 3"));
        audit(&Audit { who: "file", from: None, action: "reload", subject, result });
        let lost = Err::<(), _>(sluicegate::Error::Store(StoreError::Ambiguous("no reply".to_owned())));
        let result = AuditResult::of(&lost);
        audit(&Audit { who: "deploy", from, action: "reset", subject: &"a=b", result });
    });
    let lines = lines.json();
    assert_eq!(lines.len(), 3);
    let field = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    let fields = |line| {
        ["target", "level", "who", "from", "action", "subject", "result", "error"]
            .map(|name| field(line, name))
    };
    assert_eq!(fields(&lines[0]), ["audit", "INFO", "deploy", "127.0.0.1:1", "reset", "a\nb\"c", "done", ""]);
    assert_eq!(
        fields(&lines[1]),
        ["audit", "INFO", "file", "", "reload", "sluicegate.toml", "rejected", "line 3"]
    );
    assert_eq!(field(&lines[2], "result"), "failed", "it may have had an effect");
}

#[test]
fn in_text_format_a_value_cannot_start_a_new_line() {
    let lines = logged(&Settings::default(), || {
        tracing::debug!("filtered out");
        tracing::warn!(name = "a\nINFO forged", "something happened");
    });
    let text = lines.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains(" WARN ") && text.contains("something happened") && text.contains(r"a\nINFO"),
        "{text}"
    );
}

#[test]
fn an_invalid_filter_is_rejected_with_a_fix() {
    let settings = Settings { filter: Some("sluicegate=loud".to_owned()), ..Settings::default() };
    let error = Logs::subscriber(&settings, io::sink).err().unwrap().to_string();
    assert!(error.contains("sluicegate=loud") && error.contains("info,sluicegate=debug"), "{error}");
}

#[test]
fn log_lines_of_a_request_have_its_trace_id() {
    let settings = Settings { format: Format::Json, filter: Some("debug".to_owned()), ..Settings::default() };
    let lines = logged(&settings, || {
        let routes = Router::new()
            .route("/", axum::routing::get(|| async { tracing::warn!("within") }))
            .layer(RequestSpans(Transport::Http));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let request = |parent: &str| {
            Request::get("/").header("traceparent", parent.to_owned()).body(Body::empty()).unwrap()
        };
        runtime.block_on(async {
            for parent in [format!("00-{TRACE}-{PARENT}-01"), "00-forged".to_owned()] {
                routes.clone().oneshot(request(&parent)).await.unwrap();
            }
        });
    });
    let within: Vec<_> = lines.json().into_iter().filter(|line| line["message"] == "within").collect();
    assert_eq!(within.len(), 2);
    assert_eq!(within[0]["span"]["trace_id"], TRACE);
    assert_eq!(within[0]["span"]["url.path"], "/");
    assert_eq!(within[1]["span"]["trace_id"], Value::Null);
}

#[tokio::test]
async fn a_grpc_call_belongs_to_its_callers_trace() {
    let filter = Some("sluicegate=debug".to_owned());
    let settings = Settings { format: Format::Json, filter, ..Settings::default() };
    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, logs) = subscriber(&settings, move || writer.clone());
    let _guard = set_default(subscriber);
    let rule = Rule::new("r", Limit::sliding_log(1, Duration::from_secs(60)).unwrap());
    let limiter = Limiter::new(FailingStore::not_run(), [rule]).unwrap();
    let mut front = Front::start(limiter, grpc::Settings::default()).await;
    let mut call = tonic::Request::new(request("d", vec![descriptor([("a", "x")])]));
    call.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse().unwrap());
    front.client.should_rate_limit(call).await.unwrap();
    logs.stop();
    let lines = lines.json();
    let within = lines.iter().find(|line| line["message"] == "decided without the store").unwrap();
    assert_eq!((&within["span"]["trace_id"], &within["span"]["transport"]), (&TRACE.into(), &"grpc".into()));
}

#[tokio::test]
async fn at_the_default_level_requests_log_nothing() {
    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, logs) = subscriber(&Settings::default(), move || writer.clone());
    let _guard = set_default(subscriber);
    service().respond(CLIENT, login()).await;
    logs.stop();
    assert_eq!(lines.text(), "");
}

#[cfg(feature = "otlp")]
mod otlp {
    use std::sync::Arc;

    use opentelemetry_proto::tonic::{
        collector::trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
        common::v1::{KeyValue, any_value},
        trace::v1::Span,
    };
    use parking_lot::Mutex;
    use sluicegate_server::{auth::Access, observe::otlp::Collector, resp::Endpoint};
    use tokio::{io::AsyncWriteExt, net::TcpListener};
    use tonic::{Response, Status, transport::server::TcpIncoming};

    use super::*;

    /// A collector that keeps the received spans.
    #[derive(Clone, Default)]
    struct Received(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

    #[tonic::async_trait]
    impl TraceService for Received {
        async fn export(
            &self,
            request: tonic::Request<ExportTraceServiceRequest>,
        ) -> Result<Response<ExportTraceServiceResponse>, Status> {
            self.0.lock().push(request.into_inner());
            Ok(Response::new(ExportTraceServiceResponse::default()))
        }
    }

    impl Received {
        /// Starts a collector on a free port.
        async fn listen() -> (Self, String) {
            let received = Self::default();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let endpoint = format!("http://{}", listener.local_addr().unwrap());
            let service = TraceServiceServer::new(received.clone());
            let server = tonic::transport::Server::builder().add_service(service);
            tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
            (received, endpoint)
        }

        fn spans(&self) -> Vec<Span> {
            let requests = self.0.lock();
            let scopes =
                requests.iter().flat_map(|request| &request.resource_spans).flat_map(|of| &of.scope_spans);
            scopes.flat_map(|scope| scope.spans.clone()).collect()
        }
    }

    fn text(attributes: &[KeyValue], name: &str) -> Option<String> {
        let attribute = attributes.iter().find(|attribute| attribute.key == name)?;
        Some(match attribute.value.as_ref()?.value.as_ref()? {
            any_value::Value::StringValue(text) => text.clone(),
            any_value::Value::IntValue(number) => number.to_string(),
            other => panic!("{name} is {other:?}"),
        })
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    async fn exported(share: f64, requests: Vec<Request<Body>>) -> (Received, Vec<Span>) {
        let (received, endpoint) = Received::listen().await;
        let otlp = Some(Collector { endpoint, share });
        let (subscriber, logs) = subscriber(&Settings { otlp, ..Settings::default() }, io::sink);
        {
            let _guard = set_default(subscriber);
            let service = service();
            for request in requests {
                service.respond(CLIENT, request).await;
            }
        }
        tokio::task::spawn_blocking(|| logs.stop()).await.unwrap();
        let spans = received.spans();
        (received, spans)
    }

    #[tokio::test]
    async fn a_collector_receives_the_decision_in_the_callers_trace() {
        let (received, spans) = exported(0.0, vec![login(), login()]).await;
        assert_eq!(spans.len(), 4, "{spans:?}");
        assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
        let request = spans.iter().find(|span| span.name == "POST /v1/check").unwrap();
        assert_eq!((hex(&request.parent_span_id), request.kind), (PARENT.to_owned(), 2));
        assert_eq!(text(&request.attributes, "url.path").as_deref(), Some("/v1/check"));
        assert!(!format!("{spans:?}").contains("203.0.113.9"), "labels are not exported");

        let decisions: Vec<_> = spans.iter().filter(|span| span.name == "decide").collect();
        let of =
            |name: &str| -> Vec<_> { decisions.iter().map(|span| text(&span.attributes, name)).collect() };
        let some = |value: &str| Some(value.to_owned());
        assert_eq!(of("sluicegate.outcome"), [some("allowed"), some("denied")]);
        assert_eq!(of("sluicegate.rule"), [some("login-per-ip"), some("login-per-ip")]);
        assert_eq!(of("sluicegate.remaining"), [some("0"), some("0")]);
        assert!(of("sluicegate.retry_after_ms")[0].is_none() && of("sluicegate.retry_after_ms")[1].is_some());
        let requests: Vec<_> = spans.iter().filter(|span| span.name != "decide").collect();
        assert!(requests.iter().any(|request| request.span_id == decisions[0].parent_span_id));

        let resource = received.0.lock()[0].resource_spans[0].resource.clone().unwrap();
        assert_eq!(text(&resource.attributes, "service.name").as_deref(), Some("sluicegate"));
    }

    #[tokio::test]
    async fn a_rejected_request_has_a_span() {
        let mut foreign = login();
        foreign.headers_mut().insert("origin", "https://elsewhere.example".parse().unwrap());
        let spans = exported(0.0, vec![foreign]).await.1;
        let names: Vec<_> = spans.iter().map(|span| (&*span.name, hex(&span.trace_id))).collect();
        assert_eq!(names, [("POST /v1/check", TRACE.to_owned())]);
    }

    #[tokio::test]
    async fn a_decision_over_the_redis_protocol_is_one_span() {
        let (received, endpoint) = Received::listen().await;
        let otlp = Some(Collector { endpoint, share: 1.0 });
        let (subscriber, logs) = subscriber(&Settings { otlp, ..Settings::default() }, io::sink);
        {
            let _guard = set_default(subscriber);
            let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
            let (mut client, server) = tokio::io::duplex(1024);
            client.write_all(b"CL.THROTTLE k 0 1 60\r\nQUIT\r\n").await.unwrap();
            client.shutdown().await.unwrap();
            Endpoint::new(engine, Access::default()).serve(server).await;
        }
        tokio::task::spawn_blocking(|| logs.stop()).await.unwrap();
        let spans = received.spans();
        let outcomes: Vec<_> =
            spans.iter().map(|span| text(&span.attributes, "sluicegate.outcome")).collect();
        assert_eq!(outcomes, [Some("allowed".to_owned())], "{spans:?}");
    }

    #[tokio::test]
    async fn new_traces_are_sampled_with_the_configured_share() {
        let alone = || {
            let mut request = login();
            request.headers_mut().remove("traceparent");
            request
        };
        assert_eq!(exported(1.0, vec![alone()]).await.1.len(), 2);
        assert_eq!(exported(0.0, vec![alone()]).await.1.len(), 0);
    }

    #[tokio::test]
    async fn an_unavailable_collector_blocks_no_request_and_an_invalid_address_is_rejected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let otlp = Some(Collector { endpoint, share: 1.0 });
        let (subscriber, logs) = subscriber(&Settings { otlp, ..Settings::default() }, io::sink);
        {
            let _guard = set_default(subscriber);
            assert!(service().respond(CLIENT, login()).await.status().is_success());
        }
        tokio::task::spawn_blocking(|| logs.stop()).await.unwrap();

        let otlp = Some(Collector { endpoint: "not an address".to_owned(), share: 1.0 });
        let error = Logs::subscriber(&Settings { otlp, ..Settings::default() }, io::sink).err().unwrap();
        assert!(error.to_string().contains("http://127.0.0.1:4317"), "{error}");
    }
}
