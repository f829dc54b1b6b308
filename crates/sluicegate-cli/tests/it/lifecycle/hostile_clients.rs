//! Hostile clients: they neither block other clients nor use much memory.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    thread,
};

use sluicegate_testkit::wait::{self, PATIENCE};

use super::reload::{Checker, by_grpc, by_http, by_resp};
use crate::{
    http_client::Client,
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

/// More than the connection limit of one front end.
const INCOMPLETE_REQUESTS: usize = 2_000;
const FRONTS: usize = 3;
/// The maximum memory growth by all hostile clients of one front end, in bytes.
const MAX_GROWTH: usize = 64 << 20;
const HUGE_BODY: usize = 64 << 20;

fn start() -> (ConfigDir, ServerProcess) {
    let home = ConfigDir::new(ANY_PORTS);
    let program = home.start();
    (home, program)
}

fn assert_serves(client: &mut Client) {
    let response = client.post("/v1/check", r#"{"labels":{"user":"a"}}"#).unwrap();
    assert_eq!(response.status, 200, "{}", response.body);
}

/// Returns everything received until the connection was closed or reset; none after a timeout.
fn read_to_end(mut stream: TcpStream) -> Option<String> {
    stream.set_read_timeout(Some(2 * PATIENCE)).unwrap();
    let mut received = Vec::new();
    let mut buffer = [0; 4 << 10];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => received.extend_from_slice(&buffer[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock) => return None,
            Err(_) => break,
        }
    }
    Some(String::from_utf8_lossy(&received).into_owned())
}

/// A front end, a well-behaved client, and the incomplete requests of hostile clients.
struct Front<'a> {
    address: &'a str,
    connect: fn(&ServerProcess) -> Checker,
    incomplete: Vec<Vec<u8>>,
}

#[test]
fn incomplete_requests_block_no_other_client_and_are_closed() {
    raise_open_file_limit();
    let (_home, program) = start();
    let texts = |texts: &[&str]| texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let half_call = [&*hello, b"\0\x10\0\x01\x04\0\0\0\x01half"].concat();
    let fronts: [_; FRONTS] = [
        Front {
            address: &program.http,
            connect: by_http,
            incomplete: texts(&[
                "",
                "POST /v1/ch",
                "POST /v1/check HTTP/1.1\r\nhost: a\r\nx-a: ",
                "POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{\"labels\"",
            ]),
        },
        Front {
            address: &program.resp,
            connect: by_resp,
            incomplete: texts(&["", "PIN", "*2\r\n$4\r\nEC", "*64\r\n$60000\r\nx"]),
        },
        Front {
            address: &program.grpc,
            connect: by_grpc,
            incomplete: vec![Vec::new(), hello[..10].to_vec(), hello, half_call],
        },
    ];
    let before = program.peak_memory();
    thread::scope(|scope| {
        for Front { address, connect, incomplete } in fronts {
            let program = &program;
            scope.spawn(move || {
                let mut old = connect(program);
                old();
                let mut streams = Vec::new();
                for number in 0..INCOMPLETE_REQUESTS {
                    let mut stream = TcpStream::connect(address).unwrap();
                    stream.write_all(&incomplete[number % incomplete.len()]).unwrap();
                    streams.push(stream);
                    if number % 100 == 0 {
                        old();
                    }
                }
                connect(program)();
                old();
                let responses: Vec<_> = streams.into_iter().map(read_to_end).collect();
                assert_eq!(
                    responses.iter().filter(|response| response.is_none()).count(),
                    0,
                    "some connections stay open on {address}"
                );
                connect(program)();
            });
        }
    });
    let grown = program.peak_memory() - before;
    assert!(grown < FRONTS * MAX_GROWTH, "{grown} bytes");
}

/// The bounds are about twice what is needed.
#[test]
fn an_idle_connection_keeps_little_memory_which_is_freed_after_it_is_closed() {
    const CONNECTIONS: usize = 1_000;
    /// Maximum memory of a closed connection that the allocator keeps, in bytes.
    const KEPT: usize = 8 << 10;
    const HTTP: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n";
    raise_open_file_limit();
    for (front, request, max_kib) in [("http", HTTP, 48), ("resp", b"PING\r\n", 10)] {
        let (_home, program) = start();
        let address = if front == "http" { &program.http } else { &program.resp };
        assert_serves(&mut program.client());
        let before = program.memory();
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(request).unwrap();
            assert!(stream.read(&mut [0; 1 << 10]).unwrap() > 0);
            connections.push(stream);
        }
        let each = (program.memory() - before) / CONNECTIONS;
        assert!(each < max_kib << 10, "{front}: {each} bytes per connection");
        drop(connections);
        wait::until("the memory is freed", PATIENCE, || {
            // the allocator returns memory while it is used
            (0..10).for_each(|_| assert_serves(&mut program.client()));
            program.memory().saturating_sub(before) < CONNECTIONS * KEPT
        });
    }
}

#[test]
fn a_huge_body_is_rejected_before_it_is_read_completely() {
    let (_home, program) = start();
    let mut other = program.client();
    assert_serves(&mut other);
    let before = program.peak_memory();
    for path in ["/v1/check", "/v1/charge", "/v1/auth"] {
        for framing in [format!("content-length: {HUGE_BODY}"), "transfer-encoding: chunked".to_owned()] {
            let mut stream = TcpStream::connect(&program.http).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            write!(stream, "POST {path} HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n").unwrap();
            let mut piece = format!("{:x}\r\n", 1 << 20).into_bytes();
            piece.resize(piece.len() + (1 << 20), b' ');
            piece.extend_from_slice(b"\r\n");
            for _ in 0..HUGE_BODY >> 20 {
                // fails once the server has closed the connection
                if stream.write_all(&piece).is_err() {
                    break;
                }
            }
            assert_serves(&mut other);
            let response = read_to_end(stream).expect("the connection should be closed");
            let status = response.split(' ').nth(1).unwrap_or_default();
            assert!(["", "413", "200"].contains(&status), "{path} {framing}: {response}");
        }
    }
    let grown = program.peak_memory() - before;
    assert!(grown < HUGE_BODY / 2, "{grown} bytes");
}

#[test]
fn endless_request_heads_are_rejected() {
    let (_home, program) = start();
    let mut other = program.client();
    assert_serves(&mut other);
    let before = program.peak_memory();
    let long = "a".repeat(32 << 10);
    let many = "x-a: b\r\n".repeat(200_000);
    let streams = [
        format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", long.repeat(64)),
        format!("GET /healthz HTTP/1.1\r\nhost: a\r\nx-a: {}\r\n\r\n", long.repeat(64)),
        format!("GET /healthz HTTP/1.1\r\nhost: a\r\n{many}\r\n"),
        format!("GET /healthz HTTP/1.1\r\nhost: a\r\n{}: b\r\n\r\n", long.repeat(64)),
        long.repeat(64),
        "\r\n".repeat(1 << 20),
    ];
    for data in streams {
        let mut stream = TcpStream::connect(&program.http).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        // fails once the server has closed the connection
        let _ = stream.write_all(data.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        assert_serves(&mut other);
        let response = read_to_end(stream).expect("the connection should be closed");
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 4"), "{response}");
    }
    let grown = program.peak_memory() - before;
    assert!(grown < MAX_GROWTH, "{grown} bytes");
}

/// Raises the open file limit of this process and its children.
fn raise_open_file_limit() {
    let allowed = sluicegate_server::net::listener::raise_open_files_limit();
    let needed = u64::try_from(FRONTS * INCOMPLETE_REQUESTS).unwrap() + 500;
    assert!(allowed >= needed, "this test opens {needed} files: raise the limit (ulimit -Hn)");
}
