"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from sluicegate.blocking import Pool
from sluicegate.check import Check, Cost
from sluicegate.core import DEFAULT_DEADLINE, DEFAULT_MAX_CONNECTIONS, Core, Decides, Settings
from sluicegate.decision import (
    Decision,
    Explanation,
    Reset,
    decision_from_json,
    explanation_from_json,
    reset_from_json,
)
from sluicegate.endpoint import Path
from sluicegate.errors import InvalidRequest, SluicegateError, Unavailable
from sluicegate.failure_policy import OnFailure
from sluicegate.http1 import Response
from sluicegate.limit import Limit


class Client:
    """A blocking client. Threads can share it, and processes that are forked later can use it.

    `check`, `peek` and `check_many` always return within `deadline` seconds: if the server is unavailable or late, the
    failure policy `on_failure` decides. They raise only `InvalidRequest` and `AuthenticationError`. The other calls
    have no policy: they are sent also while the circuit breaker is open, and raise `Unavailable`.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        on_failure: OnFailure = "open",
        ca: Path | None = None,
        client_cert: tuple[Path, Path] | None = None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        settings = Settings(url, token, deadline, on_failure, ca, client_cert, max_connections)
        self._core = Core(settings)
        self._pool = Pool(self._core.endpoint, max_connections)

    def check(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        headers: bool = False,
        deadline: float | None = None,
    ) -> Decision:
        """Decides about a request, and charges it if it is allowed.

        Pass labels, for which the server's rules decide, or a key and a limit. `headers` requests the rate limit
        headers for the response.
        """
        return self._decide("check", Check(labels, key, limit, cost), headers=headers, deadline=deadline)

    def peek(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        headers: bool = False,
        deadline: float | None = None,
    ) -> Decision:
        """Decides about a request without charging it."""
        return self._decide("peek", Check(labels, key, limit, cost), headers=headers, deadline=deadline)

    def check_with(self, check: Check, *, headers: bool = False, deadline: float | None = None) -> Decision:
        """Decides about a request that is given as an object, and charges it if it is allowed."""
        return self._decide("check", check, headers=headers, deadline=deadline)

    def check_many(
        self, checks: Sequence[Check], *, headers: bool = False, deadline: float | None = None
    ) -> list[Decision | InvalidRequest]:
        """Decides about up to 1000 independent requests in one call. Returns the decisions in the same order.

        A request that is invalid only for a rule, for example because its cost is too large, has an exception instead
        of a decision.
        """
        core = self._core
        seconds = core.deadline(deadline)
        if not checks:
            return []
        request = core.encode_checks(checks, headers=headers, deadline=seconds)
        if core.admits():
            try:
                return core.read_decisions(self._send(request, seconds), checks)
            except Unavailable as error:
                core.report(error)
        return [core.decide_without_server("check", check) for check in checks]

    def charge(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        rules: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> Decision:
        """Charges usage that is known only afterwards, regardless of the limits."""
        options = {"rules": rules}
        return self._adjust("charge", Check(labels, key, limit, cost), options, deadline=deadline)

    def refund(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        rules: Sequence[str] | None = None,
        at_us: int | None = None,
        deadline: float | None = None,
    ) -> Decision:
        """Refunds at most what counts now: the newest charges, or exactly the charge made at `at_us`."""
        options = {"rules": rules, "at_us": at_us}
        return self._adjust("refund", Check(labels, key, limit, cost), options, deadline=deadline)

    def reset(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        rules: Sequence[str] | None = None,
        all_rules: bool = False,
        deadline: float | None = None,
    ) -> Reset:
        """Deletes the counters of the labels or of the key.

        With labels, only rules that count by labels are reset, unless `rules` names others or `all_rules` is set.
        """
        core = self._core
        seconds = core.deadline(deadline)
        options = {"rules": rules, "all": all_rules or None}
        request = core.encode_adjustment("reset", Check(labels, key, limit), options, deadline=seconds)
        return core.received(self._send(request, seconds), reset_from_json)

    def explain(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        deadline: float | None = None,
    ) -> Explanation:
        """Shows which rules apply, and the calculation of each. Charges nothing."""
        core = self._core
        seconds = core.deadline(deadline)
        request = core.encode_adjustment("explain", Check(labels, key, limit, cost), {}, deadline=seconds)
        return core.received(self._send(request, seconds), explanation_from_json)

    def decide_despite(self, error: SluicegateError, check: Check) -> Decision:
        """Logs an error that `check` raised, at most once a minute, and decides by the failure policy."""
        return self._core.decide_despite(error, check)

    def close(self) -> None:
        """Closes the idle connections."""
        self._pool.close()

    def __enter__(self) -> Client:
        """Returns the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the idle connections."""
        self.close()

    def _decide(self, operation: Decides, check: Check, *, headers: bool, deadline: float | None) -> Decision:
        core = self._core
        seconds = core.deadline(deadline)
        request = core.encode_check(operation, check, headers=headers, deadline=seconds)
        if core.admits():
            try:
                return core.read_decision(self._send(request, seconds), check)
            except Unavailable as error:
                core.report(error)
        return core.decide_without_server(operation, check)

    def _adjust(
        self,
        operation: Literal["charge", "refund"],
        check: Check,
        options: Mapping[str, object],
        *,
        deadline: float | None,
    ) -> Decision:
        core = self._core
        seconds = core.deadline(deadline)
        request = core.encode_adjustment(operation, check, options, deadline=seconds)
        return core.received(self._send(request, seconds), decision_from_json)

    def _send(self, request: bytes, seconds: float) -> Response:
        try:
            return self._pool.send(request, time.monotonic() + seconds)
        except Unavailable as error:
            failure = self._core.failed(error)
            if self._core.is_breaker_open and not error.is_local:
                # After a failover all of them may be dead, and each would cost a probe.
                self._pool.close()
            raise failure from error
