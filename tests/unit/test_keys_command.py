from __future__ import annotations

from pathlib import Path

import pytest

from pdserve import cli
from pdserve.peers.curve import read_curve
from pdserve.router.keys.api_key import parse_entries
from pdserve.router.keys.key_ring import KeyRing


def test_the_key_that_is_shown_is_the_one_whose_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "api", "--name", "ops", "--admin"]) == 0
    printed = capsys.readouterr()
    secret = printed.err.split()[-1]
    assert secret not in printed.out
    found = KeyRing(parse_entries(printed.out.splitlines(), takes_plain=False)).find(secret.encode())
    assert found is not None
    assert (found.name, found.is_admin) == ("ops", True)


def test_curve_keys_are_two_files_that_settings_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "curve", "--name", "router", "--directory", str(tmp_path)]) == 0
    secret, public = capsys.readouterr().out.split()
    assert read_curve(secret, public) is not None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["apis"], "unknown kind of key apis; the nearest known one is api"),
        (["api"], "--name: a key's name has 1 to 64"),
        (["curve", "--name", "../router"], "--name: a key's name has 1 to 64"),
        (["curve", "--name", "router", "--directory", "/none"], "/none/router.secret: No such file"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_help_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "--help"]) == 0
    text = capsys.readouterr().out
    assert "api " in text
    assert "curve " in text
    assert cli.main(["keys"]) == 2
