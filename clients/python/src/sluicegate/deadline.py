"""Deadlines as points of the monotonic clock."""

from __future__ import annotations

import time

from sluicegate.errors import Unavailable


def remaining(expires: float) -> float:
    """Returns the time that is left, in seconds. Raises `Unavailable` if there is none."""
    left = expires - time.monotonic()
    if left <= 0:
        raise Unavailable("deadline exceeded")
    return left
