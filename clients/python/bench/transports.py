"""Compares this client with httpx and aiohttp against one server: checks per second of one process.

Not measured: a network, TLS, and the cost of an application around the client. Needs `pip install httpx aiohttp`.

    python bench/transports.py http://127.0.0.1:8080
"""

import asyncio
import sys
import time

import aiohttp
import httpx

from sluicegate import AsyncClient, Client

BODY = {"key": "bench", "limit": {"algorithm": "token-bucket", "amount": 1_000_000_000, "window": "1s"}, "cost": 1}
LIMIT = "1000000000/second"
CHECKS = 2_000
ROUNDS = 5
CONCURRENCY = 32


async def concurrently(check) -> float:
    """Returns the checks per second of concurrent tasks."""

    async def caller() -> None:
        for _ in range(CHECKS // CONCURRENCY):
            await check()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
    return (CHECKS // CONCURRENCY) * CONCURRENCY / (time.perf_counter() - started)


def sequentially(check) -> float:
    """Returns the checks per second of one thread."""
    started = time.perf_counter()
    for _ in range(CHECKS):
        check()
    return CHECKS / (time.perf_counter() - started)


async def main(url: str) -> None:
    endpoint = f"{url}/v1/check"
    results: dict[str, list[float]] = {}
    blocking = Client(url, deadline=5)
    blocking_httpx = httpx.Client()
    limits = httpx.Limits(max_connections=64)
    async with (
        AsyncClient(url, deadline=5) as ours,
        httpx.AsyncClient(limits=limits) as other,
        aiohttp.ClientSession() as session,
    ):

        async def with_aiohttp() -> None:
            async with session.post(endpoint, json=BODY) as response:
                assert (await response.json())["allowed"]

        async def with_httpx() -> None:
            assert (await other.post(endpoint, json=BODY)).json()["allowed"]

        async def with_ours() -> None:
            assert not (await ours.check(key="bench", limit=LIMIT)).degraded

        for _ in range(ROUNDS):
            for name, check in {"sluicegate": with_ours, "aiohttp": with_aiohttp, "httpx": with_httpx}.items():
                results.setdefault(f"asyncio, {CONCURRENCY} tasks: {name}", []).append(await concurrently(check))
            checks = {
                "sluicegate": lambda: blocking.check(key="bench", limit=LIMIT),
                "httpx": lambda: blocking_httpx.post(endpoint, json=BODY).json(),
            }
            for name, check in checks.items():
                results.setdefault(f"blocking, 1 thread: {name}", []).append(sequentially(check))
    for name, rates in results.items():
        rates.sort()
        print(f"{name:32} {rates[len(rates) // 2]:8.0f}/s  ({rates[0]:.0f} to {rates[-1]:.0f})")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
