//! A server that reads what the front ends read, with the same libraries, and says yes to everything.

use std::{collections::HashMap, hint::black_box};

use anyhow::{Context, Result};
use axum::{Json, Router, routing::post, serve::ListenerExt};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tollgate_server::{
    grpc::messages::{
        Code, DescriptorStatus, RateLimitRequest, RateLimitResponse,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
    resp::codec::{Command, Decoded, Decoder},
};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use super::process::Addresses;

const ANY_PORT: &str = "127.0.0.1:0";

/// Listens; what is returned serves.
pub async fn serve() -> Result<(Addresses, impl Future<Output = Result<()>>)> {
    let http = TcpListener::bind(ANY_PORT).await?;
    let grpc = TcpIncoming::bind(ANY_PORT.parse()?)?.with_nodelay(Some(true));
    let resp = TcpListener::bind(ANY_PORT).await?;
    let addresses =
        Addresses { http: http.local_addr()?, grpc: grpc.local_addr()?, resp: resp.local_addr()? };
    let serving = async {
        let without_delay = http.tap_io(|stream| {
            // slower without, and no less right
            let _set = stream.set_nodelay(true);
        });
        let routes = Router::new().route("/v1/check", post(check));
        let over_http = tokio::spawn(axum::serve(without_delay, routes).into_future());
        let service = Server::builder().add_service(RateLimitServiceServer::new(AlwaysAllow));
        let over_grpc = tokio::spawn(service.serve_with_incoming(grpc));
        let over_resp = tokio::spawn(listen(resp));
        over_http.await??;
        over_grpc.await??;
        over_resp.await?
    };
    Ok((addresses, serving))
}

#[derive(Deserialize)]
struct Check {
    labels: HashMap<String, String>,
}

/// As large as the server's own answer.
#[derive(Serialize)]
struct Answer {
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

async fn check(Json(check): Json<Check>) -> Json<Answer> {
    black_box(check.labels);
    let tier = Tier {
        allowed: true,
        rule: Some("per-user"),
        limit: 1_000_000,
        remaining: 999_999,
        retry_after_ms: None,
        reset_after_ms: 1,
        never: false,
        unit: "requests",
        shadow: false,
    };
    Json(Answer {
        allowed: true,
        rule: Some("per-user"),
        limit: Some(1_000_000),
        remaining: Some(999_999),
        retry_after_ms: None,
        reset_after_ms: Some(1),
        never: false,
        degraded: false,
        source: "store",
        at_us: Some(1_790_000_000_000_000),
        tiers: [tier],
    })
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

/// `CL.THROTTLE key max_burst count period`.
struct Throttle<'a> {
    key: &'a [u8],
    max_burst: u64,
    count: u64,
    period: u64,
}

impl<'a> Throttle<'a> {
    fn read(command: &Command<'a>) -> Option<Self> {
        let number = |place| str::from_utf8(command.get(place)?).ok()?.parse().ok();
        if !command.name().eq_ignore_ascii_case(b"CL.THROTTLE") {
            return None;
        }
        Some(Self { key: command.get(1)?, max_burst: number(2)?, count: number(3)?, period: number(4)? })
    }

    /// Not limited, the limit, what remains, no wait, and when it is as new.
    fn allow(&self, output: &mut Vec<u8>) {
        output.extend_from_slice(b"*5\r\n:0\r\n");
        for number in [self.max_burst + 1, self.max_burst] {
            add_number(number, output);
        }
        output.extend_from_slice(b":-1\r\n");
        add_number(1, output);
    }
}

fn add_number(number: u64, output: &mut Vec<u8>) {
    output.push(b':');
    output.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    output.extend_from_slice(b"\r\n");
}

async fn listen(listener: TcpListener) -> Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(answer(stream));
    }
}

async fn answer(mut stream: TcpStream) -> Result<()> {
    let (mut decoder, mut input, mut output) = (Decoder::default(), Vec::new(), Vec::new());
    loop {
        input.reserve(16 << 10);
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
        let mut at = 0;
        loop {
            match decoder.decode(&input[at..])? {
                Decoded::Partial => break,
                Decoded::Empty(read) => at += read,
                Decoded::Command(command, read) => {
                    let throttle = Throttle::read(&command).context("no CL.THROTTLE")?;
                    black_box((throttle.key, throttle.count, throttle.period));
                    throttle.allow(&mut output);
                    at += read;
                }
            }
        }
        input.drain(..at);
        stream.write_all(&output).await?;
        output.clear();
    }
}
