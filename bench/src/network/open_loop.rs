//! Open loop: Poisson arrivals at a fixed rate. Latencies are measured from the intended start.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    Bench, LOOPBACK, MILLISECOND,
    closed_loop::{self, Observer, Quantiles, nanos},
    contestants::{Connected, Kind},
    milliseconds,
    pacing::Arrivals,
    rotated,
    workload::{Algorithm, MANY_KEYS, Spread, Workload},
};
use crate::{
    drive::Contestant,
    progress::Progress,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "open-loop";

const RATES: [f64; 3] = [1_000.0, 10_000.0, 30_000.0];
const ROUND_TRIPS: [Duration; 3] = [Duration::from_micros(200), MILLISECOND, Duration::from_millis(5)];
const QUICK_ROUND_TRIPS: [Duration; 1] = [MILLISECOND];

const WARM_UP: Duration = Duration::from_millis(300);
const MEASURED: Duration = Duration::from_secs(1);

/// Maximum number of requests in flight. A contestant that needs more cannot keep up; further arrivals count as unanswered.
const MAX_IN_FLIGHT: u64 = 20_000;

const P50: Target = Target::AtMost(1.05);
const P99: Target = Target::AtMost(1.2);
/// Required at 1 ms and 10,000 decisions per second.
const P50_TARGET_MS: f64 = 1.3;

/// The figures of one turn.
#[derive(Clone, Copy, Debug)]
struct Sample {
    answered_per_second: f64,
    unanswered: f64,
    p50_us: f64,
    p99_us: f64,
    redis_cpu_us: f64,
    client_cpu_us: f64,
}

/// The state shared by the requests of one turn.
#[derive(Default)]
struct Turn {
    latencies_ns: Mutex<Vec<u32>>,
    in_flight: AtomicU64,
    unanswered: AtomicU64,
}

/// Fills the table.
pub async fn table(bench: &mut Bench, progress: &Progress) -> Result<Table> {
    let round_trips = if bench.effort.is_quick { &QUICK_ROUND_TRIPS[..] } else { &ROUND_TRIPS[..] };
    let part = progress.begin(NAME, round_trips.len() * RATES.len() * bench.effort.rounds * Kind::ALL.len());
    let workload = Workload::new(Algorithm::TokenBucket, Spread::ManyKeys);
    part.before("creating the keys");
    bench.observer.flush().await?;
    for contestant in bench.connect_all(LOOPBACK, workload).await? {
        closed_loop::prefill(&contestant, MANY_KEYS).await?;
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for &round_trip in round_trips {
        let contestants = bench.connect_all(round_trip, workload).await?;
        for rate in RATES {
            let mut samples = vec![Vec::new(); contestants.len()];
            for round in 0..bench.effort.rounds {
                for place in rotated(contestants.len(), round) {
                    part.at(round, Kind::ALL[place].name());
                    samples[place]
                        .push(turn(&contestants[place], rate, round as u64, &bench.observer).await?);
                }
            }
            let title = format!("{}, {:.0}k/s", milliseconds(round_trip), rate / 1e3);
            for (kind, samples) in Kind::ALL.iter().zip(&samples) {
                rows.push(Row { contestant: format!("{title}, {}", kind.name()), cells: cells(samples) });
            }
            ratios.push(ratio("p50", &title, &samples, |sample| sample.p50_us, P50));
            ratios.push(ratio("p99", &title, &samples, |sample| sample.p99_us, P99));
            if round_trip == MILLISECOND && rate == 10_000.0 {
                ratios.push(Ratio {
                    what: format!("p50, {title}, sluicegate / 1 ms"),
                    stat: Stat::of(samples[2].iter().map(|sample| sample.p50_us / 1e3)),
                    target: Some(Target::AtMost(P50_TARGET_MS)),
                });
            }
        }
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: "Poisson arrivals, 100,000 keys, token bucket; latencies count from the intended start. Unanswered: failed, or not \
               sent because 20,000 requests were in flight"
            .to_owned(),
        rounds: bench.effort.rounds,
        columns: vec![
            Column::new("k answers/s", 2),
            Column::new("unanswered", 0),
            Column::new("p50 ms", 2),
            Column::new("p99 ms", 2),
            Column::new("Redis CPU us", 2),
            Column::new("client CPU us", 2),
        ],
        rows,
        ratios,
    })
}

/// Against the peer whose median is lower.
fn ratio(
    what: &str,
    title: &str,
    samples: &[Vec<Sample>],
    read: fn(&Sample) -> f64,
    target: Target,
) -> Ratio {
    let median = |place: usize| Stat::of(samples[place].iter().map(read)).median;
    let better = if median(0) <= median(1) { 0 } else { 1 };
    let rounds = samples[2].iter().zip(&samples[better]);
    Ratio {
        what: format!("{what}, {title}, sluicegate / {}", Kind::ALL[better].name()),
        stat: Stat::of(rounds.map(|(ours, peer)| read(ours) / read(peer))),
        target: Some(target),
    }
}

fn cells(samples: &[Sample]) -> Vec<Option<Stat>> {
    let reads: [fn(&Sample) -> f64; 6] = [
        |sample| sample.answered_per_second / 1e3,
        |sample| sample.unanswered,
        |sample| sample.p50_us / 1e3,
        |sample| sample.p99_us / 1e3,
        |sample| sample.redis_cpu_us,
        |sample| sample.client_cpu_us,
    ];
    reads.into_iter().map(|read| Some(Stat::of(samples.iter().map(read)))).collect()
}

async fn turn(contestant: &Connected, per_second: f64, seed: u64, observer: &Observer) -> Result<Sample> {
    let turn = Arc::new(Turn::default());
    let arrivals = Arrivals { per_second, duration: WARM_UP + MEASURED, seed };
    let (contestant, shared, begun) = (contestant.clone(), Arc::clone(&turn), Instant::now());
    let requests = tokio::spawn(arrivals.run(move |arrival| {
        let (contestant, turn) = (contestant.clone(), Arc::clone(&shared));
        async move {
            let is_measured = arrival.offset >= WARM_UP;
            if turn.in_flight.fetch_add(1, Ordering::Relaxed) >= MAX_IN_FLIGHT {
                turn.unanswered.fetch_add(u64::from(is_measured), Ordering::Relaxed);
            } else {
                let answer = contestant.decide(arrival.random).await;
                let latency = arrival.intended.elapsed();
                match answer {
                    _ if !is_measured => {}
                    Ok(_) => turn.latencies_ns.lock().expect("no task panics").push(nanos(latency)),
                    Err(_) => {
                        turn.unanswered.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            turn.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }));
    tokio::time::sleep_until((begun + WARM_UP).into()).await;
    let before = observer.cpu_times()?;
    tokio::time::sleep_until((begun + WARM_UP + MEASURED).into()).await;
    let utilisation = before.until(&observer.cpu_times()?);
    requests.await??;

    let turn = Arc::into_inner(turn).context("all requests have ended")?;
    let mut latencies = turn.latencies_ns.into_inner()?;
    ensure!(!latencies.is_empty(), "no request was answered");
    let answered_per_second = latencies.len() as f64 / MEASURED.as_secs_f64();
    let quantiles = Quantiles::of(&mut latencies);
    Ok(Sample {
        answered_per_second,
        unanswered: turn.unanswered.into_inner() as f64,
        p50_us: quantiles.p50_us,
        p99_us: quantiles.p99_us,
        redis_cpu_us: utilisation.redis * 1e6 / answered_per_second,
        client_cpu_us: utilisation.client * 1e6 / answered_per_second,
    })
}
