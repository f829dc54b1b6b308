//! Calls the library on counters of a Redis as its arguments describe: see [`Hammer::from_args`].
//!
//! Prints `ready` when it is connected, and begins when its input ends. Each admitted call is printed immediately, so a killed process
//! has reported all but the calls in flight. The first inconsistent reply ends the process with an error line.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sluicegate::{Cost, Limiter, Options, RedisStore, Source};
use sluicegate_testkit::hammer::{AdmittedCall, Hammer, ReportLine, Workload, check_snapshot, system_time};
use sluicegate_testkit::oracle::Admitted;
use tokio::task::JoinSet;

/// Long, because other tests verify deadlines.
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::from_secs(1));

fn main() -> ExitCode {
    let (line, code) = match Hammer::from_args(std::env::args().skip(1)).and_then(run) {
        Ok(calls) => (ReportLine::Done(calls), ExitCode::SUCCESS),
        Err(reason) => (ReportLine::Failed(reason), ExitCode::FAILURE),
    };
    match write_lines(&line.text()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

#[tokio::main(worker_threads = 2)]
async fn run(hammer: Hammer) -> Result<u64, String> {
    let store = RedisStore::connect(&hammer.url).await.map_err(|error| error.to_string())?;
    let limiter = Limiter::builder()
        .store(store)
        .rules(hammer.rules())
        .options(OPTIONS)
        .build()
        .map_err(|error| error.to_string())?;
    write_lines("ready\n")?;
    io::copy(&mut io::stdin(), &mut io::sink()).map_err(|error| error.to_string())?;

    let begin = system_time();
    let mut callers = JoinSet::new();
    let job = Arc::new(Job { hammer, limiter, begin, next: AtomicU64::new(0) });
    for _ in 0..job.hammer.callers {
        callers.spawn(Arc::clone(&job).call_until_done());
    }
    let mut calls = 0;
    while let Some(made) = callers.join_next().await {
        calls += made.map_err(|error| error.to_string())??;
    }
    Ok(calls)
}

/// State shared by the callers.
struct Job {
    hammer: Hammer,
    limiter: Limiter,
    begin: Duration,
    /// The number of the next call.
    next: AtomicU64,
}

impl Job {
    /// Calls until the workload is done, and returns the number of calls.
    async fn call_until_done(self: Arc<Self>) -> Result<u64, String> {
        for calls in 0.. {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let is_done = match self.hammer.workload {
                Workload::Calls(most) => number >= most,
                Workload::Time(time) => system_time() >= self.begin + time,
            };
            if is_done {
                return Ok(calls);
            }
            self.call(number).await?;
        }
        unreachable!("the range is endless")
    }

    async fn call(&self, number: u64) -> Result<(), String> {
        let Hammer { keys, costs, .. } = &self.hammer;
        let number = usize::try_from(number).expect("the number of calls fits");
        let cost = Cost::new(costs[number % costs.len()]).map_err(|error| error.to_string())?;
        // Each key in turn gets all costs.
        let key = &keys[number / costs.len() % keys.len()];
        let labels = self.hammer.labels(key);

        let sent = system_time();
        let decision = self.limiter.check(&labels, cost).await.map_err(|error| error.to_string())?;
        let received = system_time();

        let is_leased = decision.source == Source::Lease;
        if !is_leased {
            check_snapshot(&decision, &self.hammer.limits(), cost, Duration::ZERO)?;
        }
        let Some(at) = decision.at else {
            // Denied without the store: lets calls that wait for the store proceed.
            tokio::task::yield_now().await;
            return Ok(());
        };
        let at = Duration::from_micros(at.as_micros());
        // a leased decision has the time at which its units were charged
        if self.hammer.clock.is_none() && !is_leased && !(sent..=received).contains(&at) {
            return Err(format!("decided at {at:?}, sent at {sent:?}, received at {received:?}"));
        }
        if is_leased {
            tokio::task::yield_now().await;
        }
        if decision.is_allowed() {
            let call = Admitted { sent, received, cost: cost.units() };
            write_lines(&ReportLine::AdmittedCall(AdmittedCall { key: key.clone(), call, at }).text())?;
        }
        Ok(())
    }
}

/// Writes whole lines at once.
fn write_lines(lines: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    output.write_all(lines.as_bytes()).and_then(|()| output.flush()).map_err(|error| error.to_string())
}
