//! `tollgate doctor`: what is wrong with a store, and what to do about it.
//!
//! | file | has |
//! |---|---|
//! | `facts` | what one server tells about itself |
//! | `keys` | the keys of ours that the servers hold |
//! | `judge` | from facts to findings, without IO |
//! | `bound` | what such a set-up admits at most |
//! | `repair` | `--fix` |
//! | `finding`, `report` | what is said, and how |

mod bound;
mod facts;
mod finding;
mod judge;
mod keys;
mod repair;
mod report;

use std::path::PathBuf;

use clap::Args;
use tollgate::{
    RedisSetupError,
    redis::{
        URLS,
        inspect::{Inspection, Whose},
    },
};
use tollgate_server::{
    config::{self, Config, Flags, Origin, Source},
    run::StartError,
    store::StoreUrl,
};

use self::{
    facts::Facts,
    finding::{Finding, see},
    judge::Context,
    keys::{Keys, Known},
    report::Report,
};
use crate::{
    Done, Verdict,
    output::{self, Form},
};

/// Say what is wrong with the store, why it matters and what to do
///
/// Examines the Redis or Valkey servers that keep the counters: speed, version, memory and eviction, persistence, replicas,
/// clocks, rights, and the keys of tollgate. Asks gently: it may be run on servers at work. Exit code 1 if there is a problem,
/// 0 if there is at most advice.
#[derive(Args)]
pub(crate) struct Doctor {
    // Not read by clap, which repeats what it cannot read: this may hold a password.
    #[arg(long, value_name = "URL", help = format!("The store: {URLS} [env: TOLLGATE_STORE_URL=]"))]
    store: Option<String>,

    /// The configuration: its store, unless --store names one, and its rules, to find counters of rules that are gone
    /// [env: TOLLGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Mend what can be mended without harm: keys of ours that never expire, counters of rules that are gone
    #[arg(long)]
    fix: bool,

    /// Mend without asking
    #[arg(long, requires = "fix")]
    yes: bool,

    /// Examine the rights of this user instead of those of the user that connects
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// Look at this many keys at most
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_MAX_KEYS)]
    max_keys: u64,
}

/// Of how many keys a look takes half a minute.
const DEFAULT_MAX_KEYS: u64 = 1_000_000;

impl Doctor {
    pub(crate) async fn run(self, form: Form) -> Done {
        if self.fix && !self.yes && form == Form::Json {
            return Err("with --json nobody can be asked: add --yes to --fix, or leave both out".into());
        }
        let flags = Flags { config: self.config.clone(), store: self.store.clone(), ..Flags::default() };
        let config = config::load(&Source::new(flags)).map_err(StartError::Config)?;
        let StoreUrl::Redis(url) = &config.store.url else {
            return nothing_to_examine(form);
        };
        let shown = config.store.url.to_string();
        match Inspection::of(url, &config.store.redis, &config.store.prefix).await {
            Ok(inspection) => self.examine(&inspection, &config, form).await,
            Err(RedisSetupError::Connect(reason)) => {
                let report = Report::new(shown, vec![unreachable(&reason, Way::of(url))]);
                report.print(form)?;
                Ok(report.verdict())
            }
            Err(error) => Err(format!("store {shown}: {error}").into()),
        }
    }

    async fn examine(&self, inspection: &Inspection, config: &Config, form: Form) -> Done {
        let rules = matches!(config.origin, Origin::File(_)).then_some(&config.rules[..]);
        let known = rules.map(Known::of);
        let context = Context {
            shape: inspection.shape,
            is_encrypted: inspection.is_encrypted,
            deadline: config.store.deadline,
            prefix: &config.store.prefix,
            user: self.user.as_deref(),
        };
        let whose = self.user.as_deref().map_or(Whose::Own, Whose::Of);
        let mut findings = judge::together(inspection);
        let mut servers = Vec::new();
        for server in &inspection.servers {
            match Facts::of(server, whose).await {
                Ok(facts) => {
                    findings.extend(judge::server(&facts, &context));
                    servers.push(facts);
                }
                Err(error) => {
                    findings.push(unreachable(&error.to_string(), Way::Known).at(&server.address()))
                }
            }
        }
        let keys = Keys::of(&inspection.servers, known.as_ref(), self.max_keys, form).await;
        findings.extend(keys.findings(known.as_ref()));
        let mut report = Report::new(config.store.url.to_string(), findings)
            .with_servers(inspection.shape, &servers)
            .with_keys(&keys)
            .with_bound(bound::rows(&servers, inspection.shape, rules));
        if form == Form::Text {
            report.print(form)?;
        }
        let plan = if self.fix { repair::plan(&keys) } else { Vec::new() };
        if !plan.is_empty() && self.is_agreed(&plan, form) {
            let repaired = repair::repair(&inspection.servers, &keys).await?;
            report.mended(repaired, &keys);
            if form == Form::Text {
                let expiring = output::several(repaired.expiring, "key has", "keys have");
                let removed = output::several(repaired.removed, "counter is", "counters are");
                output::line(format_args!("mended: {expiring} an end now, {removed} gone"));
            }
        }
        if form == Form::Json {
            report.print(form)?;
        }
        Ok(report.verdict())
    }

    /// Shows what would be done, and asks unless told not to.
    fn is_agreed(&self, plan: &[String], form: Form) -> bool {
        if form == Form::Text {
            output::line("");
            for line in plan {
                output::line(format_args!("to mend: {line}"));
            }
        }
        self.yes || output::confirm("Do this?")
    }
}

fn nothing_to_examine(form: Form) -> Done {
    let what = "counters are kept in the memory of the server itself: there is no store to examine";
    match form {
        Form::Text => {
            output::line(format_args!("{what}\nname one by --store, for example redis://127.0.0.1:6379"))
        }
        Form::Json => Report::new("memory:".to_owned(), vec![Finding::fine("store", what)]).print(form)?,
    }
    Ok(Verdict::Fine)
}

/// How a server was to be reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    InTheClear,
    Encrypted,
    /// It was reached before.
    Known,
}

impl Way {
    fn of(url: &str) -> Self {
        if url.starts_with("rediss") { Self::Encrypted } else { Self::InTheClear }
    }
}

/// What to do about a store that cannot be reached, by what was said.
fn unreachable(reason: &str, way: Way) -> Finding {
    let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    // who speaks TLS to a server that does not waits for an answer; who does not, to one that does, is hung up on
    let is_other_way = match way {
        Way::InTheClear => says(&["end of file", "reset by peer", "terminated", "closed"]),
        Way::Encrypted => says(&["timed out", "no answer", "end of file", "reset by peer"]),
        Way::Known => false,
    };
    let (remedy, see) = if says(&["WRONGPASS", "NOAUTH", "NOPERM", "authentication failed", "AUTH"]) {
        (
            "user or password are wrong, or its rights: put them right in the URL or in store.password_file",
            see::USER,
        )
    } else if is_other_way || says(&["ertificate", "TLS", "tls", "handshake"]) {
        (
            "look whether it is up; use a URL that begins with rediss if it speaks TLS, and one that begins with redis \
             if not; store.ca names the authority of its certificate",
            see::WHERE,
        )
    } else if says(&["max number of clients"]) {
        ("raise maxclients, or find out who connects: CLIENT LIST", see::SETTINGS)
    } else if says(&["no primary of that name", "no sentinel"]) {
        (
            "look whether the sentinels are up, and whether the URL ends with the name that they know: SENTINEL MASTERS",
            see::SENTINEL,
        )
    } else if says(&["cluster support disabled", "knows no slots"]) {
        ("this is no Cluster, or an empty one: use redis://, or redis-cli --cluster create", see::CLUSTER)
    } else {
        (
            "look whether it is up, whether host and port are right, and whether a firewall is between: redis-cli -u \
             URL PING",
            see::WRONG,
        )
    };
    Finding::problem("reachable", format!("it cannot be reached: {reason}"))
        .why("each rule's on_store_failure decides until it can")
        .remedy(remedy, see)
}
