"""Checks requests for the integrations, so that no error of the limiter fails a request."""

from __future__ import annotations

from collections.abc import Callable

from sluicegate.async_client import AsyncClient
from sluicegate.check import Check
from sluicegate.client import Client
from sluicegate.decision import Decision
from sluicegate.errors import SluicegateError

# What a failure policy sees of a request whose labels could not be read.
_WITHOUT_LABELS = Check(labels={})


def decide(client: Client, build: Callable[[], Check | None]) -> Decision | None:
    """Builds and checks a request. Returns `None` if it is skipped.

    A misconfiguration, such as a wrong token, is logged, and the failure policy decides. Raises `InvalidValue`, which
    the application's client caused, and exceptions of the application's own functions.
    """
    check: Check | None = _WITHOUT_LABELS
    try:
        check = build()
        return None if check is None else client.check_with(check, headers=True)
    except SluicegateError as error:
        return client._core.decide_despite(error, check or _WITHOUT_LABELS)


async def decide_async(client: AsyncClient, build: Callable[[], Check | None]) -> Decision | None:
    """Builds and checks a request, as `decide` does."""
    check: Check | None = _WITHOUT_LABELS
    try:
        check = build()
        return None if check is None else await client.check_with(check, headers=True)
    except SluicegateError as error:
        return client._core.decide_despite(error, check or _WITHOUT_LABELS)
