"""A stranger's package against the installed wheel: its own tests, and both commands that need no code.

A fresh environment gets the two wheels and, through a path file, the packages that they depend on. The editable
installation of this repository is not part of it: nothing here may come from the working tree.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = "examples/third_party_connector"
NOT_COPIED = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "tests")


@dataclass(frozen=True)
class Environment:
    """A place of its own with the wheels installed; commands run in ``directory``."""

    bin: Path
    directory: Path

    def run(self, *command: str, status: int = 0) -> str:
        name, *arguments = command
        done = subprocess.run(
            [str(self.bin / name), *arguments],
            cwd=self.directory,
            env={"PATH": str(self.bin), "OMP_NUM_THREADS": "1", "HOME": str(self.directory)},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    directory = tmp_path_factory.mktemp("third-party")
    source, wheels, venv = directory / "source", directory / "wheels", directory / "venv"
    shutil.copytree(REPOSITORY, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    shutil.copytree(REPOSITORY / EXAMPLE, directory / "package", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels)]
    no_compiler = {"PATH": "", "HOME": str(directory)}  # the kernels are not what is tested, and take a minute
    for package in (source, directory / "package"):
        subprocess.run([*build, str(package)], check=True, timeout=100, env=no_compiler)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    python = venv / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", *map(str, wheels.glob("*.whl"))]
    subprocess.run([*pip, "--python", str(python), *install], check=True, timeout=100)
    site = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Environment(venv / "bin", directory)


def test_the_wheel_is_what_runs(environment: Environment) -> None:
    code = "import pdserve.connectors.testing as kit; print(kit.__file__)"
    assert str(environment.bin.parent) in environment.run("python", "-c", code)


def test_its_own_tests_pass(environment: Environment) -> None:
    output = environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "package")
    assert " failed" not in output
    assert int(output.split(" passed")[0].split()[-1]) > 50


def test_pytest_needs_no_code(environment: Environment) -> None:
    (environment.directory / "options.toml").write_text('path = "{directory}/kv.db"\n')
    output = environment.run(
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "pdserve.connectors.testing"),
        *("--connector", "sqlite", "--connector-options", "options.toml", "-k", "R1- or R6- or R14-"),
    )
    assert " failed" not in output
    assert " passed" in output


def test_the_command_gives_verdicts_without_pytest(environment: Environment) -> None:
    (environment.directory / "options.toml").write_text('path = "{directory}/kv.db"\n')
    (environment.directory / "pytest.py").write_text("raise ImportError('there is no pytest here')\n")
    output = environment.run(
        *("python", "-m", "pdserve.cli", "conformance", "--connector", "pdserve_sqlite:SqliteConnector"),
        *("--options", "options.toml", "--level", "1", "--report", "report.json"),
    )
    (environment.directory / "pytest.py").unlink()
    assert "R6   Every chunk is saved                 pass" in output
    report = json.loads((environment.directory / "report.json").read_text())
    assert not report["failed"]
    assert [rule["id"] for rule in report["rules"]] == [f"R{number}" for number in range(1, 24)]
