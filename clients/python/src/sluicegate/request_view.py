"""The parts of a web request that labels are read from, for ASGI and WSGI."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol


class RequestView(Protocol):
    """A request as the ready-made labels see it."""

    @property
    def method(self) -> str:
        """The method in upper case."""

    @property
    def path(self) -> str:
        """The decoded path, as the application's router sees it."""

    @property
    def route(self) -> str | None:
        """The template of the matched route; `None` if the framework has not matched one yet."""

    @property
    def peer(self) -> str | None:
        """The address of the connection; `None` for a Unix socket."""

    def header_lines(self, name: str) -> list[str]:
        """Returns all values of a header. The name is in lower case."""


class AsgiRequest:
    """The scope of an ASGI request."""

    __slots__ = ("scope",)

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self.scope = scope

    @property
    def method(self) -> str:
        """The method in upper case."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The decoded path."""
        return str(self.scope["path"])

    @property
    def route(self) -> str | None:
        """The template of the route, which FastAPI and Starlette add to the scope, after the path of a mount.

        The prefix of the whole application, which a proxy removes, is not part of it.
        """
        path = getattr(self.scope.get("route"), "path", None)
        if not isinstance(path, str):
            return None
        return self._mount(path) + path

    def _mount(self, route: str) -> str:
        """Returns the path of the mount, with the names of its parameters instead of the values a client chose."""
        root = str(self.scope.get("root_path", ""))
        mount = root.removeprefix(self.scope.get("app_root_path", root))
        if mount:
            for name, value in self.scope.get("path_params", {}).items():
                if f"{{{name}" not in route:
                    mount = mount.replace(f"/{value}", f"/{{{name}}}", 1)
        return mount

    @property
    def peer(self) -> str | None:
        """The address of the connection; `None` for a Unix socket."""
        client = self.scope.get("client")
        return client[0] or None if client else None

    def header_lines(self, name: str) -> list[str]:
        """Returns all values of a header."""
        wanted = name.encode("latin-1")
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key.lower() == wanted]

    def header(self, name: str) -> str | None:
        """Returns the first value of a header."""
        lines = self.header_lines(name.lower())
        return lines[0] if lines else None


class WsgiRequest:
    """The environment of a WSGI request. Django's `META` has the same form."""

    __slots__ = ("_path", "environ", "route")

    def __init__(self, environ: Mapping[str, Any], *, path: str | None = None, route: str | None = None) -> None:
        self.environ = environ
        self.route = route
        self._path = path

    @property
    def method(self) -> str:
        """The method in upper case."""
        return str(self.environ["REQUEST_METHOD"])

    @property
    def path(self) -> str:
        """The decoded path."""
        if self._path is not None:
            return self._path
        raw = f"{self.environ.get('SCRIPT_NAME', '')}{self.environ.get('PATH_INFO', '')}"
        return raw.encode("latin-1", "replace").decode(errors="replace")

    @property
    def peer(self) -> str | None:
        """The address of the connection; `None` for a Unix socket."""
        return self.environ.get("REMOTE_ADDR") or None

    def header_lines(self, name: str) -> list[str]:
        """Returns the value of a header. WSGI servers join the lines of a repeated header."""
        value = self.environ.get(f"HTTP_{name.replace('-', '_').upper()}")
        return [] if value is None else [str(value)]

    def header(self, name: str) -> str | None:
        """Returns the value of a header."""
        lines = self.header_lines(name.lower())
        return lines[0] if lines else None
