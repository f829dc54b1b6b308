//! A client of the Redis protocol.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    load::{Client, connect},
    process::Contestant,
    template::{RequestTemplate, USER, USER_LEN},
};

/// The command that is sent.
#[derive(Clone, Copy, Debug)]
pub enum Command {
    /// A limit per command: `CL.THROTTLE`, or throttlecrab's `THROTTLE`.
    Throttle,
    /// The limits of the rules: `SG.CHECK`.
    Check,
}

impl Command {
    /// Returns the words of the command, with [`USER`] in place of the user.
    pub fn words(self, contestant: Contestant) -> &'static [&'static str] {
        match (self, contestant) {
            (Self::Throttle, Contestant::Throttlecrab) => &["THROTTLE", USER, "999999", "1000000", "60"],
            (Self::Throttle, _) => &["CL.THROTTLE", USER, "999999", "1000000", "60"],
            (Self::Check, _) => &["SG.CHECK", "1", "user", USER],
        }
    }

    /// Returns the start of a reply that allows the request.
    fn allowed_prefix(self, contestant: Contestant) -> &'static [u8] {
        match (self, contestant) {
            (Self::Throttle, Contestant::Throttlecrab) => b"*5\r\n:1\r\n",
            (Self::Throttle, _) => b"*5\r\n:0\r\n",
            (Self::Check, _) => b"*8\r\n:1\r\n",
        }
    }

    /// Returns the number of lines of a reply.
    fn reply_lines(self) -> usize {
        match self {
            // the length and five integers
            Self::Throttle => 6,
            // the length, seven integers, and the rule's name after its length
            Self::Check => 10,
        }
    }

    fn template(self, contestant: Contestant) -> Result<RequestTemplate> {
        let words = self.words(contestant);
        let bulk = |word: &&str| {
            let len = if *word == USER { USER_LEN } else { word.len() };
            format!("${len}\r\n{word}\r\n")
        };
        RequestTemplate::new(&format!("*{}\r\n{}", words.len(), words.iter().map(bulk).collect::<String>()))
    }
}

/// One connection.
pub struct RespClient {
    stream: TcpStream,
    template: RequestTemplate,
    pipeline: usize,
    allowed_prefix: &'static [u8],
    reply_lines: usize,
    commands: Vec<u8>,
    replies: Vec<u8>,
}

impl RespClient {
    /// Connects a client that sends `pipeline` commands at a time.
    pub async fn connect(
        command: Command,
        pipeline: usize,
        contestant: Contestant,
        address: SocketAddr,
    ) -> Result<Self> {
        Ok(Self {
            stream: connect(address).await?,
            template: command.template(contestant)?,
            pipeline,
            allowed_prefix: command.allowed_prefix(contestant),
            reply_lines: command.reply_lines(),
            commands: Vec::new(),
            replies: vec![0; 16 << 10],
        })
    }
}

impl Client for RespClient {
    async fn send(&mut self, random: &mut fastrand::Rng) -> Result<u64> {
        self.commands.clear();
        for _ in 0..self.pipeline {
            self.template.write(random, &mut self.commands)?;
        }
        self.stream.write_all(&self.commands).await?;
        let (mut lines, mut is_first) = (0, true);
        while lines < self.reply_lines * self.pipeline {
            let len = self.stream.read(&mut self.replies).await?;
            let replies = &self.replies[..len];
            let is_expected = if is_first { replies.starts_with(self.allowed_prefix) } else { len > 0 };
            ensure!(is_expected, "unexpected reply: {}", replies.escape_ascii());
            lines += replies.iter().filter(|&&byte| byte == b'\n').count();
            is_first = false;
        }
        Ok(self.pipeline as u64)
    }
}
