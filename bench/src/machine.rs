//! The machine on which the figures were measured.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The machine, and how busy it was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub cores: usize,
    pub model: String,
    pub kernel: String,
    pub redis: String,
    pub rustc: String,
    pub revision: String,
    pub date: String,
    /// The contestants' versions.
    pub peers: Vec<String>,
    /// Load averages of 1, 5 and 15 minutes before the first run.
    pub load: String,
}

impl Machine {
    /// Describes this machine in its current state.
    pub fn here(redis: String) -> Result<Self> {
        let cpus = fs::read_to_string("/proc/cpuinfo")?;
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            model: model.map_or("unknown", |(_, model)| model).to_owned(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            redis,
            rustc: output("rustc", &["--version"]),
            revision: output("git", &["describe", "--always", "--dirty"]),
            date: output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            peers: crates(),
            load: load()?,
        })
    }
}

/// The path of the `sluicegate` binary that `scripts/bench` has built.
pub fn sluicegate() -> PathBuf {
    let built = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/release/sluicegate");
    std::env::var_os("SLUICEGATE").map_or_else(built, PathBuf::from)
}

/// The load averages of 1, 5 and 15 minutes.
pub fn load() -> Result<String> {
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(load.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// The CPU time of this process so far, in microseconds. Unlike [`cpu_us`], it is not rounded to ticks.
pub fn own_cpu_us() -> Result<f64> {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Ok(time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3)
}

/// The CPU time of a process's main thread so far, in microseconds.
pub fn main_thread_cpu_us(process: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{process}/schedstat"))?;
    Ok(stat.split(' ').next().context("schedstat is empty")?.parse::<f64>()? / 1e3)
}

/// The CPU time of a process so far, in microseconds.
pub fn cpu_us(process: &str) -> Result<f64> {
    const FIELD: usize = 11;
    ticks_us(process, FIELD)
}

/// The CPU time of this process's children that have ended, in microseconds.
pub fn children_cpu_us() -> Result<f64> {
    const FIELD: usize = 13;
    ticks_us("self", FIELD)
}

/// Returns the sum of user and system time of a process, from two adjacent fields of `/proc/<pid>/stat`. `field` is the
/// index of the first one after the process name. Both are in ticks of 10 ms.
fn ticks_us(process: &str, field: usize) -> Result<f64> {
    const TICK_US: f64 = 10_000.0;
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let after_name = stat.rsplit_once(") ").context("the process has no name")?.1;
    let ticks: u64 =
        after_name.split(' ').skip(field).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 * TICK_US)
}

/// The CPU time of this thread so far, in nanoseconds.
pub fn thread_cpu_ns() -> Result<u64> {
    let stat = fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(stat.split(' ').next().context("schedstat is empty")?.parse()?)
}

/// The resident memory of this process, in bytes.
pub fn resident_bytes() -> Result<u64> {
    const PAGE: u64 = 4096;
    let statm = fs::read_to_string("/proc/self/statm")?;
    Ok(statm.split(' ').nth(1).context("statm is too short")?.parse::<u64>()? * PAGE)
}

/// The contestants that are crates, with their versions in the lock file.
fn crates() -> Vec<String> {
    let mut names = vec!["governor", "quota"];
    names.extend(cfg!(feature = "throttlecrab").then_some("throttlecrab"));
    names.extend(cfg!(feature = "limitador").then_some("limitador"));
    versions_of(&names).into_iter().chain(redis_rs()).collect()
}

/// The Redis client of the hand-written limiter.
pub fn redis_client_version() -> Vec<String> {
    redis_rs().into_iter().collect()
}

/// The Redis clients of `scripts/bench network`.
pub fn client_versions() -> Vec<String> {
    redis_rs().into_iter().chain(versions_of(&["fred"])).collect()
}

/// The lock file may contain two versions of redis-rs; the bench uses the later one.
fn redis_rs() -> Option<String> {
    let versions =
        LOCK.split("name = \"redis\"\nversion = \"").skip(1).filter_map(|rest| rest.split('"').next());
    versions.last().map(|version| format!("redis-rs {version}"))
}

/// The versions of these crates in the lock file.
pub fn versions_of(names: &[&str]) -> Vec<String> {
    let version_of = |name: &&str| {
        let heading = format!("name = \"{name}\"\nversion = \"");
        let version = LOCK.split_once(&heading).and_then(|(_, rest)| rest.split('"').next());
        format!("{name} {}", version.unwrap_or("unknown"))
    };
    names.iter().map(version_of).collect()
}

/// The bench's own lock file.
const LOCK: &str = include_str!("../Cargo.lock");

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or("unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
