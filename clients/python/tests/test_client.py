"""Both clients against a real server."""

import concurrent.futures
import uuid

import pytest

from conftest import RELAXED, RULES, Sluicegate
from sluicegate import AuthenticationError, Check, Client, Decision, InvalidRequest, InvalidValue, Limit, NotSent


@pytest.fixture
def ip():
    return f"test-{uuid.uuid4()}"


def test_a_check_is_charged_until_the_limit_is_exhausted(connect, shared_server, ip):
    client = connect(shared_server.url)
    remaining = [client.check({"route": "login", "ip": ip}).remaining for _ in range(5)]
    assert remaining == [4, 3, 2, 1, 0]
    denied = client.check({"route": "login", "ip": ip})
    assert not denied
    assert (denied.allowed, denied.rule, denied.limit, denied.source) == (False, "login-per-ip", 5, "memory")
    assert 3500 < denied.retry_after <= 3600
    assert not denied.degraded
    assert [tier.rule for tier in denied.tiers] == ["login-per-ip"]


def test_a_peek_charges_nothing(connect, shared_server, ip):
    client = connect(shared_server.url)
    assert [client.peek({"route": "login", "ip": ip}).allowed for _ in range(8)] == [True] * 8
    assert client.check({"route": "login", "ip": ip}).remaining == 4


def test_a_key_with_its_own_limit_needs_no_rule(connect, shared_server, ip):
    client = connect(shared_server.url)
    limit = Limit(2, "1h", algorithm="sliding-log")
    assert [client.check(key=ip, limit=limit).allowed for _ in range(3)] == [True, True, False]
    assert client.check(key=ip + "other", limit="2/hour").remaining == 1


@pytest.mark.parametrize("fields", [{"zone": "Europe/Berlin"}, {"anchor": 15}, {"anchor": "sunday"}])
def test_only_a_calendar_window_has_a_zone_and_an_anchor(fields):
    Limit(2, "1 month", algorithm="fixed-window", **fields)
    for window, algorithm in [("30d", "fixed-window"), ("1h", "token-bucket"), (None, "concurrency")]:
        with pytest.raises(InvalidRequest, match="needs a calendar window: remove it"):
            Limit(2, window, algorithm=algorithm, **fields)


def test_a_key_can_have_a_calendar_window_and_a_lease(connect, shared_server, ip):
    client = connect(shared_server.url)
    monthly = Limit(2, "1 month", algorithm="fixed-window", zone="Europe/Berlin", anchor=15, lease=1)
    assert [client.check(key=ip, limit=monthly).allowed for _ in range(3)] == [True, True, False]
    assert monthly.window_ms == 31 * 86_400_000
    with pytest.raises(InvalidRequest, match="fixed-window"):
        Limit(2, "1 month")
    with pytest.raises(InvalidRequest, match="zone"):
        client.check(key=ip, limit=Limit(2, "1 month", algorithm="fixed-window", zone="Mars/Olympus"))


def test_a_cost_can_have_units(connect, shared_server, ip):
    client = connect(shared_server.url)
    assert client.check({"tenant": ip}, cost={"requests": 1, "tokens": 850}).remaining == 150
    assert not client.check({"tenant": ip}, cost={"tokens": 151}).allowed
    never = client.check({"tenant": ip}, cost={"tokens": 1001})
    assert (never.allowed, never.never, never.retry_after) == (False, True, None)


def test_charge_refund_and_reset_adjust_a_counter(connect, shared_server, ip):
    client = connect(shared_server.url)
    labels = {"route": "login", "ip": ip}
    first = client.charge(labels, cost=2)
    client.charge(labels, cost=1, rules=["login-per-ip"])
    assert client.peek(labels).remaining == 2
    assert client.refund(labels, cost=2, at_us=first.at_us).remaining == 4
    reset = client.reset(labels)
    assert (reset.reset, reset.kept) == (1, ())
    assert reset.counters[0]["rule"] == "login-per-ip"
    assert client.reset(labels, all_rules=True).reset == 0
    client.charge(key=ip, limit="5/hour", cost=3)
    assert client.reset(key=ip, limit="5/hour").reset == 1


def test_explain_shows_the_calculation(connect, shared_server, ip):
    client = connect(shared_server.url)
    explanation = client.explain({"route": "login", "ip": ip}, cost=6)
    assert explanation.decision.never
    assert explanation.applies[0]["rule"] == "login-per-ip"
    assert any(other["rule"] == "tokens" for other in explanation.others)


def test_many_checks_are_one_call(connect, shared_server, ip):
    client = connect(shared_server.url)
    checks = [Check({"route": "login", "ip": ip})] * 6 + [Check(key=ip, limit="1/hour", cost=2), Check({})]
    results = client.check_many(checks, headers=True)
    assert [result.allowed for result in results] == [True] * 5 + [False, False, True]
    assert results[0].headers["ratelimit"].startswith('"login-per-ip";r=4')
    assert len(client.check_many([Check(key=ip, limit="5000/hour")] * 1000)) == 1000
    assert client.check_many([]) == []
    with pytest.raises(InvalidRequest, match="1001 checks are too many"):
        client.check_many([Check({})] * 1001)


def test_headers_are_those_of_the_server(connect, shared_server, ip):
    client = connect(shared_server.url)
    labels = {"route": "login", "ip": ip}
    assert client.check(labels).headers == {}
    decision = client.check(labels, headers=True)
    assert dict(decision.headers) == {
        "ratelimit": '"login-per-ip";r=3;t=3600',
        "ratelimit-policy": '"login-per-ip";q=5;w=3600',
    }
    denied = client.check(labels, cost=5, headers=True)
    assert int(denied.headers["retry-after"]) >= denied.retry_after


INVALID = [
    ({}, "pass one of both"),
    ({"key": "k"}, "pass one of both"),
    ({"labels": {"a": "b"}, "key": "k", "limit": "1/s"}, "pass one of both"),
    ({"labels": {"a": 1}}, "label 'a' is of type int: use a string"),
    ({"labels": {"a": "x" * 1025}}, "label 'a' has 1025 bytes: use at most 1024"),
    ({"labels": {"a": "é" * 600}}, "1200 bytes"),
    ({"labels": {"a": "\ud800"}}, "not valid Unicode"),
    ({"labels": {"": "b"}}, "label"),
    ({"labels": {"a" * 129: "b"}}, "128"),
    ({"labels": {f"label{n}": "b" for n in range(65)}}, "more than 64 labels"),
    ({"key": "x" * 1025, "limit": "1/s"}, "key has 1025 bytes"),
    ({"key": "k", "limit": "5 requests"}, "is not a rate"),
    ({"key": "k", "limit": "5/minute;100/hour"}, "rules of the server"),
    ({"key": "k", "limit": "5/month"}, "is not a rate"),
    ({"key": "k", "limit": "0/minute"}, "amount 0 is out of range"),
    ({"key": "k", "limit": 5}, "is not a limit"),
    ({"labels": {"a": "b"}, "cost": -1}, "cost is out of range: use an integer from 0 to 9007199254740991"),
    ({"labels": {"a": "b"}, "cost": 1.5}, "cost 1.5 is not an integer"),
    ({"labels": {"a": "b"}, "cost": True}, "cost True is not an integer"),
    ({"labels": {"a": "b"}, "cost": 2**53}, "out of range"),
    ({"labels": {"a": "b"}, "cost": 10**5000}, "out of range"),
    ({"labels": {"a": "b"}, "cost": {"tokens": -1}}, "cost of 'tokens' is out of range"),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_requests_name_the_fix(connect, shared_server, arguments, message):
    with pytest.raises(InvalidRequest, match=message):
        connect(shared_server.url).check(**arguments)


def test_the_largest_cost_of_the_server_is_accepted(connect, shared_server):
    decision = connect(shared_server.url).peek(key="largest-cost", limit="5/minute", cost=2**53 - 1)
    assert not decision.allowed
    assert decision.never


def test_headers_have_the_name_of_a_limit_without_a_rule(connect, shared_server):
    client = connect(shared_server.url)
    check = Check(key=str(uuid.uuid4()), limit="5/minute", name='a "b" ü')
    decision = client.check_with(check, headers=True)
    assert decision.headers["ratelimit-policy"] == r'"a \"b\" ?";q=5;w=60'
    assert decision.headers["ratelimit"].startswith(r'"a \"b\" ?";r=4;t=')
    assert client.check_many([check], headers=True)[0].headers["ratelimit"].startswith(r'"a \"b\" ?";r=3;t=')
    # Rules have names already.
    by_rule = client.check_with(Check(labels={"api_key": "named"}, name="other"), headers=True)
    assert by_rule.headers["ratelimit"].startswith('"per-key";')


def test_unusable_values_have_their_own_exception(connect, shared_server):
    client = connect(shared_server.url)
    for labels, cost in (({"a": "x" * 1025}, 1), ({"a": "\udfff"}, 1), ({}, -1), ({}, 2**53)):
        with pytest.raises(InvalidValue):
            client.check(labels, cost=cost)


def test_the_server_accepts_every_text(connect, shared_server):
    client = connect(shared_server.url)
    for value in ("", "\0", "\r\n\t", '"\\', "é" * 512, "\U0001f600" * 256, "\ufffe"):
        assert client.check({"api_key": value}).remaining is not None
        assert client.check(key=value + "!" if len(value) < 256 else value, limit="5/hour").remaining is not None


def test_an_unknown_rule_is_named_with_the_known_ones(connect, shared_server):
    with pytest.raises(InvalidRequest, match='no rule "nope": use login-per-ip'):
        connect(shared_server.url).charge({"ip": "x"}, rules=["nope"])


def test_a_wrong_token_names_the_fix(connect, processes, tmp_path):
    (tmp_path / "secret").write_text("s3cret\n")
    rules = '[[server.token]]\nname = "app"\nfile = "secret"\nmay = ["check"]\n' + RULES
    server = processes(Sluicegate, tmp_path, rules)
    assert connect(server.url, token="s3cret").check({"api_key": "a"}).remaining == 19
    for token in (None, "wrong"):
        with pytest.raises(AuthenticationError, match="pass a token"):
            connect(server.url, token=token).check({"api_key": "a"})
    with pytest.raises(AuthenticationError, match="scope"):
        connect(server.url, token="s3cret").charge({"api_key": "a"})


SETTINGS = [
    ({"url": "127.0.0.1:8080"}, "use for example http://"),
    ({"url": "redis://127.0.0.1"}, "use for example http://"),
    ({"url": "http://h:99999"}, "invalid port"),
    ({"url": "http://h/v1/check"}, "has a path"),
    ({"url": "http://user:secret@h"}, "pass the token"),
    ({"ca": "ca.crt"}, "use https://"),
    ({"token": "line\n"}, "remove a newline"),
    ({"deadline": 0}, "deadline 0 is out of range"),
    ({"deadline": float("nan")}, "out of range"),
    ({"max_connections": 0}, "max_connections 0"),
    ({"on_failure": "ignore"}, 'use "open", "closed" or LocalBucket'),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=[message for _, message in SETTINGS])
def test_invalid_settings_name_the_fix(connect, settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        connect(**settings)
    assert "secret" not in str(raised.value)


def test_without_a_server_only_calls_without_a_policy_raise(connect):
    client = connect("http://127.0.0.1:1")
    assert client.check({"a": "b"}) == Decision(allowed=True, source="open", degraded=True)
    calls = [client.charge, client.refund, client.reset, client.explain]
    for call in calls:
        with pytest.raises(NotSent, match=r"http://127.0.0.1:1 unavailable"):
            call({"a": "b"})


def test_a_name_is_resolved(connect, shared_server, ip):
    port = shared_server.address.rpartition(":")[2]
    assert connect(f"http://localhost:{port}").check(key=ip, limit="5/hour").remaining == 4


def test_an_unknown_name_applies_the_policy(connect):
    assert connect("http://name.invalid").check({"a": "b"}).source == "open"
    with pytest.raises(NotSent, match=r"resolve name\.invalid"):
        connect("http://name.invalid").charge({"a": "b"})


def test_threads_share_a_client_and_the_limit_holds(shared_server, ip):
    with (
        Client(shared_server.url, deadline=RELAXED, max_connections=4) as client,
        concurrent.futures.ThreadPoolExecutor(16) as threads,
    ):
        decisions = list(threads.map(lambda _: client.check({"route": "login", "ip": ip}), range(200)))
    assert sum(decision.allowed for decision in decisions) == 5
    assert not any(decision.degraded for decision in decisions)
