"""The HTTP codec, without I/O."""

import pytest

from conftest import ALLOWED, http_response
from sluicegate.errors import BadResponse
from sluicegate.http1 import MAX_BODY_BYTES, MAX_HEAD_BYTES, RequestEncoder, ResponseParser


def test_a_request_has_a_length_and_a_token():
    encoded = RequestEncoder("limits.example:8080", "s3cret").encode("/v1/check", b"{}")
    head, _, body = encoded.partition(b"\r\n\r\n")
    assert body == b"{}"
    assert head.split(b"\r\n") == [
        b"POST /v1/check HTTP/1.1",
        b"host: limits.example:8080",
        b"authorization: Bearer s3cret",
        b"content-type: application/json",
        b"content-length: 2",
    ]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_response_can_arrive_in_pieces_of_any_size(size):
    data = http_response(extra=b"Date: today\r\n")
    parser = ResponseParser()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    results = [parser.feed(piece) for piece in pieces]
    assert results[:-1] == [None] * (len(pieces) - 1)
    assert (results[-1].status, results[-1].body, results[-1].keep_alive) == (200, ALLOWED, True)


def test_a_response_can_end_the_connection():
    assert not ResponseParser().feed(http_response(extra=b"Connection: Close\r\n")).keep_alive


BAD = {
    b"SSH-2.0-OpenSSH\r\n\r\n": "not the status",
    b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n": "not the status",
    b"HTTP/1.1 100 Continue\r\n\r\n": "not the status",
    b"HTTP/1.1 abc\r\n\r\n": "not the status",
    b"HTTP/1.1 200 OK\r\n\r\n": "no content-length",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n": "invalid content-length",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n": "invalid content-length",
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1): "at most",
    b"HTTP/1.1 200 OK\r\ncontent-length: %s\r\n\r\n" % (b"9" * 5000): "invalid content-length",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n": "transfer-encoding",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES: "bytes of headers",
    http_response() + b"HTTP/1.1": "bytes after its end",
}


@pytest.mark.parametrize(("data", "message"), BAD.items(), ids=[f"{number}" for number in range(len(BAD))])
def test_other_responses_are_rejected(data, message):
    with pytest.raises(BadResponse, match=message):
        ResponseParser().feed(data)
