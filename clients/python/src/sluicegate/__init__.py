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
    InvalidRequest,
    InvalidValue,
    NotSent,
    SluicegateError,
    TlsError,
    Unavailable,
)
from sluicegate.failure_policy import LocalBucket
from sluicegate.labels import client_ip, header, method, path, route
from sluicegate.limit import Limit

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "BadResponse",
    "Check",
    "Client",
    "Decision",
    "Explanation",
    "InvalidRequest",
    "InvalidValue",
    "Limit",
    "LocalBucket",
    "NotSent",
    "Reset",
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
