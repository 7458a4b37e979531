"""API keys and TLS of a real router: made by the commands, changed while it runs, and refused when they are wrong."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import wait_until
from replay_service import Service
from self_signed import make_certificate

from pdserve.router.main import main


class SecureService(Service):
    """A router that speaks HTTPS with this certificate."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.certificate, self.key = make_certificate(directory, "first")

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")

    def get(self, path: str, secret: str = "", trusted: Path | None = None) -> httpx.Response:
        """By a connection of its own, as a client that trusts one certificate only."""
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        context = ssl.create_default_context(cafile=trusted or self.certificate)
        return httpx.get(f"{self.url}{path}", headers=headers, verify=context, timeout=60)

    def get_pools(self) -> dict[str, int]:
        try:
            return {role: pool["usable"] for role, pool in self.get("/ready").json()["pools"].items()}
        except httpx.TransportError:
            return {}


def make_key(*options: str) -> tuple[str, str]:
    """A key and its line, as the command prints them."""
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "keys", "api", *options], check=True, capture_output=True, text=True
    )
    return done.stderr.split()[-1], done.stdout


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SecureService]:
    made = SecureService(tmp_path)
    made.add("decode")
    try:
        yield made
    finally:
        made.close()


def test_keys_and_certificate_change_while_the_router_runs(service: SecureService, tmp_path: Path) -> None:
    alice, alice_line = make_key("--name", "alice")
    bob, bob_line = make_key("--name", "bob", "--admin")
    keys = tmp_path / "api-keys"
    keys.write_text(alice_line)
    service.start(
        *("--api-keys-file", str(keys), "--tls-certificate", str(service.certificate), "--tls-key", str(service.key))
    ).wait_for(0, 1)

    def status(secret: str) -> int:
        return service.get("/v1/models", secret).status_code

    assert [status(alice), status(bob), status("")] == [200, 401, 401]
    keys.write_text(alice_line + bob_line)
    wait_until(lambda: status(bob) == 200, "the new key being valid")
    keys.write_text("half a li")
    wait_until(lambda: "the API keys were not read again" in service.log.read_text(), "the warning")
    assert [status(alice), status(bob)] == [200, 200]
    keys.write_text(bob_line)
    wait_until(lambda: status(alice) == 401, "the old key being refused")

    second, second_key = make_certificate(tmp_path, "second")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        service.get("/health", trusted=second)
    service.certificate.write_bytes(b"not a certificate")
    wait_until(lambda: "certificate and key were not read again" in service.log.read_text(), "the warning")
    second_key.replace(service.key)
    service.certificate.write_bytes(second.read_bytes())

    def shows_second() -> bool:
        try:
            return service.get("/health", trusted=second).status_code == 200
        except httpx.ConnectError:
            return False

    wait_until(shows_second, "the new certificate being shown")
    assert service.get("/health", trusted=second).json() == {"status": "ok"}
    headers = {"Authorization": f"Bearer {bob}"}
    context = ssl.create_default_context(cafile=second)
    assert httpx.post(f"{service.url}/drain", headers=headers, verify=context).status_code == 202
    assert service.router is not None
    assert service.router.wait(30) == 0
    log = service.log.read_text()
    assert alice not in log
    assert bob not in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-certificate", "{crt}"], "--tls-certificate and --tls-key belong together"),
        (["--tls-certificate", "{crt}", "--tls-key", "{dir}/none"], "--tls-key {dir}/none: No such file or directory"),
        (["--tls-certificate", "{key}", "--tls-key", "{key}"], "are no certificate and its unencrypted key in PEM"),
        (["--tls-certificate", "{crt}", "--tls-key", "{encrypted}"], "are no certificate and its unencrypted key"),
        (["--tls-certificate", "{crt}", "--tls-key", "{other}"], "key values mismatch"),
        (["--api-keys-file", "{dir}/none"], "--api-keys-file {dir}/none: No such file or directory"),
        (["--api-keys-file", "{crt}"], "--api-keys-file {crt}: entry 1: its digest is not sha256:"),
    ],
)
def test_wrong_files_are_one_line_at_the_start(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    names = {"crt": certificate, "key": key, "other": other, "encrypted": encrypted, "dir": tmp_path}
    given = ["--port", "0", "--decode", "127.0.0.1:1", *(option.format(**names) for option in options)]
    assert main(given) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message.format(**names) in line
