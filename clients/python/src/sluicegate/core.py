"""The part of a client that does no I/O: request bodies, responses, circuit breaker and failure policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sluicegate.check import Check, cost_to_json, encode
from sluicegate.circuit_breaker import CircuitBreaker
from sluicegate.decision import Decision, decision_from_json
from sluicegate.endpoint import Path, parse_endpoint
from sluicegate.errors import (
    AuthenticationError,
    BadResponse,
    HoldConflict,
    InvalidRequest,
    NotSent,
    SluicegateError,
    Unavailable,
)
from sluicegate.failure_policy import OnFailure, policy_for
from sluicegate.hold_request import HoldAdjustment, HoldAnswer, HoldRequest, answer_from_json
from sluicegate.http1 import RequestEncoder, Response
from sluicegate.message_log import MessageLog

# The shortest and the longest deadline, in seconds.
MIN_DEADLINE = 0.001
MAX_DEADLINE = 60
# Time that a call takes at most, in seconds: connecting, writing and reading.
DEFAULT_DEADLINE = 0.1
# Maximum number of connections of a client.
DEFAULT_MAX_CONNECTIONS = 64
# Maximum number of checks in one call.
MAX_CHECKS = 1000

logger = logging.getLogger("sluicegate")

Result = TypeVar("Result")
Decides = Literal["check", "peek"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a client."""

    url: str
    token: str | None
    deadline: float
    on_failure: OnFailure
    ca: Path | None
    client_cert: tuple[Path, Path] | None
    max_connections: int


class Core:
    """Prepares requests and reads responses, for the blocking and the asyncio client."""

    def __init__(self, settings: Settings) -> None:
        self.endpoint = parse_endpoint(settings.url, ca=settings.ca, client_cert=settings.client_cert)
        token = settings.token
        if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
            raise ValueError(
                "token is not a token: use printable ASCII without spaces, and remove a newline at its end"
            )
        if settings.max_connections < 1:
            raise ValueError(f"max_connections {settings.max_connections} is out of range: use at least 1")
        self._default_deadline = _valid_deadline(settings.deadline)
        self._encoder = RequestEncoder(self.endpoint.authority, token)
        self._has_token = token is not None
        self._policy = policy_for(settings.on_failure)
        self._breaker = CircuitBreaker()
        self._errors = MessageLog(logger)

    def deadline(self, deadline: float | None) -> float:
        """Returns the time that a call may take, in seconds."""
        return self._default_deadline if deadline is None else _valid_deadline(deadline)

    def encode_check(self, operation: Decides, check: Check, *, headers: bool, deadline: float) -> bytes:
        """Encodes a check or a peek."""
        fields = check.to_json()
        if headers:
            fields["headers"] = True
        return self._encode(operation, fields, deadline)

    def encode_checks(self, checks: Sequence[Check], *, headers: bool, deadline: float) -> bytes:
        """Encodes several checks."""
        if len(checks) > MAX_CHECKS:
            raise InvalidRequest(f"{len(checks)} checks are too many: send at most {MAX_CHECKS} in one call")
        requested = {"headers": True} if headers else {}
        return self._encode("check", {"checks": [check.to_json() | requested for check in checks]}, deadline)

    def encode_adjustment(
        self,
        operation: Literal["charge", "refund", "reset", "explain"],
        check: Check,
        options: Mapping[str, object],
        *,
        deadline: float,
    ) -> bytes:
        """Encodes a call for which no failure policy applies. Options that are `None` are omitted."""
        fields = check.subject_to_json()
        if operation != "reset":
            fields["cost"] = cost_to_json(check.cost)
        fields.update((name, value) for name, value in options.items() if value is not None)
        return self._encode(operation, fields, deadline)

    def encode_hold(self, request: HoldRequest, *, deadline: float) -> bytes:
        """Encodes a hold."""
        return self._encode("hold", dict(request.fields), deadline)

    def encode_hold_adjustment(self, adjustment: HoldAdjustment, *, deadline: float) -> bytes:
        """Encodes a call that settles, releases or renews a hold."""
        return self._encode(adjustment.operation, dict(adjustment.fields), deadline)

    def admits(self) -> bool:
        """Returns whether a call may use the server."""
        return self._breaker.admits()

    def received(self, response: Response, read: Callable[[Any], Result]) -> Result:
        """Reads a response. Raises the exception that its status stands for."""
        if self._breaker.succeeded():
            logger.warning("sluicegate server %s available again", self.endpoint)
        try:
            body = json.loads(response.body)
            if response.status == 200:
                return read(body)
            detail = body["detail"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadResponse(
                f"{self.endpoint} answered with status {response.status} and an unknown body: "
                "check that url is the HTTP address of a sluicegate server"
            ) from error
        raise self._error(response.status, str(detail))

    @property
    def is_breaker_open(self) -> bool:
        """Whether the circuit breaker is open."""
        return self._breaker.is_open

    def failed(self, error: Unavailable) -> Unavailable:
        """Reports that the server did not answer. Returns the exception for the caller."""
        if not error.is_local and self._breaker.failed():
            logger.warning(
                "sluicegate server %s unavailable (%s); circuit breaker open, applying the failure policy",
                self.endpoint,
                error,
            )
        problem = "not reached in time" if error.is_local else "unavailable"
        return type(error)(f"sluicegate server {self.endpoint} {problem}: {error}", is_local=error.is_local)

    def decide_without_server(self, operation: Decides, check: Check) -> Decision:
        """Decides by the failure policy."""
        return self._policy.decide(check, charge=operation == "check")

    def decide_despite(self, error: SluicegateError, check: Check) -> Decision:
        """Logs an error and decides by the failure policy."""
        self.report(error)
        return self.decide_without_server("check", check)

    def report(self, error: SluicegateError) -> None:
        """Logs an error that the failure policy hides from the caller, once per minute for each message."""
        self._errors.error(f"{error}; the failure policy decided")

    def report_dropped(self, error: SluicegateError) -> None:
        """Logs that a hold could not be settled or released, once per minute for each message."""
        self._errors.error(f"{error}; the hold was not settled, and counts until it expires")

    def circuit_open(self) -> Unavailable:
        """Returns the exception for a call that is not sent while the circuit breaker is open."""
        return NotSent(f"sluicegate server {self.endpoint} unavailable: circuit breaker open")

    def read_hold(self, response: Response, request: HoldRequest) -> HoldAnswer:
        """Reads the answer to a hold."""
        return self.received(response, lambda body: answer_from_json(request, body))

    def read_decision(self, response: Response, check: Check) -> Decision:
        """Reads the decision about a check."""
        return self.received(response, lambda body: decision_from_json(body, check.limit_name))

    def read_decisions(self, response: Response, checks: Sequence[Check]) -> list[Decision | InvalidRequest]:
        """Reads the decisions of several checks. A check that is invalid for a rule has an exception instead."""

        def read(body: Any) -> list[Decision | InvalidRequest]:
            return [
                InvalidRequest(result["detail"]) if "detail" in result else decision_from_json(result, check.limit_name)
                for result, check in zip(body["results"], checks, strict=True)
            ]

        return self.received(response, read)

    def _encode(self, operation: str, fields: dict[str, object], deadline: float) -> bytes:
        # Shorter than the deadline of this client, so that the answer of the server's failure policy arrives in time.
        fields["deadline_ms"] = max(1, int(deadline * 900))
        return self._encoder.encode(f"/v1/{operation}", encode(fields))

    def _error(self, status: int, detail: str) -> SluicegateError:
        if status == 401 or (status == 403 and self._has_token):
            return AuthenticationError(
                f"sluicegate server {self.endpoint} rejected the token (status {status}: {detail}): "
                "pass a token of its configuration that has the scope of this call as token=…"
            )
        if status == 503:
            return Unavailable(f"sluicegate server {self.endpoint}: {detail}")
        if status == 409:
            return HoldConflict(f"sluicegate server {self.endpoint}: {detail}")
        if status >= 500:
            return BadResponse(f"sluicegate server {self.endpoint} failed with status {status}: {detail}")
        return InvalidRequest(f"sluicegate server {self.endpoint}: {detail}")


def _valid_deadline(deadline: float) -> float:
    if not MIN_DEADLINE <= deadline <= MAX_DEADLINE:
        raise ValueError(f"deadline {deadline!r} is out of range: use {MIN_DEADLINE} to {MAX_DEADLINE} seconds")
    return deadline
