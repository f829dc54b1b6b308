"""Rate limits for FastAPI endpoints, as decorators or dependencies.

limiter = RateLimiter("http://127.0.0.1:8080")

@app.get("/report")
@limiter.limit("100/minute", key=header("x-api-key"))
async def report(): ...
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, HTTPException, Request, Response, WebSocket
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from sluicegate.asgi import DECISION, HOLD
from sluicegate.async_client import AsyncClient
from sluicegate.decision import Decision
from sluicegate.denial import bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide_async
from sluicegate.hold import AsyncHold
from sluicegate.labels import client_ip
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value, merged_labels
from sluicegate.request_view import AsgiRequest

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Dependency = Callable[[Request, Response], Awaitable[Decision | None]]

# The start of the names of the parameters that the decorator adds to an endpoint.
_PARAMETER = "sluicegate_decision"


def current_hold(request: Request) -> AsyncHold:
    """A dependency whose value is the hold of `RateLimitMiddleware(…, hold=True)`.

    The endpoint sets the actual cost: `hold.actual_cost = {"tokens": 120}`.
    """
    hold = request.scope.get(HOLD)
    if not isinstance(hold, AsyncHold):
        raise TypeError("the request has no hold: add RateLimitMiddleware with hold=True, without skipping this path")
    return hold


class RateLimited(HTTPException):
    """A denied request: 429, or 503 if a policy `closed` denied it. An exception handler can change the response."""

    def __init__(self, decision: Decision) -> None:
        problem = denial(decision)
        headers = {name: value for name, value in problem.headers.items() if name != "content-type"}
        super().__init__(problem.status, problem.detail, headers)
        self.decision = decision


class RateLimiter:
    """Limits endpoints by one client. `key` is the default key of limits without rules."""

    def __init__(
        self, client: AsyncClient | str, *, key: Value[Request] | None = client_ip, enabled: bool = True
    ) -> None:
        self.client = AsyncClient(client) if isinstance(client, str) else client
        self._key = key
        self._enabled = enabled

    def dependency(
        self,
        limit: LimitValue[Request] | None = None,
        *,
        key: Value[Request] | None = None,
        scope: str | None = None,
        cost: CostValue[Request] = 1,
        skip: Skip[Request] | None = None,
        labels: Labels[Request] | None = None,
        **label: Value[Request],
    ) -> Dependency:
        """Returns a dependency that checks a request, for `Depends(…)`. Its value is the decision.

        Pass a limit such as `100/minute`, or labels for the server's rules: `dependency(route="login", ip=client_ip)`.
        Functions receive the request. Without a `scope`, endpoints with different paths are counted separately.
        """
        check = RequestCheck(
            labels=merged_labels(labels, label),
            limit=limit,
            key=self._key if key is None else key,
            scope=scope,
            cost=cost,
            skip=skip,
        )

        async def check_request(request: Request, response: Response) -> Decision | None:
            if not self._enabled:
                return None
            view = AsgiRequest(request.scope)
            try:
                decision = await decide_async(self.client, lambda: check.build(request, view))
            except InvalidValue as error:
                problem = bad_request(error)
                raise HTTPException(problem.status, problem.detail) from error
            if decision is None:
                return None
            request.scope[DECISION] = decision
            if not decision.allowed:
                raise RateLimited(decision)
            # The response belongs to this request. If several limits apply, the last one overwrites the others.
            response.headers.update(decision.headers)
            return decision

        return check_request

    def limit(
        self,
        limit: LimitValue[Request] | None = None,
        *,
        key: Value[Request] | None = None,
        scope: str | None = None,
        cost: CostValue[Request] = 1,
        skip: Skip[Request] | None = None,
        labels: Labels[Request] | None = None,
        **label: Value[Request],
    ) -> Callable[[Endpoint], Endpoint]:
        """Returns a decorator for an endpoint, with the arguments of `dependency`. Write it below `@app.get(…)`.

        The check is the first dependency of the endpoint, so it also counts requests that a later dependency rejects.
        Without a `scope`, each decorated function is counted separately.
        """

        def decorate(endpoint: Endpoint) -> Endpoint:
            dependency = self.dependency(
                limit,
                key=key,
                scope=scope or f"{endpoint.__module__}.{endpoint.__qualname__}",
                cost=cost,
                skip=skip,
                labels=labels,
                **label,
            )
            return cast(Endpoint, _with_dependency(endpoint, dependency))

        return decorate


def _with_dependency(endpoint: Callable[..., Any], dependency: Dependency) -> Callable[..., Any]:
    """Adds a parameter with the dependency to the signature that FastAPI reads."""
    signature = _signature(endpoint)
    _reject_websocket(signature)
    number = sum(name.startswith(_PARAMETER) for name in signature.parameters)
    name = f"{_PARAMETER}_{number}"
    # FastAPI resolves dependencies in the order of the parameters. An annotation instead of a default, because
    # parameters without a default can follow.
    added = inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[Any, Depends(dependency)]
    )
    limited = functools.wraps(endpoint)(_limited(endpoint, name))
    parameters = [added, *signature.parameters.values()]
    limited.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return limited


def _limited(endpoint: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    """Returns a function that calls the endpoint without the added parameter, and adds the headers to its response.

    An endpoint with `yield` becomes a generator, because FastAPI streams its items. FastAPI adds the headers itself.
    """
    if inspect.isasyncgenfunction(endpoint):

        async def limited_stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            kwargs.pop(parameter, None)
            async with contextlib.aclosing(endpoint(*args, **kwargs)) as items:
                async for item in items:
                    yield item

        return limited_stream

    if inspect.isgeneratorfunction(endpoint):

        def limited_blocking_stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            kwargs.pop(parameter, None)
            yield from endpoint(*args, **kwargs)

        return limited_blocking_stream

    async def limited(*args: Any, **kwargs: Any) -> Any:
        decision: Decision | None = kwargs.pop(parameter, None)
        try:
            if inspect.iscoroutinefunction(endpoint):
                result = await endpoint(*args, **kwargs)
            else:
                result = await run_in_threadpool(endpoint, *args, **kwargs)
        except StarletteHTTPException as error:
            if decision is None:
                raise
            raise _error_with_headers(error, decision) from error
        # FastAPI adds the headers of dependencies only to responses that it creates itself.
        if decision is not None and isinstance(result, Response):
            return _response_with_headers(result, decision)
        return result

    return limited


def _signature(endpoint: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(endpoint, eval_str=True)
    except NameError:
        # A name that is defined later, which FastAPI resolves.
        return inspect.signature(endpoint)


def _reject_websocket(signature: inspect.Signature) -> None:
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if annotation == "WebSocket" or (isinstance(annotation, type) and issubclass(annotation, WebSocket)):
            raise TypeError(
                "limit is not supported for a WebSocket endpoint: call limiter.client.check(…) in the endpoint"
            )


def _error_with_headers(error: StarletteHTTPException, decision: Decision) -> StarletteHTTPException:
    """Returns a copy, because requests can share an exception that was created once."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.headers = {**decision.headers, **(error.headers or {})}
    return copied


def _response_with_headers(response: Response, decision: Decision) -> Response:
    """Returns a copy, because requests can share a response that was created once."""
    copied = copy.copy(response)
    # Starlette caches a mutable view of the original headers.
    copied.__dict__.pop("_headers", None)
    copied.raw_headers = list(response.raw_headers)
    for name, value in decision.headers.items():
        copied.headers.setdefault(name, value)
    return copied
