"""TLS with a private CA, and client certificates."""

import subprocess

import pytest

from conftest import RULES, Sluicegate
from sluicegate import TlsError, Unavailable

TLS = """
[server.tls]
cert = "server.crt"
key = "server.key"
client_ca = "ca.crt"
"""


def openssl(directory, *arguments):
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other"):
        files = ("-keyout", f"{ca}.key", "-out", f"{ca}.crt")
        # Python 3.13 requires the key usage.
        openssl(directory, "req", "-x509", *key, *files, "-subj", f"/CN={ca}", "-addext", "keyUsage=keyCertSign")
    for name in ("server", "client"):
        (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        openssl(directory, "req", *key, "-keyout", f"{name}.key", "-out", "request", "-subj", f"/CN={name}")
        signing = ("-req", "-in", "request", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(directory, "x509", *signing, "-out", f"{name}.crt", "-extfile", "extensions")
    return directory


@pytest.fixture(scope="module")
def tls_server(certificates):
    server = Sluicegate(certificates, TLS + RULES, scheme="https")
    yield server
    server.kill()


def test_a_private_ca_and_a_client_certificate(connect, certificates, tls_server):
    identity = (certificates / "client.crt", certificates / "client.key")
    client = connect(tls_server.url, ca=certificates / "ca.crt", client_cert=identity)
    for _ in range(5):
        assert client.check({"api_key": "tls"}).source == "memory"
    assert client.explain({"api_key": "tls"}).decision.allowed


def test_a_server_of_another_ca_is_rejected(connect, certificates, tls_server):
    client = connect(tls_server.url, ca=certificates / "other.crt")
    assert client.check({"api_key": "tls"}).source == "open"
    with pytest.raises(TlsError, match=r"CERTIFICATE_VERIFY_FAILED.*check ca"):
        client.charge({"api_key": "tls"})


def test_another_host_name_is_rejected(connect, certificates, tls_server):
    port = tls_server.address.rpartition(":")[2]
    with pytest.raises(TlsError, match="CERTIFICATE_VERIFY_FAILED"):
        connect(f"https://localhost:{port}", ca=certificates / "ca.crt").charge({"api_key": "tls"})


def test_without_a_client_certificate_the_policy_decides(connect, certificates, tls_server):
    client = connect(tls_server.url, ca=certificates / "ca.crt", on_failure="closed")
    assert client.check({"api_key": "tls"}).source == "closed"
    with pytest.raises(Unavailable):
        client.charge({"api_key": "tls"})


def test_a_server_without_tls_is_rejected(connect, shared_server):
    client = connect(shared_server.url.replace("http:", "https:"), deadline=1)
    assert client.check({"api_key": "tls"}).source == "open"


def test_a_missing_ca_file_is_reported(connect):
    with pytest.raises(OSError, match="No such file"):
        connect("https://limits.example", ca="missing.crt")
