//! The Redis protocol, bytes in and bytes out, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use sluicegate::{Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    engine::Engine,
    resp::Endpoint,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    task::JoinHandle,
};

const MINUTE: Duration = Duration::from_secs(60);
const NOW_US: u64 = 1_794_765_441_799_839;

/// More bytes than any test sends without reading.
const PIPE: usize = 1 << 20;

struct Api {
    endpoint: Endpoint,
    clock: ManualClock,
}

impl Api {
    fn new(rules: impl IntoIterator<Item = Rule>, access: Access) -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
        let store = MemoryStore::new().with_clock(clock.clone());
        let engine = Engine::new(Limiter::new(store, rules).unwrap());
        Self { endpoint: Endpoint::new(engine, access), clock }
    }

    fn without_rules() -> Self {
        Self::new([], Access::default())
    }

    /// Two logins per minute and address.
    fn with_login_rule() -> Self {
        let limit = Limit::sliding_log(2, MINUTE).unwrap();
        Self::new([Rule::new("login-per-ip", limit).when("route", "login").per(["ip"])], Access::default())
    }

    fn connect(&self) -> Client {
        let (io, served) = duplex(PIPE);
        let endpoint = self.endpoint.clone();
        let server = tokio::spawn(async move { endpoint.serve(served).await });
        Client { io, server }
    }

    /// Returns all replies of one connection to these lines, without line breaks.
    async fn run(&self, lines: &[&str]) -> String {
        let bytes: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\r\n").into_bytes()).collect();
        String::from_utf8(self.send(&bytes).await).unwrap().trim_end().replace("\r\n", " ")
    }

    /// Returns all replies of one connection to these bytes.
    async fn send(&self, bytes: &[u8]) -> Vec<u8> {
        let mut client = self.connect();
        client.io.write_all(bytes).await.unwrap();
        client.io.shutdown().await.unwrap();
        client.rest().await
    }
}

struct Client {
    io: DuplexStream,
    server: JoinHandle<()>,
}

impl Client {
    async fn send(&mut self, bytes: &[u8]) {
        self.io.write_all(bytes).await.unwrap();
    }

    async fn rest(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.io.read_to_end(&mut bytes).await.unwrap();
        self.server.await.unwrap();
        bytes
    }

    /// Expects exactly these bytes next.
    async fn expect(&mut self, expected: &str) {
        let mut bytes = vec![0; expected.len()];
        self.io.read_exact(&mut bytes).await.unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
    }
}

/// Encodes a command.
fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

fn integers(values: &[i64]) -> String {
    let values: Vec<_> = values.iter().map(|value| format!(" :{value}")).collect();
    format!("*{}{}", values.len(), values.concat())
}

#[tokio::test]
async fn the_vectors_of_redis_cell() {
    let api = Api::without_rules();
    // time in ms, quantity: limited, remaining, reset after, retry after
    let table = [
        (0, 6, [1, 5, 0, -1]),
        (0, 1, [0, 4, 1, -1]),
        (0, 1, [0, 3, 2, -1]),
        (0, 1, [0, 2, 3, -1]),
        (0, 1, [0, 1, 4, -1]),
        (0, 1, [0, 0, 5, -1]),
        (0, 1, [1, 0, 5, 1]),
        (3_000, 1, [0, 2, 3, -1]),
        // 3.9 s, rounded up
        (3_100, 1, [0, 1, 4, -1]),
        (4_000, 1, [0, 1, 4, -1]),
        (8_000, 1, [0, 4, 1, -1]),
        (9_500, 1, [0, 4, 1, -1]),
        (9_500, 0, [0, 4, 1, -1]),
        (9_500, 2, [0, 2, 3, -1]),
        (9_500, 5, [1, 2, 3, 3]),
    ];
    for (at_ms, quantity, [limited, remaining, reset, retry]) in table {
        api.clock.set(Timestamp::from_micros(NOW_US + 1_000 * at_ms));
        let reply = api.run(&[&format!("CL.THROTTLE key 4 1 1 {quantity}")]).await;
        assert_eq!(reply, integers(&[limited, 5, remaining, retry, reset]), "{quantity} at {at_ms} ms");
    }
}

#[tokio::test]
async fn the_examples_of_redis_cell() {
    let api = Api::without_rules();
    assert_eq!(api.run(&["CL.THROTTLE user123 0 1 2 1"]).await, integers(&[0, 1, 0, -1, 2]));
    assert_eq!(api.run(&["CL.THROTTLE user123 0 1 2 1"]).await, integers(&[1, 1, 0, 2, 2]));
    api.clock.advance(Duration::from_secs(2));
    assert_eq!(api.run(&["cl.throttle user123 0 1 2"]).await, integers(&[0, 1, 0, -1, 2]));
    assert_eq!(api.run(&["CL.THROTTLE other 15 30 60"]).await, integers(&[0, 16, 15, -1, 2]));
    for (rate, seconds) in [("24 86400", 3600), ("6 3600", 600), ("6 60", 10), ("6 120", 20), ("5 1", 1)] {
        let reply = api.run(&[&format!("CL.THROTTLE {} 0 {rate}", rate.replace(' ', ":"))]).await;
        assert_eq!(reply, integers(&[0, 1, 0, -1, seconds]), "{rate}");
    }
}

#[tokio::test]
async fn a_wait_below_a_millisecond_is_not_zero_seconds() {
    let api = Api::without_rules();
    assert_eq!(api.run(&["CL.THROTTLE k 0 1000000 1"]).await, integers(&[0, 1, 0, -1, 1]));
    assert_eq!(api.run(&["CL.THROTTLE k 0 1000000 1"]).await, integers(&[1, 1, 0, 1, 1]));
}

#[tokio::test]
async fn errors_of_cl_throttle_are_those_of_redis_cell() {
    let api = Api::without_rules();
    let usage = "-Cell error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
    for line in ["CL.THROTTLE", "CL.THROTTLE k 1 2", "CL.THROTTLE k 1 2 3 4 5"] {
        assert_eq!(api.run(&[line]).await, usage, "{line}");
    }
    let table = [
        ("k x 1 1", "-Cell error: Couldn't parse as integer: x"),
        ("k 1 1.5 1", "-Cell error: Couldn't parse as integer: 1.5"),
        ("k 1 1 1 18446744073709551616", "-Cell error: Couldn't parse as integer: 18446744073709551616"),
        ("k 1 0 1", "-Cell error: Zero rates are not supported"),
        ("k 1 1 0", "-Cell error: Zero rates are not supported"),
        ("k 1 1 1 -1", "-ERR quantity -1 is negative: use 0 or more"),
        ("k -1 1 1", "-ERR max_burst -1 is negative: use 0 or more"),
        ("k 1000000000 1 1", "-ERR burst 1000000001 is out of range: use 1 to 1000000000"),
        (
            "k 1 1 1 9007199254740993",
            "-ERR cost 9007199254740993 is too large: use a whole number from 0 to 9007199254740991",
        ),
        ("\"\" 1 1 1", "-ERR key is empty: identify the caller, for example \"user:42\""),
    ];
    for (arguments, error) in table {
        assert_eq!(api.run(&[&format!("CL.THROTTLE {arguments}")]).await, error, "{arguments}");
    }
    assert_eq!(api.run(&["CL.THROTTLE k 1 1 1 0"]).await, integers(&[0, 2, 2, -1, 0]), "nothing was charged");
}

#[tokio::test]
async fn a_reset_keeps_shared_counters_unless_their_rules_are_selected() {
    let limit = Limit::sliding_log(10, MINUTE).unwrap();
    let api =
        Api::new([Rule::new("per-ip", limit).per(["ip"]), Rule::new("total", limit)], Access::default());
    let (check, keyed) = ("SG.CHECK 1 ip a", "*3 :1 $6 per-ip $8 per-ip:a");
    api.run(&[check]).await;
    assert_eq!(api.run(&["SG.RESET ip a"]).await, keyed);
    assert_eq!(api.run(&["SG.RESET rules=per-ip,total ip a"]).await, "*3 :1 $5 total $7 total:*");
    api.run(&[check]).await;
    assert_eq!(api.run(&["SG.RESET ALL ip a"]).await, "*5 :2 $6 per-ip $8 per-ip:a $5 total $7 total:*");
    // an even number of arguments has no selection: these are labels
    assert_eq!(api.run(&["SG.RESET ALL a"]).await, "*1 :0");
    for (command, error) in [
        ("SG.RESET ip a b", "-ERR 'ip' is neither ALL nor RULES=name,..."),
        ("SG.RESET RULES= ip a", "-ERR there is no rule \"\": use per-ip, total"),
        ("SG.RESET RULES=other ip a", "-ERR there is no rule \"other\": use per-ip, total"),
    ] {
        let reply = api.run(&[command]).await;
        assert!(reply.starts_with(error), "{command}: {reply}");
    }
}

#[tokio::test]
async fn rules_decide_a_check_and_the_reply_names_the_deciding_one() {
    let api = Api::with_login_rule();
    let at = NOW_US;
    let login = "route login ip 203.0.113.9";
    let allowed = |left, wait_ms| format!("*8 :1 :2 :{left} :-1 :{wait_ms} $12 login-per-ip :0 :{at}");
    let check = format!("SG.CHECK 1 {login}");
    assert_eq!(api.run(&[&check]).await, allowed(1, 60_000));
    assert_eq!(api.run(&[&format!("SG.PEEK {login}")]).await, allowed(1, 60_000));
    assert_eq!(api.run(&[&format!("sg.check requests=1,tokens=850 {login}")]).await, allowed(0, 60_000));
    let denied = format!("*8 :0 :2 :0 :60000 :60000 $12 login-per-ip :0 :{at}");
    assert_eq!(api.run(&[&check]).await, denied);
    assert_eq!(api.run(&[&format!("SG.REFUND 1 {login}")]).await, allowed(1, 60_000));
    assert_eq!(api.run(&[&format!("SG.CHARGE 5 {login}")]).await, allowed(0, 60_000));
    assert_eq!(api.run(&[&check]).await, denied);
    let reset = format!("SG.RESET {login}");
    let deleted = "*3 :1 $12 login-per-ip $24 login-per-ip:203.0.113.9 *1 :0";
    assert_eq!(api.run(&[&reset, &reset]).await, deleted);
    assert_eq!(api.run(&[&check]).await, allowed(1, 60_000));
    let never = format!("*8 :0 :2 :1 :-1 :60000 $12 login-per-ip :0 :{at}");
    assert_eq!(api.run(&[&format!("SG.CHECK 3 {login}")]).await, never, "waiting would not help");
}

#[tokio::test]
async fn without_a_matching_rule_the_reply_has_no_values() {
    let api = Api::with_login_rule();
    assert_eq!(api.run(&["SG.CHECK 1 route other"]).await, "*8 :1 :-1 :-1 :-1 :-1 $-1 :0 :-1");
    let resp3 = api.run(&["HELLO 3", "SG.CHECK 1 route other"]).await;
    assert!(resp3.ends_with("*8 :1 :-1 :-1 :-1 :-1 _ :0 :-1"), "{resp3}");
}

#[tokio::test]
async fn hostile_numbers_are_rejected_and_charge_nothing() {
    let api = Api::with_login_rule();
    let login: [&[u8]; 4] = [b"route", b"login", b"ip", b"203.0.113.9"];
    let numbers = [
        "-1",
        "1.5",
        "9007199254740993",
        "18446744073709551616",
        "1e400",
        "NaN",
        "0x10",
        "",
        " 1",
        "1 ",
        "+1",
        "inf",
        "requests=-1",
        "requests=1.5",
        "requests=",
        "=",
        ",",
        "requests=1,requests=1",
        "\u{661}",
    ];
    for number in numbers {
        for name in [&b"SG.CHECK"[..], b"SG.CHARGE", b"SG.REFUND"] {
            let words = [&[name, number.as_bytes()][..], &login].concat();
            let reply = String::from_utf8(api.send(&command(&words)).await).unwrap();
            assert!(reply.starts_with("-ERR ") && reply.ends_with("\r\n"), "{number:?}: {reply}");
        }
        let words: [&[u8]; 6] = [b"CL.THROTTLE", b"k", b"4", b"1", b"1", number.as_bytes()];
        let reply = String::from_utf8(api.send(&command(&words)).await).unwrap();
        assert!(reply.starts_with("-ERR ") || reply.starts_with("-Cell error: "), "{number:?}: {reply}");
    }
    let untouched = api.run(&["SG.PEEK route login ip 203.0.113.9", "CL.THROTTLE k 4 1 1 0"]).await;
    assert_eq!(
        untouched,
        format!("*8 :1 :2 :2 :-1 :0 $12 login-per-ip :0 :{NOW_US} {}", integers(&[0, 5, 5, -1, 0]))
    );
}

#[tokio::test]
async fn errors_in_labels_name_the_fix() {
    let api = Api::with_login_rule();
    let table = [
        ("SG.CHECK 1", "-ERR wrong number of arguments for 'sg.check' command"),
        ("SG.PEEK a", "-ERR wrong number of arguments for 'sg.peek' command"),
        ("SG.CHECK 1 route login ip", "-ERR a label has no value: send label value [label value ...]"),
        ("SG.CHECK 1 a 1 a 2", "-ERR label \"a\" is given more than once: give each label one value"),
        ("SG.CHECK 1 \"\\xff\" 1", "-ERR label name '\\xff' is not UTF-8: use UTF-8 text"),
    ];
    for (line, error) in table {
        assert_eq!(api.run(&[line]).await, error, "{line}");
    }
    let long = format!("SG.CHECK 1 a {}", "v".repeat(1025));
    let error = "-ERR label \"a\" has a value of 1025 bytes: use at most 1024, or a hash of it";
    assert_eq!(api.run(&[&long]).await, error);
}

#[tokio::test]
async fn a_pipeline_is_answered_in_order_however_it_is_split() {
    let lines = "PING\r\nCL.THROTTLE k 1 1 60\r\n\r\nECHO a\r\nCL.THROTTLE k 1 1 60\r\nnope\r\nCL.THROTTLE k 1 1 60\r\n";
    let bulk = [command(&[b"ECHO", b"b\r\nc"]), command(&[b"QUIT"]), command(&[b"PING"])].concat();
    let bytes = [lines.as_bytes(), &bulk].concat();
    let expected = "+PONG\r\n*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:60\r\n$1\r\na\r\n*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:120\r\n\
        -ERR unknown command 'nope', with args beginning with: \r\n*5\r\n:1\r\n:2\r\n:0\r\n:60\r\n:120\r\n\
        $4\r\nb\r\nc\r\n+OK\r\n";
    for piece in [bytes.len(), 1, 2, 7, 50] {
        let api = Api::without_rules();
        let mut client = api.connect();
        for part in bytes.chunks(piece) {
            client.send(part).await;
            tokio::task::yield_now().await;
        }
        client.expect(expected).await;
        client.io.shutdown().await.unwrap();
        assert_eq!(client.rest().await, b"", "nothing is answered after QUIT");
    }
}

/// Consecutive throttles are decided in one batch, and other commands wait for it.
#[tokio::test]
async fn a_pipeline_has_the_same_replies_as_single_commands() {
    let long = "k".repeat(1025);
    let mut chance = 1_u64;
    let mut any = |count: usize| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(chance >> 33).unwrap() % count
    };
    let commands: Vec<Vec<u8>> = (0..500)
        .map(|place| {
            let key = format!("key:{}", any(9));
            let words = match any(30) {
                0 => "PING".to_owned(),
                1 => "SG.CHECK 1 route login ip 1".to_owned(),
                2 => format!("CL.THROTTLE {key} 3 x 60"),
                3 => format!("CL.THROTTLE {long} 3 1 60"),
                4 => format!("CL.THROTTLE {key} 3 0 60"),
                5 => format!("ECHO {place}"),
                6..12 => format!("CL.THROTTLE {key} {} 1 3600 {}", any(40), any(5)),
                12..14 => format!("CL.THROTTLE {key}{place} 3 1 60"),
                _ => format!("CL.THROTTLE {key} 15 30 3600"),
            };
            if any(8) == 0 {
                return format!("{words}\r\n").into_bytes();
            }
            let words: Vec<_> = words.split(' ').map(str::as_bytes).collect();
            command(&words)
        })
        .collect();
    let one_by_one = Api::with_login_rule();
    let mut client = one_by_one.connect();
    let mut expected = Vec::new();
    for command in &commands {
        client.send(command).await;
        client.send(&self::command(&[b"ECHO", b"end of this"])).await;
        let end = b"$11\r\nend of this\r\n";
        let start = expected.len();
        while !expected[start..].ends_with(end) {
            expected.push(client.io.read_u8().await.unwrap());
        }
        expected.truncate(expected.len() - end.len());
    }
    let answers = Api::with_login_rule().send(&commands.concat()).await;
    assert_eq!(answers.escape_ascii().to_string(), expected.escape_ascii().to_string());
    let denied = expected.windows(8).filter(|bytes| bytes == b"*5\r\n:1\r\n").count();
    assert!(denied > 50, "{denied}");
}

/// For pipelines of every kind of command, and of empty lines.
#[tokio::test]
async fn a_long_pipeline_yields_to_other_tasks() {
    let throttles = |count| command(&[b"CL.THROTTLE", b"k", b"15", b"30", b"60"]).repeat(count);
    let pieces = [
        throttles(1),
        [&throttles(3), &b"PING\r\n"[..]].concat(),
        [&throttles(3), &b"\n"[..]].concat(),
        b"\n".to_vec(),
    ];
    for piece in pieces {
        let api = Api::without_rules();
        let mut client = api.connect();
        client.send(&[b"PING\r\n", &*piece.repeat(PIPE / 2 / piece.len())].concat()).await;
        client.io.shutdown().await.unwrap();
        let mut turns = 0;
        while !client.server.is_finished() {
            tokio::task::yield_now().await;
            turns += 1;
        }
        assert!(turns > 10, "{turns} for {}", piece.escape_ascii());
    }
}

#[tokio::test]
async fn replies_do_not_wait_for_the_rest_of_a_pipeline() {
    let api = Api::without_rules();
    let mut client = api.connect();
    client.send(b"PING\r\n*2\r\n$4\r\nECHO\r\n$3\r\nab").await;
    client.expect("+PONG\r\n").await;
    client.send(b"c\r\n").await;
    client.expect("$3\r\nabc\r\n").await;
}

#[tokio::test]
async fn a_protocol_error_is_reported_once_and_closes_the_connection() {
    let api = Api::without_rules();
    let table = [
        ("*1000\r\n", "invalid multibulk length"),
        ("*1\r\n$536870912\r\n", "invalid bulk length"),
        ("*1\r\n*1\r\n*1\r\n", "expected '$', got '*'"),
        ("PING \"\r\n", "unbalanced quotes in request"),
    ];
    for (bytes, error) in table {
        let mut client = api.connect();
        client.send(format!("PING\r\n{bytes}PING\r\nPING\r\n").as_bytes()).await;
        client.expect(&format!("+PONG\r\n-ERR Protocol error: {error}\r\n")).await;
        let mut rest = Vec::new();
        client.io.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"", "{bytes:?}");
    }
}

#[tokio::test]
async fn http_requests_of_a_browser_are_not_executed() {
    let api = Api::without_rules();
    let request = "POST / HTTP/1.1\r\nHost: localhost\r\n\r\nCL.THROTTLE k 0 1 60\r\n";
    assert_eq!(api.send(request.as_bytes()).await, b"");
    assert_eq!(
        api.send(b"GET / HTTP/1.1\r\nHost: a\r\nPING\r\n").await.iter().filter(|&&b| b == b'\n').count(),
        1
    );
    assert_eq!(api.run(&["CL.THROTTLE k 0 1 60 0"]).await, integers(&[0, 1, 1, -1, 0]));
}

#[tokio::test]
async fn connection_commands_of_clients_are_answered() {
    let api = Api::without_rules();
    let version = env!("CARGO_PKG_VERSION");
    let fields = format!(
        "$6 server $10 sluicegate $7 version ${} {version} $4 mode $10 standalone $4 role $6 master $5 proto",
        version.len()
    );
    let rest = "$2 id :1 $7 modules *0";
    assert_eq!(api.run(&["HELLO"]).await, format!("*14 {fields} :2 {rest}"));
    let hello = api.run(&["HELLO 3 SETNAME me", "CLIENT GETNAME"]).await;
    assert_eq!(hello, format!("%7 {fields} :3 {} $2 me", rest.replace(":1", ":2")));
    let table = [
        ("PING hi", "$2 hi"),
        ("PING a b", "-ERR wrong number of arguments for 'ping' command"),
        ("ECHO", "-ERR wrong number of arguments for 'echo' command"),
        ("HELLO 4", "-NOPROTO unsupported protocol version"),
        ("HELLO x", "-ERR Protocol version is not an integer or out of range"),
        ("HELLO 3 NOPE", "-ERR Syntax error in HELLO option 'NOPE'"),
        ("SELECT 0", "+OK"),
        ("SELECT 1", "-ERR DB index is out of range"),
        ("CLIENT SETINFO LIB-NAME redis-py", "+OK"),
        ("CLIENT NO-EVICT on", "+OK"),
        (
            "client setname \"a b\"",
            "-ERR Client names cannot contain spaces, newlines or special characters.",
        ),
        ("CLIENT SETNAME", "-ERR wrong number of arguments for 'client|setname' command"),
        ("CLIENT KILL x", "-ERR unknown subcommand 'KILL'. Try CLIENT HELP."),
        ("CLIENT GETNAME", "$-1"),
        ("COMMAND COUNT", ":20"),
        ("COMMAND INFO cl.throttle nope", "*2 *6 $11 cl.throttle :-1 *2 +write +fast :1 :1 :1 $-1"),
        ("RESET", "+RESET"),
        (
            "AUTH x",
            "-ERR AUTH <password> called without any password configured for the default user. Are you sure \
                    your configuration is correct?",
        ),
        ("GET a", "-ERR unknown command 'GET', with args beginning with: 'a'"),
        ("\"a\\r\\n+OK\" b", "-ERR unknown command 'a  +OK', with args beginning with: 'b'"),
    ];
    for (line, reply) in table {
        assert_eq!(api.run(&[line]).await, reply, "{line}");
    }
    let reset = api.run(&["HELLO 3", "CLIENT SETNAME me", "RESET", "CLIENT GETNAME"]).await;
    assert!(reset.ends_with("+OK +RESET $-1"), "RESP2 again, and no name: {reset}");
    let list = api.run(&["COMMAND", "COMMAND DOCS", "COMMAND LIST"]).await;
    assert_eq!(list.matches("$8 sg.check").count(), 3, "{list}");
}

#[tokio::test]
async fn info_counts_connections_commands_and_errors() {
    let api = Api::without_rules();
    let _other = api.connect();
    api.run(&["PING", "PING", "*x"]).await;
    tokio::task::yield_now().await;
    let info = api.run(&["INFO"]).await;
    for line in [
        "connected_clients:2",
        "total_connections_received:3",
        "total_commands_processed:2",
        "protocol_errors:1",
        "loading:0",
    ] {
        assert!(info.contains(line), "{line} in {info}");
    }
    let some = api.run(&["INFO clients"]).await;
    assert!(some.contains("maxclients:") && !some.contains("loading"), "{some}");
}

#[tokio::test]
async fn passwords_authenticate_and_scopes_authorize() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let rules = [Rule::new("login-per-ip", limit).when("route", "login").per(["ip"])];
    let api = Api::new(
        rules,
        Access::new(vec![
            Token::new("ops", b"all", Scopes::ALL),
            Token::new("proxy", b"s3cret", Scopes { check: true, ..Scopes::default() }),
            Token::new("billing", b"0ther", Scopes { adjust: true, ..Scopes::default() }),
        ]),
    );
    let denied = "-NOAUTH Authentication required.";
    for line in ["PING", "SG.CHECK 1 a b", "CL.THROTTLE k 1 1 1", "COMMAND", "INFO", "CLIENT ID", "nope"] {
        assert_eq!(api.run(&[line]).await, denied, "{line}");
    }
    assert!(api.run(&["HELLO 3"]).await.starts_with("-NOAUTH HELLO must be called"));
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.";
    assert_eq!(
        api.run(&["AUTH nope", "AUTH proxy all", "HELLO 3 AUTH proxy all", "PING"]).await,
        [wrong, wrong, wrong, denied].join(" ")
    );
    assert_eq!(
        api.run(&["AUTH all", "SG.RESET route login ip a", "RESET", "PING"]).await,
        format!("+OK *1 :0 +RESET {denied}")
    );
    assert!(
        api.run(&["HELLO 2 AUTH proxy s3cret SETNAME me", "CLIENT GETNAME", "PING"])
            .await
            .ends_with("$2 me +PONG")
    );

    let may_not = |name: &str| format!("-NOPERM this token has no permission to run the '{name}' command");
    let lines =
        ["AUTH proxy s3cret", "SG.CHARGE 1 a b", "SG.REFUND 1 a b", "SG.RESET a b", "CL.THROTTLE k 0 1 1 0"];
    let expected = format!(
        "+OK {} {} {} {}",
        may_not("sg.charge"),
        may_not("sg.refund"),
        may_not("sg.reset"),
        integers(&[0, 1, 1, -1, 0])
    );
    assert_eq!(api.run(&lines).await, expected);
    let lines =
        ["AUTH billing 0ther", "SG.PEEK a b", "SG.CHECK 1 a b", "CL.THROTTLE k 0 1 1", "SG.CHARGE 1 a b"];
    let nothing = "*8 :1 :-1 :-1 :-1 :-1 $-1 :0 :-1";
    let expected =
        format!("+OK {} {} {} {nothing}", may_not("sg.peek"), may_not("sg.check"), may_not("cl.throttle"));
    assert_eq!(api.run(&lines).await, expected);
}
