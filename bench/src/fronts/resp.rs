//! Clients of the Redis protocol.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{Caller, Contestant, connect, user};

/// How many lines an answer has: five integers and how many they are.
const LINES: usize = 6;
/// How an answer begins that says yes.
const ALLOWED: &[u8] = b"*5\r\n:0\r\n";
/// How throttlecrab's does.
const ALLOWED_BY_THROTTLECRAB: &[u8] = b"*5\r\n:1\r\n";

/// One connection.
pub struct Client {
    stream: TcpStream,
    pipeline: usize,
    head: &'static [u8],
    allowed: &'static [u8],
    commands: Vec<u8>,
    replies: Vec<u8>,
}

pub async fn callers(
    contestant: Contestant,
    address: SocketAddr,
    pipeline: usize,
    connections: usize,
) -> Result<Vec<Client>> {
    let (head, allowed): (&[u8], _) = match contestant {
        Contestant::Throttlecrab => (b"*5\r\n$8\r\nTHROTTLE\r\n$10\r\n", ALLOWED_BY_THROTTLECRAB),
        Contestant::Tollgate | Contestant::AlwaysAllow => (b"*5\r\n$11\r\nCL.THROTTLE\r\n$10\r\n", ALLOWED),
    };
    let mut clients = Vec::new();
    for _ in 0..connections {
        let (commands, replies) = (Vec::new(), vec![0; 16 << 10]);
        clients.push(Client { stream: connect(address).await?, pipeline, head, allowed, commands, replies });
    }
    Ok(clients)
}

impl Caller for Client {
    async fn ask(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        self.commands.clear();
        for _ in 0..self.pipeline {
            self.commands.extend_from_slice(self.head);
            self.commands.extend_from_slice(user(random).as_bytes());
            self.commands.extend_from_slice(b"\r\n$6\r\n999999\r\n$7\r\n1000000\r\n$2\r\n60\r\n");
        }
        self.stream.write_all(&self.commands).await?;
        let (mut lines, mut is_first) = (0, true);
        while lines < LINES * self.pipeline {
            let read = self.stream.read(&mut self.replies).await?;
            let replies = &self.replies[..read];
            let is_answer = if is_first { replies.starts_with(self.allowed) } else { read > 0 };
            ensure!(is_answer, "the server does not allow: {}", replies.escape_ascii());
            lines += replies.iter().filter(|&&byte| byte == b'\n').count();
            is_first = false;
        }
        Ok(self.pipeline as u64)
    }
}
