"""asyncio connections and their pool."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from sluicegate.blocking import MAX_IDLE, no_connection
from sluicegate.deadline import remaining
from sluicegate.endpoint import Endpoint
from sluicegate.errors import BadResponse, ConnectionLost, NotSent, TlsError, Unavailable
from sluicegate.http1 import Response, ResponseParser
from sluicegate.readiness import is_readable
from sluicegate.resolver import Resolver

Result = TypeVar("Result")


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._parser = ResponseParser()
        self._response: asyncio.Future[Response] | None = None
        self._is_closed = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """Completes the response, or closes the connection if no request is in flight."""
        if self._response is None:
            self.close()
            return
        try:
            response = self._parser.feed(data)
        except BadResponse as error:
            self._fail(error)
            return
        if response is not None and not self._response.done():
            self._response.set_result(response)

    def eof_received(self) -> None:
        """Closes the connection: the server sends nothing more."""
        self._is_closed = True
        self._fail(ConnectionLost("connection closed before the response"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the request in flight."""
        self._is_closed = True
        self._fail(ConnectionLost(f"connection lost: {error}" if error else "connection closed before the response"))

    def is_usable(self) -> bool:
        """Returns whether the server kept the connection open while it was idle."""
        if self._is_closed or time.monotonic() - self.idle_since >= MAX_IDLE:
            return False
        # The event loop may not have polled since the server closed the connection.
        return not is_readable(self._descriptor)

    async def exchange(self, request: bytes, expires: float) -> Response:
        """Sends a request and reads its response. After an exception the connection must be closed."""
        transport = self._transport
        if transport is None or self._is_closed:
            raise NotSent("connection lost")
        loop = asyncio.get_running_loop()
        # Before the future is created: without a time left, there is no caller to retrieve its exception.
        left = _remaining(expires)
        response: asyncio.Future[Response] = loop.create_future()
        self._response = response
        self._parser = ResponseParser()
        # A timer instead of a cancellation: a response that arrived while the event loop was busy is not discarded.
        timer = loop.call_later(left, self._fail, Unavailable("deadline exceeded"))
        try:
            transport.write(request)
            return await response
        finally:
            timer.cancel()
            self._response = None

    def close(self) -> None:
        """Closes the connection at once."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Unavailable) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)


class Pool:
    """Keep-alive connections of one event loop. The most recently used one is used first."""

    def __init__(self, endpoint: Endpoint, resolver: Resolver, max_connections: int) -> None:
        self._endpoint = endpoint
        self._resolver = resolver
        self._max_connections = max_connections
        self._free = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: list[Connection] = []

    async def send(self, request: bytes, expires: float) -> Response:
        """Sends a request on a pooled or new connection.

        A request is repeated only on a pooled connection that was lost before the first byte was written.
        """
        is_queued = self._free == 0 or bool(self._waiting)
        if is_queued:
            await self._wait_for_turn(expires)
        else:
            self._free -= 1
        try:
            return await self._send(request, expires)
        except Unavailable as error:
            # The server had less time than the deadline.
            error.is_local = error.is_local or (is_queued and time.monotonic() >= expires)
            raise
        finally:
            self._pass_turn()

    def close(self) -> None:
        """Closes the idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _wait_for_turn(self, expires: float) -> None:
        """Waits until a connection is free."""
        loop = asyncio.get_running_loop()
        left = _remaining(expires)
        turn = loop.create_future()
        timer = loop.call_later(left, _fail, turn, no_connection(self._max_connections))
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_turn()
            raise
        finally:
            timer.cancel()

    def _pass_turn(self) -> None:
        """Lets the next caller use a connection."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _send(self, request: bytes, expires: float) -> Response:
        while self._idle:
            # Before a connection is taken, so that a late call does not close it.
            _remaining(expires)
            connection = self._idle.pop()
            if not connection.is_usable():
                connection.close()
                continue
            try:
                return await self._exchange(connection, request, expires)
            except NotSent:
                continue
        connection = await self._connect(expires)
        try:
            _remaining(expires)
        except NotSent:
            self._keep(connection)
            raise
        return await self._exchange(connection, request, expires)

    async def _exchange(self, connection: Connection, request: bytes, expires: float) -> Response:
        try:
            response = await connection.exchange(request, expires)
        except BaseException:
            # Also after a cancellation: the response may still arrive, and belongs to no later request.
            connection.close()
            raise
        if response.keep_alive:
            self._keep(connection)
        else:
            connection.close()
        return response

    def _keep(self, connection: Connection) -> None:
        """Returns a connection to the pool, and closes those that were idle for too long."""
        now = connection.idle_since = time.monotonic()
        self._idle.append(connection)
        # The oldest connections are never reused while newer ones suffice.
        expired = list(itertools.takewhile(lambda kept: now - kept.idle_since >= MAX_IDLE, self._idle))
        del self._idle[: len(expired)]
        for old in expired:
            old.close()

    async def _connect(self, expires: float) -> Connection:
        addresses = await self._addresses(expires)
        loop = asyncio.get_running_loop()
        tls = self._endpoint.tls
        hostname = self._endpoint.host if tls is not None else None
        for position, address in enumerate(addresses):
            # An address that does not answer leaves time for the others.
            timeout = _remaining(expires) / (len(addresses) - position)
            connecting = loop.create_task(
                loop.create_connection(Connection, address, self._endpoint.port, ssl=tls, server_hostname=hostname)
            )
            try:
                _, connection = await _within(connecting, timeout, _discard_connection)
            except ssl.SSLError as error:
                raise TlsError(f"TLS failed: {error}: check ca and client_cert") from error
            except OSError as error:
                failure = error
                continue
            self._resolver.prefer(address)
            return connection
        raise NotSent(f"cannot connect: {str(failure) or 'deadline exceeded'}") from failure

    async def _addresses(self, expires: float) -> tuple[str, ...]:
        addresses = self._resolver.addresses()
        if isinstance(addresses, Future):
            lookup = asyncio.wrap_future(addresses)
            try:
                return await _within(lookup, _remaining(expires), _ignore_result)
            except TimeoutError as error:
                raise NotSent(f"cannot resolve {self._endpoint.host} within the deadline") from error
            except OSError as error:
                raise NotSent(str(error)) from error
        return addresses


def _remaining(expires: float) -> float:
    """Returns the time that is left. If there is none, the event loop was too busy to send the request."""
    try:
        return remaining(expires)
    except Unavailable as error:
        raise NotSent("deadline exceeded before the request was sent: event loop busy", is_local=True) from error


async def _within(
    future: asyncio.Future[Result], seconds: float, abandon: Callable[[asyncio.Future[Result]], None]
) -> Result:
    """Waits for a future. Raises `TimeoutError` after the time.

    `asyncio.wait_for` discards a cancellation before Python 3.12, if the future is done at the same time. `abandon` is
    called if the result is not used.
    """
    try:
        await asyncio.wait({future}, timeout=seconds)
    except asyncio.CancelledError:
        abandon(future)
        raise
    if not future.done():
        abandon(future)
        raise TimeoutError("deadline exceeded")
    return future.result()


def _discard_connection(connecting: asyncio.Future[tuple[asyncio.Transport, Connection]]) -> None:
    """Cancels the attempt. If it is already complete, the connection is closed."""
    connecting.cancel()
    connecting.add_done_callback(_close_if_connected)


def _close_if_connected(connecting: asyncio.Future[tuple[asyncio.Transport, Connection]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()


def _ignore_result(lookup: asyncio.Future[tuple[str, ...]]) -> None:
    """Retrieves a later exception, so that it is not logged. The lookup continues for other callers."""
    lookup.add_done_callback(lambda done: done.cancelled() or done.exception())


def _fail(turn: asyncio.Future[None], error: NotSent) -> None:
    if not turn.done():
        turn.set_exception(error)
