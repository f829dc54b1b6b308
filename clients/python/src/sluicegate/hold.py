"""Holds: admitted requests whose cost is an estimate until they are settled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any

from sluicegate.check import Cost, cost_to_json
from sluicegate.decision import Decision
from sluicegate.errors import SluicegateError, Unavailable
from sluicegate.hold_request import HoldAdjustment, HoldAnswer, release, renew, settle
from sluicegate.settlement import Settlement

# A hold is renewed after this fraction of its time to live.
RENEW_AFTER = 2 / 3
# A failed renewal is repeated after this fraction of the time to live, and after this pause in seconds at the earliest.
RENEW_AGAIN_AFTER = 1 / 15
SHORTEST_RENEWAL_PAUSE = 0.05
# The default ttl of the server, in seconds. It renews a hold whose time to live is unknown, because its answer was
# lost, no store recorded it, or it existed already. A renewal never shortens a hold.
DEFAULT_TTL = 60.0
# The pause before such a hold is renewed for the first time, in seconds.
FIRST_PAUSE = 0.5

# The outcomes for a hold that has no counters.
_WITHOUT_COUNTERS = {"settle": "settled", "release": "released", "renew": "renewed"}


def _copied(cost: Cost) -> Cost:
    """Returns a cost that does not change with the mapping of the application."""
    return dict(cost) if isinstance(cost, Mapping) else cost


def _is_live(renewal: Settlement) -> bool:
    """Returns whether any counter still has the hold. The overall outcome is that of the worst counter."""
    return "renewed" in ([tier.outcome for tier in renewal.tiers] or [renewal.outcome])


class HoldState:
    """The common part of the blocking and the asyncio hold. True if the request is allowed."""

    def __init__(self, answer: HoldAnswer, estimate: Cost, report: Callable[[SluicegateError], None]) -> None:
        self._answer = answer
        self._estimate = _copied(estimate)
        self._report = report
        self._actual_cost: Cost | None = None
        # The call that was sent to end the hold: if it is cancelled or fails, the end of the block repeats it.
        self._unfinished_call: HoldAdjustment | None = None
        self._has_ended = False

    @property
    def decision(self) -> Decision:
        """The decision for the request with its estimated cost."""
        return self._answer.decision

    @property
    def allowed(self) -> bool:
        """Whether the request is allowed. A denied hold has charged nothing and is not settled."""
        return self._answer.decision.allowed

    @property
    def id(self) -> str:
        """The id of the hold."""
        return self._answer.id

    @property
    def token(self) -> str | None:
        """The token with which another process can settle the hold; `None` if the server did not admit it."""
        return self._answer.token

    @property
    def expires_at_us(self) -> int | None:
        """When the hold expires on the store's clock, in microseconds; `None` if no store recorded it."""
        return self._answer.expires_at_us

    @property
    def repeated(self) -> bool:
        """Whether a hold with this id was live already. This is its first response, and nothing was charged again."""
        return self._answer.repeated

    @property
    def actual_cost(self) -> Cost | None:
        """The actual cost, which is charged when the block ends, also after an exception. It can be set repeatedly."""
        return self._actual_cost

    @actual_cost.setter
    def actual_cost(self, cost: Cost) -> None:
        cost_to_json(cost)
        self._actual_cost = _copied(cost)

    def keep_estimate(self) -> None:
        """Keeps the estimate charged also after an exception, unless `actual_cost` is set."""
        if self._actual_cost is None:
            self._actual_cost = self._estimate

    def __bool__(self) -> bool:
        """Returns whether the request is allowed."""
        return self.allowed

    def _settlement(self, cost: Cost) -> HoldAdjustment | None:
        reference = self._answer.reference
        return None if reference is None else settle(reference, cost)

    def _release(self) -> HoldAdjustment | None:
        reference = self._answer.reference
        return None if reference is None else release(reference)

    @property
    def _ttl(self) -> float:
        return DEFAULT_TTL if self._answer.ttl is None else self._answer.ttl

    def _renewal(self, ttl: float | None) -> HoldAdjustment | None:
        reference = self._answer.reference
        return None if reference is None else renew(reference, self._ttl if ttl is None else ttl)

    def _final_call(self, error: BaseException | None) -> HoldAdjustment | None:
        """Returns the call at the end of a block; `None` if the hold has ended.

        A cancelled block keeps the estimate charged. Otherwise a client could avoid every charge by disconnecting.
        """
        if self._has_ended:
            return None
        if self._unfinished_call is not None:
            return self._unfinished_call
        if self._actual_cost is not None:
            return self._settlement(self._actual_cost)
        return self._release() if isinstance(error, Exception) else self._settlement(self._estimate)


class Hold(HoldState):
    """An admitted or denied hold of the blocking client.

    As a context manager, it ends with its block, unless it was settled or released before. If `actual_cost` is set, it
    is settled with that cost. Otherwise an exception releases it, and after a normal end the estimate stays charged.
    """

    def __init__(
        self,
        answer: HoldAnswer,
        estimate: Cost,
        report: Callable[[SluicegateError], None],
        adjust: Callable[[HoldAdjustment, float | None], Settlement],
    ) -> None:
        super().__init__(answer, estimate, report)
        self._adjust = adjust

    def settle(self, cost: Cost, *, deadline: float | None = None) -> Settlement:
        """Replaces the estimate with the actual cost, once. A unit that is not named keeps its estimate.

        If the server is unavailable, the call is repeated in the background, and the outcome is `queued`.
        """
        return self._finish(lambda: self._settlement(cost), "settle", deadline)

    def release(self, *, deadline: float | None = None) -> Settlement:
        """Refunds the estimate. If the server is unavailable, the call is repeated in the background."""
        return self._finish(self._release, "release", deadline)

    def renew(self, ttl: float | None = None, *, deadline: float | None = None) -> Settlement:
        """Moves the expiry to `ttl` seconds from now, if that is later.

        By default, `ttl` is that of the hold, or 60 seconds if that is unknown. Raises `Unavailable`.
        """
        return self._send(self._renewal(ttl), "renew", deadline)

    def __enter__(self) -> Hold:
        """Returns the hold."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the hold. Errors are logged."""
        adjustment = self._final_call(error)
        if adjustment is None:
            return
        try:
            self._finish(lambda: adjustment, adjustment.operation, None)
        except SluicegateError as failure:
            self._report(failure)

    def _finish(
        self, prepare: Callable[[], HoldAdjustment | None], operation: str, deadline: float | None
    ) -> Settlement:
        try:
            adjustment = self._unfinished_call = prepare()
            settlement = self._send(adjustment, operation, deadline)
        except Unavailable:
            # The end of the block repeats the call.
            raise
        except SluicegateError:
            # The end of the block must not release the hold because of this exception.
            self._unfinished_call = None
            self.keep_estimate()
            raise
        self._has_ended = True
        return settlement

    def _send(self, adjustment: HoldAdjustment | None, operation: str, deadline: float | None) -> Settlement:
        if adjustment is None:
            return Settlement(_WITHOUT_COUNTERS[operation])
        return self._adjust(adjustment, deadline)


class AsyncHold(HoldState):
    """An admitted or denied hold of the asyncio client.

    As a context manager, it is renewed while its block runs, and ends with it, as a `Hold` does. If the block is
    cancelled, the estimate stays charged.
    """

    def __init__(
        self,
        answer: HoldAnswer,
        estimate: Cost,
        report: Callable[[SluicegateError], None],
        adjust: Callable[[HoldAdjustment, float | None], Awaitable[Settlement]],
    ) -> None:
        super().__init__(answer, estimate, report)
        self._adjust = adjust
        self._renewing: asyncio.Task[None] | None = None

    async def settle(self, cost: Cost, *, deadline: float | None = None) -> Settlement:
        """Replaces the estimate with the actual cost, once. A unit that is not named keeps its estimate.

        If the server is unavailable, the call is repeated in the background, and the outcome is `queued`.
        """
        return await self._finish(lambda: self._settlement(cost), "settle", deadline)

    async def release(self, *, deadline: float | None = None) -> Settlement:
        """Refunds the estimate. If the server is unavailable, the call is repeated in the background."""
        return await self._finish(self._release, "release", deadline)

    async def renew(self, ttl: float | None = None, *, deadline: float | None = None) -> Settlement:
        """Moves the expiry to `ttl` seconds from now, if that is later.

        By default, `ttl` is that of the hold, or 60 seconds if that is unknown. Raises `Unavailable`.
        """
        return await self._send(self._renewal(ttl), "renew", deadline)

    async def __aenter__(self) -> AsyncHold:
        """Starts to renew the hold."""
        if self._answer.reference is not None and self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the hold. Errors are logged."""
        if self._renewing is not None:
            # A closed event loop raises `RuntimeError`.
            with contextlib.suppress(RuntimeError):
                self._renewing.cancel()
        adjustment = self._final_call(error)
        if adjustment is None:
            return
        try:
            await self._finish(lambda: adjustment, adjustment.operation, None)
        except SluicegateError as failure:
            self._report(failure)

    async def _finish(
        self, prepare: Callable[[], HoldAdjustment | None], operation: str, deadline: float | None
    ) -> Settlement:
        try:
            adjustment = self._unfinished_call = prepare()
            settlement = await self._send(adjustment, operation, deadline)
        except Unavailable:
            # The end of the block repeats the call.
            raise
        except SluicegateError:
            # The end of the block must not release the hold because of this exception.
            self._unfinished_call = None
            self.keep_estimate()
            raise
        self._has_ended = True
        return settlement

    async def _send(self, adjustment: HoldAdjustment | None, operation: str, deadline: float | None) -> Settlement:
        if adjustment is None:
            return Settlement(_WITHOUT_COUNTERS[operation])
        return await self._adjust(adjustment, deadline)

    async def _keep_alive(self) -> None:
        """Renews the hold until it has ended."""
        ttl = self._ttl
        pause = FIRST_PAUSE if self._answer.ttl is None else ttl * RENEW_AFTER
        if self._answer.repeated:
            # The remaining time of a hold that existed already is unknown.
            pause = 0.0
        while True:
            await asyncio.sleep(pause)
            if self._has_ended:
                return
            try:
                settlement = await self.renew(ttl)
            except Unavailable:
                pause = max(ttl * RENEW_AGAIN_AFTER, SHORTEST_RENEWAL_PAUSE)
                continue
            except SluicegateError as error:
                self._report(error)
                return
            if not _is_live(settlement):
                return
            pause = ttl * RENEW_AFTER


class PendingHold:
    """A hold that is made when it is awaited, or when it is entered with `async with`."""

    __slots__ = ("_entered", "_making")

    def __init__(self, making: Coroutine[Any, Any, AsyncHold]) -> None:
        # A coroutine, so that Python warns if it is never awaited.
        self._making = making
        self._entered: AsyncHold | None = None

    def __await__(self) -> Generator[Any, None, AsyncHold]:
        """Makes the hold."""
        return self._making.__await__()

    async def __aenter__(self) -> AsyncHold:
        """Makes the hold, and renews it while the block runs."""
        self._entered = await self._making
        return await self._entered.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the hold."""
        if self._entered is not None:
            await self._entered.__aexit__(kind, error, traceback)
