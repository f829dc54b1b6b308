"""The requests of holds: to make one, and to settle, release or renew it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sluicegate.check import Check, Cost, cost_to_json
from sluicegate.decision import Decision, decision_from_json
from sluicegate.errors import InvalidRequest, InvalidValue

# Bounds of the server.
MAX_ID_BYTES = 128
MIN_TTL = 0.001
MAX_TTL = 24 * 60 * 60.0

# The source of a decision about a request that no rule matches. Its hold has no counters.
_UNMATCHED = "unmatched"

# Identifies a hold: its token, or its labels or key with its id.
Reference = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """A check whose cost is an estimate, with the id of the hold."""

    check: Check
    id: str
    ttl: float | None
    fields: Mapping[str, object]
    """The request as the server expects it."""

    def reference(self) -> Reference:
        """Identifies the hold without its token, for a hold whose answer was lost."""
        return {**self.check.subject_to_json(), "id": self.id}


@dataclass(frozen=True, slots=True)
class HoldAnswer:
    """The decision for a hold."""

    decision: Decision
    id: str
    token: str | None = None
    expires_at_us: int | None = None
    repeated: bool = False
    reference: Reference | None = None
    """Identifies the hold on the server; `None` if there is none."""
    ttl: float | None = None
    """The time from the hold to its expiry, in seconds, if it is known."""


@dataclass(frozen=True, slots=True)
class HoldAdjustment:
    """A call that settles, releases or renews a hold."""

    operation: Literal["settle", "release", "renew"]
    fields: Mapping[str, object]


def hold_request(check: Check, id: str | None, ttl: float | None, *, headers: bool) -> HoldRequest:
    """Returns a request, with a random id if there is none."""
    id = uuid.uuid4().hex if id is None else _valid_id(id)
    fields = check.to_json()
    fields["id"] = id
    if ttl is not None:
        fields["ttl_ms"] = ttl_to_json(ttl)
    if headers:
        fields["headers"] = True
    return HoldRequest(check, id, ttl, fields)


def answer_from_json(request: HoldRequest, fields: Mapping[str, Any]) -> HoldAnswer:
    """Reads the answer to a hold. Raises `KeyError`, `TypeError` or `AttributeError` for other objects."""
    decision = decision_from_json(fields, request.check.limit_name)
    token = fields.get("token")
    expires_at_us = fields.get("expires_at_us")
    ttl, repeated = request.ttl, fields["repeated"]
    # A repeated answer has the time of the first one, but the expiry after all renewals.
    if ttl is None and not repeated and expires_at_us is not None and decision.at_us is not None:
        ttl = (expires_at_us - decision.at_us) / 1_000_000
    is_recorded = token is not None and decision.source != _UNMATCHED
    return HoldAnswer(
        decision=decision,
        id=fields["id"],
        token=token,
        expires_at_us=expires_at_us,
        repeated=repeated,
        reference={"token": token} if is_recorded else None,
        ttl=ttl,
    )


def reference_of(token: str | None, check: Check, id: str | None) -> Reference:
    """Identifies a hold by its token, or by labels or a key and its id."""
    has_subject = check.labels is not None or check.key is not None
    if token is not None and id is None and not has_subject:
        if not isinstance(token, str):
            raise InvalidRequest(f"token is of type {type(token).__name__}: use the token of the hold")
        return {"token": token}
    if token is None and id is not None and has_subject:
        return {**check.subject_to_json(), "id": _valid_id(id)}
    raise InvalidRequest(
        "a hold is identified by its token, or by its id with labels or with key and limit: pass exactly one"
    )


def settle(reference: Reference, cost: Cost) -> HoldAdjustment:
    """Returns the call that replaces the estimate."""
    return HoldAdjustment("settle", {**reference, "cost": cost_to_json(cost)})


def release(reference: Reference) -> HoldAdjustment:
    """Returns the call that refunds the estimate."""
    return HoldAdjustment("release", reference)


def renew(reference: Reference, ttl: float) -> HoldAdjustment:
    """Returns the call that moves the expiry."""
    return HoldAdjustment("renew", {**reference, "ttl_ms": ttl_to_json(ttl)})


def ttl_to_json(ttl: float) -> int:
    """Returns a time to live in milliseconds, rounded up."""
    if not isinstance(ttl, (int, float)) or not MIN_TTL <= ttl <= MAX_TTL:
        raise InvalidRequest(f"ttl {ttl!r} is out of range: use {MIN_TTL} to {MAX_TTL:.0f} seconds")
    return -int(-ttl * 1000 // 1)


def _valid_id(id: object) -> str:
    if not isinstance(id, str):
        raise InvalidRequest(f"id is of type {type(id).__name__}: use a string")
    if not 1 <= len(id.encode(errors="surrogatepass")) <= MAX_ID_BYTES:
        raise InvalidValue(f"id has {len(id.encode(errors='surrogatepass'))} bytes: use 1 to {MAX_ID_BYTES}")
    return id
