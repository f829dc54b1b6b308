"""asyncio connections and their pool."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from concurrent.futures import Future
from typing import cast

from sluicegate.blocking import MAX_IDLE
from sluicegate.deadline import remaining
from sluicegate.endpoint import Endpoint
from sluicegate.errors import BadResponse, NotSent, TlsError, Unavailable
from sluicegate.http1 import Response, ResponseParser
from sluicegate.readiness import is_readable
from sluicegate.resolver import Resolver


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
        self._fail(Unavailable("connection closed before the response"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the request in flight."""
        self._is_closed = True
        self._fail(Unavailable(f"connection lost: {error}" if error else "connection closed before the response"))

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
        response: asyncio.Future[Response] = loop.create_future()
        self._response = response
        self._parser = ResponseParser()
        # A timer instead of a cancellation: a response that arrived while the event loop was busy is not discarded.
        timer = loop.call_later(remaining(expires), self._fail, Unavailable("deadline exceeded"))
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
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            await self._wait_for_turn(expires)
        try:
            return await self._send(request, expires)
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
        turn = loop.create_future()
        error = NotSent(f"all {self._max_connections} connections are in use: raise max_connections or the deadline")
        timer = loop.call_later(remaining(expires), _fail, turn, error)
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
            connection = self._idle.pop()
            if not connection.is_usable():
                connection.close()
                continue
            try:
                return await self._exchange(connection, request, expires)
            except NotSent:
                continue
        return await self._exchange(await self._connect(expires), request, expires)

    async def _exchange(self, connection: Connection, request: bytes, expires: float) -> Response:
        try:
            response = await connection.exchange(request, expires)
        except BaseException:
            # Also after a cancellation: the response may still arrive, and belongs to no later request.
            connection.close()
            raise
        if response.keep_alive:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self, expires: float) -> Connection:
        addresses = await self._addresses(expires)
        loop = asyncio.get_running_loop()
        tls = self._endpoint.tls
        hostname = self._endpoint.host if tls is not None else None
        for position, address in enumerate(addresses):
            # An address that does not answer leaves time for the others.
            timeout = remaining(expires) / (len(addresses) - position)
            connecting = loop.create_connection(
                Connection, address, self._endpoint.port, ssl=tls, server_hostname=hostname
            )
            try:
                _, connection = await asyncio.wait_for(connecting, timeout)
            except ssl.SSLError as error:
                raise TlsError(f"TLS failed: {error}: check ca and client_cert") from error
            except (OSError, asyncio.TimeoutError) as error:
                failure = error
                continue
            self._resolver.prefer(address)
            return connection
        raise NotSent(f"cannot connect: {str(failure) or 'deadline exceeded'}") from failure

    async def _addresses(self, expires: float) -> tuple[str, ...]:
        addresses = self._resolver.addresses()
        if isinstance(addresses, Future):
            lookup = asyncio.shield(asyncio.wrap_future(addresses))
            try:
                return await asyncio.wait_for(lookup, remaining(expires))
            except asyncio.TimeoutError as error:
                raise NotSent(f"cannot resolve {self._endpoint.host} within the deadline") from error
            except OSError as error:
                raise NotSent(str(error)) from error
        return addresses


def _fail(turn: asyncio.Future[None], error: NotSent) -> None:
    if not turn.done():
        turn.set_exception(error)
