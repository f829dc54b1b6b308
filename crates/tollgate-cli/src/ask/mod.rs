//! `tollgate check`, `peek`, `charge`, `refund`, `reset` and `explain`: one question, to a server or to a store directly.
//!
//! | file | has |
//! |---|---|
//! | `question` | what is asked, as the API's JSON |
//! | `target` | who is asked: a server, or the store of a configuration, through the same API without a network |
//! | `client` | the way to a server, and what to do when it does not answer |
//! | `show` | the answer for people |

pub(crate) mod client;
pub(crate) mod question;
pub(crate) mod show;
mod target;

use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;
use tollgate_server::http::{
    explain::Explanation,
    response::{Answer, Reset},
};

use self::{
    question::{Amount, Body, Subject, moment},
    show::Asked,
    target::{Reply, Target},
};
use crate::{
    Done, Verdict,
    output::{self, Form},
};

const EXAMPLES: &str = "\
Examples:
  tollgate check route=login ip=203.0.113.9              by the rules of the server on this machine
  tollgate check user=42 --cost requests=1,tokens=850    in several units
  tollgate check --key user:42 --limit \"100 per 1m\"      without rules
  tollgate check --config tollgate.toml user=42          without a server
  if tollgate check job=backup >/dev/null; then …        in a script";

/// The questions that one can ask.
#[derive(Subcommand)]
pub(crate) enum Ask {
    /// May this request pass? Counts it if it may
    ///
    /// Exits with 0 if it may, 1 if it may not, 2 if nobody could say.
    #[command(after_long_help = EXAMPLES)]
    Check(Question),

    /// Would this request pass? Counts nothing
    ///
    /// What remains is what is left now. Exits with 0 if it would, 1 if it would not.
    Peek(Question),

    /// Count what is known only afterwards, whatever the limits say
    ///
    /// Usage such as the tokens of a finished answer; it may leave a debt, which later requests wait for.
    Charge(Adjustment),

    /// Take back what was counted, at most what counts now
    ///
    /// Without --at the newest is taken back; with it, exactly what was counted then.
    Refund(Refund),

    /// Forget what was counted
    Reset(Forget),

    /// Why would this request pass or not? Counts nothing
    ///
    /// Shows which rules apply, the counter of each and the sum, and why the other rules do not apply.
    Explain(Question),
}

/// What `check`, `peek` and `explain` take.
#[derive(Args)]
pub(crate) struct Question {
    #[command(flatten)]
    subject: Subject,

    #[command(flatten)]
    amount: Amount,

    #[command(flatten)]
    target: Target,
}

/// What `charge` takes.
#[derive(Args)]
pub(crate) struct Adjustment {
    #[command(flatten)]
    question: Question,

    #[command(flatten)]
    only: Only,
}

/// What `refund` takes.
#[derive(Args)]
pub(crate) struct Refund {
    #[command(flatten)]
    adjustment: Adjustment,

    /// When it was counted, as the answer said then (at_us): microseconds by the store's clock
    #[arg(long, visible_alias = "at-us", value_name = "MICROSECONDS", value_parser = moment, allow_negative_numbers = true)]
    at: Option<u64>,
}

/// What `reset` takes.
#[derive(Args)]
pub(crate) struct Forget {
    #[command(flatten)]
    subject: Subject,

    #[command(flatten)]
    only: Only,

    #[command(flatten)]
    target: Target,
}

#[derive(Args)]
struct Only {
    /// Only these of the rules that apply
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', conflicts_with = "key")]
    rules: Option<Vec<String>>,
}

impl Ask {
    pub(crate) async fn run(self, form: Form) -> Done {
        match self {
            Self::Check(question) => question.decided("check", show::check, form).await,
            Self::Peek(question) => question.decided("peek", show::peek, form).await,
            Self::Explain(question) => question.explained(form).await,
            Self::Charge(Adjustment { question, only }) => {
                let body = Body { rules: only.rules, ..question.body() };
                decided(&question.target, "charge", &body, show::charge, form).await
            }
            Self::Refund(Refund { adjustment: Adjustment { question, only }, at }) => {
                let body = Body { rules: only.rules, at_us: at, ..question.body() };
                decided(&question.target, "refund", &body, show::refund, form).await
            }
            Self::Reset(Forget { subject, only, target }) => {
                let body = Body { rules: only.rules, ..subject.body() };
                let (reset, reply) = asked::<Reset>(&target, "reset", &body, form).await?;
                tell(form, &reply, || show::reset(reset));
                Ok(Verdict::Fine)
            }
        }
    }
}

impl Question {
    fn body(&self) -> Body<'_> {
        Body { cost: self.amount.cost.as_ref(), ..self.subject.body() }
    }

    async fn decided(&self, call: &str, show: fn(&Asked<'_>), form: Form) -> Done {
        decided(&self.target, call, &self.body(), show, form).await
    }

    async fn explained(&self, form: Form) -> Done {
        let body = self.body();
        let (explained, reply) = asked::<Explanation>(&self.target, "explain", &body, form).await?;
        let answer = &explained.decision;
        let trouble = reply.trouble(answer).await;
        tell(form, &reply, || show::explanation(&Asked { body: &body, answer, trouble }, &explained));
        Ok(verdict(answer))
    }
}

async fn decided(target: &Target, call: &str, body: &Body<'_>, show: fn(&Asked<'_>), form: Form) -> Done {
    let (answer, reply) = asked::<Answer>(target, call, body, form).await?;
    let trouble = reply.trouble(&answer).await;
    tell(form, &reply, || show(&Asked { body, answer: &answer, trouble }));
    Ok(verdict(&answer))
}

/// The answer, read, and as it came.
async fn asked<T: DeserializeOwned>(
    target: &Target,
    call: &str,
    body: &Body<'_>,
    form: Form,
) -> Result<(T, Reply), Box<dyn std::error::Error>> {
    let reply = target.ask(call, serde_json::to_vec(body)?, form).await?;
    Ok((reply.read()?, reply))
}

/// For programs the answer is passed on as it came: a server and a store say the same.
fn tell(form: Form, reply: &Reply, show: impl FnOnce()) {
    match form {
        Form::Text => show(),
        Form::Json => output::line(reply.text()),
    }
}

fn verdict(answer: &Answer) -> Verdict {
    if answer.allowed { Verdict::Fine } else { Verdict::Found }
}
