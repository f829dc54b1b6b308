//! Tokens, TLS, cross-site requests, and secrets in logs and metrics.

use std::{fs, net::IpAddr, process::Output};

use redis::{ClientTlsConfig, ErrorKind, RedisResult, TlsCertificates, cmd};
use sluicegate_server::grpc::messages::{
    RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::{
    tls::Certificates,
    wait::{self, PATIENCE},
};
use tonic::{
    Code, Request, Status,
    transport::{Certificate, Channel, ClientTlsConfig as GrpcTls, Endpoint, Identity},
};

use crate::{
    http_client::Client,
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

const RULE: &str =
    "[[rule]]\nname = \"all\"\nper = []\nalgorithm = \"fixed-window\"\namount = 1000\nwindow = \"1d\"\n";
const TOKENS: &str = "\
[[server.token]]\nname = \"app\"\nfile = \"app\"\n\
[[server.token]]\nname = \"ops\"\nfile = \"ops\"\nmay = [\"check\", \"adjust\", \"admin\"]\n";
const APP: &str = "s3cret-of-app";
const OPS: &str = "s3cret-of-ops";
const NO_LABELS: &str = r#"{"labels":{}}"#;

fn config_dir_with_tokens() -> ConfigDir {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{TOKENS}{RULE}"));
    home.write("app", format!("{APP}\n"));
    home.write("ops", format!("{OPS}\n"));
    home
}

/// The status of a call with this token.
fn status(client: &mut Client, what: &str, token: Option<&str>) -> u16 {
    let authorization = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<_> = authorization.iter().map(|value| ("authorization", value.as_str())).collect();
    let body = if what.starts_with("GET") { "" } else { NO_LABELS };
    let response = client.call(what, &headers, body).unwrap();
    assert_eq!(
        response.head.contains("www-authenticate: bearer\r\n"),
        response.status == 401,
        "{}",
        response.head
    );
    response.status
}

#[test]
fn each_operation_requires_a_token_with_its_scope() {
    let home = config_dir_with_tokens();
    let program = home.start();
    let mut client = program.client();
    // no token, an unknown token, the scope check, all scopes
    let table = [
        ("POST /v1/check", [401, 403, 200, 200]),
        ("POST /v1/peek", [401, 403, 200, 200]),
        ("POST /v1/explain", [401, 403, 200, 200]),
        ("GET /v1/auth", [401, 403, 200, 200]),
        ("POST /v1/charge", [401, 403, 403, 200]),
        ("POST /v1/refund", [401, 403, 403, 200]),
        ("POST /v1/reset", [401, 403, 403, 200]),
        ("GET /v1/rules", [401, 403, 403, 200]),
        ("GET /v1/top", [401, 403, 403, 200]),
        ("GET /healthz", [200; 4]),
        ("GET /readyz", [200; 4]),
        ("GET /metrics", [200; 4]),
    ];
    for (call, expected) in table {
        let tokens = [None, Some("s3cret-unknown"), Some(APP), Some(OPS)];
        assert_eq!(tokens.map(|token| status(&mut client, call, token)), expected, "{call}");
    }
    let audited = |who: &str, action: &str, result: &str| {
        let who = format!("audit: audit who=\"{who}\" from=127.0.0.1:");
        let line = program.wait_for_line(&who, &format!("action=\"{action}\""));
        assert!(line.contains(&format!("result=\"{result}\"")), "{line}");
    };
    for action in ["charge", "refund", "reset", "rules", "top"] {
        audited("ops", action, "done");
    }
    // the audit log is limited per second, so later lines may be missing
    for action in ["charge", "refund", "reset"] {
        audited("unauthenticated", action, "rejected");
        audited("app", action, "rejected");
    }
    let unauthorized = |operation| {
        program.metric(&format!(
            "sluicegate_requests_total{{operation=\"{operation}\",outcome=\"unauthorized\"}}"
        ))
    };
    // forward-auth counts as a check, explain as a peek
    let counted = ["check", "peek", "charge", "refund", "reset"].map(unauthorized);
    assert_eq!(counted, ["4", "4", "3", "3", "3"]);
    assert_no_secrets(&program);
}

#[test]
fn an_audit_line_names_action_and_subject_and_masks_secrets() {
    let labels = "[labels]\napi_key = { secret = true }\n";
    let home = ConfigDir::new(&format!("{ANY_PORTS}{TOKENS}{labels}{RULE}"));
    home.write("app", APP);
    home.write("ops", OPS);
    let program = home.start();
    let mut client = program.client();
    let bearer = format!("Bearer {OPS}");
    let headers = [("authorization", bearer.as_str())];
    let body = r#"{"labels":{"api_key":"s3cret-key","user":"4\u00e92"},"rules":["all"]}"#;
    assert_eq!(client.call("POST /v1/reset", &headers, body).unwrap().status, 200);
    let line = program.wait_for_line("action=\"reset\"", "result=\"done\"");
    assert!(line.contains(" user=4é2, for all\"") && line.contains("subject=\"api_key="), "{line}");
    let forged = format!(r#"{{"labels":{{"a":"1 ip=x","b":"{}","c":"z"}},"cost":7}}"#, "y".repeat(300));
    assert_eq!(client.call("POST /v1/charge", &headers, &forged).unwrap().status, 200);
    let quoted = format!(r#"subject="a=\"1 ip=x\" b=\"{}\"… c=z, 7 requests" result="done""#, "y".repeat(64));
    program.wait_for_line("action=\"charge\"", &quoted);
    let keyed = r#"{"key":"user:42","limit":{"amount":1,"window":"1s"}}"#;
    assert_eq!(client.call("POST /v1/charge", &headers, keyed).unwrap().status, 200);
    program.wait_for_line("action=\"charge\"", "subject=\"key user:42\" result=\"done\"");
    assert_eq!(client.call("POST /v1/charge", &headers, "{").unwrap().status, 400);
    program.wait_for_line("action=\"charge\"", "subject=\"\" result=\"rejected\" error=\"400 Bad Request\"");
    assert_no_secrets(&program);
}

fn assert_no_secrets(program: &ServerProcess) {
    for place in [program.output(), program.get("/metrics").1] {
        assert!(!place.contains("s3cret") && !place.contains("PRIVATE"), "{place}");
    }
}

fn rate_limit_request() -> RateLimitRequest {
    let entry = Entry { key: "a".to_owned(), value: b"b".to_vec() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    RateLimitRequest { domain: "d".to_owned(), descriptors: vec![descriptor], hits_addend: 0 }
}

fn with_negative_hits(mut request: RateLimitRequest) -> RateLimitRequest {
    request.descriptors[0].is_negative_hits = true;
    request
}

/// Sends a gRPC request with this token.
async fn send(channel: &Channel, token: Option<&str>, message: RateLimitRequest) -> Result<(), Status> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    RateLimitServiceClient::new(channel.clone()).should_rate_limit(request).await.map(|_| ())
}

#[tokio::test]
async fn grpc_requests_require_a_token() {
    let home = config_dir_with_tokens();
    let program = home.start();
    let channel = Endpoint::from_shared(format!("http://{}", program.grpc)).unwrap().connect().await.unwrap();
    let code = async |token, message| send(&channel, token, message).await.map_err(|status| status.code());
    assert_eq!(code(None, rate_limit_request()).await, Err(Code::Unauthenticated));
    assert_eq!(code(Some("s3cret-unknown"), rate_limit_request()).await, Err(Code::PermissionDenied));
    assert_eq!(code(Some(APP), rate_limit_request()).await, Ok(()));
    assert_eq!(code(Some(APP), with_negative_hits(rate_limit_request())).await, Err(Code::PermissionDenied));
    assert_eq!(code(Some(OPS), with_negative_hits(rate_limit_request())).await, Ok(()));
    program.wait_for_line(
        "who=\"ops\" from=127.0.0.1:",
        "action=\"refund\" subject=\"domain \\\"d\\\"\" result=\"done\"",
    );
    program
        .wait_for_line("who=\"app\" from=127.0.0.1:", "action=\"refund\" subject=\"\" result=\"rejected\"");
    assert_no_secrets(&program);
}

fn redis_client(url: &str) -> redis::Connection {
    let connection = redis::Client::open(url).unwrap().get_connection_with_timeout(PATIENCE).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    connection
}

fn code<T>(result: RedisResult<T>) -> Option<String> {
    result.err().map(|error| error.code().unwrap_or_default().to_owned())
}

#[test]
fn redis_clients_send_a_token_as_password_with_or_without_a_user_name() {
    let home = config_dir_with_tokens();
    let program = home.start();
    let resp = &program.resp;
    let check = |connection: &mut redis::Connection| {
        code(cmd("SG.CHECK").arg(&["1", "a", "b"]).query::<redis::Value>(connection))
    };
    let reset = |connection: &mut redis::Connection| {
        code(cmd("SG.RESET").arg(&["a", "b"]).query::<redis::Value>(connection))
    };
    let mut unauthenticated = redis_client(&format!("redis://{resp}"));
    assert_eq!(check(&mut unauthenticated), Some("NOAUTH".to_owned()));
    for user in ["", "app"] {
        let mut app = redis_client(&format!("redis://{user}:{APP}@{resp}"));
        assert_eq!((check(&mut app), reset(&mut app)), (None, Some("NOPERM".to_owned())));
    }
    let mut ops = redis_client(&format!("redis://ops:{OPS}@{resp}"));
    assert_eq!((check(&mut ops), reset(&mut ops)), (None, None));
    for wrong in [format!("ops:{APP}"), ":s3cret-unknown".to_owned()] {
        let rejected = redis::Client::open(format!("redis://{wrong}@{resp}")).unwrap().get_connection();
        assert_eq!(rejected.err().unwrap().kind(), ErrorKind::AuthenticationFailed);
    }
    program.wait_for_line("who=\"ops\" from=127.0.0.1:", "action=\"reset\" subject=\"a=b\" result=\"done\"");
    program.wait_for_line("who=\"app\" from=127.0.0.1:", "action=\"reset\" subject=\"\" result=\"rejected\"");
    program.wait_for_line(
        "who=\"unauthenticated\" from=127.0.0.1:",
        "action=\"auth\" subject=\"\" result=\"rejected\"",
    );
    // many unauthenticated requests do not suppress the audit line of a known token
    for _ in 0..20 {
        assert_eq!(reset(&mut unauthenticated), Some("NOAUTH".to_owned()));
    }
    let mut app = redis_client(&format!("redis://app:{APP}@{resp}"));
    assert_eq!(
        code(cmd("SG.CHARGE").arg(&["1", "a", "b"]).query::<redis::Value>(&mut app)),
        Some("NOPERM".to_owned())
    );
    program
        .wait_for_line("who=\"app\" from=127.0.0.1:", "action=\"charge\" subject=\"\" result=\"rejected\"");
    assert_no_secrets(&program);
}

#[test]
fn a_reload_replaces_tokens_on_open_connections_too() {
    let home = config_dir_with_tokens();
    let program = home.start();
    let mut http = program.client();
    let mut app = redis_client(&format!("redis://app:{APP}@{}", program.resp));
    let mut ops = redis_client(&format!("redis://ops:{OPS}@{}", program.resp));
    assert_eq!(status(&mut http, "POST /v1/check", Some(APP)), 200);
    home.write("app", "s3cret-of-app-2");
    wait::until("the new token is accepted", PATIENCE, || {
        status(&mut http, "POST /v1/check", Some("s3cret-of-app-2")) == 200
    });
    assert_eq!(status(&mut http, "POST /v1/check", Some(APP)), 403);
    assert_eq!(status(&mut http, "POST /v1/check", Some(OPS)), 200);
    let check = |connection: &mut redis::Connection| {
        code(cmd("SG.CHECK").arg(&["1", "a", "b"]).query::<redis::Value>(connection))
    };
    assert_eq!((check(&mut app), check(&mut ops)), (Some("NOAUTH".to_owned()), None));
    cmd("AUTH").arg("s3cret-of-app-2").exec(&mut app).unwrap();
    assert_eq!(check(&mut app), None);
    assert_no_secrets(&program);
}

#[test]
fn a_public_listener_requires_a_token_unless_it_is_configured_as_insecure() {
    for listener in ["http", "grpc", "resp"] {
        let open = ANY_PORTS
            .replace(&format!("{listener} = \"127.0.0.1:0\""), &format!("{listener} = \"0.0.0.0:0\""));
        let home = ConfigDir::new(&format!("{open}{RULE}"));
        let Output { status, stderr, .. } = home.serve().output().unwrap();
        let error = String::from_utf8(stderr).unwrap();
        assert!(status.code() == Some(2) && error.contains("add a [[server.token]]"), "{error}");
        home.write("sluicegate.toml", format!("{open}insecure = true\n{RULE}"));
        drop(home.start());
        home.write("sluicegate.toml", format!("{open}{TOKENS}{RULE}"));
        home.write("app", APP);
        home.write("ops", OPS);
        drop(home.start());
    }
}

#[test]
fn an_invalid_secret_is_reported_by_position_and_not_printed() {
    let home = config_dir_with_tokens();
    home.write("app", "s3cret with spaces");
    let Output { status, stderr, .. } = home.serve().output().unwrap();
    let error = String::from_utf8(stderr).unwrap();
    assert!(
        status.code() == Some(2) && error.contains("sluicegate.toml:7:8") && !error.contains("s3cret"),
        "{error}"
    );
    home.write("app", APP);
    let program = home.start();
    home.write("app", "s3cret with spaces");
    program.signal("-HUP");
    program.wait_for_log("keeping the previous one");
    assert_no_secrets(&program);
}

#[test]
fn cross_site_requests_are_rejected() {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULE}"));
    let program = home.start();
    let own = format!("http://{}", program.http);
    let mut client = program.client();
    let table: [(&[(&str, &str)], u16); 8] = [
        (&[], 200),
        (&[("origin", &own)], 200),
        (&[("origin", "http://evil.example"), ("content-type", "text/plain")], 403),
        (&[("origin", "null")], 403),
        // a GET request need not have an origin
        (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], 403),
        (&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "navigate")], 403),
        // DNS rebinding: a host name of another site that resolves to this address
        (&[("origin", "http://evil.example"), ("host", "evil.example")], 403),
        (&[("sec-fetch-site", "same-origin"), ("host", "evil.example")], 403),
    ];
    for (headers, expected) in table {
        for call in ["POST /v1/check", "GET /v1/rules"] {
            assert_eq!(client.call(call, headers, NO_LABELS).unwrap().status, expected, "{call} {headers:?}");
        }
    }
    // same-origin GET requests of a rebound page have no origin
    let named = [("host", "evil.example")];
    for call in ["GET /v1/rules", "GET /v1/top", "GET /v1/live"] {
        assert_eq!(client.call(call, &named, NO_LABELS).unwrap().status, 403, "{call}");
    }
    assert_eq!(client.call("GET /metrics", &named, NO_LABELS).unwrap().status, 200);
    assert_eq!(client.call("GET /metrics", &[("origin", "null")], NO_LABELS).unwrap().status, 403);
    // a followed link
    let followed = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
    for call in ["GET /", "GET /metrics"] {
        assert_eq!(client.call(call, &followed, "").unwrap().status, 200, "{call}");
    }
}

const TLS: &str = "[server.tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n";

/// A configuration with TLS, and the certificates of its own authority.
fn config_dir_with_tls(more: &str) -> (ConfigDir, Certificates) {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{TLS}{more}{RULE}"));
    let certificates = Certificates::issue(home.path(), IpAddr::from([127, 0, 0, 1]));
    (home, certificates)
}

fn redis_over_tls(
    program: &ServerProcess,
    files: &Certificates,
    has_certificate: bool,
) -> RedisResult<redis::Value> {
    // the client requires a process-wide crypto provider
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client_tls = has_certificate.then(|| ClientTlsConfig {
        client_cert: fs::read(&files.client_certificate).unwrap(),
        client_key: fs::read(&files.client_key).unwrap(),
    });
    let certificates = TlsCertificates { client_tls, root_cert: Some(fs::read(&files.authority).unwrap()) };
    let client = redis::Client::build_with_tls(format!("rediss://{}", program.resp), certificates)?;
    cmd("SG.CHECK").arg(&["1", "a", "b"]).query(&mut client.get_connection_with_timeout(PATIENCE)?)
}

async fn grpc_over_tls(
    program: &ServerProcess,
    files: &Certificates,
    has_certificate: bool,
) -> Result<(), Status> {
    let mut tls = GrpcTls::new()
        .ca_certificate(Certificate::from_pem(fs::read(&files.authority).unwrap()))
        .domain_name("localhost");
    if has_certificate {
        tls = tls.identity(Identity::from_pem(
            fs::read(&files.client_certificate).unwrap(),
            fs::read(&files.client_key).unwrap(),
        ));
    }
    let endpoint =
        Endpoint::from_shared(format!("https://{}", program.grpc)).unwrap().tls_config(tls).unwrap();
    send(&endpoint.connect_lazy(), None, rate_limit_request()).await
}

fn http_over_tls(
    program: &ServerProcess,
    files: &Certificates,
    has_certificate: bool,
) -> std::io::Result<u16> {
    let mut client = Client::connect_tls(&program.http, &files.authority, has_certificate.then_some(files))?;
    Ok(client.post("/v1/check", NO_LABELS)?.status)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_front_end_uses_tls_and_rejects_plain_text() {
    let (home, files) = config_dir_with_tls("");
    let program = home.start();
    assert!(program.output().contains(&format!("https://{}", program.http)));
    assert_eq!(http_over_tls(&program, &files, false).unwrap(), 200);
    redis_over_tls(&program, &files, false).unwrap();
    grpc_over_tls(&program, &files, false).await.unwrap();
    assert!(program.client().get("/healthz").is_err());
    let plain = redis::Client::open(format!("redis://{}", program.resp)).unwrap();
    assert!(plain.get_connection_with_timeout(PATIENCE).is_err());
    let (_other, foreign) = config_dir_with_tls("");
    assert!(http_over_tls(&program, &foreign, false).is_err());
    assert_no_private_keys(&program);
}

fn assert_no_private_keys(program: &ServerProcess) {
    let output = program.output();
    assert!(!output.contains("PRIVATE"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_front_end_requires_a_client_certificate_of_the_configured_authority() {
    let (home, files) = config_dir_with_tls("client_ca = \"authority.pem\"\n");
    let program = home.start();
    for has_certificate in [true, false] {
        assert_eq!(http_over_tls(&program, &files, has_certificate).is_ok(), has_certificate, "http");
        assert_eq!(redis_over_tls(&program, &files, has_certificate).is_ok(), has_certificate, "redis");
        assert_eq!(grpc_over_tls(&program, &files, has_certificate).await.is_ok(), has_certificate, "grpc");
    }
    let (_other, foreign) = config_dir_with_tls("");
    let mixed = Certificates { authority: files.authority.clone(), ..foreign };
    assert!(http_over_tls(&program, &mixed, true).is_err());
    assert!(redis_over_tls(&program, &mixed, true).is_err());
    assert!(grpc_over_tls(&program, &mixed, true).await.is_err());
    assert_no_private_keys(&program);
}

#[test]
fn a_reload_replaces_certificates_and_keeps_connections_open() {
    let (home, _) = config_dir_with_tls("");
    let program = home.start();
    let old = home.path().join("old.pem");
    fs::copy(home.path().join("authority.pem"), &old).unwrap();
    let mut before = Client::connect_tls(&program.http, &old, None).unwrap();
    assert_eq!(before.get("/healthz").unwrap().status, 200);

    let fresh = tempfile::tempdir().unwrap();
    let files = Certificates::issue(fresh.path(), IpAddr::from([127, 0, 0, 1]));
    for name in ["server.key", "server.pem"] {
        home.write(name, fs::read(fresh.path().join(name)).unwrap());
    }
    wait::until("the new certificate is used", PATIENCE, || http_over_tls(&program, &files, false).is_ok());
    assert!(Client::connect_tls(&program.http, &old, None).unwrap().get("/healthz").is_err());
    assert_eq!(before.get("/healthz").unwrap().status, 200);

    // a key that does not match rejects the whole reload
    let other = tempfile::tempdir().unwrap();
    let _ = Certificates::issue(other.path(), IpAddr::from([127, 0, 0, 1]));
    home.write("sluicegate.toml", format!("{ANY_PORTS}{TLS}{}", RULE.replace("1000", "77")));
    home.write("server.key", fs::read(other.path().join("server.key")).unwrap());
    program.wait_for_log("server.tls: cert and key cannot be used");
    let mut client = Client::connect_tls(&program.http, &files.authority, None).unwrap();
    assert_eq!(client.post("/v1/peek", NO_LABELS).unwrap().json()["limit"], 1000);
    assert!(client.get("/readyz").unwrap().body.contains("\"rules\":\"stale\""));
    assert_no_private_keys(&program);
}
