"""Failure policies, circuit breaker and log, with a clock that the tests control."""

import logging

import pytest

from sluicegate import Check, Limit, LocalBucket
from sluicegate.circuit_breaker import FAILURES_TO_OPEN, MAX_BACKOFF, CircuitBreaker
from sluicegate.errors import InvalidRequest
from sluicegate.message_log import INTERVAL, MAX_MESSAGES, MessageLog


class Clock:
    """A clock in seconds."""

    def __init__(self, now=1000.0):
        self.now = now

    def ns(self):
        return int(self.now * 1e9)


@pytest.fixture
def clock():
    return Clock()


def decide(bucket, labels=None, charge=True, **fields):
    return bucket.decide(Check(labels or ({} if "key" not in fields else None), **fields), charge=charge)


def test_a_bucket_admits_its_amount_and_then_one_per_interval(clock):
    bucket = LocalBucket("4/minute", clock_ns=clock.ns)
    assert [decide(bucket).remaining for _ in range(4)] == [3, 2, 1, 0]
    denied = decide(bucket)
    assert (denied.allowed, denied.source, denied.degraded, denied.retry_after) == (False, "fallback", True, 15.0)
    assert dict(denied.headers) == {"retry-after": "15"}
    clock.now += 14.999
    assert decide(bucket).allowed is False
    clock.now += 0.001
    assert [decide(bucket).allowed, decide(bucket).allowed] == [True, False]
    clock.now += 3600
    assert [decide(bucket).allowed for _ in range(5)] == [True] * 4 + [False]


def test_a_denial_and_a_peek_charge_nothing(clock):
    bucket = LocalBucket("2/minute", clock_ns=clock.ns)
    assert all(decide(bucket, charge=False).remaining == 2 for _ in range(5))
    assert decide(bucket, cost=2).allowed
    before = decide(bucket).retry_after
    for _ in range(100):
        decide(bucket)
    assert decide(bucket).retry_after == before


def test_a_cost_above_the_capacity_is_never_allowed(clock):
    decision = decide(LocalBucket("2/minute", clock_ns=clock.ns), cost=3)
    assert (decision.allowed, decision.never, decision.retry_after) == (False, True, None)


def test_labels_and_keys_have_their_own_buckets(clock):
    bucket = LocalBucket("1/minute", per=["ip"], clock_ns=clock.ns)
    assert decide(bucket, {"ip": "a", "path": "/1"}).allowed
    assert not decide(bucket, {"ip": "a", "path": "/2"}).allowed
    assert decide(bucket, {"ip": "b", "path": "/1"}).allowed
    # A request with its own limit uses that one.
    assert [decide(bucket, key="k", limit="2/hour").allowed for _ in range(3)] == [True, True, False]


def test_processes_share_a_limit(clock):
    bucket = LocalBucket(Limit(10, "1m", burst=20), processes=4, clock_ns=clock.ns)
    assert sum(decide(bucket).allowed for _ in range(30)) == 5
    assert decide(LocalBucket("1/minute", processes=4, clock_ns=clock.ns)).allowed


def test_units_other_than_requests_count_as_one_request(clock):
    bucket = LocalBucket("2/minute", clock_ns=clock.ns)
    assert [decide(bucket, cost={"tokens": 5000}).allowed for _ in range(3)] == [True, True, False]


def test_a_flood_of_keys_frees_no_exhausted_key_and_uses_bounded_memory(clock):
    bucket = LocalBucket("1/minute", max_keys=100, clock_ns=clock.ns)
    assert decide(bucket, {"ip": "attacker"}).allowed
    admitted = sum(decide(bucket, {"ip": f"random-{n}"}).allowed for n in range(10_000))
    assert admitted == 99 + 1, "further keys share one bucket"
    assert not decide(bucket, {"ip": "attacker"}).allowed
    assert len(bucket._full_at) <= 101
    clock.now += 61
    assert decide(bucket, {"ip": "new"}).allowed
    assert len(bucket._full_at) < 5


@pytest.mark.parametrize("arguments", [{"limit": "x"}, {"limit": "1/s", "per": "ip"}, {"limit": "1/s", "processes": 0}])
def test_invalid_buckets_are_rejected(arguments):
    with pytest.raises(ValueError):
        LocalBucket(**arguments)


@pytest.mark.parametrize(
    "check",
    [
        Check(key="k", limit="often"),
        Check(key="k", limit=5),
        Check(key=["k"], limit="1/s"),
        Check({"ip": ["a"]}),
        Check({}, cost="1"),
        Check({}, cost=None),
        Check({}, cost={"requests": "1"}),
        Check({}, cost=-1),
    ],
)
def test_a_bucket_decides_also_about_a_check_that_could_not_be_encoded(clock, check):
    bucket = LocalBucket("1/minute", clock_ns=clock.ns)
    admitted = [bucket.decide(check, charge=True).allowed for _ in range(3)]
    assert admitted == [True, False, False]


def test_the_breaker_admits_one_probe_per_backoff(monkeypatch, clock):
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    breaker = CircuitBreaker()
    opened = [breaker.failed() for _ in range(FAILURES_TO_OPEN + 2)]
    assert opened == [False] * (FAILURES_TO_OPEN - 1) + [True, False, False]
    assert not breaker.admits()
    for _ in range(10):
        # Also if the outcome of a probe is never reported.
        clock.now += MAX_BACKOFF
        assert [breaker.admits() for _ in range(3)] == [True, False, False]
    clock.now += MAX_BACKOFF
    assert breaker.admits()
    assert breaker.succeeded()
    assert all(breaker.admits() for _ in range(3))
    assert not breaker.failed(), "one failure does not open it again"


def test_a_success_between_failures_keeps_the_breaker_closed():
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.failed()
        breaker.succeeded()
        breaker.failed()
        assert breaker.admits()
        breaker.succeeded()


def test_a_message_is_logged_once_per_interval(monkeypatch, clock, caplog):
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    log = MessageLog(logging.getLogger("sluicegate.test"))
    for _ in range(5):
        log.error("one")
    for number in range(1000):
        log.error(f"different {number}")
    assert [record.message for record in caplog.records].count("one") == 1
    assert len(caplog.records) == MAX_MESSAGES
    clock.now += INTERVAL
    log.error("one")
    assert len(caplog.records) == MAX_MESSAGES + 1


@pytest.mark.parametrize(
    ("text", "amount", "window_ms"),
    [
        ("100/minute", 100, 60_000),
        ("5 per second", 5, 1_000),
        ("10/5minutes", 10, 300_000),
        ("10 per 2 hours", 10, 7_200_000),
        ("5/m", 5, 60_000),
        ("100/h", 100, 3_600_000),
        ("1/DAY", 1, 86_400_000),
        ("7/30s", 7, 30_000),
        ("10/250ms", 10, 250),
        ("10 per 5 milliseconds", 10, 5),
        ("10/MS", 10, 1),
        ("3 per 2 mins", 3, 120_000),
    ],
)
def test_rates_of_other_limiters_are_parsed(text, amount, window_ms):
    limit = Limit.parse(text)
    assert (limit.amount, limit.window_ms) == (amount, window_ms)


@pytest.mark.parametrize("text", ["10/ss", "10/5hs", "10/ds", "10/mss", "10/mins s", "10/month"])
def test_rates_with_unknown_units_are_rejected(text):
    with pytest.raises(InvalidRequest, match="not a rate"):
        Limit.parse(text)


@pytest.mark.parametrize("window", ["", "1w", "5", "-1s", "1s1h", "0s", None])
def test_invalid_windows_are_rejected(window):
    with pytest.raises(InvalidRequest, match="window"):
        Limit(1, window)
