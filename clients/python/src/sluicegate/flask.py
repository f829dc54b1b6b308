"""Rate limits for Flask: a decorator for views, and limits for a whole application.

limiter = RateLimiter("http://127.0.0.1:8080")

@app.get("/report")
@limiter.limit("100/minute", key=header("x-api-key"))
def report(): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flask

from sluicegate.client import Client
from sluicegate.decision import Decision
from sluicegate.denial import Problem, bad_request, denial
from sluicegate.errors import InvalidValue
from sluicegate.guard import decide
from sluicegate.labels import client_ip
from sluicegate.request_check import CostValue, Labels, LimitValue, RequestCheck, Skip, Value, merged_labels
from sluicegate.request_view import WsgiRequest

View = TypeVar("View", bound=Callable[..., Any])
Denied = Callable[[flask.Request, Decision], Any]

# The attribute of views that limits of the application skip.
_EXEMPT = "sluicegate_exempt"


class RateLimiter:
    """Limits views by one client. `key` is the default key of limits without rules.

    `denied` returns the response to a denied request, as a view does.
    """

    def __init__(
        self,
        client: Client | str,
        *,
        key: Value[flask.Request] | None = client_ip,
        denied: Denied | None = None,
        enabled: bool = True,
    ) -> None:
        self.client = Client(client) if isinstance(client, str) else client
        self._key = key
        self._denied = denied
        self._enabled = enabled

    def limit_app(
        self,
        app: flask.Flask | flask.Blueprint,
        limit: LimitValue[flask.Request] | None = None,
        *,
        key: Value[flask.Request] | None = None,
        scope: str | None = None,
        cost: CostValue[flask.Request] = 1,
        skip: Skip[flask.Request] | None = None,
        labels: Labels[flask.Request] | None = None,
        **label: Value[flask.Request],
    ) -> None:
        """Checks every request of an application or a blueprint, except for views with `exempt`.

        Without a `scope`, routes are counted separately.
        """
        check = RequestCheck(
            labels=merged_labels(labels, label),
            limit=limit,
            key=self._key if key is None else key,
            scope=scope,
            cost=cost,
            skip=skip,
        )

        @app.before_request
        def check_request() -> Any:
            view = flask.current_app.view_functions.get(flask.request.endpoint or "")
            return None if getattr(view, _EXEMPT, False) else self._response_if_denied(check)

    def limit(
        self,
        limit: LimitValue[flask.Request] | None = None,
        *,
        key: Value[flask.Request] | None = None,
        scope: str | None = None,
        cost: CostValue[flask.Request] = 1,
        skip: Skip[flask.Request] | None = None,
        labels: Labels[flask.Request] | None = None,
        **label: Value[flask.Request],
    ) -> Callable[[View], View]:
        """Returns a decorator for a view. Write it below `@app.route(…)`.

        Pass a limit such as `100/minute`, or labels for the server's rules: `limit(route="login", ip=client_ip)`.
        Functions receive the request. Without a `scope`, each decorated function is counted separately.
        """

        def decorate(view: View) -> View:
            check = RequestCheck(
                labels=merged_labels(labels, label),
                limit=limit,
                key=self._key if key is None else key,
                scope=scope or f"{view.__module__}.{view.__qualname__}",
                cost=cost,
                skip=skip,
            )

            @functools.wraps(view)
            def limited(*args: Any, **kwargs: Any) -> Any:
                response = self._response_if_denied(check)
                return flask.current_app.ensure_sync(view)(*args, **kwargs) if response is None else response

            return cast(View, limited)

        return decorate

    def exempt(self, view: View) -> View:
        """Marks a view that the limits of the application skip."""
        setattr(view, _EXEMPT, True)
        return view

    def _response_if_denied(self, check: RequestCheck[flask.Request]) -> Any:
        """Checks the current request. Returns `None` if it is allowed."""
        if not self._enabled:
            return None
        request = flask.request
        rule = None if request.url_rule is None else request.url_rule.rule
        view = WsgiRequest(request.environ, path=request.path, route=rule)
        try:
            decision = decide(self.client, lambda: check.build(request, view))
        except InvalidValue as error:
            return _response(bad_request(error))
        if decision is None:
            return None
        flask.g.sluicegate_decision = decision
        _add_headers_later(decision)
        if decision.allowed:
            return None
        if self._denied is not None:
            return self._denied(request, decision)
        return _response(denial(decision))


def _add_headers_later(decision: Decision) -> None:
    @flask.after_this_request
    def add_headers(response: flask.Response) -> flask.Response:
        # If several limits apply, only the headers of the last decision are added.
        if flask.g.sluicegate_decision is decision:
            for name, value in decision.headers.items():
                response.headers.setdefault(name, value)
        return response


def _response(problem: Problem) -> flask.Response:
    return flask.Response(problem.body, problem.status, problem.headers)
