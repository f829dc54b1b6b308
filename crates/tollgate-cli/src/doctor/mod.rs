//! `tollgate doctor`: what is wrong with a store, and what to do about it.
//!
//! | file | has |
//! |---|---|
//! | `facts` | what one server tells about itself |
//! | `keys` | the keys of ours that the servers hold |
//! | `judge` | from facts to findings, without IO |
//! | `bound` | what such a set-up admits at most |
//! | `reach` | why a store cannot be reached |
//! | `repair` | `--fix` |
//! | `finding`, `report` | what is said, and how |

mod bound;
mod facts;
mod finding;
mod judge;
mod keys;
pub(crate) mod reach;
mod repair;
mod report;

use std::path::PathBuf;

use clap::Args;
use tollgate::{
    RedisSetupError,
    redis::{
        URLS,
        inspect::{AclSubject, Inspection},
    },
};
use tollgate_server::{
    config::{self, Config, Flags, Origin, Source},
    server::StartError,
    store::StoreUrl,
};

use self::{
    facts::Facts,
    finding::Finding,
    judge::Context,
    keys::{Keys, Known},
    reach::{Trouble, Way},
    report::Report,
};
use crate::{
    Done, Verdict,
    numbers::whole,
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

    /// CounterSnapshot at this many keys at most
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_MAX_KEYS, value_parser = whole::<u64>(0..=u64::MAX, DEFAULT_MAX_KEYS), allow_negative_numbers = true)]
    max_keys: u64,

    /// A word that belongs to no flag, for a better message: clap would repeat it, and it may hold a password
    #[arg(hide = true)]
    stray: Option<String>,
}

/// Of how many keys a look takes half a minute.
const DEFAULT_MAX_KEYS: u64 = 1_000_000;

impl Doctor {
    pub(crate) async fn run(self, form: Form) -> Done {
        if self.stray.is_some() {
            return Err("a word belongs to no flag: name the store with --store URL".into());
        }
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
                let report = Report::new(shown, vec![Trouble::new(&reason, Way::of(url)).finding()]);
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
        let whose = self.user.as_deref().map_or(AclSubject::Own, AclSubject::Of);
        let mut findings = judge::together(inspection);
        let mut servers = Vec::new();
        for server in &inspection.servers {
            match Facts::of(server, whose).await {
                Ok(facts) => {
                    findings.extend(judge::server(&facts, &context));
                    servers.push(facts);
                }
                Err(error) => {
                    let trouble = Trouble::new(&error.to_string(), Way::Known);
                    findings.push(trouble.finding().at(&server.address()))
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
