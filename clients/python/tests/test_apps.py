"""Real web servers with several worker processes and real applications."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import uuid
from urllib.parse import quote

import pytest

from apps.app_settings import OUTAGE_DEADLINE
from conftest import HERE, RULES, Redis, Sluicegate, WebApp, wait_until

UVICORN = ["uvicorn", "--port", "{port}", "--workers", "2", "--no-access-log"]
# With --preload the client is created before the worker processes are forked, and the threads of a worker share it.
GUNICORN = ["gunicorn", "--bind", "127.0.0.1:{port}", "--workers", "2", "--preload"]
THREADS = ["--worker-class", "gthread", "--threads", "4"]

COMMANDS = {
    "fastapi": [*UVICORN, "fastapi_app:app"],
    "flask": [*GUNICORN, *THREADS, "flask_app:application"],
    "django": [*GUNICORN, *THREADS, "django_app:application"],
    "django-asgi": [*UVICORN, "--lifespan", "off", "django_app:asgi"],
}
# Django applications have one client.
DJANGO_CLIENTS = {"django-local": ("django", "local"), "django-closed": ("django-asgi", "closed")}
TOKEN = "r1ght"
# The slack of a busy machine, in seconds.
SLACK = 1.0
# The same for six requests in a row, each of which has to meet its deadline.
RECOVERY_SLACK = 4.0


class Deployment:
    """Web servers with two limiters that share one Redis."""

    def __init__(self, directory, stack):
        def start(kind, *args, **kwargs):
            process = kind(*args, **kwargs)
            stack.callback(process.kill)
            return process

        redis = start(Redis, directory)
        self.limiters = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            (directory / name / "secret").write_text(TOKEN)
            rules = '[[server.token]]\nname = "app"\nfile = "secret"\nmay = ["check"]\n' + RULES
            self.limiters.append(start(Sluicegate, directory / name, rules, redis.url))
        self.apps = {}
        self.limiter_of = {}
        choices = {name: (name, "") for name in COMMANDS} | DJANGO_CLIENTS
        limiters = itertools.cycle(self.limiters)
        for name, (kind, client) in choices.items():
            limiter = self.limiter_of[name] = next(limiters)
            environment = {"LIMITER_URL": limiter.url, "LIMITER_TOKEN": TOKEN, "DJANGO_CLIENT": client}
            self.apps[name] = start(WebApp, COMMANDS[kind], directory / f"{name}.log", **environment)
        for app in self.apps.values():
            app.wait()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Deployment(tmp_path_factory.mktemp("deployment"), stack)


@pytest.fixture
def app(request, deployment):
    return deployment.apps[request.param]


@pytest.fixture
def key():
    return str(uuid.uuid4())


def every_app(*names):
    return pytest.mark.parametrize("app", names or list(COMMANDS), indirect=True)


def test_a_limit_holds_exactly_over_all_worker_processes(deployment, key):
    apps = itertools.cycle(deployment.apps[name] for name in COMMANDS)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(lambda app: app.get("/key", x_api_key=key), itertools.islice(apps, 80)))
    statuses = [response.status for response in responses]
    assert (statuses.count(200), statuses.count(429)) == (20, 60)


@every_app()
def test_responses_have_the_headers_of_the_server(app, key):
    allowed = app.get("/key", x_api_key=key)
    assert allowed.status == 200
    assert allowed.headers["ratelimit-policy"] == '"per-key";q=20;w=3600'
    assert allowed.headers["ratelimit"] == '"per-key";r=19;t=3600'
    assert "retry-after" not in allowed.headers
    for _ in range(3):
        assert app.get("/inline", x_api_key=key).status == 200
    denied = app.get("/inline", x_api_key=key)
    assert denied.status == 429
    assert 1 <= int(denied.headers["retry-after"]) <= 1200
    assert denied.headers["cache-control"] == "no-store"
    # The scope of the limit, by default the module and the name of the function.
    name = re.fullmatch(r'"(\w+\.inline)";r=0;t=\d+', denied.headers["ratelimit"])[1]
    assert denied.headers["ratelimit-policy"] == f'"{name}";q=3;w=3600'
    assert f"limit exceeded: {name}; retry in" in json.loads(denied.body)["detail"]
    # Another key, and all requests without one, have their own counter.
    assert app.get("/inline", x_api_key=key + "other").status == 200
    assert [app.get("/inline").status for _ in range(4)][3] == 429


@every_app()
def test_a_value_that_is_too_long_is_a_bad_request_and_not_a_free_pass(app):
    response = app.get("/inline", x_api_key="x" * 2000)
    assert response.status == 400
    assert "use at most 1024" in json.loads(response.body)["detail"]


@every_app("fastapi")
def test_fastapi_endpoints(app):
    first = app.get("/items/7?q=x")
    assert (first.status, first.body) == (200, b"7 x /items/7")
    assert "ratelimit" in first.headers
    assert [app.get("/items/8").status, app.get("/items/9").status] == [200, 429]
    assert json.loads(app.get("/dependency/ada").body) == {"remaining": 4}
    assert json.loads(app.get("/dependency/ada").body) == {"remaining": 3}
    missing = app.get("/missing")
    assert (missing.status, missing.headers["x-own"]) == (404, "1")
    assert "ratelimit" in missing.headers
    assert "ratelimit" not in app.get("/missing", admin="1").headers
    assert app.get("/cost?units=9", x_api_key="a").status == 200
    assert app.get("/cost?units=2", x_api_key="a").status == 429
    # A cost that the server would reject is no free pass.
    assert [app.get(f"/cost?units={units}", x_api_key="b").status for units in (-1, 10**30)] == [400, 400]
    assert [app.get("/custom/").status for _ in range(2)] == [200, 429]
    assert json.loads(app.get("/custom/").body)["wait"] > 3000
    assert app.get("/openapi.json").status == 200


@every_app("fastapi")
def test_a_misconfigured_limit_is_logged_once_and_the_policy_decides(app):
    assert [app.get("/broken").status for _ in range(5)] == [200] * 5
    lines = [line for line in app.log.read_text().splitlines() if "limit 'often' is not a rate" in line]
    assert 1 <= len(lines) <= 2, "at most once per worker process"


@every_app("fastapi")
def test_a_value_of_the_wrong_type_is_a_bad_request_and_not_a_free_pass(app):
    values = ['"ada"', "7", '["ada"]', "true", "1.5", '{"a":1}']
    assert [app.get(f"/typed?user={quote(value)}").status for value in values] == [200, 200, 400, 400, 400, 400]


@every_app("fastapi", "flask")
def test_a_wrong_token_is_logged_and_the_policy_decides(app, key):
    statuses = [app.get("/wrong-token", x_api_key=key).status for _ in range(10)]
    # Each of the two workers allows three.
    assert 3 <= statuses.count(200) <= 6
    assert set(statuses) == {200, 429}
    assert "rejected the token" in app.log.read_text()
    assert "wr0ng" not in app.log.read_text()


@pytest.mark.parametrize(
    ("app", "path", "net"),
    [("fastapi", "/middleware/", 1), ("flask", "/wsgi", 2), ("django", "/forwarded", 3)],
    indirect=["app"],
)
def test_the_address_is_that_of_the_nearest_hop_that_is_not_trusted(app, path, net):
    # uvicorn itself replaces the peer by X-Forwarded-For of 127.0.0.1, with the same result.
    remaining = [app.get(path, x_forwarded_for=f"10.9.9.{n}, 203.0.{net}.9").headers["ratelimit"] for n in range(3)]
    assert [text.split(";")[1] for text in remaining] == ["r=4", "r=3", "r=2"]
    assert app.get(path, x_forwarded_for=f"203.0.{net}.10").headers["ratelimit"].split(";")[1] == "r=4"


@every_app("fastapi")
def test_the_asgi_middleware(app, key):
    assert json.loads(app.get("/middleware/", x_forwarded_for="203.0.113.1").body) == {"remaining": 4}
    assert app.get("/middleware/skipped").status == 404
    assert "ratelimit" not in app.get("/middleware/skipped").headers
    for _ in range(5):
        denied = app.get("/middleware/", x_forwarded_for="203.0.113.1")
    assert denied.status == 429
    assert denied.headers["content-type"] == "application/problem+json"
    assert json.loads(denied.body)["violated-policies"] == ["login-per-ip"]
    custom = [app.get("/plain/", x_api_key=key) for _ in range(2)]
    assert [response.status for response in custom] == [200, 418]
    assert "retry-after" in custom[1].headers


@every_app("flask")
def test_flask_views(app, key):
    assert json.loads(app.get(f"/section/?user={key}").body) == {"remaining": 4}
    assert "ratelimit" not in app.get(f"/section/exempt?user={key}").headers
    assert [app.get("/custom").status for _ in range(2)] == [200, 418]
    assert "retry-after" in app.get("/custom").headers
    assert app.get("/wsgi", x_forwarded_for="203.0.113.2").body == b"4"


@every_app("django", "django-asgi")
def test_django_views(app, key):
    assert "ratelimit" not in app.get("/health", x_middleware_key=key).headers
    assert app.get("/plain", x_middleware_key=key).headers["ratelimit"].startswith('"per-key";r=19')
    assert [json.loads(app.get("/soft").body)["allowed"] for _ in range(2)][1] is False
    for _ in range(20):
        denied = app.get("/plain", x_middleware_key=key)
    assert denied.status == 429
    assert app.get("/missing", x_middleware_key=key).status == 404


@every_app("django", "django-asgi")
@pytest.mark.parametrize("path", ["/soft-key", "/soft-key-async"])
def test_a_django_view_that_handles_denials_gets_a_decision_for_every_request(app, key, path):
    def allowed(**headers):
        return json.loads(app.get(path, x_api_key=app.log.stem + key, **headers).body)["allowed"]

    assert [allowed() for _ in range(3)] == [True, False, False]
    assert allowed(x_admin="1") is True
    response = app.get(path, x_api_key="x" * 2000)
    assert (response.status, json.loads(response.body)["title"]) == (400, "Bad Request")


@every_app("django")
def test_a_django_view_with_two_limits_finds_the_denial(app, key):
    responses = [json.loads(app.get("/soft-twice", x_api_key=key).body)["allowed"] for _ in range(2)]
    assert responses == [True, False]


def test_a_disabled_django_limit_allows_every_request():
    program = """
import apps.app_settings
apps.app_settings.RELIABLE["enabled"] = False
import sys; sys.modules["app_settings"] = apps.app_settings
from django.test import RequestFactory
from apps.django_app import soft
print([soft(RequestFactory().get("/")).content for _ in range(2)])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert output.stdout == """[b'{"allowed": true}', b'{"allowed": true}']\n""", output.stderr


EXPECTED = {"open": {200}, "closed": {503}, "local": {200, 429}}
CASES = [
    ("fastapi", ["open", "closed", "local"]),
    ("flask", ["open", "closed", "local"]),
    ("django-local", ["local"]),
    ("django-closed", ["closed"]),
]


@pytest.mark.parametrize("outage", ["stopped", "killed"])
@pytest.mark.parametrize(("name", "policies"), CASES, ids=[name for name, _ in CASES])
def test_without_the_server_no_request_fails_or_waits_longer_than_the_deadline(deployment, name, policies, outage, key):
    app, limiter = deployment.apps[name], deployment.limiter_of[name]
    for policy in policies:
        wait_until(lambda policy=policy: is_decided_by_server(app, policy), "both workers use the server")
    limiter.stop() if outage == "stopped" else limiter.kill()
    try:
        for policy in policies:
            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                paths = [f"/{policy}"] * 30
                responses = list(threads.map(lambda path: app.get(path, x_api_key=key), paths))
            assert {response.status for response in responses} <= EXPECTED[policy]
            assert max(response.seconds for response in responses) < OUTAGE_DEADLINE + SLACK
            if policy == "closed":
                assert all(response.headers["retry-after"] == "1" for response in responses)
            if policy == "local":
                # Each of the two workers allows three.
                assert 3 <= sum(response.status == 200 for response in responses) <= 6
    finally:
        limiter.resume() if outage == "stopped" else limiter.restart()
    recovered = time.monotonic()
    for policy in policies:
        wait_until(lambda policy=policy: is_decided_by_server(app, policy), "the server decides again")
    assert time.monotonic() - recovered < 2 + RECOVERY_SLACK, app.log.read_text()[-3000:]


def is_decided_by_server(app, policy):
    """Returns whether several requests in a row, on both workers, were decided by the server."""
    return all("ratelimit" in app.get(f"/{policy}", x_api_key=str(uuid.uuid4())).headers for _ in range(6))
