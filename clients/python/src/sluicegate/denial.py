"""The response to a denied request, as the server's forward-auth sends it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from sluicegate.decision import Decision
from sluicegate.errors import InvalidValue
from sluicegate.limit_name import UNNAMED

PROBLEM_JSON = "application/problem+json"
_PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types"


@dataclass(frozen=True, slots=True)
class Problem:
    """A response with a problem body."""

    status: int
    detail: str
    headers: Mapping[str, str]
    body: bytes


def denial(decision: Decision) -> Problem:
    """Returns the response to a denied request: 503 if a policy `closed` denied it, otherwise 429."""
    if decision.source == "closed":
        status, name, title = 503, "temporary-reduced-capacity", "Temporary Reduced Capacity"
    else:
        status, name, title = 429, "quota-exceeded", "Quota Exceeded"
    violated = [
        tier.rule or decision.name or UNNAMED for tier in decision.tiers if not tier.allowed and not tier.shadow
    ]
    detail = _detail(decision, ": " + ", ".join(violated) if violated else "")
    fields: dict[str, object] = {
        "type": f"{_PROBLEM_TYPES}#{name}",
        "title": title,
        "status": status,
        "detail": detail,
        "violated-policies": violated,
    }
    if decision.retry_after is not None:
        fields["retry_after_ms"] = round(decision.retry_after * 1000)
    return _problem(status, detail, fields, decision.headers)


def bad_request(error: InvalidValue) -> Problem:
    """Returns the response to a request with an unusable value."""
    detail = str(error)
    fields = {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": detail}
    return _problem(400, detail, fields, {})


def _problem(status: int, detail: str, fields: Mapping[str, object], headers: Mapping[str, str]) -> Problem:
    all_headers = {"content-type": PROBLEM_JSON, "cache-control": "no-store", **headers}
    return Problem(status, detail, all_headers, json.dumps(fields).encode())


def _detail(decision: Decision, names: str) -> str:
    if decision.source == "closed":
        return f"limits cannot be checked at the moment{names}"
    if decision.retry_after is None:
        return f"denied{names}; a retry cannot succeed"
    seconds = math.ceil(decision.retry_after)
    return f"limit exceeded{names}; retry in {seconds} second{'' if seconds == 1 else 's'}"
