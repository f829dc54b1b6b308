"""Exceptions of the client. Every message names the fix."""

from __future__ import annotations


class SluicegateError(Exception):
    """Base class of all exceptions of this package."""


class InvalidRequest(SluicegateError, ValueError):
    """The request is invalid: nothing was charged, and a retry cannot succeed."""


class InvalidValue(InvalidRequest):
    """A value is unusable: a label or key that is too long or not text, a repeated header, an invalid cost.

    Such values usually come from the application's own client, so the integrations answer with 400.
    """


class HoldConflict(InvalidRequest):
    """The id belongs to a hold with another cost, or to a hold that has ended. Nothing was charged."""


class AuthenticationError(SluicegateError):
    """The server rejected the token, or the token lacks the scope of the call."""


class Unavailable(SluicegateError):
    """The server or its store did not answer before the deadline.

    The request may have been charged, so a check is never repeated automatically. With `is_local`, the deadline was
    spent in this process, for example by waiting for a connection, so the circuit breaker does not count it.
    """

    def __init__(self, message: str, *, is_local: bool = False) -> None:
        super().__init__(message)
        self.is_local = is_local


class BadResponse(Unavailable):
    """The response is not one of a sluicegate server."""


class ConnectionLost(Unavailable):
    """The connection was lost before the response. The request may have been charged."""


class TlsError(Unavailable):
    """The TLS handshake failed: the certificate of the server or of the client was rejected."""


class NotSent(Unavailable):
    """The connection failed before any byte of the request was written. The request was not charged."""
