//! Holds and settles on counters of a Redis as its arguments describe: see [`HoldHammer::from_args`].
//!
//! Prints `ready` when it has started, and begins when its input ends. Each step is printed before and after it. A result that contradicts an
//! earlier one ends the process with an error line.

use std::convert::Infallible;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use sluicegate::limiter::{HoldDecision, HoldToken, SettleOutcome};
use sluicegate::store::HoldId;
use sluicegate::{Limiter, Options, RedisStore, Source};
use sluicegate_testkit::hammer::holds::{HoldHammer, HoldStep, TTL, costs, labels};
use sluicegate_testkit::hammer::system_time;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Long, because other tests verify deadlines.
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5));
/// Accounts at a time.
const ACCOUNTS: u64 = 4;
/// How long they are used.
const GENERATION_MS: u128 = 500;

fn main() -> ExitCode {
    let Err(reason) = HoldHammer::from_args(std::env::args().skip(1)).and_then(run);
    let _ = print_line(&format!("failed: {}\n", reason.replace('\n', " ")));
    ExitCode::FAILURE
}

#[tokio::main(worker_threads = 2)]
async fn run(hammer: HoldHammer) -> Result<Infallible, String> {
    // a lost reply to the first call is not an error
    let store = RedisStore::connect_later(&hammer.url).map_err(|error| error.to_string())?;
    let builder = Limiter::builder().store(store).rules(hammer.tiers.rules()).options(OPTIONS);
    let limiter = builder.build().map_err(|error| error.to_string())?;
    print_line("ready\n")?;
    io::copy(&mut io::stdin(), &mut io::sink()).map_err(|error| error.to_string())?;

    let mut callers = JoinSet::new();
    let job = Arc::new(Job { limiter, hammer });
    for caller in 0..job.hammer.callers {
        callers.spawn(Arc::clone(&job).run(caller));
    }
    match callers.join_next().await {
        Some(Ok(Err(reason))) => Err(reason),
        ended => Err(format!("a caller has ended: {ended:?}")),
    }
}

/// State shared by the callers.
struct Job {
    limiter: Limiter,
    hammer: HoldHammer,
}

/// One request of a caller.
struct Request<'a> {
    job: &'a Job,
    name: String,
    account: String,
}

impl Job {
    /// Makes requests until the process is killed or a result is wrong.
    async fn run(self: Arc<Self>, caller: usize) -> Result<Infallible, String> {
        for number in 0_u64.. {
            let generation = system_time().as_millis() / GENERATION_MS;
            let request = Request {
                job: &self,
                name: format!("{}-{caller}-{number}", std::process::id()),
                account: format!("{generation}-{}", rand::random_range(0..ACCOUNTS)),
            };
            if !request.run().await? {
                pause(200..800).await;
            }
        }
        unreachable!("the range is endless")
    }
}

impl Request<'_> {
    /// Makes a hold, works, and settles it. Returns whether it was made.
    async fn run(&self) -> Result<bool, String> {
        // without an id of the caller, the library chooses one
        let own_id = rand::random_bool(0.5).then(|| HoldId::new(&self.name).expect("a short id"));
        self.print(HoldStep::Holding { account: self.account.clone() })?;
        let holding = self.hold(own_id.clone());
        let held = if rand::random_bool(0.005) {
            match timeout(Duration::from_millis(rand::random_range(0..10)), holding).await {
                Ok(held) => held?,
                Err(_) => return Ok(false), // the caller is gone while the store decides
            }
        } else {
            holding.await?
        };
        if held.decision.source != Source::Store {
            return Ok(false); // denied by the failure policy: the store may have made the hold
        }
        let (Some(token), Some(at), Some(expires_at)) = (&held.token, held.decision.at, held.expires_at)
        else {
            self.print(HoldStep::Denied)?;
            return Ok(false);
        };
        let [at, expires_at] = [at, expires_at].map(|time| Duration::from_micros(time.as_micros()));
        self.print(HoldStep::Held { at, expires_at })?;
        pause(0..20).await;
        if let Some(id) = own_id.filter(|_| rand::random_bool(0.1)) {
            self.repeat(id, &held, expires_at).await?;
        }
        if rand::random_bool(0.1) {
            // an error means that the store did not answer
            let _ = self.job.limiter.renew(token, TTL).await;
        }
        if rand::random_bool(0.01) {
            return Ok(true); // the caller has crashed
        }
        self.settle(token).await?;
        Ok(true)
    }

    async fn hold(&self, id: Option<HoldId>) -> Result<HoldDecision, String> {
        let labels = labels(&self.account);
        let hold = self.job.limiter.hold(&labels, costs(1, self.job.hammer.estimate));
        let hold = match id {
            Some(id) => hold.id(id),
            None => hold,
        };
        hold.decide().await.map_err(|error| error.to_string())
    }

    async fn repeat(&self, id: HoldId, first: &HoldDecision, expires_at: Duration) -> Result<(), String> {
        let repeated = self.hold(Some(id)).await;
        if system_time() >= expires_at {
            return Ok(());
        }
        let repeated = repeated?;
        let is_same = repeated.is_repeated && repeated.decision.at == first.decision.at;
        match repeated.decision.source {
            Source::Store if !is_same => Err(format!("repeated {first:?}: {repeated:?}")),
            _ => Ok(()),
        }
    }

    /// Settles or releases the hold, sometimes twice.
    async fn settle(&self, token: &HoldToken) -> Result<(), String> {
        let limiter = &self.job.limiter;
        let is_released = rand::random_bool(0.1);
        let tokens = if is_released { 0 } else { rand::random_range(self.job.hammer.actual.clone()) };
        let requests = u64::from(!is_released);
        self.print(HoldStep::Settling { sent: system_time(), tokens, requests })?;
        let settled = match is_released {
            true => limiter.release(token).await,
            false => limiter.settle(token, costs(1, tokens)).await,
        };
        match settled.map_err(|error| error.to_string())?.outcome {
            SettleOutcome::Queued => return Ok(()),
            SettleOutcome::Settled
            | SettleOutcome::Released
            | SettleOutcome::Already
            | SettleOutcome::Late => {
                self.print(HoldStep::Settled)?;
            }
            outcome => return Err(format!("{}: a settlement was {outcome:?}", self.name)),
        }
        if rand::random_bool(0.1) {
            let again =
                limiter.settle(token, costs(1, tokens + 1)).await.map_err(|error| error.to_string())?;
            if !matches!(again.outcome, SettleOutcome::Already | SettleOutcome::Queued) {
                return Err(format!("{}: settled twice: {again:?}", self.name));
            }
        }
        Ok(())
    }

    fn print(&self, step: HoldStep) -> Result<(), String> {
        print_line(&step.text(&self.name))
    }
}

async fn pause(millis: std::ops::Range<u64>) {
    sleep(Duration::from_millis(rand::random_range(millis))).await;
}

/// Writes a whole line at once.
fn print_line(line: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes()).and_then(|()| output.flush()).map_err(|error| error.to_string())
}
