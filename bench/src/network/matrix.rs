//! Closed loop over round trips, numbers of callers, keys and algorithms.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{
    Bench, Effort, LOOPBACK, MILLISECOND,
    closed_loop::{self, Load, Sample},
    contestants::{Connected, Kind},
    milliseconds, rotated,
    workload::{Algorithm, MANY_KEYS, Spread, Workload},
};
use crate::{
    progress::{Part, Progress},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The tables' names.
pub const NAME: &str = "matrix";
pub const SUMMARY: &str = "matrix: summary";

const ROUND_TRIPS: [Duration; 6] = [
    LOOPBACK,
    Duration::from_micros(200),
    Duration::from_micros(500),
    MILLISECOND,
    Duration::from_millis(2),
    Duration::from_millis(5),
];
const QUICK_ROUND_TRIPS: [Duration; 3] = [LOOPBACK, MILLISECOND, Duration::from_millis(5)];
const CALLERS: [usize; 5] = [1, 16, 64, 256, 1000];
const QUICK_CALLERS: [usize; 3] = [1, 64, 256];

const WORKLOADS: [Workload; 4] = [
    Workload::new(Algorithm::TokenBucket, Spread::ManyKeys),
    Workload::new(Algorithm::TokenBucket, Spread::OneKey),
    Workload::new(Algorithm::SlidingLog, Spread::ManyKeys),
    Workload::new(Algorithm::SlidingLog, Spread::OneKey),
];
/// A quick run omits the sliding log on one key.
const QUICK_WORKLOADS: usize = 3;

/// At no point may sluicegate be slower than the better peer by more than the noise.
const EVERYWHERE: Target = Target::AtLeast(0.95);
/// Target for the geometric mean of all points.
const ON_AVERAGE: Target = Target::AtLeast(1.0);
/// Target for points where the peer is limited by Redis.
const WHERE_REDIS_IS_BUSY: Target = Target::AtLeast(1.5);
/// Redis counts as busy above this utilisation of its core.
const BUSY: f64 = 0.9;

/// One cell of the matrix.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    pub algorithm: Algorithm,
    pub keys: Spread,
    pub round_trip_us: u64,
    pub callers: usize,
    /// In the order of [`Kind::ALL`].
    pub contestants: Vec<Figures>,
    /// The peer with the higher rate.
    pub better_peer: String,
    /// Decisions per second, sluicegate / the better peer, round by round.
    pub ratio: Stat,
}

/// The figures of one contestant at one point.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    pub name: String,
    pub rate: Stat,
    pub p50_us: Stat,
    pub p99_us: Stat,
    pub redis_cpu_us: Stat,
    pub redis_core: Stat,
    pub client_cpu_us: Stat,
    pub calls: Stat,
}

impl Figures {
    pub fn of(name: &str, samples: &[Sample]) -> Self {
        let stat = |read: fn(&Sample) -> f64| Stat::of(samples.iter().map(read));
        Self {
            name: name.to_owned(),
            rate: stat(|sample| sample.rate),
            p50_us: stat(|sample| sample.p50_us),
            p99_us: stat(|sample| sample.p99_us),
            redis_cpu_us: stat(|sample| sample.redis_cpu_us),
            redis_core: stat(|sample| sample.redis_core),
            client_cpu_us: stat(|sample| sample.client_cpu_us),
            calls: stat(|sample| sample.calls),
        }
    }

    /// Columns of [`Self::cells`].
    pub fn columns() -> Vec<Column> {
        vec![
            Column::new("k decisions/s", 1),
            Column::new("p50 ms", 2),
            Column::new("p99 ms", 2),
            Column::new("Redis CPU us", 2),
            Column::new("Redis core %", 0),
            Column::new("client CPU us", 2),
            Column::new("script calls", 3),
        ]
    }

    pub fn cells(&self) -> Vec<Option<Stat>> {
        let scaled = |stat: &Stat, factor: f64| Stat {
            median: stat.median * factor,
            min: stat.min * factor,
            max: stat.max * factor,
        };
        vec![
            Some(scaled(&self.rate, 1e-3)),
            Some(scaled(&self.p50_us, 1e-3)),
            Some(scaled(&self.p99_us, 1e-3)),
            Some(self.redis_cpu_us),
            Some(scaled(&self.redis_core, 100.0)),
            Some(self.client_cpu_us),
            Some(self.calls),
        ]
    }
}

impl Point {
    /// The point's name, without its workload.
    fn title(&self) -> String {
        format!("{}, {}", milliseconds(Duration::from_micros(self.round_trip_us)), callers(self.callers))
    }

    fn workload(&self) -> String {
        format!("{}, {}", self.algorithm, self.keys)
    }

    pub fn ours(&self) -> Option<&Figures> {
        self.contestants.iter().find(|figures| figures.name == Kind::Sluicegate.name())
    }

    fn peer(&self) -> Option<&Figures> {
        self.contestants.iter().find(|figures| figures.name == self.better_peer)
    }

    /// Whether the better peer keeps Redis busy.
    fn is_saturated(&self) -> bool {
        self.peer().is_some_and(|peer| peer.redis_core.median > BUSY)
    }
}

/// Measures all points, workload by workload.
pub async fn points(bench: &mut Bench, progress: &Progress) -> Result<Vec<Point>> {
    let (round_trips, callers, workloads) = if bench.effort.is_quick {
        (&QUICK_ROUND_TRIPS[..], &QUICK_CALLERS[..], &WORKLOADS[..QUICK_WORKLOADS])
    } else {
        (&ROUND_TRIPS[..], &CALLERS[..], &WORKLOADS[..])
    };
    let turns = round_trips.len() * callers.len() * workloads.len() * bench.effort.rounds * Kind::ALL.len();
    let part = progress.begin(NAME, turns);
    let mut points = Vec::new();
    for &workload in workloads {
        part.before("creating the keys");
        bench.observer.flush().await?;
        if workload.spread == Spread::ManyKeys {
            for contestant in bench.connect_all(LOOPBACK, workload).await? {
                closed_loop::prefill(&contestant, MANY_KEYS).await?;
            }
        }
        for &round_trip in round_trips {
            let contestants = bench.connect_all(round_trip, workload).await?;
            for &callers in callers {
                points.push(point(bench, &contestants, workload, round_trip, callers, &part).await?);
            }
        }
    }
    Ok(points)
}

async fn point(
    bench: &mut Bench,
    contestants: &[Connected],
    workload: Workload,
    round_trip: Duration,
    callers: usize,
    part: &Part<'_>,
) -> Result<Point> {
    let samples = take_turns(bench, contestants, bench.effort.load(callers, round_trip), part).await?;
    let median = |place: usize| Stat::of(samples[place].iter().map(|sample| sample.rate)).median;
    let better = if median(0) >= median(1) { 0 } else { 1 };
    let rounds = samples[2].iter().zip(&samples[better]);
    let contestants = Kind::ALL.iter().zip(&samples).map(|(kind, samples)| Figures::of(kind.name(), samples));
    Ok(Point {
        algorithm: workload.algorithm,
        keys: workload.spread,
        round_trip_us: round_trip.as_micros() as u64,
        callers,
        contestants: contestants.collect(),
        better_peer: Kind::ALL[better].name().to_owned(),
        ratio: Stat::of(rounds.map(|(ours, peer)| ours.rate / peer.rate)),
    })
}

/// All rounds of all contestants, interleaved.
pub async fn take_turns(
    bench: &mut Bench,
    contestants: &[Connected],
    load: Load,
    part: &Part<'_>,
) -> Result<Vec<Vec<Sample>>> {
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..bench.effort.rounds {
        for place in rotated(contestants.len(), round) {
            part.at(round, Kind::ALL.get(place).map_or("PING", |kind| kind.name()));
            samples[place].push(closed_loop::run(&contestants[place], load, &mut bench.observer).await?);
        }
    }
    Ok(samples)
}

/// One table for each workload, and the summary.
pub fn tables(points: &[Point], effort: &Effort) -> Vec<Table> {
    let mut tables = Vec::new();
    for group in points.chunk_by(|a, b| (a.algorithm, a.keys) == (b.algorithm, b.keys)) {
        let mut columns = Figures::columns();
        columns.push(Column::new("rate / better peer", 2));
        let rows = group.iter().flat_map(|point| {
            point.contestants.iter().map(|figures| {
                let mut cells = figures.cells();
                cells.push((figures.name == Kind::Sluicegate.name()).then_some(point.ratio));
                Row { contestant: format!("{}, {}", point.title(), figures.name), cells }
            })
        });
        tables.push(Table {
            name: format!("{NAME}: {}", group[0].workload()),
            what: "closed loop; round trip, callers and contestant".to_owned(),
            rounds: effort.rounds,
            columns,
            rows: rows.collect(),
            ratios: Vec::new(),
        });
    }
    tables.push(summary(points, effort));
    tables
}

fn summary(points: &[Point], effort: &Effort) -> Table {
    let row = |name: String, points: &[Point]| {
        let medians = || points.iter().map(|point| point.ratio.median);
        let below = medians().filter(|ratio| !EVERYWHERE.is_reached(&Stat::of([*ratio]))).count();
        let one = |value: f64| Some(Stat::of([value]));
        let cells = vec![
            one(points.len() as f64),
            one(geometric_mean(medians())),
            one(medians().fold(f64::INFINITY, f64::min)),
            one(medians().fold(0.0, f64::max)),
            one(below as f64),
        ];
        Row { contestant: name, cells }
    };
    let groups = points.chunk_by(|a, b| (a.algorithm, a.keys) == (b.algorithm, b.keys));
    let mut rows: Vec<_> = groups.map(|group| row(group[0].workload(), group)).collect();
    rows.push(row("all".to_owned(), points));

    let mean = geometric_mean(points.iter().map(|point| point.ratio.median));
    let mut ratios = vec![Ratio {
        what: "decisions/s, geometric mean of all points, sluicegate / better peer".to_owned(),
        stat: Stat::of([mean]),
        target: Some(ON_AVERAGE),
    }];
    let ratio = |point: &Point, target| Ratio {
        what: format!(
            "decisions/s, {}, {}, sluicegate / {}",
            point.workload(),
            point.title(),
            point.better_peer
        ),
        stat: point.ratio,
        target: Some(target),
    };
    let slower = points.iter().filter(|point| !EVERYWHERE.is_reached(&point.ratio));
    ratios.extend(slower.map(|point| ratio(point, EVERYWHERE)));
    let saturated = points.iter().filter(|point| point.is_saturated());
    ratios.extend(saturated.map(|point| {
        let mut ratio = ratio(point, WHERE_REDIS_IS_BUSY);
        ratio.what.push_str(&format!(" (which keeps Redis above {:.0} %)", BUSY * 100.0));
        ratio
    }));
    Table {
        name: SUMMARY.to_owned(),
        what: "decisions/s of sluicegate against the better peer of each point; points below 0.95, and points where that peer \
               keeps Redis busy, are listed below"
            .to_owned(),
        rounds: effort.rounds,
        columns: vec![
            Column::new("points", 0),
            Column::new("geometric mean", 2),
            Column::new("lowest", 2),
            Column::new("highest", 2),
            Column::new("below 0.95", 0),
        ],
        rows,
        ratios,
    }
}

fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values {
        sum += value.ln();
        count += 1;
    }
    (sum / f64::from(count)).exp()
}

/// A number of callers as text.
pub fn callers(count: usize) -> String {
    if count == 1 { "1 caller".to_owned() } else { format!("{count} callers") }
}
