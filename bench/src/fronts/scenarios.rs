//! What is measured: the requests, their contestants and the targets.

use super::{http::Endpoint, load::Workload, process::Contestant, resp::Command, tools::Tool};
use crate::stats::Target;

/// One table.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub description: &'static str,
    /// The first is compared with each of the others.
    pub contestants: &'static [Contestant],
    pub generator: Generator,
    /// Target for the rate of the first contestant relative to its counterpart that always allows.
    pub target: Target,
}

/// The program that generates the load.
#[derive(Clone, Copy, Debug)]
pub enum Generator {
    /// The bench's own clients.
    Own(Workload),
    /// A third-party program.
    Tool(Tool),
}

/// Front ends that throttlecrab has too.
const ALL_SERVERS: &[Contestant] =
    &[Contestant::Sluicegate, Contestant::AlwaysAllow, Contestant::Throttlecrab];
const OWN_SERVERS: &[Contestant] = &[Contestant::Sluicegate, Contestant::AlwaysAllow];
const APPS: &[Contestant] = &[Contestant::LimitedApp, Contestant::PlainApp];

const fn resp(command: Command, pipeline: usize) -> Generator {
    Generator::Own(Workload::Resp { command, pipeline })
}

const fn http(endpoint: Endpoint) -> Generator {
    Generator::Own(Workload::Http(endpoint))
}

/// All scenarios, in order.
pub const SCENARIOS: [Scenario; 15] = [
    Scenario {
        name: "resp",
        description: "CL.THROTTLE (throttlecrab: THROTTLE) on 64 connections, one command at a time on each",
        contestants: ALL_SERVERS,
        generator: resp(Command::Throttle, 1),
        target: Target::Nearly(0.85),
    },
    Scenario {
        name: "resp-16",
        description: "Like *resp*, with pipelines of 16 commands",
        contestants: ALL_SERVERS,
        generator: resp(Command::Throttle, 16),
        target: Target::AtLeast(0.6),
    },
    Scenario {
        name: "resp-64",
        description: "Like *resp*, with pipelines of 64 commands",
        contestants: ALL_SERVERS,
        generator: resp(Command::Throttle, 64),
        target: Target::AtLeast(0.5),
    },
    Scenario {
        name: "resp-check",
        description: "SG.CHECK on 64 connections, one command at a time on each",
        contestants: OWN_SERVERS,
        generator: resp(Command::Check, 1),
        target: Target::AtLeast(0.85),
    },
    Scenario {
        name: "resp-check-16",
        description: "Like *resp-check*, with pipelines of 16 commands",
        contestants: OWN_SERVERS,
        generator: resp(Command::Check, 16),
        target: Target::AtLeast(0.6),
    },
    Scenario {
        name: "resp-check-64",
        description: "Like *resp-check*, with pipelines of 64 commands",
        contestants: OWN_SERVERS,
        generator: resp(Command::Check, 64),
        target: Target::AtLeast(0.5),
    },
    Scenario {
        name: "http",
        description: "POST /v1/check (throttlecrab: POST /throttle) on 64 connections; the always-allow server uses axum",
        contestants: ALL_SERVERS,
        generator: http(Endpoint::Check),
        target: Target::Nearly(0.85),
    },
    Scenario {
        name: "forward-auth",
        description: "GET /v1/auth with the `X-Forwarded-*` headers of a trusted proxy on 64 connections; the always-allow server uses axum and sends the same `RateLimit` headers",
        contestants: OWN_SERVERS,
        generator: http(Endpoint::ForwardAuth),
        target: Target::AtLeast(0.85),
    },
    Scenario {
        name: "grpc",
        description: "ShouldRateLimit (throttlecrab: Throttle) with tonic's client, 64 concurrent calls on 4 connections; the always-allow server uses tonic",
        contestants: ALL_SERVERS,
        generator: Generator::Own(Workload::Grpc),
        target: Target::Nearly(0.85),
    },
    Scenario {
        name: "tower",
        description: "GET / of a hello-world axum app on 64 connections: with `RateLimitLayer` and a limit per header value (*sluicegate-tower*), and without the layer (*axum*)",
        contestants: APPS,
        generator: http(Endpoint::App),
        target: Target::AtLeast(0.85),
    },
    Scenario {
        name: "redis-benchmark",
        description: "The commands of *resp*, sent by one redis-benchmark per core",
        contestants: ALL_SERVERS,
        generator: Generator::Tool(Tool::RedisBenchmark { pipeline: 1 }),
        target: Target::Nearly(0.85),
    },
    Scenario {
        name: "redis-benchmark-16",
        description: "Like *redis-benchmark*, with pipelines of 16 commands",
        contestants: ALL_SERVERS,
        generator: Generator::Tool(Tool::RedisBenchmark { pipeline: 16 }),
        target: Target::AtLeast(0.6),
    },
    Scenario {
        name: "redis-benchmark-64",
        description: "Like *redis-benchmark*, with pipelines of 64 commands",
        contestants: ALL_SERVERS,
        generator: Generator::Tool(Tool::RedisBenchmark { pipeline: 64 }),
        target: Target::AtLeast(0.5),
    },
    Scenario {
        name: "wrk",
        description: "The requests of *http*, sent by wrk",
        contestants: ALL_SERVERS,
        generator: Generator::Tool(Tool::Wrk),
        target: Target::Nearly(0.85),
    },
    Scenario {
        name: "h2load",
        description: "The calls of *grpc*, all for one user, sent by h2load",
        contestants: ALL_SERVERS,
        generator: Generator::Tool(Tool::H2load),
        target: Target::Nearly(0.85),
    },
];
