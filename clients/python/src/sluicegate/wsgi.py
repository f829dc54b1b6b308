"""Rate limit middleware for WSGI applications."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sluicegate.client import Client
from sluicegate.decision import Decision
from sluicegate.denial import Problem, bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value
from sluicegate.request_view import WsgiRequest

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# The key of the environment under which an application finds the decision.
DECISION = "sluicegate.decision"


class RateLimitMiddleware:
    """Checks each request before the application.

    Pass labels for the server's rules, or a limit with a key. Functions receive a `WsgiRequest`. `denied` returns the
    WSGI application that responds to a denied request.
    """

    def __init__(
        self,
        app: WSGIApplication,
        client: Client | str,
        *,
        labels: Labels[WsgiRequest] | None = None,
        limit: LimitValue[WsgiRequest] | None = None,
        key: Value[WsgiRequest] | None = None,
        scope: str = "wsgi",
        cost: CostValue[WsgiRequest] = 1,
        skip: Skip[WsgiRequest] | None = None,
        denied: Callable[[WsgiRequest, Decision], WSGIApplication] | None = None,
    ) -> None:
        self._app = app
        self._client = Client(client) if isinstance(client, str) else client
        self._check = RequestCheck(labels=labels, limit=limit, key=key, scope=scope, cost=cost, skip=skip)
        self._denied = denied

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Handles a request."""
        request = WsgiRequest(environ)
        try:
            decision = decide(self._client, lambda: self._check.build(request, request))
        except InvalidValue as error:
            return _respond(bad_request(error))(environ, start_response)
        if decision is None:
            return self._app(environ, start_response)
        environ[DECISION] = decision
        app = self._app if decision.allowed else self._denial(request, decision)
        return app(environ, start_with_headers(start_response, decision.headers))

    def _denial(self, request: WsgiRequest, decision: Decision) -> WSGIApplication:
        if self._denied is not None:
            return self._denied(request, decision)
        return _respond(denial(decision))


def start_with_headers(start_response: StartResponse, headers: Mapping[str, str]) -> StartResponse:
    """Returns a function that adds headers to the response, except those that it already has."""

    def start(status: str, existing: list[tuple[str, str]], *exc_info: Any) -> Any:
        names = {name.lower() for name, _ in existing}
        added = [pair for pair in headers.items() if pair[0].lower() not in names]
        return start_response(status, existing + added, *exc_info)

    return start


def _respond(problem: Problem) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        headers = [*problem.headers.items(), ("content-length", str(len(problem.body)))]
        start_response(f"{problem.status} {HTTPStatus(problem.status).phrase}", headers)
        return [problem.body]

    return app
