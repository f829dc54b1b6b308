//! `sluicegate hold`, `settle`, `release` and `renew`.

use clap::{ArgGroup, Args};
use sluicegate_server::http::hold_response::{HoldBody, SettlementBody};

use super::{
    exit_status,
    print::Response,
    print_hold, print_response,
    request::{ActualCostArg, CostArg, RequestArgs, RequestBody, duration_ms, required_request},
    send,
    target::TargetArgs,
};
use crate::{CommandResult, ExitStatus, output::OutputFormat};

pub(super) const EXAMPLES: &str = "\
Examples:
  sluicegate hold tenant=acme --cost requests=1,tokens=850 --ttl 2m    prints the token of the hold
  sluicegate settle --token TOKEN --cost tokens=120                    by the token
  sluicegate settle --id job-7 tenant=acme --cost tokens=120           by the id and labels of the hold
  sluicegate release --token TOKEN                                     refunds everything";

const HOLD_HEADING: &str = "Hold";

/// Outcomes after which a hold is settled or released, now or before.
const ENDED: [&str; 5] = ["settled", "released", "already", "late", "queued"];
/// Outcomes after which a hold is renewed.
const RENEWED: [&str; 1] = ["renewed"];

/// Arguments of `hold`.
#[derive(Args)]
#[command(group(required_request()))]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    cost: CostArg,

    /// Id of the hold, unique to the request: the same id again gets the first response [default: random]
    #[arg(long, help_heading = HOLD_HEADING)]
    id: Option<String>,

    /// Time until the hold expires if it is not settled, released or renewed [default: the shortest ttl of the rules, or 1m]
    #[arg(long, value_name = "DURATION", value_parser = duration_ms, help_heading = HOLD_HEADING)]
    ttl: Option<u64>,

    #[command(flatten)]
    target: TargetArgs,
}

/// Arguments of `settle`.
#[derive(Args)]
pub(crate) struct SettleArgs {
    #[command(flatten)]
    held: HeldArgs,

    #[command(flatten)]
    cost: ActualCostArg,
}

/// Arguments of `release`.
#[derive(Args)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    held: HeldArgs,
}

/// Arguments of `renew`.
#[derive(Args)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    held: HeldArgs,

    /// Time from now until the hold expires; a hold that expires later keeps its expiry
    #[arg(long, value_name = "DURATION", value_parser = duration_ms, help_heading = HOLD_HEADING)]
    ttl: u64,
}

/// A hold that was made before: its token, or its id with the request that made it.
#[derive(Args)]
#[command(group(ArgGroup::new("held").args(["token", "id"]).required(true)))]
struct HeldArgs {
    /// Token of the hold, from the response to it
    #[arg(long, conflicts_with_all = ["labels", "key"], help_heading = HOLD_HEADING)]
    token: Option<String>,

    /// Id of the hold, with the labels or the key that it was made with
    #[arg(long, requires = "subject", help_heading = HOLD_HEADING)]
    id: Option<String>,

    #[command(flatten)]
    request: RequestArgs,

    #[command(flatten)]
    target: TargetArgs,
}

impl HoldArgs {
    pub(super) async fn run(self, format: OutputFormat) -> CommandResult {
        let body = RequestBody {
            cost: self.cost.cost.as_ref(),
            id: self.id.as_deref(),
            ttl_ms: self.ttl,
            ..self.request.body()?
        };
        let (mut held, raw) = send::<HoldBody>(&self.target, "hold", &body, format).await?;
        if raw.is_direct() && held.decision.degraded {
            // the failure policy recorded it in this process, which ends
            held.expires_at_us = None;
        }
        let answer = &held.decision;
        let store_problem = raw.store_problem(answer).await;
        let response = Response { body: &body, answer, store_problem };
        print_response(format, &raw, || print_hold::hold(&response, &held));
        Ok(exit_status(answer))
    }
}

impl SettleArgs {
    pub(super) async fn run(self, format: OutputFormat) -> CommandResult {
        let body = RequestBody { cost: self.cost.cost.as_ref(), ..self.held.body()? };
        self.held.adjust("settle", &body, &ENDED, format).await
    }
}

impl ReleaseArgs {
    pub(super) async fn run(self, format: OutputFormat) -> CommandResult {
        self.held.adjust("release", &self.held.body()?, &ENDED, format).await
    }
}

impl RenewArgs {
    pub(super) async fn run(self, format: OutputFormat) -> CommandResult {
        let body = RequestBody { ttl_ms: Some(self.ttl), ..self.held.body()? };
        self.held.adjust("renew", &body, &RENEWED, format).await
    }
}

impl HeldArgs {
    fn body(&self) -> Result<RequestBody<'_>, String> {
        Ok(match self.token.as_deref() {
            Some(token) => RequestBody { token: Some(token), ..RequestBody::default() },
            None => RequestBody { id: self.id.as_deref(), ..self.request.body()? },
        })
    }

    async fn adjust(
        &self,
        call: &str,
        body: &RequestBody<'_>,
        done: &[&str],
        format: OutputFormat,
    ) -> CommandResult {
        let (settlement, raw) = send::<SettlementBody>(&self.target, call, body, format).await?;
        if settlement.outcome == "queued" && raw.is_direct() {
            // the queue ends with this process
            return Err("the store did not answer: run the command again; a hold is settled only once".into());
        }
        print_response(format, &raw, || print_hold::settlement(body, &settlement));
        let is_done = done.contains(&&*settlement.outcome);
        Ok(if is_done { ExitStatus::Success } else { ExitStatus::Negative })
    }
}
