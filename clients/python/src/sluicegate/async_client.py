"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal

from sluicegate import hold_request
from sluicegate.aio import Pool
from sluicegate.check import Check, Cost
from sluicegate.core import DEFAULT_DEADLINE, DEFAULT_MAX_CONNECTIONS, MIN_DEADLINE, Core, Decides, Settings
from sluicegate.decision import (
    Decision,
    Explanation,
    Reset,
    decision_from_json,
    explanation_from_json,
    reset_from_json,
)
from sluicegate.endpoint import Path
from sluicegate.errors import ConnectionLost, InvalidRequest, NotSent, SluicegateError, Unavailable
from sluicegate.failure_policy import OnFailure
from sluicegate.fork import reset_after_fork
from sluicegate.hold import AsyncHold, PendingHold
from sluicegate.hold_request import HoldAdjustment, HoldAnswer
from sluicegate.http1 import Response
from sluicegate.limit import Limit
from sluicegate.resolver import Resolver
from sluicegate.settlement import QUEUED, Settlement, settlement_from_json
from sluicegate.settlement_queue import SettlementQueue


class AsyncClient:
    """An asyncio client. Tasks, event loops and processes that are forked later can share it.

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
        self._settlements = SettlementQueue(self._core)
        self._resolver = Resolver(self._core.endpoint.host)
        self._max_connections = max_connections
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        # Event loops of different threads can share the client. Reentrant, as all locks of a call: the garbage
        # collector may end a hold of a closed event loop at any time.
        self._lock = threading.RLock()
        reset_after_fork(self)

    async def check(
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
        return await self._decide("check", Check(labels, key, limit, cost), headers=headers, deadline=deadline)

    async def peek(
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
        return await self._decide("peek", Check(labels, key, limit, cost), headers=headers, deadline=deadline)

    async def check_with(self, check: Check, *, headers: bool = False, deadline: float | None = None) -> Decision:
        """Decides about a request that is given as an object, and charges it if it is allowed."""
        return await self._decide("check", check, headers=headers, deadline=deadline)

    async def check_many(
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
                return core.read_decisions(await self._send(request, seconds), checks)
            except Unavailable as error:
                core.report(error)
        return [core.decide_without_server("check", check) for check in checks]

    def hold(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        limit: Limit | str | None = None,
        cost: Cost = 1,
        id: str | None = None,
        ttl: float | None = None,
        headers: bool = False,
        deadline: float | None = None,
    ) -> PendingHold:
        """Checks a request with an estimated cost, and holds it until the actual cost is known.

        Rules with the algorithm `concurrency` need a hold. Use it as a context manager:
        `async with client.hold(…) as hold:`. Without an `id`, a random one is used; the same id again, while the hold
        is live, gets the first response. The hold expires after `ttl` seconds; by default after the shortest `ttl` of
        the rules, or 60 seconds.
        """
        return self.hold_with(Check(labels, key, limit, cost), id=id, ttl=ttl, headers=headers, deadline=deadline)

    def hold_with(
        self,
        check: Check,
        *,
        id: str | None = None,
        ttl: float | None = None,
        headers: bool = False,
        deadline: float | None = None,
    ) -> PendingHold:
        """Holds a request that is given as an object."""
        return PendingHold(self._hold(check, id, ttl, headers=headers, deadline=deadline))

    async def settle(
        self,
        token: str | None = None,
        *,
        cost: Cost,
        labels: Mapping[str, str] | None = None,
        key: str | None = None,
        limit: Limit | str | None = None,
        id: str | None = None,
        deadline: float | None = None,
    ) -> Settlement:
        """Replaces the estimate of a hold with the actual cost, once. A unit that is not named keeps its estimate.

        Pass the token of the hold, or its labels or its key and limit with its id. If the server is unavailable, the
        call is repeated in the background, and the outcome is `queued`.
        """
        reference = hold_request.reference_of(token, Check(labels, key, limit), id)
        return await self._adjust_hold(hold_request.settle(reference, cost), deadline)

    async def release(
        self,
        token: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        key: str | None = None,
        limit: Limit | str | None = None,
        id: str | None = None,
        deadline: float | None = None,
    ) -> Settlement:
        """Refunds the estimate of a hold. Otherwise like `settle`."""
        reference = hold_request.reference_of(token, Check(labels, key, limit), id)
        return await self._adjust_hold(hold_request.release(reference), deadline)

    async def renew(
        self,
        token: str | None = None,
        *,
        ttl: float,
        labels: Mapping[str, str] | None = None,
        key: str | None = None,
        limit: Limit | str | None = None,
        id: str | None = None,
        deadline: float | None = None,
    ) -> Settlement:
        """Moves the expiry of a hold to `ttl` seconds from now, if that is later. Raises `Unavailable`."""
        reference = hold_request.reference_of(token, Check(labels, key, limit), id)
        return await self._adjust_hold(hold_request.renew(reference, ttl), deadline)

    async def charge(
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
        return await self._adjust("charge", Check(labels, key, limit, cost), options, deadline=deadline)

    async def refund(
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
        return await self._adjust("refund", Check(labels, key, limit, cost), options, deadline=deadline)

    async def reset(
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
        return core.received(await self._send(request, seconds), reset_from_json)

    async def explain(
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
        return core.received(await self._send(request, seconds), explanation_from_json)

    def decide_despite(self, error: SluicegateError, check: Check) -> Decision:
        """Logs an error that `check` raised, at most once a minute, and decides by the failure policy."""
        return self._core.decide_despite(error, check)

    def hold_despite(self, error: SluicegateError, check: Check) -> AsyncHold:
        """Logs an error that `hold` raised, at most once a minute, and decides by the failure policy."""
        return self._guard(check, HoldAnswer(self.decide_despite(error, check), id=""))

    async def aclose(self) -> None:
        """Closes the idle connections of the running event loop.

        Waits up to the deadline for settlements in the background.
        """
        if len(self._settlements) > 0:
            await asyncio.to_thread(self._settlements.wait_until_empty, self._core.deadline(None))
        self._pool().close()
        # Transports close their sockets in the next iteration of the event loop.
        await asyncio.sleep(0)

    def reset_after_fork(self) -> None:
        """Drops the connections of the parent process."""
        self._pools = {}
        self._lock = threading.RLock()

    async def __aenter__(self) -> AsyncClient:
        """Returns the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the client."""
        await self.aclose()

    async def _decide(self, operation: Decides, check: Check, *, headers: bool, deadline: float | None) -> Decision:
        core = self._core
        seconds = core.deadline(deadline)
        request = core.encode_check(operation, check, headers=headers, deadline=seconds)
        if core.admits():
            try:
                return core.read_decision(await self._send(request, seconds), check)
            except Unavailable as error:
                core.report(error)
        return core.decide_without_server(operation, check)

    async def _adjust(
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
        return core.received(await self._send(request, seconds), decision_from_json)

    async def _hold(
        self, check: Check, id: str | None, ttl: float | None, *, headers: bool, deadline: float | None
    ) -> AsyncHold:
        core = self._core
        seconds = core.deadline(deadline)
        request = hold_request.hold_request(check, id, ttl, headers=headers)
        reference: hold_request.Reference | None = None
        if core.admits():
            try:
                response = await self._send_again(lambda left: core.encode_hold(request, deadline=left), seconds)
                return self._guard(check, core.read_hold(response, request))
            except Unavailable as error:
                core.report(error)
                reference = None if isinstance(error, NotSent) else request.reference()
            except SluicegateError:
                raise
            except BaseException:
                # Cancelled. The server may have received the request. The caller may hold its own id again.
                if id is None:
                    self._settlements.add(hold_request.release(request.reference()))
                raise
        decision = core.decide_without_server("check", check)
        if not decision.allowed and reference is not None:
            # The server may have admitted it.
            if id is None:
                self._settlements.add(hold_request.release(reference))
            reference = None
        return self._guard(check, HoldAnswer(decision, request.id, reference=reference, ttl=ttl))

    def _guard(self, check: Check, answer: HoldAnswer) -> AsyncHold:
        return AsyncHold(answer, check.cost, self._core.report_dropped, self._adjust_hold)

    async def _adjust_hold(self, adjustment: HoldAdjustment, deadline: float | None) -> Settlement:
        """Sends a call. A settlement or release is repeated in the background if the server does not answer."""
        core = self._core
        seconds = core.deadline(deadline)
        is_end = adjustment.operation != "renew"
        try:
            if is_end and not core.admits():
                raise core.circuit_open()
            response = await self._send_again(
                lambda left: core.encode_hold_adjustment(adjustment, deadline=left), seconds
            )
            return core.received(response, settlement_from_json)
        except Unavailable:
            if is_end and self._settlements.add(adjustment):
                return QUEUED
            raise
        except SluicegateError:
            raise
        except BaseException:
            # Cancelled, or the event loop was closed.
            if is_end:
                self._settlements.add(adjustment)
            raise

    async def _send_again(self, encode: Callable[[float], bytes], seconds: float) -> Response:
        """Sends an idempotent request. Repeats it once if the connection is lost."""
        expires = time.monotonic() + seconds
        try:
            return await self._send(encode(seconds), seconds)
        except ConnectionLost as lost:
            left = expires - time.monotonic()
            if left < MIN_DEADLINE:
                raise
            try:
                return await self._send(encode(left), left)
            except NotSent:
                # The first request may have arrived.
                raise lost from None

    async def _send(self, request: bytes, seconds: float) -> Response:
        try:
            return await self._pool().send(request, time.monotonic() + seconds)
        except Unavailable as error:
            failure = self._core.failed(error)
            if self._core.is_breaker_open and not error.is_local:
                # After a failover all of them may be dead, and each would cost a probe.
                self._close_idle()
            raise failure from error

    def _close_idle(self) -> None:
        """Closes the idle connections of all event loops."""
        running = asyncio.get_running_loop()
        for loop, pool in self._pools.items():
            if loop is running:
                pool.close()
                continue
            # A closed event loop raises `RuntimeError`, and its connections are never used again.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(pool.close)

    def _pool(self) -> Pool:
        """Returns the pool of the running event loop, and removes the pools of closed ones."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is not None:
            return pool
        with self._lock:
            open_pools = {other: kept for other, kept in self._pools.items() if not other.is_closed()}
            pool = open_pools[loop] = Pool(self._core.endpoint, self._resolver, self._max_connections)
            self._pools = open_pools
            return pool
