"""Client of the sluicegate rate limiter.

>>> from sluicegate import Client
>>> client = Client("http://127.0.0.1:8080", on_failure="open")
"""

from sluicegate.async_client import AsyncClient
from sluicegate.check import Check
from sluicegate.client import Client
from sluicegate.decision import Decision, Explanation, Reset, Tier
from sluicegate.errors import (
    AuthenticationError,
    BadResponse,
    ConnectionLost,
    HoldConflict,
    InvalidRequest,
    InvalidValue,
    NotSent,
    SluicegateError,
    TlsError,
    Unavailable,
)
from sluicegate.failure_policy import LocalBucket
from sluicegate.hold import AsyncHold, Hold
from sluicegate.labels import client_ip, header, method, path, route
from sluicegate.limit import Limit
from sluicegate.settlement import SettledTier, Settlement

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncHold",
    "AuthenticationError",
    "BadResponse",
    "Check",
    "Client",
    "ConnectionLost",
    "Decision",
    "Explanation",
    "Hold",
    "HoldConflict",
    "InvalidRequest",
    "InvalidValue",
    "Limit",
    "LocalBucket",
    "NotSent",
    "Reset",
    "SettledTier",
    "Settlement",
    "SluicegateError",
    "Tier",
    "TlsError",
    "Unavailable",
    "client_ip",
    "header",
    "method",
    "path",
    "route",
]
