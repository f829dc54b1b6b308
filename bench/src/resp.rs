//! The Redis protocol front end against a server that reads the same commands and always allows: what deciding costs.
//!
//! Clients and server share this process and its threads, so that only the ratio says something. Not measured: the
//! network, a store far away, and connections that come and go.

use std::{
    future::pending,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tollgate::{Limiter, MemoryStore};
use tollgate_server::{
    desk::Desk,
    resp::{
        self, Access, Endpoint,
        codec::{Decoded, Decoder},
    },
};

use crate::stats::Stat;

/// How many clients.
const CONNECTIONS: usize = 64;
/// How many keys they ask about.
const KEYS: u32 = 100_000;
/// How many commands a client sends at once, and which part of the always-allow server's pace is wanted.
const PIPELINES: [(usize, f64); 3] = [(1, 0.85), (16, 0.6), (64, 0.5)];
/// How long each turn lasts.
const TURN: Duration = Duration::from_millis(1_500);

const ALLOWED: &[u8] = b"*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n";
/// How many lines an answer has.
const LINES: usize = 6;

/// Measures both servers in turn, `rounds` times.
pub async fn run(rounds: usize) -> Result<()> {
    let desk = Desk::new(Limiter::new(MemoryStore::new(), [])?);
    let ours = TcpListener::bind("127.0.0.1:0").await?;
    let allowing = TcpListener::bind("127.0.0.1:0").await?;
    let addresses = [ours.local_addr()?, allowing.local_addr()?];
    tokio::spawn(resp::run(ours, Endpoint::new(desk, Access::open()), pending()));
    tokio::spawn(always_allow(allowing));
    println!("CL.THROTTLE on {KEYS} keys, {CONNECTIONS} connections, memory store, commands/s");
    println!("{:>8} {:>12} {:>13} {:>7} {:>7}", "pipeline", "tollgate", "always-allow", "ratio", "wanted");
    for (pipeline, wanted) in PIPELINES {
        let (mut paces, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
        for round in 0..rounds {
            let mut turn = [0.0; 2];
            for place in [round % 2, 1 - round % 2] {
                turn[place] = pace(addresses[place], pipeline).await?;
                paces[place].push(turn[place]);
            }
            ratios.push(turn[0] / turn[1]);
        }
        let [ours, allowing] = paces.map(|paces| Stat::of(paces).median);
        println!(
            "{pipeline:>8} {ours:>12.0} {allowing:>13.0} {:>7.2} {wanted:>7.2}",
            Stat::of(ratios).median
        );
    }
    Ok(())
}

/// How many commands a second are answered.
async fn pace(address: SocketAddr, pipeline: usize) -> Result<f64> {
    let begin = Instant::now();
    let mut clients = JoinSet::new();
    for seed in 0..CONNECTIONS {
        clients.spawn(client(address, pipeline, begin + TURN, fastrand::Rng::with_seed(seed as u64)));
    }
    let mut answered = 0;
    while let Some(count) = clients.join_next().await {
        answered += count??;
    }
    Ok(answered as f64 / begin.elapsed().as_secs_f64())
}

async fn client(
    address: SocketAddr,
    pipeline: usize,
    end: Instant,
    mut random: fastrand::Rng,
) -> Result<usize> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut commands, mut replies, mut answered) = (Vec::new(), vec![0; 16 << 10], 0);
    while Instant::now() < end {
        commands.clear();
        for _ in 0..pipeline {
            commands.extend_from_slice(b"*5\r\n$11\r\nCL.THROTTLE\r\n$10\r\nuser:");
            commands.extend_from_slice(format!("{:05}", random.u32(..KEYS)).as_bytes());
            commands.extend_from_slice(b"\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n");
        }
        stream.write_all(&commands).await?;
        let mut lines = 0;
        while lines < LINES * pipeline {
            let read = stream.read(&mut replies).await?;
            if read == 0 || replies[0] == b'-' {
                bail!("the server does not answer: {}", replies[..read].escape_ascii());
            }
            lines += replies[..read].iter().filter(|&&byte| byte == b'\n').count();
        }
        answered += pipeline;
    }
    Ok(answered)
}

/// Reads commands as the front end does, and writes the same answer to each.
async fn always_allow(listener: TcpListener) -> Result<()> {
    loop {
        let (mut stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let (mut decoder, mut input, mut output) = (Decoder::default(), Vec::new(), Vec::new());
            loop {
                input.reserve(16 << 10);
                if stream.read_buf(&mut input).await? == 0 {
                    return anyhow::Ok(());
                }
                let mut at = 0;
                loop {
                    match decoder.decode(&input[at..])? {
                        Decoded::Partial => break,
                        Decoded::Empty(read) => at += read,
                        Decoded::Command(command, read) => {
                            std::hint::black_box(command);
                            output.extend_from_slice(ALLOWED);
                            at += read;
                        }
                    }
                }
                input.drain(..at);
                stream.write_all(&output).await?;
                output.clear();
            }
        });
    }
}
