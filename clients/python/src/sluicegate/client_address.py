"""The client's address: the peer of the connection, or the address that trusted proxies report.

Any client can send `X-Forwarded-For`, so it is ignored unless the connection comes from a trusted proxy. Each proxy
appends the address it received the request from, so the hops are read from right to left up to the first that is not a
trusted proxy: this is the client. Reading also stops at a hop that is not an address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Maximum number of hops that are followed; a longer chain of trusted proxies is a loop.
MAX_HOPS = 32
# Number of leading IPv6 bits that identify a client in a key.
IPV6_PREFIX = 64


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parses networks such as `10.0.0.0/8` and single addresses."""
    networks = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ValueError(f"{error}: use a network such as 10.0.0.0/8, or an address") from error
    return tuple(networks)


def client_address(peer: Address, forwarded: Sequence[str], trusted: tuple[Network, ...]) -> Address:
    """Returns the client's address. `forwarded` are the lines of X-Forwarded-For."""
    client = peer
    hops = ",".join(forwarded).split(",") if forwarded else []
    for hop in reversed(hops[-MAX_HOPS:]):
        if not _is_trusted(client, trusted):
            break
        address = parse_hop(hop)
        if address is None:
            break
        client = address
    return client


def parse_hop(hop: str) -> Address | None:
    """Parses an address with optional port and brackets."""
    text = hop.strip(" \t")
    if text.startswith("["):
        text, bracket, port = text[1:].partition("]")
        if not bracket or ":" not in text or not (port == "" or (port[0] == ":" and _is_port(port[1:]))):
            return None
    elif text.count(":") == 1:
        text, _, port = text.partition(":")
        if not _is_port(port):
            return None
    return parse_address(text)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65535


def parse_address(text: str) -> Address | None:
    """Parses an address. An IPv4 address in IPv6 notation becomes IPv4, and a zone is removed."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))
    return address


def counted(address: Address) -> str:
    """Returns the text that identifies a client in a key: the address, or the network of an IPv6 address."""
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False).network_address)
    return str(address)


def _is_trusted(address: Address, trusted: tuple[Network, ...]) -> bool:
    return any(address in network for network in trusted)
