//! A server that decodes the same requests as the front ends, with the same libraries, and allows all of them.

use std::{collections::HashMap, hint::black_box};

use anyhow::{Context, Result, bail};
use axum::{
    Json, Router,
    extract::RawQuery,
    http::{HeaderMap, header::CACHE_CONTROL},
    response::AppendHeaders,
    routing::{get, post},
    serve::ListenerExt,
};
use serde::{Deserialize, Serialize};
use sluicegate_server::{
    grpc::messages::{
        Code, DescriptorStatus, RateLimitRequest, RateLimitResponse,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
    resp::codec::{Command, Decoded, Decoder},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use super::process::Addresses;

pub const ANY_PORT: &str = "127.0.0.1:0";

const LIMIT: u64 = 1_000_000;
const REMAINING: u64 = 999_999;
const RULE: &str = "per-user";
const AT_US: u64 = 1_790_000_000_000_000;

/// Listens, and returns the future that serves.
pub async fn serve() -> Result<(Addresses, impl Future<Output = Result<()>>)> {
    let http = TcpListener::bind(ANY_PORT).await?;
    let grpc = TcpIncoming::bind(ANY_PORT.parse()?)?.with_nodelay(Some(true));
    let resp = TcpListener::bind(ANY_PORT).await?;
    let addresses = Addresses {
        http: http.local_addr()?,
        grpc: Some(grpc.local_addr()?),
        resp: Some(resp.local_addr()?),
    };
    let serving = async {
        let routes = Router::new().route("/v1/check", post(check)).route("/v1/auth", get(forward_auth));
        let http = tokio::spawn(serve_http(http, routes));
        let service = Server::builder().add_service(RateLimitServiceServer::new(AlwaysAllow));
        let grpc = tokio::spawn(service.serve_with_incoming(grpc));
        let resp = tokio::spawn(serve_resp(resp));
        http.await??;
        grpc.await??;
        resp.await?
    };
    Ok((addresses, serving))
}

/// Serves an axum app as its documentation does, with `TCP_NODELAY`.
pub async fn serve_http(listener: TcpListener, app: Router) -> Result<()> {
    let without_delay = listener.tap_io(|stream| {
        // a failure makes responses slower, not wrong
        let _ = stream.set_nodelay(true);
    });
    Ok(axum::serve(without_delay, app).await?)
}

#[derive(Deserialize)]
struct Check {
    labels: HashMap<String, String>,
}

/// The fields of the server's own response.
#[derive(Serialize)]
struct CheckResponse {
    allowed: bool,
    rule: Option<&'static str>,
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_ms: Option<u64>,
    reset_after_ms: Option<u64>,
    never: bool,
    degraded: bool,
    source: &'static str,
    at_us: Option<u64>,
    tiers: [Tier; 1],
}

#[derive(Serialize)]
struct Tier {
    allowed: bool,
    rule: Option<&'static str>,
    limit: u64,
    remaining: u64,
    retry_after_ms: Option<u64>,
    reset_after_ms: u64,
    never: bool,
    unit: &'static str,
    shadow: bool,
}

async fn check(Json(check): Json<Check>) -> Json<CheckResponse> {
    black_box(check.labels);
    let tier = Tier {
        allowed: true,
        rule: Some(RULE),
        limit: LIMIT,
        remaining: REMAINING,
        retry_after_ms: None,
        reset_after_ms: 1,
        never: false,
        unit: "requests",
        shadow: false,
    };
    Json(CheckResponse {
        allowed: true,
        rule: Some(RULE),
        limit: Some(LIMIT),
        remaining: Some(REMAINING),
        retry_after_ms: None,
        reset_after_ms: Some(1),
        never: false,
        degraded: false,
        source: "memory",
        at_us: Some(AT_US),
        tiers: [tier],
    })
}

/// Reads the query and writes the state of the limit, as a server that decides must.
async fn forward_auth(
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> AppendHeaders<[(&'static str, String); 3]> {
    let labels: HashMap<_, _> =
        form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect();
    black_box((labels, headers));
    AppendHeaders([
        ("ratelimit-policy", format!("\"{RULE}\";q={LIMIT};w=60")),
        ("ratelimit", format!("\"{RULE}\";r={REMAINING};t=1")),
        (CACHE_CONTROL.as_str(), "no-store".to_owned()),
    ])
}

struct AlwaysAllow;

#[tonic::async_trait]
impl RateLimitService for AlwaysAllow {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        Ok(Response::new(RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses: vec![ok; request.get_ref().descriptors.len()],
            ..RateLimitResponse::default()
        }))
    }
}

/// Appends the reply to a command.
fn reply(command: &Command<'_>, output: &mut Vec<u8>) -> Result<()> {
    let name = command.name();
    let replied = if name.eq_ignore_ascii_case(b"CL.THROTTLE") {
        reply_to_throttle(command, output)
    } else if name.eq_ignore_ascii_case(b"SG.CHECK") {
        reply_to_check(command, output)
    } else {
        bail!("unknown command {}", name.escape_ascii())
    };
    replied.with_context(|| format!("invalid arguments of {}", name.escape_ascii()))
}

/// `CL.THROTTLE key max_burst count period`: limited, limit, remaining, retry after, reset after.
fn reply_to_throttle(command: &Command<'_>, output: &mut Vec<u8>) -> Option<()> {
    let max_burst = number(command, 2)?;
    black_box((command.get(1)?, number(command, 3)?, number(command, 4)?));
    output.extend_from_slice(b"*5\r\n:0\r\n");
    push_number(max_burst + 1, output);
    push_number(max_burst, output);
    output.extend_from_slice(b":-1\r\n");
    push_number(1, output);
    Some(())
}

/// `SG.CHECK cost label value …`: allowed, limit, remaining, retry after, reset after, rule, degraded, time.
fn reply_to_check(command: &Command<'_>, output: &mut Vec<u8>) -> Option<()> {
    black_box(number(command, 1)?);
    for name in command.from(2).step_by(2) {
        black_box(str::from_utf8(name).ok()?);
    }
    for value in command.from(3).step_by(2) {
        black_box(value);
    }
    output.extend_from_slice(b"*8\r\n:1\r\n");
    push_number(black_box(LIMIT), output);
    push_number(black_box(REMAINING), output);
    output.extend_from_slice(b":-1\r\n");
    push_number(black_box(1), output);
    output.push(b'$');
    output.extend_from_slice(itoa::Buffer::new().format(RULE.len()).as_bytes());
    output.extend_from_slice(b"\r\n");
    output.extend_from_slice(black_box(RULE).as_bytes());
    output.extend_from_slice(b"\r\n:0\r\n");
    push_number(black_box(AT_US), output);
    Some(())
}

fn number(command: &Command<'_>, place: usize) -> Option<u64> {
    str::from_utf8(command.get(place)?).ok()?.parse().ok()
}

fn push_number(number: u64, output: &mut Vec<u8>) {
    output.push(b':');
    output.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    output.extend_from_slice(b"\r\n");
}

async fn serve_resp(listener: TcpListener) -> Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(serve_connection(stream));
    }
}

async fn serve_connection(mut stream: TcpStream) -> Result<()> {
    let (mut decoder, mut input, mut output) = (Decoder::default(), Vec::new(), Vec::new());
    loop {
        input.reserve(16 << 10);
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
        let mut consumed = 0;
        loop {
            match decoder.decode(&input[consumed..])? {
                Decoded::Partial => break,
                Decoded::Empty(len) => consumed += len,
                Decoded::Command(command, len) => {
                    reply(&command, &mut output)?;
                    consumed += len;
                }
            }
        }
        input.drain(..consumed);
        stream.write_all(&output).await?;
        output.clear();
    }
}
