"""Flask applications in this process, with a real server."""

import uuid

import flask
import pytest

from conftest import RELAXED
from sluicegate import Client, header
from sluicegate.flask import RateLimiter


@pytest.fixture
def limiter(shared_server):
    with Client(shared_server.url, deadline=RELAXED) as client:
        yield RateLimiter(client, key=header("x-user"))


@pytest.fixture
def app():
    return flask.Flask("test")


@pytest.fixture
def user():
    return {"x-user": str(uuid.uuid4())}


def test_the_headers_of_the_innermost_limit_are_kept(app, limiter, user):
    limiter.limit_app(app, "1000/hour", scope="application")

    @app.get("/")
    @limiter.limit("100/hour", scope="outer")
    @limiter.limit("5/hour", scope="inner")
    def index():
        return str(flask.g.sluicegate_decision.limit)

    response = app.test_client().get("/", headers=user)
    assert response.text == "5"
    assert response.headers["ratelimit-policy"] == '"inner";q=5;w=3600'


def test_unknown_paths_share_one_counter(app, limiter, user):
    limiter.limit_app(app, "3/hour")

    @app.get("/")
    def index():
        return "ok"

    client = app.test_client()
    statuses = [client.get(f"/random-{number}", headers=user).status_code for number in range(5)]
    assert statuses == [404, 404, 404, 429, 429]
    assert client.get("/", headers=user).status_code == 200
