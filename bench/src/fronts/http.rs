//! Clients of the JSON API, as small as can be: what they take of the processor, no server has.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{Caller, Contestant, connect, user};

/// How the body of an answer begins that says yes.
const ALLOWED: &[u8] = br#"{"allowed":true,"#;

/// What is asked.
#[derive(Clone, Copy)]
pub struct Question {
    pub path: &'static str,
    /// About this user.
    pub body: fn(&str) -> String,
}

/// One connection.
pub struct Client {
    stream: TcpStream,
    question: Question,
    answer: Vec<u8>,
}

impl Question {
    pub fn to(contestant: Contestant) -> Self {
        match contestant {
            Contestant::Throttlecrab => Self {
                path: "/throttle",
                body: |user| {
                    format!(
                        r#"{{"key":"{user}","max_burst":1000000,"count_per_period":1000000,"period":60}}"#
                    )
                },
            },
            Contestant::Tollgate | Contestant::AlwaysAllow => {
                Self { path: "/v1/check", body: |user| format!(r#"{{"labels":{{"user":"{user}"}}}}"#) }
            }
        }
    }
}

pub async fn callers(contestant: Contestant, address: SocketAddr, connections: usize) -> Result<Vec<Client>> {
    let question = Question::to(contestant);
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(Client { stream: connect(address).await?, question, answer: Vec::new() });
    }
    Ok(clients)
}

impl Caller for Client {
    async fn ask(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        let Question { path, body } = self.question;
        let body = body(&user(random));
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.answer.clear();
        loop {
            let read = self.stream.read_buf(&mut self.answer).await?;
            ensure!(read > 0, "the server hangs up");
            if let Some(body) = body_of(&self.answer)? {
                ensure!(body.starts_with(ALLOWED), "the server says: {}", self.answer.escape_ascii());
                return Ok(1);
            }
        }
    }
}

/// The body of an answer, once all of it is there.
pub fn body_of(answer: &[u8]) -> Result<Option<&[u8]>> {
    const LENGTH: &[u8] = b"\r\ncontent-length: ";
    let Some(end) = find(answer, b"\r\n\r\n") else { return Ok(None) };
    let (head, body) = (&answer[..end], &answer[end + 4..]);
    ensure!(head.starts_with(b"HTTP/1.1 200"), "the server says: {}", answer.escape_ascii());
    let at = find(head, LENGTH).context("the answer has no length")? + LENGTH.len();
    let digits = head[at..].iter().take_while(|byte| byte.is_ascii_digit());
    let length = digits.fold(0, |length, digit| length * 10 + usize::from(digit - b'0'));
    Ok((body.len() >= length).then_some(body))
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}
