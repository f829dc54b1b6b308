"""Name resolution within a deadline: `getaddrinfo` blocks, so a background thread calls it."""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
import time
from concurrent.futures import Future

from sluicegate.fork import reset_after_fork

# How long resolved addresses are used, in seconds.
TIME_TO_LIVE = 30.0
# Maximum number of addresses of one name that are tried.
MAX_ADDRESSES = 8


class Resolver:
    """Resolves one host name. At most one lookup runs at a time, and its callers share the result."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._addresses: tuple[str, ...] = (host,) if _is_address(host) else ()
        self._valid_until = float("inf") if self._addresses else 0.0
        self._lookup: Future[tuple[str, ...]] | None = None
        self._lock = threading.RLock()
        reset_after_fork(self)

    def addresses(self) -> tuple[str, ...] | Future[tuple[str, ...]]:
        """Returns the addresses, or a lookup in progress. Expired addresses are used until a lookup succeeds."""
        if time.monotonic() < self._valid_until:
            return self._addresses
        if sys.is_finalizing():
            # No thread runs any more, and one may have had the lock. Python 3.11 and older would wait for it forever.
            return self._addresses or self._failed("the interpreter shuts down")
        with self._lock:
            lookup = self._lookup
            if lookup is None or lookup.done():
                lookup = self._lookup = Future()
                thread = threading.Thread(target=self._look_up, args=(lookup,), name="sluicegate-resolver", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The process has too many threads, or the interpreter shuts down.
                    lookup.set_exception(self._error(error))
            return self._addresses or lookup

    def prefer(self, address: str) -> None:
        """Moves an address that accepted a connection to the front."""
        with self._lock:
            if self._addresses and self._addresses[0] != address:
                others = (other for other in self._addresses if other != address)
                self._addresses = (address, *others)

    def reset_after_fork(self) -> None:
        """Drops a lookup whose thread does not exist in the child process."""
        self._lock = threading.RLock()
        self._lookup = None

    def _look_up(self, lookup: Future[tuple[str, ...]]) -> None:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            lookup.set_exception(self._error(error))
            return
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))[:MAX_ADDRESSES]
        with self._lock:
            self._addresses = addresses
            self._valid_until = time.monotonic() + TIME_TO_LIVE
        lookup.set_result(addresses)

    def _failed(self, reason: str) -> Future[tuple[str, ...]]:
        lookup: Future[tuple[str, ...]] = Future()
        lookup.set_exception(self._error(reason))
        return lookup

    def _error(self, reason: object) -> OSError:
        return OSError(f"cannot resolve {self._host}: {reason}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
