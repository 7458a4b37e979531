"""``pdserve doctor`` on real processes that are misconfigured on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import ManagedProcess, wait_until
from replay_service import Replay, Service

from pdserve.connectors.testing.free_port import find_free_port


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def ask_doctor(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pdserve.cli", "doctor", "--timeout-s", "10", *options]
    # A proxy that leads to the world outside does not lead to the service.
    environment = {**os.environ, "http_proxy": f"http://127.0.0.1:{find_free_port()}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_healthy_deployment_gets_a_clean_bill(service: Service) -> None:
    service.add("prefill")
    service.add("decode")
    service.start().wait_for(1, 1)
    service.complete()
    status, report = ask_doctor("--router", service.url)
    assert (status, report.splitlines()[-1]) == (0, "nothing is wrong"), report


def test_recomputing_decode_and_another_model_are_told(service: Service) -> None:
    service.add("prefill")
    service.add("decode", "--lose-kv")
    late = Replay("decode", service.directory, ["--weights", "other"])
    service.instances.append(late)
    service.start().wait_for(1, 1)
    late.start()
    wait_until(lambda: "is refused" in service.log.read_text(), "the refusal")
    service.complete()
    status, report = ask_doctor("--router", service.url)
    assert status == 1
    assert "after 1 of 1 hand-offs the decode instance computed most of the prompt again" in report
    assert f"decode instance {late.address}: its model or layout is not that of" in report
    assert f"decode instance {late.address}: the router refuses it" in report
    assert report.splitlines()[-1] == "3 found"


def test_ports_and_roles_without_a_router(service: Service) -> None:
    prefill, silent = service.add("prefill"), service.add("decode")
    config = service.directory / "router.toml"
    closed = f"127.0.0.1:{find_free_port()}"
    wait_until(lambda: prefill.stats and silent.stats, "the instances being there")
    silent.signal(signal.SIGSTOP)
    config.write_text(f'[pools]\ndecode = ["{prefill.address}", "{silent.address}", "{closed}"]\n')
    status, report = ask_doctor("--config", str(config), "--timeout-s", "4")
    assert status == 1
    assert f"decode instance {prefill.address}: it was started as a prefill instance" in report
    assert f"decode instance {silent.address}: what listens there does not answer as an instance" in report
    assert f"decode instance {closed}: nobody listens there" in report


def test_router_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    status, report = ask_doctor("--router", url)
    assert status == 1
    assert f"{url}: the router does not answer" in report


def test_engines_with_stores_that_do_not_meet(tmp_path: Path) -> None:
    stores = {"prefill": tmp_path / "a", "decode": tmp_path / "b"}
    instances = []
    for role, path in stores.items():
        command = [f"pdserve.{role}.main", "--port", str(find_free_port()), "--http-port", "0", "--num-blocks", "64"]
        command += ["--connector-option", f"path={path}", "--connector-option", "min_age_s=30"]
        instances.append(ManagedProcess(role, command, tmp_path))
    try:
        for instance in instances:
            instance.start()
        for instance in instances:
            instance.wait_ready()
        addresses = [instance.ready["address"].removeprefix("tcp://") for instance in instances]
        about = httpx.get(f"{instances[1].ready['http']}/about").json()
        assert about["store"]["path"] == str(stores["decode"])
        assert about["connector_options"] == {"path": str(stores["decode"]), "min_age_s": 30}
        status, report = ask_doctor("--prefill", addresses[0], "--decode", addresses[1])
        assert status == 1
        assert f"its KV store is not that of prefill instance {addresses[0]}" in report
        assert f"{stores['decode']} here, {stores['prefill']} there" in report
        # Only that, on whatever machine this runs: its disks may be full.
        assert {line.rsplit("[", 1)[1] for line in report.splitlines() if line.endswith("]")} <= {
            "store-places]",
            "store-room]",
            "shared-memory]",
        }
    finally:
        for instance in instances:
            if instance.is_alive:
                instance.kill()
