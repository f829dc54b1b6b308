"""Holds of both clients and of the ASGI middleware, with a real server."""

import asyncio
import concurrent.futures
import threading
import uuid
from typing import Annotated

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI
from fastapi.responses import StreamingResponse

from conftest import RELAXED, Redis, Sluicegate, wait_until
from sluicegate import AsyncClient, AsyncHold, Client, HoldConflict, InvalidRequest, Limit, header
from sluicegate.asgi import DECISION, HOLD, RateLimitMiddleware
from sluicegate.fastapi import RateLimiter, current_hold
from test_fastapi import Caller
from test_hold_faults import LABELS, HoldServer, calls

RULES = """
[defaults]
on_store_failure = "local"

[[rule]]
name = "in-flight"
per = ["tenant"]
algorithm = "concurrency"
amount = 2
ttl = "30s"

[[rule]]
name = "tokens"
per = ["tenant"]
unit = "tokens"
algorithm = "fixed-window"
amount = 1000
window = "1h"
max_excess = 100

[[rule]]
name = "requests"
per = ["tenant"]
algorithm = "sliding-log"
amount = 20
window = "1h"
"""
COST = {"requests": 1, "tokens": 500}


@pytest.fixture(scope="module", params=["memory", "redis"])
def server(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    redis = Redis(directory) if request.param == "redis" else None
    server = Sluicegate(directory, RULES, redis.url if redis else "memory:")
    yield server
    server.kill()
    if redis:
        redis.kill()


@pytest.fixture
def labels():
    return {"tenant": f"test-{uuid.uuid4()}"}


def remaining(client, labels):
    """The remaining units per rule."""
    explanation = client.explain(labels, cost={"requests": 0, "tokens": 0})
    return {rule["rule"]: rule["state"]["remaining"] for rule in explanation.applies}


def by_rule(settlement):
    return {tier.rule: (tier.outcome, tier.charged) for tier in settlement.tiers}


def test_a_hold_charges_its_estimate_until_it_is_settled(connect, server, labels):
    client = connect(server.url)
    with client.hold(labels, cost=COST) as hold:
        assert hold.allowed
        assert {tier.rule for tier in hold.decision.tiers} == {"in-flight", "tokens", "requests"}
        assert remaining(client, labels) == {"in-flight": 1, "tokens": 500, "requests": 19}
        settlement = hold.settle({"tokens": 120})
        assert by_rule(settlement)["tokens"] == ("settled", 120)
        assert settlement.outcome == "settled"
    assert remaining(client, labels) == {"in-flight": 2, "tokens": 880, "requests": 19}
    assert hold.settle({"tokens": 900}).outcome == "already"
    assert remaining(client, labels)["tokens"] == 880


def test_a_block_settles_its_estimate_and_an_exception_releases_it(connect, server, labels):
    client = connect(server.url)
    with client.hold(labels, cost=COST):
        pass
    assert remaining(client, labels) == {"in-flight": 2, "tokens": 500, "requests": 19}
    with pytest.raises(RuntimeError), client.hold(labels, cost=COST):
        raise RuntimeError
    assert remaining(client, labels) == {"in-flight": 2, "tokens": 500, "requests": 19}
    with client.hold(labels, cost=COST) as hold:
        hold.actual_cost = {"tokens": 7}
    assert remaining(client, labels)["tokens"] == 493


def test_at_most_the_amount_is_in_flight(connect, server, labels):
    client = connect(server.url)
    first, second, third = (client.hold(labels) for _ in range(3))
    assert [hold.allowed for hold in (first, second, third)] == [True, True, False]
    assert (third.decision.rule, third.token) == ("in-flight", None)
    first.release()
    assert client.hold(labels).allowed


def test_the_same_id_gets_the_first_answer(connect, server, labels):
    client = connect(server.url)
    first = client.hold(labels, cost=COST, id="request-1")
    again = client.hold(labels, cost=COST, id="request-1")
    assert (first.repeated, again.repeated, again.expires_at_us) == (False, True, first.expires_at_us)
    assert remaining(client, labels) == {"in-flight": 1, "tokens": 500, "requests": 19}
    with pytest.raises(HoldConflict, match="use another id"):
        client.hold(labels, cost={"requests": 1, "tokens": 501}, id="request-1")
    assert client.settle(labels=labels, id="request-1", cost={"tokens": 10}).outcome == "settled"
    assert remaining(client, labels)["tokens"] == 990
    assert client.release(labels=labels, id="never-made").outcome == "unknown"


def test_another_client_can_settle_with_the_token(connect, server, labels):
    hold = connect(server.url).hold(labels, cost=COST, ttl=10)
    other = connect(server.url)
    renewed = other.renew(hold.token, ttl=60)
    assert renewed.outcome == "renewed"
    assert renewed.tiers[0].expires_at_us > hold.expires_at_us + 40_000_000
    assert other.settle(hold.token, cost={"tokens": 1}).outcome == "settled"
    assert other.release(hold.token).outcome == "already"
    with pytest.raises(InvalidRequest, match="token"):
        other.release("no-token")


def test_an_excess_is_charged_up_to_its_bound(connect, server, labels):
    client = connect(server.url)
    # A server without tokens allows any excess, so the bound of the rule does not apply.
    assert by_rule(client.hold(labels, cost=COST).settle({"tokens": 700}))["tokens"] == ("settled", 700)
    assert remaining(client, labels)["tokens"] == 300


def test_a_key_can_have_its_own_in_flight_limit(connect, server, labels):
    client = connect(server.url)
    key, limit = labels["tenant"], Limit(1, algorithm="concurrency")
    with client.hold(key=key, limit=limit, id="one") as hold:
        assert hold.allowed
        assert not client.hold(key=key, limit=limit)
    assert client.hold(key=key, limit=limit).release().outcome == "released"
    assert client.release(key=key, limit=limit, id="one").outcome == "already"


def test_a_check_that_needs_a_hold_is_an_error(connect, server, labels):
    with pytest.raises(InvalidRequest, match='rule "in-flight" counts requests in flight: use hold'):
        connect(server.url).check(labels)


def test_an_expired_hold_frees_its_slot(connect, server, labels):
    client = connect(server.url)
    held = [client.hold(labels, cost=COST, ttl=0.2) for _ in range(2)]
    # Needs both slots.
    wait_until(lambda: client.hold(labels, cost=2, ttl=0.001), "the holds expire")
    assert by_rule(held[0].settle({"tokens": 100}))["tokens"] == ("late", 100)
    assert client.renew(held[1].token, ttl=10).outcome == "late"


def test_an_asyncio_hold_outlives_its_time_to_live(server, labels):
    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client:
            # A renewal has a second until it is late, for a busy machine.
            async with client.hold(labels, ttl=3), client.hold(labels, ttl=3):
                await asyncio.sleep(3.5)
                assert not await client.hold(labels)
            return (await client.hold(labels)).allowed

    assert asyncio.run(run())


def test_threads_and_tasks_never_exceed_the_limit(server, labels):
    in_flight, peak, lock = 0, 0, threading.Lock()

    def enter():
        nonlocal in_flight, peak
        with lock:
            in_flight += 1
            peak = max(peak, in_flight)

    def leave():
        nonlocal in_flight
        with lock:
            in_flight -= 1

    limit = Limit(3, algorithm="concurrency")
    key = labels["tenant"]
    client = Client(server.url, deadline=RELAXED)

    def use(_):
        admitted = 0
        for _ in range(10):
            with client.hold(key=key, limit=limit) as hold:
                if hold:
                    enter()
                    admitted += 1
                    leave()
        return admitted

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(use, range(16))) > 0
    assert peak <= 3
    assert [bool(client.hold(key=key, limit=limit)) for _ in range(4)] == [True] * 3 + [False]
    client.close()


@pytest.fixture
def app(server):
    """A FastAPI application whose requests are held, and how to call it."""
    loop = asyncio.new_event_loop()
    client = AsyncClient(server.url, deadline=RELAXED)
    app = FastAPI()
    app.state.entered, app.state.leave = asyncio.Event(), asyncio.Event()

    @app.get("/tokens")
    async def tokens(hold: Annotated[AsyncHold, Depends(current_hold)]):
        hold.actual_cost = {"tokens": 120}
        return {"id": hold.id}

    @app.get("/estimate")
    async def estimate():
        return "ok"

    @app.get("/fail")
    async def fail():
        raise RuntimeError

    @app.get("/stream")
    async def stream(hold: Annotated[AsyncHold, Depends(current_hold)]):
        async def words():
            for used, word in enumerate(("one ", "two ", "three"), 1):
                yield word
                hold.actual_cost = {"tokens": used}
                app.state.entered.set()
                await app.state.leave.wait()

        return StreamingResponse(words())

    @app.get("/background")
    async def background(tasks: BackgroundTasks, hold: Annotated[AsyncHold, Depends(current_hold)]):
        async def work():
            app.state.entered.set()
            await app.state.leave.wait()
            hold.actual_cost = {"tokens": 900}

        tasks.add_task(work)
        hold.actual_cost = {"tokens": 3}
        return "ok"

    app.add_middleware(
        RateLimitMiddleware,
        client=client,
        labels={"tenant": header("x-tenant")},
        cost=COST,
        hold=True,
        skip=lambda request: request.path == "/skipped",
    )
    caller = Caller(app, loop)
    caller.client = client
    yield caller
    loop.run_until_complete(client.aclose())
    loop.close()


def test_the_middleware_settles_what_the_endpoint_used(app, connect, server, labels):
    client, tenant = connect(server.url), labels["tenant"]
    response = app.get("/tokens", x_tenant=tenant)
    assert (response.status, "ratelimit" in response.headers) == (200, True)
    assert remaining(client, labels) == {"in-flight": 2, "tokens": 880, "requests": 19}
    assert app.get("/estimate", x_tenant=tenant).status == 200
    assert remaining(client, labels)["tokens"] == 380
    denied = app.get("/estimate", x_tenant=tenant)
    assert (denied.status, b"tokens" in denied.body) == (429, True)


def test_the_middleware_charges_the_estimate_of_a_request_that_fails(app, connect, server, labels):
    with pytest.raises(RuntimeError):
        app.get("/fail", x_tenant=labels["tenant"])
    assert remaining(connect(server.url), labels) == {"in-flight": 2, "tokens": 500, "requests": 19}


def test_the_middleware_holds_until_a_stream_has_ended(app, connect, server, labels):
    state, tenant = app.app.state, labels["tenant"]
    sequential = connect(server.url)

    async def run():
        streaming = asyncio.create_task(app._request("/stream", b"", "GET", {"x-tenant": tenant}))
        await state.entered.wait()
        held = await app.client.hold(labels, cost=0)
        applies = {tier.rule: tier.remaining for tier in held.decision.tiers}
        await held.release()
        state.leave.set()
        return applies, await streaming

    applies, response = app.loop.run_until_complete(run())
    assert applies["in-flight"] == 1
    assert response.body == b"one two three"
    assert remaining(sequential, labels) == {"in-flight": 2, "tokens": 997, "requests": 19}


def test_the_middleware_does_not_hold_during_background_tasks(app, connect, server, labels):
    state, client = app.app.state, connect(server.url)

    async def until_the_slot_is_free():
        while True:
            explanation = await app.client.explain(labels, cost={"requests": 0, "tokens": 0})
            if explanation.applies[0]["state"]["remaining"] == 2:
                return
            await asyncio.sleep(0.02)

    async def run():
        running = asyncio.create_task(app._request("/background", b"", "GET", {"x-tenant": labels["tenant"]}))
        await state.entered.wait()
        await asyncio.wait_for(until_the_slot_is_free(), RELAXED)
        assert not running.done()
        state.leave.set()
        return await running

    assert app.loop.run_until_complete(run()).status == 200
    assert remaining(client, labels) == {"in-flight": 2, "tokens": 997, "requests": 19}


def test_the_middleware_settles_once_although_the_last_message_cancels_the_application(fake):
    server = fake(HoldServer())

    async def application(scope, receive, send):
        scope[HOLD].actual_cost = 7
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        scope[HOLD].actual_cost = 8
        # As Starlette does when the web server reports the end of the response.
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await send({"type": "http.response.body", "body": b"b"})
        await asyncio.Event().wait()

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client:
            middleware = RateLimitMiddleware(application, client, labels=LABELS, hold=True)
            sent = []

            async def send(message):
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
            running = asyncio.create_task(middleware(scope, None, send))
            with pytest.raises(asyncio.CancelledError):
                await running
            return sent

    assert len(asyncio.run(run())) == 3
    assert calls(server) == [("hold", 1), ("settle", 8)]


def test_the_middleware_settles_a_stream_whose_client_has_disconnected(app, connect, server, labels):
    async def run():
        task = asyncio.create_task(app._request("/stream", b"", "GET", {"x-tenant": labels["tenant"]}))
        await app.app.state.entered.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    app.loop.run_until_complete(run())
    client = connect(server.url)
    wait_until(lambda: remaining(client, labels)["in-flight"] == 2, "the slot is free")
    assert remaining(client, labels)["tokens"] == 999


def test_a_request_that_is_skipped_has_no_hold(app):
    assert app.get("/skipped").status == 404


def test_without_holds_the_policy_decides_and_the_log_names_the_fix(server, labels, caplog):
    seen = []

    async def application(scope, receive, send):
        seen.append(scope[DECISION].source)
        assert HOLD not in scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    loop = asyncio.new_event_loop()
    client = AsyncClient(server.url, deadline=RELAXED)
    caller = Caller(RateLimitMiddleware(application, client, labels=labels), loop)
    assert caller.get("/").status == 200
    assert seen == ["open"]
    assert "use hold" in caplog.text

    endpoint = FastAPI()
    limiter = RateLimiter(client)

    @endpoint.get("/")
    @limiter.limit(labels=labels)
    async def limited():
        return "ok"

    assert Caller(endpoint, loop).get("/").status == 200
    loop.run_until_complete(client.aclose())
    loop.close()


def test_a_misconfigured_middleware_with_holds_never_fails_a_request(server):
    async def application(scope, receive, send):
        assert (await scope[HOLD].settle(5)).outcome == "settled"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    loop = asyncio.new_event_loop()
    client = AsyncClient(server.url, deadline=RELAXED)
    limit = Limit(10**18, "1m")
    caller = Caller(RateLimitMiddleware(application, client, limit=limit, key="a", hold=True), loop)
    assert caller.get("/").status == 200
    loop.run_until_complete(client.aclose())
    loop.close()
