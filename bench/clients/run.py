"""Compares the clients of sluicegate with rate limiters for FastAPI and Express, all on one Redis.

Called by scripts/bench clients, which installs the contestants and builds the server.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import outage

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "benchmarks-clients.md"
TAIL_LATENCY = HERE / "tail-latency.md"
START_TIMEOUT_S = 20
WARM_UP_S = 1

PYTHON = ["no limiter", "sluicegate", "slowapi", "limits", "fastapi-limiter"]
NODE = ["no limiter", "sluicegate", "express-rate-limit", "rate-limiter-flexible"]

# Connections of the load generator: one shows the latency that a limiter adds, several the rate.
LATENCY_CONNECTIONS, RATE_CONNECTIONS = 1, 16


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def process(command: list[str], port: int, **environment: str):
    """Runs a server until the block ends."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            wait_for(port, child, log)
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait(timeout=10)


def wait_for(port: int, child: subprocess.Popen, log) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    log.seek(0)
    sys.exit(f"{child.args[0]} did not start:\n{log.read().decode()}")


class Bench:
    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.redis = free_port()
        self.server = free_port()

    def redis_cpu(self) -> float:
        """Returns the CPU time that Redis has used, in seconds."""
        info = subprocess.run(
            ["redis-cli", "-p", str(self.redis), "INFO", "CPU"], capture_output=True, text=True, check=True
        ).stdout
        fields = dict(line.split(":", 1) for line in info.split() if ":" in line)
        return float(fields["used_cpu_user_main_thread"]) + float(fields["used_cpu_sys_main_thread"])

    def load(self, port: int, connections: int, seconds: int) -> dict:
        before = self.redis_cpu()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(HERE / "keys.lua"), f"http://127.0.0.1:{port}"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        figures = json.loads(output.strip().splitlines()[-1])
        if figures["errors"]:
            sys.exit(f"{figures['errors']} requests failed")
        figures["rate"] = figures["requests"] / (figures["micros"] / 1e6)
        figures["redis_us"] = (self.redis_cpu() - before) * 1e6 / figures["requests"]
        return figures

    def server_command(self) -> list[str]:
        command = [os.environ["SLUICEGATE_BIN"], "serve", "--http", f"127.0.0.1:{self.server}", "--grpc", "off", "--resp", "off"]
        return [*command, "--store", f"redis://127.0.0.1:{self.redis}"]

    @contextlib.contextmanager
    def app(self, framework: str, contestant: str):
        """Runs an application until the block ends. Returns its port."""
        port = free_port()
        environment = {
            "CONTESTANT": contestant,
            "PORT": str(port),
            "REDIS": str(self.redis),
            "SLUICEGATE": f"http://127.0.0.1:{self.server}",
            "NODE_ENV": "production",
            "PYTHONPATH": str(ROOT / "clients" / "python" / "src"),
        }
        if framework == "FastAPI":
            python = HERE / ".venv" / "bin" / "python"
            command = [str(python), "-m", "uvicorn", "--app-dir", str(HERE), "fastapi_app:app", "--port", str(port)]
            command += ["--no-access-log", "--log-level", "warning"]
        else:
            command = ["node", str(HERE / "express_app.mjs")]
        with process(command, port, **environment):
            yield port

    def measure(self, framework: str, contestant: str) -> dict:
        with self.app(framework, contestant) as port:
            self.load(port, RATE_CONNECTIONS, WARM_UP_S)
            one = self.load(port, LATENCY_CONNECTIONS, self.seconds)
            many = self.load(port, RATE_CONNECTIONS, self.seconds)
        return {"p50": one["p50"], "p99": one["p99"], "rate": many["rate"], "p99_many": many["p99"], "redis_us": many["redis_us"]}

    def measure_outage(self, framework: str, is_killed: bool) -> dict:
        """Interrupts a server that only this application uses."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(process(self.server_command(), self.server))
            port = stack.enter_context(self.app(framework, "sluicegate"))

            def restart() -> None:
                stack.enter_context(process(self.server_command(), self.server))

            return outage.measure(port, server, restart, is_killed)


def spread(values: list[float], digits: int = 0) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"


def table(framework: str, contestants: list[str], rounds: list[dict[str, dict]]) -> str:
    rows = [
        "| limiter | added p50, us | added p99, us | requests/s | of no limiter | p99 with 16, ms | Redis CPU per request, us |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for contestant in contestants:
        def figures(value, digits=0, name=contestant):
            return spread([value(round_[name], round_["no limiter"]) for round_ in rounds], digits)

        is_limited = contestant != "no limiter"
        rows.append(
            f"| {contestant} "
            f"| {figures(lambda own, none: own['p50'] - none['p50']) if is_limited else ''} "
            f"| {figures(lambda own, none: own['p99'] - none['p99']) if is_limited else ''} "
            f"| {figures(lambda own, _: own['rate'])} "
            f"| {figures(lambda own, none: own['rate'] / none['rate'], 2)} "
            f"| {figures(lambda own, _: own['p99_many'] / 1000, 1)} "
            f"| {figures(lambda own, _: own['redis_us'], 1) if is_limited else ''} |"
        )
    return f"## {framework}\n\n" + "\n".join(rows) + "\n"


def outage_table(results: dict[str, list[dict]]) -> str:
    rows = [
        "| app and outage | requests | status codes | longest request - deadline, ms | longest request without a check, ms | server decides again after, ms |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, rounds in results.items():
        statuses = collections.Counter()
        for figures in rounds:
            statuses.update(figures["statuses"])
        codes = ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))
        longest = spread([figures["over_deadline_ms"] for figures in rounds])
        unlimited = spread([figures["unlimited_ms"] for figures in rounds])
        recovery = spread([figures["recovery_ms"] for figures in rounds])
        rows.append(f"| {name} | {sum(figures['requests'] for figures in rounds):,} | {codes} | {longest} | {unlimited} | {recovery} |")
    return "## Outage of the server\n\n" + "\n".join(rows) + "\n"


def versions() -> str:
    pinned = [line.strip() for line in (HERE / "requirements.txt").read_text().splitlines() if "==" in line]
    node = json.loads((HERE / "package.json").read_text())["dependencies"]
    names = [line.replace("==", " ") for line in pinned] + [f"{name} {version}" for name, version in node.items()]
    return ", ".join(names)


def page(tables: list[str], outages: str, rounds: int, seconds: int, loads: tuple) -> str:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    node = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout.strip()
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    before, after = (" ".join(f"{value:.2f}" for value in load) for load in loads)
    return f"""# Benchmarks: Python and Node clients

<!-- written by scripts/bench clients --write docs; do not edit -->

{now}, revision {revision}: {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, Node {node};
load averages {before} before, {after} after. {versions()}. Command: `scripts/bench clients --rounds {rounds} --write docs`.

Each app has one endpoint, limited per API key (1000 keys) by a limit that is never reached, and runs as one process. All limiters use the same Redis on
loopback; *sluicegate* uses it through a server on loopback, so a request has one hop more. *Added p50* and *added p99* are those of one connection,
less those of the app without a limiter. *requests/s* and *p99 with 16* are measured with 16 connections. Contestants take turns for {rounds} rounds of
{seconds} s; each figure is the median, with (lowest..highest). Ratios and differences are computed within a round.

The app, the load generator (wrk), Redis and the server of sluicegate share the cores: on a separate host, the server would take no CPU time from the
app. sluicegate decides by a token bucket, the others count in fixed windows, which is less work.

{chr(10).join(tables)}
{outages}
The server is stopped (SIGSTOP) for {outage.OUTAGE_S} s and continues, or it is killed (SIGKILL) and started again {outage.OUTAGE_S} s later, {rounds} times each. {outage.CALLERS} callers
send a request every {outage.PAUSE_S * 1000:.0f} ms or, while they wait, when the last one is answered. The deadline of a check is {outage.DEADLINE_MS} ms, and the failure policy is `open`. *Longest
request* is that of the whole outage and recovery, including the time in the app and in the caller; *without a check* shows how much of
it is due to a busy machine. *Server decides again* is the time from the continuation, or from
the start of the new process, to the first response with a decision of the server.

{TAIL_LATENCY.read_text()}
## What is not measured

* A network between the app, the server and Redis.
* Denied requests, and several processes of one app.
* Django and Flask.
"""


def compare(bench: Bench, rounds: int) -> dict[str, list[dict]]:
    """Measures each contestant of each framework, in turns."""
    results = {}
    for framework, contestants in {"FastAPI": PYTHON, "Express": NODE}.items():
        results[framework] = []
        for number in range(rounds):
            figures = {}
            for contestant in contestants:
                print(f"{framework}, round {number + 1} of {rounds}: {contestant}", file=sys.stderr)
                figures[contestant] = bench.measure(framework, contestant)
            results[framework].append(figures)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per contestant")
    parser.add_argument("--quick", action="store_true", help="two rounds of one second")
    parser.add_argument("--only-outage", action="store_true", help="only the outage of the server, without the comparison")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--write", choices=["docs"], help="also write docs/benchmarks-clients.md")
    options = parser.parse_args()
    if options.write and options.only_outage:
        parser.error("--write needs all figures: leave out --only-outage")
    rounds, seconds = (2, 1) if options.quick else (options.rounds, 4)
    bench, before = Bench(seconds), os.getloadavg()
    redis = ["redis-server", "--port", str(bench.redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    results, outages = {}, {}
    with process(redis, bench.redis):
        if not options.only_outage:
            with process(bench.server_command(), bench.server):
                results = compare(bench, rounds)
        for number in range(rounds):
            for framework, (name, is_killed) in itertools.product(["FastAPI", "Express"], [("stopped", False), ("killed", True)]):
                print(f"outage, round {number + 1} of {rounds}: {framework}, {name}", file=sys.stderr)
                figures = bench.measure_outage(framework, is_killed)
                outages.setdefault(f"{framework}, {name}", []).append(figures)
    tables = [
        table(framework, list(rounds_[0]), rounds_) for framework, rounds_ in results.items()
    ]
    outages_text = outage_table(outages)
    print(json.dumps({**results, "outage": outages}) if options.json else "\n".join([*tables, outages_text]))
    if options.write:
        PAGE.write_text(page(tables, outages_text, rounds, seconds, (before, os.getloadavg())))


if __name__ == "__main__":
    main()
