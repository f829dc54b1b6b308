"""Rate limit middleware for ASGI applications: Starlette, FastAPI, Quart, Django and others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from sluicegate.async_client import AsyncClient
from sluicegate.decision import Decision
from sluicegate.denial import Problem, bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide_async, hold_async
from sluicegate.hold import AsyncHold
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value
from sluicegate.request_view import AsgiRequest

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key of the scope under which an application finds the decision.
DECISION = "sluicegate.decision"
# The key under which it finds the hold, if the middleware holds requests.
HOLD = "sluicegate.hold"


class RateLimitMiddleware:
    """Checks each HTTP request before the application.

    Pass labels for the server's rules, or a limit with a key. Functions receive an `AsgiRequest`. `denied` returns the
    ASGI application that responds to a denied request, for example a Starlette response.

    With `hold=True`, each request is held until the application has sent the last message of its response, or returns.
    Rules with the algorithm `concurrency` require this. Until then, the application sets the actual cost:
    `scope[HOLD].actual_cost = …`.
    """

    def __init__(
        self,
        app: App,
        client: AsyncClient | str,
        *,
        labels: Labels[AsgiRequest] | None = None,
        limit: LimitValue[AsgiRequest] | None = None,
        key: Value[AsgiRequest] | None = None,
        scope: str = "asgi",
        cost: CostValue[AsgiRequest] = 1,
        skip: Skip[AsgiRequest] | None = None,
        denied: Callable[[AsgiRequest, Decision], App] | None = None,
        hold: bool = False,
    ) -> None:
        self._app = app
        self._client = AsyncClient(client) if isinstance(client, str) else client
        self._check = RequestCheck(labels=labels, limit=limit, key=key, scope=scope, cost=cost, skip=skip, holds=hold)
        self._denied = denied
        self._holds = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = AsgiRequest(scope)
        hold: AsyncHold | None = None
        try:
            if self._holds:
                hold = await hold_async(self._client, lambda: self._check.build(request, request))
                decision = None if hold is None else hold.decision
            else:
                decision = await decide_async(self._client, lambda: self._check.build(request, request))
        except InvalidValue as error:
            await _respond(bad_request(error))(scope, receive, send)
            return
        if decision is None:
            await self._app(scope, receive, send)
            return
        scope[DECISION] = decision
        app = self._app if decision.allowed else self._denial(request, decision)
        if hold is not None and decision.allowed:
            scope[HOLD] = hold
            app = _held(app, hold)
        await app(scope, receive, send_with_headers(send, decision.headers))

    def _denial(self, request: AsgiRequest, decision: Decision) -> App:
        if self._denied is not None:
            return self._denied(request, decision)
        return _respond(denial(decision))


def _held(app: App, hold: AsyncHold) -> App:
    """Returns an application that ends the hold after the last message of the response.

    An exception settles the estimate: a client that can cause one must not avoid the charge.
    """

    async def held_app(scope: Scope, receive: Receive, send: Send) -> None:
        ending: asyncio.Task[None] | None = None

        async def send_message(message: Message) -> None:
            nonlocal ending
            await send(message)
            if ending is None and _is_last(message):
                # A task, because Starlette may cancel its own after the last message.
                ending = asyncio.get_running_loop().create_task(hold.__aexit__(None, None, None))

        async with hold:
            try:
                await app(scope, receive, send_message)
            except Exception:
                hold.keep_estimate()
                raise
            finally:
                if ending is not None:
                    await ending

    return held_app


def _is_last(message: Message) -> bool:
    kind = message["type"]
    return kind == "http.response.pathsend" or (kind == "http.response.body" and not message.get("more_body"))


def send_with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Returns a function that adds headers to the response, except those that it already has."""
    if not headers:
        return send
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def send_message(message: Message) -> None:
        if message["type"] == "http.response.start":
            existing = list(message.get("headers", ()))
            names = {name.lower() for name, _ in existing}
            message["headers"] = existing + [pair for pair in encoded if pair[0] not in names]
        await send(message)

    return send_message


def _respond(problem: Problem) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in problem.headers.items()]
        headers.append((b"content-length", str(len(problem.body)).encode()))
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": problem.body})

    return app
