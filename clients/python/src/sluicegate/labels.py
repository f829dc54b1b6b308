"""Ready-made label values for all integrations: `client_ip`, `header(…)`, `path`, `method` and `route`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from sluicegate.check import MAX_VALUE_BYTES
from sluicegate.client_address import (
    Network,
    client_address,
    counted,
    parse_address,
    parse_hop,
    parse_networks,
)
from sluicegate.errors import InvalidRequest, InvalidValue
from sluicegate.request_view import RequestView


class LabelSource(ABC):
    """A value that is read from each request."""

    @abstractmethod
    def label(self, request: RequestView) -> str | None:
        """Returns the value of a label; `None` if the request has none."""

    def key_part(self, request: RequestView) -> str | None:
        """Returns the value as part of a key, which the server does not normalize."""
        return self.label(request)


class ClientIp(LabelSource):
    """The address of the client. Behind proxies, use `client_ip.behind(…)`."""

    def __init__(self, trusted: tuple[Network, ...] = (), *, trusts_unix_socket: bool = False) -> None:
        self._trusted = trusted
        self._trusts_unix_socket = trusts_unix_socket

    def behind(self, *proxies: str) -> ClientIp:
        """Trusts `X-Forwarded-For` of these proxies: networks, addresses, or `unix` for a Unix socket."""
        networks = parse_networks(proxy for proxy in proxies if proxy != "unix")
        return ClientIp(networks, trusts_unix_socket="unix" in proxies)

    def label(self, request: RequestView) -> str:
        """Returns the address in its canonical form. The server truncates IPv6 addresses to a network."""
        return self._text(request, str)

    def key_part(self, request: RequestView) -> str:
        """Returns the address, or the /64 network of an IPv6 address."""
        return self._text(request, counted)

    def _text(self, request: RequestView, to_text: Callable[..., str]) -> str:
        peer = request.peer
        forwarded = request.header_lines("x-forwarded-for") if self._trusted or self._trusts_unix_socket else []
        if peer is None:
            return self._behind_unix_socket(forwarded, to_text)
        address = parse_address(peer)
        if address is None:
            # A test client, which has a name instead of an address.
            return peer
        return to_text(client_address(address, forwarded, self._trusted))

    def _behind_unix_socket(self, forwarded: list[str], to_text: Callable[..., str]) -> str:
        if not self._trusts_unix_socket:
            raise InvalidRequest(
                "the address of the client is unknown: if a proxy connects through a Unix socket, "
                'use client_ip.behind("unix")'
            )
        others, _, last = ",".join(forwarded).rpartition(",")
        nearest = parse_hop(last)
        if nearest is None:
            raise InvalidRequest("the address of the client is unknown: let the proxy set X-Forwarded-For")
        return to_text(client_address(nearest, [others], self._trusted))


class Header(LabelSource):
    """A header of the request."""

    def __init__(self, name: str) -> None:
        self._name = name.lower()

    def label(self, request: RequestView) -> str | None:
        """Returns the value of the header. A repeated header is invalid, because its meaning is ambiguous."""
        lines = request.header_lines(self._name)
        if len(lines) > 1:
            raise InvalidValue(f"header {self._name} is repeated: send it once")
        return lines[0] if lines else None


class RequestPart(LabelSource):
    """A part of the request line. Values of more than 1 KiB are truncated and share a counter."""

    def __init__(self, read: Callable[[RequestView], str | None]) -> None:
        self._read = read

    def label(self, request: RequestView) -> str | None:
        """Returns the value as valid text."""
        value = self._read(request)
        if value is None:
            return None
        return value.encode(errors="replace")[:MAX_VALUE_BYTES].decode(errors="ignore")


def header(name: str) -> Header:
    """Returns the source of a header's value, for example `header("x-api-key")`."""
    return Header(name)


client_ip = ClientIp()
method = RequestPart(lambda request: request.method)
path = RequestPart(lambda request: request.path)
route = RequestPart(lambda request: request.route)
