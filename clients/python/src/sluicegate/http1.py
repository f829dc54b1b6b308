"""HTTP/1.1 without I/O: encodes POST requests and parses their responses.

Supports what a sluicegate server sends: every response has a Content-Length.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluicegate.errors import BadResponse

# Maximum size of the status line and the headers of a response.
MAX_HEAD_BYTES = 16 * 1024
# Maximum size of a body: 1000 decisions with many tiers fit.
MAX_BODY_BYTES = 16 * 1024 * 1024

_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response."""

    status: int
    body: bytes
    keep_alive: bool


class RequestEncoder:
    """Encodes requests to one server."""

    __slots__ = ("_heads", "_rest_of_head")

    def __init__(self, authority: str, token: str | None) -> None:
        authorization = f"authorization: Bearer {token}\r\n" if token is not None else ""
        self._rest_of_head = (
            f" HTTP/1.1\r\nhost: {authority}\r\n{authorization}content-type: application/json\r\ncontent-length: "
        )
        self._heads: dict[str, bytes] = {}

    def encode(self, path: str, body: bytes) -> bytes:
        """Returns the bytes of a request. Only a fixed set of paths may be used, because their heads are kept."""
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = f"POST {path}{self._rest_of_head}".encode("ascii")
        return b"%b%d\r\n\r\n%b" % (head, len(body), body)


class ResponseParser:
    """Parses one response incrementally."""

    __slots__ = ("_body_start", "_buffer", "_end", "_keep_alive", "_status")

    def __init__(self) -> None:
        self._buffer = b""
        self._status = 0
        self._keep_alive = True
        self._body_start = 0
        self._end: int | None = None

    def feed(self, data: bytes) -> Response | None:
        """Adds received bytes. Returns the response once it is complete."""
        buffer = self._buffer = self._buffer + data if self._buffer else data
        if self._end is None and not self._parse_head(buffer):
            return None
        end = self._end
        if end is None or len(buffer) < end:
            return None
        if len(buffer) > end:
            raise BadResponse("response has bytes after its end")
        return Response(self._status, buffer[self._body_start : end], self._keep_alive)

    def _parse_head(self, buffer: bytes) -> bool:
        """Parses the status line and the headers. Returns whether they are complete."""
        end_of_head = buffer.find(_END_OF_HEAD)
        if end_of_head > MAX_HEAD_BYTES or (end_of_head < 0 and len(buffer) > MAX_HEAD_BYTES):
            raise BadResponse(f"response has more than {MAX_HEAD_BYTES} bytes of headers")
        if end_of_head < 0:
            return False
        status_line, *lines = buffer[:end_of_head].split(b"\r\n")
        version, _, rest = status_line.partition(b" ")
        status = rest[:3]
        if version != b"HTTP/1.1" or not status.isdigit() or len(status) != 3 or status < b"200":
            raise BadResponse(
                f"response starts with {status_line[:80]!r}, which is not the status of an HTTP/1.1 response"
            )
        self._status = int(status)
        length = self._parse_headers(lines)
        if length > MAX_BODY_BYTES:
            raise BadResponse(f"response has {length} bytes: at most {MAX_BODY_BYTES} are read")
        self._body_start = end_of_head + len(_END_OF_HEAD)
        self._end = self._body_start + length
        return True

    def _parse_headers(self, lines: list[bytes]) -> int:
        """Returns the length of the body."""
        length: bytes | None = None
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if length is not None or not value.isdigit() or len(value) > 12:
                    raise BadResponse("response has an invalid content-length")
                length = value
            elif name == b"connection":
                self._keep_alive = value.lower() != b"close"
            elif name == b"transfer-encoding":
                raise BadResponse("response has a transfer-encoding, which sluicegate does not send")
        if length is None:
            raise BadResponse("response has no content-length")
        return int(length)
