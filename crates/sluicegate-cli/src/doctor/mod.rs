//! `sluicegate doctor`: diagnoses a store and suggests fixes.
//!
//! | file | contents |
//! |---|---|
//! | `facts` | data collected from one server |
//! | `keys` | scan of sluicegate's keys |
//! | `holds` | live and expired holds, and those with lost records or wrong units |
//! | `checks` | facts to findings, without I/O |
//! | `admission_bound` | the most that this deployment admits |
//! | `connectivity` | diagnosis of connection failures |
//! | `repair` | `--fix` |
//! | `finding`, `report` | findings and their output |

mod admission_bound;
mod checks;
pub(crate) mod connectivity;
mod facts;
mod finding;
mod holds;
mod keys;
mod repair;
mod report;

use std::path::PathBuf;

use clap::Args;
use sluicegate::{
    Rule,
    redis::{
        RedisSetupError, URLS,
        inspect::{AclSubject, Inspection},
    },
};
use sluicegate_server::{
    config::{self, Config, Flags, Origin, Source, StoreSettings},
    server::StartError,
    store::StoreUrl,
};

use self::{
    checks::Context,
    connectivity::{ConnectionProblem, Transport},
    facts::ServerFacts,
    finding::{Finding, see},
    holds::HoldScan,
    keys::{ConfiguredRules, KeyScan},
    repair::Repair,
    report::DoctorReport,
};
use crate::{
    CommandResult, ExitStatus, format,
    output::{self, OutputFormat},
    value_parsers::whole_number,
};

/// Diagnose the store: problems, why they matter, and how to fix them
///
/// Examines the Redis or Valkey servers of the store: latency, version, memory and eviction, persistence, replicas, clocks,
/// permissions, and sluicegate's keys. It is rate-limited and safe to run in production. Exits with 1 if there is a problem, 0 if there
/// is at most advice.
#[derive(Args)]
pub(crate) struct Doctor {
    // Not parsed by clap: its error messages quote the value, which may contain a password.
    #[arg(long, value_name = "URL", help = format!("Store to examine: {URLS} [env: SLUICEGATE_STORE_URL=]"))]
    store: Option<String>,

    /// Configuration file: its store, and its rules if it is examined, to find orphaned counters [env: SLUICEGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Fix what is safe to fix: set a TTL on sluicegate's keys without one; release expired holds of concurrency rules; with --config, remove
    /// orphaned counters that no longer count
    #[arg(long)]
    fix: bool,

    /// Fix without confirmation
    #[arg(long, requires = "fix")]
    yes: bool,

    /// Examine the permissions of this user instead of the connected one
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// Maximum number of keys to scan
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_MAX_KEYS, value_parser = whole_number::<u64>(0..=u64::MAX, DEFAULT_MAX_KEYS), allow_negative_numbers = true)]
    max_keys: u64,

    /// Catches a positional argument: clap's error message would quote it, and it may contain a password
    #[arg(hide = true)]
    positional: Option<String>,
}

/// Scanning this many keys takes half a minute.
const DEFAULT_MAX_KEYS: u64 = 1_000_000;

impl Doctor {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        if self.positional.is_some() {
            return Err("unexpected argument: pass the store as --store URL".into());
        }
        if self.fix && !self.yes && format == OutputFormat::Json {
            return Err("--fix with --json cannot ask for confirmation: add --yes".into());
        }
        let flags = Flags { config: self.config.clone(), store: self.store.clone(), ..Flags::default() };
        let config = config::load(&Source::new(flags)).map_err(StartError::Config)?;
        let StoreUrl::Redis(url) = &config.store.url else {
            return nothing_to_examine(format);
        };
        let shown = config.store.url.to_string();
        match Inspection::of(url, &config.store.redis, &config.store.prefix).await {
            Ok(inspection) => self.examine(&inspection, &config, format).await,
            Err(RedisSetupError::Connect(reason)) => {
                let problem = ConnectionProblem::new(&reason, Transport::of(url));
                let report = DoctorReport::new(shown, vec![problem.finding()]);
                report.print(format)?;
                Ok(report.exit_status())
            }
            Err(error) => Err(format::printable(&format!("store {shown}: {error}")).into()),
        }
    }

    async fn examine(&self, inspection: &Inspection, config: &Config, format: OutputFormat) -> CommandResult {
        let rules = self.rules_of_store(config);
        let configured = rules.as_ref().ok().map(|rules| ConfiguredRules::new(rules));
        let context = Context {
            shape: inspection.shape,
            is_encrypted: inspection.is_encrypted,
            deadline: config.store.deadline,
            prefix: &config.store.prefix,
            user: self.user.as_deref(),
        };
        let whose = self.user.as_deref().map_or(AclSubject::Own, AclSubject::Of);
        let mut findings = checks::deployment(inspection);
        let mut servers = Vec::new();
        for server in &inspection.servers {
            match ServerFacts::collect(server, whose).await {
                Ok(facts) => {
                    findings.extend(checks::server(&facts, &context));
                    servers.push(facts);
                }
                Err(error) => {
                    let problem = ConnectionProblem::of(&error);
                    findings.push(problem.finding().at(&server.address()))
                }
            }
        }
        let keys = KeyScan::run(&inspection.servers, configured.as_ref(), self.max_keys, format).await;
        findings.extend(keys.findings(configured.as_ref()));
        let holds = HoldScan::run(&keys.holds, &inspection.servers).await;
        let round_trip = servers.iter().map(|facts| facts.round_trip(50)).max().unwrap_or_default();
        let own_rules = rules.as_ref().map_or(&[][..], |rules| rules);
        findings.extend(checks::leases(own_rules, config.store.instances, round_trip));
        findings.extend(rules.as_ref().err().and_then(Option::as_ref).map(OtherStore::finding));
        let mut report = DoctorReport::new(config.store.url.to_string(), findings)
            .with_servers(inspection.shape, &servers)
            .with_keys(&keys)
            .with_holds(&holds)
            .with_bound(admission_bound::rows(&servers, inspection.shape, rules.ok()));
        if format == OutputFormat::Text {
            report.print(format)?;
        }
        // a file that happens to be in the working directory is not sufficient to remove anything
        let orphans = self.config.is_some().then_some(&keys.orphans);
        let repair = Repair { without_ttl: &keys.without_ttl, orphans, holds: &holds.repairable };
        let plan = if self.fix { repair.plan() } else { Vec::new() };
        if !plan.is_empty() && self.is_confirmed(&plan, format) {
            let repaired = repair.apply(&inspection.servers).await?;
            report.mark_repaired(repaired, &keys);
            if !repair.holds.is_empty() {
                report.replace_holds(HoldScan::run(&keys.holds, &inspection.servers).await);
            }
            if format == OutputFormat::Text {
                let expiring = format::plural(repaired.expiring, "key", "keys");
                let removed = format::plural(repaired.removed, "orphaned counter", "orphaned counters");
                let released = format::plural(repaired.released, "expired hold", "expired holds");
                output::line(format_args!(
                    "fixed: set a TTL on {expiring}, removed {removed}, released {released}"
                ));
            }
        }
        if format == OutputFormat::Json {
            report.print(format)?;
        }
        Ok(report.exit_status())
    }

    /// Returns the rules of the configuration file. `Err` if there is no file, or if it configures another store: then other servers use
    /// the examined store, with rules that are not known here.
    fn rules_of_store<'a>(&self, config: &'a Config) -> Result<&'a [Rule], Option<OtherStore>> {
        let Origin::File(path) = &config.origin else { return Err(None) };
        let flags = Flags { config: self.config.clone(), ..Flags::default() };
        let own_store = config::load(&Source::new(flags)).ok().map(|config| config.store);
        let place = |store: &StoreSettings| (store.url.to_string(), store.prefix.clone());
        if own_store.as_ref().map(place) == Some(place(&config.store)) {
            return Ok(&config.rules);
        }
        let url = own_store.map(|store| store.url.to_string());
        Err(Some(OtherStore { file: path.display().to_string(), url }))
    }

    /// Prints the planned fixes and asks for confirmation, unless --yes is set.
    fn is_confirmed(&self, plan: &[String], format: OutputFormat) -> bool {
        if format == OutputFormat::Text {
            output::line("");
            for line in plan {
                output::line(format_args!("planned fix: {line}"));
            }
        }
        self.yes || output::confirm("Apply?")
    }
}

/// A configuration file of another store than the examined one.
struct OtherStore {
    file: String,
    /// `None` if it is invalid.
    url: Option<String>,
}

impl OtherStore {
    fn finding(&self) -> Finding {
        let Self { file, url } = self;
        let url = url.as_deref().unwrap_or("an invalid store");
        let what = format!("orphaned counters not searched for: {file} is the configuration of {url}");
        let remedy = "run the doctor with --config and the configuration of this store";
        Finding::unknown("orphans", what).remedy(remedy, see::KEYS)
    }
}

fn nothing_to_examine(format: OutputFormat) -> CommandResult {
    let what = "counters are kept in the server's memory: no store to examine";
    match format {
        OutputFormat::Text => {
            output::line(format_args!("{what}\nset --store, for example redis://127.0.0.1:6379"))
        }
        OutputFormat::Json => {
            DoctorReport::new("memory:".to_owned(), vec![Finding::fine("store", what)]).print(format)?
        }
    }
    Ok(ExitStatus::Success)
}
