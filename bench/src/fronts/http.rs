//! A minimal HTTP/1.1 client: the CPU time of the client is not available to the servers.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    load::{Client, connect},
    process::Contestant,
    template::{RequestTemplate, USER, USER_LEN},
};

/// What a request is sent to.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint {
    /// The JSON API.
    Check,
    /// The sub-request of a proxy.
    ForwardAuth,
    /// The route of an axum app.
    App,
}

/// A request with [`USER`] in place of the user, and its expected response.
#[derive(Clone, Copy, Debug)]
pub struct HttpRequest {
    method: &'static str,
    pub target: &'static str,
    headers: &'static str,
    pub body: &'static str,
    expected: ExpectedResponse,
}

#[derive(Clone, Copy, Debug)]
struct ExpectedResponse {
    body_prefix: &'static [u8],
    has_rate_limit_header: bool,
}

impl HttpRequest {
    pub fn new(endpoint: Endpoint, contestant: Contestant) -> Self {
        match (endpoint, contestant) {
            (Endpoint::Check, Contestant::Throttlecrab) => Self::post(
                "/throttle",
                r#"{"key":"%s","max_burst":1000000,"count_per_period":1000000,"period":60}"#,
            ),
            (Endpoint::Check, _) => Self::post("/v1/check", r#"{"labels":{"user":"%s"}}"#),
            (Endpoint::ForwardAuth, _) => Self {
                method: "GET",
                target: "/v1/auth?user=%s",
                headers: "x-forwarded-for: 203.0.113.9\r\nx-forwarded-method: GET\r\nx-forwarded-proto: https\r\n\
                          x-forwarded-host: shop.example\r\nx-forwarded-uri: /orders/42?page=2\r\n",
                body: "",
                expected: ExpectedResponse { body_prefix: b"", has_rate_limit_header: true },
            },
            (Endpoint::App, _) => Self {
                method: "GET",
                target: "/",
                headers: "x-user: %s\r\n",
                body: "",
                expected: ExpectedResponse {
                    body_prefix: b"hello",
                    has_rate_limit_header: contestant == Contestant::LimitedApp,
                },
            },
        }
    }

    const fn post(target: &'static str, body: &'static str) -> Self {
        Self {
            method: "POST",
            target,
            headers: "content-type: application/json\r\n",
            body,
            expected: ExpectedResponse { body_prefix: br#"{"allowed":true,"#, has_rate_limit_header: false },
        }
    }

    fn template(&self) -> Result<RequestTemplate> {
        let Self { method, target, headers, body, .. } = self;
        let content_length = if body.is_empty() {
            String::new()
        } else {
            format!("content-length: {}\r\n", body.len() - USER.len() + USER_LEN)
        };
        RequestTemplate::new(&format!(
            "{method} {target} HTTP/1.1\r\nhost: localhost\r\n{headers}{content_length}\r\n{body}"
        ))
    }
}

/// One connection.
pub struct HttpClient {
    stream: TcpStream,
    template: RequestTemplate,
    expected: ExpectedResponse,
    request: Vec<u8>,
    response: Vec<u8>,
}

/// Connects clients, and checks the headers of one response.
pub async fn clients(
    request: HttpRequest,
    address: SocketAddr,
    connections: usize,
) -> Result<Vec<HttpClient>> {
    let (template, expected) = (request.template()?, request.expected);
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(HttpClient {
            stream: connect(address).await?,
            template: template.clone(),
            expected,
            request: Vec::new(),
            response: Vec::new(),
        });
    }
    if let Some(client) = clients.first_mut() {
        client.send(&mut fastrand::Rng::new()).await?;
        let has_rate_limit_header = find(&client.response, b"\r\nratelimit: ").is_some();
        ensure!(
            has_rate_limit_header == expected.has_rate_limit_header,
            "unexpected headers: {}",
            client.response.escape_ascii()
        );
    }
    Ok(clients)
}

impl Client for HttpClient {
    async fn send(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        self.request.clear();
        self.template.write(random, &mut self.request)?;
        self.stream.write_all(&self.request).await?;
        self.response.clear();
        loop {
            let len = self.stream.read_buf(&mut self.response).await?;
            ensure!(len > 0, "the server closed the connection");
            if let Some(body) = complete_body(&self.response)? {
                ensure!(
                    body.starts_with(self.expected.body_prefix),
                    "unexpected response: {}",
                    self.response.escape_ascii()
                );
                return Ok(1);
            }
        }
    }
}

/// Returns the body of a response with status 200 once it is complete.
pub fn complete_body(response: &[u8]) -> Result<Option<&[u8]>> {
    const CONTENT_LENGTH: &[u8] = b"\r\ncontent-length: ";
    let Some(end) = find(response, b"\r\n\r\n") else { return Ok(None) };
    let (head, body) = (&response[..end], &response[end + 4..]);
    ensure!(head.starts_with(b"HTTP/1.1 200"), "unexpected response: {}", response.escape_ascii());
    let start =
        find(head, CONTENT_LENGTH).context("the response has no content-length")? + CONTENT_LENGTH.len();
    let digits = head[start..].iter().take_while(|byte| byte.is_ascii_digit());
    let length = digits.fold(0, |length, digit| length * 10 + usize::from(digit - b'0'));
    Ok((body.len() >= length).then_some(body))
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}
