"""FastAPI endpoints in this process, with a real server."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterable, Iterable
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response, WebSocket

from conftest import RELAXED
from conftest import Response as Received
from sluicegate import AsyncClient, header, route
from sluicegate.fastapi import RateLimiter
from sluicegate.request_view import AsgiRequest


class Caller:
    """Sends requests to an ASGI application without a web server."""

    def __init__(self, app, loop):
        self.app = app
        self.loop = loop
        self.root_path = ""

    def get(self, path, body=b"", method="GET", **headers):
        return self.loop.run_until_complete(self._request(path, body, method, headers))

    async def _request(self, path, body, method, headers):
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": self.root_path,
            "headers": lines,
            "client": ("203.0.113.9", 1),
            "server": ("test", 80),
            "scheme": "http",
        }
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        messages = []

        async def receive():
            return requests.pop() if requests else await asyncio.Event().wait()

        async def send(message):
            messages.append(message)

        await self.app(scope, receive, send)
        names = [(name.decode(), value.decode()) for name, value in messages[0]["headers"]]
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return Received(messages[0]["status"], names, content, 0.0)


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture
def limiter(shared_server, loop):
    limiter = RateLimiter(AsyncClient(shared_server.url, deadline=RELAXED), key=header("x-user"))
    yield limiter
    loop.run_until_complete(limiter.client.aclose())


@pytest.fixture
def app():
    return FastAPI()


@pytest.fixture
def caller(app, loop):
    return Caller(app, loop)


@pytest.fixture
def scope():
    return str(uuid.uuid4())


def test_an_endpoint_with_yield_is_streamed_and_limited(app, limiter, caller, scope):
    closed = []

    @app.get("/async")
    @limiter.limit("2/hour", scope=scope)
    async def stream(count: int = 2) -> AsyncIterable[dict]:
        try:
            for number in range(count):
                yield {"number": number}
        finally:
            closed.append("async")

    @app.get("/blocking")
    @limiter.limit("2/hour", scope=scope + "blocking")
    def blocking() -> Iterable[dict]:
        yield {"number": 0}
        yield {"number": 1}

    for path in ("/async", "/blocking"):
        response = caller.get(path)
        assert (response.status, response.body) == (200, b'{"number":0}\n{"number":1}\n')
        assert "r=1" in response.headers["ratelimit"]
        assert [caller.get(path).status for _ in range(2)] == [200, 429]
    assert closed == ["async", "async"]


def test_the_limit_counts_requests_that_another_dependency_rejects(app, limiter, caller, scope):
    def authenticate(token: str = Header("")):
        if token != "right":
            raise HTTPException(401)
        return "ada"

    @app.get("/")
    @limiter.limit("3/hour", scope=scope)
    async def index(request: Request, user: Annotated[str, Depends(authenticate)], page: int = 1):
        return user

    statuses = Counter(caller.get("/", token="guess").status for _ in range(20))
    assert statuses == {401: 3, 429: 17}
    assert caller.get("/", token="right", x_user="other").body == b'"ada"'


def test_the_limit_counts_invalid_parameters_but_not_invalid_json(app, limiter, caller, scope):
    @app.post("/{number}")
    @limiter.limit("3/hour", scope=scope)
    async def create(number: int, body: dict):
        return number

    def post(path, body):
        return caller.get(path, body, "POST", content_type="application/json").status

    assert [post("/1", b"{") for _ in range(5)] == [422] * 5
    assert [post("/one", b"{}"), post("/1", b"[]"), post("/1", b"{}"), post("/1", b"{}")] == [422, 422, 200, 429]


def test_the_headers_of_the_innermost_limit_are_kept(app, limiter, caller, scope):
    @app.get("/json")
    @limiter.limit("100/hour", scope=scope + "outer")
    @limiter.limit("5/hour", scope=scope + "inner")
    async def json_response():
        return "ok"

    @app.get("/response")
    @limiter.limit("100/hour", scope=scope + "outer")
    @limiter.limit("5/hour", scope=scope + "inner")
    async def response():
        return Response("ok")

    assert "q=5" in caller.get("/json").headers["ratelimit-policy"]
    assert "q=5" in caller.get("/response").headers["ratelimit-policy"]


def test_shared_responses_and_exceptions_have_no_headers_of_other_requests(app, limiter, caller, scope):
    not_found = HTTPException(status_code=404, detail="nothing", headers={"x-own": "1"})
    ok = Response("ok", headers={"x-own": "1"})

    @app.get("/not-found")
    @limiter.limit("10/hour", scope=scope)
    async def raise_not_found():
        raise not_found

    @app.get("/ok")
    @limiter.limit("10/hour", scope=scope + "ok")
    async def return_ok():
        return ok

    for path, status in (("/not-found", 404), ("/ok", 200)):
        responses = [caller.get(path, x_user=user) for user in ("ada", "ada", "bob")]
        remaining = [response.headers["ratelimit"].split(";")[1] for response in responses]
        assert remaining == ["r=9", "r=8", "r=9"]
        assert {(response.status, response.headers["x-own"]) for response in responses} == {(status, "1")}
    assert "ratelimit" not in ok.headers
    assert not_found.headers == {"x-own": "1"}


def test_mounted_applications_do_not_share_a_counter(app, limiter, caller, scope):
    for name in ("one", "two"):
        mounted = FastAPI(dependencies=[Depends(limiter.dependency("1/hour"))])

        @mounted.get("/{item}")
        async def read(item: str):
            return item

        app.mount(f"/{name}", mounted)

    @app.get("/direct/{item}")
    async def route_of(item: str, request: Request):
        return route.label(AsgiRequest(request.scope))

    statuses = [caller.get(path, x_user=scope).status for path in ("/one/a", "/two/a", "/one/b", "/two/b")]
    assert statuses == [200, 200, 429, 429]
    assert caller.get("/direct/a").body == b'"/direct/{item}"'
    # As with `uvicorn --root-path /api`.
    caller.root_path = "/api"
    assert caller.get("/api/direct/a").body == b'"/direct/{item}"'
    statuses = [caller.get(path, x_user=scope + "2").status for path in ("/api/one/a", "/api/two/a", "/api/one/b")]
    assert statuses == [200, 200, 429]


def test_a_parameter_in_the_path_of_a_mount_selects_no_counter(app, limiter, caller, scope):
    mounted = FastAPI(dependencies=[Depends(limiter.dependency("2/hour"))])

    @mounted.get("/items/{item}")
    async def read(item: str, request: Request):
        return route.label(AsgiRequest(request.scope))

    app.mount("/tenants/{tenant}", mounted)
    responses = [caller.get(f"/tenants/t{number}/items/{number}", x_user=scope) for number in range(4)]
    assert [response.status for response in responses] == [200, 200, 429, 429]
    assert responses[0].body == b'"/tenants/{tenant}/items/{item}"'


def test_a_websocket_endpoint_is_rejected_when_it_is_decorated(limiter):
    with pytest.raises(TypeError, match="not supported for a WebSocket endpoint"):

        @limiter.limit("1/s")
        async def connect(socket: WebSocket): ...
