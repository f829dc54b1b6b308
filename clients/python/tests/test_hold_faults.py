"""Holds while the server loses connections, is late or is unavailable."""

import asyncio
import json
import logging
import threading
import time

import pytest

from conftest import ALLOWED, RELAXED, http_response, wait_until
from sluicegate import AsyncClient, Client, HoldConflict, InvalidRequest, InvalidValue, Limit, LocalBucket, Unavailable

DEADLINE = 0.2
LABELS = {"tenant": "acme"}

DECIDED = json.loads(ALLOWED)
DENIED = {**DECIDED, "allowed": False, "retry_after_ms": 1000}


class HoldServer:
    """Answers the calls of holds, except the requests with the numbers in `lose`, and with a 503 those in `fail`."""

    def __init__(self, decision=DECIDED, ttl_ms=60_000, lose=(), fail=()):
        self.decision = decision
        self.ttl_ms = ttl_ms
        self.lose = lose
        self.fail = fail

    def __call__(self, server, connection):
        while (request := server.read_request(connection)) is not None:
            number, path = len(server.requests), server.paths[-1]
            if number in self.lose:
                connection.close()
                return
            if number in self.fail:
                connection.sendall(http_response(b'{"status":503,"detail":"store"}', "503 Service Unavailable"))
                continue
            connection.sendall(http_response(json.dumps(self.answer(path, request)).encode()))

    def answer(self, path, request):
        if path == "/v1/check":
            return self.decision
        if path != "/v1/hold":
            outcome = {"/v1/settle": "settled", "/v1/release": "released", "/v1/renew": "renewed"}[path]
            tier = {"rule": "tokens", "unit": "tokens", "outcome": outcome, "charged": 5, "remaining": 3}
            return {"outcome": outcome, "tiers": [{**tier, "expires_at_us": 7}]}
        answer = {**self.decision, "id": request["id"], "repeated": False}
        if self.decision["allowed"]:
            ttl_ms = request.get("ttl_ms", self.ttl_ms)
            answer |= {"token": "t0ken", "expires_at_us": self.decision["at_us"] + ttl_ms * 1000}
        return answer


def calls(server):
    """The paths of all requests, and their cost."""
    return [
        (path.removeprefix("/v1/"), request.get("cost"))
        for path, request in zip(server.paths, server.requests, strict=True)
    ]


def test_a_block_settles_what_the_application_settled(connect, fake):
    server = fake(HoldServer())
    with connect(server.url).hold(LABELS, cost={"tokens": 500}, ttl=1.5) as hold:
        assert (bool(hold), hold.allowed, hold.token, hold.repeated) == (True, True, "t0ken", False)
        assert hold.expires_at_us == 1_500_001
        settlement = hold.settle({"tokens": 120})
        assert (settlement.outcome, settlement.tiers[0].charged) == ("settled", 5)
    assert calls(server) == [("hold", {"tokens": 500}), ("settle", {"tokens": 120})]
    held, settled = server.requests
    assert (held["ttl_ms"], held["id"], len(held["id"])) == (1500, hold.id, 32)
    assert settled["token"] == "t0ken"


def test_a_block_without_settlement_settles_the_estimate(connect, fake):
    server = fake(HoldServer())
    with connect(server.url).hold(LABELS, cost={"tokens": 500}):
        pass
    assert calls(server) == [("hold", {"tokens": 500}), ("settle", {"tokens": 500})]


def test_an_exception_releases_the_hold(connect, fake):
    server = fake(HoldServer())
    with pytest.raises(RuntimeError), connect(server.url).hold(LABELS):
        raise RuntimeError
    assert calls(server) == [("hold", 1), ("release", None)]


def fail_after(hold, tokens):
    for used in range(tokens + 1):
        hold.actual_cost = {"tokens": used}
    raise RuntimeError


def test_an_exception_settles_the_actual_cost_if_it_is_set(connect, fake):
    server = fake(HoldServer())
    with pytest.raises(RuntimeError), connect(server.url).hold(LABELS) as hold:
        fail_after(hold, 4)
    assert calls(server)[1:] == [("settle", {"tokens": 4})]


def test_a_settlement_with_an_invalid_cost_keeps_the_estimate(connect, fake):
    server = fake(HoldServer())
    with pytest.raises(InvalidValue, match="cost of 'tokens'"), connect(server.url).hold(LABELS, cost=9) as hold:
        hold.settle({"tokens": -1})
    assert calls(server)[1:] == [("settle", 9)]


def test_a_released_hold_is_not_settled_by_its_block(connect, fake):
    server = fake(HoldServer())
    with connect(server.url).hold(LABELS) as hold:
        assert hold.release().outcome == "released"
    assert calls(server) == [("hold", 1), ("release", None)]


def test_nothing_is_settled_for_a_denied_hold(connect, fake):
    server = fake(HoldServer(DENIED))
    with connect(server.url).hold(LABELS) as hold:
        assert (bool(hold), hold.allowed, hold.token, hold.decision.retry_after) == (False, False, None, 1.0)
        assert (hold.settle(2).outcome, hold.renew(5).outcome) == ("settled", "renewed")
    assert calls(server) == [("hold", 1)]


def test_nothing_is_settled_if_no_rule_matches(connect, fake):
    server = fake(HoldServer({**DECIDED, "source": "unmatched"}))
    with connect(server.url).hold(LABELS):
        pass
    assert calls(server) == [("hold", 1)]


def test_each_call_of_a_hold_is_sent_again_after_a_lost_connection(connect, fake):
    server = fake(HoldServer(lose=(1, 3, 5, 7)))
    client = connect(server.url)
    hold = client.hold(LABELS, id="request-1")
    assert hold.token == "t0ken"
    assert hold.renew(30).outcome == "renewed"
    assert hold.settle(2).outcome == "settled"
    assert client.release(labels=LABELS, id="request-1").outcome == "released"
    assert [path for path, _ in calls(server)] == [
        name for name in ("hold", "renew", "settle", "release") for _ in range(2)
    ]
    first, second = server.requests[:2]
    assert first["id"] == second["id"]
    assert second["deadline_ms"] <= first["deadline_ms"]


def test_a_hold_is_sent_only_twice_and_then_the_policy_decides(connect, fake):
    server = fake(HoldServer(lose=(1, 2)))
    hold = connect(server.url).hold(LABELS, cost=3)
    assert (hold.allowed, hold.decision.source, hold.token) == (True, "open", None)
    assert [path for path, _ in calls(server)] == ["hold", "hold"]
    # The server may have admitted it.
    assert hold.settle(2).outcome == "settled"
    assert server.requests[2]["labels"] == LABELS
    assert server.requests[2]["id"] == hold.id


def test_a_hold_that_the_policy_denies_is_released(connect, fake):
    server = fake(HoldServer(lose=(1, 2)))
    hold = connect(server.url, on_failure="closed").hold(LABELS)
    assert (hold.allowed, hold.decision.source) == (False, "closed")
    wait_until(lambda: len(server.requests) == 3, "the hold is released")
    assert (server.paths[2], server.requests[2]["id"]) == ("/v1/release", hold.id)


def test_a_hold_that_may_be_repeated_is_not_released(connect, fake):
    server = fake(HoldServer(lose=(1, 2)))
    client = connect(server.url, on_failure="closed")
    assert not client.hold(LABELS, id="request-2").allowed
    hold = client.hold(LABELS, id="request-2")
    assert hold.allowed
    assert hold.settle(1).outcome == "settled"
    assert [path for path, _ in calls(server)] == ["hold", "hold", "hold", "settle"]


def test_a_hold_whose_server_stops_may_have_been_made(connect, fake):
    def stop(server, connection):
        server.read_request(connection)
        server.kill()

    hold = connect(fake(stop).url).hold(LABELS)
    assert hold.decision.source == "open"
    # The first request may have arrived, although the second was not sent.
    assert hold.settle(1).outcome == "queued"


def test_a_hold_that_was_not_sent_is_not_settled(connect, fake):
    server = fake(HoldServer())
    server.kill()
    client = connect(server.url, on_failure=LocalBucket("1/hour"))
    with client.hold(LABELS) as hold:
        assert hold.decision.source == "fallback"
    assert hold.settle(1).outcome == "settled"


def test_a_late_hold_is_decided_within_the_deadline(connect, fake):
    hanging = threading.Event()

    def answer_late(server, connection):
        server.read_request(connection)
        hanging.wait(RELAXED)

    server = fake(answer_late)
    started = time.monotonic()
    assert connect(server.url, deadline=DEADLINE).hold(LABELS).decision.source == "open"
    assert time.monotonic() - started < DEADLINE + 1.0
    hanging.set()


def test_a_settlement_is_repeated_in_the_background(connect, fake):
    server = fake(HoldServer(fail=(2, 3, 4)))
    client = connect(server.url)
    with client.hold(LABELS) as hold:
        assert hold.settle(7).outcome == "queued"
    wait_until(lambda: len(server.requests) == 5, "the settlement is delivered")
    assert calls(server)[1:] == [("settle", 7)] * 4


def test_a_settlement_is_queued_without_a_call_while_the_circuit_breaker_is_open(connect, fake, monkeypatch):
    monkeypatch.setattr("sluicegate.circuit_breaker.FIRST_BACKOFF", 60.0)
    monkeypatch.setattr("sluicegate.settlement_queue.MAX_AGE", 0.0)
    server = fake(HoldServer(lose=range(2, 100)))
    client = connect(server.url)
    hold = client.hold(LABELS)
    for _ in range(3):
        client.check(LABELS)
    requests = len(server.requests)
    assert hold.settle(1).outcome == "queued"
    wait_until(lambda: len(server.requests) > requests, "the settlement is sent in the background")
    assert server.paths[requests] == "/v1/settle"
    assert len(server.requests) == requests + 1


def test_a_settlement_is_dropped_with_a_log_line_after_its_time(connect, fake, monkeypatch, caplog):
    monkeypatch.setattr("sluicegate.settlement_queue.MAX_AGE", 0.1)
    server = fake(HoldServer(fail=range(2, 1000)))
    with caplog.at_level(logging.ERROR, "sluicegate"), connect(server.url).hold(LABELS) as hold:
        assert hold.settle(7).outcome == "queued"
        wait_until(lambda: "the hold was not settled" in caplog.text, "the settlement is dropped")
    sent = len(server.requests)
    assert sent > 2
    assert hold.settle(7).outcome == "queued", "the queue still works"


def test_a_full_queue_is_an_error_for_the_caller_and_a_log_line_at_the_end_of_a_block(
    connect, fake, monkeypatch, caplog
):
    monkeypatch.setattr("sluicegate.settlement_queue.MAX_QUEUED", 0)
    server = fake(HoldServer(fail=range(3, 100)))
    client = connect(server.url)
    hold, other = client.hold(LABELS), client.hold(LABELS)
    with pytest.raises(Unavailable):
        hold.settle(1)
    with caplog.at_level(logging.ERROR, "sluicegate"), other:
        pass
    assert "the hold was not settled" in caplog.text


def test_a_rejected_settlement_is_an_error(connect, fake):
    def reject(server, connection):
        while server.read_request(connection) is not None:
            connection.sendall(http_response(b'{"status":400,"detail":"invalid token"}', "400 Bad Request"))

    client = connect(fake(reject).url)
    with pytest.raises(InvalidRequest, match="invalid token"):
        client.settle("x", cost=1)


def test_closing_a_client_delivers_its_settlements(fake):
    server = fake(HoldServer(fail=(2,)))
    with Client(server.url, deadline=RELAXED) as client:
        assert client.hold(LABELS).settle(1).outcome == "queued"
    assert len(server.requests) == 3

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client:
            hold = await client.hold(LABELS)
            server._handle.fail = (5,)
            assert (await hold.settle(1)).outcome == "queued"

    asyncio.run(run())
    assert len(server.requests) == 6


def test_a_conflict_is_an_error(connect, fake):
    def conflict(server, connection):
        server.read_request(connection)
        connection.sendall(http_response(b'{"status":409,"detail":"id a belongs to another"}', "409 Conflict"))

    with pytest.raises(HoldConflict, match="belongs to another"):
        connect(fake(conflict).url).hold(LABELS, id="a")


INVALID = [
    ({"id": ""}, InvalidValue, "0 bytes: use 1 to 128"),
    ({"id": "ü" * 65}, InvalidValue, "130 bytes"),
    ({"id": 5}, InvalidRequest, "id is of type int"),
    ({"ttl": 0}, InvalidRequest, "ttl 0 is out of range"),
    ({"ttl": 100_000}, InvalidRequest, "use 0.001 to 86400 seconds"),
    ({"ttl": "1m"}, InvalidRequest, "ttl '1m'"),
    ({"cost": -1}, InvalidValue, "cost is out of range"),
]


@pytest.mark.parametrize(("options", "error", "message"), INVALID)
def test_invalid_holds_are_not_sent(connect, fake, options, error, message):
    server = fake(HoldServer())
    with pytest.raises(error, match=message):
        connect(server.url).hold(LABELS, **options)
    assert server.requests == []


def test_a_hold_is_named_by_its_token_or_by_its_labels_and_id(connect, fake):
    server = fake(HoldServer())
    client = connect(server.url)
    limit = Limit(3, algorithm="concurrency")
    assert client.settle(key="k", limit=limit, id="a", cost=2).outcome == "settled"
    assert client.renew("t0ken", ttl=0.0015).outcome == "renewed"
    assert server.requests[0]["limit"] == {"algorithm": "concurrency", "amount": 3}
    assert server.requests[1]["ttl_ms"] == 2
    for subject in ({}, {"labels": LABELS}, {"id": "a"}, {"token": "t", "id": "a"}, {"token": 5}):
        with pytest.raises(InvalidRequest):
            client.release(**subject)


def test_an_in_flight_limit_has_no_window(connect):
    with pytest.raises(InvalidRequest, match="concurrency has no window"):
        Limit(3, "1m", algorithm="concurrency")
    with pytest.raises(InvalidRequest, match="needs a window"):
        Limit(3)
    with pytest.raises(ValueError, match="concurrency has no token bucket"):
        LocalBucket(Limit(3, algorithm="concurrency"))
    client = connect("http://127.0.0.1:1", on_failure=LocalBucket("1/hour"))
    limit = Limit(3, algorithm="concurrency")
    assert [client.hold(key="k", limit=limit).allowed for _ in range(2)] == [True, False]


def run_in_loop(server, use):
    """Runs a coroutine function with an asyncio client."""

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client:
            return await use(client)

    return asyncio.run(run())


async def wait_for_requests(server, count):
    expires = time.monotonic() + RELAXED
    while len(server.requests) < count:
        assert time.monotonic() < expires, server.paths
        await asyncio.sleep(0.01)


def test_an_asyncio_hold_is_renewed_while_its_block_runs(fake):
    server = fake(HoldServer(ttl_ms=300))

    async def use(client):
        async with client.hold(LABELS):
            await wait_for_requests(server, 4)
        sent = len(server.requests)
        await asyncio.sleep(0.3)
        return sent

    sent = run_in_loop(server, use)
    assert [path for path, _ in calls(server)] == ["hold", *["renew"] * (sent - 2), "settle"]
    assert {request["ttl_ms"] for request in server.requests[1:-1]} == {300}


def test_an_asyncio_hold_is_awaitable_but_not_a_coroutine(fake):
    server = fake(HoldServer())

    async def use(client):
        assert (await client.hold(LABELS)).allowed
        assert all(await asyncio.gather(client.hold(LABELS), client.hold(LABELS)))
        assert (await asyncio.wait_for(client.hold(LABELS), RELAXED)).allowed
        pending = client.hold(LABELS)
        with pytest.raises(TypeError, match="coroutine"):
            asyncio.get_running_loop().create_task(pending)
        assert await pending

    run_in_loop(server, use)


def test_a_settled_hold_is_not_renewed(fake):
    server = fake(HoldServer(ttl_ms=100))

    async def use(client):
        async with client.hold(LABELS) as hold:
            await hold.settle(1)
            await asyncio.sleep(0.2)

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)][-1] == "settle"


def test_a_failed_renewal_is_repeated_before_the_hold_expires(fake):
    server = fake(HoldServer(fail=(2, 3)))

    async def use(client):
        started = time.monotonic()
        async with client.hold(LABELS, ttl=1.5):
            await wait_for_requests(server, 4)
            assert time.monotonic() - started >= 1.0

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)] == ["hold", "renew", "renew", "renew", "settle"]


def test_a_hold_is_renewed_while_any_of_its_counters_is(fake):
    class PartlyReset(HoldServer):
        def answer(self, path, request):
            answer = super().answer(path, request)
            if path != "/v1/renew":
                return answer
            gone = {"rule": "requests", "unit": "requests", "outcome": "unknown"}
            return {"outcome": "unknown", "tiers": [gone, *answer["tiers"]]}

    server = fake(PartlyReset(ttl_ms=300))

    async def use(client):
        async with client.hold(LABELS):
            await wait_for_requests(server, 3)

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)][:3] == ["hold", "renew", "renew"]


@pytest.mark.parametrize("tiers", [[], [{"rule": "tokens", "unit": "tokens", "outcome": "unknown"}]])
def test_a_hold_without_a_counter_is_not_renewed_again(fake, tiers):
    class Gone(HoldServer):
        def answer(self, path, request):
            return {"outcome": "unknown", "tiers": tiers} if path == "/v1/renew" else super().answer(path, request)

    server = fake(Gone(ttl_ms=100))

    async def use(client):
        async with client.hold(LABELS):
            await asyncio.sleep(0.4)

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)] == ["hold", "renew", "settle"]


class WithoutTime(HoldServer):
    """Answers as a server whose rule decided by the policy `local`: the hold has no time of the store."""

    def answer(self, path, request):
        answer = super().answer(path, request)
        return {**answer, "at_us": None, "source": "fallback"} if path == "/v1/hold" else answer


def test_a_hold_with_an_unknown_ttl_is_renewed_by_the_default(connect, fake):
    server = fake(WithoutTime())
    assert connect(server.url).hold(LABELS).renew().outcome == "renewed"
    assert server.requests[1]["ttl_ms"] == 60_000


def test_an_asyncio_hold_with_an_unknown_ttl_is_renewed(fake):
    server = fake(WithoutTime())

    async def use(client):
        async with client.hold(LABELS):
            await wait_for_requests(server, 2)

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)] == ["hold", "renew", "settle"]
    assert server.requests[1]["ttl_ms"] == 60_000


def test_a_hold_that_existed_already_is_renewed_at_once(fake):
    class Repeating(HoldServer):
        def answer(self, path, request):
            answer = super().answer(path, request)
            return {**answer, "repeated": True} if path == "/v1/hold" else answer

    # The time of the first answer, and the expiry after many renewals.
    server = fake(Repeating(ttl_ms=3_600_000))

    async def use(client):
        async with client.hold(LABELS, id="again") as hold:
            assert hold.repeated
            await wait_for_requests(server, 2)

    run_in_loop(server, use)
    assert [path for path, _ in calls(server)] == ["hold", "renew", "settle"]
    assert server.requests[1]["ttl_ms"] == 60_000


def test_a_cancelled_block_settles_the_estimate(fake):
    server = fake(HoldServer())

    async def use(client):
        entered = asyncio.Event()

        async def stream():
            async with client.hold(LABELS, cost={"tokens": 500}):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(stream())
        await entered.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_in_loop(server, use)
    assert calls(server)[1:] == [("settle", {"tokens": 500})]


def test_a_settlement_that_is_cancelled_is_delivered_in_the_background(fake):
    hanging = threading.Event()

    class Hanging(HoldServer):
        def answer(self, path, request):
            if path == "/v1/settle":
                hanging.wait(RELAXED)
            return super().answer(path, request)

    server = fake(Hanging())

    async def use(client):
        async def stream():
            async with client.hold(LABELS) as hold:
                await hold.settle(7)

        task = asyncio.create_task(stream())
        await wait_for_requests(server, 2)
        # Twice: also the settlement at the end of the block is cancelled.
        task.cancel()
        await wait_for_requests(server, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await wait_for_requests(server, 4)
        hanging.set()

    run_in_loop(server, use)
    assert {cost for path, cost in calls(server) if path == "settle"} == {7}
    assert {path for path, _ in calls(server)} == {"hold", "settle"}


def test_a_hold_that_is_cancelled_is_released(fake):
    received = threading.Event()

    class Hanging(HoldServer):
        def answer(self, path, request):
            if path == "/v1/hold":
                received.wait(RELAXED)
            return super().answer(path, request)

    server = fake(Hanging())

    async def use(client):
        task = asyncio.ensure_future(client.hold(LABELS))
        await wait_for_requests(server, 1)
        task.cancel()
        await wait_for_requests(server, 2)
        received.set()

    run_in_loop(server, use)
    assert (server.paths[1], server.requests[1]["id"]) == ("/v1/release", server.requests[0]["id"])


def test_settlements_are_not_sent_by_a_forked_process(fake, monkeypatch):
    server = fake(HoldServer(fail=range(2, 4)))
    with Client(server.url, deadline=RELAXED) as client:
        client.hold(LABELS).settle(1)
        client._settlements.reset_after_fork()
        assert len(client._settlements) == 0
