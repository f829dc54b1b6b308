"""Repeats settlements and releases in the background while the server is unavailable."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from sluicegate.blocking import Pool
from sluicegate.errors import SluicegateError, Unavailable
from sluicegate.fork import reset_after_fork
from sluicegate.hold_request import HoldAdjustment
from sluicegate.http1 import Response
from sluicegate.settlement import settlement_from_json

if TYPE_CHECKING:
    from sluicegate.core import Core

# Maximum number of queued settlements.
MAX_QUEUED = 10_000
# How long a settlement is repeated, in seconds.
MAX_AGE = 600.0
# The first and the longest pause after a failure, in seconds.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
# The deadline of each attempt, in seconds.
DEADLINE = 1.0


class SettlementQueue:
    """Settlements that were not delivered. A thread sends them, and ends when the queue is empty.

    One that the server answers with an error is repeated after the others, so that it does not block them.

    The asyncio client uses a thread as well, because a thread outlives event loops and cancelled tasks.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: deque[tuple[HoldAdjustment, float]] = deque()
        self._is_sending = False
        self._changed = threading.Condition()
        reset_after_fork(self)

    def __len__(self) -> int:
        """Returns the number of queued settlements."""
        return len(self._waiting)

    def add(self, adjustment: HoldAdjustment) -> bool:
        """Repeats a call until it is answered. Returns whether there is space for it, and a thread."""
        if sys.is_finalizing():
            # No thread runs any more, and one may have had the lock. Python 3.11 and older would wait for it forever.
            return False
        with self._changed:
            if len(self._waiting) >= MAX_QUEUED:
                return False
            if not self._is_sending:
                try:
                    threading.Thread(target=self._send_all, name="sluicegate-settlements", daemon=True).start()
                except RuntimeError:
                    # The process has too many threads, or the interpreter shuts down.
                    return False
                self._is_sending = True
            self._waiting.append((adjustment, time.monotonic() + MAX_AGE))
        return True

    def wait_until_empty(self, seconds: float) -> bool:
        """Waits until the queue is empty. Returns `False` if the time runs out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def reset_after_fork(self) -> None:
        """Drops the settlements, which the parent process sends."""
        self._waiting = deque()
        self._is_sending = False
        self._changed = threading.Condition()

    def _send_all(self) -> None:
        pool = Pool(self._core.endpoint, 1)
        pause = FIRST_PAUSE
        while (first := self._first()) is not None:
            adjustment, until = first
            response: Response | None = None
            try:
                response = self._send(pool, adjustment)
                self._core.received(response, settlement_from_json)
            except Unavailable as error:
                if time.monotonic() < until:
                    if response is not None:
                        self._move_first_to_end()
                    time.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(pause * 2, LONGEST_PAUSE)
                    continue
                self._core.report_dropped(error)
            except SluicegateError as error:
                self._core.report_dropped(error)
            except Exception as error:
                # Continue with the next settlement.
                self._core.report_dropped(SluicegateError(f"unexpected {type(error).__name__}: {error}"))
            pause = FIRST_PAUSE
            self._remove_first()
        pool.close()

    def _first(self) -> tuple[HoldAdjustment, float] | None:
        with self._changed:
            self._is_sending = bool(self._waiting)
            return self._waiting[0] if self._waiting else None

    def _remove_first(self) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()

    def _move_first_to_end(self) -> None:
        with self._changed:
            self._waiting.rotate(-1)

    def _send(self, pool: Pool, adjustment: HoldAdjustment) -> Response:
        request = self._core.encode_hold_adjustment(adjustment, deadline=DEADLINE)
        try:
            return pool.send(request, time.monotonic() + DEADLINE)
        except Unavailable as error:
            raise self._core.failed(error) from error
