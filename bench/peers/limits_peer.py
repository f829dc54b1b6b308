"""The contestant `limits`: asyncio on uvloop, redis-py, a fixed window. Of its strategies, clients and loops, the fastest
that was found: plain asyncio with coredis, its default, made two thirds as many decisions.

Started by the bench with one JSON argument; see `bench/src/remote/peer.rs` for the protocol. Not measured: its other
strategies, and several processes, which a Python service would have.
"""

import asyncio
import json
import platform
import random
import sys
import time
from importlib.metadata import version

import uvloop
from limits import RateLimitItemPerSecond
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter


async def main(task):
    storage = RedisStorage("async+" + task["url"], implementation="redispy", max_connections=task["callers"])
    limiter = FixedWindowRateLimiter(storage)
    item = RateLimitItemPerSecond(task["amount"], task["window_s"])
    begun = time.perf_counter()
    start = begun + task["warm_up_ms"] / 1e3
    end = start + task["measured_ms"] / 1e3
    callers = [call(limiter, item, task["keys"], seed, start, end) for seed in range(task["callers"])]
    done, cpu_us = await asyncio.gather(asyncio.gather(*callers), announce(start))
    elapsed_s = time.perf_counter() - start
    latencies = sorted(latency for caller, _ in done for latency in caller)
    return {
        "allowed": sum(allowed for _, allowed in done),
        "decisions": len(latencies),
        "elapsed_s": elapsed_s,
        "p50_us": at(latencies, 0.5),
        "p99_us": at(latencies, 0.99),
        "cpu_us": time.process_time() * 1e6 - cpu_us,
    }


async def announce(start):
    """Reports the end of the warm-up; returns the CPU time used so far."""
    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    print("measuring", flush=True)
    return time.process_time() * 1e6


async def call(limiter, item, keys, seed, start, end):
    """One caller in a closed loop."""
    source, latencies, allowed = random.Random(seed), [], 0
    before = time.perf_counter()
    while before < end:
        user = "hot" if keys == 0 else str(source.randrange(keys))
        passes = await limiter.hit(item, "user", user)
        now = time.perf_counter()
        if now >= start:
            latencies.append((now - before) * 1e6)
            allowed += passes
        before = now
    return latencies, allowed


def at(ordered, quantile):
    return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] if ordered else 0.0


if sys.argv[1] == "--version":
    with_what = f"redis-py {version('redis')}, uvloop {version('uvloop')}, Python {platform.python_version()}"
    print(f"limits {version('limits')} ({with_what})")
else:
    print(json.dumps(uvloop.run(main(json.loads(sys.argv[1])))))
