"""Measures the applications of the comparison while the server of sluicegate is stopped, or killed and restarted."""

import collections
import contextlib
import http.client
import os
import signal
import subprocess
import threading
import time

# The deadline of a check, which is the default of both clients, in milliseconds.
DEADLINE_MS = 100
# Threads that send requests, each with its own connection to the application.
CALLERS = 4
# Time between two requests of a caller.
PAUSE_S = 0.005
OUTAGE_S = 2
RECOVERY_TIMEOUT_S = 10
RESPONSE_TIMEOUT_S = 10


class Load:
    """Sends requests from several threads, and records the time, the status and the origin of each response."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._check, daemon=True) for _ in range(CALLERS)]
        self._threads.append(threading.Thread(target=self._control, daemon=True))
        # Durations of requests for a path without a limiter, which show the delays of a busy machine.
        self.unlimited: list[float] = []
        # Start and duration in seconds, status, and whether the server decided.
        self.responses: list[tuple[float, float, int, bool]] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        for started, took, response in self._send("/"):
            # Only a decision of the server has this header.
            is_decided = response.getheader("ratelimit") is not None
            self.responses.append((started, took, response.status, is_decided))

    def _control(self) -> None:
        self.unlimited.extend(took for _, took, _ in self._send("/unknown"))

    def _send(self, path: str):
        """Sends requests until the end. Yields the start, the duration and the response of each."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=RESPONSE_TIMEOUT_S)
        with contextlib.closing(connection):
            while not self._stopped.is_set():
                started = time.monotonic()
                connection.request("GET", path, headers={"x-api-key": "outage"})
                response = connection.getresponse()
                response.read()
                yield started, time.monotonic() - started, response
                time.sleep(PAUSE_S)

    def first_decision(self, since: float) -> float:
        """Waits for a response that the server decided. Returns the time since then until it was complete."""
        end = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < end:
            completed = [start + took for start, took, _, is_decided in list(self.responses) if is_decided and start >= since]
            if completed:
                return min(completed) - since
            time.sleep(0.002)
        raise TimeoutError(f"no decision of the server within {RECOVERY_TIMEOUT_S} s")


def measure(port: int, server: subprocess.Popen, restart, is_killed: bool) -> dict:
    """Interrupts the server under load. Returns figures in milliseconds."""
    with Load(port) as load:
        load.first_decision(time.monotonic())
        failed = time.monotonic()
        os.kill(server.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        recovered = time.monotonic()
        if is_killed:
            server.wait()
            restart()
        else:
            os.kill(server.pid, signal.SIGCONT)
        recovery = load.first_decision(recovered)
        # Also the requests that were sent during the recovery.
        time.sleep(0.5)
    seen = [response for response in load.responses if response[0] + response[1] >= failed]
    longest = max(took for _, took, _, _ in seen) * 1000
    return {
        "statuses": dict(collections.Counter(str(status) for _, _, status, _ in load.responses)),
        "requests": len(seen),
        "over_deadline_ms": longest - DEADLINE_MS,
        "unlimited_ms": max(load.unlimited) * 1000,
        "recovery_ms": recovery * 1000,
    }
