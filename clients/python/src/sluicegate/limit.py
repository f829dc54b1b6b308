"""Limits that are part of a request, without rules on the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Literal

from sluicegate.errors import InvalidRequest

Algorithm = Literal["token-bucket", "fixed-window", "sliding-log", "sliding-counter", "concurrency"]

_MILLISECONDS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# Periods of the calendar, with the most days of each.
_CALENDAR_DAYS = {"1 day": 1, "1 week": 7, "1 month": 31, "1 quarter": 92, "1 year": 366}
# Words for the units in a rate, in the singular.
_WORDS = {
    "day": "d",
    "hour": "h",
    "min": "m",
    "minute": "m",
    "sec": "s",
    "second": "s",
    "millisecond": "ms",
}
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?")
_RATE = re.compile(
    r"\s*(?P<amount>\d+)\s*(?:/|\bper\b)\s*(?P<count>\d*)\s*"
    rf"(?:(?P<symbol>{'|'.join(_MILLISECONDS)})|(?P<word>{'|'.join(_WORDS)})s?)\s*",
    re.IGNORECASE,
)

# Maximum number of parsed rates that are kept.
_MAX_PARSED = 256


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount per window, for requests that name their own key.

    >>> Limit(100, "1m", algorithm="sliding-log").window_ms
    60000
    """

    amount: int
    #: Not for `concurrency`, which limits requests in flight instead of an amount per window.
    window: str | timedelta | None = None
    algorithm: Algorithm = "token-bucket"
    burst: int | None = None
    #: The time zone of a calendar window (`1 day`, `1 week`, `1 month`, `1 quarter`, `1 year`); UTC if unset.
    zone: str | None = None
    #: The first day of a calendar window: a day of the month, or a weekday for `1 week`.
    anchor: int | str | None = None
    #: How much of the limit the server may charge in advance for a hot key: `1%`, or a number of units.
    lease: str | int | None = None
    #: Whether the estimate of a hold that expires stays charged (`charge`) or is refunded (`release`).
    on_expiry: Literal["charge", "release"] | None = None
    #: How much the actual cost of a hold may exceed its estimate; the capacity if unset.
    max_excess: int | None = None

    def __post_init__(self) -> None:
        """Rejects values that no algorithm accepts."""
        if not _is_count(self.amount):
            raise InvalidRequest(f"amount {self.amount!r} is out of range: use an integer of at least 1")
        if self.burst is not None and not _is_count(self.burst):
            raise InvalidRequest(f"burst {self.burst!r} is out of range: use an integer of at least 1")
        for name, value in (("zone", self.zone), ("anchor", self.anchor)):
            if value is not None and not self._is_calendar:
                raise InvalidRequest(
                    f"{name} {value!r} needs a calendar window: remove it, or use "
                    'algorithm="fixed-window" and a window such as "1 month"'
                )
        if self.algorithm == "concurrency":
            if self.window is not None:
                raise InvalidRequest(f"window {self.window!r}: concurrency has no window: remove it")
            return
        if self.window is None:
            raise InvalidRequest(f'{self.algorithm} needs a window: add one, for example "1m"')
        if self.window_ms < 1:
            raise InvalidRequest(f"window {self.window!r} is out of range: use at least 1 ms")
        if self._is_calendar and self.algorithm != "fixed-window":
            raise InvalidRequest(
                f"window {self.window!r} is a period of the calendar, which {self.algorithm} does not have: "
                'use algorithm="fixed-window", or a window such as "30d"'
            )

    @property
    def window_ms(self) -> int:
        """The window in milliseconds; of a calendar window, its longest period; 0 for `concurrency`."""
        if self.window is None:
            return 0
        if isinstance(self.window, timedelta):
            return self.window // timedelta(milliseconds=1)
        days = _CALENDAR_DAYS.get(self.window)
        return _parse_duration(self.window) if days is None else days * _MILLISECONDS["d"]

    @property
    def _is_calendar(self) -> bool:
        return isinstance(self.window, str) and self.window in _CALENDAR_DAYS

    @property
    def capacity(self) -> int:
        """The units that can be used at once."""
        return self.amount if self.burst is None else self.burst

    @staticmethod
    def parse(text: str) -> Limit:
        """Parses a rate such as `100/minute`, `5 per 10 seconds` or `10/5m`, as a token bucket.

        >>> Limit.parse("100/minute")
        Limit(amount=100, window='60000ms', algorithm='token-bucket', burst=None, zone=None, anchor=None, ...)
        """
        return _parse_rate(text)

    def to_json(self) -> dict[str, object]:
        """Returns the limit as the server expects it."""
        fields: dict[str, object] = {"algorithm": self.algorithm, "amount": self.amount}
        if self.window is not None:
            fields["window"] = self.window if self._is_calendar else f"{self.window_ms}ms"
        optional = {
            "burst": self.burst,
            "zone": self.zone,
            "anchor": self.anchor,
            "lease": self.lease,
            "on_expiry": self.on_expiry,
            "max_excess": self.max_excess,
        }
        fields.update((name, value) for name, value in optional.items() if value is not None)
        return fields


def to_limit(limit: Limit | str) -> Limit:
    """Returns a limit, parsed if it is text."""
    if isinstance(limit, Limit):
        return limit
    if isinstance(limit, str):
        return _parse_rate(limit)
    raise InvalidRequest(f'limit {limit!r} is not a limit: use text such as "100/minute", or Limit(…)')


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _parse_duration(text: object) -> int:
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if not text or found is None:
        raise InvalidRequest(
            f"window {text!r} is not a duration: use a timedelta, or whole numbers with d, h, m, s or ms, "
            'for example "1h30m" or "250ms", or a period of the calendar such as "1 month"'
        )
    counts = zip(found.groups(), _MILLISECONDS.values(), strict=True)
    return sum(int(count) * milliseconds for count, milliseconds in counts if count)


@lru_cache(maxsize=_MAX_PARSED)
def _parse_rate(text: str) -> Limit:
    found = _RATE.fullmatch(text)
    if found is None:
        if ";" in text or "," in text:
            raise InvalidRequest(
                f"limit {text!r} has several limits: write them as rules of the server, which charges all or none"
            )
        raise InvalidRequest(
            f"limit {text!r} is not a rate: use an amount per ms, second, minute, hour or day, "
            'for example "100/minute" or "5 per 10 seconds"'
        )
    symbol = found["symbol"] or _WORDS[found["word"].lower()]
    milliseconds = int(found["count"] or 1) * _MILLISECONDS[symbol.lower()]
    return Limit(int(found["amount"]), f"{milliseconds}ms")
