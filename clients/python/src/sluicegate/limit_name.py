"""The names of limits without a rule. The server names all of them `default`."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The name that the server uses.
UNNAMED = "default"

# A check of a key has one limit, so that each header has one member.
_UNNAMED_MEMBER = re.compile(rf'"{UNNAMED}"(?=;|$)')
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


def name_headers(headers: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns rate limit headers with the name of the limit, in the dialects that have names."""
    return {header: _named(header, value, name) for header, value in headers.items()}


def _named(header: str, value: str, name: str) -> str:
    if header in ("ratelimit", "ratelimit-policy"):
        member = _UNNAMED_MEMBER.match(value)
        return value if member is None else f"{_quoted(name)}{value[member.end() :]}"
    return _printable(name) if header == "x-ratelimit-resource" and value == UNNAMED else value


def _quoted(name: str) -> str:
    """Returns a string of structured fields (RFC 9651)."""
    escaped = _printable(name).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _printable(name: str) -> str:
    """Replaces characters that a header cannot have, as the server does for rules."""
    return _NOT_PRINTABLE.sub("?", name)
