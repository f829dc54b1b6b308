"""Rate limits for FastAPI endpoints, as decorators or dependencies.

limiter = RateLimiter("http://127.0.0.1:8080")

@app.get("/report")
@limiter.limit("100/minute", key=header("x-api-key"))
async def report(): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from fastapi import Depends, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from sluicegate.asgi import DECISION
from sluicegate.async_client import AsyncClient
from sluicegate.decision import Decision
from sluicegate.denial import bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide_async
from sluicegate.labels import client_ip
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value, merged_labels
from sluicegate.request_view import AsgiRequest

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Dependency = Callable[[Request, Response], Awaitable[Decision | None]]

# The start of the names of the parameters that the decorator adds to an endpoint.
_PARAMETER = "sluicegate_decision"


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
            _add_headers(response, decision)
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
    number = sum(name.startswith(_PARAMETER) for name in signature.parameters)
    name = f"{_PARAMETER}_{number}"
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=Depends(dependency), annotation=Any)
    parameters = list(signature.parameters.values())
    # A parameter **kwargs is the last one.
    position = len(parameters) - bool(parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(position, added)

    @functools.wraps(endpoint)
    async def limited(*args: Any, **kwargs: Any) -> Any:
        decision: Decision | None = kwargs.pop(name, None)
        try:
            if inspect.iscoroutinefunction(endpoint):
                result = await endpoint(*args, **kwargs)
            else:
                result = await run_in_threadpool(endpoint, *args, **kwargs)
        except StarletteHTTPException as error:
            if decision is not None:
                error.headers = {**decision.headers, **(error.headers or {})}
            raise
        # FastAPI adds the headers of dependencies only to responses that it creates itself.
        if decision is not None and isinstance(result, Response):
            _add_headers(result, decision)
        return result

    limited.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return limited


def _signature(endpoint: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(endpoint, eval_str=True)
    except NameError:
        # A name that is defined later, which FastAPI resolves.
        return inspect.signature(endpoint)


def _add_headers(response: Response, decision: Decision) -> None:
    for name, value in decision.headers.items():
        response.headers.setdefault(name, value)
