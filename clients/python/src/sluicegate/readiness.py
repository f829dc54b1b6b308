"""Detects connections that the server closed while they were idle."""

from __future__ import annotations

import select


def is_readable(descriptor: int) -> bool:
    """Returns whether a socket has bytes to read or was closed by its peer. Does not block."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([descriptor], [], [], 0)[0])
