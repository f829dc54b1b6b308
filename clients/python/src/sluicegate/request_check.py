"""Builds the check of a web request from the arguments of an integration."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar
from urllib.parse import quote

from sluicegate.check import Check, Cost, cost_to_json
from sluicegate.errors import InvalidRequest, InvalidValue
from sluicegate.labels import LabelSource
from sluicegate.limit import Limit, to_limit
from sluicegate.request_view import RequestView

Request = TypeVar("Request")
Text = str | int | uuid.UUID | None
Value = str | LabelSource | Callable[[Request], Text]
Labels = Mapping[str, Value[Request]] | Callable[[Request], Mapping[str, Text]]
LimitValue = Limit | str | Callable[[Request], Limit | str]
CostValue = Cost | Callable[[Request], Cost]
Skip = Callable[[Request], bool]

# The scope of requests that match no route.
UNMATCHED = "<unmatched>"


class RequestCheck(Generic[Request]):
    """What to check for each request: labels for the server's rules, or a limit with a key."""

    def __init__(
        self,
        *,
        labels: Labels[Request] | None = None,
        limit: LimitValue[Request] | None = None,
        key: Value[Request] | None = None,
        scope: str | None = None,
        cost: CostValue[Request] = 1,
        skip: Skip[Request] | None = None,
        holds: bool = False,
    ) -> None:
        if (labels is None) == (limit is None):
            raise InvalidRequest('pass labels, or a limit such as "100/minute" with a key: exactly one of both')
        if isinstance(limit, (str, Limit)):
            limit = to_limit(limit)
            if limit.algorithm == "concurrency" and not holds:
                raise InvalidRequest(
                    "limit counts requests in flight, which need a hold: "
                    "use the ASGI middleware with hold=True, or client.hold(…)"
                )
        if not callable(cost):
            _require_cost(cost, has_limit=limit is not None)
        if key is not None:
            _require_valid("key", key)
        if labels is not None and not callable(labels):
            for name, value in labels.items():
                _require_valid(f"label {name!r}", value)
        self._labels = labels
        self._limit = limit
        self._key = key
        self._scope = scope
        self._cost = cost
        self._skip = skip

    def build(self, request: Request, view: RequestView) -> Check | None:
        """Returns the check of a request; `None` if the request is skipped.

        Raises `InvalidValue` if a function returns a key, a label or a cost that is unusable: it usually comes from
        the body of the request, where a client chooses also the type.
        """
        if self._skip is not None and self._skip(request):
            return None
        cost = self._cost_of(request)
        if self._labels is not None:
            return Check(labels=self._label_values(self._labels, request, view), cost=cost)
        limit = self._limit(request) if callable(self._limit) else self._limit
        scope = self._scope if self._scope is not None else _scope_of(view)
        return Check(key=self._key_of(scope, request, view), limit=limit, cost=cost, name=scope)

    def _cost_of(self, request: Request) -> Cost:
        if not callable(self._cost):
            return self._cost
        cost = self._cost(request)
        try:
            _require_cost(cost, has_limit=self._limit is not None)
        except InvalidRequest as error:
            raise InvalidValue(str(error)) from error
        return cost

    def _label_values(self, labels: Labels[Request], request: Request, view: RequestView) -> dict[str, str]:
        if callable(labels):
            values = {name: _text(f"label {name!r}", value) for name, value in labels(request).items()}
        else:
            values = {name: _label(f"label {name!r}", value, request, view) for name, value in labels.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _key_of(self, scope: str, request: Request, view: RequestView) -> str:
        """Returns the scope and the value. Without a value the requests of a scope share one counter."""
        quoted = quote(scope, safe="/{}<>.-_", errors="replace")
        if self._key is None:
            return quoted
        if isinstance(self._key, LabelSource):
            value = self._key.key_part(view)
        else:
            value = _label("key", self._key, request, view)
        # The scope has no colon, so different scopes and values never share a counter.
        return quoted if value is None else f"{quoted}:{value}"


def _scope_of(view: RequestView) -> str:
    """Returns the route. Requests that match none share a scope, because a client can choose any number of paths."""
    if view.route is None:
        return UNMATCHED
    return view.route or "/"


def _label(what: str, value: Value[Request], request: Request, view: RequestView) -> str | None:
    if isinstance(value, LabelSource):
        return value.label(view)
    return _text(what, value(request) if callable(value) else value)


def _text(what: str, value: object) -> str | None:
    """Returns the text of a label or key; `None` if it is absent."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, uuid.UUID)) and not isinstance(value, bool):
        return str(value)
    raise InvalidValue(f"{what} is of type {type(value).__name__}: use a string, an integer or None")


def _require_cost(cost: Cost, *, has_limit: bool) -> None:
    """Rejects a cost that the server would reject."""
    if has_limit and isinstance(cost, Mapping):
        raise InvalidRequest("cost of a limit has units: use an integer, or labels and rules with units")
    cost_to_json(cost)


def _require_valid(what: str, value: object) -> None:
    """Rejects a constant that is not a label or key, when the application starts."""
    if isinstance(value, LabelSource) or callable(value):
        return
    try:
        _text(what, value)
    except InvalidValue as error:
        raise InvalidRequest(str(error)) from error


def merged_labels(labels: Labels[Request] | None, more: Mapping[str, Value[Request]]) -> Labels[Request] | None:
    """Returns the labels of a decorator's `labels` argument and of its keyword arguments."""
    if not more:
        return labels
    if callable(labels):
        raise InvalidRequest("labels is a function: return all labels from it, without further arguments")
    return {**(labels or {}), **more}
