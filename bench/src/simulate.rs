//! `scripts/bench simulate`: speed and memory of `sluicegate simulate` on a log. It runs the binary, so that reading,
//! parsing, matching and deciding are all included.
//!
//! Not measured: disk I/O. The log has just been written and is read from the page cache.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;

use crate::machine;

/// Number of lines in the log, and in the log of a quick run.
const LINES: u64 = 5_000_000;
const QUICK_LINES: u64 = 1_000_000;
/// Number of client addresses; a few of them send most of the requests.
const ADDRESSES: f64 = 200_000.0;
/// The period that the log covers: a day.
const SECONDS: u64 = 86_400;
/// Seed of the generated log.
const SEED: u64 = 7;
/// Target in lines per second.
const TARGET: f64 = 1e6;
/// Sampling interval of the memory use.
const LOOK: Duration = Duration::from_millis(5);

const RULES: &str = r#"
[[rule]]
name = "all-per-ip"
per = ["ip"]
amount = 120
window = "1m"
burst = 30

[[rule]]
name = "login-per-ip"
when = { path = "/login", method = "POST" }
per = ["ip"]
algorithm = "sliding-log"
amount = 5
window = "10m"

[[rule]]
name = "search"
when = { path = "/search*" }
algorithm = "sliding-counter"
amount = 600
window = "1m"
"#;

const AGENTS: [&str; 3] = [
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_1 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.1 Mobile/15E148",
    "python-requests/2.32.3",
];

/// Duration and memory of one run.
struct Run {
    took: Duration,
    peak_kib: u64,
}

/// Generates a log, runs the program on it `rounds` times in each variant, and prints the results.
pub fn run(rounds: usize, quick: bool) -> Result<()> {
    let sluicegate = machine::sluicegate();
    let lines = if quick { QUICK_LINES } else { LINES };
    let directory = tempfile()?;
    let (log, rules) = (directory.join("access.log"), directory.join("sluicegate.toml"));
    let bytes = write_log(&log, lines)?;
    fs::write(&rules, RULES)?;
    println!("{lines} lines, {:.0} MB; medians of {rounds} runs", bytes as f64 / 1e6);
    for (name, flags) in
        [("one rule file", &[][..]), ("two rule files", &["--against"]), ("with --curve", &["--curve"])]
    {
        let mut runs =
            (0..rounds).map(|_| simulate(&sluicegate, &log, &rules, flags)).collect::<Result<Vec<_>>>()?;
        runs.sort_by_key(|run| run.took);
        let median = &runs[runs.len() / 2];
        let rate = lines as f64 / median.took.as_secs_f64();
        let target =
            if flags.is_empty() { format!("  target {:.0} M/s", TARGET / 1e6) } else { String::new() };
        println!(
            "  {name:15} {:6.2} s  {:5.2} M lines/s  {:6.1} MiB at most{target}",
            median.took.as_secs_f64(),
            rate / 1e6,
            runs.iter().map(|run| run.peak_kib).max().unwrap_or_default() as f64 / 1024.0
        );
    }
    fs::remove_dir_all(&directory)?;
    Ok(())
}

fn tempfile() -> Result<PathBuf> {
    let directory = std::env::temp_dir().join(format!("sluicegate-bench-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    Ok(directory)
}

/// Its size in bytes.
fn write_log(path: &Path, lines: u64) -> Result<u64> {
    let mut random = Rng::with_seed(SEED);
    let mut log = BufWriter::with_capacity(1 << 20, File::create(path)?);
    for line in 0..lines {
        let second = line * SECONDS / lines;
        let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
        // smaller numbers are more frequent
        let address = ADDRESSES.powf(random.f64()) as u32;
        let [_, b, c, d] = address.wrapping_mul(2_654_435_761).to_be_bytes();
        let agent = AGENTS[random.usize(..AGENTS.len())];
        let (method, path, status) = match random.u32(..100) {
            0..2 => ("POST", "/login".to_owned(), 302),
            2..20 => ("GET", format!("/search?q={}", random.u32(..10_000)), 200),
            _ => ("GET", format!("/products/{}", random.u32(..50_000)), 200),
        };
        writeln!(
            log,
            "10.{b}.{c}.{d} - - [16/Nov/2026:{hours:02}:{minutes:02}:{seconds:02} +0000] \"{method} {path} HTTP/1.1\" {status} {} \
             \"https://shop.example/\" \"{agent}\"",
            random.u32(200..20_000)
        )?;
    }
    log.flush()?;
    Ok(fs::metadata(path)?.len())
}

fn simulate(sluicegate: &Path, log: &Path, rules: &Path, flags: &[&str]) -> Result<Run> {
    let mut command = Command::new(sluicegate);
    command.args(["simulate", "--json", "--config"]).arg(rules).arg("--log").arg(log);
    for flag in flags {
        command.arg(flag);
        if *flag == "--against" {
            command.arg(rules);
        }
    }
    let begun = Instant::now();
    let mut process = command
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("{} does not start", sluicegate.display()))?;
    let mut peak_kib = 0;
    let status = loop {
        peak_kib = peak_kib.max(peak(process.id()).unwrap_or_default());
        if let Some(status) = process.try_wait()? {
            break status;
        }
        std::thread::sleep(LOOK);
    };
    ensure!(status.success(), "{} failed", sluicegate.display());
    Ok(Run { took: begun.elapsed(), peak_kib })
}

/// The peak memory of a process.
fn peak(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
