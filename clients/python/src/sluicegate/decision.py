"""The answer of the server to a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sluicegate.limit_name import name_headers

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tier:
    """The part of one rule in a decision."""

    allowed: bool
    rule: str | None
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float
    never: bool
    unit: str
    shadow: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a request is allowed, and if not, when to retry. Waits are in seconds.

    A decision is true if the request is allowed: `if client.check(…):`.
    """

    allowed: bool
    source: str
    """Where the decision was made: `store`, `memory`, `cache`, `rule`, `unmatched`, `fallback`, `open`, `closed`.

    In Django also `skipped`, if the request was not checked.
    """
    rule: str | None = None
    """The deciding rule."""
    limit: int | None = None
    remaining: int | None = None
    retry_after: float | None = None
    """The time until a retry can succeed; `None` if the request is allowed or no wait is long enough."""
    reset_after: float | None = None
    never: bool = False
    """Whether no wait is long enough: the cost exceeds the limit, or a rule blocks the request."""
    degraded: bool = False
    """Whether a failure policy decided, of the server or of this client."""
    at_us: int | None = None
    """The time of the decision on the store's clock, in microseconds since the epoch."""
    tiers: tuple[Tier, ...] = ()
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    """The rate limit headers for the response, if the check requested them."""
    name: str | None = None
    """The name of the limit, if the check named a limit without a rule. The integrations use its scope."""

    def __bool__(self) -> bool:
        """Returns whether the request is allowed."""
        return self.allowed


# The decision about a request that was not checked.
SKIPPED = Decision(allowed=True, source="skipped")


@dataclass(frozen=True, slots=True)
class Reset:
    """The result of a reset."""

    reset: int
    """Number of deleted counters."""
    counters: tuple[Mapping[str, Any], ...]
    """The rule and the key of each deleted counter."""
    kept: tuple[str, ...]
    """The matching rules that were not reset, because other requests share their counters."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which rules apply to a request, and the calculation of each. The fields are those of the HTTP API."""

    decision: Decision
    applies: tuple[Mapping[str, Any], ...]
    others: tuple[Mapping[str, Any], ...]
    more_others: int


def decision_from_json(fields: Mapping[str, Any], name: str | None = None) -> Decision:
    """Reads a decision, about rules or about the limit with this name.

    Raises `KeyError`, `TypeError` or `AttributeError` for other objects.
    """
    return Decision(
        allowed=fields["allowed"],
        source=fields["source"],
        rule=fields["rule"],
        limit=fields["limit"],
        remaining=fields["remaining"],
        retry_after=_seconds(fields["retry_after_ms"]),
        reset_after=_seconds(fields["reset_after_ms"]),
        never=fields["never"],
        degraded=fields["degraded"],
        at_us=fields["at_us"],
        tiers=tuple(map(_tier_from_json, fields["tiers"])),
        headers=_headers(fields.get("headers"), name),
        name=name,
    )


def reset_from_json(fields: Mapping[str, Any]) -> Reset:
    """Reads the result of a reset."""
    return Reset(reset=fields["reset"], counters=tuple(fields["counters"]), kept=tuple(fields["kept"]))


def explanation_from_json(fields: Mapping[str, Any]) -> Explanation:
    """Reads an explanation."""
    return Explanation(
        decision=decision_from_json(fields["decision"]),
        applies=tuple(fields["applies"]),
        others=tuple(fields["others"]),
        more_others=fields["more_others"],
    )


def _tier_from_json(fields: Mapping[str, Any]) -> Tier:
    return Tier(
        allowed=fields["allowed"],
        rule=fields["rule"],
        limit=fields["limit"],
        remaining=fields["remaining"],
        retry_after=_seconds(fields["retry_after_ms"]),
        reset_after=fields["reset_after_ms"] / 1000,
        never=fields["never"],
        unit=fields["unit"],
        shadow=fields["shadow"],
    )


def _headers(headers: dict[str, str] | None, name: str | None) -> Mapping[str, str]:
    if not headers:
        return NO_HEADERS
    return MappingProxyType(headers if name is None else name_headers(headers, name))


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
