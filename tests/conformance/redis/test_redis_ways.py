"""Every way to a server: TCP, TLS with and without a client certificate, an ACL user, a cluster."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import redis

from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.options import parse_options
from pdserve.connectors.redis.server import RedisServer
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.protocol import Role

S = TINY_SPEC.block_size
PROMPT = list(range(40 * S + 1))
COMMANDS = ("getrange", "set", "strlen", "exists", "expire", "unlink")


def exchange(make_engine, **options: object) -> None:
    """A prompt goes through."""
    prefill = make_engine(num_blocks=128, **options)
    decode = make_engine("decode", num_blocks=128, **options)
    assert prefill.send("p", PROMPT)
    assert decode.load("d", PROMPT) == len(PROMPT)
    assert prefill.stats.failures == decode.stats.failures == {}


def test_tcp_and_a_database_of_its_own(make_engine, run_server) -> None:
    server = run_server(port=find_free_port())
    exchange(make_engine, url=f"redis://127.0.0.1:{server.port}/3")
    client = redis.Redis(port=server.port, db=3)
    assert client.dbsize() == 41
    client.close()


def test_an_acl_user_needs_six_commands_and_the_prefix(make_engine, run_server, tmp_path: Path) -> None:
    rights = ["~kv-of-two:*", "-@all", *(f"+{command}" for command in COMMANDS)]
    server = run_server("--user", "default", "off", "--user", "serve", "on", ">secret", *rights)
    (tmp_path / "password").write_text("secret")
    exchange(
        make_engine,
        url=server.url,
        username="serve",
        password_file=str(tmp_path / "password"),
        prefix="kv-of-two",
    )


def make_certificates(directory: Path) -> None:
    """An authority, a server's and a client's certificate."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-days", "2", "-extfile", "names"),
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


def tls_arguments(certificates: Path, port: int, *, clients: str) -> tuple[str, ...]:
    files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
    named = [part for what, name in files.items() for part in (f"--tls-{what}-file", str(certificates / name))]
    return ("--tls-port", str(port), "--tls-auth-clients", clients, *named)


def test_tls(make_engine, run_server, certificates: Path) -> None:
    port = find_free_port()
    run_server(*tls_arguments(certificates, port, clients="no"))
    exchange(make_engine, url=f"rediss://127.0.0.1:{port}", tls_ca_file=str(certificates / "ca.pem"))


def test_tls_with_a_client_certificate(make_engine, run_server, certificates: Path) -> None:
    port = find_free_port()
    run_server(*tls_arguments(certificates, port, clients="yes"))
    authority = {"tls_ca_file": str(certificates / "ca.pem")}
    files = {"tls_cert_file": str(certificates / "client.pem"), "tls_key_file": str(certificates / "client.key")}
    exchange(make_engine, url=f"rediss://localhost:{port}", **authority, **files)
    assert not make_engine(url=f"rediss://localhost:{port}", **authority).send("p", [1, *PROMPT])


def test_a_server_that_nobody_vouches_for_gets_nothing(make_engine, run_server, certificates: Path, caplog) -> None:
    port = find_free_port()
    run_server(*tls_arguments(certificates, port, clients="no"))
    engine = make_engine(url=f"rediss://127.0.0.1:{port}")
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert not engine.send("p", PROMPT)


def test_a_certificate_of_another_authority(make_engine, run_server, certificates: Path, tmp_path: Path) -> None:
    """The server comes back with one that nobody vouches for yet; who is trusted is read with each connection."""
    make_certificates(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes((certificates / "ca.pem").read_bytes())
    port = find_free_port()
    server = run_server(*tls_arguments(certificates, port, clients="no"))
    engine = make_engine(num_blocks=128, url=f"rediss://127.0.0.1:{port}", tls_ca_file=str(trusted))
    assert engine.send("before", PROMPT)
    server.kill()
    run_server(*tls_arguments(tmp_path, port, clients="no"))
    assert not engine.send("unknown", [1, *PROMPT])
    assert set(engine.stats.failures) == {"unreachable"}
    trusted.write_bytes((tmp_path / "ca.pem").read_bytes())
    deadline = time.monotonic() + 30
    while not engine.send(f"p{time.monotonic_ns()}", [1, *PROMPT]):
        assert time.monotonic() < deadline, "it did not come back by itself"


def test_a_cluster(make_engine, run_server) -> None:
    """Three nodes with a third of the slots each; one that dies costs its blocks only."""
    nodes = [run_server("--cluster-enabled", "yes", port=find_free_port()) for _ in range(3)]
    join(nodes)
    options = {"url": f"redis://127.0.0.1:{nodes[0].port}", "cluster": True, "timeout_s": 1.0}
    exchange(make_engine, **options)
    assert all(count_keys(node) > 0 for node in nodes)
    nodes[2].kill()
    engine = make_engine(num_blocks=128, **options)
    assert not engine.send("p", [1, *PROMPT])
    assert set(engine.stats.failures) <= {"unreachable", "timeout", "moved"}


def test_who_uses_a_connection_keeps_it_to_the_end(server: RedisProcess) -> None:
    """One thread asks where everything is now, while another's exchange is under way."""
    own = RedisServer(parse_options(build_context(Role.PREFILL, {"url": server.url})), timeout_s=30.0)
    watcher = redis.Redis(unix_socket_path=str(server.unix_path))
    question = [Command(b"STRLEN", b"nothing")]
    with own.exchange() as exchange:
        (channel,) = exchange.ask(question)
        own.close()
        assert channel.read_number() == 0
    with own.exchange() as exchange:
        (channel,) = exchange.ask(question)
        assert channel.read_number() == 0
    names = [client["cmd"] for client in watcher.client_list()]
    assert names.count("strlen") == 1  # the first connection is closed, the second waits for its next use
    own.close()
    watcher.close()


def count_keys(node: RedisProcess) -> int:
    client = redis.Redis(port=node.port)
    try:
        return client.dbsize()
    finally:
        client.close()


def join(nodes: list[RedisProcess]) -> None:
    clients = [redis.Redis(port=node.port) for node in nodes]
    bounds = [0, 5461, 10923, 16384]
    for index, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    deadline = time.monotonic() + 60
    while not all(is_joined(client) for client in clients):
        assert time.monotonic() < deadline, "the cluster does not come together"
        time.sleep(0.02)
    for client in clients:
        client.close()


def is_joined(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info
