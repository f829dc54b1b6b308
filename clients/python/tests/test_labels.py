"""Labels and keys from requests."""

import pytest

from sluicegate import InvalidRequest, InvalidValue, client_ip, header, method, path, route
from sluicegate.client_address import parse_hop
from sluicegate.request_check import RequestCheck
from sluicegate.request_view import AsgiRequest, WsgiRequest

TRUSTED = client_ip.behind("10.0.0.0/8", "2001:db8:ffff::/48", "192.0.2.1")


def asgi(peer="198.51.100.4", path="/", **headers):
    lines = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, values in headers.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    client = None if peer is None else (peer, 1234)
    return AsgiRequest({"type": "http", "method": "GET", "path": path, "client": client, "headers": lines})


def wsgi(peer="198.51.100.4", path="/", **headers):
    lines = {f"HTTP_{name.upper()}": ",".join([v] if isinstance(v, str) else v) for name, v in headers.items()}
    return WsgiRequest({"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": peer or "", **lines})


ADDRESSES = [
    ("198.51.100.4", "203.0.113.9", "198.51.100.4"),
    ("10.0.0.1", [], "10.0.0.1"),
    ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
    ("10.0.0.1", "192.0.2.7, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
    ("10.0.0.1", ["192.0.2.7", "203.0.113.9,10.1.2.3"], "203.0.113.9"),
    ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
    ("10.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
    ("10.0.0.1", "2001:db8::7", "2001:db8::7"),
    ("10.0.0.1", "::ffff:203.0.113.9", "203.0.113.9"),
    ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
    ("2001:db8:ffff::1", "203.0.113.9", "203.0.113.9"),
    ("10.0.0.1", "203.0.113.9, unknown, 10.1.2.3", "10.1.2.3"),
    ("10.0.0.1", "203.0.113.9, garbage", "10.0.0.1"),
    ("10.0.0.1", "", "10.0.0.1"),
    ("10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"),
    ("10.0.0.1", "203.0.113.9:x", "10.0.0.1"),
    ("10.0.0.1", ", ".join(["10.0.0.2"] * 1000), "10.0.0.2"),
    ("10.0.0.1", "[2001:db8::7", "10.0.0.1"),
    ("10.0.0.1", "[203.0.113.9]", "10.0.0.1"),
    ("10.0.0.1", "[2001:db8::7]x", "10.0.0.1"),
    ("10.0.0.1", "203.0.113.9%eth0", "10.0.0.1"),
    ("10.0.0.1", "203.0.113.9:\u00b9", "10.0.0.1"),
    ("10.0.0.1", "203.0.113.9:65536", "10.0.0.1"),
    ("10.0.0.1", "fe80::7%eth0", "fe80::7"),
    ("testclient", "203.0.113.9", "testclient"),
    ("fe80::1%eth0", [], "fe80::1"),
]


@pytest.mark.parametrize("make", [asgi, wsgi])
@pytest.mark.parametrize(("peer", "forwarded", "expected"), ADDRESSES)
def test_the_client_is_the_nearest_hop_that_is_not_a_trusted_proxy(make, peer, forwarded, expected):
    headers = {"x_forwarded_for": forwarded} if forwarded else {}
    assert TRUSTED.label(make(peer, **headers)) == expected


@pytest.mark.parametrize("make", [asgi, wsgi])
def test_without_trusted_proxies_the_peer_is_the_client(make):
    assert client_ip.label(make("10.0.0.1", x_forwarded_for="203.0.113.9")) == "10.0.0.1"


@pytest.mark.parametrize("make", [asgi, wsgi])
def test_a_unix_socket_needs_a_proxy_that_is_trusted(make):
    behind = client_ip.behind("unix", "10.0.0.0/8")
    assert behind.label(make(None, x_forwarded_for="192.0.2.7, 203.0.113.9")) == "203.0.113.9"
    assert behind.label(make(None, x_forwarded_for="203.0.113.9, 10.0.0.1")) == "203.0.113.9"
    assert behind.label(make(None, x_forwarded_for="192.0.2.7, 203.0.113.9:4711")) == "203.0.113.9"
    with pytest.raises(InvalidRequest, match="let the proxy set X-Forwarded-For"):
        behind.label(make(None))
    with pytest.raises(InvalidRequest, match=r'client_ip.behind\("unix"\)'):
        client_ip.label(make(None, x_forwarded_for="203.0.113.9"))


def test_a_key_has_the_network_of_an_ipv6_address():
    check = RequestCheck(limit="1/s", key=client_ip, scope="s")
    keys = {check.build(None, asgi(f"2001:db8:0:1::{number}")).key for number in range(1, 5)}
    assert keys == {"s:2001:db8:0:1::"}
    assert check.build(None, asgi("203.0.113.9")).key == "s:203.0.113.9"


def test_an_invalid_network_is_rejected():
    with pytest.raises(ValueError, match="use a network"):
        client_ip.behind("10.0.0.1/8")


def test_headers_are_case_insensitive_and_unambiguous():
    assert header("X-API-Key").label(asgi(x_api_key="k")) == "k"
    assert header("x-api-key").label(wsgi(x_api_key="k")) == "k"
    assert header("x-api-key").label(asgi()) is None
    with pytest.raises(InvalidValue, match="x-api-key is repeated: send it once"):
        header("x-api-key").label(asgi(x_api_key=["a", "b"]))


def test_paths_are_valid_and_bounded_text():
    assert path.label(asgi(path="/" + "é" * 1000)) == "/" + "é" * 511
    assert path.label(asgi(path="/\udc80")) == "/?"
    assert path.label(wsgi(path="/caf\u00c3\u00a9")) == "/café"
    assert method.label(asgi()) == "GET"
    assert route.label(asgi()) is None


def test_labels_can_be_constants_sources_and_functions():
    labels = {"route": "login", "ip": client_ip, "user": lambda request: 42, "none": lambda request: None}
    check = RequestCheck(labels=labels).build(None, asgi())
    assert check.labels == {"route": "login", "ip": "198.51.100.4", "user": "42"}
    assert RequestCheck(labels=lambda request: {"a": request}).build("x", asgi()).labels == {"a": "x"}


def test_different_scopes_and_values_never_share_a_key():
    def key(scope, value):
        return RequestCheck(limit="1/s", key=lambda request: value, scope=scope).build(None, asgi()).key

    pairs = [("a", "b:c"), ("a:b", "c"), ("a", None), ("a", ""), ("a:", ""), ("a%3A", ""), ("", "a"), ("a", "b")]
    assert len({key(*pair) for pair in pairs}) == len(pairs)


def test_a_skipped_request_has_no_check():
    assert RequestCheck(limit="1/s", skip=lambda request: True).build(None, asgi()) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"labels": {}, "limit": "1/s"},
        {"limit": "often"},
        {"limit": "1/s", "cost": -1},
        {"limit": "1/s", "cost": "1"},
        {"limit": "1/s", "cost": {"requests": 1}},
        {"labels": {}, "cost": {"a b": 1}},
        {"limit": "1/s", "key": ["ada"]},
        {"labels": {"user": 1.5}},
    ],
)
def test_mistakes_are_reported_when_the_application_starts(arguments):
    with pytest.raises(InvalidRequest):
        RequestCheck(**arguments)


@pytest.mark.parametrize("value", [["ada"], {"a": "b"}, True, 1.5, b"ada"])
def test_a_key_or_label_of_the_wrong_type_is_an_invalid_value(value):
    for arguments in (
        {"limit": "1/s", "key": lambda request: value},
        {"labels": {"user": lambda request: value}},
        {"labels": lambda request: {"user": value}},
    ):
        with pytest.raises(InvalidValue, match="use a string, an integer or None"):
            RequestCheck(**arguments).build(None, asgi())


@pytest.mark.parametrize("cost", ["1", None, 1.0, True, [1], {"tokens": "5"}, -1])
def test_a_cost_of_the_wrong_type_is_an_invalid_value(cost):
    with pytest.raises(InvalidValue, match="use an integer from 0"):
        RequestCheck(labels={}, cost=lambda request: cost).build(None, asgi())


def test_a_port_has_only_ascii_digits():
    # Not in a table of requests, because these digits are not Latin-1.
    assert parse_hop("203.0.113.9:\u0661\u0662") is None
    assert str(parse_hop("203.0.113.9:12")) == "203.0.113.9"


def test_costs_per_unit_need_rules():
    units = {"requests": 1, "tokens": 850}
    assert RequestCheck(labels={}, cost=lambda request: units).build(None, asgi()).cost == units
    # The server rejects both, and a policy `open` would let the request pass.
    with pytest.raises(InvalidValue, match="cost of a limit has units"):
        RequestCheck(limit="1/s", key="k", cost=lambda request: units).build(None, asgi())
    with pytest.raises(InvalidValue, match="unit 'a b' is invalid"):
        RequestCheck(labels={}, cost=lambda request: {"a b": 1}).build(None, asgi())
