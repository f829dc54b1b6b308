"""Checks requests for the integrations, so that no error of the limiter fails a request.

The outcomes of a check, in addition to a decision of the server:

* `Unavailable`: the client has already applied its failure policy.
* `InvalidValue`: the client of the application sent an unusable value. It is raised, and the integration answers with
  400, because a policy `open` would let the request pass.
* Any other `SluicegateError` is a misconfiguration, such as a wrong token: it is logged, and the policy decides.
* Exceptions of the application's own functions are raised.
"""

from __future__ import annotations

from collections.abc import Callable

from sluicegate.async_client import AsyncClient
from sluicegate.check import Check
from sluicegate.client import Client
from sluicegate.decision import Decision
from sluicegate.errors import InvalidValue, SluicegateError
from sluicegate.hold import AsyncHold

# What a failure policy sees of a request whose labels could not be read.
_WITHOUT_LABELS = Check(labels={})


def decide(client: Client, build: Callable[[], Check | None]) -> Decision | None:
    """Builds and checks a request. Returns `None` if it is skipped. Raises only `InvalidValue`."""
    check: Check | None = None
    try:
        check = build()
        return None if check is None else client.check_with(check, headers=True)
    except InvalidValue:
        raise
    except SluicegateError as error:
        return client.decide_despite(error, check or _WITHOUT_LABELS)


async def decide_async(client: AsyncClient, build: Callable[[], Check | None]) -> Decision | None:
    """Builds and checks a request, as `decide` does."""
    check: Check | None = None
    try:
        check = build()
        return None if check is None else await client.check_with(check, headers=True)
    except InvalidValue:
        raise
    except SluicegateError as error:
        return client.decide_despite(error, check or _WITHOUT_LABELS)


async def hold_async(client: AsyncClient, build: Callable[[], Check | None]) -> AsyncHold | None:
    """Builds and holds a request, as `decide` does."""
    check: Check | None = None
    try:
        check = build()
        return None if check is None else await client.hold_with(check, headers=True)
    except InvalidValue:
        raise
    except SluicegateError as error:
        return client.hold_despite(error, check or _WITHOUT_LABELS)
