"""The address of the server, from its URL, and the TLS settings."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

Path = str | os.PathLike[str]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens."""

    host: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """The host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        """Returns the URL."""
        return f"{'http' if self.tls is None else 'https'}://{self.authority}"


def parse_endpoint(url: str, *, ca: Path | None, client_cert: tuple[Path, Path] | None) -> Endpoint:
    """Parses a URL such as `http://127.0.0.1:8080`. Raises `ValueError` or `OSError` with the fix."""
    parts = urlsplit(url)
    default_port = _DEFAULT_PORTS.get(parts.scheme)
    if default_port is None or not parts.hostname:
        raise ValueError(
            f"url {url!r} is not a server: use for example http://127.0.0.1:8080 or https://limits.example"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError("url contains a password: pass the token as token=…")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"url {url!r} has a path: use only the scheme, host and port")
    if parts.scheme == "http" and (ca is not None or client_cert is not None):
        raise ValueError(f"url {url!r} is not encrypted, but certificates are set: use https://")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url {url!r} has an invalid port: use 1 to 65535") from error
    tls = _tls_context(ca, client_cert) if parts.scheme == "https" else None
    return Endpoint(parts.hostname, default_port if port is None else port, tls)


def _tls_context(ca: Path | None, client_cert: tuple[Path, Path] | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if client_cert is not None:
        context.load_cert_chain(*client_cert)
    return context
