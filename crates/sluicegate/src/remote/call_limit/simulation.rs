//! A simulation of the call limit: processes with callers in a closed loop, a network, and one server that serves one call at
//! a time. Time is simulated, so that runs are deterministic.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use super::*;

/// The time a call takes on the server, and what each of its checks adds.
const CALL_US: u64 = 8;
const CHECK_US: u64 = 4;
const MAX_BATCH: usize = 64;
const SECOND: u64 = 1_000_000;
const DEADLINE_US: u64 = 50_000;

/// A process. Each of its callers waits for its answer before it sends the next check.
struct Process {
    calls: CallLimit,
    waiting: usize,
    decisions: u64,
}

/// A call in flight.
struct Call {
    process: usize,
    checks: usize,
    sent: Sent,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    ArrivesAtServer(usize),
    ServerIsDone,
    ArrivesAtProcess(usize),
    /// No reply came by the deadline.
    Abandoned(usize),
    /// This many callers start in a process.
    Start(usize, usize),
}

struct World {
    origin: Instant,
    now_us: u64,
    round_trip_us: u64,
    /// The factor by which the server is slower than usual.
    slowness: u64,
    max_batch: usize,
    /// The additional delay of every other reply.
    detour_us: u64,
    /// How many replies never arrive.
    lost: usize,
    processes: Vec<Process>,
    calls: Vec<Call>,
    at_server: VecDeque<usize>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    busy_us: u64,
}

impl World {
    fn new(processes: usize, callers: usize, round_trip_us: u64) -> Self {
        let origin = Instant::now();
        let process = |_| Process { calls: CallLimit::new(origin), waiting: 0, decisions: 0 };
        let mut world = Self {
            origin,
            now_us: 0,
            round_trip_us,
            slowness: 1,
            max_batch: MAX_BATCH,
            detour_us: 0,
            lost: 0,
            processes: (0..processes).map(process).collect(),
            calls: Vec::new(),
            at_server: VecDeque::new(),
            events: BinaryHeap::new(),
            count: 0,
            busy_us: 0,
        };
        for process in 0..processes {
            world.start(process, callers);
        }
        world
    }

    fn start(&mut self, process: usize, callers: usize) {
        self.schedule(0, Event::Start(process, callers));
    }

    fn now(&self) -> Instant {
        self.origin + Duration::from_micros(self.now_us)
    }

    fn schedule(&mut self, after_us: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((self.now_us + after_us, self.count, event)));
    }

    /// Advances the time. Returns the decisions per second of each process, and the utilization of the server.
    fn run(&mut self, micros: u64) -> (Vec<u64>, f64) {
        let (end, busy_before) = (self.now_us + micros, self.busy_us);
        self.processes.iter_mut().for_each(|process| process.decisions = 0);
        while let Some(Reverse((at, _, _))) = self.events.peek()
            && *at <= end
        {
            let Some(Reverse((at, _, event))) = self.events.pop() else { unreachable!("it was just seen") };
            self.now_us = at;
            self.handle(event);
        }
        self.now_us = end;
        let rates = self.processes.iter().map(|process| process.decisions * SECOND / micros).collect();
        (rates, (self.busy_us - busy_before) as f64 / micros as f64)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(process, callers) => {
                self.processes[process].waiting += callers;
                self.flush(process);
            }
            Event::ArrivesAtServer(call) => {
                self.at_server.push_back(call);
                if self.at_server.len() == 1 {
                    self.serve();
                }
            }
            Event::ServerIsDone => {
                let call = self.at_server.pop_front().unwrap();
                let detour_us = if call.is_multiple_of(2) { 0 } else { self.detour_us };
                if self.lost > 0 {
                    self.lost -= 1;
                    self.schedule(DEADLINE_US, Event::Abandoned(call));
                } else {
                    self.schedule(self.round_trip_us / 2 + detour_us, Event::ArrivesAtProcess(call));
                }
                if !self.at_server.is_empty() {
                    self.serve();
                }
            }
            Event::Abandoned(call) => self.abandon(call),
            Event::ArrivesAtProcess(call) => {
                let (now, Call { process, checks, sent }) = (self.now(), &self.calls[call]);
                let process_place = *process;
                let process = &mut self.processes[process_place];
                process.calls.replied(*sent, *checks, now);
                process.decisions += *checks as u64;
                // all callers of the batch send their next check
                process.waiting += *checks;
                self.flush(process_place);
            }
        }
    }

    fn abandon(&mut self, call: usize) {
        let Call { process: place, checks, .. } = self.calls[call];
        let process = &mut self.processes[place];
        process.calls.abandon();
        process.waiting += checks;
        self.flush(place);
    }

    fn serve(&mut self) {
        let checks = self.calls[self.at_server[0]].checks as u64;
        let takes_us = (CALL_US + CHECK_US * checks) * self.slowness;
        self.busy_us += takes_us;
        self.schedule(takes_us, Event::ServerIsDone);
    }

    fn flush(&mut self, process_place: usize) {
        let now = self.now();
        let process = &mut self.processes[process_place];
        while process.waiting > 0 && process.calls.admits(now) {
            let checks = process.waiting.min(self.max_batch);
            process.waiting -= checks;
            let sent = process.calls.send(now);
            self.calls.push(Call { process: process_place, checks, sent });
            let half = self.round_trip_us / 2;
            let call = self.calls.len() - 1;
            self.count += 1;
            self.events.push(Reverse((self.now_us + half, self.count, Event::ArrivesAtServer(call))));
        }
    }

    fn limit(&self) -> usize {
        self.processes[0].calls.limit()
    }
}

/// The throughput of a closed loop in which no check is queued.
fn without_waiting(callers: u64, round_trip_us: u64) -> u64 {
    callers * SECOND / (round_trip_us + CALL_US + CHECK_US * callers.min(MAX_BATCH as u64))
}

#[tokio::test(start_paused = true)]
async fn callers_do_not_wait_while_the_server_is_idle() {
    for round_trip_us in [100, 1_000, 5_000] {
        for callers in [1, 16, 64, 256] {
            let mut world = World::new(1, callers, round_trip_us);
            world.run(SECOND / 2);
            let (rates, busy) = world.run(SECOND);
            let possible = without_waiting(callers as u64, round_trip_us);
            let context =
                format!("{callers} callers, {round_trip_us} us: {rates:?} of {possible}, busy {busy}");
            assert!(rates[0] as f64 >= 0.9 * possible as f64 || busy > 0.9, "{context}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_saturated_server_gets_large_batches() {
    for (round_trip_us, most) in [(20, 3), (100, 4), (1_000, 16)] {
        let mut world = World::new(1, 2_000, round_trip_us);
        world.run(SECOND);
        for _ in 0..20 {
            let (rates, busy) = world.run(SECOND / 10);
            assert!(busy > 0.9, "{round_trip_us} us: busy {busy}, {rates:?}");
            let limit = world.limit();
            assert!(limit <= most, "{round_trip_us} us: a limit of {limit}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_limit_adapts_to_a_changed_round_trip_within_a_second() {
    // small batches, so that many calls must be in flight
    let mut world = World::new(1, 64, 100);
    world.max_batch = 4;
    world.run(SECOND);
    for round_trip_us in [5_000, 100, 5_000, 200, 2_000] {
        world.round_trip_us = round_trip_us;
        world.run(SECOND);
        let possible = without_waiting(64, round_trip_us);
        // and stays there
        for _ in 0..10 {
            let (rates, busy) = world.run(SECOND / 5);
            let context = format!("{round_trip_us} us: {rates:?} of {possible}, busy {busy}");
            assert!(rates[0] as f64 >= 0.85 * possible as f64 || busy > 0.9, "{context}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_is_not_flooded_and_recovers() {
    let mut world = World::new(1, 256, 1_000);
    world.run(SECOND);
    world.slowness = 50;
    world.run(2 * SECOND);
    let (_, busy) = world.run(SECOND);
    assert!(busy > 0.9, "it still works all the time: {busy}");
    assert!(world.limit() <= 4, "a limit of {}", world.limit());
    world.slowness = 1;
    world.run(SECOND);
    let (rates, _) = world.run(SECOND);
    assert!(rates[0] as f64 >= 0.85 * without_waiting(256, 1_000) as f64, "{rates:?}");
}

#[tokio::test(start_paused = true)]
async fn a_burst_after_an_idle_period_is_sent_immediately() {
    let mut world = World::new(1, 2, 2_000);
    world.run(2 * SECOND);
    world.start(0, 254);
    let (rates, _) = world.run(SECOND / 10);
    assert!(rates[0] as f64 >= 0.75 * without_waiting(256, 2_000) as f64, "{rates:?}");
}

#[tokio::test(start_paused = true)]
async fn many_processes_share_a_saturated_server_and_none_starves() {
    for (processes, round_trip_us) in [(4, 1_000), (16, 200), (50, 1_000)] {
        let mut world = World::new(processes, 256, round_trip_us);
        world.run(3 * SECOND);
        let (rates, busy) = world.run(2 * SECOND);
        let (least, total) = (*rates.iter().min().unwrap(), rates.iter().sum::<u64>());
        assert!(busy > 0.9, "{processes} processes: busy {busy}");
        assert!(least * processes as u64 * 2 >= total, "{processes} processes: {rates:?}");
        let at_server = world.at_server.len();
        assert!(at_server <= processes * 12, "{processes} processes: {at_server} calls queue");
    }
}

#[tokio::test(start_paused = true)]
async fn varying_round_trips_are_not_mistaken_for_queueing() {
    let mut world = World::new(1, 64, 300);
    (world.max_batch, world.detour_us) = (4, 2_000);
    world.run(2 * SECOND);
    let (rates, busy) = world.run(SECOND);
    let possible = without_waiting(64, 300 + 2_000 / 2);
    assert!(rates[0] as f64 >= 0.7 * possible as f64, "{rates:?} of {possible}, busy {busy}");
}

#[tokio::test(start_paused = true)]
async fn lost_replies_cost_little_more_than_their_own_calls() {
    let mut world = World::new(1, 64, 1_000);
    world.max_batch = 4;
    world.run(SECOND);
    // to measure a longer round trip, a call must be alone in flight
    world.round_trip_us = 2_000;
    let mut total = 0;
    for _ in 0..40 {
        world.lost = 1;
        total += world.run(SECOND / 4).0[0] / 4;
    }
    let possible = 10 * without_waiting(60, 2_000);
    assert!(total as f64 >= 0.7 * possible as f64, "{total} of {possible}");
}
