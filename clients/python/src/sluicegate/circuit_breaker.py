"""The circuit breaker: while the server is unavailable, calls do not spend their deadline on it."""

from __future__ import annotations

import random
import threading
import time

from sluicegate.fork import reset_after_fork

# Number of failures in a row that open the breaker.
FAILURES_TO_OPEN = 3
# Time until the first probe, and its maximum after repeated failures, in seconds.
FIRST_BACKOFF = 0.1
MAX_BACKOFF = 1.0


class CircuitBreaker:
    """Opens after repeated failures. Then one call per backoff is a probe, and its success closes the breaker.

    A probe that never reports its outcome, because its task was cancelled, is followed by another after the backoff.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._backoff = FIRST_BACKOFF
        self._probe_at = 0.0
        self._lock = threading.RLock()
        reset_after_fork(self)

    @property
    def is_open(self) -> bool:
        """Whether calls are answered without the server."""
        return self._failures >= FAILURES_TO_OPEN

    def admits(self) -> bool:
        """Returns whether a call may use the server."""
        if not self.is_open:
            return True
        with self._lock:
            now = time.monotonic()
            if not self.is_open:
                return True
            if now < self._probe_at:
                return False
            self._schedule_probe(now)
            return True

    def succeeded(self) -> bool:
        """Reports that the server answered. Returns whether that closed the breaker."""
        if self._failures == 0:
            return False
        with self._lock:
            was_open = self.is_open
            self._failures = 0
            self._backoff = FIRST_BACKOFF
            return was_open

    def failed(self) -> bool:
        """Reports that the server did not answer. Returns whether that opened the breaker."""
        with self._lock:
            was_open = self.is_open
            self._failures += 1
            if self.is_open and not was_open:
                self._schedule_probe(time.monotonic())
            return self.is_open and not was_open

    def reset_after_fork(self) -> None:
        """Replaces the lock, which another thread may have held at the time of the fork."""
        self._lock = threading.RLock()

    def _schedule_probe(self, now: float) -> None:
        # Jitter, so that many processes do not probe at the same time.
        self._probe_at = now + self._backoff * random.uniform(0.5, 1.0)
        self._backoff = min(self._backoff * 2, MAX_BACKOFF)
