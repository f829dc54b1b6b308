"""Real processes for the tests: sluicegate, Redis and web servers, each on a free port of 127.0.0.1."""

import asyncio
import contextlib
import http.client
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sluicegate import AsyncClient, Client

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# How long a process may take to start or to recover, on a busy machine.
PATIENCE = 20.0
# A deadline that a busy machine keeps.
RELAXED = 5.0

RULES = """
[defaults]
on_store_failure = "local"

[[rule]]
name = "login-per-ip"
when = { route = "login" }
per = ["ip"]
algorithm = "sliding-log"
amount = 5
window = "1h"

[[rule]]
name = "per-key"
per = ["api_key"]
algorithm = "sliding-log"
amount = 20
window = "1h"

[[rule]]
name = "tokens"
per = ["tenant"]
unit = "tokens"
amount = 1000
window = "1h"
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition, what, patience=PATIENCE):
    expires = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < expires, f"timed out: {what}"
        time.sleep(0.02)


class Process:
    """A process group that is killed at the end of the test."""

    def __init__(self, command, log, **options):
        self.log = log
        with log.open("ab") as output:
            options = {"stdout": output, "stderr": output, "start_new_session": True, **options}
            self.process = subprocess.Popen(command, **options)

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


class Sluicegate(Process):
    """A sluicegate server. `restart` keeps its address."""

    def __init__(self, directory, rules=RULES, store="memory:", address="127.0.0.1:0", scheme="http"):
        program = Path(os.environ.get("SLUICEGATE_BIN", ROOT / "target/debug/sluicegate"))
        if not program.exists():
            pytest.exit(f"{program} does not exist: run cargo build, or set SLUICEGATE_BIN", returncode=2)
        self.arguments = (directory, rules, store)
        config = directory / "sluicegate.toml"
        config.write_text(rules)
        super().__init__(
            [
                *(program, "serve", "--json", "--config", config, "--store", store),
                *("--http", address, "--grpc", "off", "--resp", "off"),
            ],
            directory / "sluicegate.log",
            stdout=subprocess.PIPE,
            # On a busy machine the store may answer after the default of 50 ms.
            env={**os.environ, "SLUICEGATE_STORE_DEADLINE": "5s"},
        )
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.address = json.loads(line)["http"]
        self.url = f"{scheme}://{self.address}"

    def restart(self):
        """Starts the server again at the same address."""
        self.kill()
        self.__init__(*self.arguments, address=self.address)

    def stop(self):
        """Stops all threads of the server, which keeps its connections open but does not answer."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        wait_until(lambda: all(is_stopped(thread) for thread in threads.iterdir()), "the server stops")

    def resume(self):
        self.signal(signal.SIGCONT)


def is_stopped(thread):
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def processes():
    """Starts processes and kills them at the end."""
    with contextlib.ExitStack() as stack:

        def start(kind, *args, **kwargs):
            process = kind(*args, **kwargs)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def server(processes, tmp_path):
    return processes(Sluicegate, tmp_path)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """A server for tests that use their own keys."""
    server = Sluicegate(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


class Redis(Process):
    """A Redis server without persistence."""

    def __init__(self, directory):
        program = shutil.which("redis-server")
        assert program, "redis-server is missing: run scripts/servers"
        port = free_port()
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        super().__init__([program, *arguments, "--dir", str(directory)], directory / "redis.log")
        wait_until(lambda: is_listening(port), "redis-server listens")
        self.url = f"redis://127.0.0.1:{port}"


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Response:
    """A response of a web application, and how long it took."""

    def __init__(self, status, headers, body, seconds):
        self.status = status
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body
        self.seconds = seconds


class WebApp(Process):
    """A web server with an application of `tests/apps`."""

    def __init__(self, command, log, **environment):
        self.port = free_port()
        path = os.pathsep.join([str(HERE / "apps"), *sys.path])
        super().__init__(
            [sys.executable, "-m", *(part.format(port=self.port) for part in command)],
            log,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )

    def wait(self):
        """Waits until the application answers."""
        wait_until(self._is_ready, "the web server is ready")

    def _is_ready(self):
        assert self.process.poll() is None, self.log.read_text()
        if not is_listening(self.port):
            return False
        with contextlib.suppress(OSError):
            return self.get("/health").status == 200
        return False

    def get(self, path, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            started = time.monotonic()
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", path, headers=names)
            response = connection.getresponse()
            body = response.read()
            return Response(response.status, response.getheaders(), body, time.monotonic() - started)
        finally:
            connection.close()


class AsyncAsBlocking:
    """An `AsyncClient` whose methods block, so that one test covers both clients."""

    def __init__(self, client, loop):
        self.client = client
        self.loop = loop

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.loop.run_until_complete(getattr(self.client, name)(*args, **kwargs))

    def hold(self, *args, **kwargs):
        return AsyncHoldAsBlocking(self.loop.run_until_complete(self.client.hold(*args, **kwargs)), self.loop)


class AsyncHoldAsBlocking:
    """An `AsyncHold` whose methods block."""

    def __init__(self, hold, loop):
        self.__dict__.update(hold=hold, loop=loop)

    def __getattr__(self, name):
        value = getattr(self.hold, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            result = value(*args, **kwargs)
            return self.loop.run_until_complete(result) if inspect.isawaitable(result) else result

        return call

    def __setattr__(self, name, value):
        setattr(self.hold, name, value)

    def __bool__(self):
        return bool(self.hold)

    def __enter__(self):
        self.loop.run_until_complete(self.hold.__aenter__())
        return self

    def __exit__(self, *error):
        self.loop.run_until_complete(self.hold.__aexit__(*error))


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request):
    """Creates clients of both kinds with the same methods."""
    if request.param == "blocking":
        with contextlib.ExitStack() as stack:
            yield lambda *args, **kwargs: stack.enter_context(
                contextlib.closing(Client(*args, **{"deadline": RELAXED, **kwargs}))
            )
        return
    loop = asyncio.new_event_loop()
    clients = []

    def create(*args, **kwargs):
        clients.append(AsyncClient(*args, **{"deadline": RELAXED, **kwargs}))
        return AsyncAsBlocking(clients[-1], loop)

    yield create
    for client in clients:
        loop.run_until_complete(client.aclose())
    loop.close()


class FakeServer:
    """A TCP server whose connections are handled by a function in a thread each."""

    def __init__(self, handle):
        self.requests = []
        self.paths = []
        self.connections = 0
        self._handle = handle
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            self._handle(self, connection)

    def read_request(self, connection):
        """Returns the body of the next request; `None` at the end of the connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            received = connection.recv(65536)
            if not received:
                return None
            data += received
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(65536)
        self.paths.append(head.split(b" ")[1].decode())
        self.requests.append(json.loads(body))
        return self.requests[-1]

    def kill(self):
        # A thread in `accept` would otherwise accept one more connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


ALLOWED = json.dumps(
    {
        "allowed": True,
        "rule": None,
        "limit": 5,
        "remaining": 4,
        "retry_after_ms": None,
        "reset_after_ms": 1,
        "never": False,
        "degraded": False,
        "source": "memory",
        "at_us": 1,
        "tiers": [],
    }
).encode()


def http_response(body=ALLOWED, status="200 OK", extra=b""):
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n%s\r\n%s" % (status.encode(), len(body), extra, body)


@pytest.fixture
def fake(processes):
    """Starts a server with a function that handles connections."""
    return lambda handle: processes(FakeServer, handle)
