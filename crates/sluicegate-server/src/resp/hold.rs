//! Commands for holds: from a command to a call of the engine, and from its outcome to a reply.
//!
//! These commands identify a hold by its id and the labels of its request, which a script can store more easily than a token.

use std::time::Duration;

use sluicegate::{
    Cost,
    limiter::{HoldDecision, HoldToken, Request},
    store::HoldId,
};

use super::{
    codec::Command,
    commands::Verb,
    error::{Error, shown},
    request::{costs, labels, parse_whole, write_decision},
    response::Replies,
    session::Session,
};
use crate::engine::{Engine, Excess, HoldAdjustment, Transport};

/// A command for a hold.
#[derive(Debug)]
pub(super) enum HoldCommand {
    /// Makes one.
    Hold { request: Request<'static>, id: HoldId, ttl: Option<Duration> },
    /// Ends or renews one.
    Adjust { token: HoldToken, adjustment: HoldAdjustment },
}

impl HoldCommand {
    /// Reads a command, if it is for a hold. The number of its arguments is valid.
    pub(super) fn read(
        engine: &Engine,
        verb: Verb,
        command: &Command<'_>,
        session: &Session,
    ) -> Option<Result<Self, Error>> {
        Some(match verb {
            Verb::Hold => hold(engine, command),
            Verb::Settle => settle(engine, command, session.excess()),
            Verb::Release => adjust(engine, command, 2, HoldAdjustment::Release),
            Verb::Renew => renew(engine, command),
            _ => return None,
        })
    }

    /// Executes the command and writes the reply.
    pub(super) async fn execute(
        self,
        engine: &Engine,
        replies: &mut Replies,
    ) -> Result<(), sluicegate::Error> {
        match self {
            Self::Hold { request, id, ttl } => {
                let held = engine.hold(Transport::Resp, &request, Some(id), ttl).await?;
                hold_reply(&held, replies);
            }
            Self::Adjust { token, adjustment } => {
                let settlement = engine.adjust_hold(Transport::Resp, token, adjustment, None).await?;
                replies.bulk(settlement.outcome.name().as_bytes());
            }
        }
        Ok(())
    }
}

/// `SG.HOLD id ttl_ms cost label value [label value ...]`.
fn hold(engine: &Engine, command: &Command<'_>) -> Result<HoldCommand, Error> {
    let (id, ttl) = (id(command)?, ttl(command)?);
    let costs = costs(command.get(3).unwrap_or_default())?;
    let request = Request::new(labels(engine, command, 4)?, costs);
    let ttl = (!ttl.is_zero()).then_some(ttl);
    Ok(HoldCommand::Hold { request, id, ttl })
}

/// `SG.SETTLE id cost label value [label value ...]`.
fn settle(engine: &Engine, command: &Command<'_>, excess: Excess) -> Result<HoldCommand, Error> {
    let costs = costs(command.get(2).unwrap_or_default())?;
    adjust(engine, command, 3, HoldAdjustment::Settle { costs, excess })
}

/// `SG.RENEW id ttl_ms label value [label value ...]`.
fn renew(engine: &Engine, command: &Command<'_>) -> Result<HoldCommand, Error> {
    adjust(engine, command, 3, HoldAdjustment::Renew(ttl(command)?))
}

fn adjust(
    engine: &Engine,
    command: &Command<'_>,
    first_label: usize,
    adjustment: HoldAdjustment,
) -> Result<HoldCommand, Error> {
    let id = id(command)?;
    // the cost has no effect: the labels only select the counters
    let request = Request::new(labels(engine, command, first_label)?, Cost::ONE);
    let token = engine.limiter().hold_token(&request, id)?;
    Ok(HoldCommand::Adjust { token, adjustment })
}

fn id(command: &Command<'_>) -> Result<HoldId, Error> {
    HoldId::new(command.get(1).unwrap_or_default()).map_err(Error::invalid)
}

fn ttl(command: &Command<'_>) -> Result<Duration, Error> {
    let text = command.get(2).unwrap_or_default();
    let millis = parse_whole(text).ok_or_else(|| {
        Error::invalid(format_args!("ttl_ms '{}' is not a whole number: use milliseconds", shown(text)))
    })?;
    Ok(Duration::from_millis(millis))
}

/// The reply of `SG.CHECK`, and the time at which the hold expires; 0 if no hold was recorded.
fn hold_reply(held: &HoldDecision, replies: &mut Replies) {
    replies.array(9);
    write_decision(&held.decision, replies);
    replies.count(held.expires_at.map_or(0, |at| at.as_micros()));
}
