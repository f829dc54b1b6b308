"""Faults of the connection: late, partial, oversized and repeated responses, forks and event loops."""

import asyncio
import concurrent.futures
import gc
import json
import os
import signal
import socket
import threading
import time
import uuid

import pytest

import sluicegate.blocking
from conftest import ALLOWED, PATIENCE, RELAXED, http_response, wait_until
from sluicegate import AsyncClient, Client, Unavailable

# A short deadline, and the slack of a busy machine, in seconds.
DEADLINE = 0.2
SLACK = 1.0


def answer_all(server, connection):
    while server.read_request(connection) is not None:
        connection.sendall(http_response())


def test_connections_are_kept_alive(connect, fake):
    server = fake(answer_all)
    client = connect(server.url)
    for _ in range(20):
        assert client.check({"a": "b"}).source == "memory"
    assert (server.connections, len(server.requests)) == (1, 20)


def test_the_server_gets_a_shorter_deadline(connect, fake):
    server = fake(answer_all)
    connect(server.url, deadline=0.5).check({"a": "b"})
    connect(server.url).check({"a": "b"}, deadline=0.002)
    assert server.requests[0]["deadline_ms"] == 450
    assert server.requests[1:] == [] or server.requests[1]["deadline_ms"] == 1


def test_a_connection_that_the_server_closed_while_idle_is_replaced(connect, fake):
    def answer_once(server, connection):
        server.read_request(connection)
        connection.sendall(http_response())
        connection.close()

    server = fake(answer_once)
    client = connect(server.url)
    for number in range(10):
        assert client.check({"a": "b"}).source == "memory"
        assert len(server.requests) == number + 1
        time.sleep(0.02)


def test_a_connection_is_replaced_before_the_idle_timeout_of_the_server(connect, fake, monkeypatch):
    server = fake(answer_all)
    client = connect(server.url)
    client.check({"a": "b"})
    for module in (sluicegate.blocking, sluicegate.aio):
        monkeypatch.setattr(module, "MAX_IDLE", 0.0)
    client.check({"a": "b"})
    assert server.connections == 2


def test_a_connection_is_not_reused_after_the_server_ends_it(connect, fake):
    def answer_and_end(server, connection):
        while server.read_request(connection) is not None:
            connection.sendall(http_response(extra=b"connection: close\r\n"))

    server = fake(answer_and_end)
    client = connect(server.url)
    assert [client.check({"a": "b"}).source for _ in range(3)] == ["memory"] * 3
    assert server.connections == 3


def close_without_answer(server, connection):
    server.read_request(connection)
    connection.close()


def reset_without_answer(server, connection):
    server.read_request(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def answer_partially(server, connection):
    server.read_request(connection)
    connection.sendall(http_response()[:-5])
    connection.close()


def answer_only_the_first(handle):
    def handle_connection(server, connection):
        server.read_request(connection)
        connection.sendall(http_response())
        handle(server, connection)

    return handle_connection


@pytest.mark.parametrize("handle", [close_without_answer, reset_without_answer, answer_partially])
def test_a_request_on_a_pooled_connection_is_never_sent_twice(connect, fake, handle):
    server = fake(answer_only_the_first(handle))
    client = connect(server.url)
    assert [client.check({"a": "b"}).source for _ in range(2)] == ["memory", "open"]
    time.sleep(0.1)
    assert (len(server.requests), server.connections) == (2, 1)


@pytest.mark.parametrize("handle", [close_without_answer, reset_without_answer, answer_partially])
def test_a_request_that_may_have_arrived_is_never_sent_twice(connect, fake, handle):
    server = fake(handle)
    client = connect(server.url)
    assert client.check({"a": "b"}).source == "open"
    with pytest.raises(Unavailable):
        client.charge({"a": "b"})
    time.sleep(0.1)
    assert len(server.requests) == 2


def never_answer(server, connection):
    server.read_request(connection)
    time.sleep(10)


def drip(server, connection):
    server.read_request(connection)
    for byte in http_response():
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def send_headers_forever(server, connection):
    server.read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"x-filler: " + b"x" * 1000 + b"\r\n")


def send_too_much(server, connection):
    server.read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
    while True:
        connection.sendall(b"x" * 100_000)


def not_http(server, connection):
    server.read_request(connection)
    connection.sendall(b"-ERR unknown command\r\n\r\n")


def not_sluicegate(server, connection):
    server.read_request(connection)
    connection.sendall(http_response(b"<html>not found</html>", "404 Not Found"))


def not_a_decision(server, connection):
    server.read_request(connection)
    connection.sendall(http_response(b'{"allowed": true}'))


def fail(server, connection):
    server.read_request(connection)
    connection.sendall(http_response(json.dumps({"detail": "broken"}).encode(), "500 Internal Server Error"))


@pytest.mark.parametrize(
    "handle",
    [never_answer, drip, send_headers_forever, send_too_much, not_http, not_sluicegate, not_a_decision, fail],
)
def test_the_failure_policy_answers_within_the_deadline(connect, fake, handle):
    server = fake(handle)
    client = connect(server.url, deadline=DEADLINE, on_failure="closed")
    for call in (client.check, client.peek):
        started = time.monotonic()
        decision = call({"a": "b"})
        assert time.monotonic() - started < DEADLINE + SLACK
        assert (decision.allowed, decision.degraded, decision.source) == (False, True, "closed")
    with pytest.raises(Unavailable):
        client.charge({"a": "b"})


def test_a_listener_that_accepts_nothing_is_late(connect):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            started = time.monotonic()
            client = connect(f"http://127.0.0.1:{address[1]}", deadline=DEADLINE)
            assert client.check({"a": "b"}).source == "open"
            assert time.monotonic() - started < DEADLINE + SLACK


def test_a_late_name_server_does_not_delay_a_call(connect, monkeypatch):
    end_of_test = threading.Event()

    def resolve_late(*_, **__):
        end_of_test.wait()
        raise socket.gaierror("late")

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    client = connect("http://limits.example", deadline=DEADLINE)
    started = time.monotonic()
    assert client.check({"a": "b"}).source == "open"
    assert time.monotonic() - started < DEADLINE + SLACK
    end_of_test.set()


def test_the_circuit_breaker_spends_no_deadline_and_recovers(connect, fake):
    is_healthy = threading.Event()

    def answer_when_healthy(server, connection):
        while server.read_request(connection) is not None:
            if is_healthy.is_set():
                connection.sendall(http_response())

    server = fake(answer_when_healthy)
    client = connect(server.url, deadline=DEADLINE)
    started = time.monotonic()
    for _ in range(200):
        assert client.check({"a": "b"}).source == "open"
    assert time.monotonic() - started < 10 * DEADLINE + SLACK
    assert len(server.requests) < 12
    is_healthy.set()
    recovered = time.monotonic()
    wait_until(lambda: client.check({"a": "b"}).source == "memory", "the server decides again")
    assert time.monotonic() - recovered < 2 + SLACK
    requests = len(server.requests)
    assert all(client.check({"a": "b"}).source == "memory" for _ in range(20))
    assert len(server.requests) == requests + 20


def test_a_restarted_server_is_used_again(connect, server):
    client = connect(server.url)
    assert client.check({"api_key": "a"}).source == "memory"
    server.kill()
    assert client.check({"api_key": "a"}).source == "open"
    server.restart()
    wait_until(lambda: client.check({"api_key": "a"}).source == "memory", "the server decides again", 3)


def test_more_callers_than_connections_wait_for_a_connection(fake):
    busy = threading.Barrier(2)

    def answer_slowly(server, connection):
        while server.read_request(connection) is not None:
            busy.wait()
            connection.sendall(http_response())

    server = fake(answer_slowly)
    client = Client(server.url, max_connections=2, deadline=RELAXED)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        decisions = list(threads.map(lambda _: client.check({"a": "b"}), range(8)))
    assert [decision.source for decision in decisions] == ["memory"] * 8
    assert server.connections == 2
    client.close()

    async def check_all():
        async with AsyncClient(server.url, max_connections=2, deadline=RELAXED) as client:
            return await asyncio.gather(*(client.check({"a": "b"}) for _ in range(8)))

    assert [decision.source for decision in asyncio.run(check_all())] == ["memory"] * 8
    assert server.connections == 4


def test_a_caller_that_gets_no_connection_is_answered_by_the_policy(fake):
    server = fake(never_answer)

    async def check_all():
        async with AsyncClient(server.url, max_connections=1, deadline=DEADLINE) as client:
            return await asyncio.gather(*(client.check({"a": "b"}) for _ in range(5)))

    started = time.monotonic()
    assert [decision.source for decision in asyncio.run(check_all())] == ["open"] * 5
    assert time.monotonic() - started < DEADLINE + SLACK


def test_a_cancelled_task_does_not_leave_its_response_to_the_next_one(fake):
    def answer_late(server, connection):
        while (request := server.read_request(connection)) is not None:
            time.sleep(0.1)
            name = request["labels"]["name"]
            connection.sendall(http_response(json.dumps({**json.loads(ALLOWED), "rule": name}).encode()))

    server = fake(answer_late)

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED, max_connections=1) as client:
            first = asyncio.create_task(client.check({"name": "first"}))
            waiting = asyncio.create_task(client.check({"name": "waiting"}))
            await asyncio.sleep(0.05)
            first.cancel()
            waiting.cancel()
            second = await client.check({"name": "second"})
            assert second.rule == "second"
            assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
            return (await client.check({"name": "third"})).rule

    assert asyncio.run(run()) == "third"
    assert server.connections == 2


def test_many_cancelled_tasks_leave_the_pool_usable(shared_server):
    async def run():
        async with AsyncClient(shared_server.url, deadline=RELAXED, max_connections=3) as client:
            for round_number in range(20):
                tasks = [asyncio.create_task(client.peek({"api_key": "cancelled"})) for _ in range(30)]
                await asyncio.sleep(0.0005 * (round_number % 5))
                for task in tasks[::2]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                kept = [result for result in results if not isinstance(result, asyncio.CancelledError)]
                assert len(kept) >= 15
                assert all(result.source == "memory" for result in kept)

    asyncio.run(run())


def test_a_response_that_arrived_while_the_event_loop_was_busy_counts(fake):
    server = fake(answer_all)

    async def run():
        async with AsyncClient(server.url, deadline=DEADLINE) as client:
            await client.check({"a": "b"})
            task = asyncio.create_task(client.check({"a": "b"}))
            await asyncio.sleep(0)
            time.sleep(2 * DEADLINE)  # noqa: ASYNC251
            return await task

    assert asyncio.run(run()).source == "memory"


def test_event_loops_can_share_a_client_one_after_another(shared_server):
    client = AsyncClient(shared_server.url, deadline=RELAXED)
    key = str(uuid.uuid4())

    async def check_and_close():
        decision = await client.check({"api_key": key})
        await client.aclose()
        return decision.remaining

    assert [asyncio.run(check_and_close()) for _ in range(3)] == [19, 18, 17]
    assert len(client._pools) <= 1


def test_event_loops_of_several_threads_can_share_a_client(shared_server):
    client = AsyncClient(shared_server.url, deadline=RELAXED)
    key = str(uuid.uuid4())

    async def check_and_close():
        decisions = [await client.check(key=key, limit="50/hour") for _ in range(10)]
        await client.aclose()
        return sum(decision.allowed for decision in decisions)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        admitted = list(threads.map(lambda _: asyncio.run(check_and_close()), range(24)))
    assert sum(admitted) == 50


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_event_loop_that_was_closed_with_connections_does_no_harm(shared_server):
    client = AsyncClient(shared_server.url, deadline=RELAXED)
    key = str(uuid.uuid4())
    remaining = [asyncio.run(client.check({"api_key": key})).remaining for _ in range(5)]
    assert remaining == [19, 18, 17, 16, 15]
    assert len(client._pools) <= 1
    del client
    gc.collect()


def test_a_forked_process_uses_its_own_connections_and_locks(fake):
    server = fake(answer_all)
    with Client(server.url, deadline=RELAXED) as client:
        client.check({"a": "b"})
        # As if another thread held it at the time of the fork.
        with client._pool._lock:
            assert sources_in_child(client, {"a": "b"}) == {"memory"}
        assert server.connections == 2
        assert client.check({"a": "b"}).source == "memory"
        assert server.connections == 2


def test_processes_can_be_forked_while_threads_use_the_client(shared_server):
    labels = {"api_key": str(uuid.uuid4())}
    with Client(shared_server.url, deadline=RELAXED) as client:
        client.check(labels)
        stop = threading.Event()

        def use_client():
            while not stop.is_set():
                client.peek({"api_key": "busy"})

        threads = [threading.Thread(target=use_client) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert sources_in_child(client, labels) == {"memory"}
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert client.check(labels).remaining == 20 - 1 - 5 * 2 - 1


def sources_in_child(client, labels):
    """Checks twice in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # A child that waits for a lock of its parent is killed, and reports nothing.
        signal.alarm(10)
        try:
            os.write(writer, "\n".join(client.check(labels).source for _ in range(2)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        sources = set(output.read().split())
    os.waitpid(child, 0)
    return sources


class Failover:
    """A handler whose older connections become silent, as after a failover behind a virtual address."""

    def __init__(self):
        self.generation = 0
        self.all_open = threading.Barrier(20)

    def __call__(self, server, connection):
        generation = self.generation
        while server.read_request(connection) is not None:
            if generation == self.generation:
                if generation == 0:
                    self.all_open.wait()
                connection.sendall(http_response())


def test_after_a_failover_probes_use_new_connections(fake):
    failover = Failover()
    client = Client(fake(failover).url, deadline=RELAXED)
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        decisions = list(threads.map(lambda _: client.check({"a": "b"}), range(20)))
    assert {decision.source for decision in decisions} == {"memory"}
    failover.generation += 1
    started = time.monotonic()
    wait_until(lambda: client.check({"a": "b"}, deadline=DEADLINE).source == "memory", "the server decides again")
    assert time.monotonic() - started < 5 * DEADLINE + SLACK
    client.close()


def test_after_a_failover_probes_of_all_event_loops_use_new_connections(fake):
    failover = Failover()
    client = AsyncClient(fake(failover).url, deadline=RELAXED)

    async def check_many_times(count):
        return await asyncio.gather(*(client.check({"a": "b"}) for _ in range(count)))

    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    in_other_loop = asyncio.run_coroutine_threadsafe(check_many_times(10), other)

    async def run():
        await check_many_times(10)
        await asyncio.wrap_future(in_other_loop)
        failover.generation += 1
        started = time.monotonic()
        while (await client.check({"a": "b"}, deadline=DEADLINE)).source != "memory":
            await asyncio.sleep(0.02)
            assert time.monotonic() - started < 5 * DEADLINE + SLACK
        await client.aclose()

    try:
        asyncio.run(run())
        # A single call is enough, because the idle connections of this event loop are closed too.
        again = asyncio.run_coroutine_threadsafe(check_many_times(1), other).result(PATIENCE)
        assert again[0].source == "memory"
        asyncio.run_coroutine_threadsafe(client.aclose(), other).result(PATIENCE)
    finally:
        other.call_soon_threadsafe(other.stop)
        thread.join()
        other.close()


async def gather_checks(client, count):
    return await asyncio.gather(*(client.check({"a": "b"}) for _ in range(count)))


def answer_in_50_ms(server, connection):
    while server.read_request(connection) is not None:
        time.sleep(0.05)
        connection.sendall(http_response())


def test_waiting_for_a_connection_does_not_open_the_circuit_breaker(fake):
    server = fake(answer_in_50_ms)
    with Client(server.url, max_connections=1, deadline=DEADLINE) as client:
        with concurrent.futures.ThreadPoolExecutor(30) as threads:
            decisions = list(threads.map(lambda _: client.check({"a": "b"}), range(30)))
        assert {decision.source for decision in decisions} == {"memory", "open"}
        assert client.check({"a": "b"}, deadline=RELAXED).source == "memory"

    async def run():
        async with AsyncClient(server.url, max_connections=1, deadline=DEADLINE) as client:
            decisions = await gather_checks(client, 30)
            assert {decision.source for decision in decisions} == {"memory", "open"}
            assert (await client.check({"a": "b"}, deadline=RELAXED)).source == "memory"

    asyncio.run(run())


def test_a_busy_event_loop_does_not_open_the_circuit_breaker(fake):
    server = fake(answer_all)
    reported = []

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
        async with AsyncClient(server.url, deadline=DEADLINE) as client:
            pool = client._pool()
            connect = pool._connect

            async def connect_and_block(expires):
                connection = await connect(expires)
                time.sleep(1.5 * DEADLINE)  # noqa: ASYNC251
                return connection

            pool._connect = connect_and_block
            sources = [decision.source for decision in await gather_checks(client, 5)]
            assert "open" in sources
            pool._connect = connect
            connections = server.connections
            assert (await client.check({"a": "b"}, deadline=RELAXED)).source == "memory"
            assert server.connections == connections, "the new connections are kept"
            await asyncio.sleep(0)
            gc.collect()

    asyncio.run(run())
    assert reported == []


def test_a_cancellation_while_connecting_is_not_lost(fake):
    server = fake(answer_all)

    async def run():
        outcomes = set()
        for round_number in range(100):
            async with AsyncClient(server.url, deadline=RELAXED) as client:
                task = asyncio.create_task(client.check({"a": "b"}))
                for _ in range(round_number % 8):
                    await asyncio.sleep(0)
                if task.cancel():
                    outcomes.update(type(result) for result in await asyncio.gather(task, return_exceptions=True))
        return outcomes

    assert asyncio.run(run()) == {asyncio.CancelledError}


def test_connections_that_are_no_longer_needed_are_closed(fake, monkeypatch):
    for module in (sluicegate.blocking, sluicegate.aio):
        monkeypatch.setattr(module, "MAX_IDLE", 0.5)
    all_open = threading.Barrier(5)

    def answer_together_then_at_once(server, connection):
        server.read_request(connection)
        all_open.wait()
        connection.sendall(http_response())
        answer_all(server, connection)

    server = fake(answer_together_then_at_once)
    with Client(server.url, deadline=RELAXED) as client:
        with concurrent.futures.ThreadPoolExecutor(5) as threads:
            list(threads.map(lambda _: client.check({"a": "b"}), range(5)))
        for _ in range(8):
            time.sleep(0.1)
            client.check({"a": "b"})
        assert len(client._pool._idle) == 1

    async def run():
        async with AsyncClient(server.url, deadline=RELAXED) as client:
            await gather_checks(client, 5)
            for _ in range(8):
                await asyncio.sleep(0.1)
                await client.check({"a": "b"})
            return len(client._pool()._idle)

    assert asyncio.run(run()) == 1


def test_a_call_without_a_policy_is_sent_while_the_circuit_breaker_is_open(connect, fake, monkeypatch):
    monkeypatch.setattr("sluicegate.circuit_breaker.FIRST_BACKOFF", 60.0)

    def answer_after_three(server, connection):
        while server.read_request(connection) is not None and len(server.requests) > 3:
            connection.sendall(http_response())
        connection.close()

    server = fake(answer_after_three)
    client = connect(server.url)
    assert [client.check({"a": "b"}).source for _ in range(4)] == ["open"] * 4
    assert len(server.requests) == 3
    assert client.charge({"a": "b"}).allowed
    assert client.check({"a": "b"}).source == "memory", "the answer closes the circuit breaker"
