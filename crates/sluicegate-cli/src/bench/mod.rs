//! `sluicegate bench`: a load generator that measures latency and verifies the limit.
//!
//! | file | contents |
//! |---|---|
//! | `keys` | the keys of a run, which no other program uses |
//! | `load` | closed-loop callers and their statistics |
//! | `target` | destination: the memory store, a Redis store or a server |
//! | `limit_verifier` | checks whether more was admitted than the limit allows |
//! | `report` | output |

mod keys;
mod limit_verifier;
mod load;
mod report;
mod target;

use std::{
    error::Error,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use clap::Args;
use sluicegate::{
    Cost, Limit, duration,
    redis::URLS,
    rules::{LeaseSize, LeaseSizeError},
};
use sluicegate_server::config::Environment;
use tokio::{signal, time::sleep};

use self::{
    keys::KeySpace,
    limit_verifier::{AdmittedCall, LimitVerifier},
    load::{Extent, Load, LoadResult},
    report::BenchReport,
    target::Target,
};
use crate::{
    CommandResult,
    client::{
        http_client::SERVER_VARIABLE,
        request::{Rate, rate, windowed_algorithm_names},
    },
    format,
    output::{OutputFormat, Progress},
    value_parsers::{non_negative, whole_number},
};

/// Benchmark a store or a server: measure latency and throughput, verify the limit
///
/// Without --store, --config, --server or SLUICEGATE_SERVER, the memory store of this process is measured. Each run uses its own keys,
/// which expire: no other counter is touched. Ctrl-C ends the load early. Exit status: 1 if more was admitted than the limit allows.
#[derive(Args)]
pub(crate) struct Bench {
    // Not parsed by clap: its error messages quote the value, which may contain a password.
    #[arg(long, value_name = "URL", help_heading = TARGET_HEADING, help = format!("Store to measure: memory:, {URLS}"))]
    store: Option<String>,

    /// Measure the store of this configuration; its rules are not used
    #[arg(long, value_name = "FILE", help_heading = TARGET_HEADING)]
    config: Option<PathBuf>,

    /// Server to measure over HTTP, for example http://127.0.0.1:8080; the token is read from SLUICEGATE_TOKEN [env: SLUICEGATE_SERVER=]
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "store"], help_heading = TARGET_HEADING)]
    server: Option<String>,

    /// CA certificates to trust instead of the system's, for https:// (PEM file)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "store"], help_heading = TARGET_HEADING)]
    ca: Option<PathBuf>,

    /// Client certificate (PEM file)
    #[arg(long, value_name = "FILE", requires = "client_key", conflicts_with_all = ["config", "store"], help_heading = TARGET_HEADING)]
    client_cert: Option<PathBuf>,

    /// Private key of the client certificate (PEM file)
    #[arg(long, value_name = "FILE", requires = "client_cert", help_heading = TARGET_HEADING)]
    client_key: Option<PathBuf>,

    /// Number of concurrent callers
    #[arg(long, short = 'c', value_name = "COUNT", default_value_t = 16, value_parser = whole_number::<u16>(1..=MAX_CALLERS, 16), allow_negative_numbers = true)]
    concurrency: u16,

    /// Duration of the load: 30s, 5m
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = positive_duration)]
    duration: Duration,

    /// Number of requests, instead of a duration
    #[arg(long, value_name = "COUNT", conflicts_with = "duration", value_parser = whole_number::<u64>(1..=u64::MAX, 100_000), allow_negative_numbers = true)]
    requests: Option<u64>,

    /// Number of keys; one is a hot key
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = whole_number::<u32>(1..=MAX_KEYS, 1_000), allow_negative_numbers = true)]
    keys: u32,

    /// Distribute requests over the keys by Zipf's law with this exponent; 1.0 is usual
    #[arg(long, value_name = "EXPONENT", requires = "keys", value_parser = non_negative, allow_negative_numbers = true)]
    zipf: Option<f64>,

    /// Limit of each key
    #[arg(long, value_name = "AMOUNT per WINDOW", default_value = "100 per 1s", value_parser = rate)]
    limit: Rate,

    /// Algorithm of the limit
    #[arg(long, default_value = "token-bucket", value_parser = windowed_algorithm_names())]
    algorithm: String,

    /// Burst of a token bucket [default: the amount]
    #[arg(long, value_name = "COUNT", value_parser = whole_number::<u64>(0..=u64::MAX, 200), allow_negative_numbers = true)]
    burst: Option<u64>,

    /// How much of the limit a process may charge in advance: 1%, a fraction or units; only with a Redis store or a server
    #[arg(long, value_name = "PART", value_parser = lease_size)]
    lease: Option<LeaseSize>,

    /// Cost of each request
    #[arg(long, default_value_t = 1, value_parser = whole_number::<u64>(1..=u64::MAX, 2), allow_negative_numbers = true)]
    cost: u64,
}

const TARGET_HEADING: &str = "Target";

/// The maximum number of callers, each of which may need a thread.
const MAX_CALLERS: u64 = 500;
/// The maximum number of keys: each is verified.
const MAX_KEYS: u64 = 100_000;
/// Capacity of the verifier's queue, in batches of admitted calls.
const MAX_QUEUED_BATCHES: usize = 512;
/// Update interval of the progress bar.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

fn lease_size(text: &str) -> Result<LeaseSize, String> {
    text.parse().map_err(|error: LeaseSizeError| error.to_string())
}

/// Parses a duration above zero.
fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(Duration::ZERO) => Err("use a duration above zero".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
}

impl Bench {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        let limit = self.limit()?;
        let cost = Cost::new(self.cost)?;
        let keys = KeySpace::new(self.keys, self.zipf)?;
        let target = Target::connect(&self, &keys, limit, cost).await?;
        let (admitted_calls, calls) = mpsc::sync_channel::<Vec<AdmittedCall>>(MAX_QUEUED_BATCHES);
        let verifier = thread::spawn(move || {
            let mut verifier = LimitVerifier::new(&limit);
            calls.into_iter().for_each(|calls| verifier.add(calls));
            verifier.finish()
        });
        let load = Arc::new(Load::new(keys, self.cost, self.extent(), admitted_calls));
        let result = self.run_load(&load, &target, format).await;
        let elapsed = load.elapsed();
        let key_prefix = load.keys.prefix();
        // closes the channel, so that the verifier finishes
        drop(load);
        let (closest, verified_keys) = verifier.join().map_err(|_| "the limit verifier panicked")?;
        if result.counts.decisions() == 0
            && let Some(failure) = result.counts.first_failure
        {
            return Err(failure.into());
        }
        let report = BenchReport::new(&self, &target, limit, result, elapsed).with_verdict(
            closest,
            verified_keys,
            key_prefix,
        );
        report.print(format)?;
        Ok(report.exit_status())
    }

    /// The server of the flag, else of the environment, unless a store is given.
    fn server_url(&self) -> Option<String> {
        let is_for_store = self.store.is_some() || self.config.is_some();
        let from_environment = || Environment::of_process().get(SERVER_VARIABLE).filter(|_| !is_for_store);
        self.server.clone().or_else(from_environment)
    }

    fn limit(&self) -> Result<Limit, Box<dyn Error>> {
        let window = duration::parse(&self.limit.window)?;
        let limit = Limit::new(self.algorithm.parse()?, self.limit.amount, window)?;
        let limit = match self.burst {
            Some(burst) => limit.with_burst(burst)?,
            None => limit,
        };
        Ok(match self.lease.filter(|lease| !lease.is_none()) {
            Some(lease) => {
                limit.with_lease(lease.units_of(limit.amount()), limit.default_lease_lifetime())?
            }
            None => limit,
        })
    }

    fn extent(&self) -> Extent {
        self.requests.map_or(Extent::Time(self.duration), Extent::Requests)
    }

    /// Runs all callers until the load is complete or interrupted.
    async fn run_load(&self, load: &Arc<Load>, target: &Target, format: OutputFormat) -> LoadResult {
        let callers = target.callers(load, self.concurrency);
        let progress = Progress::new(format, "load", load.progress().1);
        let show = async {
            let (mut before, mut at) = (load.counts().0, load.elapsed());
            loop {
                sleep(PROGRESS_INTERVAL).await;
                let ((decided, denied), now) = (load.counts(), load.elapsed());
                let per_second = (decided - before) as f64 / (now - at).as_secs_f64().max(1e-9);
                let share = denied as f64 * 100.0 / decided.max(1) as f64;
                let message = format!("{} per second, {share:.1} % denied", format::count(per_second as u64));
                progress.update(load.progress().0, message);
                (before, at) = (decided, now);
            }
        };
        let stop = async {
            if signal::ctrl_c().await.is_ok() {
                load.stop();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            result = callers => result,
            () = show => unreachable!("progress is shown in an endless loop"),
            () = stop => unreachable!("this future never completes"),
        }
    }
}
