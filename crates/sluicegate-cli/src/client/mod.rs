//! `sluicegate check`, `peek`, `charge`, `refund`, `reset`, `explain`, `hold`, `settle`, `release` and `renew`: one request to a server, or to
//! a store directly; `sluicegate health`: the readiness of a server.
//!
//! | file | contents |
//! |---|---|
//! | `request` | request arguments and the API's JSON body |
//! | `target` | destination: a server, or the store of a configuration, through the same API without a network |
//! | `hold`, `print_hold` | holds: their commands and text output |
//! | `health` | readiness of a server, for health checks |
//! | `http_client` | HTTP client, with error messages that state the fix |
//! | `print` | text output of responses |

mod health;
mod hold;
pub(crate) mod http_client;
pub(crate) mod print;
mod print_hold;
pub(crate) mod request;
mod target;

use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;
use sluicegate_server::http::{
    explain::Explanation,
    response::{DecisionBody, ResetBody},
};

use self::{
    health::Health,
    hold::{HoldArgs, ReleaseArgs, RenewArgs, SettleArgs},
    print::Response,
    request::{CostArg, RequestArgs, RequestBody, required_request, timestamp_us},
    target::{RawResponse, TargetArgs},
};
use crate::{
    CommandResult, ExitStatus,
    output::{self, OutputFormat},
};

const EXAMPLES: &str = "\
Examples:
  sluicegate check route=login ip=203.0.113.9              by the rules of the local server
  sluicegate check user=42 --cost requests=1,tokens=850    cost in several units
  sluicegate check --key user:42 --limit \"100 per 1m\"      without rules
  sluicegate check --config sluicegate.toml user=42          without a server
  if sluicegate check job=backup >/dev/null; then …        in a script";

/// The commands that send one request.
#[derive(Subcommand)]
pub(crate) enum ClientCommand {
    /// Check a request, and charge it if it is allowed
    ///
    /// Exit status: 0 allowed, 1 denied, 2 error.
    #[command(after_long_help = EXAMPLES)]
    Check(DecisionArgs),

    /// Check a request without charging it
    ///
    /// Shows the remaining quota. Exit status: 0 if the request would be allowed, 1 if it would be denied, 2 error.
    Peek(DecisionArgs),

    /// Charge usage that becomes known only after the request, regardless of the limits
    ///
    /// For example the tokens of a finished response. It may leave a debt, which delays later requests.
    Charge(ChargeArgs),

    /// Refund units that were charged, at most those that still count
    ///
    /// Without --at, the most recent units are refunded; with --at, exactly those charged at that time.
    Refund(RefundArgs),

    /// Reset the counters of the rules that count by the given labels
    ///
    /// A rule is reset if it counts by labels (per) and all of them are given. Counters that other requests share are kept, unless --all
    /// or --rules selects their rules. Exit status: 0 reset, or no counter exists; 1 no rule counts by these labels; 2 error.
    Reset(ResetArgs),

    /// Explain why a request would be allowed or denied, without charging it
    ///
    /// Shows the rules that apply, the counter and arithmetic of each, and why the other rules do not apply.
    Explain(DecisionArgs),

    /// Check a request with an estimated cost, and hold it until its actual cost is known
    ///
    /// Prints the token with which the hold is settled, released or renewed. Exit status: 0 held, 1 denied, 2 error.
    #[command(after_long_help = hold::EXAMPLES)]
    Hold(HoldArgs),

    /// Replace the estimate of a hold with its actual cost, once
    ///
    /// Refunds the difference, or charges the excess. A unit that --cost does not name keeps its estimate. Exit status: 0 settled, now or
    /// before; 1 there is no such hold; 2 error.
    #[command(after_long_help = hold::EXAMPLES)]
    Settle(SettleArgs),

    /// Release a hold: refund its estimate
    ///
    /// Exit status: 0 released, now or before; 1 there is no such hold; 2 error.
    Release(ReleaseArgs),

    /// Renew a hold: move its expiry
    ///
    /// Exit status: 0 renewed; 1 the hold has ended, or there is no such hold; 2 error.
    Renew(RenewArgs),

    /// Show whether a server is ready to receive requests, for health checks
    ///
    /// Calls /readyz, which needs no token. Exit status: 0 ready, 1 not ready, 2 error.
    Health(Health),
}

/// Arguments of `check`, `peek` and `explain`.
#[derive(Args)]
#[command(group(required_request()))]
pub(crate) struct DecisionArgs {
    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    cost: CostArg,

    #[command(flatten)]
    target: TargetArgs,
}

/// Arguments of `charge`.
#[derive(Args)]
pub(crate) struct ChargeArgs {
    #[command(flatten)]
    decision: DecisionArgs,

    #[command(flatten)]
    filter: RuleFilter,
}

/// Arguments of `refund`.
#[derive(Args)]
pub(crate) struct RefundArgs {
    #[command(flatten)]
    charge: ChargeArgs,

    /// Time of the refunded check or charge: at_us of its response, in microseconds of the store's clock
    #[arg(long, visible_alias = "at-us", value_name = "MICROSECONDS", value_parser = timestamp_us, allow_negative_numbers = true)]
    at: Option<u64>,
}

/// Arguments of `reset`.
#[derive(Args)]
#[command(group(required_request()))]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    filter: RuleFilter,

    /// Reset all rules that apply, including those with counters that other requests share
    #[arg(long, conflicts_with_all = ["key", "rules"])]
    all: bool,

    #[command(flatten)]
    target: TargetArgs,
}

#[derive(Args)]
struct RuleFilter {
    /// Restrict to these of the rules that apply
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', conflicts_with = "key")]
    rules: Option<Vec<String>>,
}

impl ClientCommand {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        match self {
            Self::Check(args) => args.decide("check", print::check, format).await,
            Self::Peek(args) => args.decide("peek", print::peek, format).await,
            Self::Explain(args) => args.explain(format).await,
            Self::Hold(args) => args.run(format).await,
            Self::Settle(args) => args.run(format).await,
            Self::Release(args) => args.run(format).await,
            Self::Renew(args) => args.run(format).await,
            Self::Health(health) => health.run(format).await,
            Self::Charge(ChargeArgs { decision, filter }) => {
                let body = RequestBody { rules: filter.rules, ..decision.body()? };
                decide(&decision.target, "charge", &body, print::charge, format).await
            }
            Self::Refund(RefundArgs { charge: ChargeArgs { decision, filter }, at }) => {
                let body = RequestBody { rules: filter.rules, at_us: at, ..decision.body()? };
                decide(&decision.target, "refund", &body, print::refund, format).await
            }
            Self::Reset(ResetArgs { request, filter, all, target }) => {
                let body = RequestBody { rules: filter.rules, all: all.then_some(true), ..request.body()? };
                let (reset, raw) = send::<ResetBody>(&target, "reset", &body, format).await?;
                print_response(format, &raw, || print::reset(&reset));
                Ok(if reset.selected == 0 { ExitStatus::Negative } else { ExitStatus::Success })
            }
        }
    }
}

impl DecisionArgs {
    fn body(&self) -> Result<RequestBody<'_>, String> {
        Ok(RequestBody { cost: self.cost.cost.as_ref(), ..self.request.body()? })
    }

    async fn decide(&self, call: &str, print: fn(&Response<'_>), format: OutputFormat) -> CommandResult {
        decide(&self.target, call, &self.body()?, print, format).await
    }

    async fn explain(&self, format: OutputFormat) -> CommandResult {
        let body = self.body()?;
        let (explained, raw) = send::<Explanation>(&self.target, "explain", &body, format).await?;
        let answer = &explained.decision;
        let store_problem = raw.store_problem(answer).await;
        let response = Response { body: &body, answer, store_problem };
        print_response(format, &raw, || print::explanation(&response, &explained));
        Ok(exit_status(answer))
    }
}

async fn decide(
    target: &TargetArgs,
    call: &str,
    body: &RequestBody<'_>,
    print: fn(&Response<'_>),
    format: OutputFormat,
) -> CommandResult {
    let (answer, raw) = send::<DecisionBody>(target, call, body, format).await?;
    let store_problem = raw.store_problem(&answer).await;
    print_response(format, &raw, || print(&Response { body, answer: &answer, store_problem }));
    Ok(exit_status(&answer))
}

/// Sends a request; returns the parsed and the raw response.
async fn send<T: DeserializeOwned>(
    target: &TargetArgs,
    call: &str,
    body: &RequestBody<'_>,
    format: OutputFormat,
) -> Result<(T, RawResponse), Box<dyn std::error::Error>> {
    let raw = target.send(call, serde_json::to_vec(body)?, format).await?;
    Ok((raw.parse()?, raw))
}

/// Prints a response: as text, or as the unchanged JSON document of the API.
fn print_response(format: OutputFormat, raw: &RawResponse, print_text: impl FnOnce()) {
    match format {
        OutputFormat::Text => print_text(),
        OutputFormat::Json => output::line(raw.text()),
    }
}

fn exit_status(answer: &DecisionBody) -> ExitStatus {
    if answer.allowed { ExitStatus::Success } else { ExitStatus::Negative }
}
