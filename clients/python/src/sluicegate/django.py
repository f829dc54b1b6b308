"""Rate limits for Django: a decorator for views, and a middleware for all of them.

The setting `SLUICEGATE` has the arguments of the client, and optionally those of the middleware:

    SLUICEGATE = {"url": "http://127.0.0.1:8080", "labels": {"route": route, "ip": client_ip}}
    MIDDLEWARE = ["sluicegate.django.RateLimitMiddleware", …]

    @ratelimit("100/minute", key=header("x-api-key"))
    def report(request): ...
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from sluicegate.async_client import AsyncClient
from sluicegate.client import Client
from sluicegate.decision import SKIPPED, Decision
from sluicegate.denial import Problem, bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide, decide_async
from sluicegate.labels import client_ip
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value, merged_labels
from sluicegate.request_view import WsgiRequest

View = TypeVar("View", bound=Callable[..., Any])
Denied = Callable[[HttpRequest, Decision], HttpResponseBase]

_CLIENT = frozenset({"url", "token", "deadline", "on_failure", "ca", "client_cert", "max_connections"})
_MIDDLEWARE = frozenset({"labels", "limit", "key", "scope", "cost", "skip"})
_GENERAL = frozenset({"denied", "enabled"})

# The attribute of views that the middleware skips.
_EXEMPT = "sluicegate_exempt"


class RateLimitMiddleware:
    """Checks each request that matches a URL, by the labels or the limit in the setting `SLUICEGATE`."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        configured = {name: value for name, value in _setting().items() if name in _MIDDLEWARE}
        self._check: RequestCheck[HttpRequest] = RequestCheck(**{"key": client_ip, **configured})
        self.process_view: Callable[..., Any]
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)
            self.process_view = self._process_view_async
        else:
            self.process_view = self._process_view

    def __call__(self, request: HttpRequest) -> Any:
        """Adds the headers of the decision to the response."""
        if iscoroutinefunction(self):
            return self._call_async(request)
        return _with_headers(self._get_response(request), request)

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        return _with_headers(await self._get_response(request), request)

    def _process_view(self, request: HttpRequest, view: Callable[..., Any], *_: Any) -> HttpResponseBase | None:
        return None if getattr(view, _EXEMPT, False) else _response_instead(request, self._check)

    async def _process_view_async(
        self, request: HttpRequest, view: Callable[..., Any], *_: Any
    ) -> HttpResponseBase | None:
        return None if getattr(view, _EXEMPT, False) else await _response_instead_async(request, self._check)


def ratelimit(
    limit: LimitValue[HttpRequest] | None = None,
    *,
    key: Value[HttpRequest] | None = client_ip,
    scope: str | None = None,
    cost: CostValue[HttpRequest] = 1,
    skip: Skip[HttpRequest] | None = None,
    block: bool = True,
    labels: Labels[HttpRequest] | None = None,
    **label: Value[HttpRequest],
) -> Callable[[View], View]:
    """Returns a decorator for a view, synchronous or asynchronous.

    Pass a limit such as `100/minute`, or labels for the server's rules: `ratelimit(route="login", ip=client_ip)`.
    Functions receive the request. The view finds the decision in `request.sluicegate`; with `block=False`, also a
    denied one. A request that is skipped has an allowing decision. Without a `scope`, each decorated view is counted
    separately.
    """

    def decorate(view: View) -> View:
        check = RequestCheck(
            labels=merged_labels(labels, label),
            limit=limit,
            key=key,
            scope=scope or f"{view.__module__}.{view.__qualname__}",
            cost=cost,
            skip=skip,
        )
        limited = _limited_async(view, check, block) if iscoroutinefunction(view) else _limited(view, check, block)
        return cast(View, functools.wraps(view)(limited))

    return decorate


def exempt(view: View) -> View:
    """Marks a view that the middleware skips."""
    setattr(view, _EXEMPT, True)
    return view


def _limited(
    view: Callable[..., HttpResponseBase], check: RequestCheck[HttpRequest], block: bool
) -> Callable[..., HttpResponseBase]:
    def limited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = _response_instead(request, check, block=block)
        if response is None:
            response = view(request, *args, **kwargs)
        return _with_headers(response, request)

    return limited


def _limited_async(
    view: Callable[..., Awaitable[HttpResponseBase]], check: RequestCheck[HttpRequest], block: bool
) -> Callable[..., Awaitable[HttpResponseBase]]:
    async def limited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = await _response_instead_async(request, check, block=block)
        if response is None:
            response = await view(request, *args, **kwargs)
        return _with_headers(response, request)

    return limited


def _response_instead(
    request: HttpRequest, check: RequestCheck[HttpRequest], *, block: bool = True
) -> HttpResponseBase | None:
    """Checks a request. Returns the response to a denied or invalid one; `None` if the view responds."""
    if not _is_enabled():
        return _decided(request, None, block=block)
    try:
        decision = decide(_client(), lambda: check.build(request, _view(request)))
    except InvalidValue as error:
        return _response(bad_request(error))
    return _decided(request, decision, block=block)


async def _response_instead_async(
    request: HttpRequest, check: RequestCheck[HttpRequest], *, block: bool = True
) -> HttpResponseBase | None:
    """Checks a request, as `_response_instead` does."""
    if not _is_enabled():
        return _decided(request, None, block=block)
    try:
        decision = await decide_async(_async_client(), lambda: check.build(request, _view(request)))
    except InvalidValue as error:
        return _response(bad_request(error))
    return _decided(request, decision, block=block)


def _decided(request: HttpRequest, decision: Decision | None, *, block: bool) -> HttpResponseBase | None:
    """Keeps the decision for the view and the headers. Returns the response to a denied request."""
    previous: Decision | None = getattr(request, "sluicegate", None)
    if decision is None:
        request.sluicegate = SKIPPED if previous is None else previous  # type: ignore[attr-defined]
        return None
    # With several limits that do not block, a denial is not replaced by an allowing decision.
    if previous is None or previous.allowed or not decision.allowed:
        request.sluicegate = decision  # type: ignore[attr-defined]
    if decision.allowed or not block:
        return None
    denied: Denied | None = _setting().get("denied")
    return _response(denial(decision)) if denied is None else denied(request, decision)


def _is_enabled() -> bool:
    return bool(_setting().get("enabled", True))


def _view(request: HttpRequest) -> WsgiRequest:
    match = request.resolver_match
    return WsgiRequest(request.META, path=request.path, route=None if match is None else match.route)


def _with_headers(response: HttpResponseBase, request: HttpRequest) -> HttpResponseBase:
    decision: Decision | None = getattr(request, "sluicegate", None)
    if decision is not None:
        for name, value in decision.headers.items():
            response.headers.setdefault(name, value)
    return response


def _response(problem: Problem) -> HttpResponse:
    return HttpResponse(problem.body, status=problem.status, headers=dict(problem.headers))


@functools.cache
def _setting() -> dict[str, Any]:
    setting: dict[str, Any] = getattr(settings, "SLUICEGATE", {})
    known = _CLIENT | _MIDDLEWARE | _GENERAL
    unknown = sorted(set(setting) - known)
    if unknown:
        raise ImproperlyConfigured(f"SLUICEGATE has unknown keys {unknown}: use {', '.join(sorted(known))}")
    return setting


@functools.cache
def _client() -> Client:
    return Client(**_client_arguments())


@functools.cache
def _async_client() -> AsyncClient:
    return AsyncClient(**_client_arguments())


def _client_arguments() -> dict[str, Any]:
    return {name: value for name, value in _setting().items() if name in _CLIENT}


def _forget_setting(*, setting: str, **_: Any) -> None:
    if setting == "SLUICEGATE":
        for cached in (_setting, _client, _async_client):
            cached.cache_clear()


# Tests override settings.
setting_changed.connect(_forget_setting)
