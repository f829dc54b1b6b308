//! Background load on all cores.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Result;
use fastrand::Rng;

/// Shortest and longest cycle of spinning and sleeping, in microseconds. Random lengths keep the threads from spinning in step.
const CYCLE_US: std::ops::Range<u64> = 10_000..30_000;

/// Threads that spin for a part of the time, or all of it. They end when this is dropped.
pub struct CpuLoad {
    is_stopped: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl CpuLoad {
    /// Starts a load in percent of all cores. Above 100 percent, several threads compete for each core.
    pub fn start(percent: u32) -> Result<Self> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let threads_per_core = percent.div_ceil(100);
        let count = threads_per_core * u32::try_from(thread::available_parallelism()?.get())?;
        let threads = (0..count).map(|seed| {
            let (is_stopped, random) = (Arc::clone(&is_stopped), Rng::with_seed(seed.into()));
            thread::spawn(move || spin(percent / threads_per_core, random, &is_stopped))
        });
        Ok(Self { threads: threads.collect(), is_stopped })
    }
}

impl Drop for CpuLoad {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn spin(percent: u32, mut random: Rng, is_stopped: &AtomicBool) {
    while !is_stopped.load(Ordering::Relaxed) {
        let cycle = Duration::from_micros(random.u64(CYCLE_US));
        let spinning = cycle * percent / 100;
        let begun = Instant::now();
        while begun.elapsed() < spinning {}
        thread::sleep(cycle - spinning);
    }
}
