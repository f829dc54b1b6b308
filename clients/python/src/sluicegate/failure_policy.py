"""Failure policies: the decision of this client while the server is unavailable or late."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol, Union

from sluicegate.check import Check
from sluicegate.decision import NO_HEADERS, Decision
from sluicegate.errors import InvalidRequest
from sluicegate.fork import reset_after_fork
from sluicegate.limit import Limit, to_limit

OnFailure = Union[Literal["open", "closed"], "LocalBucket"]

# Suggested wait of a denial by `closed`, in seconds. The circuit breaker probes at least this often.
CLOSED_RETRY_AFTER = 1
# Default number of keys of a LocalBucket.
DEFAULT_MAX_KEYS = 10_000
# Minimum time between two searches for expired keys in a full table, in microseconds.
SWEEP_INTERVAL_US = 1_000_000

_OPEN = Decision(allowed=True, source="open", degraded=True)
_CLOSED = Decision(
    allowed=False,
    source="closed",
    degraded=True,
    retry_after=float(CLOSED_RETRY_AFTER),
    headers=MappingProxyType({"retry-after": str(CLOSED_RETRY_AFTER)}),
)


class FailurePolicy(Protocol):
    """Decides without the server."""

    def decide(self, check: Check, *, charge: bool) -> Decision:
        """Returns a degraded decision."""


class ConstantPolicy:
    """Allows or denies every request."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def decide(self, check: Check, *, charge: bool) -> Decision:
        """Returns the same decision for every request."""
        return self._decision


class LocalBucket:
    """A token bucket per key in the memory of this process.

    A request with its own limit uses that limit, as a token bucket; a request with labels uses `limit`, one bucket for
    each combination of the labels in `per` (by default all labels). With `processes`, the amounts are divided by the
    number of processes that share the limit, because each process has its own buckets.

    The table has at most `max_keys` buckets. If all are in use, further keys share one bucket.
    """

    def __init__(
        self,
        limit: Limit | str,
        *,
        per: Iterable[str] | None = None,
        processes: int = 1,
        max_keys: int = DEFAULT_MAX_KEYS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if isinstance(per, str):
            raise ValueError(f'per {per!r} is a string: use a list of label names, for example ["{per}"]')
        if processes < 1 or max_keys < 1:
            raise ValueError("processes and max_keys are at least 1")
        self._limit = to_limit(limit)
        if self._limit.window is None:
            raise ValueError("concurrency has no token bucket: use an amount per window")
        self._per = None if per is None else frozenset(per)
        self._processes = processes
        self._max_keys = max_keys
        self._clock_ns = clock_ns
        # For each key, the time at which its bucket is full again, in microseconds.
        self._full_at: dict[object, int] = {}
        self._sweep_at = 0
        self._lock = threading.Lock()
        reset_after_fork(self)

    def decide(self, check: Check, *, charge: bool) -> Decision:
        """Decides by the bucket of the request's key or labels.

        Also for a check that could not be encoded: an invalid limit is replaced by `limit`, an invalid cost by 1.
        """
        limit = self._limit_of(check)
        amount = max(1, limit.amount // self._processes)
        capacity = max(1, limit.capacity // self._processes)
        unit_us = max(1, -(-limit.window_ms * 1000 // amount))
        cost = _requests(check)
        with self._lock:
            now = self._clock_ns() // 1000
            key = self._key_or_overflow((self._subject(check), unit_us, capacity), now)
            full_at = max(self._full_at.get(key, 0), now)
            charged = full_at + cost * unit_us
            wait_us = charged - now - capacity * unit_us
            if wait_us <= 0 and charge and cost > 0:
                full_at = self._full_at[key] = charged
        remaining = max(0, (capacity * unit_us - (full_at - now)) // unit_us)
        return _local_decision(
            capacity=capacity,
            remaining=remaining,
            wait_us=wait_us,
            reset_us=full_at - now,
            never=cost > capacity,
        )

    def reset_after_fork(self) -> None:
        """Replaces the lock, which another thread may have held at the time of the fork."""
        self._lock = threading.Lock()

    def _limit_of(self, check: Check) -> Limit:
        if check.limit is None:
            return self._limit
        try:
            limit = to_limit(check.limit)
        except InvalidRequest:
            return self._limit
        # An in-flight limit has no window.
        return self._limit if limit.window is None else limit

    def _subject(self, check: Check) -> object:
        """Returns the key, or the labels that select a bucket."""
        if check.key is not None:
            return _hashable(check.key)
        labels = check.labels or {}
        return frozenset(
            (name, _hashable(value)) for name, value in labels.items() if self._per is None or name in self._per
        )

    def _key_or_overflow(self, key: object, now: int) -> object:
        """Returns the key, or `None` for the shared bucket if the table is full. A bucket in use is never evicted."""
        if key in self._full_at or len(self._full_at) < self._max_keys:
            return key
        if now >= self._sweep_at:
            self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}
            self._sweep_at = now + SWEEP_INTERVAL_US
        if len(self._full_at) < self._max_keys:
            return key
        return None


def policy_for(on_failure: OnFailure) -> FailurePolicy:
    """Returns the policy of a client's `on_failure` setting."""
    if isinstance(on_failure, LocalBucket):
        return on_failure
    if on_failure == "open":
        return ConstantPolicy(_OPEN)
    if on_failure == "closed":
        return ConstantPolicy(_CLOSED)
    raise ValueError(f'on_failure {on_failure!r} is not a policy: use "open", "closed" or LocalBucket(…)')


def _requests(check: Check) -> int:
    """Returns the cost in requests. Costs in other units count as one request."""
    cost = check.cost.get("requests", 1) if isinstance(check.cost, Mapping) else check.cost
    if not isinstance(cost, int) or isinstance(cost, bool) or cost < 0:
        return 1
    return max(1, cost) if isinstance(check.cost, Mapping) else cost


def _hashable(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _local_decision(*, capacity: int, remaining: int, wait_us: int, reset_us: int, never: bool) -> Decision:
    allowed = wait_us <= 0
    retry_after = None if allowed or never else math.ceil(wait_us / 1000) / 1000
    headers = NO_HEADERS if retry_after is None else MappingProxyType({"retry-after": str(math.ceil(retry_after))})
    return Decision(
        allowed=allowed,
        source="fallback",
        limit=capacity,
        remaining=remaining,
        retry_after=retry_after,
        reset_after=math.ceil(reset_us / 1000) / 1000,
        never=never and not allowed,
        degraded=True,
        headers=headers,
    )
