"""The settings of the clients of the test applications."""

import os

from sluicegate import LocalBucket

URL = os.environ.get("LIMITER_URL", "http://127.0.0.1:1")
TOKEN = os.environ.get("LIMITER_TOKEN")

# A deadline that a busy machine keeps.
RELIABLE = {"url": URL, "token": TOKEN, "deadline": 5}
# Clients for the time without the server.
OUTAGE_DEADLINE = 0.4
POLICIES = {
    policy: {"url": URL, "token": TOKEN, "deadline": OUTAGE_DEADLINE, "on_failure": on_failure}
    for policy, on_failure in {"open": "open", "closed": "closed", "local": LocalBucket("3/hour")}.items()
}
WRONG_TOKEN = {"url": URL, "token": "wr0ng", "on_failure": LocalBucket("3/hour"), "deadline": 5}
CLIENTS = {**POLICIES, "wrong-token": WRONG_TOKEN}
