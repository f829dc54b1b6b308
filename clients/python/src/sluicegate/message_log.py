"""Logs repeated errors once per interval, so that a misconfiguration does not flood the log."""

from __future__ import annotations

import logging
import threading
import time

from sluicegate.fork import reset_after_fork

# Minimum time between two lines with the same message, in seconds.
INTERVAL = 60.0
# Maximum number of different messages per interval. Further ones are not logged.
MAX_MESSAGES = 32


class MessageLog:
    """Writes each distinct message at most once per interval."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged_at: dict[str, float] = {}
        self._lock = threading.RLock()
        reset_after_fork(self)

    def error(self, message: str) -> None:
        """Logs an error."""
        with self._lock:
            now = time.monotonic()
            last = self._logged_at.get(message)
            if last is not None and now - last < INTERVAL:
                return
            if last is None and len(self._logged_at) >= MAX_MESSAGES:
                self._logged_at = {key: at for key, at in self._logged_at.items() if now - at < INTERVAL}
                if len(self._logged_at) >= MAX_MESSAGES:
                    return
            self._logged_at[message] = now
        self._logger.error("%s", message)

    def reset_after_fork(self) -> None:
        """Replaces the lock, which another thread may have held at the time of the fork."""
        self._lock = threading.RLock()
