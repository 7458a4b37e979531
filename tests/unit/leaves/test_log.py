from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pdserve.log import configure_logging

logger = logging.getLogger("pdserve.some")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("pdserve")
    handlers, level, propagate = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)


def test_what_others_chose_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("test-0", "info")
    logger.info("name %s", "a\n12:00:00 ERROR fake\r\x1b[2J\u2028\x00é", extra={"kv": {"key": "b\nc"}})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"INFO    [test-0] pdserve.some: name a\n12:00:00 ERROR fake\r\x1b[2J\u2028\x00é key=b\nc")


def test_traceback_follows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("test-0", "info")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("it failed")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: why"
