//! `tollgate bench`: load, how long decisions take under it, and whether the limit held.
//!
//! | file | has |
//! |---|---|
//! | `keys` | which keys are asked for: only this run's own |
//! | `load` | callers who never stop asking, and what they note |
//! | `target` | whom they ask: a store in this process, one in Redis, a server |
//! | `judge` | whether more was admitted than the limit allows |
//! | `report` | what is said |

mod judge;
mod keys;
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

use clap::{Args, builder::PossibleValuesParser};
use tokio::{signal, time::sleep};
use tollgate::{Cost, Limit, redis::URLS};
use tollgate_server::{config::Environment, duration};

use self::{
    judge::{Call, Judge},
    keys::Keys,
    load::{Extent, Load, Notes},
    report::Report,
    target::Target,
};
use crate::{
    Done,
    ask::{
        client::SERVER_VARIABLE,
        question::{ALGORITHMS, Rate, rate},
    },
    numbers::{not_negative, whole},
    output::{self, Form, Progress},
};

/// Put load on a store or a server: how fast it decides, and whether the limit holds
///
/// Without --store, --config, --server or TOLLGATE_SERVER, the store in this process's memory is measured. Only keys of this run's own are asked
/// for, which nobody else has and which expire by themselves: no counter at work is touched. Ctrl-C ends the load early. Exit code
/// 1 if more was admitted than the limit allows.
#[derive(Args)]
pub(crate) struct Bench {
    // Not read by clap, which repeats what it cannot read: this may hold a password.
    #[arg(long, value_name = "URL", help_heading = WHERE, help = format!("Asks this store: memory:, {URLS}"))]
    store: Option<String>,

    /// Asks the store of this configuration; of its rules none is used
    #[arg(long, value_name = "FILE", help_heading = WHERE)]
    config: Option<PathBuf>,

    /// Asks this server by HTTP, for example http://127.0.0.1:8080; a token is read from TOLLGATE_TOKEN [env: TOLLGATE_SERVER=]
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    server: Option<String>,

    /// Trusts this authority instead of the system's, for https://: a file of PEM
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    ca: Option<PathBuf>,

    /// The certificate by which the server knows who asks: a file of PEM
    #[arg(long, value_name = "FILE", requires = "client_key", conflicts_with_all = ["config", "store"], help_heading = WHERE)]
    client_cert: Option<PathBuf>,

    /// Its private key: a file of PEM
    #[arg(long, value_name = "FILE", requires = "client_cert", help_heading = WHERE)]
    client_key: Option<PathBuf>,

    /// How many callers ask at the same time
    #[arg(long, short = 'c', value_name = "COUNT", default_value_t = 16, value_parser = whole::<u16>(1..=MAX_CALLERS, 16), allow_negative_numbers = true)]
    concurrency: u16,

    /// How long they ask: 30s, 5m
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = span)]
    duration: Duration,

    /// How many requests they make, instead of a duration
    #[arg(long, value_name = "COUNT", conflicts_with = "duration", value_parser = whole::<u64>(1..=u64::MAX, 100_000), allow_negative_numbers = true)]
    requests: Option<u64>,

    /// How many keys are asked for; one is a hot key
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = whole::<u32>(1..=MAX_KEYS, 1_000), allow_negative_numbers = true)]
    keys: u32,

    /// Asks for some keys more than for others, by Zipf's law with this exponent; 1.0 is usual
    #[arg(long, value_name = "EXPONENT", requires = "keys", value_parser = not_negative, allow_negative_numbers = true)]
    zipf: Option<f64>,

    /// The limit of each key
    #[arg(long, value_name = "AMOUNT per WINDOW", default_value = "100 per 1s", value_parser = rate)]
    limit: Rate,

    /// How it is counted: token-bucket, sliding-log, sliding-counter, fixed-window
    #[arg(long, default_value = "token-bucket", value_parser = PossibleValuesParser::new(ALGORITHMS), hide_possible_values = true)]
    algorithm: String,

    /// Of a token bucket: how much passes at once; the amount unless set
    #[arg(long, value_name = "COUNT", value_parser = whole::<u64>(0..=u64::MAX, 200), allow_negative_numbers = true)]
    burst: Option<u64>,

    /// What each request costs
    #[arg(long, default_value_t = 1, value_parser = whole::<u64>(1..=u64::MAX, 2), allow_negative_numbers = true)]
    cost: u64,
}

const WHERE: &str = "Where to ask";

/// The most callers, each of which may need a thread.
const MAX_CALLERS: u64 = 500;
/// The most keys: each that was admitted anything is judged.
const MAX_KEYS: u64 = 100_000;
/// How many batches of admitted calls may wait for the judge.
const MAX_WAITING: usize = 512;
/// How often it is shown how it goes.
const SHOWN_EVERY: Duration = Duration::from_millis(100);

fn span(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(Duration::ZERO) => Err("use a duration above zero".to_owned()),
        Ok(span) => Ok(span),
        Err(error) => Err(error.to_string()),
    }
}

impl Bench {
    pub(crate) async fn run(self, form: Form) -> Done {
        let limit = self.limit()?;
        let cost = Cost::new(self.cost)?;
        let keys = Keys::new(self.keys, self.zipf)?;
        let target = Target::of(&self, &keys, limit, cost).await?;
        let (to_judge, calls) = mpsc::sync_channel::<Vec<Call>>(MAX_WAITING);
        let judge = thread::spawn(move || {
            let mut judge = Judge::new(&limit);
            calls.into_iter().for_each(|calls| judge.add(calls));
            judge.finish()
        });
        let load = Arc::new(Load::new(keys, self.cost, self.extent(), to_judge));
        let notes = self.loaded(&load, &target, form).await;
        let took = load.elapsed();
        let name = load.keys.prefix();
        // with the last of those who could, the judge knows that there is no more
        drop(load);
        let (closest, keys_asked) =
            judge.join().map_err(|_| "the verdict cannot be told: its thread has ended")?;
        if notes.counts.decisions() == 0
            && let Some(failure) = notes.counts.first_failure
        {
            return Err(failure.into());
        }
        let report = Report::new(&self, &target, limit, notes, took).with_verdict(closest, keys_asked, name);
        report.print(form)?;
        Ok(report.verdict())
    }

    /// The server that is meant: the one that is named, else that of the environment, unless a store is named.
    fn server_named(&self) -> Option<String> {
        let is_for_store = self.store.is_some() || self.config.is_some();
        let of_environment = || Environment::of_process().get(SERVER_VARIABLE).filter(|_| !is_for_store);
        self.server.clone().or_else(of_environment)
    }

    fn limit(&self) -> Result<Limit, Box<dyn Error>> {
        let window = duration::parse(&self.limit.window)?;
        let limit = Limit::new(self.algorithm.parse()?, self.limit.amount, window)?;
        Ok(match self.burst {
            Some(burst) => limit.with_burst(burst)?,
            None => limit,
        })
    }

    fn extent(&self) -> Extent {
        self.requests.map_or(Extent::Time(self.duration), Extent::Requests)
    }

    /// Has all callers ask until they are done, or somebody has had enough.
    async fn loaded(&self, load: &Arc<Load>, target: &Target, form: Form) -> Notes {
        let callers = target.callers(load, self.concurrency);
        let progress = Progress::new(form, "load", load.progress().1);
        let show = async {
            let (mut before, mut at) = (load.told().0, load.elapsed());
            loop {
                sleep(SHOWN_EVERY).await;
                let ((decided, refused), now) = (load.told(), load.elapsed());
                let per_second = (decided - before) as f64 / (now - at).as_secs_f64().max(1e-9);
                let share = refused as f64 * 100.0 / decided.max(1) as f64;
                let how = format!("{} a second, {share:.1} % refused", output::count(per_second as u64));
                progress.is_at(load.progress().0, how);
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
            notes = callers => notes,
            () = show => unreachable!("it is shown without end"),
            () = stop => unreachable!("stopping waits without end"),
        }
    }
}
