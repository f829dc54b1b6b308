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

/// What a command says after the key: burst, count and period.
pub const NUMBERS: [&str; 3] = ["999999", "1000000", "60"];

/// What the command is called.
pub fn name(contestant: Contestant) -> &'static str {
    match contestant {
        Contestant::Throttlecrab => "THROTTLE",
        Contestant::Tollgate | Contestant::AlwaysAllow => "CL.THROTTLE",
    }
}

/// One connection.
pub struct Client {
    stream: TcpStream,
    pipeline: usize,
    /// What stands before and after the user.
    around: (String, String),
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
    let allowed = match contestant {
        Contestant::Throttlecrab => ALLOWED_BY_THROTTLECRAB,
        Contestant::Tollgate | Contestant::AlwaysAllow => ALLOWED,
    };
    let word = |word: &str| format!("${}\r\n{word}\r\n", word.len());
    let around = (format!("*5\r\n{}", word(name(contestant))), NUMBERS.map(word).concat());
    let mut clients = Vec::new();
    for _ in 0..connections {
        let (around, commands, replies) = (around.clone(), Vec::new(), vec![0; 16 << 10]);
        clients.push(Client {
            stream: connect(address).await?,
            pipeline,
            around,
            allowed,
            commands,
            replies,
        });
    }
    Ok(clients)
}

impl Caller for Client {
    async fn ask(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        self.commands.clear();
        for _ in 0..self.pipeline {
            let (before, after) = &self.around;
            self.commands.extend_from_slice(before.as_bytes());
            self.commands.extend_from_slice(b"$10\r\n");
            self.commands.extend_from_slice(user(random).as_bytes());
            self.commands.extend_from_slice(b"\r\n");
            self.commands.extend_from_slice(after.as_bytes());
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
