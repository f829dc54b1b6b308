// The contestant rate-limiter-flexible: its Redis limiter over ioredis, which calls the script by its digest.
//
// Started by the bench with one JSON argument; see `bench/src/remote/peer.rs` for the protocol. Not measured: its queues,
// its insurance limiter, and several processes, which a Node service would have.

import { createRequire } from 'node:module';
import { Redis } from 'ioredis';
import { RateLimiterRedis } from 'rate-limiter-flexible';

const require = createRequire(import.meta.url);

async function main(task) {
  // without auto-pipelining: with it, half as many decisions were made
  const client = new Redis(task.url);
  const limiter = new RateLimiterRedis({
    storeClient: client,
    points: task.amount,
    duration: task.window_s,
    ...(task.caches_denials ? { inMemoryBlockOnConsumed: task.amount + 1 } : {}),
  });
  const start = performance.now() + task.warm_up_ms;
  const end = start + task.measured_ms;
  const announced = announce(start);
  const done = await Promise.all(
    Array.from({ length: task.callers }, () => call(limiter, task, start, end)),
  );
  const elapsedMs = performance.now() - start;
  const used = process.cpuUsage(await announced);
  client.disconnect();
  const latencies = Float64Array.from(done.flatMap((caller) => caller.latencies)).sort();
  return {
    allowed: done.reduce((sum, caller) => sum + caller.allowed, 0),
    decisions: latencies.length,
    elapsed_s: elapsedMs / 1e3,
    p50_us: at(latencies, 0.5),
    p99_us: at(latencies, 0.99),
    cpu_us: used.user + used.system,
  };
}

// Reports the end of the warm-up; returns the CPU time used so far.
async function announce(start) {
  await new Promise((resolve) => setTimeout(resolve, Math.max(0, start - performance.now())));
  console.log('measuring');
  return process.cpuUsage();
}

// One caller in a closed loop.
async function call(limiter, task, start, end) {
  const latencies = [];
  let allowed = 0;
  let before = performance.now();
  for (let asked = 1; before < end; asked++) {
    const user = task.keys === 0 ? 'hot' : Math.floor(Math.random() * task.keys);
    const passes = await limiter.consume(`user:${user}`).then(() => 1, denied);
    const now = performance.now();
    if (now >= start) {
      latencies.push((now - before) * 1e3);
      allowed += passes;
    }
    before = now;
    // calls that need no I/O would otherwise block the event loop, including timers
    if (task.caches_denials && asked % STRIDE === 0) await new Promise(setImmediate);
  }
  return { latencies, allowed };
}

// Maximum number of decisions of one caller before it yields to the event loop.
const STRIDE = 64;

// A denial is a rejected promise; any other rejection is a failure.
function denied(reason) {
  if (reason instanceof Error) throw reason;
  return 0;
}

function at(ordered, quantile) {
  return ordered.length ? ordered[Math.min(Math.floor(ordered.length * quantile), ordered.length - 1)] : 0;
}

if (process.argv[2] === '--version') {
  const version = (name) => require(`${name}/package.json`).version;
  console.log(
    `rate-limiter-flexible ${version('rate-limiter-flexible')} (ioredis ${version('ioredis')}, Node ${process.versions.node})`,
  );
} else {
  console.log(JSON.stringify(await main(JSON.parse(process.argv[2]))));
}
