use std::{
    io::{Read, Write},
    net::TcpListener,
    thread,
};

use super::server;
use crate::command::{CommandOutput, run, sluicegate};

/// Runs `health` with a server that sends this response.
fn health_of(response: &'static str) -> CommandOutput {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        _ = connection.read(&mut [0; 4096]).unwrap();
        connection.write_all(response.as_bytes()).unwrap();
    });
    run(&mut sluicegate(&["health", "--server", &address]))
}

#[test]
fn a_running_server_is_ready() {
    let (_home, server) = server();
    let output = server.run(&["health"]);
    assert_eq!((output.code, &*output.out), (Some(0), "READY  store ok, rules ok\n"), "{output:?}");
    let (code, json) = server.run(&["health", "--json"]).json();
    assert_eq!((code, &json["ready"]), (Some(0), &true.into()));
}

#[test]
fn a_server_that_should_receive_no_traffic_is_not_ready() {
    let output = health_of(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 47\r\nconnection: close\r\n\r\n\
         {\"ready\":false,\"store\":\"degraded\",\"rules\":\"ok\"}",
    );
    assert_eq!((output.code, &*output.out), (Some(1), "NOT READY  store degraded, rules ok\n"), "{output:?}");
}

#[test]
fn another_program_on_the_port_is_an_error() {
    let output = health_of("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
    assert_eq!((output.code, &*output.out), (Some(2), ""), "{output:?}");
    assert!(output.err.contains("is not a sluicegate server"), "{output:?}");
}
