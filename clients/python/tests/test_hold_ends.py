"""Ends of holds that are not normal: interrupted calls, garbage, closed event loops, no threads."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from conftest import PATIENCE, RELAXED, http_response, wait_until
from sluicegate import AsyncClient, Client, InvalidRequest, Limit, Unavailable, hold_request, settlement_queue
from sluicegate.asgi import RateLimitMiddleware
from sluicegate.resolver import Resolver
from sluicegate.wsgi import RateLimitMiddleware as WsgiMiddleware
from test_hold_faults import LABELS, HoldServer, calls, wait_for_requests


class Interrupt(BaseException):
    """As Ctrl-C, or the time limit of a task queue."""


@pytest.fixture
def interrupt():
    """Interrupts the main thread after a time."""

    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Hanging(HoldServer):
    """Does not answer the first request with a path until an event."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.released = threading.Event()

    def answer(self, path, request):
        if path == self.path:
            self.path = None
            self.released.wait(RELAXED)
        return super().answer(path, request)


@pytest.mark.parametrize(("path", "last"), [("/v1/hold", "release"), ("/v1/settle", "settle")])
def test_an_interrupted_call_is_ended_in_the_background(fake, interrupt, path, last):
    hanging = Hanging(path)
    server = fake(hanging)
    with Client(server.url, deadline=RELAXED) as client:
        interrupt(0.3)
        with pytest.raises(Interrupt), client.hold(LABELS):
            pass
        hanging.released.set()
        wait_until(lambda: len(client._settlements) == 0, "the hold is ended")
    assert calls(server)[-2][0] == path.removeprefix("/v1/")
    assert calls(server)[-1][0] == last
    assert {request["id"] for request in server.requests if "id" in request} == {server.requests[0]["id"]}


def test_an_interrupted_hold_with_an_id_of_the_caller_is_kept(fake, interrupt):
    hanging = Hanging("/v1/hold")
    server = fake(hanging)
    with Client(server.url, deadline=RELAXED) as client:
        interrupt(0.3)
        with pytest.raises(Interrupt):
            client.hold(LABELS, id="request-1")
        hanging.released.set()
        assert client.hold(LABELS, id="request-1").allowed
        assert len(client._settlements) == 0
    assert [path for path, _ in calls(server)] == ["hold", "hold"]


def test_an_actual_cost_that_cannot_be_queued_is_settled_by_the_block(connect, fake, monkeypatch):
    server = fake(HoldServer(fail=(2,)))
    monkeypatch.setattr(settlement_queue, "MAX_QUEUED", 0)
    with connect(server.url).hold(LABELS, cost={"tokens": 500}) as hold, pytest.raises(Unavailable):
        hold.settle({"tokens": 120})
    assert calls(server)[1:] == [("settle", {"tokens": 120})] * 2


def test_costs_are_those_of_the_time_when_they_were_passed(connect, fake):
    server = fake(HoldServer())
    cost, actual = {"tokens": 500}, {"tokens": 120}
    client = connect(server.url)
    with client.hold(LABELS, cost=cost):
        cost["tokens"] = 900
    with client.hold(LABELS, cost=cost) as hold:
        hold.actual_cost = actual
        actual["tokens"] = 0.5
        assert hold.actual_cost == {"tokens": 120}
    settled = [cost for path, cost in calls(server) if path == "settle"]
    assert settled == [{"tokens": 500}, {"tokens": 120}]


def test_a_hold_that_the_server_may_have_made_is_renewed(fake):
    server = fake(HoldServer(lose=(1, 2)))

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client, client.hold(LABELS) as hold:
            assert (hold.allowed, hold.token) == (True, None)
            await wait_for_requests(server, 3)

    asyncio.run(run())
    assert [path for path, _ in calls(server)] == ["hold", "hold", "renew", "settle"]
    assert (server.requests[2]["id"], server.requests[2]["ttl_ms"]) == (server.requests[0]["id"], 60_000)


class NoThreads(threading.Thread):
    """A thread that the clients cannot start."""

    def start(self):
        if self.name.startswith("sluicegate"):
            raise RuntimeError("can't start new thread")
        super().start()


def test_without_a_thread_a_settlement_is_dropped_and_later_ones_are_sent(connect, fake, monkeypatch, caplog):
    server = fake(HoldServer(fail=(2, 4)))
    client = connect(server.url)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", NoThreads)
        with client.hold(LABELS):
            pass
    assert "the hold was not settled" in caplog.text
    with client.hold(LABELS) as hold:
        assert hold.settle(7).outcome == "queued"
    wait_until(lambda: len(server.requests) == 5, "the settlement is sent")
    assert calls(server)[-1] == ("settle", 7)


def test_an_unexpected_error_does_not_stop_the_queue(fake, monkeypatch, caplog):
    server = fake(HoldServer(fail=(2, 4)))
    with Client(server.url, deadline=RELAXED) as client:
        with monkeypatch.context() as patched:
            patched.setattr(settlement_queue.SettlementQueue, "_send", lambda *_: 1 / 0)
            assert client.hold(LABELS).settle(1).outcome == "queued"
            wait_until(lambda: len(client._settlements) == 0, "the settlement is dropped")
        assert "unexpected ZeroDivisionError" in caplog.text
        assert client.hold(LABELS).settle(7).outcome == "queued"
        wait_until(lambda: len(server.requests) == 5, "the settlement is sent")


class Rejecting(HoldServer):
    """Answers the settlements of one cost with a 503, for example because the store of their counter is down."""

    def __call__(self, server, connection):
        while (request := server.read_request(connection)) is not None:
            if request.get("cost") == 1:
                connection.sendall(http_response(b'{"status":503,"detail":"store"}', "503 Service Unavailable"))
            else:
                answer = self.answer(server.paths[-1], request)
                connection.sendall(http_response(json.dumps(answer).encode()))


def test_a_settlement_that_the_server_does_not_accept_does_not_block_others(fake):
    server = fake(Rejecting())
    client = Client(server.url, deadline=RELAXED)
    queue = client._settlements
    for cost in (1, 2, 3):
        assert queue.add(hold_request.settle({"token": "t0ken"}, cost))
    wait_until(lambda: len(queue) == 1, "the others are delivered")
    assert [cost for _, cost in calls(server)][:3] == [1, 2, 3]
    wait_until(lambda: calls(server)[-1][1] == 1, "the first is repeated")
    client._pool.close()


def test_after_a_lost_connection_settlements_keep_their_order(fake):
    server = fake(HoldServer(lose=(1, 2)))
    with Client(server.url, deadline=RELAXED) as client:
        for cost in (1, 2):
            assert client._settlements.add(hold_request.settle({"token": "t0ken"}, cost))
    assert [cost for _, cost in calls(server)] == [1, 1, 1, 2]


def test_without_a_thread_a_name_is_looked_up_again(monkeypatch):
    resolver = Resolver("localhost")
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", NoThreads)
        with pytest.raises(OSError, match="can't start new thread"):
            resolver.addresses().result(RELAXED)
    assert resolver.addresses().result(RELAXED)


def test_garbage_collection_can_end_a_hold_while_a_call_has_a_lock(fake):
    class Collecting(list):
        def append(self, kept):
            super().append(kept)
            gc.collect()

    server = fake(HoldServer())
    client = Client(server.url, deadline=RELAXED)
    client._pool._idle = Collecting()

    def stream():
        with client.hold(LABELS, cost=9):
            yield

    abandoned = [stream()]
    next(abandoned[0])
    abandoned.append(abandoned)
    del abandoned
    checking = threading.Thread(target=client.check, args=(LABELS,), daemon=True)
    checking.start()
    checking.join(RELAXED)
    assert not checking.is_alive()
    assert ("settle", 9) in calls(server)
    client.close()


CLOSED_LOOP = """
import asyncio, gc, sys
from sluicegate import AsyncClient

client = AsyncClient(sys.argv[1], deadline=5)

async def block(entered):
    async with client.hold({"tenant": "acme"}, cost={"tokens": 500}):
        entered.set()
        await asyncio.Event().wait()

async def main():
    entered = asyncio.Event()
    asyncio.get_running_loop().create_task(block(entered))
    await entered.wait()

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
del loop
gc.collect()
client._settlements.wait_until_empty(5)
"""


def run_program(program, url):
    """Runs a program in another process, because its connection is garbage that Python warns of."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", program, url]
    subprocess.run(arguments, env=environment, check=True, capture_output=True, timeout=PATIENCE)


def test_a_task_that_is_destroyed_with_its_event_loop_settles_the_estimate(fake):
    server = fake(HoldServer())
    run_program(CLOSED_LOOP, server.url)
    assert calls(server) == [("hold", {"tokens": 500}), ("settle", {"tokens": 500})]


COLLECTED_IN_A_CALL = CLOSED_LOOP.replace(
    """
gc.collect()
""",
    """
class Collecting(dict):
    def items(self):
        gc.collect()
        return super().items()

client._pools = Collecting(client._pools)
asyncio.run(client.check({"tenant": "acme"}))
gc.collect()
""",
)


def test_garbage_collection_can_end_a_hold_while_another_event_loop_gets_its_pool(fake):
    server = fake(HoldServer())
    run_program(COLLECTED_IN_A_CALL, server.url)
    assert ("settle", {"tokens": 500}) in calls(server)


PENDING_TASK = """
import asyncio, sys
from sluicegate import AsyncClient

client = AsyncClient(sys.argv[1], deadline=5)
loop = asyncio.new_event_loop()

async def block():
    async with client.hold({"tenant": "acme"}, cost={"tokens": 500}):
        loop.stop()
        await asyncio.Event().wait()

task = loop.create_task(block())
loop.run_forever()
"""

SUSPENDED_GENERATOR = """
import sys
from sluicegate import Client

client = Client(sys.argv[1].replace("127.0.0.1", "localhost"), deadline=5)

def stream():
    with client.hold({"tenant": "acme"}):
        yield

words = stream()
next(words)
# Until the server is down. Its name is looked up again.
sys.stdin.readline()
client._pool._resolver.__init__("localhost")
"""


@pytest.mark.parametrize("program", [PENDING_TASK, SUSPENDED_GENERATOR], ids=["task", "generator"])
def test_the_interpreter_exits_although_a_hold_has_not_ended(fake, program):
    server = fake(HoldServer())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen([sys.executable, "-c", program, server.url], **options) as process:
        try:
            wait_until(lambda: server.requests, "the hold is made")
            server.kill()
            process.communicate(b"\n", timeout=PATIENCE)
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_limit_of_requests_in_flight_needs_a_hold():
    limit = Limit(2, algorithm="concurrency")
    client = AsyncClient()
    RateLimitMiddleware(None, client, limit=limit, key="a", hold=True)
    with pytest.raises(InvalidRequest, match="hold=True"):
        RateLimitMiddleware(None, client, limit=limit, key="a")
    with pytest.raises(InvalidRequest, match=r"client\.hold"):
        WsgiMiddleware(None, Client(), limit=limit, key="a")
