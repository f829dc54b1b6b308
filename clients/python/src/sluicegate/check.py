"""The request: labels or a key with a limit, and a cost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sluicegate.errors import InvalidRequest, InvalidValue
from sluicegate.limit import Limit, to_limit

Cost = int | Mapping[str, int]

# Bounds of the server, checked here because values often come from the application's own clients.
MAX_VALUE_BYTES = 1024
MAX_COST = 2**53 - 1
_UNIT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Check:
    """One request: either labels, for which the server's rules decide, or a key with its own limit."""

    labels: Mapping[str, str] | None = None
    key: str | None = None
    limit: Limit | str | None = None
    cost: Cost = 1
    name: str | None = None
    """The name of the limit of a key, in the rate limit headers and in the response to a denied request."""

    @property
    def limit_name(self) -> str | None:
        """The name of the limit; `None` for labels, because rules have names."""
        return None if self.key is None else self.name

    def subject_to_json(self) -> dict[str, object]:
        """Returns the labels, or the key and its limit, as the server expects them."""
        if self.labels is not None and self.key is None and self.limit is None:
            for name, value in self.labels.items():
                _require_text(f"label {name!r}", value)
            return {"labels": dict(self.labels)}
        if self.labels is None and self.key is not None and self.limit is not None:
            _require_text("key", self.key)
            return {"key": self.key, "limit": to_limit(self.limit).to_json()}
        raise InvalidRequest("a request has either labels, or a key and a limit: pass one of both")

    def to_json(self) -> dict[str, object]:
        """Returns the request as the server expects it."""
        fields = self.subject_to_json()
        fields["cost"] = cost_to_json(self.cost)
        return fields


def cost_to_json(cost: Cost) -> object:
    """Returns the cost as the server expects it."""
    if isinstance(cost, Mapping):
        return {_require_unit(unit): _require_units(f"cost of {unit!r}", units) for unit, units in cost.items()}
    return _require_units("cost", cost)


def encode(fields: Mapping[str, object]) -> bytes:
    """Encodes a request body."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("a label or key is not valid Unicode: replace its lone surrogates") from error


def _require_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} is of type {type(value).__name__}: use a string")
    # A character has at most 4 bytes.
    if len(value) > MAX_VALUE_BYTES // 4:
        length = len(value.encode(errors="surrogatepass"))
        if length > MAX_VALUE_BYTES:
            raise InvalidValue(f"{what} has {length} bytes: use at most {MAX_VALUE_BYTES}, or a hash of it")


def _require_unit(unit: object) -> str:
    if not isinstance(unit, str) or _UNIT.fullmatch(unit) is None:
        raise InvalidRequest(f"unit {unit!r} is invalid: use 1 to 64 letters, digits, '-', '_' or '.'")
    return unit


def _require_units(what: str, units: object) -> int:
    if not isinstance(units, int) or isinstance(units, bool):
        raise InvalidRequest(f"{what} {units!r} is not an integer: use an integer from 0 to {MAX_COST}")
    if not 0 <= units <= MAX_COST:
        raise InvalidValue(f"{what} is out of range: use an integer from 0 to {MAX_COST}")
    return units
