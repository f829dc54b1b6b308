"""Blocking connections and their pool."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from sluicegate.deadline import remaining
from sluicegate.endpoint import Endpoint
from sluicegate.errors import ConnectionLost, NotSent, TlsError, Unavailable
from sluicegate.fork import reset_after_fork
from sluicegate.http1 import Response, ResponseParser
from sluicegate.readiness import is_readable
from sluicegate.resolver import Resolver

# How long a connection stays in the pool without use, in seconds. Shorter than the idle timeout of the server (30 s).
MAX_IDLE = 20.0

_READ_BYTES = 64 * 1024


class Connection:
    """A connection that carries one request at a time."""

    __slots__ = ("_socket", "idle_since")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.idle_since = 0.0

    def is_usable(self) -> bool:
        """Returns whether the server kept the connection open while it was idle."""
        return time.monotonic() - self.idle_since < MAX_IDLE and not is_readable(self._socket.fileno())

    def exchange(self, request: bytes, expires: float) -> Response:
        """Sends a request and reads its response. After an exception the connection must be closed."""
        self._send(request, expires)
        parser = ResponseParser()
        while True:
            try:
                self._socket.settimeout(remaining(expires))
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise _unavailable(error) from error
            if not data:
                raise ConnectionLost("connection closed before the response")
            response = parser.feed(data)
            if response is not None:
                return response

    def _send(self, request: bytes, expires: float) -> None:
        try:
            self._socket.settimeout(remaining(expires))
            sent = self._socket.send(request)
        except ConnectionError as error:
            raise NotSent(f"connection lost: {error}") from error
        except OSError as error:
            raise _unavailable(error) from error
        if sent < len(request):
            try:
                self._socket.settimeout(remaining(expires))
                self._socket.sendall(memoryview(request)[sent:])
            except OSError as error:
                raise _unavailable(error) from error

    def close(self) -> None:
        """Closes the connection without a TLS shutdown, which would block."""
        self._socket.close()


class Pool:
    """Keep-alive connections of a thread-safe client. The most recently used one is used first."""

    def __init__(self, endpoint: Endpoint, max_connections: int) -> None:
        self._endpoint = endpoint
        self._resolver = Resolver(endpoint.host)
        self._max_connections = max_connections
        self._free = threading.Semaphore(max_connections)
        # The oldest first.
        self._idle: list[Connection] = []
        # Reentrant, as all locks of a call: the garbage collector may close a generator that ends a hold, at any time.
        self._lock = threading.RLock()
        reset_after_fork(self)

    def send(self, request: bytes, expires: float) -> Response:
        """Sends a request on a pooled or new connection.

        A request is repeated only on a pooled connection that was lost before the first byte was written.
        """
        free = self._free
        is_queued = not free.acquire(blocking=False)
        if is_queued and not free.acquire(timeout=remaining(expires)):
            raise no_connection(self._max_connections)
        try:
            return self._send(request, expires)
        except Unavailable as error:
            # The server had less time than the deadline.
            error.is_local = error.is_local or (is_queued and time.monotonic() >= expires)
            raise
        finally:
            free.release()

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def reset_after_fork(self) -> None:
        """Drops the connections of the parent process, and locks that another thread may have held."""
        self._free = threading.Semaphore(self._max_connections)
        self._lock = threading.RLock()
        self.close()

    def _send(self, request: bytes, expires: float) -> Response:
        while (connection := self._take_idle()) is not None:
            try:
                return self._exchange(connection, request, expires)
            except NotSent:
                continue
        return self._exchange(self._connect(expires), request, expires)

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()

    def _exchange(self, connection: Connection, request: bytes, expires: float) -> Response:
        try:
            response = connection.exchange(request, expires)
        except BaseException:
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
        expired: list[Connection] = []
        with self._lock:
            self._idle.append(connection)
            # The oldest connections are never reused while newer ones suffice.
            while self._idle and now - self._idle[0].idle_since >= MAX_IDLE:
                expired.append(self._idle.pop(0))
        for old in expired:
            old.close()

    def _connect(self, expires: float) -> Connection:
        addresses = self._addresses(expires)
        for position, address in enumerate(addresses):
            # An address that does not answer leaves time for the others.
            timeout = remaining(expires) / (len(addresses) - position)
            try:
                connected = socket.create_connection((address, self._endpoint.port), timeout)
            except OSError as error:
                failure = error
                continue
            self._resolver.prefer(address)
            return Connection(self._secured(connected, expires))
        raise NotSent(f"cannot connect: {failure}") from failure

    def _addresses(self, expires: float) -> tuple[str, ...]:
        addresses = self._resolver.addresses()
        if isinstance(addresses, Future):
            try:
                return addresses.result(timeout=remaining(expires))
            except FutureTimeoutError as error:
                raise NotSent(f"cannot resolve {self._endpoint.host} within the deadline") from error
            except OSError as error:
                raise NotSent(str(error)) from error
        return addresses

    def _secured(self, connected: socket.socket, expires: float) -> socket.socket:
        """Returns the socket with TLS, if the endpoint uses it."""
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._endpoint.tls is None:
                return connected
            connected.settimeout(remaining(expires))
            return self._endpoint.tls.wrap_socket(connected, server_hostname=self._endpoint.host)
        except OSError as error:
            connected.close()
            raise _unavailable(error) from error


def no_connection(max_connections: int) -> NotSent:
    """Returns the exception for a call that waited for a connection until its deadline."""
    return NotSent(
        f"all {max_connections} connections are in use: raise max_connections or the deadline", is_local=True
    )


def _unavailable(error: OSError) -> Unavailable:
    if isinstance(error, TimeoutError):
        return Unavailable("deadline exceeded")
    if isinstance(error, ssl.SSLError):
        return TlsError(f"TLS failed: {error}: check ca and client_cert")
    return ConnectionLost(f"connection lost: {error}")
