"""The answer of the server to settling, releasing or renewing a hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SettledTier:
    """The outcome for the counter of one rule."""

    rule: str | None
    unit: str
    outcome: str
    charged: int | None
    """The units that the hold has charged in total; `None` if the hold is unknown."""
    remaining: int | None
    """The units that are available now; `None` if nothing changed."""
    expires_at_us: int | None
    """When the hold expires on the store's clock, in microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """The outcome of settling, releasing or renewing a hold."""

    outcome: str
    """The worst of the outcomes of all counters, from the best: `settled`, `released`, `renewed`, `already`, `late`,
    `queued`, `unknown`.

    `already`: the hold was settled or released before, and nothing changed. `late`: the hold had expired; settling
    charged the actual cost once. `queued`: the server or its store did not answer, and the call is repeated in the
    background. `unknown`: there is no such hold, and nothing changed.
    """
    tiers: tuple[SettledTier, ...] = ()


QUEUED = Settlement("queued")


def settlement_from_json(fields: Mapping[str, Any]) -> Settlement:
    """Reads a settlement. Raises `KeyError`, `TypeError` or `AttributeError` for other objects."""
    return Settlement(fields["outcome"], tuple(map(_tier_from_json, fields["tiers"])))


def _tier_from_json(fields: Mapping[str, Any]) -> SettledTier:
    return SettledTier(
        rule=fields["rule"],
        unit=fields["unit"],
        outcome=fields["outcome"],
        charged=fields.get("charged"),
        remaining=fields.get("remaining"),
        expires_at_us=fields.get("expires_at_us"),
    )
